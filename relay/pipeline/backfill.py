"""Fills queues from the log: those that were declared with `start`, and those that are rebuilt.

Until such a queue is filled, tasks put nothing into it. What they apply is what the fill reads: it follows the group's
snapshots, one difference after the other, up to what all partitions have applied. Then it locks the partitions, puts in
the rest of what each of them has applied, and the tasks go on from there, all in one commit. So there is nothing
between both, nothing is in the queue twice, and messages are in the order of the log from the first one on.

A transaction that the target has deferred or dead-lettered is passed by. If it is applied before the queue is filled,
it is read then, before what comes after it; if not, its retry puts it into the queue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from functools import partial

import numpy as np
from psycopg import sql

from relay.config.handlers import QueueHandler
from relay.config.settings import Settings
from relay.event_types.registry import registered
from relay.event_types.upcasting import Upcasting
from relay.faults import (
    ConfigurationError,
    FaultAction,
    RelayError,
    TaskFault,
    action_for,
    describe,
)
from relay.model.batch import Share
from relay.model.snapshots import BEGINNING, Snapshot, Xids
from relay.model.transactions import Mask, Transactions
from relay.pipeline.routing import BatchRouter, chooser
from relay.queues.conditions import Conditions
from relay.queues.declared import Declared, DeclaredQueue, QueueFault, route_to, stop
from relay.queues.filling import FIELDS, QUEUES, Filling
from relay.retention import reader_positions
from relay.runtime.parts import SOON_SECONDS, Condition, Recurring
from relay.source.outbox.applied import AppliedPosition, applied_at
from relay.source.outbox.cursor import Cursor
from relay.source.outbox.differences import Difference, condition, cut, has_rows, without
from relay.source.outbox.rows import not_received, prepare_reading
from relay.source.outbox.selection import Unread, Wanted, everywhere, whole
from relay.source.outbox.visibility import require_visible
from relay.source.server import durable_position
from relay.source.witnesses import cover, require_history
from relay.store import locks, queue_fills
from relay.store.connections import APPLICATION_NAME, Connection, Pool, asking, connect, open_pool
from relay.store.positions import offsets, snapshots
from relay.store.positions.snapshots import ChainLink
from relay.store.queue_fills import Passed, QueueFill
from relay.waits import Backoff

log = logging.getLogger(__name__)

POLL_SECONDS = 5.0
"""How long the end of another instance, which fills queues, may go unseen."""
REST_SECONDS = 1.0, 10.0
"""The first and the longest pause while no queue is to be filled; it doubles. Meanwhile no connection is kept."""
JOIN_SECONDS = 0.2
"""How long to wait before another attempt to end a fill, while tasks apply a large difference."""
MOST_ROWS = 200_000
"""How many rows of the outbox are put into a queue at most while the partitions are locked."""
FEW_ROWS = 1_000
"""How many rows that every partition has applied are left to be put in then; more are put in before."""
LOCK_TIMEOUT = "10s"
"""How long the end of a fill waits for tasks that have locked their partitions."""


class _Moved(Exception):
    """The queue was dropped or rebuilt meanwhile, or another instance has filled it further."""


@dataclass(frozen=True, slots=True)
class _Applied:
    """What each partition has applied, in order of their numbers, and the transactions noted beside (full xids)."""

    positions: Sequence[AppliedPosition]
    links: Sequence[ChainLink]
    noted: Mapping[int, Xids]

    @property
    def oldest(self) -> Snapshot:
        """The snapshot of which every partition has applied everything."""
        reached = {each.snapshot for each in self.positions}
        return next(link.snapshot for link in self.links if link.snapshot in reached)

    @property
    def newest(self) -> Snapshot:
        """The last snapshot of the group: what it does not see is applied where it is noted."""
        return self.links[-1].snapshot

    @property
    def xids(self) -> Xids:
        """All noted transactions, full xids, ascending."""
        return np.unique(np.concatenate([_NONE, *self.noted.values()]))

    def mask(self, share: Share, partition: int) -> Mask:
        """Which transactions of a share a partition has applied."""
        noted = share.among(self.noted.get(partition, _NONE))
        return noted | self.positions[partition].covers(share)


_NONE = np.zeros(0, np.int64)


class QueueFills(Recurring):
    """Fills queues of a group from the log, in a thread; of several instances, one does. No fault ends it."""

    def __init__(self, settings: Settings) -> None:
        condition = Condition(
            "queue filling",
            log,
            "queues cannot be filled from the log yet",
            "queues are filled from the log again",
            SOON_SECONDS,
        )
        super().__init__(condition, ends_at_stop=True, close_seconds=5.0)
        self._settings = settings
        self._target: Connection | None = None
        self._filler: _Filler | None = None
        self._rests = Backoff(*REST_SECONDS)

    def turn(self) -> float:
        """Fill the queues that are to be filled; returns the seconds until the next poll."""
        group = self._settings.group
        try:
            if self._target is None:
                with asking(self._settings.target_dsn) as conn:
                    if not queue_fills.open_fills(conn, group):
                        self.condition.works()
                        return self._rests.take()
                self._rests.reset()
                self._target = connect(self._settings.target_dsn, application_name=APPLICATION_NAME)
            asked = queue_fills.open_fills(self._target, group)
            if not asked:
                self.release()
                self.condition.works()
                return self._rests.take()
            key = locks.queue_fills(group)
            if not locks.try_lock(self._target, key):
                self.condition.clear()
                return POLL_SECONDS
            try:
                return self._fill(self._target, asked)
            finally:
                if not self._target.broken:
                    locks.unlock(self._target, key)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Close the connections."""
        self._close_filler()
        target, self._target = self._target, None
        if target is not None:
            target.close()

    def _close_filler(self) -> None:
        filler, self._filler = self._filler, None
        if filler is not None:
            filler.close()

    def _fill(self, target: Connection, asked: Sequence[QueueFill]) -> float:
        if self._filler is None:
            self._filler = _Filler(self._settings, target, self.stopping.is_set)
        faults = []
        ended = 0
        for each in asked:
            try:
                ended += self._filler.fill(each)
            except _Moved:
                continue
            except QueueFault as stopping:
                # It goes on from there once the queue is declared otherwise.
                stop(target, self._settings.group, stopping)
            except Exception as error:
                if target.broken or self.stopping.is_set():
                    raise
                fault = str(error) if isinstance(error, RelayError) else TaskFault.of(error).text
                queue_fills.fails(target, each, fault)
                faults.append(f"{each.queue}: {fault}")
        if faults:
            more = f"; and {len(faults) - 1} more" if len(faults) > 1 else ""
            self.condition.fails(f"{faults[0]}{more}")
            return min(self.condition.pause, POLL_SECONDS) if ended else self.condition.pause
        self.condition.works()
        return JOIN_SECONDS


