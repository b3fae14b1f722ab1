"""The integration tests' outbox: it publishes, runs relay in a thread, and queries the database."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any, Self

import psycopg
import pytest
import yaml
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.types.json import Jsonb

from relay.admin import install
from relay.admin.uninstall import plan_removal, remove
from relay.config.dsn import DatabaseAccess
from relay.config.settings import Settings
from relay.delivery.sinks import Sinks
from relay.faults import RelayError
from relay.model.batch import Batch, TaskOutcome
from relay.pipeline.apply import Applier
from relay.pipeline.plan import Planner
from relay.service import Service
from relay.source.hybrid import open_source
from relay.source.stream.receiver import Receiver
from relay.source.stream.slot import create_slot
from relay.spark.session import Session
from relay.store.connections import connect
from tests.roles import PASSWORD, Role, dsn_of, join_roles, prepare

APPEND = """
    insert into projection (id, host_id, c_offset, transaction_id, amount)
    values (%(id)s, %(host_id)s, %(c_offset)s, %(transaction_id)s, (%(payload)s->>'amount')::numeric)
"""
"""Appends without ON CONFLICT, so that an event that is applied twice has two rows."""

WATCH = """
    create table moved_back (former pg_lsn);
    create function note_moved_back() returns trigger language plpgsql as $$
    begin
        insert into public.moved_back
        select applied_lsn from relay.positions as former
         where (former.group_id, former.topic_id, former.partition_id) = (new.group_id, new.topic_id, new.partition_id)
           and former.number < new.number and former.applied_lsn > new.applied_lsn;
        return null;
    end $$;
    create trigger note_moved_back after insert on relay.positions
        for each row execute function note_moved_back();
"""

DEFER = """
    insert into relay.deferred (group_id, keys, holds, retry_at, hosts, columns, commit_lsn, end_lsn, commit_ts, xid,
                                first_offset, last_offset, events, size)
    select %s, array(select host || ' host' from unnest(hosts) as host), true, now(), hosts, '{}', '0/0', '0/0', 0, 0,
           1, 1, 1, 1
      from (select %s::text[] as hosts) as asked
"""
"""Defers a transaction that holds a key of each host: parameters are the group and the hosts."""
PROJECTION = """
    create table projection (
        seq bigserial, id uuid, host_id uuid, c_offset bigint, transaction_id uuid,
        amount numeric check (amount >= 0)
    )
"""

GIVE = """
    do $$
    declare
        part regclass;
        home regnamespace;
    begin
        for part in select to_regclass('{table}') union select relid from pg_partition_tree(to_regclass('{table}')) loop
            if exists (select from pg_class where oid = part and relowner = current_user::regrole) then
                execute format('alter table %s owner to app_owner', part);
                execute format('revoke all on %s from app_relay, app_worker, app_reader', part);
                home := (select relnamespace::regnamespace from pg_class where oid = part);
                execute case when home = 'public'::regnamespace then 'grant usage, create on schema public to app_owner'
                             else format('alter schema %s owner to app_owner', home) end;
            end if;
        end loop;
    end $$
"""
"""Gives a table, with its partitions, to who installs relay."""
BEGIN_AGAIN = """
    alter publication {former} rename to {name};
    grant temporary on database {name} to relay;
    update relay.streams set slot = {text}, publication = {text};
    update relay.readers
       set target = replace(target, {former_text}, {text}), snapshot = pg_current_snapshot(), moved_at = now(),
           noted_at = now();
    update relay.completeness set since = pg_current_snapshot(), snapshot = pg_current_snapshot(), noted_at = now();
    update relay.positions set updated_at = now();
    update relay.snapshots set snapshot = pg_current_snapshot(), taken_at = now()
"""
JOIN_SLOT = """
    with last as (
        update relay.snapshots
           set snapshot = pg_current_snapshot(), polled_lsn = pg_current_wal_insert_lsn(), taken_at = now()
         where id = (select max(id) from relay.snapshots)
    )
    update relay.groups set confirmed_lsn = %s::pg_lsn
