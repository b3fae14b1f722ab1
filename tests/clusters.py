"""Databases that move from one PostgreSQL cluster to another, as an operator moves them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import LiteralString

import psycopg
import pytest

from tests.outbox import Outbox
from tests.postgres import EmbeddedServer, start_server

_ROLES: tuple[LiteralString, ...] = (
    "relay",
    "relay_owner",
    "relay_publisher",
    "relay_reader",
    "relay_worker",
)


@contextmanager
def two_clusters() -> Iterator[tuple[EmbeddedServer, EmbeddedServer]]:
    """Two servers of their own; skips where a program is missing."""
    with start_server() as old, start_server(own_identifier=True) as new:
        if not isinstance(old, EmbeddedServer) or not isinstance(new, EmbeddedServer):
            pytest.skip("needs pg_dump beside the server")
        if not old.has("pg_dump"):
            pytest.skip("needs pg_dump beside the server")
        yield old, new


def lead(old: EmbeddedServer, new: EmbeddedServer) -> None:
    """Let the transaction ids of a server be ahead of another one's, also once a dump is restored there."""
    with Outbox(old.dsn()) as first, Outbox(new.dsn()) as second:
        pass_ids(first, next_id(second) + 3_000)


def restore(
    old: EmbeddedServer, new: EmbeddedServer, name: str = "app", into: str | None = None
) -> str:
    """Dump a database, and restore it in another cluster, as docs/operations.md says; returns its DSN."""
    programs = old.cluster._bin
    dsn = new.create_database(into or name)
    with psycopg.connect(new.dsn(), autocommit=True) as conn:
        for role in _ROLES:
            # What `pg_dumpall --roles-only` would bring.
            with suppress(psycopg.errors.DuplicateObject):
                conn.execute(f"create role {role}".encode())
    dump = subprocess.run(
        [programs / "pg_dump", "-Fc", old.dsn(name)], check=True, capture_output=True
    )
    subprocess.run(
        [programs / "pg_restore", "-d", dsn], check=True, capture_output=True, input=dump.stdout
    )
    return dsn


def replace_folder(server: EmbeddedServer, of: str, into: str) -> None:
    """Stop a server, replace a folder beside its `data` by a copy of another one, and start it."""
    server.stop()
    folder = server.cluster.directory
    subprocess.run(["rm", "-rf", folder / into], check=True)
    subprocess.run(["cp", "-a", folder / of, folder / into], check=True)
    server.start()


def pass_ids(server: Outbox, beyond: int) -> None:
    """Use transaction ids of a server up to one."""
    server.conn.execute(
        f"""
        do $$
        begin
            while pg_current_xact_id()::text::bigint <= {beyond} loop
                commit;
            end loop;
        end $$
        """.encode()
    )


def next_id(server: Outbox) -> int:
    """The next transaction id of a server."""
    return int(server.value("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint"))
