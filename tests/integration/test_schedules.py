"""Schedules: each time is published once, whoever is there to do it."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import psycopg
import pytest
from psycopg.types.json import Jsonb

from relay.admin import schedules as admin
from relay.admin.check import examine
from relay.admin.schedules import UnknownSchedule
from relay.config.settings import Settings
from relay.faults import ConfigurationError, Unreachable
from relay.model.cron import Cron
from relay.schedules.steps import event_id
from relay.schedules.ticking import Ticker, declare
from relay.store import schedules
from relay.store.connections import connect
from tests.outbox import Outbox, host, relaying, wait_until
from tests.process import relay
from tests.unit.test_cron import CHANGES, EXPRESSIONS

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
    # Half an hour from now: a time of the last minute is never missed.
    minute = outbox.value("select extract(minute from now() + interval '30 min')::int")
    declared(outbox, cron=f"{minute} * * * *", missed=missed)
    turn(outbox)
    assert published(outbox) == []
    shift(outbox, timedelta(hours=3))
    turn(outbox)
    assert len(published(outbox)) == number
    (found,) = schedules.listed(outbox.conn)
    assert found.missed_ticks == 3
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
    assert not schedules.tick(outbox.conn, [(found, late)])
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


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "give one of cron, every and at"),
    ({"cron": "* * *"}, "cron: must have five fields"),
    ({"every": "1 month"}, "every: must be whole seconds"),
    ({"every": "0.5 s"}, "every: must be at least a second"),
    ({"every": "0 s"}, "every: must be at least a second"),
    ({"every": "1.5 s"}, "every: must be whole seconds"),
    ({"every": "36501 days"}, "every: must be at most 36500 days"),
    ({"at": "infinity"}, "at: must be a time from 1970 to 9000"),
    ({"at": "20000-01-01"}, "at: must be a time from 1970 to 9000"),
    ({"at": "0044-03-15 BC"}, "at: must be a time from 1970 to 9000"),
    ({"cron": "* * * * " + "1," * 500}, "cron: must have at most 1000 characters"),
    ({"every": "1 h", "name": "a\nb"}, "name: must not have control characters"),
    ({"every": "1 h", "missed": "some"}, "missed: must be latest, all or skip"),
    ({"every": "1 h", "jitter": "-1 s"}, "jitter: must be from 0"),
    ({"every": "1 h", "publish": Jsonb({"event_type": "a"})}, "host_id must be a UUID"),
    ({"every": "1 h", "publish": Jsonb({**EVENT, "typ": 1})}, "typ is not a key"),
    *(
        ({"cron": "@daily", "timezone": zone}, f"timezone: '{zone}' is not a time zone such as")
        for zone in ("Europe/Pariss", "europe/paris", "CEST", "UTC-3", "posixrules")
    ),
]


def test_a_declaration_that_is_refused(outbox: Outbox, subtests: pytest.Subtests) -> None:
    for more, fault in REFUSED:
        with subtests.test(str(more)), pytest.raises(psycopg.DataError, match=fault):
            declared(outbox, **more)


def test_the_configuration_declares_changes_and_drops(outbox: Outbox) -> None:
    assert declared(outbox, "of SQL", every="1 h")
    assert not declared(outbox, "of SQL", every="1 h")
    one = outbox.settings(schedules={"nightly": {"cron": "@daily", "publish": EVENT}})
    with connect(outbox.relay_dsn) as conn:
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


def test_the_commands(outbox: Outbox, tmp_path: Path) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml")

    def run(*arguments: str, status: int = 0) -> str:
        result = relay("schedule", *arguments, "--config", str(config))
        assert result.returncode == status, result.stdout + result.stderr
        assert (result.stderr == "") is (status == 0)
        return result.stdout if status == 0 else result.stderr

    def faulty(*arguments: str) -> str:
        text = run(*arguments, status=2)
        assert text.count("\n") == 1, text
        return text

    unknown = "relay: there is no schedule 'other' (schedules: nightly, often, past): put it into"
    declared(outbox, every="1 h", jitter="90 s")
    declared(outbox, "often", cron="0 3 30 2 *")
    declared(outbox, "past", at=datetime(2026, 1, 1, tzinfo=UTC))
    listed = run("list")
    assert "every 1:00:00" in listed
    assert "over\n" in listed
    (found, *_) = json.loads(run("list", "--json"))
    assert (found["every"], found["jitter"], found["last"]) == (3600, 90, [])
    assert len(json.loads(run("next", "nightly", "--count", "7", "--json"))) == 7
    result = relay("schedule", "next", "often", "--config", str(config))
    assert result.stderr == "'0 3 30 2 *': there is no such day\n"
    assert run("pause", "nightly", "--reason", "rest") == "schedule nightly is paused\n"
    assert run("pause", "nightly") == "schedule nightly was paused already\n"
    assert "1 paused" in relay("status", "--config", str(config)).stdout
    assert run("resume", "nightly") == "schedule nightly is resumed\n"
    assert run("resume", "nightly") == "schedule nightly was not paused\n"
    (event_id,) = re.findall(r"published event (\S+)", run("run-now", "nightly"))
    assert outbox.column("select id::text from outbox_message_t") == [event_id]
    for command in ("next", "pause", "resume", "run-now"):
        assert faulty(command, "other").startswith(unknown)
    hourly = {"every": "1h", "publish": EVENT}
    outbox.config_file(config, schedules={"nightly": hourly, "new": hourly})
    assert "'new' is in the configuration, but not declared yet: start" in faulty("pause", "new")
    text = "relay: schedules.nightly: nightly is declared in SQL: drop it there first\n"
    assert faulty("run") == text
    done = outbox.column("select action from relay.actions order by id")
    assert done == ["schedule pause", "schedule resume", "schedule run-now"]


def test_nothing_is_done_that_cannot_be_recorded(outbox: Outbox) -> None:
    declared(outbox, every="1 h")
    nowhere = outbox.settings(target={"dsn": "host=127.0.0.1 port=1 dbname=none"})
    with pytest.raises(Unreachable):
        admin.pause(nowhere, "nightly")
    with pytest.raises(Unreachable):
        admin.run_now(nowhere, "nightly")
    assert outbox.column("select paused_at from relay.schedules") == [None]
    assert published(outbox) == []


def test_an_error_names_some_of_many_schedules(outbox: Outbox) -> None:
    for number in range(25):
        declared(outbox, f"s{number:02}", every="1 h")
    with pytest.raises(UnknownSchedule, match=r"schedules: s00, .*, s19, …\)"):
        admin.upcoming(outbox.settings(), "other", 1)


def test_two_groups_cannot_have_one_schedule(outbox: Outbox) -> None:
    nightly = {"nightly": {"cron": "@daily", "publish": EVENT}}
    declare(outbox.conn, outbox.settings(schedules=nightly))
    other = outbox.settings(group="other", schedules=nightly)
    text = "nightly is in the configuration of group default: give one of the two another name"
    with pytest.raises(ConfigurationError, match=text):
        declare(outbox.conn, other)
    # The other group's schedules are not its to drop.
    declare(outbox.conn, outbox.settings(group="other"))
    assert [each.name for each in schedules.listed(outbox.conn)] == ["nightly"]


def test_a_renamed_schedule_goes_on_under_its_new_name(outbox: Outbox) -> None:
    hourly = {"every": "1h", "missed": "all", "publish": EVENT}
    turn(outbox, outbox.settings(schedules={"nightly": hourly}))
    shift(outbox, timedelta(hours=1))
    renamed = outbox.settings(schedules={"hourly": hourly})
    turn(outbox, renamed)
    turn(outbox, renamed)
    # Times before it had its name are not missed.
    assert published(outbox) == []
    assert [each.name for each in schedules.listed(outbox.conn)] == ["hourly"]


def test_who_may_publish_does_not_act_for_the_configuration(outbox: Outbox) -> None:
    with connect(outbox.relay_dsn) as conn:
        declare(conn, outbox.settings(schedules={"nightly": {"cron": "@daily", "publish": EVENT}}))
    outbox.conn.execute("set role relay_publisher")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="configured_by: only a member"):
        outbox.conn.execute("select relay.drop_schedule('nightly', 'default')")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="configured_by: only a member"):
        declared(outbox, every="1 h", configured_by="default")
    outbox.conn.execute("reset role; set role relay")
    assert declared(outbox, every="1 h", configured_by="default")
    outbox.conn.execute("reset role")


def test_a_time_that_has_passed_is_found_by_the_check(outbox: Outbox) -> None:
    declared(outbox, at=datetime(2026, 1, 1, tzinfo=UTC))
    turn(outbox)
    found = [each.text for each in examine(outbox.settings()) if each.subject == "schedules"]
    assert found == [
        "nightly: its time had passed when it was declared, so it publishes nothing: give it another time"
    ]


def test_an_owner_acts_for_its_schedules_and_for_no_others(outbox: Outbox) -> None:
    """Whoever might publish could pause, change and drop what another service had declared."""
    ours, theirs = f"{outbox.slot}_ours", f"{outbox.slot}_theirs"
    for role in (ours, theirs):
        outbox.conn.execute(f"create role {role} in role relay_publisher".encode())

    def acts() -> list[str]:
        """What the present role may do."""
        found = []
        for call in (
            "pause_schedule('nightly', true)",
            "pause_schedule('nightly', false)",
            "run_schedule('nightly')",
        ):
            try:
                outbox.conn.execute(f"select relay.{call}".encode())
                found.append(call.partition("_")[0])
            except psycopg.errors.InsufficientPrivilege as error:
                assert ours in str(error)  # noqa: PT017
        return found

    try:
        outbox.conn.execute(f"set role {ours}".encode())
        assert declared(outbox, every="1 h")
        assert acts() == ["pause", "pause", "run"]
        outbox.conn.execute(f"set role {theirs}".encode())
        assert acts() == []
        assert not declared(outbox, every="1 h")
        text = f"nightly belongs to the role {ours}: only its members"
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match=text):
            declared(outbox, every="2 h")
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match=text):
            outbox.conn.execute("select relay.drop_schedule('nightly')")
        outbox.conn.execute("set role relay")
        assert acts() == ["pause", "pause", "run"]
        # One of a former edition belongs to whom declares it again.
        outbox.conn.execute("reset role; update relay.schedules set owner = null")
        outbox.conn.execute(f"set role {theirs}".encode())
        assert acts() == ["pause", "pause", "run"]
        assert declared(outbox, every="2 h")
        outbox.conn.execute("reset role")
        assert outbox.column("select owner::text from relay.schedules") == [theirs]
    finally:
        outbox.conn.execute("reset role")
        outbox.conn.execute(f"drop role {ours}, {theirs}".encode())


def test_a_publisher_does_not_act_for_the_configuration(outbox: Outbox) -> None:
    declare(
        outbox.conn, outbox.settings(schedules={"nightly": {"cron": "@daily", "publish": EVENT}})
    )
    outbox.conn.execute("set role relay_publisher")
    for call in ("pause_schedule('nightly', true)", "run_schedule('nightly')"):
        with pytest.raises(
            psycopg.errors.InsufficientPrivilege,
            match="nightly is in the configuration of group default: only a member of the role relay",
        ):
            outbox.conn.execute(f"select relay.{call}".encode())
    outbox.conn.execute("reset role")


def test_many_that_are_due_are_published_in_a_few_commits(outbox: Outbox) -> None:
    """One whose event is refused holds up none of them."""
    outbox.conn.execute(
        "select relay.declare_schedule(name => 's' || n, every => '1 h', publish => %s)"
        " from generate_series(1, 250) as n",
        (Jsonb(EVENT),),
    )
    declared(outbox, "odd", every="1 h", publish=Jsonb({**EVENT, "aggregate_version": "first"}))
    outbox.conn.execute("update relay.schedules set since = now() - interval '70 min'")
    ticker = Ticker(outbox.settings())
    try:
        for _ in range(10):
            ticker.turn()
        assert ticker.condition.fault is not None
        assert ticker.condition.fault.fault.startswith("odd: ")
    finally:
        ticker.release()
    assert len(published(outbox)) == 250
    # Those of its portion are tried one by one.
    assert outbox.value("select count(distinct c_xid) from outbox_message_t") <= 110


def test_the_least_time_is_found_by_an_index(outbox: Outbox) -> None:
    """With 10,000 schedules the look for it read all of them, every two seconds and after each time."""
    outbox.conn.execute(
        """
        insert into relay.schedules (name, every, timezone, missed, jitter, publish, due_at, next_at)
        select 's' || n, '1 h', 'UTC', 'latest', '0 s', '{}', now() + make_interval(secs => n), now()
          from generate_series(1, 10000) as n
        """
    )
    outbox.conn.execute("vacuum analyze relay.schedules")
    read = "select coalesce(seq_tup_read, 0) from pg_stat_xact_all_tables where relid = 'relay.schedules'::regclass"
    with psycopg.connect(outbox.relay_dsn) as conn:
        wait = schedules.wait(conn)
        assert wait is not None
        assert 0 < wait < 10
        assert schedules.due(conn, 100) == []
        assert conn.execute(read).fetchone() == (0,)


_IN_SQL = """
    with minutes as (
        select m, m at time zone %(zone)s as local
          from generate_series(%(begins)s - interval '25 h', %(until)s, interval '1 min') as m),
    changes as (
        select m, local, lag(local) over (order by m) as before from minutes),
    shown as (
        select m, local as at from minutes
        union all
        select m, each from changes
         cross join generate_series(before + interval '1 min', local - interval '1 min', interval '1 min') as each
         where %(fixed)s and local - before > interval '1 min'),
    first as (
        select at, m, row_number() over (partition by at order by m) as number from shown)
    select distinct m from first
     where m > %(begins)s and (number = 1 or not %(fixed)s)
       and extract(minute from at) = any (%(minutes)s) and extract(hour from at) = any (%(hours)s)
       and case when %(both)s then extract(day from at) = any (%(days)s) and extract(dow from at) = any (%(weekdays)s)
                else extract(day from at) = any (%(days)s) or extract(dow from at) = any (%(weekdays)s) end
     order by m
"""
"""When an expression is due, by PostgreSQL's own time zones: other than tests/unit/test_cron.py computes it."""


def test_changes_of_clocks_are_those_that_postgresql_knows(outbox: Outbox) -> None:
    for zone, day in CHANGES:
        for expression in EXPRESSIONS:
            cron = Cron.parse(expression, ZoneInfo(zone))
            begins = datetime.fromisoformat(f"{day}T00:00:00+00:00") - timedelta(hours=30)
            until = begins + timedelta(hours=84)
            given = {
                "zone": zone,
                "begins": begins,
                "until": until,
                "fixed": cron.fixed,
                "both": cron.any_day or cron.any_weekday,
                **{
                    name: list(getattr(cron, name))
                    for name in ("minutes", "hours", "days", "weekdays")
                },
            }
            found = [each for (each,) in outbox.conn.execute(_IN_SQL.encode(), given)]
            own = list(islice(cron.after(begins), len(found) + 1))
            assert own[:-1] == found, (zone, expression)
            assert own[-1] > until
