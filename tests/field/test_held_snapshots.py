"""A snapshot that somebody holds, such as a pg_dump, keeps every dead row: relay does not become slower.

Counted are the pages of relay's tables and of their indices that statements touch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import psycopg
import pytest

from relay.model.events import Lsn
from relay.model.snapshots import RowCounts, Snapshot
from relay.retention import partitions, schedule
from relay.store import brakes, trips
from relay.store.brakes import Streak
from relay.store.connections import Connection, connect
from relay.store.positions import offsets, sinks, snapshots
from relay.store.positions.sinks import SinkEntry, SinkPosition
from tests.outbox import DEFER, Outbox, host, relaying, wait_until

GROUP = "default"
TOLERANCE = 1.1

FAIL_DELETION = """
    create function fail() returns trigger language plpgsql as $$ begin raise deadlock_detected; end $$;
    create trigger fail before delete on relay.positions for each row when (old.partition_id = 7)
        execute function fail();
"""
_TOUCHED = """
    select coalesce(sum(coalesce(heap_blks_read, 0) + coalesce(heap_blks_hit, 0)
                        + coalesce(idx_blks_read, 0) + coalesce(idx_blks_hit, 0)), 0)::bigint
      from pg_statio_user_tables where schemaname = %s or relname = %s
"""


@pytest.fixture
def held(outbox: Outbox) -> Iterator[Outbox]:
    """An outbox in whose database somebody holds a snapshot, and where nothing is vacuumed."""
    tables = outbox.column(
        "select oid::regclass::text from pg_class where relkind = 'r'"
        " and (relnamespace = 'relay'::regnamespace or relname = 'outbox_message_t')"
    )
    for table in tables:
        outbox.conn.execute(f"alter table {table} set (autovacuum_enabled = off)".encode())
    with connect(outbox.relay_dsn) as conn:
        *_, last = snapshots.chain(conn, GROUP)
        offsets.move(conn, GROUP, range(8), last.id)
        snapshots.prune(conn, GROUP, since=0)
    with snapshot_held(outbox):
        yield outbox


@contextmanager
def snapshot_held(outbox: Outbox) -> Iterator[None]:
    with psycopg.connect(outbox.relay_dsn) as holder:
        holder.execute("set transaction isolation level repeatable read")
        holder.execute("select count(*) from relay.groups")
        yield


def in_session(dsn: str, outbox: Outbox, *acts: Callable[[Connection], object]) -> None:
    """Run statements in a session of their own, which reports what it has counted when it ends."""
    with connect(dsn) as conn:
        for act in acts:
            act(conn)
        pid = conn.info.backend_pid
    wait_until(lambda: not outbox.column("select 1 from pg_stat_activity where pid = %s", (pid,)))


def touched(
    outbox: Outbox, act: Callable[[Connection], object], schema: str = "relay", table: str = ""
) -> int:
    """How many pages of tables and indices the statements of `act` touch."""

    def count() -> int:
        return int(outbox.value(_TOUCHED, (schema, table)))

    before = count()
    in_session(outbox.relay_dsn, outbox, act)
    wait_until(lambda: count() > before)
    return count() - before


class Stream:
    """Tasks of the stream, each of one commit, with the comparison of the stream and the outbox every now and then."""

    def __init__(self) -> None:
        self._commits = 0
        self._superseded = offsets.Superseded(GROUP)

    def run(self, conn: Connection, tasks: int) -> None:
        for number in range(tasks):
            self._commits += 1
            chosen = [number % 8] if number % 5 else [1, 3, 5]
            with conn.transaction():
                locked = offsets.lock(conn, GROUP, chosen, [str(host(1))])
                lsn = Lsn(self._commits * 100)
                advances = [offsets.Advance(each, lsn, self._commits) for each in chosen]
                noted = RowCounts(np.array([10_000 + self._commits]), np.array([1]))
                trips.run_each(conn, [offsets.advance(GROUP, locked.positions, advances, noted)])

    def compare(self, conn: Connection) -> None:
        (link,) = snapshots.chain(conn, GROUP)
        assert len(snapshots.noted_rows(conn, GROUP).xids) > 0
        seen = Snapshot.parse(f"{10_001 + self._commits}:{10_001 + self._commits}:")
        assert snapshots.replace(conn, GROUP, link, seen)
        assert len(snapshots.noted(conn, GROUP)) == 0
        self._superseded.delete(conn)


class Sinks:
    """Sinks that are stored together, by turns at a newer snapshot and with what is done after it."""

    NAMES = ("a", "b", "c")

    def __init__(self) -> None:
        self._stores = 0
        self._superseded = offsets.Superseded(GROUP)

    def run(self, conn: Connection, stores: int) -> None:
        for _ in range(stores):
            self._stores += 1
            reached = 10_000 + self._stores // 3 * 3
            position = SinkPosition(Snapshot(reached, reached, ()), delivered_lsn=Lsn(self._stores))
            done = [10_001 + self._stores]
            entries = [
                SinkEntry(name, 0, 0, position, done, "attached", None) for name in self.NAMES
            ]
            assert set(sinks.store(conn, GROUP, entries, waits=False)) == set(self.NAMES)
            if self._stores % 5 == 0:
                self._superseded.delete(conn)

    def read(self, conn: Connection) -> None:
        found = sinks.states(conn, GROUP, self.NAMES)
        assert {each.position.delivered_lsn for each in found.values()} == {self._stores}
        assert {len(each.done) for each in found.values()} <= {1, 2, 3}
        sinks.watch(conn, GROUP, self.NAMES)


class Polling:
    """Differences that are polled, each by one task."""

    def __init__(self) -> None:
        self._since = 0
        self._superseded = offsets.Superseded(GROUP)

    def run(self, conn: Connection, differences: int) -> None:
        chosen = range(8)
        for number in range(differences):
            positions, (before,) = offsets.positions_and_chain(conn, GROUP)
            end = 10_000 + max(each.next_offset for each in positions)
            seen = Snapshot.parse(f"{end}:{end}:")
            after = snapshots.append(conn, GROUP, before, seen, Lsn(end))
            assert after is not None
            ends = dict.fromkeys(chosen, end)
            with conn.transaction():
                claimed = offsets.claim(conn, GROUP, chosen)
                assert claimed is not None
                assert not snapshots.noted_in(conn, GROUP, chosen)
                offsets.polled(conn, GROUP, claimed, ends, end)
            assert offsets.complete(conn, GROUP, before.id, after.id, ends) == len(chosen)
            snapshots.prune(conn, GROUP, self._since)
            self._since = before.id
            if number % 10 == 0:
                self._superseded.delete(conn)


@pytest.mark.rare
def test_a_task_touches_as_many_pages_after_thousands_of_others(held: Outbox) -> None:
    stream = Stream()

    def tasks(number: int) -> int:
        return touched(held, lambda conn: stream.run(conn, number))

    in_session(held.relay_dsn, held, lambda conn: stream.run(conn, 500), stream.compare)
    task, comparison = tasks(40), touched(held, stream.compare)
    for _ in range(16):
        in_session(held.relay_dsn, held, lambda conn: stream.run(conn, 250), stream.compare)
    assert tasks(40) <= task * TOLERANCE
    assert touched(held, stream.compare) <= comparison * TOLERANCE
    # They are dead, and still there.
    assert held.value("select n_dead_tup from pg_stat_user_tables where relname = 'positions'") > 0
    assert held.value("select count(*) from relay.positions") < 100


def test_sinks_touch_as_many_pages_after_hundreds_of_stores(held: Outbox) -> None:
    """Each store was an update of the sink's row, whose dead versions whoever read or stored it walked through."""
    for name in Sinks.NAMES:
        held.begin_sink(name, "'10:10:'")
    stored = Sinks()
    # As many that the index has two levels.
    in_session(held.relay_dsn, held, lambda conn: stored.run(conn, 150))
    store, read = touched(held, lambda conn: stored.run(conn, 30)), touched(held, stored.read)
    in_session(held.relay_dsn, held, lambda conn: stored.run(conn, 600))
    assert touched(held, lambda conn: stored.run(conn, 30)) <= store * TOLERANCE
    assert touched(held, stored.read) <= read * TOLERANCE
    dead = dict(
        held.conn.execute(
            "select relname, n_dead_tup from pg_stat_user_tables where relname in ('positions', 'sink_claims')"
        )
    )
    # Nothing that is read has dead versions; superseded positions are dead, and still there.
    assert dead["sink_claims"] <= len(Sinks.NAMES) < 1000 < dead["positions"]


