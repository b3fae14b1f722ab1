"""Reports of users of job queues on unique jobs, debouncing, progress and results, tried on relay's queues."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from relay.client.enqueueing import enqueue, enqueue_async
from relay.client.errors import EventInvalid, NotInTransaction
from relay.client.worker import LeasedMessage, LeaseLost, Message, Queue, Worker
from tests.client_sessions import DRIVERS
from tests.outbox import Outbox, wait_until
from tests.workers import DATABASES, working

LATER = datetime(2999, 1, 1, tzinfo=UTC)


def declare(outbox: Outbox, **more: Any) -> None:
    """Declare the queue `mail` of direct messages."""
    statement, text = Queue(name="mail", match=None, **more).declaration()
    outbox.worker.execute(statement.with_parameter("%s").encode(), (text,))


@contextmanager
def session(outbox: Outbox) -> Iterator[psycopg.Connection[Any]]:
    """A transaction of a worker, which the block ends."""
    with psycopg.connect(outbox.worker_dsn) as conn:
        yield conn


def put(outbox: Outbox, payload: Any, **options: Any) -> int:
    """Enqueue in a transaction of its own."""
    with session(outbox) as conn:
        return enqueue(conn, "mail", payload, **{"unique_key": "k", **options})


def items(outbox: Outbox) -> list[tuple[str, Any]]:
    """State and payload of each message, in order."""
    return outbox.conn.execute(
        "select i.state, m.payload from relay.queue_items as i join relay.queue_messages as m using (id) order by id"
    ).fetchall()


@pytest.mark.parametrize("mode", ["skip", "replace", "move"])
def test_the_first_message_of_a_key_is_put_in_by_any_mode(outbox: Outbox, mode: str) -> None:
    """oban-bg/oban#834: replace failed where nothing was there to be replaced."""
    declare(outbox)
    put(outbox, 1, on_duplicate=mode, deliver_at=LATER)
    assert items(outbox) == [("scheduled", 1)]


def test_a_second_message_is_left_out_and_both_callers_get_one_id(outbox: Outbox) -> None:
    """procrastinate-org/procrastinate#1432: the second one aborted the caller's transaction with a unique violation."""
    declare(outbox)
    first = put(outbox, 1)
    with session(outbox) as conn:
        assert enqueue(conn, "mail", 2, unique_key="k") == first
        conn.execute("select")
        enqueue(conn, "mail", 3, unique_key="other")
    assert items(outbox) == [("enqueued", 1), ("enqueued", 3)]


def test_the_latest_contents_count_where_they_are_to_replace(outbox: Outbox) -> None:
    """timgit/pg-boss#309 and #548: the newer version of an article was dropped. graphile/worker#312: so is its type."""
    declare(outbox)
    first = put(outbox, 1, event_id="a")
    assert put(outbox, 2, on_duplicate="replace", event_type="article", event_id="b") == first
    assert outbox.conn.execute(
        "select payload, event_type, event_id from relay.queue_messages"
    ).fetchall() == [(2, "article", "b")]


def test_a_burst_moves_one_message_each_time_further(outbox: Outbox) -> None:
    """timgit/pg-boss#414 and #353: a debounced job ran twice, or was dropped, instead of once after the burst."""
    declare(outbox)
    times = [LATER + timedelta(minutes=10 * number) for number in range(4)]
    assert len({put(outbox, 1, on_duplicate="move", deliver_at=at) for at in times}) == 1
    assert outbox.conn.execute(
        "select payload, available_at from relay.queue_messages"
    ).fetchall() == [(1, times[-1])]


@pytest.mark.parametrize("taken", ["take", "claim", "lease"])
def test_a_message_that_is_worked_is_enough_and_is_never_changed(
    outbox: Outbox, taken: str
) -> None:
    """oban-bg/oban#635: arguments were replaced while the job ran with the former ones. graphile/worker#303: then any
    number of further jobs came in beside the one that runs."""
    declare(outbox)
    first = put(outbox, 1)
    with psycopg.connect(outbox.worker_dsn, autocommit=taken == "lease") as worker:
        worker.execute(f"select from relay.{taken}('mail')".encode())
        assert put(outbox, 2) == first
        second = put(outbox, 3, on_duplicate="replace")
        assert second != first
        assert put(outbox, 4, on_duplicate="replace") == second
        if taken == "take":
            worker.commit()
        else:
            done = worker.execute("select relay.complete('mail', %s, 1)", (first,)).fetchone()
            assert done == (True,)
    assert items(outbox) == [("enqueued", 4)]
    with session(outbox) as worker:
        assert worker.execute("select payload from relay.take('mail', 10)").fetchall() == [(4,)]