"""

Event = Mapping[str, Any]


def event(amount: Any = 1, event_type: str = "order.placed", **more: Any) -> dict[str, Any]:
    """An event in the form that `relay.publish` accepts."""
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


def initialise(
    settings: Settings, source_dsn: str | None = None, target_dsn: str | None = None, **options: Any
) -> list[str]:
    """Do the work of `relay init` as who owns the databases, unless other DSNs are given."""
    source_dsn = source_dsn or as_installer(settings.source_dsn)
    if target_dsn is None and not settings.one_database:
        target_dsn = as_installer(settings.target_dsn)
    done = install.initialise(settings, source_dsn, target_dsn, **options)
    if source_dsn is not None:
        # The roles that it may have made.
        with psycopg.connect(source_dsn, autocommit=True) as conn, suppress(psycopg.Error):
            join_roles(conn)
    return done


def uninstall(settings: Settings) -> list[str]:
    """Do the work of `relay uninstall` as who owns the databases."""
    source = as_installer(settings.source_dsn)
    target = None if settings.one_database else as_installer(settings.target_dsn)
    return remove(settings, plan_removal(settings, source, target), source, target)


def as_installer(access: DatabaseAccess) -> str | None:
    """The address for the role that installs; None where another role than the tests' relay is configured."""
    conninfo = access.conninfo()
    is_relay = conninfo_to_dict(conninfo).get("user") == Role.RELAY
    return dsn_of(Role.INSTALLER, conninfo) if is_relay else None


