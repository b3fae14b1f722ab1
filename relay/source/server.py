"""The source's server: its identity and timelines, its snapshot and the end of its WAL, and what it lets relay do.

Managed servers differ from PostgreSQL: they show settings of their own, and give rights by other ways.

Sources: PostgreSQL's `src/backend/access/transam/timeline.c`, which writes and reads `pg_wal/*.history`; PostgreSQL 19
documentation, `effective_wal_level`; documentation of logical replication on Amazon RDS, Cloud SQL, AlloyDB, Azure and
Neon.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import psycopg
from psycopg import sql

from relay.faults import ConfigurationError, first_line
from relay.model.events import Lsn
from relay.model.snapshots import Snapshot
from relay.store.connections import Connection

OLDEST_SERVER = 140000

_WAL_HINTS = {
    "rds.logical_replication": "set rds.logical_replication to 1 in the parameter group, and reboot the instance",
    "cloudsql.logical_decoding": "set the flag cloudsql.logical_decoding to on, which restarts the instance",
    "alloydb.logical_decoding": "set the flag alloydb.logical_decoding to on, which restarts the instance",
    "azure.extensions": "set the server parameter wal_level to logical, and restart the server",
    "neon.timeline_id": "turn on logical replication in the settings of the project",
}
"""What makes a managed server write logical WAL, by a setting that only it has."""

_WAL_HINT = "run `alter system set wal_level = logical` and restart the server"

_RDS_ROLE = "rds_replication"
"""The role whose members may replicate on Amazon RDS and Aurora, where no role can be given the attribute."""

_FUNCTIONS = ("pg_logical_emit_message",)
_OF_SLOTS = ("pg_create_logical_replication_slot", "pg_drop_replication_slot")
"""Functions that relay calls when it needs them, and that cannot be tried without an effect."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_PAGE = 8192
_PAGE_HEADER, _SEGMENT_HEADER = 24, 40
"""The sizes in bytes of the header of a WAL page, and of the first page of a segment."""
_SWITCH = re.compile(r"\s*(\d+)\s+([0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8})(?:\s|$)", re.ASCII)


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """A snapshot, and a position of the WAL at or after the end of every commit that the snapshot sees.

    `durable`: a crash of the server would lose none of these commits. The snapshot sees every transaction whose COMMIT
    had returned before `at`, by the server's clock; None on a hot standby, which cannot tell.
    """

    snapshot: Snapshot
    lsn: Lsn
    durable: bool
    at: datetime | None = None


def current_position(conn: Connection) -> SourcePosition:
    """Read the snapshot that sessions see now. Raises psycopg.Error.

    On a hot standby, whose snapshot has no list of transactions in progress, it sees only what is certain.
    """
    (row,) = conn.execute(
        """
        select pg_current_snapshot()::text, standby,
               (case when standby then pg_last_wal_replay_lsn() else pg_current_wal_insert_lsn() end)::text,
               case when not standby then pg_current_wal_flush_lsn()::text end,
               pg_size_bytes(current_setting('wal_segment_size')),
               -- The time at which the transaction began, which is before its snapshot was taken.
               (extract(epoch from transaction_timestamp()) * 1000000)::bigint
          from pg_is_in_recovery() as standby
        """
    )
    text, standby, position, flushed, segment, began = row
    snapshot, lsn = Snapshot.parse(text), end_before(Lsn.parse(position or "0/0"), segment)
    if standby:
        return SourcePosition(snapshot.certain(), lsn, durable=True)
    at = _EPOCH + timedelta(microseconds=began)
    return SourcePosition(snapshot, lsn, Lsn.parse(flushed) >= lsn, at)


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


def is_standby(conn: Connection) -> bool:
    """Whether the server only replays what another one writes. Raises psycopg.Error."""
    ((standby,),) = conn.execute("select pg_is_in_recovery()")
    return bool(standby)


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


@dataclass(frozen=True, slots=True)
class TimelineSwitch:
    """A former timeline, and the position at which the server left it."""

    timeline: int
    position: Lsn


@dataclass(frozen=True, slots=True)
class TimelineHistory:
    """A server's timeline, and its former timelines, oldest first."""

    timeline: int
    switches: tuple[TimelineSwitch, ...] = ()

    @classmethod
    def parse(cls, timeline: int, text: str) -> TimelineHistory:
        """Parse a timeline's history file: parent, switch point and reason in a line; blank lines; # comments.

        Raises ValueError for a malformed file.
        """
        lines = (line for line in text.splitlines() if line.strip())
        switches = tuple(_switch(line) for line in lines if not line.lstrip().startswith("#"))
        order = [switch.timeline for switch in switches] + [timeline]
        if any(later <= former for former, later in pairwise(order)):
            raise ValueError(f"the history of timeline {timeline} is out of sequence: {order}")
        return cls(timeline, switches)

    def __str__(self) -> str:
        """The history in the form that `parse` reads."""
        return "".join(f"{each.timeline}\t{each.position}\n" for each in self.switches)

    @property
    def timelines(self) -> frozenset[int]:
        """Every timeline of the history."""
        return frozenset(each.timeline for each in self.switches) | {self.timeline}

    def since(self, timeline: int) -> TimelineHistory:
        """The history from a timeline on, without those before it."""
        switches = tuple(each for each in self.switches if each.timeline >= timeline)
        return TimelineHistory(self.timeline, switches)

    def shared_until(self, other: TimelineHistory) -> Lsn | None:
        """The position up to which both histories share WAL; None if both are on the same timeline."""
        shared = Lsn(0)
        for ours, theirs in zip(self._segments(), other._segments(), strict=False):
            if ours[0] != theirs[0]:
                return shared
            if ours[1] != theirs[1]:
                return min(end for end in (ours[1], theirs[1]) if end is not None)
            shared = ours[1] or shared
        return None

    def _segments(self) -> list[tuple[int, Lsn | None]]:
        """Each timeline, and the position at which it was left; None for the current one."""
        return [*((each.timeline, each.position) for each in self.switches), (self.timeline, None)]


