"""The kinds of databases of workers, and workers that run in a thread."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from threading import Thread
from typing import Any

import asyncpg
import django.db
import psycopg
import psycopg_pool
import sqlalchemy
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from relay.client.worker import Worker
from tests.client_sessions import django_connection, parameters

Execute = Callable[[Any, str], Any]
"""Runs a statement in a session of a handler."""


@asynccontextmanager
async def _dsn(dsn: str) -> AsyncIterator[str]:
    yield dsn


@asynccontextmanager
async def _psycopg_pool(dsn: str) -> AsyncIterator[Any]:
    with psycopg_pool.ConnectionPool(dsn, open=True) as pool:
        yield pool


@asynccontextmanager
async def _async_psycopg_pool(dsn: str) -> AsyncIterator[Any]:
    async with psycopg_pool.AsyncConnectionPool(dsn, open=False) as pool:
        yield pool


@asynccontextmanager
async def _asyncpg(dsn: str) -> AsyncIterator[Any]:
    async with asyncpg.create_pool(**parameters(dsn), min_size=1) as pool:
        yield pool


def _engine(dsn: str) -> sqlalchemy.Engine:
    return sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))


@asynccontextmanager
async def _sqlalchemy(dsn: str) -> AsyncIterator[Any]:
    engine = _engine(dsn)
    yield engine
    engine.dispose()


@asynccontextmanager
async def _sqlalchemy_sessions(dsn: str) -> AsyncIterator[Any]:
    engine = _engine(dsn)
    yield sessionmaker(engine)
    engine.dispose()


@asynccontextmanager
async def _async_sqlalchemy_sessions(dsn: str) -> AsyncIterator[Any]:
    engine = create_async_engine(
        "postgresql+asyncpg://", async_creator=lambda: asyncpg.connect(**parameters(dsn))
    )
    yield async_sessionmaker(engine)
    await engine.dispose()


@asynccontextmanager
async def _django(dsn: str) -> AsyncIterator[Any]:
    alias = f"worker_{uuid.uuid4().hex}"
    django.db.connections.settings[alias] = django_connection(dsn).settings_dict
    yield django.db.connections[alias]


def _text(statement: str) -> Any:
    return sqlalchemy.text(statement)


def _execute_encoded(session: Any, statement: str) -> Any:
    return session.execute(statement.encode())


def _execute_text(session: Any, statement: str) -> Any:
    return session.execute(_text(statement))


def _execute(session: Any, statement: str) -> Any:
    return session.execute(statement)


def _execute_in_cursor(session: Any, statement: str) -> None:
    with session.cursor() as cursor:
        cursor.execute(statement)


DATABASES: dict[str, tuple[Callable[[str], AbstractAsyncContextManager[Any]], bool, Execute]] = {
    "psycopg": (_dsn, False, _execute_encoded),
    "psycopg async": (_dsn, True, _execute_encoded),
    "psycopg_pool": (_psycopg_pool, False, _execute_encoded),
    "psycopg_pool async": (_async_psycopg_pool, True, _execute_encoded),
    "asyncpg": (_asyncpg, True, _execute),
    "SQLAlchemy Engine": (_sqlalchemy, False, _execute_text),
    "SQLAlchemy sessionmaker": (_sqlalchemy_sessions, False, _execute_text),
    "SQLAlchemy async_sessionmaker": (_async_sqlalchemy_sessions, True, _execute_text),
    "Django": (_django, False, _execute_in_cursor),
}
"""Opens a database, whether its handlers are coroutine functions, and how these run a statement."""


@contextmanager
def working(worker: Worker) -> Iterator[None]:
    """Run a worker in a thread during a block; raises at its end what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(worker.run())
        except BaseException as error:
            raised.append(error)

    thread = Thread(target=run, name="worker")
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join(30)
    assert not thread.is_alive(), "the worker does not stop"
    if raised:
        raise raised[0]