class _Filler:
    """Fills one queue after the other. `target` is in autocommit mode. Raises psycopg.Error, RelayError, _Moved."""

    def __init__(
        self, settings: Settings, target: Connection, is_stopping: Callable[[], bool]
    ) -> None:
        self._settings = settings
        self._group = settings.group
        self._target = target
        self._is_stopping = is_stopping
        self._table = sql.Identifier(*settings.source.table_name)
        self._router = BatchRouter(settings)
        self._upcaster = Upcasting(registered(settings.events))
        self._conditions = Conditions(FIELDS)
        # One connection has the plan of a difference, the other reads rows.
        self._source: Pool = open_pool(settings.source_dsn, 2, prepare_reading)
        self._cursor = Cursor(settings, self._source.connection)
        self._rows = self._cursor.rows
        target.execute("select set_config('lock_timeout', %s, false)", (LOCK_TIMEOUT,))

    def close(self) -> None:
        """Close the connections to the source."""
        self._source.close()

    def fill(self, fill: QueueFill) -> bool:
        """Fill a queue as far as the target has applied; returns whether it is filled."""
        with self._source.connection() as source:
            require_history(source, self._target, self._group)
        while not self._is_stopping():
            if fill.before is None:
                self._begin(fill)
            elif fill.purge_upto is not None:
                while queue_fills.purge(self._target, fill) and not self._is_stopping():
                    pass
            elif fill.after is not None:
                self._read(fill, Difference(fill.before, fill.after))
            else:
                applied = self._applied()
                settled = Difference(fill.before, applied.oldest)
                if not self._exceeds(settled, FEW_ROWS) and self._is_near(fill, applied):
                    return self._join(fill)
                if settled.is_empty:
                    return False
                with self._locked(fill):
                    queue_fills.open_difference(self._target, fill, settled.after)
            fill = self._reread(fill)
        return False

    def _reread(self, fill: QueueFill) -> QueueFill:
        for each in queue_fills.open_fills(self._target, self._group):
            if (each.queue_id, each.asked_at) == (fill.queue_id, fill.asked_at):
                return each
        raise _Moved

    def _locked(self, fill: QueueFill) -> _Locked:
        return _Locked(self._target, fill)

    def _applied(self) -> _Applied:
        positions, links = offsets.positions_and_chain(self._target, self._group)
        if not links:
            raise ConfigurationError(
                f"the group {self._group!r} reads only the WAL, which has no earlier events: drop the queue, and "
                "declare it without start, or set source.mode: auto"
            )
        noted = snapshots.noted_in(self._target, self._group, range(len(positions)))
        return _Applied(applied_at(positions, links), links, noted)

    # The beginning of a fill.

    def _begin(self, fill: QueueFill) -> None:
        """Find where the fill begins; from now on, the log is kept for it, and no task puts anything into the queue."""
        with self._source.connection() as source:
            reader_positions.note(source, self._target, self._group, self._settings.source.table)
            self._rows.require_marked(source)
            self._rows.require_offsets(source, f"rebuild the queue {fill.queue}")
            first, seen = self._first(source, fill)
        with self._target.transaction():
            # A task that did not know of the fill has its partitions until its messages are there.
            locks.lock_in_transaction(self._target, locks.retries(self._group))
            with self._locked(fill):
                offsets.lock_all(self._target, self._group)
                queue_fills.begin(self._target, fill, first, seen, BEGINNING)
        log.info(
            "a queue is filled from the log",
            extra={"queue": fill.queue, "start": fill.start, "c_offset": first},
        )

    def _first(self, source: Connection, fill: QueueFill) -> tuple[int | None, Snapshot | None]:
        """The c_offset that a fill begins at, and a snapshot that says which lower ones are left out."""
        if fill.start == "beginning":
            return None, None
        seen = durable_position(source).snapshot
        cover(source, self._target, self._group, seen)
        following = self._rows.next_offset(source)
        if fill.start.isdecimal():
            first = int(fill.start)
            if first > following:
                raise ConfigurationError(
                    f"start: {first} is past the end of the outbox; the next c_offset is {following}"
                )
            oldest = self._rows.oldest_offset(source)
            if oldest is not None and first < oldest:
                log.warning(
                    "the log no longer has the events that a queue is to begin with",
                    extra={"queue": fill.queue, "start": first, "c_offset": oldest},
                )
                first = oldest
            return first, seen
        since = self._rows.first_since(source, datetime.fromisoformat(fill.start))
        return following if since is None else since, seen

    # The differences that every partition has applied.

    def _read(self, fill: QueueFill, between: Difference) -> None:
        """Put a difference into the queue, in portions: each is one commit with the progress of the fill."""
        unread = partial(_to_put, fill, None)
        with closing(self._cursor.plan(between, fill.polled_offset)) as portions:
            for portion in portions:
                if self._is_stopping():
                    return
                with self._locked(fill):
                    count = self._put(fill, portion.shares, unread)
                    queue_fills.advance(self._target, fill, portion.upto, count)
                fill = self._reread(fill)
        with self._locked(fill):
            queue_fills.end_difference(self._target, fill)

    # The end of a fill.

    def _join(self, fill: QueueFill) -> bool:
        """Put in what partitions have applied beyond the last difference; tasks put in the rest. False: not yet."""
        with self._target.transaction():
            # Until the commit, nobody retries, and no task applies anything.
            locks.lock_in_transaction(self._target, locks.retries(self._group))
            with self._locked(fill):
                offsets.lock_all(self._target, self._group)
                # A snapshot that replaces the last one replaces notes, too.
                locks.lock_in_transaction(self._target, locks.chain(self._group))
                applied = self._applied()
                if not self._is_near(fill, applied) or self._lacks_earlier(fill, applied):
                    return False
                unread = partial(_to_put, fill, applied)
                count = self._put(fill, list(self._rest(fill, applied)), unread)
                queue_fills.end(self._target, self._group, fill, count)
        log.info("a queue is filled", extra={"queue": fill.queue})
        return True

    def _is_near(self, fill: QueueFill, applied: _Applied) -> bool:
        """Whether what is left is little enough to be put in while the partitions are locked."""
        if len(applied.xids) > MOST_ROWS:
            return False
        assert fill.before is not None  # noqa: S101
        return not self._exceeds(Difference(fill.before, applied.newest), MOST_ROWS)

    def _exceeds(self, between: Difference, rows: int) -> bool:
        """Whether a difference has so many rows."""
        if between.is_empty:
            return False
        with self._source.connection() as source:
            _, count = cut(source, self._table, between, rows)
        return count >= rows

    def _rest(self, fill: QueueFill, applied: _Applied) -> Iterator[Share]:
        """What partitions have applied beyond the fill, each something else, is among this."""
        assert fill.before is not None  # noqa: S101
        rest = Difference(fill.before, applied.newest)
        if not rest.is_empty:
            yield from self._cursor.shares(rest)
        noted = applied.xids
        with self._source.connection() as source:
            now = require_visible(source, noted)
        later = noted[~applied.newest.sees(noted) & ~fill.before.sees(noted)]
        if len(later):
            yield from self._cursor.shares(_exactly(later, now))

    def _lacks_earlier(self, fill: QueueFill, applied: _Applied) -> bool:
        """Whether the target has still to apply events that are left out, since the fill begins after them."""
        if fill.from_offset is None or fill.seen is None:
            return False
        between = Difference(applied.oldest, fill.seen)
        if between.is_empty:
            return False
        earlier = sql.SQL("{} and {} < {} and {}").format(
            condition(between),
            sql.Identifier(self._settings.source.mapping["c_offset"]),
            fill.from_offset,
            without(applied.xids.tolist()),
        )
        with self._source.connection() as source:
            return has_rows(source, self._table, earlier)

    # What both put in.

    def _put(self, fill: QueueFill, shares: Sequence[Share], unread: Unread) -> int:
        """Put in transactions, after those that were passed by and are applied now; returns the messages."""
        unapplied = queue_fills.unapplied(self._target, self._group)
        passed = queue_fills.take_passed(self._target, fill, unapplied)
        again, only = list(_again(passed)), np.array([each.last_offset for each in passed])
        large = self._cursor.large([*again, *shares])
        count = 0
        for transactions, _ in self._cursor.read(again, whole, large):
            kept = np.isin(transactions.facts["last_offset"], only)
            count += self._copy(fill, transactions.take(np.flatnonzero(kept)), large)
        for transactions, wanted in self._cursor.read(shares, unread, large):
            waits = np.isin(transactions.facts["last_offset"], unapplied)
            if waits.any():
                late = transactions.take(np.flatnonzero(waits))
                queue_fills.pass_by(self._target, fill, list(self._passed(late, wanted)))
                transactions = transactions.take(np.flatnonzero(~waits))
            count += self._copy(fill, transactions, large)
        self._require_kept(fill)
        return count

    def _passed(self, transactions: Transactions, wanted: Wanted) -> Iterator[Passed]:
        decoder = self._router.decoder(transactions.columns)
        xids, positions = wanted.located(transactions)
        last_offsets = transactions.facts["last_offset"].tolist()
        for index, (last, position) in enumerate(
            zip(last_offsets, positions.tolist(), strict=True)
        ):
            keys = [int(xids[index])]
            if wanted.unmarked:
                (rows,) = transactions.part(index, index + 1).portions(1 << 40, 1 << 40)
                (values,) = decoder.columns(rows, ["c_offset"])
                keys = [int(value) for value in values if value is not None]
            yield Passed(last, position, wanted.unmarked, keys)

    def _copy(self, fill: QueueFill, transactions: Transactions, large: Collection[int]) -> int:
        """Put transactions into the queue; returns the messages. One that cannot be put in is a dead letter there."""
        if not len(transactions):
            return 0
        try:
            if large:
                self._require_received(transactions, large)
            with self._target.transaction():
                return sum(self._copied(fill, transactions))
        except Exception as error:
            if isinstance(error, RelayError) or action_for(error) is not FaultAction.DEAD_LETTER:
                raise
            if len(transactions) == 1:
                self._leave_out(fill, transactions, error)
                return 0
        middle = len(transactions) // 2
        parts = transactions.part(0, middle), transactions.part(middle, len(transactions))
        return sum(self._copy(fill, part, large) for part in parts)

    def _require_received(self, transactions: Transactions, large: Collection[int]) -> None:
        table = self._settings.source.table
        for each in transactions:
            fault = not_received(each, self._router.events(each), large, table)
            if fault is not None:
                raise fault

    def _copied(self, fill: QueueFill, transactions: Transactions) -> Iterator[int]:
        declared = _declared(self._group, fill)
        whole = self._router.whole(transactions)
        filling = Filling(QUEUES, lambda: declared, self._upcaster, conditions=self._conditions)
        yield filling.put(self._target, whole, stops=False)
        names = [
            name
            for name, each in self._settings.handlers.items()
            if isinstance(each, QueueHandler) and (each.queue or name) == fill.queue
        ]
        parts = self._router.route(transactions).parts if names else {}
        for name in names:
            if name in parts:
                handler = Filling(name, lambda: declared, self._upcaster, fill.queue)
                yield handler.put(self._target, parts[name])

    def _leave_out(self, fill: QueueFill, transactions: Transactions, error: Exception) -> None:
        declared = _declared(self._group, fill)
        decoder = self._router.decoder(transactions.columns)
        matches = [bool(names) for names in declared.choose(transactions, decoder)]
        (only,) = transactions
        why = f"relay cannot put it into the queue: {describe(error)}"
        for event, wanted in zip(self._router.events(only), matches, strict=True):
            if not wanted:
                continue
            fields = {
                "event_id": str(event.id or ""),
                "event_type": event.event_type or "",
                "host_id": None if event.host_id is None else str(event.host_id),
                "transaction_id": None
                if event.transaction_id is None
                else str(event.transaction_id),
            }
            queue_fills.leave_out(self._target, fill, fields, why)
        log.error(
            "an event of the log cannot be put into a queue",
            extra={"queue": fill.queue, "c_offset": only.last_offset, "fault": describe(error)},
        )

    def _require_kept(self, fill: QueueFill) -> None:
        """Raise ConfigurationError if retention has given up the fill: what was read may be incomplete."""
        with self._source.connection() as source:
            given_up = reader_positions.given_up(source, self._target, self._group)
        if reader_positions.of_queue(fill.queue) in given_up:
            raise ConfigurationError(
                "retention has given up the fill (retention.max_lag), and events that it has not read may be gone: run "
                f"`relay queue rebuild {fill.queue} --from` with a later position"
            )


