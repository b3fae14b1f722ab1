"""Events that Spark writes to files and tables: all of them, each once, whatever breaks."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pyarrow.parquet
import pytest

from relay.admin.dead_letters import DeadLetters
from relay.admin.sinks import listed, pause, resume, seek
from relay.config.settings import Settings
from relay.logs import quiet_libraries
from relay.runtime.parts import Condition
from relay.spark.session import Session
from relay.spark.sink_worker import SparkWorker
from relay.spark.writers import BATCH_COLUMN, BatchId, writer
from relay.store import groups
from relay.store.connections import connect
from relay.store.dead_letters.selection import DeadLetterSelection
from relay.store.positions import spark_batches
from relay.store.positions.sinks import SinkMoved
from tests.outbox import APPEND, Outbox, event, host, relaying, wait_until
from tests.postgres import Server
from tests.process import running

PARTITIONS = pyarrow.dataset.partitioning(flavor="hive")

written: list[tuple[BatchId, list[str]]] = []
faults: list[Exception] = []


@pytest.fixture
def session(spark_session: Session) -> Session:
    """Whatever the engine: the writer needs it."""
    return spark_session


def lake(path: Path, **more: Any) -> dict[str, Any]:
    """Every event goes into the projection and to a DataFrame writer."""
    target = {} if "callable" in more or "table" in more else {"path": str(path)}
    handlers = {
        "projection": {"type": "sql", "statement": APPEND},
        "lake": {"type": "spark", "every": 0.2, **target, **more},
    }
    return {"handlers": handlers, "routes": [{"handlers": list(handlers)}]}


def files(path: Path) -> pyarrow.Table:
    """What lies there once nothing is being written: Spark moves its files about until then."""
    found = pyarrow.dataset.dataset(path, format="parquet", partitioning=PARTITIONS)
    return found.to_table()


def has_files(path: Path) -> bool:
    """Whether there are files of any batch, also while Spark moves them: os.walk leaves out what is gone by then."""
    return any(name.endswith(".parquet") for _, _, names in os.walk(path) for name in names)


def written_all(outbox: Outbox, timeout: float = 120.0) -> None:
    """Wait until the sink has written everything that is published."""
    outbox.wait_delivered("lake", timeout)
    assert not begun(outbox)


def begun(outbox: Outbox) -> list[str]:
    """The ids of the batches that are begun."""
    return outbox.column("select batch::text from relay.spark_batches where batch is not null")


@contextmanager
def relayed(outbox: Outbox, engine: str, session: Session, **config: Any) -> Iterator[None]:
    with relaying(outbox.settings(engine, **config), session):
        outbox.wait_drained()
        yield


def assert_each_once(outbox: Outbox, path: Path) -> pyarrow.Table:
    found = files(path)
    assert sorted(found["id"].to_pylist()) == sorted(
        outbox.column("select id::text from projection")
    )
    return found


def test_events_are_appended_to_files_by_date_and_bucket(
    outbox: Outbox, engine: str, session: Session, tmp_path: Path
) -> None:
    outbox.fill(300, events=5, hosts=20)
    outbox.publish(host(1), event(7, "order.paid", metadata={"trace": "é"}))
    path = tmp_path / "lake"
    with relayed(outbox, engine, session, **lake(path)):
        written_all(outbox)
        outbox.fill(10)
        wait_until(lambda: outbox.value("select count(*) from projection") == 1_551)
        written_all(outbox)
    found = assert_each_once(outbox, path)
    assert len(set(found["relay_batch"].to_pylist())) >= 2
    stored = outbox.conn.execute(
        """
        select id::text, host_id::text, aggregate_id, event_ts, payload::text, c_offset, transaction_count,
               to_char(event_ts at time zone 'UTC', 'YYYY-MM-DD'),
               (abs(hashtext(host_id::text)::bigint) % 8)::int
          from outbox_message_t order by 1
        """
    ).fetchall()
    names = "id host_id aggregate_id event_ts payload c_offset transaction_count date host_bucket"
    rows = found.select(names.split()).sort_by("id").to_pylist()
    assert [tuple(row.values()) for row in rows] == stored
    outbox.assert_exact()


def test_times_that_python_does_not_know(outbox: Outbox, session: Session, tmp_path: Path) -> None:
    times = ["infinity", "0044-03-15 12:00:00+00 BC", "2026-11-21 23:30:00-02", "1969-07-20 20:17Z"]
    outbox.publish(host(2), *(event(n, event_ts=time) for n, time in enumerate(times)))
    with relayed(outbox, "inline", session, **lake(tmp_path / "lake")):
        written_all(outbox)
    assert_each_once(outbox, tmp_path / "lake")
    days = {path.name for path in (tmp_path / "lake").iterdir() if path.is_dir()}
    assert days == {"date=__HIVE_DEFAULT_PARTITION__", "date=2026-11-22", "date=1969-07-20"}


def test_events_are_appended_to_a_table(
    outbox: Outbox, session: Session, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    table = f"lake_{abs(hash(request.node.name))}_{outbox.slot}"
    spark = session.get()
    assert spark is not None
    options = {"path": str(tmp_path / "table"), "compression": "zstd"}
    config = lake(tmp_path, table=table, options=options, partition_by=["event_type"])
    outbox.fill(100, events=5)
    try:
        with relayed(outbox, "inline", session, **config):
            written_all(outbox)
            outbox.fill(10)
            wait_until(lambda: outbox.value("select count(*) from projection") == 550)
            written_all(outbox)
        found = [row.id for row in spark.table(table).select("id").collect()]
    finally:
        spark.sql(f"drop table if exists {table}")
    assert sorted(found) == sorted(outbox.column("select id::text from projection"))


def remember(frame: Any, batch: BatchId) -> None:
    """A writer of the user's own, which fails as often as it is told to."""
    written.append((batch, sorted(row.id for row in frame.select("id").collect())))
    if faults:
        raise faults.pop()


