"""Reports of users of job queues, tried on the functions of relay's work queues: who takes what, and when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest

from tests.outbox import Outbox, wait_until
from tests.postgres import Server
from tests.roles import Role

ID = "select id from relay."
FILL = "select relay.enqueue('mail', '{}', key => n::text) from generate_series(1, %s) as n"


@pytest.fixture
def queue(outbox: Outbox) -> Outbox:
    """An outbox with the queue `mail` of direct messages in any order."""
    declare(outbox)
    return outbox


def declare(outbox: Outbox, key: str = "none", attempts: int = 5, backoff: str = "1 s") -> None:
    outbox.worker.execute(
        "select relay.declare_queue('mail', null, key => %s, attempts => %s, backoff => %s::interval)",
        (key, attempts, backoff),
    )


def enqueue(outbox: Outbox, *keys: str) -> list[int]:
    """Enqueue a message for each key; returns their ids."""
    return [
        outbox.worker.value("select relay.enqueue('mail', '{}', host_id => 'h', key => %s)", (key,))
        for key in keys
    ]


@contextmanager
def session(outbox: Outbox) -> Iterator[psycopg.Connection[Any]]:
    with closing(psycopg.connect(outbox.worker_dsn, autocommit=True)) as conn:
        yield conn


def ids(conn: psycopg.Connection[Any], call: str) -> list[int]:
    return [row[0] for row in conn.execute(f"{ID}{call}".encode())]


def items(outbox: Outbox) -> list[tuple[int, str, int]]:
    rows = outbox.conn.execute("select id, state, attempts from relay.queue_items order by id")
    return [(number, state, attempts) for number, state, attempts in rows]


def move_marks(outbox: Outbox) -> None:
    outbox.conn.execute(
        "select relay.move_marks(q.id, s.mark, s.due_mark, '-infinity')"
        " from relay.queues as q, relay.queue_state(q.name, relay.this_call()) as s"
    )


def mark_ahead(outbox: Outbox, interval: str) -> None:
    """Make the newest mark of times one that was noted before the clock was set back."""
    outbox.conn.execute(
        "insert into relay.queue_marks (queue_id, mark, due_mark, noted_at)"
        " select id, 0, clock_timestamp() + %s::interval, clock_timestamp() + %s::interval from relay.queues",
        (interval, interval),
    )


@pytest.mark.parametrize("ahead", ["1 s", "1 year"])
@pytest.mark.parametrize("how", ["release", "retry"])
def test_a_clock_that_goes_back_hides_no_message(queue: Outbox, ahead: str, how: str) -> None:
    """After a failover to a server whose clock is behind, what got a time was below the mark, and was never taken.

    sidekiq-scheduler/sidekiq-scheduler#283, dbader/schedule#323: after the clock was set back, jobs never ran.
    """
    (number,) = enqueue(queue, "")
    mark_ahead(queue, ahead)
    assert ids(queue.conn, "lease('mail', 1, '1 hour')") == [number]
    more = ", '0 s'" if how == "retry" else ""
    assert queue.value(f"select relay.{how}('mail', %s, 1{more})::text", (number,)) in (
        "true",
        "retry",
    )
    wait_until(lambda: ids(queue.conn, "take('mail')") == [number])


def test_a_mark_of_a_clock_that_was_ahead_does_not_come_back(queue: Outbox) -> None:
    """Once the clock has reached it, what was given a time meanwhile would be below it."""
    (number,) = enqueue(queue, "")
    mark_ahead(queue, "1 hour")
    assert ids(queue.conn, "lease('mail', 1, '1 hour')") == [number]
    assert queue.value("select count(*) from relay.queue_marks where due_mark > now()") == 0


def test_a_wait_that_is_over_already_hides_no_message(queue: Outbox) -> None:
    """A retry with a negative wait, as of a deadline that has passed, was below the mark, and was never taken.

    graphile/worker#449: jobs that wait for nothing, and that nobody takes.
    """
    numbers = enqueue(queue, "", "")
    assert ids(queue.conn, "lease('mail', 2, '1 hour')") == numbers
    mark_ahead(queue, "0 s")
    assert (
        queue.worker.value("select relay.retry('mail', %s, 1, '-1 hour')", (numbers[0],)) == "retry"
    )
    assert queue.worker.value("select relay.extend('mail', %s, 1, '-1 hour')", (numbers[1],))
    assert sorted(ids(queue.conn, "take('mail', 2)")) == numbers


@pytest.mark.parametrize("attempts", [1, 5])
@pytest.mark.parametrize("key", ["none", "user"])
def test_a_message_that_kills_its_workers_is_a_dead_letter_in_the_end(
    outbox: Outbox, attempts: int, key: str
) -> None:
    """sidekiq/sidekiq#4069, #5300, activepieces/activepieces#15130, nilenso/goose#35: a kill counts nothing."""
    declare(outbox, key, attempts)
    poison, *_ = enqueue(outbox, "a", "b", "c")
    killed = 0
    for _ in range(50):
        with session(outbox) as conn:
            conn.execute("begin")
            claimed = conn.execute("select id, attempt from relay.claim('mail')").fetchall()
            if (poison, 1) in claimed:
                killed += 1
                continue  # The session ends with its transaction.
            for number, attempt in claimed:
                conn.execute("select relay.complete('mail', %s, %s)", (number, attempt))
            conn.execute("commit")
    assert killed == max(attempts, 3)
    assert items(outbox) == [(poison, "dead", 0)]
    assert "may kill its workers" in outbox.value("select error from relay.queue_items")


