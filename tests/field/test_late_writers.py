"""A Spark sink's writer that was suspended, lost its claim, and wakes up after its successor has written its batch.

confluentinc/kafka-connect-storage-cloud#800 (a task that hung overwrites, 30 minutes later, what its successor has
written), confluentinc/kafka-connect-storage-cloud#253, apache/spark#25795 (what a killed application left is committed
by its successor), ray-project/ray#64872 (a delete and an append are two commits), apache/hive#4899 (a killed attempt
commits), apache/spark#32207 (partitions are deleted, then renamed), apache/iceberg#4666, ClickHouse/ClickHouse#112096
(a commit whose answer is lost is taken for a failure, and its files are deleted), apache/iceberg#12545 (files of failed
attempts pile up), apache/iceberg#4194, apache/paimon#4779 and StarRocks/starrocks#77443 (a cleaning by age deletes
files that are not committed yet).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pyarrow.dataset
import pytest
from pyspark.sql import DataFrame, DataFrameWriter, SparkSession

from relay.config.handlers import SparkHandler
from relay.config.settings import Settings
from relay.model.snapshots import BEGINNING, Snapshot
from relay.spark import sink_worker
from relay.spark.session import Session
from relay.spark.sink_worker import SparkWorker
from relay.spark.writers import BatchId, StagingWriter, writer
from relay.spark.writers.files import StagedFiles
from relay.store.positions import spark_batches
from relay.store.positions.spark_batches import Contents, OpenBatch
from tests.outbox import Outbox, event, host, wait_until

LATE = "sink late"
HERE = "tests.field.test_late_writers"


class Gate:
    """Suspends the thread `LATE` where it comes by for the second time; its first attempt fails."""

    def __init__(self) -> None:
        self.failed = threading.Event()
        self.reached = threading.Event()
        self.opened = threading.Event()

    def suspend(self) -> None:
        """Wait in the late writer until the gate is opened."""
        if threading.current_thread().name == LATE:
            if not self.failed.is_set():
                self.failed.set()
                raise ValueError("the first attempt")
            self.reached.set()
            assert self.opened.wait(60)


gate = Gate()


def suspended(frame: DataFrame) -> DataFrame:
    """A sink's transform."""
    gate.suspend()
    return frame


@pytest.fixture
def spark(spark_session: Session) -> SparkSession:
    session = spark_session.get(timeout=120)
    assert session is not None
    return session


@pytest.fixture(autouse=True)
def closed_gate() -> Iterator[None]:
    global gate
    gate = Gate()
    yield
    gate.opened.set()


def sink(outbox: Outbox, **destination: Any) -> Settings:
    lake = {
        "type": "spark",
        "every": 0.001,
        "start": "beginning",
        "transform": f"{HERE}:suspended",
        **destination,
    }
    return outbox.settings(handlers={"lake": lake}, routes=[{"handlers": ["lake"]}])


def started(settings: Settings, session: Session, name: str) -> SparkWorker:
    worker = SparkWorker("lake", settings, session)
    worker._thread.name = name
    worker.start()
    return worker


def lose_claim(outbox: Outbox, worker: SparkWorker) -> None:
    """End the session of the target that has the claim, as a failover does."""
    outbox.conn.execute("select pg_terminate_backend(%s)", [worker._claim.conn.info.backend_pid])


def in_files(path: Path) -> list[str]:
    found = pyarrow.dataset.dataset(path, format="parquet", partitioning="hive")
    return sorted(found.to_table()["id"].to_pylist())


