"""Sixty days of rotation while events are published and relayed, and the rotating instance is killed.

One sink's endpoint is away for two weeks, another sink is paused for more than three.
"""

from __future__ import annotations

import random
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from threading import Event, Thread, Timer
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from relay.admin.retention import partition, partition_new
from relay.config.settings import Settings
from relay.config.source import OWN_OUTBOX
from relay.retention.partitions import partitions
from relay.retention.schedule import Schedule
from relay.store.connections import connect
from relay.store.positions import sinks
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.webhook import Answer, Answers, Webhook

pytestmark = [pytest.mark.chaos, pytest.mark.rare]

DAYS = 60
SKEW = """
    create table skew (by interval);
    insert into skew values ('0');
    create function skew() returns interval language sql stable security definer as 'select by from public.skew';
    alter table outbox_message_t alter c_ts set default now() + public.skew();
"""


def test_sixty_days(database: str) -> None:
    dice = random.Random(17)
    retry = {"wait": 0.05, "max_wait": 0.2}
    with Outbox(database) as outbox, Webhook() as failing, Webhook() as paused:
        config: dict[str, Any] = {
            "retention": {"keep": "7d", "ahead": "3d"},
            "handlers": {
                **outbox.config()["handlers"],
                "failing": {"type": "http", "url": failing.url, "retry": retry},
                "paused": {"type": "http", "url": paused.url, "retry": retry},
            },
            "routes": [{"handlers": ["projection", "failing", "paused"]}],
        }
        outbox.install(**config)
        settings = outbox.settings(**config)
        partition_new(settings, "1d", outbox.installer_dsn)
        outbox.conn.execute(SKEW)
        stopping, published = Event(), [0]

        def publish() -> None:
            with psycopg.connect(outbox.publisher_dsn, autocommit=True) as conn:
                while not stopping.is_set():
                    conn.execute(
                        "select relay.publish(%s, null, %s)",
                        (host(published[0] % 7), Jsonb([event()])),
                    )
                    published[0] += 1
                    stopping.wait(0.002)

        publisher = Thread(target=publish)
        publisher.start()
        killed = 0
        try:
            for third in range(3):
                with relaying(settings):
                    for day in range(third * DAYS // 3, (third + 1) * DAYS // 3):
                        outbox.conn.execute(
                            "update skew set by = make_interval(days => %s)", (day,)
                        )
                        if day in (10, 25):
                            failing.answers = _answering(503 if day == 10 else 204)
                        if day in (5, 30):
                            assert sinks.pause(outbox.conn, "default", "paused", day == 5, None)
                        if day == 29:
                            # What the paused sink has not read stays.
                            assert _days_kept(outbox, day) >= 24
                        reached = published[0] + 20
                        wait_until(lambda least=reached: published[0] >= least)  # type: ignore[misc]
                        killed += _turn(outbox, settings, day, dice)
                        if day >= 45:
                            # A day is over sooner here than a sink stores how far it is.
                            wait_until(lambda now=day: _is_flat(outbox, settings, now, dice))  # type: ignore[misc]
                if third == 1:
                    partition(settings, "12h", outbox.installer_dsn)
        finally:
            stopping.set()
            publisher.join()
        with relaying(settings):
            outbox.wait_drained()
            outbox.wait_compared()
            for name in ("failing", "paused"):
                outbox.wait_delivered(name)
        for endpoint in (failing, paused):
            assert len(endpoint.ids()) == published[0]
        killed += _turn(outbox, settings, DAYS - 1, dice)
        assert killed > 5
        assert outbox.value("select count(*) from projection") == published[0]
        assert outbox.value("select count(distinct id) from projection") == published[0]
        # A week and a day of events, in partitions of a day and of half a day, and three days ahead.
        oldest = outbox.value("select min(c_ts) from outbox_message_t")
        assert oldest > datetime.now(UTC) + timedelta(days=DAYS - 1 - 8)
        assert outbox.value("select count(*) from outbox_message_t_default") == 0
        assert len(partitions(outbox.conn, OWN_OUTBOX)) <= 2 * 8 + 2 * 4 + 1


def _answering(status: int) -> Answers:
    return lambda *_: Answer(status)


def _days_kept(outbox: Outbox, day: int) -> float:
    """How old the oldest event is, in days."""
    oldest = outbox.value("select min(c_ts) from outbox_message_t")
    age: timedelta = datetime.now(UTC) + timedelta(days=day) - oldest
    return age / timedelta(days=1)


def _is_flat(outbox: Outbox, settings: Settings, day: int, dice: random.Random) -> bool:
    """Whether retention removes what is older than a week and the partition's day."""
    _turn(outbox, settings, day, dice)
    return _days_kept(outbox, day) < 9


def _turn(outbox: Outbox, settings: Settings, day: int, dice: random.Random) -> int:
    """A day's turn, whose sessions may be killed at any moment, then repeated; returns how often they were."""
    moment = datetime.now(UTC) + timedelta(days=day)

    def attempt() -> None:
        with (
            closing(connect(outbox.relay_dsn, application_name="rotation")) as source,
            closing(connect(outbox.relay_dsn, application_name="rotation")) as target,
        ):
            Schedule(settings, lambda: None, lambda _: moment).retain(source, target)

    def kill() -> None:
        with psycopg.connect(outbox.superuser_dsn, autocommit=True) as conn:
            conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'rotation'"
            )

    killer = Timer(dice.uniform(0.005, 0.06), kill)
    killer.start()
    killed = 1
    with suppress(psycopg.OperationalError):
        attempt()
        killed = 0
    killer.join()
    with suppress(psycopg.errors.LockNotAvailable):
        attempt()
    return killed
