"""Applies one task in one target transaction: the heart of correctness. The same on Spark and inline.

Effects, dead letters and offsets commit together, so redelivery is recognised by the offsets under their row locks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import psycopg
from psycopg_pool import ConnectionPool

from relay import handlers
from relay.batch import DeadTransaction, Range, Task, TaskOutcome, Work
from relay.config import Settings
from relay.events import Lsn
from relay.faults import Action, ProcessDied, action_for, describe
from relay.pipeline.routed import Parts, Routing
from relay.source.rows import OutboxRows, prefer_index
from relay.store import dead_letters, offsets, suspects
from relay.store.connections import open_pool
from relay.transactions import Mask, Transactions, Undecoded

Connection = psycopg.Connection[Any]


class _HandlerFailed(Exception):
    """A handler raised; the reason is the cause."""

    def __init__(self, handler: handlers.Handler) -> None:
        super().__init__(handler.name)
        self.handler = handler


Apply = Callable[[Connection, Transactions, Parts], list[DeadTransaction]]
"""Runs the handlers of transactions that were routed; returns those that were dead-lettered."""


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

    def connect(self) -> None:
        """Open a connection now instead of with the first task. Raises psycopg.Error."""
        with self._pool.connection():
            pass

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
            if not len(fresh):
                return TaskOutcome(task.partitions, skipped=task.events)
            dead = self._deliver(conn, fresh, apply)
            offsets.advance(conn, self._group, _advances(fresh, task.touched))
        events = fresh.events
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
                events += transactions.events
                dead += self._deliver(conn, transactions, apply)
        offsets.hand_over(conn, self._group, list(floors), task.upto + 1)
        return _outcome(task, events, 0, dead)

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
        self, conn: Connection, transactions: Transactions, apply: Apply
    ) -> list[DeadTransaction]:
        """Run the handlers of transactions; returns what was dead-lettered."""
        deliverable, parts, refused = self._routing.route(transactions)
        dead = [
            self._bury(conn, transactions[place], None, refusal)
            for place, refusal in refused.items()
        ]
        return dead + apply(conn, deliverable, parts)

    def _apply_together(
        self, conn: Connection, _: Transactions, parts: Parts
    ) -> list[DeadTransaction]:
        """Apply all of them at once; nothing is dead-lettered."""
        self._run_handlers(conn, parts)
        return []

    def _apply_guarded(
        self, conn: Connection, transactions: Transactions, _: Parts
    ) -> list[DeadTransaction]:
        """Apply them one by one, each under a note that a crash would leave behind."""
        dead: list[DeadTransaction] = []
        for place, transaction in enumerate(transactions):
            name = suspects.name_of(transaction)
            deaths = self._suspects.deaths(name)
            if deaths >= self._settings.crash_limit:
                reason = ProcessDied(f"{deaths} processes died while they handled it")
                dead.append(self._bury(conn, transaction, None, reason))
            else:
                self._suspects.note(name)
                dead += self._route_and_apply_carefully(conn, transactions.part(place, place + 1))
            self._suspects.clear(name)
        return dead

    def _apply_carefully(
        self, conn: Connection, transactions: Transactions, parts: Parts
    ) -> list[DeadTransaction]:
        """Apply a range under a savepoint, halving it on failure; returns what was dead-lettered."""
        if not len(transactions):
            return []
        try:
            with conn.transaction():
                self._run_handlers(conn, parts, settle=True)
            return []
        except _HandlerFailed as failure:
            reason = _reason(failure)
            if action_for(reason) is not Action.DEAD_LETTER:
                raise
            if len(transactions) == 1:
                if isinstance(reason, psycopg.ProgrammingError):
                    # The statement itself may have broken since the start; then no event is to blame.
                    failure.handler.check(conn)
                return [self._bury(conn, transactions[0], failure.handler.name, reason)]
        middle = len(transactions) // 2
        halves = transactions.part(0, middle), transactions.part(middle, len(transactions))
        return [dead for half in halves for dead in self._route_and_apply_carefully(conn, half)]

    def _route_and_apply_carefully(
        self, conn: Connection, transactions: Transactions
    ) -> list[DeadTransaction]:
        deliverable, parts, _ = self._routing.route(transactions)
        return self._apply_carefully(conn, deliverable, parts)

    def _run_handlers(self, conn: Connection, parts: Parts, settle: bool = False) -> None:
        """Each handler in the configuration's order, over all of its transactions.

        To settle is to check deferred constraints now, while it is known whose doing it is.
        """
        if settle:
            conn.execute("set constraints all deferred")
        for name, handler in self._handlers.items():
            if name not in parts:
                continue
            try:
                handler.apply(conn, parts[name])
                if settle:
                    conn.execute("set constraints all immediate")
                    conn.execute("set constraints all deferred")
            except Exception as error:
                raise _HandlerFailed(handler) from error

    def _bury(
        self, conn: Connection, transaction: Undecoded, handler: str | None, error: BaseException
    ) -> DeadTransaction:
        events = self._routing.events(transaction)
        dead_letters.bury(conn, self._group, events, handler, error)
        return DeadTransaction(
            transaction.transaction_id,
            transaction.commit.end_lsn,
            len(events),
            handler,
            describe(error),
        )


def _outcome(task: Work, events: int, skipped: int, dead: Sequence[DeadTransaction]) -> TaskOutcome:
    lost = sum(item.events for item in dead)
    return TaskOutcome(task.partitions, events - lost, skipped, tuple(dead))


def _reason(error: BaseException) -> BaseException:
    return error.__cause__ or error if isinstance(error, _HandlerFailed) else error


def _fresh(task: Task, cursors: Mapping[int, offsets.Cursor]) -> Transactions:
    """The transactions that are not in the target yet.

    The commit's position says so, or its offset where another way than this WAL was taken before. Partitions that a
    transaction touches moved together when it was applied, so they agree.
    """
    end, last = task.transactions.facts["end_lsn"], task.transactions.facts["last_offset"]
    fresh = np.zeros(len(end), np.bool_)
    for partitions, here in _by_partitions(task.transactions, task.touched):
        for cursor in map(cursors.__getitem__, partitions):
            by_offset = (last > 0) & (last < cursor.handover_offset)
            fresh |= here & (end > cursor.applied_lsn) & ~by_offset
    return task.transactions if fresh.all() else task.transactions.take(np.flatnonzero(fresh))


def _advances(fresh: Transactions, touched: Sequence[tuple[int, ...]]) -> list[offsets.Advance]:
    reached: dict[int, tuple[int, Lsn]] = {}
    for partitions, here in _by_partitions(fresh, touched):
        following = max(1, int(fresh.facts["last_offset"][here].max()) + 1)
        end = Lsn(fresh.facts["end_lsn"][here].max())
        for partition in partitions:
            next_offset, lsn = reached.get(partition, (1, Lsn(0)))
            reached[partition] = (max(next_offset, following), max(lsn, end))
    return [
        offsets.Advance(partition, *position) for partition, position in sorted(reached.items())
    ]


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
