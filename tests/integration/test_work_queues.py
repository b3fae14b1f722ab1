"""Work queues: relay fills them from the log, and workers take from them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import psycopg
import pytest

from relay.admin.check import examine
from relay.admin.dead_letters import DeadLetters
from relay.admin.findings import Severity
from relay.admin.queues import drop
from relay.client.messages import application_name
from relay.client.worker import Queue
from relay.config.fields import is_header, is_name
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.model.events import EVENT_FIELDS
from relay.queues.configured import ConfiguredQueues
from relay.retention import schedule
from relay.retention.erasure import erase
from relay.retention.schedule import Schedule
from relay.spark.session import Session
from relay.store.dead_letters.selection import DeadLetterSelection
from tests.outbox import (
    Outbox,
    event,
    host,
    relaying,
    relaying_until_it_ends,
    wait_until,
    work_and_crash,
)
from tests.process import relay


def enqueued(outbox: Outbox, queue: str = "mail") -> list[Any]:
    """The payloads in a queue, in order."""
    return outbox.column(
        """
        select (payload ->> 'amount')::int from relay.queue_messages as m join relay.queues as q on q.id = m.queue_id
         where q.name = %s order by m.id
        """,
        (queue,),
    )


def declare(outbox: Outbox, name: str = "mail", **more: Any) -> bool:
    """Declare a queue; returns whether anything changed."""
    given = {"name": name, **more}
    arguments = ", ".join(f'"{key}" => %({key})s' for key in given)
    row = outbox.worker.execute(
        f"select relay.declare_queue({arguments})".encode(), given
    ).fetchone()
    return row == (True,)


@contextmanager
def worker(outbox: Outbox) -> Iterator[psycopg.Connection[Any]]:
    with closing(psycopg.connect(outbox.worker_dsn, autocommit=True)) as conn:
        yield conn


@contextmanager
def superuser(outbox: Outbox) -> Iterator[psycopg.Connection[Any]]:
    """A session that may do in relay's tables what its functions do."""
    with closing(psycopg.connect(outbox.superuser_dsn, autocommit=True)) as conn:
        yield conn


def test_what_is_published_after_a_declaration_is_in_the_queue_once(outbox: Outbox) -> None:
    outbox.publish(host(1), event(1))
    with relaying(outbox.settings()):
        outbox.wait_handled()
        assert declare(outbox, match='{"event_type": "order.*"}')
        outbox.publish(host(1), event(2), event(3, "mail.sent"))
        outbox.wait_handled()
        assert declare(outbox, "all")
        outbox.publish(host(2), event(4))
        outbox.wait_handled()
    assert enqueued(outbox) == [2, 4]
    assert enqueued(outbox, "all") == [4]
    outbox.assert_exact()


def queue(outbox: Outbox, *keys: str, **more: Any) -> list[int]:
    """Declare the queue `mail` of direct messages, and enqueue one for each key; returns their ids."""
    declare(outbox, match=None, **more)
    return [
        outbox.worker.value("select relay.enqueue('mail', '{}', host_id => 'h', key => %s)", (key,))
        for key in keys
    ]


def ids(conn: psycopg.Connection[Any], most: int = 100) -> list[int]:
    """The ids of the messages that are taken now."""
    return [row[0] for row in conn.execute("select id from relay.take('mail', %s)", (most,))]


def move_marks(outbox: Outbox) -> None:
    """Move the marks of all queues as far as they may go."""
    outbox.conn.execute(
        "select relay.move_marks(q.id, s.mark, s.due_mark, '-infinity')"
        " from relay.queues as q, relay.queue_state(q.name, relay.this_call()) as s"
    )


def test_a_queue_that_was_declared_twice_is_unchanged(outbox: Outbox) -> None:
    assert declare(outbox, match='{"event_type": "a"}')
    before = outbox.value("select relay.queues_revision('default')")
    assert not declare(outbox, match='{"event_type": "a"}')
    assert outbox.value("select relay.queues_revision('default')") == before
    assert declare(outbox, match='{"event_type": ["a", "b"]}')
    assert outbox.value("select relay.queues_revision('default')") == before + 1


NOT_FOLLOWED: list[dict[str, Any]] = [
    {"match": '{"event_typ": "a"}'},
    {"match": '{"payload.": "a"}'},
    {"match": '{"event_type": []}'},
    {"match": '{"event_type": {"a": 1}}'},
    {"match": "[]"},
    {"key": "tenant"},
    {"key": "payload"},
    {"attempts": 0},
    {"workers": "nobody of this name"},
    {"group_id": "another"},
]


def test_a_declaration_that_relay_could_not_follow_is_refused(
    outbox: Outbox, subtests: pytest.Subtests
) -> None:
    for more in NOT_FOLLOWED:
        with (
            subtests.test(str(more)),
            pytest.raises(psycopg.Error, match=r"relay\.declare_queue"),
        ):
            declare(outbox, **more)


def test_the_fields_of_a_declaration_are_those_of_a_route(outbox: Outbox) -> None:
    for field in EVENT_FIELDS:
        assert outbox.value("select relay.is_event_field(%s)", (field,)), field
    for name in ("payload.a.b", "metadata.x", "payload", "id.x", "headers.a", "payload..a", "c"):
        expected = is_name(name) and not is_header(name)
        assert outbox.value("select relay.is_event_field(%s)", (name,)) == expected, name