@pytest.mark.parametrize("ordered", [False, True])
def test_one_that_is_put_in_beside_a_worker_is_taken_beside_it_unless_a_key_orders_them(
    outbox: Outbox, ordered: bool
) -> None:
    """procrastinate-org/procrastinate#1050 and vercel/workflow#3657: two of one key ran side by side, unexpectedly."""
    declare(outbox, key="payload.thing" if ordered else None)
    put(outbox, 1, host_id=7, key="thing")
    with session(outbox) as worker:
        worker.execute("select from relay.claim('mail')")
        put(outbox, 2, host_id=7, key="thing", on_duplicate="replace")
        beside = outbox.worker.column("select payload from relay.take('mail')")
    assert beside == ([] if ordered else [2])


def test_a_lease_that_is_over_may_still_be_completed(outbox: Outbox) -> None:
    """So its message is not replaced: its worker has done the former contents alone."""
    declare(outbox)
    first = put(outbox, 1)
    outbox.worker.execute("select from relay.lease('mail', 1, '0 s')")
    assert put(outbox, 2, on_duplicate="replace") != first
    assert outbox.worker.value("select relay.complete('mail', %s, 1)", (first,))
    assert items(outbox) == [("enqueued", 2)]


def test_one_that_fails_waits_beside_the_next_of_its_key(outbox: Outbox) -> None:
    """timgit/pg-boss#535 and procrastinate-org/procrastinate#1446: the retry violated the index, and no worker went on.
    riverqueue/river#619: it was discarded."""
    declare(outbox, attempts=2, backoff=0.001, max_backoff=0.001)
    first = put(outbox, 1)
    outbox.worker.execute("select from relay.lease('mail')")
    put(outbox, 2, on_duplicate="replace")
    assert outbox.worker.value("select relay.retry('mail', %s, 1, '0 s')", (first,)) == "retry"
    with session(outbox) as worker:
        taken = worker.execute("select payload from relay.take('mail', 10) order by id").fetchall()
    assert taken == [(1,), (2,)]
    # A dead one is not enough, and is still unique when it comes back.
    dead = put(outbox, 3)
    outbox.worker.execute("select from relay.lease('mail')")
    assert outbox.worker.value("select relay.fail('mail', %s, 1)", (dead,))
    outbox.worker.execute("select relay.requeue('mail')")
    assert put(outbox, 4) == outbox.value("select max(id) from relay.queue_messages")
    assert items(outbox) == [("enqueued", 3)]


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_two_at_once_take_turns(outbox: Outbox, ends: str) -> None:
    """oban-bg/oban#1087: four transactions that were rolled back kept the fifth from inserting its job."""
    declare(outbox)
    with psycopg.connect(outbox.worker_dsn) as first:
        enqueue(first, "mail", 1, unique_key="k")
        thread = threading.Thread(target=put, args=(outbox, 2))
        thread.start()
        wait_until(
            lambda: outbox.value(
                "select count(*) from pg_locks where not granted and locktype = 'advisory'"
            )
        )
        getattr(first, ends)()
        thread.join(30)
    assert items(outbox) == [("enqueued", 1 if ends == "commit" else 2)]


