"""Chooses the mode: reads the WAL where that is possible, and polls what the WAL does not have."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from threading import Event
from typing import Protocol

import numpy as np
import psycopg

from relay.config.settings import Settings
from relay.faults import ConfigurationError, RelayError, describe, is_transient
from relay.model.batch import Batch, Outcome
from relay.model.events import Lsn
from relay.model.snapshots import full_xids
from relay.runtime.parts import SOON_SECONDS, Condition, Due, Heartbeat, Part
from relay.source.decode.assembler import OpenCommit
from relay.source.outbox.interval import Interval
from relay.source.outbox.polling import BUSY_SECONDS, Follower, Poller, PollSource, note_mode
from relay.source.recovery import Recognition, Recovery
from relay.source.server import SourcePosition
from relay.source.state import ELSEWHERE, POLLS, STANDBY, STREAMS, SourceState
from relay.source.stream.wal import WalSource

log = logging.getLogger(__name__)

GRACE_SECONDS = 3.0
"""How long the replication connection may fail before relay polls."""
AUDIT_SECONDS = 5.0
"""How often the stream is compared with the outbox."""
STILL_SECONDS = 5.0
"""How long the stream may bring nothing of what the outbox has before relay polls."""
REPORT_SECONDS = 30.0
"""The same in mode wal, where it is only reported: a walsender that decodes a large transaction is silent as well."""
RECONNECT_SECONDS = 15.0
"""The least time between two reconnections because commits are missing in the stream."""


class Source(Protocol):
    """A source of batches for the service."""

    def guard(self) -> None:
        """Note which commit is received, since one may have killed a process. Call before `start`."""

    def start(self) -> None:
        """Begin to receive."""

    def batches(self, follower: Follower) -> Iterator[Batch]:
        """Yield batches as they come, and notify `follower` of the mode. Ends after `stop()`. Raises RelayError."""

    def ahead(self, events: int) -> Batch | None:
        """Return the batch after the one in flight, which `batches()` yields next.

        None if it has fewer than `events` events, was returned already, or something else may come next.
        """

    def ack(self, batch: Batch, outcome: Outcome) -> None:
        """Note that the batch is committed."""

    def confirm(self, end: Lsn) -> None:
        """Confirm the WAL up to a position: it is no longer needed."""

    def stop(self) -> None:
        """Let `batches()` end after the batch in flight. Safe in a signal handler's thread."""

    def close(self) -> None:
        """Close the connections to the source."""

    @property
    def flushed(self) -> Lsn:
        """The position up to which PostgreSQL may recycle the WAL."""

    @property
    def heartbeat(self) -> Heartbeat:
        """The heartbeat of the thread that takes the batches, while it waits for one."""

    @property
    def receiver(self) -> WalSource | None:
        """The reader of the slot, with a thread of its own."""

    @property
    def error(self) -> RelayError | None:
        """None: `batches` raises what no retry can repair."""

    @property
    def conditions(self) -> Sequence[Condition]:
        """The conditions of its background parts."""

    def state(self) -> SourceState:
        """How the source is read now. Safe in any thread."""


def open_source(settings: Settings) -> Source:
    """Build the source for the configured `source.mode`."""
    return PollSource(settings) if settings.source.mode == "poll" else StreamSource(settings)


