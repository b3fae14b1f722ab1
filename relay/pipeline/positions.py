"""Compares a task with the positions of its partitions: what is new in it, and where it leaves them. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from relay.faults import RelayError
from relay.model.batch import Range, Share, Task
from relay.model.events import Lsn
from relay.model.snapshots import Xids, full_xids
from relay.model.transactions import Int64Array, Mask, Transactions
from relay.source.outbox.rows import Wanted
from relay.store.positions import offsets

_NONE = "{}"


def require_same_source(task: Task, locked: offsets.Locked) -> None:
    """Raise RelayError if the group has followed the source to another timeline since the task was read."""
    if task.source_epoch not in (None, locked.source_epoch):
        raise RelayError(
            "another instance has followed the source to another server or timeline since this one read its batch, of "
            "which nothing was applied: start relay again"
        )


def fresh_of(task: Task, locked: offsets.Locked) -> Transactions:
    """The transactions that are not in the target yet: `task.transactions` itself if all are new, otherwise a copy.

    A transaction is new if its commit ends after the applied LSN of its partitions and, once the group has polled, if
    the last snapshot does not see it. All partitions that a transaction touches moved together when it was applied.

    Example: partition 0 is at LSN 20, partition 1 at 10; transactions end at 10 (partition 1), 20 (0) and 30 (0 and 1).
    Only the last one is new.
    """
    facts = task.transactions.facts
    seen = None
    if locked.last is not None:
        seen = locked.last.snapshot.sees(full_xids(facts["xid"], task.next_xid))
    end = facts["end_lsn"]
    furthest = max(position.applied_lsn for position in locked.positions.values())
    # Usually everything is new, which one comparison finds out.
    if end[0] > furthest and (seen is None or not seen.any()):
        return task.transactions
    fresh = np.zeros(len(end), np.bool_)
    for partitions, here in _by_partitions(task.transactions, task.touched):
        for partition in partitions:
            fresh |= here & (end > locked.positions[partition].applied_lsn)
    if seen is not None:
        fresh &= ~seen
    return task.transactions if fresh.all() else task.transactions.take(np.flatnonzero(fresh))


def advances(fresh: Transactions, touched: Sequence[tuple[int, ...]]) -> list[offsets.Advance]:
    """The LSN and next offset to which transactions move the partitions that they touch, in order of the partitions.

    `touched` has the partitions of each tuple of hosts, by the index in `fresh.facts["hosts"]`.
    """
    reached: dict[int, tuple[Lsn, int]] = {}
    for partitions, here in _by_partitions(fresh, touched):
        # The greatest bigint has no next one.
        following = max(1, min(int(fresh.facts["last_offset"][here].max()), offsets.LAST - 1) + 1)
        end = Lsn(fresh.facts["end_lsn"][here].max())
        for partition in partitions:
            lsn, next_offset = reached.get(partition, (Lsn(0), 1))
            reached[partition] = (max(lsn, end), max(next_offset, following))
    return [
        offsets.Advance(partition, *position) for partition, position in sorted(reached.items())
    ]


def reached_lsns(
    positions: Mapping[int, offsets.PartitionPosition], moved: Iterable[offsets.Advance] = ()
) -> dict[int, Lsn]:
    """The LSN of each partition after a task has `moved` some of them."""
    reached = {partition: position.applied_lsn for partition, position in positions.items()}
    for each in moved:
        before = reached[each.partition_id]
        reached[each.partition_id] = max(before, each.applied_lsn)
    return reached


def is_ahead(task: Task, positions: Mapping[int, offsets.PartitionPosition]) -> bool:
    """Whether a partition of the task has not reached the end of the batch before (`task.after`)."""
    return any(positions[partition].applied_lsn < lsn for partition, lsn in task.after.items())


def is_early(task: Range, positions: Mapping[int, offsets.PartitionPosition]) -> bool:
    """Whether what precedes the range is not applied yet in one of its partitions."""
    return any(
        (position.snapshot_id or 0, position.polled_offset)
        < (task.snapshot_id, task.lower_bounds[partition])
        for partition, position in positions.items()
    )


def wanted_of(
    shares: Iterable[Share],
    unmarked: bool,
    lower_bounds: Mapping[int, int],
    noted: Mapping[int, Xids],
) -> Wanted:
    """The transactions of `shares` that are still to be applied in the partitions that have a lower bound, in order.

    `noted` are full xids (int64) in each partition that are applied already. A transaction that some of its partitions
    have applied is read without the rows of these, not with those of the others alone: a host may have changed since
    the plan, and its row must not fall out of both.
    """
    none = np.zeros(0, np.int64)
    xids, positions, done = [none], [none], list[str]()
    for share in shares:
        if share.unmarked != unmarked:
            continue
        masks = {
            partition: _unread(share, lower_bounds.get(partition), noted.get(partition))
            for partition in share.partitions
        }
        unread = np.logical_or.reduce(list(masks.values()))
        xids.append(share.xids[unread])
        positions.append(share.positions[unread])
        done += _done(masks, np.flatnonzero(unread))
    return Wanted(
        np.concatenate(xids),
        np.concatenate(positions),
        done if any(map(_NONE.__ne__, done)) else None,
    )


def _done(masks: Mapping[int, Mask], indices: Int64Array) -> list[str]:
    """For each transaction, by its index, the partitions that have applied it, as a PostgreSQL array."""
    first, *others = masks.values()
    if all((first == other).all() for other in others):
        return [_NONE] * len(indices)
    return [
        "{" + ",".join(str(partition) for partition, mask in masks.items() if not mask[index]) + "}"
        for index in indices.tolist()
    ]


def _unread(share: Share, lower_bound: int | None, noted: Xids | None) -> Mask:
    if lower_bound is None:
        return np.zeros(len(share.xids), np.bool_)
    unread: Mask = share.positions > lower_bound
    return unread if noted is None else unread & ~np.isin(share.xids, noted)


def last_positions(task: Range, lower_bounds: Mapping[int, int]) -> dict[int, int]:
    """The last position of the range's transactions in each partition that has a lower bound."""
    ends: dict[int, int] = {}
    for share in task.shares:
        for partition in share.partitions:
            if partition in lower_bounds:
                last = int(share.positions[-1])
                ends[partition] = max(ends.get(partition, last), last)
    return ends


def _by_partitions(
    transactions: Transactions, touched: Sequence[tuple[int, ...]]
) -> Iterator[tuple[tuple[int, ...], Mask]]:
    """Group transactions by the partitions they touch: yields partitions, and a mask (bool) of transactions."""
    kinds: dict[tuple[int, ...], int] = {}
    of_hosts = np.array([kinds.setdefault(each, len(kinds)) for each in touched])
    kind = of_hosts[transactions.facts["hosts"]]
    for partitions, number in kinds.items():
        here = kind == number
        if here.any():
            yield partitions, here