def test_routes_by_payload_key_and_transaction_of_a_declared_queue(outbox: Outbox) -> None:
    declare(
        outbox, match='{"payload.amount": [1, 2], "event_type": "order.*"}', key="payload.amount"
    )
    with relaying(outbox.settings()):
        outbox.publish(host(1), *(event(amount) for amount in (1, 2, 3)))
        outbox.publish(host(1), event(1, "other"))
        outbox.wait_handled()
    assert enqueued(outbox) == [1, 2]
    assert outbox.column("select key from relay.queue_messages order by id") == [
        f"{host(1)} payload.amount {amount}" for amount in (1, 2)
    ]
    assert outbox.value(
        "select bool_and((m.event_type, m.host_id, m.user_id, m.aggregate_type, m.aggregate_id, m.transaction_id,"
        " m.event_ts, m.payload) = (o.event_type, o.host_id::text, o.user_id::text, o.aggregate_type,"
        " o.aggregate_id, o.transaction_id::text, o.event_ts, o.payload))"
        " from relay.queue_messages as m join outbox_message_t as o on o.id::text = m.event_id"
    )


def test_a_redelivery_after_a_crash_fills_once(outbox: Outbox) -> None:
    declare(outbox)
    outbox.fill(20, events=3)
    settings = outbox.settings()
    work_and_crash(settings, 2)
    some = len(enqueued(outbox))
    assert 0 < some < 60
    outbox.drain(settings)
    assert len(enqueued(outbox)) == 60
    assert outbox.value("select count(distinct event_id) from relay.queue_messages") == 60


def test_each_engine_fills_once_in_order(
    outbox: Outbox, engine: str, session: Session | None
) -> None:
    declare(outbox, key="host")
    outbox.fill(30, events=3, hosts=4)
    outbox.drain(outbox.settings(engine), session)
    assert len(enqueued(outbox)) == 90
    assert outbox.value("select count(distinct event_id) from relay.queue_messages") == 90
    assert not outbox.column(
        "select from (select o.c_offset < lag(o.c_offset) over (partition by key order by m.id) as overtaken"
        " from relay.queue_messages as m join outbox_message_t as o on o.id::text = m.event_id) as m where overtaken"
    )


def test_polled_events_fill_once_between_the_modes(outbox: Outbox) -> None:
    declare(outbox)
    outbox.fill(10, events=2)
    polling = outbox.settings(source={**outbox.config()["source"], "mode": "poll"})
    with relaying(polling):
        outbox.wait_handled()
    outbox.fill(5, events=2)
    with relaying(outbox.settings()):
        outbox.wait_handled()
    assert (
        outbox.value("select count(distinct event_id) from relay.queue_messages")
        == len(enqueued(outbox))
        == 30
    )


def test_a_dead_transaction_is_enqueued_by_its_replay(outbox: Outbox) -> None:
    declare(outbox)
    settings = outbox.settings()
    with relaying(settings):
        outbox.publish(host(1), event(-1))
        outbox.publish(host(1), event(2))
        outbox.wait_handled()
        assert enqueued(outbox) == [2]
        outbox.conn.execute("alter table projection drop constraint projection_amount_check")
        dead_letters = DeadLetters(settings, outbox.conn)
        dead_letters.replay(dead_letters.find(DeadLetterSelection()), "mended")
        wait_until(lambda: enqueued(outbox) == [2, -1])
    assert enqueued(outbox) == [2, -1]


def test_an_event_that_no_route_matches_is_in_a_queue_only_where_it_is_ignored(
    outbox: Outbox,
) -> None:
    declare(outbox)
    routes = [{"match": {"event_type": "order.*"}, "handlers": ["projection"]}]
    with relaying(outbox.settings(routes=routes)):
        outbox.publish(host(1), event(1, "other"))
        outbox.publish(host(1), event(2))
        outbox.wait_handled()
    assert enqueued(outbox) == [2]
    with relaying(outbox.settings(routes=routes, unrouted="ignore"), accept_configuration=True):
        outbox.publish(host(1), event(3, "other"))
        outbox.publish(host(1), event(4))
        wait_until(lambda: enqueued(outbox) == [2, 3, 4])


def test_what_a_handler_of_type_queue_needs_is_checked_and_not_dropped(outbox: Outbox) -> None:
    settings = outbox.settings(
        handlers={"mail": {"type": "queue"}}, routes=[{"handlers": ["mail"]}]
    )

    def warnings() -> list[str]:
        return [each.text for each in examine(settings) if each.level is Severity.WARNING]

    missing = (
        "handlers.mail.queue: there is no queue 'mail', and transactions with events for it wait"
    )
    assert [each for each in warnings() if each.startswith(missing)]
    declare(outbox, match=None)
    assert not [each for each in warnings() if "queue" in each]
    with pytest.raises(ConfigurationError, match=r"handlers\.mail puts events into the queue mail"):
        drop(settings, "mail")
    assert outbox.column("select name from relay.queues") == ["mail"]


def test_what_is_taken_is_done_with_the_commit_and_given_back_without(outbox: Outbox) -> None:
    numbers = queue(outbox, "", "", "")
    with worker(outbox) as first, worker(outbox) as second:
        with first.transaction(force_rollback=True):
            assert ids(first, 2) == numbers[:2]
            assert ids(second) == numbers[2:]
        assert ids(second, 1) == numbers[:1]
        first.execute("begin")
        assert ids(first) == numbers[1:2]
    with worker(outbox) as third:
        wait_until(lambda: ids(third) == numbers[1:2])


