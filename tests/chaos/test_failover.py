"""The source fails over to a standby: with a synchronised slot the stream goes on, without one the gap is polled.

A failover with a loss stops relay until an operator decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.types.json import Jsonb

from relay.admin.offsets import plan_seek, seek
from relay.config.settings import Settings
from relay.model.snapshots import Snapshot
from relay.store.positions import spark_batches
from relay.store.positions.spark_batches import Contents, OpenBatch
from tests.outbox import (
    PROJECTION,
    Outbox,
    event,
    host,
    relaying,
    run_until_fault,
    wait_for_fault,
    wait_until,
)
from tests.postgres import EmbeddedServer, start_server, start_standby
from tests.roles import PASSWORD, Role

pytestmark = pytest.mark.chaos

PRIMARY = {"wal_log_hints": "on"}
STANDBY = {"hot_standby_feedback": "on", "primary_slot_name": "standby"}


@dataclass(frozen=True)
class Pair:
    """A primary with a streaming standby, and the outbox as each of them has it."""

    primary: EmbeddedServer
    source: Outbox
    standby: EmbeddedServer
    copy: Outbox

    def settings(self, target: Outbox, dsn: str | None = None, mode: str = "auto") -> Settings:
        """A relay that follows whichever of both may be written to, with its target elsewhere."""
        source = {"dsn": dsn or self.either(), "slot": "app", "publication": "app", "mode": mode}
        return Settings(**self.source.config(source=source, target={"dsn": target.relay_dsn}))

    def either(self, user: str = "postgres") -> str:
        """The DSN of whichever of both may be written to."""
        return make_conninfo(
            host="127.0.0.1,127.0.0.1",
            port=f"{self.primary.cluster.port},{self.standby.cluster.port}",
            dbname="app",
            user=user,
            password="p",
            target_session_attrs="read-write",
        )

    def synchronise(self) -> None:
        """Wait until the standby has the slot."""
        wait_until(lambda: slot_is_synchronised(self.source, self.copy))

    def replicate(self) -> None:
        """Wait until the standby has everything."""
        tip = self.source.wal_end()
        wait_until(lambda: has_replayed(self.copy, tip))

    def cut(self) -> None:
        """Let the standby lag permanently."""
        self.replicate()
        self.copy.conn.execute("alter system set primary_conninfo = ''")
        self.copy.conn.execute("select pg_reload_conf()")
        wait_until(lambda: not self.copy.column("select pid from pg_stat_wal_receiver"))

    def fail_over(self) -> None:
        """Kill the primary, and make the standby one."""
        self.primary.kill()
        self.copy.conn.execute("select pg_promote()")


@contextmanager
def streaming_pair(
    synchronised: bool = False, settings: Mapping[str, str] | None = None
) -> Iterator[Pair]:
    """A new pair; skips the test where the standby cannot have the slot but should (`synchronised`)."""
    with start_server({**PRIMARY, **(settings or {})}) as primary:
        # The packages of some older versions have no more than the server.
        if not isinstance(primary, EmbeddedServer) or not primary.has("pg_basebackup"):
            pytest.skip("needs pg_basebackup beside the server")
        if synchronised and primary.major < 17:
            pytest.skip("failover slots came with PostgreSQL 17")
        with Outbox(primary.create_database("app")) as source:
            source.conn.execute("select pg_create_physical_replication_slot('standby', true)")
            with (
                start_standby(primary, {**STANDBY, **(settings or {})}) as standby,
                Outbox(standby.dsn("app")) as copy,
            ):
                yield Pair(primary, source, standby, copy)


def assert_applied_in_order(target: Outbox, ids: list[Any]) -> None:
    """Assert that the target has these events, each once, and each host's in the order of their insertion."""
    assert sorted(ids) == sorted(target.column("select id from projection"))
    assert not target.column(
        "select 1 from (select c_offset < lag(c_offset) over (partition by host_id order by seq) as overtaken"
        " from projection) as followed where overtaken"
    )


def has_replayed(standby: Outbox, lsn: str) -> bool:
    """Whether the standby has come as far as a position of its primary."""
    return bool(standby.value("select pg_last_wal_replay_lsn() >= %s::pg_lsn", (lsn,)))


