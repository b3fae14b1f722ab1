"""Chooses the mode: reads the WAL where that is possible, and polls what the WAL does not have."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import Protocol

import numpy as np
import psycopg

from relay.config.settings import Settings
from relay.faults import ConfigurationError, RelayError, TransientFault, describe, is_transient
from relay.model.batch import Batch, Outcome
from relay.model.events import Lsn
from relay.model.snapshots import full_xids
from relay.runtime.parts import SOON_SECONDS, Condition, Due, Heartbeat, Part
from relay.source.decode.assembler import OpenCommit
from relay.source.outbox.interval import Interval
from relay.source.polling import BUSY_SECONDS, Follower, Poller, PollSource, note_mode
from relay.source.recognition import Recognition
from relay.source.server import SourcePosition
from relay.source.state import ELSEWHERE, POLLS, STANDBY, STREAMS, NoStream, SourceState
from relay.source.stream.lost_slot import Recovery
from relay.source.stream.receiver import Receiver

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
    def receiver(self) -> Receiver | None:
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


@dataclass(frozen=True, slots=True)
class _Mode:
    """How the source is read. `still` is the position that a stream which stands still has not reached, and why.

    `stood_by`: another process has read the slot since this one did.
    """

    mode: str = ELSEWHERE
    reason: str | None = None
    still: tuple[Lsn, str] | None = None
    stood_by: bool = False
    takeovers: int = 0


@dataclass(slots=True)
class _Audit:
    """The comparison of the stream with the outbox: the position that the stream has to reach, and what is due when.

    Times are of the monotonic clock. `membership` changes when the outbox is taken out of the publication.
    """

    seen: SourcePosition | None = None
    since: float = 0.0
    due: float = 0.0
    reconnects: float = 0.0
    membership: tuple[int, int | None] | None = None


class StreamSource(Part):
    """Reads the WAL and, in mode `auto`, polls what it does not have: older rows, and all rows during an outage.

    Both modes move the same positions. A snapshot whose commits have all come from the WAL replaces the previous one;
    commits that it sees and that did not come are polled.

                             a commit comes, or the stream has begun
        ┌───────────┐ ───────────────────────────────────────────────▶ ┌─────────┐
        │ ELSEWHERE │                                                  │ STREAMS │ is compared with the outbox
        └───────────┘ ◀─────────── another process has the slot ────── └─────────┘
            ▲   │                                                        │     ▲
            │   │    an outage: at once if retries do not help, else     │     │  a commit comes, the stream has begun
            │   │    after GRACE_SECONDS; the stream stands still; a     │     │  again, or passes what stood still:
            │   │    commit is too large to be received                  │     │  first, what it may lack is polled
            │   └───────────────────────────┬────────────────────────────┘     │
            │                               ▼                                  │
            │                          ┌─────────┐                             │
            └─ another process has it ─│  POLLS  │─────────────────────────────┘
                                       └─────────┘

    In mode `wal`, an outage or a stream that stands still changes nothing: relay waits, and says why.

    Each turn of `batches` looks at the state that the stream has published, and makes one of these steps. What is being
    polled is finished before the stream's next batch, and a batch that the target refuses, because a difference is
    open, is yielded again after its windows.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.heartbeat = Heartbeat()
        self._polls = settings.source.mode == "auto"
        self._interval = Interval(settings)
        recovery = Recovery(settings) if self._polls else None
        self.receiver = Receiver(settings, recovery, self._wake, Recognition(settings))
        self._poller = Poller(settings, self.heartbeat)
        self._stopping = Event()
        # Replaced as a whole, by the thread that takes the batches; others read it.
        self._reading = _Mode()
        self._audit = _Audit()
        # The connection whose missing commits are polled.
        self._joined = 0
        self._ahead: Batch | None = None
        # The outcome of the batch that was yielded last; None until it is acknowledged.
        self._outcome: Outcome | None = None
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
        self.receiver.guard()
        self._poller.guard()

    def start(self) -> None:
        """Begin to receive."""
        self.receiver.start()

    def stop(self) -> None:
        """Let `batches()` end after the batch in flight. Safe in a signal handler's thread."""
        self._stopping.set()
        self.receiver.commits.stop()
        self._poller.stop()
        self._interval.wake()

    def _wake(self) -> None:
        """Take notice of the stream's state, which has changed. Safe in any thread."""
        self._interval.wake()
        self.receiver.commits.wake()

    def close(self) -> None:
        """Report the last position and leave the slot."""
        self.receiver.close()
        self._poller.close()
        self._interval.close()

    @property
    def flushed(self) -> Lsn:
        """The position that was reported, or is about to be, as durable."""
        return self.receiver.confirmation.flushed

    @property
    def conditions(self) -> Sequence[Condition]:
        """The conditions of polling, of the audit, and of a stream that may stand still without a fault."""
        return (
            self._poller.condition,
            self._interval.condition,
            self.receiver.condition,
            self._audited,
            self._flows,
        )

    def state(self) -> SourceState:
        """How the source is read now. Safe in any thread."""
        reading, stream, received = self._reading, self.receiver.state, self.receiver.received
        is_left = stream.outage is not None or stream.stuck is not None or reading.still is not None
        if reading.mode == POLLS and is_left:
            doing, reason = POLLS, reading.reason
        elif received.connected and stream.outage is None:
            doing, reason = STREAMS, None
        elif stream.on_standby:
            doing, reason = STANDBY, "another process reads the slot"
        else:
            doing = ELSEWHERE
            reason = stream.outage.reason if stream.outage else "not connected yet"
        return SourceState(doing, reason, reading.takeovers, received)

    def ack(self, batch: Batch, outcome: Outcome) -> None:
        """Note that the batch is committed; a window as far as it could be claimed."""
        self._outcome = outcome
        self._poller.note(outcome)
        if batch.window is None and not outcome.busy:
            self.receiver.ack(batch)

    def confirm(self, end: Lsn) -> None:
        """Confirm the WAL up to a position: everything up to it is durable."""
        self.receiver.confirm(end)

    def batches(self, follower: Follower) -> Iterator[Batch]:
        """Yield whole commits as they come, and windows before them where the stream has gaps.

        Ends after `stop()`. Raises RelayError.
        """
        self._follower = follower
        while not self._stopping.is_set():
            self.heartbeat.update("waits for events")
            batch, self._ahead = self._ahead or self.receiver.take(self._pause()), None
            stream, still = self.receiver.state, self._reading.still
            if batch is not None:
                yield from self._join()
                yield from self._streamed(batch)
                yield from self._compare()
            elif stream.stuck is not None:
                yield from self._poll_around(stream.stuck)
            elif stream.outage is not None:
                yield from self._poll_during(stream.outage)
            elif stream.on_standby:
                self._stand_by()
            elif still is not None and self.receiver.confirmation.received < still[0]:
                self._enter(POLLS, still[1])
                yield from self._poll_now()
            elif stream.connections:
                yield from self._join()
                yield from self._compare()
                self._notice_standstill()

    def ahead(self, events: int) -> Batch | None:
        """Return the batch of the stream after the one in flight, if it has about `events` events.

        None before a difference is polled or a snapshot adopted: then nothing may be in flight.
        """
        receiver, seen = self.receiver, self._audit.seen
        if self._ahead is not None or self._reading.mode != STREAMS:
            return None
        if receiver.state.connections != self._joined:
            return None
        if not receiver.commits.has_ready(events, receiver.is_full):
            return None
        if seen is not None and receiver.confirmation.flushed >= seen.lsn:
            return None
        self._ahead = receiver.take(0.0)
        return self._ahead

    @property
    def _is_refused(self) -> bool:
        """Whether the target did not take all of the batch that was yielded last."""
        return self._outcome is not None and self._outcome.busy

    @property
    def _has_stalled(self) -> bool:
        """Whether the target took nothing of the batch that was yielded last."""
        return self._outcome is not None and all(task.busy for task in self._outcome.tasks)

    def _pause(self) -> float:
        reading = self._reading
        if reading.mode == POLLS and (
            reading.still is not None or self.receiver.state.outage is not None
        ):
            return 0.0  # the interval between polls is the wait
        return 0.2 if self._audit.seen else 1.0

    # Steps of the stream.

    def _join(self) -> Iterator[Batch]:
        """Begin, or go on, to read the stream, after polling what is open and what a new connection may lack."""
        if self._reading.still is not None:
            self._reading = replace(self._reading, still=None)
            self._audit.seen = None
            yield from self._windows(opening=False)
        yield from self._missing()
        self._enter(STREAMS)

    def _missing(self) -> Iterator[Batch]:
        """Poll what the stream may lack after a new connection."""
        stream = self.receiver.state
        if stream.connections == self._joined:
            return
        self._joined = stream.connections
        self._audit.seen = None
        self._audit.due = 0.0
        if not self._polls and self._poller.last() is None:
            return
        windows = self._windows(opening=stream.incomplete)
        yield from self._logged(windows) if stream.incomplete else windows
        if not self._stopping.is_set():
            self.receiver.complete(stream.connections)

    def _streamed(self, batch: Batch) -> Iterator[Batch]:
        """Yield a batch of the WAL; again, after polling, if the target refused it because a difference is open."""
        while not self._stopping.is_set():
            self._outcome = None
            yield batch
            if not self._is_refused:
                return
            self._require_polling()
            yield from self._windows(opening=False)

    def _compare(self) -> Iterator[Batch]:
        """Compare the stream with the outbox every AUDIT_SECONDS, by a snapshot that replaces the group's last one.

        Commits that the snapshot sees and the stream has not brought are polled; usually there are none.
        """
        audit, now = self._audit, time.monotonic()
        if now < audit.due:
            return
        self.heartbeat.update("compares the stream with the outbox", Due.LATE)
        try:
            if audit.seen is None:
                audit.seen = self._published_position()
                if audit.seen is None:
                    audit.due = now + AUDIT_SECONDS
                    return
                audit.since = now
            if self._ahead is not None or self.receiver.confirmation.flushed < audit.seen.lsn:
                return
            whole = self._poller.adopt(audit.seen, self._polls, self._follower.adopt)
            self.receiver.compared(audit.seen.snapshot.xmax)
        except (psycopg.Error, TransientFault) as error:
            if not is_transient(error):
                raise
            self._audited.fails(describe(error))
            audit.due = now + max(AUDIT_SECONDS, self._audited.pause)
            return
        self._audited.works()
        self._flows.works()
        audit.seen = None
        audit.due = now + AUDIT_SECONDS
        if whole:
            return
        self._require_polling()
        yield from self._logged(self._windows(opening=False))
        audit.due = 0.0
        if now >= audit.reconnects:
            # The stream may still use a publication that was dropped.
            audit.reconnects = now + RECONNECT_SECONDS
            log.warning(
                "the stream lacks commits that the outbox has; they are polled, and relay connects again"
            )
            self.receiver.reconnect()

    def _notice_standstill(self) -> None:
        """Poll from now on if the stream, which has no fault, does not bring what the outbox has, and say why.

        A walsender may hang, or wait for a standby (synchronized_standby_slots), or decode much for others. In mode wal
        only the reason is reported.
        """
        audit, receiver = self._audit, self.receiver
        seen = audit.seen
        if seen is None or self._ahead is not None:
            return
        silent = min(time.monotonic() - audit.since, receiver.quiet)
        limit = STILL_SECONDS if self._polls else REPORT_SECONDS
        if (
            silent < limit
            or receiver.confirmation.received >= seen.lsn
            or not receiver.commits.empty
        ):
            return
        audit.since = time.monotonic()
        try:
            if self._polls and not self._poller.lacks(seen):
                # What is published later than this observation is only in another one.
                audit.seen, audit.due = None, 0.0
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
        reason = f"the stream stands still: {activity}"
        self._enter(POLLS, reason, still=(seen.lsn, reason))

    def _published_position(self) -> SourcePosition | None:
        """The source's position, if the stream brings all of the outbox; if not, None, and relay connects again.

        That finds out why. Raises ConfigurationError or RelayError in mode wal, and psycopg.Error.
        """
        before = self._audit.membership
        try:
            seen, found = self._poller.published_position()
        except ConfigurationError as error:
            if not self._polls:
                raise
            log.warning("the stream is left", extra={"fault": str(error)})
            self.receiver.reconnect()
            return None
        self._audit.membership = found
        if before not in (None, found) and not self._polls:
            source = self._settings.source
            raise RelayError(
                f"source.publication: {source.outbox} was taken out of {source.publication!r} and put back while relay "
                "read the WAL, which lacks the events between: publish them again, or set source.mode: auto, and start "
                "relay again"
            )
        return seen

    # Steps of polling.

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
            yield from self._window(window)

    def _window(self, window: Batch) -> Iterator[Batch]:
        """Yield a window, and wait a moment if other instances held all of its partitions."""
        self._outcome = None
        yield window
        if self._has_stalled:
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
        self._enter(POLLS, "a commit is too large to be received")
        xid = full_xids(np.array([commit.xid]), self.receiver.state.next_xid)
        if not last.snapshot.shows(xid):
            if (window := self._poller.window(by_reference=True)) is None:
                self._stopping.wait(BUSY_SECONDS)
            else:
                yield from self._window(window)
            return
        while not self._stopping.is_set() and (
            window := self._poller.window(opening=False, by_reference=True)
        ):
            yield from self._window(window)
        if self._stopping.is_set():
            return
        try:
            self.receiver.pass_over(commit)
        except psycopg.Error as error:
            if not is_transient(error):
                raise
            log.debug("cannot stream on yet", extra={"fault": describe(error)})
            self._stopping.wait(BUSY_SECONDS)

    def _poll_during(self, outage: NoStream) -> Iterator[Batch]:
        """Poll during an outage, in mode auto, unless the next attempt to connect may still end it."""
        if not self._polls:
            return
        if not outage.certain and time.monotonic() - outage.since < GRACE_SECONDS:
            self._stopping.wait(0.1)
            return
        self._enter(POLLS, outage.reason)
        yield from self._poll_now()

    def _poll_now(self) -> Iterator[Batch]:
        """Yield the next window, or wait for the next poll."""
        window = self._poller.window()
        if window is None:
            self.heartbeat.update("waits for events", Due.LATE)
            self._interval.wait()
            return
        self._interval.shorten()
        yield from self._window(window)

    # Transitions.

    def _stand_by(self) -> None:
        """Note that another process reads the slot."""
        left = self._reading
        self._reading = replace(left, mode=ELSEWHERE, still=None, stood_by=True)
        self._audited.clear()
        self._flows.clear()
        if left.mode != ELSEWHERE:
            self._audit.seen = None
            self._interval.leave()
            self._follower.on_standby()

    def _enter(
        self, mode: str, reason: str | None = None, still: tuple[Lsn, str] | None = None
    ) -> None:
        """Read the source in another mode from now on; in the same one at most the reason changes."""
        left = self._reading
        if mode == left.mode:
            if reason != left.reason:
                self._reading = replace(left, reason=reason)
                note_mode(self._settings, mode, reason, began=False)
            return
        self._audited.clear()
        self._flows.clear()
        if mode == STREAMS:
            self._reading = _Mode(mode, reason, takeovers=left.takeovers + left.stood_by)
            self._interval.leave()
            self._follower.streaming()
        else:
            self._reading = replace(left, mode=mode, reason=reason, still=still)
            self._follower.polling()
        log.log(
            logging.WARNING if reason else logging.INFO,
            "polling, since the WAL cannot be read" if reason else "reading the WAL",
            extra={"reason": reason} if reason else {},
        )
        note_mode(self._settings, mode, reason)