def test_only_the_first_of_a_key_is_taken_and_a_retry_holds_its_key(outbox: Outbox) -> None:
    a1, b1, a2, b2 = queue(outbox, "a", "b", "a", "b", key="user")
    with worker(outbox) as first, worker(outbox) as second:
        with first.transaction():
            assert ids(first, 1) == [a1]
            assert ids(second, 1) == [b1]
            assert ids(second) == [b2]
        first.execute("begin")
        assert ids(first, 1) == [a2]
        first.execute("rollback")
        assert (
            outbox.worker.value("select relay.retry('mail', %s, 1, '1 hour', 'no')", (a2,))
            == "retry"
        )
        (a3,) = queue(outbox, "a", key="user")
        assert ids(second) == []
        outbox.conn.execute(
            "update relay.queue_messages set available_at = now() where id = %s", (a2,)
        )
        assert ids(second, 1) == [a2]
        assert ids(second) == [a3]


def test_a_hot_key_hides_nobody(outbox: Outbox) -> None:
    numbers = queue(outbox, *["hot"] * 200, "cold", key="user")
    with worker(outbox) as first, worker(outbox) as second, first.transaction():
        assert ids(first, 1) == numbers[:1]
        assert ids(second, 1) == numbers[-1:]
        assert ids(second, 1) == []


def test_messages_that_wait_for_others_of_their_keys_are_not_walked_by_each_take(
    outbox: Outbox,
) -> None:
    """For a second or two, takes begin where the last search from the mark has found something; later ones see all."""
    numbers = queue(outbox, *["failing"] * 600, *["other"] * 50, key="user")
    retry = "select relay.retry('mail', id, attempt, %s) from relay.claim('mail')"
    assert outbox.column(retry, ("1 hour",)) == ["retry"]
    walked = "select idx_tup_fetch from pg_stat_xact_user_tables where relid = 'relay.queue_messages'::regclass"

    def fetched(noted_at: str) -> int:
        """How many rows a take has looked at."""
        # One session, whose transaction is undone, notes a time as relay's functions do, and takes.
        with superuser(outbox) as conn, conn.transaction(force_rollback=True):
            conn.execute(f"update relay.queue_marks set noted_at = {noted_at}".encode())
            assert ids(conn, 1) == [other]
            row = conn.execute(walked).fetchone()
            assert row is not None
            return int(row[0])

    # The first take after a second notes where it has found something.
    outbox.conn.execute("update relay.queue_marks set noted_at = '-infinity'")
    with worker(outbox) as conn:
        assert ids(conn, 1) == [numbers[600]]
    other = numbers[601]
    assert outbox.value("select max(start) from relay.queue_marks") == numbers[600]
    assert fetched("'-infinity'") > 600
    wait_until(lambda: fetched("clock_timestamp()") < 50)
    outbox.conn.execute(
        "update relay.queue_messages set available_at = now() where not leased and attempts = 1"
    )
    with worker(outbox) as conn:
        assert ids(conn, 1) == numbers[:1]
        wait_until(lambda: ids(conn, 1) == numbers[1:2])


def test_a_lease_that_has_gone_to_another_ends_nothing(outbox: Outbox) -> None:
    """riverqueue/river#1258, #773, janbjorge/pgqueuer#475, procrastinate-org/procrastinate#1518: nobody took it."""
    (number,) = queue(outbox, "")
    lease = "select attempt from relay.lease('mail', 1, %s)"
    assert outbox.column(lease, ("0 seconds",)) == [1]
    assert outbox.column(lease, ("1 hour",)) == [2]
    for how in ("complete", "extend", "release", "retry", "fail"):
        assert not outbox.value(f"select relay.{how}('mail', %s, 1)", (number,)), how
    assert outbox.worker.value("select relay.complete('mail', %s, 2)", (number,))
    assert not outbox.column("select id from relay.queue_items")


def test_a_mark_does_not_pass_what_comes_back(outbox: Outbox) -> None:
    numbers = queue(outbox, "", "", "")
    lease = "select id from relay.lease('mail', 1, '1 hour')"
    assert outbox.column(lease) == numbers[:1]
    with worker(outbox) as first, worker(outbox) as second, worker(outbox) as publisher:
        with publisher.transaction():
            (late,) = publisher.execute("select relay.enqueue('mail', '{}')").fetchall()[0]
            (later,) = queue(outbox, "")
            with first.transaction(force_rollback=True):
                assert ids(first) == [*numbers[1:], later]
                move_marks(outbox)
            assert ids(second) == [*numbers[1:], later]
            move_marks(outbox)
        assert ids(second) == [late]
        move_marks(outbox)
        with second.transaction():
            assert second.execute(
                "select relay.release('mail', %s, 1)", (numbers[0],)
            ).fetchall() == [(True,)]
            # The clock goes on to the next second, in which the time of the release is no longer.
            move_marks(outbox)
        assert outbox.value("select max(mark) from relay.queue_marks") > numbers[0]
        assert ids(first) == numbers[:1]


