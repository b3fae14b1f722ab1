"""The rights on relay's own objects that the schema's files give: which of them are missing, and how they come back.

A dump without privileges, a table that was made again, a right that was revoked, or a server that lacks a role would be
noticed by the statement that needs it: by the publisher, or with the first dead letter.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import psycopg
from psycopg import sql

from relay.faults import ConfigurationError
from relay.store import migrations
from relay.store.connections import Connection
from relay.store.migrations import Side

ROLES: Mapping[str, str] = {
    "relay": "the service",
    "relay_publisher": "publishers",
    "relay_owner": "relay.publish and the other functions that run with its rights",
    "relay_worker": "workers of queues",
    "relay_reader": "readers",
}
"""The roles, and who needs them."""
_OF_SIDE: Mapping[Side, tuple[str, ...]] = {
    "source": ("relay", "relay_publisher", "relay_owner"),
    "outbox": ("relay_reader",),
    "target": ("relay", "relay_owner", "relay_worker"),
}
_NEEDED_BY: Mapping[str, str] = {
    "source/002_retention.sql": "retention",
    "source/003_causes.sql": "handlers that publish",
    "outbox/001_outbox.sql": "relay.publish",
    "outbox/002_schedules.sql": "schedules",
    "outbox/003_readers.sql": "readers",
    "outbox/004_subscribers.sql": "subscribers",
    "outbox/005_api.sql": "the HTTP API",
    "target/002_retention.sql": "retention",
    "target/004_queues.sql": "work queues",
    "target/005_scheduled.sql": "cancellations",
    "target/006_dead_letters.sql": "dead letters of work queues",
    "target/007_attempts.sql": "kept attempts",
    "target/008_sagas.sql": "sagas",
}
"""What needs the rights that a file grants, where it is not the service."""

_GRANT = re.compile(
    r"^ *grant ([^;']+?) on (?:(sequence|function|procedure|schema)\s+)?([^;']+?)\s+to (\w+);",
    re.MULTILINE,
)
_LISTED = re.compile(r"(?:[^,(]|\([^)]*\))+")
"""Matches what a list has between its commas, of which those in parentheses are no separators."""
_FOR_EVERYBODY = (
    "max_event_bytes",
    "recent_witness",
    "holds_witness",
    "this_call",
    "message_state",
)
"""Functions that PUBLIC may call: those of witnesses, where it may read an outbox; that of who calls, at any call.

That of a state, where it may read the messages of queues.
"""

_NO_ROLE = "select name from unnest(%s::text[]) as name where to_regrole(name) is null"
_MISSING = """
    select number
      from unnest(%s::text[], %s::text[], %s::text[], %s::text[], %s::text[])
           with ordinality as needed (role, kind, name, privilege, columns, number)
     where case
           when role <> 'public' and to_regrole(role) is null then false
           when kind = 'schema' then not has_schema_privilege(role, to_regnamespace(name)::oid, privilege)
           when kind = 'sequence' then not has_sequence_privilege(role, to_regclass(name)::oid, privilege)
           when kind in ('function', 'procedure')
                then not has_function_privilege(role, to_regprocedure(name)::oid, privilege)
           when columns <> '' then exists (
               select from pg_attribute
                where attrelid = to_regclass(name) and attname = any (string_to_array(columns, ', '))
                  and not has_column_privilege(role, attrelid, attnum, privilege))
           else not has_table_privilege(role, to_regclass(name)::oid, privilege)
           end
     order by number
"""
_USABLE = """
    select bool_and(has_schema_privilege(oid, 'usage')) from pg_namespace where nspname = any (%s)
"""
_POLICED = "select name from unnest(%s::text[]) as name where row_security_active(name) limit 1"
_DEFINERS = """
    select p.oid::regprocedure::text, quote_ident(pg_get_userbyid(p.proowner))
      from pg_proc as p
     where p.pronamespace = 'relay'::regnamespace and p.prosecdef and p.proowner <> to_regrole('relay_owner')
       and p.proname <> all (%s)
     order by 1
"""
_OPEN = """
    select p.oid::regprocedure::text from pg_proc as p
     where p.pronamespace = 'relay'::regnamespace and p.proname <> all (%s)
       and has_function_privilege('public', p.oid, 'execute')
     order by 1
"""
_RETAINED = """
    select r.outbox, c.oid::regclass::text, r.offset_column, quote_ident(pg_get_userbyid(c.relowner))
      from relay.retained as r
      join pg_class as c
        on c.oid = to_regclass(format('%%I.%%I', split_part(r.outbox, '.', 1), split_part(r.outbox, '.', 2)))
     where exists (select from pg_proc as p
                    where p.pronamespace = 'relay'::regnamespace and p.proname = any (%s)
                      and (p.proowner <> c.relowner or not p.prosecdef))
        or not has_table_privilege(c.relowner, 'relay.retained'::regclass, 'select')
        or not has_table_privilege(c.relowner, 'relay.removed'::regclass, 'select, insert, delete')
     order by 1
