"""Opens and pools connections to the source and the target."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import psycopg
from psycopg import sql
from psycopg.adapt import Buffer, Dumper
from psycopg.pq import ExecStatus
from psycopg.types.json import JsonbDumper
from psycopg_pool import ConnectionPool, PoolTimeout

from relay.config.dsn import DatabaseAccess
from relay.faults import (
    ConfigurationError,
    NoCredentials,
    SecretUnavailable,
    first_line,
    made_read_only,
    server_error,
    spoils_session,
    transaction_ended,
)
from relay.model.events import Lsn
from relay.store import poolers, refusals, session_settings, transaction_guard
from relay.store.keep_alive import LIMIT, KeepAlive
from relay.store.session_settings import LOCK_TIMEOUT, SessionKind

log = logging.getLogger(__name__)

Connection = psycopg.Connection[Any]
"""A connection whose rows are of any type."""
Dsn = DatabaseAccess | str
"""How to connect: as the configuration says, whose secrets may change, or by a connection string."""

CONNECT_TIMEOUT_SECONDS = 10
POOL_TIMEOUT_SECONDS = 5.0
"""How long a task waits for a connection before that counts as a fault and the task is retried."""

_PG_LSN = 3220

CLIENT_KEEPALIVE: Mapping[str, Any] = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
}
"""Options of libpq: after a minute without an answer an idle connection is lost, such as that of a listener.

There is no `tcp_user_timeout`, which would also end the connection while the server works and reads nothing.
"""
_RESET = b"reset session authorization; reset role; reset all; unlisten *; close all"
"""With `pg_advisory_unlock_all`, resets what DISCARD ALL does, except temporary relations and prepared statements.

Source: PostgreSQL documentation, "DISCARD".
"""
_CREATE_LEFT_OVER = r"""
    create or replace function pg_temp.relay_left_over() returns boolean language plpgsql as $$
    begin
        perform pg_advisory_unlock_all();
        return exists (select from pg_prepared_statements where from_sql)
            or exists (select from pg_depend join pg_class on pg_class.oid = objid
                        where classid = 'pg_class'::regclass and refclassid = 'pg_namespace'::regclass
                          and refobjid = pg_my_temp_schema() and relname not like 'relay\_%');
    end $$
"""
"""A function, since planning this query for each reset would cost more than the reset itself."""
_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "autocommit": True,
        "application_name": "relay",
        "client_encoding": "UTF8",
        "connect_timeout": CONNECT_TIMEOUT_SECONDS,
        **CLIENT_KEEPALIVE,
    }
)
Configure = Callable[[psycopg.Connection[Any]], None]


class _Pool(ConnectionPool[psycopg.Connection[Any]]):
    """A pool that replaces its sessions after a fault that may be the session's own.

    `configure` prepares a new session. A PoolTimeout has the error of the last attempt to open one, which psycopg only
    logs; what no retry repairs, such as a missing right, is raised as it is.
    """

    def __init__(self, dsn: Dsn, configure: Configure, **options: Any) -> None:
        faults: list[psycopg.Error | ConfigurationError] = []

        class Connection(psycopg.Connection[Any]):
            @classmethod
            def connect(cls, conninfo: str = "", **kwargs: Any) -> Any:
                try:
                    return _opened_noting(dsn, super().connect, **kwargs)
                except psycopg.OperationalError as error:
                    faults[:] = [error]
                    raise

        def prepare(conn: psycopg.Connection[Any]) -> None:
            try:
                configure(conn)
            except (psycopg.Error, ConfigurationError) as error:
                faults[:] = [error]
                raise
            faults.clear()

        self._faults = faults
        super().__init__("", connection_class=Connection, configure=prepare, **options)

    def getconn(self, timeout: float | None = None) -> psycopg.Connection[Any]:
        """Return a connection. Raises PoolTimeout, psycopg.errors.InsufficientPrivilege or ConfigurationError."""
        try:
            return super().getconn(timeout)
        except PoolTimeout as error:
            if not self._faults:
                raise
            fault = self._faults[0]
            if isinstance(fault, ConfigurationError | psycopg.errors.InsufficientPrivilege):
                raise fault from None
            raise PoolTimeout(first_line(fault).removeprefix("connection failed: ")) from error

    @contextmanager
    def connection(self, timeout: float | None = None) -> Iterator[psycopg.Connection[Any]]:
        """Lend a connection; after a fault of the block that may be the session's own, all sessions are replaced."""
        with super().connection(timeout) as conn:
            try:
                yield conn
            except BaseException as error:
                if spoils_session(error):
                    # The others are as old, and most likely as wrong.
                    self.drain()
                raise


_session_settings: ContextVar[Mapping[str, str]] = ContextVar(
    "session_settings", default=MappingProxyType({})
)


class _LsnDumper(Dumper):
    oid = _PG_LSN

    def dump(self, obj: Lsn) -> Buffer:
        return str(obj).encode()