def _switch(line: str) -> TimelineSwitch:
    match = _SWITCH.match(line)
    if match is None:
        raise ValueError(f"{line!r} is not a line of a timeline's history")
    return TimelineSwitch(int(match[1]), Lsn.parse(match[2]))


def decodes(version: int, level: str, effective: str | None) -> bool:
    """Whether a server can decode WAL logically.

    From PostgreSQL 19 on (`effective` is not None) the first logical slot raises the level of a server with
    `wal_level = replica`, without a restart.
    """
    if "logical" in (level, effective):
        return True
    return version >= 190000 and effective is not None and level == "replica"


def require_logical_wal(conn: Connection) -> None:
    """Raise ConfigurationError if the server does not write what logical decoding needs."""
    version = conn.info.server_version
    if version < OLDEST_SERVER:
        raise ConfigurationError(
            f"source.dsn: the server is PostgreSQL {version // 10000}, relay needs 14 or later"
        )
    (row,) = conn.execute(
        "select current_setting('wal_level'), current_setting('effective_wal_level', true)"
    )
    level, effective = row
    if not decodes(version, level, effective):
        raise ConfigurationError(
            f"source.dsn: the server runs with wal_level={level}, relay needs logical: {_logical_wal_hint(conn)}, "
            "or set source.mode: poll, which needs no logical WAL"
        )


def _logical_wal_hint(conn: Connection) -> str:
    for setting, hint in _WAL_HINTS.items():
        (row,) = conn.execute("select current_setting(%s, true)", (setting,))
        if row[0] is not None:
            return hint
    return _WAL_HINT


def require_replication_right(conn: Connection) -> None:
    """Raise ConfigurationError if the connection's role may not replicate."""
    (row,) = conn.execute(
        """
        select rolname, rolreplication or rolsuper or coalesce(pg_has_role(oid, to_regrole(%(rds)s), 'member'), false),
               to_regrole(%(rds)s) is not null
          from pg_roles where rolname = current_user
        """,
        {"rds": _RDS_ROLE},
    )
    name, may, grants = row
    if not may:
        hint = f"grant {_RDS_ROLE} to {name}" if grants else f"alter role {name} replication"
        raise ConfigurationError(
            f"source.dsn: the role {name} may not replicate: run `{hint}` as an administrator, or connect as a role "
            "that may"
        )


def give_replication_right(conn: Connection, role: str) -> bool:
    """Let a role replicate, in the way of this server; returns whether that was new.

    Raises ConfigurationError if the server refuses it.
    """
    (row,) = conn.execute(
        """
        select coalesce(pg_has_role(to_regrole(%(role)s), to_regrole(%(rds)s), 'member'), false),
               to_regrole(%(rds)s) is not null,
               coalesce((select rolreplication from pg_roles where rolname = %(role)s), true)
        """,
        {"role": role, "rds": _RDS_ROLE},
    )
    is_member, grants, may = row
    if may or is_member:
        return False
    right = sql.Identifier(role)
    hint = f"grant {_RDS_ROLE} to {role}" if grants else f"alter role {role} replication"
    statement = (
        sql.SQL("grant {} to {}").format(sql.Identifier(_RDS_ROLE), right)
        if grants
        else sql.SQL("alter role {} replication").format(right)
    )
    try:
        with conn.transaction():
            conn.execute(statement)
    except psycopg.errors.InsufficientPrivilege as error:
        raise ConfigurationError(
            f"the role {role} may not replicate ({error.diag.message_primary}): run "
            f"`{hint}` as a superuser, or let relay log in as a role that may"
        ) from None
    return True


def require_functions(conn: Connection, has_slot: bool = True) -> None:
    """Raise ConfigurationError if the server lacks, or refuses the role, a function that relay calls.

    Without `has_slot`, as in mode poll, relay calls none of slots.
    """
    try:
        server_of(conn)
        current_position(conn)
    except (
        psycopg.errors.InsufficientPrivilege,
        psycopg.errors.UndefinedFunction,
        psycopg.errors.FeatureNotSupported,
        psycopg.errors.ObjectNotInPrerequisiteState,
    ) as error:
        raise ConfigurationError(
            f"source.dsn: {first_line(error)}: relay cannot work without it: grant it to the role, or ask who runs the "
            "server"
        ) from None
    rows = conn.execute(
        """
        select name, bool_or(proname is not null)
          from unnest(%s::text[]) as name
          left join pg_proc on proname = name and pronamespace = 'pg_catalog'::regnamespace
         group by name having not coalesce(bool_or(has_function_privilege(pg_proc.oid, 'execute')), false)
        """,
        ([*_FUNCTIONS, *(_OF_SLOTS if has_slot else ())],),
    ).fetchall()
    if not rows:
        return
    name, exists = rows[0]
    hint = (
        f"run `grant execute on function {name} to relay`" if exists else "ask who runs the server"
    )
    raise ConfigurationError(
        f"source.dsn: {'the role may not call' if exists else 'the server has no'} {name}(), which relay needs: {hint}"
    )
