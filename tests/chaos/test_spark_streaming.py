"""Streaming queries over the outbox that are killed again and again: the files have each committed event once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import Event

import psycopg
import pytest
from psycopg.types.json import Jsonb

from relay.runtime.threads import beside
from tests.outbox import Outbox, event, host, wait_until
from tests.process import ROOT

pytestmark = [pytest.mark.chaos, pytest.mark.rare, pytest.mark.timeout(900)]

KILLS = 2
CHANCE = random.Random(32)

QUERY = """
import pathlib, sys
from relay.config.settings import SparkSettings
from relay.spark import register
from relay.spark.session import Session

dsn, folder, available, sink = sys.argv[1:]
session = Session(SparkSettings.model_validate({"master": "local[2]"}))
session.start()
spark = session.get(240)
register(spark)
trigger = {"availableNow": True} if available == "yes" else {"processingTime": "100 milliseconds"}
events = spark.readStream.format("outbox").options(dsn=dsn, partitions="2", maxEventsPerTrigger="300").load()
writer = events.writeStream.option("checkpointLocation", folder + "/checkpoint").trigger(**trigger)
if sink == "parquet":
    writer = writer.format("parquet").option("path", folder + "/events")
else:
    from relay.spark import append_to

    writer = writer.foreachBatch(append_to(folder + "/table"))
query = writer.start()
query.awaitTermination()
if sink == "parquet":
    # Spark's own log of the folder tells which files a killed query has left.
    found = [row.id for row in spark.read.parquet(folder + "/events").select("id").collect()]
else:
    from deltalake import DeltaTable, QueryBuilder

    table = QueryBuilder().register("events", DeltaTable(folder + "/table"))
    found = table.execute("select id from events").read_all()["id"].to_pylist()
pathlib.Path(folder, "ids").write_text("".join(each + "\\n" for each in found))
session.close()
"""


@contextmanager
def streaming(
    outbox: Outbox, folder: Path, sink: str, available: str = "no"
) -> Iterator[subprocess.Popen[bytes]]:
    """A query in a process group of its own, killed at the end with its JVM."""
    with (folder / "query.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", QUERY, outbox.jobs_dsn, str(folder), available, sink],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def publishing(outbox: Outbox) -> AbstractContextManager[None]:
    """Transactions all the time: committed, with savepoints, and rolled back."""

    def publish(stop: Event) -> None:
        number = 0
        with psycopg.connect(outbox.publisher_dsn) as conn:
            # Few enough for the last query: a batch of 300 takes it one to five seconds.
            while not stop.wait(0.1):
                number += 1
                for part in range(2):
                    with conn.transaction(force_rollback=number % 7 == 0 and part == 1):
                        conn.execute(
                            "select relay.publish(%s, null, %s)",
                            (host(number % 9), Jsonb([event(number), event(number)])),
                        )
                if number % 5 == 0:
                    conn.rollback()
                else:
                    conn.commit()

    return beside(publish, "publisher")


def committed_batches(folder: Path) -> int:
    found = folder / "checkpoint" / "commits"
    return sum(each.name.isdecimal() for each in found.iterdir()) if found.exists() else 0


@pytest.mark.parametrize("sink", ["parquet", pytest.param("delta", marks=pytest.mark.long)])
def test_each_event_is_written_once_with_the_query_killed(
    outbox: Outbox, tmp_path: Path, sink: str
) -> None:
    """Beside a publisher, and a transaction that stays open from before the first query to after the last kill."""
    with psycopg.connect(outbox.publisher_dsn) as open_long, publishing(outbox):
        open_long.execute("select relay.publish(%s, null, %s)", (host(99), Jsonb([event(1)])))
        for _ in range(KILLS):
            before = committed_batches(tmp_path)
            with streaming(outbox, tmp_path, sink) as query:
                wait_until(
                    lambda: committed_batches(tmp_path) > before + 1 or query.poll() is not None,  # noqa: B023
                    240,
                )
                with suppress(subprocess.TimeoutExpired):
                    query.wait(CHANCE.uniform(0, 1.0))
                assert query.poll() is None, (tmp_path / "query.log").read_text()
        open_long.commit()
    with streaming(outbox, tmp_path, sink, available="yes") as last:
        assert last.wait(240) == 0, (tmp_path / "query.log").read_text()
    found = (tmp_path / "ids").read_text().split()
    stored = outbox.column("select id::text from outbox_message_t")
    assert sorted(found) == sorted(stored)
    assert len(stored) > 100
