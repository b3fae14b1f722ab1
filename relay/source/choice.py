"""Which way the events come: the WAL where it can be had, polling for what it does not have."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from threading import Event
from typing import Protocol

import numpy as np
import psycopg

from relay.batch import Batch, Outcome
from relay.config import Settings
from relay.events import Lsn
from relay.faults import RelayError, describe
from relay.source.assembler import Begun
from relay.source.interval import Interval
from relay.source.poll import BUSY_SECONDS, Poller, PollSource, note_mode
from relay.source.recovery import Recognition, Recovery
from relay.source.wal import WalSource
from relay.transactions import Transactions

log = logging.getLogger(__name__)

GRACE_SECONDS = 3.0
"""How long the replication connection may fail before polling steps in."""
AUDIT_SECONDS = 10.0
"""How often an idle stream is compared with the outbox."""


_NEVER = np.iinfo(np.int64).min


class Source(Protocol):
    """Where the service takes its batches from."""

    def guard(self) -> None:
        """A process may have died of what comes now. Before `start`."""

    def start(self) -> None:
        """Begin to receive."""

    def batches(self) -> Iterator[Batch]:
        """Batches as they come. Ends after `stop()`. Raises RelayError."""

    def ack(self, batch: Batch, outcome: Outcome) -> None:
        """The batch is committed, and durable unless `target.synchronous_commit` is off."""

    def confirm(self, end: Lsn) -> None:
        """Everything up to a position is durable, where `ack` did not say so."""

    def stop(self) -> None:
        """Let `batches()` end after the batch in flight. Safe in a signal handler's thread."""

    def close(self) -> None:
        """Let go of the source."""

    @property
    def flushed(self) -> Lsn:
        """The position up to which PostgreSQL may recycle the WAL."""


def open_source(settings: Settings) -> Source:
    """The source that `source.mode` asks for."""
    return PollSource(settings) if settings.source.mode == "poll" else StreamSource(settings)