def test_attempts_end_with_a_dead_letter_that_can_be_enqueued_again(outbox: Outbox) -> None:
    (number,) = queue(outbox, "", attempts=2, backoff="0 seconds")
    lease = "select id, attempt from relay.lease('mail', 1)"
    for attempt, ended in ((1, "retry"), (2, "dead")):
        assert outbox.conn.execute(lease).fetchall() == [(number, attempt)]
        retry = "select relay.retry('mail', %s, %s, error => 'no')"
        assert outbox.value(retry, (number, attempt)) == ended
    assert outbox.conn.execute(
        "select id, state, attempts, error from relay.queue_items"
    ).fetchall() == [(number, "dead", 2, "no")]
    assert outbox.worker.value("select relay.requeue('mail')") == 1
    assert outbox.column("select state from relay.queue_items") == ["enqueued"]


def test_expired_last_leases_use_up_no_limit(outbox: Outbox) -> None:
    outbox.worker.execute("select relay.declare_queue('mail', null, 'none', attempts => 1)")
    for _ in range(8):
        outbox.worker.execute("select relay.enqueue('mail', '{}')")
    expired = outbox.worker.column("select id from relay.lease('mail', 7, '0 s')")
    outbox.conn.execute(
        "update relay.queue_messages set available_at = clock_timestamp() where available_at is null"
    )
    assert len(outbox.worker.column("select id from relay.take('mail', 2)")) == 1
    assert outbox.column("select id from relay.queue_dead_letters order by id") == expired


def test_a_paused_queue_is_filled_and_not_taken_from(outbox: Outbox) -> None:
    numbers = queue(outbox, "")
    assert outbox.worker.value("select relay.pause_queue('mail')")
    assert not outbox.worker.value("select relay.pause_queue('mail')")
    numbers += queue(outbox, "")
    with worker(outbox) as conn:
        assert ids(conn) == []
        assert outbox.worker.value("select relay.pause_queue('mail', false)")
        assert ids(conn, 1) == numbers[:1]
        assert outbox.worker.value("select relay.purge_queue('mail')") == 1


def test_only_members_of_its_role_take_from_a_queue(outbox: Outbox) -> None:
    name = outbox.slot
    outbox.conn.execute(
        f"create role {name}_a login password 'p' in role relay_worker;"
        f"create role {name}_b login password 'p' in role relay_worker".encode()
    )
    try:
        sessions = [
            psycopg.connect(
                outbox.dsn_as(f"{name}_{each}"),
                autocommit=True,
            )
            for each in "ab"
        ]
        with closing(sessions[0]) as owner, closing(sessions[1]) as other:
            owner.execute("select relay.declare_queue('mail', null)")
            owner.execute("select relay.enqueue('mail', '{}')")
            for refused in (
                "select relay.take('mail')",
                "select relay.declare_queue('mail', null, attempts => 7)",
                "select relay.drop_queue('mail')",
                "select relay.purge_queue('mail')",
                "select relay.pause_queue('mail')",
                "select relay.enqueue('mail', '{}')",
                "select from relay.queue_messages",
                "select relay.queue_state('mail', relay.this_call())",
            ):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    other.execute(refused.encode())
            for unknown in (
                "select relay.take('nothing')",
                "select relay.purge_queue('nothing')",
                "select relay.complete('nothing', 1, 1)",
            ):
                with pytest.raises(psycopg.errors.UndefinedObject, match="no queue 'nothing'"):
                    other.execute(unknown.encode())
            assert len(ids(owner)) == 1
    finally:
        outbox.conn.execute(
            f"drop owned by {name}_a, {name}_b; drop role {name}_a, {name}_b".encode()
        )


def test_relay_fills_queues_with_its_own_rights_only(outbox: Outbox) -> None:
    declare(outbox)
    with outbox.limited_role() as (_, dsn):
        source = {**outbox.config()["source"], "dsn": dsn}
        with relaying(outbox.settings(source=source)):
            outbox.publish(host(1), event(1))
            outbox.wait_handled()
    assert enqueued(outbox) == [1]


def test_an_erased_host_has_no_messages(outbox: Outbox) -> None:
    declare(outbox)
    settings = outbox.settings()
    with relaying(settings):
        outbox.publish(host(1), event(1))
        outbox.publish(host(2), event(2))
        outbox.wait_handled()
    report = erase(settings, outbox.conn, outbox.conn, str(host(1)))
    assert report.removed["messages of queues"] == 1
    assert enqueued(outbox) == [2]


def test_a_queue_that_is_dropped_is_no_longer_filled(outbox: Outbox) -> None:
    declare(outbox)
    with relaying(outbox.settings()):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        outbox.worker.execute("select relay.drop_queue('mail')")
        outbox.publish(host(1), event(2))
        outbox.wait_handled()
    assert not outbox.column("select id from relay.queue_messages")


def test_nobody_takes_a_claimed_message_between_its_failure_and_the_end_of_the_attempt(
    outbox: Outbox,
) -> None:
    outbox.conn.execute("create table effects (number int)")
    (first,) = queue(outbox, "a", backoff="0 s")
    with worker(outbox) as mine:
        with mine.transaction():
            (row,) = mine.execute("select id, attempt from relay.claim('mail')").fetchall()
            assert row == (first, 1)
            with mine.transaction(force_rollback=True):
                mine.execute("insert into effects values (1)")
            assert ids(outbox.worker) == []
            ended = mine.execute("select relay.retry('mail', %s, 1)", (first,)).fetchone()
            assert ended == ("retry",)
        with mine.transaction():
            (row,) = mine.execute("select id, attempt from relay.claim('mail')").fetchall()
            assert row == (first, 2)
            assert mine.execute("select relay.complete('mail', %s, 2)", (first,)).fetchone() == (
                True,
            )
        assert mine.execute("select * from effects").fetchall() == []
    assert outbox.column("select state from relay.queue_items") == []


