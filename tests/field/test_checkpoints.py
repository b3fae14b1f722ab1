"""A stream of `format("outbox")` that ends and begins again goes on exactly where its checkpoint is.

Reports of other sources and sinks: a restart that read everything again or skipped what came meanwhile
(apache/paimon#8205, neo4j/neo4j-spark-connector#579, delta-io/delta#548, apache/iceberg#10156), a micro-batch that was
written twice, because the driver died between the write and Spark's commit log (apache/paimon#9666,
apache/iceberg#8809, apache/hudi#6098, Azure/azure-event-hubs-spark#431), a new query whose first micro-batches were
taken for those of the former one (the review of apache/paimon#9667).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deltalake
import pytest

from relay.spark import append_to, register
from relay.spark.session import Session
from tests.outbox import Outbox

pytestmark = [pytest.mark.timeout(300)]


def run(
    session: Any, outbox: Outbox, folder: Path, checkpoint: str = "checkpoint", **options: str
) -> None:
    """Read what is there into a Delta table, and end."""
    query = (
        session.readStream.format("outbox")
        .options(dsn=outbox.jobs_dsn, partitions="2", **options)
        .load()
        .select("id", "c_offset")
        .writeStream.foreachBatch(append_to(str(folder / "table")))
        .option("checkpointLocation", str(folder / checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(120)
    assert query.exception() is None


def read(folder: Path) -> list[str]:
    return sorted(deltalake.DeltaTable(folder / "table").to_pyarrow_table()["id"].to_pylist())


@pytest.mark.rare
def test_a_query_that_begins_again(outbox: Outbox, spark_session: Session, tmp_path: Path) -> None:
    session = spark_session.get(timeout=120)
    assert session is not None
    register(session)
    outbox.fill(3)
    before = set(outbox.column("select id::text from outbox_message_t"))
    run(session, outbox, tmp_path, startingPosition="now")
    outbox.fill(4)
    # `now` was at the first start: what came while the query was stopped is read.
    run(session, outbox, tmp_path, startingPosition="now")
    wanted = sorted(set(outbox.column("select id::text from outbox_message_t")) - before)
    assert read(tmp_path) == wanted
    # Nothing is new, so nothing is read again, and the next events are not skipped.
    run(session, outbox, tmp_path, startingPosition="now")
    assert read(tmp_path) == wanted
    outbox.fill(2)
    run(session, outbox, tmp_path, startingPosition="now", maxEventsPerTrigger="3")
    wanted = sorted(set(outbox.column("select id::text from outbox_message_t")) - before)
    assert read(tmp_path) == wanted
    # As if the driver had died after the write: Spark repeats its last micro-batch, with the same rows.
    commits = sorted(
        (tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda each: int(each.name)
    )
    commits[-1].unlink()
    commits[-1].with_name(f".{commits[-1].name}.crc").unlink()
    outbox.fill(1)
    run(session, outbox, tmp_path, startingPosition="now")
    wanted = sorted(set(outbox.column("select id::text from outbox_message_t")) - before)
    assert read(tmp_path) == wanted
    # Another query into the same table counts its micro-batches from 0 again.
    run(session, outbox, tmp_path, checkpoint="another")
    wanted += outbox.column("select id::text from outbox_message_t")
    assert read(tmp_path) == sorted(wanted)
