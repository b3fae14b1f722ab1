"""What streaming queries over other sources got wrong, tried on `format("outbox")` and `append_to`.

Reports: apache/paimon#9667 (a new query on an old identity: its batches are taken for ones that the table has),
delta-io/delta-rs#2580, #3515 and #3821 (two writers of one transaction identifier both commit),
delta-io/delta-rs#2642 (a merged schema casts), delta-io/delta-rs#1777 (times with a zone are appended once),
apache/iceberg#4971 and #5560 (commits without data), apache/hudi#806 and #2296 (what a filter leaves out is read for
ever), apache/spark#20150 (a union of two streams restarts where one has nothing new), apache/spark#20598, #38785 and
Azure/azure-event-hubs-spark#361 (one stream on both sides of a join or a union), apache/spark#29700 (a micro-batch
without data is the last one before a restart), apache/spark#37213 (a trigger that runs once), apache/spark#20836
(gaps between positions), lakesoul-io/LakeSoul#225 and AbsaOSS/ABRiS#309 (a column is added beside a running query),
turbolytics/sql-flow#358 and laminardb/laminardb#388 (one time in the future), apache/spark#46651 (a session that is
lost between two triggers), apache/spark#15868, RMLio/RMLStreamer#49 and hazelcast/hazelcast#22688 (more tasks than
connections), apache/spark#45023 (the process of a source's driver side dies).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import deltalake
import psutil
import psycopg
import pyarrow as pa
import pytest
from psycopg.types.json import Jsonb
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as f
from pyspark.sql.streaming.datasource import ReadMaxRows

from relay.faults import ConfigurationError
from relay.model.snapshots import BEGINNING, Snapshot
from relay.source.outbox.differences import Difference
from relay.spark import append_to, data_source, position_of, reading, register, streams
from relay.spark.data_source import StreamReader
from relay.spark.data_source_options import parse
from relay.spark.reading import TaskPortion
from relay.spark.session import Session
from relay.store.connections import connect
from tests.outbox import LONG_SECONDS, Outbox, event, host, wait_until

pytestmark = [pytest.mark.timeout(600)]

Append = Callable[[Any, int], None]


# append_to


@pytest.fixture
def append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Append:
    """The function for a table of this test; no query of Spark's tells where its micro-batches end."""
    monkeypatch.setattr(streams, "_end", lambda _, query, number: {"relay.position": f"{number}:"})
    return append_to(str(tmp_path / "table"))


class Frame:
    """A micro-batch of a query, as foreachBatch gets it."""

    def __init__(self, rows: pa.Table, query: str = "q") -> None:
        self._rows = rows
        context = SimpleNamespace(getLocalProperty={"sql.streaming.queryId": query}.get)
        self.sparkSession = SimpleNamespace(sparkContext=context)

    def toArrow(self) -> pa.Table:  # noqa: N802
        return self._rows


def numbers(*values: int) -> pa.Table:
    return pa.table({"n": pa.array(values, pa.int64())})


def found(folder: Path) -> list[Any]:
    return sorted(deltalake.DeltaTable(folder / "table").to_pyarrow_table()["n"].to_pylist())


def test_a_repeated_micro_batch_is_recognised_and_a_new_query_is_another_one(
    append: Append, tmp_path: Path
) -> None:
    append(Frame(numbers(1)), 0)
    append(Frame(numbers(2)), 1)
    append(Frame(numbers(2)), 1)
    append(Frame(numbers(1)), 0)
    assert found(tmp_path) == [1, 2]
    append(Frame(numbers(3), "a new checkpoint"), 0)
    assert found(tmp_path) == [1, 2, 3]


