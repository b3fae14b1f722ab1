"""Functions that relay, and a plain loop, call in the benchmark: `type: function`, named in the configuration."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Sized

COUNTER, WAIT = "BENCH_COUNTER", "BENCH_WAIT"
_counters: list[mmap.mmap] = []


async def returns(delivery: Sized) -> None:
    """Count the events."""
    _add(len(delivery))


async def waits(delivery: Sized) -> None:
    """Wait as a call to another service does, then count the events."""
    await asyncio.sleep(float(os.environ[WAIT]))
    _add(len(delivery))


def _add(events: int) -> None:
    if not _counters:
        with open(os.environ[COUNTER], "r+b") as file:  # noqa: PTH123
            _counters.append(mmap.mmap(file.fileno(), 8))
    (counter,) = _counters
    counter[:8] = (int.from_bytes(counter[:8], "little") + events).to_bytes(8, "little")
