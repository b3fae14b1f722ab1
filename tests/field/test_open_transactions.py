"""A transaction that a worker, a reader or a publisher leaves open holds back nothing but what it has itself.

Sessions that are idle in a transaction are everyday: a debugger, a pool that lost its thread, a notebook. What they
have declared, changed or dropped is theirs; who declares, reads or retains something else does not wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Thread
from typing import Any

import psycopg
import pytest
from psycopg import errors

from relay.retention.schedule import Schedule
from relay.store.connections import connect, sessions_with
from tests.outbox import Login, Outbox, event, host, initialise, relaying, wait_until

GATED = {
    "projection": {
        "type": "sql",
        "statement": "with gate as (select pg_advisory_xact_lock_shared(7))"
        " insert into projection (id, host_id, c_offset, transaction_id)"
        " select %(id)s, %(host_id)s, %(c_offset)s, %(transaction_id)s from gate",
    }
}
"""A handler whose tasks wait while another session has the lock 7."""
WAITING = "select count(*) from pg_locks where locktype = 'advisory' and objid = 7 and not granted"
MESSAGES = """
    select q.name, m.event_id
      from relay.queue_messages as m left join relay.queues as q on q.id = m.queue_id order by m.id
"""


def retain(outbox: Outbox) -> Schedule:
    """Retention after a turn, in which no statement has waited for long."""
    retention = Schedule(outbox.settings(), lambda: None)
    with (
        sessions_with({"lock_timeout": "10s"}),
        closing(connect(outbox.relay_dsn)) as source,
        closing(connect(outbox.relay_dsn)) as target,
    ):
        retention.retain(source, target)
    return retention


@contextmanager
def other_worker(outbox: Outbox) -> Iterator[Login]:
    """A worker of another role, which waits for nobody for long."""
    with (
        outbox.member("relay_worker") as dsn,
        Login.connect(dsn, autocommit=True) as other,
    ):
        other.execute("set statement_timeout = '20s'")
        yield other


# Queues.


@pytest.mark.parametrize(
    "call",
    [
        "relay.declare_queue('more')",
        "relay.declare_queue('mine', '{}', attempts => 9)",
        "relay.drop_queue('mine')",
        "relay.rebuild_queue('mine')",
        "relay.pause_queue('mine')",
        "relay.purge_queue('mine')",
        "relay.enqueue('mine', '{}')",
        "relay.take('mine', 5)",
    ],
)
def test_an_open_transaction_of_a_worker_holds_nobody_elses_queue(
    outbox: Outbox, call: str
) -> None:
    """relay.drop_queue had the lock of all partitions, and each declaration the row of the group, to the commit."""
    outbox.worker.execute("select relay.declare_queue('mine', '{}')")
    with (
        other_worker(outbox) as other,
        relaying(outbox.settings()),
        psycopg.connect(outbox.worker_dsn) as idle,
    ):
        outbox.publish(host(1), event())
        outbox.wait_handled()
        idle.execute(f"select {call}".encode())
        other.execute("select relay.declare_queue('theirs', '{}')")
        other.execute("select relay.declare_queue('past', '{}', start => 'beginning')")
        wait_until(
            lambda: (
                outbox.value("select count(*) from relay.queue_fills where ended_at > now()")
                or outbox.value("select bool_and(ended_at is not null) from relay.queue_fills")
            ),
            20,
        )
        for number in range(16):
            outbox.publish(host(number), event())
        outbox.wait_handled(20)
        assert other.value("select ready from relay.queue_figures where queue = 'theirs'") == 16
        assert other.value("select ready from relay.queue_figures where queue = 'past'") == 17
        other.execute("select relay.drop_queue('theirs')")
        idle.commit()
        outbox.publish(host(1), event())
        outbox.wait_handled(20)
    assert retain(outbox).condition.fault is None
    outbox.assert_exact()
    lost = "select count(*) from relay.queue_messages where queue_id not in (select id from relay.queues)"
    assert outbox.value(lost) == 0
    assert outbox.value("select ready from relay.queue_figures where queue = 'past'") == 18


def test_a_task_in_flight_does_not_keep_a_queue_from_being_dropped_and_declared_again(
    outbox: Outbox,
) -> None:
    """What it puts in is of the queue that was dropped: it goes, and what the new one has stays."""
    outbox.worker.execute("set statement_timeout = '20s'")
    outbox.worker.execute("select relay.declare_queue('mail', '{}', key => 'host')")
    (former,) = outbox.column("select id from relay.queues")
    with relaying(outbox.settings(handlers=GATED)):
        with psycopg.connect(outbox.superuser_dsn) as gate:
            gate.execute("select pg_advisory_xact_lock(7)")
            outbox.publish(host(1), event())
            wait_until(lambda: outbox.value(WAITING) == 1, 20)
            outbox.worker.execute("select relay.drop_queue('mail')")
            outbox.worker.execute("select relay.declare_queue('mail', '{}', key => 'host')")
        outbox.wait_handled()
        assert outbox.column("select queue_id from relay.queue_messages") == [former]
        assert outbox.worker.column("select id from relay.claim('mail')") == []
        outbox.publish(host(1), event())
        outbox.wait_handled()
    assert retain(outbox).condition.fault is None
    (second,) = outbox.column("select id::text from outbox_message_t order by c_offset offset 1")
    assert outbox.conn.execute(MESSAGES.encode()).fetchall() == [("mail", second)]
    assert outbox.worker.column("select event_id from relay.take('mail', 9)") == [second]
    outbox.assert_exact()


def test_a_queue_of_the_same_name_that_begins_in_the_past_has_each_event_once(
    outbox: Outbox,
) -> None:
    """Also those that a task in flight puts into the queue that was dropped."""
    outbox.worker.execute("select relay.declare_queue('mail', '{}', key => 'host')")
    with relaying(outbox.settings(handlers=GATED)):
        with psycopg.connect(outbox.superuser_dsn) as gate:
            gate.execute("select pg_advisory_xact_lock(7)")
            for number in range(4):
                outbox.publish(host(number), event())
            wait_until(lambda: outbox.value(WAITING) > 0, 20)
            outbox.worker.execute("select relay.drop_queue('mail')")
            outbox.worker.execute(
                "select relay.declare_queue('mail', '{}', key => 'host', start => 'beginning')"
            )
            for number in range(4):
                outbox.publish(host(number), event())
        outbox.wait_handled()
        wait_until(lambda: outbox.value("select ended_at is not null from relay.queue_fills"), 20)
        for number in range(4):
            outbox.publish(host(number), event())
        outbox.wait_handled()
    retain(outbox)
    of_queue = "select event_id from relay.queue_messages order by event_id"
    assert outbox.column(of_queue) == outbox.column(
        "select id::text from outbox_message_t order by id::text"
    )
    overtaken = """
        select count(*) from (
            select c_offset < lag(c_offset) over (partition by m.host_id order by m.id) as is_late
              from relay.queue_messages as m join outbox_message_t as o on o.id::text = m.event_id) as followed
         where is_late
    """
    assert outbox.value(overtaken) == 0
    outbox.assert_exact()


def test_what_a_worker_leaves_for_a_queue_that_was_dropped_is_removed(outbox: Outbox) -> None:
    """A transaction that knew the queue, and ended after it was dropped: of every table that refers to it."""
    outbox.worker.execute(
        "select relay.declare_queue('mail', null, keep_done => '1 hour');"
        "select relay.declare_queue('other', null); select relay.enqueue('other', '{}')"
    )
    with psycopg.connect(outbox.worker_dsn) as late, psycopg.connect(outbox.worker_dsn) as later:
        late.execute("select relay.enqueue('mail', '{}') from generate_series(1, 3)")
        later.execute("select relay.enqueue('mail', '{}', deliver_at => now() + interval '1 hour')")
        outbox.worker.execute("select relay.drop_queue('mail')")
        late.commit()
        later.commit()
    gone = outbox.value("select min(queue_id) from relay.queue_messages")
    outbox.conn.execute(
        """
        insert into relay.queue_dead_letters (id, queue_id, attempts, enqueued_at, event_id, event_type)
        values (-1, %(gone)s, 1, now(), 'e', 't');
        """.replace("%(gone)s", str(gone)).encode()
    )
    outbox.conn.execute(
        f"insert into relay.queue_done (id, queue_id, attempts, enqueued_at, first_taken_at, event_id, event_type)"
        f" values (-1, {gone}, 1, now(), now(), 'e', 't');"
        f"insert into relay.queue_marks (queue_id, mark, due_mark) values ({gone}, 0, now())".encode()
    )
    assert outbox.value("select count(*) from relay.queue_messages") == 5
    assert retain(outbox).condition.fault is None
    for table in ("queue_messages", "queue_dead_letters", "queue_done", "queue_marks"):
        left = f"select count(*) from relay.{table} where queue_id not in (select id from relay.queues)"
        assert outbox.value(left) == 0, table
    assert outbox.worker.value("select count(*) from relay.take('other', 9)") == 1


def test_no_message_of_a_queue_that_is_there_is_removed(outbox: Outbox) -> None:
    """While queues of the same names are dropped and declared again, as fast as it goes."""
    rounds, threads = 25, 3
    missed: list[Any] = []

    def work(name: str) -> None:
        with psycopg.connect(outbox.worker_dsn) as conn:
            for number in range(rounds):
                conn.execute("select relay.declare_queue(%s, null)", (name,))
                if number % 2:
                    conn.commit()
                conn.execute("select relay.enqueue(%s, '{}') from generate_series(1, 20)", (name,))
                conn.commit()
                taken = conn.execute("select id from relay.take(%s, 100)", (name,)).fetchall()
                conn.commit()
                if len(taken) != 20:
                    missed.append((name, number, len(taken)))
                conn.execute("select relay.drop_queue(%s)", (name,))
                conn.commit()

    workers = [Thread(target=work, args=(f"q{number}",)) for number in range(threads)]
    for each in workers:
        each.start()
    with psycopg.connect(outbox.relay_dsn, autocommit=True) as conn:
        while any(each.is_alive() for each in workers):
            conn.execute("select relay.remove_orphans(1000)")
    assert missed == []
    assert outbox.value("select sum(revision) from relay.queue_revisions") == 2 * rounds * threads


@pytest.mark.parametrize("call", ["relay.drop_queue('mine')", "relay.rebuild_queue('mine')"])
def test_a_queue_that_is_being_dropped_keeps_no_other_from_being_filled(
    outbox: Outbox, call: str
) -> None:
    """The queues are filled one after the other: the first one waited for the transaction, and the others for it."""
    for _ in range(3):
        outbox.publish(host(1), event())
    outbox.drain(outbox.settings())
    outbox.worker.execute("select relay.declare_queue('mine', '{}', start => 'beginning')")
    filled = """
        select ended_at is not null from relay.queue_fills join relay.queues as q on q.id = queue_id where name = %s
    """
    with other_worker(outbox) as other, psycopg.connect(outbox.worker_dsn) as idle:
        other.execute("select relay.declare_queue('theirs', '{}', start => 'beginning')")
        idle.execute(f"select {call}".encode())
        with relaying(outbox.settings()) as service:
            wait_until(lambda: outbox.value(filled, ("theirs",)), 30)
            wait_until(
                lambda: any(
                    "another session drops or rebuilds the queue" in str(each.fault)
                    for each in service.conditions
                ),
                30,
            )
            idle.rollback()
            wait_until(lambda: outbox.value(filled, ("mine",)), 30)
    assert outbox.column("select count(*) from relay.queue_messages group by queue_id") == [3, 3]


def test_declarations_of_many_transactions_count_whatever_their_order(outbox: Outbox) -> None:
    """A number that is the greatest of several would not change with the commit of a lower one."""
    counted = "select relay.queues_revision('default')"
    assert outbox.value(counted) is None
    with psycopg.connect(outbox.worker_dsn) as first, psycopg.connect(outbox.worker_dsn) as second:
        second.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        first.execute("select relay.declare_queue('a')")
        second.execute("select relay.declare_queue('b')")
        outbox.worker.execute("select relay.declare_queue('c')")
        assert outbox.value(counted) == 1
        second.commit()
        assert outbox.value(counted) == 2
        first.execute("savepoint s; select relay.declare_queue('d'); rollback to s")
        first.execute("select relay.declare_queue('e')")
        first.commit()
        assert outbox.value(counted) == 4
    for attempts in range(6, 12):
        outbox.worker.execute("select relay.declare_queue('c', attempts => %s)", (attempts,))
    assert outbox.column("select revision from relay.queue_revisions") == [10]


# Names that somebody is just taking.

NAMED = {
    "queue": ("relay.declare_queue", "relay_worker", "relay.declare_queue('x')"),
    "reader": ("relay.declare_reader", "relay_reader", "relay.declare_reader('x')"),
    "lanes": ("relay.declare_reader", "relay_reader", "relay.declare_reader('x', lanes => 2)"),
    "schedule": (
        "relay.declare_schedule",
        "relay_publisher",
        'relay.declare_schedule(\'x\', \'{"host_id": "00000000-0000-4000-8000-000000000001",'
        ' "event_type": "t"}\', every => \'1 hour\')',
    ),
}


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize("limit", ["50ms", pytest.param(None, marks=pytest.mark.rare)])
def test_who_declares_what_another_is_declaring_is_told_so(
    outbox: Outbox, kind: str, limit: str | None
) -> None:
    """It waited for as long as the other transaction was open."""
    function, role, call = NAMED[kind]
    if limit is not None:
        signature = outbox.value("select to_regproc(%s)::oid::regprocedure::text", (function,))
        outbox.conn.execute(f"alter function {signature} set lock_timeout = '{limit}'".encode())
    with (
        outbox.member(role, "pg_monitor") as first,
        outbox.member(role) as second,
        psycopg.connect(first) as idle,
        psycopg.connect(second, autocommit=True) as other,
    ):
        other.execute("set statement_timeout = '20s'")
        idle.execute(f"select {call}".encode())
        with pytest.raises(errors.LockNotAvailable, match=f"{function}: another session declares"):
            other.execute(f"select {call}".encode())
        idle.rollback()
        other.execute(f"select {call}".encode())


def test_nobody_takes_the_name_of_a_lane(outbox: Outbox) -> None:
    """A single `x/1` kept everybody else from declaring `x` with lanes."""
    with (
        outbox.member("relay_reader") as dsn,
        psycopg.connect(dsn, autocommit=True) as other,
        pytest.raises(errors.InvalidParameterValue, match="would be that of a lane"),
    ):
        other.execute("select relay.declare_reader('x/1')")
    outbox.reader.execute("select relay.declare_reader('x', lanes => 3)")
    # One of a former edition stays, and can be declared again.
    outbox.reader.execute("select relay.declare_reader('team-1')")
    outbox.conn.execute(
        "update relay.log_readers set name = 'team/1' where name = 'team-1';"
        "update relay.readers set reader = 'team/1' where reader = 'team-1'"
    )
    assert not outbox.reader.value("select relay.declare_reader('team/1', max_lag => '1 day')")
    outbox.reader.execute("select relay.declare_reader('team/2026')")


# Readers and retention.


@pytest.mark.parametrize(
    "call",
    [
        "relay.declare_reader('mine', '{}', expires => '1 hour')",
        "relay.seek('mine', 'now')",
        "relay.drop_reader('mine')",
        "relay.keep_reader('mine')",
    ],
)
@pytest.mark.parametrize("days", [1, 9])
def test_an_open_transaction_of_a_reader_holds_no_retention(
    outbox: Outbox, call: str, days: int
) -> None:
    """relay waited for it, with the lock of the outbox's retention: no events were removed, no reader expired."""
    for name in ("mine", "theirs"):
        outbox.reader.execute(
            "select relay.declare_reader(%s, '{}', expires => '5 minutes')", (name,)
        )
    outbox.conn.execute(
        "update relay.readers set noted_at = now() - make_interval(days => %s) where target = 'relay.declare_reader'",
        (days,),
    )
    if days > 7:
        outbox.conn.execute("update relay.log_readers set expired_at = now() - interval '8 days'")
    with psycopg.connect(outbox.reader_dsn) as idle:
        idle.execute(f"select {call}".encode())
        assert retain(outbox).condition.fault is None
        idle.rollback()
    left = "select name from relay.log_readers where expired_at is null or expired_at < now() - interval '7 days'"
    assert "theirs" not in outbox.column(left)
    assert retain(outbox).condition.fault is None
    assert outbox.column(left) == []


