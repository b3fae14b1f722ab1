"""Reports of users who replay a log into consumers, or rebuild them, tried on queues that are filled from the log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from threading import Thread
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from relay.admin.acts import QueueRebuild
from relay.admin.queues import rebuild
from relay.pipeline.backfill import _Filler
from relay.store import queue_fills
from relay.store.connections import connect
from tests.integration.test_work_queues import enqueued
from tests.outbox import Outbox, event, host, relaying, wait_until

PUBLISH = "select relay.publish(%s, null, %s)"


@pytest.fixture
def filler(outbox: Outbox) -> Iterator[_Filler]:
    with (
        closing(connect(outbox.relay_dsn)) as target,
        closing(_Filler(outbox.settings(), target, lambda: False)) as filler,
    ):
        yield filler


def declare(outbox: Outbox, name: str, start: str = "beginning", **more: Any) -> None:
    arguments = "".join(f', "{key}" => %s' for key in more)
    outbox.worker.execute(
        f"select relay.declare_queue(%s, start => %s{arguments})".encode(),
        [name, start, *more.values()],
    )


def fill(outbox: Outbox, filler: _Filler) -> None:
    """Fill all queues that are to be filled, to their end."""
    for each in queue_fills.open_fills(outbox.conn, "default"):
        assert filler.fill(each)


def publish(outbox: Outbox, *numbers: int) -> None:
    for number in numbers:
        outbox.publish(host(1), event(number))


def test_nothing_is_lost_or_overtakes_when_the_past_becomes_the_present(outbox: Outbox) -> None:
    """bluesky-social/jetstream-legacy#42, sboesebeck/morphium#319: events are lost, or out of order, at the cutover."""
    publish(outbox, *range(50))

    def go_on() -> None:
        with closing(psycopg.connect(outbox.publisher_dsn, autocommit=True)) as conn:
            for number in range(50, 350):
                conn.execute(PUBLISH, (host(1), Jsonb([event(number)])))

    with relaying(outbox.settings()):
        publisher = Thread(target=go_on)
        publisher.start()
        declare(outbox, "mail", key="host")
        publisher.join(120)
        wait_until(lambda: not queue_fills.open_fills(outbox.conn, "default"))
        outbox.wait_handled()
    assert enqueued(outbox, "mail") == list(range(350))


def test_rebuilds_repeat_and_leave_other_queues_alone(outbox: Outbox, filler: _Filler) -> None:
    """JasperFx/marten#577, #3690, nats-io/nats-server#2607: a second rebuild is empty, or empties another consumer."""
    publish(outbox, 1, 2, 3)
    outbox.drain(outbox.settings())
    declare(outbox, "mail")
    declare(outbox, "other")
    fill(outbox, filler)
    ((leased, attempt),) = outbox.worker.execute("select id, attempt from relay.lease('other')")
    for _ in range(2):
        outbox.worker.execute("select relay.rebuild_queue('mail')")
        fill(outbox, filler)
        assert enqueued(outbox, "mail") == enqueued(outbox, "other") == [1, 2, 3]
    assert outbox.worker.value("select relay.complete('other', %s, %s)", (leased, attempt))
    publish(outbox, 4)
    outbox.drain(outbox.settings())
    assert enqueued(outbox, "mail") == [1, 2, 3, 4]
    assert enqueued(outbox, "other") == [2, 3, 4]


def test_a_gap_in_the_numbers_ends_no_fill(outbox: Outbox, filler: _Filler) -> None:
    """JasperFx/marten#624: a rebuild leaves out what comes after a gap of a hundred numbers."""
    publish(outbox, 1)
    outbox.conn.execute("select setval('relay.offsets', 100000)")
    publish(outbox, 2)
    outbox.drain(outbox.settings())
    declare(outbox, "mail")
    declare(outbox, "late", start="500")
    fill(outbox, filler)
    assert enqueued(outbox, "mail") == [1, 2]
    assert enqueued(outbox, "late") == [2]


def test_an_empty_log_and_one_where_nothing_matches_are_filled(
    outbox: Outbox, filler: _Filler
) -> None:
    """JasperFx/marten#2597: a rebuild without an event for the consumer fails."""
    declare(outbox, "empty")
    fill(outbox, filler)
    publish(outbox, 1)
    outbox.drain(outbox.settings())
    declare(outbox, "other", match='{"event_type": "mail.*"}')
    fill(outbox, filler)
    assert enqueued(outbox, "empty") == [1]
    assert not enqueued(outbox, "other")


def test_a_start_that_the_log_no_longer_has_is_its_oldest_event(
    outbox: Outbox, filler: _Filler, caplog: pytest.LogCaptureFixture
) -> None:
    """apache/pinot#19359, spring-projects/spring-kafka#1493: who asks for what is gone gets the end, without a word."""
    publish(outbox, *range(1, 6))
    outbox.drain(outbox.settings())
    outbox.conn.execute("delete from outbox_message_t where c_offset < 3")
    declare(outbox, "mail", start="1")
    planned = rebuild.rehearse(outbox.settings(), "mail", from_="1")
    assert planned.answer == QueueRebuild("at c_offset 3, the oldest event", 0, 0, done=False)
    fill(outbox, filler)
    assert enqueued(outbox, "mail") == [3, 4, 5]
    (warning,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert warning.getMessage() == "the log no longer has the events that a queue is to begin with"


def test_a_crash_before_the_progress_is_stored_fills_nothing_twice(
    outbox: Outbox, filler: _Filler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PacktPublishing/Hands-On-Domain-Driven-Design-with-.NET-Core#17: effects and checkpoint are two commits."""
    publish(outbox, 1, 2, 3)
    outbox.drain(outbox.settings())
    declare(outbox, "mail")
    (asked,) = queue_fills.open_fills(outbox.conn, "default")

    def crash(*_: object) -> None:
        raise psycopg.OperationalError("the connection is lost")

    with monkeypatch.context() as patch:
        patch.setattr(queue_fills, "end", crash)
        with pytest.raises(psycopg.OperationalError):
            filler.fill(asked)
    assert not enqueued(outbox, "mail")
    fill(outbox, filler)
    assert enqueued(outbox, "mail") == [1, 2, 3]


def test_a_transaction_that_was_open_all_the_while_is_not_missed(
    outbox: Outbox, filler: _Filler
) -> None:
    """JasperFx/marten#716: an event whose transaction commits after a later one's is passed for good."""
    with closing(psycopg.connect(outbox.publisher_dsn)) as late:
        late.execute(PUBLISH, (host(1), Jsonb([event(1)])))
        publish(outbox, 2)
        outbox.drain(outbox.settings())
        declare(outbox, "mail")
        declare(outbox, "from", start="2")
        fill(outbox, filler)
        assert enqueued(outbox, "mail") == enqueued(outbox, "from") == [2]
        late.commit()
    outbox.drain(outbox.settings())
    assert enqueued(outbox, "mail") == enqueued(outbox, "from") == [2, 1]
