"""Which transactions of a difference a consumer reads, against one transaction after the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.model.batch import Share
from relay.model.transactions import Mask, Transactions
from relay.source.outbox.selection import everywhere, select

PARTITIONS = 3
members = st.sets(st.integers(0, PARTITIONS - 1), min_size=1).map(sorted).map(tuple)
unit = st.tuples(members, st.booleans(), st.sets(st.integers(0, PARTITIONS - 1)))
"""The partitions in which a transaction has rows, whether these lack c_xid, and the partitions that have read it."""


@given(st.lists(unit, max_size=12))
def test_each_transaction_is_read_in_the_partitions_that_lack_it(
    units: list[tuple[tuple[int, ...], bool, set[int]]],
) -> None:
    xids = [1_000 + 7 * number % 13 for number in range(len(units))]
    read = {(xids[n], unmarked): done for n, (_, unmarked, done) in enumerate(units)}
    shares = []
    for kind in sorted({(partitions, unmarked) for partitions, unmarked, _ in units}):
        of_kind = [
            n for n, (partitions, unmarked, _) in enumerate(units) if (partitions, unmarked) == kind
        ]
        shares.append(
            Share(
                kind[0],
                len(of_kind),
                np.array([xids[n] for n in of_kind], np.int64),
                np.array(of_kind, np.int64),
                kind[1],
            )
        )

    def unread(share: Share) -> dict[int, Mask]:
        return {
            partition: np.array(
                [partition not in read[xid, share.unmarked] for xid in share.xids.tolist()],
                np.bool_,
            )
            for partition in share.partitions
        }

    selected = list(select(shares, unread))
    assert [each.unmarked for each in selected] == sorted(
        {each.unmarked for each in selected}, reverse=True
    )
    found = {}
    for wanted in selected:
        done = wanted.done or ["{}"] * len(wanted.xids)
        for xid, position, but in zip(
            wanted.xids.tolist(), wanted.positions.tolist(), done, strict=True
        ):
            found[position] = (xid, wanted.unmarked, but)
    expected = {}
    for number, (partitions, unmarked, done_in) in enumerate(units):
        already = [str(each) for each in partitions if each in done_in]
        if len(already) < len(partitions):
            expected[number] = (xids[number], unmarked, "{" + ",".join(already) + "}")
    assert found == expected


@pytest.mark.parametrize("unmarked", [False, True])
def test_a_position_is_found_by_the_key_that_was_read(unmarked: bool) -> None:
    """Of xids the server sends the lower half, also of a row that is more than half a cycle of them old."""
    old, recent = 4, (7 << 32) + 6
    share = Share(
        (0, 1), 3, np.array([recent, 9, old], np.int64), np.array([1, 2, 3], np.int64), unmarked
    )
    mask = np.array([True, False, True])
    (wanted,) = select([share], lambda each: everywhere(each, mask))
    assert wanted.done is None
    facts = np.zeros(2, [("xid", np.int64), ("last_offset", np.int64)])
    facts["xid"] = [0, 0] if unmarked else [old, 6]
    facts["last_offset"] = [old, recent] if unmarked else [70, 80]
    read = cast(Transactions, SimpleNamespace(facts=facts))
    xids, positions = wanted.located(read)
    assert xids.tolist() == ([0, 0] if unmarked else [old, recent])
    assert positions.tolist() == [3, 1]
