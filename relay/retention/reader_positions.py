"""Notes in the source how far each reader of the outbox is: `relay.readers`.

A row may be removed when every reader's snapshot sees it. A snapshot noted earlier sees no more than the reader has
read, so that a late note cannot remove a row too early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from psycopg import sql
from psycopg.rows import class_row

from relay.config.settings import Settings
from relay.config.source import SourceSettings
from relay.faults import ConfigurationError
from relay.model.snapshots import Snapshot
from relay.store.connections import Connection, database_identity

_POSITIONS = """
    select reader, snapshot::text,
           case when reader = '' then
               array(select distinct c_offset from relay.dead_letter_queue
                      where group_id = %(group)s and by_reference and status in ('dead', 'replaying')
                        and c_offset is not null)
           else '{}' end
      from (select '' as reader,
                   (select snapshot from relay.chain(%(group)s) order by pg_snapshot_xmin(snapshot) limit 1) as snapshot
             union all
            -- One that has lost its positions holds everything.
            select sink, case when s.number is null then '1:1:' else s.snapshot end
              from relay.sink_claims left join relay.sinks as s using (group_id, sink) where group_id = %(group)s
             union all
            -- What a fill has passed by, since it was deferred, is read again.
            select 'queue ' || q.name, '1:1:' from relay.queue_fills as f join relay.queues as q on q.id = f.queue_id
             where q.group_id = %(group)s and f.ended_at is null) as p
     order by reader
"""

_NOTE = """
    insert into relay.readers as r (group_id, target, reader, snapshot, by_reference, outbox)
    select %(group)s, %(target)s, n.reader, n.snapshot::pg_snapshot, n.by_reference::bigint[], %(outbox)s
      from unnest(%(readers)s::text[], %(snapshots)s::text[], %(by_reference)s::text[])
           as n (reader, snapshot, by_reference)
     where not exists (
               -- A row that a conflict finds is locked, even where nothing of it is changed.
               select from relay.readers as r
                where (r.group_id, r.target, r.reader) = (%(group)s, %(target)s, n.reader)
                  and (r.given_up_at is not null
                       or (r.snapshot::text, r.by_reference::text, r.outbox)
                          is not distinct from (n.snapshot, n.by_reference, %(outbox)s)
                          and r.noted_at >= now() - interval '1 minute'))
    on conflict (group_id, target, reader) do update
       set snapshot = excluded.snapshot, by_reference = excluded.by_reference, outbox = excluded.outbox,
           noted_at = now(),
           moved_at = case when r.snapshot::text is distinct from excluded.snapshot::text then now() else r.moved_at end
     where r.given_up_at is null
