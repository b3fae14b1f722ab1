"""Another history of the source: which instance may change the group's state, and what stops relay until a decision."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest

from relay.source import recognition, walsender
from relay.store import groups
from tests.outbox import Outbox, event, host, relaying, run_until_fault, wait_for_fault, wait_until
from tests.process import relay

LOST = "the source has lost events that group 'default' has applied"


def advance_beyond_the_source(outbox: Outbox) -> None:
    """As after a restored backup: positions were applied that the source has yet to come to."""
    outbox.conn.execute(
        "update relay.positions set applied_lsn = applied_lsn + 10000000000 where applied_lsn > '0/0'"
    )


def forget_witnesses(outbox: Outbox) -> None:
    """As where relay may take none: timelines and LSNs alone tell another history."""
    groups.forget_witnesses(outbox.conn, "default")


def copy_witnesses(outbox: Outbox) -> None:
    """As a dump does: no row is as its transaction inserted it."""
    outbox.conn.execute("update relay.witnesses set taken_at = taken_at")


def test_an_instance_that_stands_by_does_not_touch_the_group(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others apply more between its questions to the source and to the target."""
    identify = walsender.identify
    seen: list[str] = []

    def slowly(conn: psycopg.Connection[Any]) -> walsender.System:
        system = identify(conn)
        if outbox.column(
            "select 1 from pg_replication_slots where slot_name = %s and active", (outbox.slot,)
        ):
            outbox.publish(host(1), event(1))
            outbox.wait_handled()
            seen.append(str(system.position))
        return system

    monkeypatch.setattr(recognition, "identify", slowly)
    outbox.watch_positions()
    with relaying(outbox.settings()):
        outbox.publish(host(1), event(0))
        outbox.wait_handled()
        group = outbox.column("select to_jsonb(g) - 'instances' from relay.groups g")
        with relaying(outbox.settings()):
            wait_until(lambda: len(seen) > 1)
            assert outbox.positions_moved_back() == 0
            assert outbox.column("select to_jsonb(g) - 'instances' from relay.groups g") == group
    assert outbox.value(
        "select max(applied_lsn) > %s::pg_lsn from relay.consumer_offsets", (seen[1],)
    )
    outbox.assert_exact()


def test_a_source_that_lost_what_was_applied_stops_relay_until_somebody_decides(
    outbox: Outbox, tmp_path: Path
) -> None:
    outbox.fill(4)
    outbox.drain(outbox.settings())
    outbox.watch_positions()
    advance_beyond_the_source(outbox)
    outbox.publish(host(1), event(1))
    config = outbox.config_file(tmp_path / "relay.yaml")
    for _ in range(2):
        result = relay("run", "--config", str(config))
        assert result.returncode == 1
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("relay: ")]
        assert LOST in line
        assert "relay offsets seek --to" in line
    assert outbox.handled() == 20
    assert outbox.positions_moved_back() == 0
    assert relay("offsets", "seek", "--to", "21", "--yes", "--config", str(config)).returncode == 0
    outbox.drain(outbox.settings())
    outbox.assert_exact()


@pytest.mark.parametrize("mode", ["auto", "poll"])
def test_a_former_primary_is_refused(outbox: Outbox, mode: str) -> None:
    """The group's timeline is none that the server has ever been on."""
    outbox.fill(4)
    outbox.drain(outbox.settings())
    forget_witnesses(outbox)
    outbox.conn.execute("update relay.groups set timeline = 2, timeline_history = E'1\\t0/1\\n'")
    outbox.publish(host(1), event(1))
    settings = outbox.settings(source={**outbox.config()["source"], "mode": mode})
    for _ in range(2):
        said = run_until_fault(settings)
        assert LOST in said
        assert "its timeline 1 shares WAL with their timeline 2 only up to 0/1:" in said
    assert outbox.handled() == 20


