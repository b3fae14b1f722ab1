"""The peers' side of the benchmark: a process reads its arguments, answers, and notes the arrival of events."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from typing import Any


def arguments() -> dict[str, Any]:
    """The JSON object with which the benchmark started this process."""
    job: dict[str, Any] = json.loads(sys.argv[-1])
    return job


def say(word: str, **fields: Any) -> None:
    """Answer the benchmark."""
    print(json.dumps({"said": word, **fields}), flush=True)


class Arrivals:
    """A file with a line for each event: its aggregate_id and the clock (ns) of its arrival."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def note(self, aggregates: Iterable[str | None]) -> None:
        """Note that these arrived now, in one write(2), so that lines of several threads do not mix."""
        now = time.time_ns()
        os.write(self._file, "".join(f"{name} {now}\n" for name in aggregates).encode())
