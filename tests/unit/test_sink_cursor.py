"""How far a sink is: what is new to it, what is done, and what is stored of that."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.delivery.feed import Feed, Streamed, WalHold
from relay.delivery.progress import Prefix, SinkCommit, SinkProgress
from relay.model.events import Lsn
from relay.model.snapshots import Snapshot
from relay.model.transactions import Routed, Transactions
from relay.store.positions.sinks import BEFORE_FIRST, SinkPosition

NOTHING = np.zeros(0, np.int64)


def cursor(
    snapshot: Snapshot | None = None, done: tuple[int, ...] = (), polls: bool = True
) -> SinkProgress:
    return SinkProgress(SinkPosition(snapshot), np.array(done, np.int64), polls)


def commit(position: int, deliveries: int = 1) -> SinkCommit:
    return SinkCommit(position, position, deliveries, 0.0)


def new(of: SinkProgress, *xids: int) -> list[bool]:
    return [bool(each) for each in of.is_new(np.array(xids, np.uint64), np.array(xids))]


@given(st.lists(st.integers(0, 3), max_size=20), st.randoms())
def test_a_prefix_reaches_what_comes_before_the_first_that_is_not_done(
    deliveries: list[int], chance: random.Random
) -> None:
    prefix = Prefix(0)
    commits = [commit(number + 1, count) for number, count in enumerate(deliveries)]
    for each in commits:
        prefix.add([each])
    left = [each for each in commits for _ in range(each.deliveries)]
    chance.shuffle(left)
    passed: list[int] = []
    while True:
        undone = [each for each in commits if each.deliveries]
        assert prefix.reached == (undone[0].position - 1 if undone else len(commits))
        passed += prefix.take_passed()
        assert passed == list(range(1, prefix.reached + 1))
        assert len(prefix) == len(commits) - prefix.reached
        if not left:
            return
        left.pop().deliveries -= 1
        prefix.advance()


def test_what_the_snapshot_sees_or_is_done_is_not_new() -> None:
    found = cursor(Snapshot(10, 20, (12,)), done=(25,))
    assert new(found, 9, 12, 15, 20, 25) == [False, True, False, True, False]


def test_what_is_in_flight_when_a_sink_joins_the_stream_again_counts_as_polled() -> None:
    found = cursor(Snapshot(10, 10, ()))
    found.join(Lsn(15))
    first, done, second = commit(20), commit(25), commit(40)
    found.stream(first, done)
    found.finish(done)
    found.join(Lsn(30))
    assert (found.polls_any, found.reached) == (True, Lsn(0))
    found.finish(first)
    assert (found.polls_any, found.reached) == (False, Lsn(30))
    found.stream(second)
    found.finish(second)
    assert found.reached == Lsn(40)
    assert found.adopt(Snapshot(50, 50, ()))


def test_without_polling_the_position_in_the_wal_says_what_is_new() -> None:
    found = SinkProgress(SinkPosition(None, applied_lsn=Lsn(15)), NOTHING, polls=False)
    assert new(found, 14, 15, 16) == [False, False, True]
    found.join(Lsn(0))
    first, second = commit(20), commit(30)
    found.stream(first)
    found.stream(second)
    found.finish(second)
    delivered = SinkPosition(None, applied_lsn=Lsn(15), delivered_lsn=Lsn(30))
    assert found.to_store() == (delivered, [30])
    # Until the position tells it.
    assert found.to_store() == (delivered, [30])
    again = SinkProgress(delivered, np.array([30], np.int64), polls=False)
    assert new(again, 20, 30, 40) == [True, False, True]
    found.finish(first)
    assert found.to_store() == (replace(delivered, applied_lsn=Lsn(30)), [])


def test_what_is_polled_while_joining_does_not_come_again_by_the_stream() -> None:
    found = cursor(Snapshot(10, 10))
    found.join(Lsn(5))
    polled = commit(11)
    found.poll_beside(polled)
    assert new(found, 11, 12) == [False, True]
    streamed = commit(12)
    found.stream(streamed)
    found.finish(streamed)
    # The WAL has to wait for what was polled: its rows may be deleted.
    assert found.reached == 0
    assert not found.adopt(Snapshot(13, 13))
    found.finish(polled)
    assert found.reached == 12
    position = SinkPosition(Snapshot(10, 10), delivered_lsn=Lsn(12))
    assert found.to_store() == (position, [12, 11])
    assert found.to_store() == (position, [])
    assert found.adopt(Snapshot(12, 12))
    assert new(found, 11, 12, 13) == [False, False, True]


def test_of_a_difference_the_offset_is_stored_and_what_is_done_beyond_it() -> None:
    found = cursor(Snapshot(10, 10), done=(15,))
    found.open(Snapshot(20, 20))
    first, second = commit(11), commit(12)
    found.poll(first)
    found.poll(second)
    found.finish(second)
    position, unstored = found.to_store()
    assert (position.polled_offset, unstored) == (BEFORE_FIRST, [12])
    found.finish(first)
    position, unstored = found.to_store()
    assert (position.polled_offset, unstored) == (12, [])
    assert found.known.tolist() == [15]
    assert position.snapshot == Snapshot(10, 10)
    found.read()
    assert found.to_store()[0] == SinkPosition(Snapshot(20, 20))
    assert len(found.known) == 0


def test_an_offset_is_not_stored_while_what_was_streamed_before_is_under_way() -> None:
    """Polling leaves it out, so no offset of the difference may be said to be done beyond it."""
    found = cursor(Snapshot(10, 10))
    streamed, polled = commit(11), commit(12)
    found.stream(streamed)
    found.open(Snapshot(20, 20))
    found.poll(polled)
    found.finish(polled)
    position, unstored = found.to_store()
    assert (position.following, position.polled_offset) == (Snapshot(20, 20), BEFORE_FIRST)
    assert unstored == [12]
    found.finish(streamed)
    position, unstored = found.to_store()
    assert (position.polled_offset, unstored) == (12, [11])
    assert found.known.tolist() == [11]


def test_what_takes_long_does_not_keep_the_next_difference_or_the_stream() -> None:
    found = cursor(Snapshot(10, 10))
    found.open(Snapshot(20, 20))
    slow, fast = commit(11), commit(12)
    found.poll(slow)
    found.poll(fast)
    found.finish(fast)
    found.read()
    assert found.end == Snapshot(20, 20)
    found.open(Snapshot(30, 30))
    next_one = commit(21)
    found.poll(next_one)
    found.finish(next_one)
    found.read()
    assert found.remembered == 3
    position, unstored = found.to_store()
    assert (position.snapshot, position.following) == (Snapshot(10, 10), Snapshot(20, 20))
    assert (position.polled_offset, unstored) == (BEFORE_FIRST, [12, 21])
    found.join(Lsn(25))
    assert new(found, 11, 12, 21, 29, 31) == [False, False, False, False, True]
    after_a_crash = SinkProgress(position, np.array(unstored), polls=True)
    assert after_a_crash.reading == (Snapshot(10, 10), Snapshot(20, 20), BEFORE_FIRST)
    assert after_a_crash.known.tolist() == [12, 21]
    found.finish(slow)
    assert found.to_store() == (SinkPosition(Snapshot(30, 30)), [])


@given(
    st.lists(
        st.sampled_from(["open", "poll", "poll", "poll", "stream", "finish", "finish", "crash"])
    ),
    st.randoms(),
)
def test_whatever_ends_first_each_transaction_is_delivered(
    steps: list[str], chance: random.Random
) -> None:
    """A transaction is read once, and again after a crash only if it was not done when that was stored.

    The stream brings some that the next difference has too.
    """
    at = cursor(Snapshot(3, 3))
    done: set[int] = set()
    stored = at.to_store()
    stored_done: set[int] = set()
    kept: list[int] = []
    under_way: list[SinkCommit] = []
    upto = 3

    def unread(of: SinkProgress) -> list[int]:
        assert of.reading is not None
        before, after, polled = of.reading
        xids = [xid for xid in range(before.xmax, after.xmax) if xid > polled]
        taken = set(of.known.tolist())
        return [xid for xid in xids if xid not in taken]

    for step in [*steps, "crash", "open", "end"]:
        if step == "open" and at.reading is None:
            upto += chance.randint(0, 6)
            at.open(Snapshot(upto, upto))
        elif step == "poll" and at.reading is not None:
            left = unread(at)
            if not left:
                at.read()
                continue
            under_way.append(commit(left[0]))
            at.poll(under_way[-1])
        elif step == "stream" and at.reading is None:
            xid = upto + chance.randint(0, 5)
            if new(at, xid) == [True]:
                under_way.append(commit(xid))
                at.stream(under_way[-1])
        elif step == "finish" and under_way:
            ended = under_way.pop(chance.randrange(len(under_way)))
            assert ended.xid not in stored_done
            at.finish(ended)
            done.add(ended.xid)
            if chance.random() < 0.5:
                position, unstored = at.to_store()
                kept += unstored
                stored, stored_done = (position, kept), set(done)
        elif step == "crash":
            seen = stored[0].snapshot
            assert seen is not None
            kept = [xid for xid in kept if xid >= seen.xmax]
            at = SinkProgress(stored[0], np.array(kept, np.int64), polls=True)
            under_way, done = [], set(stored_done)
            upto = max(3, at.end.xmax if at.end else 3)
        elif step == "end":
            while at.reading is not None:
                left = unread(at)
                if not left:
                    at.read()
                    continue
                under_way.append(commit(left[0]))
                at.poll(under_way[-1])
            for each in under_way:
                at.finish(each)
                done.add(each.xid)
    assert at.end == at.position.snapshot
    assert done >= set(range(3, upto))


def test_a_snapshot_that_sees_less_is_not_adopted() -> None:
    found = cursor(Snapshot(20, 20), done=(30,))
    assert not found.adopt(Snapshot(19, 25, (19,)))
    assert found.adopt(Snapshot(25, 25))
    assert found.known.tolist() == [30]


def streamed(size: int) -> Streamed:
    return Streamed(Routed(Transactions.none(), None), 0, 0.0, size)  # type: ignore[arg-type]


def test_a_feed_buffers_while_it_is_open_and_has_room() -> None:
    woken: list[int] = []
    feed = Feed(100, lambda: woken.append(1))
    feed.offer(streamed(1))
    assert (feed.take(), len(woken)) == (None, 0)
    feed.open()
    feed.offer(streamed(60))
    feed.offer(streamed(60))
    assert feed.overflowed is True
    assert feed.take() is not None
    assert feed.take() is None
    feed.close()
    assert len(woken) == 2


def lower_bound(hold: WalHold) -> Lsn | None:
    return hold.lower_bound


def test_wal_is_held_for_what_is_not_stored_until_the_row_says_that_the_sink_polls() -> None:
    hold = WalHold(polls=True)
    assert lower_bound(hold) == 0
    hold.load(Lsn(0), attached=False)
    assert lower_bound(hold) is None
    hold.join(Lsn(5))
    assert lower_bound(hold) is None
    hold.require(Lsn(9))
    assert lower_bound(hold) == 5
    hold.store(Lsn(7), attached=True)
    assert lower_bound(hold) == 7
    hold.leave()
    assert lower_bound(hold) == 7
    hold.store(Lsn(8), attached=True)
    assert lower_bound(hold) == 8
    hold.store(Lsn(8), attached=False)
    assert lower_bound(hold) is None


def test_nothing_is_confirmed_before_the_row_of_an_attached_sink_is_stored_again() -> None:
    hold = WalHold(polls=True)
    hold.load(Lsn(0), attached=True)
    hold.join(Lsn(5))
    hold.require(Lsn(9))
    assert lower_bound(hold) == 0
    hold.store(Lsn(0), attached=False)
    assert lower_bound(hold) == 5
    hold.store(Lsn(9), attached=True)
    assert lower_bound(hold) is None
    hold.forget()
    assert lower_bound(hold) == 0


def test_wal_that_nobody_takes_is_released_after_a_while() -> None:
    hold = WalHold(polls=True)
    assert not hold.expire(10)
    assert hold.expire(-1)
    assert lower_bound(hold) is None
    hold.join(Lsn(5))
    hold.require(Lsn(9))
    assert not hold.expire(-1)
    hold.leave()
    assert hold.expire(-1)


def test_in_mode_wal_the_stored_position_alone_decides() -> None:
    hold = WalHold(polls=False)
    hold.require(Lsn(9))
    assert lower_bound(hold) == 0
    hold.load(Lsn(3), attached=False)
    hold.join(Lsn(5))
    assert lower_bound(hold) == 3
    assert hold.lacks(Lsn(3))
    hold.leave()
    assert not hold.expire(-1)
    hold.store(Lsn(7), attached=True)
    assert lower_bound(hold) == 7
    hold.forget()
    assert lower_bound(hold) == 0
    hold.load(Lsn(9), attached=True)
    assert lower_bound(hold) is None
    assert not hold.lacks(Lsn(9))


@pytest.mark.parametrize("limit", [100, None])
def test_one_batch_may_be_larger_than_the_buffer(limit: int | None) -> None:
    feed = Feed(limit, lambda: None)
    feed.open()
    feed.offer(streamed(1_000))
    assert not feed.overflowed
    feed.offer(streamed(1))
    assert feed.overflowed is (limit is not None)
