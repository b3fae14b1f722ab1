"""The kinds of sessions in which services publish, with one interface; each begins a transaction."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
import django
import django.db
import psycopg
import pytest
import sqlalchemy
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from relay.client import Outbox


@dataclass
class Opened:
    """A session in a transaction."""

    session: Any
    execute: Callable[[str], Any]
    commit: Callable[[], Any]
    rollback: Callable[[], Any]
    asynchronous: bool = False

    async def publish(self, outbox: Outbox, events: Any, **values: Any) -> uuid.UUID:
        """Publish with `publish`, or with `publish_async` in an asynchronous session."""
        if self.asynchronous:
            return await outbox.publish_async(self.session, events, **values)
        return outbox.publish(self.session, events, **values)

    async def run(self, call: Callable[[], Any]) -> None:
        """Call one of the driver's functions, and await it in an asynchronous session."""
        result = call()
        if self.asynchronous:
            await result


def parameters(dsn: str) -> dict[str, Any]:
    """The parameters of a DSN for asyncpg and Django."""
    fields = conninfo_to_dict(dsn)
    return {
        "host": fields["host"],
        "port": fields["port"],
        "user": fields.get("user"),
        "password": fields.get("password"),
        "database": fields["dbname"],
    }


@asynccontextmanager
async def with_psycopg(dsn: str) -> AsyncIterator[Opened]:
    with psycopg.connect(dsn) as conn:
        yield Opened(conn, lambda sql: conn.execute(sql.encode()), conn.commit, conn.rollback)


@asynccontextmanager
async def with_psycopg_cursor(dsn: str) -> AsyncIterator[Opened]:
    with psycopg.connect(dsn) as conn, conn.cursor() as cursor:
        yield Opened(cursor, lambda sql: cursor.execute(sql.encode()), conn.commit, conn.rollback)


@asynccontextmanager
async def with_psycopg_async(dsn: str) -> AsyncIterator[Opened]:
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        yield Opened(conn, lambda sql: conn.execute(sql.encode()), conn.commit, conn.rollback, True)


@asynccontextmanager
async def with_psycopg_async_cursor(dsn: str) -> AsyncIterator[Opened]:
    async with await psycopg.AsyncConnection.connect(dsn) as conn, conn.cursor() as cursor:
        yield Opened(
            cursor, lambda sql: cursor.execute(sql.encode()), conn.commit, conn.rollback, True
        )


@asynccontextmanager
async def with_sqlalchemy_session(dsn: str) -> AsyncIterator[Opened]:
    engine = sqlalchemy.create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(dsn), poolclass=NullPool
    )
    with Session(engine) as session:
        yield Opened(
            session,
            lambda sql: session.execute(sqlalchemy.text(sql)),
            session.commit,
            session.rollback,
        )


@asynccontextmanager
async def with_sqlalchemy_connection(dsn: str) -> AsyncIterator[Opened]:
    engine = sqlalchemy.create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(dsn), poolclass=NullPool
    )
    with engine.connect() as conn:
        yield Opened(
            conn, lambda sql: conn.execute(sqlalchemy.text(sql)), conn.commit, conn.rollback
        )


@asynccontextmanager
async def with_sqlalchemy_asyncpg(dsn: str) -> AsyncIterator[Opened]:
    engine = create_async_engine(
        "postgresql+asyncpg://",
        async_creator=lambda: asyncpg.connect(**parameters(dsn)),
        poolclass=NullPool,
    )
    async with AsyncSession(engine) as session:
        yield Opened(
            session,
            lambda sql: session.execute(sqlalchemy.text(sql)),
            session.commit,
            session.rollback,
            True,
        )


@asynccontextmanager
async def with_sqlalchemy_async_connection(dsn: str) -> AsyncIterator[Opened]:
    engine = create_async_engine(
        "postgresql+psycopg://",
        async_creator=lambda: psycopg.AsyncConnection.connect(dsn),
        poolclass=NullPool,
    )
    async with engine.connect() as conn:
        yield Opened(
            conn, lambda sql: conn.execute(sqlalchemy.text(sql)), conn.commit, conn.rollback, True
        )


@asynccontextmanager
async def with_asyncpg(dsn: str) -> AsyncIterator[Opened]:
    conn = await asyncpg.connect(**parameters(dsn))
    try:
        transaction = conn.transaction()
        await transaction.start()
        yield Opened(conn, conn.execute, transaction.commit, transaction.rollback, True)
    finally:
        await conn.close()


@asynccontextmanager
async def with_django(dsn: str) -> AsyncIterator[Opened]:
    # Blocking the event loop is safe: no other task runs in it.
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"
    conn = django_connection(dsn)
    conn.set_autocommit(False)

    def execute(sql: str) -> None:
        with conn.cursor() as cursor:
            cursor.execute(sql)

    try:
        yield Opened(conn, execute, conn.commit, conn.rollback)
    finally:
        conn.rollback()
        conn.close()


def django_connection(dsn: str) -> Any:
    """A Django connection outside a project."""
    if not settings.configured:
        settings.configure(USE_TZ=True)
        django.setup()
    given = parameters(dsn)
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": given["database"],
        "HOST": given["host"],
        "PORT": given["port"],
        "USER": given["user"] or "",
        "PASSWORD": given["password"] or "",
    }
    return django.db.utils.ConnectionHandler({"default": database})["default"]


DRIVERS: dict[str, Callable[[str], AbstractAsyncContextManager[Opened]]] = {
    "psycopg": with_psycopg,
    "psycopg cursor": with_psycopg_cursor,
    "psycopg async": with_psycopg_async,
    "psycopg async cursor": with_psycopg_async_cursor,
    "SQLAlchemy Session": with_sqlalchemy_session,
    "SQLAlchemy Connection": with_sqlalchemy_connection,
    "SQLAlchemy AsyncSession, asyncpg": with_sqlalchemy_asyncpg,
    "SQLAlchemy AsyncConnection, psycopg": with_sqlalchemy_async_connection,
    "asyncpg": with_asyncpg,
    "Django": with_django,
}
KINDS = [
    pytest.param(name, marks=() if name in ("psycopg", "asyncpg", "Django") else pytest.mark.rare)
    for name in DRIVERS
]
"""Their names, for tests in which those of one library do not differ: the others are rare."""
