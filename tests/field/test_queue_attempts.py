"""What became of each attempt of a message of a queue: what job queues overwrote, lost or could not say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

from relay import Drop, RetryLater
from relay.admin.events import find
from relay.admin.retention import erase
from relay.api.events import EventAttempt
from relay.cli.app import app
from relay.client.worker import Message, Worker
from relay.store.attempts import prune
from relay.store.connections import connect
from tests.console import Program, Visitor, console_of, served
from tests.outbox import Outbox, host, relaying, wait_until
from tests.workers import working

_KEPT = """
    select number, outcome, error from relay.attempts
     where message_id = %s and consumer = 'queue:mail' order by number, began_at
"""


@pytest.fixture
def worker(outbox: Outbox) -> Iterator[psycopg.Connection[Any]]:
    """A worker's session, with the queue `mail` of direct messages, which are tried three times."""
    outbox.worker.execute("select relay.declare_queue('mail', null, attempts => 3)")
    with closing(psycopg.connect(outbox.worker_dsn, autocommit=True)) as conn:
        yield conn


def enqueue(outbox: Outbox, number: int = 1) -> int:
    """Enqueue a message of a host; returns its id."""
    return int(
        outbox.worker.value(
            "select relay.enqueue('mail', '{}', host_id => %s)", (str(host(number)),)
        )
    )


def began(conn: psycopg.Connection[Any], how: str) -> tuple[int, int]:
    """The id and the attempt of the message that is had now."""
    row = conn.execute(f"select id, attempt from relay.{how}('mail')".encode()).fetchone()
    assert row is not None
    return row[0], row[1]


def fails(conn: psycopg.Connection[Any], how: str, error: str) -> str:
    """Fail the next attempt as workers do, to be tried again at once; returns what becomes of the message."""
    if how == "take":
        with conn.transaction(force_rollback=True):
            had = began(conn, how)
        return retried(conn, had, error)
    with conn.transaction():
        had = began(conn, how)
        if how == "claim":
            return retried(conn, had, error)
    return retried(conn, had, error)


def retried(conn: psycopg.Connection[Any], had: tuple[int, int], error: str) -> str:
    row = conn.execute("select relay.retry('mail', %s, %s, '0 s', %s)", (*had, error)).fetchone()
    return str(row and row[0])


def succeeds(conn: psycopg.Connection[Any], how: str) -> None:
    """End the next attempt well."""
    with conn.transaction():
        had = began(conn, how)
        if how != "take":
            row = conn.execute("select relay.complete('mail', %s, %s)", had).fetchone()
            assert row == (True,)


def kept(outbox: Outbox, message: int) -> list[tuple[Any, ...]]:
    """The attempts that are kept of a message, in order."""
    return outbox.conn.execute(_KEPT, (message,)).fetchall()


@pytest.mark.parametrize("keep_done", [None, "1 hour"], ids=["deleted", "kept"])
@pytest.mark.parametrize("how", ["take", "claim", "lease"])
def test_a_retry_overwrites_nothing_of_the_attempts_before_it(
    outbox: Outbox, worker: psycopg.Connection[Any], how: str, keep_done: str | None
) -> None:
    """The time and the error of an attempt were gone with the next one, and all of them with a success.

    https://github.com/procrastinate-org/procrastinate/issues/48
    https://github.com/procrastinate-org/procrastinate/issues/1231
    https://github.com/janbjorge/pgqueuer/issues/321
    https://github.com/uptick/django-cq/issues/7
    https://github.com/OCA/queue/pull/577
    https://github.com/pricingassistant/mrq/pull/130
    https://github.com/riverqueue/river/issues/577
    https://github.com/graphile/worker/issues/174
    """
    outbox.worker.execute(
        "select relay.declare_queue('mail', null, attempts => 3, keep_done => %s::interval)",
        (keep_done,),
    )
    message = enqueue(outbox)
    assert fails(worker, how, "Timeout: no answer\nand a second line") == "retry"
    assert fails(worker, how, "\nRefused: " + "x" * 5_000) == "retry"
    succeeds(worker, how)
    assert kept(outbox, message) == [
        (1, "failed", "Timeout: no answer"),
        (2, "failed", ("Refused: " + "x" * 5_000)[:1_000]),
        (3, "delivered", None),
    ]
    began_at = outbox.column("select began_at from relay.attempts order by number")
    assert began_at == sorted(began_at)
    is_known = outbox.column("select seconds >= 0 from relay.attempts order by number")
    # What was given back by a rollback does not know when it was taken; what was taken is done with a commit.
    assert is_known == [None if how == "take" else True] * 3


