"""The examples of publishing services, and the migrations that install the outbox."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
import sqlalchemy
from alembic.migration import MigrationContext
from alembic.operations import Operations
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

import relay.client.alembic  # noqa: F401
from relay.client import Event
from relay.client import Outbox as Client
from relay.client.schema import install_inbox
from tests.client_sessions import parameters
from tests.outbox import Outbox, host
from tests.process import ROOT

EXAMPLES = ROOT / "examples"


def environment(dsn: str) -> dict[str, str]:
    found = parameters(dsn)
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("PG")},
        "PYTHONPATH": str(ROOT),
        "DATABASE_NAME": found["database"],
        "PGHOST": found["host"],
        "PGPORT": str(found["port"]),
        "PGUSER": found["user"] or "",
        "PGPASSWORD": found["password"] or "",
    }


def manage(dsn: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=EXAMPLES / "django_shop",
        env=environment(dsn),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.rare
def test_django(database: str) -> None:
    """`migrate` installs the outbox, an order comes with its event, and the migration can be taken back."""
    done = manage(database, "migrate")
    assert done.returncode == 0, done.stderr
    assert manage(database, "makemigrations", "--check").returncode == 0
    done = manage(database, "place", str(host(1)), "A-1", "19.99")
    assert done.stdout == "1\n", done.stderr
    assert manage(database, "place", str(host(1)), "A-2", "0").returncode == 1
    with psycopg.connect(database) as conn:
        found = conn.execute(
            "select host_id, aggregate_id, event_type, payload from outbox_message_t"
        ).fetchall()
        assert found == [(host(1), "1", "order.placed", {"sku": "A-1", "amount": "19.99"})]
        assert conn.execute("select sku from shop_order").fetchall() == [("A-1",)]
    for app in ("shop", "relay_outbox"):
        done = manage(database, "migrate", app, "zero")
        assert done.returncode == 0, done.stderr
    with psycopg.connect(database) as conn:
        assert conn.execute("select to_regclass('outbox_message_t')").fetchall() == [(None,)]
    assert manage(database, "migrate").returncode == 0


ASK = """
import sys, json
from fastapi.testclient import TestClient
from app import app
with TestClient(app) as client:
    for amount in ("19.99", "0"):
        answer = client.post(f"/tenants/{sys.argv[1]}/orders", json={"sku": "A-1", "amount": amount})
        print(answer.status_code)
"""


def url_for_asyncpg(dsn: str) -> str:
    found = parameters(dsn)
    return sqlalchemy.URL.create(
        "postgresql+asyncpg",
        found["user"],
        found["password"],
        database=found["database"],
        query={"host": found["host"], "port": str(found["port"])},
    ).render_as_string(False)


@pytest.fixture
def service_dsn(outbox: Outbox) -> Iterator[str]:
    """The DSN of a service that has its own tables in `public`, and is a member of relay_publisher."""
    with outbox.member("relay_publisher") as dsn:
        role = conninfo_to_dict(dsn)["user"]
        outbox.conn.execute(f"grant create on schema public to {role}".encode())
        yield dsn


def test_fastapi(outbox: Outbox, service_dsn: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(host(1))],
        cwd=EXAMPLES / "fastapi_shop",
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "DATABASE_URL": url_for_asyncpg(service_dsn),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["201", "422"], done.stderr
    rows = outbox.conn.execute(
        "select host_id, aggregate_id, payload from outbox_message_t"
    ).fetchall()
    assert rows == [(host(1), "1", {"sku": "A-1", "amount": "19.99"})]
    assert outbox.column("select sku from orders") == ["A-1"]


DELIVER = """
import base64, hmac, json, os, time
from fastapi.testclient import TestClient
import webhook

body = json.dumps({"subject": "7", "data": {"amount": 19.99}}).encode()
at = str(int(time.time()))

def signed(identity, secret=webhook.secret):
    digest = hmac.digest(secret, f"{identity}.{at}.".encode() + body, "sha256")
    signature = "v1," + base64.b64encode(digest).decode()
    return {"webhook-id": identity, "webhook-timestamp": at, "webhook-signature": signature}

async def fail(*_):
    raise RuntimeError

with TestClient(webhook.app, raise_server_exceptions=False) as client:
    makes = webhook.make_invoice
    webhook.make_invoice = fail
    answers = [client.post("/events", content=body, headers=signed("a"))]
    webhook.make_invoice = makes
    for headers in (signed("a"), signed("a"), signed("b"), signed("c", b"other"), {}):
        answers.append(client.post("/events", content=body, headers=headers))