def test_a_retry_and_a_given_back_message_are_no_interruptions(outbox: Outbox) -> None:
    """A message that failed or was looked at by another is no poison: oban-bg/oban#430, solid_queue#589."""
    declare(outbox, attempts=100, backoff="0 s")
    (number,) = enqueue(outbox, "")
    for attempt in range(1, 6):
        with outbox.worker.transaction():
            assert ids(outbox.worker, "claim('mail')") == [number]
            with session(outbox) as other:
                assert ids(other, "claim('mail')") == []
            outbox.worker.execute("select relay.retry('mail', %s, %s, '0 s')", (number, attempt))
    assert outbox.value("select interruptions from relay.queue_messages") == 0


@pytest.mark.parametrize(
    "undone", ["begin; {}; rollback", "begin; savepoint s; {}; rollback to s; commit"]
)
@pytest.mark.parametrize(
    "call",
    [
        "cancel_messages('mail', id => {})",
        "move_messages('mail', now(), id => {})",
        "purge_queue('mail')",
        "drop_queue('mail')",
    ],
)
def test_what_an_operator_takes_back_is_no_interruption(
    outbox: Outbox, call: str, undone: str
) -> None:
    """Three times, and the message was a dead letter that may kill its workers; a claim passed it by each time."""
    declare(outbox, attempts=1)
    later = "now() + interval '1 hour'" if call.startswith("move") else "null"
    number = outbox.value(
        f"select relay.enqueue('mail', '{{}}', host_id => 'h', deliver_at => {later})"
    )
    for _ in range(4):
        outbox.conn.execute(undone.format(f"select relay.{call.format(number)}").encode())
    ((touched, interrupted),) = outbox.conn.execute(
        "select xmax <> '0', relay.was_aborted(xmax) from relay.queue_messages"
    ).fetchall()
    assert (touched, interrupted) == (True, False)
    if later != "null":
        return
    with session(outbox) as conn:
        conn.execute("begin")
        assert ids(conn, "claim('mail')") == [number]
        conn.execute("rollback")
    # That of a worker is one.
    assert ids(outbox.conn, "claim('mail')") == []
    assert outbox.column("select interruptions from relay.queue_messages") == [1]


def test_a_worker_whose_lease_is_over_ends_nothing_of_another(queue: Outbox) -> None:
    """riverqueue/river#1302, rails/solid_queue#761, hardbyte/awa#102: what was done was rescued, or done twice."""
    (number,) = enqueue(queue, "")
    assert ids(queue.conn, "lease('mail', 1, '0 s')") == [number]
    # Late, but nobody has taken it: it is done, and nothing brings it back.
    with session(queue) as other:
        queue.conn.execute("begin")
        assert queue.worker.value("select relay.complete('mail', %s, 1)", (number,))
        assert ids(other, "lease('mail')") == []
        queue.conn.execute("commit")
        assert ids(other, "lease('mail')") == []
    assert items(queue) == []


def test_an_exhausted_message_lets_its_key_go_on(outbox: Outbox) -> None:
    """graphile/worker#254, triggerdotdev/trigger.dev#163: the last attempt left the queue locked."""
    declare(outbox, "user", attempts=1)
    first, second = enqueue(outbox, "a", "a")
    assert ids(outbox.worker, "lease('mail', 1, '0 s')") == [first]
    wait_until(lambda: ids(outbox.worker, "lease('mail', 1, '1 hour')") == [second])
    assert items(outbox)[0] == (first, "dead", 1)


