"""Selects transactions of a difference: those that a consumer has not read yet, and in which partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from relay.model.batch import Share
from relay.model.snapshots import XID_CYCLE, Xids
from relay.model.transactions import Int64Array, Mask, Transactions

_NONE = "{}"

Unread = Callable[[Share], Mapping[int, Mask]]
"""Tells which transactions of a share are to be read in each of its partitions."""


class Wanted(NamedTuple):
    """Transactions to be read, of one kind; xids and positions are int64, in any order.

    `done` has, for each of them, the partitions whose rows are left out, as a PostgreSQL array such as `{0,3}`; None
    leaves out none. `unmarked`: the rows have no c_xid, so `xids` has their c_offsets instead.
    """

    xids: Xids
    positions: Int64Array
    done: Sequence[str] | None = None
    unmarked: bool = False

    def located(self, transactions: Transactions) -> tuple[Xids, Int64Array]:
        """The full xid (0 if it has none) and the position of each of some transactions that were read.

        A log may have rows that are further back than half a cycle of xids, so they are told by what was wanted.
        """
        facts = transactions.facts
        known, read = self.xids % XID_CYCLE, facts["xid"]
        if self.unmarked:
            known, read = self.xids, facts["last_offset"]
        order = np.argsort(known, kind="stable")
        found = order[np.searchsorted(known, read, sorter=order)]
        xids = np.zeros(len(found), np.int64) if self.unmarked else self.xids[found]
        return xids, self.positions[found]


def select(shares: Iterable[Share], unread: Unread) -> Iterator[Wanted]:
    """Yield what is to be read of `shares`: first rows that are older than the column c_xid, in order.

    A transaction that some of its partitions have read is read without the rows of these, not with those of the others
    alone: a host may have changed since the plan, and its row must not fall out of both.
    """
    shares = list(shares)
    for unmarked in (True, False):
        wanted = _of_kind((share for share in shares if share.unmarked == unmarked), unread)
        if len(wanted.xids):
            yield wanted._replace(unmarked=unmarked)


def everywhere(share: Share, mask: Mask) -> dict[int, Mask]:
    """The same transactions of a share in all of its partitions."""
    return dict.fromkeys(share.partitions, mask)


def whole(share: Share) -> dict[int, Mask]:
    """All transactions of a share, in all of its partitions."""
    return everywhere(share, np.full(len(share.xids), True))


def _of_kind(shares: Iterable[Share], unread: Unread) -> Wanted:
    none = np.zeros(0, np.int64)
    xids, positions, done = [none], [none], list[str]()
    for share in shares:
        masks = unread(share)
        chosen = np.logical_or.reduce(list(masks.values()))
        xids.append(share.xids[chosen])
        positions.append(share.positions[chosen])
        done += _done(masks, np.flatnonzero(chosen))
    partly = any(map(_NONE.__ne__, done))
    return Wanted(np.concatenate(xids), np.concatenate(positions), done if partly else None)


def _done(masks: Mapping[int, Mask], indices: Int64Array) -> list[str]:
    """For each transaction, by its index, the partitions whose mask leaves it out, as a PostgreSQL array."""
    first, *others = masks.values()
    if all(first is other or (first == other).all() for other in others):
        return [_NONE] * len(indices)
    return [
        "{" + ",".join(str(partition) for partition, mask in masks.items() if not mask[index]) + "}"
        for index in indices.tolist()
    ]
