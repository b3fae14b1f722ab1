"""Reports of readers of other logs that missed or repeated events, tried on `relay.read` and `relay.advance`.

Each test names the report. What it describes is done here: the reader must neither miss an event nor stand still.
"""

from __future__ import annotations

import uuid
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.outbox import Outbox

_HOST = uuid.uuid4()
_Connection = psycopg.Connection[Any]


def _publish(conn: _Connection, *numbers: int, event_type: str = "order.placed") -> None:
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


def _read(conn: _Connection, most: int = 1000) -> tuple[list[int], str | None]:
    rows = conn.execute("select position, id, payload from relay.read('r', %s)", (most,)).fetchall()
    return [row[2]["number"] for row in rows if row[1]], rows[0][0] if rows else None


def _advance(conn: _Connection, position: str | None) -> None:
    conn.execute("select relay.advance('r', %s)", (position,))


def _drain(conn: _Connection, most: int = 1000) -> list[int]:
    found: list[int] = []
    while (read := _read(conn, most))[1]:
        _advance(conn, read[1])
        found += read[0]
    return found


@pytest.fixture
def log(outbox: Outbox) -> Outbox:
    """An outbox with the reader `r`, which begins now."""
    outbox.reader.execute("select relay.declare_reader('r')")
    return outbox


def test_a_lower_number_that_commits_later_is_read(log: Outbox) -> None:
    """Eventuous/eventuous#222, patchlevel/event-sourcing#615: the next call asked for greater numbers than the last.
    JasperFx/marten#3122: events were skipped after a threshold of time. Here there is none.
    """
    with psycopg.connect(log.publisher_dsn) as first:
        _publish(first, 1)
        _publish(log.publisher, 2)
        assert _drain(log.reader) == [2]
        for _ in range(20):
            assert _drain(log.reader) == []
        first.commit()
    _publish(log.publisher, 3)
    assert _drain(log.reader) == [1, 3]


def test_two_writers_that_commit_in_another_order(log: Outbox) -> None:
    """PaulGrimshaw/dcb-event-store#89, eugene-khyst/postgresql-event-sourcing#2: of two writers one was dropped."""
    with psycopg.connect(log.publisher_dsn) as first, psycopg.connect(log.publisher_dsn) as second:
        for number in range(5):
            _publish(first, number)
            _publish(second, 10 + number)
            second.commit()
            assert _drain(log.reader) == [10 + number]
        first.commit()
    assert _drain(log.reader) == [0, 1, 2, 3, 4]


def test_a_rollback_leaves_no_gap_that_anybody_waits_for(log: Outbox) -> None:
    """JasperFx/marten#5108, #2681: gaps of rolled-back writers stopped the high-water mark for ever."""
    with psycopg.connect(log.publisher_dsn) as idle, psycopg.connect(log.publisher_dsn) as failed:
        # A session that stays idle in its transaction, as that report has.
        idle.execute("select pg_current_xact_id()")
        for number in range(50):
            _publish(failed, number)
            failed.rollback()
        _publish(log.publisher, 1)
        assert _drain(log.reader) == [1]


def test_a_long_import_is_not_passed_over(log: Outbox) -> None:
    """JasperFx/marten#4952, #1629: progress went past events of an import that was still open."""
    with psycopg.connect(log.publisher_dsn) as importing:
        for number in range(100):
            _publish(importing, number)
            if number % 10 == 0:
                _publish(log.publisher, 1000 + number)
                assert _drain(log.reader) == [1000 + number]
        importing.commit()
    assert _drain(log.reader, 7) == list(range(100))


def test_the_sequence_may_jump(log: Outbox) -> None:
    """JasperFx/marten#3503: after gaps in the sequence the daemon stood still."""
    _publish(log.publisher, 1)
    log.conn.execute("select setval('relay.offsets', 1000000000)")
    _publish(log.publisher, 2)
    assert _drain(log.reader) == [1, 2]


def test_a_filter_that_matches_nothing_moves_on(outbox: Outbox) -> None:
    """Eventuous/eventuous#559, kurrent-io/KurrentDB#3320: the checkpoint stayed, and everything was read again."""
    outbox.reader.execute("""select relay.declare_reader('r', '{"event_type": "rare"}')""")
    _publish(outbox.publisher, 1, 2, 3)
    numbers, position = _read(outbox.reader)
    assert numbers == []
    _advance(outbox.reader, position)
    assert _read(outbox.reader) == ([], None), "nothing is looked through again"
    _publish(outbox.publisher, 4, event_type="rare")
    assert _drain(outbox.reader) == [4]


def test_a_filtered_position_is_not_past_what_was_not_looked_at(outbox: Outbox) -> None:
    """kurrent-io/KurrentDB#4990, #4023: an empty page's checkpoint was the end of the log, and an event was missed."""
    outbox.reader.execute("""select relay.declare_reader('r', '{"event_type": "rare"}')""")
    with psycopg.connect(outbox.publisher_dsn) as late:
        _publish(late, 1, event_type="rare")
        _publish(outbox.publisher, 2)
        _, position = _read(outbox.reader)
        late.commit()
    _publish(outbox.publisher, 3, event_type="rare")
    _advance(outbox.reader, position)
    assert _drain(outbox.reader) == [1, 3]


def test_a_reader_that_lost_its_place_cannot_commit(log: Outbox) -> None:
    """akka/alpakka-kafka#755, mailgun/kafka-pixy#62: a former owner's commit, and what is consumed twice after it."""
    _publish(log.publisher, 1)
    _, former = _read(log.reader)
    with psycopg.connect(log.reader_dsn) as successor:
        assert _drain(successor) == [1]
        successor.commit()
    _publish(log.publisher, 2)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="another session"):
        _advance(log.reader, former)
    assert _drain(log.reader) == [2]


def test_only_what_is_advanced_is_done(log: Outbox) -> None:
    """RTBHOUSE/kafka-workers#19, commanded/eventstore#327: a checkpoint beyond what was handled skips the rest."""
    for number in range(5):
        _publish(log.publisher, number)
    numbers, position = _read(log.reader, 2)
    _publish(log.publisher, 5)
    _advance(log.reader, position)
    assert numbers + _drain(log.reader) == [0, 1, 2, 3, 4, 5]


def test_the_subscription_advances_by_what_it_has_seen(log: Outbox) -> None:
    """proteanhq/protean#1088, SQLStreamStore/SQLStreamStore#121: the tail is chased while many write."""
    found: list[int] = []
    writers = [psycopg.connect(log.publisher_dsn) for _ in range(8)]
    try:
        for number in range(200):
            writer = writers[number * 5 % 8]
            _publish(writer, number)
            if number % 3 == 0:
                writers[number * 3 % 8].commit()
            found += _drain(log.reader, 2)
        for writer in writers:
            writer.commit()
    finally:
        for writer in writers:
            writer.close()
    found += _drain(log.reader)
    assert sorted(found) == list(range(200))
