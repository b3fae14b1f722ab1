"""Applies one task in one target transaction: the heart of correctness. The same on Spark and inline.

Effects, dead letters and offsets commit together, so redelivery is recognised by the offsets under their row locks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import psycopg
from psycopg_pool import ConnectionPool

from relay import handlers
from relay.config import Settings
from relay.events import (
    DeadTransaction,
    Lsn,
    Range,
    Task,
    TaskOutcome,
    Undecoded,
    Work,
)
from relay.faults import Action, ProcessDied, action_for, describe
from relay.pipeline.routed import Routed, Routing
from relay.source.grouping import Received
from relay.source.rows import OutboxRows, prefer_index
from relay.store import dead_letters, offsets, suspects
from relay.store.connections import open_pool

Connection = psycopg.Connection[Any]


class _HandlerFailed(Exception):
    """A handler raised; the reason is the cause."""

    def __init__(self, handler: handlers.Handler) -> None:
        super().__init__(handler.name)
        self.handler = handler


Apply = Callable[[Connection, list[Routed]], list[DeadTransaction]]
"""Runs the handlers of transactions; returns those that were dead-lettered."""


class Applier:
    """Applies tasks with the configured routes and handlers, each on a pooled connection of its own.

    Raises ConfigurationError when a handler cannot be built.
    """

    def __init__(self, settings: Settings, connections: int) -> None:
        self._group = settings.group
        self._routing = Routing(settings)
        self._handlers = handlers.build(settings.handlers)
        self._connections = connections
        self._pool = open_pool(settings.target_dsn, connections, self._configure)
        self._settings = settings
        self._rows = OutboxRows(settings)

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()
        for name in ("_source", "_suspects"):
            if name in self.__dict__:
                self.__dict__[name].close()

    @cached_property
    def _source(self) -> ConnectionPool[Connection]:
        """Only ranges read the source themselves."""
        return open_pool(self._settings.source_dsn, self._connections, prefer_index)

    @cached_property
    def _suspects(self) -> suspects.Suspects:
        """Only a guarded task takes notes."""
        return suspects.Suspects(self._settings, self._connections)

    def _configure(self, conn: Connection) -> None:
        for handler in self._handlers.values():
            handler.configure(conn)

    def apply(self, task: Work, guarded: bool = False) -> TaskOutcome:
        """Apply the task and commit. Whatever it raises has left no trace in the target.

        First all transactions together. If one of them cannot be applied, again with savepoints: a range that fails is
        halved until the culprit stands alone, and only that one is dead-lettered.

        Guarded, one transaction after the other is noted, applied and its note taken back. One that is noted already
        `crash_limit` times has killed as many processes and is dead-lettered.
        """
        if guarded:
            return self._settled(task, self._apply_guarded)
        try:
            return self._attempt(task, self._apply_together)
        except Exception as error:
            if action_for(_reason(error)) is not Action.DEAD_LETTER:
                raise _reason(error) from None
        return self._settled(task, self._apply_carefully)

    def _settled(self, task: Work, apply: Apply) -> TaskOutcome:
        try:
            return self._attempt(task, apply)
        except _HandlerFailed as failure:
            raise _reason(failure) from None

    def _attempt(self, task: Work, apply: Apply) -> TaskOutcome:
        with self._pool.connection() as conn, conn.transaction():
            if isinstance(task, Range):
                return self._apply_range(conn, task, apply)
            cursors = offsets.lock(conn, self._group, task.partitions)
            fresh = _fresh(task, cursors)
            if not fresh:
                return TaskOutcome(task.partitions, skipped=task.events)
            dead = self._deliver(conn, [transaction for transaction, _ in fresh], apply)
            offsets.advance(conn, self._group, _advances(fresh))
        events = sum(len(transaction.tuples) for transaction, _ in fresh)
        return _outcome(task, events, task.events - events, dead)

    def _apply_range(self, conn: Connection, task: Range, apply: Apply) -> TaskOutcome:
        """Claim the partitions, read what is still to be applied of them, apply it and move them behind it."""
        cursors = offsets.claim(conn, self._group, task.partitions)
        if cursors is None:
            return TaskOutcome(task.partitions, busy=True)
        floors = {
            partition: cursor.next_offset
            for partition, cursor in cursors.items()
            if cursor.next_offset <= task.upto
        }
        if not floors:
            return TaskOutcome(task.partitions)
        events = 0
        dead: list[DeadTransaction] = []
        with self._source.connection() as source:
            for transactions in self._portions(self._rows.commits(source, floors, task.upto)):
                events += sum(len(transaction.tuples) for transaction in transactions)
                dead += self._deliver(conn, transactions, apply)
        offsets.hand_over(conn, self._group, list(floors), task.upto + 1)
        return _outcome(task, events, 0, dead)

    def _portions(self, commits: Iterable[Received]) -> Iterator[list[Undecoded]]:
        """Commits, as many together as fit into memory: a range is one target transaction however large it is."""
        limits = self._settings.batch
        portion: list[Undecoded] = []
        events = size = 0
        for received in commits:
            portion += received.transactions
            events += received.events
            size += received.size
            if events >= limits.max_events or size >= limits.max_bytes or received.spooled:
                yield portion
                portion, events, size = [], 0, 0
        if portion:
            yield portion

    def _deliver(
        self, conn: Connection, transactions: Sequence[Undecoded], apply: Apply
    ) -> list[DeadTransaction]:
        """Route transactions and run their handlers; returns what was dead-lettered."""
        routed = self._routing.route(transactions)
        dead = [self._bury(conn, item, None, item.refusal) for item in routed if item.refusal]
        deliverable = [item for item in routed if not item.refusal]
        return dead + apply(conn, deliverable)

    def _apply_together(self, conn: Connection, routed: list[Routed]) -> list[DeadTransaction]:
        """Apply all of them at once; nothing is dead-lettered."""
        self._run_handlers(conn, routed)
        return []

    def _apply_guarded(self, conn: Connection, routed: list[Routed]) -> list[DeadTransaction]:
        """Apply them one by one, each under a note that a crash would leave behind."""
        dead: list[DeadTransaction] = []
        for item in routed:
            name = suspects.name_of(item.undecoded)
            deaths = self._suspects.deaths(name)
            if deaths >= self._settings.crash_limit:
                reason = ProcessDied(f"{deaths} processes died while they handled it")
                dead.append(self._bury(conn, item, None, reason))
            else:
                self._suspects.note(name)
                dead += self._apply_carefully(conn, [item])
            self._suspects.clear(name)
        return dead

    def _apply_carefully(self, conn: Connection, routed: list[Routed]) -> list[DeadTransaction]:
        """Apply a range under a savepoint, halving it on failure; returns what was dead-lettered."""
        if not routed:
            return []
        try:
            with conn.transaction():
                self._run_handlers(conn, routed, settle=True)
            return []
        except _HandlerFailed as failure:
            reason = _reason(failure)
            if action_for(reason) is not Action.DEAD_LETTER:
                raise
            if len(routed) == 1:
                if isinstance(reason, psycopg.ProgrammingError):
                    # The statement itself may have broken since the start; then no event is to blame.
                    failure.handler.check(conn)
                return [self._bury(conn, routed[0], failure.handler.name, reason)]
        middle = len(routed) // 2
        return self._apply_carefully(conn, routed[:middle]) + self._apply_carefully(
            conn, routed[middle:]
        )

    def _run_handlers(
        self, conn: Connection, routed: Sequence[Routed], settle: bool = False
    ) -> None:
        """Each handler in the configuration's order, over all of its transactions.

        To settle is to check deferred constraints now, while it is known whose doing it is.
        """
        if settle:
            conn.execute("set constraints all deferred")
        for name, handler in self._handlers.items():
            work = [item.parts[name] for item in routed if name in item.parts]
            if not work:
                continue
            try:
                handler.apply(conn, work)
                if settle:
                    conn.execute("set constraints all immediate")
                    conn.execute("set constraints all deferred")
            except Exception as error:
                raise _HandlerFailed(handler) from error

    def _bury(
        self, conn: Connection, item: Routed, handler: str | None, error: BaseException
    ) -> DeadTransaction:
        dead_letters.bury(conn, self._group, item.events, handler, error)
        return DeadTransaction(
            item.undecoded.transaction_id,
            item.undecoded.commit.end_lsn,
            len(item.events),
            handler,
            describe(error),
        )


def _outcome(task: Work, events: int, skipped: int, dead: Sequence[DeadTransaction]) -> TaskOutcome:
    lost = sum(item.events for item in dead)
    return TaskOutcome(task.partitions, events - lost, skipped, tuple(dead))


def _reason(error: BaseException) -> BaseException:
    return error.__cause__ or error if isinstance(error, _HandlerFailed) else error


def _fresh(
    task: Task, cursors: Mapping[int, offsets.Cursor]
) -> Sequence[tuple[Undecoded, tuple[int, ...]]]:
    """The transactions that are not in the target yet, with the partitions that they touch."""
    planned = list(zip(task.transactions, task.touched, strict=True))
    applied = max(cursor.applied_lsn for cursor in cursors.values())
    handover = max(cursor.handover_offset for cursor in cursors.values())
    oldest = min((t.last_offset for t in task.transactions if t.last_offset), default=handover)
    if task.transactions[0].commit.end_lsn > applied and oldest >= handover:
        return planned
    return [item for item in planned if not _applied(*item, cursors)]


def _applied(
    transaction: Undecoded, touched: Sequence[int], cursors: Mapping[int, offsets.Cursor]
) -> bool:
    """Whether a redelivered transaction is in the target already.

    The commit's position says so, or its offset where another way than this WAL was taken before. Partitions that a
    transaction touches moved together when it was applied, so they agree.
    """
    end = transaction.commit.end_lsn
    last = transaction.last_offset
    return all(
        end <= cursors[partition].applied_lsn or 0 < last < cursors[partition].handover_offset
        for partition in touched
    )


def _advances(fresh: Sequence[tuple[Undecoded, tuple[int, ...]]]) -> list[offsets.Advance]:
    reached: dict[int, tuple[int, Lsn]] = {}
    for transaction, touched in fresh:
        for partition in touched:
            next_offset, lsn = reached.get(partition, (1, Lsn(0)))
            reached[partition] = (
                max(next_offset, transaction.last_offset + 1),
                max(lsn, transaction.commit.end_lsn),
            )
    return [
        offsets.Advance(partition, *position) for partition, position in sorted(reached.items())
    ]
