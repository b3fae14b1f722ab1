"""Connects to a walsender, identifies the server, and starts the stream.

psycopg has no replication API, but it lets START_REPLICATION run on a connection opened with
`replication=database`, and its libpq wrapper reads and writes the copy.

Source: PostgreSQL documentation, "Streaming Replication Protocol".
"""

from __future__ import annotations

import re
import selectors
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import ConnStatus, ExecStatus, TransactionStatus
from psycopg.pq.abc import PGconn
from psycopg.rows import scalar_row

from relay.config.settings import Settings
from relay.config.source import SourceSettings
from relay.faults import ConfigurationError, RelayError, refused_for_good, server_error
from relay.model.events import Lsn
from relay.source.decode.translation import Encoding
from relay.source.server import TimelineHistory
from relay.store import session_settings
from relay.store.connections import APPLICATION_NAME, CLIENT_KEEPALIVE, Connection, connect, opened
from relay.store.session_settings import SessionKind

DEFAULT_SENDER_TIMEOUT = 60.0
"""The seconds to use where `wal_sender_timeout` is off."""
LEAVE_SECONDS = 2.0
"""How long relay waits for the server to end a stream."""

_STANDBYS = b"show synchronous_standby_names"
_EVERY_STANDBY = re.compile(r'(?:^|[\s,(])"?\*"?(?=$|[\s,)])')
"""Matches the name * in `synchronous_standby_names`, as in `*`, `FIRST 1 (a, *)` and `ANY 1 ("*")`."""


@dataclass(frozen=True, slots=True)
class System:
    """A server: its identifier, its timelines, the end of its WAL, whether it is a standby, and its next full xid."""

    identifier: str
    history: TimelineHistory
    position: Lsn = field(compare=False)
    standby: bool = field(compare=False)
    next_xid: int = field(compare=False)


@dataclass(frozen=True, slots=True)
class WalStream:
    """One replication connection in COPY BOTH mode. Times are in seconds.

    `session` is an ordinary session on the same server, which a shutdown ends. `encoding` is that of names and values
    where it is not UTF-8; `partitioned`: the outbox is a partitioned table; `next_xid`: the server's next full xid.
    """

    conn: Connection
    session: Connection
    start: Lsn
    status_every: float
    dead_after: float
    encoding: Encoding | None
    partitioned: bool
    next_xid: int = 0

    def require_running(self) -> None:
        """Raise psycopg.OperationalError if the server has ended the session. Call when its socket is readable.

        A server that shuts down ends ordinary sessions first. Its walsender then waits until everything is confirmed
        that it has sent, which may need the sessions that were ended.
        """
        pgconn = self.session.pgconn
        pgconn.consume_input()
        # Parses what was read.
        pgconn.is_busy()
        if pgconn.status != ConnStatus.OK:
            raise psycopg.OperationalError("the connection beside the stream is lost")

    def ask_standbys(self) -> None:
        """Ask the server which standbys commits wait for, without waiting for the answer."""
        pgconn = self.session.pgconn
        if pgconn.transaction_status == TransactionStatus.IDLE:
            pgconn.send_query(_STANDBYS)

    def is_waited_for(self) -> bool:
        """Whether the answer to `ask_standbys`, if it has come, says that commits wait for this stream."""
        pgconn = self.session.pgconn
        waited_for = False
        while not pgconn.is_busy() and (result := pgconn.get_result()) is not None:
            waited_for = _means_every_standby((result.get_value(0, 0) or b"").decode())
        return waited_for

    def close(self) -> None:
        """Close both connections."""
        self.conn.close()
        self.session.close()

    def end(self) -> None:
        """End the copy, and wait until the server ends it: then it has read the last status update."""
        pgconn = self.conn.pgconn
        pgconn.put_copy_end()
        pgconn.flush()
        deadline = time.monotonic() + LEAVE_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(pgconn.socket, selectors.EVENT_READ)
            while time.monotonic() < deadline:
                length, _ = pgconn.get_copy_data(1)
                if length < 0:
                    return
                if length == 0:
                    selector.select(max(0.0, deadline - time.monotonic()))
                    pgconn.consume_input()


def open_replication(settings: Settings) -> Connection:
    """Open a connection to the source's walsender. Raises psycopg.OperationalError."""
    try:
        conn = opened(
            settings.source_dsn,
            psycopg.connect,
            replication="database",
            # A walsender speaks the simple query protocol only.
            cursor_factory=psycopg.ClientCursor,
            autocommit=True,
            client_encoding="UTF8",
            application_name=APPLICATION_NAME,
            connect_timeout=10,
            # The receiver judges silence by the server's keepalives; TCP's own detect a host that is gone.
            **CLIENT_KEEPALIVE,
        )
    except psycopg.OperationalError as error:
        if refused_for_good(error):
            # A server may refuse replication alone, as RDS does with IAM's tokens. An ordinary session notes the rest.
            with suppress(psycopg.OperationalError):
                connect(settings.source_dsn).close()
        raise
    try:
        session_settings.apply(conn, session_settings.statements(SessionKind.OWN))
    except BaseException:
        conn.close()
        raise
    return conn