def test_many_at_once_put_in_one(outbox: Outbox) -> None:
    """procrastinate-org/procrastinate#217: a count before the insert let several through."""
    declare(outbox)
    threads = [
        threading.Thread(target=put, args=(outbox, number), kwargs={"on_duplicate": mode})
        for number, mode in enumerate(["skip", "replace"] * 6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(items(outbox)) == 1


def test_a_transaction_that_does_not_see_the_others_is_refused(outbox: Outbox) -> None:
    """oban-bg/oban#1092: under REPEATABLE READ the job that another transaction has inserted is not seen."""
    declare(outbox)
    with session(outbox) as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="READ COMMITTED"):
            enqueue(conn, "mail", 1, unique_key="k")
        conn.rollback()
        enqueue(conn, "mail", 1)


def test_a_change_that_is_undone_counts_as_no_interruption(outbox: Outbox) -> None:
    """relay.claim counts aborted transactions that had a message, not those of who enqueues."""
    declare(outbox, attempts=3)
    put(outbox, 1)
    for _ in range(4):
        with session(outbox) as conn:
            enqueue(conn, "mail", 2, unique_key="k", on_duplicate="replace")
            conn.rollback()
    with session(outbox) as conn:
        assert conn.execute("select payload from relay.claim('mail')").fetchall() == [(1,)]
    assert outbox.value("select interruptions from relay.queue_messages") == 0


@pytest.mark.parametrize(
    ("options", "fault", "told"),
    [
        ({"on_duplicate": "ignore"}, psycopg.errors.InvalidParameterValue, "skip, replace or move"),
        ({"on_duplicate": "move"}, psycopg.errors.NullValueNotAllowed, "deliver_at"),
        ({"deliver_at": datetime(2030, 1, 1)}, EventInvalid, "deliver_at: has no time zone"),  # noqa: DTZ001
        ({"priority": 1}, TypeError, "'priority'"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    outbox: Outbox, options: dict[str, Any], fault: type[Exception], told: str
) -> None:
    declare(outbox)
    with pytest.raises(fault, match=told):
        put(outbox, 1, **options)


def test_a_payload_is_refused_by_the_path_of_its_value(outbox: Outbox) -> None:
    declare(outbox)
    with pytest.raises(EventInvalid, match=r"payload\.a\[1\]: nan is not a JSON number"):
        put(outbox, {"a": [1, float("nan")]})
    put(outbox, {"price": Decimal("1.10"), "at": LATER}, metadata={"a": 1}, host_id=7, key="x")
    assert outbox.conn.execute(
        "select payload, metadata, host_id from relay.queue_messages"
    ).fetchall() == [({"price": "1.10", "at": LATER.isoformat()}, {"a": 1}, "7")]


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_message_comes_with_the_transaction_of_any_driver(outbox: Outbox, driver: str) -> None:
    declare(outbox)

    async def scenario(ends: str) -> None:
        async with DRIVERS[driver](outbox.worker_dsn) as opened:
            if opened.asynchronous:
                await enqueue_async(opened.session, "mail", ends)
            else:
                enqueue(opened.session, "mail", ends)
            await opened.run(getattr(opened, ends))

    for ends in ("rollback", "commit"):
        asyncio.run(scenario(ends))
    assert items(outbox) == [("enqueued", "commit")]


def test_a_session_without_a_transaction_is_refused(outbox: Outbox) -> None:
    declare(outbox)
    with pytest.raises(NotInTransaction):
        enqueue(outbox.worker, "mail", 1)


@pytest.mark.parametrize("database", DATABASES)
def test_a_handler_says_how_far_it_is_and_what_came_of_it(outbox: Outbox, database: str) -> None:
    """riverqueue/river#163, hardbyte/awa#12, timgit/pg-boss#35: while a job runs, nobody sees how far it is. Not as in
    collectiveidea/delayed_job#1009, where it was seen once the transaction had ended."""
    declare(outbox, keep_done=3600)
    put(outbox, 1)
    seen: list[Any] = []
    opened, is_async, _ = DATABASES[database]

    def look() -> None:
        seen.extend(outbox.conn.execute("select state, note from relay.queue_items").fetchall())

    def handle(message: LeasedMessage) -> None:
        message.note({"pages": 3})
        look()
        message.keep({"pages": Decimal(9)})

    async def handle_async(message: LeasedMessage) -> None:
        await message.note({"pages": 3})
        look()
        message.keep({"pages": Decimal(9)})

    async def scenario() -> None:
        async with opened(outbox.worker_dsn) as given:
            worker = Worker(given, "mail", lease=30.0, poll=0.05)
            worker.handles()(handle_async if is_async else handle)
            task = asyncio.create_task(worker.run())
            while not outbox.value("select count(*) from relay.queue_done"):
                assert not task.done(), task.exception()
                await asyncio.sleep(0.01)
            worker.stop()
            await task

    asyncio.run(scenario())
    assert seen == [("leased", {"pages": 3})]
    assert outbox.conn.execute("select state, note, result from relay.queue_items").fetchall() == [
        ("done", {"pages": 3}, {"pages": "9"})
    ]


def test_a_result_is_kept_with_the_effects_of_its_transaction_alone(outbox: Outbox) -> None:
    """That of an attempt which failed is not the message's."""
    declare(outbox, keep_done=3600, attempts=2, backoff=0.001, max_backoff=0.001)
    put(outbox, 1)
    worker = Worker(outbox.worker_dsn, "mail", poll=0.05)

    @worker.handles()
    def handle(message: Message, session: Any) -> None:
        message.keep(f"attempt {message.attempt}")
        if message.attempt == 1:
            raise ValueError

    with working(worker):
        wait_until(lambda: outbox.value("select count(*) from relay.queue_done"))
    assert outbox.column("select result from relay.queue_items") == ["attempt 2"]


def test_nobody_notes_what_is_another_workers(outbox: Outbox) -> None:
    declare(outbox)
    first = put(outbox, 1)
    outbox.worker.execute("select from relay.lease('mail', 1, '0 s')")
    outbox.worker.execute("select from relay.lease('mail', 1, '1 hour')")
    assert not outbox.worker.value("select relay.note_message('mail', %s, 1, '1')", (first,))
    assert outbox.worker.value("select relay.note_message('mail', %s, 2, '2')", (first,))
    assert outbox.column("select note from relay.queue_items") == [2]


def test_a_note_for_a_lease_that_was_lost_ends_the_handler(outbox: Outbox) -> None:
    declare(outbox)
    first = put(outbox, 1)
    raised: list[BaseException] = []
    worker = Worker(outbox.worker_dsn, "mail", lease=3600.0, poll=0.05)

    @worker.handles()
    def handle(message: LeasedMessage) -> None:
        outbox.conn.execute("delete from relay.queue_messages where id = %s", (first,))
        try:
            message.note(1)
        except LeaseLost as error:
            raised.append(error)
            raise

    with working(worker):
        wait_until(lambda: bool(raised))
    assert items(outbox) == []
