"""Transactions as columns: cut, joined, picked from and sent away, they stay what they are one by one."""

from __future__ import annotations

import pickle
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from relay.model.transactions import FACTS, PADDING, Rows, Transactions, Undecoded

HOSTS = st.lists(st.sampled_from("abc"), min_size=1, max_size=2, unique=True).map(tuple)
ROWS = st.lists(st.binary(max_size=20), min_size=1, max_size=4)
ONE = st.tuples(HOSTS, st.none() | st.binary(max_size=5), ROWS)
COMMITS = st.lists(st.lists(ONE, min_size=1, max_size=3), max_size=5)

Commits = list[list[tuple[tuple[str, ...], bytes | None, list[bytes]]]]
Plain = tuple[int, tuple[str, ...], str | None, list[bytes]]


def of(commits: Commits) -> Transactions:
    """Transactions in commits that end at 1, 2 and so on; each row follows a header of two bytes."""
    facts, ids, rows = [], [], list[bytes]()
    hosts: list[tuple[str, ...]] = []
    for end, commit in enumerate(commits, start=1):
        for host, transaction_id, tuples in commit:
            size = sum(map(len, tuples))
            facts.append((end, end, end, end, end, end, len(tuples), size, len(hosts)))
            ids.append(transaction_id)
            hosts.append(host)
            rows += [b"##" + row for row in tuples]
    return Transactions(("c",), np.array(facts, FACTS), ids, hosts, Rows.of(rows).without_header(2))


def plain(each: Undecoded) -> Plain:
    assert each.size == sum(map(len, each.tuples))
    return int(each.commit.end_lsn), each.hosts, each.transaction_id, list(each.tuples)


def expected(commits: Commits) -> list[Plain]:
    return [
        (end, hosts, None if name is None else name.decode("utf-8", "surrogateescape"), rows)
        for end, commit in enumerate(commits, start=1)
        for hosts, name, rows in commit
    ]


@given(COMMITS)
def test_each_transaction_is_what_it_was(commits: Commits) -> None:
    transactions = of(commits)
    assert list(map(plain, transactions)) == expected(commits)
    assert [plain(transactions[index]) for index in range(len(transactions))] == expected(commits)
    assert transactions.events == sum(len(rows) for *_, rows in expected(commits))


@given(COMMITS, st.data())
def test_parts_are_joined_to_the_whole(commits: Commits, data: st.DataObject) -> None:
    transactions = of(commits)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(transactions)), max_size=3)))
    bounds = [0, *cuts, len(transactions)]
    parts = [transactions.part(*pair) for pair in pairwise(bounds)]
    copied = [pickle.loads(pickle.dumps(part)) for part in parts]
    assert list(map(plain, Transactions.joined(parts))) == expected(commits)
    assert list(map(plain, Transactions.joined(copied))) == expected(commits)
    assert parts == copied == []


def test_many_rows_travel_in_portions() -> None:
    rows = [bytes([number]) * 300_000 for number in range(10)]
    everything = Rows.of(rows)
    assert len(everything.__reduce__()[1][0]) > 1
    assert list(pickle.loads(pickle.dumps(everything))) == rows
    some = everything.take(np.array([1, 8, 9], np.int64))
    assert list(pickle.loads(pickle.dumps(some))) == [rows[1], rows[8], rows[9]]


@given(COMMITS.filter(bool), st.data())
def test_those_that_are_taken_keep_their_order_and_travel_alone(
    commits: Commits, data: st.DataObject
) -> None:
    everything = expected(commits)
    indices = sorted(data.draw(st.sets(st.integers(0, len(everything) - 1))))
    taken = of(commits).take(np.array(indices, np.int64))
    sent = pickle.loads(pickle.dumps(taken))
    for found in (taken, sent):
        assert list(map(plain, found)) == [everything[index] for index in indices]
    assert len(sent.rows.data) <= taken.held + len(PADDING)


@given(COMMITS.filter(bool), st.data())
def test_rows_that_are_chosen_leave_no_transaction_empty(
    commits: Commits, data: st.DataObject
) -> None:
    count = of(commits).events
    chosen = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    wanted = iter(chosen)
    left = [
        (end, hosts, name, kept)
        for end, hosts, name, rows in expected(commits)
        if (kept := [row for row in rows if next(wanted)])
    ]
    assert list(map(plain, of(commits).where(np.array(chosen)))) == left


@given(COMMITS.filter(bool), st.integers(0, 30), st.integers(0, 100))
def test_what_fits_is_whole_commits_within_the_limits(
    commits: Commits, events: int, size: int
) -> None:
    transactions = of(commits)
    fitting = transactions.fitting(events, size)
    taken = transactions.part(0, fitting)
    assert taken.events <= events
    assert taken.held <= size
    ends = [end for end, *_ in expected(commits)]
    assert fitting == len(ends) or fitting == ends.index(ends[fitting])
    following = transactions.part(fitting, len(ends))
    if len(following):
        more = transactions.part(0, fitting + following.first_commit())
        assert more.events > events or more.held > size
