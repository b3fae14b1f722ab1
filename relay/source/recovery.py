"""Recreates a lost slot or publication, and recognises a source that is another server or has lost events."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import psycopg

from relay.config.settings import Settings
from relay.faults import RelayError, TransientFault, first_line, refused_for_good
from relay.model.events import Lsn
from relay.source.open_transactions import oldest_open, reporting_blockers
from relay.source.outbox_table import OutboxTable
from relay.source.server import current_position, server_of
from relay.source.slot import (
    create_slot,
    drop_slot,
    ensure_publication,
    require_ours,
    slot_state,
)
from relay.source.timelines import TimelineHistory
from relay.source.walsender import System, identify, open_replication
from relay.store import groups, streams
from relay.store.connections import Connection, connect

log = logging.getLogger(__name__)


RECREATIONS_AN_HOUR = 3


class Unavailable(Exception):
    """The WAL cannot be read, for a reason that does not pass by itself."""


@dataclass(frozen=True, slots=True)
class SourceComparison:
    """The source as it is, and where the group's positions belong to: read before, so that they lag, never lead."""

    group: str
    origin: groups.SourceOrigin
    system: System
    table: str = ""
    restored: bool = False
    """Whether the server is another one, with rows that came from elsewhere."""

    @property
    def foreign(self) -> bool:
        """Whether the positions belong to a server with another identifier."""
        return self.origin.identifier not in (None, self.system.identifier)

    @property
    def same(self) -> bool:
        """Whether the positions belong to this very history."""
        return (
            self.origin.identifier == self.system.identifier
            and _known(self.origin) == self.system.history
        )

    def require_valid(self) -> None:
        """Raise RelayError if the source no longer has what was applied, Unavailable if it does not have it yet."""
        origin, system = self.origin, self.system
        self._require_newer()
        if self.restored:
            raise RelayError(
                f"the source is another server, and rows of {self.table} were inserted there by other transactions "
                "than those that their c_xid names: by a dump or by logical replication. relay cannot know which "
                f"events are new to group {self.group!r}: restore the target to a state from before, or `relay offsets "
                "seek` to where relay is to go on, as --to end or a time"
            )
        if origin.identifier is None or self.foreign:
            return
        known = _known(origin)
        # A role that may only poll is not told what led to the first timeline that it sees.
        history = system.history if origin.history else system.history.since(known.timeline)
        shared = known.shared_until(history)
        limit = system.position if shared is None else min(shared, system.position)
        if max(origin.applied, origin.polled) <= limit:
            return
        if system.standby and system.history.timeline in known.timelines:
            raise Unavailable("the server is a standby that does not have yet what was applied")
        ours = (
            f"its WAL ends at {limit}"
            if limit == system.position
            else f"its timeline {system.history.timeline} has in common with timeline {origin.timeline}, which they "
            f"came from, only what lies up to {limit}"
        )
        lost = (
            f"has lost events that group {self.group!r} has applied: they reach up to {origin.applied}"
            if origin.applied > limit
            else f"may have lost events that group {self.group!r} has polled or delivered: they lie below "
            f"{origin.polled}"
        )
        raise RelayError(
            f"the source {lost}, but {ours}: a failover with a loss, a former primary, or an older backup. New events "
            "take over positions and c_offsets of the lost ones, so relay does not go on until you decide: restore the "
            "target to a state from before the loss; or keep what was applied, and go on with what the source has "
            f"published since, by `relay offsets seek --to {limit}`, or --to the time of the loss where the slot does "
            "not reach back"
        )

    def _require_newer(self) -> None:
        """Raise RelayError if transactions that were applied are still to come on this server.

        On a server that pg_upgrade has made, transaction ids go on.
        """
        if self.system.standby or self.system.next_xid >= self.origin.xmax:
            return
        former = f", which came from {self.origin.identifier}," if self.foreign else ""
        raise RelayError(
            f"the source{' is another server and' if self.foreign else ''} gives {self.system.next_xid} as the next "
            f"transaction, but group {self.group!r}{former} has applied what came before {self.origin.xmax}: it was "
            "restored from an older backup or a dump, or failed over with a loss, and relay cannot know which events "
            "are new. Restore the target to a state from before, or `relay offsets seek` to where relay is to go on, "
            "as --to end or a time"
        )


def _known(origin: groups.SourceOrigin) -> TimelineHistory:
    return TimelineHistory.parse(origin.timeline or 1, origin.history or "")


