"""The set-up of a long case: databases, endpoints, instances of relay with any handlers, a publisher, and samples."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any, LiteralString

import psutil
import psycopg
import yaml

from bench.backlog import PROJECTION
from bench.environment import variables
from bench.job import Job
from bench.live import PUBLISHER, latencies
from bench.outbox import APPLICATION_NAME, Outbox, wait_until
from bench.receivers import Endpoint
from bench.results import Measurement
from relay.admin.install import initialise
from relay.config.settings import Settings

MIB = 2**20
SAMPLE_SECONDS = 0.5

STATES = "select sink, state from relay.sinks where group_id = %s"
SAMPLE = """
    select (select pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn) from pg_replication_slots
             where slot_name = %(slot)s),
           (select count(*) from pg_stat_activity
             where backend_type in ('client backend', 'walsender') and application_name not like 'bench%%'
               and datname = any(%(databases)s))
"""
DEAD = "select count(*) from relay.dead_letter_queue where group_id = %s and status = %s"
DEFERRED = "select count(*) from relay.deferred where group_id = %s"
EFFECTS = """
    select aggregate_id, (extract(epoch from pg_xact_commit_timestamp(xmin)) * 1e9)::bigint from projection
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """The state at a moment.

    `at` is the wall clock in ns, `lag` the bytes of WAL that the slot retains, `deferred` the number of deferred
    transactions, `states` the sinks', `connections` those of relay, `threads` and `resident` (MiB) of its largest
    process.
    """

    at: int
    lag: float
    deferred: int
    states: Mapping[str, str]
    connections: int
    threads: int
    resident: float


