"""What is done about a source that has changed: another server, a slot or a publication that was lost."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg

from relay.config import Settings
from relay.events import Lsn
from relay.faults import RelayError
from relay.source.slot import (
    create_slot,
    drop_slot,
    ensure_publication,
    require_ours,
    slot_state,
)
from relay.store import groups, streams
from relay.store.connections import connect

log = logging.getLogger(__name__)

Connection = psycopg.Connection[Any]

RECREATIONS_AN_HOUR = 3


class Unavailable(Exception):
    """The WAL cannot be had for a reason that does not pass by itself."""


@dataclass(frozen=True, slots=True)
class System:
    """The server and timeline that positions belong to, and where its WAL ends now."""

    identifier: str
    timeline: int
    position: Lsn = field(compare=False)


def identify(conn: Connection) -> System:
    """Ask a replication connection who it is.

    Source: PostgreSQL documentation, "Streaming Replication Protocol", IDENTIFY_SYSTEM.
    """
    row = conn.execute("IDENTIFY_SYSTEM").fetchone()
    if row is None:
        raise psycopg.OperationalError("the server does not identify itself")
    return System(str(row[0]), int(row[1]), Lsn.parse(str(row[2])))


def recognise(settings: Settings, system: System) -> None:
    """Let c_offset decide what is new if LSNs cannot: another server, timeline, or an older state of it.

    Raises psycopg.Error if the target, which remembers, cannot be reached.
    """
    with connect(settings.target_dsn) as target:
        if groups.recognise(
            target, settings.group, system.identifier, system.timeline, system.position
        ):
            log.warning("the source's positions are not those of before; c_offset decides")


class Recovery:
    """Recreates a lost slot, publication first.

    What the new slot does not have is left to polling: the cursors tell what is missing.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def restore(self, conn: Connection, undecodable: bool) -> bool:
        """Make publication and slot if they cannot serve; returns whether there is a new slot.

        `undecodable`: the slot stands in WAL from before the publication. Raises Unavailable if the server cannot
        have a slot, RelayError if the slot is lost again and again, ConfigurationError if it is not ours.
        """
        source = self._settings.source
        state = slot_state(conn, source.slot)
        if state is not None:
            require_ours(state, conn.info.dbname)
        lost = state is not None and (state.lost or undecodable) and not state.active
        published = conn.execute(
            "select from pg_publication where pubname = %s", (source.publication,)
        ).rowcount
        if state is not None and published and not lost:
            return False
        _require_capable(conn)
        with connect(self._settings.target_dsn) as target:
            if groups.recreations(target, self._settings.group) >= RECREATIONS_AN_HOUR:
                raise RelayError(
                    f"source.slot: {source.slot!r} was lost {RECREATIONS_AN_HOUR} times within an hour: raise "
                    "max_slot_wal_keep_size, or find out who drops it, and start relay again; or set source.mode: poll"
                )
            reason = "it was missing" if state is None else state.invalidation_reason
            try:
                ensure_publication(conn, source)
                if state is not None:
                    drop_slot(conn, source.slot)
                create_slot(conn, source.slot)
                # A role of an administrator's own making need not have the right.
                with suppress(psycopg.errors.InsufficientPrivilege):
                    streams.record(conn, source.slot, self._settings.group)
            except psycopg.errors.InsufficientPrivilege as error:
                raise Unavailable(
                    f"the role may not make publication and slot ({error.diag.message_primary}): "
                    "run `relay init` as an administrator"
                ) from None
            groups.note_recreation(target, self._settings.group)
        log.warning(
            "the slot was recreated; what it does not have is read by polling",
            extra={"slot": source.slot, "reason": reason or "the publication was missing"},
        )
        return True


def _require_capable(conn: Connection) -> None:
    row = conn.execute("select pg_is_in_recovery(), current_setting('wal_level')").fetchone()
    standby, level = row if row else (False, "logical")
    if standby:
        raise Unavailable("the server is a standby")
    if level != "logical":
        raise Unavailable(f"the server runs with wal_level={level}, which has no logical decoding")
