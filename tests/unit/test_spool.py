"""Rows on disk: what was appended is what is read, in order, for each owner, as often as asked."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.faults import TransientFault
from relay.model.spool import Spool, SpooledTuples

WINDOW = 1 << 20
"""How much the spool reads at once."""


def spooled(rows: Sequence[tuple[int, bytes]], owners: int) -> list[SpooledTuples]:
    """Rows with the number of their owner, appended in order."""
    spool = Spool()
    found = [SpooledTuples(spool) for _ in range(owners)]
    for owner, row in rows:
        spool.append(row, found[owner])
    spool.seal()
    return found


@given(st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=300)), max_size=40))
def test_each_owner_reads_its_own_rows_in_order_and_as_often_as_it_likes(
    rows: list[tuple[int, bytes]],
) -> None:
    for owner, tuples in enumerate(spooled(rows, 4)):
        expected = [row for whose, row in rows if whose == owner]
        assert len(tuples) == len(expected)
        assert list(tuples) == expected
        assert list(tuples) == expected


@pytest.mark.parametrize("around", [-5, -4, -3, -1, 0, 1, 4, 5, WINDOW])
def test_rows_may_end_anywhere_in_the_window_and_exceed_it(around: int) -> None:
    large = os.urandom(WINDOW + around)
    rows = [(0, b""), (0, large), (0, b"after"), (0, b""), (0, large[::-1])]
    (tuples,) = spooled(rows, 1)
    assert list(tuples) == [row for _, row in rows]


def test_many_small_rows_fill_more_than_one_window() -> None:
    rows = [(0, b"%07d" % number) for number in range(3 * WINDOW // 11)]
    (tuples,) = spooled(rows, 1)
    assert list(tuples) == [row for _, row in rows]


def test_a_large_row_among_those_of_another_owner() -> None:
    large = os.urandom(2 * WINDOW)
    rows = [(0, b"1"), (1, large), (0, b"2"), (1, b"x"), (1, b"y"), (0, b"3"), (0, b"4")]
    first, second = spooled(rows, 2)
    assert list(first) == [b"1", b"2", b"3", b"4"]
    assert list(second) == [large, b"x", b"y"]


def test_an_owner_without_rows_reads_none() -> None:
    empty, _ = spooled([(1, b"x")], 2)
    assert (len(empty), list(empty)) == (0, [])


def test_two_readers_in_step_do_not_disturb_each_other() -> None:
    rows = [(number % 2, b"%d" % number) for number in range(100)]
    first, second = spooled(rows, 2)
    pairs = list(zip_longest(first, second, first))
    assert pairs == [(b"%d" % n, b"%d" % (n + 1), b"%d" % n) for n in range(0, 100, 2)]


def test_readers_on_several_threads_read_the_same() -> None:
    rows = [(number % 3, os.urandom(number % 5000)) for number in range(600)]
    owners = spooled(rows, 3)
    with ThreadPoolExecutor(6) as threads:
        found: list[list[bytes]] = list(threads.map(list, owners * 4))
    expected = [[row for whose, row in rows if whose == owner] for owner in range(3)]
    assert found == expected * 4


def test_a_reader_keeps_the_file_alive_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    process = psutil.Process()
    # What other tests have left is closed before it is counted.
    gc.collect()
    before = process.num_fds()
    spool = Spool(tmp_path)
    tuples = SpooledTuples(spool)
    spool.append(b"row", tuples)
    spool.seal()
    del spool
    gc.collect()
    assert list(tuples) == [b"row"]
    assert (
        list(tmp_path.iterdir()) == []
    )  # the file has no name, so that not even a crash leaves it
    del tuples
    gc.collect()
    assert process.num_fds() == before


def test_a_file_that_was_cut_short_is_an_error_and_no_end() -> None:
    spool = Spool()
    tuples = SpooledTuples(spool)
    spool.append(b"first", tuples)
    spool.seal()
    # Never flushed: it stands only in this process's buffer.
    spool.append(b"second", tuples)
    reader = iter(tuples)
    assert next(reader) == b"first"
    with pytest.raises(OSError, match="truncated"):
        next(reader)


def test_a_folder_that_is_not_there_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(TransientFault, match="missing: No such file or directory"):
        Spool(tmp_path / "missing")
