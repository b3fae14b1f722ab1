"""How a peer's process hears from the benchmark and answers, and how it notes when an event arrived."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from typing import Any


def arguments() -> dict[str, Any]:
    """What this process was started with."""
    found: dict[str, Any] = json.loads(sys.argv[-1])
    return found


def say(word: str, **fields: Any) -> None:
    """Tell the benchmark something."""
    print(json.dumps({"said": word, **fields}), flush=True)


class Arrivals:
    """A file with a line for each event: its aggregate_id and the clock when it came to the handler."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def note(self, aggregates: Iterable[str | None]) -> None:
        """All of these came now. One write, so that lines of several threads do not mix."""
        now = time.time_ns()
        os.write(self._file, "".join(f"{name} {now}\n" for name in aggregates).encode())
