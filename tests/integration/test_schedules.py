"""Schedules: each time is published once, whoever is there to do it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.schedules.steps import event_id
from relay.schedules.ticking import Ticker, declare
from relay.store import schedules
from relay.store.connections import connect
from tests.outbox import Outbox, host, relaying, wait_until

EVENT = {"event_type": "cron.nightly", "host_id": str(host(1)), "payload": {"amount": 1}}


def declared(outbox: Outbox, name: str = "nightly", **more: Any) -> bool:
    """Declare a schedule in SQL; returns whether that changed anything."""
    given = {"name": name, "publish": Jsonb(EVENT), **more}
    arguments = ", ".join(f'"{key}" => %({key})s' for key in given)
    row = outbox.conn.execute(
        f"select relay.declare_schedule({arguments})".encode(), given
    ).fetchone()
    return row == (True,)


def turn(outbox: Outbox, settings: Settings | None = None) -> float:
    """Publish what is due, as a part of relay does."""
    ticker = Ticker(settings or outbox.settings())
    try:
        return ticker.turn()
    finally:
        ticker.release()


def shift(outbox: Outbox, by: timedelta, name: str = "nightly") -> None:
    """Let a schedule be as if the clock had jumped on."""
    outbox.conn.execute(
        """
        update relay.schedules set since = since - %(by)s, passed_at = passed_at - %(by)s, next_at = next_at - %(by)s,
               due_at = due_at - %(by)s, version = version + 1 where name = %(name)s
        """,
        {"by": by, "name": name},
    )


def published(outbox: Outbox) -> list[str]:
    return outbox.column(
        "select metadata ->> 'scheduled_at' from outbox_message_t where metadata ? 'schedule' order by c_offset"
    )


@pytest.mark.parametrize(("missed", "number"), [("latest", 1), ("all", 3), ("skip", 0)])
def test_what_was_missed(outbox: Outbox, missed: str, number: int) -> None:
    declared(outbox, every="1 h", missed=missed)
    turn(outbox)
    assert published(outbox) == []
    shift(outbox, timedelta(hours=3))
    turn(outbox)
    assert len(published(outbox)) == number
    (found,) = schedules.listed(outbox.conn)
    assert found.missed_ticks in (2, 3)  # the newest may be of this minute
    assert (found.published, len(found.last)) == (number, number)
    assert found.next_at is not None
    assert found.next_at > found.present
    turn(outbox)
    assert len(published(outbox)) == number


def test_an_event_has_the_template_and_an_id_of_its_time(outbox: Outbox) -> None:
    declared(outbox, every="1 h")
    shift(outbox, timedelta(hours=1))
    turn(outbox)
    (found,) = schedules.listed(outbox.conn)
    (moment,) = found.last
    rows = outbox.conn.execute(
        "select id, event_type, host_id::text, payload, metadata, transaction_count from outbox_message_t"
    ).fetchall()
    at = moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert rows == [
        (
            event_id(found.id, moment),
            "cron.nightly",
            str(host(1)),
            {"amount": 1},
            {"schedule": "nightly", "scheduled_at": at},
            1,
        )
    ]


def test_figures_say_what_is_overdue_paused_or_not_understood(outbox: Outbox) -> None:
    declared(outbox, "a", every="1 h")
    declared(outbox, "b", every="1 h")
    declared(outbox, "c", cron="0 3 99 * *")
    turn(outbox)
    for name in "ab":
        shift(outbox, timedelta(hours=3), name)
    outbox.conn.execute("select relay.pause_schedule('b', true)")
    overdue, paused, odd = schedules.figures(outbox.conn)
    assert overdue.overdue_seconds > 3600
    assert (paused.overdue_seconds, paused.is_paused) == (0, True)
    assert (odd.overdue_seconds, odd.stands_still) == (0, True)
    turn(outbox)
    overdue, *_ = schedules.figures(outbox.conn)
    assert (overdue.overdue_seconds, overdue.published) == (0, 1)
    assert overdue.missed_ticks in (2, 3)


def test_a_clock_that_jumps_back_repeats_nothing(outbox: Outbox) -> None:
    declared(outbox, every="1 h", missed="all")
    shift(outbox, timedelta(hours=5))
    turn(outbox)
    assert len(published(outbox)) == 5
    outbox.conn.execute(
        "update relay.schedules set next_at = now() - interval '4 h', due_at = now() - interval '4 h', "
        "version = version + 1"
    )
    turn(outbox)
    assert len(published(outbox)) == 5


def test_an_older_computation_publishes_nothing(outbox: Outbox) -> None:
    declared(outbox, every="1 h")
    shift(outbox, timedelta(hours=1))
    (found,) = schedules.listed(outbox.conn)
    turn(outbox)
    moment = datetime.now(UTC)
    late = schedules.DueTicks([moment], [event_id(found.id, moment)], moment, None, None)
    assert not schedules.tick(outbox.conn, found, late)
    assert len(published(outbox)) == 1


def test_times_of_a_pause_are_not_missed(outbox: Outbox) -> None:
    declared(outbox, every="1 h", missed="all")
    assert schedules.pause(outbox.conn, "nightly", True)
    assert not schedules.pause(outbox.conn, "nightly", True)
    shift(outbox, timedelta(hours=5))
    turn(outbox)
    assert schedules.pause(outbox.conn, "nightly", False)
    turn(outbox)
    assert published(outbox) == []


def test_a_single_time_comes_once(outbox: Outbox) -> None:
    declared(outbox, at=datetime.now(UTC) + timedelta(hours=1))
    turn(outbox)
    outbox.conn.execute(
        "update relay.schedules set at = at - interval '2 h', since = since - interval '3 h', due_at = null, "
        "version = version + 1"
    )
    turn(outbox)
    turn(outbox)
    assert len(published(outbox)) == 1
    (found,) = schedules.listed(outbox.conn)
    assert found.next_at is None


def test_what_nobody_understands_stands_still_and_others_go_on(outbox: Outbox) -> None:
    declared(outbox, "wrong", cron="61 * * * *")
    declared(outbox, every="1 h")
    shift(outbox, timedelta(hours=1))
    turn(outbox)
    wrong = schedules.named(outbox.conn, "wrong")
    assert wrong is not None
    assert wrong.fault == "minute: '61' is not from 0 to 59"
    assert len(published(outbox)) == 1


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({}, "give one of cron, every and at"),
        ({"cron": "* * *"}, "cron: must have five fields"),
        ({"every": "1 month"}, "every: must be whole seconds"),
        ({"every": "0.5 s"}, "every: must be whole seconds"),
        ({"every": "1 h", "missed": "some"}, "missed: must be latest, all or skip"),
        ({"every": "1 h", "jitter": "-1 s"}, "jitter: must be from 0"),
        ({"every": "1 h", "publish": Jsonb({"event_type": "a"})}, "host_id must be a UUID"),
        ({"every": "1 h", "publish": Jsonb({**EVENT, "typ": 1})}, "typ is not a key"),
        ({"every": "1 h", "timezone": "Europe/Pariss"}, 'time zone "Europe/Pariss" not recognized'),
    ],
)
def test_a_declaration_that_is_refused(outbox: Outbox, more: dict[str, Any], fault: str) -> None:
    with pytest.raises(psycopg.DataError, match=fault):
        declared(outbox, **more)


def test_the_configuration_declares_changes_and_drops(outbox: Outbox) -> None:
    assert declared(outbox, "of SQL", every="1 h")
    assert not declared(outbox, "of SQL", every="1 h")
    one = outbox.settings(schedules={"nightly": {"cron": "@daily", "publish": EVENT}})
    with connect(outbox.dsn) as conn:
        declare(conn, one)
        first = schedules.named(conn, "nightly")
        assert first is not None
        assert first.configured_by == "default"
        declare(conn, one)
        assert schedules.named(conn, "nightly").version == first.version  # type: ignore[union-attr]
        declare(conn, outbox.settings(schedules={"nightly": {"every": "30s", "publish": EVENT}}))
        changed = schedules.named(conn, "nightly")
        assert changed is not None
        assert changed.since > first.since
        assert changed.every == timedelta(seconds=30)
        with pytest.raises(psycopg.Error, match="nightly is in the configuration of group default"):
            conn.execute("select relay.drop_schedule('nightly')")
        taken = outbox.settings(schedules={"of SQL": {"every": "1h", "publish": EVENT}})
        with pytest.raises(
            ConfigurationError, match=r"schedules\.of SQL: of SQL is declared in SQL"
        ):
            declare(conn, taken)
        declare(conn, outbox.settings())
        assert [each.name for each in schedules.listed(conn)] == ["of SQL"]
        assert conn.execute("select relay.drop_schedule('of SQL')").fetchone() == (True,)
        assert conn.execute("select relay.drop_schedule('of SQL')").fetchone() == (False,)


def test_relay_publishes_and_applies_what_is_due(outbox: Outbox) -> None:
    with relaying(outbox.settings(schedules={"often": {"every": "1s", "publish": EVENT}})):
        wait_until(lambda: len(published(outbox)) >= 2, 60)
    times = published(outbox)
    assert len(times) == len(set(times))
    assert outbox.column("select distinct metadata ->> 'schedule' from outbox_message_t") == [
        "often"
    ]
