"""Reports of consumers with a stored position: Kafka's groups, subscriptions of EventStoreDB, Marten and Eventuous.

Each test names the report. What it describes is done to `subscribe`: no event may be missed, who has lost a reader may
not move it, and a reader that is in use may not be lost.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from threading import Thread
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

import relay
from relay.client import log
from relay.client.reader import ReaderError, ReaderMoved, ReadTransaction, subscribe
from tests.outbox import Outbox, wait_until

_HOST = uuid.uuid4()
_END = """
    select pg_terminate_backend(pid) from pg_stat_activity
     where application_name = 'relay reader r' and datname = current_database()
"""


def _publish(
    conn: psycopg.Connection[Any], *numbers: int, event_type: str = "order.placed"
) -> None:
    events = [
        {
            "event_type": event_type,
            "aggregate_type": "Order",
            "aggregate_id": "1",
            "payload": {"number": number},
        }
        for number in numbers
    ]
    conn.execute("select relay.publish(%s, null, %s)", (_HOST, Jsonb(events)))


def _numbers(transaction: relay.Transaction) -> list[int]:
    return [event.payload["number"] for event in transaction.events]


def _reading(outbox: Outbox, **options: Any) -> Iterator[ReadTransaction]:
    given: dict[str, Any] = {"poll": 0.05, "start": "beginning", **options}
    return iter(subscribe(outbox.dsn, "r", **given))


def _take(outbox: Outbox, count: int, **options: Any) -> list[list[int]]:
    """Read and do so many transactions in a new process, so to say."""
    found = []
    with closing(_reading(outbox, **options)) as reader:  # type: ignore[type-var]
        for _ in range(count):
            transaction = next(reader)
            found.append(_numbers(transaction))
            transaction.done()
    return found


def _claimed_by(outbox: Outbox) -> list[int]:
    return outbox.column(
        "select pid from pg_locks where locktype = 'advisory' and classid = x'72647263'::int::oid and granted "
        "and database = (select oid from pg_database where datname = current_database())"
    )


def test_who_has_lost_its_session_does_not_act_as_if_it_had_it(outbox: Outbox) -> None:
    """JasperFx/wolverine#2602, timescale/prometheus-postgresql-adapter#89: a session was ended, and two led."""
    _publish(outbox.conn, 1)
    _publish(outbox.conn, 2)
    with closing(_reading(outbox)) as first:  # type: ignore[type-var]
        transaction = next(first)
        outbox.conn.execute(_END.encode())
        with closing(_reading(outbox)) as second:  # type: ignore[type-var]
            taken = next(second)
            with pytest.raises(ReaderMoved):
                transaction.done()
            taken.done()
            assert [_numbers(taken), _numbers(next(second))] == [[1], [2]]


def test_a_late_acknowledgement_moves_nothing(outbox: Outbox) -> None:
    """confluentinc/librdkafka#5604: offsets of partitions that another consumer had meanwhile were committed."""
    for number in range(4):
        _publish(outbox.conn, number)
    with closing(_reading(outbox)) as first:  # type: ignore[type-var]
        late = [next(first) for _ in range(4)]
        outbox.conn.execute(_END.encode())
        assert _take(outbox, 2) == [[0], [1]]
        with pytest.raises(ReaderMoved):
            late[3].done()
    assert _take(outbox, 2) == [[2], [3]]


@pytest.mark.rare
def test_a_handler_that_blocks_keeps_the_reader(outbox: Outbox) -> None:
    """dpkp/kafka-python#2070: while a handler slept, no heartbeat was sent, and the same message came for ever."""
    _publish(outbox.conn, 1)
    with closing(_reading(outbox, lease=4, poll=0.1)) as reader:  # type: ignore[type-var]
        transaction = next(reader)
        (pid,) = _claimed_by(outbox)
        time.sleep(6)
        assert _claimed_by(outbox) == [pid]
        transaction.done()
    assert not outbox.conn.execute("select from relay.read('r')").rowcount


