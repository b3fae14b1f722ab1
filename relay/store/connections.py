"""Opens and pools connections to the source and the target.

A pooler may give the statements of one session to several sessions of the server. relay's claims are advisory locks,
and its settings are those of a session: both would remain in the pooler's sessions, and belong to whoever gets
these next. So relay refuses such an address.

Source: PgBouncer documentation, "SQL feature map for pooling modes".
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from secrets import token_hex
from threading import Lock, Thread
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

import psycopg
from psycopg.abc import AdaptContext
from psycopg.adapt import AdaptersMap, Buffer, Dumper
from psycopg.pq import ConnStatus, ExecStatus, TransactionStatus
from psycopg.types.datetime import IntervalLoader, TimestamptzLoader
from psycopg.types.json import JsonbDumper, set_json_loads

from relay.config.dsn import DatabaseAccess
from relay.faults import (
    ConfigurationError,
    NoCredentials,
    SecretUnavailable,
    spoils_session,
)
from relay.model import exact_json
from relay.model.events import Lsn
from relay.model.moments import nearest, nearest_interval
from relay.runtime import forks
from relay.runtime.adapters import own_adapters
from relay.store import refusals, session_settings
from relay.store.session_settings import LOCK_TIMEOUT, SessionKind

if TYPE_CHECKING:
    from psycopg_pool import ConnectionPool

log = logging.getLogger(__name__)

Connection = psycopg.Connection[Any]
"""A connection whose rows are of any type."""
Dsn = DatabaseAccess | str
"""How to connect: as the configuration says, whose secrets may change, or by a connection string."""

INSTANCE = f"{socket.gethostname()[:40]}:{os.getpid()}"
"""The name of this process among the instances of a group; with INSTANCE_PREFIX it fits into an application_name."""
INSTANCE_PREFIX = "relay "
APPLICATION_NAME = INSTANCE_PREFIX + INSTANCE
"""The application_name of the sessions by which an instance is recognised."""

CONNECT_TIMEOUT_SECONDS = 10
POOL_TIMEOUT_SECONDS = 5.0
"""How long a task waits for a connection before that counts as a fault and the task is retried."""
_IDLE_SECONDS = 600.0
_CLOSE_SECONDS = 1.0
"""How long the end of a pool waits for its threads."""
_ASKED_SECONDS = 8.0
_MOST_ASKED = 32
"""More than relay has threads that ask at once."""
_FRESH_SECONDS = 1.0
"""How long ago a session has answered that will do where no time is to be lost with one whose server hangs."""

_PG_LSN = 3220

CLIENT_KEEPALIVE: Mapping[str, Any] = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
}
"""Options of libpq: after a minute without an answer an idle connection is lost, such as that of a listener.

