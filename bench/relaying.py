"""relay as a contender: `relay run` in a process of its own, as a user starts it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.environment import variables
from bench.handlers import ARRIVALS
from bench.outbox import Backlog, Outbox, wait_until
from bench.peers import Live
from relay.config import Settings
from relay.install import initialise

NOTHING = {"type": "python", "callable": "bench.handlers:nothing"}
WAIT = {"type": "python", "callable": "bench.handlers:wait"}
NOTE = {"type": "python", "callable": "bench.handlers:note"}
NOTE_AND_INSERT = {"type": "python", "callable": "bench.handlers:note_and_insert"}

# As many events as a batch may hold: every batch is inline, and no Spark session is started.
INLINE = {"inline_max_events": 10_000}
SPARK = {"inline_max_events": 0}
SESSION_READY = "the Spark session is ready"


@dataclass(frozen=True, slots=True)
class Running:
    """A relay process and its log."""

    process: subprocess.Popen[bytes]
    log: Path

    def said(self, words: str) -> float:
        """Wait until it has logged the words; returns the monotonic clock."""
        return wait_until(lambda: words in self.log.read_text(), words, 120, self.process)


@dataclass(frozen=True, slots=True)
class Relay:
    """relay with one handler, inline or on Spark; everything else is the default."""

    name: str
    handler: Mapping[str, str]
    spark: bool = False
    master: str = "local[*]"
    batch: Mapping[str, int] | None = None
    style: str = "relay"

    def unavailable(self) -> str | None:
        return None

    def drain(self, outbox: Outbox, backlog: Backlog, folder: Path, effect: bool) -> float:
        """On Spark the slot is kept from relay until its session is ready, so that nothing is received before."""
        with outbox.copy(backlog) as slot, ExitStack() as hold:
            initialise(self._settings(outbox, slot))
            if self.spark:
                hold.enter_context(outbox.held(slot))
            holder = outbox.reader(slot)
            with self.running(outbox, slot, folder) as running:
                if self.spark:
                    running.said(SESSION_READY)
                    hold.close()
                started = wait_until(
                    lambda: outbox.reader(slot) not in (None, holder),
                    "relay attached",
                    120,
                    running.process,
                )
                finished = outbox.confirmed(slot, backlog, running.process)
            if effect and outbox.applied() != backlog.events:
                raise AssertionError(f"{outbox.applied()} of {backlog.events} rows")
            return backlog.events / (finished - started)

    def catch_up(self, outbox: Outbox, group: str, events: int, folder: Path) -> float:
        """Rows a second by polling from the first row on, counted from the moment the Spark session is ready."""
        outbox.conn.execute("truncate projection")
        initialise(self._settings(outbox, group, "poll"), start="beginning")
        query = "select min(next_offset) from relay.consumer_offsets where group_id = %s"
        with self.running(outbox, group, folder, "poll") as running:
            started = running.said(SESSION_READY)
            # Hosts differ in their last offset; the gap at the end is less than one batch.
            last = int(outbox.value("select max(c_offset) from outbox_message_t"))
            wait_until(
                lambda: int(outbox.value(query, group)) > last - 2_000,
                "caught up",
                process=running.process,
            )
            finished = wait_until(
                lambda: outbox.applied() >= events, "every row", process=running.process
            )
        return events / (finished - started)

    @contextmanager
    def consuming(self, live: Live) -> Iterator[None]:
        with self.attached(live.outbox, live.outbox.new_slot(), live.folder, live.arrivals):
            yield

    @contextmanager
    def attached(
        self, outbox: Outbox, slot: str, folder: Path, arrivals: Path | None = None
    ) -> Iterator[Running]:
        """A relay that reads the slot, which is dropped at the end."""
        initialise(self._settings(outbox, slot))
        noted = {ARRIVALS: str(arrivals)} if arrivals else {}
        with self.running(outbox, slot, folder, environment=noted) as running:
            outbox.streaming(slot)
            yield running
        outbox.drop(slot)

    @contextmanager
    def running(
        self,
        outbox: Outbox,
        slot: str,
        folder: Path,
        mode: str = "wal",
        environment: Mapping[str, str] | None = None,
    ) -> Iterator[Running]:
        """`relay run`, ended with SIGTERM."""
        log = folder / f"{slot}.log"
        file = folder / f"{slot}.yaml"
        file.write_text(yaml.safe_dump(self._config(outbox, slot, mode)))
        command = [sys.executable, "-m", "relay", "run", "--config", str(file)]
        with log.open("w") as stream:
            process = subprocess.Popen(
                command, stderr=stream, cwd=folder, env=variables(**(environment or {}))
            )
        try:
            yield Running(process, log)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _settings(self, outbox: Outbox, slot: str, mode: str = "wal") -> Settings:
        return Settings(**self._config(outbox, slot, mode))

    def _config(self, outbox: Outbox, slot: str, mode: str) -> dict[str, Any]:
        batch = self.batch if self.batch is not None else SPARK if self.spark else INLINE
        return outbox.config(
            slot,
            mode,
            batch=dict(batch),
            spark={"master": self.master},
            handlers={"bench": dict(self.handler)},
            routes=[{"handlers": ["bench"]}],
        )
