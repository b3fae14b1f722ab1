"""Applies one task in one target transaction: the heart of correctness. The same on Spark and inline.

Effects, dead letters and offsets commit together, so redelivery is recognised by the offsets under their row locks.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple, TypeVar

import numpy as np
import psycopg
from psycopg_pool import ConnectionPool

from relay.config.fields import JSON_FIELDS
from relay.config.handlers import PythonHandler
from relay.config.settings import Settings
from relay.faults import (
    Braked,
    NotReceived,
    NotRouted,
    ProcessDied,
    RelayError,
    Undecodable,
    describe,
    kind_of,
    timed_out,
)
from relay.logs import RepeatedLines
from relay.model.batch import DeadLettered, Range, Share, Task, TaskOutcome, Work
from relay.model.dispositions import (
    NEW,
    AttemptHistory,
    Blocked,
    Disposition,
    Dispositions,
    Failure,
    holds_up_followers,
    is_dead,
)
from relay.model.events import Event, Lsn
from relay.model.snapshots import Xids, full_xids
from relay.model.trace_context import Traced, TraceRecord, trace_id
from relay.model.transactions import Mask, Transactions, Undecoded
from relay.pipeline.brake import Brake, run_of
from relay.pipeline.deferral import DeferralRules
from relay.pipeline.handling import HandlerFailed, HandlerRunner, HandlingMode, reason_of
from relay.pipeline.routing import Assignment, BatchRouter
from relay.pipeline.tracing import Tracing, joined, judged
from relay.source.rows import OutboxRows, Wanted, prepare_reading
from relay.store import (
    brakes,
    dead_letters,
    deferred,
    deferred_due,
    deferred_rows,
    offsets,
    snapshots,
)
from relay.store.connections import Connection, HandlerPool, open_pool
from relay.store.deferred import Deferral
from relay.store.deferred_due import Due
from relay.store.unflushed import require_kept

log = logging.getLogger(__name__)

Done = TypeVar("Done")


DUE_AT_ONCE = 500
"""How many transactions whose turn has come are taken together."""


class Redelivery(NamedTuple):
    """Transactions of `relay.deferred` that were tried again: how many, how many were applied, which are dead now."""

    tried: int
    applied: int
    dead: list[DeadLettered]
    trace_record: TraceRecord | None = None


class _Delivered(NamedTuple):
    """What became of transactions: what is dead, how many events wait, and what is to be said of stopped sinks."""

    dead: list[DeadLettered]
    deferred_events: int
    braked: list[str]
    trace_record: TraceRecord | None = None


class Applier:
    """Applies tasks with the configured routes and handlers, each on a pooled connection of its own.

    Raises ConfigurationError when a handler cannot be built.
    """

    def __init__(self, settings: Settings, connections: int) -> None:
        self._group = settings.group
        self._durable = settings.target.durable
        self._router = BatchRouter(settings)
        self._deferral_rules = DeferralRules(settings, self._router)
        self._handler_runner = HandlerRunner(settings, self._deferral_rules, connections)
        self.active_jobs = self._handler_runner.active_jobs
        self._connections = connections
        self._pool = HandlerPool(
            settings.target_dsn,
            connections,
            self._handler_runner.configure,
            durable=self._durable,
            code_of=[
                name for name, each in settings.handlers.items() if isinstance(each, PythonHandler)
            ],
        )
        self._limits = settings.brakes
        self._settings = settings
        self._rows = OutboxRows(settings)
        self._deferrals = RepeatedLines(log, logging.WARNING, "deferred", "attempts")
        self._tracing = (
            Tracing(self._router, self._handler_runner.names) if settings.observe.traces else None
        )

    def connect(self) -> None:
        """Open a connection now instead of with the first task. Raises psycopg.Error."""
        with self._pool.connection():
            pass

    def note_orderly_exit(self) -> None:
        """The process ends itself now, which must not count as a death. Raises psycopg.Error."""
        self._handler_runner.note_orderly_exit()

    def close(self) -> None:
        """Close the connections."""
        self._handler_runner.close()
        self._pool.close()
        if "_source" in self.__dict__:
            self._source.close()

    @cached_property
    def _source(self) -> ConnectionPool[Connection]:
        """Only ranges read the source themselves."""
        return open_pool(self._settings.source_dsn, self._connections, prepare_reading)

    def apply(self, task: Work, guarded: bool = False) -> TaskOutcome:
        """Apply the task and commit. Whatever it raises has left no trace in the target.

        First all transactions together. If one of them cannot be applied, again with savepoints: a range that fails is
        halved until the culprit stands alone, and only that one is dead-lettered.

        Guarded, one transaction after the other is noted, applied and its note taken back. One that is noted already
        `crash_limit` times has killed as many processes and is dead-lettered.
        """
        with self.active_jobs.job() as job:
            outcome = self._by_mode(partial(self._attempt, task), guarded)
        return replace(outcome, seconds=job.seconds) if job.seconds else outcome

    def _by_mode(self, attempt: Callable[[HandlingMode], Done], guarded: bool) -> Done:
        """Attempt something in a target transaction of its own: together first, else carefully."""
        try:
            if guarded:
                return attempt(HandlingMode.GUARDED)
            try:
                return attempt(HandlingMode.TOGETHER)
            except Exception as error:
                if not self._handler_runner.can_isolate(error):
                    raise
                mode = HandlingMode.HALVED if timed_out(reason_of(error)) else HandlingMode.ISOLATED
            return attempt(mode)
        except HandlerFailed as failure:
            raise reason_of(failure) from None
        except Braked as error:
            with suppress(psycopg.Error), self._pool.connection() as conn:
                brakes.mark(conn, self._group, error.handler, error.fault)
            raise

    def _attempt(self, task: Work, mode: HandlingMode) -> TaskOutcome:
        began = time.time_ns()
        outcome = self._commit(task, mode)
        return (
            replace(outcome, trace_record=outcome.trace_record.since(began))
            if outcome.trace_record
            else outcome
        )

    def _commit(self, task: Work, mode: HandlingMode) -> TaskOutcome:
        with self._pool.transaction() as conn:
            self.active_jobs.enters(conn)
            if isinstance(task, Range):
                return self._apply_range(conn, task, mode)
            locked = offsets.lock(
                conn, self._group, task.partitions, task.transactions.distinct_hosts
            )
            positions = locked.positions
            _require_same_source(task, locked)
            require_kept(task.lower_bounds, positions)
            if not locked.has_no_open_difference or _is_ahead(task, positions):
                return TaskOutcome(task.partitions, busy=True)
            fresh = _fresh(task, locked)
            if not len(fresh):
                reached = self._reached(positions)
                return TaskOutcome(task.partitions, skipped=task.events, reached=reached)
            brake = Brake(self._limits, locked.streaks)
            delivered = self._deliver(conn, fresh, locked.holding, mode, brake)
            moved = advances(fresh, task.touched)
            noted = None
            if locked.last is not None:
                noted = np.unique(full_xids(fresh.facts["xid"], task.next_xid))
            offsets.advance(conn, self._group, moved, noted, self._durable)
        events = fresh.events
        outcome = _outcome(task, events, task.events - events, [delivered], len(fresh))
        return replace(outcome, reached=self._reached(positions, moved))

    def _reached(
        self,
        positions: Mapping[int, offsets.PartitionPosition],
        moved: Iterable[offsets.Advance] = (),
    ) -> dict[int, Lsn]:
        """Where partitions are now, if that may still be lost."""
        if self._durable:
            return {}
        reached = {partition: position.applied_lsn for partition, position in positions.items()}
        for each in moved:
            before = reached[each.partition_id]
            reached[each.partition_id] = max(before, each.applied_lsn)
        return reached

    def _apply_range(self, conn: Connection, task: Range, mode: HandlingMode) -> TaskOutcome:
        """Claim the partitions, read what is still to be applied of the range, apply it and move them behind it."""
        positions = offsets.claim(conn, self._group, task.partitions)
        if positions is None or _is_early(task, positions):
            return TaskOutcome(task.partitions, busy=True)
        lower_bounds = {
            partition: position.polled_offset
            for partition, position in positions.items()
            if position.snapshot_id == task.snapshot_id and position.polled_offset < task.upto
        }
        if not lower_bounds:
            return TaskOutcome(task.partitions)
        noted = snapshots.noted_in(conn, self._group, lower_bounds)
        events = count = 0
        all_delivered: list[_Delivered] = []
        for transactions in self._portions(
            self.active_jobs.reading(self._of_range(task, lower_bounds, noted))
        ):
            events += transactions.events
            count += len(transactions)
            left, dead_lettered = self._dead_letter_by_reference(
                conn, transactions, task.by_reference
            )
            all_delivered.append(_Delivered(dead_lettered, 0, []))
            if not len(left):
                continue
            hosts = left.distinct_hosts
            locked = offsets.lock(conn, self._group, list(lower_bounds), hosts)
            brake = Brake(self._limits, locked.streaks)
            all_delivered.append(self._deliver(conn, left, locked.holding, mode, brake))
        offsets.polled(conn, self._group, _ends(task, lower_bounds), task.upto, self._durable)
        return _outcome(task, events, 0, all_delivered, count)

    def _of_range(
        self, task: Range, lower_bounds: Mapping[int, int], noted: Mapping[int, Xids]
    ) -> Iterator[Transactions]:
        """The transactions that are still to be applied; first those from before the outbox had c_xid."""
        for unmarked in (True, False):
            wanted = _wanted(task.shares, unmarked, lower_bounds, {} if unmarked else noted)
            if not len(wanted.xids):
                continue
            with (
                self._source.connection() as source,
                # Closed before the connection is: a COPY that is under way would keep that from being returned.
                closing(self._rows.commits(source, wanted, unmarked, task.by_reference)) as found,
            ):
                yield from found

    def _dead_letter_by_reference(
        self, conn: Connection, transactions: Transactions, by_reference: Collection[int]
    ) -> tuple[Transactions, list[DeadLettered]]:
        """Dead-letter the transactions with a row that was too large to be read; returns the others and the dead."""
        large = {
            index: found
            for index, each in enumerate(transactions)
            if (found := self._offsets_among(each, by_reference))
        }
        dead = []
        for index, missing in large.items():
            where = f"{self._settings.source.table}, c_offset {', '.join(map(str, missing))}"
            fault = NotReceived(f"payload and metadata are too large, they are only in {where}")
            number, dead_lettered = self._dead_letter(
                conn, transactions[index], Failure(None, fault)
            )
            dead_letters.mark_by_reference(conn, number, missing)
            dead.append(dead_lettered)
        others = transactions.take(transactions.besides(large)) if large else transactions
        return others, dead

    def _offsets_among(self, transaction: Undecoded, wanted: Collection[int]) -> list[int]:
        first, last = transaction.first_offset, transaction.last_offset
        if not any(first <= offset <= last for offset in wanted):
            return []
        found = (event.c_offset for event in self._router.events(transaction))
        return [offset for offset in found if offset is not None and offset in wanted]

    def _portions(self, found: Iterable[Transactions]) -> Iterator[Transactions]:
        """As many together as fit into memory: a range is one target transaction however large it is."""
        limits = self._settings.batch
        portion: list[Transactions] = []
        events = size = 0
        for transactions in found:
            if portion and not portion[0].joins(transactions):
                yield Transactions.joined(portion)
                portion, events, size = [], 0, 0
            portion.append(transactions)
            events += transactions.events
            size += transactions.held
            if events >= limits.max_events or size >= limits.max_bytes:
                yield Transactions.joined(portion)
                portion, events, size = [], 0, 0
        if portion:
            yield Transactions.joined(portion)

    def _deliver(
        self,
        conn: Connection,
        transactions: Transactions,
        holding: set[str],
        mode: HandlingMode,
        brake: Brake,
    ) -> _Delivered:
        """Run the handlers of transactions, but park those that have to wait."""
        assigned = self._router.route(transactions)
        deferrals = self._deferral_rules.split(conn, assigned, holding)
        flowing = transactions.besides(deferrals)
        left = assigned.take(flowing) if deferrals else assigned
        found = self._handler_runner.handle(conn, left, mode, {}, brake)
        braked = self._count(conn, left, found, brake)
        dispositions = {flowing[index]: disposition for index, disposition in found.items()}
        deferrals |= {
            index: self._deferral(assigned.part(index, index + 1), disposition, NEW)
            for index, disposition in dispositions.items()
            if holds_up_followers(disposition)
        }
        dead: list[DeadLettered] = []
        for index, disposition in sorted(dispositions.items()):
            if is_dead(disposition):
                number, dead_lettered = self._dead_letter(conn, transactions[index], disposition)
                dead.append(dead_lettered)
                if index in deferrals:
                    deferrals[index] = replace(deferrals[index], dead_transaction=number)
        # In commit order, since that is the order in which they are taken up again.
        indices = sorted(deferrals)
        entries = zip(transactions.take(indices), map(deferrals.__getitem__, indices), strict=True)
        deferred.defer(conn, self._group, entries)
        self._report(dispositions)
        unblocked = [index for index, deferral in deferrals.items() if not deferral.blocked]
        trace_record = self._trace_record(
            assigned, lambda index: judged(dispositions.get(index), index in deferrals)
        )
        return _Delivered(
            dead, int(transactions.facts["events"][unblocked].sum()), braked, trace_record
        )

    def _trace_record(
        self, assigned: Assignment, judge: Callable[[int], Traced | None]
    ) -> TraceRecord | None:
        return None if self._tracing is None else self._tracing.trace_record(assigned, judge)

    def _count(
        self, conn: Connection, assigned: Assignment, dispositions: Dispositions, brake: Brake
    ) -> list[str]:
        """Store how many transactions in a row each handler lets die, in the commit that writes the dead letters.

        Returns what is to be said of sinks that are stopped now. Raises Braked for a transactional handler, where
        tasks side by side have let too many die together.
        """
        failed = {
            disposition.handler: disposition
            for disposition in dispositions.values()
            if is_dead(disposition) and disposition.handler
        }
        explanations = []
        for handler in sorted(failed.keys() | brake.streaks.keys() | brake.braked.keys()):
            if handler not in self._limits:
                if handler in brake.streaks:
                    brakes.forget(conn, self._group, handler)
                continue
            reached = np.flatnonzero(assigned.reached(handler)).tolist()
            last = run_of(handler, reached, dispositions)
            stopped = brake.braked.get(handler)
            fault = last.fault or stopped
            if fault is None:
                if last.begins:
                    brakes.forget(conn, self._group, handler)
                    _report_release(handler, brake)
                continue
            deaths = brakes.add(
                conn, self._group, handler, fault, last.deaths, last.begins, stopped is not None
            )
            before = brake.streaks.get(handler)
            if stopped and not (before and before.braked):
                explanations.append(brake.explain(handler))
            elif handler in failed and not stopped and deaths > self._limits[handler]:
                raise brake.fault(handler, failed[handler].error)
        return explanations

    def _deferral(
        self, one: Assignment, disposition: Disposition, before: AttemptHistory
    ) -> Deferral:
        """What a transaction that was not applied waits for."""
        keys = self._deferral_rules.keys(one)
        if isinstance(disposition, Blocked):
            return Deferral(keys, attempts=before.attempts, first_failed_at=before.since)
        return Deferral(
            keys,
            after=disposition.after or 0.0,
            blocked=disposition.after is None,
            attempts=disposition.attempts,
            first_failed_at=before.since or time.time(),
            handler=disposition.handler,
            reason=describe(disposition.error),
        )

    def retry_deferred(self, guarded: bool = False) -> Redelivery:
        """Retry the transactions whose turn has come, and commit.

        Whatever it raises has left no trace in the target.
        """
        with self.active_jobs.job():
            return self._by_mode(self._retry_deferred, guarded)

    def seconds_to_next(self) -> float | None:
        """How long it is until the time of another transaction comes; None if none waits for a time."""
        with self._pool.connection() as conn:
            return deferred_due.seconds_to_next(conn, self._group)

    def _retry_deferred(self, mode: HandlingMode) -> Redelivery:
        began = time.time_ns()
        found = self._retry(mode)
        return (
            found._replace(trace_record=found.trace_record.since(began))
            if found.trace_record
            else found
        )

    def _retry(self, mode: HandlingMode) -> Redelivery:
        limits = self._settings.batch
        with self._pool.transaction() as conn:
            self.active_jobs.enters(conn)
            due = deferred_due.claim(conn, self._group, DUE_AT_ONCE)
            if not due:
                return Redelivery(0, 0, [])
            transactions = deferred_rows.transactions(
                conn, due, limits.max_bytes, limits.spool_directory
            )
            return self._redeliver(conn, due, transactions, mode)

    def _redeliver(
        self, conn: Connection, due: Sequence[Due], transactions: Transactions, mode: HandlingMode
    ) -> Redelivery:
        histories = {
            index: AttemptHistory(each.attempts, each.first_failed_at)
            for index, each in enumerate(due)
        }
        # What was dead before is not counted: it only stays dead.
        dead_before = any(each.dead_transaction is not None for each in due)
        limits = {} if dead_before else self._limits
        streaks = {} if dead_before else brakes.streaks(conn, self._group)
        brake = Brake(limits, streaks, defers=True)
        assigned = self._router.route(transactions)
        dispositions = self._handler_runner.handle(conn, assigned, mode, histories, brake)
        for fault in () if dead_before else self._count(conn, assigned, dispositions, brake):
            log.error("a handler is stopped", extra={"fault": fault})
        done: list[int] = []
        replayed: list[int] = []
        undelivered: list[int] = []
        again: list[tuple[int, Deferral]] = []
        dead: list[DeadLettered] = []
        for index, each in enumerate(due):
            disposition, number = dispositions.get(index), each.dead_transaction
            if is_dead(disposition):
                number, dead_lettered = self._dead_letter(
                    conn, transactions[index], disposition, number, each.undelivered
                )
                dead.append(dead_lettered)
            elif disposition is None:
                if number is not None:
                    replayed.append(number)
                if each.undelivered:
                    undelivered.append(index)
            if disposition is None or not holds_up_followers(disposition):
                done.append(each.id)
            elif isinstance(disposition, Failure) or not each.holds:
                deferral = self._deferral(
                    assigned.part(index, index + 1), disposition, histories[index]
                )
                again.append((each.id, replace(deferral, dead_transaction=number)))
        if replayed:
            dead_letters.mark(conn, self._group, replayed, "replayed", "replayed")
        self._report(dispositions)
        self._deliver_to_sinks(conn, assigned, undelivered)
        deferred.defer_again(conn, again)
        deferred.remove(conn, done)
        trace_record = self._trace_record(
            assigned,
            lambda index: judged(dispositions.get(index), False, histories[index].attempts),
        )
        return Redelivery(len(due), len(due) - len(dispositions), dead, trace_record)

    def _deliver_to_sinks(
        self, conn: Connection, assigned: Assignment, undelivered: Iterable[int]
    ) -> None:
        """Defer, for each sink, the transactions that no sink has had: its worker delivers them in their order."""
        by_sink: dict[str, list[tuple[Undecoded, Deferral]]] = {}
        for index in undelivered:
            for sink, delivery, deferral in self._deferral_rules.deliveries(
                assigned.part(index, index + 1)
            ):
                by_sink.setdefault(sink, []).append((delivery, deferral))
        for sink, deliveries in by_sink.items():
            deferred.defer(conn, self._group, deliveries, sink)

    def _report(self, dispositions: Dispositions) -> None:
        """Log which handlers and faults defer transactions, however many there are."""
        faults = Counter(
            (disposition.handler, describe(disposition.error))
            for disposition in dispositions.values()
            if isinstance(disposition, Failure) and not is_dead(disposition)
        )
        for (handler, fault), attempts in faults.items():
            self._deferrals.note(attempts, handler=handler, fault=fault)

    def _small(self, events: Iterable[Event], left_out: list[int]) -> Iterator[Event]:
        """Events without payload and metadata where these are above the limit; their c_offsets are noted.

        To write what processes died of may take as much memory as they had.
        """
        for event in events:
            texts = (event.text(name) or "" for name in JSON_FIELDS)
            offset = event.c_offset
            if offset is None or sum(map(len, texts)) <= self._settings.source.max_event_bytes:
                yield event
            else:
                left_out.append(offset)
                yield event.without(JSON_FIELDS)

    def _dead_letter(
        self,
        conn: Connection,
        transaction: Undecoded,
        failure: Failure,
        number: int | None = None,
        undelivered: bool = False,
    ) -> tuple[int, DeadLettered]:
        """Dead-letter a transaction; one that was replayed is dead again under the `number` that it has.

        `undelivered` says that no sink has had it, as none has what cannot be routed.
        """
        events = self._router.events(transaction)
        left_out: list[int] = []
        written = (
            self._small(events, left_out) if isinstance(failure.error, ProcessDied) else events
        )
        if number is None:
            undelivered |= isinstance(failure.error, NotRouted | Undecodable | NotReceived)
            number = dead_letters.insert(
                conn,
                self._group,
                written,
                failure.handler,
                failure.error,
                undelivered=undelivered,
            )
        else:
            dead_letters.mark_dead_again(conn, self._group, number, failure.handler, failure.error)
        if left_out:
            dead_letters.mark_by_reference(conn, number, left_out)
        return number, DeadLettered(
            transaction.transaction_id,
            transaction.commit.end_lsn,
            len(events),
            failure.handler,
            describe(failure.error),
            trace_id(events),
            kind_of(failure.error),
        )


def _outcome(
    task: Work,
    events: int,
    skipped: int,
    delivered: Sequence[_Delivered],
    transactions: int,
) -> TaskOutcome:
    dead = tuple(item for each in delivered for item in each.dead)
    lost = sum(item.events for item in dead)
    deferred_events = sum(each.deferred_events for each in delivered)
    return TaskOutcome(
        task.partitions,
        events - lost - deferred_events,
        skipped,
        deferred_events,
        dead,
        tuple(line for each in delivered for line in each.braked),
        trace_record=joined(each.trace_record for each in delivered),
        transactions=transactions,
    )


def _report_release(handler: str, brake: Brake) -> None:
    """A line where a handler that was stopped has succeeded; a warning, which Spark's workers print too."""
    streak = brake.streaks.get(handler)
    if streak is not None and streak.braked:
        log.warning("a stopped handler goes on", extra={"handler": handler})


