"""relay as a contender: `relay run` in its own process, as a user starts it."""

from __future__ import annotations

import subprocess
import sys
import time
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
from bench.receivers import Receiver, delivering
from bench.results import Measurement
from relay.admin.install import initialise
from relay.config.settings import Settings

NOTHING = {"type": "python", "callable": "bench.handlers:nothing"}
WAIT = {"type": "python", "callable": "bench.handlers:wait"}
COMPUTE = {"type": "python", "callable": "bench.handlers:compute"}
COMPUTE_1_MS = {"type": "python", "callable": "bench.handlers:compute_1_ms"}
NOTE = {"type": "python", "callable": "bench.handlers:note"}
NOTE_AND_INSERT = {"type": "python", "callable": "bench.handlers:note_and_insert"}

# The most events of a batch, so that every batch runs inline and no Spark session starts.
INLINE = {"inline_max_events": 10_000}
# Larger batches, over which a Spark job's fixed cost is spread.
SPARK = {"inline_max_events": 0, "max_events": 50_000, "max_bytes": 33_554_432}
SESSION_READY = "the Spark session is ready"
CLAIMED = "select true from relay.sinks where group_id = %s and instance is not null"
SINK_ATTACHED = "a sink is attached to the stream"


@dataclass(slots=True)
class Running:
    """A relay process, its log, the wall clock (ns) of its start, the monotonic clock of its attachment to the slot."""

    process: subprocess.Popen[bytes]
    log: Path
    started_ns: int
    attached: float = 0.0

    def said(self, words: str) -> float:
        """Wait until the log has the words; returns the monotonic clock."""
        return wait_until(lambda: words in self.log.read_text(), words, 120, self.process)