class _Locked:
    """A database transaction of the target with the lock of a fill.

    Raises _Moved if it is not as it was read, RelayError while another session drops or rebuilds the queue.
    """

    def __init__(self, target: Connection, fill: QueueFill) -> None:
        self._target = target
        self._fill = fill
        self._transaction = target.transaction()

    def __enter__(self) -> None:
        self._transaction.__enter__()
        try:
            if queue_fills.lock(self._target, self._fill) is None:
                raise _Moved
        except BaseException as error:
            self._transaction.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(self, *error: object) -> None:
        self._transaction.__exit__(*error)  # type: ignore[arg-type]


def _declared(group: str, fill: QueueFill) -> Declared:
    """The queue alone, as one that is filled."""
    queue = DeclaredQueue(fill.queue_id, fill.queue, fill.key, fill.is_conditional)
    routes = [] if fill.match is None else [route_to(queue, fill.match)]
    return Declared(group, 0, {fill.queue: queue}, chooser(routes))


def _exactly(xids: Xids, now: Snapshot) -> Difference:
    """The difference of some transactions (full xids, ascending) that a snapshot sees."""
    others = sorted({*now.in_progress, *xids.tolist()})
    return Difference(Snapshot(min(now.xmin, int(xids[0])), now.xmax, tuple(others)), now)


def _to_put(fill: QueueFill, applied: _Applied | None, share: Share) -> dict[int, Mask]:
    """What a fill puts in of a share: what is `applied`, or all, but for what is before its beginning."""
    left: Mask = np.full(len(share.xids), True)
    if fill.from_offset is not None and fill.seen is not None:
        left = ~((share.positions < fill.from_offset) & share.seen_by(fill.seen))
    if applied is None:
        return everywhere(share, left)
    return {partition: left & applied.mask(share, partition) for partition in share.partitions}


def _again(passed: Sequence[Passed]) -> Iterator[Share]:
    """The database transactions of what was passed by."""
    for unmarked in (True, False):
        pairs = {
            (key, each.position)
            for each in passed
            if each.unmarked == unmarked
            for key in each.keys
        }
        if pairs:
            keys, positions = np.array(sorted(pairs), np.int64).T
            yield Share((0,), len(pairs), keys, positions, unmarked)