def test_a_task_touches_as_many_pages_after_hundreds_of_dead_letters(held: Outbox) -> None:
    stream = Stream()

    def fail(conn: Connection, times: int) -> None:
        for _ in range(times):
            with conn.transaction():
                locked = offsets.lock(conn, GROUP, [1], [str(host(1))])
                assert not locked.streaks
                assert brakes.add(conn, GROUP, "projection", "CheckViolation", 1, False, False) == 1
            with conn.transaction():
                locked = offsets.lock(conn, GROUP, [1], [str(host(1))])
                assert locked.streaks == {"projection": Streak("CheckViolation", 1, False)}
                brakes.forget(conn, GROUP, "projection")
            with conn.transaction():
                conn.execute(DEFER, (GROUP, [str(host(2))]))
                conn.execute("delete from relay.deferred")

    in_session(held.relay_dsn, held, lambda conn: fail(conn, 4), lambda conn: stream.run(conn, 200))
    task = touched(held, lambda conn: stream.run(conn, 40))
    in_session(held.relay_dsn, held, lambda conn: fail(conn, 400))
    assert touched(held, lambda conn: stream.run(conn, 40)) <= task * TOLERANCE


@pytest.mark.rare
def test_polling_touches_as_many_pages_after_hundreds_of_differences(held: Outbox) -> None:
    # What the stream has noted, polling no longer looks at.
    stream, polling = Stream(), Polling()
    in_session(held.relay_dsn, held, lambda conn: stream.run(conn, 500), stream.compare)
    # As many that the indices have two levels.
    in_session(held.relay_dsn, held, lambda conn: polling.run(conn, 320))
    difference = touched(held, lambda conn: polling.run(conn, 20))
    in_session(held.relay_dsn, held, lambda conn: polling.run(conn, 400))
    assert touched(held, lambda conn: polling.run(conn, 20)) <= difference * TOLERANCE


