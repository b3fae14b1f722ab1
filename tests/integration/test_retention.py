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
from relay.cursors import plan_seek, seek
from relay.faults import ConfigurationError
from relay.retention.partitions import partitions
from relay.retention.schedule import Schedule
from relay.service import Service
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
    return [
        each.name.removeprefix("public.outbox_message_t_")
        for each in partitions(outbox.conn, OWN_OUTBOX)
    ]


def test_partitions_are_created_and_dropped(rotated: Outbox) -> None:
    assert ranges(rotated)[0] == "before"
    assert ranges(rotated)[-1] == "default"
    settings = relayed(rotated)
    turn(settings, days=7)
    today = datetime.now(UTC)
    assert "before" in ranges(rotated)
    turn(settings, days=9)
    assert "before" not in ranges(rotated)
    ahead = today + timedelta(days=12)
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


def test_a_lagging_sink_and_a_paused_one_hold_their_events(rotated: Outbox) -> None:
    settings = relayed(rotated)
    rotated.conn.execute(
        """
        insert into relay.sinks (group_id, sink, snapshot, paused_at)
        select group_id, 'mail', '3:3:', now() from relay.consumer_offsets limit 1
        """
    )
    turn(settings, days=30)
    assert rotated.value("select count(*) from outbox_message_t") == 50
    rotated.conn.execute("update relay.sinks set snapshot = pg_current_snapshot()")
    turn(settings, days=30)
    assert rotated.value("select count(*) from outbox_message_t") == 0


def test_an_event_that_only_the_outbox_has_holds_its_row(kept: Outbox) -> None:
    settings = relayed(kept)
    kept.conn.execute(
        """
        insert into relay.dead_letter_queue (group_id, c_offset, exception, by_reference)
        select 'default', max(c_offset), 'too large', true from outbox_message_t
        """
    )
    turn(settings, days=30)
    assert kept.value("select count(*) from outbox_message_t") == 1
    kept.conn.execute("update relay.dead_letter_queue set status = 'discarded'")
    turn(settings, days=30)
    assert kept.value("select count(*) from outbox_message_t") == 0


def test_a_group_that_has_not_noted_its_position_holds_everything(kept: Outbox) -> None:
    settings = relayed(kept)
    kept.conn.execute("insert into relay.streams values ('other', 'other', null)")
    turn(settings, days=30)
    assert kept.value("select count(*) from outbox_message_t") == 50


def test_rows_beyond_all_partitions_get_one(rotated: Outbox) -> None:
    settings = relayed(rotated)
    rotated.conn.execute(
        "alter table outbox_message_t alter c_ts set default now() + interval '20 days'"
    )
    rotated.fill(4)
    assert rotated.value("select count(*) from outbox_message_t_default") == 20
    turn(settings, days=20)
    assert rotated.value("select count(*) from outbox_message_t_default") == 0
    assert rotated.value("select count(*) from outbox_message_t") == 20
    assert rotated.value("select count(*) from pg_constraint where conname = 'relay_range'") == 0
    with relaying(settings):
        rotated.wait_drained()
    assert rotated.value("select count(distinct id) from projection") == 70
    assert rotated.value("select count(*) from projection") == 70


def test_the_role_relay_suffices(rotated: Outbox) -> None:
    settings = relayed(rotated)
    with rotated.clerk() as (_, dsn):
        turn(settings, days=30, dsn=dsn)
        assert rotated.value("select count(*) from outbox_message_t") == 0
        with psycopg.connect(dsn, autocommit=True) as conn:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute("delete from outbox_message_t")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute("update relay.retained set every = '1 minute'")
            # Only an outbox that is given to retention, and only its old partitions.
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(
                    "select relay.drop_partition('public.projection', 'public.projection', now())"
                )
            row = conn.execute(
                "select relay.drop_partition('public.outbox_message_t', 'public.projection', now())"
            ).fetchone()
            assert row == (False,)


def test_publishers_cannot_choose_the_time(rotated: Outbox) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        rotated.conn.execute(
            """
            set role relay_publisher;
            insert into outbox_message_t (host_id, event_type, payload, c_ts) values (gen_random_uuid(), 'a', '{}', '2000-01-01')
            """
        )
    rotated.conn.execute("reset role")


def test_another_interval(rotated: Outbox) -> None:
    settings = relayed(rotated)
    assert (
        partition(settings, "6h")[0]
        == "interval of 6:00:00 for the next partitions of public.outbox_message_t"
    )
    turn(settings, days=3)
    last = partitions(rotated.conn, OWN_OUTBOX)[-2]
    assert last.lower and last.upper
    assert last.upper - last.lower == timedelta(hours=6)
    assert last.name.endswith(f"_p{last.lower:%Y%m%d%H}")


def test_a_reader_is_given_up_only_when_told(kept: Outbox) -> None:
    settings = relayed(kept)
    kept.fill(3)
    turn(settings, days=30)
    assert kept.value("select count(*) from outbox_message_t") == 15
    told = kept.settings(retention={"keep": "7d", "max_lag": "20d"})
    turn(told, days=10)
    assert kept.value("select count(*) from outbox_message_t") == 15
    turn(told, days=30)
    assert kept.value("select count(*) from outbox_message_t") == 15
    turn(told, days=30)
    assert kept.value("select count(*) from outbox_message_t") == 0
    assert kept.column("select action from relay.actions") == ["give up"]
    with pytest.raises(ConfigurationError, match=r"was given up by retention \(max_lag\)"):
        Service(settings).run()
    move = plan_seek(settings, "end", None)
    seek(settings, move, None)
    with relaying(settings):
        kept.fill(1)
        kept.wait_drained()
    assert kept.value("select count(*) from projection") == 55
