"""The databases of workers, one class for each driver, with one interface: transactions, and statements in them.

What a worker is given is recognised by the names of its classes: no driver is imported that the caller has not
imported. A connection string needs psycopg.

All transactions are READ COMMITTED, whatever the default of the role is: those of two workers that take from one queue
are no conflict.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn, Protocol

from relay.client.errors import WorkerError
from relay.client.sessions import (
    Statement,
    for_psycopg,
    for_sqlalchemy,
    require_sqlalchemy_transaction,
)
from relay.renewal import renew_sessions
from relay.runtime.adapters import own


@dataclass(slots=True)
class ClaimedRows:
    """An open transaction, and the rows that the statement which began it has returned."""

    session: Any
    rows: list[str]
    ending: tuple[Statement, str] | None = None
    """The statement that ends the transaction if nothing is raised, and its parameter; the commit follows."""
    is_followed: bool = False
    """Whether the same statement begins the next transaction: an asynchronous link may send it behind the commit."""


class Link(Protocol):
    """What one slot of a worker reaches its database through: at most one connection at a time."""

    def transaction(self) -> AbstractContextManager[Any]:
        """Return a context manager with a session in a transaction. Raises what the driver raises."""
        ...

    def claiming(self, statement: Statement, text: str) -> AbstractContextManager[ClaimedRows]:
        """Return a context manager for a transaction that begins with a statement, and ends with what `ending` says."""
        ...

    def savepoint(self, session: Any) -> AbstractContextManager[Any]:
        """Return a context manager that undoes what its block has changed, if that raises; once in `claiming`."""
        ...

    def fetch(self, session: Any, statement: Statement, text: str) -> list[str]:
        """Run a statement in a session, and return the first column of its rows. Raises what the driver raises."""
        ...

    def run(self, statement: Statement, text: str) -> list[str]:
        """Do the same in a transaction of its own."""
        ...

    def close(self) -> None:
        """Close the connection if it is the slot's own."""
        ...


