"""Polled ranges: what of one is still to be applied, read from the outbox where the task is applied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from relay.config.settings import Settings
from relay.faults import RelayError
from relay.model.batch import Range, Share
from relay.model.snapshots import Xids
from relay.model.transactions import Mask, Transactions
from relay.source.outbox.cursor import Cursor
from relay.source.outbox.rows import prepare_reading
from relay.store.connections import Pool, open_pool
from relay.store.positions import offsets


class RangeReader:
    """Reads ranges over connections to the source of its own. Safe in several threads; raises psycopg.Error."""

    def __init__(self, settings: Settings, connections: int) -> None:
        self._batch = settings.batch
        self._source: Pool = open_pool(settings.source_dsn, connections, prepare_reading)
        self._cursor = Cursor(settings, self._source.connection)

    def close(self) -> None:
        """Close the connections."""
        self._source.close()

    def read(
        self, task: Range, lower_bounds: Mapping[int, int], noted: Mapping[int, Xids]
    ) -> Iterator[Transactions]:
        """Yield the transactions of a range that are still to be applied, first those older than the column c_xid.

        `lower_bounds` are the positions up to which each partition is done, `noted` the full xids that are done after
        them (int64).
        """
        left = partial(unread, lower_bounds, noted)
        for found in self._cursor.read(task.shares, left, task.by_reference):
            yield found.transactions

    def by_reference(self, task: Range) -> Range:
        """The range without the contents of rows that are too large to be read. Raises RelayError if there are none."""
        large = tuple(self._cursor.large(task.shares))
        if not large:
            raise RelayError(
                "source.table: rows are too large for the server to send together, and none is larger than "
                "source.max_event_bytes: lower it, or batch.max_events"
            )
        return replace(task, by_reference=large)

    def portions(self, found: Iterable[Transactions]) -> Iterator[Transactions]:
        """Join transactions up to `batch.max_events` and `max_bytes`: a range is one commit however large it is."""
        limits = self._batch
        portion: list[Transactions] = []
        events = size = 0
        for transactions in found:
            if portion and not portion[0].joins(transactions):
                yield Transactions.joined(portion)
                portion, events, size = [], 0, 0
            portion.append(transactions)
            events += transactions.events
            size += transactions.held
            if events >= limits.max_events or size >= limits.max_bytes:
                yield Transactions.joined(portion)
                portion, events, size = [], 0, 0
        if portion:
            yield Transactions.joined(portion)


def is_early(task: Range, positions: Mapping[int, offsets.PartitionPosition]) -> bool:
    """Whether what precedes the range is not applied yet in one of its partitions."""
    return any(
        (position.snapshot_id or 0, position.polled_offset)
        < (task.snapshot_id, task.lower_bounds[partition])
        for partition, position in positions.items()
    )


def last_positions(task: Range, lower_bounds: Mapping[int, int]) -> dict[int, int]:
    """The last position of the range's transactions in each partition that has a lower bound."""
    ends: dict[int, int] = {}
    for share in task.shares:
        for partition in share.partitions:
            if partition in lower_bounds:
                last = int(share.positions[-1])
                ends[partition] = max(ends.get(partition, last), last)
    return ends


def unread(
    lower_bounds: Mapping[int, int], noted: Mapping[int, Xids], share: Share
) -> dict[int, Mask]:
    """The transactions of a share that are still to be applied in the partitions that have a lower bound.

    `noted` are full xids (int64) in each partition that are applied already.
    """
    return {
        partition: _unread_in(share, lower_bounds.get(partition), noted.get(partition))
        for partition in share.partitions
    }


def _unread_in(share: Share, lower_bound: int | None, noted: Xids | None) -> Mask:
    if lower_bound is None:
        return np.zeros(len(share.xids), np.bool_)
    found: Mask = share.positions > lower_bound
    return found if noted is None else found & ~share.among(noted)