def _require_same_source(task: Task, locked: offsets.Locked) -> None:
    """Raise RelayError if the group follows another history of the source than the one that the task was read in."""
    if task.source_epoch not in (None, locked.source_epoch):
        raise RelayError(
            "another instance has followed the source to another server or timeline since this one read its batch, of "
            "which nothing was applied: start relay again"
        )


def _fresh(task: Task, locked: offsets.Locked) -> Transactions:
    """The transactions that are not in the target yet.

    The commit's position says so, and for what was polled the snapshot that sees it. Partitions that a transaction
    touches moved together when it was applied, so they agree.
    """
    facts = task.transactions.facts
    seen = None
    if locked.last is not None:
        seen = locked.last.snapshot.sees(full_xids(facts["xid"], task.next_xid))
    end = facts["end_lsn"]
    furthest = max(position.applied_lsn for position in locked.positions.values())
    # As a rule everything is new, and then no partition has to be looked at by itself.
    if end[0] > furthest and (seen is None or not seen.any()):
        return task.transactions
    fresh = np.zeros(len(end), np.bool_)
    for partitions, here in _by_partitions(task.transactions, task.touched):
        for partition in partitions:
            fresh |= here & (end > locked.positions[partition].applied_lsn)
    if seen is not None:
        fresh &= ~seen
    return task.transactions if fresh.all() else task.transactions.take(np.flatnonzero(fresh))


