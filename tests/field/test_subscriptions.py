"""Reports of consumers with a stored position: Kafka's groups, subscriptions of EventStoreDB, Marten and Eventuous.

Each test names the report. What it describes is done to `subscribe`: no event may be missed, who has lost a reader may
not move it, and a reader that is in use may not be lost.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from threading import Thread
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

import relay
from relay.client import claimed_reader
from relay.client.claimed_reader import ClaimedReader
from relay.client.log_pages import LogPage
from relay.client.log_session import ReaderSession
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
    return iter(subscribe(outbox.reader_dsn, "r", **given))


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
    _publish(outbox.publisher, 1)
    _publish(outbox.publisher, 2)
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
        _publish(outbox.publisher, number)
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
    _publish(outbox.publisher, 1)
    with closing(_reading(outbox, lease=4, poll=0.1)) as reader:  # type: ignore[type-var]
        transaction = next(reader)
        (pid,) = _claimed_by(outbox)
        time.sleep(6)
        assert _claimed_by(outbox) == [pid]
        transaction.done()
    assert not outbox.reader.execute("select from relay.read('r')").rowcount


@pytest.mark.rare
def test_an_idle_reader_keeps_its_claim(outbox: Outbox) -> None:
    """dpkp/kafka-python#1787: the heartbeats of an idle consumer failed, and its group was balanced anew."""
    found: list[list[int]] = []
    outbox.reader.execute("select relay.declare_reader('r')")
    thread = Thread(target=lambda: found.extend(_take(outbox, 1, lease=4, poll=1)))
    thread.start()
    wait_until(lambda: bool(_claimed_by(outbox)))
    before = _claimed_by(outbox)
    time.sleep(6)
    assert _claimed_by(outbox) == before
    _publish(outbox.publisher, 1)
    thread.join(30)
    assert found == [[1]]


