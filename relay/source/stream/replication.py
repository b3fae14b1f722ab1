"""Opens the slot's stream: checks server, slot and publication, runs START_REPLICATION, and explains failures.

Source: PostgreSQL documentation, "Streaming Replication Protocol".
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from threading import Event, Lock
from typing import Any

import psycopg

from relay.config.settings import Settings
from relay.faults import (
    ConfigurationError,
    NotNow,
    RelayError,
    describe,
    first_line,
    is_transient,
)
from relay.model.events import Lsn
from relay.runtime.parts import LATE_SECONDS, SOON_SECONDS, Condition, Due, Heartbeat
from relay.runtime.retry import RetryUntilSuccess
from relay.source.decode.translation import Encoding, codec_of
from relay.source.outbox.columns import is_partitioned
from relay.source.outbox.table import require_same_hash
from relay.source.recognition import Recognition, SourceComparison, Unavailable
from relay.source.state import NoStream, StreamState
from relay.source.stream.confirmation import Confirmation
from relay.source.stream.lost_slot import Recovery
from relay.source.stream.slot import (
    reader_activity,
    require_ours,
    require_published,
    slot_reader,
    slot_state,
)
from relay.source.walsender import (
    System,
    WalStream,
    identify,
    open_replication,
    open_session,
    require_asynchronous,
    sender_timeout,
    start_replication,
)
from relay.store.connections import INSTANCE, INSTANCE_PREFIX, Connection, asking
from relay.store.presence import instances

log = logging.getLogger(__name__)


ACTIVE_WAIT_SECONDS = 1.0
"""How often a standby tries to read the slot."""
ORPHANED_SECONDS = 3.0
"""How long the slot may be held for an instance that does not run: a walsender may notice late that it is gone."""
APPLIED_POLL_SECONDS = 0.1
STATUS_SHARE = 0.6
"""The share of `wal_sender_timeout` after which a status update is sent."""


class _SlotActive(Exception):
    """Another process reads the slot."""


class Replication:
    """Opens the stream, retries during outages, and reports why there is no stream.

    The receiver's thread owns it. Other threads may read `state`, and call `cancel_opening`, `complete` and `publish`.
    """

    def __init__(
        self,
        settings: Settings,
        confirmation: Confirmation,
        recovery: Recovery | None,
        recognition: Recognition | None,
        changed: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._confirmation = confirmation
        self._recovery = recovery
        self._recognition = recognition
        self._changed = changed
        self.heartbeat = Heartbeat()
        self.closing = Event()
        self.condition = Condition(
            "replication",
            log,
            "cannot stream yet",
            "the source can be used again",
            LATE_SECONDS if recovery else SOON_SECONDS,
        )
        self._retrying = RetryUntilSuccess(
            self.closing, self.condition, self._note_why, _may_pass, _wait
        )
        self.state = StreamState()
        self._publishing = Lock()
        # Held while the group's state in the target is changed together with `incomplete`.
        self._completing = Lock()
        # Only for the receiver's thread, except that `cancel_opening` cancels the query of `_opening`.
        self._opening: Connection | None = None
        self._system: System | None = None
        self._undecodable = False
        self._noted_left = False
        self._orphaned_since: float | None = None

    def publish(self, **changes: Any) -> None:
        """Replace the state by one with some fields changed. Safe in any thread."""
        with self._publishing:
            self.state = replace(self.state, **changes)

    def connect(self) -> WalStream | None:
        """Open the stream, with retries until it succeeds; None once relay closes. Raises RelayError, psycopg.Error."""
        try:
            return self._retrying(self._open)
        except (psycopg.Error, _SlotActive, Unavailable):
            if self.closing.is_set():
                return None
            raise

    def cancel_opening(self) -> None:
        """Cancel the creation of a slot, which may take long. Safe in any thread."""
        opening = self._opening
        if opening is not None:
            with suppress(psycopg.Error):
                opening.cancel_safe(timeout=1)

    def lost(self, error: psycopg.Error) -> None:
        """Note why the stream has ended. Raises RelayError if a new one would end the same way."""
        if is_transient(error):
            self.unavailable(f"replication connection lost: {describe(error)}", certain=False)
        elif self._recovery is None:
            raise _explained(error, self._settings) from error
        else:
            # The publication did not exist yet at the slot's position: that WAL can never be decoded.
            self._undecodable = isinstance(error, psycopg.errors.UndefinedObject)
            self.unavailable(str(_explained(error, self._settings)), certain=True)

    def recovered(self) -> None:
        """End the outage."""
        if self.state.outage is not None:
            self.publish(outage=None)
            self._changed()

    def unavailable(self, reason: str, certain: bool) -> None:
        """Begin or continue an outage."""
        before = self.state.outage
        since = before.since if before else time.monotonic()
        self.publish(outage=NoStream(reason, since, certain))

    def complete(self, connections: int) -> None:
        """Note that the commits which the slot may lack are polled, unless `connections` shows a newer connection."""
        with self._completing:
            if connections != self.state.connections:
                return
            if self.state.incomplete and self._recognition is not None:
                self._recognition.leave(None)
            self.publish(incomplete=False)

    def leave(self, stream: WalStream) -> None:
        """End a stream, if relay closes after `note_left`: before another process can read the slot."""
        if self.closing.is_set():
            self.note_left()
        stream.end()

    def note_left(self) -> None:
        """Store how far the slot is confirmed if relay ends, has read it, and has left nothing out.

        Without a stream too: the slot may be replaced between a lost connection and the next start.
        """
        if self._recognition is None or self._noted_left:
            return
        state = self.state
        if state.connections and not state.incomplete and not state.on_standby:
            self._noted_left = True
            self._recognition.leave(self._confirmation.flushed)

    def _open(self) -> WalStream:
        if self.closing.is_set():
            raise _SlotActive
        self.heartbeat.update("connects", Due.LATE)
        conn = self._opening = open_replication(self._settings)
        try:
            return self._start(conn)
        except BaseException as error:
            other_reader = (
                self._other_reader(conn) if isinstance(error, psycopg.errors.ObjectInUse) else None
            )
            conn.close()
            if isinstance(error, psycopg.errors.ObjectInUse):
                raise (Unavailable(other_reader) if other_reader else _SlotActive()) from error
            if isinstance(error, psycopg.Error) and not is_transient(error):
                explained = _explained(error, self._settings)
                if self._recovery is None:
                    raise explained from error
                raise Unavailable(str(explained)) from error
            raise
        finally:
            self._opening = None

    def _other_reader(self, conn: Connection) -> str | None:
        """Describe the client that reads the slot, if it is no running relay; None if relay may wait for the slot."""
        if self._recovery is None:
            return None
        try:
            reader = slot_reader(conn, self._settings.source.slot)
            if reader is None:
                return None
            if not reader.startswith("relay"):
                return f"another client reads the slot: {reader or 'without a name'}"
            if self._is_alive(reader):
                self._orphaned_since = None
                return None
            activity = reader_activity(conn, self._settings.source.slot)
        except psycopg.Error:
            return None
        self._orphaned_since = self._orphaned_since or time.monotonic()
        if time.monotonic() - self._orphaned_since < ORPHANED_SECONDS:
            return None
        return (
            f"the slot is held for no running instance: {activity}; its process hangs, or is another group's: end it "
            "with pg_terminate_backend"
        )

    def _is_alive(self, reader: str) -> bool:
        """Whether another instance of the group runs with that application_name. Raises psycopg.Error."""
        with asking(self._settings.target_dsn) as target:
            running = instances(target, self._settings.group)
        if INSTANCE in running:
            # This one; a process may have several.
            running.remove(INSTANCE)
        return reader.removeprefix(INSTANCE_PREFIX) in running

    def _note_why(self, error: BaseException) -> None:
        """Publish why there is no stream, and report it, before the next attempt."""
        self.heartbeat.update("waits to connect again", Due.LATE)
        stood_by = self.state.on_standby
        if isinstance(error, _SlotActive):
            self.publish(on_standby=True, outage=None)
            self.condition.works()
            if not stood_by:
                log.warning("another process reads the slot; standing by")
            return
        certain = isinstance(error, Unavailable)
        fault = str(error) if certain else describe(error)
        self.publish(on_standby=False)
        self.unavailable(f"cannot stream yet: {fault}", certain)
        self.condition.fails(fault)

    def _creating(self, waits_for: str | None) -> None:
        self.heartbeat.update("recreates the slot", Due.OPEN)
        oldest = f"; the oldest is {waits_for}" if waits_for else ""
        self.unavailable(
            f"the slot is being recreated, which waits for all running transactions{oldest}",
            certain=True,
        )
        log.warning(
            "the slot is being recreated, which waits for all running transactions",
            extra={"waits_for": waits_for} if waits_for else {},
        )

    def _start(self, conn: Connection) -> WalStream:
        slot = self._settings.source.slot
        system, comparison = self._inspect(conn)
        if comparison is not None and not _is_read(conn, slot):
            # Otherwise a lost slot would be recreated although its stream is refused.
            comparison.require_valid()
        recreated = False
        if self._recovery is not None:
            recreated = self._recovery.restore(conn, self._undecodable, self._creating)
            self._undecodable = False
        state = slot_state(conn, slot)
        if state is None and self._recovery is not None:
            raise NotNow("the slot was just dropped")
        if state is None:
            raise ConfigurationError(
                f"source.slot: there is no replication slot {slot!r}: run `relay init` to create it; events of commits "
                "that no slot has are not delivered in mode wal"
            )
        self.heartbeat.update("starts to stream", Due.LATE)
        require_ours(state, conn.info.dbname)
        self._require_streamable(conn)
        timeout = sender_timeout(conn)
        server_encoding = conn.info.parameter_status("server_encoding")
        encoding = Encoding.of(server_encoding)
        require_same_hash(conn)
        partitioned = is_partitioned(conn, self._settings.source)
        confirmed = Lsn.parse(state.confirmed_flush_lsn or "0/0")
        left_at = self._left_at(comparison)
        lacks = recreated or self._is_incomplete(comparison, left_at, confirmed)
        if recreated:
            self._confirmation.reset()
        start = max(confirmed, self._confirmation.received)
        # The server refuses a slot that another process reads: it may be an instance that has taken over.
        start_replication(conn, self._settings.source, start, encoding)
        if lacks and self._recovery is None:
            raise RelayError(
                f"the slot {slot!r} does not continue where group {self._settings.group!r} left it: another client has "
                "advanced it, or it was dropped and made again, or the server is another one: set source.mode to auto, "
                "which polls the events that the slot does not have, or skip them with `relay offsets seek`"
            )
        with ExitStack() as opened:
            session = opened.enter_context(open_session(self._settings, conn))
            self._require_unchanged(session, confirmed)
            if left_at and confirmed > left_at and not recreated:
                log.warning(
                    "another client has advanced the slot; events that it does not have are polled",
                    extra={"from": str(left_at), "to": str(confirmed)},
                )
            with self._completing:
                epoch = self.state.epoch
                if self._recognition is not None and comparison is not None:
                    # Only the process that reads the slot changes the group's state. What the slot lacks stays true
                    # if the target does not answer.
                    self.publish(incomplete=self.state.incomplete or lacks)
                    epoch = self._recognition.follow(session, comparison, self.state.incomplete)
                self._confirmation.start(confirmed)
                self._system = system
                self._orphaned_since = None
                self.publish(
                    connections=self.state.connections + 1,
                    on_standby=False,
                    epoch=epoch,
                    codec=codec_of(server_encoding),
                    next_xid=system.next_xid,
                )
            opened.pop_all()
        self._changed()
        log.info("streaming", extra={"slot": slot, "lsn": str(start)})
        return WalStream(
            conn,
            session,
            start,
            timeout * STATUS_SHARE,
            timeout * 1.5,
            encoding,
            partitioned,
            system.next_xid,
        )

    def _require_unchanged(self, session: Connection, confirmed: Lsn) -> None:
        """Raise TransientFault if the slot was recreated or advanced after it was inspected, until the stream began.

        PostgreSQL then begins the stream at the slot's new position, without an error.
        """
        state = slot_state(session, self._settings.source.slot)
        if state is None or Lsn.parse(state.confirmed_flush_lsn or "0/0") != confirmed:
            raise NotNow("the slot was just recreated or advanced")

    def _left_at(self, comparison: SourceComparison | None) -> Lsn | None:
        """How far the slot was confirmed when the group left it; None if unknown, 0/0 if it may lack commits."""
        if comparison is None or self._recognition is None:
            return None
        # What this process has confirmed says nothing once another instance has taken over.
        if comparison.origin.confirmed is None and self._recognition.is_last_reader(
            comparison.origin
        ):
            return self._confirmation.flushed
        return comparison.origin.confirmed

    def _is_incomplete(
        self, comparison: SourceComparison | None, left_at: Lsn | None, confirmed: Lsn
    ) -> bool:
        """Whether the slot may lack commits: it is new to the group, or another server's, or was advanced."""
        if comparison is None:
            return False
        if not left_at:
            # A reader that is killed leaves nothing out. In mode wal a group begins with its slot.
            uncertain = left_at is not None or comparison.origin.identifier is None
            return comparison.foreign or (uncertain and self._recovery is not None)
        return comparison.foreign or confirmed > left_at

    def _inspect(self, conn: Connection) -> tuple[System, SourceComparison | None]:
        comparison = self._recognition.inspect(conn) if self._recognition else None
        system = comparison.system if comparison else identify(conn)
        if self._system in (None, system):
            return system, comparison
        self._await_applied()
        self._system = None
        # More was applied meanwhile.
        return self._inspect(conn)

    def _require_streamable(self, conn: Connection) -> None:
        """Refuse a publication that leaves out columns, whose values would silently be null, and to be a standby."""
        try:
            require_published(conn, self._settings.source)
            require_asynchronous(conn)
        except ConfigurationError as error:
            if self._recovery is None:
                raise
            raise Unavailable(str(error)) from None

    def _await_applied(self) -> None:
        """Wait until everything from the former server or timeline is applied: its LSNs are not valid on this one."""
        log.warning(
            "the source is another server or timeline; relay first applies what it has received"
        )
        while not self._confirmation.all_acknowledged and not self.closing.is_set():
            self.heartbeat.update("waits until the commits of the former server are applied")
            self.closing.wait(APPLIED_POLL_SECONDS)
        self._confirmation.reset()


def _is_read(conn: Connection, slot: str) -> bool:
    state = slot_state(conn, slot)
    return state is not None and state.active


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, _SlotActive | Unavailable) or is_transient(error)


def _wait(error: BaseException) -> float | None:
    return ACTIVE_WAIT_SECONDS if isinstance(error, _SlotActive) else None


def _explained(error: psycopg.Error, settings: Settings) -> RelayError:
    source = settings.source
    first = first_line(error)
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return ConfigurationError(
            f"source.dsn: {first}: give the role the REPLICATION attribute, or connect as one that has it"
        )
    if isinstance(error, psycopg.errors.UndefinedObject):
        return ConfigurationError(
            f"source.slot or source.publication: {first}: run `relay init` to create slot {source.slot!r} and "
            f"publication {source.publication!r}"
        )
    if isinstance(error, psycopg.errors.ObjectNotInPrerequisiteState):
        return RelayError(
            f"the slot {source.slot!r} can no longer be used: {first}: set source.mode to auto, which recreates "
            "it and polls the events that it does not have"
        )
    return RelayError(f"the server refuses to stream: {first}")
