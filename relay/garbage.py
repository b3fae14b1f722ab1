"""How often Python looks for garbage.

A batch is tens of thousands of small tuples without cycles. With Python's defaults the collector walks over them again
and again, which was a fifth of all time. What is dropped without a cycle is freed at once all the same.

Source: Python documentation, "gc — Garbage Collector interface".
"""

from __future__ import annotations

import gc

_YOUNG_OBJECTS = 100_000
_YOUNG_ROUNDS = 20
_MIDDLE_ROUNDS = 100


def collect_seldom() -> None:
    """Leave out of every later look what was loaded so far, and look at what is new when there is much of it."""
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_ROUNDS, _MIDDLE_ROUNDS)