REMEMBER = "tests.integration.test_spark_handler:remember"


def test_a_batch_is_the_same_however_often_it_is_tried(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    written.clear()
    faults[:] = [OSError("the lake is frozen"), ValueError("x")]
    outbox.fill(100, events=5)
    with relayed(outbox, "inline", session, **lake(tmp_path, callable=REMEMBER, max_events=200)):
        written_all(outbox)
    first, *others = written
    assert others[:2] == [first, first]
    batches = [batch for batch, _ in others[1:]]
    assert [batch.number for batch in batches] == [1, 2, 3]
    assert len({batch.application for batch in batches}) == 1
    assert len({batch.id for batch in batches}) == 3
    assert [len(ids) for _, ids in others[1:]] == [200, 200, 100]
    ids = [event_id for _, ids in others[1:] for event_id in ids]
    assert sorted(ids) == sorted(outbox.column("select id::text from projection"))


def test_only_what_is_routed_to_the_sink_is_written(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    config = lake(tmp_path / "lake")
    config["routes"] = [
        {"match": {"payload.amount": 3}, "handlers": ["projection"]},
        {"match": {"event_type": "order.*"}, "handlers": ["projection", "lake"]},
    ]
    outbox.publish(host(1), event(1), event(3))
    # A transaction with an event that goes nowhere goes nowhere.
    outbox.publish(host(1), event(4), event(5, "stock.moved"))
    outbox.publish(host(2), event(6))
    with relayed(outbox, "inline", session, **config):
        written_all(outbox)
    found = files(tmp_path / "lake")
    assert sorted(found["payload"].to_pylist()) == ['{"amount": 1}', '{"amount": 6}']
    assert outbox.value("select count(*) from projection") == 3
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 2


@pytest.mark.parametrize(("start", "expected"), [("now", ["2"]), ("beginning", ["1", "2"])])
def test_a_new_sink_begins_where_it_is_told_to(
    outbox: Outbox, session: Session, tmp_path: Path, start: str, expected: list[str]
) -> None:
    outbox.publish(host(1), event(1))
    with relaying(outbox.settings()):
        outbox.wait_handled()
    with relayed(outbox, "inline", session, **lake(tmp_path / "lake", start=start)):
        wait_until(lambda: bool(outbox.column("select 1 from relay.sinks")))
        outbox.publish(host(1), event(2))
        written_all(outbox)
    found = files(tmp_path / "lake")["payload"].to_pylist()
    assert sorted(each.partition(": ")[2].removesuffix("}") for each in found) == expected


def test_a_query_and_a_function_change_what_is_written(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    spark = session.get()
    assert spark is not None
    names = f"names_{outbox.slot}"
    spark.sql(f"create table {names} as select 'order.placed' as kind, 'a sale' as name").collect()
    query = (
        "select id, name, get_json_object(payload, '$.amount')::int as amount from events"
        f" join {names} on kind = event_type"
    )
    config = lake(
        tmp_path / "lake",
        sql=query,
        transform="tests.integration.test_spark_handler:double",
        partition_by=["name"],
    )
    outbox.publish(host(1), event(1), event(2), event(3, "order.paid"))
    try:
        with relayed(outbox, "inline", session, **config):
            written_all(outbox)
    finally:
        spark.sql(f"drop table {names}")
    rows = files(tmp_path / "lake").to_pylist()
    assert sorted((row["name"], row["amount"]) for row in rows) == [("a sale", 2), ("a sale", 4)]
    assert rows[0].keys() == {"id", "name", "amount", BATCH_COLUMN}


def double(frame: Any) -> Any:
    """A transformation of the user's own."""
    return frame.withColumn("amount", frame.amount * 2)


def test_a_seek_gives_up_the_batch_that_is_begun(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    written.clear()
    outbox.publish(host(1), event(1))
    config = lake(tmp_path, callable=REMEMBER)
    settings = outbox.settings(**config)
    with relayed(outbox, "inline", session, **config):
        written_all(outbox)
        faults[:] = [ValueError("x")] * 1_000
        outbox.publish(host(1), event(2))
        wait_until(lambda: len(written) >= 3)
        seek(settings, "lake", to="beginning")
        wait_until(lambda: len(written[-1][1]) == 2)
        faults.clear()
        written_all(outbox)
    numbers = [batch.number for batch, _ in written]
    assert numbers[:2] == [1, 2]
    assert numbers[-1] == 3
    assert len({batch.application for batch, _ in written}) == 1
    assert written[-1][1] == sorted(outbox.column("select id::text from projection"))


def test_a_seek_into_a_difference_leaves_out_what_lies_before(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    written.clear()
    for number in range(6):
        outbox.publish(host(1), event(number))
    offset = outbox.value("select c_offset from outbox_message_t order by 1 offset 3 limit 1")
    config = lake(tmp_path, callable=REMEMBER)
    settings = outbox.settings(**config)
    with relayed(outbox, "inline", session, **config):
        written_all(outbox)
        seek(settings, "lake", to=str(offset))
        wait_until(lambda: len(written) >= 2)
        written_all(outbox)
    again = outbox.column("select id::text from outbox_message_t where c_offset >= %s", (offset,))
    assert written[-1][1] == sorted(again)


def test_a_paused_sink_writes_nothing_until_it_is_resumed(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    config = lake(tmp_path / "lake")
    settings = outbox.settings(**config)
    with relayed(outbox, "inline", session, **config):
        wait_until(lambda: bool(outbox.column("select 1 from relay.sinks")))
        pause(settings, "lake", "maintenance")
        wait_until(lambda: listed(settings)[0].state == "paused")
        outbox.publish(host(1), event(1))
        outbox.wait_drained()
        outbox.wait_handled()
        (found,) = listed(settings)
        assert (found.state, found.unread) == ("paused", 1)
        assert not has_files(tmp_path / "lake")
        resume(settings, "lake")
        written_all(outbox)
    assert_each_once(outbox, tmp_path / "lake")


def test_a_replayed_dead_letter_comes_with_a_batch(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    config = lake(tmp_path / "lake")
    config["routes"] = [{"match": {"event_type": "order.*"}, "handlers": ["projection", "lake"]}]
    outbox.publish(host(1), event(1), event(2, "stock.moved", metadata={"trace": "é"}))
    with relayed(outbox, "inline", session, **config):
        outbox.wait_handled()
        written_all(outbox)
    assert not has_files(tmp_path / "lake")
    with relayed(outbox, "inline", session, **lake(tmp_path / "lake")):
        settings = outbox.settings(**lake(tmp_path / "lake"))
        with connect(outbox.relay_dsn) as conn:
            dead_letters = DeadLetters(settings, conn)
            dead_letters.replay(dead_letters.find(DeadLetterSelection()), None)
        wait_until(lambda: has_files(tmp_path / "lake"))
        written_all(outbox)
    found = assert_each_once(outbox, tmp_path / "lake")
    stored = outbox.conn.execute(
        """
        select id::text, payload::text, metadata::text, event_ts, c_offset,
               (abs(hashtext(host_id::text)::bigint) % 8)::int
          from outbox_message_t order by 1
        """
    ).fetchall()
    rows = found.select(
        ["id", "payload", "metadata", "event_ts", "c_offset", "host_bucket"]
    ).sort_by("id")
    assert [tuple(row.values()) for row in rows.to_pylist()] == stored
    assert set(outbox.column("select status from relay.dead_letter_queue")) == {"replayed"}


def test_a_destination_that_cannot_be_written_holds_up_nobody(
    outbox: Outbox, session: Session, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lake"
    path.write_text("no folder")
    outbox.publish(host(1), event(1))
    config = lake(path)
    with relayed(outbox, "inline", session, **config):
        outbox.wait_handled()
        wait_until(lambda: "handlers.lake: cannot write with Spark yet" in caplog.text)
        wait_until(lambda: listed(outbox.settings(**config))[0].fault is not None)
    assert outbox.value("select rows_read from relay.spark_batches where batch is not null") == 1
    path.unlink()
    with relayed(outbox, "inline", session, **config):
        written_all(outbox)
        wait_until(lambda: listed(outbox.settings(**config))[0].fault is None)
    assert_each_once(outbox, path)


def test_a_fault_is_over_where_nothing_is_to_be_written_after_it(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    settings = outbox.settings(**lake(tmp_path / "lake"))
    outbox.install_again(settings)

    def fault() -> object:
        return outbox.value("select fault from relay.sinks where sink = 'lake'")

    with relaying(settings, session):
        outbox.publish(host(1), event(1))
        written_all(outbox)
        outbox.conn.execute("alter table relay.spark_batches rename batch to away")
        wait_until(lambda: fault() is not None)
        outbox.conn.execute("alter table relay.spark_batches rename away to batch")
        wait_until(lambda: fault() is None)


class NoSession:
    """A session that cannot be built."""

    def __init__(self) -> None:
        self.condition = Condition("spark", logging.getLogger("relay"), "fails", "works")

    def start(self) -> None:
        """It has begun."""

    def get(self, timeout: float = 0.0) -> None:
        time.sleep(timeout / 10)

    def end(self) -> None:
        """It is not built."""


def test_status_tells_that_the_session_is_missing(
    outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.spark.sink_worker.BUILD_SECONDS", 0.0)
    settings = outbox.settings(**lake(tmp_path / "lake", start="beginning"))
    outbox.publish(host(1), event(1))
    missing: Any = NoSession()
    waiting = SparkWorker("lake", settings, missing)
    waiting.start()
    output = "the Spark session is being built"
    wait_until(lambda: listed(settings)[0].fault == output)
    why = "SparkException: Master removed our application"
    missing.condition.fails(why)
    wait_until(lambda: listed(settings)[0].fault == f"{output}: {why}")
    assert listed(settings)[0].since is not None
    waiting.stop()
    waiting.join(10)


def raises(frame: Any) -> Any:
    raise ValueError("s3cret")


def returns_nothing(frame: Any) -> Any:
    return None


def breaks_the_query(frame: Any) -> Any:
    return frame.where(f"payload = {frame.select('payload').first().payload}")


def test_a_fault_tells_where_and_what_and_no_value(
    outbox: Outbox, session: Session, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # As each process of relay does; other tests undo it.
    quiet_libraries()
    outbox.publish(host(1), event(1, payload={"card": "s3cret"}))
    here = "tests.integration.test_spark_handler"
    broken: dict[str, dict[str, str]] = {
        "cast": {
            "sql": "select cast(payload as int) as amount from events",
            "on_bad_row": "stop",
        },
        "syntax": {"sql": "selec * form events"},
        "raising": {"transform": f"{here}:raises"},
        "quoting": {"transform": f"{here}:breaks_the_query"},
        "nothing": {"transform": f"{here}:returns_nothing"},
        "calling": {"callable": f"{here}:raises_for"},
    }
    handlers = {
        name: {"type": "spark", "every": 0.2, **more}
        | ({} if "callable" in more else {"path": str(tmp_path / name)})
        for name, more in broken.items()
    }
    config: dict[str, Any] = {"handlers": handlers, "routes": [{"handlers": list(handlers)}]}
    settings = outbox.settings(**config)
    with relayed(outbox, "inline", session, **config):
        wait_until(lambda: None not in [each.fault for each in listed(settings)], 60)
    found = {each.name: str(each.fault) for each in listed(settings)}
    assert "s3cret" not in str(found) + caplog.text
    line = r" \((/.*)?test_spark_handler\.py:\d+\)"
    expected = {
        "cast": "NumberFormatException: CAST_INVALID_INPUT: sqlstate 22018",
        "syntax": r"handlers.syntax.sql: ParseException: \[PARSE_SYNTAX_ERROR\] .* 'selec'.*\(line 1, pos 0\)",
        "raising": f"handlers.raising.transform: ValueError{line}",
        "quoting": f"handlers.quoting.transform: ParseException: .*{line}",
        "nothing": "handlers.nothing.transform: the function returned NoneType: return the DataFrame to write",
        "calling": f"handlers.calling.callable: RuntimeError{line}",
    }
    wrong = {
        name: fault for name, fault in found.items() if not re.fullmatch(expected[name], fault)
    }
    assert not wrong
    assert {vars(record)["fault"] for record in caplog.records if "fault" in vars(record)} == set(
        found.values()
    )


def raises_for(frame: Any, batch: BatchId) -> None:
    raise RuntimeError("s3cret")


def test_the_jvm_logs_lost_executors_and_no_value(session: Session) -> None:
    spark = session.get()
    assert spark is not None
    manager: Any = spark.sparkContext._jvm.org.apache.logging.log4j.LogManager  # type: ignore[union-attr]

    def heard(name: str) -> bool:
        return bool(manager.getLogger(f"org.apache.spark.{name}").isErrorEnabled())

    assert heard("scheduler.TaskSchedulerImpl")
    quoting = ("executor.Executor", "scheduler.TaskSetManager", "util.Utils")
    assert not any(map(heard, (*quoting, "sql.execution.datasources.FileFormatWriter", "")))


def worker(settings: Settings, session: Session) -> SparkWorker:
    """A sink that another process works; it has the claim."""
    made = SparkWorker("lake", settings, session)
    wait_until(made._claim.take)
    return made


def test_one_instance_writes_and_another_takes_over(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    settings = outbox.settings(**lake(tmp_path / "lake"))
    outbox.publish(host(1), event(1))
    second = SparkWorker("lake", settings, session)
    with relaying(outbox.settings(**lake(tmp_path / "lake", every=3_600)), session):
        outbox.wait_handled()
        wait_until(lambda: bool(outbox.column("select 1 from relay.sinks where instance <> ''")))
        assert not second._claim.take()
    second.start()
    written_all(outbox)
    second.stop()
    second.join(60)
    assert_each_once(outbox, tmp_path / "lake")


def test_a_writer_that_comes_too_late_changes_nothing(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    path = tmp_path / "lake"
    settings = outbox.settings(**lake(path, every=0.001))
    outbox.publish(host(1), event(1), event(2))
    outbox.drain(outbox.settings(**lake(path, every=3_600)), session)
    late = worker(settings, session)
    batch = begin(late)
    spark = session.get()
    assert spark is not None
    frame = late._frame(spark, batch)
    late._write(batch)
    assert_each_once(outbox, path)
    identity = BatchId(batch.application, batch.number, batch.id)
    writer("lake", settings.spark_handlers["lake"]).write(frame, identity)
    with pytest.raises(SinkMoved):
        late._finish(batch)
    late._disconnect()
    assert assert_each_once(outbox, path).num_rows == 2


def begin(sink: SparkWorker) -> spark_batches.OpenBatch:
    """Begin the batch that is due."""
    found: list[spark_batches.OpenBatch] = []

    def has_begun() -> bool:
        batch = sink._store_due_batch(sink._load())
        if batch is not None:
            found.append(batch)
        return bool(found)

    wait_until(has_begun)
    (batch,) = found
    return batch


def test_the_rights_that_are_granted_suffice(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    outbox.publish(host(1), event(1))
    with outbox.limited_role() as (_, dsn):
        source = {**outbox.config()["source"], "dsn": dsn}
        with relayed(outbox, "inline", session, source=source, **lake(tmp_path / "lake")):
            written_all(outbox)
    assert_each_once(outbox, tmp_path / "lake")


def test_a_table_of_the_users_is_left_alone(
    outbox: Outbox, session: Session, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither one without partitions loses its rows, nor one that has some of relay's columns as partitions."""
    spark = session.get()
    assert spark is not None
    outbox.publish(host(1), event(1))
    plain, dated = f"plain_{outbox.slot}", f"dated_{outbox.slot}"
    spark.sql(f"create table {plain} as select '1' as id").collect()
    spark.sql(
        f"create table {dated} using parquet partitioned by (date) as select '1' as id, current_date as date"
    ).collect()
    handlers = {
        name: {"type": "spark", "every": 0.1, "table": name, "partition_by": ["date"]}
        for name in (plain, dated)
    }
    try:
        with relayed(
            outbox, "inline", session, handlers=handlers, routes=[{"handlers": [plain, dated]}]
        ):
            wait_until(lambda: len(_faults(caplog)) >= 2)
        faults = sorted(_faults(caplog))
        for fault, name in zip(faults, (dated, plain), strict=True):
            assert f"handlers.{name}.table: {name} is not partitioned by relay_batch" in fault
        for name in handlers:
            assert [row.id for row in spark.table(name).collect()] == ["1"]
    finally:
        for name in handlers:
            spark.sql(f"drop table {name}")
    assert (
        outbox.value("select sum(rows_read) from relay.spark_batches where batch is not null") == 2
    )


def _faults(caplog: pytest.LogCaptureFixture) -> set[str]:
    return {str(record.fault) for record in caplog.records if hasattr(record, "fault")}


@pytest.mark.parametrize("partition_by", [["date"], pytest.param([], marks=pytest.mark.rare)])
def test_a_table_of_relays_keeps_its_rows(
    outbox: Outbox, session: Session, tmp_path: Path, partition_by: list[str]
) -> None:
    """A batch of a day replaces nothing of that day."""
    spark = session.get()
    assert spark is not None
    table = f"kept_{len(partition_by)}_{outbox.slot}"
    config = lake(tmp_path, table=table, partition_by=partition_by)
    try:
        with relayed(outbox, "inline", session, **config):
            for number in range(2):
                outbox.publish(host(number), event(1))
                written_all(outbox)
        found = [row.id for row in spark.table(table).collect()]
    finally:
        spark.sql(f"drop table if exists {table}")
    assert sorted(found) == sorted(outbox.column("select id::text from projection"))
    assert len(found) == 2


def test_a_target_that_counts_from_the_start_again_replaces_nothing(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    """As this one does when it is restored from a backup: elsewhere, its numbers are those of another application."""
    path = tmp_path / "lake"
    applications = set()
    with relayed(outbox, "inline", session, **lake(path)):
        for _ in range(2):
            outbox.publish(host(1), event(1))
            written_all(outbox)
            applications.add(outbox.value("select application from relay.spark_batches"))
            outbox.conn.execute("update relay.spark_batches set server = 'x 1', number = 7")
        assert outbox.value("select number from relay.spark_batches") == 7
    assert len(applications) == 2
    assert assert_each_once(outbox, path).num_rows == 2


def test_two_targets_that_share_a_path_never_meet(
    outbox: Outbox, server: Server, session: Session, tmp_path: Path
) -> None:
    path = tmp_path / "lake"
    other_dsn = server.create_database(f"{outbox.slot}_other")
    with Outbox(other_dsn) as other:
        other.install()
        for each in (outbox, other):
            each.publish(host(1), event(1))
            with relayed(each, "inline", session, **lake(path)):
                written_all(each)
        ids = [each.value("select id::text from projection") for each in (outbox, other)]
    server.drop_database(f"{outbox.slot}_other")
    assert sorted(files(path)["id"].to_pylist()) == sorted(ids)


def test_another_path_is_another_application(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    outbox.publish(host(1), event(1))
    (tmp_path / "a").write_text("no folder")
    with relayed(outbox, "inline", session, **lake(tmp_path / "a")):
        wait_until(lambda: bool(begun(outbox)))
        former = outbox.value("select application from relay.spark_batches")
    with relayed(outbox, "inline", session, **lake(tmp_path / "b")):
        written_all(outbox)
    assert assert_each_once(outbox, tmp_path / "b").num_rows == 1
    found = outbox.conn.execute(
        "select application, number from relay.spark_batches where application <> %s", (former,)
    ).fetchall()
    assert [number for _, number in found] == [1]
    assert not begun(outbox)


def test_a_batch_that_was_begun_keeps_its_layout(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    path = tmp_path / "lake"
    for number in range(20):
        outbox.publish(host(number), event(1))
    outbox.drain(outbox.settings(**lake(path, every=3_600)), session)
    first = worker(outbox.settings(**lake(path, every=0.001)), session)
    batch = begin(first)
    spark = session.get()
    assert spark is not None
    # It dies before the position moves.
    identity = BatchId(batch.application, batch.number, batch.id)
    writer("lake", first._handler).write(first._frame(spark, batch), identity)
    first._disconnect()
    changed = lake(path, host_buckets=4, partition_by=["host_bucket"])
    with relayed(outbox, "inline", session, **changed):
        written_all(outbox)
    found = assert_each_once(outbox, path)
    assert found.num_rows == 20
    buckets = outbox.column(
        "select distinct mod(abs(hashtext(host_id::text)::bigint), 8)::int from outbox_message_t"
    )
    assert set(found["host_bucket"].to_pylist()) == set(buckets)
    assert max(buckets) >= 4


@pytest.mark.rare
def test_what_an_attempt_left_in_other_partitions_of_a_table_is_replaced(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    """Another table of the query has changed since the attempt; the catalog does not remove the table's files."""
    spark = session.get()
    assert spark is not None
    names, table = f"names_{outbox.slot}", f"lake_{outbox.slot}"
    spark.sql(f"create table {names} as select 1L as version, 'a' as name").collect()
    config = lake(
        tmp_path,
        table=table,
        every=0.001,
        options={"path": str(tmp_path / "table")},
        sql=f"select id, date, name from events join {names} on version = aggregate_version",
        partition_by=["date", "name"],
    )
    outbox.publish(
        host(1), *(event(n, aggregate_version=n, event_ts="infinity") for n in range(1, 4))
    )
    spark.sql(
        rf"insert into {names} values (2L, 'it''s {{a}} \\\\ %s `b` \"c\"/='), (3L, null)"
    ).collect()
    try:
        write_and_die(outbox, session, config)
        former = spark.table(table).count()
        spark.sql(f"insert overwrite {names} values (1L, 'b'), (2L, 'b'), (3L, 'b')").collect()
        with relayed(outbox, "inline", session, **config):
            written_all(outbox)
        rows = spark.table(table).collect()
    finally:
        spark.sql(f"drop table if exists {names}")
        spark.sql(f"drop table if exists {table}")
    assert former == 0
    assert [row.name for row in rows] == ["b"] * 3
    assert spark.read.parquet(str(tmp_path / "table")).count() == 3


def test_what_an_attempt_with_another_query_left_is_replaced(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    path = tmp_path / "lake"
    outbox.publish(host(1), event(1))
    query = "select id, upper(event_type) as event_type from events"
    former = lake(path, every=0.001, sql=query, partition_by=["event_type"])
    write_and_die(outbox, session, former)
    with relayed(outbox, "inline", session, **lake(path, partition_by=["event_type"])):
        written_all(outbox)
    assert assert_each_once(outbox, path)["event_type"].to_pylist() == ["order.placed"]


@pytest.mark.parametrize("kind", ["path", "table"])
def test_a_wrong_partition_column_can_be_corrected_while_a_batch_is_begun(
    outbox: Outbox,
    session: Session,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    spark = session.get()
    assert spark is not None
    table = f"lake_{outbox.slot}"
    index = {"table": table} if kind == "table" else {}
    query = "select id, event_type as kind from events"
    outbox.publish(host(1), event(1))
    try:
        wrong = lake(tmp_path / "lake", sql=query, partition_by=["kin"], **index)
        with relayed(outbox, "inline", session, **wrong):
            wait_until(lambda: "partition_by: the batch has no column kin" in str(_faults(caplog)))
        caplog.clear()
        right = lake(tmp_path / "lake", sql=query, partition_by=["kind"], **index)
        with relayed(outbox, "inline", session, **right):
            written_all(outbox)
        assert not _faults(caplog)
        found = spark.table(table) if index else spark.read.parquet(str(tmp_path / "lake"))
        assert [row.kind for row in found.collect()] == ["order.placed"]
    finally:
        spark.sql(f"drop table if exists {table}")


def write_and_die(outbox: Outbox, session: Session, config: dict[str, Any]) -> None:
    """Write a batch and die before the position moves."""
    patient = {"lake": {**config["handlers"]["lake"], "every": 3_600}}
    handlers = {**config["handlers"], **patient}
    outbox.drain(outbox.settings(**{**config, "handlers": handlers}), session)
    sink = worker(outbox.settings(**config), session)
    batch = begin(sink)
    spark = session.get()
    assert spark is not None
    identity = BatchId(batch.application, batch.number, batch.id)
    writer("lake", sink._handler).write(sink._frame(spark, batch), identity)
    sink._disconnect()


def test_a_source_that_is_replaced_gives_up_no_batch(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    """Its standby has the rows of the batch too, and part of them may be written."""
    outbox.publish(host(1), event(1))
    outbox.drain(outbox.settings(**lake(tmp_path / "lake", every=3_600)), session)
    sink = worker(outbox.settings(**lake(tmp_path / "lake", every=0.001)), session)
    batch = begin(sink)
    former = groups.origin(outbox.conn, "default")
    assert former.polled >= batch.contents.lsn
    assert former.identifier is not None
    with outbox.conn.transaction():
        groups.follow(outbox.conn, "default", former.identifier, 2, "1 0/1 history", reset=False)
    again = sink._stored_batch(sink._load())
    assert again is not None
    assert (again.id, again.epoch) == (batch.id, batch.epoch + 1)
    sink._write(again)
    sink._disconnect()
    assert assert_each_once(outbox, tmp_path / "lake").num_rows == 1


def test_rows_from_before_there_was_c_xid_are_written_once(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    written.clear()
    for number in range(5):
        outbox.publish(host(number), event(1))
    outbox.conn.execute("update outbox_message_t set c_xid = null where c_offset <= 3")
    config = lake(tmp_path, callable=REMEMBER, max_events=2, start="beginning")
    # The group itself begins after them.
    outbox.conn.execute("delete from relay.sink_claims")
    with relayed(outbox, "inline", session, **config):
        wait_until(lambda: sum(len(ids) for _, ids in written) >= 5)
        written_all(outbox)
    ids = sorted(each for _, ids in written for each in ids)
    assert ids == sorted(outbox.column("select id::text from outbox_message_t"))
    # They are not divided: all of them come first.
    assert [len(ids) for _, ids in written] == [3, 2]


def test_what_dead_attempts_left_is_removed_after_a_week(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    path = tmp_path / "lake"
    old = [path / f".{kind}-old" for kind in ("relay", "spark-staging")]
    new = [path / f".{kind}-new" for kind in ("relay", "spark-staging")]
    for folder in (*old, *new):
        folder.mkdir(parents=True)
    for folder in old:
        os.utime(folder, (1, 1))
    outbox.publish(host(1), event(1))
    with relayed(outbox, "inline", session, **lake(path)):
        written_all(outbox)
    assert not any(folder.exists() for folder in old)
    assert all(folder.exists() for folder in new)


def test_a_target_that_is_changed_and_changed_back_has_each_event_once(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    """Relay died between writing to the first target and moving the position; the second is a slip of the pen."""
    first, second = tmp_path / "a", tmp_path / "b"
    outbox.publish(host(1), event(1))
    write_and_die(outbox, session, lake(first, every=0.001))
    second.write_text("no folder")
    with relayed(outbox, "inline", session, **lake(second)):
        wait_until(lambda: len(begun(outbox)) == 2)
    with relayed(outbox, "inline", session, **lake(first)):
        written_all(outbox)
    assert_each_once(outbox, first)


@pytest.mark.rare
@pytest.mark.parametrize("edited", [False, True], ids=["as-published", "edited"])
@pytest.mark.parametrize("read_first", [True, False], ids=["sink-first", "replay-first"])
def test_what_was_unrouted_and_is_read_with_new_routes_is_not_replayed_too(
    outbox: Outbox, session: Session, tmp_path: Path, read_first: bool, edited: bool
) -> None:
    """The target has dead-lettered it before the sink came to it; then a route was added."""
    config = lake(tmp_path / "lake", every=3_600)
    config["routes"] = [{"match": {"event_type": "order.*"}, "handlers": ["projection", "lake"]}]
    outbox.publish(host(1), event(1, "stock.moved"))
    outbox.publish(host(1), event(2))
    with relayed(outbox, "inline", session, **config):
        outbox.wait_handled()
        wait_until(lambda: outbox.column("select status from relay.dead_letter_queue") == ["dead"])
    settings = outbox.settings(**lake(tmp_path / "lake"))
    with relayed(
        outbox, "inline", session, **lake(tmp_path / "lake", every=0.2 if read_first else 3_600)
    ):
        if read_first:
            written_all(outbox)
        with connect(outbox.relay_dsn) as conn:
            dead_letters = DeadLetters(settings, conn)
            if edited:
                number = outbox.value("select id from relay.dead_letter_queue")
                dead_letters.edit(number, '{"amount": 3}', None)
            replayed = dead_letters.replay(dead_letters.find(DeadLetterSelection()), None)
            assert dead_letters.outcome(replayed).done == 1
    with relayed(outbox, "inline", session, **lake(tmp_path / "lake")):
        written_all(outbox)
    assert outbox.column("select status from relay.dead_letter_queue") == ["replayed"]
    rows = assert_each_once(outbox, tmp_path / "lake")
    wanted = ['{"amount": 2}', '{"amount": 3}' if edited else '{"amount": 1}']
    assert sorted(rows["payload"].to_pylist()) == sorted(wanted)


@pytest.mark.rare
def test_the_log_of_a_run_has_no_value_and_no_traceback(outbox: Outbox, tmp_path: Path) -> None:
    """Neither Spark nor its Python workers write beside relay's own lines."""
    outbox.publish(host(1), event(1, payload={"card": "s3cret"}))
    lakes: dict[str, dict[str, Any]] = {
        "cast": {"path": f"{tmp_path}/lake", "sql": "select cast(payload as int) from events"},
        "misplaced": {"path": f"{__file__}/lake", "format": "delta"},
        "column": {"path": f"{tmp_path}/lake", "sql": "select amount from events"},
        "unknown": {"table": "nowhere.lake"},
    }
    file = outbox.config_file(
        tmp_path / "relay.yaml",
        spark={"master": "local[1]"},
        handlers={name: {"type": "spark", "every": 0.2, **more} for name, more in lakes.items()},
        routes=[{"handlers": list(lakes)}],
    )
    with running(file) as service:
        for name in lakes:
            service.wait_said(f"handlers.{name}: cannot write with Spark yet", 120)
        assert service.terminate() == 0
        log = service.log.read_text()
        faults = {line["handler"]: line["fault"] for line in service.lines() if "fault" in line}
    assert "s3cret" not in log
    assert faults["misplaced"].startswith("PythonException: PYTHON_EXCEPTION: sqlstate 38000: Not")
    assert faults["column"].startswith("handlers.column.sql: AnalysisException: [UNRESOLVED_COL")
    assert faults["unknown"].startswith("AnalysisException: [SCHEMA_NOT_FOUND] ")
    beside = [line for line in log.splitlines() if not line.startswith(("{", "WARNING: "))]
    assert not beside


@pytest.mark.chaos
@pytest.mark.rare
@pytest.mark.timeout(900)
def test_each_event_is_written_once_with_relay_killed_while_it_writes(
    outbox: Outbox, tmp_path: Path
) -> None:
    path = tmp_path / "lake"
    outbox.fill(10_000, events=5)
    file = outbox.config_file(
        tmp_path / "relay.yaml",
        **lake(path, max_events=10_000),
        batch={"inline_max_events": 1_000_000_000},
    )
    for done in range(3):
        with running(file) as service:
            # Sooner and later in the life of a batch, also between its last file and the end that is stored.
            service.wait_said("wrote a batch with Spark", 180) if done % 2 else None
            wait_until(lambda: bool(begun(outbox)), 180)
            if done:
                wait_until(lambda: has_files(path), 180)
            service.kill()
    with running(file) as service:
        wait_until(lambda: outbox.value("select count(*) from projection") == 50_000, 180)
        written_all(outbox)
        assert service.terminate() == 0
    assert assert_each_once(outbox, path).num_rows == 50_000
    outbox.assert_exact()
