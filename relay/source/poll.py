"""The polling path: windows of committed rows, planned from the group's cursors and the outbox.

Whoever applies a range claims its partitions by their row locks and reads the rows itself, so any number of instances
share a group, and executors read their own ranges.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from threading import Event
from typing import Any

import psycopg
from psycopg_pool import ConnectionPool

from relay.batch import Batch, Outcome, Window
from relay.config import Settings
from relay.events import Lsn
from relay.faults import RelayError, describe
from relay.patience import say_once, until_it_works
from relay.source.history import History
from relay.source.interval import Interval
from relay.source.recovery import Recognition
from relay.source.rows import OutboxRows, is_standby, is_visible, prepare_reading, server_of
from relay.store import groups, offsets
from relay.store.connections import connect, open_pool
from relay.transactions import Transactions

log = logging.getLogger(__name__)

BUSY_SECONDS = 0.05
"""How long to wait when other instances hold every partition that has something to do."""
AHEAD_LOOKS = 25
AHEAD_SECONDS = 0.2
"""A row can be relayed from the WAL before other sessions see it, so a cursor may be ahead for a moment."""


class Poller:
    """Looks for what the group has still to apply of the rows that are committed.

    Raises RelayError if the outbox is behind the group, Interrupted by `stop`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._rows = OutboxRows(settings)
        self._own = settings.poll.partition_ids or range(settings.partitions)
        self._source: ConnectionPool[psycopg.Connection[Any]] = open_pool(
            settings.source_dsn, 1, prepare_reading
        )
        self._target: ConnectionPool[psycopg.Connection[Any]] = open_pool(settings.target_dsn, 1)
        self._floors: dict[int, int] = {}
        self._stopping = Event()
        self._retrying = until_it_works(self._stopping, say_once(log, "cannot look for events yet"))
        self._looks = 0
        self._recognition = Recognition(settings)
        self._examined: tuple[str, int] | None = None

    def stop(self) -> None:
        """End waiting; a look that cannot be had returns None."""
        self._stopping.set()

    def close(self) -> None:
        """Close the connections."""
        self.stop()
        self._source.close()
        self._target.close()

    def checkpoint(self) -> tuple[int, Lsn]:
        """A c_offset, and the position in the WAL behind the commits of all rows below it. Raises psycopg.Error."""
        with self._source.connection() as conn:
            return self._rows.checkpoint(conn)

    def following(self, xid: int) -> int | None:
        """The c_offset after those of a commit and all before it; None while it is not visible, or after `stop`.

        Waits for as long as a database is away.
        """
        try:
            return self._retrying(self._following, xid)
        except psycopg.Error:
            if self._stopping.is_set():
                return None
            raise

    def _following(self, xid: int) -> int | None:
        with self._source.connection() as conn:
            return self._rows.next_offset(conn) if is_visible(conn, xid) else None

    def look(self, before: int | None = None, by_reference: bool = False) -> Batch | None:
        """The next window, ending below the c_offset `before`; None if nothing is left there or after `stop`.

        `by_reference`: rows above `source.max_event_bytes` are not to be read. Waits for as long as a database is away.
        """
        try:
            return self._retrying(self._look, before, by_reference)
        except psycopg.Error:
            if self._stopping.is_set():
                return None
            raise

    def _look(self, before: int | None, by_reference: bool) -> Batch | None:
        with self._source.connection() as source:
            cursors, tip = self._cursors(source)
            if before is not None:
                tip = min(tip, before - 1)
            floors = {
                cursor.partition_id: max(
                    cursor.next_offset, self._floors.get(cursor.partition_id, cursor.next_offset)
                )
                for cursor in cursors
            }
            pending = {partition: floor for partition, floor in floors.items() if floor <= tip}
            heads = self._rows.heads(source, pending, tip) if pending else {}
            # What lies below is known to hold nothing, and need not be searched again.
            self._floors.update({p: heads.get(p, tip + 1) for p in pending})
            own = [head for partition, head in heads.items() if partition in self._own]
            if not own:
                return None
            window = self._window(source, heads, min(own), tip)
            if by_reference:
                large = self._rows.large(source, min(own), window.upto)
                window = replace(window, by_reference=tuple(large))
        self._looks += 1
        return Batch(
            number=self._looks,
            transactions=Transactions.none(),
            end=Lsn(0),
            events=sum(events for _, events in window.spread),
            size=0,
            window=window,
        )

    def _window(
        self, source: psycopg.Connection[Any], heads: dict[int, int], low: int, tip: int
    ) -> Window:
        size = self._settings.poll.batch_size
        most = self._settings.batch.max_events
        if tip - low >= max(size, most):
            # Far behind: about as many rows for each partition as a batch may have.
            size = max(size, most * self._settings.partitions)
        upto = self._rows.boundary(source, low, min(tip, low + size - 1), tip, size)
        reached = {partition: head for partition, head in heads.items() if head <= upto}
        spread = self._rows.spread(source, reached, low, upto)
        return Window(upto, spread, rows=upto - low + 1, left=tip - upto)

    def _cursors(self, source: psycopg.Connection[Any]) -> tuple[list[offsets.Cursor], int]:
        """Every partition's cursor, and the newest committed c_offset."""
        for _ in range(AHEAD_LOOKS):
            with self._target.connection() as target:
                cursors = offsets.all_cursors(target, self._settings.group)
                origin = groups.origin(target, self._settings.group)
            self._require_history(source, origin)
            following = self._rows.next_offset(source)
            ahead = [cursor for cursor in cursors if cursor.next_offset > following]
            # A standby only lags.
            if not ahead or is_standby(source):
                return cursors, following - 1
            self._stopping.wait(AHEAD_SECONDS)
        raise RelayError(_behind(self._settings, ahead[0], following))

    def _require_history(self, source: psycopg.Connection[Any], origin: groups.Origin) -> None:
        """Raise RelayError if the server is on a timeline that lacks what was applied from the WAL."""
        if origin.timeline is None or not origin.applied:
            return
        identifier, timeline, standby = server_of(source)
        known = History.parse(origin.timeline, origin.history or "")
        if (
            identifier != origin.identifier
            or timeline == known.timeline
            or (standby and timeline in known.timelines)
            or self._examined == (identifier, timeline)
        ):
            return
        self._recognition.require_valid()
        self._examined = identifier, timeline


