"""Runs the steps of the demo: install, build up a backlog, drain it, publish live, stop relay.

relay runs as a process of its own; its log is read.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from psycopg.conninfo import make_conninfo

from relay.config.loading import load
from relay.config.settings import Settings
from relay.demo.screen import Screen
from relay.demo.shop import Poison, Scale, Shop
from relay.faults import RelayError
from relay.store.connections import Connection, connect

STOP_SECONDS = 40.0
"""Twice the `shutdown_timeout` after which relay ends itself."""
TAIL_LINES = 15


class DemoFailed(RelayError):
    """The demo cannot go on."""


LOGIN = """
    alter role relay login;
    grant usage on schema shop to relay;
    grant select, insert, update on all tables in schema shop to relay
"""
"""Lets relay log in as the role that `relay init` has made, with the rights that the demo's handlers need."""


def configuration_file() -> Path:
    """Return the path of the demo's configuration: in the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parent.parent
    shipped = package / "config" / "demo.yaml"
    return shipped if shipped.is_file() else package.parent / "config" / "demo.yaml"


def environment(dsn: str) -> dict[str, str]:
    """Return the environment with the demo's DSN, and without variables that name a database of the user."""
    kept = {name: text for name, text in os.environ.items() if not _is_setting(name)}
    return kept | {"RELAY_SOURCE__DSN": dsn}


def settings(dsn: str) -> Settings:
    """Load the demo's configuration, as the command does."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment(dsn))
    try:
        return load(configuration_file())
    finally:
        os.environ.clear()
        os.environ.update(before)


def _is_setting(name: str) -> bool:
    return name.upper().startswith("RELAY_")


def command(name: str, *options: str) -> list[str]:
    """Return the arguments of a relay command on the demo's configuration."""
    return [sys.executable, "-m", "relay", name, "--config", str(configuration_file()), *options]


