"""Which deliveries wait for which others."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from relay.delivery.order import Delivery, Queues, rests_of_partial_commits
from relay.delivery.progress import SinkCommit
from relay.model.keys import at_any, of_endpoint

KEYS = st.frozensets(st.sampled_from("abc"), min_size=1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["new", "deferred"]), KEYS),
        st.tuples(st.sampled_from(["run", "stop", "end"]), st.integers(0, 5)),
    ),
    max_size=60,
)


def delivery(number: int, keys: frozenset[str], is_deferred: bool) -> Delivery:
    anything: Any = number
    return Delivery(anything, anything, keys, due=anything if is_deferred else None)


@given(STEPS)
def test_everything_ends_and_order_holds_for_each_key(steps: list[tuple[str, Any]]) -> None:
    queues = Queues()
    pending: list[Delivery] = []
    overtaken: list[Delivery] = []

    def end(one: Delivery) -> None:
        for earlier in pending:
            if earlier is not one and earlier.keys & one.keys and one not in overtaken:
                # The deferred one goes first, then the older one; but what runs already is not called back.
                assert (earlier.due is None, pending.index(earlier)) > (
                    one.due is None,
                    pending.index(one),
                )
        queues.remove(one)
        pending.remove(one)

    for number, (step, what) in enumerate(steps, start=1):
        free = [each for each in pending if not each.blockers and not each.is_running]
        runs = [each for each in pending if each.is_running]
        if step in ("new", "deferred"):
            pending.append(delivery(number, what, step == "deferred"))
            queues.add(pending[-1])
        elif step == "run" and free:
            free[what % len(free)].is_running = True
        elif step == "stop" and runs:
            one = runs[what % len(runs)]
            one.is_running = False
            queues.stop([one])
        elif step == "end" and runs:
            one = runs[what % len(runs)]
            overtaken.append(one)
            end(one)
        for each in pending:
            assert not (each.is_running and each.blockers)
        for key in "abc":
            assert sum(each.is_running and key in each.keys for each in pending) <= 1
    while pending:
        free = [each for each in pending if not each.blockers]
        assert free
        for each in free:
            if not each.is_running:
                each.is_running = True
            else:
                overtaken.append(each)
            end(each)


AT_ENDPOINTS = st.frozensets(st.sampled_from([*"abc", *of_endpoint("abc", "x")]), max_size=2)
COMMITS = st.lists(
    st.tuples(st.lists(AT_ENDPOINTS, min_size=1), st.booleans(), st.booleans()), max_size=8
)


@given(COMMITS)
def test_what_is_deferred_at_the_end_overtakes_nothing(
    commits: list[tuple[list[frozenset[str]], bool, bool]],
) -> None:
    pending: list[Delivery] = []
    for keys_of, is_begun, is_whole in commits:
        commit = SinkCommit(0, 0, len(keys_of) + (not is_whole), 0.0, is_begun)
        for keys in keys_of:
            pending.append(delivery(len(pending), keys, is_deferred=False))
            pending[-1].commit = commit
    deferred = rests_of_partial_commits(pending)
    left = [each for each in pending if each not in deferred]
    assert deferred == [each for each in pending if each in deferred]
    assert not {each.commit for each in deferred} & {each.commit for each in left}
    for each in deferred:
        before = pending[: pending.index(each)]
        whole = set(map(at_any, each.keys))
        assert not [one for one in left if one in before and whole & set(map(at_any, one.keys))]
    if all(is_whole for _, _, is_whole in commits):
        assert not any(each.commit.is_begun for each in left if each.commit)
