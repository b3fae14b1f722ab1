"""Runs the handlers of transactions inside a target transaction, and finds out which transactions they fail on.

Three ways to run those inside the target: all transactions together; carefully, where a range that fails is halved
under savepoints until the culprit stands alone; guarded, one by one under a note that a crash would leave behind.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from secrets import token_hex
from typing import Any

import psycopg

from relay import handlers
from relay.config.handlers import PythonHandler
from relay.config.settings import Settings
from relay.event_types.loading import registered
from relay.event_types.upcasting import Upcasting
from relay.faults import (
    Action,
    ProcessDied,
    StatementTimeout,
    TransientFault,
    action_for,
    describe,
    timed_out,
)
from relay.model.dispositions import (
    NEW,
    Behind,
    Failure,
    Fates,
    History,
    has_to_wait,
    is_dead,
    judge,
)
from relay.model.transactions import Routed, Transactions
from relay.pipeline.activity import AtWork
from relay.pipeline.brake import Brake
from relay.pipeline.deferral import Waiting
from relay.pipeline.routing import Parts, Routing
from relay.retry import LONGEST_WAIT_SECONDS
from relay.store import suspects

log = logging.getLogger(__name__)

Connection = psycopg.Connection[Any]
Histories = Mapping[int, History]
"""What became of transactions before, by place."""


class HandlerFailed(Exception):
    """A handler raised; the reason is the cause."""

    def __init__(self, handler: handlers.Handler) -> None:
        super().__init__(handler.name)
        self.handler = handler


Run = Callable[[Connection, Transactions, Parts, Brake], Fates]
"""Runs the handlers inside the target of transactions that were routed."""


class Handling:
    """The configured handlers. Raises ConfigurationError when one cannot be built."""

    def __init__(
        self, settings: Settings, routing: Routing, waiting: Waiting, connections: int
    ) -> None:
        self._settings = settings
        self._routing = routing
        self._waiting = waiting
        self._connections = connections
        self._inside = handlers.build(
            settings.handlers, settings.source.sql_types, Upcasting(registered(settings.events))
        )
        self._defers = {
            name: each.retry
            for name, each in settings.handlers.items()
            if isinstance(each, PythonHandler)
        }
        self._may_hold = {
            name
            for name in self._inside
            if name in self._defers or settings.handlers[name].blocks_key
        }
        self._losses: Counter[str] = Counter()
        self.at_work = AtWork()

    @property
    def names(self) -> tuple[str, ...]:
        """The transactional handlers."""
        return tuple(self._inside)

    def forgive(self) -> None:
        """The process ends itself now, which must not count as a death. Raises psycopg.Error."""
        if "_suspects" in self.__dict__:
            self._suspects.forgive()

    def close(self) -> None:
        """Let go of what the handlers hold."""
        if "_suspects" in self.__dict__:
            self._suspects.close()

    def configure(self, conn: Connection) -> None:
        """Prepare a new connection."""
        for handler in self._inside.values():
            handler.configure(conn)

    @cached_property
    def _suspects(self) -> suspects.Suspects:
        """Only a guarded task takes notes."""
        return suspects.Suspects(self._settings, self._connections)

    def can_isolate(self, error: BaseException) -> bool:
        """Whether running carefully finds out which transactions are concerned by what a run together has raised."""
        reason = reason_of(error)
        if action_for(reason) is Action.DEAD_LETTER or self._is_deferred(error):
            return True
        # Fewer transactions take less time.
        return isinstance(error, HandlerFailed) and timed_out(reason)

    def _is_deferred(self, error: BaseException) -> bool:
        return (
            isinstance(error, HandlerFailed)
            and error.handler.name in self._defers
            and isinstance(error.__cause__, TransientFault)
        )

    def handle(
        self,
        conn: Connection,
        transactions: Transactions,
        run: Run,
        histories: Histories,
        brake: Brake,
    ) -> Fates:
        """Route transactions and run their transactional handlers; returns what was not applied.

        A transaction that is not applied has no effects in the target. Where a transactional handler lets too many
        transactions in a row die, raises Braked, or defers them if `brake` says so.
        """
        deliverable, parts, refused = self._routing.route(transactions)
        fates: Fates = {place: Failure(None, refusal) for place, refusal in refused.items()}
        places = transactions.besides(refused)
        known = {new: histories[old] for new, old in enumerate(places) if old in histories}
        # All together they are applied or not, so that nothing has to be taken out.
        holds = run != self.together and not self._may_hold.isdisjoint(parts)
        if not (holds or brake.defers):
            found = run(conn, deliverable, parts, brake)
        else:
            found = self._settle(conn, deliverable, parts, run, known, brake)
        return fates | {places[place]: fate for place, fate in found.items()}

    def _settle(
        self,
        conn: Connection,
        transactions: Transactions,
        parts: Parts,
        run: Run,
        histories: Histories,
        brake: Brake,
    ) -> Fates:
        """Run handlers that may let others wait: what cannot be applied is taken out, and the rest begins again."""
        fates: Fates = {}
        rest, known = transactions, histories
        while True:
            places = transactions.besides(fates)
            if fates:
                rest, parts, _ = self._routing.route(transactions.take(places))
                known = {new: histories[old] for new, old in enumerate(places) if old in histories}
            brake.begin()
            with conn.transaction(_savepoint()) as savepoint:
                found = self._judged(run(conn, rest, parts, brake), known, brake)
                behind = self._behind(rest, found)
                found |= behind
                if behind:
                    raise psycopg.Rollback(savepoint)
            fates |= {places[place]: fate for place, fate in found.items()}
            if not behind:
                return fates

    def _judged(self, found: Fates, histories: Histories, brake: Brake) -> Fates:
        """Whether, and when, a handler inside the target that asks for another attempt gets one."""
        judged = dict(found)
        for place, fate in sorted(found.items()):
            before = histories.get(place, NEW)
            if isinstance(fate, Failure) and fate.after is not None:
                judged[place] = replace(fate, attempts=before.attempts + 1)
            elif isinstance(fate, Failure) and fate.handler in self._defers:
                verdict = judge(
                    fate.handler,
                    fate.error,
                    before.attempts + 1,
                    before,
                    self._defers[fate.handler],
                    self._settings.handlers[fate.handler].blocks_key,
                )
                # Other deaths were counted when they happened.
                exhausted = is_dead(verdict) and isinstance(fate.error, TransientFault)
                if exhausted and brake.defers and brake.stops_late(fate.handler, fate.error):
                    verdict = replace(verdict, after=LONGEST_WAIT_SECONDS, holds=False)
                judged[place] = verdict
        return judged

    def _behind(self, transactions: Transactions, fates: Fates) -> Fates:
        """Those that follow on one that has to wait, with one of its keys."""
        waiting = {place for place, fate in fates.items() if has_to_wait(fate)}
        held: set[str] = set()
        behind: Fates = {}
        for place in range(min(waiting, default=len(transactions)), len(transactions)):
            keys = self._waiting.keys(transactions.part(place, place + 1))
            if place in waiting:
                held |= keys
            elif place not in fates and not held.isdisjoint(keys):
                held |= keys
                behind[place] = Behind()
        return behind

    def together(self, conn: Connection, _: Transactions, parts: Parts, __: Brake) -> Fates:
        """Apply all of them at once, or raise."""
        self._run(conn, parts)
        return {}

    def guarded(
        self, conn: Connection, transactions: Transactions, _: Parts, brake: Brake
    ) -> Fates:
        """Apply them one by one, each under a note that a crash would leave behind."""
        fates: Fates = {}
        former: str | None = None
        try:
            for place, transaction in enumerate(transactions):
                name = suspects.name_of(transaction)
                if self._suspects.note_next(former, name, self._settings.crash_limit):
                    with self._suspects.in_flight(name):
                        one = self._route_and_run(conn, transactions.part(place, place + 1), brake)
                    fates.update((place, fate) for fate in one.values())
                else:
                    died = f"{self._settings.crash_limit} processes died while they handled it"
                    fates[place] = Failure(None, ProcessDied(died))
                former = name
        except BaseException:
            if former is not None:
                # The target may be away, and then the fault is what counts.
                with suppress(psycopg.Error):
                    self._suspects.clear(former)
            raise
        if former is not None:
            self._suspects.clear(former)
        return fates

    def carefully(
        self, conn: Connection, transactions: Transactions, parts: Parts, brake: Brake
    ) -> Fates:
        """Apply a range under a savepoint, halving it on failure; returns those that fail alone."""
        if not len(transactions):
            return {}
        try:
            with conn.transaction(_savepoint()):
                self._run(conn, parts, settle=True)
            brake.succeeded(parts)
            return {}
        except HandlerFailed as failure:
            reason = reason_of(failure)
            if not self.can_isolate(failure):
                raise
            if len(transactions) == 1:
                if timed_out(reason):
                    raise HandlerFailed(failure.handler) from _too_slow(failure.handler)
                if isinstance(reason, psycopg.ProgrammingError):
                    # The statement itself may have broken since the start; then no event is to blame.
                    failure.handler.check(conn)
                name = failure.handler.name
                if not self._is_deferred(failure) and brake.require(name, reason):
                    return {0: Failure(name, reason, after=LONGEST_WAIT_SECONDS)}
                return {0: Failure(name, reason, holds=self._settings.handlers[name].blocks_key)}
        return self._halved(conn, transactions, brake)

    def in_halves(
        self, conn: Connection, transactions: Transactions, parts: Parts, brake: Brake
    ) -> Fates:
        """As `carefully`, where the whole range is known to take too long."""
        if len(transactions) < 2:
            return self.carefully(conn, transactions, parts, brake)
        return self._halved(conn, transactions, brake)

    def _halved(self, conn: Connection, transactions: Transactions, brake: Brake) -> Fates:
        middle = len(transactions) // 2
        first = self._route_and_run(conn, transactions.part(0, middle), brake)
        second = self._route_and_run(conn, transactions.part(middle, len(transactions)), brake)
        return first | {middle + place: fate for place, fate in second.items()}

    def _route_and_run(self, conn: Connection, transactions: Transactions, brake: Brake) -> Fates:
        deliverable, parts, _ = self._routing.route(transactions)
        return self.carefully(conn, deliverable, parts, brake)

    def _run(self, conn: Connection, parts: Parts, settle: bool = False) -> None:
        """Each handler in the configuration's order, over all of its transactions.

        To settle is to check deferred constraints now, while it is known whose doing it is.
        """
        if settle:
            conn.execute("set constraints all deferred")
        for name, handler in self._inside.items():
            if name not in parts:
                continue
            if not self._settings.handlers[name].reliable:
                self._run_loosely(conn, handler, parts[name])
                continue
            try:
                with self.at_work.handler(name):
                    handler.apply(conn, parts[name])
                if settle:
                    _settle_constraints(conn)
            except Exception as error:
                raise HandlerFailed(handler) from _blamed(conn, error)

    def _run_loosely(self, conn: Connection, handler: handlers.Handler, routed: Routed) -> None:
        """Run a handler that is not reliable: what it fails on is left out."""
        if self._survives(conn, handler, routed):
            return
        transactions = routed.transactions
        for place in range(len(transactions)):
            one = Routed(transactions.part(place, place + 1), routed.decoder)
            self._survives(conn, handler, one, last=True)

    def _survives(
        self, conn: Connection, handler: handlers.Handler, routed: Routed, last: bool = False
    ) -> bool:
        try:
            with conn.transaction(_savepoint()):
                conn.execute("set constraints all deferred")
                with self.at_work.handler(handler.name):
                    handler.apply(conn, routed)
                _settle_constraints(conn)
        except Exception as error:
            reason = _blamed(conn, error)
            action = action_for(reason)
            of_target = isinstance(reason, psycopg.Error) and action is Action.RETRY
            if action is Action.STOP or of_target:
                raise HandlerFailed(handler) from reason
            if last:
                self._losses[handler.name] += 1
                log.warning(
                    "not applied, and not tried again: the handler is not reliable",
                    extra={
                        "handler": handler.name,
                        "transaction_id": routed.transactions[0].transaction_id,
                        "fault": describe(error),
                        "losses": self._losses[handler.name],
                    },
                )
            return False
        return True


def _savepoint() -> str:
    """A name that no handler can roll back to."""
    return f"relay_{token_hex(8)}"


def reason_of(error: BaseException) -> BaseException:
    """What a handler raised, or the fault itself."""
    return error.__cause__ or error if isinstance(error, HandlerFailed) else error


def _blamed(conn: Connection, error: Exception) -> Exception:
    """What to blame for a handler's fault: without its connection to the target no handler can work."""
    if not conn.broken or (isinstance(error, psycopg.Error) and action_for(error) is Action.RETRY):
        return error
    lost = psycopg.OperationalError("the connection to the target is lost")
    lost.__cause__ = error
    return lost


def _too_slow(handler: handlers.Handler) -> StatementTimeout:
    return StatementTimeout(
        f"handlers.{handler.name}: a single transaction takes longer than the target's statement_timeout: make what it "
        "runs faster, or raise the setting for relay's role; a lock that somebody holds passes by itself"
    )


def _settle_constraints(conn: Connection) -> None:
    conn.execute("set constraints all immediate")
    conn.execute("set constraints all deferred")
