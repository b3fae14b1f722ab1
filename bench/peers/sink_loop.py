"""Hand-written loops over a client library that deliver the outbox to an endpoint or a broker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.environment import no_venv
from bench.job import Job
from bench.outbox import Outbox, wait_until
from bench.peers import Live
from bench.receivers import Receiver, delivering
from bench.results import Measurement

WORKER = "bench.workers.sink_loop"


@dataclass(frozen=True, slots=True)
class SinkLoop:
    """Reads the outbox in order, waits for every confirmation, keeps each host's order, and stores its position."""

    receiver: Receiver
    style: str = "relay"

    def unavailable(self) -> str | None:
        return no_venv()

    def deliver(self, outbox: Outbox, events: int, folder: Path) -> Measurement:
        """Events a second, from the connection to the last event."""
        with self._job(outbox, folder, follows=False) as job:
            job.answer("ready")
            with delivering(events, job.pid) as figures:
                wait_until(lambda: self.receiver.received() >= events, "every event")
        return figures

    @contextmanager
    def consuming(self, live: Live) -> Iterator[None]:
        with self._job(live.outbox, live.folder, follows=True) as job:
            job.answer("ready")
            yield

    def _job(self, outbox: Outbox, folder: Path, follows: bool) -> Job:
        job = {"dsn": outbox.dsn, "follows": follows, **self.receiver.loop}
        return Job(WORKER, job, folder)