@dataclass(frozen=True, slots=True)
class Relay:
    """relay with one handler, inline or on Spark.

    Keys that are not given have their defaults, but `source.mode` is wal. `observed` says that it serves its metrics.
    """

    name: str
    handler: Mapping[str, Any]
    spark: bool = False
    master: str = "local[*]"
    batch: Mapping[str, int] | None = None
    style: str = "relay"
    mode: str = "wal"
    partitions: int = 8
    observed: bool = False

    def unavailable(self) -> str | None:
        return None

    def drain(self, outbox: Outbox, backlog: Backlog, folder: Path, effect: bool) -> float:
        with outbox.copy(backlog) as slot:
            with self.warm(outbox, slot, folder) as running:
                started = running.attached
                finished = outbox.confirmed(slot, backlog, running.process)
            if effect and outbox.applied() != backlog.events:
                raise AssertionError(f"{outbox.applied()} of {backlog.events} rows")
            return backlog.events / (finished - started)

    def drain_measured(self, outbox: Outbox, backlog: Backlog, folder: Path) -> Measurement:
        """Events a second, and relay's CPU, from its attachment to the slot to the confirmation of the last event."""
        with outbox.copy(backlog) as slot, self.warm(outbox, slot, folder) as running:
            process = running.process
            with delivering(backlog.events, process.pid) as figures:
                outbox.confirmed(slot, backlog, process)
        return figures

    @contextmanager
    def warm(
        self, outbox: Outbox, slot: str, folder: Path, arrivals: Path | None = None
    ) -> Iterator[Running]:
        """A relay that has just attached to the slot.

        If it starts a Spark session, the slot is held until the session is ready, so that relay receives nothing
        before.
        """
        with ExitStack() as hold:
            if self.starts_spark:
                hold.enter_context(outbox.held(slot))
            holder = outbox.reader(slot)
            with self.cold(outbox, slot, folder, arrivals) as running:
                if self.starts_spark:
                    running.said(SESSION_READY)
                    hold.close()
                running.attached = wait_until(
                    lambda: outbox.reader(slot) not in (None, holder),
                    "relay attached",
                    120,
                    running.process,
                )
                yield running

    @contextmanager
    def cold(
        self, outbox: Outbox, slot: str, folder: Path, arrivals: Path | None = None
    ) -> Iterator[Running]:
        """A relay that has just started."""
        initialise(self._settings(outbox, slot, self.mode))
        noted = {ARRIVALS: str(arrivals)} if arrivals else {}
        with self._running(outbox, slot, folder, self.mode, noted) as running:
            yield running

    @property
    def starts_spark(self) -> bool:
        """Whether relay starts a Spark session at once, because every batch runs there."""
        return self._batch.get("inline_max_events") == 0

    def catch_up(self, outbox: Outbox, group: str, events: int, folder: Path) -> float:
        """Rows a second by polling from the first row on, from the moment when the Spark session is ready."""
        outbox.conn.execute("truncate projection")
        initialise(self._settings(outbox, group, "poll"), start="beginning")
        query = "select min(next_offset) from relay.consumer_offsets where group_id = %s"
        with self._running(outbox, group, folder, "poll") as running:
            started = running.said(SESSION_READY)
            # Partitions differ in their last offset, by less than one batch.
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

    def deliver(self, outbox: Outbox, events: int, folder: Path, receiver: Receiver) -> Measurement:
        """Events a second to a sink that begins with the first event, from its claim to the last event."""
        group = outbox.new_name()
        with self.cold(outbox, group, folder) as running:
            process = running.process
            wait_until(lambda: bool(outbox.value(CLAIMED, group)), "sink claimed", process=process)
            figures = _delivered(process, events, receiver)
        outbox.drop(group)
        return figures

    def deliver_stream(
        self, outbox: Outbox, backlog: Backlog, folder: Path, receiver: Receiver
    ) -> Measurement:
        """Events a second to a sink that is attached to the stream, from its start to the last event."""
        with outbox.copy(backlog) as slot, self.warm(outbox, slot, folder) as running:
            return _delivered(running.process, backlog.events, receiver)

    @contextmanager
    def consuming(self, live: Live) -> Iterator[None]:
        # In another mode than wal, relay creates the group's slot.
        slot = live.outbox.new_slot() if self.mode == "wal" else live.outbox.new_name()
        with self.warm(live.outbox, slot, live.folder, live.arrivals) as running:
            if self.mode != "wal":
                running.said(SINK_ATTACHED)
            yield
        live.outbox.drop(slot)

    @contextmanager
    def _running(
        self,
        outbox: Outbox,
        slot: str,
        folder: Path,
        mode: str = "wal",
        environment: Mapping[str, str] | None = None,
    ) -> Iterator[Running]:
        """Run `relay run`, and end it with SIGTERM."""
        log = folder / f"{slot}.log"
        file = folder / f"{slot}.yaml"
        file.write_text(yaml.safe_dump(self._config(outbox, slot, mode)))
        command = [sys.executable, "-m", "relay", "run", "--config", str(file)]
        with log.open("w") as stream:
            started = time.time_ns()
            process = subprocess.Popen(
                command, stderr=stream, cwd=folder, env=variables(**(environment or {}))
            )
        try:
            yield Running(process, log, started)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def _batch(self) -> Mapping[str, int]:
        return self.batch if self.batch is not None else SPARK if self.spark else INLINE

    def _settings(self, outbox: Outbox, slot: str, mode: str = "wal") -> Settings:
        return Settings(**self._config(outbox, slot, mode))

    def _config(self, outbox: Outbox, slot: str, mode: str) -> dict[str, Any]:
        return outbox.config(
            slot,
            mode,
            partitions=self.partitions,
            batch=dict(self._batch),
            spark={"master": self.master},
            observe={"listen": "127.0.0.1:0" if self.observed else None},
            handlers={"bench": dict(self.handler)},
            routes=[{"handlers": ["bench"]}],
        )


def _delivered(process: subprocess.Popen[bytes], events: int, receiver: Receiver) -> Measurement:
    with delivering(events, process.pid) as figures:
        wait_until(lambda: receiver.received() >= events, "every event", process=process)
    return figures
