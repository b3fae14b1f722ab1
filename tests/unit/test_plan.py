"""The plan: tasks that may run side by side, with order and atomicity intact."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from relay.model.batch import Task
from relay.model.transactions import FACTS, Rows, Transactions
from relay.pipeline import plan
from relay.pipeline.plan import Planner, partition_of

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


class Hashes:
    """Stands in for PostgreSQL: the hash of each host, and what was asked."""

    def __init__(self, known: dict[str, int]) -> None:
        self.known = known
        self.asked: list[list[str]] = []

    def __call__(self, hosts: Sequence[bytes]) -> NDArray[np.int32]:
        asked = [host.decode() for host in hosts]
        self.asked.append(asked)
        return np.array([self.known[host] for host in asked], np.int32)


def transaction(number: int, *hosts: str) -> Transactions:
    """One transaction with an event for each host."""
    facts = np.array([(number, number, 0, number, 0, 0, len(hosts), 0, 0)], FACTS)
    return Transactions(("host_id",), facts, [b"t"], [hosts], Rows.of([b""] * len(hosts)))


def together(*found: Transactions) -> Transactions:
    return Transactions.joined(list(found)) if found else Transactions.none()


def touches(task: Task) -> list[tuple[int, ...]]:
    """The partitions of each transaction."""
    return [task.touched[hosts] for hosts in task.transactions.facts["hosts"]]


def numbers(task: Task) -> list[int]:
    return [each.commit.xid for each in task.transactions]


HOSTS = {f"h{number}": number for number in range(30)}
BATCHES = st.lists(st.lists(st.sampled_from(list(HOSTS)), min_size=1, max_size=4, unique=True))


@given(BATCHES, st.integers(1, 12))
def test_the_plan_keeps_order_and_atomicity(batch: list[list[str]], partitions: int) -> None:
    transactions = together(*(transaction(n, *hosts) for n, hosts in enumerate(batch)))
    tasks = Planner(partitions, hashes=Hashes(HOSTS)).plan(transactions)

    # Every transaction is in exactly one task, in commit order.
    assert sorted(number for task in tasks for number in numbers(task)) == list(range(len(batch)))
    assert all(numbers(task) == sorted(numbers(task)) for task in tasks)

    # No two tasks share a partition, so each host is in one task only.
    owned = [partition for task in tasks for partition in task.partitions]
    assert len(owned) == len(set(owned))

    # A task owns what its transactions touch, in the order in which rows are locked, and no more.
    for task in tasks:
        touched = [sorted({HOSTS[host] % partitions for host in batch[n]}) for n in numbers(task)]
        assert [list(each) for each in touches(task)] == touched
        assert list(task.partitions) == sorted({p for each in touched for p in each})
        assert task.events == sum(len(batch[n]) for n in numbers(task))


@given(BATCHES, st.integers(1, 12))
def test_only_what_must_be_joined_is_joined(batch: list[list[str]], partitions: int) -> None:
    """As many tasks as there are connected components, counted by merging sets until nothing moves."""
    components: list[set[int]] = []
    for hosts in batch:
        touched = {HOSTS[host] % partitions for host in hosts}
        apart = [each for each in components if not each & touched]
        components = [*apart, touched.union(*(each for each in components if each & touched))]
    transactions = together(*(transaction(n, *hosts) for n, hosts in enumerate(batch)))
    tasks = Planner(partitions, hashes=Hashes(HOSTS)).plan(transactions)
    assert sorted(map(sorted, components)) == sorted(list(task.partitions) for task in tasks)


def test_a_transaction_of_several_hosts_joins_their_partitions() -> None:
    hashes = Hashes({"a": 0, "b": 1, "c": 2})
    tasks = Planner(8, hashes=hashes).plan(
        together(
            transaction(1, "a"), transaction(2, "b"), transaction(3, "c"), transaction(4, "b", "a")
        )
    )
    assert [(task.partitions, numbers(task)) for task in tasks] == [
        ((0, 1), [1, 2, 4]),
        ((2,), [3]),
    ]
    assert touches(tasks[0]) == [(0,), (1,), (0, 1)]


def test_a_batch_is_not_tied_by_what_was_cut_off() -> None:
    hashes = Hashes({"a": 0, "b": 1})
    everything = together(transaction(1, "a"), transaction(2, "b"), transaction(3, "b", "a"))
    tasks = Planner(8, hashes=hashes).plan(everything.part(0, 2))
    assert [(task.partitions, numbers(task)) for task in tasks] == [((0,), [1]), ((1,), [2])]
    Planner(8, hashes=hashes).plan(everything.part(0, 1))
    assert hashes.asked == [["a", "b"], ["a"]]


def test_nothing_to_plan_asks_nothing() -> None:
    hashes = Hashes({})
    assert Planner(8, hashes=hashes).plan(Transactions.none()) == []
    assert hashes.asked == []


@pytest.mark.parametrize(
    ("value", "partitions", "partition"),
    [
        # What PostgreSQL says for abs(value::bigint) % partitions; abs(int) would overflow on the first.
        (INT_MIN, 8, 0),
        (INT_MIN, 7, 2),
        (INT_MIN, 1000, 648),
        (INT_MAX, 8, 7),
        (-1, 8, 1),
        (-9, 8, 1),
        (0, 8, 0),
        (INT_MIN, 1, 0),
    ],
)
def test_the_partition_is_postgresql_s(value: int, partitions: int, partition: int) -> None:
    assert partition_of(value, partitions) == partition
    (task,) = Planner(partitions, hashes=Hashes({"h": value})).plan(together(transaction(1, "h")))
    assert task.partitions == (partition,)


def test_the_hash_of_a_host_is_asked_once() -> None:
    hashes = Hashes(HOSTS)
    planner = Planner(8, hashes=hashes)
    planner.plan(together(transaction(1, "h1"), transaction(2, "h2"), transaction(3, "h1", "h2")))
    planner.plan(together(transaction(4, "h2"), transaction(5, "h3")))
    planner.plan(together(transaction(6, "h1", "h2", "h3")))
    assert hashes.asked == [["h1", "h2"], ["h3"]]


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> int:
    """Room for three hosts, so that a test need not make a hundred thousand."""
    monkeypatch.setattr(plan, "CACHED_HOSTS", 3)
    return 3


@pytest.mark.usefixtures("small_cache")
def test_the_host_that_was_not_seen_for_longest_is_forgotten() -> None:
    hashes = Hashes(HOSTS)
    planner = Planner(8, hashes=hashes)
    for hosts in (["h1"], ["h2"], ["h3"], ["h1"], ["h4"], ["h1", "h3", "h4"], ["h2"]):
        planner.plan(together(transaction(1, *hosts)))
    assert hashes.asked == [["h1"], ["h2"], ["h3"], ["h4"], ["h2"]]


@given(st.lists(BATCHES.filter(bool), max_size=4))
def test_a_batch_of_more_hosts_than_are_remembered_is_planned_all_the_same(
    batches: list[list[list[str]]],
) -> None:
    hashes = Hashes(HOSTS)
    planner = Planner(5, hashes=hashes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "CACHED_HOSTS", 3)
        for batch in batches:
            transactions = together(*(transaction(n, *hosts) for n, hosts in enumerate(batch)))
            tasks = planner.plan(transactions)
            assert sum(len(task.transactions) for task in tasks) == len(batch)


@given(st.lists(st.lists(st.sampled_from(list(HOSTS)), min_size=1, max_size=3, unique=True)))
def test_what_is_remembered_is_bounded(batches: list[list[str]]) -> None:
    """Whatever came before, no more than the last three hosts are known without asking."""
    hashes = Hashes(HOSTS)
    planner = Planner(8, hashes=hashes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "CACHED_HOSTS", 3)
        for hosts in batches:
            planner.plan(together(transaction(1, *hosts)))
        hashes.asked.clear()
        for host in HOSTS:
            # Each of these may push out only what was seen longer ago.
            planner.plan(together(transaction(1, host)))
    asked = {host for hosts in hashes.asked for host in hosts}
    assert len(asked) >= len(HOSTS) - 3
