"""Retention: what all readers are past is removed, and nothing else."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime, timedelta
from threading import Event, Thread
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from relay.admin.partitioning import partition, partition_new
from relay.config import OWN_OUTBOX, Settings
from relay.retention.partitions import partitions
from relay.retention.schedule import Schedule
from relay.store.connections import connect
from tests.outbox import Outbox, event, host, relaying, wait_until

KEEP: dict[str, Any] = {"retention": {"keep": "7d", "ahead": "3d"}}


def turn(settings: Settings, days: float = 0.0, dsn: str | None = None) -> None:
    """One turn of retention, at a time in some days."""
    moment = datetime.now(UTC) + timedelta(days=days)
    with (
        closing(connect(dsn or settings.source_dsn)) as source,
        closing(connect(dsn or settings.target_dsn)) as target,
    ):
        Schedule(settings, lambda: None, lambda: moment).turn(source, target)


@pytest.fixture
def kept(database: str) -> Any:
    """An outbox with retention."""
    with Outbox(database) as made:
        made.install(**KEEP)
        yield made


def relayed(outbox: Outbox, **more: Any) -> Settings:
    """Publish and relay until the group's snapshot sees it."""
    settings = outbox.settings(**KEEP, **more)
    outbox.fill(10)
    with relaying(settings):
        outbox.wait_drained()
        outbox.wait_compared()
    return settings


def test_deletes_what_is_read_and_old(kept: Outbox) -> None:
    settings = relayed(kept)
    kept.fill(1, events=3)
    turn(settings)
    assert kept.value("select count(*) from outbox_message_t") == 53
    turn(settings, days=8)
    assert kept.value("select count(*) from outbox_message_t") == 3
    with relaying(settings):
        kept.wait_drained()
    assert kept.value("select count(*) from projection") == 53


@pytest.fixture
def rotated(kept: Outbox) -> Outbox:
    """An outbox that is partitioned from the start."""
    partition_new(kept.settings(**KEEP), "1d")
    return kept


def ranges(outbox: Outbox) -> list[str]:
    """The names of the partitions, oldest first."""
    return [each.name.removeprefix("outbox_message_t_") for each in partitions(outbox.conn, OWN_OUTBOX)]


def test_partitions_are_created_and_dropped(rotated: Outbox) -> None:
    assert ranges(rotated)[0] == "before"
    assert ranges(rotated)[-1] == "default"
    settings = relayed(rotated)
    turn(settings, days=8)
    today = datetime.now(UTC)
    assert "before" in ranges(rotated)
    turn(settings, days=16)
    assert "before" not in ranges(rotated)
    ahead = today + timedelta(days=19)
    assert ranges(rotated)[-2:] == [f"p{ahead:%Y%m%d}", "default"]
    assert rotated.value("select count(*) from outbox_message_t") == 0
    rotated.fill(5)
    with relaying(settings):
        rotated.wait_drained()
    assert rotated.value("select count(*) from projection") == 75


@pytest.mark.parametrize("mode", ["auto", "poll"])
def test_a_live_table_is_converted(kept: Outbox, mode: str) -> None:
    settings = kept.settings(**KEEP, source={**kept.config()["source"], "mode": mode})
    published = 0
    stopping = Event()

    def publish() -> None:
        nonlocal published
        with psycopg.connect(kept.dsn, autocommit=True) as conn:
            while not stopping.is_set():
                conn.execute(
                    "select relay.publish(%s, null, %s)", (host(published % 7), Jsonb([event()]))
                )
                published += 1

    with relaying(settings):
        kept.fill(200)
        publisher = Thread(target=publish)
        publisher.start()
        try:
            wait_until(lambda: published > 50)
            done = partition(settings, "1d")
            after = published
            wait_until(lambda: published > after + 50)
        finally:
            stopping.set()
            publisher.join()
        assert done[0] == "partitions of public.outbox_message_t, one for each 1 day, 0:00:00"
        kept.wait_handled()
    kept.assert_exact()
    assert ranges(kept)[0] == "before"
    assert kept.value("select count(*) from outbox_message_t") == 1000 + published
    assert partition(settings, "1d") == []
