"""What the integration tests share: an outbox to publish to, a relay to run, and questions to the database."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Self

import psycopg
import pytest
import yaml
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.json import Jsonb

from relay.admin.install import initialise
from relay.config.settings import Settings
from relay.delivery.sinks import Sinks
from relay.faults import RelayError
from relay.model.batch import Batch, TaskOutcome
from relay.pipeline.apply import Applier
from relay.pipeline.plan import Planner
from relay.service import Service
from relay.source.hybrid import open_source
from relay.source.wal import WalSource
from relay.spark.session import Session

APPEND = """
    insert into projection (id, host_id, c_offset, transaction_id, amount)
    values (%(id)s, %(host_id)s, %(c_offset)s, %(transaction_id)s, (%(payload)s->>'amount')::numeric)
"""
"""Appends without ON CONFLICT, so that a second application shows."""

WATCH = """
    create table moved_back (former pg_lsn);
    create function note_moved_back() returns trigger language plpgsql as $$
    begin
        insert into moved_back values (old.applied_lsn);
        return null;
    end $$;
    create trigger note_moved_back after update on relay.consumer_offsets
        for each row when (new.applied_lsn < old.applied_lsn) execute function note_moved_back();
"""

PROJECTION = """
    create table projection (
        seq bigserial, id uuid, host_id uuid, c_offset bigint, transaction_id uuid,
        amount numeric check (amount >= 0)
    )
"""

Event = Mapping[str, Any]


def event(amount: Any = 1, event_type: str = "order.placed", **more: Any) -> dict[str, Any]:
    """One event as `relay.publish` takes it."""
    return {
        "event_type": event_type,
        "aggregate_type": "Order",
        "aggregate_id": "1",
        "payload": {"amount": amount},
        **more,
    }


def host(number: int) -> uuid.UUID:
    """The id of the tests' n-th host."""
    return uuid.UUID(int=number, version=4)


