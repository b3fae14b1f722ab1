"""Runs a statement with one text parameter in a session of any supported driver, in its open transaction.

Sessions are recognised by the names of their classes: no driver is imported that the caller has not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from relay.client.errors import NotInTransaction, UnknownSession
from relay.runtime.adapters import own

Read = Callable[[Any], Any]
"""Reads what is wanted of a driver's result."""


class Statement(NamedTuple):
    """The text of a statement before and after its only parameter."""

    before: str
    after: str

    @classmethod
    def selecting(cls, result: str, joined: str = "") -> Statement:
        """Return a statement that selects `result`; there and in `joined`, `p.a` is its parameter, a JSON object."""
        return cls(
            f"select {result} from (select cast(cast(",  # noqa: S608
            f" as text) as json) as a) as p{joined}",
        )

    def with_parameter(self, placeholder: str, escaped: str | None = None) -> str:
        """Return the statement with a driver's placeholder; `escaped` is a character that the driver wants doubled."""
        before, after = self
        if escaped:
            before, after = (
                before.replace(escaped, escaped * 2),
                after.replace(escaped, escaped * 2),
            )
        return before + placeholder + after


def execute(session: Any, statement: Statement, text: str) -> int:
    """Run the statement in a synchronous session; returns the number of its rows.

    Raises NotInTransaction, UnknownSession, and what the driver raises.
    """
    rows: int = _SYNCHRONOUS[_kind_of(session, _SYNCHRONOUS)](session, statement, text)
    return rows


async def execute_async(session: Any, statement: Statement, text: str) -> int:
    """Run the statement in an asynchronous session; returns the number of its rows. Raises what `execute` raises."""
    rows: int = await _ASYNCHRONOUS[_kind_of(session, _ASYNCHRONOUS)](session, statement, text)
    return rows


def query(session: Any, statement: Statement, text: str) -> str:
    """Run a statement whose result is one text in a synchronous session; returns it. Raises what `execute` raises."""
    run = _SYNCHRONOUS[_kind_of(session, _SYNCHRONOUS)]
    return str(run(session, statement, text, _text))


async def query_async(session: Any, statement: Statement, text: str) -> str:
    """Do what `query` does, in an asynchronous session."""
    run = _ASYNCHRONOUS[_kind_of(session, _ASYNCHRONOUS)]
    return str(await run(session, statement, text, _text))


def _rows(result: Any) -> int:
    """Return the number of rows of a driver's result."""
    rows: int = result.rowcount
    return rows


def _text(result: Any) -> Any:
    """Return the one value of a driver's result, whatever makes its rows; awaitable where the driver's is."""
    row = result.fetchone()
    return _awaited(row) if hasattr(row, "__await__") else row[0]


async def _awaited(row: Any) -> Any:
    return (await row)[0]


def savepoint(session: Any) -> Any:
    """Return a context manager that undoes what its block has changed, if that raises. Raises what `execute` raises."""
    kind = _kind_of(session, _SYNCHRONOUS)
    if kind == "django":
        return _django_savepoint(session)
    if kind.startswith("sqlalchemy"):
        return session.begin_nested()
    conn = session.connection if kind == "psycopg cursor" else session
    _require_psycopg_transaction(conn)
    if conn.info.transaction_status.name == "IDLE":
        # Otherwise psycopg's block would be the transaction, and commit it.
        conn.execute("select")
    return conn.transaction()


@contextmanager
def _django_savepoint(conn: Any) -> Iterator[None]:
    if conn.get_autocommit():
        _refuse("the connection is in autocommit mode: use transaction.atomic()")
    name = conn.savepoint()
    try:
        yield
    except BaseException:
        conn.savepoint_rollback(name)
        raise
    conn.savepoint_commit(name)


async def savepoint_async(session: Any) -> Any:
    """Return the asynchronous form of `savepoint`."""
    kind = _kind_of(session, _ASYNCHRONOUS)
    if kind.startswith("sqlalchemy"):
        return session.begin_nested()
    if kind == "asyncpg":
        if not session.is_in_transaction():
            _refuse("the connection has no transaction open")
        return session.transaction()
    conn = session.connection if kind == "psycopg async cursor" else session
    _require_psycopg_transaction(conn)
    if conn.info.transaction_status.name == "IDLE":
        await conn.execute("select")
    return conn.transaction()