@pytest.mark.parametrize("how", ["take", "claim", "lease"])
def test_the_messages_of_a_key_are_never_worked_side_by_side(outbox: Outbox, how: str) -> None:
    """graphile/worker#621, rails/solid_queue#689: those that were fetched in advance ran at the same time."""
    declare(outbox, "user")
    numbers = enqueue(outbox, *"aaabbb")
    with session(outbox) as first, session(outbox) as second:
        first.execute("begin")
        assert ids(first, f"{how}('mail', 10)") == [numbers[0], numbers[3]]
        if how == "lease":
            first.execute("commit")
        assert ids(second, f"{how}('mail', 10)") == []


def test_a_scheduled_message_blocks_nobody(outbox: Outbox) -> None:
    """procrastinate-org/procrastinate#1599: a job for later stalled the ready jobs of its lock."""
    declare(outbox)
    with session(outbox) as conn:
        scheduled = "select relay.enqueue('mail', '{}', deliver_at => now() + %s::interval)"
        later = outbox.worker.value(scheduled, ("1 hour",))
        due = outbox.worker.value(scheduled, ("0 seconds",))
        (ready,) = enqueue(outbox, "")
        assert sorted(ids(conn, "take('mail', 10)")) == [due, ready]
    assert items(outbox) == [(later, "scheduled", 0)]
    declare(outbox, "user")
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="ordered by a key"):
        outbox.worker.execute("select relay.enqueue('mail', '{}', deliver_at => now() + '1 hour')")


def test_thousands_of_retries_that_are_due_at_once_are_shared(queue: Outbox) -> None:
    """bensheldon/good_job#720, riverqueue/river#785: each fetch sorted all that was due."""
    queue.worker.execute("select relay.enqueue('mail', '{}') from generate_series(1, 10000)")
    queue.worker.execute(
        "select relay.retry('mail', id, attempt, '0 s') from relay.lease('mail', 10000, '1 hour')"
    )
    taken: list[list[int]] = [[] for _ in range(4)]

    def work(mine: list[int]) -> None:
        with session(queue) as conn:
            while more := ids(conn, "take('mail', 100)"):
                mine.extend(more)

    threads = [threading.Thread(target=work, args=(each,)) for each in taken]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    numbers = [number for each in taken for number in each]
    assert len(numbers) == len(set(numbers)) == 10000


def test_dead_letters_do_not_come_back_with_a_queue_of_the_same_name(queue: Outbox) -> None:
    """oban-bg/oban#1289, NikolayS/PgQue#208: what was left under a name belonged to whoever took the name."""
    (number,) = enqueue(queue, "")
    queue.worker.execute("select relay.fail('mail', id, attempt) from relay.claim('mail')")
    assert items(queue) == [(number, "dead", 1)]
    queue.worker.execute("select relay.drop_queue('mail')")
    declare(queue)
    assert items(queue) == []
    assert queue.worker.value("select relay.requeue('mail')") == 0


def test_names_differ_in_case_length_and_quotes(outbox: Outbox) -> None:
    """pgmq/pgmq#33, #114, NikolayS/PgQue#109, hibiken/asynq#294: names became identifiers, and were cut."""
    names = ["mail", "Mail", "größe", "x" * 99, "x" * 100, "a'b\"c;--", "$1 %s"]
    for name in names:
        outbox.worker.execute("select relay.declare_queue(%s, null)", (name,))
        outbox.worker.execute("select relay.enqueue(%s, to_jsonb(%s::text))", (name, name))
    for name in names:
        assert outbox.worker.column("select payload from relay.take(%s, 10)", (name,)) == [name]


def test_who_locked_a_row_is_known_after_a_crash_of_the_server(killable_server: Server) -> None:
    """sidekiq/sidekiq#5300, oban-bg/oban#430: what a crash interrupts is taken again, and is counted.

    bensheldon/good_job#90: a job that outlived the crash was given to others; a lease outlives it.
    """
    with Outbox(killable_server.create_database("crashed")) as outbox:
        outbox.install()
        declare(outbox, attempts=1)
        (leased,) = enqueue(outbox, "")
        assert ids(outbox.worker, "lease('mail', 1, '1 hour')") == [leased]
        (number,) = enqueue(outbox, "")
        with session(outbox) as conn:
            conn.execute("begin")
            assert ids(conn, "claim('mail')") == [number]
            # Whose commit flushes the WAL up to here.
            outbox.conn.execute("create table flushed ()")
            killable_server.stop("immediate")
            killable_server.start()
    with Outbox(killable_server.dsn("crashed")) as outbox:
        assert ids(outbox.worker, "claim('mail')") == []
        counted = outbox.column("select interruptions from relay.queue_messages order by id")
        assert counted == [0, 1]
        assert ids(outbox.worker, "claim('mail', 10)") == [number]
        assert outbox.worker.value("select relay.complete('mail', %s, 1)", (leased,)) is True


