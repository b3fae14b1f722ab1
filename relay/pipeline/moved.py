"""Rows of a partitioned outbox that were moved between its partitions: to the WAL a move is an insert. No I/O.

Offsets come from the counter, in commit order, so what is new has a greater offset than every commit before it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from relay.transactions import ColumnDecoder, Mask, Places, Transactions


def reached_before(end: npt.NDArray[np.uint64], last: Places) -> Places:
    """The greatest offset of the commits before that of each transaction; 0 where there is none.

    `end` are the ends of their commits, `last` their greatest offsets, both in commit order.
    """
    commits = np.flatnonzero(np.concatenate(([True], end[1:] != end[:-1])))
    reached = np.maximum.accumulate(np.concatenate(([0], last)))
    before: Places = reached[commits][
        np.searchsorted(commits, np.arange(len(end)), side="right") - 1
    ]
    return before


def without_moved(
    transactions: Transactions, least: Places, decoder: ColumnDecoder
) -> Transactions:
    """The transactions without the rows that were moved; one that has no others is left out.

    `least` is the least offset that a new row of each transaction can have. A row that was inserted and moved in one
    commit stays as it was inserted. Transactions in a file stay as they are.
    """
    if transactions.spooled is not None or not len(transactions):
        return transactions
    (texts,) = decoder.columns(transactions.rows, ["c_offset"])
    offsets = np.array([int(text or 0) for text in texts], np.int64)
    owners = np.repeat(np.arange(len(transactions)), transactions.facts["events"])
    new = (offsets == 0) | (offsets >= least[owners]) & ~_repeated(
        transactions.facts["end_lsn"][owners], offsets
    )
    if new.all():
        return transactions
    found = transactions.where(new)
    facts = found.facts.copy()
    starts = np.cumsum(facts["events"]) - facts["events"]
    facts["first_offset"] = np.minimum.reduceat(offsets[new], starts) if len(facts) else 0
    return replace(found, facts=facts)


def _repeated(commits: npt.NDArray[np.uint64], offsets: Places) -> Mask:
    """The rows whose commit has had their offset before."""
    order = np.lexsort((np.arange(len(offsets)), offsets, commits))
    same = np.concatenate(
        (
            [False],
            (np.diff(commits[order]) == 0) & (np.diff(offsets[order]) == 0),
        )
    )
    repeated: Mask = np.zeros(len(offsets), np.bool_)
    repeated[order] = same
    return repeated
