"""Applies one task in one database transaction of the target, inline and on Spark.

Effects, dead letters and offsets commit together. A redelivery is recognised by the offsets, under the
locks of the partitions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
import psycopg

from relay.config.handlers import PythonHandler, QueueHandler
from relay.config.settings import Settings
from relay.faults import Braked, RelayError, TooLarge
from relay.model.batch import DeadLetterReport, Range, Task, TaskOutcome, Work
from relay.model.dispositions import (
    APPLIED,
    AttemptHistory,
    DeadLetter,
    Dispositions,
    holds_keys,
    is_deferred,
)
from relay.model.events import Lsn
from relay.model.snapshots import RowCounts, full_xids
from relay.model.trace_context import Traced, TraceRecord
from relay.model.transactions import Mask, Transactions
from relay.pipeline.deferral import DeferralRules
from relay.pipeline.failure_limit import FailureLimit, store_streaks
from relay.pipeline.handling import (
    HandlerFailed,
    HandlerRunner,
    HandlingMode,
    Last,
    Trial,
    reason_of,
)
from relay.pipeline.ranges import RangeReader, is_early, last_positions
from relay.pipeline.routing import Assignment, BatchRouter, chooser
from relay.pipeline.settlement import Settlement, Unsettled
from relay.pipeline.tracing import joined, trace_record, traced_as
from relay.queues.declared import Declared, DeclaredQueues
from relay.queues.filling import QUEUES
from relay.source.outbox.rows import not_received
from relay.store import brakes, trips
from relay.store.brakes import Streak
from relay.store.connections import Connection
from relay.store.deferred import due as deferred_due
from relay.store.deferred.due import DeferredTimes, DueTransaction
from relay.store.handler_sessions import HandlerPool, KeepAlive
from relay.store.positions import offsets, snapshots
from relay.store.positions.unflushed import require_kept

log = logging.getLogger(__name__)

FEW = 20
"""Up to so many transactions are walked one by one, which is cheaper than arrays of them."""
DUE_AT_ONCE = 500
"""How many due transactions are retried in one database transaction."""


@dataclass(frozen=True, slots=True)
class Handled:
    """What became of transactions, new ones or retried ones of `relay.deferred`.

    `tried` and `applied` count transactions, `deferred_events` the events of those that are deferred. `braked` has a
    line for each handler that was stopped; `seconds` has the seconds that each handler took. `held` are the keys of
    retried ones that still hold them.
    """

    tried: int = 0
    applied: int = 0
    deferred_events: int = 0
    dead: tuple[DeadLetterReport, ...] = ()
    braked: tuple[str, ...] = ()
    trace_record: TraceRecord | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    held: frozenset[str] = frozenset()

    @classmethod
    def joined(cls, parts: Sequence[Handled]) -> Handled:
        """What became of all the transactions of one database transaction."""
        return cls(
            sum(each.tried for each in parts),
            sum(each.applied for each in parts),
            sum(each.deferred_events for each in parts),
            tuple(dead for each in parts for dead in each.dead),
            tuple(line for each in parts for line in each.braked),
            joined(each.trace_record for each in parts),
        )


Done = TypeVar("Done", TaskOutcome, Handled)


class Applier:
    """Applies tasks with the configured routes and handlers, each on a pooled connection of its own.

    Raises ConfigurationError when a handler cannot be built.
    """

    def __init__(self, settings: Settings, connections: int, keeps_alive: bool = False) -> None:
        """`keeps_alive`: the server ends a session in a transaction whose process gives no sign of life."""
        # The declared queues are a handler like others: what fails there is isolated, and counts for the brake.
        declared = QueueHandler(type="queue", order_by="none")
        handlers = {**settings.handlers, QUEUES: declared}
        settings = settings.model_copy(update={"handlers": handlers})
        self._group = settings.group
        self._durable = settings.target.durable
        self._router = BatchRouter(settings)
        self._deferral_rules = DeferralRules(settings, self._router)
        self._queues = DeclaredQueues(settings.group, chooser)
        self._handler_runner = HandlerRunner(
            settings, self._deferral_rules, connections, self._queues
        )
        self.active_jobs = self._handler_runner.active_jobs
        self._pool = HandlerPool(
            settings.target_dsn,
            connections,
            self._handler_runner.configure,
            durable=self._durable,
            code_of=[
                name for name, each in settings.handlers.items() if isinstance(each, PythonHandler)
            ],
            keep_alive=KeepAlive() if keeps_alive else None,
        )
        self._limits = settings.brakes
        self._sinks = frozenset(settings.sink_handlers)
        self._settings = settings
        self._settlement = Settlement(settings)
        self._ranges = RangeReader(settings, connections)
        self._traces = settings.observe.traces

    def mark(self, application_name: str) -> None:
        """Set the application_name of the next transactions."""
        self._pool.mark = application_name

    def connect(self) -> None:
        """Open a connection before the first task needs it. Raises psycopg.Error."""
        with self._pool.connection():
            pass

    def note_orderly_exit(self) -> None:
        """Note that the process ends itself, which is no crash. Raises psycopg.Error."""
        self._handler_runner.note_orderly_exit()

    def close(self) -> None:
        """Close the connections."""
        self._handler_runner.close()
        self._pool.close()
        self._ranges.close()

    def apply(self, task: Work, guarded: bool = False) -> TaskOutcome:
        """Apply the task and commit. If it raises, no effect and no position is stored; after `Braked` the brake is.

        First all transactions are applied together. If that fails, they are applied again with savepoints: a range that
        fails is halved until a single transaction fails, and only that one is dead-lettered or deferred.

        `guarded` applies one transaction at a time, each under a note in the target that is removed afterwards. A
        transaction with `crash_limit` notes has killed as many processes and is dead-lettered.
        """
        return self._run(partial(self._apply, task), guarded)

    def retry_deferred(self, guarded: bool = False) -> Handled:
        """Retry the deferred transactions that are due, and commit. If it raises, the target is unchanged."""
        return self._run(self._retry, guarded)

    def deferred_times(self) -> DeferredTimes:
        """When deferred transactions are due."""
        with self._pool.connection() as conn:
            return deferred_due.times(conn, self._group)

    def _run(self, attempt: Callable[[Trial], Done], guarded: bool) -> Done:
        """Call `attempt` in the modes that it needs; returns its outcome, with the times that it took."""

        def timed(trial: Trial) -> Done:
            began = time.time_ns()
            outcome = attempt(trial)
            if outcome.trace_record is None:
                return outcome
            return replace(outcome, trace_record=outcome.trace_record.since(began))

        with self.active_jobs.job() as job:
            outcome = self._by_mode(timed, guarded)
        return replace(outcome, seconds=job.seconds) if job.seconds else outcome

    def _by_mode(self, attempt: Callable[[Trial], Done], guarded: bool) -> Done:
        """Call `attempt` with TOGETHER; if an event may be at fault, again in ways that isolate it."""
        trial = Trial(HandlingMode.GUARDED if guarded else HandlingMode.TOGETHER)
        try:
            while True:
                try:
                    return attempt(trial)
                except Exception as error:
                    following = self._handler_runner.following(trial, error)
                    if following is None:
                        raise
                trial = following
        except HandlerFailed as failure:
            raise reason_of(failure) from None
        except Braked as error:
            with suppress(psycopg.Error), self._pool.connection() as conn:
                if brakes.mark(conn, self._group, error):
                    _report_sample(error)
            raise

    def _apply(self, task: Work, trial: Trial) -> TaskOutcome:
        try:
            return self._commit(task, trial)
        except TooLarge:
            if not isinstance(task, Range) or task.by_reference:
                raise
            return self._commit(self._ranges.by_reference(task), trial)

    def _commit(self, task: Work, trial: Trial) -> TaskOutcome:
        with self._pool.transaction() as conn:
            self.active_jobs.enters(conn)
            if isinstance(task, Range):
                return self._apply_range(conn, task, trial)
            locked = offsets.lock(
                conn, self._group, task.partitions, task.transactions.distinct_hosts
            )
            positions = locked.positions
            _require_same_source(task, locked)
            require_kept(task.lower_bounds, positions)
            if not locked.has_no_open_difference or _is_ahead(task, positions):
                return TaskOutcome(task.partitions, busy=True)
            fresh = _fresh_of(task, locked)
            if not len(fresh):
                reached = {} if self._durable else _reached_lsns(positions)
                return TaskOutcome(task.partitions, skipped=task.events, reached=reached)
            limit = FailureLimit(self._limits, self._own(locked.streaks))
            assigned = self._router.route(fresh, self._queues.at(conn, locked.queues))
            moved = advances(fresh, task.touched)
            noted = None
            if locked.last is not None:
                noted = RowCounts.summed(
                    full_xids(fresh.facts["xid"], task.next_xid), fresh.facts["events"]
                )
            last = Last(offsets.advance(self._group, positions, moved, noted, self._durable))
            delivered = self._deliver(conn, assigned, trial, limit, locked.holding, last=last)
            if not last.sent:
                trips.run_each(conn, [last.statement])
        events = fresh.events
        outcome = _outcome(task, events, task.events - events, delivered, len(fresh))
        # Only what the target could still lose in a crash is reported.
        return (
            outcome if self._durable else replace(outcome, reached=_reached_lsns(positions, moved))
        )

    def _apply_range(self, conn: Connection, task: Range, trial: Trial) -> TaskOutcome:
        """Claim the partitions, read and apply what is new to them in the range, and move them to its end."""
        positions = offsets.claim(conn, self._group, task.partitions)
        if positions is None or is_early(task, positions):
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
        all_delivered: list[Handled] = []
        found = self._ranges.read(task, lower_bounds, noted)
        for transactions in self._ranges.portions(self.active_jobs.reading(found)):
            events += transactions.events
            count += len(transactions)
            left = transactions
            if task.by_reference:
                left, dead = self._dead_letter_too_large(conn, transactions, task.by_reference)
                all_delivered.append(Handled(dead=tuple(dead)))
            if not len(left):
                continue
            hosts = left.distinct_hosts
            locked = offsets.lock(conn, self._group, list(lower_bounds), hosts)
            limit = FailureLimit(self._limits, self._own(locked.streaks))
            assigned = self._router.route(left, self._queues.at(conn, locked.queues))
            all_delivered.append(self._deliver(conn, assigned, trial, limit, locked.holding))
        ends = last_positions(task, lower_bounds)
        offsets.polled(conn, self._group, positions, ends, task.upto, self._durable)
        return _outcome(task, events, 0, Handled.joined(all_delivered), count)

    def _own(self, streaks: Mapping[str, Streak]) -> dict[str, Streak]:
        """The streaks of the target's handlers. Each sink counts its own: to pass its events is no success of its."""
        return {name: each for name, each in streaks.items() if name not in self._sinks}

    def _deliver(
        self,
        conn: Connection,
        assigned: Assignment,
        trial: Trial,
        limit: FailureLimit,
        holding: Set[str] = frozenset(),
        due: Sequence[DueTransaction] = (),
        last: Last | None = None,
    ) -> Handled:
        """Run the handlers of transactions, and settle those that were not applied.

        Of new ones, those that a key blocks which a deferred transaction holds, of the hosts `holding`, wait behind it.
        Retried ones have their rows in `due`, which hold their keys. `last` may be sent with the handlers' statements.
        """
        transactions = assigned.transactions
        histories = [AttemptHistory.of(each.attempts, each.failing_seconds) for each in due]
        dispositions: Dispositions = {}
        keys: Mapping[int, frozenset[str]] = {}
        if not due:
            dispositions, keys = self._deferral_rules.split(conn, assigned, holding)
        flowing = transactions.besides(dispositions)
        left = assigned.take(flowing) if dispositions else assigned
        found = self._handler_runner.handle(
            conn, left, trial, dict(enumerate(histories)), limit, last
        )
        braked = store_streaks(conn, self._group, left, found, limit)
        dispositions |= {flowing[index]: disposition for index, disposition in found.items()}
        if not dispositions and not due:
            applied = len(transactions)
            record = self._trace_record(assigned, dispositions, histories)
            return Handled(applied, applied, braked=tuple(braked), trace_record=record)
        self._deferral_rules.pass_on(conn, assigned, dispositions, due)
        unsettled = self._unsettled(assigned, dispositions, keys, due, histories)
        dead = self._settlement.store(conn, unsettled)
        self._settlement.log_retries(dispositions.values())
        waiting = [
            index for index, each in dispositions.items() if not isinstance(each, DeadLetter)
        ]
        held = [index for index, each in dispositions.items() if due and holds_keys(each)]
        return Handled(
            len(transactions),
            len(transactions) - len(dispositions),
            int(transactions.facts["events"][waiting].sum()),
            tuple(dead),
            tuple(braked),
            self._trace_record(assigned, dispositions, histories),
            held=frozenset[str]().union(*(due[index].keys for index in held)),
        )

    def _unsettled(
        self,
        assigned: Assignment,
        dispositions: Dispositions,
        keys: Mapping[int, frozenset[str]],
        due: Sequence[DueTransaction],
        histories: Sequence[AttemptHistory],
    ) -> Iterator[Unsettled]:
        """Yield the transactions to settle, in commit order, which is the order of their retries.

        A retried one that is applied has a row to be removed. `keys` are those that are known already.
        """
        indices = range(len(due)) if due else sorted(dispositions)
        for index, rows in zip(indices, assigned.transactions.take(indices), strict=True):
            events, disposition = self._router.events(rows), dispositions.get(index, APPLIED)
            if due:
                yield Unsettled(rows, events, disposition, (), histories[index], due[index])
                continue
            own = keys.get(index)
            if own is None and is_deferred(disposition):
                own = self._deferral_rules.keys(assigned, index)
            yield Unsettled(rows, events, disposition, own or ())

    def _dead_letter_too_large(
        self, conn: Connection, transactions: Transactions, by_reference: Collection[int]
    ) -> tuple[Transactions, list[DeadLetterReport]]:
        """Dead-letter the transactions with a row that was too large to be read; returns the others and the dead.

        `by_reference` are the c_offsets of such rows.
        """
        unsettled = {}
        for index, rows in enumerate(transactions):
            events = self._router.events(rows)
            fault = not_received(rows, events, by_reference, self._settings.source.table)
            if fault is not None:
                unsettled[index] = Unsettled(rows, events, DeadLetter(None, fault))
        if not unsettled:
            return transactions, []
        others = transactions.take(transactions.besides(unsettled))
        return others, self._settlement.store(conn, unsettled.values())

    def _trace_record(
        self, assigned: Assignment, dispositions: Dispositions, histories: Sequence[AttemptHistory]
    ) -> TraceRecord | None:
        if not self._traces:
            return None

        def traced(index: int) -> Traced | None:
            attempts = histories[index].attempts if histories else 0
            return traced_as(dispositions.get(index, APPLIED), bool(histories), attempts)

        return trace_record(assigned, self._handler_runner.names, traced)

    def _retry(self, trial: Trial) -> Handled:
        limits = self._settings.batch
        with self._pool.transaction() as conn:
            self.active_jobs.enters(conn)
            due = deferred_due.claim(conn, self._group, DUE_AT_ONCE, limits.max_bytes)
            stuck: set[str] = set()
            declared = self._queues.current(conn) if due else None
            return Handled.joined(
                [
                    self._retry_run(conn, run, trial, stuck, declared)
                    for run in deferred_due.runs(due)
                ]
            )

    def _retry_run(
        self,
        conn: Connection,
        run: Sequence[DueTransaction],
        trial: Trial,
        stuck: set[str],
        declared: Declared | None,
    ) -> Handled:
        """Retry transactions of one table layout, but for those with a key that is `stuck`.

        Adds the keys of what was not applied to `stuck`.
        """
        due = []
        for each in run:
            if stuck.isdisjoint(each.keys):
                due.append(each)
            else:
                stuck.update(each.keys)
        if not due:
            return Handled()
        limits = self._settings.batch
        transactions = deferred_due.transactions(
            conn, due, limits.max_bytes, limits.spool_directory
        )
        # A replayed transaction that fails is not a new dead letter: it does not count for the failure limit.
        if any(each.dead_transaction is not None for each in due):
            limit = FailureLimit({}, {}, defers=True)
        else:
            streaks = self._own(brakes.streaks(conn, self._group))
            limit = FailureLimit(self._limits, streaks, defers=True)
        assigned = self._router.route(transactions, declared)
        delivered = self._deliver(conn, assigned, trial, limit, due=due)
        stuck.update(delivered.held)
        return delivered