"""
_MEMBERSHIP = (
    """
    do $$
    declare
        needed text := case when current_setting('server_version_num')::int >= 160000 then 'set' else 'member' end;
    begin
        if to_regrole('relay_owner') is not null and not pg_has_role('relay_owner', needed) then
            execute format('grant relay_owner to %I', current_user);
        end if;
    end
    $$
    """,
)
"""Makes the session's role a member of relay_owner, as who gives it a function has to be."""
_OF_RETENTION = (
    *("create_ahead", "enclose_default", "validate_default", "exchange_default"),
    *("drop_partition", "delete_portion"),
)
"""Functions that run with the rights of the owner of an outbox: see `relay.retain`."""


@dataclass(frozen=True, slots=True)
class Right:
    """A right that a file of the schema grants. `kind` is empty for a table; `columns` may limit it."""

    needed_by: str
    role: str
    kind: str
    name: str
    privilege: str
    columns: str = ""

    @property
    def statement(self) -> str:
        """The statement that grants it."""
        columns = f" ({self.columns})" if self.columns else ""
        return f"grant {self.privilege}{columns} on {self.what} to {self.role}"

    @property
    def what(self) -> str:
        """The object, as a statement names it."""
        return f"{self.kind} {self.name}".strip()


@dataclass(frozen=True, slots=True)
class Lack:
    """What a database lacks of what the schema's files give, and the statements that give it again."""

    subject: str
    text: str
    statements: tuple[str, ...]
    hint: str = ""


def granted(sides: Sequence[Side]) -> Iterator[Right]:
    """Yield each right that the files of some sides grant to a role."""
    for file in (file for side in sides for file in migrations.files(side)):
        of_file = _NEEDED_BY.get(migrations.name_of(file), "the service")
        for privileges, kind, names, role in _GRANT.findall(file.read_text(encoding="utf-8")):
            needed_by = of_file if role in ROLES else ROLES["relay_publisher"]
            for name in _LISTED.findall(names):
                for privilege in _LISTED.findall(privileges):
                    word, _, columns = privilege.strip().partition(" ")
                    if word != "create":  # for as long as functions are given to their owner
                        listed = " ".join(columns.strip("()").split())
                        name_ = " ".join(name.split())
                        yield Right(needed_by, role, kind, name_, word, listed)


def _missing(conn: Connection, rights: Sequence[Right], me: str | None = None) -> list[Right]:
    """Return those that are missing. With `me`, the role `relay` is who is asked about, as which a session logs in."""
    schemas = [each for each in rights if each.kind == "schema"]
    if len(schemas) < len(rights):
        # Without the right to use a schema, the session can look up nothing in it.
        usable = conn.execute(_USABLE, ([each.name for each in schemas],)).fetchone()
        if not usable or not usable[0]:
            return _missing(conn, schemas, me)
    columns = ("role", "kind", "name", "privilege", "columns")
    values = [[getattr(each, column) for each in rights] for column in columns]
    if me is not None:
        values[0] = [me if role == "relay" else role for role in values[0]]
    return [rights[number - 1] for (number,) in conn.execute(_MISSING, values)]


def require(conn: Connection, sides: Sequence[Side], key: str) -> None:
    """Raise ConfigurationError if the session's role lacks a right of the role relay, or a policy hides relay's rows.

    `key` is the configuration key of the database. Two small queries.
    """
    role = conn.info.user
    missing = _missing(conn, [each for each in granted(sides) if each.role == "relay"], role)
    if missing:
        one = missing[0]
        raise ConfigurationError(
            f"{key}: the role {role} has no right to {one.privilege} on {one.what}{_more(missing)}: run `relay init`, "
            f"which grants it again, or `{one.statement}`, and connect as a member of relay"
        )
    tables = [table for side in sides for table in migrations.tables(side)]
    policed = conn.execute(_POLICED, (tables,)).fetchone()
    if policed is not None:
        raise ConfigurationError(
            f"{key}: row-level security hides rows of {policed[0]} from the role {role}: run "
            f"`alter role {role} bypassrls`, or `alter table {policed[0]} disable row level security`"
        )


def _more(found: Collection[object]) -> str:
    return f" (and {len(found) - 1} more)" if len(found) > 1 else ""


def lacking(conn: Connection, sides: Sequence[Side], but: Collection[str] = ()) -> Iterator[Lack]:
    """Find the roles, rights and owners that are not as the files of some sides make them.

    The rights of the roles `but` are left out. Each kind is asked for when the ones before are dealt with: a role that
    is made has no rights yet. Raises psycopg.Error.
    """
    yield from _roles(conn, sides)
    # Before the rights of roles, which everybody's would hide.
    yield from _open_functions(conn)
    yield from _rights(conn, [each for each in granted(sides) if each.role not in but])
    yield from _owned(conn)
    if "source" in sides:
        yield from _retained(conn)


