"""A database with an outbox, backlogs in its WAL, and copies of a slot to drain a backlog several times."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from bench.backlog import NOTE, PROJECTION, fill
from relay.admin.install import initialise
from relay.config.settings import Settings
from relay.demo.embedded import Cluster

PUBLICATION = "bench"
APPLICATION_NAME = "bench"
"""The name of the benchmark's own sessions, as far as they would count as the contender's."""
TIMEOUT_SECONDS = 300.0
POLL_SECONDS = 0.02
"""Seconds between two polls for the end of a drain. Polls take CPU from the contender: 4 % of both cores at 5 ms."""

SERVER_SETTINGS = {
    "max_replication_slots": "40",
    "max_wal_senders": "20",
    "max_connections": "200",
    "max_wal_size": "8GB",
    "track_commit_timestamp": "on",
}
"""Changes to the server's defaults, for all contenders. Durability is the default: fsync and synchronous_commit on."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """Events in the WAL between the slot's position and `end`."""

    slot: str
    end: str
    events: int


def wait_until(
    reached: Callable[[], bool],
    what: str,
    seconds: float = TIMEOUT_SECONDS,
    process: subprocess.Popen[Any] | None = None,
) -> float:
    """Poll until `reached` returns true, and return the monotonic clock.

    Raises TimeoutError after `seconds`, and RuntimeError if `process` ends before.
    """
    deadline = time.monotonic() + seconds
    while not reached():
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"{what}: the process ended with status {process.returncode}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(POLL_SECONDS)
    return time.monotonic()


class Outbox:
    """One database with relay's outbox, its publication and a table for effects."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.name = name
        self.dsn = cluster.create_database(name)
        self.conn: psycopg.Connection[Any] = psycopg.connect(
            self.dsn, autocommit=True, application_name=APPLICATION_NAME
        )
        self.conn.execute(PROJECTION)
        self._slots = 0
        initialise(self.settings(f"{name}_base"))

    def settings(self, slot: str, **sections: Any) -> Settings:
        """A configuration of relay on this database, whose group has the slot's name."""
        return Settings(**self.config(slot, **sections))

    def config(self, slot: str, mode: str = "wal", **sections: Any) -> dict[str, Any]:
        """The configuration as a mapping, for a file."""
        source = {"dsn": self.dsn, "slot": slot, "publication": PUBLICATION, "mode": mode}
        return {"source": source, "group": slot, **sections}

    def publish(
        self, transactions: int, events: int = 5, one_commit: bool = False, note: str = NOTE
    ) -> Backlog:
        """Append a backlog to the outbox, and create a slot that begins just before it."""
        slot = self.new_slot()
        fill(self.conn, transactions, events, one_commit, note)
        end = self.value("select pg_current_wal_insert_lsn()::text")
        # It writes to the WAL too, so that every reader can go past the end.
        self.conn.execute("checkpoint")
        return Backlog(slot, end, transactions * events)

    def new_slot(self) -> str:
        """Create a slot that begins at the current position, and return its name."""
        name = self.new_name()
        self.conn.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (name,))
        return name

    @contextmanager
    def copy(self, backlog: Backlog) -> Iterator[str]:
        """A slot at the start of the backlog, with an empty projection; it is dropped at the end."""
        name = self.new_name()
        self.conn.execute(
            "select pg_copy_logical_replication_slot(%s, %s, false)", (backlog.slot, name)
        )
        self.conn.execute("truncate projection")
        self.conn.execute("checkpoint")
        try:
            yield name
        finally:
            self.drop(name)

    def drop(self, slot: str) -> None:
        """Drop the slot when it is no longer active."""
        wait_until(lambda: not self._active(slot), f"{slot} free", 60)
        self.conn.execute(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = %s",
            (slot,),
        )

    def streaming(self, slot: str) -> float:
        """Wait until the slot is active; returns the monotonic clock."""
        return wait_until(lambda: self._active(slot), f"{slot} active", 120)

    def confirmed(
        self, slot: str, backlog: Backlog, process: subprocess.Popen[Any] | None = None
    ) -> float:
        """Wait until the slot is confirmed to the backlog's end; returns the monotonic clock."""
        return wait_until(
            lambda: bool(
                self.value(
                    "select confirmed_flush_lsn >= %s::pg_lsn from pg_replication_slots where slot_name = %s",
                    backlog.end,
                    slot,
                )
            ),
            f"{slot} confirmed",
            process=process,
        )

    @contextmanager
    def held(self, slot: str) -> Iterator[None]:
        """Keep other readers from the slot without moving it, with a reader that reads nothing."""
        conn: psycopg.Connection[Any] = psycopg.connect(
            self.dsn, replication="database", autocommit=True
        )
        statement = sql.SQL(
            "START_REPLICATION SLOT {} LOGICAL 0/0 (proto_version '1', publication_names {})"
        ).format(sql.Identifier(slot), sql.Literal(PUBLICATION))
        conn.pgconn.send_query(statement.as_bytes(conn))
        try:
            self.streaming(slot)
            yield
        finally:
            conn.close()

    def reader(self, slot: str) -> int | None:
        """The process id of the server's process for the slot; None if the slot is not active."""
        pid = self.value("select active_pid from pg_replication_slots where slot_name = %s", slot)
        return None if pid is None else int(pid)

    def applied(self) -> int:
        """The number of rows in the projection."""
        return int(self.value("select count(*) from projection"))

    def value(self, query: str, *arguments: Any) -> Any:
        """The first value of a query's first row; None without a row."""
        row = self.conn.execute(query.encode(), arguments).fetchone()
        return row[0] if row else None

    def _active(self, slot: str) -> bool:
        return self.reader(slot) is not None

    def new_name(self) -> str:
        """A name that no slot or group has yet."""
        self._slots += 1
        return f"{self.name}_{self._slots}"