def slot_is_synchronised(source: Outbox, standby: Outbox) -> bool:
    """Try once: the standby takes the slot over when it has come as far as the slot, and the slot as far as it.

    The slot's oldest transaction moves on with the server's notes of the running ones, otherwise made every 15 s.
    """
    source.fill(1)
    source.conn.execute("select pg_log_standby_snapshot()")
    tip = source.wal_end()
    source.wait_drained()
    wait_until(lambda: has_replayed(standby, tip))
    standby.conn.execute("select pg_sync_replication_slots()")
    return bool(
        standby.column(
            "select 1 from pg_replication_slots where slot_name = 'app' and synced and not temporary"
        )
    )


@pytest.fixture
def target(database: str) -> Iterator[Outbox]:
    """A database of another server, as it must be to tell what a new primary has not seen."""
    with Outbox(database) as made:
        made.conn.execute(PROJECTION)
        yield made


@pytest.mark.rare
@pytest.mark.timeout(300)
@pytest.mark.parametrize("synchronised", [True, False])
def test_a_standby_is_promoted(target: Outbox, synchronised: bool) -> None:
    with streaming_pair(synchronised) as pair:
        settings = pair.settings(target)
        pair.source.install_again(settings)
        target.watch_positions()
        with relaying(settings):
            pair.source.fill(200)
            wait_until(lambda: target.handled() == 1_000)
            pair.source.wait_drained()
            if synchronised:
                pair.synchronise()
            pair.replicate()
            before = pair.source.value("select count(*) from outbox_message_t")
            wait_until(lambda: target.handled() == before)
            pair.fail_over()
            pair.copy.fill(200)
            wait_until(lambda: target.handled() == before + 1_000)
            # Polling may have got them all before the WAL of the new primary could be had.
            wait_until(lambda: target.value("select timeline from relay.groups") == 2)
            pair.copy.fill(1)
            wait_until(lambda: target.handled() == before + 1_005)
            everything = pair.copy.column("select id from outbox_message_t order by c_offset")
    recreated = target.value("select cardinality(slot_recreations) from relay.groups")
    assert recreated == (0 if synchronised else 1)
    assert target.positions_moved_back() == 0
    assert target.value("select timeline_history from relay.groups").startswith("1\t")
    assert_applied_in_order(target, everything)


@pytest.mark.rare
@pytest.mark.timeout(300)
@pytest.mark.parametrize("synchronised", [True, False])
def test_a_failover_loses_events_that_were_applied(target: Outbox, synchronised: bool) -> None:
    """New events take over the lost ones' c_offsets and positions, and none of them is skipped."""
    with streaming_pair(synchronised) as pair:
        settings = pair.settings(target)
        pair.source.install_again(settings)
        running = ExitStack()
        running.enter_context(relaying(settings))
        pair.source.fill(20)
        pair.source.wait_drained()
        if synchronised:
            pair.synchronise()
        pair.cut()
        pair.source.fill(1)
        pair.source.wait_drained()
        applied = target.column("select id from projection order by seq")
        pair.fail_over()
        # More than were lost: their c_offsets go beyond what was applied.
        pair.copy.fill(2)
        said = wait_for_fault(running)
        assert "has lost events that group 'default' has applied" in said
        assert run_until_fault(settings) == said
        assert target.column("select id from projection order by seq") == applied
        assert target.value("select timeline from relay.groups") == 1
        assert target.value("select cardinality(slot_recreations) from relay.groups") == 0

        everything = pair.copy.column("select id from outbox_message_t")
        new = sorted(set(everything) - set(applied))
        assert len(new) == 10
        since = pair.copy.value(
            "select min(event_ts) from outbox_message_t where id = any(%s)", (new,)
        )
        (lsn,) = re.findall(r"seek --to (\S+/\w+)", said)
        move = plan_seek(settings, lsn if synchronised else since.isoformat(), None)
        assert move.again == 5
        seek(settings, move, None)
        with relaying(settings):
            wait_until(lambda: target.handled() >= len(applied) + 10)
            pair.copy.fill(1)
            pair.copy.wait_drained()
        newer = set(pair.copy.column("select id from outbox_message_t")) - set(everything)
        assert sorted(target.column("select id from projection")) == sorted(
            [*applied, *new, *newer]
        )


