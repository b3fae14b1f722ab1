"""Reads the events of transactions that are deferred for a Spark sink, such as replayed dead letters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from relay.config.settings import Settings
from relay.model.events import EVENT_FIELDS, SQL_TYPES, Event
from relay.model.transactions import Routed
from relay.pipeline.routing import BatchRouter
from relay.spark.frames import columns, pack
from relay.store.connections import Connection
from relay.store.deferred import due as deferred_due
from relay.store.positions import spark_batches

AT_ONCE = 1_000
"""The most deferred transactions in a batch."""
MAX_BYTES = 64 * 1024 * 1024
"""The most bytes of them in a batch, which may exceed it by its first one: they pass through the driver."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def due(conn: Connection, settings: Settings, sink: str) -> list[deferred_due.DueTransaction]:
    """The due transactions that belong in the next batch. Raises psycopg.Error."""
    heads = deferred_due.heads(conn, settings.group, sink, AT_ONCE)
    size = 0
    for number, each in enumerate(heads):
        size += each.size
        if number and size > MAX_BYTES:
            return heads[:number]
    return heads


def packed(
    conn: Connection,
    settings: Settings,
    wanted: Sequence[deferred_due.DueTransaction],
    host_buckets: int,
) -> bytes:
    """The events of deferred transactions, as an Arrow stream. Raises psycopg.Error."""
    limits = settings.batch
    transactions = deferred_due.transactions(conn, wanted, limits.max_bytes, limits.spool_directory)
    routed = Routed(transactions, BatchRouter(settings).decoder(transactions.columns))
    events = [event for transaction in routed for event in transaction.events]
    hosts = {event.text("host_id") or "" for event in events}
    hashes = spark_batches.hashes(conn, sorted(hosts))
    rows = list(_rows(events, hashes, host_buckets, bool(settings.source.headers)))
    return pack(rows, columns(settings.source))


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
