"""Attempts to deliver are kept, as `attempts` of the configuration says, and no longer than that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from relay import Drop
from relay.admin import sinks
from relay.admin.events import EventDestination, find
from relay.admin.retention import erase
from relay.config.settings import Settings
from relay.retention import schedule
from relay.store import attempts
from relay.store.attempts import NewAttempt
from relay.store.connections import connect
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.webhook import Answer, Webhook

_KEPT = """
    select number, outcome, status, error, destination is not null from relay.attempts
     where event_ids @> array[%s] order by began_at
"""
_AT_ONCE = {"wait": 0.05, "max_wait": 0.05, "jitter": 0, "defer_after": 0}


@contextmanager
def hooked(
    outbox: Outbox, answer: Callable[[], Answer], of_all: dict[str, Any], **more: Any
) -> Iterator[tuple[Settings, Webhook]]:
    """A webhook that gets all events, and the configuration."""
    with Webhook(lambda _headers, _body: answer()) as webhook:
        hook = {"type": "http", "url": f"{webhook.url}?key=secret", "retry": _AT_ONCE, **more}
        settings = outbox.settings(
            handlers={"hook": hook}, routes=[{"handlers": ["hook"]}], attempts=of_all
        )
        outbox.install_again(settings)
        yield settings, webhook


def publish(outbox: Outbox) -> str:
    """Publish one event; returns its id."""
    transaction = outbox.publish(host(1), event())
    return str(
        outbox.value("select id from outbox_message_t where transaction_id = %s", (transaction,))
    )


def kept(outbox: Outbox, event_id: str) -> list[tuple[Any, ...]]:
    """The attempts that are kept of an event, in order."""
    return outbox.conn.execute(_KEPT, (event_id,)).fetchall()


@pytest.mark.parametrize("batch", [{}, {"each": "batch", "max_wait": 0}], ids=["one", "batch"])
def test_an_attempt_that_fails_is_kept_with_the_delivery_after_it(
    outbox: Outbox, batch: dict[str, Any]
) -> None:
    """With what delivers later; an event that is delivered at once is none of them."""
    answers = [Answer(503, body=b"quotes 4711"), Answer(503), Answer(200)]
    with (
        hooked(outbox, lambda: answers.pop(0) if answers else Answer(), {}, **batch) as (of, _),
        relaying(of),
    ):
        failed = publish(outbox)
        wait_until(
            lambda: [each[:3] for each in kept(outbox, failed)][2:] == [(3, "delivered", 200)]
        )
        at_once = publish(outbox)
        outbox.wait_delivered("hook")
    assert [each[:3] for each in kept(outbox, failed)[:2]] == [
        (1, "failed", 503),
        (2, "failed", 503),
    ]
    assert all(each[4] for each in kept(outbox, failed))
    assert kept(outbox, at_once) == []
    (text,) = outbox.column("select string_agg(to_jsonb(a)::text, '') from relay.attempts as a")
    assert "secret" not in text
    assert "4711" not in text


@pytest.mark.parametrize(
    ("attempts", "of_sink", "expected"),
    [
        ({"record": "all"}, None, [("delivered", 202, None)]),
        ({"record": "all", "answers": True}, None, [("delivered", 202, "taken")]),
        ({"record": "none"}, "all", [("delivered", 202, None)]),
        ({"record": "all"}, "none", []),
        ({}, None, []),
    ],
    ids=["all", "with answers", "all of one sink", "none of one sink", "failures"],
)
def test_what_is_kept_of_a_delivery_that_succeeds_at_once(
    outbox: Outbox, attempts: dict[str, Any], of_sink: str | None, expected: list[Any]
) -> None:
    """As the configuration says; its answer only where that is asked for."""
    with (
        hooked(outbox, lambda: Answer(202, body=b"taken"), attempts, attempts=of_sink) as (of, _),
        relaying(of),
    ):
        number = publish(outbox)
        outbox.wait_delivered("hook")
    found = outbox.conn.execute(
        "select outcome, status, answer from relay.attempts where event_ids @> array[%s]", (number,)
    ).fetchall()
    assert found == expected


def test_an_attempt_names_all_its_events_and_any_answer_can_be_kept(outbox: Outbox) -> None:
    """A response has whatever its sender likes."""
    body = b'\0"\\{x},\xff'
    with (
        hooked(
            outbox,
            lambda: Answer(200, body=body),
            {"record": "all", "answers": True},
            each="transaction",
        ) as (of, _),
        relaying(of),
    ):
        transaction = outbox.publish(host(1), event(), event())
        outbox.wait_delivered("hook")
    ids = outbox.column(
        "select id::text from outbox_message_t where transaction_id = %s", (transaction,)
    )
    found = outbox.conn.execute("select event_ids, hosts, answer from relay.attempts").fetchall()
    assert [(set(each[0]), each[1:]) for each in found] == [
        (set(ids), ([str(host(1))], '\ufffd"\\{x},\ufffd'))
    ]


def state(settings: Settings, event_id: str) -> EventDestination:
    """Where an event is at the sink."""
    (found,) = (each for each in find(settings, event_id).destinations if each.name == "hook")
    return found


def test_an_event_that_is_older_than_its_sink_was_never_for_it(outbox: Outbox) -> None:
    """By the sink's first position; after it was rebuilt from the beginning, it was for it after all."""
    before = outbox.settings()
    outbox.install_again(before)
    with relaying(before):
        old = publish(outbox)
        outbox.wait_handled()
        outbox.wait_drained()
    with hooked(outbox, Answer, {}) as (settings, webhook):
        new = publish(outbox)
        with relaying(settings):
            outbox.wait_delivered("hook")
            assert (state(settings, old).state, state(settings, new).state) == ("before", "passed")
            assert (state(settings, new).reason or "").startswith("delivered at the first attempt")
            sinks.rebuild(settings, "hook")
            wait_until(lambda: old in webhook.ids())
            outbox.wait_delivered("hook")
        assert state(settings, old).state == "passed"


