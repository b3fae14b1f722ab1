"""Requests and responses of the HTTP API, beyond the rows that other modules of relay define."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    create_model,
)

from relay.admin.acts import Act, option
from relay.admin.status import Status
from relay.console.group import MOST, PAGE
from relay.faults import ConfigurationError
from relay.observe.troubles import Trouble, Urgency
from relay.source.outbox.search import EventSearch
from relay.store.dead_letters import DeadLetterAction, of_queue
from relay.store.dead_letters.selection import DeadLetterSelection
from relay.store.filters import DeferredSelection, Filter, Moment
from relay.store.queues import MessageSelection, QueueFigures, QueueItem
from relay.store.sagas import SagaEntry, SagaRow
from relay.store.schedules import ScheduleRow
from relay.web.problems import described

REASON_CHARACTERS = 1_000

Text = Annotated[str, StringConstraints(max_length=1_000)]
ReasonText = Annotated[
    str, StringConstraints(strip_whitespace=True, min_length=1, max_length=REASON_CHARACTERS)
]


class Model(BaseModel):
    """An object of the API; unknown members are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EventFilter(Filter):
    """Selects events of the outbox that meet every condition."""

    host: Text | None = Field(None, description="Their host_id.")
    event_type: Text | None = None
    aggregate_type: Text | None = None
    aggregate: Text | None = Field(None, description="Their aggregate_id.")
    since: Moment | None = Field(None, description="Published then or later, by event_ts.")
    until: Moment | None = Field(None, description="Published before, by event_ts.")

    def search(self) -> EventSearch:
        """Return the search of the outbox."""
        return EventSearch(
            self.host, self.event_type, self.aggregate_type, self.aggregate, self.since, self.until
        )


class EventQuery(EventFilter):
    """A page of events; `before` is `next` of the page before."""

    limit: int = Field(PAGE, ge=1, le=MOST)
    before: Text | None = None


class DeadLetterQuery(DeadLetterSelection):
    """A page of dead transactions; `before` is `next` of the page before."""

    limit: int = Field(PAGE, ge=1, le=MOST)
    before: int | None = None


class DeferredQuery(DeferredSelection):
    """A page of deferred transactions; `after` is `next` of the page before."""

    limit: int = Field(PAGE, ge=1, le=MOST)
    after: int = 0


class Reasoned(Model):
    """An action, and its reason, which is stored with it."""

    reason: ReasonText


def body_of(act: Act) -> type[Reasoned]:
    """Return what the route of an act takes."""
    if not act.parameters:
        return Reasoned
    members: dict[str, Any] = {}
    if act.plans:
        only = Field(False, description="Only report what the action would do.")
        members["dry_run"] = (bool, only)
    for each in act.parameters:
        kind, given = get_args(each.annotation)
        default = ... if each.default is each.empty else each.default
        described = Field(
            default,
            alias=option(each),
            description=given.help,
            examples=list(given.examples) or None,
        )
        members[each.name] = (Text if kind is str else kind, described)
    name = f"{act.subject.name} {act.name} act".title().replace(" ", "")
    return create_model(name, __base__=Reasoned, __doc__=act.does, **members)


class QueueAnswer(Model):
    """A queue, and messages of it that are not done, the oldest first."""

    figures: QueueFigures
    items: list[QueueItem]


class SagaAnswer(Model):
    """A saga, and what has happened in it; `next` is `after` of the following entries."""

    saga: SagaRow
    entries: list[SagaEntry]
    next: int | None


class SchedulesAnswer(Model):
    """A page of schedules; `next` is `after` of the following one."""

    rows: list[ScheduleRow]
    next: str | None


class ScheduleAnswer(Model):
    """A schedule, whose last times are `schedule.last`, and its next ten times."""

    schedule: ScheduleRow
    next: list[datetime]


class TokenAct(Reasoned):
    """A new token of the HTTP API."""

    name: Text
    rights: list[Literal["read", "publish"]] = ["read"]
    hosts: list[Text] = Field([], description="UUIDs; empty: every host.")
    types: list[Text] = Field([], description="Names or globs such as order.*; empty: every type.")
    expires: Text | None = Field(None, description="After how long it is refused, such as 90d.")


class NewToken(BaseModel):
    """A token, which relay cannot show again: it stores the hash only."""

    token: str


class QueueReplayAct(Reasoned):
    """Which dead letters of a queue are enqueued again: all, or those with some ids."""

    ids: list[int] = []

    def selection(self, queue: str) -> DeadLetterSelection:
        """Return the selection of the store."""
        return DeadLetterSelection(ids=self.ids, sink=of_queue(queue))


class QueueDiscardAct(QueueReplayAct):
    """Which dead letters of a queue are deleted; without ids it needs `all`."""

    all: bool = False


class MessagesAct(Reasoned):
    """An action on messages of a queue, which needs a condition."""

    filter: MessageSelection


class MoveMessagesAct(MessagesAct):
    """Another time for messages that wait for their time, or for a retry."""

    to: Moment | None = Field(None, description="The new time; null: now.")


class ResendAct(Reasoned):
    """Which events a sink gets again: those with some ids, or without ids those that meet every condition."""

    ids: list[Text] = []
    filter: EventFilter = EventFilter()
    endpoint: Text | None = Field(None, description="Only to this one of several endpoints.")


class OffsetsSeekAct(Reasoned):
    """A seek of the group, to a c_offset, an LSN, a time, beginning or end; with `partition`, of that one only."""

    to: Text = Field(examples=["2026-03-01T12:00", "beginning", "end", "4711"])
    partition: int | None = None
    dry_run: bool = Field(False, description="Only report what the action would do.")


class DeadLettersAct(Reasoned):
    """An action on dead transactions; an empty filter needs `all`."""

    filter: DeadLetterSelection = DeadLetterSelection()
    all: bool = False


class DeferredAct(Reasoned):
    """An action on deferred transactions; an empty filter needs `all`."""

    filter: DeferredSelection = DeferredSelection()
    all: bool = False


class EditAct(Reasoned):
    """A new payload, as JSON text, so that numbers keep every digit."""

    payload: Annotated[str, StringConstraints(max_length=1_000_000)]


class GroupName(BaseModel):
    """A group that the console shows."""

    name: str


class TroubleAnswer(BaseModel):
    """What needs attention: the alert that tells of it, what is wrong since when, and what cures it or shows more."""

    alert: str
    urgency: Urgency
    text: str
    cure: str | None
    since: datetime | None


class StatusAnswer(BaseModel):
    """What `relay status --json` prints, and what needs attention."""

    troubles: list[TroubleAnswer]
    status: dict[str, Any]

    @classmethod
    def of(cls, status: Status, troubles: Sequence[Trouble]) -> StatusAnswer:
        """Return the response for a status."""
        answers = [TroubleAnswer.model_validate(each.as_json()) for each in troubles]
        return cls(troubles=answers, status=status.as_json())


class Payload(BaseModel):
    """A payload as JSON text."""

    payload: str


class DeadAnswer(BaseModel):
    """A dead transaction: a page of its events, with long values cut, and the actions on it."""

    number: int
    events: list[dict[str, Any]]
    next: int | None = Field(description="`after` of the following page; null at the end.")
    actions: Sequence[DeadLetterAction]


Wanted = TypeVar("Wanted", bound=Filter)


def filter_of(model: type[Wanted], values: dict[str, Any]) -> Wanted:
    """Return the filter that the fields of a form make. Raises ConfigurationError."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        # Without the value.
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise ConfigurationError(described(fault["loc"], fault["msg"])) from None
