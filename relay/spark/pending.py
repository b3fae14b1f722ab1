"""Finds the contents of a Spark sink's next batch: a difference of the outbox, and due deferred transactions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from psycopg import sql

from relay.config.settings import Settings
from relay.source.outbox.differences import Difference, condition, cut
from relay.source.server import durable_position
from relay.spark import frames, replays
from relay.spark.reading import MappedTable
from relay.store.connections import Connection
from relay.store.deferred import due as deferred_due
from relay.store.positions.sinks import BEFORE_FIRST, SinkState
from relay.store.positions.spark_batches import Contents


@dataclass(frozen=True, slots=True)
class PendingBatch:
    """The contents of the next batch; `is_full` says that it need not wait for more events."""

    contents: Contents
    due: list[deferred_due.DueTransaction]
    is_full: bool

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
) -> PendingBatch | None:
    """The next batch of a sink; None if its position is where the source is. Raises psycopg.Error."""
    position = state.position
    if position.snapshot is None:
        return None
    seen = durable_position(source)
    end = position.following or seen.snapshot
    if not (seen.snapshot.covers(position.snapshot) and seen.snapshot.covers(end)):
        # A standby may lag.
        return None
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
    due = replays.due(target, settings, sink)
    if count and not has_rows(source, table, contents):
        contents = replace(contents, rows=0)
    if not (contents.rows or due or count or position.following is not None):
        return None
    if due and not count:
        # Without new rows the position stays.
        contents = replace(contents, after=position.snapshot, left_out=())
    return PendingBatch(contents, due, count >= most or position.following is not None)


def has_rows(source: Connection, table: MappedTable, contents: Contents) -> bool:
    """Whether a batch's difference has rows that are not left out of it. Raises psycopg.Error."""
    wanted = frames.left_out(table, contents)
    if wanted is None:
        return True
    cursor = source.execute(
        sql.SQL("select from {} where {} and {} limit 1").format(
            table.identifier,
            condition(Difference(contents.before, contents.after)),
            wanted,
        ),
        prepare=False,
    )
    return cursor.rowcount > 0