def _report_sample(braked: Braked) -> None:
    """Log one of the transactions with which a handler was stopped: the task is rolled back, so none is dead."""
    log.error(
        "transactions failed, and their handler is stopped",
        extra={
            "handler": braked.handler,
            "failed": braked.failed,
            "transaction_id": braked.transaction_id,
            "hosts": ", ".join(braked.hosts),
            "fault": braked.fault,
        },
    )


def _outcome(
    task: Work, events: int, skipped: int, delivered: Handled, transactions: int
) -> TaskOutcome:
    lost = sum(item.events for item in delivered.dead)
    return TaskOutcome(
        task.partitions,
        events - lost - delivered.deferred_events,
        skipped,
        delivered.deferred_events,
        delivered.dead,
        delivered.braked,
        trace_record=delivered.trace_record,
        transactions=transactions,
    )


def _require_same_source(task: Task, locked: offsets.Locked) -> None:
    """Raise RelayError if the group has followed the source to another timeline since the task was read."""
    if task.source_epoch not in (None, locked.source_epoch):
        raise RelayError(
            "another instance has followed the source to another server or timeline since this one read its batch, of "
            "which nothing was applied: start relay again"
        )


def _fresh_of(task: Task, locked: offsets.Locked) -> Transactions:
    """The transactions that are not in the target yet: `task.transactions` itself if all are new, otherwise a copy.

    A transaction is new if its commit ends after the applied LSN of its partitions and, once the group has polled, if
    the last snapshot does not see it. All partitions that a transaction touches moved together when it was applied.

    Example: partition 0 is at LSN 20, partition 1 at 10; transactions end at 10 (partition 1), 20 (0) and 30 (0 and 1).
    Only the last one is new.
    """
    facts = task.transactions.facts
    seen = None
    if locked.last is not None:
        seen = locked.last.snapshot.sees(full_xids(facts["xid"], task.next_xid))
    end = facts["end_lsn"]
    furthest = max(position.applied_lsn for position in locked.positions.values())
    # Usually everything is new, which one comparison finds out.
    if int(end[0]) > furthest and (seen is None or not seen.any()):
        return task.transactions
    fresh = np.zeros(len(end), np.bool_)
    for partitions, here in _by_partitions(task.transactions, task.touched):
        for partition in partitions:
            fresh |= here & (end > locked.positions[partition].applied_lsn)
    if seen is not None:
        fresh &= ~seen
    return task.transactions if fresh.all() else task.transactions.take(np.flatnonzero(fresh))