def test_the_lock_of_somebody_who_looks_for_messages_loses_no_lease(outbox: Outbox) -> None:
    """PostgreSQL locks the newest version of a row, and only then sees that it is not what was asked for."""
    (first,) = queue(outbox, "a")
    with worker(outbox) as mine, superuser(outbox) as other:
        assert mine.execute("select id from relay.lease('mail')").fetchone() == (first,)
        completed: list[Any] = []

        def complete() -> None:
            row = mine.execute("select relay.complete('mail', %s, 1)", (first,)).fetchone()
            completed.append(row)

        with other.transaction():
            other.execute("select from relay.queue_messages for update")
            thread = Thread(target=complete)
            thread.start()
            wait_until(
                lambda: (
                    outbox.value("select count(*) from pg_locks where not granted") > 0
                    or bool(completed)
                )
            )
        thread.join(20)
    assert completed == [(True,)]


def test_the_commands_on_queues(outbox: Outbox, tmp_path: Path) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml")

    def run(*arguments: str, status: int = 0) -> str:
        result = relay("queue", *arguments, "--config", str(config))
        assert result.returncode == status, result.stdout + result.stderr
        return result.stdout if status == 0 else result.stderr

    first, _ = queue(outbox, "a", "b", attempts=1)
    assert "mail\t2\t0\t0\t0" in run("list")
    assert run("pause", "mail", "--reason", "rest") == "queue mail is paused\n"
    assert run("pause", "mail") == "queue mail was paused already\n"
    assert ids(outbox.worker) == []
    assert run("resume", "mail") == "queue mail is resumed\n"
    assert outbox.worker.value("select relay.fail('mail', %s, 1, 'no address')", (first,))
    (figures,) = json.loads(run("list", "--json"))
    assert (figures["ready"], figures["dead"]) == (1, 1)
    assert 0 < figures["oldest_seconds"] < 600
    shown = json.loads(run("show", "mail", "--state", "dead", "--json"))
    assert [(each["id"], each["error"]) for each in shown["items"]] == [(first, "no address")]
    assert run("purge", "mail", "--yes") == "1 message deleted\n"
    assert outbox.column("select state from relay.queue_items") == ["dead"]
    assert run("drop", "mail", "--yes") == "queue mail is dropped\n"
    assert "there is no queue 'mail'" in run("show", "mail", status=2)
    done = outbox.column("select action from relay.actions order by id")
    assert done == ["queue pause", "queue resume", "queue purge", "queue drop"]


def test_the_commands_on_dead_letters_of_queues(outbox: Outbox, tmp_path: Path) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml")

    def run(*arguments: str, status: int = 0) -> str:
        result = relay("dlq", *arguments, "--config", str(config))
        assert result.returncode == status, result.stdout + result.stderr
        return result.stdout + result.stderr

    numbers = queue(outbox, "a", "b", "c", "d")
    for number, why in zip(numbers, ("no address", "closed", "closed", "closed"), strict=True):
        assert outbox.worker.value("select relay.fail('mail', %s, 1, %s)", (number, why))
    assert [line.split("\t")[0] for line in run("list").splitlines()[1:]] == [
        f"mail/{number}" for number in numbers[::-1]
    ]
    outbox.worker.value("select relay.pause_queue('mail')")
    line = "queue mail\t0 ready, 0 waiting, 4 dead letters, 0 workers, paused since "
    assert line in relay("status", "--config", str(config)).stdout
    (figures,) = json.loads(relay("status", "--json", "--config", str(config)).stdout)["queues"]
    assert (figures["queue"], figures["dead"]) == ("mail", 4)
    of = ("--queue", "mail")
    listed = json.loads(run("list", *of, "--json"))
    assert [each["id"] for each in listed] == numbers[::-1]
    assert "no address" in run("list", *of, "--exception", "address")
    shown = json.loads(run("show", str(numbers[0]), *of, "--json"))
    assert [(each["sink"], each["exception"]) for each in shown] == [("queue:mail", "no address")]
    assert json.loads(run("show", f"mail/{numbers[0]}", "--json")) == shown
    exported = [json.loads(line) for line in run("export", *of).splitlines()]
    assert [each["id"] for each in exported] == numbers
    assert "name the dead letters by a filter" in run("replay", *of, status=2)
    assert "--sink: cannot be given with --queue" in run("list", *of, "--sink", "x", status=2)
    assert "--wait: cannot be given" in run("replay", *of, "--all", "--wait", status=2)
    assert "there is no replayed or discarded" in run("purge", *of, "--all")
    assert "is no id of a dead letter of queue 'mail'" in run(
        "list", *of, "--id", "sms/1", status=2
    )
    assert "there is no queue 'other'" in run("list", "--queue", "other", status=2)
    assert "no dead letter 99999 in queue 'mail'" in run("show", "99999", *of, status=2)
    assert "2 messages will be enqueued again" in run(
        "replay",
        *of,
        "--exception",
        "closed",
        "--dry-run",
        "--id",
        str(numbers[1]),
        "--id",
        str(numbers[2]),
    )
    assert run("replay", *of, "--exception", "address", "--yes", "--reason", "mended") == (
        "1 message will be enqueued again\n1 message is in the queue again\n"
    )
    assert "2 messages are discarded" in run(
        *("discard", *of, "--id", str(numbers[1]), "--id", str(numbers[2]), "--yes")
    )
    left = "select id, state from relay.queue_items order by state"
    assert [state for _, state in outbox.conn.execute(left.encode())] == ["dead", "enqueued"]
    assert "1 message is in the queue again" in run("replay", *of, "--all", "--yes")
    assert "there is no dead letter to be given up in queue 'mail'" in run(
        "discard", *of, "--all", "--yes"
    )
    acts = "select action, consumer, letters, reason from relay.dead_letter_actions order by id"
    assert outbox.conn.execute(acts.encode()).fetchall() == [
        ("replay", "queue:mail", numbers[:1], "mended"),
        ("discard", "queue:mail", [numbers[1]], None),
        ("discard", "queue:mail", [numbers[2]], None),
        ("replay", "queue:mail", [numbers[3]], None),
    ]