class Outbox:
    """A database with relay's outbox in it, and a projection that handlers append to."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.slot = str(conninfo_to_dict(dsn)["dbname"])
        self.conn = psycopg.connect(dsn, autocommit=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.conn.close()

    def config(self, **overrides: Any) -> dict[str, Any]:
        """A configuration as its YAML would be; the projection takes every event."""
        return {
            "source": {"dsn": self.dsn, "slot": self.slot, "publication": self.slot},
            "handlers": {"projection": {"type": "sql", "statement": APPEND}},
            "routes": [{"handlers": ["projection"]}],
            # Where no batch is too large for the driver, no JVM is started.
            "batch": {"inline_max_events": 1_000_000_000},
            **overrides,
        }

    def settings(self, engine: str = "inline", **overrides: Any) -> Settings:
        """Settings that send every batch to one engine."""
        inline_max_events = 0 if engine == "spark" else 1_000_000_000
        batch = {"inline_max_events": inline_max_events, **overrides.pop("batch", {})}
        return Settings(**self.config(batch=batch, **overrides))

    def config_file(self, path: Path, **overrides: Any) -> Path:
        """The configuration as a file."""
        path.write_text(yaml.safe_dump(self.config(**overrides)))
        return path

    def install(self, **overrides: Any) -> None:
        """Run what `relay init` runs, and create the projection."""
        self.conn.execute(PROJECTION)
        initialise(self.settings(**overrides))

    def install_again(self, settings: Settings) -> None:
        """Run what `relay init` runs for other settings."""
        initialise(settings)

    def reconnect(self) -> None:
        """Connect anew, after the server was away."""
        self.conn = psycopg.connect(self.dsn, autocommit=True)

    def publish(
        self, host_id: uuid.UUID, *events: Event, transaction_id: uuid.UUID | None = None
    ) -> uuid.UUID:
        """Publish one business transaction in a commit of its own."""
        row = self.conn.execute(
            "select relay.publish(%s, %s, %s, %s)",
            (host_id, host(999), Jsonb(list(events)), transaction_id),
        ).fetchone()
        assert row is not None
        return uuid.UUID(str(row[0]))

    def fill(self, transactions: int, events: int = 5, hosts: int = 64) -> None:
        """Publish many business transactions, each in a commit of its own, as fast as the server can."""
        self.conn.execute(
            f"""
            do $$
            begin
                set local synchronous_commit = off;
                for t in 1..{transactions} loop
                    perform relay.publish(
                        ('00000000-0000-4000-8000-' || lpad((t % {hosts})::text, 12, '0'))::uuid,
                        ('00000000-0000-4000-9000-' || lpad((t % 1000)::text, 12, '0'))::uuid,
                        (select jsonb_agg(jsonb_build_object(
                            'event_type', 'order.placed', 'aggregate_type', 'Order', 'aggregate_id', t::text,
                            'payload', jsonb_build_object('order', t, 'amount', n, 'note', repeat('x', 100))))
                         from generate_series(1, {events}) n));
                    commit;
                    set local synchronous_commit = off;
                end loop;
            end $$
            """.encode()
        )

    def column(self, query: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """The first column of a query."""
        return [row[0] for row in self.conn.execute(query.encode(), parameters)]

    def value(self, query: str, parameters: Sequence[Any] = ()) -> Any:
        """The one value of a query."""
        (found,) = self.column(query, parameters)
        return found

    def watch_positions(self) -> None:
        """Note from now on when the position of a partition moves back."""
        self.conn.execute(WATCH)

    def positions_moved_back(self) -> int:
        """How often the position of a partition moved back."""
        return int(self.value("select count(*) from moved_back"))

    @contextmanager
    def clerk(self) -> Iterator[tuple[str, str]]:
        """A role with the rights that `sql/` grants and those for the projection: its name, and its DSN."""
        name = f"{self.slot}_clerk"
        self.conn.execute(
            f"create role {name} login password 'p' replication in role relay;"
            f"grant insert, select on projection to {name};"
            f"grant usage on sequence projection_seq_seq to {name}".encode()
        )
        try:
            yield name, make_conninfo(self.dsn, user=name, password="p")
        finally:
            self.conn.execute(f"drop owned by {name}; drop role {name}".encode())

    def tip(self) -> str:
        """The position up to which everything is to be confirmed."""
        return str(self.value("select pg_current_wal_insert_lsn()::text"))

    def confirmed(self, lsn: str) -> bool:
        """Whether the slot is confirmed to a position."""
        return bool(
            self.value(
                "select confirmed_flush_lsn >= %s::pg_lsn from pg_replication_slots where slot_name = %s",
                (lsn, self.slot),
            )
        )

    def wait_drained(self, timeout: float = 60.0) -> None:
        """Wait until the slot is confirmed to where the WAL is now."""
        tip = self.tip()
        wait_until(lambda: self.confirmed(tip), timeout)

    def wait_compared(self, timeout: float = 30.0) -> None:
        """Wait until the stream was compared with the outbox, so that nothing is noted any more."""
        wait_until(
            lambda: not self.column("select 1 from relay.applied_commits limit 1"),
            timeout,
        )

    def handled(self) -> int:
        """How many events are in the projection or among the target's dead letters."""
        return int(
            self.value(
                """
                select (select count(*) from projection)
                       + (select count(*) from relay.dead_letter_queue where sink = '')
                """
            )
        )

    def wait_handled(self, timeout: float = 30.0) -> None:
        """Wait until everything published so far is handled."""
        total = self.value("select count(*) from outbox_message_t")
        wait_until(lambda: self.handled() >= total, timeout)

    def wait_delivered(self, sink: str, timeout: float = 60.0) -> None:
        """Wait until a sink has stored everything published so far as done, and nothing is deferred."""
        query = """
            select not exists (select from relay.deferred where sink = %(sink)s) and not exists (
                select from outbox_message_t, relay.sinks
                 where sink = %(sink)s and not pg_visible_in_snapshot(c_xid, snapshot)
                   and c_xid not in (select unnest(xids) from relay.sink_commits where sink = %(sink)s))
              from relay.sinks where sink = %(sink)s
        """
        wait_until(
            lambda: self.conn.execute(query, {"sink": sink}).fetchall() == [(True,)], timeout, 0.2
        )

    def drain(
        self, settings: Settings, session: Session | None = None, timeout: float = 60.0
    ) -> None:
        """Relay until everything published so far is confirmed."""
        with relaying(settings, session):
            self.wait_drained(timeout)

    def assert_exact(self) -> None:
        """Projection + dead letters = outbox, nothing twice, order of insertion per host held."""
        self.assert_complete()
        assert (
            self.value(
                """
            select count(*) from (
                select c_offset < lag(c_offset) over (partition by host_id order by seq) as overtaken from projection
            ) as followed where overtaken
            """
            )
            == 0
        )

    def assert_complete(self) -> None:
        """Projection + the target's dead letters = outbox, nothing twice."""
        assert self.value("select count(*) from projection") == self.value(
            "select count(distinct id) from projection"
        )
        assert not self.column(
            """
            (select id from outbox_message_t
             except (select id from projection
                     union select event_id::uuid from relay.dead_letter_queue where sink = ''))
            union all
            ((select id from projection union all select event_id::uuid from relay.dead_letter_queue where sink = '')
             except all select id from outbox_message_t)
            """
        )