def advances(fresh: Transactions, touched: Sequence[tuple[int, ...]]) -> list[offsets.Advance]:
    """The LSN and next offset to which transactions move the partitions that they touch, in order of the partitions.

    `touched` has the partitions of each tuple of hosts, by the index in `fresh.facts["hosts"]`.
    """
    reached: dict[int, tuple[Lsn, int]] = {}
    for partitions, last_offset, end_lsn in _ends(fresh, touched):
        # The greatest bigint has no next one.
        following, end = max(1, min(last_offset, offsets.LAST - 1) + 1), Lsn(end_lsn)
        for partition in partitions:
            lsn, next_offset = reached.get(partition, (Lsn(0), 1))
            reached[partition] = (max(lsn, end), max(next_offset, following))
    return [
        offsets.Advance(partition, *position) for partition, position in sorted(reached.items())
    ]


def _ends(
    fresh: Transactions, touched: Sequence[tuple[int, ...]]
) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yield some partitions, and the last offset and the end of what touches them; each may come several times."""
    facts = fresh.facts
    if len(fresh) > FEW:
        for partitions, here in _by_partitions(fresh, touched):
            some = facts[here]
            yield partitions, int(some["last_offset"].max()), int(some["end_lsn"].max())
        return
    columns = (facts[name].tolist() for name in ("hosts", "last_offset", "end_lsn"))
    for hosts, last_offset, end_lsn in zip(*columns, strict=True):
        yield touched[hosts], last_offset, end_lsn


def _reached_lsns(
    positions: Mapping[int, offsets.PartitionPosition], moved: Iterable[offsets.Advance] = ()
) -> dict[int, Lsn]:
    """The LSN of each partition after a task has `moved` some of them."""
    reached = {partition: position.applied_lsn for partition, position in positions.items()}
    for each in moved:
        before = reached[each.partition_id]
        reached[each.partition_id] = max(before, each.applied_lsn)
    return reached


def _is_ahead(task: Task, positions: Mapping[int, offsets.PartitionPosition]) -> bool:
    """Whether a partition of the task has not reached the end of the batch before (`task.after`)."""
    return any(positions[partition].applied_lsn < lsn for partition, lsn in task.after.items())


def _by_partitions(
    transactions: Transactions, touched: Sequence[tuple[int, ...]]
) -> Iterator[tuple[tuple[int, ...], Mask]]:
    """Group transactions by the partitions they touch: yields partitions, and a mask (bool) of transactions."""
    kinds: dict[tuple[int, ...], int] = {}
    of_hosts = np.array([kinds.setdefault(each, len(kinds)) for each in touched])
    kind = of_hosts[transactions.facts["hosts"]]
    for partitions, number in kinds.items():
        here = kind == number
        if here.any():
            yield partitions, here
