"""Many deferred transactions that fall due together: bounded memory, turns for live traffic, few statements.

Reports: Celery 9849 (tasks with an ETA, all fetched at once, fill the memory), Sidekiq 3889 (a retry set of 100,000
delays what is scheduled), 843 (a poller takes two million due jobs at once) and 3436 (a set that is retried twice),
River 1318 (a portion of jobs that cannot be rescued hides those after it), pg-boss 874 (what dies again after a redrive
is lost).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from relay.admin.dead_letters import DeadLetters
from relay.config.settings import Settings
from relay.delivery import submission
from relay.faults import Rejected
from relay.model.dispositions import APPLIED, DeadLetter, Disposition
from relay.model.events import Decoder, Event, Events, Row
from relay.pipeline.settlement import Settlement, Unsettled
from relay.store import deferred
from relay.store.dead_letters.selection import DeadLetterSelection
from relay.store.deferred import Deferral
from relay.store.deferred import due as deferred_due
from relay.store.deferred.due import DueTransaction
from tests.deferrals import undecoded
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.process import Running, running
from tests.sinks import make_event
from tests.webhook import Answer, Webhook

MUCH = 1 << 40
"""More bytes than anything here has."""
DEAD = b'"dead"'
"""What the payload of an event has that its destination refuses at first."""


def with_hook(url: str, **more: Any) -> dict[str, Any]:
    """A configuration whose events all go to an endpoint."""
    return {
        "handlers": {"hook": {"type": "http", "url": url, **more}},
        "routes": [{"handlers": ["hook"]}],
        "dead_letters": {"brake": 0},
    }


# Memory.


MEGABYTES, EACH = 100, 50_000


def schedule(outbox: Outbox, settings: Settings) -> None:
    """Defer many transactions, each of a key, until a time that does not come by itself."""
    note = os.urandom(EACH // 2).hex()
    payload = {"amount": 1, "note": note}
    outbox.publish(host(1), event(deliver_at="2999-01-01", payload=payload))
    with relaying(settings):
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 1)
    columns = """
        group_id, sink, hosts, columns, commit_lsn, end_lsn, commit_ts, xid, first_offset, last_offset, events, size,
        sizes, data, retry_at, holds"""
    outbox.conn.execute(
        f"""
        insert into relay.deferred ({columns}, keys)
        select {columns}, array['key ' || n] from relay.deferred, generate_series(2, %s) as n
        """.encode(),
        (MEGABYTES * 1_000_000 // EACH,),
    )


def memory(relay: Running, field: str) -> int:
    """A figure of a process's memory in MB, such as VmRSS, and VmHWM for the most that it has had."""
    status = Path(f"/proc/{relay.process.pid}/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) // 1_000


@pytest.mark.rare
@pytest.mark.parametrize("of", ["the target", "a sink"])
def test_what_falls_due_together_does_not_fill_the_memory(
    outbox: Outbox, tmp_path: Path, of: str
) -> None:
    with Webhook() as webhook:
        changes = with_hook(webhook.url) if of == "a sink" else {}
        schedule(outbox, outbox.settings(**changes))
        config = outbox.config_file(tmp_path / "relay.yaml", **changes)

        def is_done() -> bool:
            # The endpoint keeps what it gets.
            webhook.requests.clear()
            return not outbox.column("select 1 from relay.deferred limit 1")

        with running(config, memory="own") as relay:
            relay.wait_said("streaming")
            # Nothing is fetched before its time.
            before = memory(relay, "VmRSS")
            outbox.conn.execute("update relay.deferred set retry_at = now()")
            wait_until(is_done, 120)
            assert memory(relay, "VmHWM") - before < MEGABYTES // 2
            assert relay.terminate() == 0


# Turns.


class Refusing:
    """An endpoint that refuses what is dead until it `accepts`, and takes its time."""

    def __init__(self) -> None:
        self.accepts = False

    def __call__(self, headers: dict[str, str], body: bytes) -> Answer:
        if DEAD not in body:
            return Answer()
        return Answer(after=0.01) if self.accepts else Answer(status=422)


@contextmanager
def with_dead_letters(
    outbox: Outbox, count: int, hosts: int
) -> Iterator[tuple[Settings, Webhook, DeadLetters]]:
    """A running relay, an endpoint that has refused `count` transactions, and accepts them now."""
    refusing = Refusing()
    with Webhook(refusing) as webhook:
        settings = outbox.settings(**with_hook(webhook.url, concurrency=4))
        for number in range(count):
            outbox.publish(host(number % hosts), event(payload={"kind": "dead"}))
        with relaying(settings):
            wait_until(
                lambda: outbox.value("select count(*) from relay.dead_letter_queue") == count
            )
            refusing.accepts = True
            yield settings, webhook, DeadLetters(settings, outbox.conn)


def arrived(webhook: Webhook) -> list[tuple[bool, str, int]]:
    """Of each event that the endpoint has accepted whether it was dead, its host, and its c_offset, in order."""
    return [
        (DEAD in each.body, each.event["hostid"], int(each.event["sequence"]))
        for each in webhook.accepted
    ]


@pytest.mark.rare
def test_live_events_come_between_the_replays_of_other_keys(outbox: Outbox) -> None:
    with with_dead_letters(outbox, 1_500, hosts=50) as (_, webhook, found):
        replayed = found.replay(found.find(DeadLetterSelection()), "all")
        wait_until(lambda: len(webhook.accepted) > 100)
        for number in range(50):
            outbox.publish(host(1_000 + number), event())
        assert found.outcome(replayed).done == 1_500
        wait_until(lambda: len(webhook.accepted) == 1_550)
    live = [place for place, (was_dead, *_) in enumerate(arrived(webhook)) if not was_dead]
    assert live[-1] < 1_000


@pytest.mark.rare
def test_the_replays_of_a_key_are_done_together_if_a_live_event_waits_for_them(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that not every live event waits for all replays; the order of each key stays."""
    monkeypatch.setattr(submission, "RETRIED_AT_ONCE", 50)
    with with_dead_letters(outbox, 1_500, hosts=50) as (_, webhook, found):
        replayed = found.replay(found.find(DeadLetterSelection()), "all")
        wait_until(lambda: len(webhook.accepted) > 100)
        for number in range(50):
            outbox.publish(host(number), event())
        assert found.outcome(replayed).done == 1_500
        wait_until(lambda: len(webhook.accepted) == 1_550)
    events = arrived(webhook)
    for number in range(50):
        offsets = [offset for _, of, offset in events if of == str(host(number))]
        assert offsets == sorted(offsets)
    live = [place for place, (was_dead, *_) in enumerate(events) if not was_dead]
    assert live[25] < 1_450


@pytest.mark.parametrize("sink", ["", "hook"])
def test_what_waits_for_replays_does_not_wait_for_those_of_all_keys(
    outbox: Outbox, sink: str
) -> None:
    keys, each = 50, 30
    replays = [
        (undecoded(), Deferral({f"key {number % keys}"}, dead_transaction=number))
        for number in range(keys * each)
    ]
    deferred.defer(outbox.conn, "default", replays, sink)
    done = deferred_due.heads(outbox.conn, "default", sink, 50, MUCH)
    live = [(undecoded(), Deferral({f"key {number}"})) for number in range(keys)]
    deferred.defer(outbox.conn, "default", live, sink)
    order: list[DueTransaction] = []
    while done:
        order += done
        deferred.remove(outbox.conn, [each.id for each in done])
        done = deferred_due.heads(outbox.conn, "default", sink, 50, MUCH)
    assert len(order) == len(replays) + len(live)
    for key in range(keys):
        ids = [each.id for each in order if each.keys == [f"key {key}"]]
        assert ids == sorted(ids)
    places = [place for place, each in enumerate(order) if each.dead_transaction is None]
    assert places[keys // 2] < 1_200


# Statements.


class OneEvent(Decoder):
    """Decodes every row as one event."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def event(self, data: bytes, commit_fields: Row) -> Event:
        return self._event


def unsettled(
    numbers: Sequence[int], disposition: Disposition, due: Sequence[DueTransaction] = ()
) -> list[Unsettled]:
    """Transactions of an event each, of 50 hosts; `due` has their rows if they were deferred."""
    return [
        Unsettled(
            undecoded(hosts=[str(number % 50)]),
            Events(
                undecoded().tuples,
                OneEvent(make_event(number, number % 50)),
                undecoded().commit,
            ),
            disposition,
            {f"{number % 50} host"},
            due=due[index] if due else None,
        )
        for index, number in enumerate(numbers)
    ]


def round_trips(conn: psycopg.Connection[Any], work: Callable[[], object]) -> int:
    """How often psycopg waits for the server meanwhile."""
    count, wait = Counter[str](), conn.wait

    def counted(*arguments: Any, **named: Any) -> Any:
        count["waits"] += 1
        return wait(*arguments, **named)

    conn.wait = counted  # type: ignore[method-assign]
    try:
        work()
    finally:
        conn.wait = wait  # type: ignore[method-assign]
    return count["waits"]


def test_many_due_transactions_are_read_in_few_round_trips(outbox: Outbox) -> None:
    """How long what is due takes must depend on the work, not on how many were due together.

    https://github.com/resque/resque-scheduler/issues/640
    """
    conn = outbox.conn
    deferred.defer(conn, "default", ((undecoded(), Deferral(())) for _ in range(300)))
    due = deferred_due.heads(conn, "default", "", 300, MUCH)
    assert len(due) == 300

    def read() -> None:
        with conn.transaction():
            assert len(deferred_due.transactions(conn, due, MUCH, None)) == 300

    assert round_trips(conn, read) < 20


@pytest.mark.parametrize("holds", [False, True], ids=["", "that hold their keys"])
def test_a_thousand_dead_letters_take_few_round_trips(outbox: Outbox, holds: bool) -> None:
    conn = outbox.conn
    settings = outbox.settings(**with_hook("http://localhost/"))
    settlement = Settlement(settings, "hook")
    dead = DeadLetter("hook", Rejected("HTTP 422"), holds=holds)
    count = 1_000

    def store(disposition: Disposition) -> list[int]:
        due = deferred_due.heads(conn, "default", "hook", count, MUCH)
        with conn.transaction():
            settlement.store(conn, unsettled([each.id for each in due], disposition, due))
        return [each.id for each in due]

    def settle() -> None:
        with conn.transaction():
            settlement.store(conn, unsettled(range(count), dead))

    def statuses() -> list[tuple[Any, ...]]:
        return conn.execute(
            "select status, count(*) from relay.dead_letter_queue group by 1"
        ).fetchall()

    found = DeadLetters(settings, conn)
    trips = [round_trips(conn, settle)]
    assert statuses() == [("dead", count)]
    again: list[tuple[Disposition, str]] = [
        (DeadLetter("hook", Rejected("again")), "dead"),
        (APPLIED, "replayed"),
    ]
    for disposition, status in again:
        trips.append(
            round_trips(conn, lambda: found.replay(found.find(DeadLetterSelection()), "all"))
        )
        assert statuses() == [("replaying", count)]
        assert found.find(DeadLetterSelection()).transactions == 0
        trips.append(round_trips(conn, partial(store, disposition)))
        assert statuses() == [(status, count)]
    assert outbox.value("select count(*) from relay.deferred") == 0
    assert max(trips) < 100


# What comes after what cannot be tried.


def test_what_is_blocked_does_not_hide_what_is_due(outbox: Outbox) -> None:
    blocked = [Deferral({"a"}, after=60), *(Deferral({"a"}) for _ in range(3_000))]
    deferred.defer(outbox.conn, "default", ((undecoded(), each) for each in blocked))
    outbox.conn.execute("update relay.deferred set predecessor = null")
    deferred.defer(outbox.conn, "default", [(undecoded(), Deferral({"b"}))])
    (due,) = deferred_due.heads(outbox.conn, "default", "", 500, MUCH)
    assert due.keys == ["b"]
