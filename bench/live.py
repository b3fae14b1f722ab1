"""Measures latencies: a consumer that waits, a publisher at a fixed rate, and their clocks joined event by event."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeVar

from bench.job import Job
from bench.outbox import Outbox
from bench.peers import Live
from bench.results import Measurement
from bench.workers.publisher import EVENTS

Name = TypeVar("Name")

WARM_UP_NS = 1_000_000_000
"""Nanoseconds whose events count as published, but not in the latencies."""
SILENCE_SECONDS = 3.0
"""A run ends after as many seconds without an arrival; the remaining events are missing."""

PUBLISHER = "bench.workers.publisher"
COMMITS = """
    select aggregate_id, (extract(epoch from pg_xact_commit_timestamp(xmin)) * 1e9)::bigint from projection
"""


class Consumer(Protocol):
    """A contender of live runs; the publisher publishes in its style."""

    @property
    def style(self) -> str: ...

    def unavailable(self) -> str | None: ...

    def consuming(self, live: Live) -> AbstractContextManager[None]:
        """A context that is entered when it is ready for events, and left when all have arrived."""


def measure(
    consumer: Consumer,
    outbox: Outbox,
    folder: Path,
    rate: int,
    seconds: float,
    events: int = EVENTS,
) -> Measurement:
    """Milliseconds from just before COMMIT to the handler and, if it has an effect, to the effect's commit."""
    arrivals, published = folder / "arrivals", folder / "published"
    published.unlink(missing_ok=True)
    # Truncated, not removed: an endpoint has it open.
    arrivals.write_bytes(b"")
    outbox.conn.execute("truncate projection")
    job = {"dsn": outbox.dsn, "style": consumer.style, "rate": rate, "seconds": seconds}
    job["events"] = events
    # relay's publisher needs only psycopg, which the project's venv has.
    command = [sys.executable, "-m", PUBLISHER] if consumer.style == "relay" else None
    with consumer.consuming(Live(outbox, folder, arrivals)):
        with Job(PUBLISHER, {**job, "file": str(published)}, folder, command) as publisher:
            reached = float(publisher.answer("done")["rate"])
        sent = _clocks(published.read_text().splitlines())
        _wait_for_arrivals(arrivals, len(sent))
        time.sleep(0.5)
    arrived = _clocks(arrivals.read_text().splitlines())
    effects = {name: int(clock) for name, clock in outbox.conn.execute(COMMITS.encode())}
    figures = {
        **{"transactions/s": reached, "missing": float(len(sent.keys() - arrived.keys()))},
        **latencies(sent, arrived),
    }
    return {**figures, **latencies(sent, effects, "durable ")} if effects else figures


def latencies(
    sent: Mapping[Name, int],
    arrived: Mapping[Name, int],
    prefix: str = "",
    warm_up_ns: int = WARM_UP_NS,
) -> Measurement:
    """Percentiles, in milliseconds, from one clock to the other (both in ns), of the names that both have."""
    begin = min(sent.values(), default=0) + warm_up_ns
    delays = sorted(
        (arrived[name] - clock) / 1e6
        for name, clock in sent.items()
        if name in arrived and clock >= begin
    )
    if len(delays) < 2:
        return {}
    centiles = statistics.quantiles(delays, n=100, method="inclusive")
    names = {"p50": centiles[49], "p95": centiles[94], "p99": centiles[98], "max": delays[-1]}
    return {prefix + name: value for name, value in names.items()}


def _clocks(lines: Iterable[str]) -> dict[str, int]:
    """The first clock of each aggregate: a redelivery is not late."""
    clocks: dict[str, int] = {}
    for line in lines:
        name, clock = line.split()
        clocks.setdefault(name, int(clock))
    return clocks


def _wait_for_arrivals(arrivals: Path, expected: int) -> None:
    lines, since = -1, time.monotonic()
    while lines < expected and time.monotonic() - since < SILENCE_SECONDS:
        count = arrivals.read_bytes().count(b"\n")
        if count != lines:
            lines, since = count, time.monotonic()
        time.sleep(0.05)