"""
_NOTE_ALL = sql.SQL(
    """
    with noted as ({}),
         gone as (delete from relay.readers
                   where group_id = %(group)s and target = %(target)s and reader <> all (%(readers)s))
    select reader from relay.readers
     where group_id = %(group)s and target = %(target)s and reader = any (%(readers)s) and given_up_at is not null
     order by 1
    """
).format(sql.SQL(_NOTE))


_MAX_LAG = sql.SQL(
    "(select l.max_lag from relay.log_readers as l"
    " where (r.group_id, r.target, r.reader) = ('', 'relay.declare_reader', l.name))"
)


@dataclass(frozen=True, slots=True)
class OutboxReader:
    """A reader of the outbox. `unread_since` is the c_ts of its oldest unread row, None if it has read all rows.

    `reader` is the name of a sink, empty for the target of the group.
    """

    group_id: str
    target: str
    reader: str
    noted_at: datetime
    given_up_at: datetime | None
    unread_since: datetime | None
    max_lag: timedelta | None = None
    """Its own limit, instead of `retention.max_lag`."""

    @property
    def name(self) -> str:
        """The group, and the name of the sink if it is one, as text."""
        return " ".join(filter(None, (self.group_id, self.reader)))


def of_queue(queue: str) -> str:
    """Return the name of the reader that fills a queue from the log."""
    return f"queue {queue}"


def note(
    source: Connection, target: Connection, group: str, outbox: str
) -> tuple[list[str], list[str]]:
    """Note in the source how far the readers of a group are; returns the names of all, and of those given up.

    `outbox` is the table that they read. A reader that was given up remains given up. Readers that no longer exist are
    deleted. Raises psycopg.Error.
    """
    positions = target.execute(_POSITIONS, {"group": group}).fetchall()
    names = [reader for reader, _, _ in positions]
    rows = source.execute(
        _NOTE_ALL,
        {
            "group": group,
            "target": database_identity(target),
            "outbox": outbox,
            "readers": names,
            "snapshots": [snapshot for _, snapshot, _ in positions],
            "by_reference": [
                "{" + ",".join(map(str, numbers)) + "}" for _, _, numbers in positions
            ],
        },
    )
    return names, [name for (name,) in rows]


def note_reader(source: Connection, name: str, snapshot: str, outbox: str) -> None:
    """Note how far a Spark query is, a reader that belongs to no group.

    Raises ConfigurationError if it was given up.
    """
    given_up_rows = source.execute(
        "select from relay.readers where (group_id, target, reader) = ('', '', %s) and given_up_at is not null",
        (name,),
    )
    if given_up_rows.rowcount:
        raise ConfigurationError(
            f"reader: {name!r} was given up by retention, and rows that it has not read may be gone: begin with a new "
            "checkpoint and another name"
        )
    source.execute(
        _NOTE,
        {
            "group": "",
            "target": "",
            "outbox": outbox,
            "readers": [name],
            "snapshots": [snapshot],
            "by_reference": ["{}"],
        },
    )


def readers(source: Connection, settings: Settings) -> list[OutboxReader]:
    """List the readers of the outbox, with the time of the oldest unread row. Needs c_ts. Raises psycopg.Error."""
    statement = sql.SQL(
        """
        select r.group_id, r.target, r.reader, r.noted_at, r.given_up_at,
               (select o.c_ts from {table} as o
                 where o.c_xid >= pg_snapshot_xmin(r.snapshot) and not pg_visible_in_snapshot(o.c_xid, r.snapshot)
                 order by o.c_xid limit 1) as unread_since,
               {max_lag} as max_lag
          from relay.readers as r where coalesce(r.outbox, {outbox}) = {outbox} order by 1, 2, 3
        """
    ).format(
        table=sql.Identifier(*settings.source.table_name),
        outbox=sql.Literal(settings.source.table),
        max_lag=_MAX_LAG if settings.source.owns_table else sql.NULL,
    )
    with source.cursor(row_factory=class_row(OutboxReader)) as cursor:
        return cursor.execute(statement).fetchall()


def noted(source: Connection, group: str, outbox: str) -> list[tuple[str, Snapshot, datetime]]:
    """List the last known snapshot of each reader of a group, '' is the target, and when it was noted.

    Of groups of the same name in several targets, it is the one that was noted last. Raises psycopg.Error.
    """
    rows = source.execute(
        """
        select distinct on (reader) reader, snapshot::text, noted_at from relay.readers
         where group_id = %s and coalesce(outbox, %s) = %s and snapshot is not null order by reader, noted_at desc
        """,
        (group, outbox, outbox),
    )
    return [(name, Snapshot.parse(text), noted_at) for name, text, noted_at in rows]


def lagging(
    candidates: Sequence[OutboxReader], present: datetime, max_lag: timedelta | None
) -> list[OutboxReader]:
    """Return the readers that are not given up, and have unread rows older than their own limit or else `max_lag`."""
    return [
        each
        for each in candidates
        if each.given_up_at is None
        and each.unread_since is not None
        and (limit := each.max_lag or max_lag) is not None
        and present - each.unread_since > limit
    ]


def give_up(source: Connection, reader: OutboxReader) -> bool:
    """Give a reader up: retention no longer keeps rows for it.

    Returns False while another session has it in an open transaction. Raises psycopg.Error.
    """
    return bool(
        source.execute(
            """
            update relay.readers set given_up_at = now()
             where (group_id, target, reader) in (
                   select group_id, target, reader from relay.readers
                    where group_id = %s and target = %s and reader = %s for update skip locked)
            """,
            (reader.group_id, reader.target, reader.reader),
        ).rowcount
    )


def given_up(source: Connection, target: Connection, group: str) -> list[str]:
    """List the readers of a group that were given up: sinks by name, '' is the target. Raises psycopg.Error."""
    rows = source.execute(
        "select reader from relay.readers where group_id = %s and target = %s and given_up_at is not null order by 1",
        (group, database_identity(target)),
    )
    return [str(name) for (name,) in rows]


def given_up_readers(source: Connection) -> list[str]:
    """List the readers of all groups that were given up, as text. Raises psycopg.Error."""
    rows = source.execute(
        "select concat_ws(' ', nullif(group_id, ''), nullif(reader, '')) from relay.readers"
        " where given_up_at is not null order by 1"
    )
    return [str(name) for (name,) in rows]


def accept(
    source: Connection, target: Connection, settings: Settings, names: Sequence[str]
) -> None:
    """Note readers that an operator has moved; they are no longer given up. Raises psycopg.Error."""
    source.execute(
        "delete from relay.readers where group_id = %s and target = %s and reader = any (%s)",
        (settings.group, database_identity(target), list(names)),
    )
    note(source, target, settings.group, settings.source.table)


def retain(source: Connection, of: SourceSettings) -> bool:
    """Grant relay the right to remove rows of the outbox that all readers are past; returns whether it is new.

    Needs the rights of the table's owner. Raises psycopg.Error.
    """
    if source.execute(
        "select where has_table_privilege('relay.removed', 'select, delete')"
    ).rowcount:
        # Removals in another cluster, which a dump has brought, before transactions of this one come so far.
        source.execute(
            "delete from relay.removed where newest >= pg_snapshot_xmax(pg_current_snapshot())"
        )
    if source.execute("select from relay.retained where outbox = %s", (of.table,)).rowcount:
        return False
    source.execute(
        "select relay.retain(%s::regclass, %s, %s)",
        (sql.Identifier(*of.table_name).as_string(source), of.table, of.mapping["c_offset"]),
    )
    return True