def _roles(conn: Connection, sides: Sequence[Side]) -> Iterator[Lack]:
    wanted = list(dict.fromkeys(role for side in sides for role in _OF_SIDE[side]))
    for (name,) in conn.execute(_NO_ROLE, (wanted,)).fetchall():
        statement = f"create role {name} nologin"
        yield Lack(
            f"role {name}",
            f"{ROLES[name]}: the server has no role {name}",
            (statement,),
            f"run `{statement}` as an administrator, then `relay init`",
        )


def _rights(conn: Connection, rights: Sequence[Right]) -> Iterator[Lack]:
    missing = _missing(conn, rights)
    by = attrgetter("role", "needed_by")
    for (role, needed_by), group in groupby(sorted(missing, key=by), by):
        found = list(group)
        one = found[0]
        yield Lack(
            f"rights of the role {role} for {needed_by}",
            f"{needed_by}: the role {role} has no right to {one.privilege} on {one.what}{_more(found)}",
            tuple(each.statement for each in found),
            f"run `relay init`, which grants it again, or `{one.statement}`",
        )


def _open_functions(conn: Connection) -> Iterator[Lack]:
    """Find functions that everybody may call, as after a dump without privileges."""
    found = [name for (name,) in conn.execute(_OPEN, ([*_FOR_EVERYBODY],))]
    if found:
        yield Lack(
            "functions of relay's are not for everybody",
            f"everybody may call {found[0]}{_more(found)}",
            (f"revoke all on routine {', '.join(found)} from public",),
            f"run `relay init`, or `revoke all on routine {found[0]} from public`",
        )


def _owned(conn: Connection) -> Iterator[Lack]:
    """Find functions that run with the rights of their owner, who is not the role that has few."""
    found = conn.execute(_DEFINERS, ([*_OF_RETENTION],)).fetchall()
    if found:
        name, owner = found[0]
        yield Lack(
            "functions of the role relay_owner",
            f"{name}{_more(found)} runs with the rights of its owner, {owner}, and not of relay_owner",
            (
                *_MEMBERSHIP,
                "grant create on schema relay to relay_owner",
                *(f"alter function {each} owner to relay_owner" for each, _ in found),
                "revoke create on schema relay from relay_owner",
            ),
            f"run `grant relay_owner to {owner}` as a superuser, or as a role with the ADMIN OPTION of relay_owner, "
            f"then `relay init` as {owner}",
        )


def _retained(conn: Connection) -> Iterator[Lack]:
    """Find outboxes whose rows retention cannot remove, since its functions run with the rights of another role."""
    (may,) = conn.execute(
        "select has_table_privilege(to_regclass('relay.retained')::oid, 'select')"
    ).fetchone() or (False,)
    if not may:
        return
    for outbox, table, column, owner in conn.execute(_RETAINED, ([*_OF_RETENTION],)).fetchall():
        statement = sql.SQL("select relay.retain({}::regclass, {}, {})").format(
            table, outbox, column
        )
        yield Lack(
            f"rights of retention to {outbox}",
            f"retention: its functions do not run with the rights of {owner}, who owns {outbox}",
            (statement.as_string(conn),),
            f"run `relay init` as {owner}, or as a member of it",
        )


def make_roles(conn: Connection) -> list[str]:
    """Create the roles that the server lacks, as far as it lets the session; returns their names.

    The session's role becomes a member of relay_owner. Call it in a database transaction. Raises psycopg.Error for what
    is no refusal.
    """
    made = []
    with suppress(psycopg.errors.InsufficientPrivilege), conn.transaction():
        for (name,) in conn.execute(_NO_ROLE, ([*ROLES],)).fetchall():
            conn.execute(sql.SQL("create role {} nologin").format(sql.Identifier(name)))
            made.append(name)
    _join_owner(conn)
    return made


def _join_owner(conn: Connection) -> None:
    """Make the session's role a member of relay_owner, if the server lets it."""
    with suppress(psycopg.errors.InsufficientPrivilege), conn.transaction():
        for membership in _MEMBERSHIP:
            conn.execute(membership.encode())


def drop_role(conn: Connection, name: str) -> None:
    """Drop a role of relay's. Raises psycopg.Error if it has rights or owns something."""
    conn.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))


def repair(conn: Connection, sides: Sequence[Side]) -> tuple[list[str], list[str]]:
    """Give again what `lacking` finds; returns a line for each repair, and one for each that the server refuses.

    Call it in a database transaction. Raises psycopg.Error for what is no refusal.
    """
    done, refused = [], []
    _join_owner(conn)
    for lack in lacking(conn, sides):
        try:
            with conn.transaction():
                for statement in lack.statements:
                    conn.execute(statement.encode())
        except psycopg.errors.InsufficientPrivilege as error:
            refused.append(f"{lack.text} ({error.diag.message_primary}): {lack.hint}")
        else:
            done.append(lack.subject)
    return done, refused


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