@pytest.mark.rare
def test_an_idle_reader_keeps_its_claim(outbox: Outbox) -> None:
    """dpkp/kafka-python#1787: the heartbeats of an idle consumer failed, and its group was balanced anew."""
    found: list[list[int]] = []
    outbox.conn.execute("select relay.declare_reader('r')")
    thread = Thread(target=lambda: found.extend(_take(outbox, 1, lease=4, poll=1)))
    thread.start()
    wait_until(lambda: bool(_claimed_by(outbox)))
    before = _claimed_by(outbox)
    time.sleep(6)
    assert _claimed_by(outbox) == before
    _publish(outbox.conn, 1)
    thread.join(30)
    assert found == [[1]]


def test_the_position_passes_what_does_not_match(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eventuous/eventuous#559, kurrent-io/KurrentDB#3320: a filter without matches never moved the checkpoint."""
    monkeypatch.setattr(log, "_NOTE_SECONDS", 0.0)
    outbox.conn.execute("select relay.declare_reader('r')")
    _publish(outbox.conn, 1, event_type="other")
    found: list[list[int]] = []
    match = {"event_type": "wanted"}
    thread = Thread(target=lambda: found.extend(_take(outbox, 1, match=match)))
    thread.start()
    wait_until(lambda: not outbox.conn.execute("select from relay.read('r')").rowcount)
    _publish(outbox.conn, 2, event_type="wanted")
    thread.join(30)
    assert found == [[2]]


def test_a_reader_that_waits_survives_several_losses(outbox: Outbox) -> None:
    """Eventuous/eventuous#225, kurrent-io/KurrentDB#1602, #1127: no reconnection, or after the first loss only."""
    outbox.conn.execute("select relay.declare_reader('r')")
    found: list[list[int]] = []
    thread = Thread(target=lambda: found.extend(_take(outbox, 3)))
    thread.start()
    for number in range(3):
        wait_until(lambda: bool(_claimed_by(outbox)))
        outbox.conn.execute(_END.encode())
        _publish(outbox.conn, number)
    thread.join(60)
    assert found == [[0], [1], [2]]


def test_a_reader_that_waits_does_not_expire(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bsm/sarama-cluster#124, zendesk/racecar#419: an idle consumer committed nothing, and its offsets expired."""
    monkeypatch.setattr(log, "_SIGN_SECONDS", 0.0)
    outbox.conn.execute("select relay.declare_reader('r', expires => '5 minutes')")
    thread = Thread(target=_take, args=(outbox, 1), kwargs={"start": None})
    thread.start()
    wait_until(lambda: bool(_claimed_by(outbox)))
    outbox.conn.execute("update relay.readers set noted_at = now() - interval '4 minutes'")
    wait_until(
        lambda: (
            outbox.column(
                "select noted_at > now() - interval '1 minute' from relay.readers where reader = 'r'"
            )
            == [True]
        )
    )
    _publish(outbox.conn, 1)
    thread.join(30)
    assert not thread.is_alive()


def test_an_expired_reader_does_not_begin_anywhere_else(outbox: Outbox) -> None:
    """confluentinc/librdkafka#1442, thomhurst/Dekaf#2259, Parsely/pykafka#504: it began at an end, without a word."""
    outbox.conn.execute("select relay.declare_reader('r', expires => '5 minutes')")
    _publish(outbox.conn, 1)
    outbox.conn.execute("update relay.readers set noted_at = now() - interval '6 minutes'")
    assert outbox.column("select relay.expire_readers()") == ["r"]
    for start in ("now", "beginning", None):
        with pytest.raises(ReaderError, match=r"retention \(expires\).* relay\.seek"):
            next(_reading(outbox, start=start))


def test_what_failed_to_commit_comes_again(outbox: Outbox) -> None:
    """spring-projects/spring-kafka#3703, corda/corda-runtime-os#6181: a commit failed, and the events were skipped."""
    for number in range(3):
        _publish(outbox.conn, number)
    with closing(_reading(outbox)) as reader, psycopg.connect(outbox.dsn) as conn:  # type: ignore[type-var]
        next(reader).done()
        failed = next(reader)
        outbox.conn.execute("select relay.seek('r', 'beginning')")
        with pytest.raises(ReaderMoved), conn.transaction(), failed.commit(conn):
            pass
        assert [_numbers(next(reader)) for _ in range(3)] == [[0], [1], [2]]


def test_stopping_skips_nothing(outbox: Outbox) -> None:
    """JasperFx/marten#1857: the events that were in flight when the daemon stopped were skipped."""
    for number in range(10):
        _publish(outbox.conn, number)
    reader = subscribe(outbox.dsn, "r", start="beginning", poll=0.05)
    found = []
    for transaction in reader:
        found.append(_numbers(transaction))
        if len(found) == 4:
            reader.stop()
            # Its handler has failed: this one is not done.
            break
        transaction.done()
    assert found == [[0], [1], [2], [3]]
    assert _take(outbox, 7) == [[number] for number in range(3, 10)]


def test_what_comes_between_two_runs_is_read(outbox: Outbox) -> None:
    """Eventuous/eventuous#291, JasperFx/marten#3167: a restart skipped the first event; `now` did not begin."""
    _publish(outbox.conn, 1)
    outbox.conn.execute("select relay.declare_reader('r', start => 'now')")
    _publish(outbox.conn, 2)
    assert _take(outbox, 1, start="now") == [[2]]
    _publish(outbox.conn, 3)
    _publish(outbox.conn, 4)
    assert _take(outbox, 2, start="now") == [[3], [4]]


def test_what_is_done_is_durable_before_the_end(outbox: Outbox) -> None:
    """mailgun/kafka-pixy#62: it stopped before the last offset was stored, and another one got the message again."""
    for number in range(3):
        _publish(outbox.conn, number)
    reader = _reading(outbox)
    for _ in range(2):
        next(reader).done()
    reader.close()  # type: ignore[attr-defined]
    assert _take(outbox, 1) == [[2]]


def test_each_transaction_has_its_position(outbox: Outbox) -> None:
    """kurrent-io/KurrentDB#3230: reading could not go on from any event, since none had the next position."""
    for number in range(6):
        _publish(outbox.conn, number)
    with closing(_reading(outbox)) as reader:  # type: ignore[type-var]
        positions = [next(reader).position for _ in range(6)]
    for number, position in enumerate(positions[:-1]):
        other = subscribe(outbox.dsn, f"from {number}", start=position, poll=0.05)
        with closing(iter(other)) as reader:  # type: ignore[type-var]
            assert _numbers(next(reader)) == [number + 1]


def test_what_commits_late_is_read_between_pages(outbox: Outbox) -> None:
    """proteanhq/protean#1088, commanded/eventstore#327: the checkpoint passed events that came while it caught up."""
    with psycopg.connect(outbox.dsn) as late:
        _publish(late, 1000)
        for number in range(300):
            _publish(outbox.conn, number)
        found: list[int] = []
        with closing(_reading(outbox, page=20)) as reader:  # type: ignore[type-var]
            for _ in range(150):
                transaction = next(reader)
                found += _numbers(transaction)
                transaction.done()
            late.commit()
            for number in range(300, 350):
                _publish(outbox.conn, number)
            for _ in range(201):
                transaction = next(reader)
                found += _numbers(transaction)
                transaction.done()
    assert sorted(found) == [*range(350), 1000]
    assert [number for number in found if number < 1000] == list(range(350))


def test_a_cancelled_task_leaves_no_lock(outbox: Outbox) -> None:
    """GreptimeTeam/greptimedb#7670: an election's task was cancelled, and its advisory lock stayed for ever."""

    async def run() -> None:
        async def read() -> None:
            async for _ in subscribe(outbox.dsn, "r", poll=0.05):
                pass

        for _ in range(3):
            task = asyncio.create_task(read())
            await asyncio.sleep(0.05)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    asyncio.run(run())
    wait_until(lambda: not _claimed_by(outbox))