@contextmanager
def sessions_with(settings: Mapping[str, str]) -> Iterator[None]:
    """Apply settings of PostgreSQL, such as statement_timeout, to sessions that `connect` opens in this block.

    For callers of functions that open connections. A thread that is started in the block does not inherit the settings.
    """
    before = _session_settings.set({**_session_settings.get(), **settings})
    try:
        yield
    finally:
        _session_settings.reset(before)


def opened(
    dsn: Dsn, open_connection: Callable[..., psycopg.Connection[Any]], **options: Any
) -> psycopg.Connection[Any]:
    """Open a connection with the secrets as they are now. Raises psycopg.OperationalError."""
    if isinstance(dsn, str):
        return open_connection(dsn, **options)
    try:
        return open_connection(dsn.conninfo(), **options)
    except SecretUnavailable as error:
        raise NoCredentials(f"{dsn.key}: {error}") from None


def _opened_noting(
    dsn: Dsn, open_connection: Callable[..., psycopg.Connection[Any]], **options: Any
) -> psycopg.Connection[Any]:
    """The same for an ordinary session; notes whether the server refuses the secrets."""
    try:
        conn = opened(dsn, open_connection, **options)
    except psycopg.OperationalError as error:
        if isinstance(dsn, DatabaseAccess):
            refusals.note(dsn, error)
        raise
    if isinstance(dsn, DatabaseAccess):
        refusals.accepted(dsn)
    return conn


def connect(
    dsn: Dsn, kind: SessionKind = SessionKind.OWN, **options: Any
) -> psycopg.Connection[Any]:
    """Open a connection in autocommit mode, whose commits are durable. Raises psycopg.OperationalError.

    Raises ConfigurationError for a session that lacks the right to a setting that relay needs.
    """
    conn = _opened_noting(dsn, psycopg.connect, **{**_OPTIONS, **options})
    try:
        _require_session(dsn, conn)
        session_settings.apply(conn, session_settings.statements(kind, _session_settings.get()))
    except BaseException:
        conn.close()
        raise
    return conn


def require_writable(conn: psycopg.Connection[Any]) -> None:
    """Raise psycopg.errors.ReadOnlySqlTransaction if the session is read-only, as those of a standby are.

    An advisory lock can be taken there, but those who connect to the primary do not see it.
    """
    row = conn.execute("show transaction_read_only").fetchone()
    if row and row[0] == "on":
        raise psycopg.errors.ReadOnlySqlTransaction("the session is read-only")


def require_writable_by_default(conn: psycopg.Connection[Any]) -> None:
    """Raise psycopg.errors.ReadOnlySqlTransaction if new sessions are read-only, whatever this one has set."""
    row = conn.execute(
        """
        select pg_is_in_recovery()
            or (select reset_val = 'on' from pg_settings where name = 'default_transaction_read_only')
        """
    ).fetchone()
    if row and row[0]:
        raise psycopg.errors.ReadOnlySqlTransaction("the server or the role is read-only")


def open_pool(
    dsn: Dsn, size: int, configure: Configure | None = None
) -> ConnectionPool[psycopg.Connection[Any]]:
    """Open a pool of at most `size` connections that write dicts as jsonb and `Lsn` as pg_lsn.

    Commits are durable, and no statement waits for a lock longer than `LOCK_TIMEOUT`.
    """
    session = session_settings.statements(SessionKind.OWN, {"lock_timeout": LOCK_TIMEOUT})
    return _pool(dsn, size, session, configure)


