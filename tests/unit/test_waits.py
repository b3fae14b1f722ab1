"""Waits double, up to the longest one, and a part of them may be random."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relay.waits import Backoff, doubled

seconds = st.floats(0.001, 1e6)


@given(seconds, seconds, st.integers(0, 100_000))
def test_a_wait_is_never_longer_than_the_longest(first: float, longest: float, times: int) -> None:
    assert doubled(first, times, longest) <= longest
    assert doubled(first, times + 1, longest) >= doubled(first, times, longest)


@given(seconds, seconds)
def test_waits_double_until_they_are_reset(first: float, longest: float) -> None:
    waits = Backoff(first, longest)
    taken = [waits.take() for _ in range(12)]
    assert taken == [doubled(min(first, longest), times, longest) for times in range(12)]
    waits.reset()
    assert waits.take() == min(first, longest)


def test_the_next_wait_grows_from_one_that_was_bounded() -> None:
    """Else a reader would be silent for long after it has passed events that do not match."""
    waits = Backoff(0.05, 600.0)
    assert [waits.take(0.1) for _ in range(3)] == [0.05, 0.1, 0.1]
    assert [waits.take() for _ in range(2)] == [0.1, 0.2]


@given(st.floats(0, 1))
def test_a_part_of_a_wait_is_random(part: float) -> None:
    waits = Backoff(1.0, 1.0, random_part=part)
    taken = [waits.take() for _ in range(20)]
    assert all(1 - part <= wait <= 1 for wait in taken)
