"""What the source's server says of itself: who it is, what its sessions see, and how far its WAL is."""

from __future__ import annotations

from dataclasses import dataclass

from relay.model.events import Lsn
from relay.model.snapshots import Snapshot
from relay.store.connections import Connection

_PAGE = 8192
_PAGE_HEADER, _SEGMENT_HEADER = 24, 40
"""What a page of the WAL begins with before its first record, and the first page of a segment."""


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """What was visible at a moment, and a position of the WAL that all of it lies below.

    `durable` says that a crash of the server would not take any of it back.
    """

    snapshot: Snapshot
    lsn: Lsn
    durable: bool


def current_position(conn: Connection) -> SourcePosition:
    """What sessions see now. Raises psycopg.Error.

    Of a hot standby only what is certain: its snapshot has no list of the transactions in progress.
    """
    (found,) = conn.execute(
        """
        select pg_current_snapshot()::text, standby,
               (case when standby then pg_last_wal_replay_lsn() else pg_current_wal_insert_lsn() end)::text,
               case when not standby then pg_current_wal_flush_lsn()::text end,
               pg_size_bytes(current_setting('wal_segment_size'))
          from pg_is_in_recovery() as standby
        """
    )
    text, standby, position, flushed, segment = found
    snapshot, lsn = Snapshot.parse(text), end_before(Lsn.parse(position or "0/0"), segment)
    if standby:
        return SourcePosition(snapshot.certain(), lsn, durable=True)
    return SourcePosition(snapshot, lsn, Lsn.parse(flushed) >= lsn)


def durable_position(conn: Connection) -> SourcePosition:
    """What sessions see now, and the server has on its disk. The connection is in no transaction. Raises psycopg.Error.

    With synchronous_commit off, a crash would take back what is visible, and give its xid again.
    """
    seen = current_position(conn)
    if not seen.durable:
        _flush(conn)
    return seen


def _flush(conn: Connection) -> None:
    """Let the server write its WAL to disk, which it may put off while a transaction is open: by a commit."""
    with conn.transaction():
        conn.execute("set transaction read write")
        conn.execute("set local synchronous_commit = local")
        conn.execute("select pg_logical_emit_message(true, 'relay', '')")


def server_of(conn: Connection) -> tuple[str, int, bool]:
    """The server's system identifier, its timeline, and whether it is a standby.

    A standby that has just followed another timeline may still tell the former one.
    """
    (found,) = conn.execute(
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
    identifier, timeline, standby = found
    return identifier, timeline, standby


def end_before(lsn: Lsn, segment: int) -> Lsn:
    """Where the last record before a position ends, with segments of so many bytes.

    The next one is to be inserted after the header of a page that nothing may have been written to yet.
    """
    header = _PAGE_HEADER if lsn % segment >= _PAGE else _SEGMENT_HEADER
    return Lsn(lsn - header) if lsn % _PAGE == header else lsn