class HandlerPool:
    """A pool of at most `size` sessions of the target that run statements of the user.

    Settings and locks of a session are reset with the commit, in the same round trip. Unless `durable`, a crash of the
    server may lose commits. `code_of` names the Python handlers: their code cannot end a transaction, and a session in
    which it left temporary tables or prepared statements is closed. With `keep_alive`, the server ends a transaction
    that waits for this process when it is frozen. `mark` is the application_name of the next transactions; None: the
    pool's.
    """

    def __init__(
        self,
        dsn: Dsn,
        size: int,
        configure: Configure,
        durable: bool,
        code_of: Sequence[str],
        keep_alive: KeepAlive | None = None,
    ) -> None:
        self._configure = configure
        self._code_of = code_of
        self._reset = b""
        self._keep_alive = keep_alive
        self.mark: str | None = None
        defaults = {"lock_timeout": LOCK_TIMEOUT}
        if keep_alive is not None:
            defaults["idle_in_transaction_session_timeout"] = LIMIT
        session = session_settings.statements(
            SessionKind.HANDLER, defaults=defaults, durable=durable
        )
        self._pool = _pool(dsn, size, session, self._prepare)

    def connection(self) -> AbstractContextManager[psycopg.Connection[Any]]:
        """Return a session for relay's own statements, committed at the end of the block."""
        return self._pool.connection()

    @contextmanager
    def transaction(self) -> Iterator[psycopg.Connection[Any]]:
        """Run a database transaction; it is committed at the end of the block, or rolled back by an exception.

        Raises ConfigurationError if user code ended it, and psycopg.Error.
        """
        with self._pool.connection() as conn:
            try:
                self._begin(conn)
                with self._keep_alive.within(conn) if self._keep_alive else nullcontext():
                    yield conn
                left_over = self._commit(conn)
            except BaseException as error:
                is_code = bool(self._code_of) and _made_read_only(conn, error)
                self._abandon(conn)
                if is_code:
                    raise made_read_only(self._code_of) from error
                raise
            if left_over and self._code_of:
                _close(conn)

    def _begin(self, conn: psycopg.Connection[Any]) -> None:
        """Begin a transaction that user code must not end; without user code the first statement may begin it."""
        begin = transaction_guard.BEGIN if self._code_of else b"begin"
        if self.mark:
            name = sql.SQL("; set local application_name = {}").format(self.mark)
            begin += name.as_bytes(conn)
        elif not self._code_of:
            return
        result = conn.pgconn.exec_(begin)
        if result.status == ExecStatus.COMMAND_OK:
            return
        error = server_error(result)
        if isinstance(error, psycopg.errors.UndefinedFunction | psycopg.errors.InvalidSchemaName):
            raise ConfigurationError(
                "target.dsn: temporary objects of the session are missing in the next transaction, as with a pooler "
                "in transaction mode: connect to PostgreSQL itself, or set the pooler to session mode"
            )
        raise error

    def _commit(self, conn: psycopg.Connection[Any]) -> bool:
        # Deferred triggers of the user's tables run at the commit.
        end = session_settings.USERS_PATH_LOCALLY + b"; commit; " + self._reset
        if not self._code_of:
            return _run(conn, end)
        try:
            return _run(conn, transaction_guard.CLOSE + end)
        except psycopg.errors.InvalidCursorName:
            raise transaction_ended(self._code_of) from None

    def close(self) -> None:
        """Close the sessions."""
        self._pool.close()
        if self._keep_alive:
            self._keep_alive.close()

    def _prepare(self, conn: psycopg.Connection[Any]) -> None:
        last = b"pg_temp.relay_left_over()" if self._code_of else b"pg_advisory_unlock_all()"
        if self._code_of:
            conn.execute(_CREATE_LEFT_OVER)
            conn.execute(transaction_guard.CREATE)
        self._reset = b"; ".join((_RESET, session_settings.restoring(conn), b"select " + last))
        self._configure(conn)
        conn.autocommit = False

    def _abandon(self, conn: psycopg.Connection[Any]) -> None:
        try:
            conn.rollback()
            if _run(conn, self._reset) and self._code_of:
                _close(conn)
        except psycopg.Error:
            conn.close()


def _made_read_only(conn: psycopg.Connection[Any], error: BaseException) -> bool:
    """Whether a transaction failed since it is read-only, although transactions of this session are not.

    A server that does not report these settings, such as some poolers, counts as one that has become read-only.
    """
    refusals = [
        each
        for each in (error, error.__cause__)
        if isinstance(each, psycopg.errors.ReadOnlySqlTransaction)
    ]
    if not any(each.diag.source_function == "PreventCommandIfReadOnly" for each in refusals):
        return False
    settings = ("default_transaction_read_only", "in_hot_standby")
    return all(conn.info.parameter_status(each) == "off" for each in settings)


def _run(conn: psycopg.Connection[Any], command: bytes) -> bool:
    """Run statements of which the last returns a boolean; returns it. Raises psycopg.Error."""
    result = conn.pgconn.exec_(command)
    if result.status != ExecStatus.TUPLES_OK:
        raise server_error(result)
    return result.get_value(0, 0) == b"t"


def _close(conn: psycopg.Connection[Any]) -> None:
    log.warning(
        "a handler left temporary tables or prepared statements in its session, which was closed: drop them, or create "
        "tables with `on commit drop`"
    )
    conn.close()


def _require_session(dsn: Dsn, conn: psycopg.Connection[Any]) -> None:
    """Raise ConfigurationError if a pooler lends the session to others, who would get relay's settings."""
    key = "dsn" if isinstance(dsn, str) else dsn.key
    poolers.require_session(conn, lambda: opened(dsn, psycopg.connect, **_OPTIONS), key)


def _pool(
    dsn: Dsn,
    size: int,
    session: bytes,
    configure: Configure | None,
) -> ConnectionPool[psycopg.Connection[Any]]:
    def prepare(conn: psycopg.Connection[Any]) -> None:
        conn.adapters.register_dumper(dict, JsonbDumper)
        conn.adapters.register_dumper(Lsn, _LsnDumper)
        _require_session(dsn, conn)
        session_settings.apply(conn, session)
        if configure is not None:
            configure(conn)

    return _Pool(
        dsn,
        min_size=0,
        max_size=size,
        open=True,
        timeout=POOL_TIMEOUT_SECONDS,
        # The next task tries again after a failed attempt; the pool's own backoff would delay the recovery.
        reconnect_timeout=1.0,
        configure=prepare,
        kwargs=_OPTIONS,
    )
