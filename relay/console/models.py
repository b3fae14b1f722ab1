"""What the HTTP API takes and answers, beyond the rows that relay's own functions return."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
)

from relay.admin.status import Status
from relay.console.group import MOST, PAGE
from relay.faults import ConfigurationError
from relay.store import dead_letter_selection, deferred_selection
from relay.store.dead_letters import DeadLetterAction

REASON_CHARACTERS = 1_000

ReasonText = Annotated[
    str, StringConstraints(strip_whitespace=True, min_length=1, max_length=REASON_CHARACTERS)
]
Text = Annotated[str, StringConstraints(max_length=1_000)]


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


Moment = Annotated[datetime, AfterValidator(_aware)]
"""A time; without a zone it is UTC."""


class Model(BaseModel):
    """An object of the API; unknown members are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DeadLetterFilter(Model):
    """Which dead transactions: those with an event that all of this holds of."""

    ids: list[int] = Field(
        default=[], description="Dead letters; their transactions are taken whole."
    )
    transaction: Text | None = None
    host: Text | None = None
    handler: Text | None = Field(None, description="The handler that failed.")
    kind: Text | None = Field(
        None,
        description="The kind of fault: what the exception begins with, as CheckViolation [23514].",
    )
    event_type: Text | None = None
    sink: Text | None = Field(None, description="The sink that it belongs to; empty: the target.")
    exception: Text | None = Field(None, description="A part of the exception's text.")
    since: Moment | None = Field(None, description="Dead-lettered then or later.")
    until: Moment | None = Field(None, description="Dead-lettered before.")
    status: Literal["dead", "replaying", "replayed", "discarded"] | None = None

    def asked(self) -> dead_letter_selection.DeadLetterSelection:
        """The filter of the store."""
        return dead_letter_selection.DeadLetterSelection(
            tuple(self.ids),
            self.transaction,
            self.host,
            self.handler,
            self.event_type,
            self.since,
            self.until,
            self.exception,
            self.status,
            self.sink,
            self.kind,
        )


class DeferredFilter(Model):
    """Which deferred transactions: those that all of this holds of."""

    ids: list[int] = []
    sink: Text | None = Field(None, description="The sink that it goes to; empty: the target.")
    handler: Text | None = Field(None, description="The handler that failed last.")
    kind: Literal["retry", "holding", "replay", "scheduled", "blocked"] | None = None
    key: Text | None = Field(None, description="One of its ordering keys.")
    host: Text | None = None

    def asked(self) -> deferred_selection.DeferredSelection:
        """The filter of the store."""
        return deferred_selection.DeferredSelection(
            tuple(self.ids), self.sink, self.handler, self.kind, self.key, self.host
        )


class DeadLetterQuery(DeadLetterFilter):
    """A page of dead transactions; `before` is `next` of the page before."""

    limit: int = Field(PAGE, ge=1, le=MOST)
    before: int | None = None


class DeferredQuery(DeferredFilter):
    """A page of deferred transactions; `after` is `next` of the page before."""

    limit: int = Field(PAGE, ge=1, le=MOST)
    after: int = 0


class Act(Model):
    """Why something is done; kept with the action."""

    reason: ReasonText


class SeekAct(Act):
    """Where to go on: a c_offset, a time, beginning or end."""

    to: Text = Field(examples=["2026-03-01T12:00", "beginning", "end", "4711"])
    dry_run: bool = Field(False, description="Only say what would be done.")


class OffsetsSeekAct(SeekAct):
    """As for a sink; an LSN too. With `partition` only that one moves."""

    partition: int | None = None


class RebuildAct(Act):
    """From where everything is delivered again."""

    from_: Text = Field("beginning", alias="from")
    dry_run: bool = Field(False, description="Only say what would be done.")


class DeadLettersAct(Act):
    """Which dead transactions; `all` is needed where the filter is empty."""

    filter: DeadLetterFilter = DeadLetterFilter()
    all: bool = False


class DeferredAct(Act):
    """Which deferred transactions; `all` is needed where the filter is empty."""

    filter: DeferredFilter = DeferredFilter()
    all: bool = False


class EditAct(Act):
    """Another payload, as JSON text, so that numbers keep every digit."""

    payload: Annotated[str, StringConstraints(max_length=1_000_000)]


class Problem(BaseModel):
    """What went wrong, as RFC 9457 describes it; `detail` is one line for a person."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str


class Changed(BaseModel):
    """Whether that changed anything."""

    changed: bool


class Count(BaseModel):
    """How many transactions that concerned."""

    transactions: int
    warnings: list[str] = []


class Moved(BaseModel):
    """Where a sink or a group goes on, in words; what of its dead and deferred transactions is given up for that."""

    goes_on: str
    dead: int
    deferred: int
    done: bool
    again: int | None = Field(
        None, description="Events that are delivered again, where that is known."
    )
    skipped: int | None = Field(
        None, description="Events that are passed over, where that is known."
    )


class GroupName(BaseModel):
    """A group that the console shows."""

    name: str


class StatusAnswer(BaseModel):
    """What `relay status --json` prints, and what is not as it should be, a line each."""

    troubles: list[str]
    status: dict[str, Any]

    @classmethod
    def of(cls, found: Status, troubles: list[str]) -> StatusAnswer:
        """The answer for a status."""
        return cls(troubles=troubles, status=found.as_json())


class Payload(BaseModel):
    """A payload as JSON text."""

    payload: str


class DeadAnswer(BaseModel):
    """A dead transaction: some of its events, of long values the beginning; what was done about it."""

    number: int
    events: list[dict[str, Any]]
    next: int | None = Field(description="Give it as `after` for the events that follow.")
    actions: Sequence[DeadLetterAction]


def one_line(error: ValidationError, prefix: str = "") -> str:
    """What is wrong with the first value, and where. Never the value."""
    fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return described(fault["loc"], fault["msg"], prefix)


def described(location: Sequence[int | str], message: str, prefix: str = "") -> str:
    """A fault of validation on one line."""
    key = ".".join(str(part) for part in location if part not in ("body", "query", "path"))
    text = message.removeprefix("Value error, ")
    return f"{prefix}{key or 'the request'}: {text[:1].lower()}{text[1:]}"


def dead_letter_filter(values: dict[str, Any]) -> DeadLetterFilter:
    """The filter that fields of a form give; empty ones say nothing. Raises ConfigurationError."""
    try:
        return DeadLetterFilter.model_validate(values)
    except ValidationError as error:
        raise ConfigurationError(one_line(error)) from None


def deferred_filter(values: dict[str, Any]) -> DeferredFilter:
    """The filter that fields of a form give. Raises ConfigurationError."""
    try:
        return DeferredFilter.model_validate(values)
    except ValidationError as error:
        raise ConfigurationError(one_line(error)) from None
