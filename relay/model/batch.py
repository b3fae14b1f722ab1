"""What is applied at once: batches, the tasks that they are split into, and what became of them. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from relay.model.events import Lsn
from relay.model.trace_context import TraceRecord
from relay.model.transactions import Int64Array, Transactions


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """Transactions of a difference that touch the same partitions, in order of their positions.

    `xids` and `positions` are int64, one for each transaction. `unmarked`: they are rows from before the outbox had
    c_xid, and `xids` has the c_offset of each.
    """

    partitions: tuple[int, ...]
    events: int
    xids: Int64Array
    positions: Int64Array
    unmarked: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Transactions of the difference that begins at a snapshot of the group, after one position up to another.

    `floors` are positions that partitions must have reached before. `left` counts the events of the difference after
    the window. `by_reference` are c_offsets of rows that are too large to be read.
    """

    snapshot_id: int
    upto: int
    shares: Sequence[Share]
    lower_bounds: Mapping[int, int]
    left: int = 0
    by_reference: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Whole commits in commit order. `end` may be acknowledged when every transaction is durable.

    A polled batch has a `window` instead of transactions: its tasks read their rows themselves. `source_epoch` is the
    group's when it was received, and `next_xid` about what the source gave next.
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


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """The transactions of a batch that one target transaction applies, and the partitions that they touch.

    `touched[i]` are the partitions of `transactions.hosts[i]`, none where no transaction has these hosts. `floors` is
    the applied_lsn that partitions must have, of those that the target could have forgotten in a crash, `source_epoch`
    and `next_xid` the batch's. `after` is the applied_lsn at which the batch before leaves partitions, if that one is
    still in flight: until they have it, the task is busy.
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
        """How many events the task holds."""
        return self.transactions.events


@dataclass(frozen=True, slots=True, eq=False)
class Range:
    """The shares of a window that join some partitions; a task reads their rows by itself.

    `events` is how many there were when it was planned; the rest as in Window. Of rows with an offset in
    `by_reference`, payload and metadata are not read, and their transactions are dead-lettered.
    """

    partitions: tuple[int, ...]
    snapshot_id: int
    upto: int
    shares: Sequence[Share]
    lower_bounds: Mapping[int, int]
    events: int
    by_reference: tuple[int, ...] = ()


Work = Task | Range
"""What one target transaction applies."""


@dataclass(frozen=True, slots=True)
class JobName:
    """How an engine names the job that applies a batch: `group` for all attempts, `description` for one of them."""

    group: str
    description: str

    @classmethod
    def of(cls, consumer: str, batch: Batch, attempt: int) -> JobName:
        """The name of an attempt, counted from 1, such as `batch 17: 12,345 events, 0/16B3748–0/16B9000, attempt 1`.

        `consumer` is the group whose batch it is: groups may share a Spark session.
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
class DeadLettered:
    """A business transaction that went to the dead letters; `fault` and its `kind` are safe in a log.

    `trace_id` is the publisher's trace, sampled or not.
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
        """What a log line says of it."""
        return {
            "transaction_id": self.transaction_id,
            "lsn": str(self.end_lsn),
            "events": self.events,
            "handler": self.handler,
            "fault": self.fault,
            "trace_id": self.trace_id,
        }


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """What became of one task's events.

    `applied` counts those of transactions that went through, `deferred` those of transactions that wait. `busy`
    says that nothing was done: another instance holds the partitions of a range, a difference is open in those of a
    task, or they have not reached its `after`. `braked` has a line for each sink that the task has stopped.
    `reached` is the applied_lsn at which a task left its partitions, if the target may still lose the commit. `trail`
    is there only with `observe.traces`. `transactions` counts the business transactions that were not skipped;
    `seconds` is how long each handler took.
    """

    partitions: tuple[int, ...]
    applied: int = 0
    skipped: int = 0
    deferred: int = 0
    dead: tuple[DeadLettered, ...] = ()
    braked: tuple[str, ...] = ()
    busy: bool = False
    reached: Mapping[int, Lsn] = field(default_factory=dict)
    trace_record: TraceRecord | None = None
    transactions: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a batch, task by task, which engine ran it, and why that one."""

    engine: str
    tasks: Sequence[TaskOutcome]
    reason: str = ""

    @property
    def deferred(self) -> int:
        """Events of transactions that wait."""
        return sum(task.deferred for task in self.tasks)

    @property
    def applied(self) -> int:
        """Events of transactions that went through."""
        return sum(task.applied for task in self.tasks)

    @property
    def skipped(self) -> int:
        """Events that were in the target already."""
        return sum(task.skipped for task in self.tasks)

    @property
    def busy(self) -> bool:
        """Whether a task was not done."""
        return any(task.busy for task in self.tasks)

    @property
    def reached(self) -> dict[int, Lsn]:
        """Where the tasks left their partitions, if the target may still lose their commits."""
        return {
            partition: reached for task in self.tasks for partition, reached in task.reached.items()
        }

    @property
    def dead(self) -> list[DeadLettered]:
        """The transactions that were dead-lettered."""
        return [dead for task in self.tasks for dead in task.dead]
