"""Reads a group and acts on it, for the pages and the API, with the functions that the commands use.

The sessions of requests are bounded in number, and in the time of each statement.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from threading import Lock
from typing import Any, Generic, TypeVar

import psycopg

from relay.admin import endpoints, events, queues, resend, sagas, schedules, sinks, status, tokens
from relay.admin.acts import Act, Done, Missing
from relay.admin.connections import reach_target
from relay.admin.dead_letters import DeadLetters, printed
from relay.admin.deferred import DeferredTransactions
from relay.admin.events import FoundEvent
from relay.admin.offsets import OffsetsMove, PartitionStatus, plan_seek, positions, seek
from relay.admin.sinks import SinkStatus
from relay.admin.status import Status
from relay.config.handlers import DeliveryHandler, HttpHandler
from relay.config.settings import Settings
from relay.config.types import duration as length_of
from relay.console.charts import Series, of_group, of_sink
from relay.faults import ConfigurationError, Unreachable, first_line
from relay.observe import history
from relay.observe.troubles import Trouble, troubles
from relay.source.outbox.search import EventPage, EventSearch
from relay.store import (
    actions,
    brakes,
    dead_letters,
    presence,
)
from relay.store import queues as stored_queues
from relay.store.actions import Action
from relay.store.api_tokens import EVERY, TokenRow
from relay.store.dead_letters import DeadLetterAction
from relay.store.dead_letters import selection as dead_letter_selection
from relay.store.dead_letters.selection import (
    ActedOnDead,
    DeadLetterSelection,
    DeadTransaction,
    FoundDeadLetters,
    Kind,
)
from relay.store.deferred import selection as deferred_selection
from relay.store.deferred.selection import Deferred, FoundDeferred
from relay.store.endpoints import StoredEndpoint
from relay.store.filters import DeferredSelection
from relay.store.positions import offsets
from relay.store.queues import MessageSelection, QueueFigures, QueueItem
from relay.store.sagas import SagaEntry, SagaRow, SagaSelection
from relay.store.schedules import ScheduleRow
from relay.web.sessions import ACT_SECONDS, acting, reading

COUNT_SECONDS = 2.0
"""Longest time of a count of unread rows or of kinds of fault; a count that takes longer is not shown."""
Row = TypeVar("Row")

PAGE = 50
"""Default number of rows of a page."""
MOST = 500
"""Largest number of rows of a page."""
HISTORY_HOURS = history.KEPT_SECONDS / 3600
"""Age of the oldest sample, in hours."""
_KINDS = 12
_EVENTS_SHOWN = 20
_TIMES = 10


@dataclass(frozen=True, slots=True)
class Page(Generic[Row]):
    """Rows of a list, and the key after which the following ones come; None at the end."""

    rows: Sequence[Row]
    next: int | None


def _page(rows: Sequence[Row], limit: int, key: Callable[[Row], int]) -> Page[Row]:
    """Return a page of `limit` rows; a further row in `rows` shows that more follow."""
    return Page(rows[:limit], key(rows[limit - 1]) if len(rows) > limit else None)


@dataclass(frozen=True, slots=True)
class DeadTransactionPage:
    """A dead transaction: a page of its events, the actions on it, and the running instances of the group."""

    number: int
    events: Page[dict[str, Any]]
    actions: Sequence[DeadLetterAction]
    instances: Sequence[str]


@dataclass(frozen=True, slots=True)
class Partitions:
    """The positions of partitions. `counted` is false if unread events cannot be counted; `uncounted` says why."""

    rows: Page[PartitionStatus]
    total: int
    counted: bool
    uncounted: str | None
    instances: Sequence[str]


@dataclass(frozen=True, slots=True)
class QueuedReplay:
    """How many dead transactions are queued, and warnings for the operator."""

    queued: int
    warnings: Sequence[str]


@dataclass(frozen=True, slots=True)
class Kept:
    """The values of a page and when they were read; with a `fault`, they could not be read again since."""

    values: dict[str, Any]
    read_at: datetime
    fault: str | None


_KEPT = 50
"""How many pages are kept."""


class GroupView:
    """A group as pages and API see it.

    Methods raise ConfigurationError if an action is not possible, Unreachable if a database cannot be reached,
    TransientFault if too many requests use the databases, and psycopg.Error. `by` is the operator and `reason` the
    reason of an action; both are stored with it.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._last_status: Status | None = None
        self._kept: OrderedDict[Hashable, Kept] = OrderedDict()
        self._keeping = Lock()

    def kept(self, key: Hashable, read: Callable[[], dict[str, Any]]) -> Kept:
        """Return what `read` returns; while a database cannot be read, what it returned for this `key` before.

        Raises what `read` raises where there is nothing from before.
        """
        try:
            found = Kept(read(), datetime.now(UTC), None)
        except (Unreachable, psycopg.OperationalError) as error:
            with self._keeping:
                before = self._kept.get(key)
            if before is None:
                raise
            return replace(before, fault=first_line(error))
        with self._keeping:
            self._kept[key] = found
            self._kept.move_to_end(key)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return found

    @property
    def name(self) -> str:
        """The name of the group."""
        return self._settings.group

    @property
    def settings(self) -> Settings:
        """Its configuration."""
        return self._settings

    def history(self, hours: float = HISTORY_HOURS, sink: str | None = None) -> list[Series]:
        """Return the series of a sink, or of the group; without points if this process does not relay the group."""
        samples = history.of(self.name).samples(time.time() - hours * 3600)
        return of_group(samples) if sink is None else of_sink(samples, sink)

    def status(self) -> Status:
        """Read the status, as `relay status` shows it; of a database that cannot be read, what it was before."""
        with reading():
            self._last_status = status.read(self._settings, self._last_status)
        return self._last_status

    def troubles(self, current: Status) -> list[Trouble]:
        """Return what of the status needs attention."""
        return troubles(current, self._settings.source.mode)

    def partitions(self, limit: int = PAGE, after: int = -1) -> Partitions:
        """Read the positions of the partitions, in the order of their numbers."""
        with reading(), reach_target(self._settings) as target:
            stored = offsets.initialised(target, self.name)
            running = presence.instances(target, self.name)
        uncounted = None
        try:
            with reading(COUNT_SECONDS):
                listed = positions(self._settings)
        except (psycopg.Error, Unreachable) as error:
            too_long = isinstance(error, psycopg.errors.QueryCanceled)
            uncounted = (
                f"it takes more than {COUNT_SECONDS:.0f} s" if too_long else first_line(error)
            )
            listed = [
                PartitionStatus(
                    each.partition_id, each.next_offset, str(each.applied_lsn), None, None
                )
                for each in stored
            ]
        following = sorted(
            (each for each in listed if each.partition_id > after),
            key=lambda each: each.partition_id,
        )
        rows = _page(following[: limit + 1], limit, lambda each: each.partition_id)
        return Partitions(rows, len(listed), uncounted is None, uncounted, running)

    def plan_seek(self, to: str, partition: int | None) -> OffsetsMove:
        """Return what a seek of the whole group, or of one partition, would do."""
        with reading(ACT_SECONDS):
            return plan_seek(self._settings, to, partition)

    def seek(self, to: str, partition: int | None, by: str, reason: str) -> str:
        """Move the stopped group to another position; return that position in words."""
        with acting(by):
            move = plan_seek(self._settings, to, partition)
            seek(self._settings, move, partition, reason)
        return move.goal.text

    def sinks(self) -> list[SinkStatus]:
        """Read the sinks. Unread events are not counted if that takes long or the source cannot be reached."""
        with reading(COUNT_SECONDS):
            return sinks.listed(
                self._settings, away=lambda _: None, deadline=time.monotonic() + COUNT_SECONDS
            )

    def sink(self, name: str) -> SinkStatus:
        """Read one sink. Raises Missing."""
        for each in self.sinks():
            if each.name == name:
                return each
        raise Missing(f"there is no sink {name!r} in group {self.name!r}")

    def rehearse(self, act: Act, name: str, given: Mapping[str, Any]) -> Done:
        """Return what an act would do."""
        with reading(ACT_SECONDS):
            return act.rehearse(self._settings, name, **given) if act.asks else Done(act.does)

    def act(self, act: Act, name: str, given: Mapping[str, Any], by: str, reason: str) -> Done:
        """Do an act that is declared."""
        with acting(by):
            return act(self._settings, name, reason, **given)

    @property
    def delivering_sinks(self) -> list[str]:
        """The configured sinks to which single events can be delivered again."""
        handlers = self._settings.sink_handlers
        return [name for name, each in handlers.items() if isinstance(each, DeliveryHandler)]

    def resend(
        self,
        name: str,
        ids: Sequence[str],
        wanted: EventSearch,
        endpoint: str | None,
        by: str,
        reason: str,
    ) -> int:
        """Have a sink, or one of its endpoints, get events again; return in how many deliveries."""
        with acting(by):
            planned = resend.plan(self._settings, name, ids, wanted, endpoint)
            return resend.resend(self._settings, planned, reason).deliveries

    def endpoints(self, sink: str, limit: int = PAGE) -> list[StoredEndpoint]:
        """Read endpoints of a sink that fail or are disabled, the disabled ones first; none of one with a fixed URL."""
        if not self.has_endpoints(sink):
            return []
        with reading():
            return endpoints.listed(self._settings, sink, limit)

    def names_endpoints(self, sink: str) -> bool:
        """Whether the endpoints of a sink have names, by which one is chosen."""
        handler = self._settings.handlers.get(sink)
        return isinstance(handler, HttpHandler) and handler.has_ids

    def has_endpoints(self, sink: str) -> bool:
        """Whether data choose the endpoints of a sink."""
        handler = self._settings.handlers.get(sink)
        return isinstance(handler, HttpHandler) and handler.has_endpoints

    def event(self, event_id: str) -> FoundEvent:
        """Find an event, with its state at each destination. Raises Missing."""
        with reading():
            try:
                return events.find(self._settings, event_id)
            except events.UnknownEvent as error:
                raise Missing(str(error)) from None

    def events(
        self, wanted: EventSearch, limit: int = PAGE, before: str | None = None
    ) -> EventPage:
        """Search the outbox for events, the newest first."""
        with reading():
            return events.search(self._settings, wanted, before, limit)

    def queues(self) -> list[QueueFigures]:
        """Read the figures of the work queues."""
        with reading():
            return queues.listed(self._settings)

    def queue(
        self, name: str, wanted: MessageSelection, limit: int = PAGE
    ) -> tuple[QueueFigures, list[QueueItem]]:
        """Read the figures of a queue and its items that a filter selects, the oldest first.

        Raises Missing for a queue that is not declared.
        """
        with reading():
            return queues.shown(self._settings, name, wanted, limit)

    def cancel_messages(self, name: str, wanted: MessageSelection, by: str, reason: str) -> int:
        """Cancel messages of a queue that nobody has; return how many. Raises Missing."""
        with acting(by):
            return queues.cancel(self._settings, name, wanted, reason)

    def move_messages(
        self, name: str, wanted: MessageSelection, to: datetime | None, by: str, reason: str
    ) -> int:
        """Give messages that wait for their time another one, None: now; return how many. Raises Missing."""
        with acting(by):
            return queues.move(self._settings, name, wanted, to, reason)

    def edit_message(self, name: str, number: int, payload: str, by: str, reason: str) -> bool:
        """Give a message that nobody has another payload; return whether there is one. Raises Missing."""
        with acting(by):
            return queues.edit(self._settings, name, number, payload, reason)

    def sagas(self, wanted: SagaSelection, limit: int = PAGE, after: int = 0) -> Page[SagaRow]:
        """Read the sagas that a filter selects, the oldest first; by default those that have not ended."""
        with reading():
            rows = sagas.listed(self._settings, wanted, limit + 1, after)
        return _page(rows, limit, lambda each: each.id)

    def saga(self, name: str, limit: int = PAGE, after: int = 0) -> tuple[SagaRow, Page[SagaEntry]]:
        """Read a saga by its id, and what has happened in it, in order. Raises Missing."""
        with reading():
            found, rows = sagas.shown(self._settings, name, limit + 1, after)
        return found, _page(rows, limit, lambda each: each.number)

    def schedules(self, limit: int = PAGE, after: str = "") -> tuple[list[ScheduleRow], str | None]:
        """Read schedules in the order of their names, and the name after which more follow; None at the end."""
        with reading():
            rows = schedules.listed(self._settings, after, limit + 1)
        return rows[:limit], rows[limit - 1].name if len(rows) > limit else None

    def schedule(self, name: str) -> tuple[ScheduleRow, list[datetime]]:
        """Read a schedule, and compute its next ten times. Raises Missing."""
        with reading():
            return schedules.upcoming(self._settings, name, _TIMES)

    def tokens(self, limit: int = PAGE, before: int | None = None) -> Page[TokenRow]:
        """Read the tokens of the HTTP API, newest first, also those that are revoked or have expired."""
        with reading():
            rows = tokens.newest(self._settings, limit + 1, before)
        return _page(rows, limit, lambda each: each.id)

    def create_token(
        self,
        name: str,
        rights: Sequence[str],
        hosts: Sequence[str],
        types: Sequence[str],
        expires: str | None,
        by: str,
        reason: str,
    ) -> str:
        """Create a token, and return it: nobody can read it again. Without hosts or types it is for every one."""
        try:
            length = length_of(expires) if expires else None
        except ValueError as error:
            raise ConfigurationError(f"expires: {error}") from None
        with acting(by):
            return tokens.create(
                self._settings, name, rights, hosts or [EVERY], types or [EVERY], length, reason
            )

    def stopped_handlers(self) -> list[brakes.BrakedHandler]:
        """Read the handlers that the brake has stopped."""
        with reading(), reach_target(self._settings) as target:
            return brakes.braked(target, self.name)

    def deferred(
        self, selection: DeferredSelection, limit: int = PAGE, after: int = 0
    ) -> Page[Deferred]:
        """List deferred transactions, oldest first."""
        with reading(), reach_target(self._settings) as target:
            rows = deferred_selection.listed(target, self.name, selection, limit + 1, after)
        return _page(rows, limit, lambda each: each.id)

    def find_deferred(self, selection: DeferredSelection) -> FoundDeferred:
        """Find the deferred transactions that an action would concern."""
        with reading(), reach_target(self._settings) as target:
            return DeferredTransactions(self._settings, target).find(selection)

    def run_deferred(self, selection: DeferredSelection, by: str, reason: str) -> int:
        """Make deferred transactions due now; return how many."""
        with acting(by), reach_target(self._settings) as target:
            deferrals = DeferredTransactions(self._settings, target)
            return sum(deferrals.run(deferrals.find(selection), reason).values())

    def cancel_deferred(self, selection: DeferredSelection, by: str, reason: str) -> int:
        """Dead-letter deferred transactions; return how many."""
        with acting(by), reach_target(self._settings) as target:
            deferrals = DeferredTransactions(self._settings, target)
            return deferrals.cancel(deferrals.find(selection), reason)

    def dead_letters(
        self, selection: DeadLetterSelection, limit: int = PAGE, before: int | None = None
    ) -> Page[DeadTransaction]:
        """List dead transactions and dead messages of queues, newest first. Raises Missing for another queue."""
        with reading(), reach_target(self._settings) as target:
            wanted = printed(self._settings, target, selection)
            rows = dead_letter_selection.listed(
                target, self.name, wanted, limit + 1, DeadTransaction, before=before
            )
        return _page(rows, limit, lambda each: each.number)

    def dead_kinds(self) -> tuple[dict[str, int], Sequence[Kind] | None]:
        """Count dead events by status, and the commonest kinds of fault; None if counting these takes long."""
        with reading(), reach_target(self._settings) as target:
            statuses = dead_letter_selection.statuses(target, self.name)
        try:
            with reading(COUNT_SECONDS), reach_target(self._settings) as target:
                return statuses, dead_letter_selection.kinds(target, self.name, _KINDS)
        except psycopg.errors.QueryCanceled:
            return statuses, None

    def dead_consumers(self) -> list[str]:
        """List what dead letters may belong to beside the target: sinks, and queues as `queue:NAME`."""
        with reading(), reach_target(self._settings) as target:
            names = stored_queues.names(target, self.name)
        return [*sorted(self._settings.sink_handlers), *map(dead_letters.of_queue, names)]

    def dead_letter(
        self,
        dead_letter_id: int,
        queue: str | None = None,
        limit: int = _EVENTS_SHOWN,
        after: int | None = None,
    ) -> DeadTransactionPage:
        """Read the dead transaction of a dead letter, with its events after the dead letter `after`. Raises Missing.

        With a `queue`, the dead letter is a message of it.
        """
        wanted = dead_letter_selection.one(dead_letter_id, queue)
        with reading(), reach_target(self._settings) as target:
            number = dead_letter_selection.transaction_of(target, self.name, wanted)
            if number is None:
                raise self._no_dead_letter(dead_letter_id)
            events = dead_letter_selection.events(target, number, limit + 1, after or 0)
            done = dead_letters.actions(target, number)
            running = presence.instances(target, self.name)
        page = _page(events, limit, lambda each: int(each["id"]))
        return DeadTransactionPage(number, page, done, running)

    def payload(self, dead_letter_id: int, queue: str | None = None) -> str:
        """Read the whole payload of a dead letter, as JSON text. Raises Missing."""
        wanted = dead_letter_selection.one(dead_letter_id, queue)
        with reading(), reach_target(self._settings) as target:
            text = dead_letter_selection.payload(target, self.name, wanted)
        if text is None:
            raise self._no_dead_letter(dead_letter_id)
        return text

    def edit(
        self, dead_letter_id: int, payload: str, by: str, reason: str, queue: str | None = None
    ) -> None:
        """Replace the payload of an event of a dead transaction."""
        with acting(by), reach_target(self._settings) as target:
            DeadLetters(self._settings, target).edit(dead_letter_id, payload, reason, queue)

    def find_dead(self, selection: DeadLetterSelection) -> FoundDeadLetters:
        """Find the dead transactions that an action would concern. Raises Missing for another queue."""
        with reading(), reach_target(self._settings) as target:
            wanted = printed(self._settings, target, selection)
            return DeadLetters(self._settings, target).find(wanted)

    def replay(self, selection: DeadLetterSelection, by: str, reason: str) -> QueuedReplay:
        """Queue dead transactions to be applied or delivered again, and put dead messages into their queues.

        Raises Missing for another queue.
        """
        with acting(by), reach_target(self._settings) as target:
            dead = DeadLetters(self._settings, target)
            found = dead.find(printed(self._settings, target, selection))
            warnings = dead.warnings(found)
            queued = len(dead.replay(found, reason))
            if queued:
                warnings += dead.idle(found)
        return QueuedReplay(queued, warnings)

    def discard(self, selection: DeadLetterSelection, by: str, reason: str) -> int:
        """Discard dead transactions; return how many. Raises Missing for another queue."""
        with acting(by), reach_target(self._settings) as target:
            dead = DeadLetters(self._settings, target)
            found = dead.find(printed(self._settings, target, selection))
            return dead.discard(found, reason)

    def actions(
        self, limit: int = PAGE, before: int | None = None, sink: str | None = None
    ) -> Page[Action]:
        """List the actions on the group and its sinks, newest first."""
        with reading(), reach_target(self._settings) as target:
            rows = actions.recent(target, self.name, limit + 1, sink, before)
        return _page(rows, limit, lambda each: each.id)

    def dead_letter_actions(
        self, limit: int = PAGE, before: int | None = None
    ) -> Page[ActedOnDead]:
        """List the actions on dead letters, newest first."""
        with reading(), reach_target(self._settings) as target:
            rows = dead_letter_selection.acted(target, self.name, limit + 1, before)
        return _page(rows, limit, lambda each: each.id)

    def _no_dead_letter(self, dead_letter_id: int) -> Missing:
        return Missing(f"there is no dead letter {dead_letter_id} in group {self.name!r}")
