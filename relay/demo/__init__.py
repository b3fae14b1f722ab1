"""`relay demo`: relays events of a publisher on a private PostgreSQL, and verifies the result from the database."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from relay.demo.embedded import Cluster
from relay.demo.performance import Log, play
from relay.demo.report import facts, judge
from relay.demo.screen import Screen
from relay.demo.shop import Scale
from relay.faults import ConfigurationError
from relay.spark.jvm import java_home

__all__ = ["Scale", "run_demo"]

SERVER_SETTINGS = {"track_commit_timestamp": "on"}
"""Records when an effect was committed, by the clock of the server that stamped its event."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_demo(console: Console, directory: Path | None, scale: Scale | None = None) -> bool:
    """Run the demo, print its summary, and return whether every promise was kept. Leaves no process running.

    directory: new or empty; keeps the server's data and the logs. By default a temporary folder, removed at the end.

    Raises RelayError if the demo cannot run or go on, SystemExit on a signal.
    """
    _require_empty(directory)
    java_home()  # raises if there is none, before the server starts
    with (
        _ended_by_signals(),
        Screen(console) as screen,
        Cluster(directory, settings=SERVER_SETTINGS) as cluster,
        _undisturbed_end(),
    ):
        log = Log(cluster.directory / "relay.log")
        try:
            kept = _perform(cluster.create_database("demo"), log, screen, scale or Scale())
        except Exception:
            screen.lines("The end of relay's log:", log.tail())
            raise
        if not kept:
            screen.lines("The end of relay's log:", log.tail())
        return kept


def _perform(dsn: str, log: Log, screen: Screen, scale: Scale) -> bool:
    performance = play(dsn, log, screen, scale)
    screen.step("verifying from the database")
    checks = judge(dsn, performance)
    screen.summary(facts(dsn, performance), checks)
    return all(check.kept for check in checks)


def _require_empty(directory: Path | None) -> None:
    if directory is not None and directory.exists() and any(directory.iterdir()):
        raise ConfigurationError(f"{directory}: is not empty: name a new folder")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Turn the first signal into SystemExit, so that everything is stopped; ignore later ones."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def end(number: int, _: FrameType | None) -> None:
        _ignore_signals()
        # psycopg warns about a connection that is closed during a query.
        logging.getLogger("psycopg").setLevel(logging.CRITICAL)
        raise SystemExit(128 + number)

    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _undisturbed_end() -> Iterator[None]:
    """Ignore signals at the end of the block: they must not interrupt the cleanup."""
    try:
        yield
    finally:
        _ignore_signals()


def _ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
