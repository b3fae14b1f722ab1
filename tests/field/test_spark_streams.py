"""What streaming queries over other sources got wrong, tried on `format("outbox")` and its recipe for Delta.

Reports: apache/paimon#9667 (a new query on an old identity: its batches are taken for ones that the table has),
delta-io/delta-rs#2580, #3515 and #3821 (two writers of one transaction identifier both commit),
delta-io/delta-rs#2642 (a merged schema casts), apache/iceberg#4971 and #5560 (commits without data),
apache/spark#20836 (gaps between positions), apache/spark#46651 (a session that is lost between two triggers),
apache/spark#15868, RMLio/RMLStreamer#49 and hazelcast/hazelcast#22688 (more tasks than connections).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import deltalake
import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo
from pyspark.sql.streaming.datasource import ReadMaxRows

from relay.model.snapshots import BEGINNING, Snapshot
from relay.source.outbox.differences import Difference
from relay.spark import data_source, reading
from relay.spark.data_source import StreamReader
from relay.spark.data_source_options import parse
from relay.spark.reading import TaskPortion
from relay.store.connections import connect
from tests.outbox import Outbox
from tests.pages import DOCS, blocks

Append = Callable[[Any, int], None]


# The recipe of docs/reference/data-source.md


@pytest.fixture
def append(tmp_path: Path) -> Append:
    """The function of the page, for a table of this test."""
    page = (DOCS / "reference" / "data-source.md").read_text()
    (code,) = [each.text for each in blocks(page) if "def append(" in each.text]
    names: dict[str, Any] = {"__name__": "recipe"}
    exec(code.partition("\nevents = ")[0].replace("/lake/orders", str(tmp_path / "table")), names)
    found: Append = names["append"]
    return found


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
    assert sorted(rows) == sorted(outbox.column("select id::text from outbox_message_t"))


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
        ids_by(outbox.dsn, "3:3:")
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
    yield make_conninfo(outbox.dsn, user=name, password="p")
    outbox.conn.execute(f"drop owned by {name}; drop role {name}")


def test_transactions_that_rolled_back_are_no_micro_batches(outbox: Outbox) -> None:
    outbox.fill(4, events=1)
    with psycopg.connect(outbox.dsn, autocommit=True) as conn:
        for _ in range(300):
            with conn.transaction(force_rollback=True):
                conn.execute("select pg_current_xact_id()")
    outbox.fill(4, events=1)
    reader = StreamReader(parse({"dsn": outbox.dsn, "ordered": "false", "partitions": "1"}))
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
    reader = StreamReader(parse({"dsn": outbox.dsn, "reader": "lake"}))
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
    reader = StreamReader(parse({"dsn": outbox.dsn}))
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
    assert sorted(rows) == sorted(outbox.column("select id::text from outbox_message_t"))


def end_sessions(outbox: Outbox) -> None:
    outbox.conn.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where application_name = 'relay spark' and datname = current_database()"
    )