@contextmanager
def relaying(
    settings: Settings, session: Session | None = None, accept_configuration: bool = False
) -> Iterator[Service]:
    """A relay in a thread of this process; what it raises is raised at the end."""
    service = Service(settings, session, accept_configuration)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            service.run()
        except BaseException as error:
            raised.append(error)

    thread = Thread(target=run, name="relay")
    thread.start()
    try:
        yield service
    finally:
        service.stop()
        thread.join(60)
        if raised:
            # What ended the relay is the cause of what the test missed.
            raise raised[0]
    assert not thread.is_alive()


def stream_and_die(settings: Settings, tasks: int | None = None) -> None:
    """Apply the slot's next batch, or only so many of its tasks, and confirm nothing."""
    source = WalSource(settings)
    source.start()
    try:
        batch = source.take(30)
        assert batch is not None
        outcomes = apply_some(settings, batch, tasks)
        assert not any(outcome.busy for outcome in outcomes)
    finally:
        source.close()


def work_and_die(settings: Settings, tasks: int) -> None:
    """Apply some tasks of the first batch that relay takes, and end as a process that is killed then."""
    source = open_source(settings)
    source.start()
    try:
        apply_some(
            settings,
            next(iter(source.batches(Sinks(settings, source.confirm, source.stop)))),
            tasks,
        )
    finally:
        source.stop()
        source.close()
    with psycopg.connect(settings.target_dsn) as conn:
        # It could not say how far the slot is confirmed.
        conn.execute(
            "update relay.groups set confirmed_lsn = null where group_id = %s", (settings.group,)
        )


def apply_some(settings: Settings, batch: Batch, tasks: int | None) -> list[TaskOutcome]:
    """Apply the first tasks of a batch, by default all; returns what became of these."""
    with (
        closing(Applier(settings, 1)) as applier,
        psycopg.connect(settings.source_dsn) as conn,
    ):
        planned = Planner(settings.partitions, partial(_hashtext, conn)).work(batch, None)
        return [applier.apply(task) for task in planned[:tasks]]


def _hashtext(conn: psycopg.Connection[Any], hosts: Sequence[str]) -> list[int]:
    rows = conn.execute("select hashtext(host) from unnest(%s::text[]) as host", (list(hosts),))
    return [value for (value,) in rows]


def wait_until(condition: Callable[[], bool], timeout: float = 60.0, every: float = 0.02) -> None:
    """Ask every few seconds until the condition holds; fails after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s"
        time.sleep(every)


def why_it_ends(settings: Settings) -> str:
    """Run a relay until a fault ends it; returns what it says."""
    running = ExitStack()
    running.enter_context(relaying(settings))
    return why_it_ended(running)


def why_it_ended(running: ExitStack) -> str:
    """Wait until a fault ends the one relay that runs; returns what it says."""
    wait_until(lambda: "relay" not in {thread.name for thread in threading.enumerate()})
    with pytest.raises(RelayError) as raised:
        running.close()
    assert raised.value.exit_status == 1
    return str(raised.value)
