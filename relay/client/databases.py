"""The databases of workers, one class for each driver, with one interface: transactions, and statements in them.

What a worker is given is recognised by the names of its classes: no driver is imported that the caller has not
imported. A connection string needs psycopg.

All transactions are READ COMMITTED, whatever the default of the role is: those of two workers that take from one queue
are no conflict.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from typing import Any, Protocol

from relay.client.errors import WorkerError
from relay.client.sessions import (
    Statement,
    for_psycopg,
    for_sqlalchemy,
    require_sqlalchemy_transaction,
)
from relay.renewal import renew_sessions
from relay.runtime.adapters import own


class Link(Protocol):
    """What one slot of a worker reaches its database through: at most one connection at a time."""

    def transaction(self) -> AbstractContextManager[Any]:
        """Return a context manager with a session in a transaction. Raises what the driver raises."""
        ...

    def savepoint(self, session: Any) -> AbstractContextManager[Any]:
        """Return a context manager that undoes what its block has changed, if that raises."""
        ...

    def fetch(self, session: Any, statement: Statement, text: str) -> list[str]:
        """Run a statement in a session, and return the first column of its rows. Raises what the driver raises."""
        ...

    def close(self) -> None:
        """Close the connection if it is the slot's own."""
        ...


class AsyncLink(Protocol):
    """The asynchronous form of `Link`."""

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Return an asynchronous context manager with a session in a transaction."""
        ...

    def savepoint(self, session: Any) -> AbstractAsyncContextManager[Any]:
        """Return an asynchronous context manager that undoes what its block has changed, if that raises."""
        ...

    async def fetch(self, session: Any, statement: Statement, text: str) -> list[str]:
        """Run a statement in a session, and return the first column of its rows."""
        ...

    async def close(self) -> None:
        """Close the connection if it is the slot's own."""
        ...


_ISOLATED = "set transaction isolation level read committed"


def _block(session: Any) -> Any:
    """Return a savepoint of psycopg or asyncpg: a block of a connection that is in a transaction."""
    return session.transaction()


def _nested(session: Any) -> Any:
    """Return a savepoint of SQLAlchemy."""
    return session.begin_nested()


def _psycopg_fetch(session: Any, statement: Statement, text: str) -> list[str]:
    with own(session) as cursor:
        rows = cursor.execute(for_psycopg(cursor, statement), (text,)).fetchall()
    return [row[0] for row in rows]


async def _psycopg_fetch_async(session: Any, statement: Statement, text: str) -> list[str]:
    async with own(session) as cursor:
        await cursor.execute(for_psycopg(cursor, statement), (text,))
        return [row[0] for row in await cursor.fetchall()]


class _Psycopg:
    """A connection of psycopg that the slot opens itself, and opens again after it was lost."""

    def __init__(self, dsn: str, name: str) -> None:
        self._dsn, self._name = dsn, name
        self._conn: Any = None

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        import psycopg

        if self._conn is None or self._conn.closed:
            # Without prepared statements, which a pooler of transactions does not keep.
            self._conn = psycopg.connect(
                self._dsn, autocommit=True, prepare_threshold=None, **_named(self._dsn, self._name)
            )
            self._conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        # With a block of psycopg, a handler cannot commit by itself what the worker has to commit.
        with self._conn.transaction():
            yield self._conn

    savepoint = staticmethod(_block)
    fetch = staticmethod(_psycopg_fetch)

    def close(self) -> None:
        if self._conn is not None:
            self._conn.close()


class _AsyncPsycopg:
    """The asynchronous form of `_Psycopg`."""

    def __init__(self, dsn: str, name: str) -> None:
        self._dsn, self._name = dsn, name
        self._conn: Any = None

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        import psycopg

        if self._conn is None or self._conn.closed:
            self._conn = await psycopg.AsyncConnection.connect(
                self._dsn, autocommit=True, prepare_threshold=None, **_named(self._dsn, self._name)
            )
            await self._conn.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
        async with self._conn.transaction():
            yield self._conn

    savepoint = staticmethod(_block)
    fetch = staticmethod(_psycopg_fetch_async)

    async def close(self) -> None:
        if self._conn is not None:
            await self._conn.close()