@pytest.mark.rare
@pytest.mark.timeout(300)
def test_a_standby_is_polled_up_to_the_oldest_open_transaction(target: Outbox) -> None:
    """Its snapshots do not tell which transactions are open on the primary."""
    with streaming_pair() as pair:
        pair.source.install_again(pair.settings(target))
        as_relay = make_conninfo(pair.standby.dsn("app"), user=Role.RELAY, password=PASSWORD)
        settings = pair.settings(target, as_relay, "poll")
        pair.source.publish(host(1), event(0))
        with psycopg.connect(pair.source.publisher_dsn) as slow:
            slow.execute("select relay.publish(%s, null, %s)", (host(1), Jsonb([event(1)])))
            pair.source.publish(host(1), event(2))
            pair.replicate()
            with relaying(settings):
                wait_until(lambda: target.handled() > 0)
                # What came with it, in one commit, is what the difference has.
                assert target.column("select amount from projection") == [0]
                slow.commit()
                pair.replicate()
                wait_until(lambda: target.handled() == 3)
        everything = pair.source.column("select id from outbox_message_t order by c_offset")
    assert target.column("select id from projection order by seq") == everything


@pytest.mark.rare
@pytest.mark.timeout(300)
def test_an_instance_at_a_lagging_standby_waits(target: Outbox) -> None:
    with streaming_pair() as pair:
        settings = pair.settings(target)
        pair.source.install_again(settings)
        target.watch_positions()
        with relaying(settings):
            pair.source.fill(5)
            pair.source.wait_drained()
            pair.cut()
            pair.source.fill(5)
            pair.source.wait_drained()
            with relaying(pair.settings(target, pair.standby.dsn("app"))):
                # It has connected, and polls what the standby has: nothing new.
                wait_until(lambda: target.value("select source_mode from relay.groups") == "poll")
                for number in range(20):
                    pair.source.publish(host(number), event(number))
                pair.source.wait_drained()
        everything = pair.source.column("select id from outbox_message_t")
    assert target.positions_moved_back() == 0
    assert sorted(everything) == sorted(target.column("select id from projection"))


@contextmanager
def publishing(dsn: str, hosts: int) -> Iterator[None]:
    """Somebody publishes for each host all the while, wherever the server may be."""
    done = Event()

    def run(number: int) -> None:
        while not done.is_set():
            with suppress(psycopg.Error), Outbox(dsn) as writer:
                while not done.wait(0.01):
                    writer.publish(host(number), event(1), event(2))

    threads = [Thread(target=run, args=(number,)) for number in range(hosts)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


@pytest.mark.rare
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["auto", "poll"])
def test_publishers_go_on_while_a_synchronous_standby_is_promoted(
    target: Outbox, mode: str
) -> None:
    with streaming_pair(synchronised=True) as pair:
        settings = pair.settings(target, mode=mode)
        pair.source.install_again(settings)
        for setting in (
            "synchronous_standby_names = '*'",
            "synchronized_standby_slots = 'standby'",
        ):
            pair.source.conn.execute(f"alter system set {setting}".encode())
        pair.source.conn.execute("select pg_reload_conf()")
        wait_until(lambda: pair.source.column("show synchronous_standby_names") == ["*"])
        pair.copy.conn.execute("alter system set synchronous_standby_names = ''")
        pair.copy.conn.execute("alter system set synchronized_standby_slots = ''")
        pair.copy.conn.execute("select pg_reload_conf()")
        with relaying(settings):
            with publishing(pair.either(), hosts=3):
                wait_until(lambda: target.handled() > 300)
                pair.fail_over()
                before = target.handled()
                wait_until(lambda: target.handled() > before + 300)
            published = pair.copy.value("select count(*) from outbox_message_t")
            wait_until(lambda: target.handled() >= published)
        everything = pair.copy.column("select id from outbox_message_t")
    assert_applied_in_order(target, everything)