@dataclass(slots=True)
class Instance:
    """`relay run`, restarted with one configuration and one log."""

    config: Path
    process: subprocess.Popen[bytes] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self) -> None:
        command = [sys.executable, "-m", "relay", "run", "--config", str(self.config)]
        with self.config.with_suffix(".log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stderr=log, cwd=self.config.parent, env=variables(**self.environment)
            )

    def kill(self) -> None:
        """End the process with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        """End the process with SIGTERM, as an operator does."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(60)

    @property
    def usage(self) -> psutil.Process | None:
        """The process, to be asked what it uses; None while there is none."""
        if self.process is not None and self.process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                return psutil.Process(self.process.pid)
        return None

    @property
    def resident(self) -> float:
        """The resident memory in MiB; 0 while there is no process."""
        usage = self.usage
        with suppress(psutil.NoSuchProcess):
            return float(usage.memory_info().rss / MIB) if usage else 0.0
        return 0.0

    @property
    def threads(self) -> int:
        """The number of threads; 0 while there is no process."""
        usage = self.usage
        with suppress(psutil.NoSuchProcess):
            return int(usage.num_threads()) if usage else 0
        return 0


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
    """A group with any handlers, the endpoints of its sinks, and instances of relay that work it.

    `endpoints` are started and stopped with the case. `awaited` are the sinks that have to be attached before it
    begins. Without `target` the effects are in the outbox's database; other sections are of relay's configuration.
    """

    def __init__(
        self,
        outbox: Outbox,
        folder: Path,
        handlers: Mapping[str, Mapping[str, Any]],
        endpoints: Mapping[str, Endpoint],
        awaited: Sequence[str] = (),
        instances: int = 1,
        mode: str = "auto",
        target: str | None = None,
        **sections: Any,
    ) -> None:
        self.outbox, self.folder, self.endpoints = outbox, folder, endpoints
        self.phases = Phases()
        self.samples: list[Sample] = []
        self._awaited = awaited
        self.group = outbox.new_name()
        sections = {"routes": [{"handlers": list(handlers)}], **sections}
        if target:
            sections["target"] = {"dsn": target}
        handlers = {name: dict(each) for name, each in handlers.items()}
        self.config = outbox.config(self.group, mode=mode, handlers=handlers, **sections)
        self.target = _connected(target) if target else outbox.conn
        self.target.execute(PROJECTION)
        self.instances = []
        for number in range(instances):
            file = folder / f"{self.group}_{number}.yaml"
            file.write_text(yaml.safe_dump(self.config))
            self.instances.append(Instance(file))
        self._ended = Event()
        self._published = 0

    @contextmanager
    def running(self, samples: bool = True) -> Iterator[None]:
        """Run the endpoints and relay, with the awaited sinks attached, and take samples until the end.

        Without `samples`, which are commits, they are taken by `sample` only.
        """
        initialise(Settings(**self.config))
        with ExitStack() as stack:
            for endpoint in dict.fromkeys(self.endpoints.values()):
                stack.enter_context(endpoint)
            stack.callback(self.outbox.drop, self.group)
            for instance in self.instances:
                stack.callback(instance.kill)
                instance.start()
            stack.callback(self._ended.set)
            for sink in self._awaited:
                self.wait_attached(sink)
            sampler = Thread(target=self._sampling, daemon=True)
            if samples:
                sampler.start()
            yield
            self._ended.set()
            if samples:
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

    def states(self) -> dict[str, str]:
        """The state of each sink."""
        return dict(self.target.execute(STATES, (self.group,)).fetchall())

    def wait_attached(self, sink: str, seconds: float = 120.0) -> float:
        return wait_until(
            lambda: self.states().get(sink) == "attached",
            f"{sink} attached",
            seconds,
            self.instances[0].process,
        )

    def wait_streaming(self) -> float:
        """Wait until relay reads its slot."""
        return wait_until(
            lambda: self.outbox.reader(self.group) is not None,
            "relay streams",
            120,
            self.instances[0].process,
        )

    def wait_applied(self, events: int) -> float:
        """Wait until the projection has so many rows."""
        return wait_until(lambda: self.applied() >= events, "the projection")

    def applied(self) -> int:
        """The number of rows in the projection."""
        row = self.target.execute("select count(*) from projection").fetchone()
        return int(row[0]) if row else 0

    @contextmanager
    def publishing(
        self,
        rate: int,
        seconds: float,
        hosts: int = 64,
        types: Mapping[str, int] | None = None,
    ) -> Iterator[Publishing]:
        """Run a publisher of one event a transaction, which ends after `seconds`.

        Its events have numbers that no other publisher of the case gives. Of `types`, every n-th event has the type.
        """
        file = self.folder / f"{self.outbox.name}.published"
        file.unlink(missing_ok=True)
        until = file.with_suffix(".until")
        until.unlink(missing_ok=True)
        job = {
            **{"dsn": self.outbox.dsn, "style": "relay", "rate": rate, "seconds": seconds},
            **{"events": 1, "hosts": hosts, "file": str(file), "until": str(until)},
            **{"first": self._published, "types": dict(types or {})},
        }
        self._published += int(rate * seconds)
        command = [sys.executable, "-m", PUBLISHER]
        with Job(PUBLISHER, job, self.folder, command, seconds=None) as publisher:
            yield Publishing(publisher, file, until)

    def arrivals(self, sink: str) -> list[tuple[int, int]]:
        """The number of each event and the clock (ns) of its arrival, in the order of arrival."""
        return [(n, clock) for name, n, clock in self.endpoints[sink].arrived() if name == sink]

    def effects(self) -> dict[int, int]:
        """The clock (ns) of the commit of each event's effect, by the event's number."""
        return {int(number): int(clock) for number, clock in self.target.execute(EFFECTS.encode())}

    def sent(self, published: Mapping[int, int], phase: str) -> dict[int, int]:
        """Of what was published, by the clock of its COMMIT: what belongs to a phase."""
        begin, end = self.phases.span(phase)
        return {number: clock for number, clock in published.items() if begin <= clock < end}

    def within(self, phase: str) -> list[Sample]:
        """The samples of a phase."""
        begin, end = self.phases.span(phase)
        return [each for each in self.samples if begin <= each.at < end]

    def latencies(self, published: Mapping[int, int], sink: str, phase: str) -> Measurement:
        """The latencies of the events that were published in a phase, and the peaks of its samples."""
        arrived: dict[int, int] = {}
        for number, clock in self.arrivals(sink):
            arrived.setdefault(number, clock)
        within = self.within(phase)
        return {
            **latencies(self.sent(published, phase), arrived, warm_up_ns=0),
            "WAL lag, MiB": max((each.lag for each in within), default=0.0) / MIB,
            "deferred": float(max((each.deferred for each in within), default=0)),
            "RSS MiB": max((each.resident for each in within), default=0.0),
        }

    def number_from(self, first: int) -> None:
        """Let the next publisher number its events from `first`."""
        self._published = first

    def deferred(self) -> int:
        """The number of deferred transactions."""
        return self._count(DEFERRED)

    def dead(self, status: str = "dead") -> int:
        """The number of dead letters with a status."""
        return self._count(DEAD, status)

    def _count(self, query: LiteralString, *more: str) -> int:
        row = self.target.execute(query, (self.group, *more)).fetchone()
        return int(row[0]) if row else 0

    def _sampling(self) -> None:
        with (
            _connected(self.outbox.dsn) as conn,
            psycopg.connect(
                self.target.info.dsn, autocommit=True, application_name=APPLICATION_NAME
            ) as target,
        ):
            while not self._ended.wait(SAMPLE_SECONDS):
                self._sample(conn, target)

    def sample(self) -> None:
        """Take a sample now."""
        self._sample(self.outbox.conn, self.target)

    def _sample(self, conn: psycopg.Connection[Any], target: psycopg.Connection[Any]) -> None:
        databases = [self.outbox.conn.info.dbname, self.target.info.dbname]
        of = {"slot": self.group, "databases": databases}
        lag, connections = conn.execute(SAMPLE, of).fetchone() or (0, 0)
        (deferred,) = target.execute(DEFERRED, (self.group,)).fetchone() or (0,)
        states = dict(target.execute(STATES, (self.group,)).fetchall())
        resident = max(instance.resident for instance in self.instances)
        threads = max(instance.threads for instance in self.instances)
        at = time.time_ns()
        self.samples.append(
            Sample(at, float(lag or 0), deferred, states, connections, threads, resident)
        )


def _connected(dsn: str) -> psycopg.Connection[Any]:
    return psycopg.connect(dsn, autocommit=True, application_name=APPLICATION_NAME)


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
