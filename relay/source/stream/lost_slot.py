"""Recreates a lost slot or publication."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

import psycopg

from relay.config.settings import Settings
from relay.faults import (
    ConfigurationError,
    RelayError,
)
from relay.model.events import Lsn
from relay.source.recognition import Unavailable
from relay.source.server import is_standby, require_logical_wal
from relay.source.stream.slot import (
    create_slot,
    drop_slot,
    ensure_publication,
    has_publication,
    oldest_open,
    reporting_blockers,
    require_ours,
    slot_state,
)
from relay.store import groups, streams
from relay.store.connections import Connection, asking

log = logging.getLogger(__name__)


RECREATIONS_AN_HOUR = 3
"""How often a lost slot is recreated within an hour before relay stops."""


class Recovery:
    """Recreates a lost slot, after its publication.

    The positions in the target say which commits the new slot does not have: these are polled.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def restore(
        self, conn: Connection, undecodable: bool, creating: Callable[[str | None], None]
    ) -> bool:
        """Create publication and slot if they are missing or unusable; returns whether the slot is new.

        `undecodable`: the slot's position is in WAL from before the publication. The creation of a slot waits for all
        running transactions: `creating` is called before it and, in another thread, repeatedly during it, with the
        oldest of them. Raises Unavailable if the server cannot have a slot, RelayError if the slot is lost repeatedly,
        ConfigurationError if it is not ours, and psycopg.errors.ObjectInUse while it is read.
        """
        source = self._settings.source
        state = slot_state(conn, source.slot)
        if state is not None:
            require_ours(state, conn.info.dbname)
        lost = state is not None and (state.lost or undecodable) and not state.active
        published = has_publication(conn, source)
        if state is not None and published and not lost:
            return False
        _require_capable(conn)
        with asking(self._settings.target_dsn) as target:
            if groups.recreations(target, self._settings.group) >= RECREATIONS_AN_HOUR:
                raise RelayError(
                    f"source.slot: {source.slot!r} was lost {RECREATIONS_AN_HOUR} times within an hour: raise "
                    "max_slot_wal_keep_size, or find out who drops it or its publication, make them again with `relay "
                    "init`, and start relay; or set source.mode: poll"
                )
            reason = "it was missing" if state is None else state.invalidation_reason
            try:
                # If this process dies now, the next one polls first too.
                groups.note_confirmed(target, self._settings.group, Lsn(0))
                # Before the publication, which a stream of the slot would get in the middle of open commits.
                if state is not None:
                    drop_slot(conn, source.slot)
                ensure_publication(conn, source)
                oldest = oldest_open(conn)
                creating(None if oldest is None else str(oldest))
                with reporting_blockers(self._settings.source_dsn, creating):
                    create_slot(conn, source.slot)
                # A role that an administrator made need not have the right.
                with suppress(psycopg.errors.InsufficientPrivilege):
                    streams.record(conn, source.slot, self._settings.group)
            except psycopg.errors.InsufficientPrivilege as error:
                raise Unavailable(
                    f"the role may not create publication and slot ({error.diag.message_primary}): "
                    "run `relay init` as an administrator"
                ) from None
            groups.note_recreation(target, self._settings.group)
        log.warning(
            "the slot was recreated; events that it does not have are polled",
            extra={"slot": source.slot, "reason": reason or "the publication was missing"},
        )
        return True


def _require_capable(conn: Connection) -> None:
    if is_standby(conn):
        raise Unavailable("the server is a standby")
    try:
        require_logical_wal(conn)
    except ConfigurationError as error:
        raise Unavailable(str(error)) from None