@pytest.mark.rare
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lossy", [True, False])
def test_a_standby_is_promoted_while_relay_polls(target: Outbox, lossy: bool) -> None:
    with streaming_pair() as pair:
        settings = pair.settings(target, mode="poll")
        pair.source.install_again(settings)
        running = ExitStack()
        running.enter_context(relaying(settings))
        pair.source.fill(20)
        wait_until(lambda: target.handled() == 100)
        if lossy:
            pair.cut()
        pair.source.fill(1)
        wait_until(lambda: target.handled() == 105)
        if not lossy:
            pair.replicate()
        applied = target.column("select id from projection order by seq")
        pair.fail_over()
        # More than were lost: transaction ids and c_offsets go beyond those that were applied.
        pair.copy.fill(20)
        if lossy:
            assert "may have lost events that group 'default' has polled" in wait_for_fault(running)
            assert target.column("select id from projection order by seq") == applied
            return
        wait_until(lambda: target.handled() == 205)
        running.close()
        assert target.value("select timeline from relay.groups") == 2
        # Positions are those of the new timeline now.
        with relaying(settings):
            pair.copy.fill(1)
            wait_until(lambda: target.handled() == 210)
        everything = pair.copy.column("select id from outbox_message_t")
    assert sorted(everything) == sorted(target.column("select id from projection"))


@pytest.mark.rare
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lossy", [True, False])
def test_a_witness_decides_where_nobody_may_ask_for_the_history(
    target: Outbox, lossy: bool
) -> None:
    """Without the right to replicate, nobody learns where the timelines part."""
    with streaming_pair() as pair:
        pair.source.install_again(pair.settings(target, mode="poll"))
        pair.source.conn.execute("create role reader login password 'p' in role relay")
        settings = pair.settings(target, pair.either("reader"), mode="poll")
        running = ExitStack()
        running.enter_context(relaying(settings))
        pair.source.fill(20)
        wait_until(lambda: target.handled() == 100)
        if lossy:
            pair.cut()
            pair.source.fill(1)
            wait_until(lambda: target.handled() == 105)
        else:
            pair.replicate()
        pair.fail_over()
        # More ids than were lost.
        pair.copy.fill(20)
        if lossy:
            said = wait_for_fault(running)
            assert "does not have the witness" in said
            assert "a failover with a loss" in said
            assert target.handled() == 105
            return
        wait_until(lambda: target.handled() == 200)
        running.close()


@pytest.mark.rare
@pytest.mark.timeout(300)
def test_a_failover_that_loses_nothing_but_a_witness_stops_nobody(target: Outbox) -> None:
    """The events and the position before them are there; the timelines tell that the witness is all that is lost."""
    with streaming_pair() as pair:
        settings = pair.settings(target)
        pair.source.install_again(settings)
        with relaying(settings):
            pair.source.fill(5)
            pair.source.wait_drained()
        pair.cut()
        lost = "select relay.take_witness()"
        pair.source.conn.execute(lost)
        newest = pair.source.conn.execute(
            "select id, snapshot::text, lsn::text from relay.witnesses order by number desc limit 1"
        ).fetchone()
        assert newest is not None
        target.conn.execute(
            "insert into relay.noted_witnesses (group_id, witness, snapshot, lsn)"
            " values ('default', %s, %s::pg_snapshot, %s)",
            newest,
        )
        pair.fail_over()
        pair.copy.fill(5)
        with relaying(settings):
            wait_until(lambda: target.handled() == 50)


def test_a_batch_of_spark_is_not_taken_for_one_that_the_former_primary_began() -> None:
    """Its number is the same and its rows are others: a table that has the one must not refuse the other."""
    with streaming_pair() as pair:
        pair.source.install()
        begun = [_next_batch(pair.source)]
        pair.cut()
        begun.append(_next_batch(pair.source))
        pair.fail_over()
        begun.append(_next_batch(pair.copy))
    assert [each.number for each in begun] == [1, 2, 1]
    assert begun[0].application == begun[1].application != begun[2].application


def test_a_batch_of_spark_is_not_taken_for_one_that_a_restored_server_began() -> None:
    """A copy of its files, as of a volume, has the same timeline."""
    with start_server() as server:
        dsn = server.create_database("app")
        with Outbox(dsn) as outbox:
            outbox.install()
            first = _next_batch(outbox)
        server.stop()
        server.start()
        with Outbox(dsn) as outbox:
            second = _next_batch(outbox)
    assert first.application != second.application


def _next_batch(target: Outbox) -> OpenBatch:
    """Begin a batch of a sink, and end it."""
    contents = Contents(Snapshot(1, 1), Snapshot(5, 5))
    spark_batches.begin(target.conn, "default", "lake", "delta x", 1, ([], 8), contents)
    batch = spark_batches.begun(target.conn, "default", "lake", "delta x")
    assert batch is not None
    assert spark_batches.end(target.conn, "default", "lake", batch.id)
    return batch