@pytest.mark.parametrize("rows_of_a_commit", [250, 40_000])
def test_retention_touches_as_many_pages_for_the_last_rows_as_for_the_first(
    held: Outbox, monkeypatch: pytest.MonkeyPatch, rows_of_a_commit: int
) -> None:
    monkeypatch.setattr(partitions, "PORTION", 500)
    held.install_again(held.settings(retention={"keep": "1d"}))

    def publish(conn: Connection) -> None:
        for _ in range(40_000 // rows_of_a_commit):
            conn.execute(
                """
                insert into public.outbox_message_t (host_id, aggregate_type, event_type, payload, transaction_id)
                select gen_random_uuid(), 'Order', 'order.placed', '{}', gen_random_uuid() from generate_series(1, %s)
                """,
                (rows_of_a_commit,),
            )

    in_session(held.publisher_dsn, held, publish)
    held.conn.execute("update relay.readers set snapshot = pg_current_snapshot()")
    fetched = "select idx_tup_fetch from pg_stat_user_tables where relname = 'outbox_message_t'"
    before = int(held.value(fetched))
    with snapshot_held(held):
        rows = partitions.Upkeep("public.outbox_message_t")

        def delete(conn: Connection, portions: int) -> int:
            left = iter(range(portions + 1))
            late = held.conn.execute("select now() + interval '1 day'").fetchone()
            assert late is not None
            steps = rows.steps(
                conn, "delete", late[0], timedelta(0), timedelta(0), lambda: next(left) == portions
            )
            return sum(int(done or 0) for _, done, _ in steps)

        def pages(portions: int) -> float:
            deleted: list[int] = []
            count = touched(
                held,
                lambda conn: deleted.append(delete(conn, portions)),
                table="outbox_message_t",
            )
            return count / deleted[0]

        # Rows of one commit are deleted in ever larger portions, each of which walks through those before.
        first = pages(2)
        assert pages(1000) <= first * (TOLERANCE if rows_of_a_commit == 250 else 2.5)
        # No portion reads what is left to the next ones, although the table has no statistics.
        assert int(held.value(fetched)) - before <= 2 * 40_000
    assert held.value("select count(*) from outbox_message_t") == 0


def test_superseded_positions_are_deleted_while_relay_runs(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "NOTE_SECONDS", 0.2)
    with relaying(outbox.settings()):
        outbox.fill(300)
        outbox.wait_handled()
        outbox.wait_compared()
        wait_until(lambda: outbox.value("select count(*) from relay.positions") <= 16, 30)
    outbox.assert_exact()


def test_what_a_failed_deletion_has_not_deleted_is_deleted_later(held: Outbox) -> None:
    """Two instances delete the same rows, and a statement of one fails: oban-bg/oban#168."""
    stream = Stream()
    with connect(held.relay_dsn) as conn:
        stream.run(conn, 200)
        held.conn.execute(FAIL_DELETION)
        with pytest.raises(psycopg.errors.DeadlockDetected):
            stream.compare(conn)
        held.conn.execute("drop trigger fail on relay.positions")
        stream.run(conn, 10)
        stream.compare(conn)
    assert held.value("select count(*) from relay.positions") < 20
