"""Events that a DataFrame writer appends to files and tables: all of them, each once, whatever breaks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pyarrow.parquet
import pytest
from relay.handlers.spark import writer
from relay.pipeline.spark_writer import SparkWriter

from relay.spark.session import Session
from relay.store import spark_batches
from tests.outbox import APPEND, Outbox, event, host, relaying, wait_until
from tests.process import running

PARTITIONS = pyarrow.dataset.partitioning(flavor="hive")

written: list[tuple[int, list[str]]] = []
faults: list[Exception] = []


@pytest.fixture
def session(spark_session: Session) -> Session:
    """Whatever the engine: the writer needs it."""
    return spark_session


def lake(path: Path, **more: Any) -> dict[str, Any]:
    """Every event goes into the projection and to a DataFrame writer."""
    place = {} if "callable" in more or "table" in more else {"path": str(path)}
    handlers = {
        "projection": {"type": "sql", "statement": APPEND},
        "lake": {"type": "spark", "every": 0.2, **place, **more},
    }
    return {"handlers": handlers, "routes": [{"handlers": list(handlers)}]}


def files(path: Path) -> pyarrow.Table:
    """What lies there once nothing is being written: Spark moves its files about until then."""
    found = pyarrow.dataset.dataset(path, format="parquet", partitioning=PARTITIONS)
    return found.to_table()


def has_files(path: Path) -> bool:
    """Whether there are files of any batch, also while Spark moves them: os.walk leaves out what is gone by then."""
    return any(name.endswith(".parquet") for _, _, names in os.walk(path) for name in names)


def written_all(outbox: Outbox) -> None:
    wait_until(lambda: outbox.value("select count(*) from projection") > 0)
    wait_until(lambda: outbox.value("select count(*) from relay.spark_portions") == 0, 120)
    assert outbox.value("select count(*) from relay.spark_events") == 0


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
    times = ["infinity", "0044-03-15 12:00:00+00 BC", "2026-11-21 23:30:00-02"]
    outbox.publish(host(2), *(event(n, event_ts=time) for n, time in enumerate(times)))
    with relayed(outbox, "inline", session, **lake(tmp_path / "lake")):
        written_all(outbox)
    assert_each_once(outbox, tmp_path / "lake")
    days = {path.name for path in (tmp_path / "lake").iterdir() if path.is_dir()}
    assert days == {"date=__HIVE_DEFAULT_PARTITION__", "date=-0043-03-15", "date=2026-11-22"}


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


def remember(frame: Any, number: int) -> None:
    """A writer of the user's own, which fails as often as it is told to."""
    written.append((number, sorted(row.id for row in frame.select("id").collect())))
    if faults:
        raise faults.pop()


