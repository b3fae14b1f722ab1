"""What a Spark sink's next batch has: a difference of the outbox, and due deferred transactions.

Replayed dead letters are such transactions: their events are read from `relay.deferred` and travel with the batch.
Commits with an event for later (`deliver_at`) are left out of it, and deferred for the sink.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from psycopg import sql

from relay.config.settings import Settings
from relay.model.batch import Share
from relay.model.events import EVENT_FIELDS, SQL_TYPES, Event
from relay.model.transactions import Routed, Undecoded
from relay.pipeline.deferral import Ordering
from relay.pipeline.routing import BatchRouter
from relay.source.outbox import differences
from relay.source.outbox.cursor import Cursor
from relay.source.outbox.differences import XID, Difference, array, cut
from relay.source.outbox.selection import whole
from relay.source.server import durable_position
from relay.source.witnesses import cover
from relay.spark import frames
from relay.spark.reading import MappedTable, columns
from relay.store import clock
from relay.store.completeness import Completeness, Moments
from relay.store.connections import Connection
from relay.store.deferred import Deferral, cancelled, event_key, has_requests, ids_of
from relay.store.deferred import due as deferred_due
from relay.store.deferred.due import DueTransaction
from relay.store.positions import spark_batches
from relay.store.positions.sinks import BEFORE_FIRST, SinkState
from relay.store.positions.spark_batches import Contents


@dataclass(frozen=True, slots=True)
class PendingBatch:
    """The contents of the next batch; `is_full` says that it need not wait for more events.

    `moves`: the contents end after the sink's position. Where nothing is due and no row is new, the position stays, and
    `complete` says up to where the sink has everything all the same.
    """

    contents: Contents
    due: list[DueTransaction]
    is_full: bool
    moves: bool
    complete: Completeness

    @property
    def is_empty(self) -> bool:
        """Whether the sink has received everything up to the end of the contents, and nothing is due."""
        return not (self.contents.rows or self.due)


def find(
    source: Connection,
    target: Connection,
    settings: Settings,
    sink: str,
    table: MappedTable,
    state: SinkState,
    moments: Moments,
) -> PendingBatch | None:
    """The next batch of a sink; None where the source cannot tell, or nothing is polled. Raises psycopg.Error.

    `moments` are those at which the source was read for the sink; the present one is added.
    """
    position = state.position
    if position.snapshot is None:
        return None
    seen = durable_position(source)
    end = position.following or seen.snapshot
    if not seen.snapshot.shows(position.snapshot, end):
        # A standby may lag.
        return None
    moments.note(seen.snapshot, seen.at)
    most = settings.spark_handlers[sink].max_events
    after, count = cut(source, table.identifier, Difference(position.snapshot, end), most)
    contents = Contents(
        position.snapshot,
        after,
        position.polled_offset if position.following else BEFORE_FIRST,
        state.done.tolist(),
        seen.lsn,
        count,
    )
    due = _due(target, settings, sink)
    if count and not has_rows(source, table, contents):
        contents = replace(contents, rows=0)
    complete = moments.reached(after)
    moves = bool(count) or position.following is not None
    if moves:
        cover(source, target, settings.group, seen.snapshot)
    if due and not count:
        # Without new rows the position stays.
        contents = replace(contents, after=position.snapshot, left_out=())
    # What the snapshot of a position without new rows sees is not all that it sees later, but the rows are the same.
    contents = replace(contents, complete_before=complete.before)
    is_full = count >= most or position.following is not None
    return PendingBatch(contents, due, is_full, moves, complete)


def has_rows(source: Connection, table: MappedTable, contents: Contents) -> bool:
    """Whether a batch's difference has rows that are not left out of it. Raises psycopg.Error."""
    if frames.left_out(table, contents) is None:
        return True
    return differences.has_rows(source, table.identifier, frames.rows_of(table, contents))


def published(
    source: Connection, table: MappedTable, dead: Sequence[tuple[int, int | None, str | None]]
) -> list[int]:
    """Those of some commits, by full xid, that have one of these events in the outbox. Raises psycopg.Error.

    An event is its full xid, c_offset and id; without both of the last ones it may be any event of the commit.
    """
    if not dead:
        return []
    xids, offsets, ids = zip(*dead, strict=True)
    column = table.mapping["id"]
    rows = source.execute(
        sql.SQL(
            "select distinct dead.xid::text::bigint"
            " from unnest({xids}, %s::bigint[], %s::text[]) as dead (xid, c_offset, id)"
            " join {table} on {table}.{own_xid} = dead.xid and coalesce({table}.{offset} = dead.c_offset, true)"
            " and coalesce({own_id} = dead.id, true)"
        ).format(
            xids=array(xids, "xid8"),
            table=table.identifier,
            own_xid=XID,
            offset=sql.Identifier(table.mapping["c_offset"]),
            own_id=sql.SQL("concat({}.{})").format(table.identifier, sql.Identifier(column))
            if column
            else sql.SQL("null"),
        ),
        (list(offsets), list(ids)),
        prepare=False,
    )
    return sorted(xid for (xid,) in rows)