class StreamSource(Part):
    """Reads the WAL and, in mode `auto`, polls what it does not have: older rows, and all rows during an outage.

    Both modes move the same positions. A snapshot whose commits have all come from the WAL replaces the previous one;
    commits that it sees and that did not come are polled.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.heartbeat = Heartbeat()
        self._takeovers = 0
        self._stood_by = False
        self._reason: str | None = None
        self._polls = settings.source.mode == "auto"
        self._interval = Interval(settings)
        recovery = Recovery(settings) if self._polls else None
        self._wal = WalSource(settings, recovery, self._interval.wake, Recognition(settings))
        self._poller = Poller(settings, self.heartbeat)
        self._stopping = Event()
        self._progressed = True
        self._refused = False
        self._mode = ""
        self._connections = 0
        self._incomplete = False
        self._current_position: SourcePosition | None = None
        self._positioned = 0.0
        # The position that a stream which stands still has not reached.
        self._still: Lsn | None = None
        self._ahead: Batch | None = None
        self._next_audit = 0.0
        self._next_reconnect = 0.0
        self._membership: tuple[int, int | None] | None = None
        self._audited = Condition(
            "audit",
            log,
            "the stream cannot be compared with the outbox",
            "the stream is compared with the outbox again",
            least_attempts=2,
        )
        self._flows = Condition(
            "stream", log, "the stream stands still", "the stream goes on", SOON_SECONDS
        )

    def guard(self) -> None:
        """Note which commit is received, since one may have killed a process. Call before `start`."""
        self._wal.guard()
        self._poller.guard()

    def start(self) -> None:
        """Begin to receive."""
        self._wal.start()

    def stop(self) -> None:
        """Let `batches()` end after the batch in flight. Safe in a signal handler's thread."""
        self._stopping.set()
        self._wal.stop()
        self._poller.stop()
        self._interval.wake()

    def close(self) -> None:
        """Report the last position and leave the slot."""
        self._wal.close()
        self._poller.close()
        self._interval.close()

    @property
    def flushed(self) -> Lsn:
        """The position that was reported, or is about to be, as durable."""
        return self._wal.flushed

    @property
    def receiver(self) -> WalSource:
        """The reader of the slot, with a thread of its own."""
        return self._wal

    @property
    def conditions(self) -> Sequence[Condition]:
        """The conditions of polling, of the audit, and of a stream that may stand still without a fault."""
        return (
            self._poller.condition,
            self._interval.condition,
            self._wal.condition,
            self._audited,
            self._flows,
        )

    def state(self) -> SourceState:
        """How the source is read now. Safe in any thread."""
        received, outage, mode = self._wal.received_now(), self._wal.outage, self._mode
        if mode == POLLS and (
            outage is not None or self._wal.stuck is not None or self._still is not None
        ):
            return SourceState(POLLS, self._reason, self._takeovers, received)
        if received.connected and outage is None:
            return SourceState(STREAMS, None, self._takeovers, received)
        if self._wal.is_standby:
            reason = "another process reads the slot"
            return SourceState(STANDBY, reason, self._takeovers, received)
        reason = outage.reason if outage else "not connected yet"
        return SourceState(ELSEWHERE, reason, self._takeovers, received)

    def ack(self, batch: Batch, outcome: Outcome) -> None:
        """Note that the batch is committed; a window as far as it could be claimed."""
        self._progressed = any(not task.busy for task in outcome.tasks)
        self._poller.note(outcome)
        if batch.window is not None:
            return
        self._refused = outcome.busy
        if not outcome.busy:
            self._wal.ack(batch)

    def confirm(self, end: Lsn) -> None:
        """Confirm the WAL up to a position: everything up to it is durable."""
        self._wal.confirm(end)

    def batches(self, follower: Follower) -> Iterator[Batch]:
        """Yield whole commits as they come, and windows before them where the stream has gaps.

        Ends after `stop()`. Raises RelayError.
        """
        self._follower = follower
        while not self._stopping.is_set():
            self.heartbeat.update("waits for events")
            batch, self._ahead = self._ahead or self._wal.take(self._pause()), None
            if batch is not None:
                yield from self._moving()
                yield from self._missing()
                self._enter("wal")
                yield from self._streamed(batch)
                yield from self._audit()
            elif self._wal.stuck is not None:
                yield from self._poll_around(self._wal.stuck)
            elif self._wal.outage is not None:
                yield from self._polled()
            elif self._wal.is_standby:
                self._enter_standby()
            elif self._still is not None and self._wal.received < self._still:
                yield from self._poll_now()
            elif self._wal.connections:
                yield from self._moving()
                yield from self._missing()
                self._enter("wal")
                yield from self._audit()
                self._notice_standstill()

    def ahead(self, events: int) -> Batch | None:
        """Return the batch of the stream after the one in flight, if it has about `events` events.

        None before a difference is polled or a snapshot adopted: then nothing may be in flight.
        """
        if self._ahead is not None or self._mode != "wal":
            return None
        if self._wal.connections != self._connections or not self._wal.has_ready(events):
            return None
        if self._current_position is not None and self._wal.flushed >= self._current_position.lsn:
            return None
        self._ahead = self._wal.take(0.0)
        return self._ahead

    def _pause(self) -> float:
        if self._mode == "poll" and (self._wal.outage is not None or self._still is not None):
            return 0.0  # the interval between polls is the wait
        return 0.2 if self._current_position else 1.0

    def _streamed(self, batch: Batch) -> Iterator[Batch]:
        """Yield a batch of the WAL; again, after polling, if the target refused it because a difference is open."""
        while not self._stopping.is_set():
            yield batch
            if not self._refused:
                return
            self._require_polling()
            yield from self._windows(opening=False)

    def _missing(self) -> Iterator[Batch]:
        """Poll what the stream may lack after a new connection."""
        if self._wal.connections == self._connections:
            return
        self._connections = self._wal.connections
        incomplete = self._wal.incomplete
        self._current_position = None
        self._next_audit = 0.0
        if not self._polls and self._poller.last() is None:
            return
        windows = self._windows(opening=incomplete)
        yield from self._logged(windows) if incomplete else windows
        if not self._stopping.is_set():
            self._wal.complete(self._connections)

    def _audit(self) -> Iterator[Batch]:
        """Compare the stream with the outbox every AUDIT_SECONDS, by a snapshot that replaces the group's last one.

        Commits that the snapshot sees and the stream has not brought are polled; usually there are none.
        """
        now = time.monotonic()
        if now < self._next_audit:
            return
        self.heartbeat.update("compares the stream with the outbox", Due.LATE)
        try:
            if self._current_position is None:
                if not self._is_published():
                    self._next_audit = now + AUDIT_SECONDS
                    return
                self._current_position = self._poller.current_position()
                self._positioned = now
            if self._ahead is not None or self._wal.flushed < self._current_position.lsn:
                return
            whole = self._poller.adopt(self._current_position, self._polls, self._follower.adopt)
            self._wal.next_xid = self._current_position.snapshot.xmax
        except psycopg.Error as error:
            if not is_transient(error):
                raise
            self._audited.fails(describe(error))
            self._next_audit = now + max(AUDIT_SECONDS, self._audited.pause)
            return
        self._audited.works()
        self._flows.works()
        self._current_position = None
        self._next_audit = now + AUDIT_SECONDS
        if whole:
            return
        self._require_polling()
        yield from self._logged(self._windows(opening=False))
        self._next_audit = 0.0
        if now >= self._next_reconnect:
            # The stream may still use a publication that was dropped.
            self._next_reconnect = now + RECONNECT_SECONDS
            log.warning(
                "the stream lacks commits that the outbox has; they are polled, and relay connects again"
            )
            self._wal.reconnect()

    def _notice_standstill(self) -> None:
        """Poll from now on if the stream, which has no fault, does not bring what the outbox has, and say why.

        A walsender may hang, or wait for a standby (synchronized_standby_slots), or decode much for others. In mode wal
        only the reason is reported.
        """
        seen = self._current_position
        if seen is None or self._ahead is not None:
            return
        silent = min(time.monotonic() - self._positioned, self._wal.quiet)
        limit = STILL_SECONDS if self._polls else REPORT_SECONDS
        if silent < limit or self._wal.received >= seen.lsn or not self._wal.empty:
            return
        self._positioned = time.monotonic()
        try:
            if self._polls and not self._poller.lacks(seen):
                return
            activity = self._poller.reader_activity()
        except psycopg.Error as error:
            if not is_transient(error):
                raise
            self._audited.fails(describe(error))
            return
        if not self._polls:
            self._flows.fails(f"{seen.lsn} is not received: {activity}")
            return
        self._still = seen.lsn
        self._enter("poll", f"the stream stands still: {activity}")

    def _moving(self) -> Iterator[Batch]:
        """Finish what is being polled, since the stream goes on."""
        if self._still is None:
            return
        self._still = self._current_position = None
        yield from self._windows(opening=False)

    def _is_published(self) -> bool:
        """Whether the stream still brings all of the outbox; if not, in mode auto, connect again, which finds out why.

        Raises ConfigurationError or RelayError in mode wal, and psycopg.Error.
        """
        try:
            found = self._poller.require_published()
        except ConfigurationError as error:
            if not self._polls:
                raise
            log.warning("the stream is left", extra={"fault": str(error)})
            self._wal.reconnect()
            return False
        before, self._membership = self._membership, found
        if before not in (None, found) and not self._polls:
            source = self._settings.source
            raise RelayError(
                f"source.publication: {source.outbox} was taken out of {source.publication!r} and put back while relay "
                "read the WAL, which lacks the events between: publish them again, or set source.mode: auto, and start "
                "relay again"
            )
        return True

    def _logged(self, windows: Iterator[Batch]) -> Iterator[Batch]:
        """Yield windows, and log a line if there are any."""
        for number, window in enumerate(windows):
            if not number:
                log.info("polling events that the slot does not have")
            yield window

    def _require_polling(self) -> None:
        """Raise RelayError if the mode does not allow polling."""
        if not self._polls:
            raise RelayError(
                f"the slot {self._settings.source.slot!r} does not have all events that group {self._settings.group!r} "
                "needs: set source.mode to auto, which polls the missing ones, or skip them with `relay offsets seek`"
            )

    def _windows(self, opening: bool) -> Iterator[Batch]:
        """Yield the windows of the open differences and, with `opening`, of a new one up to now."""
        if opening:
            yield from self._windows(opening=False)
        while not self._stopping.is_set() and (window := self._poller.window(opening)):
            opening = False
            yield window
            if not self._progressed:
                self._stopping.wait(BUSY_SECONDS)

    def _poll_around(self, commit: OpenCommit) -> Iterator[Batch]:
        """Poll up to and including a commit that cannot be received; large rows are dead-lettered by reference.

        Everything before it is applied already. A later commit may be polled and streamed; it is applied once.
        """
        last = self._poller.last()
        if self._stopping.is_set():
            return
        # In mode wal, sinks do not get what is polled.
        is_missed = not self._polls and bool(self._settings.sink_handlers)
        if last is None or is_missed:
            raise RelayError(
                f"the commit at {commit.lsn} cannot be received, since it is too large, and this group cannot poll it "
                "instead: give relay more memory, or delete the event and skip it with `relay offsets seek`"
            )
        self._enter("poll", "a commit is too large to be received")
        xid = full_xids(np.array([commit.xid]), self._wal.next_xid)
        if not last.snapshot.sees(xid).all():
            if (window := self._poller.window(by_reference=True)) is not None:
                yield window
            if window is None or not self._progressed:
                self._stopping.wait(BUSY_SECONDS)
            return
        while not self._stopping.is_set() and (
            window := self._poller.window(opening=False, by_reference=True)
        ):
            yield window
            if not self._progressed:
                self._stopping.wait(BUSY_SECONDS)
        if self._stopping.is_set():
            return
        try:
            self._wal.pass_over(commit)
        except psycopg.Error as error:
            if not is_transient(error):
                raise
            log.debug("cannot stream on yet", extra={"fault": describe(error)})
            self._stopping.wait(BUSY_SECONDS)

    def _polled(self) -> Iterator[Batch]:
        outage = self._wal.outage
        if outage is None or not self._polls:
            return
        if not outage.certain and time.monotonic() - outage.since < GRACE_SECONDS:
            self._stopping.wait(0.1)
            return
        self._enter("poll", outage.reason)
        yield from self._poll_now()

    def _poll_now(self) -> Iterator[Batch]:
        """Yield the next window, or wait for the next poll."""
        window = self._poller.window()
        if window is None:
            self.heartbeat.update("waits for events", Due.LATE)
            self._interval.wait()
            return
        self._interval.shorten()
        yield window
        if not self._progressed:
            self._stopping.wait(BUSY_SECONDS)

    def _enter_standby(self) -> None:
        """Note that another process reads the slot."""
        self._stood_by = True
        self._still = None
        self._audited.clear()
        self._flows.clear()
        if self._mode:
            self._mode = ""
            self._current_position = None
            self._interval.leave()
            self._follower.on_standby()

    def _enter(self, mode: str, reason: str | None = None) -> None:
        if mode == self._mode:
            return
        self._mode, self._reason = mode, reason
        self._audited.clear()
        self._flows.clear()
        if mode == "wal":
            self._takeovers += self._stood_by
            self._stood_by = False
            self._interval.leave()
            self._follower.streaming()
        else:
            self._follower.polling()
        log.log(
            logging.WARNING if reason else logging.INFO,
            "polling, since the WAL cannot be read" if reason else "reading the WAL",
            extra={"reason": reason} if reason else {},
        )
        note_mode(self._settings, mode, reason)
