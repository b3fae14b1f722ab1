"""The set-up of an outage's case: a database, two endpoints, instances of relay, a publisher, and samples."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import psycopg
import yaml

from bench.backlog import STATEMENTS
from bench.environment import variables
from bench.job import Job
from bench.live import PUBLISHER, latencies
from bench.outbox import Outbox, wait_until
from bench.receivers import Endpoint
from bench.results import Measurement
from relay.admin.install import initialise
from relay.config.settings import Settings

HEALTHY, OTHER, PROJECTION = "healthy", "other", "projection"
MIB = 2**20
SAMPLE_SECONDS = 0.5

SAMPLE = """
    select (select pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn) from pg_replication_slots
             where slot_name = %(slot)s),
           (select count(*) from relay.deferred where group_id = %(slot)s),
           (select state from relay.sinks where group_id = %(slot)s and sink = %(sink)s)
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """The state at a moment.

    `at` is the wall clock in ns, `lag` the bytes of WAL that the slot retains, `deferred` the number of deferred
    transactions, `state` the other sink's, and `resident` relay's memory in MiB.
    """

    at: int
    lag: float
    deferred: int
    state: str
    resident: float


@dataclass(slots=True)
class Instance:
    """`relay run`, restarted with one configuration and one log."""

    config: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "relay", "run", "--config", str(self.config)]
        with self.config.with_suffix(".log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stderr=log, cwd=self.config.parent, env=variables()
            )

    def kill(self) -> None:
        """End the process with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @property
    def resident(self) -> float:
        """The resident memory in MiB; 0 while there is no process."""
        if self.process is not None:
            with suppress(psutil.NoSuchProcess):
                return float(psutil.Process(self.process.pid).memory_info().rss / MIB)
        return 0.0


@dataclass(slots=True)
class Phases:
    """The time when each phase of a case began (wall clock, ns); the last phase continues to the end."""

    begins: dict[str, int] = field(default_factory=dict)

    def begin(self, name: str) -> None:
        self.begins[name] = time.time_ns()

    def span(self, name: str) -> tuple[int, int]:
        begins = list(self.begins)
        following = begins.index(name) + 1
        end = self.begins[begins[following]] if following < len(begins) else 1 << 63
        return self.begins[name], end


class Case:
    """A database, two endpoints, and a group with a projection and a sink for each endpoint.

    `other` has additional settings of the other sink.
    """

    def __init__(
        self,
        outbox: Outbox,
        folder: Path,
        other: Mapping[str, Any] | None = None,
        instances: int = 1,
    ) -> None:
        self.outbox, self.folder = outbox, folder
        self.phases = Phases()
        self.samples: list[Sample] = []
        self.endpoints = {
            HEALTHY: Endpoint(folder, folder / f"{outbox.name}.{HEALTHY}"),
            OTHER: Endpoint(folder, folder / f"{outbox.name}.{OTHER}"),
        }
        handlers = {
            PROJECTION: dict(STATEMENTS["each: event"]),
            HEALTHY: self.endpoints[HEALTHY].handler,
            OTHER: {**self.endpoints[OTHER].handler, **(other or {})},
        }
        self.group = outbox.new_name()
        self.config = outbox.config(
            self.group, mode="auto", handlers=handlers, routes=[{"handlers": list(handlers)}]
        )
        self.instances = []
        for number in range(instances):
            file = folder / f"{self.group}_{number}.yaml"
            file.write_text(yaml.safe_dump(self.config))
            self.instances.append(Instance(file))
        self._ended = Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the endpoints and relay, with both sinks attached, and take samples until the end."""
        initialise(Settings(**self.config))
        with ExitStack() as stack:
            for endpoint in self.endpoints.values():
                stack.enter_context(endpoint)
            for instance in self.instances:
                stack.callback(instance.kill)
                instance.start()
            stack.callback(self._ended.set)
            self.wait_attached(HEALTHY)
            self.wait_attached(OTHER)
            sampler = Thread(target=self._sample, daemon=True)
            sampler.start()
            yield
            self._ended.set()
            sampler.join()

    def command(self, *words: str) -> None:
        """Run a command of relay on this group."""
        config = str(self.instances[0].config)
        subprocess.run(
            [sys.executable, "-m", "relay", *words, "--config", config],
            check=True,
            stdout=subprocess.DEVNULL,
            env=variables(),
        )

    def state(self, sink: str) -> str:
        found = self.outbox.value(
            "select state from relay.sinks where group_id = %s and sink = %s", self.group, sink
        )
        return str(found)

    def wait_attached(self, sink: str, seconds: float = 120.0) -> float:
        return wait_until(lambda: self.state(sink) == "attached", f"{sink} attached", seconds)

    @contextmanager
    def publishing(self, rate: int, seconds: float, hosts: int = 64) -> Iterator[Publishing]:
        """Run a publisher of one event a transaction, which ends after `seconds`."""
        file = self.folder / f"{self.outbox.name}.published"
        until = file.with_suffix(".until")
        job = {
            **{"dsn": self.outbox.dsn, "style": "relay", "rate": rate, "seconds": seconds},
            **{"events": 1, "hosts": hosts, "file": str(file), "until": str(until)},
        }
        command = [sys.executable, "-m", PUBLISHER]
        with Job(PUBLISHER, job, self.folder, command, seconds=None) as publisher:
            yield Publishing(publisher, file, until)

    def arrivals(self, sink: str) -> list[tuple[int, int]]:
        """The number of each event and the clock (ns) of its arrival, in the order of arrival."""
        lines = (self.folder / f"{self.outbox.name}.{sink}").read_text().splitlines()
        return [(int(number), int(clock)) for number, clock in map(str.split, lines)]

    def latencies(self, published: Mapping[int, int], sink: str, phase: str) -> Measurement:
        """The latencies of the events that were published in a phase, and the peaks of its samples."""
        begin, end = self.phases.span(phase)
        sent = {number: clock for number, clock in published.items() if begin <= clock < end}
        arrived: dict[int, int] = {}
        for number, clock in self.arrivals(sink):
            arrived.setdefault(number, clock)
        within = [each for each in self.samples if begin <= each.at < end]
        return {
            **latencies(sent, arrived, warm_up_ns=0),
            "WAL lag, MiB": max((each.lag for each in within), default=0.0) / MIB,
            "deferred": float(max((each.deferred for each in within), default=0)),
            "RSS MiB": max((each.resident for each in within), default=0.0),
        }

    def _sample(self) -> None:
        with psycopg.connect(self.outbox.dsn, autocommit=True) as conn:
            while not self._ended.wait(SAMPLE_SECONDS):
                of = {"slot": self.group, "sink": OTHER}
                row = conn.execute(SAMPLE.encode(), of).fetchone()
                assert row is not None
                resident = max(instance.resident for instance in self.instances)
                lag, deferred, state = row
                self.samples.append(
                    Sample(time.time_ns(), float(lag or 0), deferred, str(state), resident)
                )


@dataclass(frozen=True, slots=True)
class Publishing:
    """A running publisher."""

    publisher: Job
    file: Path
    until: Path

    def end(self) -> dict[int, int]:
        """End it now; returns as `done`."""
        self.until.touch()
        return self.done()

    def done(self) -> dict[int, int]:
        """Wait for its end; returns the clock (ns) just before each event's COMMIT, by the event's number."""
        self.publisher.answer("done")
        lines = self.file.read_text().splitlines()
        return {int(number): int(clock) for number, clock in map(str.split, lines)}
