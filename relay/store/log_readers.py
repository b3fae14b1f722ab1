"""The readers of `relay.declare_reader`: their rows in the source, and the functions that move and drop them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import psycopg
from psycopg.rows import class_row

_LISTED = """
    with claims as materialized (
        select l.objid, max(l.pid) as pid from pg_locks as l
         where l.locktype = 'advisory' and l.classid = x'72647263'::int::oid and l.objsubid = 2 and l.granted
           and l.database = (select d.oid from pg_database as d where d.datname = current_database())
         group by l.objid)
    select r.name, r.owner, r.match, r.expires, r.max_lag, r.created_at, p.moved_at,
           format('%%s/%%s@%%s', p.number, p.snapshot, relay.log_origin(r.history)) as position, h.given_up_at,
           not is_present.history as other_history,
           r.condition::text as where, r.params, r.lane_of, r.lane, r.lanes, r.lane_key,
           c.pid,
           coalesce(extract(epoch from clock_timestamp() - case when unread.c_ts is not null then
                        greatest(least(unread.c_ts, '9999-12-30'), '0001-01-02') end), 0)::float8 as lag_seconds
      from relay.log_readers as r
      join lateral (select * from relay.log_positions as n
                     where n.reader = r.id order by n.number desc limit 1) as p on true
      join relay.readers as h on (h.group_id, h.target, h.reader) = ('', 'relay.declare_reader', r.name)
     cross join lateral (select coalesce(relay.holds_witness(r.history), false)) as is_present (history)
      left join claims as c on c.objid = (r.id %% 2147483648)::oid
      left join lateral (
          select coalesce((to_jsonb(o) ->> 'c_ts')::timestamptz, o.event_ts) as c_ts from public.outbox_message_t as o
           where o.c_xid >= case when is_present.history then pg_snapshot_xmin(p.snapshot) else '0' end
             and not (is_present.history and pg_visible_in_snapshot(o.c_xid, p.snapshot))
           order by o.c_xid limit 1) as unread on true
     where %(name)s::text is null or %(name)s in (r.name, r.lane_of)
     order by coalesce(r.lane_of, r.name), r.lane
"""


@dataclass(frozen=True, slots=True)
class ReaderRow:
    """A reader, and where it is. `pid` is the server's process for the session that has claimed it, if there is one.

    `lag_seconds` is the age of the oldest event that it has not read, whether it matches or not; 0 without any. With
    `other_history` its position is of another history of the database: it may have read nothing of this one, and is
    refused until `seek`.
    """

    name: str
    owner: str
    match: Mapping[str, Any]
    expires: timedelta | None
    max_lag: timedelta | None
    created_at: datetime
    moved_at: datetime
    position: str
    given_up_at: datetime | None
    other_history: bool
    where: str | None
    params: Mapping[str, Any] | None
    lane_of: str | None
    lane: int | None
    lanes: int | None
    lane_key: str | None
    pid: int | None
    lag_seconds: float


def listed(source: psycopg.Connection[Any], name: str | None = None) -> list[ReaderRow]:
    """Read all readers, or the one of a name, or its lanes in their order. Raises psycopg.Error."""
    with source.cursor(row_factory=class_row(ReaderRow)) as cursor:
        return cursor.execute(_LISTED, {"name": name}).fetchall()


def has_history(source: psycopg.Connection[Any]) -> bool:
    """Whether positions of readers can be stored: not in a copy until `relay init` has run. Raises psycopg.Error."""
    row = source.execute("select relay.history() is not null").fetchone()
    return bool(row and row[0])


def of_other_histories(source: psycopg.Connection[Any]) -> list[str]:
    """List the readers whose positions are of another history of the database, once each. Raises psycopg.Error."""
    rows = source.execute(
        """
        select distinct coalesce(lane_of, name) from relay.log_readers
         where not coalesce(relay.holds_witness(history), false) order by 1
        """
    )
    return [str(name) for (name,) in rows]


def bind(source: psycopg.Connection[Any]) -> int:
    """Give positions the present history; returns how many there are.

    Those of a schema without witnesses, and those of a dump of this server, whose transaction ids go on; but none that
    is ahead of it, which is of another one. Raises psycopg.Error.
    """
    return source.execute(
        """
        update relay.log_readers as r set history = relay.history()
         where (r.history is null
                or not relay.holds_witness(r.history)
                   and exists (select from relay.witnesses as w, pg_control_system() as present
                                where w.id = r.history and w.cluster = present.system_identifier))
           and (select pg_snapshot_xmax(p.snapshot) from relay.log_positions as p
                 where p.reader = r.id order by p.number desc limit 1) <= pg_snapshot_xmax(pg_current_snapshot())
        """
    ).rowcount


def seek(source: psycopg.Connection[Any], name: str, to: str) -> None:
    """Move a reader to `now`, `beginning` or a position. Raises psycopg.Error."""
    source.execute("select relay.seek(%s, %s)", (name, to))


def drop(source: psycopg.Connection[Any], name: str) -> None:
    """Drop a reader. Raises psycopg.Error."""
    source.execute("select relay.drop_reader(%s)", (name,))
