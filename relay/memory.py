"""Tunes Python's garbage collector, and returns memory to the system.

A batch is tens of thousands of small tuples without cycles. With Python's defaults the collector walks over them again
and again, which was a fifth of all time. Objects outside cycles are freed at once all the same.

Sources: Python documentation, "gc — Garbage Collector interface"; mallopt(3); Arrow documentation, "Memory Pools".
"""

from __future__ import annotations

import ctypes
import gc

_YOUNG_OBJECTS = 100_000
_YOUNG_ROUNDS = 20
_MIDDLE_ROUNDS = 100

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 1024 * 1024


def collect_rarely() -> None:
    """Exclude everything loaded so far from garbage collection, and collect only when there are many new objects."""
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_ROUNDS, _MIDDLE_ROUNDS)


def return_large_blocks() -> None:
    """Give large buffers back to the system as soon as they are free, where the C library is glibc.

    By itself it begins to keep them after the first one, for each thread apart: up to 30 MB more, measured.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def return_arrow_blocks() -> None:
    """Let Arrow allocate with the C library: its own allocator keeps 20 MB, measured."""
    import pyarrow as pa

    pa.set_memory_pool(pa.system_memory_pool())