def test_the_figures_of_a_queue(outbox: Outbox) -> None:
    queue(outbox, *"abcdef")
    with worker(outbox) as mine, mine.transaction():
        mine.execute("select from relay.take('mail', 1)")
        mine.execute("select from relay.lease('mail', 2)")
    outbox.worker.execute("select relay.retry('mail', id, 1, '1 hour') from relay.claim('mail', 1)")
    outbox.worker.execute("select relay.fail('mail', id, 1) from relay.claim('mail', 1)")
    (row,) = outbox.conn.execute(
        "select ready, waiting, leased, dead, workers from relay.queue_figures"
    ).fetchall()
    assert row == (1, 1, 2, 1, 0)


def test_connections_of_workers_are_counted_whatever_the_name_of_the_queue(outbox: Outbox) -> None:
    """The server keeps 63 characters of ASCII of a connection's name."""
    names = ["mail", 'Größe "1"', "m" * 60, "m" * 61, "é" * 100]
    for name in names:
        outbox.worker.execute("select relay.declare_queue(%s)", (name,))
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(
                psycopg.connect(outbox.worker_dsn, application_name=application_name(name))
            )
        found = outbox.conn.execute("select queue, workers from relay.queue_figures").fetchall()
    assert sorted(found) == sorted((name, 1) for name in names)


def test_instances_that_declare_the_same_queues_at_once_declare_each_once(outbox: Outbox) -> None:
    settings = outbox.settings(queues={"mail": {}, "more": {"keep_done": "1d"}})
    instances = [ConfiguredQueues(settings) for _ in range(6)]
    with ThreadPoolExecutor(len(instances)) as threads:
        for started in [threads.submit(each.start) for each in instances]:
            started.result(timeout=60)
    assert outbox.column("select name from relay.queues order by name") == ["mail", "more"]
    # One raise for each queue: what the others declared was nothing new.
    assert outbox.value("select relay.queues_revision('default')") == 2


def test_a_claimed_message_that_is_given_back_counts_no_attempt(outbox: Outbox) -> None:
    (number,) = queue(outbox, "", attempts=1)
    release = "select relay.release('mail', id, attempt%s) from relay.claim('mail')"
    for _ in range(3):
        assert outbox.column(release % "") == [True]
    assert outbox.column(release % ", '1 hour'") == [True]
    assert outbox.conn.execute("select id, state, attempts from relay.queue_items").fetchall() == [
        (number, "scheduled", 0)
    ]
    assert ids(outbox.worker) == []


def test_a_transaction_that_enqueues_many_messages_holds_one_lock_for_them(outbox: Outbox) -> None:
    """Each lock takes shared memory of the server, and a rollback to a savepoint releases those taken since."""
    queue(outbox)
    held = "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"
    many = "select relay.enqueue('mail', '{}') from generate_series(1, 20)"
    with worker(outbox) as mine:
        with mine.transaction():
            mine.execute("savepoint before")
            mine.execute(many)
            mine.execute("rollback to savepoint before")
            assert mine.execute(held).fetchone() == (0,)
            mine.execute(many)
            assert mine.execute(held).fetchone() == (1,)
        with mine.transaction():
            mine.execute(many)
            assert mine.execute(held).fetchone() == (1,)
    assert len(ids(outbox.worker)) == 40


def test_a_queue_that_a_worker_declares_has_what_the_worker_says(outbox: Outbox) -> None:
    of_worker = Queue(
        name="mail",
        where="$.payload.amount >= $least",
        params={"least": 'a "b"'},
        keep_done=90.5,
    )
    statement, text = of_worker.declaration()
    declaration = statement.with_parameter("%s")
    assert outbox.worker.value(declaration, (text,)) == "true"
    assert outbox.worker.value(declaration, (text,)) == "false"
    assert outbox.conn.execute(
        "select condition::text, params, keep_done::text from relay.queues"
    ).fetchall() == [('($."payload"."amount" >= $"least")', {"least": 'a "b"'}, "00:01:30.5")]


DONE = "select id, event_id, attempts from relay.queue_items where state = 'done' order by id"


