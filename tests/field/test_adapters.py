"""relay's statements mean the same whatever adapters the application has registered for all its connections.

Global adapters have broken the statements of others in svinota/pyroute2#750 (list and dict), and libraries have broken
applications by their own in procrastinate-org/procrastinate#113; psycopg/psycopg#541 asks for such adapters. What makes
a connection's cursors and rows is the application's, too: coleifer/peewee#2035 (rows that are no tuples),
psycopg/psycopg#560 (cursors without `%s`), #876 (both come with the pool).
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg import AsyncRawCursor, ClientCursor, RawCursor
from psycopg.rows import class_row, dict_row, scalar_row
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from relay.client import Event
from relay.client import Outbox as Publisher
from relay.client.enqueueing import enqueue, enqueue_async
from relay.client.errors import ReaderError, WorkerError, reader_error, worker_error
from relay.client.worker import Message, Worker
from tests.integration.test_workers import fill, is_empty
from tests.outbox import Outbox, event, host, wait_until
from tests.process import ROOT, running

REGISTER = """
import sys
import psycopg
from psycopg.types.json import JsonbDumper
from psycopg.types.string import StrDumper, TextLoader

class Shouting(TextLoader):
    def load(self, data):
        return super().load(data).upper()

class Whispering(StrDumper):
    def dump(self, obj):
        return super().dump(obj.lower())

psycopg.adapters.register_dumper(list, JsonbDumper)
psycopg.adapters.register_dumper(dict, JsonbDumper)
psycopg.adapters.register_dumper(str, Whispering)
psycopg.adapters.register_loader("text", Shouting)
"""
READS = """
from relay.client.reader import subscribe
for transaction in subscribe(sys.argv[1], "mail", start="beginning"):
    print(next(iter(transaction.events)).payload["amount"], flush=True)
    break
"""
WORKS = """
from relay.client.worker import Worker
worker = Worker(sys.argv[1], "mail", concurrency=1)

@worker.handles()
def handle(message, conn):
    print(message.payload, flush=True)
    worker.stop()

worker.run_forever()
"""
PUBLISHES = """
from relay.client import Event, Outbox
with psycopg.connect(sys.argv[1]) as conn:
    for session in (conn, conn.cursor()):
        given = Event("order.placed", ("Order", "1"), payload={"Amount": "Ä"})
        Outbox().publish(session, given, host_id="00000000-0000-4000-8000-000000000001")
"""


HANDLES = """
import json

def handle(transaction, cursor):
    for each in transaction.events:
        # A list is jsonb, as the module has registered.
        cursor.execute("insert into taken values (%s, 'handled')", ([each.payload["amount"], "Ä"],))
        cursor.connection.execute("insert into taken values (%s, 'by connection')", ([1],))

def send(delivery):
    with delivery.transaction() as conn:
        conn.execute("insert into taken values (%s, 'sent')", ([2],))
