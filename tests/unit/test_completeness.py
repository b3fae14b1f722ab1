"""A reader is complete up to the time of the latest snapshot that it covers, never later."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from relay.model.snapshots import BEGINNING, Snapshot
from relay.source.outbox.differences import up_to
from relay.store.completeness import Completeness, Moments

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def _at(seconds: int) -> datetime:
    return NOON + timedelta(seconds=seconds)


def test_a_whole_snapshot_has_its_own_time() -> None:
    moments = Moments()
    moments.note(Snapshot(10, 12, (10,)), _at(1))
    assert moments.reached(Snapshot(10, 12, (10,))) == Completeness(Snapshot(10, 12, (10,)), _at(1))


def test_a_transaction_that_is_still_to_come_holds_the_time() -> None:
    """10 was open at the first moment and has committed at the second: a reader without it has reached the first."""
    moments = Moments()
    moments.note(Snapshot(10, 12, (10,)), _at(1))
    moments.note(Snapshot(12, 12), _at(2))
    assert moments.reached(Snapshot(10, 12, (10,))).before == _at(1)
    assert moments.reached(Snapshot(12, 12)).before == _at(2)


def test_no_time_is_known_before_the_first_moment_is_reached() -> None:
    moments = Moments()
    moments.note(Snapshot(20, 20), _at(1))
    assert moments.reached(Snapshot(15, 15)).before is None
    assert moments.reached(BEGINNING).before is None
    moments.note(Snapshot(30, 30), None)
    assert moments.reached(Snapshot(30, 30)).before == _at(1)


def test_the_same_snapshot_at_a_later_time_counts() -> None:
    moments = Moments()
    moments.note(Snapshot(20, 20), _at(1))
    moments.note(Snapshot(20, 20), _at(9))
    assert moments.reached(Snapshot(20, 20)).before == _at(9)


def test_a_reader_that_lags_for_long_costs_no_memory_and_goes_on() -> None:
    moments = Moments()
    for number in range(10_000):
        moments.note(Snapshot(number + 3, number + 3), _at(number))
        behind = moments.reached(Snapshot(number // 2 + 3, number // 2 + 3)).before
        assert behind is None or behind <= _at(number // 2)
    assert len(moments._moments) <= 64
    assert moments.reached(Snapshot(10_002, 10_002)).before == _at(9_999)


@st.composite
def _histories(draw: st.DrawFn) -> tuple[dict[int, tuple[int, int]], list[int], list[int]]:
    """Transactions with the times of their first write and of their commit, the times of reads, and cuts."""
    count = draw(st.integers(1, 12))
    times = st.integers(0, 40)
    spans = [sorted((draw(times), draw(times))) for _ in range(count)]
    spans.sort()
    history = {3 + number: (begin, end) for number, (begin, end) in enumerate(spans)}
    return history, sorted(draw(st.lists(times, max_size=8))), draw(st.lists(st.integers(3, 16)))


def _snapshot(history: dict[int, tuple[int, int]], at: int) -> Snapshot:
    """The snapshot that is taken at a time: commits of that very time are visible."""
    xmax = 1 + max((xid for xid, (begin, _) in history.items() if begin <= at), default=2)
    running = tuple(xid for xid, (_, end) in history.items() if xid < xmax and end > at)
    return Snapshot(min((*running, xmax)), xmax, running)


@given(_histories())
def test_everything_committed_before_the_time_is_visible(
    made: tuple[dict[int, tuple[int, int]], list[int], list[int]],
) -> None:
    """However commits overlap, and wherever a difference is cut."""
    history, reads, cuts = made
    moments, position = Moments(), BEGINNING
    for number, at in enumerate(reads):
        seen = _snapshot(history, at)
        moments.note(seen, _at(at))
        cut = up_to(seen, max(cuts[number % len(cuts)] if cuts else 99, position.xmax))
        position = cut if cut.covers(position) else position
        before = moments.reached(position).before
        if before is None:
            continue
        committed = [xid for xid, (_, end) in history.items() if _at(end) < before]
        assert all(_sees(position, xid) for xid in committed)


def _sees(position: Snapshot, xid: int) -> bool:
    return xid < position.xmax and xid not in position.in_progress
