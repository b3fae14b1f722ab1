"""Spark sinks keep to `deliver_at`: no event is written before its time, and each is written once."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from relay.config.settings import Settings
from relay.spark import frames
from relay.spark.session import Session
from relay.spark.sink_worker import SparkWorker
from relay.store.positions.sinks import SinkMoved
from relay.store.positions.spark_batches import OpenBatch
from tests.outbox import Outbox, event, host


def settings(outbox: Outbox, path: Path, **more: Any) -> Settings:
    lake = {"type": "spark", "path": str(path), "format": "json", "every": 0.01, **more}
    return outbox.settings(handlers={"lake": lake}, routes=[{"handlers": ["lake"]}])


def amounts(path: Path) -> list[int]:
    """The amounts of all events in the files, in order of size."""
    lines = (line for each in path.rglob("part-*.json") for line in each.read_text().splitlines())
    return sorted(json.loads(json.loads(line)["payload"])["amount"] for line in lines)


def later() -> str:
    return (datetime.now(UTC) + timedelta(hours=1)).isoformat()


def work(worker: SparkWorker, times: int) -> None:
    for _ in range(times):
        worker.work()


def claimed(configured: Settings, session: Session) -> SparkWorker:
    """A worker that has its sink, without a thread."""
    worker = SparkWorker("lake", configured, session)
    assert worker._claim.take()
    return worker


def test_an_event_is_not_written_before_its_time(
    outbox: Outbox, spark_session: Session, tmp_path: Path
) -> None:
    configured = settings(outbox, tmp_path / "lake")
    worker = claimed(configured, spark_session)
    worker.work()
    outbox.publish(host(1), event(1))
    outbox.publish(host(1), event(2, deliver_at=later()), event(3))
    outbox.publish(host(1), event(4, deliver_at="2020-01-01T00:00:00Z"))
    with outbox.conn.transaction():
        # Two business transactions of one commit, of which only the first one waits.
        outbox.publish(host(1), event(5, deliver_at="infinity"))
        outbox.publish(host(2), event(6))
    work(worker, 6)
    assert amounts(tmp_path / "lake") == [1, 4, 6]
    assert outbox.value("select count(*) from relay.deferred where retry_at > now()") == 2
    outbox.conn.execute("update relay.deferred set retry_at = now()")
    work(worker, 3)
    assert amounts(tmp_path / "lake") == [1, 2, 3, 4, 5, 6]
    assert outbox.value("select count(*) from relay.deferred") == 0
    worker._disconnect()


def test_a_batch_of_nothing_but_scheduled_events_is_none(
    outbox: Outbox, spark_session: Session, tmp_path: Path
) -> None:
    worker = claimed(settings(outbox, tmp_path / "lake"), spark_session)
    worker.work()
    for number in range(3):
        outbox.publish(host(1), event(number, deliver_at=later()))
    work(worker, 4)
    assert outbox.value("select count(*) from relay.deferred") == 3
    assert outbox.column("select 1 from relay.spark_batches") == []
    assert outbox.value("select state from relay.sinks") == "caught up"
    worker._disconnect()


def test_a_sink_that_is_moved_in_a_batch_defers_nothing_twice(
    outbox: Outbox, spark_session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = claimed(settings(outbox, tmp_path / "lake"), spark_session)
    worker.work()
    outbox.publish(host(1), event(1), event(2))
    outbox.publish(host(1), event(3, deliver_at=later()))
    finish = worker._finish

    def moved(*written: Any) -> None:
        outbox.conn.execute("update relay.sink_claims set epoch = epoch + 1")
        finish(*written)

    monkeypatch.setattr(worker, "_finish", moved)
    with pytest.raises(SinkMoved):
        work(worker, 5)
    monkeypatch.undo()
    assert outbox.value("select count(*) from relay.deferred") == 0
    work(worker, 5)
    assert outbox.value("select count(*) from relay.deferred") == 1
    worker._disconnect()


def test_an_outbox_without_the_column_has_no_schedule(
    outbox: Outbox, spark_session: Session, tmp_path: Path
) -> None:
    worker = claimed(settings(outbox, tmp_path / "lake"), spark_session)
    worker.work()
    outbox.conn.execute("alter table outbox_message_t drop column deliver_at cascade")
    outbox.conn.execute(
        """
        insert into outbox_message_t (id, host_id, event_type, aggregate_type, aggregate_id, payload)
        values (gen_random_uuid(), %s, 'order.placed', 'Order', '1', %s)
        """,
        (host(1), Jsonb({"amount": 7})),
    )
    work(worker, 4)
    assert amounts(tmp_path / "lake") == [7]
    worker._disconnect()


def requested(outbox: Outbox, transaction: Any, host_id: Any = None) -> str:
    """Cancel the only event of a business transaction; returns its id."""
    (number,) = outbox.column(
        "select id::text from outbox_message_t where transaction_id = %s", (transaction,)
    )
    outbox.conn.execute("select relay.cancel(%s, %s)", (number, host_id))
    return str(number)


def with_nobody_who_writes(outbox: Outbox, path: Path, written: list[str]) -> SparkWorker:
    """A worker whose batches are noted instead of written with Spark, by the ids of their events."""
    worker = claimed(settings(outbox, path), Session(outbox.settings().spark))

    def write(batch: OpenBatch) -> None:
        contents = batch.contents
        ids = """
            select id::text from outbox_message_t
             where pg_visible_in_snapshot(c_xid, %s) and not pg_visible_in_snapshot(c_xid, %s)
               and c_xid::text::bigint <> all (%s) and %s > 0
        """
        given = (str(contents.after), str(contents.before), list(contents.left_out), contents.rows)
        written.extend([*outbox.column(ids, given), *frames.packed_ids(contents.data)])
        worker._finish(batch)

    worker._write = write  # type: ignore[method-assign]
    worker.work()
    return worker


def test_what_is_cancelled_before_it_is_read_is_not_written(outbox: Outbox, tmp_path: Path) -> None:
    """Its time had passed when the sink read it: it was written, although the caller was told that it is stopped."""
    written: list[str] = []
    worker = with_nobody_who_writes(outbox, tmp_path / "lake", written)
    past = "2020-01-01T00:00:00Z"
    requested(outbox, outbox.publish(host(1), event(1, deliver_at=past)))
    requested(outbox, outbox.publish(host(1), event(2, deliver_at=later())))
    # That of another host is not meant, nor one that is not scheduled.
    kept = [
        requested(outbox, outbox.publish(host(1), event(3, deliver_at=past)), str(host(2))),
        requested(outbox, outbox.publish(host(1), event(4))),
    ]
    work(worker, 8)
    outbox.conn.execute("update relay.deferred set retry_at = now()")
    work(worker, 4)
    assert sorted(written) == sorted(kept)
    assert outbox.value("select count(*) from relay.deferred") == 0
    stopped = (
        "select count(*) from relay.cancellations where sink = 'lake' and outcome = 'cancelled'"
    )
    assert outbox.value(stopped) == 2
    worker._disconnect()


def test_what_is_cancelled_while_it_is_written_is_told_of(outbox: Outbox, tmp_path: Path) -> None:
    written: list[str] = []
    worker = with_nobody_who_writes(outbox, tmp_path / "lake", written)
    transaction = outbox.publish(host(1), event(1, deliver_at=later()))
    work(worker, 4)
    outbox.conn.execute("update relay.deferred set retry_at = now()")
    finish = worker._finish

    def cancelled(batch: OpenBatch) -> None:
        requested(outbox, transaction)
        finish(batch)

    worker._finish = cancelled  # type: ignore[assignment, method-assign]
    work(worker, 4)
    assert len(written) == 1
    outcomes = "select outcome from relay.cancellations where sink = 'lake'"
    assert outbox.column(outcomes) == ["delivered"]
    worker._disconnect()
