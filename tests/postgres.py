"""The PostgreSQL server of a test session: a container where Docker answers, else embedded.

`RELAY_TEST_POSTGRES` decides: `docker`, `embedded`, a folder with the binaries of another version,
or unset for a container if Docker answers and the embedded server if not.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
from psycopg import sql

from relay.demo.embedded import (
    HOST,
    SETTINGS,
    START_TIMEOUT,
    STOP_SIGNALS,
    STOP_TIMEOUT,
    Cluster,
    StopMode,
    free_port,
    uri,
)

if TYPE_CHECKING:
    from testcontainers.community.postgres import PostgresContainer

IMAGE = "postgres:18"
VARIABLE = "RELAY_TEST_POSTGRES"

_CONTAINER_PORT = 5432

# Most of what a new database costs is the disk's work on its 300 files. Tests kill processes, never the machine.
_MEMORY = Path("/dev/shm")
_ENOUGH_MEMORY = 8 << 30  # bytes

CARELESS: Mapping[str, str] = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_prepared_transactions": "4",
}
"""Settings for a server that is never killed: each database that is made or dropped is a checkpoint."""


class Server(ABC):
    """A PostgreSQL server that a test may stop, kill and start; it keeps its data and its port."""

    _kept: psycopg.Connection[Any] | None = None
    """The session that creates and drops databases, of a server that no test stops."""

    @abstractmethod
    def dsn(self, database: str = "postgres") -> str:
        """The connection URI of a database, as superuser; it need not exist."""

    @abstractmethod
    def start(self) -> None:
        """Start the server unless it runs, and wait until it accepts connections."""

    @abstractmethod
    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server and wait; `immediate` leaves recovery to the next start."""

    @abstractmethod
    def kill(self) -> None:
        """Kill every process of the server at once (SIGKILL) and wait."""

    @cached_property
    def major(self) -> int:
        """The major version."""
        with psycopg.connect(self.dsn(), autocommit=True) as connection:
            return connection.info.server_version // 10_000

    def create_database(
        self, name: str, options: LiteralString = "", template: str | None = None
    ) -> str:
        """Create a database, with options of CREATE DATABASE, and return its connection URI."""
        parts = [sql.SQL("create database {}").format(sql.Identifier(name)), sql.SQL(options)]
        if template:
            parts.append(sql.SQL("template {}").format(sql.Identifier(template)))
        with self._administering() as connection:
            if self.major >= 15:
                # Copied as files, since thousands are created: their WAL costs more than the checkpoint.
                parts.append(sql.SQL("strategy file_copy"))
            connection.execute(sql.SQL(" ").join(parts))
        return self.dsn(name)

    @contextmanager
    def keeping_session(self) -> Iterator[None]:
        """Create and drop databases in one session meanwhile: to open it is a tenth of what an outbox costs."""
        with psycopg.connect(self.dsn(), autocommit=True) as self._kept:
            try:
                yield
            finally:
                self._kept = None

    @contextmanager
    def _administering(self) -> Iterator[psycopg.Connection[Any]]:
        if self._kept is not None:
            yield self._kept
            return
        with psycopg.connect(self.dsn(), autocommit=True) as connection:
            yield connection

    def create_encoded_database(self, name: str, encoding: LiteralString) -> str:
        """Create a database of another encoding than UTF-8, and return its connection URI."""
        provider = "locale_provider libc" if self.major >= 15 else ""
        return self.create_database(
            name, f"template template0 locale 'C' {provider} encoding {encoding}"
        )

    def drop_database(self, name: str) -> None:
        """Drop a database if it exists, with its slots, connections and prepared transactions."""
        with self._administering() as connection:
            prepared = "select gid from pg_prepared_xacts where database = %s"
            for (gid,) in connection.execute(prepared, (name,)).fetchall():
                # One that a failed test has left would hold back the slots of all later tests.
                with psycopg.connect(self.dsn(name), autocommit=True) as inside:
                    inside.execute(sql.SQL("rollback prepared {}").format(gid))
            # DROP DATABASE WITH (FORCE) ends sessions, but fails while a slot of the database is active.
            connection.execute(
                "select pg_terminate_backend(active_pid, 10000) from pg_replication_slots"
                " where database = %s and active",
                (name,),
            )
            connection.execute(
                sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name))
            )


class EmbeddedServer(Server):
    """A server from binaries on this machine."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def has(self, program: str) -> bool:
        """Whether a program lies beside the server's."""
        return (self.cluster._bin / program).exists()

    def dsn(self, database: str = "postgres") -> str:
        return self.cluster.dsn(database)

    def start(self) -> None:
        self.cluster.start()

    def stop(self, mode: StopMode = "fast") -> None:
        self.cluster.stop(mode)

    def kill(self) -> None:
        self.cluster.kill()


