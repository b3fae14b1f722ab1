"""What publishers have around them: sessions with several engines, migrations, several databases, standbys."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import psycopg
import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from psycopg.conninfo import make_conninfo
from psycopg.types.json import Jsonb
from sqlalchemy import Column, Delete, Engine, Table, Text, Update, Uuid
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    scoped_session,
    sessionmaker,
)
from sqlalchemy.pool import NullPool

from relay.admin.check import examine
from relay.client import Event, EventInvalid, UnknownSession
from relay.client import Outbox as Client
from relay.client.alembic import include_name, include_object
from relay.client.schema import install as scripts
from relay.client.testing import collect
from relay.faults import ConfigurationError
from relay.source.stream.receiver import Receiver
from relay.source.walsender import _means_every_standby
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.postgres import Server


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)


class Bill(Base):
    __tablename__ = "bills"

    id: Mapped[int] = mapped_column(primary_key=True)


def engine(dsn: str) -> Engine:
    return sqlalchemy.create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(dsn), poolclass=NullPool
    )


@pytest.fixture
def engines(outbox: Outbox, server: Server) -> Iterator[tuple[Engine, Engine]]:
    """The engines of the database with the outbox, and of another one with the same tables."""
    name = f"{outbox.slot}_other"
    dsn = server.create_database(name)
    with Outbox(dsn) as other:
        other.install()
    for each in (outbox.superuser_dsn, dsn):
        made = engine(each)
        Base.metadata.create_all(made)
        with psycopg.connect(each) as conn:
            tables = ", ".join(Base.metadata.tables)
            conn.execute(
                f"grant select, insert, update, delete on {tables} to app_publisher".encode()
            )
            conn.execute("grant usage on all sequences in schema public to app_publisher")
    yield engine(outbox.publisher_dsn), engine(other.publisher_dsn)
    server.drop_database(name)


def placed(number: int) -> Event:
    return Event("order.placed", ("Order", number), payload={})


@pytest.mark.parametrize("scoped", [False, True])
def test_the_event_commits_with_the_rows_of_a_session_with_binds(
    outbox: Outbox, engines: tuple[Engine, Engine], scoped: bool
) -> None:
    """`Session(binds=…)` has no default engine, or another one: sqlalchemy/sqlalchemy#5650, djrobstep/sqlakeyset#58."""
    ours, theirs = engines
    for binds in ({Order: ours}, {Order: ours, Bill: theirs}):
        made = sessionmaker(binds=binds)
        session: Any = scoped_session(made) if scoped else made()
        order = Order()
        session.add(order)
        Client().publish(session, placed(1), host_id=host(1))
        session.rollback()
        session.add(Order())
        Client().publish(session, placed(2), host_id=host(1))
        session.commit()
        session.close()
    assert outbox.column("select aggregate_id from outbox_message_t") == ["2", "2"]
    assert (
        outbox.value("select count(*) from orders o join outbox_message_t m on o.xmin = m.xmin")
        == 2
    )


def test_a_session_of_which_nobody_can_tell_the_engine_is_refused(
    outbox: Outbox, engines: tuple[Engine, Engine]
) -> None:
    """Rows of two databases are two transactions; the event would belong to one of them."""
    ours, theirs = engines
    with Session(binds={Order: ours, Bill: theirs}) as session:
        session.add_all([Order(), Bill()])
        with pytest.raises(UnknownSession, match="2 engines for its changes"):
            Client().publish(session, placed(1), host_id=host(1))
        session.flush()
        with pytest.raises(UnknownSession, match=r"session\.connection\(bind_arguments"):
            Client().publish(session, placed(1), host_id=host(1))
        conn = session.connection(bind_arguments={"mapper": Order})
        Client().publish(conn, placed(1), host_id=host(1))
        session.commit()
    with Session() as session, pytest.raises(UnknownSession, match="0 engines"):
        Client().publish(session, placed(2), host_id=host(1))
    assert outbox.column("select aggregate_id from outbox_message_t") == ["1"]