@pytest.mark.parametrize("how", ["take", "claim", "lease"])
def test_a_message_that_is_done_at_once_leaves_nothing(
    outbox: Outbox, worker: psycopg.Connection[Any], how: str
) -> None:
    """Also one that was given back, or waited for its time: what did not fail costs nothing."""
    message = enqueue(outbox)
    had = began(worker, "lease")
    worker.execute("select relay.release('mail', %s, %s, '0 s', 'unknown type')", had)
    succeeds(worker, how)
    outbox.worker.execute(
        "select relay.enqueue('mail', '{}', deliver_at => now() + interval '1 ms')"
    )
    wait_until(
        lambda: outbox.value("select available_at < clock_timestamp() from relay.queue_messages")
    )
    succeeds(worker, how)
    assert kept(outbox, message) == []
    assert outbox.value("select count(*) from relay.attempts") == 0


def note_settings(outbox: Outbox, **attempts: Any) -> None:
    """Have relay note what a configuration says of attempts, as it does within seconds after its start."""
    settings = outbox.settings(attempts=attempts)
    with connect(settings.target_dsn) as target:
        prune(target, settings.group, settings.attempts)


@pytest.mark.parametrize("keep_done", [None, "1 hour"], ids=["deleted", "kept"])
@pytest.mark.parametrize("how", ["take", "claim", "lease"])
def test_the_configuration_says_which_attempts_of_messages_are_kept(
    outbox: Outbox, worker: psycopg.Connection[Any], how: str, keep_done: str | None
) -> None:
    """`attempts.record` and `attempts.keep` were those of sinks alone."""
    outbox.worker.execute(
        "select relay.declare_queue('mail', null, attempts => 3, keep_done => %s::interval)",
        (keep_done,),
    )
    note_settings(outbox, record="none")
    unkept = enqueue(outbox)
    assert fails(worker, how, "Timeout") == "retry"
    succeeds(worker, how)
    note_settings(outbox, record="all", keep="2h")
    at_once = enqueue(outbox)
    succeeds(worker, how)
    assert (kept(outbox, unkept), kept(outbox, at_once)) == ([], [(1, "delivered", None)])
    assert outbox.value(
        "select kept_until between now() + '1h' and now() + '2h' from relay.attempts"
    )


def test_relay_notes_its_configuration_of_attempts_once(outbox: Outbox) -> None:
    """A relay at rest writes nothing for it; another one, after a change, does."""
    noted = "select record, keep, max_bytes, xmin::text from relay.attempt_settings"
    with relaying(outbox.settings()):
        wait_until(lambda: bool(outbox.conn.execute(noted).fetchall()))
    ((*values, xmin),) = outbox.conn.execute(noted).fetchall()
    assert values == ["failures", timedelta(days=7), 1024**3]
    note_settings(outbox)
    assert outbox.conn.execute(noted).fetchall() == [(*values, xmin)]
    note_settings(outbox, record="all")
    assert outbox.column("select record from relay.attempt_settings") == ["all"]


@pytest.mark.parametrize("lease", [None, 30], ids=["claimed", "leased"])
def test_a_message_that_its_worker_drops_is_not_delivered(
    outbox: Outbox, worker: psycopg.Connection[Any], lease: int | None
) -> None:
    """A job that its worker had refused looked like one that had succeeded."""
    ids = [enqueue(outbox), enqueue(outbox, 2)]
    mail = Worker(outbox.worker_dsn, "mail", lease=lease, poll=0.05)

    @mail.handles()
    def handle(message: Message, _: object = None) -> None:
        if message.id == ids[0] and message.attempt == 1:
            raise RetryLater("closed", after=0)
        raise Drop("not ours\nat all")

    with working(mail):
        wait_until(lambda: outbox.value("select count(*) from relay.queue_messages") == 0)
    dropped = ("dropped", "Drop: not ours")
    assert kept(outbox, ids[0]) == [(1, "failed", "RetryLater: closed"), (2, *dropped)]
    assert kept(outbox, ids[1]) == [(1, *dropped)]
    event = outbox.value("select event_ids[1] from relay.attempts where number = 2")
    (destination,) = find(outbox.settings(), event).destinations
    assert (destination.state, destination.reason) == ("done", dropped[1])