def test_of_two_drivers_with_one_micro_batch_one_commits(
    append: Append, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was taken for dead goes on between its comparison and its write."""
    append(Frame(numbers(1)), 0)
    write = deltalake.write_deltalake

    def late(*args: Any, **options: Any) -> None:
        monkeypatch.setattr(deltalake, "write_deltalake", write)
        append(Frame(numbers(2)), 1)
        write(*args, **options)

    monkeypatch.setattr(deltalake, "write_deltalake", late)
    with pytest.raises(deltalake.exceptions.CommitFailedError):
        append(Frame(numbers(2)), 1)
    assert found(tmp_path) == [1, 2]


def test_a_micro_batch_without_rows_adds_no_commit(append: Append, tmp_path: Path) -> None:
    append(Frame(numbers(1)), 0)
    version = deltalake.DeltaTable(tmp_path / "table").version()
    append(Frame(numbers()), 1)
    assert deltalake.DeltaTable(tmp_path / "table").version() == version
    append(Frame(numbers(2)), 2)
    assert found(tmp_path) == [1, 2]


def test_a_column_of_the_table_keeps_its_type(append: Append, tmp_path: Path) -> None:
    append(Frame(numbers(1)), 0)
    append(Frame(pa.table({"n": ["7"]})), 1)
    assert found(tmp_path) == [1, 7]
    with pytest.raises(Exception, match=r"(?i)cast"):
        append(Frame(pa.table({"n": ["seven"]})), 2)
    assert found(tmp_path) == [1, 7]


def test_a_table_that_is_gone_is_not_begun_in_the_middle(append: Append, tmp_path: Path) -> None:
    append(Frame(numbers(1)), 0)
    (tmp_path / "table").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match="there is no table at"):
        append(Frame(numbers(2)), 1)
    assert not (tmp_path / "table").exists()


def test_the_position_of_a_table(append: Append, tmp_path: Path) -> None:
    """It is that of its newest micro-batch, beside commits of others, and of the version that was restored."""
    table = str(tmp_path / "table")
    assert position_of(table) == "beginning"
    append(Frame(numbers()), 0)
    assert position_of(table) == "beginning"
    append(Frame(numbers(1)), 1)
    version = deltalake.DeltaTable(table).version()
    append(Frame(numbers(2)), 2)
    deltalake.write_deltalake(table, numbers(7), mode="append")
    deltalake.DeltaTable(table).optimize.compact()
    assert position_of(table) == "2:"
    deltalake.DeltaTable(table).restore(version)
    assert position_of(table) == "1:"
    append(Frame(numbers(2)), 3)
    assert position_of(table) == "3:"


def test_a_table_without_a_position_is_named(tmp_path: Path) -> None:
    """It is of another program, or the recipe of a former page wrote it."""
    table = str(tmp_path / "table")
    deltalake.write_deltalake(table, numbers(7))
    with pytest.raises(ConfigurationError, match=r"no commit in the log of the table at .*/table"):
        position_of(table)


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_query_whose_checkpoint_is_lost_goes_on(
    outbox: Outbox, spark_session: Session, tmp_path: Path, is_lost: bool
) -> None:
    """It appended everything a second time. Beside it a transaction stays open over the loss.

    delta-io/delta#1346, neo4j/neo4j-spark-connector#579, apache/paimon#9666: who removes a checkpoint chooses between
    events that are missing and events that are there twice.
    """
    session = spark_session.get(timeout=120)
    assert session is not None
    register(session)
    table, checkpoint = str(tmp_path / "table"), tmp_path / "checkpoint"

    def run() -> None:
        query = (
            session.readStream.format("outbox")
            .options(dsn=outbox.jobs_dsn, partitions="2", maxEventsPerTrigger="4")
            .option("startingPosition", position_of(table))
            .load()
            .where("event_type <> 'left.out'")
            .selectExpr("id")
            .writeStream.foreachBatch(append_to(table))
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(120)

    outbox.fill(3, events=2)
    with psycopg.connect(outbox.publisher_dsn) as late:
        late.execute("select relay.publish(%s, null, %s)", (host(9), Jsonb([event(1)])))
        outbox.fill(3, events=2)
        outbox.publish(host(1), event(1, "left.out"))
        run()
        if is_lost:
            shutil.rmtree(checkpoint)
        late.commit()
    outbox.fill(2, events=2)
    run()
    written = deltalake.DeltaTable(table).to_pyarrow_table()["id"].to_pylist()
    assert sorted(written) == outbox.column(
        "select id::text from outbox_message_t where event_type <> 'left.out' order by 1"
    )


# Reading without Spark


def test_a_task_waits_for_a_connection(
    outbox: Outbox, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark in local mode fails the query at the first one that is refused."""
    outbox.fill(3)
    snapshot = str(outbox.value("select pg_current_snapshot()::text"))
    refused = Event()

    def noting(*args: Any, **options: Any) -> Any:
        try:
            return connect(*args, **options)
        except psycopg.OperationalError:
            refused.set()
            raise

    monkeypatch.setattr(reading, "connect", noting)
    rows: list[Any] = []
    with psycopg.connect(role):
        task = Thread(target=lambda: rows.extend(ids_by(role, snapshot)))
        task.start()
        assert refused.wait(60)
    task.join(60)
    assert sorted(rows) == stored(outbox)


def test_a_task_whose_password_is_refused_does_not_wait(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = 0

    def refuse(*_: Any, **__: Any) -> Any:
        nonlocal attempts
        attempts += 1
        raise psycopg.OperationalError('FATAL: password authentication failed for user "u"')

    monkeypatch.setattr(reading, "connect", refuse)
    with pytest.raises(psycopg.OperationalError, match="authentication failed"):
        ids_by(outbox.jobs_dsn, "3:3:")
    assert attempts == 1


def ids_by(dsn: str, snapshot: str) -> list[str]:
    """The ids of all that a snapshot sees, as a task reads them."""
    parsed = parse({"dsn": dsn})
    portion = TaskPortion(Difference(BEGINNING, Snapshot.parse(snapshot)))
    batches = reading.read(dsn, parsed.table, portion, 8, None, ("id",))
    return [each for batch in batches for each in batch.column("id").to_pylist()]


@pytest.fixture
def role(outbox: Outbox) -> Iterator[str]:
    """The DSN of a role that may read the outbox, with one session at a time."""
    name = f"one_{outbox.slot}"
    outbox.conn.execute(f"create role {name} login password 'p' connection limit 1")
    outbox.conn.execute(f"grant select on outbox_message_t to {name}")
    outbox.conn.execute("select relay.let_keep_positions('outbox_message_t')")
    yield outbox.dsn_as(name)
    outbox.conn.execute(f"drop owned by {name}; drop role {name}")


def test_transactions_that_rolled_back_are_no_micro_batches(outbox: Outbox) -> None:
    outbox.fill(4, events=1)
    with psycopg.connect(outbox.jobs_dsn, autocommit=True) as conn:
        for _ in range(300):
            with conn.transaction(force_rollback=True):
                conn.execute("select pg_current_xact_id()")
    outbox.fill(4, events=1)
    reader = StreamReader(parse({"dsn": outbox.jobs_dsn, "ordered": "false", "partitions": "1"}))
    try:
        offset, batches = reader.initialOffset(), []
        while (end := reader.latestOffset(offset, ReadMaxRows(3))) != offset:
            rows = [
                batch.num_rows
                for each in reader.partitions(offset, end)
                for batch in reader.read(each)
            ]
            batches.append(sum(rows))
            offset = end
        assert batches == [3, 3, 2]
    finally:
        reader.stop()


def test_a_position_is_noted_by_a_new_session_where_the_server_ended_the_former(
    outbox: Outbox,
) -> None:
    """It was an error that named rights and `relay init`."""
    outbox.fill(2)
    reader = StreamReader(parse({"dsn": outbox.relay_dsn, "reader": "lake"}))
    noted = "select snapshot::text from relay.readers where reader = 'lake'"
    try:
        end = reader.latestOffset(reader.initialOffset(), ReadMaxRows(100))
        end_sessions(outbox)
        reader.commit(end)
        assert outbox.value(noted) == end["snapshot"]
    finally:
        reader.stop()


def test_a_trigger_goes_on_where_the_server_ends_its_session_in_the_middle(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended_first(step: Callable[..., Any]) -> Callable[..., Any]:
        """The step, before whose first call the server ends the session."""
        sessions = iter([end_sessions])

        def call(*arguments: Any) -> Any:
            for end in sessions:
                end(outbox)
            return step(*arguments)

        return call

    outbox.fill(2)
    reader = StreamReader(parse({"dsn": outbox.jobs_dsn}))
    for name in ("durable_position", "cut", "lost_after", "wait_until_visible"):
        monkeypatch.setattr(data_source, name, ended_first(getattr(data_source, name)))
    try:
        start = reader.initialOffset()
        end = reader.latestOffset(start, ReadMaxRows(100))
        tasks = reader.partitions(start, end)
        rows = [
            each
            for task in tasks
            for batch in reader.read(task)
            for each in batch.column("id").to_pylist()
        ]
    finally:
        reader.stop()
    assert sorted(rows) == stored(outbox)


def end_sessions(outbox: Outbox) -> None:
    outbox.conn.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where application_name = 'relay spark' and datname = current_database()"
    )


# Queries


@pytest.fixture
def spark(spark_session: Session) -> Any:
    session = spark_session.get(timeout=120)
    assert session is not None
    register(session)
    before = session.conf.get("spark.sql.shuffle.partitions")
    session.conf.set("spark.sql.shuffle.partitions", "1")
    yield session
    session.conf.set("spark.sql.shuffle.partitions", str(before))


def events(spark: Any, outbox: Outbox, **options: str) -> Any:
    given = {"dsn": outbox.jobs_dsn, "partitions": "1", **options}
    return spark.readStream.format("outbox").options(**given).load()


def run(frame: Any, folder: Path, **trigger: Any) -> None:
    """Write what is there into files, and end."""
    writer = frame.writeStream.format("parquet").option("path", str(folder / "files"))
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    query = writer.trigger(**(trigger or {"availableNow": True})).start()
    try:
        assert query.awaitTermination(LONG_SECONDS)
    finally:
        query.stop()
    assert query.exception() is None


def written(spark: Any, folder: Path, column: str = "id") -> list[Any]:
    rows = spark.read.parquet(str(folder / "files")).select(column).collect()
    return sorted(row[0] for row in rows)


def stored(outbox: Outbox) -> list[str]:
    return sorted(outbox.column("select id::text from outbox_message_t"))


def forget_the_last_commit(folder: Path) -> None:
    """As if the driver had died after the last write, before Spark noted it."""
    commits = (folder / "checkpoint" / "commits").glob("[0-9]*")
    last = max(commits, key=lambda each: int(each.name))
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink()


@pytest.mark.rare
def test_a_union_goes_on_where_one_of_its_streams_has_nothing_new(
    spark: Any, outbox: Outbox, tmp_path: Path
) -> None:
    outbox.conn.execute("create table quiet (like outbox_message_t including all)")
    outbox.fill(2)
    outbox.conn.execute("insert into quiet select * from outbox_message_t")
    once = stored(outbox)
    both = events(spark, outbox).union(events(spark, outbox, table="public.quiet")).select("id")
    run(both, tmp_path)
    outbox.fill(3)
    run(both, tmp_path)
    forget_the_last_commit(tmp_path)
    outbox.fill(1)
    run(both, tmp_path)
    assert written(spark, tmp_path) == sorted(stored(outbox) + once)


@pytest.mark.rare
def test_one_stream_on_both_sides_of_a_union_and_a_join(
    spark: Any, outbox: Outbox, tmp_path: Path
) -> None:
    outbox.fill(4)
    frame = events(spark, outbox, maxEventsPerTrigger="7").select("id")
    for _ in range(2):
        run(frame.union(frame), tmp_path / "union")
        run(frame.join(frame.withColumnRenamed("id", "other"), f.expr("id = other")), tmp_path)
        assert written(spark, tmp_path / "union") == sorted(2 * stored(outbox))
        assert written(spark, tmp_path) == stored(outbox)
        outbox.fill(3)


@pytest.mark.rare
def test_an_hour_is_written_once_where_a_micro_batch_without_data_is_repeated(
    spark: Any, outbox: Outbox, tmp_path: Path
) -> None:
    def publish(day: int) -> None:
        outbox.publish(host(1), event(event_ts=f"2026-03-0{day}T08:30:00+00:00"))

    days = (
        events(spark, outbox)
        .withWatermark("event_ts", "1 hour")
        .groupBy(f.window("event_ts", "1 day"))
        .count()
        .selectExpr("dayofmonth(window.start) as id")
    )
    publish(1)
    publish(2)
    run(days, tmp_path)
    assert written(spark, tmp_path) == [1]
    forget_the_last_commit(tmp_path)
    publish(3)
    run(days, tmp_path)
    assert written(spark, tmp_path) == [1, 2]


@pytest.mark.rare
def test_a_time_in_the_future_ends_no_window_of_today(
    spark: Any, outbox: Outbox, tmp_path: Path
) -> None:
    """With `least`, as the documentation has it; without, the second event is dropped."""
    at = f.least("event_ts", f.current_timestamp())
    days = (
        events(spark, outbox)
        .withColumn("at", at)
        .withWatermark("at", "36 hours")
        .groupBy(f.window("at", "1 day"))
        .count()
        .selectExpr("window.start as id")
    )
    outbox.publish(host(1), event(event_ts="2999-01-01T00:00:00+00:00"))
    outbox.publish(host(1), event(event_ts="infinity"))
    run(days, tmp_path)
    outbox.publish(host(1), event())
    query = days.writeStream.format("noop").outputMode("append").trigger(availableNow=True)
    running = query.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    assert running.awaitTermination(LONG_SECONDS)
    dropped = [
        state.numRowsDroppedByWatermark
        for each in running.recentProgress
        for state in each.stateOperators
    ]
    assert dropped
    assert sum(dropped) == 0


@pytest.mark.rare
def test_what_a_filter_leaves_out_is_read_once_and_a_trigger_runs_once(
    spark: Any, outbox: Outbox, tmp_path: Path
) -> None:
    outbox.fill(5)
    reader = spark.readStream.format("outbox").options(dsn=outbox.jobs_dsn, maxEventsPerTrigger="3")
    nothing = reader.load().where("event_type = 'none'").writeStream.format("noop")
    nothing = nothing.option("checkpointLocation", str(tmp_path / "checkpoint"))
    counts = []
    for trigger in ({"once": True}, {"availableNow": True}, {"availableNow": True}):
        query = nothing.trigger(**trigger).start()
        assert query.awaitTermination(LONG_SECONDS)
        counts.append(sum(each.numInputRows for each in query.recentProgress))
    assert counts == [25, 0, 0]


@pytest.mark.rare
def test_a_column_that_is_added_beside_a_running_query_and_sessions_that_are_lost(
    spark: Any, outbox: Outbox, tmp_path: Path
) -> None:
    writer = (
        events(spark, outbox, dsn=outbox.relay_dsn, reader="lake")
        .select("id")
        .writeStream.format("parquet")
    )
    writer = writer.option("path", str(tmp_path / "files"))
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        outbox.fill(2)
        query.processAllAvailable()
        outbox.conn.execute("alter table outbox_message_t add region text default 'eu'")
        for _ in range(3):
            end_sessions(outbox)
            outbox.fill(2)
            query.processAllAvailable()
        assert query.isActive
    finally:
        query.stop()
    assert written(spark, tmp_path) == stored(outbox)


@pytest.mark.rare
def test_a_query_whose_source_process_dies_ends_and_goes_on_from_its_checkpoint(
    spark: Any, outbox: Outbox, tmp_path: Path
) -> None:
    outbox.fill(2)
    frame = events(spark, outbox).select("id")
    writer = frame.writeStream.format("parquet").option("path", str(tmp_path / "files"))
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        query.processAllAvailable()
        # Those of its tasks end.
        wait_until(lambda: len(ports(outbox)) == 1)
        owner_of(*ports(outbox)).kill()
        with pytest.raises(StreamingQueryException):
            query.awaitTermination(LONG_SECONDS)
    finally:
        query.stop()
    outbox.fill(3)
    run(frame, tmp_path)
    assert written(spark, tmp_path) == stored(outbox)


@pytest.mark.rare
def test_a_query_ends_with_a_line_where_the_server_lost_what_it_has_read(
    spark: Any, outbox: Outbox, tmp_path: Path
) -> None:
    """And a new one goes on at an earlier position of its checkpoint."""
    frame = events(spark, outbox).select("id")
    for _ in range(2):
        outbox.fill(2)
        run(frame, tmp_path)
    first, last = (
        json.loads((tmp_path / "checkpoint" / "offsets" / str(number)).read_text().splitlines()[-1])
        for number in (0, 1)
    )
    outbox.conn.execute("delete from relay.witnesses where id = %s", (last["witness"],))
    outbox.fill(1)
    with pytest.raises(StreamingQueryException, match=r"RelayError: position .* does not have its"):
        run(frame, tmp_path)
    assert len(written(spark, tmp_path)) == 20
    start = f"{first['snapshot']}@{first['witness']}"
    run(events(spark, outbox, startingPosition=start).select("id"), tmp_path / "new")
    assert len(written(spark, tmp_path / "new")) == 15


def ports(outbox: Outbox) -> list[int]:
    return outbox.column(
        "select client_port from pg_stat_activity"
        " where application_name = 'relay spark' and datname = current_database()"
    )


def owner_of(port: int) -> psutil.Process:
    """The process of this one's descendants that has a connection from a port."""
    for each in psutil.Process().children(recursive=True):
        if any(conn.laddr.port == port for conn in each.net_connections("tcp")):
            return each
    raise AssertionError(f"no process has a connection from port {port}")


@pytest.mark.rare
def test_a_stream_needs_two_connections(
    spark: Any, outbox: Outbox, role: str, tmp_path: Path
) -> None:
    """Its driver's and a task's: the other tasks wait."""
    outbox.conn.execute(f"alter role one_{outbox.slot} connection limit 2")
    outbox.fill(20)
    frame = events(spark, outbox, dsn=role, partitions="4").select("id")
    run(frame, tmp_path)
    assert written(spark, tmp_path) == stored(outbox)
