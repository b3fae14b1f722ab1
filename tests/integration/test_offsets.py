"""The tools that move a stopped group, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psycopg
import pytest

from relay.admin import offsets as moves
from relay.admin.offsets import repartition
from relay.config.settings import Settings
from relay.faults import ConfigurationError, RelayError
from relay.model.events import Lsn
from relay.model.transactions import Transactions
from relay.pipeline.backfill import _Filler
from relay.source import hybrid
from relay.source.stream.receiver import commits_after
from relay.store import queue_fills, trips
from relay.store.connections import connect
from relay.store.positions import offsets, snapshots
from tests.outbox import (
    DEFER,
    PROJECTION,
    Outbox,
    event,
    host,
    initialise,
    relaying,
    stream_and_crash,
    wait_until,
)
from tests.process import relay, running

APPEND_SHOP = """
    insert into projection (id, host_id, amount) values (%(id)s, %(host_id)s, (%(payload)s->>'amount')::numeric)
"""


def total(outbox: Outbox) -> int:
    return int(outbox.value("select count(*) from projection"))


@pytest.mark.parametrize("mode", ["auto", pytest.param("poll", marks=pytest.mark.rare)])
def test_seek_delivers_again_or_passes_over(outbox: Outbox, tmp_path: Path, mode: str) -> None:
    overrides: dict[str, Any] = {"source": {**outbox.config()["source"], "mode": mode}}
    config = outbox.config_file(tmp_path / "relay.yaml", **overrides)
    outbox.fill(20)
    settings = Settings(**outbox.config(**overrides))
    with relaying(settings):
        outbox.wait_handled()

    asked = relay("offsets", "seek", "--to", "51", "--config", str(config), stdin="n\n")
    assert "50 events will be delivered again, 0 will be skipped" in asked.stdout
    assert asked.returncode == 1
    assert relay("offsets", "seek", "--to", "51", "--yes", "--config", str(config)).returncode == 0
    with relaying(settings):
        wait_until(lambda: total(outbox) == 150)
        outbox.publish(host(1), event(1))
        wait_until(lambda: total(outbox) == 151)
    assert outbox.value("select count(*) from projection where c_offset > 50") == 101

    outbox.fill(20)
    passed = relay("offsets", "seek", "--to", "end", "--yes", "--config", str(config))
    assert "100 will be skipped" in passed.stdout
    with relaying(settings):
        outbox.publish(host(1), event(2))
        wait_until(lambda: total(outbox) == 152)
    shown = json.loads(relay("offsets", "show", "--json", "--config", str(config)).stdout)
    assert len(shown) == 8
    assert max(position["next_offset"] for position in shown) == 203

    assert (
        relay("offsets", "seek", "--to", "beginning", "--yes", "--config", str(config)).returncode
        == 0
    )
    with relaying(settings):
        wait_until(lambda: total(outbox) == 152 + 202)


def test_what_is_not_applied_is_counted_as_unread(outbox: Outbox, tmp_path: Path) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml")
    outbox.publish(host(1), event(1))
    outbox.publish(host(2), event(2), event(3))
    outbox.drain(outbox.settings())

    def unread() -> set[int]:
        shown = relay("offsets", "show", "--json", "--config", str(config))
        return {position["unread"] for position in json.loads(shown.stdout)}

    assert unread() == {0}
    outbox.publish(host(1), event(4))
    outbox.publish(host(2), event(5), event(6))
    assert unread() == {0, 1, 2}


def test_seek_to_a_time_to_a_position_and_in_one_partition(outbox: Outbox, tmp_path: Path) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml")
    outbox.publish(host(1), event(1, event_ts="2026-01-01T00:00:00Z"))
    outbox.publish(host(1), event(2, event_ts="2026-02-01T00:00:00Z"))
    outbox.drain(outbox.settings())
    moved = relay("offsets", "seek", "--to", "2026-01-15", "--yes", "--config", str(config))
    assert "at c_offset 2: 1 event " in moved.stdout
    with relaying(outbox.settings()):
        wait_until(lambda: total(outbox) == 3)
    assert outbox.column("select amount from projection order by seq") == [1, 2, 2]

    confirmed = outbox.value(
        "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s",
        (outbox.slot,),
    )
    outbox.publish(host(1), event(3))
    lsn = outbox.wal_end()
    outbox.publish(host(2), event(4))
    moved = relay("offsets", "seek", "--to", lsn, "--yes", "--config", str(config))
    assert f"at {lsn}: 0 events will be delivered again, 1 will be skipped" in moved.stdout
    assert confirmed == outbox.value(
        "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s",
        (outbox.slot,),
    )
    with relaying(outbox.settings()):
        wait_until(lambda: total(outbox) == 4)
        # One partition is moved only where all of what was there before the start has been polled.
        wait_until(lambda: len(snapshots.chain(outbox.conn, "default")) == 1)
    assert outbox.column("select amount from projection order by seq") == [1, 2, 2, 4]

    partition = outbox.value("select abs(hashtext(%s::text)::bigint) %% 8", (str(host(2)),))
    moved = relay(
        "offsets",
        "seek",
        "--to",
        "1",
        "--partition",
        str(partition),
        "--yes",
        "--config",
        str(config),
    )
    assert moved.returncode == 0, moved.stderr
    with relaying(outbox.settings()):
        wait_until(lambda: total(outbox) == 5)
    assert outbox.column("select amount from projection order by seq")[4] == 4


def seek(settings: Settings, to: str) -> None:
    moves.seek(settings, moves.plan_seek(settings, to, None), None)


@pytest.mark.parametrize("in_progress", [False, True])
def test_what_commits_while_a_seek_reads_the_wal_is_delivered_once(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, in_progress: bool
) -> None:
    monkeypatch.setattr(hybrid, "AUDIT_SECONDS", 0.2)
    settings = outbox.settings()
    outbox.publish(host(1), event(1))
    outbox.drain(settings)
    lsn = outbox.wal_end()
    with Outbox(outbox.superuser_dsn) as early, Outbox(outbox.superuser_dsn) as late:
        before, after = ExitStack(), ExitStack()
        if in_progress:
            before.enter_context(early.conn.transaction())
        early.publish(host(2), event(2))
        outbox.publish(host(1), event(3))

        def after_the_position(*arguments: Any) -> Iterator[Transactions]:
            before.close()
            after.enter_context(late.conn.transaction())
            late.publish(host(3), event(4))
            outbox.publish(host(1), event(5))
            return commits_after(*arguments)

        monkeypatch.setattr(moves, "commits_after", after_the_position)
        seek(settings, lsn)
        after.close()
    outbox.publish(host(1), event(6))
    with relaying(settings):
        outbox.wait_drained()
        outbox.wait_compared()
    assert sorted(outbox.column("select amount from projection")) == [1, 2, 3, 4, 5, 6]
    outbox.assert_exact()


def test_a_seek_to_a_position_in_the_wal_does_not_mind_publishers(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrid, "AUDIT_SECONDS", 0.2)
    settings = outbox.settings()
    outbox.publish(host(1), event(1))
    outbox.drain(settings)
    lsn = outbox.wal_end()
    done = Event()

    def publish(number: int) -> None:
        with Outbox(outbox.superuser_dsn) as publisher:
            while not done.is_set():
                publisher.publish(host(number), event(1), event(2))

    publishers = [Thread(target=publish, args=(number,)) for number in range(2)]
    for publisher in publishers:
        publisher.start()
    try:
        wait_until(lambda: outbox.value("select count(*) from outbox_message_t") > 100)
        seek(settings, lsn)
    finally:
        done.set()
        for publisher in publishers:
            publisher.join()
    with relaying(settings):
        outbox.wait_drained()
        outbox.wait_compared()
    outbox.assert_exact()


def test_a_group_that_has_polled_goes_on_with_the_wal_alone(outbox: Outbox) -> None:
    outbox.publish(host(1), event(1))
    outbox.drain(outbox.settings())
    outbox.publish(host(1), event(2))
    settings = outbox.settings(source={**outbox.config()["source"], "mode": "wal"})
    seek(settings, "end")
    outbox.publish(host(1), event(3))
    with relaying(settings):
        outbox.wait_drained()
        outbox.publish(host(1), event(4))
        outbox.wait_drained()
    assert outbox.column("select amount from projection order by seq") == [1, 3, 4]


def test_what_is_delivered_again_is_not_replayed_as_well(outbox: Outbox, tmp_path: Path) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml")
    for amount in (1, -2, 3, -4):
        outbox.publish(host(amount % 3), event(amount))
    outbox.drain(outbox.settings())
    for offset in (2, 3):
        outbox.conn.execute(DEFER, ("default", [str(host(9))]))
        outbox.conn.execute(
            "update relay.deferred set last_offset = %s where last_offset = 1", (offset,)
        )
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 2
    outbox.conn.execute("alter table projection drop constraint projection_amount_check")
    seek = ["offsets", "seek", "--to", "3", "--yes", "--config", str(config)]
    assert relay(*seek).returncode == 0
    statuses = "select status from relay.dead_letter_queue order by c_offset"
    assert outbox.column(statuses) == ["dead", "discarded"]
    assert outbox.column("select last_offset from relay.deferred") == [2]
    outbox.conn.execute("delete from relay.deferred")
    with relaying(outbox.settings()):
        replay = ["dlq", "replay", "--all", "--yes", "--config", str(config)]
        assert relay(*replay).returncode == 0
        wait_until(lambda: total(outbox) == 5)
    assert sorted(outbox.column("select amount from projection")) == [-4, -2, 1, 3, 3]


@pytest.mark.parametrize(
    ("to", "words"),
    [
        ("99", "past the end of the outbox; the next c_offset is 3"),
        ("0/1", "older than the WAL that the slot"),
        ("FFFF/0", "past the end of the WAL"),
        ("soon", "neither a c_offset, an LSN"),
    ],
)
def test_seek_to_nowhere(outbox: Outbox, tmp_path: Path, to: str, words: str) -> None:
    outbox.publish(host(1), event(1), event(2))
    config = outbox.config_file(tmp_path / "relay.yaml")
    result = relay("offsets", "seek", "--to", to, "--yes", "--config", str(config))
    assert result.returncode == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_running_group_is_not_moved_and_status_shows_who_is_active(
    outbox: Outbox, tmp_path: Path
) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml")
    (tmp_path / "second").mkdir()
    second = outbox.config_file(tmp_path / "second" / "relay.yaml")
    outbox.publish(host(1), event(1))

    def status() -> dict[str, object]:
        return dict(json.loads(relay("status", "--json", "--config", str(config)).stdout))

    with running(config) as first:
        outbox.wait_handled()
        with running(second) as standby:
            standby.wait_said("another process reads the slot")
            found = status()
            assert str(found["active"]).endswith(f":{first.process.pid}")
            assert len(found["instances"]) == 2  # type: ignore[arg-type]
            assert found["source_mode"] == "wal"
            for command in (["seek", "--to", "1", "--yes"], ["repartition", "--partitions", "4"]):
                refused = relay("offsets", *command, "--config", str(config))
                assert refused.returncode == 2
                assert "is running" in refused.stderr
            first.kill()
            outbox.publish(host(1), event(2))
            wait_until(lambda: outbox.handled() == 2)
            wait_until(lambda: str(status()["active"]).endswith(f":{standby.process.pid}"))
    outbox.assert_exact()


@pytest.mark.rare
def test_a_group_is_repartitioned_without_losing_or_repeating(
    outbox: Outbox, tmp_path: Path
) -> None:
    partitions = 4
    outbox.conn.execute("delete from relay.group_partitions; delete from relay.positions")
    settings = outbox.settings(partitions=partitions)
    outbox.install_again(settings)
    for after in (16, 1, 4):
        outbox.fill(200, hosts=32)
        with running(
            outbox.config_file(
                tmp_path / "relay.yaml", partitions=partitions, batch={"max_events": 50}
            )
        ) as service:
            seen = outbox.handled()
            wait_until(lambda seen=seen: outbox.handled() > seen + 100)  # type: ignore[misc]
            service.kill()
        # A partition may lag behind others; the command moves it to their position.
        config = outbox.config_file(tmp_path / "relay.yaml", partitions=partitions)
        result = relay(
            "offsets", "repartition", "--partitions", str(after), "--config", str(config)
        )
        assert result.returncode == 0, result.stderr
        partitions = after
        outbox.fill(20, hosts=32)
        assert outbox.value("select count(*) from relay.consumer_offsets") == after
    with relaying(outbox.settings(partitions=partitions)):
        outbox.wait_handled()
        outbox.wait_drained()
    outbox.assert_exact()


def test_a_group_is_repartitioned_although_noted_events_are_gone(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrid, "AUDIT_SECONDS", 0.2)
    outbox.publish(host(0), event(0))
    outbox.drain(outbox.settings())
    with outbox.conn.transaction():
        for number in (1, 2):
            outbox.publish(host(number), event(number))
    stream_and_crash(outbox.settings())
    assert outbox.value("select count(*) from relay.applied_commits") > 0
    outbox.conn.execute("delete from outbox_message_t")
    repartition(outbox.settings(), 4)
    assert outbox.value("select count(*) from relay.applied_commits") == 0
    outbox.publish(host(1), event(3))
    # What was noted comes from the slot once more.
    with relaying(outbox.settings(partitions=4)):
        outbox.wait_drained()
        outbox.wait_compared()
    assert sorted(outbox.column("select amount from projection")) == [0, 1, 2, 3]


def test_who_waits_for_a_partition_sees_what_was_deferred_meanwhile(outbox: Outbox) -> None:
    group, deferred_rows = outbox.settings().group, str(host(1))
    hosts = [deferred_rows, str(host(2))]
    with (
        ThreadPoolExecutor(1) as thread,
        psycopg.connect(outbox.superuser_dsn) as second,
        psycopg.connect(outbox.superuser_dsn) as first,
    ):
        locked = offsets.lock(first, group, [1, 0], hosts)
        assert list(locked.positions) == [0, 1]
        assert locked.holding == set()
        waiting = thread.submit(offsets.lock, second, group, [1], hosts)
        pid = second.info.backend_pid
        wait_until(lambda: outbox.value("select cardinality(pg_blocking_pids(%s)) > 0", (pid,)))
        first.execute(DEFER, (group, [deferred_rows]))
        trips.run_each(
            first, [offsets.advance(group, locked.positions, [offsets.Advance(1, Lsn(70), 7)])]
        )
        first.commit()
        locked = waiting.result(30)
    assert locked.positions[1].next_offset == 7
    assert locked.holding == {deferred_rows}
    outbox.conn.execute("delete from relay.deferred")


def test_a_seek_of_one_partition_leaves_the_dead_letters_of_the_others(outbox: Outbox) -> None:
    outbox.conn.execute("alter table outbox_message_t alter host_id drop not null")
    insert = "insert into outbox_message_t (host_id, event_type, payload) values (%s, 'x', '{\"amount\": -1}')"
    for to in (None, host(2)):
        outbox.conn.execute(insert, (to,))
    settings = outbox.settings()
    outbox.drain(settings)
    (partition,) = outbox.column("select abs(hashtext(%s::text)::bigint) %% 8", (str(host(2)),))
    assert partition != outbox.value("select abs(hashtext('')::bigint) %% 8")
    move = moves.plan_seek(settings, "beginning", partition)
    assert move.given_up == (1, 0)
    moves.seek(settings, move, partition)
    dead_letters = "select host_id::uuid, status from relay.dead_letter_queue order by host_id"
    assert outbox.conn.execute(dead_letters).fetchall() == [(host(2), "discarded"), (None, "dead")]


def test_a_seek_into_a_commit_gives_up_all_of_its_dead_letters(outbox: Outbox) -> None:
    with outbox.conn.transaction():
        outbox.publish(host(1), event(-1))
        outbox.publish(host(2), event(2))
    settings = outbox.settings()
    outbox.drain(settings)
    second = outbox.value("select max(c_offset) from outbox_message_t")
    move = moves.plan_seek(settings, str(second), None)
    assert (move.again, move.given_up) == (2, (1, 0))
    moves.seek(settings, move, None)
    assert outbox.column("select status from relay.dead_letter_queue") == ["discarded"]


def test_a_seek_needs_the_number_of_partitions_that_the_group_has(outbox: Outbox) -> None:
    with pytest.raises(ConfigurationError, match="was initialised with 8"):
        moves.plan_seek(outbox.settings(partitions=4), "end", None)


def test_what_has_no_xid_yet_keeps_a_group_from_polling(database: str) -> None:
    """A group that began in mode wal; rows were published before the outbox had c_xid, and are still in the WAL."""
    with Outbox(database) as outbox:
        outbox.conn.execute(PROJECTION)
        outbox.conn.execute(
            "create table shop (id uuid default gen_random_uuid(), host_id uuid, event_type text, payload jsonb,"
            " transaction_id uuid)"
        )
        outbox.give("shop")
        source = {**outbox.config()["source"], "table": "public.shop", "mode": "wal"}
        streaming, polling = (
            outbox.settings(
                source={**source, "mode": mode},
                handlers={"projection": {"type": "sql", "statement": APPEND_SHOP}},
            )
            for mode in ("wal", "auto")
        )
        initialise(streaming)
        insert = (
            "insert into shop (host_id, event_type, payload) values (%s, 'x', '{\"amount\": 1}')"
        )
        outbox.conn.execute(insert, (host(1),))
        initialise(polling)
        outbox.conn.execute(insert, (host(1),))
        confirmed = outbox.value("select confirmed_flush_lsn::text from pg_replication_slots")
        with pytest.raises(ConfigurationError, match="older than the column c_xid"):
            moves.plan_seek(polling, confirmed, None)
        with relaying(streaming):
            outbox.wait_drained()
        outbox.conn.execute(insert, (host(1),))
        seek(polling, outbox.value("select confirmed_flush_lsn::text from pg_replication_slots"))
        with relaying(polling):
            wait_until(lambda: outbox.value("select count(*) from projection") == 3)
            outbox.wait_drained()


def test_times_that_python_does_not_know_do_not_keep_offsets_from_being_shown(
    outbox: Outbox,
) -> None:
    for moment in ("4713-01-01 BC", "infinity", "-infinity"):
        outbox.publish(host(1), event(1))
        outbox.conn.execute("update outbox_message_t set event_ts = %s", (moment,))
        assert sum(each.unread or 0 for each in moves.positions(outbox.settings())) > 0


def test_positions_without_their_snapshot_are_told_by_whoever_reads_them_and_a_seek_repairs_them(
    outbox: Outbox, tmp_path: Path
) -> None:
    """One of two tables of the target was restored without the other."""
    config = outbox.config_file(tmp_path / "relay.yaml")
    outbox.publish(host(1), event(1))
    outbox.drain(outbox.settings())
    outbox.worker.execute("select relay.declare_queue('mail', start => 'beginning')")
    outbox.conn.execute("update relay.snapshots set id = id + 1000")
    published = outbox.value("select id::text from outbox_message_t")
    for command in (("status",), ("offsets", "show"), ("event", published)):
        told = relay(*command, "--config", str(config))
        assert told.returncode == 1
        assert "which relay.snapshots does not have" in f"{told.stdout}{told.stderr}"
        assert "Traceback" not in told.stderr
    (fill,) = queue_fills.open_fills(outbox.conn, "default")
    with (
        closing(connect(outbox.relay_dsn)) as target,
        closing(_Filler(outbox.settings(), target, lambda: False)) as filler,
        pytest.raises(RelayError, match=r"which relay\.snapshots does not have"),
    ):
        filler.fill(fill)
    moved = relay("offsets", "seek", "--to", "end", "--yes", "--config", str(config))
    assert moved.returncode == 0, moved.stderr
    assert "nothing shows how many events this affects" in moved.stdout
    outbox.publish(host(1), event(2))
    outbox.drain(outbox.settings())
    assert outbox.column("select amount from projection order by seq") == [1, 2]
