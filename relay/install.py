"""Puts relay into databases and takes it out again: schema, publication, slot, group."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from relay.config import Settings, Source
from relay.faults import ConfigurationError
from relay.preflight import reach, require_logical_wal, require_table
from relay.source.slot import drop_publication, drop_slot, ensure_publication, ensure_slot
from relay.store import migrations, offsets

Connection = psycopg.Connection[Any]

OWN_TABLE = Source().table


def initialise(
    settings: Settings, source_dsn: str | None = None, target_dsn: str | None = None
) -> list[str]:
    """Install what is missing; returns what was done, in words. Doing it twice changes nothing.

    The DSNs, where given, belong to an administrator; the configured roles need fewer rights.
    Raises ConfigurationError.
    """
    done: list[str] = []
    source_dsn = source_dsn or settings.source_dsn
    target_dsn = target_dsn or (source_dsn if settings.one_database else settings.target_dsn)
    with reach(source_dsn, "source.dsn") as source, reach(target_dsn, "target.dsn") as target:
        try:
            require_logical_wal(source)
            done += _install(source, settings)
            done += _installed(migrations.install(target, "target"))
            offsets.require_partition_count(
                offsets.partition_count(target, settings.group), settings.group, settings.partitions
            )
            done += _start_group(source, target, settings)
        except psycopg.errors.InsufficientPrivilege as error:
            raise ConfigurationError(
                f"source.dsn or target.dsn: {_first(error)}: connect as an administrator "
                "(`relay init --admin-dsn …`), or have the right granted"
            ) from None
        except psycopg.errors.ConfigurationLimitExceeded as error:
            raise ConfigurationError(
                f"source.dsn: {_first(error)}: raise max_replication_slots and restart the server, or drop a slot"
            ) from None
    return done


def _install(source: Connection, settings: Settings) -> list[str]:
    installed = migrations.install(source, "source")
    if settings.source.table == OWN_TABLE:
        installed += migrations.install(source, "outbox")
        require_table(source, settings)
    else:
        require_table(source, settings)
        _adopt(source, settings)
    return _installed(installed)


def _adopt(source: Connection, settings: Settings) -> None:
    """Give an outbox that was there before what relay's own has: offsets, notification, the service's right to read."""
    table = sql.Identifier(*settings.source.table_name)
    source.execute(
        sql.SQL("select relay.attach({}::regclass, {})").format(
            sql.Literal(table.as_string(source)), settings.source.mapping["c_offset"]
        )
    )
    if source.execute("select from pg_roles where rolname = 'relay'").rowcount:
        source.execute(sql.SQL("grant select on {} to relay").format(table))


def _start_group(source: Connection, target: Connection, settings: Settings) -> list[str]:
    done = []
    name = settings.source
    if ensure_publication(source, name.publication, name.table_name):
        done.append(f"publication {name.publication} of {name.table}")
    # Read before the slot exists: a row below this offset is older than the slot.
    row = source.execute("select next_offset from relay.log_counter where id = 1").fetchone()
    first = int(row[0]) if row else 1
    if ensure_slot(source, name.slot):
        done.append(f"replication slot {name.slot}")
    created = offsets.create(target, settings.group, settings.partitions, first)
    if created:
        done.append(f"group {settings.group} with {created} partitions")
    return done


def remove(settings: Settings, admin_dsn: str | None = None) -> list[str]:
    """Drop the slot, the publication and relay's schema in both databases; the outbox and its rows stay.

    Raises ConfigurationError if a relay is still running.
    """
    done = []
    with reach(admin_dsn or settings.source_dsn, "source.dsn") as source:
        try:
            if drop_slot(source, settings.source.slot):
                done.append(f"replication slot {settings.source.slot}")
        except psycopg.errors.ObjectInUse:
            raise ConfigurationError(
                f"source.slot: {settings.source.slot!r} is being read: stop the running relay first"
            ) from None
        drop_publication(source, settings.source.publication)
        source.execute("drop schema if exists relay cascade")
        done.append(f"publication {settings.source.publication} and schema relay in the source")
    if not settings.one_database:
        with reach(settings.target_dsn, "target.dsn") as target:
            target.execute("drop schema if exists relay cascade")
        done.append("schema relay in the target")
    return done


def _installed(names: list[str]) -> list[str]:
    return [f"schema file {name}" for name in names]


def _first(error: psycopg.Error) -> str:
    return str(error).strip().splitlines()[0]