_KINDS = {
    ("psycopg", "Connection"): "psycopg",
    ("psycopg", "Cursor"): "psycopg cursor",
    ("psycopg", "AsyncConnection"): "psycopg async",
    ("psycopg", "AsyncCursor"): "psycopg async cursor",
    ("sqlalchemy", "Session"): "sqlalchemy session",
    ("sqlalchemy", "scoped_session"): "sqlalchemy session",
    ("sqlalchemy", "Connection"): "sqlalchemy connection",
    ("sqlalchemy", "AsyncSession"): "sqlalchemy async session",
    ("sqlalchemy", "async_scoped_session"): "sqlalchemy async session",
    ("sqlalchemy", "AsyncConnection"): "sqlalchemy async connection",
    ("asyncpg", "Connection"): "asyncpg",
    ("asyncpg", "PoolConnectionProxy"): "asyncpg",
    ("django", "BaseDatabaseWrapper"): "django",
    ("django", "ConnectionProxy"): "django",
}


def _kind_of(session: object, wanted: Container[str]) -> str:
    """Return the kind of a session by the names of its classes. Raises UnknownSession for one that is not wanted."""
    found = (
        _KINDS.get((each.__module__.partition(".")[0], each.__name__))
        for each in type(session).__mro__
    )
    kind = next(filter(None, found), "")
    if kind in wanted:
        return kind
    name = f"{type(session).__module__}.{type(session).__qualname__}"
    if kind in _ASYNCHRONOUS:
        raise UnknownSession(
            f"{name} is asynchronous: call the function whose name ends with _async; of an inbox, write `async with`"
        )
    if kind in _SYNCHRONOUS:
        raise UnknownSession(
            f"{name} is not asynchronous: call the function without _async; of an inbox, write `with`"
        )
    raise UnknownSession(
        f"{name} is not a supported session: pass a connection of psycopg, SQLAlchemy, asyncpg or Django"
    )


def _refuse(what: str) -> None:
    raise NotInTransaction(f"{what}: begin a transaction first")


def _psycopg(conn: Any, statement: Statement, text: str, read: Read = _rows) -> Any:
    _require_psycopg_transaction(conn)
    cursor = own(conn)
    return read(cursor.execute(for_psycopg(cursor, statement), (text,)))


def _psycopg_cursor(cursor: Any, statement: Statement, text: str, read: Read = _rows) -> Any:
    return _psycopg(cursor.connection, statement, text, read)


async def _psycopg_async(conn: Any, statement: Statement, text: str, read: Read = _rows) -> Any:
    _require_psycopg_transaction(conn)
    cursor = own(conn)
    found = read(await cursor.execute(for_psycopg(cursor, statement), (text,)))
    return await found if hasattr(found, "__await__") else found


async def _psycopg_async_cursor(
    cursor: Any, statement: Statement, text: str, read: Read = _rows
) -> Any:
    return await _psycopg_async(cursor.connection, statement, text, read)


def for_psycopg(cursor: Any, statement: Statement) -> str:
    """Return a statement with its parameter as a cursor of psycopg wants it."""
    is_raw = any(each.__name__ in ("RawCursor", "AsyncRawCursor") for each in type(cursor).__mro__)
    return statement.with_parameter("$1") if is_raw else statement.with_parameter("%s", "%")


def _require_psycopg_transaction(conn: Any) -> None:
    # Without autocommit, psycopg begins a transaction with the statement.
    if conn.autocommit and conn.info.transaction_status.name == "IDLE":
        _refuse("the connection is in autocommit mode and has no transaction open")


def _sqlalchemy_session(session: Any, statement: Statement, text: str, read: Read = _rows) -> Any:
    conn = session.connection(bind_arguments=_sqlalchemy_bind(_registered(session)))
    return _sqlalchemy_connection(conn, statement, text, read)


def _sqlalchemy_connection(conn: Any, statement: Statement, text: str, read: Read = _rows) -> Any:
    from sqlalchemy import text as clause

    require_sqlalchemy_transaction(conn)
    return read(conn.execute(clause(for_sqlalchemy(statement)), {"events": text}))


async def _sqlalchemy_async_session(
    session: Any, statement: Statement, text: str, read: Read = _rows
) -> Any:
    bind = await _registered(session).run_sync(_sqlalchemy_bind)
    return await _sqlalchemy_async_connection(
        await session.connection(bind_arguments=bind), statement, text, read
    )


def _registered(session: Any) -> Any:
    """Return the session that a scoped session stands for now."""
    return session.registry() if hasattr(session, "registry") else session