class StreamSource:
    """The WAL, and in mode `auto` polling for what it does not have: rows older than the slot, or all while it is away.

    The gapless c_offset shows what is missing: a commit that does not follow on the one before, and at an idle stream
    an outbox with more than was applied. Both ways move the same cursors, so what came one way is skipped on the other.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._polls = settings.source.mode == "auto"
        self._interval = Interval(settings)
        recovery = Recovery(settings) if self._polls else None
        self._wal = WalSource(settings, recovery, self._interval.ring, Recognition(settings))
        self._poller = Poller(settings)
        self._stopping = Event()
        self._progressed = True
        self._mode = ""
        self._expected: int | None = None
        self._connections = 0
        self._checkpoint: tuple[int, Lsn] | None = None
        self._next_audit = 0.0
        self._audited = False

    def guard(self) -> None:
        """A process may have died of what comes now. Before `start`."""
        self._wal.guard()

    def start(self) -> None:
        """Begin to receive."""
        self._wal.start()

    def stop(self) -> None:
        """Let `batches()` end after the batch in flight. Safe in a signal handler's thread."""
        self._stopping.set()
        self._wal.stop()
        self._poller.stop()
        self._interval.ring()

    def close(self) -> None:
        """Report the last position and leave the slot."""
        self._wal.close()
        self._poller.close()
        self._interval.close()

    @property
    def flushed(self) -> Lsn:
        """The position that was reported, or is about to be, as durable."""
        return self._wal.flushed

    def ack(self, batch: Batch, outcome: Outcome) -> None:
        """The batch is committed; a polled one as far as it could be claimed."""
        if batch.window is None:
            self._wal.ack(batch, outcome)
        self._progressed = any(not task.busy for task in outcome.tasks)

    def confirm(self, end: Lsn) -> None:
        """Everything up to a position is durable."""
        self._wal.confirm(end)

    def batches(self) -> Iterator[Batch]:
        """Whole commits as they come, each behind what it follows on. Ends after `stop()`. Raises RelayError."""
        while not self._stopping.is_set():
            batch = self._wal.take(self._pause())
            self._look_at_connection()
            if batch is not None:
                self._enter("wal")
                yield from self._missing_before(batch)
                if not self._stopping.is_set():
                    yield batch
            elif self._wal.stuck is not None:
                yield from self._around(self._wal.stuck)
            elif self._wal.outage is not None:
                yield from self._polled()
            elif self._connections:
                self._enter("wal")
                yield from self._missing_when_idle()

    def _pause(self) -> float:
        if self._mode == "poll" and self._wal.outage is not None:
            return 0.0  # the interval between polls is the wait
        return 0.2 if self._checkpoint else 1.0

    def _look_at_connection(self) -> None:
        if self._wal.connections != self._connections:
            self._connections = self._wal.connections
            self._expected = None
            self._checkpoint = None
            self._next_audit = 0.0
            self._audited = False

    def _missing_before(self, batch: Batch) -> Iterator[Batch]:
        """What the outbox has below a commit of the batch that does not follow on the one before."""
        floor = _NEVER if self._expected is None else self._expected
        gap, self._expected = _gap(batch.transactions, floor)
        if gap:
            yield from self._missing(gap)

    def _missing_when_idle(self) -> Iterator[Batch]:
        """What the outbox has although the stream has passed it: nothing, as a rule."""
        if not self._polls or time.monotonic() < self._next_audit:
            return
        try:
            self._checkpoint = self._checkpoint or self._poller.checkpoint()
        except psycopg.Error as error:
            self._next_audit = time.monotonic() + AUDIT_SECONDS
            log.debug("cannot compare with the outbox", extra={"fault": describe(error)})
            return
        following, position = self._checkpoint
        if self._wal.received >= position and self._wal.empty:
            self._checkpoint = None
            self._next_audit = time.monotonic() + AUDIT_SECONDS
            # At first there may be rows older than the slot; later the stream itself has left something out.
            yield from self._missing(following, suspicious=self._audited)
            self._audited = True

    def _missing(self, before: int, suspicious: bool = False) -> Iterator[Batch]:
        said = False
        while not self._stopping.is_set() and (window := self._poller.look(before)):
            if not self._polls:
                raise RelayError(
                    f"the slot {self._settings.source.slot!r} does not have all events below c_offset {before} that "
                    f"group {self._settings.group!r} has still to get: set source.mode to auto, which reads them by "
                    "polling, or pass over them with `relay offsets seek`"
                )
            if not said:
                said = True
                log.info("reading by polling what the slot does not have", extra={"before": before})
            yield window
            if not self._progressed:
                self._stopping.wait(BUSY_SECONDS)
        if said and suspicious:
            self._wal.reconnect()

    def _around(self, commit: Begun) -> Iterator[Batch]:
        """What the outbox has up to a commit that cannot be received, by polling that leaves large rows where they are.

        Everything that came before it is applied already. Whatever commits meanwhile may come both ways.
        """
        following = self._poller.following(commit.xid)
        if following is None:
            self._stopping.wait(BUSY_SECONDS)
            return
        self._enter("poll", "a commit is too large to be received")
        while not self._stopping.is_set() and (
            window := self._poller.look(following, by_reference=True)
        ):
            yield window
            if not self._progressed:
                self._stopping.wait(BUSY_SECONDS)
        if not self._stopping.is_set():
            self._wal.pass_over(commit)

    def _polled(self) -> Iterator[Batch]:
        outage = self._wal.outage
        if outage is None or not self._polls:
            return
        if not outage.certain and time.monotonic() - outage.since < GRACE_SECONDS:
            self._stopping.wait(0.1)
            return
        self._enter("poll", outage.reason)
        window = self._poller.look()
        if window is None:
            self._interval.wait()
            return
        self._interval.shorten()
        yield window
        if not self._progressed:
            self._stopping.wait(BUSY_SECONDS)

    def _enter(self, mode: str, reason: str | None = None) -> None:
        if mode == self._mode:
            return
        self._mode = mode
        if mode == "wal":
            self._interval.leave()
        log.log(
            logging.WARNING if reason else logging.INFO,
            "polling, since the WAL cannot be had" if reason else "reading the WAL",
            extra={"reason": reason} if reason else {},
        )
        note_mode(self._settings, mode, reason)


def _gap(transactions: Transactions, expected: int) -> tuple[int, int | None]:
    """The first c_offset of the last commit that does not follow on those before, or 0, and what is expected next.

    A transaction without offsets says nothing. Those of one commit may come in any order.
    """
    facts = transactions.facts[transactions.facts["last_offset"] != 0]
    if not len(facts):
        return 0, None if expected == _NEVER else expected
    if len(facts) == 1:  # at the head of the stream, where each array operation is felt
        start, end = int(facts["first_offset"][0]), int(facts["last_offset"][0])
        return start if start > expected else 0, max(expected, end + 1)
    commits = np.flatnonzero(np.diff(facts["end_lsn"], prepend=0))
    first = np.minimum.reduceat(facts["first_offset"], commits)
    last = np.maximum.reduceat(facts["last_offset"], commits)
    reached = np.maximum.accumulate(np.concatenate(([expected], last + 1)))
    gaps = first[first > reached[:-1]]
    return int(gaps[-1]) if len(gaps) else 0, int(reached[-1])