async def dropping(_: Any) -> None:
    """Want nothing."""
    raise Drop("not wanted")


@pytest.mark.parametrize("each", ["transaction", "batch"])
def test_an_event_that_its_sink_has_dropped_is_not_called_delivered(
    outbox: Outbox, each: str
) -> None:
    """It is said by whom, and why."""
    hook = {"type": "function", "callable": f"{__name__}:dropping", "each": each}
    settings = outbox.settings(handlers={"hook": hook}, routes=[{"handlers": ["hook"]}])
    outbox.install_again(settings)
    with relaying(settings):
        number = publish(outbox)
        outbox.wait_delivered("hook")
    found = state(settings, number)
    assert (found.state, found.attempts) == ("dropped", 1)
    assert "not wanted" in (found.reason or "")


def test_a_delivery_after_failures_has_a_time_a_count_and_an_address(outbox: Outbox) -> None:
    """All of which nobody could tell before."""
    answers = [Answer(503), Answer(503)]
    with (
        hooked(outbox, lambda: answers.pop() if answers else Answer(), {}) as (settings, _),
        relaying(settings),
    ):
        number = publish(outbox)
        wait_until(lambda: state(settings, number).state == "delivered")
        found = state(settings, number)
        attempts = find(settings, number).attempts
    assert found.attempts == 3
    assert found.since == attempts[0].began_at
    assert (found.reason or "").startswith("POST http://127.0.0.1:")
    assert [each.status for each in attempts] == [204, 503, 503]


_NOTE_COMMITS = """
    create table public.stored (xid xid8);
    create function public.note() returns trigger language plpgsql security definer as
        $$ begin insert into public.stored values (pg_current_xact_id()); return null; end $$;
    create trigger note after insert on relay.positions for each statement execute function public.note();
"""


def test_attempts_that_are_kept_cost_no_commit_of_their_own(outbox: Outbox) -> None:
    """They are stored with the position that they have moved: in its transaction."""
    with hooked(outbox, Answer, {"record": "all"}) as (settings, _):
        outbox.conn.execute(_NOTE_COMMITS)
        with relaying(settings):
            for _ in range(20):
                publish(outbox)
            outbox.wait_delivered("hook")
    assert outbox.value("select count(*) from relay.attempts") == 20
    alone = (
        "select count(*) from relay.attempts where xmin not in (select xid::xid from public.stored)"
    )
    assert outbox.value(alone) == 0


def slices(outbox: Outbox) -> dict[int, int]:
    """How many attempts there are, by the days until they do not count any more."""
    return dict(
        outbox.conn.execute(
            "select extract(day from date_trunc('day', kept_until at time zone 'utc')"
            " - date_trunc('day', now() at time zone 'utc'))::int, count(*) from relay.attempts group by 1"
        ).fetchall()
    )