class PollSource:
    """The outbox as a source of batches, without logical replication.

    A window may be shared with other instances: each applies what it can claim.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._poller = Poller(settings)
        self._interval = Interval(settings)
        self._stopping = Event()
        self._progressed = True

    def guard(self) -> None:
        """Nothing is received ahead of what is applied."""

    def start(self) -> None:
        """Nothing runs in the background."""
        note_mode(self._settings, "poll", "source.mode is poll")

    def stop(self) -> None:
        """Let `batches()` end after the batch in flight. Safe in a signal handler's thread."""
        self._stopping.set()
        self._poller.stop()
        self._interval.ring()

    def close(self) -> None:
        """Close the connections."""
        self._poller.close()
        self._interval.close()

    @property
    def flushed(self) -> Lsn:
        """Nothing is confirmed to anybody."""
        return Lsn(0)

    def batches(self) -> Iterator[Batch]:
        """Windows as long as there is something to do, then as it is published. Ends after `stop()`.

        Raises RelayError.
        """
        while not self._stopping.is_set():
            batch = self._poller.look()
            if batch is None:
                self._interval.wait()
                continue
            self._interval.shorten()
            yield batch
            if not self._progressed:
                self._stopping.wait(BUSY_SECONDS)

    def ack(self, batch: Batch, outcome: Outcome) -> None:
        """The batch is committed, as far as it could be claimed."""
        self._progressed = any(not task.busy for task in outcome.tasks)

    def confirm(self, end: Lsn) -> None:
        """Nothing is confirmed to the outbox: the cursors in the target are all there is."""


def note_mode(settings: Settings, mode: str, reason: str | None) -> None:
    """Tell `relay status` how the source is read from now on."""
    try:
        with connect(settings.target_dsn) as conn:
            groups.note_mode(conn, settings.group, mode, reason)
    except psycopg.Error as error:
        log.debug("cannot note the way of reading", extra={"fault": describe(error)})


def _behind(settings: Settings, cursor: offsets.Cursor, following: int) -> str:
    return (
        f"the outbox is behind group {settings.group!r}: partition {cursor.partition_id} has applied up to c_offset "
        f"{cursor.next_offset - 1}, but the next one to be given is {following}; the source was restored from an older "
        f"backup, or failed over with a loss. Either set relay.log_counter.next_offset to {cursor.next_offset} in the "
        "source, so that new events are numbered behind those that were relayed, or `relay offsets seek --to end` to "
        "take what is published from now on as new"
    )