def _named(dsn: str, name: str) -> dict[str, Any]:
    """Return the name under which the server shows the connections, unless the connection string has one."""
    from psycopg.conninfo import conninfo_to_dict

    # The server cuts longer names.
    return {} if "application_name" in conninfo_to_dict(dsn) else {"application_name": name[:63]}


def _is_read_only(error: BaseException | None) -> bool:
    """Return whether a server refused to write, as seen through what SQLAlchemy and Django raise instead."""
    while error is not None:
        if "25006" in (getattr(error, "sqlstate", None), getattr(error, "pgcode", None)):
            return True
        error = getattr(error, "orig", None) or error.__cause__
    return False


@contextmanager
def _leaving(discard: Callable[[], None]) -> Iterator[None]:
    """Discard a pool's connection to a server that has become read-only: the pool then asks for the primary again."""
    try:
        yield
    except Exception as error:
        if _is_read_only(error):
            discard()
        raise


@asynccontextmanager
async def _leaving_async(discard: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """The asynchronous form of `_leaving`."""
    try:
        yield
    except Exception as error:
        if _is_read_only(error):
            await discard()
        raise


class _Pooled:
    """What has no connection of its own: each transaction takes one of a pool, or of an engine."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def close(self) -> None:
        """Do nothing: the pool is the caller's."""


class _AsyncPooled:
    """The asynchronous form of `_Pooled`."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    async def close(self) -> None:
        """Do nothing: the pool is the caller's."""


class _PsycopgPool(_Pooled):
    @contextmanager
    def transaction(self) -> Iterator[Any]:
        import psycopg

        with self._pool.connection() as conn, _leaving(conn.close):
            former = conn.isolation_level
            conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            try:
                with conn.transaction():
                    yield conn
            finally:
                conn.isolation_level = former

    savepoint = staticmethod(_block)
    fetch = staticmethod(_psycopg_fetch)


class _AsyncPsycopgPool(_AsyncPooled):
    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        import psycopg

        async with self._pool.connection() as conn, _leaving_async(conn.close):
            former = conn.isolation_level
            await conn.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
            try:
                async with conn.transaction():
                    yield conn
            finally:
                await conn.set_isolation_level(former)

    savepoint = staticmethod(_block)
    fetch = staticmethod(_psycopg_fetch_async)


class _Asyncpg(_AsyncPooled):
    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        async with (
            self._pool.acquire() as conn,
            _leaving_async(conn.close),
            conn.transaction(isolation="read_committed"),
        ):
            yield conn

    savepoint = staticmethod(_block)

    async def fetch(self, session: Any, statement: Statement, text: str) -> list[str]:
        return [row[0] for row in await session.fetch(statement.with_parameter("$1"), text)]


class _SQLAlchemy(_Pooled):
    @contextmanager
    def transaction(self) -> Iterator[Any]:
        with self._pool.begin() as session, _leaving(session.invalidate):
            from sqlalchemy import text as clause

            require_sqlalchemy_transaction(session)
            session.execute(clause(_ISOLATED))
            yield session

    savepoint = staticmethod(_nested)

    def fetch(self, session: Any, statement: Statement, text: str) -> list[str]:
        from sqlalchemy import text as clause

        rows = session.execute(clause(for_sqlalchemy(statement)), {"events": text})
        return [row[0] for row in rows]


class _AsyncSQLAlchemy(_AsyncPooled):
    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        async with self._pool.begin() as session, _leaving_async(session.invalidate):
            from sqlalchemy import text as clause

            await session.run_sync(require_sqlalchemy_transaction)
            await session.execute(clause(_ISOLATED))
            yield session

    savepoint = staticmethod(_nested)

    async def fetch(self, session: Any, statement: Statement, text: str) -> list[str]:
        from sqlalchemy import text as clause

        rows = await session.execute(clause(for_sqlalchemy(statement)), {"events": text})
        return [row[0] for row in rows]


class _Django(_Pooled):
    """A connection of Django, of which each thread has its own."""

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        from django.db import connections, transaction

        conn = connections[self._pool.alias]
        renew_sessions()
        with _leaving(conn.close), transaction.atomic(using=conn.alias):
            with conn.cursor() as cursor:
                cursor.execute(_ISOLATED)
            yield conn

    def savepoint(self, session: Any) -> AbstractContextManager[Any]:
        from django.db import transaction

        block: AbstractContextManager[Any] = transaction.atomic(using=session.alias)
        return block

    def fetch(self, session: Any, statement: Statement, text: str) -> list[str]:
        with session.cursor() as cursor:
            cursor.execute(statement.with_parameter("%s", "%"), [text])
            return [row[0] for row in cursor.fetchall()]


_POOLS: dict[tuple[str, str], type[_Pooled]] = {
    ("psycopg_pool", "ConnectionPool"): _PsycopgPool,
    ("sqlalchemy", "Engine"): _SQLAlchemy,
    ("sqlalchemy", "sessionmaker"): _SQLAlchemy,
    ("django", "BaseDatabaseWrapper"): _Django,
    ("django", "ConnectionProxy"): _Django,
}
_ASYNC_POOLS: dict[tuple[str, str], type[_AsyncPooled]] = {
    ("psycopg_pool", "AsyncConnectionPool"): _AsyncPsycopgPool,
    ("asyncpg", "Pool"): _Asyncpg,
    ("sqlalchemy", "AsyncEngine"): _AsyncSQLAlchemy,
    ("sqlalchemy", "async_sessionmaker"): _AsyncSQLAlchemy,
}


class Database:
    """What a worker was given as its database.

    `is_async` says whether its handlers have to be coroutine functions; None: either all or none of them.
    `is_opened_here` says that the worker opens its connections itself, in any thread.
    """

    def __init__(self, given: Any, name: str) -> None:
        """`name` is that of connections which the worker opens itself. Raises TypeError for what is no database."""
        self._given, self._name = given, name
        self.is_async: bool | None = None
        self.is_opened_here = isinstance(given, str)
        if isinstance(given, str):
            return
        names = [(each.__module__.partition(".")[0], each.__name__) for each in type(given).__mro__]
        found = [each for each in names if each in _POOLS or each in _ASYNC_POOLS]
        if not found:
            name = f"{type(given).__module__}.{type(given).__qualname__}"
            raise TypeError(
                f"{name} is no database: give a connection string, a pool of psycopg or asyncpg, an engine or "
                "sessionmaker of SQLAlchemy, or django.db.connection"
            )
        self._kind = found[0]
        self.is_async = self._kind in _ASYNC_POOLS

    def check(self) -> None:
        """Raise WorkerError for a connection string that libpq does not understand; its text may have a password."""
        if not isinstance(self._given, str):
            return
        import psycopg
        from psycopg.conninfo import conninfo_to_dict

        try:
            conninfo_to_dict(self._given)
        except psycopg.ProgrammingError:
            raise WorkerError(
                "the connection string of the worker's database is not valid: write it as "
                "postgresql://user@host/database or host=… dbname=… user=…"
            ) from None

    def link(self) -> Link:
        """Return what a slot of a synchronous worker uses."""
        if isinstance(self._given, str):
            return _Psycopg(self._given, self._name)
        linked: Any = _POOLS[self._kind](self._given)
        return linked  # type: ignore[no-any-return]

    def async_link(self) -> AsyncLink:
        """Return what a slot of an asynchronous worker uses."""
        if isinstance(self._given, str):
            return _AsyncPsycopg(self._given, self._name)
        linked: Any = _ASYNC_POOLS[self._kind](self._given)
        return linked  # type: ignore[no-any-return]
