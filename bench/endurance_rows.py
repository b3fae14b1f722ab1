"""What rows of endurance have in common: one measurement for several rows, CPU, connections, and a held snapshot."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import psycopg

from bench.case import Case
from bench.outbox import APPLICATION_NAME, Outbox
from bench.plan import Plan
from bench.results import Contender, Measurement
from relay.demo.embedded import Cluster

Rows = dict[str, Measurement]
"""Figures by the name of their row."""

_numbers = itertools.count(1)


def new_outbox(plan: Plan, name: str) -> Outbox:
    """An outbox in a database of its own, without a slot that nobody reads."""
    outbox = Outbox(plan.cluster, f"{name.replace('-', '_')}_{next(_numbers)}")
    outbox.drop(f"{outbox.name}_base")
    return outbox


class Together:
    """Rows that one measurement yields. It is repeated once if it fails, not once for each row."""

    def __init__(self, measure: Callable[[], Rows]) -> None:
        self._measure = measure
        self._rows: Rows | None = None
        self._tries = 2
        self._error = Exception()

    def contender(self, name: str, against: str | None = None) -> Contender:
        """The row of this name."""
        return Contender(name, lambda: self._row(name), 1, against)

    def _row(self, name: str) -> Measurement:
        if self._rows is None:
            if not self._tries:
                raise self._error
            self._tries -= 1
            try:
                self._rows = self._measure()
            except Exception as error:
                self._error = error
                raise
        return self._rows[name]


@contextmanager
def held_snapshot(dsn: str) -> Iterator[None]:
    """Hold a snapshot in a database, as pg_dump or an analyst does."""
    with psycopg.connect(dsn, application_name=f"{APPLICATION_NAME} snapshot") as conn:
        conn.execute("set transaction isolation level repeatable read, read only")
        conn.execute("select 1")
        yield


class Consumption:
    """What relay and the server use between two moments, without the benchmark's own sessions."""

    def __init__(self, plan: Plan, case: Case) -> None:
        self._plan, self._case = plan, case
        self._at = time.monotonic()
        self._relay, self._server = self._relay_seconds(), self._server_seconds()
        self._commits = self._committed()

    def figures(self) -> Measurement:
        """CPU in percent of a core, and the commits a second of relay's databases, since it was made."""
        took = time.monotonic() - self._at
        return {
            "relay CPU, %": (self._relay_seconds() - self._relay) / took * 100,
            "server CPU, %": (self._server_seconds() - self._server) / took * 100,
            "commits/s of the databases": (self._committed() - self._commits) / took,
        }

    def _relay_seconds(self) -> float:
        used = [instance.usage for instance in self._case.instances]
        return sum(_seconds(process) for process in used if process is not None)

    def _server_seconds(self) -> float:
        return server_seconds(self._plan.cluster, self._case.outbox.conn)

    def _committed(self) -> int:
        names = [conn.info.dbname for conn in (self._case.outbox.conn, self._case.target)]
        return int(
            self._case.outbox.value(
                "select sum(xact_commit + xact_rollback) from pg_stat_database where datname = any(%s)",
                names,
            )
        )


def server_seconds(cluster: Cluster, conn: psycopg.Connection[Any]) -> float:
    """CPU seconds of all processes of the server, also of those that have ended, without the benchmark's sessions."""
    named = "select pid from pg_stat_activity where application_name like 'bench%'"
    own = {row[0] for row in conn.execute(named)}
    postmaster = psutil.Process(cluster.pid)
    of = postmaster.cpu_times()
    total = _seconds(postmaster) + of.children_user + of.children_system
    for child in postmaster.children():
        if child.pid not in own:
            with suppress(psutil.NoSuchProcess):
                total += _seconds(child)
    return total


def _seconds(process: psutil.Process) -> float:
    of = process.cpu_times()
    return float(of.user + of.system)


def peaks(case: Case, phase: str) -> Measurement:
    """The most threads, connections and memory of relay in the samples of a phase."""
    samples = case.within(phase)
    if not samples:
        return {}
    return {
        "threads": float(max(each.threads for each in samples)),
        "connections": float(max(each.connections for each in samples)),
        "RSS MiB": max(each.resident for each in samples),
    }


def left_the_stream(case: Case, phase: str, sinks: Mapping[str, Any]) -> float:
    """How many of these sinks were not attached in some sample of a phase."""
    return float(
        len(
            {
                sink
                for each in case.within(phase)
                for sink in sinks
                if each.states.get(sink) != "attached"
            }
        )
    )