class Login(psycopg.Connection[Any]):
    """A session of a role."""

    def column(self, query: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """The first column of a query."""
        return [row[0] for row in self.execute(query.encode(), parameters)]

    def value(self, query: str, parameters: Sequence[Any] = ()) -> Any:
        """The value of a query with one row."""
        (value,) = self.column(query, parameters)
        return value


class Outbox:
    """A database with relay's outbox, and a projection to which handlers append.

    `superuser_dsn` and `conn` are a superuser's; relay and others log in as `dsn_of` their role.
    """

    def __init__(self, dsn: str, is_prepared: bool = False) -> None:
        """`is_prepared`: it is a copy of an outbox, and who installs relay owns it."""
        self.superuser_dsn = dsn
        self.slot = str(conninfo_to_dict(dsn)["dbname"])
        self.conn = Login.connect(dsn, autocommit=True)
        self._logins: dict[Role, Login] = {}
        if not is_prepared:
            prepare(self.conn)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_logins()
        self.conn.close()

    def close_logins(self) -> None:
        """Close the sessions of roles, as after they were ended: what comes next logs in again."""
        for each in self._logins.values():
            each.close()
        self._logins.clear()

    def login(self, role: Role) -> Login:
        """A session of a role."""
        if role not in self._logins or self._logins[role].closed:
            self._logins[role] = Login.connect(self.dsn_of(role), autocommit=True)
        return self._logins[role]

    @property
    def publisher(self) -> Login:
        """A session of a publisher; that of `conn` where what is published is part of a transaction of it."""
        if not self.conn.autocommit or self.conn.info.transaction_status != TransactionStatus.IDLE:
            return self.conn
        return self.login(Role.PUBLISHER)

    @property
    def worker(self) -> Login:
        """A session of a worker of queues, which owns those that it declares."""
        return self.login(Role.WORKER)

    @property
    def reader(self) -> Login:
        """A session of a reader, which owns those that it declares."""
        return self.login(Role.READER)

    def dsn_of(self, role: Role) -> str:
        """The DSN of the database for a role."""
        return dsn_of(role, self.superuser_dsn)

    def dsn_as(self, name: str, password: str = PASSWORD) -> str:
        """The DSN of the database for a role that a test has made."""
        return make_conninfo(self.superuser_dsn, user=name, password=password)

    @property
    def installer_dsn(self) -> str:
        """The DSN of who installs relay."""
        return self.dsn_of(Role.INSTALLER)

    @property
    def relay_dsn(self) -> str:
        """The DSN by which relay logs in."""
        return self.dsn_of(Role.RELAY)

    @property
    def publisher_dsn(self) -> str:
        """The DSN by which an application publishes."""
        return self.dsn_of(Role.PUBLISHER)

    @property
    def worker_dsn(self) -> str:
        """The DSN by which a worker logs in."""
        return self.dsn_of(Role.WORKER)

    @property
    def reader_dsn(self) -> str:
        """The DSN by which a reader logs in."""
        return self.dsn_of(Role.READER)

    @property
    def lake_dsn(self) -> str:
        """The DSN by which sinks of type spark write tables."""
        return self.dsn_of(Role.LAKE)

    @property
    def jobs_dsn(self) -> str:
        """The DSN by which Spark jobs read the outbox."""
        return self.dsn_of(Role.JOBS)

    def config(self, **overrides: Any) -> dict[str, Any]:
        """A configuration as a mapping; every event goes to the projection."""
        return {
            "source": {"dsn": self.relay_dsn, "slot": self.slot, "publication": self.slot},
            "handlers": {"projection": {"type": "sql", "statement": APPEND}},
            "routes": [{"handlers": ["projection"]}],
            # No batch is too large for this process, so no JVM starts.
            "batch": {"inline_max_events": 1_000_000_000},
            **overrides,
        }

    def settings(self, engine: str = "inline", **overrides: Any) -> Settings:
        """Settings that send every batch to one engine."""
        inline_max_events = 0 if engine == "spark" else 1_000_000_000
        batch = {"inline_max_events": inline_max_events, **overrides.pop("batch", {})}
        return Settings(**self.config(batch=batch, **overrides))

    def config_file(self, path: Path, **overrides: Any) -> Path:
        """Write the configuration to a file, and return its path."""
        path.write_text(yaml.safe_dump(self.config(**overrides)))
        return path

    def install(self, **overrides: Any) -> None:
        """Do the work of `relay init`, and create the projection."""
        self.conn.execute(PROJECTION)
        self.install_again(self.settings(**overrides))

    def adopt(self, former: str) -> None:
        """Give a copy of an installed database a slot, and the name, times and positions that `relay init` would."""
        names = {
            "former": sql.Identifier(former),
            "former_text": former,
            "name": sql.Identifier(self.slot),
            "text": self.slot,
        }
        self.conn.execute(sql.SQL(BEGIN_AGAIN).format(**names))
        lsn = create_slot(self.conn, self.slot)
        self.conn.execute(JOIN_SLOT, (str(lsn),))

    def install_again(self, settings: Settings) -> None:
        """Do the work of `relay init` for other settings."""
        of = settings.source
        if not of.owns_table and of.message_prefix is None:
            self.give(sql.Identifier(*of.table_name).as_string(self.conn))
        initialise(settings)
        join_roles(self.conn)

    def let_handlers_publish(self) -> None:
        """Let the role relay publish, as `relay init --handlers-publish` does."""
        initialise(self.settings(), handlers_publish=True)

    def give(self, table: str) -> None:
        """Give a table of the tests to who installs relay; relay keeps no right to it but those of `relay init`."""
        self.conn.execute(GIVE.format(table=table).encode())

    def reconnect(self) -> None:
        """Connect again, after the server was down."""
        self.conn.close()
        self.conn = Login.connect(self.superuser_dsn, autocommit=True)
        self.close_logins()

    def publish(
        self, host_id: uuid.UUID, *events: Event, transaction_id: uuid.UUID | None = None
    ) -> uuid.UUID:
        """Publish one business transaction in its own commit, as a publisher."""
        row = self.publisher.execute(
            "select relay.publish(%s, %s, %s, %s)",
            (host_id, host(999), Jsonb(list(events)), transaction_id),
        ).fetchone()
        assert row is not None
        return uuid.UUID(str(row[0]))

    def fill(self, transactions: int, events: int = 5, hosts: int = 64) -> None:
        """Publish many business transactions, each in its own commit, at the server's speed."""
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
        """The first column of a query, for the superuser."""
        return self.conn.column(query, parameters)

    def value(self, query: str, parameters: Sequence[Any] = ()) -> Any:
        """The value of a query with one row, for the superuser."""
        return self.conn.value(query, parameters)

    def watch_positions(self) -> None:
        """Install a trigger that notes when the position of a partition moves back."""
        self.conn.execute(WATCH)

    def positions_moved_back(self) -> int:
        """The number of times that the position of a partition moved back."""
        return int(self.value("select count(*) from moved_back"))

    @contextmanager
    def limited_role(self) -> Iterator[tuple[str, str]]:
        """The name and the DSN of a role with only relay's rights and those for the projection."""
        name = f"{self.slot}_limited"
        self.conn.execute(
            f"create role {name} login password 'p' replication in role relay;"
            f"grant insert, select on projection to {name};"
            f"grant usage on sequence projection_seq_seq to {name}".encode()
        )
        try:
            yield name, self.dsn_as(name)
        finally:
            self.conn.execute(f"drop owned by {name}; drop role {name}".encode())

    @contextmanager
    def member(self, *groups: str) -> Iterator[str]:
        """The DSN of a role with the rights of some, and of nothing else."""
        name = f"{self.slot}_{'_'.join(groups)}"[:63]
        self.conn.execute(
            f"create role {name} login password 'p' in role {', '.join(groups)}".encode()
        )
        try:
            yield self.dsn_as(name)
        finally:
            self.conn.execute(f"drop owned by {name}; drop role {name}".encode())

    def wal_end(self) -> str:
        """The end of the WAL."""
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
        """Wait until the slot is confirmed to the current end of the WAL."""
        end = self.wal_end()
        wait_until(lambda: self.confirmed(end), timeout)

    def wait_compared(self, timeout: float = 30.0) -> None:
        """Wait until relay has compared the stream with the outbox, and removed its notes of commits."""
        wait_until(
            lambda: not self.column("select 1 from relay.applied_commits limit 1"),
            timeout,
        )

    def handled(self) -> int:
        """The number of events in the projection and among the target's dead letters."""
        return int(
            self.value(
                """
                select (select count(*) from projection)
                       + (select count(*) from relay.dead_letter_queue where sink = '')
                """
            )
        )

    def wait_handled(self, timeout: float = 30.0) -> None:
        """Wait until all events published so far are handled."""
        total = self.value("select count(*) from outbox_message_t")
        wait_until(lambda: self.handled() >= total, timeout)

    def wait_delivered(self, sink: str, timeout: float = 60.0) -> None:
        """Wait until a sink's stored position covers all events published so far, and none is deferred."""
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

    def begin_sink(self, sink: str, snapshot: str = "null") -> None:
        """Store a sink that nobody has worked yet at a snapshot, an expression in SQL."""
        self.conn.execute(
            f"""
            with begun as (
                insert into relay.sink_claims (group_id, sink) values ('default', %s) returning group_id, sink)
            insert into relay.positions (group_id, owner, topic_id, partition_id, number, snapshot, delivered_lsn,
                                         notes_from)
            select group_id, sink, 1, 0, 1, {snapshot}, '0/0', 1 from begun
            """.encode(),
            (sink,),
        )

    def set_sinks(self, snapshot: str, sink: str = "%") -> None:
        """Set sinks to a snapshot, an expression in SQL, of which nobody works one; nothing is noted after it."""
        self.conn.execute(
            f"""
            insert into relay.positions (group_id, owner, topic_id, partition_id, number, snapshot, delivered_lsn,
                                         notes_from)
            select group_id, sink, 1, 0, number + 1, {snapshot}, delivered_lsn, number + 1
              from relay.sinks where sink like %s
            """.encode(),
            (sink,),
        )

    def set_sinks_back(self) -> None:
        """Set all sinks to the beginning of the log, as if a process had died before it stored anything of them."""
        self.set_sinks("'3:3:'")
        self.conn.execute("update relay.sink_claims set state = 'lagging'")

    def drain(
        self, settings: Settings, session: Session | None = None, timeout: float = 60.0
    ) -> None:
        """Run relay until all events published so far are confirmed."""
        with relaying(settings, session):
            self.wait_drained(timeout)

    def assert_exact(self) -> None:
        """Assert that projection and dead letters have every event once, each host's in order of insertion."""
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
        """Assert that the projection and the target's dead letters have every event once."""
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


Installing = Callable[[Outbox], None]
"""Makes an outbox in a database, with a slot of its name."""
Copied = Callable[[str, Installing], AbstractContextManager[Outbox]]
"""Yields an outbox as a function makes it; of those of one name, each but the first is a copy."""


@contextmanager
def relaying(
    settings: Settings, session: Session | None = None, accept_configuration: bool = False
) -> Iterator[Service]:
    """Run relay in a thread of this process; its exception is raised at the end."""
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
            # It is the cause of a failed assertion in the context, which it replaces.
            raise raised[0]
    assert not thread.is_alive()


def stream_and_crash(settings: Settings, tasks: int | None = None) -> None:
    """Apply the slot's next batch, or its first `tasks` tasks, and confirm nothing, like a crash."""
    source = Receiver(settings)
    source.start()
    try:
        batch = source.take(30)
        assert batch is not None
        outcomes = apply_some(settings, batch, tasks)
        assert not any(outcome.busy for outcome in outcomes)
    finally:
        source.close()


def work_and_crash(settings: Settings, tasks: int) -> None:
    """Apply some tasks of the first batch that relay receives, and end without confirming, like a crash."""
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
    with connect(settings.target_dsn) as conn:
        # A crashed process does not store how far the slot is confirmed.
        conn.execute(
            "update relay.groups set confirmed_lsn = null where group_id = %s", (settings.group,)
        )


def apply_some(settings: Settings, batch: Batch, tasks: int | None) -> list[TaskOutcome]:
    """Apply the first tasks of a batch, all where `tasks` is None, and return their outcomes."""
    with closing(Applier(settings, 1)) as applier:
        planned = Planner(settings.partitions).work(batch, None)
        return [applier.apply(task) for task in planned[:tasks]]


LONG_SECONDS = 120.0
"""The longest wait for what needs a Spark session, which starts slowly beside other tests."""


def wait_until(condition: Callable[[], bool], timeout: float = 60.0, every: float = 0.02) -> None:
    """Poll a condition until it holds, less often the longer it takes; fail after `timeout` seconds."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < timeout, f"not within {timeout} s"
        time.sleep(max(every, min(0.2, waited / 5)))


@contextmanager
def relaying_until_it_ends(settings: Settings, text: str) -> Iterator[Service]:
    """Run relay, which has to end by itself after the block, with an error that the pattern `text` matches."""
    with ExitStack() as running:
        yield running.enter_context(relaying(settings))
        wait_until(lambda: "relay" not in {thread.name for thread in threading.enumerate()}, 20)
        with pytest.raises(RelayError, match=text):
            running.close()


def run_until_fault(settings: Settings, session: Session | None = None) -> str:
    """Run relay until a fault ends it, and return the error's text."""
    running = ExitStack()
    running.enter_context(relaying(settings, session))
    return wait_for_fault(running)


def wait_for_fault(running: ExitStack) -> str:
    """Wait until a fault ends the running relay, and return the error's text."""
    wait_until(lambda: "relay" not in {thread.name for thread in threading.enumerate()})
    with pytest.raises(RelayError) as raised:
        running.close()
    assert raised.value.exit_status == 1
    return str(raised.value)
