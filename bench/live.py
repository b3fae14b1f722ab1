"""One live run: a consumer that waits, a publisher at its pace, and the two clocks joined event by event."""

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

Name = TypeVar("Name")

WARM_UP_NS = 1_000_000_000
"""Events of the first second count as published, but not in the latencies."""
SILENCE_SECONDS = 3.0
"""What has not come after this long without any arrival is missing."""

PUBLISHER = "bench.workers.publisher"
COMMITS = """
    select aggregate_id, (extract(epoch from pg_xact_commit_timestamp(xmin)) * 1e9)::bigint from projection
"""


class Consumer(Protocol):
    """A contender of live runs: what it reads is published in its own style."""

    @property
    def style(self) -> str: ...

    def unavailable(self) -> str | None: ...

    def consuming(self, live: Live) -> AbstractContextManager[None]:
        """Entered when it is ready for events, left when all have come."""


def measure(
    consumer: Consumer, outbox: Outbox, folder: Path, rate: int, seconds: float
) -> Measurement:
    """Milliseconds from just before COMMIT to the handler, and to the commit of its effect if it has one."""
    arrivals, published = folder / "arrivals", folder / "published"
    published.unlink(missing_ok=True)
    # Emptied, since an endpoint has it open already.
    arrivals.write_bytes(b"")
    outbox.conn.execute("truncate projection")
    job = {"dsn": outbox.dsn, "style": consumer.style, "rate": rate, "seconds": seconds}
    # relay's publisher needs no more than psycopg, which the project's venv has.
    command = [sys.executable, "-m", PUBLISHER] if consumer.style == "relay" else None
    with consumer.consuming(Live(outbox, folder, arrivals)):
        with Job(PUBLISHER, {**job, "file": str(published)}, folder, command) as publisher:
            reached = float(publisher.answer("done")["rate"])
        sent = _clocks(published.read_text().splitlines())
        _settle(arrivals, len(sent))
        time.sleep(0.5)
    came = _clocks(arrivals.read_text().splitlines())
    effects = {name: int(clock) for name, clock in outbox.conn.execute(COMMITS.encode())}
    found = {
        **{"transactions/s": reached, "missing": float(len(sent.keys() - came.keys()))},
        **latencies(sent, came),
    }
    return {**found, **latencies(sent, effects, "durable ")} if effects else found


def latencies(
    sent: Mapping[Name, int],
    came: Mapping[Name, int],
    prefix: str = "",
    warm_up_ns: int = WARM_UP_NS,
) -> Measurement:
    """Milliseconds from one clock (ns) to the other, of what is in both."""
    begin = min(sent.values(), default=0) + warm_up_ns
    found = sorted(
        (came[name] - clock) / 1e6
        for name, clock in sent.items()
        if name in came and clock >= begin
    )
    if len(found) < 2:
        return {}
    centiles = statistics.quantiles(found, n=100, method="inclusive")
    names = {"p50": centiles[49], "p95": centiles[94], "p99": centiles[98], "max": found[-1]}
    return {prefix + name: value for name, value in names.items()}


def _clocks(lines: Iterable[str]) -> dict[str, int]:
    """The first clock of each aggregate: what comes a second time is not late."""
    clocks: dict[str, int] = {}
    for line in lines:
        name, clock = line.split()
        clocks.setdefault(name, int(clock))
    return clocks


def _settle(arrivals: Path, expected: int) -> None:
    lines, since = -1, time.monotonic()
    while lines < expected and time.monotonic() - since < SILENCE_SECONDS:
        found = arrivals.read_bytes().count(b"\n")
        if found != lines:
            lines, since = found, time.monotonic()
        time.sleep(0.05)