class Recognition:
    """Tells whether the source is still the one that the group's positions belong to."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def inspect(self, conn: Connection) -> SourceComparison:
        """Compare a replication connection's server with what the group remembers. Changes nothing.

        Raises psycopg.Error if one of them does not answer.
        """
        with connect(self._settings.target_dsn) as target:
            origin = groups.origin(target, self._settings.group)
        return self._compare(conn, origin, identify(conn))

    def _compare(
        self, conn: Connection, origin: groups.SourceOrigin, system: System
    ) -> SourceComparison:
        settings = self._settings
        found = SourceComparison(settings.group, origin, system)
        if not found.foreign or not origin.xmax:
            return found
        restored = OutboxTable(settings).are_restored(conn)
        return replace(found, table=settings.source.table, restored=restored)

    def follow(self, comparison: SourceComparison, incomplete: bool) -> int:
        """Remember the source that was seen, for who holds its slot; returns the group's epoch.

        On another timeline LSNs stay valid up to where it was left. On another server, which pg_upgrade has made of the
        former, the snapshots decide what is new. `incomplete`: whoever reads the slot next is to poll first, as long as
        nobody says otherwise. Raises RelayError if events that were applied are lost, and psycopg.Error if the target
        does not answer.
        """
        epoch = self._remember(comparison)
        with connect(self._settings.target_dsn) as target:
            groups.note_confirmed(target, comparison.group, Lsn(0) if incomplete else None)
        return epoch

    def follow_polled(self, source: Connection, origin: groups.SourceOrigin) -> None:
        """Remember the source that a connection polls, as `follow` does; `origin` was read before.

        Raises RelayError if events that were applied are lost; TransientFault or psycopg.Error while that cannot be
        told.
        """
        comparison = self._polled(source, origin)
        if comparison is None:
            return
        try:
            self._remember(comparison)
        except Unavailable as error:
            raise TransientFault(str(error)) from None

    def has_lost(self, source: Connection, origin: groups.SourceOrigin) -> bool:
        """Whether the source that a connection polls has lost events that were applied, polled or delivered.

        Changes nothing. Raises TransientFault or psycopg.Error while that cannot be told.
        """
        try:
            comparison = self._polled(source, origin)
            if comparison is not None:
                comparison.require_valid()
        except Unavailable:
            return False
        except TransientFault:
            raise
        except RelayError:
            return True
        return False

    def _polled(self, source: Connection, origin: groups.SourceOrigin) -> SourceComparison | None:
        """The source that a connection polls; None for a standby, which may lag: that the snapshots tell."""
        identifier, timeline, standby = server_of(source)
        known, ours = _known(origin), identifier == origin.identifier
        if ours and standby and timeline in known.timelines:
            return None
        seen = current_position(source)
        history = known if ours and timeline == known.timeline else TimelineHistory(timeline)
        system = System(identifier, history, seen.lsn, standby, seen.snapshot.xmax)
        comparison = self._compare(source, origin, system)
        if not comparison.same and timeline > 1:
            comparison = replace(
                comparison, system=replace(system, history=self._with_history(comparison))
            )
        return comparison

    def _with_history(self, comparison: SourceComparison) -> TimelineHistory:
        """The history of a polled server's timeline, which only a replication connection tells.

        Its last timeline only if the role may not have one, and there is nothing yet to compare it with.
        """
        try:
            with open_replication(self._settings) as conn:
                found = identify(conn)
        except psycopg.OperationalError as error:
            if not refused_for_good(error):
                raise
            if comparison.origin.identifier is None:
                return comparison.system.history
            raise RelayError(
                "source.dsn: the source is on another timeline, and only a replication connection can tell whether "
                f"events that were applied are lost there: {first_line(error)}: give the role the REPLICATION "
                "attribute, or decide with `relay offsets seek`"
            ) from None
        # A standby that has just followed its primary tells the former timeline for a while.
        if not found.standby and found.history.timeline != comparison.system.history.timeline:
            raise TransientFault(
                "source.dsn: the servers that it leads to are on different timelines"
            )
        return found.history

    def _remember(self, comparison: SourceComparison) -> int:
        """Let the group's LSNs belong to the source that was seen; returns the group's epoch."""
        comparison.require_valid()
        if comparison.same:
            return comparison.origin.epoch
        system = comparison.system
        with connect(self._settings.target_dsn) as target, target.transaction():
            # Other instances may have applied more of the former history, or followed already.
            now = replace(comparison, origin=groups.origin(target, comparison.group, lock=True))
            if now.same:
                return now.origin.epoch
            now.require_valid()
            epoch = groups.follow(
                target,
                comparison.group,
                system.identifier,
                system.history.timeline,
                str(system.history),
                reset=now.foreign,
            )
            if now.foreign or (now.origin.identifier is None and now.origin.confirmed is None):
                # The slot may lack something.
                groups.note_confirmed(target, comparison.group, Lsn(0))
        if now.foreign:
            log.warning("the source is another server: snapshots decide what is new")
        elif now.origin.identifier is not None:
            log.info(
                "the source is on another timeline, which has everything that was applied",
                extra={"timeline": system.history.timeline, "before": now.origin.timeline},
            )
        return epoch

    def leave(self, confirmed: Lsn | None) -> None:
        """Remember how far the slot is confirmed, before somebody else can read it; None while it is read."""
        # Without it, the next reader only notices later that somebody has advanced the slot.
        with suppress(psycopg.Error), connect(self._settings.target_dsn) as target:
            groups.note_confirmed(target, self._settings.group, confirmed)


class Recovery:
    """Recreates a lost slot, publication first.

    What the new slot does not have is polled: the positions tell what is missing.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def restore(
        self, conn: Connection, undecodable: bool, creating: Callable[[str | None], None]
    ) -> bool:
        """Make publication and slot if they cannot serve; returns whether there is a new slot.

        `undecodable`: the slot's position is in WAL from before the publication. `creating` is called before a slot is
        made, which takes until the transactions that run have ended, and from time to time meanwhile, in another
        thread, with the oldest of these. Raises Unavailable if the server cannot have a slot, RelayError if the slot is
        lost again and again, ConfigurationError if it is not ours.
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
                # If this process dies now, the next one polls first as well.
                groups.note_confirmed(target, self._settings.group, Lsn(0))
                if state is not None:
                    drop_slot(conn, source.slot)
                oldest = oldest_open(conn)
                creating(None if oldest is None else str(oldest))
                with reporting_blockers(self._settings.source_dsn, creating):
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
