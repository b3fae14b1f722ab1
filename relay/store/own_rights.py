"""Which rights on relay's own objects a session lacks: those that the schema's files grant to the role relay.

A dump without privileges, a revoked right, or row-level security that somebody enabled would be noticed by the
statement that needs it, which may be the first dead letter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from relay.faults import ConfigurationError
from relay.store import migrations
from relay.store.connections import Connection
from relay.store.migrations import Side

_GRANT = re.compile(
    r"^\s*grant (.+?) on (?:(sequence|function) )?(relay\..+) to relay;$", re.MULTILINE
)
_LISTED = re.compile(r"(?:[^,(]|\([^)]*\))+")
"""Matches what a list has between its commas, of which those in parentheses are no separators."""

_MISSING = """
    select kind, name, privilege
      from unnest(%s::text[], %s::text[], %s::text[]) as needed (kind, name, privilege)
     where not case kind
               when 'sequence' then has_sequence_privilege(name, privilege)
               when 'function' then has_function_privilege(name, privilege)
               when 'columns' then has_any_column_privilege(name, privilege)
               else has_table_privilege(name, privilege)
               end
     limit 1
"""
_POLICED = "select name from unnest(%s::text[]) as name where row_security_active(name) limit 1"


def granted(sides: Sequence[Side]) -> Iterator[tuple[str, str, str]]:
    """Yield the kind, the name and the privilege of each right that the files of some sides grant to the role relay."""
    for file in (file for side in sides for file in migrations.files(side)):
        for privileges, kind, names in _GRANT.findall(file.read_text(encoding="utf-8")):
            for name in _LISTED.findall(names):
                for privilege in _LISTED.findall(privileges):
                    word, _, columns = privilege.strip().partition(" ")
                    yield kind or ("columns" if columns else "table"), name.strip(), word


def require(conn: Connection, sides: Sequence[Side], key: str) -> None:
    """Raise ConfigurationError if the session's role lacks a right of the role relay, or a policy hides relay's rows.

    `key` is the configuration key of the database. Two small queries.
    """
    kinds, names, privileges = (list(each) for each in zip(*granted(sides), strict=True))
    role = conn.info.user
    found = conn.execute(_MISSING, (kinds, names, privileges)).fetchone()
    if found is not None:
        kind, name, privilege = found
        what = f"{kind} {name}" if kind in ("sequence", "function") else name
        raise ConfigurationError(
            f"{key}: the role {role} has no right to {privilege} on {what}: run `grant {privilege} on {what} to "
            "relay`, as `relay init` did and a dump without privileges does not, and connect as a member of relay"
        )
    tables = [table for side in sides for table in migrations.tables(side)]
    policed = conn.execute(_POLICED, (tables,)).fetchone()
    if policed is not None:
        raise ConfigurationError(
            f"{key}: row-level security hides rows of {policed[0]} from the role {role}: run "
            f"`alter role {role} bypassrls`, or `alter table {policed[0]} disable row level security`"
        )


def require_temporary(conn: Connection, key: str) -> None:
    """Raise ConfigurationError if the session may not create temporary objects, as those of handlers do."""
    (row,) = conn.execute(
        "select has_database_privilege(current_database(), 'temporary'), quote_ident(current_database())"
    )
    may, database = row
    if not may:
        raise ConfigurationError(
            f"{key}: the role {conn.info.user} may not create temporary tables, which handlers' sessions need: run "
            f"`grant temporary on database {database} to relay`"
        )