@pytest.mark.parametrize("how", ["retry", "fail"])
def test_the_last_attempt_is_known_as_those_before_it(
    outbox: Outbox, worker: psycopg.Connection[Any], how: str
) -> None:
    """The error of what is not tried again was not stored; what was brought back had more errors than attempts.

    https://github.com/que-rb/que/issues/438
    https://github.com/flow-hydraulics/flow-wallet-api/issues/227
    https://github.com/oban-bg/oban/issues/309
    """
    message = enqueue(outbox)
    fails(worker, "claim", "first")
    with worker.transaction():
        had = began(worker, "claim")
        if how == "fail":
            worker.execute("select relay.fail('mail', %s, %s, 'given up')", had)
        else:
            assert retried(worker, had, "second") == "retry"
    if how == "retry":
        assert fails(worker, "lease", "given up") == "dead"
    numbers = [1, 2] if how == "fail" else [1, 2, 3]
    found = kept(outbox, message)
    assert [each[:2] for each in found] == [(number, "failed") for number in numbers]
    assert found[-1][2] == "given up"
    assert outbox.column("select error from relay.queue_dead_letters") == ["given up"]
    outbox.worker.execute("select relay.requeue('mail')")
    succeeds(worker, "claim")
    assert kept(outbox, message) == found
    assert outbox.value("select count(*) from relay.attempts") == len(found)


@pytest.mark.parametrize("how", ["take", "claim", "lease"])
def test_a_lease_that_has_ended_is_an_attempt_that_failed(
    outbox: Outbox, worker: psycopg.Connection[Any], how: str
) -> None:
    """A job whose process was killed had more attempts than errors, and nobody knew when it had run.

    https://github.com/oban-bg/oban_web/issues/7
    https://github.com/oban-bg/oban/issues/137
    """
    message = enqueue(outbox)
    worker.execute("select relay.lease('mail', 1, '1 ms')")
    wait_until(
        lambda: outbox.value("select available_at < clock_timestamp() from relay.queue_messages")
    )
    succeeds(worker, how)
    assert kept(outbox, message) == [
        (1, "failed", "the lease has expired"),
        (2, "delivered", None),
    ]
    (lasted,) = outbox.column("select seconds from relay.attempts where number = 1")
    assert 0 < lasted < 1


def test_a_message_whose_last_lease_has_ended_is_dead_with_all_its_attempts(
    outbox: Outbox, worker: psycopg.Connection[Any]
) -> None:
    """https://github.com/graphile/worker/issues/254"""
    message = enqueue(outbox)
    for _ in range(3):
        wait_until(
            lambda: worker.execute("select from relay.lease('mail', 1, '1 ms')").rowcount == 1
        )
    wait_until(
        lambda: (
            worker.execute("select from relay.claim('mail')").rowcount == 0
            and outbox.value("select count(*) from relay.queue_dead_letters") == 1
        )
    )
    assert kept(outbox, message) == [
        (number, "failed", "the lease has expired") for number in (1, 2, 3)
    ]


def test_a_message_that_kills_its_workers_is_dead_with_the_reason(
    outbox: Outbox, worker: psycopg.Connection[Any]
) -> None:
    """https://github.com/oban-bg/oban/issues/137"""
    message = enqueue(outbox)
    for _ in range(3):
        with worker.transaction(force_rollback=True):
            assert began(worker, "claim") == (message, 1)
        assert worker.execute("select from relay.claim('mail')").rowcount == 0
    ((number, outcome, error),) = kept(outbox, message)
    assert (number, outcome) == (1, "failed")
    assert "it may kill its workers" in error
    assert outbox.column("select error from relay.queue_dead_letters") == [error]