def initialise(dsn: str) -> None:
    """Run `relay init`. Raises DemoFailed."""
    result = subprocess.run(
        command("init"),
        env=environment(dsn),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if result.returncode:
        raise DemoFailed(f"relay init failed:\n{result.stderr.strip()}")


@dataclass(frozen=True, slots=True)
class LoggedBatch:
    """A batch that relay has logged."""

    number: int
    engine: str
    events: int


class Log:
    """The file of relay's log."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def contains(self, message: str) -> bool:
        """Return whether the log has a line with this message."""
        return any(entry.get("message") == message for entry in self._entries())

    def batches(self) -> list[LoggedBatch]:
        """Return the logged batches, in order."""
        return [
            LoggedBatch(entry["batch"], entry["engine"], entry["events"])
            for entry in self._entries()
            if entry.get("message") == "batch"
        ]

    def fault(self) -> str:
        """Return the error with which relay ended; empty if it has logged none."""
        ended = (entry for entry in self._entries() if entry.get("message") == "ended by an error")
        return next((entry["fault"] for entry in ended), "")

    def tail(self) -> list[str]:
        """Return the last lines."""
        return self._lines()[-TAIL_LINES:]

    def _entries(self) -> list[dict[str, Any]]:
        # Java writes lines that are not JSON, and the last line may be incomplete.
        complete = (line for line in self._lines() if line.startswith("{") and line.endswith("}"))
        return [json.loads(line) for line in complete]

    def _lines(self) -> list[str]:
        return self.file.read_text(errors="replace").splitlines() if self.file.exists() else []


class Relay:
    """A process of `relay run`, which the constructor starts; as a context manager it ends on exit, or is killed."""

    def __init__(self, dsn: str, log: Log) -> None:
        self._log = log
        with log.file.open("wb") as file:
            self._process = subprocess.Popen(
                # relay logs each batch at level debug.
                command("run", "--log-format", "json", "--log-level", "debug"),
                env=environment(dsn),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                # A process group of its own: Ctrl-C at a terminal reaches only the demo, and __exit__ kills the group.
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            # relay, if it did not end, and a JVM that was starting, which may outlive it by seconds.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def stop(self) -> int:
        """Send SIGTERM and return the exit status. Raises DemoFailed if relay does not end."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise DemoFailed(f"relay did not end within {STOP_SECONDS:g} s of SIGTERM") from None

    def require_running(self) -> None:
        """Raise DemoFailed if relay has ended by itself."""
        status = self._process.poll()
        if status is not None:
            why = f"relay ended by itself with status {status}"
            fault = self._log.fault()
            raise DemoFailed(f"{why}: {fault}" if fault else why)


SCHEMA = Path(__file__).with_name("shop.sql")
POLL_SECONDS = 0.5
START_SECONDS = 180.0
STALL_SECONDS = 60.0
"""Longest time without progress while there are unread events."""
CONFIRM_SECONDS = 10.0

_PROGRESS = """
    select (select count(*) from public.outbox_message_t) as published,
           (select count(*) from shop.projection) + (select count(*) from relay.dead_letter_queue) as finished
"""
_CONFIRMED = """
    select confirmed_flush_lsn >= %s::pg_lsn from pg_replication_slots where database = current_database()
"""


@dataclass(frozen=True, slots=True)
class Performance:
    """What the demo did, as far as the database does not show it."""

    poisons: list[Poison]
    drained_from: datetime
    first_live_offset: int
    end: str
    exit_status: int
    batches: list[LoggedBatch]


def play(dsn: str, log: Log, screen: Screen, scale: Scale) -> Performance:
    """Run the steps of the demo in an empty database. Raises DemoFailed if relay fails."""
    with connect(dsn) as conn:
        screen.step(f"PostgreSQL {_value(conn, 'show server_version')} is running")
        conn.execute(SCHEMA.read_bytes())
        screen.step("relay init")
        initialise(dsn)
        conn.execute(LOGIN)
        service = make_conninfo(dsn, user="relay")
        screen.step("relay run")
        with Relay(service, log) as relay, screen.watching(settings(service)):
            return _Stage(conn, dsn, relay, log, screen, scale).perform()


class _Stage:
    """The running relay and its database; `conn` reads the progress."""

    def __init__(
        self, conn: Connection, dsn: str, relay: Relay, log: Log, screen: Screen, scale: Scale
    ) -> None:
        self._conn = conn
        self._dsn = dsn
        self._relay = relay
        self._log = log
        self._screen = screen
        self._scale = scale
        self._shop = Shop(scale.hosts)

    def perform(self) -> Performance:
        self._wait_for_log("streaming")
        drained_from = self._build_up_backlog()
        self._screen.step("draining the backlog")
        self._drain()
        first_live_offset = _value(
            self._conn, "select max(c_offset) + 1 from public.outbox_message_t"
        )
        end = self._publish_live()
        self._drain()
        self._wait_for_confirmation(end)
        self._screen.step("stopping relay")
        status = self._relay.stop()
        return Performance(
            self._shop.poisons,
            drained_from,
            first_live_offset,
            end,
            status,
            self._log.batches(),
        )

    def _build_up_backlog(self) -> datetime:
        """Publish the backlog and wait for Spark while the partitions are locked; return when they were released.

        Without the lock, which another instance could hold, relay applies everything inline before Spark has started.
        """
        total = self._scale.backlog
        self._screen.step(
            f"publishing {total:,} events while Spark starts and the partitions are locked"
        )
        with connect(self._dsn) as lock, lock.transaction():
            lock.execute("select from relay.group_partitions for update")
            # Ten thousand durable commits would take long on a slow disk, and the demo does not need them.
            with connect(self._dsn) as conn:
                conn.execute("set synchronous_commit = off")
                self._keep_watching(
                    self._shop.backlog(conn, self._scale),
                    lambda published, _: self._screen.show("published", published, total),
                )
            self._screen.step("waiting for Spark")
            self._wait_for_log("the Spark session is ready")
            moment: datetime = _value(lock, "select clock_timestamp()")
        return moment

    def _publish_live(self) -> str:
        """Publish at an even pace; return an LSN after the last commit."""
        scale = self._scale
        self._screen.step(
            f"publishing {scale.live_rate} transactions a second for {scale.live_seconds:g} s"
        )
        with connect(self._dsn) as conn:
            self._keep_watching(
                self._shop.live(conn, scale),
                lambda published, finished: self._screen.show("relayed", finished, published),
            )
            return str(_value(conn, "select pg_current_wal_flush_lsn()::text"))

    def _keep_watching(self, steps: Iterable[None], show: Callable[[int, int], None]) -> None:
        """Run the steps, and show every POLL_SECONDS how many events are published and finished."""
        polled_at = time.monotonic()
        for _ in steps:
            if time.monotonic() - polled_at >= POLL_SECONDS:
                self._relay.require_running()
                show(*self._progress())
                polled_at = time.monotonic()

    def _drain(self) -> None:
        """Wait until every published event is applied or dead. Raises DemoFailed if relay makes no progress."""
        seen, since = -1, time.monotonic()
        while True:
            published, finished = self._progress()
            self._screen.show("relayed", finished, published)
            if finished >= published:
                return
            if finished > seen:
                seen, since = finished, time.monotonic()
            elif time.monotonic() - since > STALL_SECONDS:
                raise DemoFailed(
                    f"relay has made no progress for {STALL_SECONDS:g} s at {finished:,} of {published:,} events"
                )
            self._relay.require_running()
            time.sleep(POLL_SECONDS / 2)

    def _progress(self) -> tuple[int, int]:
        row = self._conn.execute(_PROGRESS).fetchone()
        return row or (0, 0)

    def _wait_for_confirmation(self, end: str) -> None:
        """Wait until relay has confirmed the end of the WAL, CONFIRM_SECONDS at most; `verify` checks it."""
        deadline = time.monotonic() + CONFIRM_SECONDS
        while not _value(self._conn, _CONFIRMED, end) and time.monotonic() < deadline:
            time.sleep(0.1)

    def _wait_for_log(self, message: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._log.contains(message):
            self._relay.require_running()
            if time.monotonic() > deadline:
                raise DemoFailed(f"relay did not log {message!r} within {START_SECONDS:g} s")
            time.sleep(0.1)


def _value(conn: Connection, query: str, *parameters: object) -> Any:
    row = conn.execute(query.encode(), parameters or None).fetchone()
    return row[0] if row else None
