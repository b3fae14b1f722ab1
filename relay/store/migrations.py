"""Installs the schema: ordered SQL files, each applied once and recorded in `relay.migrations`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import psycopg

LOCK = 0x72656C6179  # "relay"

Side = Literal["source", "outbox", "target"]


def sql_directory() -> Path:
    """Where the SQL files are: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parent.parent
    shipped = package / "sql"
    return shipped if shipped.is_dir() else package.parent / "sql"


def files(side: Side) -> list[Path]:
    """The files of one folder, in the order in which they apply."""
    return sorted((sql_directory() / side).glob("*.sql"))


def name_of(file: Path) -> str:
    """The name under which a file is recorded, such as `source/001_source.sql`."""
    return f"{file.parent.name}/{file.name}"


def applied(conn: psycopg.Connection[Any]) -> set[str]:
    """The names of the files that this database has had; empty where relay was never installed."""
    row = conn.execute("select to_regclass('relay.migrations') is not null").fetchone()
    if not row or not row[0]:
        return set()
    return {name for (name,) in conn.execute("select name from relay.migrations")}


def pending(conn: psycopg.Connection[Any], side: Side) -> list[str]:
    """The names of the files that this database has still to get."""
    done = applied(conn)
    return [name_of(file) for file in files(side) if name_of(file) not in done]


def install(conn: psycopg.Connection[Any], side: Side) -> list[str]:
    """Apply what is pending, all in one transaction under an advisory lock; returns the names that were applied.

    The connection must be in autocommit mode. Installing twice changes nothing; two at once wait for each other.
    Raises psycopg.Error, with nothing applied.
    """
    installed = []
    with conn.transaction():
        conn.execute("select pg_advisory_xact_lock(%s)", (LOCK,))
        done = applied(conn)
        for file in files(side):
            name = name_of(file)
            if name not in done:
                conn.execute(file.read_bytes())
                installed.append(name)
    return installed
