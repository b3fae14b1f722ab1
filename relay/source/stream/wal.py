"""The slot as a source of batches.

Three parts have modules of their own: `replication` opens the stream, `receiver` is the thread that reads it, and
`commit_queue` has the commits for the service. The functions here are for the service's thread, unless they say
otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from relay.config.settings import Settings
from relay.model.batch import Batch
from relay.model.events import POSTGRES_EPOCH, Lsn
from relay.model.transactions import Transactions
from relay.runtime.parts import Condition
from relay.source.decode.assembler import OpenCommit
from relay.source.recovery import Recognition, Recovery
from relay.source.state import Received
from relay.source.stream.commit_queue import CommitQueue
from relay.source.stream.progress import Progress
from relay.source.stream.receiver import Receiver
from relay.source.stream.replication import Outage, Replication

_EPOCH_SECONDS = POSTGRES_EPOCH.timestamp()


class WalSource:
    """Reads batches from the slot.

    `take` returns whole commits in commit order, `ack` frees their memory, `confirm` confirms their WAL. A lost
    connection is opened again; other faults end `take` with a RelayError. With a `recovery` a lost slot is recreated,
    and faults of the slot are an `outage` instead of an error. A `recognition` refuses a source that has lost events
    that were applied. `changed` is called when the stream is back.
    """

    def __init__(
        self,
        settings: Settings,
        recovery: Recovery | None = None,
        changed: Callable[[], None] = lambda: None,
        recognition: Recognition | None = None,
        start: Lsn | None = None,
    ) -> None:
        self._progress = Progress()
        if start is not None:
            # Everything before counts as received, and is never confirmed.
            self._progress.commit(start)
        self._queue = CommitQueue(settings.batch)
        self._replication = Replication(settings, self._progress, recovery, recognition, changed)
        self._receiver = Receiver(settings, self._replication, self._queue, self._progress)
        self.heartbeat = self._receiver.heartbeat

    def start(self) -> None:
        """Begin to receive."""
        self._receiver.start()

    @property
    def condition(self) -> Condition:
        """Whether the replication connection can be opened."""
        return self._replication.condition

    @property
    def is_alive(self) -> bool:
        """Whether the receiver's thread runs."""
        return self._receiver.is_alive

    def received_now(self) -> Received:
        """The current state of the stream. Safe in any thread."""
        heard = self._receiver.last_heard
        size, events, oldest = self._queue.held()
        return Received(
            connected=heard is not None,
            silent=0.0 if heard is None else max(0.0, time.monotonic() - heard),
            position=self._progress.received,
            buffered_bytes=size + self._receiver.open_bytes,
            buffered_events=events,
            oldest=None if oldest is None else _EPOCH_SECONDS + oldest / 1_000_000,
            connections=self._replication.connections,
        )

    def stop(self) -> None:
        """End `take`: it returns None from now on. Safe in a signal handler's thread."""
        self._queue.stop()

    def guard(self) -> None:
        """Note which commit is received, since one may have killed a process. Call before `start`."""
        self._receiver.guard()

    @property
    def stuck(self) -> OpenCommit | None:
        """The commit that cannot be received, before which the stream stops; None without one."""
        return self._receiver.stuck

    def pass_over(self, commit: OpenCommit) -> None:
        """Continue to stream after this commit, since it is durable. Raises psycopg.Error."""
        self._receiver.pass_over(commit)

    def reconnect(self) -> None:
        """Connect again, which checks slot and publication."""
        self._receiver.reconnect()

    def close(self, timeout: float = 5.0) -> None:
        """Report the last position and leave the slot; waits about `timeout` seconds at most."""
        self._queue.stop()
        self._receiver.close(timeout)

    @property
    def flushed(self) -> Lsn:
        """The position that was reported, or is about to be, as durable."""
        return self._progress.flushed

    @property
    def received(self) -> Lsn:
        """The position up to which the stream was received."""
        return self._progress.received

    @property
    def quiet(self) -> float:
        """For how many seconds the stream has brought no message of a commit."""
        return time.monotonic() - self._receiver.last_brought

    @property
    def empty(self) -> bool:
        """Whether no commit is queued."""
        return self._queue.empty

    @property
    def outage(self) -> Outage | None:
        """Why there is no stream; None while there is one, or while another process reads the slot."""
        return self._replication.outage

    @property
    def is_standby(self) -> bool:
        """Whether another process reads the slot."""
        return self._replication.on_standby

    @property
    def connections(self) -> int:
        """How many times streaming has begun."""
        return self._replication.connections

    @property
    def incomplete(self) -> bool:
        """Whether the slot may lack commits, so that a difference is to be polled."""
        return self._replication.incomplete

    def complete(self, connections: int) -> None:
        """Note that the commits which the slot may lack are polled, unless `connections` shows a newer connection."""
        self._replication.complete(connections)

    @property
    def next_xid(self) -> int:
        """The source's next full xid, when the stream began or when the outbox was last compared with it."""
        return self._replication.next_xid

    @next_xid.setter
    def next_xid(self, xid: int) -> None:
        self._replication.next_xid = xid

    def take(self, timeout: float) -> Batch | None:
        """Return the next whole commits: many under load, few when idle.

        None after `timeout` seconds, or `stop`. Raises RelayError.
        """
        queued = self._queue.take(timeout)
        if queued is None:
            return None
        number, transactions = queued
        return Batch(
            number=number,
            transactions=transactions,
            end=transactions.end,
            events=transactions.events,
            size=transactions.held,
            spooled=transactions.spooled is not None,
            source_epoch=self._replication.epoch,
            next_xid=self._replication.next_xid,
            codec=self._replication.codec,
        )

    def has_ready(self, events: int) -> bool:
        """Whether `take` would return about `events` events at once, or as many as the limits and the buffer allow."""
        return self._queue.has_ready(events, self._receiver.is_full)

    def ack(self, batch: Batch) -> None:
        """Free the memory of a batch that is committed."""
        self._queue.ack(batch)
        self._receiver.wake()

    def confirm(self, end: Lsn) -> None:
        """Confirm everything up to a position, which is durable: PostgreSQL may recycle its WAL. Safe in any thread."""
        self._progress.ack(end)
        self._receiver.wake()


def commits_after(settings: Settings, lsn: Lsn, until: Lsn) -> Iterator[Transactions]:
    """Yield the slot's commits that end after `lsn`, up to `until`. Reads the slot and confirms nothing.

    Raises RelayError if the slot cannot be read.
    """
    source = WalSource(settings, start=lsn)
    source.start()
    try:
        while source.received < until or not source.empty:
            batch = source.take(0.2)
            if batch is None:
                continue
            later = batch.transactions.facts["end_lsn"] > lsn
            if later.any():
                yield batch.transactions.take(np.flatnonzero(later))
            source.ack(batch)
    finally:
        source.close()