def test_an_idle_reader_does_not_read_because_others_commit(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eventuous/eventuous#224, Windshiftapp/core#274: who waited for events took the processor of a busy server."""
    asked: list[str] = []
    send, value = ReaderSession.send, ReaderSession.value

    def sent(session: ReaderSession, statement: str, parameters: tuple[str, ...]) -> None:
        asked.append("read")
        send(session, statement, parameters)

    def got(session: ReaderSession, statement: str, parameters: tuple[Any, ...] = ()) -> str | None:
        if "log_is_quiet" in statement:
            asked.append("look")
        return value(session, statement, parameters)

    monkeypatch.setattr(ReaderSession, "send", sent)
    monkeypatch.setattr(ReaderSession, "value", got)
    monkeypatch.setattr(claimed_reader, "_QUIET_SECONDS", 0.0)
    outbox.reader.execute("select relay.declare_reader('r')")
    found: list[list[int]] = []
    thread = Thread(target=lambda: found.extend(_take(outbox, 1, poll=0.02)))
    thread.start()
    wait_until(lambda: asked[-2:] == ["look", "look"])
    reads = asked.count("read")
    for _ in range(5):
        outbox.conn.execute("select pg_current_xact_id()")
        looks = asked.count("look")
        wait_until(lambda looks=looks: asked.count("look") > looks + 1)  # type: ignore[misc]
    assert asked.count("read") == reads
    _publish(outbox.publisher, 1)
    thread.join(30)
    assert found == [[1]]


def test_what_commits_late_ends_the_quiet(outbox: Outbox) -> None:
    """JasperFx/marten#716: an event whose transaction had begun before what was read was passed over for good."""
    outbox.reader.execute("select relay.declare_reader('r')")
    number = outbox.value("select (relay.log_reader('r', relay.this_call())).number")

    def is_quiet(since: str) -> bool:
        return bool(outbox.value("select relay.log_is_quiet(%s)", (f"{number}/{since}",)))

    def present() -> str:
        return str(outbox.value("select pg_current_snapshot()::text"))

    with psycopg.connect(outbox.publisher_dsn) as late:
        _publish(late, 1)
        _publish(outbox.publisher, 2)
        before = present()
        assert is_quiet(before)
        _publish(outbox.publisher, *range(100))
        assert not is_quiet(before)
        # As many as it looks at have committed since `late` began: it does not say that there is no other.
        assert not is_quiet(present())
        late.rollback()
        assert is_quiet(present())
        _publish(late, 1)
        before = present()
        assert is_quiet(before)
        late.commit()
        assert not is_quiet(before)


def _recorded(monkeypatch: pytest.MonkeyPatch, method: str) -> list[Any]:
    """Have a method without arguments of every reader recorded; returns its results, which grow."""
    results: list[Any] = []
    original = getattr(ClaimedReader, method)

    def recorded(reader: ClaimedReader) -> Any:
        results.append(original(reader))
        return results[-1]

    monkeypatch.setattr(ClaimedReader, method, recorded)
    return results


def test_a_reader_that_waits_notices_that_it_was_moved(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """apache/pulsar#139: a cursor could be moved only while no consumer was connected."""
    monkeypatch.setattr(claimed_reader, "_QUIET_SECONDS", 0.0)
    quiet = _recorded(monkeypatch, "_is_quiet")
    found: list[list[int]] = []
    ended: list[ReaderError] = []

    def read() -> None:
        try:
            for transaction in _reading(outbox, poll=0.02):
                found.append(_numbers(transaction))
                transaction.done()
        except ReaderError as error:
            ended.append(error)

    _publish(outbox.publisher, 1)
    thread = Thread(target=read, daemon=True)
    thread.start()
    for count in (1, 2):
        wait_until(lambda count=count: len(found) == count)  # type: ignore[misc]
        quiet.clear()
        wait_until(lambda: quiet[-2:] == [True, True])
        if count == 1:
            outbox.reader.execute("select relay.seek('r', 'beginning')")
    outbox.reader.execute("select relay.drop_reader('r')")
    thread.join(60)
    assert found == [[1], [1]]
    assert "there is no reader 'r'" in str(ended)


def test_the_position_passes_what_does_not_match(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eventuous/eventuous#559, kurrent-io/KurrentDB#3320: a filter without matches never moved the checkpoint."""
    monkeypatch.setattr(claimed_reader, "_NOTE_SECONDS", 0.0)
    outbox.reader.execute("select relay.declare_reader('r')")
    _publish(outbox.publisher, 1, event_type="other")
    found: list[list[int]] = []
    match = {"event_type": "wanted"}
    thread = Thread(target=lambda: found.extend(_take(outbox, 1, match=match)))
    thread.start()
    wait_until(lambda: not outbox.reader.execute("select from relay.read('r')").rowcount)
    _publish(outbox.publisher, 2, event_type="wanted")
    thread.join(30)
    assert found == [[2]]


def test_the_position_passes_what_does_not_match_in_the_quiet_after_it(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eventuous/eventuous#559: the checkpoint stayed before the last events without a match, while no others came."""
    monkeypatch.setattr(claimed_reader, "_NOTE_SECONDS", 3600.0)
    passed = _recorded(monkeypatch, "_pass")
    outbox.reader.execute("select relay.declare_reader('r')")
    _publish(outbox.publisher, 1, event_type="other")
    found: list[list[int]] = []
    match = {"event_type": "wanted"}
    thread = Thread(target=lambda: found.extend(_take(outbox, 1, match=match)))
    thread.start()
    wait_until(lambda: bool(passed))
    assert outbox.reader.execute("select from relay.read('r')").rowcount
    monkeypatch.setattr(claimed_reader, "_NOTE_SECONDS", 0.0)
    wait_until(lambda: not outbox.reader.execute("select from relay.read('r')").rowcount)
    _publish(outbox.publisher, 2, event_type="wanted")
    thread.join(30)
    assert found == [[2]]


def test_a_reader_that_waits_survives_several_losses(outbox: Outbox) -> None:
    """Eventuous/eventuous#225, kurrent-io/KurrentDB#1602, #1127: no reconnection, or after the first loss only."""
    outbox.reader.execute("select relay.declare_reader('r')")
    found: list[list[int]] = []
    thread = Thread(target=lambda: found.extend(_take(outbox, 3)))
    thread.start()
    for number in range(3):
        wait_until(lambda: bool(_claimed_by(outbox)))
        outbox.conn.execute(_END.encode())
        _publish(outbox.publisher, number)
    thread.join(60)
    assert found == [[0], [1], [2]]


def test_a_reader_that_waits_does_not_expire(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bsm/sarama-cluster#124, zendesk/racecar#419: an idle consumer committed nothing, and its offsets expired."""
    monkeypatch.setattr(claimed_reader, "_SIGN_SECONDS", 0.0)
    outbox.reader.execute("select relay.declare_reader('r', expires => '5 minutes')")
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
    _publish(outbox.publisher, 1)
    thread.join(30)
    assert not thread.is_alive()


def test_an_expired_reader_does_not_begin_anywhere_else(outbox: Outbox) -> None:
    """confluentinc/librdkafka#1442, thomhurst/Dekaf#2259, Parsely/pykafka#504: it began at an end, without a word."""
    outbox.reader.execute("select relay.declare_reader('r', expires => '5 minutes')")
    _publish(outbox.publisher, 1)
    outbox.conn.execute("update relay.readers set noted_at = now() - interval '6 minutes'")
    assert outbox.column("select relay.expire_readers()") == ["r"]
    for start in ("now", "beginning", None):
        with pytest.raises(ReaderError, match=r"retention \(expires\).* relay\.seek"):
            next(_reading(outbox, start=start))


def test_what_failed_to_commit_comes_again(outbox: Outbox) -> None:
    """spring-projects/spring-kafka#3703, corda/corda-runtime-os#6181: a commit failed, and the events were skipped."""
    for number in range(3):
        _publish(outbox.publisher, number)
    with closing(_reading(outbox)) as reader, psycopg.connect(outbox.reader_dsn) as conn:  # type: ignore[type-var]
        next(reader).done()
        failed = next(reader)
        outbox.reader.execute("select relay.seek('r', 'beginning')")
        with pytest.raises(ReaderMoved), conn.transaction(), failed.commit(conn):
            pass
        assert [_numbers(next(reader)) for _ in range(3)] == [[0], [1], [2]]


def test_stopping_skips_nothing(outbox: Outbox) -> None:
    """JasperFx/marten#1857: the events that were in flight when the daemon stopped were skipped."""
    for number in range(10):
        _publish(outbox.publisher, number)
    reader = subscribe(outbox.reader_dsn, "r", start="beginning", poll=0.05)
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
    _publish(outbox.publisher, 1)
    outbox.reader.execute("select relay.declare_reader('r', start => 'now')")
    _publish(outbox.publisher, 2)
    assert _take(outbox, 1, start="now") == [[2]]
    _publish(outbox.publisher, 3)
    _publish(outbox.publisher, 4)
    assert _take(outbox, 2, start="now") == [[3], [4]]


def test_what_is_done_is_durable_before_the_end(outbox: Outbox) -> None:
    """mailgun/kafka-pixy#62: it stopped before the last offset was stored, and another one got the message again."""
    for number in range(3):
        _publish(outbox.publisher, number)
    reader = _reading(outbox)
    for _ in range(2):
        next(reader).done()
    reader.close()  # type: ignore[attr-defined]
    assert _take(outbox, 1) == [[2]]


def test_each_transaction_has_its_position(outbox: Outbox) -> None:
    """kurrent-io/KurrentDB#3230: reading could not go on from any event, since none had the next position."""
    for number in range(6):
        _publish(outbox.publisher, number)
    with closing(_reading(outbox)) as reader:  # type: ignore[type-var]
        positions = [next(reader).position for _ in range(6)]
    for number, position in enumerate(positions[:-1]):
        other = subscribe(outbox.reader_dsn, f"from {number}", start=position, poll=0.05)
        with closing(iter(other)) as reader:  # type: ignore[type-var]
            assert _numbers(next(reader)) == [number + 1]


def test_what_commits_late_is_read_between_pages(outbox: Outbox) -> None:
    """proteanhq/protean#1088, commanded/eventstore#327: the checkpoint passed events that came while it caught up."""
    with psycopg.connect(outbox.publisher_dsn) as late:
        _publish(late, 1000)
        for number in range(300):
            _publish(outbox.publisher, number)
        found: list[int] = []
        with closing(_reading(outbox, page=20)) as reader:  # type: ignore[type-var]
            for _ in range(150):
                transaction = next(reader)
                found += _numbers(transaction)
                transaction.done()
            late.commit()
            for number in range(300, 350):
                _publish(outbox.publisher, number)
            for _ in range(201):
                transaction = next(reader)
                found += _numbers(transaction)
                transaction.done()
    assert sorted(found) == [*range(350), 1000]
    assert [number for number in found if number < 1000] == list(range(350))


def _wait_for_page(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Returns a function that waits until so many pages have been read, also ahead."""
    pages: list[int] = []

    class Noted(LogPage):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            pages.append(self.number)

    monkeypatch.setattr(claimed_reader, "LogPage", Noted)
    return lambda count: wait_until(lambda: len(pages) >= count)


def test_what_was_fetched_ahead_is_not_yielded_after_a_seek(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """thomhurst/Dekaf#1722, fsprojects/pulsar-client-dotnet#348, tulios/kafkajs#367: messages of before the seek."""
    wait_for_page = _wait_for_page(monkeypatch)
    for number in range(8):
        _publish(outbox.publisher, number)
    with closing(_reading(outbox, page=2)) as reader:  # type: ignore[type-var]
        first = next(reader)
        position = first.position
        first.done()
        second = next(reader)
        wait_for_page(2)
        outbox.reader.execute("select relay.seek('r', %s)", (position,))
        with pytest.raises(ReaderMoved):
            second.done()
        assert [_numbers(next(reader)) for _ in range(7)] == [[number] for number in range(1, 8)]


def test_what_was_fetched_ahead_is_not_yielded_after_another_has_read_it(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """segmentio/kafka-go#1398: after a rebalance, a reader's queue had messages that another one had committed."""
    wait_for_page = _wait_for_page(monkeypatch)
    for number in range(8):
        _publish(outbox.publisher, number)
    with closing(_reading(outbox, page=2)) as first:  # type: ignore[type-var]
        transaction = next(first)
        wait_for_page(2)
        outbox.conn.execute(_END.encode())
        assert _take(outbox, 6) == [[number] for number in range(6)]
        with pytest.raises(ReaderMoved):
            transaction.done()
        assert [_numbers(next(first)) for _ in range(2)] == [[6], [7]]


def test_an_acknowledgement_of_before_a_move_moves_nothing(outbox: Outbox) -> None:
    """kafka4beam/brod#52: acknowledgements from before a move counted for what was read after it."""
    for number in range(6):
        _publish(outbox.publisher, number)
    with closing(_reading(outbox)) as reader:  # type: ignore[type-var]
        late = [next(reader) for _ in range(4)]
        late[0].done()
        outbox.reader.execute("select relay.seek('r', 'beginning')")
        with pytest.raises(ReaderMoved):
            late[1].done()
        again = [next(reader) for _ in range(2)]
        for each in late:
            with pytest.raises(ReaderMoved):
                each.done()
        again[0].done()
    assert _take(outbox, 1) == [[1]]


def test_a_handler_that_fails_ends_the_iteration(outbox: Outbox) -> None:
    """Eventuous/eventuous#407, #25: the subscription stood still without a word, or its checkpoint passed the event."""
    for number in range(3):
        _publish(outbox.publisher, number)

    async def run() -> list[list[int]]:
        found = []
        async for transaction in subscribe(outbox.reader_dsn, "r", start="beginning", poll=0.05):
            found.append(_numbers(transaction))
            if found[-1] == [1]:
                raise ZeroDivisionError
            await transaction.done()
        return found

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            asyncio.run(run())
    assert _take(outbox, 2) == [[1], [2]]


def test_locks_of_the_application_are_others(outbox: Outbox) -> None:
    """commanded/eventstore#166: an advisory lock of the application had the number of a subscription's."""
    outbox.reader.execute("select relay.declare_reader('r', start => 'beginning')")
    _publish(outbox.publisher, 1)
    outbox.conn.execute(
        "select pg_advisory_lock(id), pg_advisory_lock((x'72647263'::bigint << 32) | id) from relay.log_readers"
    )
    assert _take(outbox, 1) == [[1]]
    outbox.conn.execute("select pg_advisory_unlock_all()")


def test_no_transaction_is_open_while_a_handler_works(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """debezium/debezium#1713, #3224: a connector that did nothing held a transaction open."""
    wait_for_page = _wait_for_page(monkeypatch)
    for number in range(4):
        _publish(outbox.publisher, number)
    open_since = (
        "select 1 from pg_stat_activity where application_name = 'relay reader r' "
        "and datname = current_database() and (xact_start is not null or backend_xmin is not null)"
    )
    with closing(_reading(outbox, page=2)) as reader:  # type: ignore[type-var]
        next(reader)
        wait_for_page(2)
        wait_until(lambda: not outbox.column(open_since))


def test_the_end_of_the_log_is_not_its_beginning(outbox: Outbox) -> None:
    """gravitational/teleport#15160: a reader that had come to the end began again with the first event."""
    for number in range(3):
        _publish(outbox.publisher, number)
    found: list[list[int]] = []
    reader = subscribe(outbox.reader_dsn, "r", start="beginning", poll=0.01)
    thread = Thread(target=lambda: found.extend(_numbers(each) for each in reader))
    thread.start()
    wait_until(lambda: len(found) == 3)
    _publish(outbox.publisher, 3)
    wait_until(lambda: len(found) >= 4)
    reader.stop()
    thread.join(30)
    assert found == [[0], [1], [2], [3]]


def test_what_is_in_flight_at_a_loss_comes_again(outbox: Outbox) -> None:
    """kurrent-io/KurrentDB#1301: a client was disconnected while it worked, and the checkpoint was after its events."""
    for number in range(5):
        _publish(outbox.publisher, number)
    reader = _reading(outbox)
    next(reader).done()
    for _ in range(3):
        next(reader)
    outbox.conn.execute(_END.encode())
    reader.close()  # type: ignore[attr-defined]
    assert _take(outbox, 4) == [[1], [2], [3], [4]]


def test_a_start_counts_once(outbox: Outbox) -> None:
    """kurrent-io/KurrentDB#1081: a subscription that starts from the beginning did so after each restart."""
    for number in range(3):
        _publish(outbox.publisher, number)
    for number in range(3):
        assert _take(outbox, 1, start="beginning") == [[number]]


def test_nothing_comes_after_a_stop(outbox: Outbox) -> None:
    """kurrent-io/KurrentDB#929: a subscription that was dropped went on with the events that it had fetched."""
    for number in range(5):
        _publish(outbox.publisher, number)
    reader = subscribe(outbox.reader_dsn, "r", start="beginning", poll=0.05)
    found = []
    for transaction in reader:
        found.append(_numbers(transaction))
        reader.stop()
    assert found == [[0]]
    assert list(reader) == []


def test_events_that_were_deleted_stop_nobody(outbox: Outbox) -> None:
    """kurrent-io/KurrentDB#3449: a subscription whose next events had been scavenged did not go on."""
    for number in range(6):
        _publish(outbox.publisher, number)
    with closing(_reading(outbox)) as reader:  # type: ignore[type-var]
        for _ in range(2):
            next(reader).done()
    outbox.conn.execute(
        "delete from outbox_message_t where (payload ->> 'number')::int between 1 and 3"
    )
    assert _take(outbox, 2) == [[4], [5]]


def test_a_rare_event_in_a_large_backlog_is_found(outbox: Outbox) -> None:
    """JasperFx/marten#3705: between matching events lay so many others that the query timed out."""
    _publish(outbox.publisher, 1, event_type="rare")
    outbox.fill(2_000, events=10)
    _publish(outbox.publisher, 2, event_type="rare")
    assert _take(outbox, 2, match={"event_type": "rare"}) == [[1], [2]]


def test_a_second_iteration_begins_with_what_was_not_done(outbox: Outbox) -> None:
    """apache/pinot#18669: a batch that was fetched and not processed was skipped by the next call."""
    for number in range(5):
        _publish(outbox.publisher, number)
    reader = subscribe(outbox.reader_dsn, "r", start="beginning", poll=0.05)
    for expected in ([0], [1], [2]):
        for transaction in reader:
            assert _numbers(transaction) == expected
            transaction.done()
            break


def test_a_task_that_is_cancelled_at_once_leaves_no_connection(outbox: Outbox) -> None:
    """MagicStack/asyncpg#464, sqlalchemy/sqlalchemy#12077: cancelled while it connected, and the connection stayed."""

    async def run() -> None:
        async def read() -> None:
            async for _ in subscribe(outbox.reader_dsn, "r", poll=0.05):
                pass

        for turns in range(6):
            task = asyncio.create_task(read())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    asyncio.run(run())
    found = (
        "select 1 from pg_stat_activity where application_name = 'relay reader r' "
        "and datname = current_database()"
    )
    wait_until(lambda: not outbox.column(found))