def test_done_messages_stay_for_keep_done_however_they_end(outbox: Outbox) -> None:
    keys = ("a", "b", "c", "d")
    numbers = queue(outbox, *keys, key="user", keep_done="1 hour", backoff="0 seconds")
    events = outbox.column("select event_id from relay.queue_items order by id")
    with worker(outbox) as conn:
        with conn.transaction(force_rollback=True):
            assert ids(conn) == numbers
        assert outbox.conn.execute(DONE).fetchall() == []
        assert ids(conn, 1) == numbers[:1]
        with conn.transaction():
            conn.execute("select from relay.claim('mail', 1)")
            conn.execute("select relay.complete('mail', %s, 1)", (numbers[1],))
        for attempt, end in enumerate(("retry", "complete"), 1):
            conn.execute("select from relay.lease('mail', 1)")
            conn.execute(f"select relay.{end}('mail', %s, %s)".encode(), (numbers[2], attempt))
        assert outbox.conn.execute(DONE).fetchall() == [
            (number, event_id, attempts)
            for number, event_id, attempts in zip(numbers, events, (1, 1, 2), strict=False)
        ]
        assert not outbox.worker.value("select relay.complete('mail', %s, 2)", (numbers[2],))
        assert len(outbox.conn.execute(DONE).fetchall()) == 3
        assert declare(outbox, match=None, key="user", backoff="0 seconds")
        assert ids(conn, 1) == numbers[3:]
        assert outbox.conn.execute(DONE).fetchall() == []
        assert outbox.value("select count(*) from relay.queue_done") == 3


def test_a_queue_without_keys_keeps_what_is_done(outbox: Outbox) -> None:
    numbers = queue(outbox, "", "", keep_done="1 hour")
    with worker(outbox) as conn:
        assert ids(conn) == numbers
        assert [row[0] for row in outbox.conn.execute(DONE)] == numbers


def test_retention_removes_done_messages_in_time(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "_PRUNE_PORTION", 2)
    numbers = queue(outbox, *["a"] * 7, keep_done="1 hour")
    with worker(outbox) as conn:
        ids(conn)
    outbox.conn.execute(
        "update relay.queue_done set done_at = done_at - interval '2 hours' where id <> %s",
        (numbers[3],),
    )
    assert [row[0] for row in outbox.conn.execute(DONE)] == numbers[3:4]
    settings = outbox.settings()
    Schedule(settings, lambda: None).retain(outbox.conn, outbox.conn)
    assert outbox.column("select id from relay.queue_done") == numbers[3:4]
    declare(outbox, match=None)
    Schedule(settings, lambda: None).retain(outbox.conn, outbox.conn)
    assert outbox.column("select id from relay.queue_done") == []


def test_what_is_done_is_erased_and_dropped_with_its_queue(outbox: Outbox) -> None:
    declare(outbox, match=None, keep_done="1 hour")
    for number in (1, 1, 2):
        outbox.worker.execute(
            "select relay.enqueue('mail', '{}', host_id => %s)", (str(host(number)),)
        )
    with worker(outbox) as conn:
        ids(conn, 1)
        report = erase(outbox.settings(), outbox.conn, outbox.conn, str(host(1)))
        assert report.removed["messages of queues"] == 2
        assert len(ids(conn)) == 1
    assert outbox.column("select host_id from relay.queue_done") == [str(host(2))]
    queue(outbox, "a", keep_done="1 hour")
    with worker(outbox) as conn:
        ids(conn)
    outbox.worker.execute("select relay.drop_queue('mail')")
    assert outbox.value("select count(*) from relay.queue_done") == 0


NOT_EVALUATED: list[dict[str, Any]] = [
    {"where": "$.payload.amount >"},
    {"where": "$.payload.amount > $least"},
    {"where": '$.payload ? (@.x == "$least").y == $"a b"', "params": '{"least": 1}'},
    {"where": "$.payload.amount > $least", "params": "[1]"},
    {"where": "$.payload.amount > 1", "match": None},
    {"keep_done": "0 seconds"},
]


def test_a_condition_that_could_not_be_evaluated_is_refused(
    outbox: Outbox, subtests: pytest.Subtests
) -> None:
    for more in NOT_EVALUATED:
        fault = rf"relay\.declare_queue: ({'|'.join(more)}|params)"
        with subtests.test(str(more)), pytest.raises(psycopg.Error, match=fault):
            declare(outbox, **more)


CONDITIONS = {
    "large": ("$.payload.amount >= $least", '{"least": 2}', [2, 3]),
    "filter": ("$.payload ? (@.amount < 2)", None, [1]),
    "of fields": ('$.host_id == $host && $.event_type starts with "order."', None, [1, 2, 3]),
    "text": ('$.payload.amount == "$no" || $.payload.amount == 3', None, [3]),
    # Each of these fails for every event, strictly so or in a way that SQL/JSON does not suppress.
    "absent": ("strict $.payload.absent > 1", None, []),
    "types": ("$.payload.amount.datetime() > 1", None, []),
    "division": ("1 / ($.payload.amount - $.payload.amount) > 0", None, []),
    "time": ('$.event_type.datetime("aaa!") == 1', None, []),
}


