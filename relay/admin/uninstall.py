"""Removes relay from its databases: groups, slots, publications, indexes, schema. `relay uninstall`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import psycopg
from psycopg import sql

from relay.admin.connections import administrators
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.source.outbox.additions import drop_all_indexes
from relay.source.stream.slot import drop_publication, drop_slot, slot_state
from relay.store import migrations, presence, streams
from relay.store.connections import Connection


@dataclass(frozen=True, slots=True)
class InstalledGroup:
    """A group of the target, and how much is dropped with it."""

    name: str
    partitions: int
    dead_letters: int


@dataclass(frozen=True, slots=True)
class Removal:
    """The objects that `relay uninstall` drops. `schemas` has the names of databases. No outbox is ever dropped."""

    groups: tuple[InstalledGroup, ...]
    slots: tuple[streams.StreamRecord, ...]
    publications: tuple[str, ...]
    schemas: tuple[str, ...]

    def lines(self) -> list[str]:
        """Describe the removal, a line for each object."""
        here = {group.name for group in self.groups}
        return [
            *(
                f"group {group.name}: {group.partitions} partitions, {group.dead_letters} dead letters"
                for group in self.groups
            ),
            *(
                f"replication slot {slot.slot} of the group {slot.group_id}"
                + (
                    ""
                    if slot.group_id in here
                    else ", whose offsets are in another database and stay there"
                )
                for slot in self.slots
            ),
            *(f"publication {name}" for name in self.publications),
            *(f"schema relay in the database {name}" for name in self.schemas),
        ]


def plan_removal(
    settings: Settings, source_dsn: str | None = None, target_dsn: str | None = None
) -> Removal:
    """Find the objects that `relay uninstall` drops: all that relay has in the configured source and target.

    Raises ConfigurationError if relay is installed in neither, a right is missing, or an instance runs.
    """
    with (
        administrators(settings, source_dsn, target_dsn) as (source, target),
        _rights_named(),
    ):
        removal = _plan(settings, source, target)
        with _stopped(removal, source, target):
            return removal


def remove(
    settings: Settings,
    agreed: Removal,
    source_dsn: str | None = None,
    target_dsn: str | None = None,
) -> list[str]:
    """Drop the objects of an approved removal; returns a line for each.

    Raises ConfigurationError, with nothing dropped, if the objects have changed, a right is missing, or an instance
    runs.
    """
    with (
        administrators(settings, source_dsn, target_dsn) as (source, target),
        _rights_named(),
    ):
        removal = _plan(settings, source, target)
        if removal != agreed:
            raise ConfigurationError(
                "uninstall: the installed objects have changed meanwhile: run `relay uninstall` again"
            )
        with _stopped(removal, source, target):
            _drop(removal, source, target)
    return removal.lines()


@contextmanager
def _rights_named() -> Iterator[None]:
    """Raise ConfigurationError with a hint if a role lacks a right."""
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        raise ConfigurationError(
            f"source.dsn or target.dsn: {error.diag.message_primary}: connect as an administrator "
            "(`relay uninstall --admin-dsn …`)"
        ) from None


def _plan(settings: Settings, source: Connection, target: Connection) -> Removal:
    databases = [source] if source is target else [source, target]
    installed = [conn for conn in databases if migrations.recorded(conn)]
    if not installed:
        names = " nor in ".join(repr(conn.info.dbname) for conn in databases)
        raise ConfigurationError(
            f"uninstall: relay is not installed in {names}: there is nothing to drop, or correct source.dsn and "
            "target.dsn"
        )
    known = _streams(source, settings) if source in installed else []
    return Removal(
        groups=tuple(_groups(target)) if target in installed else (),
        slots=tuple(each for each in known if _is_here(source, each.slot)),
        publications=tuple(sorted({each.publication for each in known if each.publication})),
        schemas=tuple(conn.info.dbname for conn in installed),
    )


def _streams(source: Connection, settings: Settings) -> list[streams.StreamRecord]:
    """List the slots and publications that relay has created; without a record of them, the configured ones."""
    recorded = streams.all_streams(source)
    if recorded is not None:
        return recorded
    named = settings.source
    return [streams.StreamRecord(named.slot, settings.group, named.publication)]


def _is_here(source: Connection, slot: str) -> bool:
    """Return whether the slot exists in this database: names of slots are unique in the whole cluster."""
    state = slot_state(source, slot)
    return state is not None and state.database == source.info.dbname


def _groups(target: Connection) -> Iterator[InstalledGroup]:
    # Without the view, a former edition has dead letters of the target and of sinks only.
    found = "select coalesce(to_regclass('relay.dead_letters'), 'relay.dead_letter_queue'::regclass)::text"
    ((letters,),) = target.execute(found).fetchall()
    for name, partitions, dead in target.execute(
        sql.SQL(
            """
            select coalesce(o.group_id, d.group_id), coalesce(o.partitions, 0), coalesce(d.dead_letters, 0)
              from (select group_id, count(*) as partitions from relay.consumer_offsets group by 1) as o
              full join (select group_id, count(*) as dead_letters from {} where group_id is not null group by 1) as d
                   using (group_id)
             order by 1
            """
        ).format(sql.SQL(letters))
    ):
        yield InstalledGroup(name, partitions, dead)


@contextmanager
def _stopped(removal: Removal, source: Connection, target: Connection) -> Iterator[None]:
    """Keep instances of the groups from starting. Raises ConfigurationError if one runs, or a process reads a slot."""
    with ExitStack() as locks:
        for group in removal.groups:
            if not locks.enter_context(presence.stopped(target, group.name)):
                running = ", ".join(presence.instances(target, group.name))
                raise ConfigurationError(
                    f"group: an instance of {group.name!r} is running ({running}): stop it first"
                )
        for each in removal.slots:
            state = slot_state(source, each.slot)
            if state is not None and state.active:
                raise ConfigurationError(
                    f"source.slot: {each.slot!r} of the group {each.group_id!r} is read by process "
                    f"{state.active_pid}: stop the running relay first"
                )
        yield


def _drop(removal: Removal, source: Connection, target: Connection) -> None:
    with ExitStack() as transactions:
        databases = [source] if source is target else [source, target]
        for conn in databases:
            transactions.enter_context(conn.transaction())
        for name in removal.publications:
            drop_publication(source, name)
        drop_all_indexes(source)
        for conn in databases:
            conn.execute("drop schema if exists relay cascade")
        # Last, since a rollback does not restore a slot.
        for each in removal.slots:
            drop_slot(source, each.slot)
