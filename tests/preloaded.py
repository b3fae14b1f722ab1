"""Starts commands of relay by forking a process that has imported relay: imports are most of what a start costs.

The command is a process of its own, with its own arguments, environment, folder and files, as if it had been started by
`python -m relay`. One such process serves all tests of a pytest process, and ends with it.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple, NoReturn

import typer.main

ROOT = Path(__file__).resolve().parent.parent

_MODULES = (
    *("pandas", "pyarrow", "pyspark.sql", "relay.cli.app", "relay.supervisor", "relay.service"),
    *("relay.admin.check", "relay.admin.install", "relay.admin.status", "relay.admin.dead_letters"),
    *("relay.admin.offsets", "relay.admin.queues", "relay.handlers.sql", "relay.handlers.python"),
    *("relay.observe.observer", "relay.sinks.http", "typer._adapters"),
)
"""What most commands import."""
_AT_START = ("PYTHON", "LC_", "LANG", "COLUMNS", "LINES", "TERM", "TZ", "LD_", "MALLOC_")
"""Beginnings of the names of variables that count when Python starts or relay is imported."""
_FORKABLE = frozenset({"PYTHONPATH", "PYTHONFAULTHANDLER"})


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether a process that is forked heeds all of these variables, which differ from the tests' own."""
    return all(
        name in _FORKABLE or not name.startswith(_AT_START)
        for name, value in environment.items()
        if os.environ.get(name) != value
    )


class Forked:
    """A running command of relay, with the part of `subprocess.Popen` that the tests use."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        files: Sequence[int],
        cwd: Path | None = None,
    ) -> None:
        """`files` are the descriptors for its standard input, output and errors."""
        self.args = ["python", "-m", "relay", *arguments]
        self.returncode: int | None = None
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(_server())
        socket.send_fds(self._connection, [b"\n"], list(files))
        asked = _Request(list(arguments), dict(environment), str(cwd or Path.cwd()))
        self._connection.sendall(json.dumps(asked).encode() + b"\n")
        self._answers = self._connection.makefile()
        self.pid = int(self._answers.readline())

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(self._answers.readline())
            self._answers.close()
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


@cache
def _server() -> str:
    """Start the process that forks; returns the path of its socket."""
    folder = Path(mkdtemp(prefix="relay-tests-"))
    path = folder / "socket"
    # It ends when this process does, since its standard input ends.
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.preloaded", path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert server.stdin
    assert server.stdout
    assert server.stdout.readline() == b"ready\n"

    def end() -> None:
        assert server.stdin
        server.stdin.close()
        server.wait(30)
        path.unlink()
        folder.rmdir()

    atexit.register(end)
    return str(path)


class _Request(NamedTuple):
    """What to run, and where."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str


class _Forking:
    """The process that forks. Descriptors 0 to 2 are for what it forks, so its own are moved away."""

    def __init__(self, path: str) -> None:
        self.owner = os.dup(0)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(16)
        self.ended, self.wake = os.pipe()
        os.set_blocking(self.wake, False)
        self.running: dict[int, socket.socket] = {}
        self.inherited = {number: signal.getsignal(number) for number in _HANDLED}
        # A child that ends writes to the pipe.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        # Ctrl-C in a terminal reaches it, too.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def serve(self) -> _Request | None:
        """Fork for each request until the tests end; in a forked process, return what it was asked."""
        with selectors.DefaultSelector() as selector:
            for each in (self.owner, self.listener, self.ended):
                selector.register(each, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self.ended in ready:
                    os.read(self.ended, 4096)
                    self.report()
                if self.owner in ready:
                    return None
                if self.listener in ready:
                    connection, _ = self.listener.accept()
                    asked = self.fork(connection)
                    if asked is not None:
                        return asked

    def fork(self, connection: socket.socket) -> _Request | None:
        """Read a request and fork; returns it in the forked process only."""
        _, files, _, _ = socket.recv_fds(connection, 1, 3)
        with connection.makefile() as stream:
            asked = _Request(*json.loads(stream.readline()))
        pid = os.fork()
        if pid == 0:
            self.close(connection)
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            return asked
        self.running[pid] = connection
        for file in files:
            os.close(file)
        _answer(connection, pid)
        return None

    def close(self, connection: socket.socket) -> None:
        """Leave nothing of this process in the forked one."""
        signal.set_wakeup_fd(-1)
        for number, handler in self.inherited.items():
            signal.signal(number, handler)
        for each in (self.listener, connection, *self.running.values()):
            each.close()
        for descriptor in (self.owner, self.ended, self.wake):
            os.close(descriptor)

    def report(self) -> None:
        """Tell the tests which commands have ended."""
        while self.running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with self.running.pop(pid) as connection:
                _answer(connection, os.waitstatus_to_exitcode(status))


_HANDLED = (signal.SIGCHLD, signal.SIGINT)


def _answer(connection: socket.socket, number: int) -> None:
    # A test that failed may have closed it.
    with suppress(OSError):
        connection.sendall(f"{number}\n".encode())


def _name_after_this_process() -> None:
    """Put this process's id for that of its parent where relay has named the instance on import."""
    former, own = f":{os.getppid()}", f":{os.getpid()}"
    for module in [each for name, each in sys.modules.items() if name.startswith("relay.")]:
        for name, value in vars(module).items():
            if isinstance(value, str) and value.endswith(former):
                setattr(module, name, value.removesuffix(former) + own)


def _run(request: _Request) -> None:
    """Do what Python does for `-m relay` in this environment."""
    arguments, environment, folder = request
    _name_after_this_process()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    time.tzset()
    if environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    first = [folder, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:] = [*first, *(each for each in sys.path if each != str(ROOT))]
    sys.argv[1:] = arguments
    try:
        runpy.run_module("relay", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        _end(end.code or 0)
    _end(0)


def _end(status: int) -> NoReturn:
    """End as Python does, but leave the memory to the kernel: to take modules apart would copy what is shared."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _build_commands() -> None:
    """Build relay's command line once: it is the same in each forked process."""
    from relay.cli.app import app

    build = typer.main.get_command
    built: Any = build(app)
    list(built.commands.values())

    def get_command(typer_instance: typer.Typer) -> Any:
        return built if typer_instance is app else build(typer_instance)

    typer.main.get_command = get_command


def _main() -> None:
    for name in _MODULES:
        __import__(name)
    _build_commands()
    forking = _Forking(sys.argv[1])
    # The collector of a forked process leaves these objects, and so their memory stays shared.
    gc.collect()
    gc.freeze()
    os.write(1, b"ready\n")
    asked = forking.serve()
    if asked is not None:
        _run(asked)


if __name__ == "__main__":
    _main()
