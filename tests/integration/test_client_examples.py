"""The examples of publishing services, and the migrations that install the outbox."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
import sqlalchemy
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

import relay.client.alembic  # noqa: F401
from relay.client import Event
from relay.client import Outbox as Client
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


def test_fastapi(outbox: Outbox) -> None:
    found = parameters(outbox.dsn)
    url = sqlalchemy.URL.create(
        "postgresql+asyncpg",
        found["user"],
        found["password"],
        database=found["database"],
        query={"host": found["host"], "port": str(found["port"])},
    )
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(host(1))],
        cwd=EXAMPLES / "fastapi_shop",
        env={**os.environ, "PYTHONPATH": str(ROOT), "DATABASE_URL": url.render_as_string(False)},
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


def test_the_blocks_of_the_document_run(outbox: Outbox) -> None:
    """Each Python block of docs/how-to/publish.md, one after the other, in one namespace."""
    text = Path(ROOT / "docs" / "how-to" / "publish.md").read_text()
    blocks = [part.partition("```")[0] for part in text.split("```python\n")[1:]]
    assert len(blocks) >= 6
    outbox.conn.execute(
        "create table orders (id bigint generated always as identity, amount numeric)"
    )
    names: dict[str, Any] = {
        "DSN": outbox.dsn,
        "parameters": parameters(outbox.dsn),
        "tenant": host(1),
    }
    for block in blocks:
        exec(compile(block, "docs/how-to/publish.md", "exec"), names)
    published = ["order.placed", "order.paid", "order.sent", "order.paid"]
    assert outbox.column("select event_type from outbox_message_t order by c_offset") == published
    assert outbox.column("select region from shop_outbox") == ["eu"]
