"""Recognises a source that is another server or timeline, or has lost events, or whose slot others have moved."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from uuid import uuid4

import psycopg

from relay.config.settings import Settings
from relay.faults import (
    NotNow,
    RelayError,
    TransientFault,
    first_line,
    refused_for_good,
)
from relay.model.events import Lsn
from relay.model.snapshots import Witness
from relay.source.outbox.table import OutboxTable
from relay.source.server import TimelineHistory, current_position, server_of
from relay.source.walsender import System, identify, open_replication
from relay.source.witnesses import HeldWitnesses, is_one, running_database
from relay.store import groups
from relay.store.connections import Connection, asking

log = logging.getLogger(__name__)


class Unavailable(Exception):
    """The WAL cannot be read, for a reason that retries alone do not remove."""


@dataclass(frozen=True, slots=True)
class SourceComparison:
    """The source as it is, and the source that the group's positions belong to.

    The positions are read first, so that they may lag the source but are never past it.
    """

    group: str
    origin: groups.SourceOrigin
    system: System
    held: Witness | None = None
    """Of the witnesses that were noted for the group, the newest one that this server holds."""
    held_since: datetime | None = None
    """When it was noted, if it is not the newest of all."""
    table: str = ""
    restored: bool = False
    """Whether the server is another one, and has rows that were restored or replicated into it."""

    @property
    def foreign(self) -> bool:
        """Whether the positions belong to a server with another identifier."""
        return self.origin.identifier not in (None, self.system.identifier)

    @property
    def same(self) -> bool:
        """Whether the positions belong to this server and timeline."""
        return (
            self.origin.identifier == self.system.identifier
            and _known(self.origin) == self.system.history
        )

    def require_valid(self) -> None:
        """Raise RelayError if the source has lost applied events, Unavailable if it does not have them yet."""
        origin, system = self.origin, self.system
        if self.is_proven:
            return
        self._require_newer()
        if self.restored:
            raise RelayError(
                f"the source is another server, and rows of {self.table} were restored or replicated into it, so that "
                "their c_xid is not that of their transaction. relay cannot know which events are new to group "
                f"{self.group!r}. {_DECIDE}"
            )
        if origin.identifier is None or self.foreign:
            self.require_witness()
            return
        known = _known(origin)
        # A role that may only poll cannot read the history before the first timeline that it saw.
        history = system.history if origin.history else system.history.since(known.timeline)
        shared = known.shared_until(history)
        limit = system.position if shared is None else min(shared, system.position)
        if max(origin.applied, origin.polled) <= limit:
            if shared is None or (origin.witness is not None and origin.witness.lsn > shared):
                self.require_witness()
            # Otherwise at most the witness is lost, and nothing of what its snapshot sees.
            return
        if system.standby and system.history.timeline in known.timelines:
            raise Unavailable("the server is a standby that has not replayed yet what was applied")
        ours = (
            f"its WAL ends at {limit}"
            if limit == system.position
            else f"its timeline {system.history.timeline} shares WAL with their timeline {origin.timeline} only up to "
            f"{limit}"
        )
        lost = (
            f"has lost events that group {self.group!r} has applied: they reach up to {origin.applied}"
            if origin.applied > limit
            else f"may have lost events that group {self.group!r} has polled or delivered: they end before "
            f"{origin.polled}"
        )
        raise RelayError(
            f"the source {lost}, but {ours}: a failover with a loss, a former primary, or an older backup. New events "
            "reuse positions and c_offsets of the lost ones, so relay stops until you decide: restore the target to a "
            "state from before the loss; or keep what was applied, and continue with what the source has published "
            f"since, by `relay offsets seek --to {limit}`, or --to the time of the loss if the slot does not have the "
            "WAL since then"
        )

    @property
    def is_proven(self) -> bool:
        """Whether this server holds a witness of all that the group has read."""
        origin, held = self.origin, self.held
        if held is None or origin.xmax > held.snapshot.xmax:
            return False
        return self.foreign or max(origin.applied, origin.polled) <= held.lsn

    def require_witness(self) -> None:
        """Raise RelayError if a witness of what the group has read is not on this server, Unavailable if not yet."""
        origin, held = self.origin, self.held
        if origin.witness is None or held == origin.witness:
            return
        if held is not None and origin.xmax <= held.snapshot.xmax:
            return
        if self.system.standby and not self.foreign and origin.witness.lsn > self.system.position:
            raise Unavailable("the server is a standby that has not replayed yet what was applied")
        if self.foreign:
            how = "it is another server, into which a dump or a part of the database was restored"
        elif not self.same:
            how = "a failover with a loss, or a restore to a point in time"
        else:
            how = "it was restored from an older backup, or relay was installed in it again"
        earlier = (
            f"the newest that it has is of {self.held_since:%Y-%m-%d %H:%M:%S} UTC"
            if self.held_since
            else "it has no earlier one"
        )
        raise RelayError(
            f"the source does not have the witness {origin.witness.id} of what group {self.group!r} has applied: {how}"
            f"; {earlier}. relay cannot know which events are new. {_DECIDE}"
        )

    def _require_newer(self) -> None:
        """Raise RelayError if this server has not assigned yet the xids of transactions that were applied.

        pg_upgrade keeps the next xid.
        """
        if self.system.standby or self.system.next_xid >= self.origin.xmax:
            return
        other = ", another server," if self.foreign else ""
        former = f", which read server {self.origin.identifier}," if self.foreign else ""
        raise RelayError(
            f"the source{other} has the next transaction id {self.system.next_xid}, but group {self.group!r}{former} "
            f"has applied transactions below {self.origin.xmax}: the source was restored from an older backup or a "
            f"dump, or failed over with a loss, and relay cannot know which events are new. {_DECIDE}"
        )


_DECIDE = (
    "Restore the target to a state from before, or set with `relay offsets seek` where relay is to continue: --to the "
    "time to which the source was restored, or --to end, which passes over what was published since"
)


def _known(origin: groups.SourceOrigin) -> TimelineHistory:
    return TimelineHistory.parse(origin.timeline or 1, origin.history or "")


class Recognition:
    """Recognises whether the source is still the one that the group's positions belong to."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process = uuid4()
        self._has_read = False
        self._witnesses = HeldWitnesses()

    def inspect(self, conn: Connection) -> SourceComparison:
        """Compare the server of a replication connection with the source that the group has stored. Changes nothing.

        Raises psycopg.Error if source or target does not answer.
        """
        with asking(self._settings.target_dsn) as target:
            origin = groups.origin(target, self._settings.group)
        return self._compare(conn, origin, identify(conn))

    def _compare(
        self, conn: Connection, origin: groups.SourceOrigin, system: System
    ) -> SourceComparison:
        settings = self._settings
        held, since = self._held(conn, origin)
        comparison = SourceComparison(settings.group, origin, system, held, since)
        if not comparison.foreign or not origin.xmax:
            return comparison
        restored = OutboxTable(settings).are_restored(conn)
        return replace(comparison, table=settings.source.table, restored=restored)

    def _held(
        self, conn: Connection, origin: groups.SourceOrigin
    ) -> tuple[Witness | None, datetime | None]:
        """The newest of the group's witnesses that a server holds; when it was noted, if later ones are missing."""
        if origin.witness is None:
            return None, None
        if self._witnesses.has(conn, origin.witness.id):
            return origin.witness, None
        with asking(self._settings.target_dsn) as target:
            if is_one(conn, origin, running_database(target)):
                return origin.witness, None
            noted = groups.witnesses(target, self._settings.group)
        for each in noted:
            if self._witnesses.has(conn, each.witness.id):
                return each.witness, each.noted_at.astimezone(UTC)
        return None, None

    def follow(self, session: Connection, comparison: SourceComparison, incomplete: bool) -> int:
        """Store the source of a comparison as the group's, for the process that holds its slot; returns the epoch.

        `session` is an ordinary one on the same server.

        On another timeline LSNs stay valid up to the switch. On another server, made by pg_upgrade, the snapshots
        decide what is new. `incomplete`: the next reader of the slot polls first, unless `leave` is called before.
        Raises RelayError if events that were applied are lost, and psycopg.Error if the target does not answer.
        """
        epoch = self._remember(session, comparison)
        self._has_read = True
        with asking(self._settings.target_dsn) as target:
            groups.note_reading(target, comparison.group, self._process, incomplete)
        return epoch

    def follow_polled(self, source: Connection, origin: groups.SourceOrigin) -> None:
        """Store the source that a connection polls, as `follow` does; `origin` was read before.

        Raises RelayError if events that were applied are lost; TransientFault or psycopg.Error while that is unknown.
        """
        comparison = self._polled(source, origin)
        if comparison is None:
            return
        try:
            self._remember(source, comparison)
        except Unavailable as error:
            raise NotNow(str(error)) from None

    def has_lost(self, source: Connection, origin: groups.SourceOrigin) -> bool:
        """Whether the source that a connection polls has lost events that were applied, polled or delivered.

        Changes nothing. Raises TransientFault or psycopg.Error while that is unknown.
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

    def require_valid(self, source: Connection, origin: groups.SourceOrigin) -> None:
        """Raise RelayError if the source of a connection has lost events that were applied.

        Changes nothing. While that is unknown, whoever reads the source finds out. Raises psycopg.Error.
        """
        try:
            comparison = self._polled(source, origin)
            if comparison is not None:
                comparison.require_valid()
        except (Unavailable, TransientFault):
            return

    def _polled(self, source: Connection, origin: groups.SourceOrigin) -> SourceComparison | None:
        """Compare the source that a connection polls; None for a standby that may lag, which snapshots check."""
        identifier, timeline, standby = server_of(source)
        known, ours = _known(origin), identifier == origin.identifier
        if ours and standby and timeline in known.timelines:
            return None
        seen = current_position(source)
        history = known if ours and timeline == known.timeline else TimelineHistory(timeline)
        system = System(identifier, history, seen.lsn, standby, seen.snapshot.xmax)
        comparison = self._compare(source, origin, system)
        if not comparison.same and timeline > 1 and not comparison.is_proven:
            comparison = replace(
                comparison, system=replace(system, history=self._with_history(comparison))
            )
        return comparison

    def _with_history(self, comparison: SourceComparison) -> TimelineHistory:
        """Read the timeline history of a polled server, which needs a replication connection.

        Without the right to one, returns the current timeline alone if the group has stored no source yet, and raises
        RelayError otherwise: a witness has proven nothing.
        """
        try:
            with open_replication(self._settings) as conn:
                system = identify(conn)
        except psycopg.OperationalError as error:
            if not refused_for_good(error):
                raise
            if comparison.origin.identifier is None:
                return comparison.system.history
            comparison.require_witness()
            raise RelayError(
                "source.dsn: the source is on another timeline, and only a replication connection shows whether "
                f"events that were applied are lost there: {first_line(error)}: give the role the REPLICATION "
                "attribute, or decide with `relay offsets seek`"
            ) from None
        # A standby that has just followed its primary still reports the former timeline for a while.
        if not system.standby and system.history.timeline != comparison.system.history.timeline:
            raise NotNow("source.dsn: its servers are on different timelines")
        return system.history

    def _remember(self, source: Connection, comparison: SourceComparison) -> int:
        """Store that the group's LSNs belong to the source of the comparison; returns the group's epoch."""
        comparison.require_valid()
        if comparison.same and comparison.held == comparison.origin.witness:
            return comparison.origin.epoch
        system = comparison.system
        with asking(self._settings.target_dsn) as target, target.transaction():
            # Another instance may have applied more of the former history, or stored the new source already.
            origin = groups.origin(target, comparison.group, locked=True)
            # Sinks may have polled the new source since: its next transaction id is read after their positions.
            next_xid = current_position(source).snapshot.xmax
            now = self._compare(source, origin, replace(system, next_xid=next_xid))
            now.require_valid()
            if now.held != now.origin.witness:
                # What it proved is there: it alone was lost.
                groups.forget_witnesses(target, comparison.group)
            if now.same:
                return now.origin.epoch
            epoch = groups.follow(
                target,
                comparison.group,
                system.identifier,
                system.history.timeline,
                str(system.history),
                reset=now.foreign,
            )
            if now.foreign or (now.origin.identifier is None and now.origin.confirmed is None):
                # The slot may lack commits.
                groups.note_confirmed(target, comparison.group, Lsn(0))
        if now.foreign:
            log.warning(
                "the source is another server: relay continues from snapshots instead of LSNs"
            )
        elif now.origin.identifier is not None:
            log.info(
                "the source is on another timeline, which has everything that was applied",
                extra={"timeline": system.history.timeline, "before": now.origin.timeline},
            )
        return epoch

    def is_last_reader(self, origin: groups.SourceOrigin) -> bool:
        """Whether no other process of the group has read the slot since this one did."""
        return self._has_read and origin.reading == self._process

    def leave(self, confirmed: Lsn | None) -> None:
        """Store how far the slot is confirmed; None while it is read. Does nothing once another process has read it."""
        if not self._has_read:
            return
        # May fail: without it, the next reader only notices later that another client has advanced the slot.
        with suppress(psycopg.Error), asking(self._settings.target_dsn) as target:
            groups.note_left(target, self._settings.group, self._process, confirmed)
