"""Shows the progress of a long catch-up: a bar on a terminal, a log line every ten seconds elsewhere."""

from __future__ import annotations

import logging
import sys
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from relay.model.batch import Batch, Outcome
from relay.pipeline.listeners import BatchListener
from relay.runtime.parts import Part

log = logging.getLogger(__name__)

MINIMUM_EVENTS = 50_000
"""Least number of unread rows of a catch-up that is shown."""
LOG_SECONDS = 10.0


class CatchUp(BatchListener, Part):
    """The progress of catching up by polling: rows, rows per second, time left.

    Rows count as done when they are planned, also if another instance applies them.
    """

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._running = False
        self._began = 0.0
        self._done = 0
        self._last_logged = 0.0

    def durable(self, batch: Batch, outcome: Outcome, seconds: float) -> None:
        """Add a batch that is done."""
        window = batch.window
        left = window.left if window else 0
        if not self._running and left < MINIMUM_EVENTS:
            return
        if window is None or not self._running:
            self._end() if self._running else self._begin(left)
            return
        self._done += batch.events
        self._show(left)
        if left == 0:
            self._end()

    def close(self) -> None:
        """Remove the bar."""
        if self._running:
            self._end()

    def _begin(self, left: int) -> None:
        self._running = True
        self._began = self._last_logged = time.monotonic()
        self._done = 0
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("catching up"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]:,.0f} rows/s"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("", total=left, rate=0.0)
            self._bar.start()
        else:
            log.info("catching up", extra={"left": left, "batch": None})

    def _show(self, left: int) -> None:
        now = time.monotonic()
        rate = self._done / max(now - self._began, 0.001)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, total=self._done + left, rate=rate)
        elif now - self._last_logged > LOG_SECONDS:
            self._last_logged = now
            log.info(
                "catching up",
                extra={
                    "batch": None,
                    "rows": self._done,
                    "left": left,
                    "rows_per_second": round(rate),
                    "seconds_left": round(left / rate) if rate else None,
                },
            )

    def _end(self) -> None:
        seconds = time.monotonic() - self._began
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None
        self._running = False
        log.info(
            "caught up",
            extra={
                "batch": None,
                "rows": self._done,
                "seconds": round(seconds, 1),
                "rows_per_second": round(self._done / max(seconds, 0.001)),
            },
        )
