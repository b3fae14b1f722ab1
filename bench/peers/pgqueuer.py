"""pgqueuer: jobs in its own table, claimed with SKIP LOCKED; NOTIFY wakes the worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.environment import no_venv
from bench.job import Job
from bench.outbox import Backlog, Outbox
from bench.peers import Live

WORKER = "bench.workers.pgqueuer"
DEFAULT_BATCH = 10
TUNED_BATCH = 500


@dataclass(frozen=True, slots=True)
class PgQueuer:
    """A worker with one batch size; with an effect, each job's handler commits it on its own connection."""

    label: str
    batch_size: int = DEFAULT_BATCH
    effect: bool = False
    style: str = "pgqueuer"

    @property
    def name(self) -> str:
        return f"pgqueuer, {self.label}"

    def unavailable(self) -> str | None:
        return no_venv()

    def drain(self, outbox: Outbox, backlog: Backlog, folder: Path, effect: bool) -> float:
        """Events a second of a backlog of the same size in its own table, from `run()` on."""
        with self._job(outbox, folder, backlog.events, None) as job:
            answer = job.answer("done")
            return backlog.events / (float(answer["at"]) - float(answer["started"]))

    @contextmanager
    def consuming(self, live: Live) -> Iterator[None]:
        with self._job(live.outbox, live.folder, None, live.arrivals) as job:
            job.answer("ready")
            yield

    def _job(self, outbox: Outbox, folder: Path, events: int | None, arrivals: Path | None) -> Job:
        job = {
            **{"dsn": outbox.dsn, "events": events, "batch_size": self.batch_size},
            **{"effect": self.effect, "arrivals": str(arrivals) if arrivals else None},
        }
        return Job(WORKER, job, folder)