class ContainerServer(Server):
    """A server in a container, with a published port that it keeps when it restarts."""

    def __init__(self, container: PostgresContainer, port: int) -> None:
        self.container = container
        local = _connects(port)
        self.host = HOST if local else container.get_container_host_ip()
        self.port = port if local else container.get_exposed_port(_CONTAINER_PORT)

    def dsn(self, database: str = "postgres") -> str:
        return uri(self.host, self.port, database, self.container.username, self.container.password)

    def start(self) -> None:
        if not self._running():
            self.container.get_wrapped_container().start()
        self._wait_until_ready()

    def stop(self, mode: StopMode = "fast") -> None:
        self._end(STOP_SIGNALS[mode].name)

    def kill(self) -> None:
        self._end("SIGKILL")

    def _end(self, signal: str) -> None:
        if self._running():
            self.container.get_wrapped_container().kill(signal=signal)
            self.container.get_wrapped_container().wait(timeout=STOP_TIMEOUT)

    def _running(self) -> bool:
        self.container.reload()
        return self.container.status == "running"

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            try:
                psycopg.connect(self.dsn(), connect_timeout=2).close()
            except psycopg.OperationalError:
                if time.monotonic() > deadline or not self._running():
                    raise
                time.sleep(0.05)
            else:
                return


@contextmanager
def start_server(
    settings: Mapping[str, str] | None = None, own_identifier: bool = False
) -> Iterator[Server]:
    """Run a new server, ready for logical replication, and remove it with its data at the end.

    `settings` are added to `relay.demo.embedded.SETTINGS`. Its data is a copy of what initdb made once, and has the
    system identifier of all copies, unless it is to have one of its own, which costs half a second of CPU.
    """
    choice = os.environ.get(VARIABLE) or ("docker" if docker_answers() else "embedded")
    if choice == "docker":
        with _container({**SETTINGS, **(settings or {})}) as server:
            yield server
    else:
        bin_dir = None if choice == "embedded" else Path(choice)
        with _folder_in_memory() as folder:
            cluster = Cluster(folder, settings=settings, bin_dir=bin_dir)
            if not own_identifier:
                cluster.directory.mkdir(mode=0o755, exist_ok=True)
                subprocess.run(["cp", "-a", _initialised(bin_dir), cluster.data], check=True)
            with cluster:
                yield EmbeddedServer(cluster)


@cache
def _initialised(bin_dir: Path | None) -> Path:
    """The data folder of a server that was never started."""
    open_folder = _folder_in_memory()
    folder = open_folder.__enter__()
    atexit.register(open_folder.__exit__, None, None, None)
    cluster = Cluster(folder, bin_dir=bin_dir)
    cluster._make_folders()
    cluster._initialise()
    return cluster.data


@contextmanager
def _folder_in_memory() -> Iterator[Path | None]:
    """A folder in memory for a server, where there is enough; else None."""
    if not _MEMORY.is_dir() or shutil.disk_usage(_MEMORY).free < _ENOUGH_MEMORY:
        yield None
        return
    with TemporaryDirectory(prefix="relay-postgres-", dir=_MEMORY) as folder:
        # The server's account enters it.
        Path(folder).chmod(0o755)
        yield Path(folder) / "cluster"


def docker_answers() -> bool:
    """Whether testcontainers is installed and reaches a Docker engine."""
    try:
        from testcontainers.core.docker_client import DockerClient

        client = DockerClient().client
        client.ping()
    except Exception:
        # The client raises errors of docker, requests and the operating system.
        return False
    client.close()
    return True


@contextmanager
def _container(settings: Mapping[str, str]) -> Iterator[Server]:
    from testcontainers.community.postgres import PostgresContainer

    port = free_port()
    flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    container = PostgresContainer(
        IMAGE, username="postgres", password=secrets.token_hex(8), dbname="postgres", driver=None
    )
    # Without a fixed port, Docker publishes another one at each start.
    container.with_bind_ports(_CONTAINER_PORT, port).with_command(["postgres", *flags])
    with container:
        server = ContainerServer(container, port)
        server.start()
        yield server


def _connects(port: int) -> bool:
    """Whether the published port is on this machine's loopback.

    Testcontainers names the bridge instead wherever `/.dockerenv` exists, and `localhost` may mean ::1, where Docker
    may not listen. Only a remote engine or a test in a container needs another address.
    """
    try:
        socket.create_connection((HOST, port), timeout=2).close()
    except OSError:
        return False
    return True


@contextmanager
def start_standby(primary: EmbeddedServer, settings: Mapping[str, str]) -> Iterator[EmbeddedServer]:
    """Run a streaming standby of an embedded server, which needs a physical slot `standby`."""
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        directory.chmod(0o755)
        binaries = primary.cluster._bin
        subprocess.run(
            [
                binaries / "pg_basebackup",
                *("-D", directory / "data", "-d", primary.dsn(), "-X", "stream", "-R"),
                *("-c", "fast", "-S", "standby", "--no-sync"),
            ],
            check=True,
            capture_output=True,
            cwd=directory,
        )
        owner = (primary.cluster.data).stat()
        for path in (directory / "data", *(directory / "data").rglob("*")):
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
        with Cluster(directory, settings=settings, bin_dir=binaries) as cluster:
            yield EmbeddedServer(cluster)