print(*(answer.status_code for answer in answers))
"""


@pytest.fixture
def invoices(database: str) -> str:
    """The database of the example `inbox`."""
    with psycopg.connect(database) as conn:
        conn.execute(install_inbox().encode())
        conn.execute((EXAMPLES / "inbox" / "invoices.sql").read_bytes())
    return database


def test_a_webhook_with_an_inbox(invoices: str) -> None:
    """What failed comes again and counts, what was handled does not, and forged requests are refused."""
    done = subprocess.run(
        [sys.executable, "-c", DELIVER],
        cwd=EXAMPLES / "inbox",
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "DATABASE_URL": url_for_asyncpg(invoices),
            "SIGNING_SECRET": "whsec_c2VjcmV0",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["500", "204", "204", "204", "401", "400"], done.stderr
    with psycopg.connect(invoices) as conn:
        found = conn.execute("select order_id, amount::text from invoices").fetchall()
        assert found == [("7", "19.99")] * 2
        assert conn.execute("select id from relay.inbox order by 1").fetchall() == [("a",), ("b",)]


class Delivered:
    """A message of Kafka."""

    def __init__(self, identity: str) -> None:
        self._identity = identity

    def headers(self) -> list[tuple[str, bytes]]:
        return [("content-type", b"application/json"), ("ce_id", self._identity.encode())]

    def value(self) -> bytes:
        return b'{"subject": "7", "data": {"amount": 0.1}}'

    def error(self) -> None:
        return None


class Topic:
    """A consumer of a topic, which is killed when it has no message left."""

    def __init__(self, *identities: str) -> None:
        self._left = list(identities)
        self.stored: list[object] = []

    def poll(self, _: float) -> Delivered:
        if not self._left:
            raise KeyboardInterrupt
        return Delivered(self._left.pop(0))

    def store_offsets(self, message: object) -> None:
        self.stored.append(message)


def test_a_consumer_with_an_inbox(invoices: str) -> None:
    """What comes again after a crash makes no second invoice, and its offset is stored."""
    spec = importlib.util.spec_from_file_location("consumer", EXAMPLES / "inbox" / "consumer.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with psycopg.connect(invoices, autocommit=True) as conn:
        for identities in (["a", "b"], ["b", "a", "c"]):
            topic = Topic(*identities)
            with pytest.raises(KeyboardInterrupt):
                example.consume(topic, conn)
            assert len(topic.stored) == len(identities)
        assert conn.execute("select amount::text from invoices").fetchall() == [("0.1",)] * 3


def migrated(conn: sqlalchemy.Connection, what: str) -> None:
    operations: Any = Operations(MigrationContext.configure(conn))
    getattr(operations, what)()


def test_alembic(database: str) -> None:
    engine = sqlalchemy.create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(database), poolclass=NullPool
    )
    with engine.begin() as conn:
        migrated(conn, "create_outbox")
    with engine.begin() as conn:
        Client().publish(conn, Event("any", payload={}), host_id=host(1))
    with engine.begin() as conn:
        migrated(conn, "drop_outbox")
        assert conn.scalar(sqlalchemy.text("select to_regclass('outbox_message_t')")) is None


def test_alembic_over_asyncpg(database: str) -> None:
    async def run() -> Any:
        engine = create_async_engine(
            "postgresql+asyncpg://",
            async_creator=lambda: asyncpg.connect(**parameters(database)),
            poolclass=NullPool,
        )
        async with engine.begin() as conn:
            await conn.run_sync(migrated, "create_outbox")
            await Client().publish_async(conn, Event("any", payload={}), host_id=host(1))
        async with engine.connect() as conn:
            return await conn.scalar(sqlalchemy.text("select count(*) from outbox_message_t"))

    assert asyncio.run(run()) == 1


def test_the_blocks_of_the_document_run(outbox: Outbox, service_dsn: str) -> None:
    """Each Python block of docs/how-to/publish.md, one after the other, in one namespace."""
    text = Path(ROOT / "docs" / "how-to" / "publish.md").read_text()
    blocks = [part.partition("```")[0] for part in text.split("```python\n")[1:]]
    assert len(blocks) >= 6
    with psycopg.connect(service_dsn) as conn:
        conn.execute("create table orders (id bigint generated always as identity, amount numeric)")
    names: dict[str, Any] = {
        "DSN": service_dsn,
        "parameters": parameters(service_dsn),
        "tenant": host(1),
    }
    for block in blocks:
        exec(compile(block, "docs/how-to/publish.md", "exec"), names)
    published = ["order.placed", "order.paid", "order.sent", "order.paid"]
    assert outbox.column("select event_type from outbox_message_t order by c_offset") == published
    assert outbox.column("select region from shop_outbox") == ["eu"]