def test_what_was_flushed_before_counts_among_the_changes(
    outbox: Outbox, engines: tuple[Engine, Engine]
) -> None:
    """pallets-eco/flask-sqlalchemy#1017: a flush gives a row its id; the event went with what was added after it."""
    ours, theirs = engines
    with Session(binds={Order: ours, Bill: theirs}) as session:
        order = Order()
        session.add(order)
        session.flush()
        session.add(Bill())
        with pytest.raises(UnknownSession, match="2 engines for its changes"):
            Client().publish(session, placed(order.id), host_id=host(1))
        session.rollback()
        session.execute(sqlalchemy.insert(Order))
        assert session.scalars(sqlalchemy.select(Bill)).all() == []
        with session.begin_nested():
            Client().publish(session, placed(1), host_id=host(1))
        session.commit()
    assert outbox.column("select aggregate_id from outbox_message_t") == ["1"]


def test_a_routing_session_that_has_written_elsewhere_is_refused(
    engines: tuple[Engine, Engine],
) -> None:
    """The event would go where the session writes what belongs to no class: sqlalchemy/sqlalchemy#7936."""
    leader, bills = engines

    class Routing(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, **_: Any) -> Engine:
            of_bill = mapper is not None and sqlalchemy.inspect(mapper).class_ is Bill
            return bills if of_bill else leader

    with Routing() as session:
        session.add(Order())
        session.add(Bill())
        session.flush()
        with pytest.raises(UnknownSession, match="2 engines for its changes"):
            Client().publish(session, placed(1), host_id=host(1))


def test_an_asynchronous_session_with_binds(outbox: Outbox, engines: tuple[Engine, Engine]) -> None:
    async def publish() -> None:
        ours, theirs = (
            create_async_engine(
                "postgresql+psycopg://",
                async_creator=partial(psycopg.AsyncConnection.connect, dsn),
                poolclass=NullPool,
            )
            for dsn in (
                outbox.publisher_dsn,
                make_conninfo(outbox.publisher_dsn, dbname=f"{outbox.slot}_other"),
            )
        )
        async with AsyncSession(binds={Order: ours, Bill: theirs}) as session:
            session.add(Order())
            await session.flush()
            await Client().publish_async(session, placed(1), host_id=host(1))
            session.add(Bill())
            with pytest.raises(UnknownSession, match="2 engines for its changes"):
                await Client().publish_async(session, placed(2), host_id=host(1))
            await session.commit()

    asyncio.run(publish())
    assert outbox.column("select aggregate_id from outbox_message_t") == ["1"]


def test_an_event_goes_where_a_routing_session_writes(
    outbox: Outbox, engines: tuple[Engine, Engine]
) -> None:
    """SQLAlchemy's documentation routes reads to followers: litestar-org/advanced-alchemy#635."""
    leader, follower = engines

    class Routing(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, **_: Any) -> Engine:
            return leader if self._flushing or isinstance(clause, Update | Delete) else follower

    with Routing() as session:
        assert session.scalars(sqlalchemy.select(Order)).all() == []
        Client().publish(session, placed(1), host_id=host(1))
        session.add(Order())
        session.commit()
    assert outbox.column("select aggregate_id from outbox_message_t") == ["1"]
    assert outbox.column("select id from orders") == [1]


def test_autogenerate_leaves_the_outbox_alone(outbox: Outbox) -> None:
    """It proposed to drop the outbox and each partition: benavlabs/FastAPI-boilerplate#204, mozilla-ai/otari#1274."""
    outbox.conn.execute(
        "create table outbox_message_t_p1 (like outbox_message_t); create table lost (id int); drop table projection"
    )
    with engine(outbox.publisher_dsn).connect() as conn:
        found: list[Any] = []
        for schemas in (False, True):
            context = MigrationContext.configure(
                conn, opts={"include_name": include_name, "include_schemas": schemas}
            )
            found += compare_metadata(context, sqlalchemy.MetaData())
    assert [(kind, table.name) for kind, table in found] == [("remove_table", "lost")] * 2


