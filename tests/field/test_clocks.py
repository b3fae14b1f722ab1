"""One clock: what is due, old or expired is judged by the database's clock, however wrong that of relay's host is."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from relay import Delivery
from relay.admin import sinks as sinks_admin
from relay.admin.status import lag_seconds
from relay.cli.app import app
from relay.config.settings import Settings
from relay.retention.schedule import Schedule
from relay.schedules.ticking import Ticker
from relay.store.connections import connect
from tests.outbox import APPEND, Outbox, event, host, relaying, wait_until
from tests.webhook import Answer, Webhook

Shift = Callable[[timedelta], None]

MINUTES_10 = timedelta(minutes=10)
EITHER_WAY = [MINUTES_10, -MINUTES_10]
SHORT = {"wait": 0.1, "max_wait": 0.1}


class _IsDatetime(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, datetime)


@pytest.fixture
def shift(monkeypatch: pytest.MonkeyPatch) -> Shift:
    """Set relay's clock ahead of the database's, or behind it."""
    wall = time.time

    def shifted_by(offset: timedelta) -> None:
        class Shifted(datetime, metaclass=_IsDatetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
                return datetime.now(tz) + offset

        monkeypatch.setattr(time, "time", lambda: wall() + offset.total_seconds())
        for name, module in list(sys.modules.items()):
            if name.startswith("relay.") and getattr(module, "datetime", None) is datetime:
                monkeypatch.setattr(module, "datetime", Shifted)

    return shifted_by


def in_seconds(outbox: Outbox, seconds: float) -> str:
    """A time from now by the database's clock, as an event has it."""
    moment: datetime = outbox.value("select clock_timestamp()")
    return (moment + timedelta(seconds=seconds)).isoformat()


def posting(webhook: Webhook, **retry: Any) -> dict[str, Any]:
    """Every event goes to the projection and to the webhook."""
    return {
        "handlers": {
            "projection": {"type": "sql", "statement": APPEND},
            "hook": {
                "type": "http",
                "url": webhook.url,
                "retry": {**SHORT, **retry},
                # While it is open, no attempt counts.
                "circuit_breaker": {"failures": 1_000_000},
            },
        },
        "routes": [{"handlers": ["projection", "hook"]}],
    }


@pytest.mark.parametrize("offset", EITHER_WAY)
def test_events_are_due_by_the_databases_clock(
    outbox: Outbox, shift: Shift, offset: timedelta
) -> None:
    """Particular/NServiceBus.SqlServer#463, kagkarlsson/db-scheduler#364, apache/pulsar#25310."""
    with Webhook() as webhook:
        settings = outbox.settings(**posting(webhook))
        shift(offset)
        with relaying(settings):
            outbox.publish(host(1), event(1, deliver_at=in_seconds(outbox, 300)))
            outbox.publish(host(2), event(2, deliver_at=in_seconds(outbox, 1)))
            outbox.publish(host(3), event(3, deliver_at=in_seconds(outbox, -300)))
            wait_until(lambda: len(webhook.accepted) == 2)
            wait_until(lambda: outbox.value("select count(*) from projection") == 2)
            due = "select sink from relay.deferred where retry_at > now() + interval '4 minutes'"
            assert sorted(outbox.column(due)) == ["", "hook"]
    assert sorted(outbox.column("select amount from projection")) == [2, 3]


@pytest.mark.parametrize("offset", EITHER_WAY)
def test_retries_are_exhausted_by_the_databases_clock(
    outbox: Outbox, shift: Shift, offset: timedelta
) -> None:
    """The first attempt was of an instance whose clock was right."""
    with Webhook(lambda headers, body: Answer(503)) as webhook:
        settings = outbox.settings(**posting(webhook, max_elapsed=300))
        with relaying(settings):
            outbox.publish(host(1), event(1))
            wait_until(lambda: bool(outbox.column("select 1 from relay.deferred")))
        shift(offset)
        first = outbox.value("select first_failed_at from relay.deferred")
        with relaying(settings):
            wait_until(lambda: outbox.column("select attempts > 2 from relay.deferred") != [False])
            assert outbox.column("select 1 from relay.deferred")
            outbox.conn.execute(
                "update relay.deferred set first_failed_at = now() - interval '400 seconds'"
            )
            wait_until(lambda: bool(outbox.column("select 1 from relay.dead_letter_queue")))
    assert abs((first - datetime.now(UTC)).total_seconds()) < 60


FLIGHTS: list[tuple[datetime, float]] = []
MAY_END = threading.Event()


def wait_for_the_end(delivery: Delivery) -> None:
    """Note the deadline twice: before the test changes the clock, and after."""
    FLIGHTS.append((delivery.deadline, delivery.seconds_left))
    MAY_END.wait(20)
    FLIGHTS.append((delivery.deadline, delivery.seconds_left))
    if delivery.attempt == 1:
        raise ConnectionError


