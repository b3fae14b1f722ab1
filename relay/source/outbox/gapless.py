"""Offsets without gaps (`source.offsets: gapless`): c_offset comes from a counter instead of a sequence.

Source: light-portal's `log_counter`.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from relay.config.source import SourceSettings
from relay.faults import ConfigurationError
from relay.source.outbox.columns import columns
from relay.source.outbox.triggers import fires

TRIGGER = "relay_fill_offset"


def is_gapless(conn: psycopg.Connection[Any], source: SourceSettings) -> bool:
    """Whether relay's trigger is on the outbox and fires. Raises psycopg.Error."""
    return fires(conn, source, TRIGGER, "fill_offset")


def require_numbered(conn: psycopg.Connection[Any], source: SourceSettings) -> None:
    """Raise ConfigurationError if the outbox has no column for gapless offsets, and `relay init` adds none."""
    column = source.mapping["c_offset"]
    if source.offsets == "sequence" or source.mode != "wal" or source.owns_table:
        return
    existing = columns(conn, source.table_name)
    if existing and column not in existing:
        raise ConfigurationError(
            f"source.offsets: gapless fills the column {column!r}, which {source.table} does not have and `relay init` "
            "does not add in mode wal: add it (bigint), map another column (columns: {c_offset: …}), or set "
            "source.offsets: sequence"
        )


def set_gapless(conn: psycopg.Connection[Any], source: SourceSettings, wanted: bool) -> bool:
    """Switch between the counter and the sequence; returns whether that changed anything.

    A change locks the outbox until the database transaction ends. Raises psycopg.Error.
    """
    row = conn.execute(
        "select relay.set_gapless(%s::regclass, %s, %s)",
        (
            sql.Identifier(*source.table_name).as_string(conn),
            source.mapping["c_offset"],
            wanted,
        ),
    ).fetchone()
    return bool(row and row[0])