def _sqlalchemy_bind(session: Any) -> dict[str, Any]:
    """Return the arguments with which a session connects to the database of its rows.

    A session with several engines would give the event another connection, hence another transaction, than the rows.
    Raises UnknownSession if it cannot be told which.
    """
    from sqlalchemy.exc import UnboundExecutionError
    from sqlalchemy.orm import Session

    routed = type(session).get_bind is not Session.get_bind
    # SQLAlchemy 2.1 has a public name for it.
    binds_of_classes = session.binds if hasattr(session, "binds") else session._Session__binds
    configured = {session.bind, *binds_of_classes.values()} - {None}
    if not routed and len(configured) == 1:
        return {"bind": configured.pop()}
    try:
        binds = _binds_of_changes(session) or (
            {session.get_bind(clause=_a_write())} if routed else configured
        )
    except UnboundExecutionError:
        binds = configured
    if len(binds) != 1:
        raise UnknownSession(
            f"the session has {len(binds)} engines for its changes: publish with the connection of the rows, such as "
            'session.connection(bind_arguments={"mapper": Order})'
        )
    return {"bind": binds.pop()}


def _binds_of_changes(session: Any) -> set[Any]:
    """Return where the session has written, and where it will: an engine, or its connection if the session has one."""
    kinds = {type(each) for each in (*session.new, *session.dirty, *session.deleted)}
    unflushed = {session.get_bind(mapper=kind, clause=_a_write()) for kind in kinds}
    connections = _connections(session)
    written = {each for each in connections.values() if _has_written(each)}
    return written | {connections.get(bind, bind) for bind in unflushed}


def _connections(session: Any) -> dict[Any, Any]:
    """Return the connections that the session's transaction has opened, by engine."""
    transaction = session.get_transaction()
    # SQLAlchemy has no public name for it.
    opened = getattr(transaction, "_connections", {})
    return {bind: connection for bind, (connection, *_) in opened.items()}


def _has_written(conn: Any) -> bool:
    """Return whether a connection's transaction has changed anything; one of another database has no outbox."""
    if conn.dialect.name != "postgresql":
        return False
    asked = "select pg_catalog.pg_current_xact_id_if_assigned() is not null"
    return bool(conn.exec_driver_sql(asked).scalar())


def _a_write() -> Any:
    """Return a clause by which a session that routes reads elsewhere recognises a write."""
    from sqlalchemy import table, update

    return update(table("outbox"))


async def _sqlalchemy_async_connection(
    conn: Any, statement: Statement, text: str, read: Read = _rows
) -> Any:
    from sqlalchemy import text as clause

    await conn.run_sync(require_sqlalchemy_transaction)
    return read(await conn.execute(clause(for_sqlalchemy(statement)), {"events": text}))


def for_sqlalchemy(statement: Statement) -> str:
    """Return a statement with its parameter as SQLAlchemy's `text` wants it, named `events`."""
    # SQLAlchemy reads `:name` as a parameter, `\:` as a colon, and leaves `::` alone.
    escaped = [
        part.replace("::", "\0").replace(":", r"\:").replace("\0", "::") for part in statement
    ]
    return Statement(*escaped).with_parameter(":events")


def require_sqlalchemy_transaction(session: Any) -> None:
    """Raise NotInTransaction for a session or connection whose begin, commit and rollback do nothing."""
    is_session = callable(session.connection)
    conn = session.connection() if is_session else session
    if getattr(conn.connection.dbapi_connection, "autocommit", False):
        _refuse("the connection has the isolation level AUTOCOMMIT")


async def _asyncpg(conn: Any, statement: Statement, text: str, read: Read = _rows) -> Any:
    if not conn.is_in_transaction():
        _refuse("the connection has no transaction open")
    if read is _text:
        return await conn.fetchval(statement.with_parameter("$1"), text)
    status: str = await conn.execute(statement.with_parameter("$1"), text)
    return int(status.rpartition(" ")[2])


def _django(conn: Any, statement: Statement, text: str, read: Read = _rows) -> Any:
    if conn.get_autocommit():
        _refuse("the connection is in autocommit mode: use transaction.atomic()")
    with conn.cursor() as cursor:
        cursor.execute(statement.with_parameter("%s", "%"), [text])
        return read(cursor)


_SYNCHRONOUS: dict[str, Callable[..., Any]] = {
    "psycopg": _psycopg,
    "psycopg cursor": _psycopg_cursor,
    "sqlalchemy session": _sqlalchemy_session,
    "sqlalchemy connection": _sqlalchemy_connection,
    "django": _django,
}
_ASYNCHRONOUS: dict[str, Callable[..., Any]] = {
    "psycopg async": _psycopg_async,
    "psycopg async cursor": _psycopg_async_cursor,
    "sqlalchemy async session": _sqlalchemy_async_session,
    "sqlalchemy async connection": _sqlalchemy_async_connection,
    "asyncpg": _asyncpg,
}
