"""The target is restored from a dump while its server runs on: later batches have numbers that the table knows.

Reports: MaterializeInc/materialize#22816 (after a restore, sinks go on as if nothing had been written since the
backup), databricks/iceberg-kafka-connect#308 and apache/iceberg#15293 (a source that counts from the start again: what
it commits is taken for what the table has, and silently left out), itadventurer/kafka-backup#23 (a backup whose
connector has the name of a former one writes nothing into the emptied topic), delta-io/delta#1813 and
apache/iceberg#10892 (a rewound job whose batches the table counts as committed).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, LiteralString
from uuid import uuid4

import deltalake
import psycopg
import pyarrow as pa
import pytest

from relay.config.handlers import SparkHandler
from relay.model.snapshots import BEGINNING, Snapshot
from relay.spark.writers import BatchId, writer
from relay.store.connections import connect
from relay.store.positions import spark_batches
from relay.store.positions.spark_batches import Contents
from tests.lake import LocalFrame
from tests.outbox import Outbox
from tests.postgres import Server

AFTER = Snapshot(9, 9, ())


class Sink:
    """A sink of a Delta table, whose batches are stored in a target."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "table"
        settings = {"type": "spark", "format": "delta", "path": str(self.path), "partition_by": []}
        self.writer = writer("lake", SparkHandler.model_validate(settings))

    def write(self, target: psycopg.Connection[Any], *ids: str) -> str:
        """Write a batch; returns the application."""
        spark_batches.begin(target, "g", "lake", "t", 1, ([], 1), Contents(BEGINNING, AFTER))
        batch = spark_batches.begun(target, "g", "lake", "t")
        assert batch is not None
        frame: Any = LocalFrame(pa.table({"id": list(ids)}))
        self.writer.write(frame, BatchId(batch.application, batch.number, str(uuid4())))
        assert spark_batches.end(target, "g", "lake", batch.id)
        return batch.application

    def ids(self) -> list[str]:
        found: list[str] = deltalake.DeltaTable(self.path).to_pyarrow_table()["id"].to_pylist()
        return sorted(found)


def test_batches_of_one_target_are_of_one_application(outbox: Outbox, tmp_path: Path) -> None:
    sink = Sink(tmp_path)
    with connect(outbox.relay_dsn) as target:
        assert len({sink.write(target, each) for each in "abc"}) == 1
    assert sink.ids() == ["a", "b", "c"]


@pytest.mark.parametrize(
    "empty",
    [
        pytest.param(
            "alter table relay.spark_batches rename to former;"
            "create table relay.spark_batches (like relay.former including all);"
            "drop table relay.former",
            id="pg_restore --clean",
        ),
        pytest.param("truncate relay.spark_batches", id="pg_restore --data-only"),
    ],
)
def test_a_restored_table_is_another_application(
    outbox: Outbox, tmp_path: Path, empty: LiteralString
) -> None:
    """The dump fills another table of the same name, or the one that is there once it was emptied.

    Who restores it is a superuser here.
    """
    sink = Sink(tmp_path)
    with connect(outbox.superuser_dsn) as target:
        sink.write(target, "a")
        target.execute("create table public.saved as select * from relay.spark_batches")
        sink.write(target, "b")
        target.execute(empty)
        target.execute("insert into relay.spark_batches select * from public.saved")
        sink.write(target, "b", "c")
    # What the dump does not know comes twice, as everywhere after a restore; nothing is left out.
    assert sink.ids() == ["a", "b", "b", "c"]


def test_a_restored_database_is_another_application(
    server: Server, installed: str, tmp_path: Path
) -> None:
    """As a copy of a database leaves it: its tables have the numbers of the former ones."""
    sink = Sink(tmp_path)
    name, saved = f"restored_{os.getpid()}", f"saved_{os.getpid()}"
    try:
        with connect(server.create_database(name, template=installed)) as target:
            sink.write(target, "a")
        server.create_database(saved, template=name)
        with connect(server.dsn(name)) as target:
            sink.write(target, "b")
        server.drop_database(name)
        with connect(server.create_database(name, template=saved)) as target:
            sink.write(target, "b", "c")
    finally:
        server.drop_database(name)
        server.drop_database(saved)
    assert sink.ids() == ["a", "b", "b", "c"]