def test_the_events_that_satisfy_its_condition_are_in_a_queue(outbox: Outbox) -> None:
    for name, (where, params, _) in CONDITIONS.items():
        given = f'{{"host": "{host(1)}"}}' if name == "of fields" else params
        declare(outbox, name, match='{"event_type": "order.*"}', where=where, params=given)
    declare(outbox, "all")
    with relaying(outbox.settings()):
        outbox.publish(host(1), *(event(amount) for amount in (1, 2, 3)))
        outbox.publish(host(1), event(5, "mail.sent"))
        outbox.wait_handled()
    for name, (*_, expected) in CONDITIONS.items():
        assert enqueued(outbox, name) == expected, name
    assert enqueued(outbox, "all") == [1, 2, 3, 5]
    outbox.assert_exact()


def test_a_condition_that_changes_concerns_later_events(outbox: Outbox) -> None:
    declare(outbox, where="$.payload.amount == 1")
    with relaying(outbox.settings()):
        outbox.publish(host(1), event(1), event(2))
        outbox.wait_handled()
        assert not declare(outbox, where="$.payload.amount==1")
        assert declare(outbox, where="$.payload.amount == 2")
        outbox.publish(host(1), event(1), event(2))
        outbox.wait_handled()
        assert declare(outbox)
        outbox.publish(host(1), event(3))
        outbox.wait_handled()
    assert enqueued(outbox) == [1, 2, 3]


def test_a_condition_sees_texts_of_any_kind(outbox: Outbox) -> None:
    where = "$.payload.text == $text && $.metadata == null && $.id != null"
    text = 'a "quoted\\, {text}\n NULL é'
    declare(outbox, where=where, params=psycopg.types.json.Jsonb({"text": text}))
    with relaying(outbox.settings()):
        for each in (text, "NULL"):
            plain = event(1)
            outbox.publish(host(1), {**plain, "payload": {**plain["payload"], "text": each}})
        outbox.wait_handled()
    assert outbox.column("select payload ->> 'text' from relay.queue_messages") == [text]


def findings(settings: Settings) -> list[str]:
    """What `relay check` says of queues, but for what is in order."""
    found = examine(settings, accept_configuration=True)
    return [
        each.text for each in found if each.subject == "queues" and each.level is not Severity.OK
    ]


def test_queues_of_the_configuration_are_declared_before_the_first_batch(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    mail = {"match": {"event_type": "order.*"}, "key": "payload.amount", "backoff": 0.5}
    whole = {
        "where": "$.payload.amount > $least",
        "params": {"least": 1},
        "keep_done": "7d",
        "attempts": 3,
        "paused": True,
    }
    outbox.publish(host(1), event(1), event(2))
    settings = outbox.settings(queues={"mail": mail, "more": mail | whole})
    assert findings(settings) == []
    assert outbox.value("select count(*) from relay.queues") == 0
    with relaying(settings):
        outbox.wait_handled()
    assert (enqueued(outbox), enqueued(outbox, "more")) == ([1, 2], [2])
    of_more = outbox.conn.execute(
        "select match, key, attempts, backoff::text, keep_done::text, workers, condition::text, params,"
        " paused_at is null from relay.queues where name = 'more'"
    )
    match = {"event_type": ["order.*"]}
    assert of_more.fetchone() == (
        *(match, "payload.amount", 3, "00:00:00.5", "7 days", "relay_worker"),
        *('($."payload"."amount" > $"least")', {"least": 1}, False),
    )
    revision = outbox.value("select relay.queues_revision('default')")
    with relaying(settings):
        pass
    assert outbox.value("select relay.queues_revision('default')") == revision
    declare(outbox, "other")
    changed = outbox.settings(queues={"mail": {"match": {"event_type": "mail.*"}}})
    with relaying(changed, accept_configuration=True):
        outbox.publish(host(1), event(3), event(4, "mail.sent"))
        outbox.wait_handled()
    assert (enqueued(outbox), enqueued(outbox, "more")) == ([1, 2, 4], [2, 3])
    assert [
        vars(each)["queues"] for each in caplog.records if "no longer in the" in each.getMessage()
    ] == ["more"]
    for each in (changed, outbox.settings(queues={"mail": {}})):
        (line,) = findings(each)
        assert line.startswith("queues.more: the queue is no longer configured")
        assert line.endswith("run `relay queue drop more`")
    declare(outbox, "more")
    assert findings(changed) == []


@pytest.mark.parametrize(
    ("queue", "line"),
    [
        ({"workers": "nobody"}, "queues.mail: workers: there is no role 'nobody'"),
        ({"where": "$.a >"}, "queues.mail: where is no path of SQL/JSON: "),
        ({"where": "$.a > $b"}, "queues.mail: params: the variable b of where is missing"),
    ],
    ids=str,
)
def test_a_queue_of_the_configuration_that_is_refused_stops_relay(
    outbox: Outbox, queue: dict[str, Any], line: str
) -> None:
    settings = outbox.settings(queues={"mail": queue})
    (found,) = findings(settings)
    assert found.startswith(line)
    with relaying_until_it_ends(settings, re.escape(line)):
        pass
    assert outbox.value("select count(*) from relay.queues") == 0


def test_commands_show_what_is_done_where_they_are_asked(outbox: Outbox, tmp_path: Path) -> None:
    done, left = queue(outbox, "", "", keep_done="1 hour")
    assert ids(outbox.conn, 1) == [done]
    config = str(outbox.config_file(tmp_path / "relay.yaml"))
    for more, expected in (((), [left]), (("--state", "done"), [done])):
        result = relay("queue", "show", "mail", "--json", "--config", config, *more)
        assert [each["id"] for each in json.loads(result.stdout)["items"]] == expected
