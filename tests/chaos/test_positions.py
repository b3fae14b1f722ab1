"""Any interleaving of publishers, with relay changing between the WAL and polling wherever it likes.

What is committed is applied once, business transactions stay whole, and of one host what was published after another's
commit is applied after it. A sink beside gets the same, by a cursor of its own.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relay.config.settings import Settings
from relay.delivery import sinks
from relay.model.events import Transaction
from relay.source import hybrid
from relay.source.stream import lost_slot
from tests.outbox import Outbox, host, relaying, wait_until, work_and_crash
from tests.postgres import start_server

PUBLISHERS = 8

_PUBLISH = """
    insert into outbox_message_t (id, host_id, event_type, payload, transaction_id)
    select id, %s, 'x', '{"amount": 1}', %s from unnest(%s::uuid[]) as id
"""
_APPLY = """
    insert into projection (id, host_id, c_offset, transaction_id, amount) values
    (%(id)s, %(host_id)s, %(c_offset)s, %(transaction_id)s, (%(payload)s::jsonb->>'amount')::numeric)
"""


@dataclass
class Publisher:
    """A session with a transaction that stays open until it is told to end."""

    conn: psycopg.Connection[Any]
    ids: list[uuid.UUID] = field(default_factory=list)

    @property
    def open(self) -> bool:
        return self.conn.info.transaction_status is not psycopg.pq.TransactionStatus.IDLE


class Destination:
    """A sink that takes everything, and remembers it."""

    name = "destination"

    def __init__(self) -> None:
        self.events: list[tuple[uuid.UUID, uuid.UUID]] = []

    def resume(self, series: str) -> None:
        """It drops no repetition."""

    async def deliver(self, transaction: Transaction) -> None:
        for each in transaction.events:
            assert isinstance(each.host_id, uuid.UUID)
            assert isinstance(each.id, uuid.UUID)
            self.events.append((each.host_id, each.id))

    async def close(self) -> None:
        """Nothing is open."""


class World:
    """Publishers, prepared transactions, the slot and relay, with a clock that ticks at each step."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.clock = 0
        self.destination = Destination()
        self.inserted: dict[uuid.UUID, int] = {}
        self.committed: dict[uuid.UUID, int] = {}
        self.publishers = [
            Publisher(psycopg.connect(outbox.publisher_dsn)) for _ in range(PUBLISHERS)
        ]
        self.prepared: dict[str, list[uuid.UUID]] = {}
        self.knows_slot = True
        """Whether relay could say how far it has read the slot: not if it was killed."""

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.conn.close()

    def begin(self) -> None:
        """Everything before is over: nothing is left of it but positions."""
        self.finish(commits=False)
        self.outbox.conn.execute("truncate outbox_message_t, projection")
        self.destination.events.clear()
        self.inserted.clear()
        self.committed.clear()

    def publish(self, number: int, to: int, count: int) -> None:
        publisher = self.publishers[number]
        ids = [uuid.uuid4() for _ in range(count)]
        publisher.conn.execute(_PUBLISH, (host(to), uuid.uuid4(), ids))
        self.inserted |= dict.fromkeys(ids, self._tick())
        publisher.ids += ids

    def publish_in_a_savepoint(self, number: int, to: int, keeps: bool) -> None:
        conn = self.publishers[number].conn
        conn.execute("savepoint here")
        before = list(self.publishers[number].ids)
        self.publish(number, to, 1)
        if not keeps:
            conn.execute("rollback to savepoint here")
            self.publishers[number].ids = before

    def end(self, number: int, commits: bool) -> None:
        publisher = self.publishers[number]
        if not publisher.open:
            return
        if commits:
            publisher.conn.commit()
            self.committed |= dict.fromkeys(publisher.ids, self._tick())
        else:
            publisher.conn.rollback()
        publisher.ids = []

    def prepare(self, number: int) -> None:
        publisher = self.publishers[number]
        if not publisher.open:
            return
        name = uuid.uuid4().hex
        publisher.conn.execute(f"prepare transaction '{name}'".encode())
        publisher.conn.rollback()
        self.prepared[name], publisher.ids = publisher.ids, []

    def end_prepared(self, commits: bool) -> None:
        if not self.prepared:
            return
        name, ids = next(iter(self.prepared.items()))
        del self.prepared[name]
        self.outbox.conn.execute(
            f"{'commit' if commits else 'rollback'} prepared '{name}'".encode()
        )
        if commits:
            self.committed |= dict.fromkeys(ids, self._tick())

    def update(self) -> None:
        """Rows that were published get another xmin."""
        self.outbox.conn.execute("update outbox_message_t set user_id = gen_random_uuid()")

    def drop_slot(self) -> None:
        self.outbox.conn.execute(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = %s",
            (self.outbox.slot,),
        )

    def advance_slot(self) -> None:
        if not self.knows_slot:
            # Then nothing is lost either, but what the slot lacks comes later than what it has.
            return
        self.outbox.conn.execute(
            "select pg_replication_slot_advance(slot_name, pg_current_wal_flush_lsn())"
            " from pg_replication_slots where slot_name = %s",
            (self.outbox.slot,),
        )

    def relay(self, mode: str, batch_size: int, whole: bool) -> None:
        """Let relay run until everything that is committed is applied, or only until it has applied something."""
        due = len(self.committed)
        goal = due if whole else min(due, self.applied + 1)
        with relaying(self._settings(mode, batch_size)):
            wait_until(lambda: self.applied >= goal)
            if whole:
                wait_until(lambda: len(self.destination.events) >= due)
        if mode == "auto":
            self.knows_slot = bool(
                self.outbox.value("select confirmed_lsn is not null from relay.groups")
            )

    def relay_dies(self, mode: str, batch_size: int, tasks: int) -> None:
        """Let relay apply some tasks of what it takes first, and be killed."""
        if self.applied < len(self.committed):
            self.knows_slot = False
            work_and_crash(self._settings(mode, batch_size), tasks)

    def _settings(self, mode: str, batch_size: int) -> Settings:
        source = {**self.outbox.config()["source"], "mode": mode}
        return self.outbox.settings(
            source=source,
            partitions=4,
            poll={"batch_size": batch_size, "wait_period_ms": 50},
            batch={"max_events": 5},
            handlers={
                "projection": {"type": "sql", "statement": _APPLY},
                "destination": {"type": "http", "url": "http://localhost/"},
            },
            routes=[{"handlers": ["projection", "destination"]}],
        )

    @property
    def applied(self) -> int:
        return int(self.outbox.value("select count(*) from projection"))

    def finish(self, commits: bool) -> None:
        """All transactions end."""
        for number in range(PUBLISHERS):
            self.end(number, commits)
        while self.prepared:
            self.end_prepared(commits)

    def assert_exact(self) -> None:
        self.outbox.assert_complete()
        assert set(self.outbox.column("select id from projection")) == set(self.committed)
        torn = (
            "select transaction_id from projection group by 1 having count(distinct applied_by) > 1"
        )
        assert self.outbox.column(torn) == []
        applied = self.outbox.conn.execute("select host_id, id from projection order by seq")
        self._assert_order(applied)
        delivered = [event for _, event in self.destination.events]
        assert sorted(delivered) == sorted(self.committed)
        self._assert_order(self.destination.events)

    def _assert_order(self, events: Iterable[tuple[uuid.UUID, uuid.UUID]]) -> None:
        by_host: dict[uuid.UUID, list[uuid.UUID]] = {}
        for to, event in events:
            by_host.setdefault(to, []).append(event)
        for of_host in by_host.values():
            latest = 0
            for event in of_host:
                # Nothing that was committed before this was inserted is still to come.
                assert self.committed[event] > latest
                latest = max(latest, self.inserted[event])

    def _tick(self) -> int:
        self.clock += 1
        return self.clock


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(hybrid, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(hybrid, "AUDIT_SECONDS", 0.2)
    monkeypatch.setattr(lost_slot, "RECREATIONS_AN_HOUR", 10**6)
    with ExitStack() as stack:
        server = stack.enter_context(start_server({"max_prepared_transactions": "100"}))
        outbox = stack.enter_context(Outbox(server.create_database("positions")))
        outbox.install(partitions=4)
        outbox.conn.execute(
            "alter table projection add applied_by xid8 default pg_current_xact_id()"
        )
        found = World(outbox)
        monkeypatch.setattr(
            sinks,
            "build_sinks",
            lambda configured, *_: {
                name: (found.destination, each)
                for name, each in configured.items()
                if name == "destination"
            },
        )
        stack.callback(found.close)
        yield found


numbers = st.integers(0, PUBLISHERS - 1)
hosts = st.integers(0, 3)
flags = st.booleans()
publishing = st.one_of(
    st.tuples(st.just(World.publish), numbers, hosts, st.integers(1, 4)),
    st.tuples(st.just(World.publish_in_a_savepoint), numbers, hosts, flags),
    st.tuples(st.just(World.end), numbers, flags),
    st.tuples(st.just(World.prepare), numbers),
    st.tuples(st.just(World.end_prepared), flags),
    st.tuples(st.just(World.update)),
)
relaying_somehow = st.one_of(
    st.tuples(st.just(World.relay), st.sampled_from(["auto", "poll"]), st.integers(1, 9), flags),
    st.tuples(
        st.just(World.relay_dies),
        st.sampled_from(["auto", "poll"]),
        st.integers(1, 9),
        st.integers(0, 3),
    ),
    st.tuples(st.just(World.drop_slot)),
    st.tuples(st.just(World.advance_slot)),
)
phases = st.lists(
    st.tuples(st.lists(publishing, max_size=12), relaying_somehow), min_size=1, max_size=4
)
Step = tuple[Callable[..., None], Any]


@pytest.mark.timeout(3_600)  # 1,000 examples in `make chaos`
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(phases, flags)
def test_what_is_committed_is_applied_once(
    world: World, phases: list[tuple[list[Step], Step]], commits: bool
) -> None:
    world.begin()
    for steps, way in phases:
        for step, *arguments in (*steps, way):
            step(world, *arguments)
    world.finish(commits)
    world.relay("auto", 3, whole=True)
    # What was applied is not polled.
    world.relay("poll", 9, whole=True)
    world.assert_exact()