There is no `tcp_user_timeout`, which would also end the connection while the server works and reads nothing.
"""
SHORT_TIMEOUTS: Mapping[str, Any] = {
    "tcp_user_timeout": 5_000,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
}
"""Options of libpq by which a session of small statements fails within seconds where the server does not answer."""
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


_NO_MORE: Mapping[str, str] = MappingProxyType({})
_session_settings: ContextVar[Mapping[str, str]] = ContextVar("session_settings", default=_NO_MORE)


class _LsnDumper(Dumper):
    oid = _PG_LSN

    def dump(self, obj: Lsn) -> Buffer:
        return str(obj).encode()


class _TimestamptzLoader(TimestamptzLoader):
    def load(self, data: Buffer) -> datetime:
        try:
            moment = super().load(data)
            moment.astimezone(UTC)
        except (psycopg.DataError, OverflowError):
            text = bytes(data).decode()
            return nearest(is_early=text.endswith("BC") or text.startswith(("-", "0001")))
        return moment


class _IntervalLoader(IntervalLoader):
    def load(self, data: Buffer) -> timedelta:
        try:
            return super().load(data)
        except (psycopg.DataError, OverflowError):
            return nearest_interval(is_negative=bytes(data).startswith(b"-"))


def _adapt(context: AdaptContext) -> None:
    """Let a connection read what others may have written, and Python has not."""
    set_json_loads(_json, context)
    context.adapters.register_loader("timestamptz", _TimestamptzLoader)
    context.adapters.register_loader("interval", _IntervalLoader)


def _adapt_values(context: AdaptContext) -> None:
    """Let a connection write dicts as jsonb and `Lsn` as pg_lsn."""
    context.adapters.register_dumper(dict, JsonbDumper)
    context.adapters.register_dumper(Lsn, _LsnDumper)


class _UsersAdapters:
    """A context with what users' modules have registered for all connections, and what relay's pools add."""

    connection = None

    def __init__(self) -> None:
        self.adapters = AdaptersMap(psycopg.adapters)
        _adapt(self)
        _adapt_values(self)


@contextmanager
def with_users_adapters(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """Let the cursors that a block opens have the adapters that users' modules have registered for all connections.

    relay's own statements on the same connection do not have them.
    """
    session: Any = conn
    own = session._adapters
    users = _users_adapters.get(conn)
    if users is None:
        users = _users_adapters[conn] = _UsersAdapters().adapters
    session._adapters = users
    try:
        yield
    finally:
        session._adapters = own


_users_adapters: WeakKeyDictionary[psycopg.Connection[Any], AdaptersMap] = WeakKeyDictionary()


def _json(value: str | bytes) -> Any:
    """Read JSON that others have declared, whose numbers may be longer than those that Python converts."""
    return exact_json.loads_floats(value if isinstance(value, str) else value.decode())


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
    """Open a connection with the secrets as they are now, with own adapters. Raises psycopg.OperationalError."""
    try:
        conn = open_connection(
            dsn if isinstance(dsn, str) else dsn.conninfo(), context=own_adapters(), **options
        )
    except SecretUnavailable as error:
        key = "" if isinstance(dsn, str) else f"{dsn.key}: "
        raise NoCredentials(f"{key}{error}") from None
    _adapt(conn)
    forks.keep(conn)
    return conn


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


def cancel_running(seconds: float) -> None:
    """Ask the servers to end what the sessions of this process run, which would outlive it; waits so long at most.

    Their threads get an error, so only a process that ends calls it.
    """
    running = [
        each
        for each in forks.kept()
        if isinstance(each, psycopg.Connection)
        and each.pgconn.transaction_status == TransactionStatus.ACTIVE
    ]

    def cancel(conn: Connection) -> None:
        with suppress(psycopg.Error):
            conn.cancel_safe(timeout=seconds)
        # Nor can the thread run the next one.
        with suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(conn.fileno())) as link:
            link.shutdown(socket.SHUT_RDWR)

    threads = [Thread(target=cancel, args=(conn,), daemon=True) for conn in running]
    for thread in threads:
        thread.start()
    ends = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()))


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


def connect_pooled(
    dsn: Dsn,
    open_connection: Callable[..., psycopg.Connection[Any]] = psycopg.connect,
    **options: Any,
) -> psycopg.Connection[Any]:
    """Open a connection in autocommit mode, of which a pooler may give each transaction to another session.

    Its statements run in `with_settings`: nothing is left in sessions that others use, too. `open_connection` may be
    that of a subclass. Raises psycopg.OperationalError, and ConfigurationError as `connect` does.
    """
    conn = _opened_noting(dsn, open_connection, **{**_OPTIONS, **options})
    try:
        if leads_to_pooler(conn):
            conn.prepare_threshold = None
            conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        else:
            settings = session_settings.statements(SessionKind.OWN, _session_settings.get())
            session_settings.apply(conn, settings)
    except BaseException:
        conn.close()
        raise
    return conn


@contextmanager
def with_settings(
    conn: psycopg.Connection[Any], more: Mapping[str, str] = _NO_MORE
) -> Iterator[None]:
    """Run a block with the settings of relay's own sessions, and `more`, on a connection of `connect_pooled`.

    Behind a pooler, or with `more`, the block is one database transaction. Raises psycopg.Error.
    """
    # Nothing is prepared where a pooler exchanges sessions.
    if conn.prepare_threshold is not None and not more:
        yield
        return
    settings = {**more, **_session_settings.get()}
    with conn.transaction():
        local = session_settings.statements(SessionKind.OWN, settings, local=True)
        session_settings.apply(conn, local)
        yield


def database_identity(conn: psycopg.Connection[Any]) -> str:
    """Return the system identifier and the name of a database, which identify it at any address: `7…/shop`."""
    known = _identities.get(conn)
    if known is None:
        # Neither changes while there is a session.
        row = conn.execute(
            "select system_identifier || '/' || current_database() from pg_control_system()"
        ).fetchone()
        known = _identities[conn] = str(row and row[0])
    return known


_identities: WeakKeyDictionary[psycopg.Connection[Any], str] = WeakKeyDictionary()


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


class Pool:
    """At most `size` sessions of a database, for any thread, until `close`: psycopg's pool, opened with the first loan.

    `configure` prepares a session. Of those that nobody has needed for `max_idle` seconds, one after the other is
    closed. After a fault that may be a session's own, all of them are replaced. `options` are libpq's.
    """

    def __init__(
        self, dsn: Dsn, size: int, configure: Configure, max_idle: float, **options: Any
    ) -> None:
        self._dsn = dsn
        self._size = size
        self._configure = configure
        self._max_idle = max_idle
        self._options = {**_OPTIONS, **options}
        self._lock = Lock()
        self._sessions: ConnectionPool[Connection] | None = None
        self._given_back: WeakKeyDictionary[Connection, float] = WeakKeyDictionary()
        """When a session was given back (monotonic clock, seconds)."""
        self._fault: Exception | None = None
        """Of the last attempt to open one, which psycopg only logs."""
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def connection(
        self, timeout: float = POOL_TIMEOUT_SECONDS, idle_seconds: float = math.inf
    ) -> Iterator[Connection]:
        """Lend a session; what it has begun is committed at the end of the block, or rolled back by an exception.

        One that was free for longer than `idle_seconds` is not lent. Raises psycopg.OperationalError, among them
        PoolTimeout if all are lent for `timeout` seconds, and what `configure` raises.
        """
        while True:
            sessions, conn = self._lend(timeout)
            free_since = self._given_back.get(conn, math.inf)
            if free_since >= time.monotonic() - idle_seconds and not _is_lost(conn):
                break
            conn.close()
            sessions.putconn(conn)
        try:
            with conn:
                yield conn
        except BaseException as error:
            if spoils_session(error):
                # The others are as old, and most likely as wrong.
                sessions.drain()
            raise
        finally:
            self._given_back[conn] = time.monotonic()
            sessions.putconn(conn)

    def close(self) -> None:
        """Close the sessions; one that is lent, at the end of its block."""
        self._is_closed = True
        self.close_free()

    def close_free(self) -> None:
        """Close the sessions and threads; who needs a session gets a new one."""
        with self._lock:
            sessions, self._sessions = self._sessions, None
        if sessions is not None:
            sessions.close(_CLOSE_SECONDS)

    def _lend(self, timeout: float) -> tuple[ConnectionPool[Connection], Connection]:
        # Imported here: commands have no pool.
        from psycopg_pool import PoolClosed, PoolTimeout

        while True:
            sessions = self._opened()
            try:
                return sessions, sessions.getconn(timeout)
            except (PoolClosed, PoolTimeout) as error:
                if self._fault is not None and not self._is_closed:
                    raise self._fault from None
                if self._is_closed or isinstance(error, PoolTimeout):
                    raise

    def _opened(self) -> ConnectionPool[Connection]:
        from psycopg_pool import ConnectionPool, PoolClosed

        with self._lock:
            if self._is_closed:
                raise PoolClosed("the connections are closed")
            if self._sessions is None:
                sessions = ConnectionPool(
                    connection_class=self._connection_class(),
                    min_size=0,
                    max_size=self._size,
                    max_idle=self._max_idle,
                    # Who needs a session tries again after a failed attempt.
                    reconnect_timeout=0.0,
                    reconnect_failed=self._forget,
                    num_workers=1,
                    name="sessions",
                    open=False,
                )
                try:
                    sessions.open()
                except RuntimeError as error:
                    # The system has no thread.
                    raise PoolClosed(str(error)) from error
                self._sessions = sessions
            return self._sessions

    def _forget(self, sessions: ConnectionPool[Connection]) -> None:
        """Tell those who wait for a session that there is none, where none is lent that they could wait for."""
        with self._lock:
            if sessions.get_stats()["pool_size"] or self._sessions is not sessions:
                return
            self._sessions = None
        # It waits for the thread that runs this.
        Thread(target=sessions.close, daemon=True).start()

    def _connection_class(self) -> type[Connection]:
        connect_noting = self._connect_noting

        class Session(psycopg.Connection[Any]):
            @classmethod
            def connect(cls, *_: Any, **__: Any) -> Any:
                return connect_noting()

        return Session

    def _connect_noting(self) -> Connection:
        try:
            conn = _opened_noting(self._dsn, psycopg.connect, **self._options)
            try:
                self._configure(conn)
            except BaseException:
                conn.close()
                raise
        except Exception as error:
            self._fault = error
            raise
        self._fault = None
        return conn


def _is_lost(conn: Connection) -> bool:
    """Whether the server has ended a session that is idle."""
    poll, pgconn = select.poll(), conn.pgconn
    try:
        poll.register(pgconn.socket, select.POLLIN)
        while pgconn.status == ConnStatus.OK and poll.poll(0):
            pgconn.consume_input()
            # Parses what was read.
            pgconn.is_busy()
    except psycopg.OperationalError:
        return True
    return pgconn.status != ConnStatus.OK


_IN_TIME = session_settings.statements(SessionKind.OWN, {"lock_timeout": LOCK_TIMEOUT})
_asked: dict[Dsn, Pool] = {}
"""The pools of `asking`."""


def shared_pool(dsn: Dsn) -> Pool:
    """The pool of `asking`, which is closed with the process."""
    pool = _asked.get(dsn)
    if pool is None:
        new = new_pool(dsn, _MOST_ASKED, _IN_TIME, max_idle=_ASKED_SECONDS, **SHORT_TIMEOUTS)
        # Of two threads that ask at once, one gets the other's: a pool that lends nothing has no session and no thread.
        pool = _asked.setdefault(dsn, new)
        atexit.register(pool.close)
    return pool


@contextmanager
def asking(dsn: Dsn) -> Iterator[Connection]:
    """Lend a session as those of `open_pool`, for what is asked once: who asks a moment later gets the same one.

    Nobody else has it in the block, which leaves nothing in it, such as a lock; with settings of `sessions_with` it is
    one database transaction, in a session that has just answered, or a new one. It fails within seconds where the
    server does not answer. Raises psycopg.OperationalError and ConfigurationError as `connect` does.
    """
    more = _session_settings.get()
    with shared_pool(dsn).connection(idle_seconds=_FRESH_SECONDS if more else math.inf) as conn:
        if not more:
            yield conn
            return
        with conn.transaction():
            for name, value in more.items():
                conn.execute("select pg_catalog.set_config(%s, %s, true)", (name, value))
            yield conn


@contextmanager
def asking_both(source: Dsn, target: Dsn) -> Iterator[tuple[Connection, Connection]]:
    """Lend a session of each of two databases, one for both where they are configured as one."""
    with asking(source) as of_source:
        if source == target:
            yield of_source, of_source
            return
        with asking(target) as of_target:
            yield of_source, of_target


def close_asked(*dsns: Dsn) -> None:
    """Close the sessions that `asking` keeps for the next question to some databases."""
    for dsn, pool in list(_asked.items()):
        if dsn in dsns:
            pool.close_free()


def open_pool(dsn: Dsn, size: int, configure: Configure | None = None) -> Pool:
    """Open a pool of at most `size` connections that write dicts as jsonb and `Lsn` as pg_lsn.

    Commits are durable, and no statement waits for a lock longer than `LOCK_TIMEOUT`.
    """
    return new_pool(dsn, size, _IN_TIME, configure)


def new_pool(
    dsn: Dsn,
    size: int,
    session: bytes,
    configure: Configure | None = None,
    max_idle: float = _IDLE_SECONDS,
    **options: Any,
) -> Pool:
    """Open a pool of at most `size` connections, each prepared by the statements `session` and by `configure`."""

    def prepare(conn: Connection) -> None:
        _adapt_values(conn)
        _require_session(dsn, conn)
        session_settings.apply(conn, session)
        if configure is not None:
            configure(conn)

    return Pool(dsn, size, prepare, max_idle, **options)


POOLER_HINT = (
    "a pooler such as PgBouncer cannot stream the WAL: name the server itself, which has another address or port "
    "(Neon: the host without -pooler; Supabase: db.<project>.supabase.co, port 5432)"
)
"""What to do where a pooler answers."""

_TRIES = 3
"""How often the two sessions are compared: a pooler may hand out its sessions in turn."""
_ANSWER_SECONDS = 2.0
_known: set[tuple[str, int, str, str]] = set()
"""Addresses at which each connection has a session of the server for itself."""


def _require_session(dsn: Dsn, conn: psycopg.Connection[Any]) -> None:
    """Raise ConfigurationError if `conn` does not keep one session of the server for itself.

    Asks once for each address, before relay sets anything that others would notice. Raises psycopg.Error.
    """
    info = conn.info
    address = (info.host, info.port, info.dbname, info.user)
    if address in _known:
        return
    if leads_to_pooler(conn):
        with closing(opened(dsn, psycopg.connect, **_OPTIONS)) as other:
            if _share_session(conn, other):
                raise _no_session(info.host, "dsn" if isinstance(dsn, str) else dsn.key)
    _known.add(address)


def leads_to_pooler(conn: psycopg.Connection[Any]) -> bool:
    """Whether a pooler answers instead of the server: it makes up the process id that a client gets."""
    row = conn.execute("select pg_catalog.pg_backend_pid()").fetchone()
    return row is not None and bool(row[0] != conn.info.backend_pid)


def _share_session(conn: psycopg.Connection[Any], other: psycopg.Connection[Any]) -> bool:
    """Whether a setting of one session is seen in another one, or is lost by its own."""
    token = token_hex(8)
    conn.execute("select pg_catalog.set_config('relay.session', %s, false)", (token,))
    for _ in range(_TRIES):
        seen = _token(other)
        if seen is None:
            break
        if seen == token or _token(conn) not in (token, None):
            return True
    conn.execute("reset relay.session")
    return False


def _token(conn: psycopg.Connection[Any]) -> str | None:
    """What `relay.session` is; None without an answer in time, since the pooler has no session left."""
    pgconn = conn.pgconn
    pgconn.send_query(b"select coalesce(pg_catalog.current_setting('relay.session', true), '')")
    deadline = time.monotonic() + _ANSWER_SECONDS
    while pgconn.is_busy():
        if not select.select([pgconn.socket], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return None
        pgconn.consume_input()
    token = None
    while (result := pgconn.get_result()) is not None:
        if result.status == ExecStatus.TUPLES_OK:
            token = (result.get_value(0, 0) or b"").decode()
    return token


def _no_session(host: str | None, key: str) -> ConfigurationError:
    host = host or ""
    if "-pooler." in host:
        # Neon's pooled addresses.
        hint = f"use the host {host.replace('-pooler.', '.', 1)}"
    elif ".pooler.supabase." in host:
        hint = "use the direct connection, db.<project>.supabase.co on port 5432"
    else:
        hint = "connect to PostgreSQL itself, or set the pooler to session mode"
    return ConfigurationError(
        f"{key}: {host or 'the address'} is a pooler that gives each transaction to another session of the server, and "
        f"relay's locks and settings belong to a session: {hint}"
    )