@pytest.mark.filterwarnings("ignore:Did not recognize type 'xid8'")
def test_autogenerate_leaves_alone_what_relay_adds_to_an_outbox_of_ones_own(database: str) -> None:
    """It dropped what no model has: odense-rpa/automation-server#64, caura-ai/caura#1602."""
    models = sqlalchemy.MetaData()
    own = Table(
        "own",
        models,
        *(
            Column(name, Uuid, primary_key=name == "id", nullable=False)
            for name in ("id", "host_id")
        ),
        *(Column(name, JSONB if name == "payload" else Text) for name in ("event_type", "payload")),
        Column("lost", Text, index=True),
    )
    models.create_all(engine(database))
    with Outbox(database) as outbox:
        source = {**outbox.config()["source"], "mode": "poll", "table": "public.own"}
        outbox.install_again(outbox.settings(source=source))
        added = outbox.column("select attname from pg_attribute where attrelid = 'own'::regclass")
        assert {"c_xid", "c_offset"} <= set(added)
    own.indexes.clear()
    own._columns.remove(own.c.lost)
    with engine(database).connect() as conn:
        context = MigrationContext.configure(
            conn, opts={"include_name": include_name, "include_object": include_object}
        )
        found = compare_metadata(context, models)
    assert [kind for kind, *_ in found] == ["remove_index", "remove_column"]
    assert found[1][3].name == "lost"


def test_alembic_writes_the_outbox_as_a_script(database: str) -> None:
    """`alembic upgrade --sql` has no connection."""
    written = io.StringIO()
    context = MigrationContext.configure(
        dialect_name="postgresql", opts={"as_sql": True, "output_buffer": written}
    )
    operations: Any = Operations(context)
    operations.create_outbox()
    with psycopg.connect(database) as conn:
        conn.execute(written.getvalue().encode())
        conn.execute(
            "select relay.publish(gen_random_uuid(), null, %s)",
            (Jsonb([event()]),),
        )


@pytest.mark.parametrize("aggregate", [("Order", None), (None, 1)])
def test_an_aggregate_without_an_id_is_refused(aggregate: Any) -> None:
    """Until a row is flushed, and null was stored: mattrobinsonsre/terrapod#1173, proteanhq/protean#1059."""
    nameless = Event("order.placed", aggregate, payload={})
    client = Client()
    with (
        collect(client),
        pytest.raises(EventInvalid, match=r"events\[0\]\.aggregate.*flush the session"),
    ):
        client.publish(None, nameless, host_id=host(1))


REFUSED: list[tuple[str, Any]] = [
    ("id", None),
    ("id", "42"),
    ("event_type", None),
    ("event_type", ""),
    ("version", 1.5),
    ("version", True),
    ("version", 2**63),
    ("host_id", None),
    ("host_id", "acme"),
    ("host_id", 5),
    ("user_id", "bob"),
    ("transaction_id", "first"),
]


def test_a_test_refuses_what_the_outbox_refuses(outbox: Outbox, subtests: pytest.Subtests) -> None:
    """The test collected what production refused: division-sh/swarm#152, envato/event_sourcery#176."""
    for field, value in REFUSED:
        with subtests.test(f"{field}: {value!r}"):
            given: dict[str, Any] = {"event_type": "order.placed", "host_id": host(1), field: value}
            of_call = {
                name: given.pop(name)
                for name in ("host_id", "user_id", "transaction_id")
                if name in given
            }
            client, event = Client(), Event(**given, payload={})
            with pytest.raises(EventInvalid, match=field), collect(client):
                client.publish(None, event, **of_call)
            with pytest.raises(EventInvalid, match=field):
                client.publish(outbox.conn, event, **of_call)


def test_ids_of_a_table_of_ones_own_are_of_any_kind() -> None:
    client = Client("app.events", {"transaction_id": None})
    with collect(client) as published:
        client.publish(None, Event("order.placed", id=42, payload={}), host_id="acme", user_id=7)
    assert published[0].host_id == "acme"