def pages_of_a_claim(conn: psycopg.Connection[Any]) -> int:
    """How many pages a claim of one message touches, in a session that has planned its statements; nothing is ended."""
    ids(conn, "claim('mail')")
    claim = "explain (analyze, buffers, format json) select from relay.claim('mail')"
    ((plans,),) = conn.execute(claim.encode()).fetchall()
    plan = plans[0]["Plan"]
    assert plan["Actual Rows"] == 1
    return int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])


def test_claims_of_a_queue_with_keys_are_flat_under_a_held_snapshot(outbox: Outbox) -> None:
    """NikolayS/PgQue#61, #80, hardbyte/awa#169, riverqueue/river#59: dead rows slowed fetches."""
    declare(outbox, "user")
    outbox.conn.execute("alter table relay.queue_messages set (autovacuum_enabled = off)")
    figures = []
    with session(outbox) as worker, psycopg.connect(outbox.superuser_dsn) as holder:
        holder.execute("set transaction isolation level repeatable read")
        holder.execute("select from relay.queues")
        # Planned while there is nothing, as in a worker's session that begins before its messages.
        enqueue(outbox, "")
        pages_of_a_claim(worker)
        for _ in range(3):
            outbox.conn.execute(FILL, (6000,))
            while ids(worker, "take('mail', 300)"):
                pass
            outbox.conn.execute(FILL, (10,))
            move_marks(outbox)
            figures.append(pages_of_a_claim(worker))
            outbox.worker.execute("select relay.purge_queue('mail')")
    assert figures[-1] <= figures[0] * 1.1, figures


@pytest.mark.parametrize("is_analyzed", [False, True])
def test_messages_that_wait_cost_those_of_other_keys_nothing(
    outbox: Outbox, is_analyzed: bool
) -> None:
    """riverqueue/river#785, bensheldon/good_job#720: each fetch read all jobs that were scheduled or waited.

    Also where the statistics are of a time when none waited, so that all indexes of those that wait seem equal.
    """
    declare(outbox, "user")
    with session(outbox) as worker:
        enqueue(outbox, "first")
        outbox.conn.execute(FILL, (5000,))
        if is_analyzed:
            outbox.conn.execute("vacuum analyze relay.queue_messages")
        before = pages_of_a_claim(worker)
        outbox.worker.execute(
            "select relay.retry('mail', id, attempt, '1 hour') from relay.lease('mail', 5001, '1 hour')"
        )
        enqueue(outbox, "another")
        assert pages_of_a_claim(worker) <= before + 10


def test_failing_keys_with_messages_behind_them_cost_others_little(outbox: Outbox) -> None:
    """bensheldon/good_job#896, rails/solid_queue#689: blocked jobs at the head of the queue were read by each fetch."""
    declare(outbox, "user")
    with session(outbox) as worker:
        for _ in range(2):
            outbox.conn.execute(FILL, (300,))
        outbox.worker.execute(
            "select relay.retry('mail', id, attempt, '1 hour') from relay.lease('mail', 300, '1 hour')"
        )
        assert ids(worker, "claim('mail')") == []
        outbox.worker.execute(
            "select relay.enqueue('mail', '{}', key => 'other ' || n) from generate_series(1, 500) as n"
        )
        first, second = enqueue(outbox, "a", "a")
        assert pages_of_a_claim(worker) <= 600
        taken = ids(worker, "take('mail', 1000)")
        assert len(taken) == 501
        assert first in taken
        assert ids(worker, "take('mail', 1000)") == [second]
        assert ids(worker, "take('mail', 1000)") == []


@pytest.mark.parametrize("behind", [1, 8])
def test_what_one_claim_has_searched_the_next_ones_do_not(outbox: Outbox, behind: int) -> None:
    """bensheldon/good_job#896, rails/solid_queue#689: each claim searched again until 500 messages were passed.

    Behind the keys that fail are so few messages that a larger window passes them, or so many that keys are walked.
    """
    declare(outbox, "user")
    with session(outbox) as worker:
        for _ in range(1 + behind):
            outbox.conn.execute(FILL, (300,))
        outbox.worker.execute(
            "select relay.retry('mail', id, attempt, '1 hour') from relay.lease('mail', 300, '1 hour')"
        )
        enqueue(outbox, *(f"other {number}" for number in range(20)))
        move_marks(outbox)
        # For a second or two after a search, of which this machine may take all.
        wait_until(lambda: pages_of_a_claim(worker) <= 120)


