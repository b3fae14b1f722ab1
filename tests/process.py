"""Runs `relay` in its own process, as a user does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import psutil

from tests.outbox import Outbox, wait_until
from tests.preloaded import Forked, can_fork

ROOT = Path(__file__).resolve().parent.parent


def relay(
    *arguments: str, cwd: Path | None = None, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    with TemporaryFile() as given, TemporaryFile() as output, TemporaryFile() as errors:
        given.write(stdin.encode())
        given.seek(0)
        process = _start(arguments, environment, (given, output, errors), cwd)
        try:
            status = process.wait(120)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, status, _read(output), _read(errors))


def administer(
    outbox: Outbox, *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command that installs or changes relay's tables, as who installs relay."""
    return relay(*arguments, cwd=cwd, stdin="", RELAY_ADMIN_DSN=outbox.installer_dsn, **environment)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return TextIOWrapper(file, encoding="utf-8").read()


def _start(
    arguments: Sequence[str],
    environment: dict[str, str],
    files: tuple[IO[bytes], IO[bytes], IO[bytes]],
    cwd: Path | None = None,
    fresh: bool = False,
) -> subprocess.Popen[bytes] | Forked:
    """Start `relay`: in a new Python only if it is asked for, or the environment has something for its start."""
    whole = _environment(environment)
    if not fresh and can_fork(whole):
        return Forked(arguments, whole, [each.fileno() for each in files], cwd)
    given, output, errors = files
    return subprocess.Popen(
        [sys.executable, "-m", "relay", *arguments],
        stdin=given,
        stdout=output,
        stderr=errors,
        cwd=cwd,
        env=whole,
    )


def _environment(more: dict[str, str]) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RELAY_", "PG"))}
    # With this path, relay finds the tests' handlers in any folder.
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1", **more}


@dataclass
class Running:
    """A running `relay run` and its log, one JSON object a line."""

    process: subprocess.Popen[bytes] | Forked
    log: Path
    begun: int
    """The length of the log when this process started, in bytes."""

    def lines(self) -> list[dict[str, Any]]:
        """The lines of the log so far."""
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def said(self, message: str) -> bool:
        """Whether a log line begins with this message."""
        return any(line["message"].startswith(message) for line in self.lines())

    def wait_said(self, message: str, timeout: float = 60.0) -> None:
        """Wait for a log line."""
        wait_until(lambda: self.said(message) or self.process.poll() is not None, timeout)
        assert self.said(message), self.log.read_text()

    def kill(self) -> None:
        """End it with SIGKILL, like the kernel's out-of-memory killer."""
        self.process.kill()
        self.process.wait(30)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop it with SIGSTOP during a block, as one whose container is paused."""
        self.process.send_signal(signal.SIGSTOP)
        leader = psutil.Process(self.process.pid)
        wait_until(lambda: leader.status() == psutil.STATUS_STOPPED)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal when it has logged a line; returns the exit status."""
        wait_until(lambda: self.log.stat().st_size > self.begun or self.process.poll() is not None)
        self.process.send_signal(number)
        try:
            return self.process.wait(40)
        except subprocess.TimeoutExpired:
            # Python's fault handler writes the stack of every thread to the log.
            self.process.send_signal(signal.SIGABRT)
            self.process.wait(30)
            raise AssertionError(f"it did not stop:\n{self.log.read_text()}") from None


@contextmanager
def running(
    config: Path, *arguments: str, command: str = "run", memory: str = "", **environment: str
) -> Iterator[Running]:
    """Run `relay run`, or another command, in the background; it is killed at the end if it still runs.

    With `memory="own"` it is a new Python, whose memory has nothing but what it imports.
    """
    log = config.with_suffix(".log")
    with log.open("ab") as stream:
        begun = stream.tell()
        with Path(os.devnull).open("rb") as nothing:
            process = _start(
                [
                    *(command, "--config", str(config), "--log-format", "json"),
                    *(["--log-level", "debug"] if command == "run" else []),
                    *arguments,
                ],
                environment,
                (nothing, stream, stream),
                fresh=memory == "own",
            )
    try:
        yield Running(process, log, begun)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)