def published(outbox: Outbox) -> list[str]:
    return sorted(outbox.column("select id::text from outbox_message_t"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", ["path", pytest.param("table", marks=pytest.mark.rare)])
def test_a_writer_that_wakes_up_takes_nothing_from_its_successor(
    outbox: Outbox,
    spark_session: Session,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """It is killed when it begins to write; what it has removed by then would be lost."""
    table, path = f"late_{outbox.slot}", tmp_path / "lake"
    destination = {"path": str(path)} if kind == "path" else {"table": table}
    settings = sink(outbox, partition_by=["event_type"], **destination)
    outbox.publish(host(1), event(1), event(2, "order.paid"))
    killed = threading.Event()

    def dies(method: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **options: Any) -> None:
            if threading.current_thread().name == LATE and gate.opened.is_set():
                killed.set()
                raise SystemExit
            method(*args, **options)

        return call

    for method in ("save", "insertInto"):
        monkeypatch.setattr(DataFrameWriter, method, dies(getattr(DataFrameWriter, method)))
    late = started(settings, spark_session, LATE)
    assert gate.reached.wait(60)
    lose_claim(outbox, late)
    successor = started(settings, spark_session, "sink successor")
    try:
        outbox.wait_delivered("lake")
        outbox.publish(host(1), event(2))
        outbox.wait_delivered("lake")
        gate.opened.set()
        assert killed.wait(60)
        if kind == "path":
            assert in_files(path) == published(outbox)
        else:
            assert sorted(row.id for row in spark.table(table).collect()) == published(outbox)
    finally:
        for each in (successor, late):
            each.stop()
            each.join(30)
        spark.sql(f"drop table if exists {table}")


def upper(frame: DataFrame) -> DataFrame:
    """A transform with which an attempt differs from the others."""
    from pyspark.sql.functions import upper

    return frame.withColumn("event_type", upper("event_type"))


def claimed(settings: Settings, session: Session) -> SparkWorker:
    """A worker that has the sink's claim, and whose thread is this one."""
    worker = SparkWorker("lake", settings, session)
    wait_until(worker._claim.take)
    return worker


def begun(worker: SparkWorker) -> OpenBatch:
    """The batch that is begun."""
    found: list[OpenBatch] = []

    def has_begun() -> bool:
        state = worker._load()
        batch = worker._stored_batch(state) or worker._store_due_batch(state)
        if batch is not None:
            found.append(batch)
        return bool(found)

    wait_until(has_begun)
    return found[0]


def test_whoever_decides_a_batch_first_decides_it_for_good(
    outbox: Outbox,
    spark_session: Session,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the steps of a batch its writer is suspended, and others write and finish it."""
    path = tmp_path / "lake"
    plain = sink(outbox, path=str(path), transform=None, partition_by=["event_type"])
    loud = sink(outbox, path=str(path), transform=f"{HERE}:upper", partition_by=["event_type"])
    loud_writer = writer("lake", loud.spark_handlers["lake"])
    plain_writer = writer("lake", plain.spark_handlers["lake"])
    assert isinstance(loud_writer, StagingWriter)
    assert isinstance(plain_writer, StagingWriter)
    outbox.publish(host(1), event(1), event(2, "order.paid"))

    first = claimed(loud, spark_session)
    batch = begun(first)
    identity = BatchId(batch.application, batch.number, batch.id)
    staged = loud_writer.write(first._frame(spark, batch), identity)
    undecided = loud_writer.write(first._frame(spark, batch), identity)
    assert staged
    assert undecided
    decided = spark_batches.decide(first._claim.conn, plain.group, "lake", batch.id, staged)
    assert decided == staged
    move, moved = StagedFiles._move, list[Any]()

    def moves_one(staging: StagedFiles, source: Any, destination: Any) -> None:
        if moved:
            raise RuntimeError("suspended")
        moved.append(destination)
        move(staging, source, destination)

    with monkeypatch.context() as patched:
        patched.setattr(StagedFiles, "_move", moves_one)
        with pytest.raises(RuntimeError):
            loud_writer.publish(spark, identity, staged)
    first._claim.release()

    second = claimed(plain, spark_session)
    again = begun(second)
    assert again.files == staged
    assert (
        spark_batches.decide(second._claim.conn, plain.group, "lake", batch.id, undecided) == staged
    )
    second._write(again)
    found = in_files(path)
    assert moved
    assert found == published(outbox)

    # The first one goes on: it moves nothing, and what it stages from now on is never seen.
    loud_writer.publish(spark, identity, staged)
    late = loud_writer.write(first._frame(spark, batch), identity)
    assert late
    assert spark_batches.decide(second._claim.conn, plain.group, "lake", batch.id, late) is None
    second._disconnect()
    assert in_files(path) == found
    kinds = pyarrow.dataset.dataset(path, format="parquet", partitioning="hive").to_table()
    assert set(kinds["event_type"].to_pylist()) == {"ORDER.PLACED", "ORDER.PAID"}


def test_a_decision_whose_answer_is_lost_and_attempts_that_fail(
    outbox: Outbox, spark_session: Session, spark: SparkSession, tmp_path: Path
) -> None:
    """The files of the first are kept, and those of the others are not."""
    path = tmp_path / "lake"
    settings = sink(outbox, path=str(path), transform=None, partition_by=["host_bucket"])
    outbox.publish(host(1), event(1))
    worker = claimed(settings, spark_session)
    batch = begun(worker)
    identity = BatchId(batch.application, batch.number, batch.id)
    files_writer = writer("lake", settings.spark_handlers["lake"])
    broken = worker._frame(spark, batch).selectExpr("*", "raise_error('no') as broken")
    with pytest.raises(Exception, match="USER_RAISED_EXCEPTION"):
        files_writer.write(broken, identity)
    assert not list(path.rglob("*.parquet"))
    staged = files_writer.write(worker._frame(spark, batch), identity)
    assert staged
    assert spark_batches.decide(worker._claim.conn, settings.group, "lake", batch.id, staged)
    # The answer is lost with the session.
    lose_claim(outbox, worker)
    with pytest.raises(psycopg.OperationalError):
        spark_batches.decide(worker._claim.conn, settings.group, "lake", batch.id, staged)
    worker._disconnect()
    again = claimed(settings, spark_session)
    again._write(begun(again))
    again._disconnect()
    assert in_files(path) == published(outbox)
    assert not list(path.glob(".relay-*"))


def test_a_batch_that_was_given_up_is_not_inserted_after_a_later_one(
    outbox: Outbox, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sink is moved while the writer is suspended; its successor has begun another batch with the same rows."""
    from pyspark.sql.classic.dataframe import DataFrame as Classic

    outbox.conn.execute("create table lake (id text)")
    table = {"type": "spark", "jdbc": {"dsn": outbox.lake_dsn, "table": "public.lake"}}
    lake = writer("lake", SparkHandler.model_validate(table))
    application = str(host(1))
    frame = spark.createDataFrame([("a",)], "id string")
    collect, suspends = Classic.collect, [True]

    def collects(self: Any) -> Any:
        found = collect(self)
        if suspends:
            suspends.clear()
            lake.write(frame, BatchId(application, 2, str(host(3))))
        return found

    monkeypatch.setattr(Classic, "collect", collects)
    lake.write(frame, BatchId(application, 1, str(host(2))))
    assert not suspends
    assert outbox.column("select id from lake") == ["a"]


def test_files_that_wait_to_be_moved_are_not_taken_for_remains(
    outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """iceberg#4194: relay was stopped for weeks between the decision and the move; a check removes what is that old."""
    steps: list[str] = []
    destination = SimpleNamespace(
        check=lambda *_: steps.append("check"),
        write=lambda *_: steps.append("write"),
        publish=lambda *_: steps.append("publish"),
        kind="files",
        left=lambda *_: steps.append("left"),
        lacks=lambda *_: None,
    )
    monkeypatch.setattr(sink_worker, "writer", lambda *_: destination)
    session: Any = SimpleNamespace(
        get=lambda: session, newSession=lambda: session, replace_if_dead=lambda _: None
    )
    worker = SparkWorker("lake", sink(outbox, path=str(tmp_path), transform=None), session)
    monkeypatch.setattr(worker, "_look", lambda *_: None)
    monkeypatch.setattr(worker, "_finish", lambda *_: None)
    contents = Contents(BEGINNING, Snapshot(9, 9, ()))
    decided = OpenBatch("a", 1, "b", 1, [], 1, contents, [".relay-b/1/part-1.parquet"])
    worker._write(decided)
    assert steps == ["publish", "left"]