def test_migrations_of_several_databases_create_the_roles_once(killable_server: Server) -> None:
    """pytest-xdist migrates a database for each process at once: Runfusion/Fusion#2104, WeblateOrg/weblate#13988."""
    with psycopg.connect(killable_server.dsn(), autocommit=True) as conn:
        conn.execute("create role migrator createdb createrole login")
    dsns = [killable_server.create_database(f"db_{n}", "owner migrator") for n in range(6)]
    failed: list[Exception] = []
    ready = threading.Barrier(len(dsns))

    def migrate(dsn: str) -> None:
        try:
            with psycopg.connect(dsn, user="migrator") as conn:
                ready.wait()
                for script in scripts():
                    conn.execute(script.encode())
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=migrate, args=(dsn,)) for dsn in dsns]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert failed == []


def test_an_installation_beside_a_dump_does_not_queue_publishers(outbox: Outbox) -> None:
    """ALTER TABLE behind a nightly pg_dump: strelov1/freehire#1284, alphagov/notifications-api#3901."""
    waits: list[float] = []
    with psycopg.connect(outbox.superuser_dsn) as dump:
        dump.execute("lock table outbox_message_t in access share mode")
        stopping = threading.Event()

        def install() -> None:
            settings = outbox.settings(
                source=outbox.config()["source"] | {"max_event_bytes": 1_000_000}
            )
            outbox.install_again(settings)
            stopping.set()

        installing = threading.Thread(target=install)
        installing.start()
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            begun = time.monotonic()
            outbox.publish(host(1), event())
            waits.append(time.monotonic() - begun)
        assert not stopping.is_set()
        dump.rollback()
        installing.join(15)
    assert stopping.is_set()
    assert max(waits) < 1.0
    assert outbox.value("select relay.max_event_bytes()") == 1_000_000


@pytest.mark.parametrize(
    ("names", "every"),
    [
        *((names, True) for names in ("*", "ANY 1 (*)", "FIRST 1 (a, *)", '2 ("*", b)', " * ")),
        *((names, False) for names in ("", "a, b", 'FIRST 2 (a, "b*")', "ANY 1 (a_, *b)")),
    ],
)
def test_which_standbys_commits_wait_for(names: str, every: bool) -> None:
    assert _means_every_standby(names) is every


def wait_for_standbys(outbox: Outbox, names: str) -> None:
    outbox.conn.execute(f"alter system set synchronous_standby_names = '{names}'".encode())
    outbox.conn.execute("select pg_reload_conf()")
    wait_until(lambda: outbox.value("show synchronous_standby_names") == names)


def test_no_commit_waits_for_the_stream(killable_server: Server) -> None:
    """A stream counts as a standby for the name *: greenplum-db/gpdb#17509, greenplum-db/gpdb#16953."""
    with Outbox(killable_server.create_database("app")) as outbox:
        outbox.install()
        settings = outbox.settings()
        outbox.conn.execute("set statement_timeout = '20s'")
        with relaying(settings):
            outbox.publish(host(0), event(0))
            outbox.wait_handled()
            wait_for_standbys(outbox, "*")
            with psycopg.connect(outbox.publisher_dsn, autocommit=True) as publisher:
                waiting = threading.Thread(
                    target=publisher.execute,
                    args=("select relay.publish(gen_random_uuid(), null, %s)",),
                    kwargs={"params": (Jsonb([event(1)]),)},
                )
                waiting.start()
                streams = "select 1 from pg_stat_replication"
                wait_until(lambda: not outbox.column(streams), 10)
                # As without relay, it waits for the standbys.
                assert waiting.is_alive()
                wait_for_standbys(outbox, "")
                waiting.join()
            wait_until(lambda: bool(outbox.column(streams)))
            outbox.wait_handled()
        wait_for_standbys(outbox, "ANY 1 (*)")
        assert any(
            "every commit of the server would wait" in each.text for each in examine(settings)
        )
        # Without polling it cannot go on.
        stream = Receiver(settings)
        stream.start()
        with pytest.raises(ConfigurationError, match="every commit of the server would wait"):
            stream.take(10)
        stream.close()