def test_a_timeline_that_was_left_after_all_that_was_applied_is_followed(outbox: Outbox) -> None:
    outbox.fill(4)
    outbox.drain(outbox.settings())
    forget_witnesses(outbox)
    outbox.watch_positions()
    outbox.conn.execute(
        "update relay.groups set timeline = 2, timeline_history = E'1\\t' || pg_current_wal_insert_lsn()"
    )
    before = outbox.value("select source_epoch from relay.groups")
    outbox.publish(host(1), event(1))
    outbox.drain(outbox.settings())
    assert outbox.column("select timeline from relay.groups") == [1]
    assert outbox.value("select source_epoch from relay.groups") == before + 1
    assert outbox.positions_moved_back() == 0
    outbox.assert_exact()


def test_what_was_read_in_an_earlier_history_is_not_applied(outbox: Outbox) -> None:
    """Another instance has followed the source to its new primary while this one still had a batch of the old."""
    outbox.publish(host(1), event(1))
    running = ExitStack()
    running.enter_context(relaying(outbox.settings()))
    outbox.wait_drained()
    outbox.conn.execute("update relay.groups set source_epoch = source_epoch + 1")
    outbox.publish(host(1), event(2))
    assert "another instance has followed the source" in wait_for_fault(running)
    assert outbox.handled() == 1
    outbox.drain(outbox.settings())
    outbox.assert_exact()


def test_who_stands_by_leaves_it_to_the_reader_of_the_slot_to_judge(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    outbox.publish(host(1), event(1))
    with relaying(outbox.settings()):
        outbox.wait_drained()
        advance_beyond_the_source(outbox)
        with relaying(outbox.settings()):
            wait_until(lambda: "another process reads the slot; standing by" in caplog.messages)
    assert LOST in run_until_fault(outbox.settings())
    assert outbox.handled() == 1


def test_what_others_apply_of_the_former_history_until_it_is_left_counts(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox.fill(4)
    outbox.drain(outbox.settings())
    outbox.conn.execute(
        "update relay.groups set timeline = 2, timeline_history = E'1\\t' || pg_current_wal_insert_lsn()"
    )
    identify = walsender.identify

    def slowly(conn: psycopg.Connection[Any]) -> walsender.System:
        system = identify(conn)
        advance_beyond_the_source(outbox)
        return system

    monkeypatch.setattr(recognition, "identify", slowly)
    assert LOST in run_until_fault(outbox.settings())
    assert outbox.column("select timeline from relay.groups") == [2]


@pytest.mark.parametrize("mode", ["auto", "poll"])
def test_rows_that_were_restored_in_another_cluster_stop_relay(outbox: Outbox, mode: str) -> None:
    """Its transaction ids have gone on beyond those of the dump before relay comes."""
    outbox.publish(host(1), event(1))
    outbox.drain(outbox.settings())
    copy_witnesses(outbox)
    later = int(outbox.value("select pg_current_xact_id()::text")) + 10
    outbox.conn.execute("update outbox_message_t set c_xid = %s::text::xid8", (later,))
    for _ in range(20):
        outbox.conn.execute("select pg_current_xact_id()")
    outbox.publish(host(1), event(2))
    outbox.conn.execute("update relay.groups set system_identifier = '1'")
    settings = outbox.settings(source={**outbox.config()["source"], "mode": mode})
    assert "were restored or replicated into it" in run_until_fault(settings)
    assert outbox.column("select amount from projection") == [1]


@pytest.mark.parametrize("mode", ["auto", "poll"])
def test_a_server_that_pg_upgrade_has_made_is_followed(outbox: Outbox, mode: str) -> None:
    outbox.publish(host(1), event(1))
    outbox.drain(outbox.settings())
    outbox.conn.execute("update outbox_message_t set user_id = gen_random_uuid()")
    with outbox.conn.transaction(), outbox.conn.transaction():
        outbox.publish(host(1), event(2))
    outbox.conn.execute(
        "update relay.groups set system_identifier = '1', timeline = 5, timeline_history = E'4\\t0/1\\n'"
    )
    with relaying(outbox.settings(source={**outbox.config()["source"], "mode": mode})):
        outbox.wait_handled()
    assert outbox.column("select amount from projection order by seq") == [1, 2]
    assert outbox.value("select timeline from relay.groups") == 1
