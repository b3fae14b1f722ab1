"""Reads the state of the source's server: its identity and timeline, the visible snapshot, and the end of its WAL."""

from __future__ import annotations

from dataclasses import dataclass

from relay.model.events import Lsn
from relay.model.snapshots import Snapshot
from relay.store.connections import Connection

_PAGE = 8192
_PAGE_HEADER, _SEGMENT_HEADER = 24, 40
"""The sizes in bytes of the header of a WAL page, and of the first page of a segment."""


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """A snapshot, and a position of the WAL at or after the end of every commit that the snapshot sees.

    `durable`: a crash of the server would lose none of these commits.
    """

    snapshot: Snapshot
    lsn: Lsn
    durable: bool


def current_position(conn: Connection) -> SourcePosition:
    """Read the snapshot that sessions see now. Raises psycopg.Error.

    On a hot standby, whose snapshot has no list of transactions in progress, it sees only what is certain.
    """
    (row,) = conn.execute(
        """
        select pg_current_snapshot()::text, standby,
               (case when standby then pg_last_wal_replay_lsn() else pg_current_wal_insert_lsn() end)::text,
               case when not standby then pg_current_wal_flush_lsn()::text end,
               pg_size_bytes(current_setting('wal_segment_size'))
          from pg_is_in_recovery() as standby
        """
    )
    text, standby, position, flushed, segment = row
    snapshot, lsn = Snapshot.parse(text), end_before(Lsn.parse(position or "0/0"), segment)
    if standby:
        return SourcePosition(snapshot.certain(), lsn, durable=True)
    return SourcePosition(snapshot, lsn, Lsn.parse(flushed) >= lsn)


def durable_position(conn: Connection) -> SourcePosition:
    """Read the current snapshot, after the server has flushed all commits that it sees. Raises psycopg.Error.

    The connection is in no transaction. With synchronous_commit off, a crash could lose visible commits, and the server
    would assign their xids again.
    """
    seen = current_position(conn)
    if not seen.durable:
        _flush(conn)
    return seen


def _flush(conn: Connection) -> None:
    """Let the server flush its WAL, by a commit that waits for that."""
    with conn.transaction():
        conn.execute("set transaction read write")
        conn.execute("set local synchronous_commit = local")
        conn.execute("select pg_logical_emit_message(true, 'relay', '')")


def server_of(conn: Connection) -> tuple[str, int, bool]:
    """Read the server's system identifier, its timeline, and whether it is a standby.

    A standby that has just followed another timeline may still report the former one.
    """
    (row,) = conn.execute(
        """
        select s.system_identifier::text,
               case when standby then greatest(c.timeline_id, r.min_recovery_end_timeline,
                                               (select received_tli from pg_stat_wal_receiver))
                    else ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int end,
               standby
          from pg_control_system() as s, pg_control_checkpoint() as c, pg_control_recovery() as r,
               pg_is_in_recovery() as standby
        """
    )
    identifier, timeline, standby = row
    return identifier, timeline, standby


def end_before(lsn: Lsn, segment: int) -> Lsn:
    """The end of the last record before the insert position `lsn`; `segment` is the size of WAL segments in bytes.

    The insert position may be after the header of a page that has no record yet.
    """
    header = _PAGE_HEADER if lsn % segment >= _PAGE else _SEGMENT_HEADER
    return Lsn(lsn - header) if lsn % _PAGE == header else lsn