def test_who_works_messages_may_not_touch_what_is_kept_of_them(
    outbox: Outbox, worker: psycopg.Connection[Any]
) -> None:
    """A worker's attempts are written by relay's functions, with a worker's rights on the queue."""
    message = enqueue(outbox)
    fails(worker, "claim", "failed")
    assert len(kept(outbox, message)) == 1
    for forbidden in (
        "select from relay.attempts",
        "insert into relay.attempts select * from relay.attempts",
        "delete from relay.attempts",
        "select relay.note_attempt('(0,1)', 1, 'delivered', null)",
        "select relay.prune_attempts(0)",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            worker.execute(forbidden.encode())


def test_an_attempt_waits_for_no_slice_that_is_emptied_and_none_is_emptied_under_it(
    outbox: Outbox, worker: psycopg.Connection[Any]
) -> None:
    """The removal of old jobs and those who worked others waited for each other.

    https://github.com/oban-bg/oban/issues/1030
    """
    message, other = enqueue(outbox), enqueue(outbox)
    assert fails(worker, "claim", "first") == "retry"
    worker.execute("set lock_timeout = '10 s'")
    with psycopg.connect(outbox.relay_dsn) as relay:
        assert relay.execute("select relay.prune_attempts(0)").fetchone() == (1,)
        assert fails(worker, "claim", "not kept") == "retry"
        succeeds(worker, "claim")
    assert outbox.value("select count(*) from relay.attempts") == 0
    with worker.transaction():
        had = began(worker, "claim")
        assert retried(worker, had, "kept") == "retry"
        assert outbox.value("select relay.prune_attempts(0)") == 0
    assert [each[2] for each in (*kept(outbox, message), *kept(outbox, other))] == ["kept"]
    assert outbox.value("select relay.prune_attempts(0)") == 1


def test_an_erasure_takes_the_attempts_of_a_hosts_messages(
    outbox: Outbox, worker: psycopg.Connection[Any]
) -> None:
    """Errors may quote what was worked."""
    for number in (1, 2):
        enqueue(outbox, number)
        assert fails(worker, "claim", f"of {number}") == "retry"
        succeeds(worker, "claim")
    assert outbox.value("select count(*) from relay.attempts") == 4
    erase(outbox.settings(), str(host(1)), True, outbox.installer_dsn)
    assert outbox.conn.execute(
        "select hosts, error from relay.attempts order by number"
    ).fetchall() == [
        ([str(host(2))], "of 2"),
        ([str(host(2))], None),
    ]


def test_the_attempts_of_a_message_are_shown_wherever_those_of_sinks_are(
    outbox: Outbox, worker: psycopg.Connection[Any], tmp_path: Path
) -> None:
    """https://github.com/janbjorge/pgqueuer/pull/642"""
    message = enqueue(outbox)
    fails(worker, "claim", "Refused: 4711")
    event = outbox.value("select event_id from relay.queue_messages")
    config = outbox.config_file(tmp_path / "relay.yaml")

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, [*arguments, "--config", str(config)])
        assert result.exit_code == 0, result.output
        return result.output

    of_message = ("queue", "show", "mail", "--id", str(message))
    for said in (run(*of_message), run("event", event)):
        assert "queue:mail" in said
        assert "Refused: 4711" in said
    (told,) = json.loads(run(*of_message, "--json"))["attempts"]
    assert (told["number"], told["message_id"]) == (1, message)
    settings = outbox.settings(observe=console_of())
    with served(settings) as address:
        visitor, program = Visitor(address), Program(address)
        assert "queue:mail" in visitor.page(f"/groups/default/event?id={event}")
        (of_event,) = program.get(f"events/{event}")["attempts"]
        assert (of_event["consumer"], of_event["outcome"]) == ("queue:mail", "failed")
    succeeds(worker, "claim")
    found = find(settings, event)
    assert [(each.kind, each.name, each.state, each.attempts) for each in found.destinations] == [
        ("queue", "mail", "done", 2)
    ]
    assert [each.outcome for each in found.attempts] == ["delivered", "failed"]
    # A client of the HTTP API is not told what may quote a payload.
    assert (of_api := EventAttempt.of(found.attempts[1], True)).sink == "queue:mail"
    assert of_api.reason is None
