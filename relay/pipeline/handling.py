"""Runs transactional handlers inside a database transaction of the target, and isolates the transactions that fail."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property, partial
from secrets import token_hex
from typing import assert_never

import psycopg
from psycopg.pq import TransactionStatus

from relay import handlers
from relay.config.handlers import PythonHandler, QueueHandler, RetrySettings
from relay.config.settings import Settings
from relay.event_types.registry import registered
from relay.event_types.upcasting import Upcasting
from relay.faults import (
    Drop,
    FaultAction,
    HandlerOccupied,
    HandlerTimeout,
    ProcessDied,
    StatementTimeout,
    TransientFault,
    action_for,
    describe,
    ends_session,
    may_be_of_one,
    timed_out,
    transaction_ended,
)
from relay.handlers import sql
from relay.model.dispositions import (
    BLOCKED,
    NEW,
    AttemptHistory,
    DeadLetter,
    Dispositions,
    Failed,
    RetryLater,
    holds_keys,
)
from relay.model.transactions import Routed
from relay.pipeline.active_jobs import ActiveJobs
from relay.pipeline.deferral import DeferralRules
from relay.pipeline.failure_limit import FailureLimit
from relay.pipeline.retry_policy import DropLog, RetryPolicy
from relay.pipeline.routing import Assignment, Parts
from relay.queues.declared import DeclaredQueues
from relay.queues.filling import QUEUES, Filling
from relay.runtime.retry import LONGEST_WAIT_SECONDS
from relay.runtime.timed import Occupied, Overrun, TimedThreads
from relay.store import suspects, trips
from relay.store.connections import Connection
from relay.store.handler_sessions import end_session
from relay.store.session_settings import PIN_PATH_LOCALLY, USERS_PATH_LOCALLY, users_path

log = logging.getLogger(__name__)

_OF_QUEUES = RetrySettings(max_wait=30.0)
"""How a transaction waits for a queue that does not exist: for ever, and not long once it does."""

_USERS_PATH, _PIN_PATH = map(trips.BoundStatement, (USERS_PATH_LOCALLY, PIN_PATH_LOCALLY))

Histories = Mapping[int, AttemptHistory]
"""The earlier attempts of transactions, by index."""


class HandlerFailed(Exception):
    """A handler raised; the reason is the cause.

    `suspect` is the name of the transaction if it was tried alone, and `seconds` is how long that took.
    """

    def __init__(self, handler: handlers.Handler) -> None:
        super().__init__(handler.name)
        self.handler = handler
        self.suspect: str | None = None
        self.seconds = 0.0


@dataclass(slots=True)
class Last:
    """The statement that ends a task, and whether it was sent already."""

    statement: trips.BoundStatement
    sent: bool = False


class HandlingMode(Enum):
    """How handlers are run inside a target transaction."""

    TOGETHER = auto()
    """All transactions at once; the first fault is raised."""
    ISOLATED = auto()
    """Under a savepoint; a range that fails is halved until single transactions fail."""
    HALVED = auto()
    """ISOLATED, but halved at once, since the whole range is known to time out."""
    ALONE = auto()
    """One transaction at a time, since the session ends with one of them."""
    GUARDED = auto()
    """ALONE, each under a note that remains if the process crashes."""


@dataclass(frozen=True, slots=True)
class Trial:
    """How a task is tried, and the transactions that are not, by name: with each of them a session has ended."""

    mode: HandlingMode
    known: Mapping[str, HandlerFailed] = field(default_factory=dict)


def build(settings: Settings, queues: DeclaredQueues) -> dict[str, handlers.Handler]:
    """Build the transactional handlers; returns them by name, in the configuration's order.

    `queues` are those that the current task has read. Raises ConfigurationError for a handler that cannot be built.
    """
    upcaster = Upcasting(registered(settings.events))
    built = handlers.build(
        settings.handlers, settings.source.sql_types, upcaster, settings.source.max_hops
    )
    for name, each in settings.handlers.items():
        if isinstance(each, QueueHandler):
            queue = None if name == QUEUES else each.queue or name
            built[name] = Filling(name, lambda: queues.known, upcaster, queue)
    return {name: built[name] for name in settings.handlers if name in built}


class HandlerRunner:
    """Runs the transactional handlers. Raises ConfigurationError when one cannot be built."""

    def __init__(
        self,
        settings: Settings,
        deferral_rules: DeferralRules,
        connections: int,
        queues: DeclaredQueues,
    ) -> None:
        self._settings = settings
        self._deferral_rules = deferral_rules
        self._connections = connections
        self._transactional = build(settings, queues)
        self._code = {
            name for name, each in settings.handlers.items() if isinstance(each, PythonHandler)
        }
        self._defers = {
            name: RetryPolicy(name, each.retry if isinstance(each, PythonHandler) else _OF_QUEUES)
            for name, each in settings.handlers.items()
            if isinstance(each, PythonHandler | QueueHandler)
        }
        self._unlimited = {
            name: RetryPolicy(name, RetrySettings())
            for name in self._transactional
            if name not in self._defers
        }
        self._succeeded_at: dict[str, float] = {}
        self._seconds = {
            name: each.timeout
            for name, each in settings.handlers.items()
            if isinstance(each, PythonHandler)
        }
        self._threads = TimedThreads("python handler")
        self._losses: Counter[str] = Counter()
        self._drops = DropLog(log)
        self.active_jobs = ActiveJobs()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the transactional handlers, in the configuration's order, the declared queues last."""
        return tuple(self._transactional)

    def note_orderly_exit(self) -> None:
        """Note that the process ends itself, which is no crash. Raises psycopg.Error."""
        if "_suspects" in self.__dict__:
            self._suspects.note_orderly_exit()

    def close(self) -> None:
        """Close the connections that guarded tasks use, and end the threads of Python handlers."""
        self._threads.close()
        if "_suspects" in self.__dict__:
            self._suspects.close()

    def configure(self, conn: Connection) -> None:
        """Prepare a new connection."""
        for handler in self._transactional.values():
            handler.configure(conn)

    @cached_property
    def _suspects(self) -> suspects.Suspects:
        """The notes of guarded tasks; opened with the first one."""
        return suspects.Suspects(self._settings, self._connections)

    def following(self, trial: Trial, error: BaseException) -> Trial | None:
        """The trial that may find the transactions which have caused `error`; None without one.

        Where a session ends with a transaction, that one is left out once it has failed alone: the commit without it
        shows that the target answers for the others.
        """
        reason, known = reason_of(error), trial.known
        if not ends_session(reason):
            if trial.mode is not HandlingMode.TOGETHER or not self._can_isolate(error):
                return None
            slow = timed_out(reason)
            return Trial(HandlingMode.HALVED if slow else HandlingMode.ISOLATED, known)
        if trial.mode not in (HandlingMode.ALONE, HandlingMode.GUARDED):
            return Trial(HandlingMode.ALONE, known)
        if not isinstance(error, HandlerFailed) or error.suspect in {None, *known}:
            return None
        return Trial(trial.mode, {**known, str(error.suspect): error})

    def _can_isolate(self, error: BaseException) -> bool:
        """Whether savepoints can find the transactions that have caused `error`.

        What deferred triggers raise at the commit is of no handler until its constraints are checked.
        """
        reason = reason_of(error)
        is_of_one = action_for(reason) is FaultAction.DEAD_LETTER or may_be_of_one(reason)
        return is_of_one or self._is_deferred(error)

    def _is_deferred(self, error: BaseException) -> bool:
        return isinstance(error, HandlerFailed) and self._is_retried(
            error.handler.name, reason_of(error)
        )

    def _is_retried(self, handler: str, error: BaseException) -> bool:
        """Whether a fault of a handler defers its transaction, and does not let the whole task fail or die."""
        if may_be_of_one(error):
            return True
        policy = self._defers.get(handler)
        if policy is None:
            return False
        # Memory may be short for all, but more often a single event asks for it all.
        if isinstance(error, TransientFault | MemoryError):
            return True
        return policy.on_any and policy.retries(error) and not _is_of_target(error)

    def handle(
        self,
        conn: Connection,
        assigned: Assignment,
        trial: Trial,
        histories: Histories,
        limit: FailureLimit,
        last: Last | None = None,
    ) -> Dispositions:
        """Run the transactional handlers; returns the dispositions of the transactions that were not applied, by index.

        A transaction that is not applied has no effects in the target. If a handler fails on too many transactions in a
        row, raises Braked or, if `limit.defers`, defers them. `last` may be sent with what is sent here last: nothing
        of the user runs after that.
        """
        refused = assigned.refused
        dispositions: Dispositions = {
            index: DeadLetter(None, refusal) for index, refusal in refused.items()
        }
        indices = assigned.transactions.besides(refused)
        deliverable = assigned.take(indices) if refused else assigned
        known = {new: histories[old] for new, old in enumerate(indices) if old in histories}
        # With TOGETHER all transactions are applied or none, so that none can be blocked.
        if trial.mode is HandlingMode.TOGETHER and not limit.defers:
            self._together(conn, deliverable, last)
            found = {}
        else:
            found = self._apply_reliable(conn, deliverable, trial, known, limit)
        return dispositions | {indices[index]: disposition for index, disposition in found.items()}

    def _apply_reliable(
        self,
        conn: Connection,
        assigned: Assignment,
        trial: Trial,
        histories: Histories,
        limit: FailureLimit,
    ) -> Dispositions:
        """Run handlers whose failures may block later transactions; without these, run the rest again."""
        dispositions: Dispositions = {}
        rest, known = assigned, histories
        while True:
            indices = assigned.transactions.besides(dispositions)
            if dispositions:
                rest = assigned.take(indices)
                known = {new: histories[old] for new, old in enumerate(indices) if old in histories}
            limit.begin()
            with conn.transaction(_savepoint()) as savepoint:
                found = self._with_retries(self._run(conn, rest, trial, limit), known, limit)
                blocked = self._blocked(rest, found)
                found |= blocked
                if blocked:
                    raise psycopg.Rollback(savepoint)
            dispositions |= {indices[index]: disposition for index, disposition in found.items()}
            if not blocked:
                return dispositions

    def _with_retries(
        self, found: Dispositions, histories: Histories, limit: FailureLimit
    ) -> Dispositions:
        """Decide on retries: replace the dead letters of handlers that may be retried by what `disposition_of` says."""
        dispositions = dict(found)
        for index, failed in sorted(found.items()):
            before = histories.get(index, NEW)
            if isinstance(failed, RetryLater):
                dispositions[index] = replace(failed, attempts=before.attempts + 1)
            elif (
                isinstance(failed, DeadLetter)
                and failed.handler is not None
                and (failed.handler in self._defers or may_be_of_one(failed.error))
            ):
                dispositions[index] = self._disposition_of(
                    failed.handler, failed.error, before, limit
                )
            elif isinstance(failed, DeadLetter) and failed.handler is not None:
                dispositions[index] = replace(failed, attempts=before.attempts + 1)
        return dispositions

    def _disposition_of(
        self, handler: str, error: BaseException, before: AttemptHistory, limit: FailureLimit
    ) -> Failed:
        policy = self._defers.get(handler) or self._unlimited[handler]
        is_called = not isinstance(error, HandlerOccupied)
        if may_be_of_one(error) and not (is_called and self._is_proven(handler, before, limit)):
            after = policy.wait_uncounted(error, before)
            return RetryLater(handler, error, after, before.attempts)
        attempts = before.attempts + 1
        blocks_key = self._settings.handlers[handler].blocks_key
        disposition = policy.disposition_of(error, attempts, before, blocks_key)
        # The failure limit has counted other dead letters when they happened.
        exhausted = isinstance(disposition, DeadLetter) and self._is_retried(handler, error)
        if exhausted and limit.defers and limit.stops_late(handler, error):
            return RetryLater(handler, error, LONGEST_WAIT_SECONDS, attempts)
        return disposition

    def _is_proven(self, handler: str, before: AttemptHistory, limit: FailureLimit) -> bool:
        """Whether a fault of the target is the transaction's: the handler has applied others since it first failed.

        Otherwise it may be one of all, such as a lock on a table of the handler, and the attempt does not count.
        """
        since = limit.began if before.since is None else before.since
        return before.attempts > 0 or self._succeeded_at.get(handler, 0.0) >= since

    def _note_success(self, names: Iterable[str]) -> None:
        now = time.monotonic()
        self._succeeded_at.update(dict.fromkeys(names, now))

    def _blocked(self, assigned: Assignment, dispositions: Dispositions) -> Dispositions:
        """The transactions that an earlier one of `dispositions` blocks, since it holds one of their keys."""
        blocking = {index for index, disposition in dispositions.items() if holds_keys(disposition)}
        held: set[str] = set()
        blocked: Dispositions = {}
        for index in range(min(blocking, default=len(assigned)), len(assigned)):
            keys = self._deferral_rules.keys(assigned, index)
            if index in blocking:
                held |= keys
            elif index not in dispositions and not held.isdisjoint(keys):
                held |= keys
                blocked[index] = BLOCKED
        return blocked

    def _run(
        self, conn: Connection, assigned: Assignment, trial: Trial, limit: FailureLimit
    ) -> Dispositions:
        match trial.mode:
            case HandlingMode.TOGETHER:
                self._together(conn, assigned, None)
                return {}
            case HandlingMode.ISOLATED:
                return self._isolated(conn, assigned, limit, len(assigned))
            case HandlingMode.HALVED:
                return self._isolated(conn, assigned, limit, max(1, len(assigned) // 2))
            case HandlingMode.ALONE:
                return self._alone(conn, assigned, limit, trial)
            case HandlingMode.GUARDED:
                return self._guarded(conn, assigned, limit, trial)
        assert_never(trial.mode)

    def _together(self, conn: Connection, assigned: Assignment, last: Last | None) -> None:
        self._call(conn, assigned.parts, last=last)
        self._note_success(assigned.parts)

    def _alone(
        self, conn: Connection, assigned: Assignment, limit: FailureLimit, trial: Trial
    ) -> Dispositions:
        """Apply one transaction at a time, but for those that are known to end the session."""
        dispositions: Dispositions = {}
        for index in range(len(assigned)):
            one = self._isolated(conn, assigned.part(index, index + 1), limit, 1, trial)
            dispositions.update((index, disposition) for disposition in one.values())
        return dispositions

    def _guarded(
        self, conn: Connection, assigned: Assignment, limit: FailureLimit, trial: Trial
    ) -> Dispositions:
        """Apply one transaction at a time, each under a note that remains if the process crashes."""
        dispositions: Dispositions = {}
        former: str | None = None
        try:
            for index, transaction in enumerate(assigned.transactions):
                name = suspects.name_of(transaction)
                if self._suspects.note_next(former, name, self._settings.crash_limit):
                    with self._suspects.in_flight(name):
                        part = assigned.part(index, index + 1)
                        one = self._isolated(conn, part, limit, 1, trial)
                    dispositions.update((index, disposition) for disposition in one.values())
                else:
                    died = f"{self._settings.crash_limit} processes died while they handled it"
                    dispositions[index] = DeadLetter(
                        None, ProcessDied(died), self._settings.crash_limit
                    )
                former = name
        except BaseException:
            if former is not None:
                # If the target is unreachable, the first fault is the one to raise.
                with suppress(psycopg.Error):
                    self._suspects.clear(former)
            raise
        if former is not None:
            self._suspects.clear(former)
        return dispositions

    def _isolated(
        self,
        conn: Connection,
        assigned: Assignment,
        limit: FailureLimit,
        size: int,
        trial: Trial | None = None,
    ) -> Dispositions:
        """Apply transactions in portions, each under a savepoint; returns the dispositions of those that failed alone.

        The first portion has `size` of them. After a failure the next one is half as large, after a success twice as
        large: one failure among n transactions costs about 2 log n attempts, n in a row cost about n.

        Once a handler has had so many faults of the target in a row that no other attempt is worth its time, its
        transactions are blocked: they are deferred without an attempt, and others go on.
        """
        dispositions: Dispositions = {}
        begin, most = 0, len(assigned)
        while begin < len(assigned):
            portion = assigned.part(begin, min(begin + size, len(assigned)))
            if limit.gives_up(portion.parts):
                if len(portion) == 1:
                    dispositions[begin], begin = BLOCKED, begin + 1
                size = 1
                continue
            failure = self._failure(conn, portion, limit, trial)
            if failure is None:
                begin, size = begin + len(portion), min(size * 2, most)
            elif len(portion) == 1:
                alone = self._failed_alone(conn, portion, failure, limit)
                dispositions.update((begin, disposition) for disposition in alone.values())
                begin, size = begin + 1, 1
            else:
                size = len(portion) // 2
                if timed_out(reason_of(failure)):
                    # Each larger one would take as long again.
                    most = size
        return dispositions

    def _failure(
        self, conn: Connection, portion: Assignment, limit: FailureLimit, trial: Trial | None
    ) -> HandlerFailed | None:
        """Apply a portion under a savepoint; returns the fault if a smaller portion may not have it, else raises it."""
        name = suspects.name_of(portion.transactions[0]) if len(portion) == 1 else None
        known = trial.known.get(name) if trial is not None and name is not None else None
        if known is not None and known.handler.name in portion.parts:
            return known
        began = time.monotonic()
        try:
            with conn.transaction(_savepoint()):
                self._call(conn, portion.parts, check_constraints=True)
        except HandlerFailed as failure:
            reason = reason_of(failure)
            _require_open(conn, failure.handler, reason)
            failure.suspect, failure.seconds = name, time.monotonic() - began
            if ends_session(reason) or not self._can_isolate(failure):
                raise
            return failure
        self._note_success(portion.parts)
        limit.succeeded(portion.parts)
        return None

    def _failed_alone(
        self, conn: Connection, alone: Assignment, failure: HandlerFailed, limit: FailureLimit
    ) -> Dispositions:
        """The disposition of a transaction that fails by itself; none once a handler has dropped it."""
        reason = reason_of(failure)
        if timed_out(reason):
            reason = _too_slow(failure.handler)
        if isinstance(reason, psycopg.ProgrammingError):
            # If the statement has become invalid since the start, `check` raises: no event is at fault.
            failure.handler.check(conn)
        name = failure.handler.name
        if isinstance(reason, Drop):
            self._drops.note(name, reason, alone.transactions[0].transaction_id)
            limit.succeeded((name,))
            return self._isolated(conn, alone.without(name), limit, 1)
        if may_be_of_one(reason):
            if not self._settings.handlers[name].reliable:
                self._note_loss(name, reason, alone.transactions[0].transaction_id)
                return self._isolated(conn, alone.without(name), limit, 1)
            limit.failed(name, failure.seconds)
            return {0: DeadLetter(name, reason)}
        if not self._is_deferred(failure) and limit.require(name, reason, alone.transactions[0]):
            return {0: RetryLater(name, reason, LONGEST_WAIT_SECONDS)}
        return {0: DeadLetter(name, reason, holds=self._settings.handlers[name].blocks_key)}

    def _call(
        self,
        conn: Connection,
        parts: Parts,
        check_constraints: bool = False,
        last: Last | None = None,
    ) -> None:
        """Run each handler, in the configuration's order, over all of its transactions, under the user's search_path.

        With `check_constraints`, deferred constraints are checked after each handler, while it is known which one
        has violated them.
        """
        called = [name for name in self._transactional if name in parts]
        if not called or (last is not None and self._sent(conn, called, parts, last)):
            return
        then = None if last is None else last.statement
        with users_path(conn, not self._code.isdisjoint(parts), then):
            if check_constraints:
                conn.execute("set constraints all deferred")
            for name in called:
                handler = self._transactional[name]
                if not self._settings.handlers[name].reliable:
                    self._run_loosely(conn, handler, parts[name])
                    continue
                try:
                    self._apply(conn, handler, parts[name])
                    if check_constraints:
                        _check_constraints(conn)
                except Exception as error:
                    raise HandlerFailed(handler) from _cause(conn, error)
        if last is not None:
            last.sent = True

    def _sent(self, conn: Connection, called: Sequence[str], parts: Parts, last: Last) -> bool:
        """Send the statements of the only handler and `last` in one round trip; False if that cannot be."""
        (name, *others) = called
        is_reliable = self._settings.handlers[name].reliable
        if others or not is_reliable or parts[name].events > sql.FEW_EVENTS:
            return False
        handler = self._transactional[name]
        try:
            with self.active_jobs.handler(name):
                statements = handler.statements(parts[name])
                if statements is None:
                    return False
                trips.run_all(conn, [_USERS_PATH, *statements, _PIN_PATH, last.statement])
        except trips.TripFailed as failed:
            if not 1 <= failed.index <= len(statements or ()):
                raise failed.error from None
            raise HandlerFailed(handler) from _cause(conn, failed.error)
        except Exception as error:
            raise HandlerFailed(handler) from _cause(conn, error)
        last.sent = True
        return True

    def _apply(self, conn: Connection, handler: handlers.Handler, routed: Routed) -> None:
        """Let a handler apply transactions. Raises its errors, and HandlerTimeout, which has ended the session."""
        name = handler.name
        with self.active_jobs.handler(name) as runs_in:
            seconds = self._seconds.get(name)
            if seconds is None:
                handler.apply(conn, routed)
                return
            try:
                self._threads.run(name, partial(handler.apply, conn, routed), seconds, runs_in)
            except Occupied as occupied:
                raise HandlerOccupied(
                    f"handlers.{name}: nothing is called, since {occupied.calls} calls go on after their timeout of "
                    f"{seconds:g} s, the first one{occupied.position}: let what it waits for have a time-out of its own"
                ) from None
            except Overrun:
                end_session(conn)
                raise HandlerTimeout(
                    f"handlers.{name}: the function takes longer for a transaction than its timeout of {seconds:g} s: "
                    "make it faster, raise timeout, or use a handler of type function for what waits"
                ) from None

    def _run_loosely(self, conn: Connection, handler: handlers.Handler, routed: Routed) -> None:
        """Run a handler that is not reliable: transactions that it fails on are skipped."""
        if self._survives(conn, handler, routed):
            return
        transactions = routed.transactions
        for index in range(len(transactions)):
            one = Routed(transactions.part(index, index + 1), routed.decoder)
            self._survives(conn, handler, one, last=True)

    def _survives(
        self, conn: Connection, handler: handlers.Handler, routed: Routed, last: bool = False
    ) -> bool:
        try:
            with conn.transaction(_savepoint()):
                conn.execute("set constraints all deferred")
                self._apply(conn, handler, routed)
                _check_constraints(conn)
        except Exception as error:
            reason = _cause(conn, error)
            _require_open(conn, handler, reason)
            is_stop = action_for(reason) is FaultAction.STOP
            if is_stop or ends_session(reason) or _is_of_target(reason):
                raise HandlerFailed(handler) from reason
            if last and isinstance(reason, Drop):
                self._drops.note(handler.name, reason, routed.transactions[0].transaction_id)
            elif last:
                self._note_loss(handler.name, error, routed.transactions[0].transaction_id)
            return False
        return True

    def _note_loss(self, name: str, error: BaseException, transaction_id: str | None) -> None:
        """Tell of a transaction that a handler which is not reliable has failed on."""
        self._losses[name] += 1
        log.warning(
            "not applied, and not tried again: the handler is not reliable",
            extra={
                "handler": name,
                "transaction_id": transaction_id,
                "fault": describe(error),
                "losses": self._losses[name],
            },
        )


def _savepoint() -> str:
    """A random name, so that no handler can roll back to the savepoint."""
    return f"relay_{token_hex(8)}"


def _require_open(conn: Connection, handler: handlers.Handler, reason: BaseException) -> None:
    """Raise ConfigurationError if a handler's fault has no savepoint to go back to, since it ended the transaction."""
    if not conn.broken and conn.info.transaction_status == TransactionStatus.INERROR:
        raise transaction_ended([handler.name]) from reason


def reason_of(error: BaseException) -> BaseException:
    """The exception that a handler raised, or `error` itself."""
    return error.__cause__ or error if isinstance(error, HandlerFailed) else error


def _cause(conn: Connection, error: Exception) -> Exception:
    """The cause of a handler's fault: how the connection was lost, if it is lost; otherwise `error`."""
    if (
        not conn.broken
        or ends_session(error)
        or (isinstance(error, psycopg.Error) and action_for(error) is FaultAction.RETRY)
    ):
        return error
    inner = error.__cause__ or error.__context__
    if isinstance(inner, Exception) and ends_session(inner):
        return inner
    lost = psycopg.OperationalError("the connection to the target is lost")
    lost.__cause__ = error
    return lost


def _is_of_target(error: BaseException) -> bool:
    """Whether a fault is an outage or a conflict of the database: the whole task is retried."""
    return isinstance(error, psycopg.Error) and action_for(error) is FaultAction.RETRY


def _too_slow(handler: handlers.Handler) -> StatementTimeout:
    return StatementTimeout(
        f"handlers.{handler.name}: a single transaction takes longer than the target's statement_timeout: make what it "
        "runs faster, or raise the setting for relay's role; a lock of another session passes by itself"
    )


def _check_constraints(conn: Connection) -> None:
    conn.execute("set constraints all immediate")
    conn.execute("set constraints all deferred")