class AsyncLink(Protocol):
    """The asynchronous form of `Link`."""

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Return an asynchronous context manager with a session in a transaction."""
        ...

    def claiming(self, statement: Statement, text: str) -> AbstractAsyncContextManager[ClaimedRows]:
        """Return an asynchronous context manager for a transaction that begins with a statement, see `Link`."""
        ...

    def savepoint(self, session: Any) -> AbstractAsyncContextManager[Any]:
        """Return an asynchronous context manager that undoes what its block has changed, if that raises."""
        ...

    async def fetch(self, session: Any, statement: Statement, text: str) -> list[str]:
        """Run a statement in a session, and return the first column of its rows."""
        ...

    async def run(self, statement: Statement, text: str) -> list[str]:
        """Do the same in a transaction of its own."""
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


class Steps:
    """What a slot does in its transactions, by `transaction` and `fetch`."""

    transaction: Callable[[], AbstractContextManager[Any]]
    fetch: Callable[[Any, Statement, str], list[str]]

    @contextmanager
    def claiming(self, statement: Statement, text: str) -> Iterator[ClaimedRows]:
        with self.transaction() as session:
            claimed = ClaimedRows(session, self.fetch(session, statement, text))
            yield claimed
            if claimed.ending is not None:
                self.fetch(session, *claimed.ending)

    def run(self, statement: Statement, text: str) -> list[str]:
        with self.transaction() as session:
            return self.fetch(session, statement, text)


class AsyncSteps:
    """The asynchronous form of `Steps`."""

    transaction: Callable[[], AbstractAsyncContextManager[Any]]
    fetch: Callable[[Any, Statement, str], Awaitable[list[str]]]

    @asynccontextmanager
    async def claiming(self, statement: Statement, text: str) -> AsyncIterator[ClaimedRows]:
        async with self.transaction() as session:
            claimed = ClaimedRows(session, await self.fetch(session, statement, text))
            yield claimed
            if claimed.ending is not None:
                await self.fetch(session, *claimed.ending)

    async def run(self, statement: Statement, text: str) -> list[str]:
        async with self.transaction() as session:
            return await self.fetch(session, statement, text)


_BEGIN, _COMMIT, _ROLLBACK = b"begin isolation level read committed", b"commit", b"rollback"
_SAVEPOINT, _RELEASE = b"savepoint relay_attempt", b"release savepoint relay_attempt"
_UNDO = b"rollback to savepoint relay_attempt", _RELEASE
_STATEMENT_GONE = "26000"


@cache
def _own_connections() -> tuple[Any, Any]:
    """Return the classes of the connections that a slot opens: no handler can commit what the worker has to commit."""
    import psycopg

    def refuse() -> NoReturn:
        raise psycopg.ProgrammingError(
            "the worker ends the transaction, together with the message: use conn.transaction() for a savepoint"
        )

    class Connection(psycopg.Connection[Any]):
        def commit(self) -> None:
            refuse()

        def rollback(self) -> None:
            refuse()

    class AsyncConnection(psycopg.AsyncConnection[Any]):
        async def commit(self) -> None:
            refuse()

        async def rollback(self) -> None:
            refuse()

    return Connection, AsyncConnection


class _Own:
    """A connection of psycopg that a slot opens itself, and what is sent on it in one trip.

    A trip is one query string of several statements: after one that fails, the server runs none of the others.
    """

    def __init__(self, dsn: str, name: str) -> None:
        self._dsn, self._name = dsn, name
        self._conn: Any = None
        self._is_prepared: bool | None = None
        """Whether the statement that claims is prepared; None where the session may not keep it, as behind a pooler."""
        self._is_undone = False
        """Whether the savepoint of the transaction is gone."""
        self._is_committed = False
        """Whether the last trip has committed."""

    @property
    def _is_open(self) -> bool:
        return self._conn is not None and not self._conn.closed

    @property
    def _is_idle(self) -> bool:
        return self._is_open and self._conn.info.transaction_status.name == "IDLE"

    def _opened(self, process: int) -> None:
        """Note on which server process the new connection is."""
        # A pooler has made up the one that the client knows.
        self._is_prepared = False if process == self._conn.info.backend_pid else None

    def _begun(self, statement: Statement, text: str) -> tuple[bytes, ...]:
        """Return what begins a transaction with a statement, in which a handler is called."""
        call = self._call(statement, text)
        if self._is_prepared:
            call = b"execute relay_claim (" + self._literal(text) + b")"
        return _BEGIN, call, _SAVEPOINT

    def _note_loss(self, error: Exception) -> None:
        """Note that the statement that claims is gone: a handler may deallocate all, as psycopg does on a rollback.

        Raises any other error.
        """
        if not self._is_prepared or getattr(error, "sqlstate", None) != _STATEMENT_GONE:
            raise error
        self._is_prepared = None

    def _call(self, statement: Statement, text: str) -> bytes:
        """Return a statement with its parameter."""
        before, after = statement
        return before.encode() + self._literal(text) + after.encode()

    def _literal(self, text: str) -> bytes:
        from psycopg.pq import Escaping

        given = text.encode(self._conn.info.encoding)
        return bytes(Escaping(self._conn.pgconn).escape_literal(given))

    def _ended(self, claimed: ClaimedRows) -> tuple[bytes, ...]:
        """Return what ends a transaction."""
        if claimed.ending is None:
            return (_COMMIT,)
        end = (self._call(*claimed.ending), _COMMIT)
        return end if self._is_undone else (_RELEASE, *end)

    def _sent(self, statements: tuple[bytes, ...]) -> Generator[Any, Any, list[str]]:
        """Send statements, and return the rows of the last one that returns any: each is one text.

        Yields what psycopg waits for. A cursor for each trip would cost as much again.
        """
        from psycopg.generators import execute
        from psycopg.pq import ExecStatus

        self._is_committed = False
        self._conn.pgconn.send_query(b"; ".join(statements))
        rows: list[str] = []
        for result in (yield from execute(self._conn.pgconn)):
            if result.status == ExecStatus.TUPLES_OK:
                values = (result.get_value(number, 0) for number in range(result.ntuples))
                rows = [bytes(each).decode(self._conn.info.encoding) for each in values]
            elif result.status != ExecStatus.COMMAND_OK:
                raise self._error(result)
            elif result.command_status == b"COMMIT":
                self._is_committed = True
        return rows

    def _error(self, result: Any) -> Exception:
        import psycopg

        error = psycopg.errors.error_from_result(result, self._conn.info.encoding)
        # libpq's own has no SQLSTATE: the connection is lost.
        return error if error.sqlstate else psycopg.OperationalError(str(error).strip())


class _Psycopg(_Own):
    @contextmanager
    def transaction(self) -> Iterator[Any]:
        if not self._is_open:
            self._connect()
        with self._conn.transaction():
            yield self._conn

    fetch = staticmethod(_psycopg_fetch)

    @contextmanager
    def claiming(self, statement: Statement, text: str) -> Iterator[ClaimedRows]:
        self._make_idle()
        self._prepare(statement)
        try:
            try:
                rows = self._trip(*self._begun(statement, text))
            except Exception as error:
                self._note_loss(error)
                rows = self._trip(_ROLLBACK, *self._begun(statement, text))
            self._is_undone = False
            claimed = ClaimedRows(self._conn, rows)
            yield claimed
            self._trip(*self._ended(claimed))
        except BaseException:
            self._roll_back()
            raise

    @contextmanager
    def savepoint(self, session: Any) -> Iterator[None]:
        from psycopg import Rollback

        try:
            yield
        except BaseException as error:
            self._is_undone = True
            # Where the connection is lost, what the handler has met says more than the loss.
            with suppress(Exception):
                self._trip(*_UNDO)
                if isinstance(error, Rollback) and error.transaction is None:
                    return
            raise

    def run(self, statement: Statement, text: str) -> list[str]:
        self._make_idle()
        try:
            return self._trip(_BEGIN, self._call(statement, text), _COMMIT)
        except BaseException:
            self._roll_back()
            raise

    def _make_idle(self) -> None:
        """Connect, unless there is a connection on which nothing is left open."""
        if not self._is_idle:
            self.close()
            self._connect()

    def _connect(self) -> None:
        import psycopg

        # What handlers run is not prepared: a pooler of transactions does not keep it.
        self._conn = _own_connections()[0].connect(
            self._dsn, autocommit=True, prepare_threshold=None, **_named(self._dsn, self._name)
        )
        self._conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        self._is_prepared = None
        [process] = self._trip(b"select pg_catalog.pg_backend_pid()")
        self._opened(int(process))

    def _prepare(self, statement: Statement) -> None:
        if self._is_prepared is False:
            prepared = f"prepare relay_claim (text) as {statement.with_parameter('$1')}"
            self._trip(prepared.encode())
            self._is_prepared = True

    def _trip(self, *statements: bytes) -> list[str]:
        with self._conn.lock:
            rows: list[str] = self._conn.wait(self._sent(statements))
        return rows

    def _roll_back(self) -> None:
        """Undo what is open, and close a connection on which that is not possible."""
        if self._is_open and not self._is_idle:
            try:
                self._trip(_ROLLBACK)
            except Exception:
                self.close()

    def close(self) -> None:
        if self._conn is not None:
            self._conn.close()


class _AsyncPsycopg(_Own):
    """The asynchronous form of `_Psycopg`, which also begins a transaction in the trip that commits the one before."""

    _followed: list[str] | Exception | None = None
    """What the statement returned that was sent behind the last commit."""

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        if not self._is_open:
            await self._connect()
        async with self._conn.transaction():
            yield self._conn

    fetch = staticmethod(_psycopg_fetch_async)

    @asynccontextmanager
    async def claiming(self, statement: Statement, text: str) -> AsyncIterator[ClaimedRows]:
        try:
            rows = await self._rows(statement, text)
            claimed, self._is_undone = ClaimedRows(self._conn, rows), False
            yield claimed
            ended = self._ended(claimed)
            if claimed.is_followed:
                await self._follow(*ended, *self._begun(statement, text))
            else:
                await self._trip(*ended)
        except BaseException:
            await self._roll_back()
            raise

    async def _rows(self, statement: Statement, text: str) -> list[str]:
        """Return what the statement that begins a transaction returns; it may have been sent with the last commit."""
        followed, self._followed = self._followed, None
        try:
            if isinstance(followed, Exception):
                raise followed
            if followed is not None:
                return followed
            await self._make_idle()
            await self._prepare(statement)
            return await self._trip(*self._begun(statement, text))
        except Exception as error:
            self._note_loss(error)
        return await self._trip(_ROLLBACK, *self._begun(statement, text))

    async def _follow(self, *statements: bytes) -> None:
        """Commit, and begin the next transaction: what fails there is raised when its rows are asked for."""
        try:
            self._followed = await self._trip(*statements)
        except Exception as error:
            if not self._is_committed:
                raise
            self._followed = error

    @asynccontextmanager
    async def savepoint(self, session: Any) -> AsyncIterator[None]:
        from psycopg import Rollback

        try:
            yield
        except BaseException as error:
            self._is_undone = True
            # Where the connection is lost, what the handler has met says more than the loss.
            with suppress(Exception):
                await self._trip(*_UNDO)
                if isinstance(error, Rollback) and error.transaction is None:
                    return
            raise

    async def run(self, statement: Statement, text: str) -> list[str]:
        await self._make_idle()
        try:
            return await self._trip(_BEGIN, self._call(statement, text), _COMMIT)
        except BaseException:
            await self._roll_back()
            raise

    async def _make_idle(self) -> None:
        if not self._is_idle:
            await self.close()
            await self._connect()

    async def _connect(self) -> None:
        import psycopg

        self._conn = await _own_connections()[1].connect(
            self._dsn, autocommit=True, prepare_threshold=None, **_named(self._dsn, self._name)
        )
        await self._conn.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
        self._is_prepared = None
        [process] = await self._trip(b"select pg_catalog.pg_backend_pid()")
        self._opened(int(process))

    async def _prepare(self, statement: Statement) -> None:
        if self._is_prepared is False:
            prepared = f"prepare relay_claim (text) as {statement.with_parameter('$1')}"
            await self._trip(prepared.encode())
            self._is_prepared = True

    async def _trip(self, *statements: bytes) -> list[str]:
        async with self._conn.lock:
            rows: list[str] = await self._conn.wait(self._sent(statements))
        return rows

    async def _roll_back(self) -> None:
        if self._is_open and not self._is_idle:
            try:
                await self._trip(_ROLLBACK)
            except Exception:
                await self.close()

    async def close(self) -> None:
        followed, self._followed = self._followed, None
        if followed:
            # What was claimed and not begun is given back; a rollback would count as an interruption.
            with suppress(Exception):
                await self._trip(_COMMIT)
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


class _Pooled(Steps):
    """What has no connection of its own: each transaction takes one of a pool, or of an engine."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def close(self) -> None:
        """Do nothing: the pool is the caller's."""


class _AsyncPooled(AsyncSteps):
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
