"""Runs the demo's relay as a process of its own, and reads its log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from relay.config.loading import load
from relay.config.settings import Settings
from relay.faults import RelayError

STOP_SECONDS = 40.0
"""Twice the `shutdown_timeout` after which relay ends itself."""
TAIL_LINES = 15


class DemoFailed(RelayError):
    """The demo cannot go on."""


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
