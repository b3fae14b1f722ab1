"""Sixty days of rotation while events are published and relayed, and whoever rotates is killed."""

from __future__ import annotations

import random
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from threading import Event, Thread, Timer

import psycopg
import pytest
from psycopg.types.json import Jsonb

from relay.admin.partitioning import partition, partition_new
from relay.config import OWN_OUTBOX, Settings
from relay.retention.partitions import partitions
from relay.retention.schedule import Schedule
from relay.store.connections import connect
from tests.outbox import Outbox, event, host, relaying, wait_until

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
    keep = {"keep": "7d", "ahead": "3d"}
    with Outbox(database) as outbox:
        outbox.install(retention=keep)
        settings = outbox.settings(retention=keep)
        partition_new(settings, "1d")
        outbox.conn.execute(SKEW)
        stopping, published = Event(), [0]

        def publish() -> None:
            with psycopg.connect(outbox.dsn, autocommit=True) as conn:
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
                        reached = published[0] + 20
                        wait_until(lambda least=reached: published[0] >= least)  # type: ignore[misc]
                        killed += _turn(outbox, settings, day, dice)
                if third == 1:
                    partition(settings, "12h")
        finally:
            stopping.set()
            publisher.join()
        with relaying(settings):
            outbox.wait_drained()
            outbox.wait_compared()
        killed += _turn(outbox, settings, DAYS - 1, dice)
        assert killed > 5
        assert outbox.value("select count(*) from projection") == published[0]
        assert outbox.value("select count(distinct id) from projection") == published[0]
        # A week and a day of events, in partitions of a day and of half a day, and three days ahead.
        oldest = outbox.value("select min(c_ts) from outbox_message_t")
        assert oldest > datetime.now(UTC) + timedelta(days=DAYS - 1 - 8)
        assert outbox.value("select count(*) from outbox_message_t_default") == 0
        assert len(partitions(outbox.conn, OWN_OUTBOX)) <= 2 * 8 + 2 * 4 + 1


def _turn(outbox: Outbox, settings: Settings, day: int, dice: random.Random) -> int:
    """A day's turn, whose sessions may be killed at any moment, then repeated; returns how often they were."""
    moment = datetime.now(UTC) + timedelta(days=day)

    def attempt() -> None:
        with (
            closing(connect(outbox.dsn, application_name="rotation")) as source,
            closing(connect(outbox.dsn, application_name="rotation")) as target,
        ):
            Schedule(settings, lambda: None, lambda: moment).turn(source, target)

    def kill() -> None:
        with psycopg.connect(outbox.dsn, autocommit=True) as conn:
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
