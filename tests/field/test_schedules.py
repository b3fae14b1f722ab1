"""What others' schedulers did around restarts, several instances and changes of clocks."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import psycopg
import pytest
from psycopg.types.json import Jsonb

from relay.admin import schedules as admin
from relay.client import Event
from relay.client.schedule import EventSchedule, drop_schedule, drop_schedule_async
from relay.config.settings import Settings
from relay.model.cron import Cron
from relay.observe.observer import schedules_shown
from relay.schedules import ticking as ticking_module
from relay.schedules.steps import MOST_EVENTS, step
from relay.schedules.ticking import Ticker
from relay.store import schedules
from relay.store.schedules import ScheduleFigures, ScheduleRow
from tests.chaos.proxy import Proxy
from tests.outbox import Outbox, host, wait_until
from tests.pgbouncer import pooled
from tests.postgres import EmbeddedServer, Server

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
EVENT = {"event_type": "cron.often", "host_id": str(host(1)), "payload": {}}


def row(**more: Any) -> ScheduleRow:
    """A schedule of ten seconds that was last worked at noon."""
    values: dict[str, Any] = {
        "name": "often",
        "id": UUID(int=1),
        "cron": None,
        "every": timedelta(seconds=10),
        "at": None,
        "timezone": "UTC",
        "missed": "latest",
        "jitter": timedelta(0),
        "configured_by": None,
        "since": NOON - timedelta(days=1),
        "paused_at": None,
        "next_at": None,
        "passed_at": NOON,
        "last": [],
        "last_event_id": None,
        "published": 0,
        "missed_ticks": 0,
        "fault": None,
        "version": 1,
        "present": NOON,
        **more,
    }
    return ScheduleRow(**values)


def times(expression: str, zone: str, after: str, count: int) -> list[str]:
    """The next times of an expression as its clock shows them, after a time in UTC."""
    begins = datetime.fromisoformat(f"{after}+00:00")
    found = islice(Cron.parse(expression, ZoneInfo(zone)).after(begins), count)
    return [each.astimezone(ZoneInfo(zone)).strftime("%d %H:%M %z") for each in found]


def test_a_suspended_host_does_not_replay_each_tick() -> None:
    """After 78 minutes of sleep one event comes, not 468.

    https://github.com/dbos-inc/dbos-transact-py/issues/803
    """
    found = step(row(), NOON + timedelta(minutes=78))
    assert found.times == [NOON + timedelta(minutes=78)]
    assert found.missed > 400
    assert found.next == NOON + timedelta(minutes=78, seconds=10)


def test_every_missed_time_is_published_in_portions() -> None:
    """A restart after an outage made one run of many that were due; all at once would be a burst.

    https://github.com/neochaotic/leoflow/pull/135
    """
    now, schedule = NOON + timedelta(minutes=78), row(missed="all")
    found: list[datetime] = []
    while True:
        portion = step(schedule, now)
        if not portion.times:
            break
        assert len(portion.times) <= MOST_EVENTS
        found += portion.times
        schedule = row(missed="all", passed_at=portion.passed)
    assert found == [NOON + timedelta(seconds=10 * n) for n in range(1, 469)]


def test_skipping_goes_past_the_grace_only() -> None:
    """What is late by less than the grace runs; what is older moves on without a run.

    https://github.com/NousResearch/hermes-agent/pull/104981
    """
    hourly = row(every=timedelta(hours=1), missed="skip")
    assert len(step(hourly, NOON + timedelta(hours=1, seconds=59)).times) == 1
    late = step(hourly, NOON + timedelta(hours=1, seconds=61))
    assert (late.times, late.missed, late.next) == ([], 1, NOON + timedelta(hours=2))


def test_jitter_ends_before_the_following_time() -> None:
    """What is right where the jitter is longer than the shortest interval? Here most of such times were left out.

    https://github.com/zeroclaw-labs/zeroclaw/issues/10969
    """
    minutes = row(every=timedelta(minutes=1), jitter=timedelta(hours=1))
    found: list[datetime] = []
    for second in range(0, 600, 5):
        now = NOON + timedelta(seconds=second)
        portion = step(minutes, now)
        assert portion.missed == 0
        found += portion.times
        minutes = row(
            every=minutes.every,
            jitter=minutes.jitter,
            passed_at=portion.passed or minutes.passed_at,
        )
    assert found[:9] == [NOON + timedelta(minutes=n) for n in range(1, 10)]


@pytest.mark.parametrize("seconds", [0.0, 0.01, 29.9, 59.9, 60.1, 119.0])
def test_no_look_back_is_needed(seconds: float) -> None:
    """A check every 60 seconds that looks back 60 seconds may miss a run.

    https://github.com/timgit/pg-boss/issues/327
    """
    each_minute = row(every=timedelta(minutes=1))
    found = step(each_minute, NOON + timedelta(minutes=1, seconds=seconds))
    assert len(found.times) == 1


def test_the_next_time_is_stored(outbox: Outbox) -> None:
    """A time at which the service was restarted was never run.

    https://github.com/timgit/pg-boss/issues/557, https://github.com/timgit/pg-boss/issues/914
    """
    declare(outbox, every="1 h")
    outbox.conn.execute(
        "update relay.schedules set since = now() - interval '90 min', version = version + 1"
    )
    turn(outbox)
    assert outbox.column("select count(*) from outbox_message_t") == [1]
    (left,) = outbox.column("select next_at > now() from relay.schedules")
    assert left is True


def test_a_day_is_not_skipped_where_the_clock_changes_at_midnight() -> None:
    """In Chile midnight was left out and the day with it.

    https://github.com/Hexagon/croner/issues/132
    """
    found = times("0 0 * * *", "America/Santiago", "2025-09-05T12:00", 4)
    assert found == ["06 00:00 -0400", "07 01:00 -0300", "08 00:00 -0300", "09 00:00 -0300"]


def test_each_quarter_of_the_repeated_hour_comes() -> None:
    """Nothing ran for the repeated hour.

    https://github.com/Steve-Mcl/node-red-contrib-cron-plus/issues/108
    https://github.com/jensrossbach/node-red-contrib-chronos/issues/247
    https://github.com/Steve-Mcl/node-red-contrib-cron-plus/issues/72
    """
    begins = datetime(2025, 10, 26, 0, 20, tzinfo=UTC)
    cron = Cron.parse("*/15 * * * *", ZoneInfo("Europe/London"))
    found = list(islice(cron.after(begins), 12))
    assert {after - before for before, after in pairwise(found)} == {timedelta(minutes=15)}


def test_a_fixed_time_comes_once_on_both_changes() -> None:
    """Half past two ran not at all, and half past one twice.

    https://github.com/temporalio/temporal/issues/8205
    https://github.com/kelektiv/node-cron/issues/563
    https://github.com/rundeck/rundeck/issues/6879
    https://github.com/netresearch/go-cron/issues/41
    """
    spring = times("30 2 * * *", "America/New_York", "2026-03-07T12:00", 2)
    assert spring == ["08 03:00 -0400", "09 02:30 -0400"]
    autumn = times("30 1 * * *", "America/New_York", "2026-10-31T12:00", 2)
    assert autumn == ["01 01:30 -0400", "02 01:30 -0500"]


def test_eight_in_the_morning_is_that_in_summer_and_in_winter() -> None:
    """The crontab had to be changed twice a year, since it knew UTC only.

    https://github.com/graphile/worker/issues/334, https://github.com/graphile/worker/issues/252
    https://github.com/citusdata/pg_cron/issues/16
    """
    spring = times("0 8 * * *", "America/New_York", "2026-03-06T14:00", 3)
    assert spring == ["07 08:00 -0500", "08 08:00 -0400", "09 08:00 -0400"]
    autumn = times("0 8 * * *", "America/New_York", "2026-10-30T14:00", 3)
    assert autumn == ["31 08:00 -0400", "01 08:00 -0500", "02 08:00 -0500"]


def test_a_time_in_the_repeated_hour_is_accepted() -> None:
    """Shortly before a change the expression was refused.

    https://github.com/healthchecks/healthchecks/issues/196
    """
    found = times("0 2 * * *", "Europe/Copenhagen", "2018-10-27T12:00", 2)
    assert found == ["28 02:00 +0200", "29 02:00 +0100"]


def test_a_clock_that_was_wrong_for_hours_delays_nothing_afterwards() -> None:
    """After the clock was set back, nothing ran for eight hours: that is how long no time is new.

    Of what was published while it was ahead nothing is repeated; the first time after it is.
    https://github.com/citusdata/pg_cron/issues/105
    """
    ahead = row(passed_at=NOON + timedelta(hours=8))
    back = step(ahead, NOON)
    assert (back.times, back.missed) == ([], 0)
    assert back.next == NOON + timedelta(hours=8, seconds=10)


def test_what_is_no_expression_is_an_error() -> None:
    """It was accepted and never ran.

    https://github.com/dbos-inc/dbos-transact-py/issues/123
    """
    with pytest.raises(ValueError, match="minute: "):
        Cron.parse("*/INVALID * * * *", ZoneInfo("UTC"))


def test_what_cannot_be_computed_stands_still() -> None:
    """One schedule without a time that can be reached stopped those of everybody.

    https://github.com/sixb-ai/sixb/pull/418, https://github.com/Steve-Mcl/node-red-contrib-cron-plus/pull/130
    """
    assert step(row(every=None, cron="0 0 30 2 *"), NOON).fault == (
        "'0 0 30 2 *': there is no such day"
    )
    found = step(row(every=timedelta(days=10_000_000)), NOON)
    assert found.fault == "date value out of range"


def declare(outbox: Outbox, **more: Any) -> None:
    arguments = "".join(f', "{key}" => %({key})s' for key in more)
    outbox.conn.execute(
        f"select relay.declare_schedule('often', %(event)s{arguments})".encode(),
        {"event": Jsonb(EVENT), **more},
    )


def turn(outbox: Outbox, settings: Settings | None = None) -> None:
    ticker = Ticker(settings or outbox.settings())
    try:
        ticker.turn()
    finally:
        ticker.release()


def work(settings: Settings) -> None:
    """Publish what is due until the process is killed."""
    ticker = Ticker(settings)
    ticker.start()
    ticker.join(600)


@contextmanager
def instances(settings: Settings, number: int) -> Iterator[list[BaseProcess]]:
    processes: list[BaseProcess] = [
        get_context("spawn").Process(target=work, args=(settings,)) for _ in range(number)
    ]
    for each in processes:
        each.start()
    try:
        yield processes
    finally:
        for each in processes:
            each.kill()
            each.join(10)


@pytest.mark.rare
def test_each_time_comes_once_from_instances_that_are_killed_and_frozen(outbox: Outbox) -> None:
    """Three jobs for one time, by processes that shared the name of their host and each took itself for the leader.

    https://github.com/oban-bg/oban-py/issues/32, https://github.com/oban-bg/oban/issues/1488
    https://github.com/oban-bg/oban-py/issues/17
    """
    chance = random.Random(1)
    declare(outbox, every="1 s", missed="all")
    # As after an outage: a thousand times are due.
    outbox.conn.execute(
        "update relay.schedules set since = now() - interval '1000 s', version = version + 1"
    )
    settings = outbox.settings()
    with instances(settings, 5) as processes:
        for _ in range(12):
            time.sleep(chance.random())
            pid = chance.choice(processes).pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            time.sleep(chance.random())
            os.kill(pid, signal.SIGCONT)
            killed = chance.randrange(len(processes))
            processes[killed].kill()
            processes[killed].join(10)
            processes[killed] = get_context("spawn").Process(target=work, args=(settings,))
            processes[killed].start()
        wait_until(lambda: outbox.column("select published from relay.schedules")[0] > 1000, 60)
    found = outbox.column(
        "select (metadata ->> 'scheduled_at')::timestamptz from outbox_message_t order by 1"
    )
    assert {after - before for before, after in pairwise(found)} == {timedelta(seconds=1)}
    assert outbox.column("select published from relay.schedules") == [len(found)]


def test_a_service_declares_and_drops_through_pgbouncer(outbox: Outbox) -> None:
    with pooled(outbox.relay_dsn) as dsn, psycopg.connect(dsn) as conn:
        schedule = EventSchedule(
            name="ours", cron="@daily", event=Event("cron.ours", payload={"a": 1}), host_id=host(1)
        )
        schedule.declare(conn)
        conn.commit()
        assert outbox.column("select publish ->> 'event_type' from relay.schedules") == [
            "cron.ours"
        ]
        drop_schedule(conn, "ours")
        conn.commit()
        assert outbox.column("select count(*) from relay.schedules") == [0]


@pytest.mark.parametrize("kind", [{"every": 60}, {"at": NOON}])
def test_a_service_declares_what_the_configuration_can(
    outbox: Outbox, kind: dict[str, Any]
) -> None:
    with psycopg.connect(outbox.publisher_dsn) as conn:
        EventSchedule(
            name="ours",
            event=Event("cron.ours", aggregate=("Shop", 1), payload={}, metadata={"by": "us"}),
            host_id=host(1),
            user_id=host(2),
            missed="skip",
            jitter=1.5,
            **kind,
        ).declare(conn)
    found = outbox.column(
        "select missed || jitter || (publish ->> 'aggregate_id') from relay.schedules"
    )
    assert found == ["skip00:00:01.51"]


@contextmanager
def ticking(settings: Settings, number: int = 1) -> Iterator[list[Ticker]]:
    """Instances that publish what is due."""
    tickers = [Ticker(settings) for _ in range(number)]
    for each in tickers:
        each.start()
    try:
        yield tickers
    finally:
        for each in tickers:
            each.close()


def let_five_minutes_pass(outbox: Outbox) -> None:
    """Let the schedule be as if an outage had lasted for its last five minutes."""
    outbox.conn.execute(
        """
        update relay.schedules set since = since - interval '5 min', next_at = next_at - interval '5 min',
               due_at = due_at - interval '5 min', version = version + 1
        """
    )


def test_after_an_outage_the_first_time_comes_at_once(server: Server, outbox: Outbox) -> None:
    """The scheduler did not survive that the database was away, or paused for longer and longer.

    https://github.com/dbos-inc/dbos-transact-py/issues/139, https://github.com/quartznet/quartznet/issues/740
    https://github.com/hangfire-postgres/Hangfire.PostgreSql/issues/392
    """
    declare(outbox, every="5 min")
    proxy = Proxy(outbox.relay_dsn)
    through = outbox.settings(source={**outbox.config()["source"], "dsn": proxy.dsn})
    allow = f"alter database {outbox.conn.info.dbname} allow_connections "
    with psycopg.connect(server.dsn(), autocommit=True) as other, ticking(through) as (ticker,):
        (condition,) = ticker.conditions
        wait_until(lambda: outbox.column("select due_at is not null from relay.schedules")[0])
        # The test's own session stays.
        other.execute(f"{allow} false".encode())
        proxy.cut()
        wait_until(lambda: condition.fault is not None)
        for _ in range(300):
            condition.fails("the attempts of five minutes")
        assert condition.pause <= 1
        let_five_minutes_pass(outbox)
        other.execute(f"{allow} true".encode())
        wait_until(lambda: outbox.value("select count(*) from outbox_message_t") == 1)
        wait_until(lambda: condition.fault is None)
    proxy.close()


def test_ordinary_work_leaves_no_error_in_the_servers_log(server: Server, outbox: Outbox) -> None:
    """Instances that published at once failed on a unique index at each time, in the server's log.

    https://github.com/bensheldon/good_job/issues/1230, https://github.com/bensheldon/good_job/issues/1446
    https://github.com/bensheldon/good_job/issues/1536, https://github.com/graphile/worker/issues/211
    """
    if not isinstance(server, EmbeddedServer):
        pytest.skip("only an embedded server's log can be read")
    before = server.cluster.log.stat().st_size
    publish = {"cron.often": {"every": "1s", "publish": EVENT}}
    settings = outbox.settings(schedules=publish)
    with ticking(settings, 4):
        wait_until(lambda: outbox.column("select published > 2 from relay.schedules") == [True])
        assert schedules.pause(outbox.conn, "cron.often", True)
        assert schedules.run_now(outbox.conn, "cron.often") is not None
        assert schedules.pause(outbox.conn, "cron.often", False)
        number = outbox.column("select published from relay.schedules")[0]
        wait_until(lambda: outbox.column("select published from relay.schedules")[0] > number)
    with ticking(outbox.settings()):
        wait_until(lambda: outbox.column("select 1 from relay.schedules") == [])
    written = server.cluster.log.read_bytes()[before:].decode(errors="replace")
    assert [line for line in written.splitlines() if "ERROR" in line or "FATAL" in line] == []


def test_instances_publish_through_pgbouncer(outbox: Outbox) -> None:
    """In transaction mode each statement may have another session of the server."""
    with pooled(outbox.relay_dsn, sessions=2) as dsn:
        source = {**outbox.config()["source"], "dsn": dsn}
        settings = outbox.settings(
            source=source, schedules={"often": {"every": "1s", "publish": EVENT}}
        )
        with ticking(settings, 3) as tickers:
            # So often that statements would be prepared.
            wait_until(
                lambda: outbox.column("select published > 6 from relay.schedules") == [True], 60
            )
            assert [each.conditions[0].fault for each in tickers] == [None] * 3
    times = outbox.column("select metadata ->> 'scheduled_at' from outbox_message_t")
    assert len(times) == len(set(times))


def test_the_commands_work_through_pgbouncer(outbox: Outbox) -> None:
    declare(outbox, every="1 h")
    with pooled(outbox.relay_dsn) as dsn:
        settings = outbox.settings(source={**outbox.config()["source"], "dsn": dsn})
        for _ in range(8):
            assert [each.name for each in admin.listed(settings)] == ["often"]
            assert len(admin.upcoming(settings, "often", 3)[1]) == 3
            assert admin.pause(settings, "often", "rest").changed
            assert admin.resume(settings, "often").changed
            admin.run_now(settings, "often")
        turn(outbox, settings)
        # Nothing is left in the sessions, which others use, too.
        with psycopg.connect(dsn, autocommit=True) as other:
            for _ in range(4):
                left = other.execute("select name from pg_settings where source = 'session'")
                assert {"search_path", "lock_timeout"}.isdisjoint(name for (name,) in left)
    assert outbox.value("select count(*) from outbox_message_t") == 8
    assert outbox.value("select count(*) from relay.actions") == 24


def test_a_service_declares_asynchronously_through_pgbouncer(outbox: Outbox) -> None:
    ours = EventSchedule(
        name="ours", every=60, event=Event("cron.ours", payload={}), host_id=host(1)
    )

    async def work(dsn: str) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            for _ in range(8):
                await ours.declare_async(conn)
                await conn.commit()
                await drop_schedule_async(conn, "ours")
                await conn.commit()
            await ours.declare_async(conn)

    with pooled(outbox.relay_dsn, sessions=2) as dsn:
        asyncio.run(work(dsn))
    assert outbox.column("select name from relay.schedules") == ["ours"]


def test_a_refused_schedule_that_is_dropped_is_no_fault(outbox: Outbox) -> None:
    """An alarm for a schedule that nobody has any more would stand until the process ends."""
    publish = Jsonb(EVENT | {"aggregate_version": "first"})
    outbox.conn.execute(
        "select relay.declare_schedule('bad', %s, every => '1 s', missed => 'all')", (publish,)
    )
    ticker = Ticker(outbox.settings())

    def is_failing() -> bool:
        ticker.turn()
        return ticker.condition.fault is not None

    try:
        wait_until(is_failing)
        outbox.conn.execute("select relay.drop_schedule('bad')")
        ticker.turn()
        assert ticker.condition.fault is None
    finally:
        ticker.release()


def test_times_of_a_dropped_schedule_are_not_those_of_its_successor(outbox: Outbox) -> None:
    """It was read, dropped, and declared again with other times, before what was computed of it was written."""
    outbox.conn.execute(
        "select relay.declare_schedule('often', %s, every => '1 s')", (Jsonb(EVENT),)
    )
    (former,) = schedules.due(outbox.conn, 10)
    outbox.conn.execute("select relay.drop_schedule('often')")
    outbox.conn.execute(
        "select relay.declare_schedule('often', %s, cron => '0 0 1 1 *')", (Jsonb(EVENT),)
    )
    assert not schedules.tick(outbox.conn, [(former, step(former, former.present))])
    (found,) = schedules.listed(outbox.conn)
    assert found.next_at is None


def test_a_peer_that_keeps_the_connection_and_says_nothing_is_left(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy whose server was gone acknowledged what it got: no timeout of TCP ends the wait for an answer."""
    monkeypatch.setattr(ticking_module, "ANSWER_SECONDS", 1.0)
    declare(outbox, every="1 s")
    proxy = Proxy(outbox.relay_dsn)
    settings = outbox.settings(source={**outbox.config()["source"], "dsn": proxy.dsn})
    with ticking(settings) as (ticker,):
        (condition,) = ticker.conditions
        wait_until(lambda: outbox.column("select published > 0 from relay.schedules") == [True])
        proxy.stall()
        wait_until(lambda: condition.fault is not None)
        assert condition.fault is not None
        assert "has not answered" in condition.fault.fault
        proxy.resume()
        number = outbox.column("select published from relay.schedules")[0]
        wait_until(lambda: outbox.column("select published from relay.schedules")[0] > number)
        wait_until(lambda: condition.fault is None)
    proxy.close()


def test_schedules_beyond_a_thousand_share_a_series() -> None:
    """50,000 series of one process slow a monitor down; an alert must see each schedule all the same."""
    figures = [ScheduleFigures(str(n), 1, 0, 0.0, False, None) for n in range(3000)]
    assert schedules_shown(figures[:1000]) == figures[:1000]
    figures[2000] = ScheduleFigures("late", 2, 1, 90.0, True, "no such day")
    *own, others = schedules_shown(figures)
    assert own == figures[:1000]
    assert others == ScheduleFigures("(others)", 2001, 1, 90.0, True, "no such day")
