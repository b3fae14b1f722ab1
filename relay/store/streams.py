"""Records slots and publications of a source, with their groups: `relay.streams`."""

from __future__ import annotations

from dataclasses import dataclass

from psycopg.rows import class_row

from relay.faults import ConfigurationError
from relay.store.connections import Connection


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """A slot, its group, and its publication if relay created that."""

    slot: str
    group_id: str
    publication: str | None


def all_streams(conn: Connection) -> list[StreamRecord] | None:
    """List every stream of this source; None if the schema is an early edition that does not record them."""
    row = conn.execute("select to_regclass('relay.streams') is not null").fetchone()
    if not row or not row[0]:
        return None
    with conn.cursor(row_factory=class_row(StreamRecord)) as cursor:
        return cursor.execute(
            "select slot, group_id, publication from relay.streams order by slot"
        ).fetchall()


def slots_of(conn: Connection, group: str) -> list[str]:
    """List the slots that the group has, or had; empty if the schema does not record them. Raises psycopg.Error."""
    return [each.slot for each in all_streams(conn) or () if each.group_id == group]


def record(conn: Connection, slot: str, group: str, publication: str | None = None) -> bool:
    """Record a slot; returns whether it is new.

    `publication` is the one that relay created for it; None keeps the recorded one.
    """
    new = conn.execute(
        "insert into relay.streams (slot, group_id, publication) values (%s, %s, %s) on conflict do nothing",
        (slot, group, publication),
    ).rowcount
    # Not part of the insert: the role of the service may only insert, and creates no publication.
    if publication is not None:
        conn.execute(
            "update relay.streams set publication = %s where slot = %s", (publication, slot)
        )
    return new > 0


def forget(conn: Connection, slot: str) -> None:
    """Delete the record of a slot."""
    conn.execute("delete from relay.streams where slot = %s", (slot,))


def require_free(conn: Connection, slot: str, group: str) -> None:
    """Raise ConfigurationError if the slot belongs to another group, which would lose what this one confirms."""
    row = conn.execute(
        "select group_id from relay.streams where slot = %s and group_id <> %s", (slot, group)
    ).fetchone()
    if row:
        raise ConfigurationError(
            f"source.slot: {slot!r} is the slot of the group {row[0]!r}: name another slot for the group {group!r}"
        )