def open_session(settings: Settings, stream: Connection) -> Connection:
    """Open an ordinary session on the server of a replication connection. Raises psycopg.OperationalError."""
    info = stream.info
    server = {"host": info.host, "hostaddr": info.hostaddr, "port": str(info.port)}
    given: dict[str, Any] = {key: value for key, value in server.items() if value}
    return connect(settings.source_dsn, **given)


def identify(conn: Connection) -> System:
    """Identify a connection's server. Raises psycopg.Error, or RelayError if its history cannot be read.

    Source: PostgreSQL documentation, "Streaming Replication Protocol", IDENTIFY_SYSTEM.
    """
    # Read first: if a standby is promoted meanwhile, its position is at least as great.
    (row,) = conn.execute(
        "select pg_is_in_recovery(), pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
    )
    standby, next_xid = row
    identity = conn.execute("IDENTIFY_SYSTEM").fetchone()
    if identity is None:
        raise psycopg.OperationalError("the server does not identify itself")
    timeline = int(identity[1])
    position = Lsn.parse(str(identity[2]))
    return System(str(identity[0]), _history(conn, timeline), position, standby, next_xid)


def _history(conn: Connection, timeline: int) -> TimelineHistory:
    """Read the history of a timeline; empty where the server has no history file for it.

    Source: PostgreSQL documentation, "Streaming Replication Protocol", TIMELINE_HISTORY.
    """
    if timeline == 1:
        return TimelineHistory(timeline)
    # Servers before PostgreSQL 15 give the file's bytes the type bytea, and send them as they are.
    result = conn.pgconn.exec_(f"TIMELINE_HISTORY {timeline}".encode())
    if result.status != ExecStatus.TUPLES_OK:
        error = server_error(result)
        if isinstance(error, psycopg.errors.UndefinedFile):
            return TimelineHistory(timeline)
        raise error
    try:
        return TimelineHistory.parse(
            timeline, (result.get_value(0, 1) or b"").decode(errors="replace")
        )
    except ValueError as error:
        raise RelayError(f"source.dsn: {error}: repair the file in the server's pg_wal") from None


def require_asynchronous(conn: Connection) -> None:
    """Raise ConfigurationError if commits of the server would wait until relay confirms them. Raises psycopg.Error.

    A stream counts as a standby if `synchronous_standby_names` has a *. relay confirms a commit after one of its own,
    which in the same server would wait for relay.
    """
    (row,) = conn.execute(_STANDBYS)
    if _means_every_standby(row[0]):
        raise ConfigurationError(
            f"source.dsn: synchronous_standby_names is {row[0]!r}, and * stands for relay's stream too, so that every "
            "commit of the server would wait for relay: name the standbys instead (their application_name), or set "
            "source.mode: poll"
        )


def _means_every_standby(names: str) -> bool:
    return _EVERY_STANDBY.search(names) is not None


def sender_timeout(conn: Connection) -> float:
    """Read `wal_sender_timeout` in seconds; DEFAULT_SENDER_TIMEOUT where it is off. Raises psycopg.Error."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        cursor.execute(
            "select setting::float8 / 1000 from pg_settings where name = 'wal_sender_timeout'"
        )
        return float(next(cursor)) or DEFAULT_SENDER_TIMEOUT


def start_replication(
    conn: Connection, source: SourceSettings, start: Lsn, encoding: Encoding | None
) -> None:
    """Start the stream of the slot's commits that end after `start`. Raises psycopg.Error."""
    command = sql.SQL(
        "START_REPLICATION SLOT {} LOGICAL {} (proto_version '1', publication_names {}{})"
    ).format(
        sql.Identifier(source.slot),
        sql.SQL(str(start)),
        sql.Literal(sql.Identifier(source.publication).as_string(conn)),
        sql.SQL("" if source.message_prefix is None else ", messages 'true'"),
    )
    text = command.as_string(conn)
    if encoding is not None:
        conn.execute(sql.SQL("set client_encoding to {}").format(encoding.name))
    result = conn.pgconn.exec_(text.encode(encoding.codec if encoding else "utf-8"))
    if result.status != ExecStatus.COPY_BOTH:
        raise server_error(result)


def end_of_stream(pgconn: PGconn) -> psycopg.Error:
    """The error with which the server has ended a copy."""
    result = pgconn.get_result()
    if result is not None and result.status == ExecStatus.FATAL_ERROR:
        return server_error(result)
    return psycopg.OperationalError("the server ended the stream")
