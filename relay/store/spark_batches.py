"""Events on their way to a DataFrame writer: `relay.spark_portions` and `relay.spark_events`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import class_row, scalar_row

from relay.events import EVENT_FIELDS, SQL_TYPES

Connection = psycopg.Connection[Any]

_SPACE = 0x73706172  # "spar"


@dataclass(frozen=True, slots=True)
class SparkBatch:
    """What is written together. The same number and the same id always mean the same events.

    `number` counts the batches of a target; `id` is the batch's own in every target that ever shares its destination,
    a target restored from a backup included.
    """

    number: int
    id: str
    host_buckets: int
    portions: list[int]
    sizes: list[int]
    """How many events each portion has."""


def staging(group: str, handler: str) -> str:
    """The statement that puts the relation `batch` aside for a handler, as a portion of its own."""
    fields = sql.SQL(", ").join(map(sql.Identifier, EVENT_FIELDS))
    return (
        sql.SQL(
            "with portion as (insert into relay.spark_portions (group_id, handler, events)"
            " select {group}, {handler}, count(*) from batch returning id)"
            " insert into relay.spark_events (portion, {fields}) select portion.id, {columns} from portion, batch"
        )
        .format(
            group=sql.Literal(group),
            handler=sql.Literal(handler),
            fields=fields,
            columns=sql.SQL(", ").join(sql.Identifier("batch", name) for name in EVENT_FIELDS),
        )
        .as_string()
    )


def claim(conn: Connection, group: str, handler: str) -> bool:
    """Whether this session is the one that writes the handler's batches; if so, it is until its end."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        cursor.execute(
            "select pg_try_advisory_lock(%s, hashtext(%s))", (_SPACE, f"{group}/{handler}")
        )
        return bool(cursor.fetchone())


def take(
    conn: Connection, group: str, handler: str, events: int, seconds: float, host_buckets: int
) -> SparkBatch | None:
    """The batch that was begun and not finished, or a new one, for so many buckets.

    A new one is due when so many events are staged, or when the oldest is so many seconds old.
    """
    with conn.transaction():
        return _begun(conn, group, handler) or _begin(
            conn, group, handler, events, seconds, host_buckets
        )


def _begun(conn: Connection, group: str, handler: str) -> SparkBatch | None:
    with conn.cursor(row_factory=class_row(SparkBatch)) as cursor:
        return cursor.execute(
            """
            select batch as number, batch_id as id, host_buckets,
                   array_agg(id order by id) as portions, array_agg(events order by id) as sizes
              from relay.spark_portions
             where group_id = %s and handler = %s and batch is not null
             group by batch, batch_id, host_buckets order by batch limit 1
            """,
            (group, handler),
        ).fetchone()


def _begin(
    conn: Connection, group: str, handler: str, events: int, seconds: float, host_buckets: int
) -> SparkBatch | None:
    with conn.cursor(row_factory=class_row(SparkBatch)) as cursor:
        return cursor.execute(
            """
            with staged as (
                select id, staged_at, sum(events) over (order by id) as total, events
                  from relay.spark_portions
                 where group_id = %(group)s and handler = %(handler)s and batch is null
            ), due as (
                select nextval('relay.spark_batches') as number, gen_random_uuid() as id from staged
                having max(total) >= %(events)s
                    or min(staged_at) <= clock_timestamp() - make_interval(secs => %(seconds)s)
            ), begun as (
                update relay.spark_portions as portion
                   set batch        = due.number,
                       batch_id     = to_char(due.number, 'FM000000000000') || '-' || due.id,
                       host_buckets = %(host_buckets)s
                  from staged, due
                 where portion.id = staged.id and staged.total - staged.events < %(events)s
                returning portion.id, portion.events, portion.batch, portion.batch_id, portion.host_buckets
            )
            select batch as number, batch_id as id, host_buckets,
                   array_agg(id order by id) as portions, array_agg(events order by id) as sizes
              from begun group by batch, batch_id, host_buckets
            """,
            {
                "group": group,
                "handler": handler,
                "events": events,
                "seconds": seconds,
                "host_buckets": host_buckets,
            },
        ).fetchone()


def finish(conn: Connection, batch: SparkBatch) -> None:
    """The batch is written: forget its events."""
    with conn.transaction():
        conn.execute("delete from relay.spark_events where portion = any(%s)", (batch.portions,))
        conn.execute("delete from relay.spark_portions where id = any(%s)", (batch.portions,))


def staged(conn: Connection, group: str) -> int:
    """How many events of the group are not written yet."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        return int(
            cursor.execute(
                "select sum(events) from relay.spark_portions where group_id = %s",
                (group,),
            ).fetchone()
            or 0
        )


def staged_for(conn: Connection, group: str) -> dict[str, int]:
    """How many events are staged for each handler."""
    return dict(
        conn.execute(
            "select handler, sum(events)::bigint from relay.spark_portions where group_id = %s group by 1 order by 1",
            (group,),
        ).fetchall()
    )


def rows(conn: Connection, portion: int, buckets: int, at_once: int) -> Iterator[list[Any]]:
    """The events of a portion, so many at a time: fields, day of event_ts since 1970, bucket of the host.

    Times are microseconds since 1970, since PostgreSQL knows some that Python does not; infinity is null.
    """
    with conn.transaction(), conn.cursor(name="relay_spark") as cursor:
        cursor.execute(_ROWS, {"portion": portion, "buckets": buckets})
        while some := cursor.fetchmany(at_once):
            yield some


def _plain(field: str) -> sql.Composed:
    kind = SQL_TYPES[field]
    if kind == "timestamptz":
        text = "case when isfinite({0}) then (extract(epoch from {0}) * 1000000)::bigint end"
    else:
        text = "{0}" if kind in ("bigint", "int") else "{0}::text"
    return sql.SQL(text).format(sql.Identifier(field))


_ROWS = sql.SQL(
    """
    select {fields},
           case when isfinite(event_ts) then (event_ts at time zone 'UTC')::date - date '1970-01-01' end,
           (abs(hashtext(host_id::text)::bigint) %% %(buckets)s)::int
      from relay.spark_events where portion = %(portion)s order by c_offset
    """
).format(fields=sql.SQL(", ").join(map(_plain, EVENT_FIELDS)))