def test_a_reader_that_cannot_be_given_up_is_named(outbox: Outbox) -> None:
    """One that lags by more than max_lag, and is just being moved, holds back neither other readers nor retention."""
    initialise(outbox.settings(retention={"keep": "1d"}))
    for name in ("mine", "theirs"):
        outbox.reader.execute(
            "select relay.declare_reader(%s, '{}', max_lag => '5 minutes')", (name,)
        )
    outbox.publish(host(1), event())
    outbox.drain(outbox.settings())
    outbox.conn.execute(
        "alter table outbox_message_t disable trigger all; update outbox_message_t set c_ts = now() - interval '1 hour'"
    )
    with psycopg.connect(outbox.reader_dsn) as idle:
        idle.execute("select relay.seek('mine', 'now')")
        retention = retain(outbox)
        assert retention.condition.fault is not None
        assert (
            "the reader mine cannot be given up: another session" in retention.condition.fault.fault
        )
        given_up = "select reader from relay.readers where given_up_at is not null order by 1"
        assert outbox.column(given_up) == ["theirs"]
        idle.rollback()
    assert retain(outbox).condition.fault is None
    assert outbox.column(given_up) == ["mine", "theirs"]


def test_a_subscriber_that_is_just_being_declared_is_not_dropped_with_its_condition(
    outbox: Outbox,
) -> None:
    """The condition that nobody had any more was removed, and the subscriber who has got it meanwhile with it."""
    outbox.reader.execute("select relay.declare_reader('r')")
    declare = "select relay.declare_subscriber('r', %s, '{\"event_type\": \"a\"}')"
    outbox.reader.execute(declare, ("first",))
    outbox.reader.execute("select relay.drop_subscriber('r', 'first')")
    expire = "set statement_timeout = '20s'; select relay.expire_subscribers()"
    with psycopg.connect(outbox.reader_dsn) as idle, psycopg.connect(outbox.relay_dsn) as relay:
        idle.execute(declare, ("second",))
        ended = Thread(target=idle.commit)
        relay.execute(expire)
        ended.start()
        ended.join()
        relay.commit()
    assert outbox.column("select name from relay.log_subscribers") == ["second"]
    outbox.reader.execute("select relay.drop_subscriber('r', 'second')")
    outbox.conn.execute("select relay.expire_subscribers()")
    assert outbox.column("select id from relay.log_conditions") == []


# Numbers.


def test_everybody_may_take_a_number_and_nothing_else_of_the_sequence(outbox: Outbox) -> None:
    """The default of the column is evaluated as whoever inserts: it makes gaps, which mean nothing."""
    outbox.publish(host(1), event())
    number = outbox.value("select 'relay.offsets'::regclass::oid")
    with outbox.member("pg_monitor") as dsn, psycopg.connect(dsn, autocommit=True) as anybody:
        anybody.execute(
            "select nextval(%s::oid::regclass) from generate_series(1, 1000)", (number,)
        )
        for refused in (
            f"select setval({number}::oid::regclass, 1)",
            f"select setval({number}::oid::regclass, 9223372036854775807)",
            "select last_value from relay.offsets",
            "select nextval('relay.offsets')",
        ):
            with pytest.raises(errors.InsufficientPrivilege):
                anybody.execute(refused.encode())
    outbox.publish(host(1), event())
    outbox.drain(outbox.settings())
    outbox.assert_exact()
