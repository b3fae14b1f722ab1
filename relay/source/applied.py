"""Reads what each partition has applied of the outbox, as snapshots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from relay.model.snapshots import Snapshot
from relay.store.positions import offsets


@dataclass(frozen=True, slots=True)
class AppliedPosition:
    """What a partition has applied, or would have applied after a move.

    That is everything that `snapshot` sees and, up to the position `polled_offset`, what the snapshot `after` sees.
    """

    partition: int
    snapshot: Snapshot
    after: Snapshot
    polled_offset: int


def applied_in(
    target: psycopg.Connection[Any], group: str, partition: int | None = None
) -> list[AppliedPosition]:
    """Read what each partition, or one, has applied; empty where only the WAL is read. Raises psycopg.Error."""
    positions, links = offsets.positions_and_chain(target, group)
    if not links:
        return []
    positions = [position for position in positions if partition in (None, position.partition_id)]
    index = {link.id: number for number, link in enumerate(links)}
    applied = []
    for position in positions:
        current = index[position.snapshot_id or links[-1].id]
        before, after = links[current], links[min(current + 1, len(links) - 1)]
        applied.append(
            AppliedPosition(
                position.partition_id, before.snapshot, after.snapshot, position.polled_offset
            )
        )
    return applied
