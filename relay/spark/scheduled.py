"""Keeps events with a later `deliver_at` out of a Spark sink's batches: their commits are deferred for the sink."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
from psycopg import sql

from relay.config.settings import Settings
from relay.model.transactions import Undecoded
from relay.pipeline.deferral import Ordering, delivery_times
from relay.pipeline.routing import BatchRouter
from relay.source.outbox.differences import XID, Difference, condition
from relay.source.outbox.rows import OutboxRows, Wanted
from relay.spark.frames import left_out
from relay.spark.reading import MappedTable, columns
from relay.store import clock
from relay.store.connections import Connection
from relay.store.deferred import Deferral
from relay.store.positions.spark_batches import Contents


def commits(
    source: Connection, target: Connection, table: MappedTable, contents: Contents
) -> list[int]:
    """The commits of a batch with an event for later, by the target's clock: full xids. Raises psycopg.Error.

    Rows without c_xid are left out: they are older than relay.
    """
    column = table.mapping["deliver_at"]
    if column not in columns(source, table):
        return []
    wanted = left_out(table, contents)
    rows = source.execute(
        sql.SQL(
            "select distinct {xid}::text::bigint from {table}"
            " where {between} and {wanted} and {xid} is not null and {column}::timestamptz > {now}"
        ).format(
            xid=XID,
            table=table.identifier,
            between=condition(Difference(contents.before, contents.after)),
            wanted=sql.SQL("true") if wanted is None else wanted,
            column=sql.Identifier(column),
            now=sql.Literal(clock.present(target)),
        ),
        prepare=False,
    )
    return sorted(xid for (xid,) in rows)


def entries(
    source: Connection, settings: Settings, sink: str, xids: Collection[int]
) -> Iterator[tuple[Undecoded, Deferral]]:
    """The parts of commits for a sink, to be deferred: until the latest `deliver_at`, without one until the next batch.

    Raises psycopg.Error, TooLarge and RelayError as `OutboxRows.commits` does.
    """
    router = BatchRouter(settings)
    ordering = Ordering({sink: settings.handlers[sink]})
    wanted = Wanted(np.array(sorted(xids), np.int64), np.zeros(len(xids), np.int64))
    for transactions in OutboxRows(settings).commits(source, wanted):
        routed = router.route(transactions).parts.get(sink)
        if routed is None:
            continue
        times = delivery_times(routed.transactions, router)
        for index, (rows, events) in enumerate(zip(routed.transactions, routed, strict=True)):
            keys = ordering.delivery_keys(sink, rows.hosts, [events])
            yield rows, Deferral(keys, holds=False, until=times.get(index))