_FILL = """
    insert into relay.attempts (slice, kept_until, group_id, consumer, event_ids, hosts, number, began_at, seconds,
                                outcome, error)
    select extract(epoch from d.until)::bigint / 86400 % 9, d.until, 'other', 'hook', array[gen_random_uuid()::text],
           '{}', 1, now(), 0.1, 'failed', repeat('x', 500)
      from (select now() + make_interval(days => day) as until from generate_series(-1, 7) as day) as d,
           generate_series(1, 200)
"""


@pytest.mark.parametrize(
    ("most", "left"), [(1024**3, list(range(8))), (1024**2, [3, 4, 5, 6, 7])], ids=["time", "room"]
)
def test_attempts_are_removed_by_day_as_their_time_or_their_room_ends(
    outbox: Outbox, most: int, left: list[int]
) -> None:
    """A slice is emptied as a whole, so that nothing bloats; where there is no room, those that end first go."""
    outbox.conn.execute(_FILL.encode())
    assert set(slices(outbox)) == set(range(-1, 8))
    settings = outbox.settings(attempts={"max_bytes": most})
    with connect(settings.source_dsn) as source, connect(settings.target_dsn) as target:
        schedule.Schedule(settings, lambda: None).retain(source, target)
    assert sorted(slices(outbox)) == left
    assert set(slices(outbox).values()) == {200}


def test_the_room_of_a_group_is_not_taken_from_another(outbox: Outbox) -> None:
    """The least `max_bytes` counted for all groups of a target: one that kept little emptied the slices of others."""
    outbox.conn.execute(_FILL.encode())
    of = outbox.settings().attempts
    with connect(outbox.relay_dsn) as target:
        attempts.prune(target, "other", of)
        attempts.prune(target, "default", of.model_copy(update={"max_bytes": 1024**2}))
    assert sorted(slices(outbox)) == list(range(8))


def test_ids_of_any_text_are_kept_as_they_are(outbox: Outbox, narrow: str) -> None:
    """An id with U+001F was two; one that the target's encoding lacks was another one than where it is deferred."""
    ids = ["a\x1fb", 'c","d\\', "\N{HEAVY CHECK MARK}", ""]
    answer = 'é\0"\\\N{HEAVY CHECK MARK}'
    tried = NewAttempt(ids, ids[:2], 1, 2.5, 0.5, "failed", None, 503, None, answer, None)
    with Outbox(narrow) as narrow_target:
        narrow_target.install()
    wide = (outbox.relay_dsn, ids[2], "\ufffd")
    for dsn, mark, nul in (wide, (narrow_target.relay_dsn, "\\u2714", "\\ufffd")):
        with connect(dsn) as target:
            attempts.add(target, "default", "hook", timedelta(days=1), [tried, tried])
            stored = target.execute(
                "select event_ids, hosts, answer from relay.attempts"
            ).fetchall()
        assert stored == [([*ids[:2], mark, ""], ids[:2], f'é{nul}"\\{mark}')] * 2


def test_who_reads_attempts_keeps_nobody_else_waiting(outbox: Outbox) -> None:
    """A dump reads for hours: what is to be removed stays until it has ended, and sinks write beside it."""
    with hooked(outbox, lambda: Answer(200), {"record": "all"}) as (settings, _):
        event_id = publish(outbox)
        with relaying(settings):
            wait_until(lambda: bool(kept(outbox, event_id)))
            with connect(outbox.superuser_dsn) as dump, dump.transaction():
                assert dump.execute("select count(*) from relay.attempts").fetchone() == (1,)
                with connect(settings.target_dsn) as relay:
                    assert relay.execute("select relay.prune_attempts(0)").fetchone() == (0,)
                later = publish(outbox)
                wait_until(lambda: bool(kept(outbox, later)))
    assert outbox.value("select relay.prune_attempts(0)") == 1


def test_an_erasure_takes_the_attempts_of_a_host(outbox: Outbox) -> None:
    """And leaves those of others."""
    outbox.conn.execute(_FILL.encode())
    of_hosts = [[str(host(1))], [str(host(2))], [str(host(1)), str(host(2))]]
    outbox.conn.execute(
        "update relay.attempts set group_id = 'default', hosts = %s", (of_hosts[1],)
    )
    for each in (of_hosts[0], of_hosts[2]):
        outbox.conn.execute(
            "insert into relay.attempts select (jsonb_populate_record(a, jsonb_build_object('hosts', %s::text[]))).*"
            " from relay.attempts as a where a.hosts = %s limit 1",
            (each, of_hosts[1]),
        )
    erase(outbox.settings(), str(host(1)), True, outbox.installer_dsn)
    assert outbox.column("select distinct hosts from relay.attempts") == [of_hosts[1]]