"""


def run(tmp_path: Path, program: str, dsn: str) -> str:
    (tmp_path / "program.py").write_text(REGISTER + program)
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), dsn],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_a_reader_reads(outbox: Outbox, tmp_path: Path) -> None:
    outbox.publish(host(1), event(7))
    assert run(tmp_path, READS, outbox.reader_dsn) == "7"


def test_a_worker_works(outbox: Outbox, tmp_path: Path) -> None:
    fill(outbox, "Mixed")
    assert run(tmp_path, WORKS, outbox.worker_dsn) == "Mixed"
    assert is_empty(outbox)


def test_a_publisher_publishes(outbox: Outbox, tmp_path: Path) -> None:
    run(tmp_path, PUBLISHES, outbox.publisher_dsn)
    assert outbox.column("select payload ->> 'Amount' from outbox_message_t") == ["Ä", "Ä"]


FACTORIES: dict[str, dict[str, Any]] = {
    "a cursor without %s": {"cursor_factory": RawCursor},
    "a cursor that binds": {"cursor_factory": ClientCursor},
    "rows of a class": {"row_factory": class_row(SimpleNamespace)},
    "rows of one value": {"row_factory": scalar_row},
    "rows as dicts": {"row_factory": dict_row},
}


def test_a_connection_may_have_factories_of_its_own(
    outbox: Outbox, subtests: pytest.Subtests
) -> None:
    for kind, factories in FACTORIES.items():
        with subtests.test(kind), psycopg.connect(outbox.publisher_dsn, **factories) as conn:
            for session in (conn, conn.cursor()):
                given = Event("order.placed", payload={"kind": kind})
                Publisher().publish(session, given, host_id=host(1))
    published = outbox.column("select payload ->> 'kind' from outbox_message_t order by c_offset")
    assert published == [kind for kind in FACTORIES for _ in range(2)]


def test_a_worker_s_connections_may_have_factories_of_their_own(
    outbox: Outbox, subtests: pytest.Subtests
) -> None:
    fill(outbox)
    for kind, factories in FACTORIES.items():
        with subtests.test(kind), ConnectionPool(outbox.worker_dsn, kwargs=factories) as pool:
            with pool.connection() as conn:
                enqueue(conn, "mail", kind)
            assert taken_by(Worker(pool, "mail", concurrency=1)) == [kind]
        is_raw = factories.get("cursor_factory") is RawCursor
        asynchronous = {**factories, "cursor_factory": AsyncRawCursor} if is_raw else factories
        if "cursor_factory" not in factories or is_raw:
            with subtests.test(f"{kind}, asynchronous"):
                assert asyncio.run(taken_in_coroutine(outbox, kind, asynchronous)) == [kind]


def taken_by(worker: Worker) -> list[Any]:
    """What the worker's handler gets first."""
    found: list[Any] = []

    @worker.handles()
    def handle(message: Message, conn: Any) -> None:
        found.append(message.payload)
        worker.stop()

    worker.run_forever()
    return found


async def taken_in_coroutine(outbox: Outbox, kind: str, factories: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    dsn = outbox.worker_dsn
    async with AsyncConnectionPool(dsn, kwargs=factories, open=False) as pool:
        async with pool.connection() as conn:
            await enqueue_async(conn, "mail", kind)
        worker = Worker(pool, "mail", concurrency=1)

        @worker.handles()
        async def handle(message: Message, conn: Any) -> None:
            found.append(message.payload)
            worker.stop()

        await worker.run()
    return found


@pytest.mark.parametrize("mode", ["auto", "poll"])
def test_relay_runs_with_handlers_that_register_adapters(
    outbox: Outbox, tmp_path: Path, mode: str
) -> None:
    """`relay run` applied nothing: its arrays were sent as JSON. Handlers have what they have registered."""
    (tmp_path / "registering.py").write_text(REGISTER + HANDLES)
    outbox.conn.execute("create table taken (value jsonb, how text)")
    outbox.conn.execute("grant all on taken to public")
    config = {
        "source": {**outbox.config()["source"], "mode": mode},
        "handlers": {
            "plain": {"type": "python", "callable": "registering:handle"},
            "function": {"type": "function", "callable": "registering:send"},
        },
        "routes": [{"handlers": ["plain", "function"]}],
    }
    path = outbox.config_file(tmp_path / "relay.yaml", **config)
    with running(path, memory="own", PYTHONPATH=f"{tmp_path}:{ROOT}"):
        outbox.publish(host(1), event(7))
        wait_until(lambda: outbox.value("select count(*) from taken") == 3)
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
    taken = outbox.conn.execute("select how, value::text from taken order by how").fetchall()
    # The module's dumper of texts is its own, too.
    assert taken == [("by connection", "[1]"), ("handled", '[7, "Ä"]'), ("sent", "[2]")]
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0


@pytest.mark.parametrize(
    "refused",
    [
        psycopg.errors.UndefinedFunction("operator does not exist"),
        psycopg.errors.InvalidTextRepresentation("invalid input syntax"),
        psycopg.ProgrammingError("cannot adapt type 'list'"),
    ],
)
def test_what_is_refused_for_good_is_no_outage(refused: psycopg.Error) -> None:
    assert isinstance(reader_error(refused, "mail"), ReaderError)
    assert isinstance(worker_error(refused, "mail"), WorkerError)


@pytest.mark.parametrize(
    "outage",
    [psycopg.OperationalError("connection lost"), psycopg.errors.AdminShutdown("shutdown")],
)
def test_an_outage_is_waited_for(outage: psycopg.Error) -> None:
    assert reader_error(outage, "mail") is None
    assert worker_error(outage, "mail") is None
