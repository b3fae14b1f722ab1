"""Batches, the tasks into which they are split, and their outcomes. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from relay.model.events import Lsn
from relay.model.snapshots import Snapshot, Xids
from relay.model.trace_context import TraceRecord
from relay.model.transactions import Int64Array, Mask, Transactions


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """Transactions of a difference that touch the same partitions, in order of their positions.

    `xids` and `positions` are int64, one element for each transaction. With `unmarked`, the elements stand for rows
    that were inserted before the outbox had c_xid, and `xids` has their c_offset.
    """

    partitions: tuple[int, ...]
    events: int
    xids: Int64Array
    positions: Int64Array
    unmarked: bool = False

    def among(self, xids: Xids) -> Mask:
        """Which of the transactions are among some (full xids, in any order)."""
        if self.unmarked:
            return np.zeros(len(self.xids), np.bool_)
        return np.isin(self.xids, xids)

    def seen_by(self, snapshot: Snapshot) -> Mask:
        """Which of the transactions a snapshot sees."""
        if self.unmarked:
            return np.full(len(self.xids), not snapshot.is_beginning)
        return snapshot.sees(self.xids)


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """The transactions of a difference after one position and up to another, `upto`.

    The difference begins at the group's snapshot `snapshot_id`. `lower_bounds` are positions that partitions must
    already have reached. `left` counts the events of the difference after the window. `by_reference` are the c_offsets
    of rows that are too large to be read.
    """

    snapshot_id: int
    upto: int
    shares: Sequence[Share]
    lower_bounds: Mapping[int, int]
    left: int = 0
    by_reference: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Whole commits in commit order. relay may confirm `end` when every transaction is durable.

    A polled batch has a `window` instead of transactions: its tasks read their rows. `size` is in bytes. `source_epoch`
    is the group's epoch when the batch was received, `next_xid` approximately the source's next transaction id, and
    `codec` the one of its encoding, in whose bytes hosts are hashed.
    """

    number: int
    transactions: Transactions
    end: Lsn
    events: int
    size: int
    spooled: bool = False
    window: Window | None = None
    source_epoch: int | None = None
    next_xid: int = 0
    codec: str = "utf-8"


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """The transactions of a batch that one commit of the target applies, and the partitions that they touch.

    `touched[i]` are the partitions of `transactions.hosts[i]`, empty where no transaction has these hosts.
    `lower_bounds` is the applied_lsn that partitions must have, for those whose offsets the target may have lost in a
    crash; `source_epoch` and `next_xid` are the batch's. `after` is the applied_lsn that partitions get from the
    previous batch, if that is in flight: until they have it, the task is busy.
    """

    partitions: tuple[int, ...]
    transactions: Transactions
    touched: Sequence[tuple[int, ...]]
    lower_bounds: Mapping[int, Lsn] = field(default_factory=dict)
    source_epoch: int | None = None
    next_xid: int = 0
    after: Mapping[int, Lsn] = field(default_factory=dict)

    @property
    def events(self) -> int:
        """The number of events of the task."""
        return self.transactions.events


@dataclass(frozen=True, slots=True, eq=False)
class Range:
    """The shares of a window that one commit of the target applies; the task reads their rows from the source.

    `events` is their number when the range was planned; the other fields are as in Window. Payload and metadata of rows
    with a c_offset in `by_reference` are not read, and the transactions of these rows are dead-lettered.
    """

    partitions: tuple[int, ...]
    snapshot_id: int
    upto: int
    shares: Sequence[Share]
    lower_bounds: Mapping[int, int]
    events: int
    by_reference: tuple[int, ...] = ()


Work = Task | Range
"""The input of a task: what one commit of the target applies."""


@dataclass(frozen=True, slots=True)
class JobName:
    """The names of the job that applies a batch: `group` for all attempts, `description` for one of them."""

    group: str
    description: str

    @classmethod
    def of(cls, consumer: str, batch: Batch, attempt: int) -> JobName:
        """The name of an attempt, counted from 1, such as `batch 17: 12,345 events, 0/16B3748–0/16B9000, attempt 1`.

        `consumer` is the group of the batch: groups may share a Spark session.
        """
        if batch.window:
            span = f"c_offset up to {batch.window.upto}"
        else:
            span = f"{Lsn(batch.transactions.facts['end_lsn'][0])}–{batch.end}"
        return cls(
            f"relay {consumer} batch {batch.number}",
            f"batch {batch.number}: {batch.events:,} events, {span}, attempt {attempt}",
        )


@dataclass(frozen=True, slots=True)
class DeadLetterReport:
    """What is logged and counted of a transaction that was dead-lettered; `fault` and `kind` are safe in a log.

    `trace_id` is the id of the publisher's trace, sampled or not.
    """

    transaction_id: str | None
    end_lsn: Lsn
    events: int
    handler: str | None
    fault: str
    trace_id: str | None = None
    kind: str = ""

    @property
    def fields(self) -> dict[str, object]:
        """The fields of its log line."""
        return {
            "transaction_id": self.transaction_id,
            # A polled transaction has no LSN.
            "lsn": str(self.end_lsn) if self.end_lsn else None,
            "events": self.events,
            "handler": self.handler,
            "fault": self.fault,
            "trace_id": self.trace_id,
        }


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """The outcome of one task.

    `applied` counts the events of applied transactions, `skipped` the events that the target already had, `deferred`
    those of deferred transactions. `busy` says that the task did nothing: another instance holds the
    partitions of a range, a difference is open in those of a task, or they have not reached its `after`. `braked` has a
    line for each handler that the task stopped. `reached` is the applied_lsn of the task's partitions, if the target
    may still lose the commit. `trace_record` is set only with `observe.traces`. `transactions` counts the business
    transactions that were not skipped; `seconds` has the seconds that each handler took.
    """

    partitions: tuple[int, ...]
    applied: int = 0
    skipped: int = 0
    deferred: int = 0
    dead: tuple[DeadLetterReport, ...] = ()
    braked: tuple[str, ...] = ()
    busy: bool = False
    reached: Mapping[int, Lsn] = field(default_factory=dict)
    trace_record: TraceRecord | None = None
    transactions: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a batch: those of its tasks, the engine that ran it, and the reason for that engine."""

    engine: str
    tasks: Sequence[TaskOutcome]
    reason: str = ""

    @property
    def deferred(self) -> int:
        """The number of events of deferred transactions."""
        return sum(task.deferred for task in self.tasks)

    @property
    def applied(self) -> int:
        """The number of applied events."""
        return sum(task.applied for task in self.tasks)

    @property
    def skipped(self) -> int:
        """The number of events that the target already had."""
        return sum(task.skipped for task in self.tasks)

    @property
    def busy(self) -> bool:
        """Whether a task was busy."""
        return any(task.busy for task in self.tasks)

    @property
    def did_nothing(self) -> bool:
        """Whether no task has applied, skipped, deferred or dead-lettered anything."""
        return not any(
            task.applied or task.skipped or task.deferred or task.dead for task in self.tasks
        )

    @property
    def reached(self) -> dict[int, Lsn]:
        """The applied_lsn of each partition after the tasks, if the target may still lose their commits."""
        return {
            partition: reached for task in self.tasks for partition, reached in task.reached.items()
        }

    @property
    def dead(self) -> list[DeadLetterReport]:
        """The transactions that were dead-lettered."""
        return [dead for task in self.tasks for dead in task.dead]