def advances(fresh: Transactions, touched: Sequence[tuple[int, ...]]) -> list[offsets.Advance]:
    """Where transactions leave the partitions that they touch, in order of the partitions."""
    reached: dict[int, tuple[Lsn, int]] = {}
    for partitions, here in _by_partitions(fresh, touched):
        following = max(1, int(fresh.facts["last_offset"][here].max()) + 1)
        end = Lsn(fresh.facts["end_lsn"][here].max())
        for partition in partitions:
            lsn, next_offset = reached.get(partition, (Lsn(0), 1))
            reached[partition] = (max(lsn, end), max(next_offset, following))
    return [
        offsets.Advance(partition, *position) for partition, position in sorted(reached.items())
    ]


def _is_ahead(task: Task, positions: Mapping[int, offsets.PartitionPosition]) -> bool:
    """Whether the batch before is not applied yet in a partition of the task."""
    return any(positions[partition].applied_lsn < lsn for partition, lsn in task.after.items())


def _is_early(task: Range, positions: Mapping[int, offsets.PartitionPosition]) -> bool:
    """Whether somebody has not applied yet what comes before the range."""
    return any(
        (position.snapshot_id or 0, position.polled_offset)
        < (task.snapshot_id, task.lower_bounds[partition])
        for partition, position in positions.items()
    )


