"""The roles by which tests log in, as docs/security.md and docs/how-to/install.md name them.

No test's relay is a superuser. A role belongs to the whole server, so all databases of a server share these.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import psycopg
from psycopg.conninfo import make_conninfo

from relay.store.own_rights import ROLES

PASSWORD = "p"


class Role(StrEnum):
    """A role that may log in."""

    INSTALLER = "app_owner"
    """Owns the databases and may create roles: `relay init`, `relay uninstall`, `relay partition`."""
    RELAY = "app_relay"
    """A member of `relay`: the service, and the commands of operators."""
    PUBLISHER = "app_publisher"
    """A member of `relay_publisher`."""
    WORKER = "app_worker"
    """A member of `relay_worker`."""
    READER = "app_reader"
    """A member of `relay_reader`."""
    LAKE = "app_lake"
    """May create tables in `public`, and insert into those that are there: `jdbc.dsn` of sinks of type spark."""
    JOBS = "app_jobs"
    """May select from the outbox, and is a member of nothing: Spark jobs that read `format("outbox")`."""


_ATTRIBUTES = {Role.INSTALLER: "createrole replication", Role.RELAY: "replication"}
_MEMBERS = {
    Role.RELAY: "relay",
    Role.PUBLISHER: "relay_publisher",
    Role.WORKER: "relay_worker",
    Role.READER: "relay_reader",
}

_MAKE = """
    if to_regrole('{role}') is null then
        create role {role} login {attributes} password '{password}';
    end if;
"""
_JOIN = """
    if to_regrole('{of}') is not null and not pg_has_role('{role}', '{of}', 'usage') then
        grant {of} to {role};
    end if;
"""
_OWN = """
    if exists (select from pg_database where datname = current_database() and datdba <> 'app_owner'::regrole) then
        execute format('alter database %I owner to app_owner', current_database());
        -- What comes to be in the schema, the outbox first of all.
        alter default privileges for role app_owner in schema public grant select on tables to app_jobs;
        alter default privileges in schema public grant select on tables to app_jobs;
        grant usage, create on schema public to app_lake;
        alter default privileges in schema public grant select, insert on tables to app_lake;
        -- What handlers' statements touch, those of workers and readers too.
        alter default privileges in schema public
            grant select, insert, update, delete on tables to app_relay, app_worker, app_reader;
        alter default privileges in schema public grant usage on sequences to app_relay, app_worker, app_reader;
    end if;
"""


def make_all(conn: psycopg.Connection[Any]) -> None:
    """Make the roles, and those of relay as who installs it has made them for another database of the server."""
    _do(conn, _roles())
    conn.execute("set role app_owner")
    for name in ROLES:
        conn.execute(f"create role {name} nologin".encode())
    conn.execute("reset role")
    # Before PostgreSQL 16 only a superuser may.
    conn.execute("alter role relay replication")
    join_roles(conn)


def prepare(conn: psycopg.Connection[Any]) -> None:
    """Make the roles that the server lacks, and give the database to who installs relay.

    What the session, of a superuser, creates in the schema public is for handlers of relay, of workers and of readers.
    """
    _do(conn, [*_roles(), *_memberships(), _OWN])


def join_roles(conn: psycopg.Connection[Any]) -> None:
    """Make the roles members of those that relay has made so far; `conn` is a superuser's session."""
    _do(conn, _memberships())


def _roles() -> list[str]:
    return [
        _MAKE.format(role=role, attributes=_ATTRIBUTES.get(role, ""), password=PASSWORD)
        for role in Role
    ]


def _memberships() -> list[str]:
    return [_JOIN.format(role=role, of=of) for role, of in _MEMBERS.items()]


def _do(conn: psycopg.Connection[Any], statements: list[str]) -> None:
    conn.execute(f"do $do$ begin {''.join(statements)} end $do$".encode())


def dsn_of(role: Role, dsn: str) -> str:
    """The same database for another role."""
    if not dsn.startswith("postgresql://"):
        return make_conninfo(dsn, user=role, password=PASSWORD)
    parts = urlsplit(dsn)
    address = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{role}:{PASSWORD}@{address}").geturl()