@pytest.mark.parametrize("offset", EITHER_WAY)
def test_a_call_keeps_its_time_when_the_clock_jumps(
    outbox: Outbox, shift: Shift, offset: timedelta
) -> None:
    """Neither is it cancelled, nor does its retry come later."""
    FLIGHTS.clear()
    MAY_END.clear()
    handler = {
        "type": "function",
        "callable": f"{__name__}:wait_for_the_end",
        "timeout": 30,
        "retry": {**SHORT, "defer_after": 0},
    }
    settings = outbox.settings(handlers={"mail": handler}, routes=[{"handlers": ["mail"]}])
    with relaying(settings):
        outbox.publish(host(1), event(1))
        wait_until(lambda: bool(FLIGHTS))
        shift(offset)
        time.sleep(0.5)
        MAY_END.set()
        outbox.wait_delivered("mail", 10)
    (before, left), (after, later), *again = FLIGHTS
    assert len(again) == 2
    assert 0 < later < left - 0.4
    assert abs(after - before - offset) < timedelta(seconds=0.1)


@pytest.mark.parametrize("text", ["2026-03-01T12:00", "2026-03-01T07:00-05:00"])
def test_a_time_without_a_zone_is_utc(outbox: Outbox, tmp_path: Path, text: str) -> None:
    """The session's time zone decided which dead letters a command discards, while lists are in UTC."""
    zone = "alter database {} set timezone = 'America/New_York'"
    outbox.conn.execute(zone.format(outbox.slot).encode())
    outbox.conn.execute(
        "insert into relay.dead_letter_queue (group_id, event_id, exception, created_dt)"
        " values ('default', 'early', '', '2026-03-01 11:59:00 UTC'),"
        " ('default', 'late', '', '2026-03-01 12:01:00 UTC')"
    )
    config = outbox.config_file(tmp_path / "relay.yaml")
    words = ("dlq", "discard", "--config", str(config), "--since", text, "--yes")
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    statuses = "select event_id from relay.dead_letter_queue where status = 'discarded'"
    assert outbox.column(statuses) == ["late"]


def retention(settings: Settings) -> None:
    """One turn of retention."""
    with (
        closing(connect(settings.source_dsn)) as source,
        closing(connect(settings.target_dsn)) as target,
    ):
        Schedule(settings, lambda: None).retain(source, target)


@pytest.mark.parametrize("days", [100, -100])
def test_what_is_kept_ages_by_the_databases_clock(database: str, shift: Shift, days: int) -> None:
    keep: dict[str, Any] = {"retention": {"keep": "7d"}}
    with Outbox(database) as outbox:
        outbox.install(**keep)
        settings = outbox.settings(**keep)
        outbox.fill(4, events=1)
        outbox.conn.execute(
            "update outbox_message_t set c_ts = now() - interval '8 days' where c_offset < 3"
        )
        with relaying(settings):
            outbox.wait_drained()
            outbox.wait_compared()
        outbox.conn.execute(
            "insert into relay.actions (group_id, sink, action, detail, acted_at)"
            " values ('default', '', 'young', '{}', now()), ('default', '', 'old', '{}', now() - interval '400 days')"
        )
        shift(timedelta(days=days))
        retention(settings)
        assert outbox.value("select count(*) from outbox_message_t") == 2
        assert outbox.column("select action from relay.actions") == ["young"]


@pytest.mark.parametrize("offset", EITHER_WAY)
def test_a_lag_is_measured_by_the_databases_clock(
    outbox: Outbox, shift: Shift, offset: timedelta
) -> None:
    settings = outbox.settings()
    with Webhook() as webhook:
        settings = outbox.settings(**posting(webhook))
        with relaying(settings):
            outbox.publish(host(1), event(0))
            outbox.wait_delivered("hook")
    outbox.publish(host(1), event(1, event_ts=in_seconds(outbox, -60)))
    shift(offset)
    lags = (
        lag_seconds(settings),
        sinks_admin.lag_seconds(settings)["hook"],
    )
    assert all(60 <= lag < 90 for lag in lags)


@pytest.mark.parametrize("offset", EITHER_WAY)
def test_schedules_are_due_by_the_databases_clock(
    outbox: Outbox, shift: Shift, offset: timedelta
) -> None:
    """citusdata/pg_cron#105."""
    publish = {"event_type": "cron.often", "host_id": str(host(1))}
    settings = outbox.settings(
        schedules={
            "five": {"every": "5m", "missed": "all", "publish": publish},
            "second": {"every": "1s", "missed": "all", "publish": publish},
        }
    )
    shift(offset)
    ticker = Ticker(settings)
    with closing(ticker):
        ticker.start()
        wait_until(
            lambda: (
                outbox.column("select published > 1 from relay.schedules where name = 'second'")
                == [True]
            )
        )
    ahead = """
        select count(*) from outbox_message_t
         where (metadata ->> 'scheduled_at')::timestamptz not between now() - interval '5 min' and now()
    """
    assert outbox.value(ahead) == 0
    (soon,) = outbox.column(
        "select next_at between since and since + interval '10 min' from relay.schedules where name = 'five'"
    )
    assert soon
    assert outbox.column("select sum(missed_ticks)::int from relay.schedules") == [0]
