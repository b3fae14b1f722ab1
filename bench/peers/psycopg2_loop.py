"""A hand-written loop over psycopg2's replication connection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.environment import no_venv
from bench.job import Job
from bench.outbox import PUBLICATION, Backlog, Outbox
from bench.peers import Live

WORKER = "bench.workers.psycopg2_loop"


@dataclass(frozen=True, slots=True)
class Psycopg2Loop:
    """`consume_stream`, with every column decoded in Python; with an effect, one commit for each transaction.

    `effect` says that of live runs.
    """

    effect: bool = False
    name: str = "psycopg2 loop"
    style: str = "relay"

    def unavailable(self) -> str | None:
        return no_venv()

    def drain(self, outbox: Outbox, backlog: Backlog, folder: Path, effect: bool) -> float:
        with outbox.copy(backlog) as slot:
            job = {
                **{"dsn": outbox.dsn, "slot": slot, "publication": PUBLICATION},
                **{"events": backlog.events, "effect": effect},
            }
            with Job(WORKER, job, folder) as worker:
                started = outbox.streaming(slot)
                return backlog.events / (float(worker.answer("done")["at"]) - started)

    @contextmanager
    def consuming(self, live: Live) -> Iterator[None]:
        slot = live.outbox.new_slot()
        job = {
            **{"dsn": live.outbox.dsn, "slot": slot, "publication": PUBLICATION},
            **{"events": None, "effect": self.effect, "arrivals": str(live.arrivals)},
        }
        with Job(WORKER, job, live.folder):
            live.outbox.streaming(slot)
            yield
        live.outbox.drop(slot)
