"""Snapshots against a model: the set of transactions that had ended."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.model.events import Lsn
from relay.model.page_snapshots import PageSnapshots
from relay.model.snapshots import BEGINNING, Snapshot, full_xids
from relay.source.server import end_before

LAST = 40


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    xmax = draw(st.integers(3, LAST))
    in_progress = draw(st.sets(st.integers(3, xmax - 1))) if xmax > 3 else set()
    return Snapshot(min(in_progress, default=xmax), xmax, tuple(sorted(in_progress)))


def visible(snapshot: Snapshot) -> set[int]:
    return set(range(3, snapshot.xmax)) - set(snapshot.in_progress)


@given(snapshots())
def test_it_sees_what_had_ended(snapshot: Snapshot) -> None:
    xids = np.arange(3, LAST + 5)
    assert set(xids[snapshot.sees(xids)].tolist()) == visible(snapshot)


@given(snapshots(), snapshots())
def test_it_covers_another_that_sees_no_more(one: Snapshot, other: Snapshot) -> None:
    assert one.covers(other) == (visible(other) <= visible(one))


@given(snapshots())
def test_everything_covers_the_beginning(snapshot: Snapshot) -> None:
    assert snapshot.covers(BEGINNING)
    assert not visible(BEGINNING)
    assert snapshot.covers(snapshot.certain())


@given(snapshots())
def test_its_text_is_that_of_postgresql(snapshot: Snapshot) -> None:
    assert Snapshot.parse(str(snapshot)) == snapshot


def test_the_text_of_a_server() -> None:
    assert Snapshot.parse("754:760:754,757") == Snapshot(754, 760, (754, 757))
    with pytest.raises(ValueError, match="unpack"):
        Snapshot.parse("754")


@given(st.integers(3, 1 << 40), st.integers(-(1 << 31) + 1, (1 << 31) - 1))
def test_the_epoch_of_a_transaction_is_the_nearest(xmax: int, distance: int) -> None:
    xid = xmax + distance
    found = full_xids(np.array([xid & 0xFFFFFFFF], np.int64), xmax)
    assert found.tolist() == [xid]


@pytest.mark.parametrize(
    ("position", "end"),
    [
        (0x2000 + 24, 0x2000),
        (0x2000 + 40, 0x2000 + 40),
        (0x1000000 + 40, 0x1000000),
        (0x1000000 + 24, 0x1000000 + 24),
        (0x3000, 0x3000),
    ],
)
def test_a_record_ends_before_the_header_of_an_empty_page(position: int, end: int) -> None:
    assert end_before(Lsn(position), 16 << 20) == end


@given(snapshots(), st.data())
def test_between_the_transactions_of_a_page(end: Snapshot, data: st.DataObject) -> None:
    """Each sees its transaction and those before it, none after it, and nothing that the page's end does not see."""
    found = sorted(visible(end))
    xids = [xid for xid in data.draw(st.permutations(found)) if data.draw(st.booleans())]
    before = data.draw(st.integers(3, end.xmax))
    page = PageSnapshots(xids, before, end.in_progress)
    for index in range(len(xids)):
        after = Snapshot(*page.after(index))
        assert after.xmax == max(before, *(xid + 1 for xid in xids[: index + 1]))
        assert after.xmin == min(after.in_progress, default=after.xmax)
        seen = set(range(3, after.xmax)) - set(end.in_progress) - set(xids[index + 1 :])
        assert visible(after) == seen
        assert set(xids[: index + 1]) <= seen