_REPLAYS = 1_000
"""The most deferred transactions in a batch."""
_REPLAYED_BYTES = 64 * 1024 * 1024
"""The most bytes of them in a batch, which may exceed it by its first one: they pass through the driver."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _due(conn: Connection, settings: Settings, sink: str) -> list[DueTransaction]:
    """The due transactions that belong in the next batch, of one table layout. Raises psycopg.Error."""
    due = deferred_due.heads(conn, settings.group, sink, _REPLAYS, _REPLAYED_BYTES)
    return next(deferred_due.runs(due), [])


def packed_events(
    conn: Connection,
    settings: Settings,
    wanted: Sequence[DueTransaction],
    host_buckets: int,
) -> bytes:
    """The events of deferred transactions, as an Arrow stream. Raises psycopg.Error."""
    routed = deferred_part(conn, settings, wanted)
    events = [event for transaction in routed for event in transaction.events]
    hosts = {event.text("host_id") or "" for event in events}
    hashes = spark_batches.hashes(conn, sorted(hosts))
    rows = list(_rows(events, hashes, host_buckets, bool(settings.source.headers)))
    return frames.packed_rows(rows, frames.columns(settings.source))


def _rows(
    events: Sequence[Event], hashes: Mapping[str, int], host_buckets: int, with_headers: bool
) -> Iterator[list[Any]]:
    for event in events:
        at = _microseconds(event.text("event_ts"))
        yield [
            *(_value(event, field) for field in EVENT_FIELDS),
            None if at is None else at // 86_400_000_000,
            hashes[event.text("host_id") or ""] % host_buckets,
            *([list(event.headers.items())] if with_headers else []),
        ]


def _value(event: Event, field: str) -> Any:
    text = event.text(field)
    kind = SQL_TYPES[field]
    if kind == "timestamptz":
        return _microseconds(text)
    return int(text) if text is not None and kind in ("bigint", "int") else text


def _microseconds(text: str | None) -> int | None:
    """A time in microseconds since 1970; None outside the years 1 to 9999, as `relay.spark.reading` has it."""
    if text is None:
        return None
    try:
        return (datetime.fromisoformat(text) - _EPOCH) // timedelta(microseconds=1)
    except ValueError:
        return None


def scheduled_commits(
    source: Connection, target: Connection, table: MappedTable, contents: Contents
) -> list[int]:
    """The commits of a batch with an event for later, by the target's clock: full xids. Raises psycopg.Error.

    Rows without c_xid are left out: they are older than relay.
    """
    column = table.mapping["deliver_at"]
    if column not in columns(source, table):
        return []
    rows = source.execute(
        sql.SQL(
            "select distinct {xid}::text::bigint from {table}"
            " where {rows} and {xid} is not null and {column}::timestamptz > {now}"
        ).format(
            xid=XID,
            table=table.identifier,
            rows=frames.rows_of(table, contents),
            column=sql.Identifier(column),
            now=sql.Literal(clock.present(target)),
        ),
        prepare=False,
    )
    return sorted(xid for (xid,) in rows)


def cancelled_commits(
    source: Connection, target: Connection, table: MappedTable, contents: Contents
) -> list[int]:
    """The commits of a batch with a scheduled event that somebody has asked to cancel: full xids. Raises psycopg.Error.

    Their time may have passed. Without any request nothing is read from the source.
    """
    column, event_id = table.mapping["deliver_at"], table.mapping["id"]
    if not event_id or column not in columns(source, table) or not has_requests(target):
        return []
    rows = source.execute(
        sql.SQL(
            "select {xid}::text::bigint, concat({id}) from {table}"
            " where {rows} and {xid} is not null and {column} is not null"
        ).format(
            xid=XID,
            id=sql.Identifier(event_id),
            table=table.identifier,
            rows=frames.rows_of(table, contents),
            column=sql.Identifier(column),
        ),
        prepare=False,
    )
    ids: dict[int, list[str]] = {}
    for xid, each in rows:
        ids.setdefault(xid, []).append(event_key(each))
    return sorted(cancelled(target, ids))


def commits(source: Connection, table: MappedTable, contents: Contents) -> list[int]:
    """The commits of a batch, full xids; rows without c_xid, which are older than relay, are of none."""
    if not contents.rows:
        return []
    rows = source.execute(
        sql.SQL(
            "select distinct {xid}::text::bigint from {table} where {rows} and {xid} is not null"
        ).format(xid=XID, table=table.identifier, rows=frames.rows_of(table, contents)),
        prepare=False,
    )
    return sorted(xid for (xid,) in rows)


def parts(
    source: Connection, settings: Settings, router: BatchRouter, sink: str, xids: Collection[int]
) -> Iterator[Routed]:
    """The parts of commits, full xids, that are routed to a sink. Raises as `OutboxRows.commits` does."""
    share = Share((0,), len(xids), np.array(sorted(xids)), np.zeros(len(xids), np.int64))
    for transactions, _ in Cursor(settings, lambda: nullcontext(source)).read([share], whole):
        routed = router.route(transactions).parts.get(sink)
        if routed is not None:
            yield routed


def deferred_part(conn: Connection, settings: Settings, due: Sequence[DueTransaction]) -> Routed:
    """Deferred transactions of one table layout. Raises psycopg.Error."""
    limits = settings.batch
    transactions = deferred_due.transactions(conn, due, limits.max_bytes, limits.spool_directory)
    return Routed(transactions, BatchRouter(settings).decoder(transactions.columns))


def scheduled(
    source: Connection, settings: Settings, sink: str, xids: Collection[int]
) -> Iterator[tuple[Undecoded, Deferral]]:
    """The parts of commits for a sink, to be deferred: until the latest `deliver_at`, without one until the next batch.

    Raises psycopg.Error, TooLarge and RelayError as `OutboxRows.commits` does.
    """
    router = BatchRouter(settings)
    ordering = Ordering({sink: settings.handlers[sink]})
    for routed in parts(source, settings, router, sink, xids):
        times = router.delivery_times(routed.transactions)
        keys = ordering.delivery_keys(sink, routed)
        for index, rows in enumerate(routed.transactions):
            ids = ids_of(rows, routed.decoder)
            yield rows, Deferral(keys[index], False, until=times.get(index), event_ids=ids)
