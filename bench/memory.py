"""Measures the resident memory of relay's processes, and the time to the first event."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Self

import psutil

from bench.outbox import Backlog, Outbox, wait_until
from bench.relaying import Relay
from bench.results import Measurement

EVERY_SECONDS = 0.1
MIB = 2**20


class Footprint:
    """The peaks, in MiB, of a process and its descendants while the context lasts, sampled every 0.1 s."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._done = Event()
        self._thread = Thread(target=self._sample, daemon=True)
        self.peaks: Measurement = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(EVERY_SECONDS):
            sizes = self._resident()
            for name, size in {**sizes, "total MiB": sum(sizes.values())}.items():
                self.peaks[name] = max(size, self.peaks.get(name, 0.0))

    def _resident(self) -> Mapping[str, float]:
        sizes = {"driver MiB": 0.0, "JVM MiB": 0.0, "Python workers MiB": 0.0}
        with suppress(psutil.NoSuchProcess):
            sizes["driver MiB"] = self._root.memory_info().rss / MIB
            for child in self._root.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    java = "java" in child.name()
                    size = child.memory_info().rss / MIB
                    sizes["JVM MiB" if java else "Python workers MiB"] += size
        return sizes


def draining(relay: Relay, outbox: Outbox, backlog: Backlog, folder: Path) -> Measurement:
    """The peaks from the attachment to the slot to the end of the backlog."""
    with (
        outbox.copy(backlog) as slot,
        relay.warm(outbox, slot, folder) as running,
        Footprint(running.process.pid) as footprint,
    ):
        outbox.confirmed(slot, backlog, running.process)
    return footprint.peaks


def idle(relay: Relay, outbox: Outbox, folder: Path, seconds: float) -> Measurement:
    """The peaks while there are no events; a Spark session that relay starts is ready before."""
    slot = outbox.new_slot()
    with (
        relay.warm(outbox, slot, folder) as running,
        Footprint(running.process.pid) as footprint,
    ):
        time.sleep(seconds)
    outbox.drop(slot)
    return footprint.peaks


def first_event(relay: Relay, outbox: Outbox, backlog: Backlog, folder: Path) -> Measurement:
    """Seconds from the start of the process to the handler's first event, which is in the slot before."""
    arrivals = folder / "first"
    arrivals.unlink(missing_ok=True)
    arrivals.touch()
    with outbox.copy(backlog) as slot, relay.cold(outbox, slot, folder, arrivals) as running:
        wait_until(lambda: arrivals.stat().st_size > 0, "first event", 120, running.process)
        arrived = int(arrivals.read_text().split()[1])
    return {"first event s": (arrived - running.started_ns) / 1e9}