def test_a_message_whose_worker_has_died_can_be_purged_and_cancelled(outbox: Outbox) -> None:
    """What a worker had leased before it died stayed after a purge, while no worker took from the queue."""
    outbox.worker.execute("select relay.declare_queue('mail', null, key => 'host')")
    for call in ("cancel_messages('mail', event_id => %s)", "purge_queue('mail')"):
        enqueue(outbox, "")
        ((event_id,),) = outbox.worker.execute(
            "select event_id from relay.lease('mail', 1, '1 hour')"
        ).fetchall()
        given = (event_id,) if "%s" in call else ()
        assert outbox.value(f"select relay.{call}", given) == 0
        outbox.conn.execute("update relay.queue_messages set available_at = clock_timestamp()")
        assert outbox.value(f"select relay.{call}", given) == 1
        assert items(outbox) == []


def test_a_queue_whose_role_was_dropped_is_declared_again(outbox: Outbox) -> None:
    """Every call failed with: role "gone" does not exist. Nobody could drop the queue; a member of relay may."""
    role = f"gone_{outbox.value('select oid from pg_database where datname = current_database()')}"
    outbox.conn.execute(f'create role "{role}"'.encode())
    outbox.worker.execute("select relay.declare_queue('mail', null, workers => %s)", (role,))
    outbox.conn.execute(f'drop role "{role}"'.encode())
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match=role):
        enqueue(outbox, "a")
    declare_again = "select relay.declare_queue('mail', null, workers => 'relay_worker')"
    assert outbox.login(Role.RELAY).value(declare_again)
    assert len(enqueue(outbox, "a")) == 1
    assert len(ids(outbox.worker, "take('mail')")) == 1
    outbox.worker.execute("select relay.drop_queue('mail')")


@pytest.mark.parametrize("key", ["none", "host"])
def test_the_largest_number_of_messages_may_be_asked_for(outbox: Outbox, key: str) -> None:
    declare(outbox, key)
    for call in ("claim('mail', 2147483647)", "lease('mail', 2147483647)"):
        assert ids(outbox.worker, call) == []
    enqueue(outbox, "a")
    assert len(ids(outbox.worker, "take('mail', 2147483647)")) == 1


def test_the_longest_times_are_computed(outbox: Outbox) -> None:
    """A done message that stays for ever made the view of all queues fail; a late attempt could not be ended."""
    for more in ("keep_done => '300000 years'", "max_backoff => '300000 years'"):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="than 36500 days"):
            outbox.worker.execute(f"select relay.declare_queue('mail', null, {more})".encode())
    outbox.worker.execute(
        "select relay.declare_queue('mail', null, attempts => 100, backoff => '36500 days',"
        " max_backoff => '36500 days', keep_done => '36500 days')"
    )
    (number,) = enqueue(outbox, "a")
    outbox.conn.execute("update relay.queue_messages set attempts = 40")
    assert outbox.worker.value("select relay.retry('mail', %s, 41)", (number,)) == "retry"
    assert items(outbox) == [(number, "retry", 41)]


def test_a_worker_is_woken_when_a_message_can_be_taken_not_before(queue: Outbox) -> None:
    """One that is enqueued for later wakes nobody; one that is moved to now, or has a time that is over, does."""
    put = "select relay.enqueue('mail', '{}', deliver_at => now() + %s::interval)"
    with session(queue) as worker:
        row = worker.execute("select relay.watch_queue('mail')").fetchone()
        assert row is not None
        worker.execute(f"listen {row[0]}".encode())

        def said() -> list[str]:
            queue.conn.execute("select pg_notify(%s, 'end')", (row[0],))
            payloads = []
            for each in worker.notifies(timeout=30):
                payloads.append(each.payload)
                if each.payload == "end":
                    break
            return payloads

        number = queue.value(put, ("1 hour",))
        assert said() == ["end"]
        queue.worker.execute("select relay.move_messages('mail', now(), id => %s)", (number,))
        assert said() == ["", "end"]
        queue.conn.execute(put, ("-1 hour",))
        assert said() == ["", "end"]
