"""What each partition of a group, or a sink, has applied of the outbox: a snapshot, and a part of what comes next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psycopg

from relay.faults import RelayError
from relay.model.batch import Share
from relay.model.snapshots import Snapshot, Xids
from relay.model.transactions import Mask
from relay.store.connections import Connection
from relay.store.positions import offsets, sinks, snapshots


class BrokenChain(RelayError):
    """A position refers to a snapshot that the group does not have."""


@dataclass(frozen=True, slots=True)
class AppliedPosition:
    """What a partition has applied, or would have applied after a move.

    That is everything that `snapshot` sees and, up to the position `polled_offset`, what the snapshot `after` sees.
    """

    partition: int
    snapshot: Snapshot
    after: Snapshot
    polled_offset: int

    def covers(self, share: Share) -> Mask:
        """Which transactions of a difference are part of it."""
        polled: Mask = share.positions <= self.polled_offset
        return share.seen_by(self.snapshot) | (share.seen_by(self.after) & polled)


def applied_in(
    target: psycopg.Connection[Any], group: str, partition: int | None = None
) -> list[AppliedPosition]:
    """Read what each partition, or one, has applied; empty where only the WAL is read. Raises psycopg.Error."""
    found = applied_at(*offsets.positions_and_chain(target, group))
    return [each for each in found if partition in (None, each.partition)]


def applied_at(
    positions: Sequence[offsets.PartitionPosition], links: Sequence[snapshots.ChainLink]
) -> list[AppliedPosition]:
    """What partitions have applied whose positions refer to a chain of snapshots; empty without one."""
    if not links:
        return []
    applied = []
    for position in positions:
        current = index_of(links, position.snapshot_id or links[-1].id)
        before, after = links[current], links[min(current + 1, len(links) - 1)]
        applied.append(
            AppliedPosition(
                position.partition_id, before.snapshot, after.snapshot, position.polled_offset
            )
        )
    return applied


def index_of(links: Sequence[snapshots.ChainLink], number: int) -> int:
    """The index of the snapshot with that number. Raises BrokenChain if there is none."""
    for index, link in enumerate(links):
        if link.id == number:
            return index
    raise BrokenChain(
        f"relay.positions: a partition is at snapshot {number}, which relay.snapshots does not have: one of "
        "the tables was changed or restored without the other: restore both, or set with `relay offsets seek` where "
        "relay is to continue"
    )


@dataclass(frozen=True, slots=True)
class ReadPosition:
    """What the target or a sink has read: `positions` of the partitions, and the transactions `done` after them.

    `done` has full xids (int64, in any order). A sink has one position. `positions` is empty where only the WAL is
    read.
    """

    positions: Sequence[AppliedPosition]
    done: Xids


def position_of_mark(mark: Mapping[str, Any]) -> ReadPosition:
    """What a sink had read once, as `relay.store.positions.sinks.mark` has noted it."""
    snapshot = Snapshot.parse(mark["snapshot"])
    after = Snapshot.parse(mark["following"] or mark["snapshot"])
    done = np.array([int(xid) for xid in mark["done"]], np.int64)
    return ReadPosition([AppliedPosition(0, snapshot, after, mark["polled"])], done)


def position_of_target(target: Connection, group: str) -> ReadPosition:
    """Read what the target has applied. Raises psycopg.Error."""
    return ReadPosition(applied_in(target, group), snapshots.noted(target, group))


def position_of_sink(target: Connection, group: str, sink: sinks.StoredSink) -> ReadPosition:
    """Read what a sink has delivered. Raises psycopg.Error."""
    at = sink.position
    if at.snapshot is None:
        return ReadPosition([], np.zeros(0, np.int64))
    applied = AppliedPosition(0, at.snapshot, at.following or at.snapshot, at.polled_offset)
    return ReadPosition([applied], sinks.done(target, group, sink.sink))
