"""Puts relay into databases and takes it out again: schema, publication, slot, group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from relay.config import Settings
from relay.faults import ConfigurationError
from relay.preflight import reach, require_logical_wal, require_table
from relay.source.columns import require_readable
from relay.source.index import drop_indexes, ensure_index
from relay.source.rows import OutboxRows
from relay.source.slot import drop_publication, drop_slot, ensure_publication, ensure_slot
from relay.store import migrations, offsets

Connection = psycopg.Connection[Any]


def initialise(
    settings: Settings,
    source_dsn: str | None = None,
    target_dsn: str | None = None,
    start: str | None = None,
) -> list[str]:
    """Install what is missing; returns what was done, in words. Doing it twice changes nothing.

    `start` is where a new group begins: `beginning`, `now` (the default) or a c_offset. The DSNs, where
    given, belong to an administrator; the configured roles need fewer rights.
    Raises ConfigurationError.
    """
    done: list[str] = []
    source_dsn = source_dsn or settings.source_dsn
    target_dsn = target_dsn or (source_dsn if settings.one_database else settings.target_dsn)
    with reach(source_dsn, "source.dsn") as source, reach(target_dsn, "target.dsn") as target:
        try:
            if settings.source.mode != "poll":
                require_logical_wal(source)
            done += _install(source, settings)
            done += _installed(migrations.install(target, "target", "target.dsn"))
            offsets.require_partition_count(
                offsets.partition_count(target, settings.group), settings.group, settings.partitions
            )
            done += _start_group(source, target, settings, _start(target, settings, start))
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


def _start(target: Connection, settings: Settings, start: str | None) -> Start:
    """Where a new group begins. Raises ConfigurationError if it is said of one that exists."""
    if start is None:
        return Start("now")
    if offsets.partition_count(target, settings.group):
        raise ConfigurationError(
            f"--from: the group {settings.group!r} has begun already: move it with `relay offsets seek --to {start}`"
        )
    if start not in ("beginning", "now") and not start.isdecimal():
        raise ConfigurationError(f"--from: {start!r} is neither beginning, now, nor a c_offset")
    if settings.source.mode == "wal" and start != "now":
        raise ConfigurationError(
            "--from: rows older than the slot are read by polling, which source.mode: wal rules out: set it to auto"
        )
    return Start(start)


@dataclass(frozen=True, slots=True)
class Start:
    """Where a new group begins: `beginning`, `now` or a c_offset."""

    place: str

    def offset(self, source: Connection, settings: Settings) -> int:
        """The first c_offset that the group is to see. Raises ConfigurationError where rows have no offset."""
        rows = OutboxRows(settings)
        if self.place == "now":
            return rows.next_offset(source) if settings.source.mode != "wal" else _counter(source)
        rows.require_offsets(source)
        if self.place == "beginning":
            return min(1, rows.first_offset(source))
        return int(self.place)


def _counter(source: Connection) -> int:
    row = source.execute("select next_offset from relay.log_counter where id = 1").fetchone()
    return int(row[0]) if row else 1


def _install(source: Connection, settings: Settings) -> list[str]:
    installed = migrations.install(source, "source", "source.dsn")
    if settings.source.owns_table:
        installed += migrations.install(source, "outbox", "source.dsn")
        require_table(source, settings)
        require_readable(source, settings.source)
        _limit_event_bytes(source, settings.source.max_event_bytes)
    else:
        require_table(source, settings)
        require_readable(source, settings.source)
        _adopt(source, settings)
    return _installed(installed)


def _limit_event_bytes(source: Connection, limit: int) -> None:
    """Let relay's own table and `relay.publish` refuse larger events; rows that are there already stay."""
    source.execute(
        "select relay.limit_event_bytes(%(limit)s) where relay.max_event_bytes() <> %(limit)s",
        {"limit": limit},
    )


def _adopt(source: Connection, settings: Settings) -> None:
    """Give an outbox that was there before what relay's own has: offsets, notification, the service's right to read."""
    table = sql.Identifier(*settings.source.table_name)
    source.execute(
        sql.SQL("select relay.attach({}::regclass, {})").format(
            sql.Literal(table.as_string(source)), settings.source.mapping["c_offset"]
        )
    )
    offset = sql.Identifier(settings.source.mapping["c_offset"])
    if settings.source.mode != "wal":
        # Offsets that were given before relay came go before those that it gives.
        source.execute(
            sql.SQL(
                """
                update relay.log_counter as counter set next_offset = newest.c_offset + 1
                  from (select max({}) as c_offset from {}) as newest
                 where counter.id = 1 and counter.next_offset <= newest.c_offset
                """
            ).format(offset, table)
        )
    if source.execute("select from pg_roles where rolname = 'relay'").rowcount:
        source.execute(sql.SQL("grant select on {} to relay").format(table))


def _start_group(
    source: Connection, target: Connection, settings: Settings, start: Start
) -> list[str]:
    done = []
    name = settings.source
    if name.mode != "poll" and ensure_publication(source, name):
        done.append(f"publication {name.publication} of {name.table}")
    # Decided before the slot exists: what was committed in between is older than the slot, and read by polling.
    first = start.offset(source, settings)
    if name.mode != "poll" and ensure_slot(source, name.slot):
        done.append(f"replication slot {name.slot}")
    if name.mode != "wal" and ensure_index(source, settings):
        done.append(f"index of {name.table} for polling {settings.partitions} partitions")
    # What goes before an offset that was asked for is skipped if the slot should bring it.
    handover = first if start.place.isdecimal() else 1
    created = offsets.create(target, settings.group, settings.partitions, first, handover)
    if created:
        done.append(f"group {settings.group} with {created} partitions, from c_offset {first} on")
    return done


def remove(
    settings: Settings, admin_dsn: str | None = None, target_admin_dsn: str | None = None
) -> list[str]:
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
        drop_indexes(source, settings)
        source.execute("drop schema if exists relay cascade")
        done.append(f"publication {settings.source.publication} and schema relay in the source")
    if not settings.one_database:
        with reach(target_admin_dsn or settings.target_dsn, "target.dsn") as target:
            target.execute("drop schema if exists relay cascade")
        done.append("schema relay in the target")
    return done


def _installed(names: list[str]) -> list[str]:
    return [f"schema file {name}" for name in names]


def _first(error: psycopg.Error) -> str:
    return str(error).strip().splitlines()[0]