def test_a_batch_is_the_same_however_often_it_is_tried(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    written.clear()
    faults[:] = [OSError("the lake is frozen"), ValueError("x")]
    config = lake(
        tmp_path, callable="tests.integration.test_spark_handler:remember", max_events=200
    )
    outbox.fill(100, events=5)
    with relayed(outbox, "inline", session, **config):
        written_all(outbox)
    first, *others = written
    assert others[:2] == [first, first]
    numbers = [number for number, _ in others[1:]]
    assert numbers == sorted(set(numbers))
    ids = [event_id for _, ids in others[1:] for event_id in ids]
    assert sorted(ids) == sorted(outbox.column("select id::text from projection"))


def test_a_dead_transaction_is_not_written(
    outbox: Outbox, engine: str, session: Session, tmp_path: Path
) -> None:
    for number in (1, -1, 2):
        outbox.publish(host(1), event(number), event(number))
    with relayed(outbox, engine, session, **lake(tmp_path / "lake")):
        written_all(outbox)
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 2
    assert assert_each_once(outbox, tmp_path / "lake").num_rows == 4


def test_a_place_that_cannot_be_written_keeps_the_events_and_holds_up_nobody(
    outbox: Outbox, session: Session, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lake"
    path.write_text("no folder")
    outbox.publish(host(1), event(1))
    config = lake(path)
    with relayed(outbox, "inline", session, **config):
        outbox.wait_handled()
        wait_until(lambda: "handlers.lake: cannot write with Spark yet" in caplog.text)
    assert outbox.value("select events from relay.spark_portions where batch is not null") == 1
    path.unlink()
    with relayed(outbox, "inline", session, **config):
        written_all(outbox)
    assert_each_once(outbox, path)


def test_one_instance_writes_and_another_takes_over(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    settings = outbox.settings(**lake(tmp_path / "lake"))
    outbox.publish(host(1), event(1))
    with relaying(outbox.settings(**lake(tmp_path / "lake", every=3_600)), session):
        outbox.wait_handled()
        second = SparkWriter("lake", settings, session)
        assert not second._look()
        assert outbox.value("select count(*) from relay.spark_portions") == 1
    wait_until(second._look)
    second._disconnect()
    assert_each_once(outbox, tmp_path / "lake")


def test_a_writer_that_comes_too_late_replaces_nothing(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    path = tmp_path / "lake"
    settings = outbox.settings(**lake(path))
    outbox.publish(host(1), event(1), event(2))
    with relaying(outbox.settings(**lake(path, every=3_600)), session):
        outbox.wait_handled()
    spark = session.get()
    batch = spark_batches.take(outbox.conn, settings.group, "lake", 1, 0, 8)
    assert spark is not None
    assert batch is not None
    late = SparkWriter("lake", settings, session)._frame(spark, batch)
    wait_until(SparkWriter("lake", settings, session)._look)
    with pytest.raises(Exception, match="has 0 of 2 events"):
        writer("lake", settings.spark_handlers["lake"])(late, batch.number)
    assert assert_each_once(outbox, path).num_rows == 2


def test_the_rights_that_are_granted_suffice(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    outbox.publish(host(1), event(1))
    with outbox.clerk() as (_, dsn):
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
            wait_until(lambda: len(caplog.records) >= 2)
        faults = sorted(str(getattr(record, "fault", "")) for record in caplog.records)
        for fault, name in zip(faults, (dated, plain), strict=True):
            assert f"handlers.{name}.table: {name} is not partitioned by relay_batch" in fault
        for name in handlers:
            assert [row.id for row in spark.table(name).collect()] == ["1"]
    finally:
        for name in handlers:
            spark.sql(f"drop table {name}")
    assert outbox.value("select sum(events) from relay.spark_portions") == 2


def test_a_target_that_counts_from_the_start_again_replaces_nothing(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    """As another target that shares the path, or this one restored from a backup."""
    path = tmp_path / "lake"
    with relayed(outbox, "inline", session, **lake(path)):
        for _ in range(2):
            outbox.publish(host(1), event(1))
            outbox.wait_handled()
            written_all(outbox)
            outbox.conn.execute("alter sequence relay.spark_batches restart")
    assert assert_each_once(outbox, path).num_rows == 2


def test_a_batch_that_was_begun_keeps_its_buckets(
    outbox: Outbox, session: Session, tmp_path: Path
) -> None:
    path = tmp_path / "lake"
    for number in range(20):
        outbox.publish(host(number), event(1))
    with relaying(outbox.settings(**lake(path, every=3_600)), session):
        outbox.wait_handled()
    settings = outbox.settings(**lake(path, host_buckets=4))
    first = spark_batches.take(outbox.conn, settings.group, "lake", 1, 0, 8)
    while first is not None:
        assert SparkWriter("lake", settings, session)._look()
        first = spark_batches.take(outbox.conn, settings.group, "lake", 1, 0, 8)
    found = assert_each_once(outbox, path)
    buckets = outbox.column(
        "select distinct mod(abs(hashtext(host_id::text)::bigint), 8)::int from outbox_message_t"
    )
    assert set(found["host_bucket"].to_pylist()) == set(buckets)
    assert max(buckets) >= 4


@pytest.mark.chaos
@pytest.mark.rare
@pytest.mark.timeout(900)
def test_each_event_is_written_once_with_relay_killed_while_it_writes(
    outbox: Outbox, tmp_path: Path
) -> None:
    path = tmp_path / "lake"
    outbox.fill(2_000, events=5)
    file = outbox.config_file(
        tmp_path / "relay.yaml",
        **lake(path, max_events=2_000),
        batch={"inline_max_events": 1_000_000_000, "max_events": 1_000},
    )
    for done in range(4):
        with running(file) as service:
            # Sooner and later in the life of a batch, also between its last file and the note that it is written.
            service.wait_said("written with Spark", 180) if done % 2 else None
            wait_until(
                lambda: (
                    outbox.value(
                        "select count(*) from relay.spark_portions where batch is not null"
                    )
                    > 0
                ),
                180,
            )
            if done:
                wait_until(lambda: has_files(path), 180)
            service.kill()
    with running(file) as service:
        wait_until(lambda: outbox.value("select count(*) from projection") == 10_000, 180)
        written_all(outbox)
        assert service.terminate() == 0
    assert assert_each_once(outbox, path).num_rows == 10_000
    outbox.assert_exact()