def _wanted(
    shares: Iterable[Share],
    unmarked: bool,
    lower_bounds: Mapping[int, int],
    noted: Mapping[int, Xids],
) -> Wanted:
    """What of shares is still to be applied in the partitions that have floors, in order."""
    parts: list[Wanted] = []
    for share in shares:
        if share.unmarked != unmarked:
            continue
        masks = {
            partition: _unread(share, lower_bounds.get(partition), noted.get(partition))
            for partition in share.partitions
        }
        first, *others = masks.values()
        if all((first == other).all() for other in others):
            masks = {-1: first}
        for partition, mask in masks.items():
            xids = share.xids[mask]
            parts.append(Wanted(xids, share.positions[mask], np.full(len(xids), partition)))
    if len(parts) <= 1:
        return parts[0] if parts else Wanted(*(np.zeros(0, np.int64),) * 3)
    return Wanted(*map(np.concatenate, zip(*parts, strict=True)))


def _unread(share: Share, lower_bound: int | None, noted: Xids | None) -> Mask:
    if lower_bound is None:
        return np.zeros(len(share.xids), np.bool_)
    unread: Mask = share.positions > lower_bound
    return unread if noted is None else unread & ~np.isin(share.xids, noted)


def _ends(task: Range, lower_bounds: Mapping[int, int]) -> dict[int, int]:
    """The greatest position of the range's transactions in each partition."""
    ends: dict[int, int] = {}
    for share in task.shares:
        for partition in share.partitions:
            if partition in lower_bounds:
                last = int(share.positions[-1])
                ends[partition] = max(ends.get(partition, last), last)
    return ends


def _by_partitions(
    transactions: Transactions, touched: Sequence[tuple[int, ...]]
) -> Iterator[tuple[tuple[int, ...], Mask]]:
    """Which transactions touch the same partitions."""
    kinds: dict[tuple[int, ...], int] = {}
    of_hosts = np.array([kinds.setdefault(each, len(kinds)) for each in touched])
    kind = of_hosts[transactions.facts["hosts"]]
    for partitions, number in kinds.items():
        here = kind == number
        if here.any():
            yield partitions, here
