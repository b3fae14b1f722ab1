"""What the console reads of a group and does to it: pages and API call this, and it calls what the commands call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import BoundedSemaphore
from typing import Any, Generic, TypeVar

import psycopg

from relay.admin import sinks, status
from relay.admin.connections import reach_target
from relay.admin.dead_letters import DeadLetters
from relay.admin.deferred import DeferredTransactions
from relay.admin.offsets import OffsetsMove, PartitionStatus, plan_seek, positions, seek
from relay.admin.sinks import SinkMove, SinkStatus
from relay.admin.status import Status
from relay.config.settings import Settings
from relay.console import measured
from relay.console.measured import Series
from relay.faults import ConfigurationError, TransientFault, Unreachable
from relay.observe import history
from relay.observe.health import Limits, failures
from relay.store import (
    actions,
    brakes,
    dead_letter_pages,
    dead_letters,
    deferred_selection,
    offsets,
    presence,
)
from relay.store.actions import Action
from relay.store.connections import sessions_with
from relay.store.dead_letter_pages import ActedOnDead, Kind, Listed
from relay.store.dead_letter_selection import DeadLetterSelection as DeadFilter
from relay.store.dead_letter_selection import FoundDeadLetters as DeadFound
from relay.store.dead_letters import DeadLetterAction
from relay.store.deferred_selection import Deferred

Row = TypeVar("Row")

PAGE = 50
"""Rows of a page, where nothing else is asked for."""
MOST = 500
"""Rows of a page at most."""
READ_SECONDS = 8.0
"""How long a statement may take that only reads."""
COUNT_SECONDS = 2.0
"""How long the rows may be counted that a partition or a sink has still to look at; without an answer there is none."""
ACT_SECONDS = 60.0
"""How long a statement may take that changes something."""
ASKING = 20
"""How many requests wait for the databases side by side; there are threads left for those that need none."""
_TURN_SECONDS = 1.0
HISTORY_HOURS = history.KEPT_SECONDS / 3600
"""How far back the samples go at most."""
_KINDS = 12
_EVENTS_SHOWN = 20
_LOCK_SECONDS = 10.0


class Missing(ConfigurationError):
    """There is no such thing as was asked for."""


@dataclass(frozen=True, slots=True)
class Page(Generic[Row]):
    """Some rows, and the key after which the next ones come; None where there are none."""

    rows: Sequence[Row]
    next: int | None


def _page(rows: Sequence[Row], limit: int, key: Callable[[Row], int]) -> Page[Row]:
    """A page of rows, of which one more than `limit` was read."""
    return Page(rows[:limit], key(rows[limit - 1]) if len(rows) > limit else None)


@dataclass(frozen=True, slots=True)
class Dead:
    """A dead transaction with some of its events, from the first on that is after a dead letter."""

    number: int
    letters: Page[dict[str, Any]]
    done: Sequence[DeadLetterAction]
    instances: Sequence[str]


@dataclass(frozen=True, slots=True)
class Partitions:
    """Where partitions stand. `counted` is false where what is unread cannot be counted, or not soon."""

    rows: Page[PartitionStatus]
    total: int
    counted: bool
    instances: Sequence[str]


@dataclass(frozen=True, slots=True)
class Replayed:
    """How many dead transactions are queued, and what an operator should know about that."""

    queued: int
    warnings: Sequence[str]


class GroupView:
    """A group of the console.

    Everything raises ConfigurationError for what cannot be done, Unreachable where a database is away, and
    psycopg.Error. `by` is who acts, `reason` why: both are kept with the action.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @property
    def name(self) -> str:
        """The name of the group."""
        return self._settings.group

    @property
    def settings(self) -> Settings:
        """Its configuration."""
        return self._settings

    def history(self, hours: float = HISTORY_HOURS, sink: str | None = None) -> list[Series]:
        """What was measured over the last hours, of a sink or of all; without points where no relay runs here."""
        samples = history.of(self.name).samples(time.time() - hours * 3600)
        return measured.of_group(samples) if sink is None else measured.of_sink(samples, sink)

    def status(self) -> Status:
        """What `relay status` shows."""
        with _reading():
            return status.read(self._settings)

    def troubles(self, found: Status) -> list[str]:
        """What is not as it should be, a line each."""
        lines = list(failures(found, self.name, Limits(), None, {}))
        lines += [
            f"handler {each.handler} is stopped: {each.deaths} transactions in a row failed with {each.fault}"
            for each in found.braked
        ]
        for each in found.sinks:
            if each.state == "paused":
                lines.append(f"sink {each.sink} is paused by {each.paused_by}")
            elif each.fault:
                lines.append(f"sink {each.sink} delivers nothing: {each.fault}")
        return lines

    def partitions(self, limit: int = PAGE, after: int = -1) -> Partitions:
        """Where the partitions stand, by their numbers."""
        with _reading(), reach_target(self._settings) as target:
            found = offsets.initialised(target, self.name)
            running = presence.instances(target, self.name)
        counted = True
        try:
            with _reading(COUNT_SECONDS):
                listed = positions(self._settings)
        except (psycopg.Error, Unreachable):
            counted = False
            listed = [
                PartitionStatus(
                    each.partition_id, each.next_offset, str(each.applied_lsn), None, None
                )
                for each in found
            ]
        wanted = sorted(
            (each for each in listed if each.partition_id > after),
            key=lambda each: each.partition_id,
        )
        rows = _page(wanted[: limit + 1], limit, lambda each: each.partition_id)
        return Partitions(rows, len(listed), counted, running)

    def plan_seek(self, to: str, partition: int | None) -> OffsetsMove:
        """What seeking the whole group, or one partition, would do."""
        with _reading(ACT_SECONDS):
            return plan_seek(self._settings, to, partition)

    def seek(self, to: str, partition: int | None, by: str, reason: str) -> str:
        """Let the stopped group go on at another position; returns where, in words."""
        with _acting(by):
            move = plan_seek(self._settings, to, partition)
            seek(self._settings, move, partition, reason)
        return move.goal.text

    def sinks(self) -> list[SinkStatus]:
        """The sinks. What one has still to read is not counted where that takes long, or the source is away."""
        with _reading(COUNT_SECONDS):
            return sinks.listed(
                self._settings, away=lambda _: None, deadline=time.monotonic() + COUNT_SECONDS
            )

    def sink(self, name: str) -> SinkStatus:
        """One sink. Raises Missing."""
        for each in self.sinks():
            if each.name == name:
                return each
        raise Missing(f"there is no sink {name!r} in group {self.name!r}")

    def pause(self, name: str, by: str, reason: str) -> bool:
        """Let a sink stop; returns whether that changed anything."""
        with _acting(by):
            return sinks.set_paused(self._settings, name, True, reason)

    def resume(self, name: str, by: str, reason: str) -> bool:
        """Let a sink go on; returns whether that changed anything."""
        with _acting(by):
            return sinks.set_paused(self._settings, name, False, reason)

    def plan_sink_seek(self, name: str, to: str) -> SinkMove:
        """Where a sink would go on, and what would be given up for that."""
        with _reading(ACT_SECONDS):
            return sinks.plan_seek(self._settings, name, to, "to")

    def seek_sink(self, name: str, to: str, rebuild: bool, by: str, reason: str) -> str:
        """Let a sink go on at another position; returns where, in words. A rebuild is kept as such."""
        action = "sink rebuild" if rebuild else "sink seek"
        with _acting(by):
            move = sinks.plan_seek(self._settings, name, to, "to")
            sinks.seek(self._settings, name, move.goal, action, reason)
        return move.goal.text

    def drop_sink(self, name: str, by: str, reason: str) -> int:
        """Forget a sink that is no longer configured; returns how many deferred transactions are forgotten with it."""
        with _acting(by):
            return sinks.drop(self._settings, name, reason)

    def stopped_handlers(self) -> list[brakes.BrakedHandler]:
        """The handlers whose progress is stopped."""
        with _reading(), reach_target(self._settings) as target:
            return brakes.braked(target, self.name)

    def deferred(
        self, wanted: deferred_selection.DeferredSelection, limit: int = PAGE, after: int = 0
    ) -> Page[Deferred]:
        """Deferred transactions, oldest first."""
        with _reading(), reach_target(self._settings) as target:
            found = deferred_selection.listed(target, self.name, wanted, limit + 1, after)
        return _page(found, limit, lambda each: each.id)

    def find_deferred(
        self, wanted: deferred_selection.DeferredSelection
    ) -> deferred_selection.FoundDeferred:
        """How many deferred transactions a filter selects."""
        with _reading(), reach_target(self._settings) as target:
            return DeferredTransactions(self._settings, target).find(wanted)

    def run_deferred(
        self, wanted: deferred_selection.DeferredSelection, by: str, reason: str
    ) -> int:
        """Have deferred transactions tried now; returns how many."""
        with _acting(by), reach_target(self._settings) as target:
            deferrals = DeferredTransactions(self._settings, target)
            return sum(deferrals.run(deferrals.find(wanted), reason).values())

    def cancel_deferred(
        self, wanted: deferred_selection.DeferredSelection, by: str, reason: str
    ) -> int:
        """Give deferred transactions up to the dead letters; returns how many."""
        with _acting(by), reach_target(self._settings) as target:
            deferrals = DeferredTransactions(self._settings, target)
            return deferrals.cancel(deferrals.find(wanted), reason)

    def dead_letters(
        self, wanted: DeadFilter, limit: int = PAGE, before: int | None = None
    ) -> Page[Listed]:
        """Dead transactions, newest first."""
        wanted = self._printed(wanted)
        with _reading(), reach_target(self._settings) as target:
            found = dead_letter_pages.listed(target, self.name, wanted, limit + 1, before)
        return _page(found, limit, lambda each: each.number)

    def dead_kinds(self) -> tuple[dict[str, int], Sequence[Kind] | None]:
        """How many dead events have which status, and the commonest kinds of fault; None where that takes long."""
        with _reading(), reach_target(self._settings) as target:
            statuses = dead_letter_pages.statuses(target, self.name)
        try:
            with _reading(COUNT_SECONDS), reach_target(self._settings) as target:
                return statuses, dead_letter_pages.kinds(target, self.name, _KINDS)
        except psycopg.errors.QueryCanceled:
            return statuses, None

    def dead_letter(
        self, dead_letter_id: int, limit: int = _EVENTS_SHOWN, after: int | None = None
    ) -> Dead:
        """The dead transaction that holds a dead letter, and its events after one. Raises Missing."""
        with _reading(), reach_target(self._settings) as target:
            number = dead_letters.transaction_of(target, self.name, dead_letter_id)
            if number is None:
                raise self._no_dead_letter(dead_letter_id)
            found = dead_letter_pages.events(target, number, limit + 1, after or 0)
            done = dead_letters.actions(target, number)
            running = presence.instances(target, self.name)
        return Dead(number, _page(found, limit, lambda each: int(each["id"])), done, running)

    def payload(self, dead_letter_id: int) -> str:
        """The whole payload of a dead letter, as JSON text. Raises Missing."""
        with _reading(), reach_target(self._settings) as target:
            found = dead_letter_pages.payload(target, self.name, dead_letter_id)
        if found is None:
            raise self._no_dead_letter(dead_letter_id)
        return found

    def edit(self, dead_letter_id: int, payload: str, by: str, reason: str) -> None:
        """Give an event of a dead transaction another payload."""
        with _acting(by), reach_target(self._settings) as target:
            DeadLetters(self._settings, target).edit(dead_letter_id, payload, reason)

    def find_dead(self, wanted: DeadFilter) -> DeadFound:
        """How many dead transactions a filter selects."""
        with _reading(), reach_target(self._settings) as target:
            return DeadLetters(self._settings, target).find(self._printed(wanted))

    def replay(self, wanted: DeadFilter, by: str, reason: str) -> Replayed:
        """Queue dead transactions to be applied or delivered again."""
        with _acting(by), reach_target(self._settings) as target:
            letters = DeadLetters(self._settings, target)
            found = letters.find(self._printed(wanted))
            warnings = [
                f"handler {name}, in which {count} of them failed, is not configured any more: they go where the "
                "routes lead now"
                for name, count in letters.missing_handlers(found).items()
            ]
            queued = len(letters.replay(found, reason))
            if queued and not letters.instances():
                warnings.append("no instance is running: they are tried when one starts")
        return Replayed(queued, warnings)

    def discard(self, wanted: DeadFilter, by: str, reason: str) -> int:
        """Give dead transactions up; returns how many."""
        with _acting(by), reach_target(self._settings) as target:
            letters = DeadLetters(self._settings, target)
            return letters.discard(letters.find(self._printed(wanted)), reason)

    def actions(
        self, limit: int = PAGE, before: int | None = None, sink: str | None = None
    ) -> Page[Action]:
        """What was done to the group and its sinks, newest first."""
        with _reading(), reach_target(self._settings) as target:
            found = actions.recent(target, self.name, limit + 1, sink, before)
        return _page(found, limit, lambda each: each.id)

    def dead_letter_actions(
        self, limit: int = PAGE, before: int | None = None
    ) -> Page[ActedOnDead]:
        """What was done about dead letters, newest first."""
        with _reading(), reach_target(self._settings) as target:
            found = dead_letter_pages.acted(target, self.name, limit + 1, before)
        return _page(found, limit, lambda each: each.id)

    def _printed(self, wanted: DeadFilter) -> DeadFilter:
        """The filter with ids as PostgreSQL prints them."""
        source, host, transaction = self._settings.source, wanted.host_id, wanted.transaction_id
        return replace(
            wanted,
            host_id=host and source.printed_id("host_id", host, "host"),
            transaction_id=transaction
            and source.printed_id("transaction_id", transaction, "transaction"),
        )

    def _no_dead_letter(self, dead_letter_id: int) -> Missing:
        return Missing(f"there is no dead letter {dead_letter_id} in group {self.name!r}")


_asking = BoundedSemaphore(ASKING)


@contextmanager
def _sessions(settings: Mapping[str, str]) -> Iterator[None]:
    """Sessions with settings, for a request whose turn it is. Raises TransientFault where too many wait."""
    if not _asking.acquire(timeout=_TURN_SECONDS):
        raise TransientFault(
            f"the databases do not answer: {ASKING} requests wait for them: try again later"
        )
    try:
        with sessions_with(settings):
            yield
    finally:
        _asking.release()


@contextmanager
def _reading(seconds: float = READ_SECONDS) -> Iterator[None]:
    with _sessions({"statement_timeout": f"{seconds * 1000:.0f}"}):
        yield


@contextmanager
def _acting(by: str) -> Iterator[None]:
    settings = {
        "statement_timeout": f"{ACT_SECONDS * 1000:.0f}",
        "lock_timeout": f"{_LOCK_SECONDS * 1000:.0f}",
        "relay.operator": by,
    }
    with _sessions(settings):
        yield
