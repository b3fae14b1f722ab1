"""The routes by which programs read events, and learn what has become of one."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, Header, Query, Request
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from relay.admin import events
from relay.admin.events import QUEUE, EventDestination
from relay.api.callers import Reading, TokenCaller
from relay.api.database import ApiDatabase
from relay.api.filters import ReadFilter, asked
from relay.api.positions import LONGEST, LogHistory, parse, present, read_kept
from relay.api.streams import EventStream
from relay.api.turns import IN_TURN
from relay.config.settings import Settings
from relay.store.api_tokens import EVERY
from relay.store.attempts import KeptAttempt
from relay.store.connections import Connection
from relay.store.dead_letters import queue_of
from relay.store.log_pages import LogEvent, LogPosition, PageSize
from relay.web.problems import described_problems
from relay.web.sessions import reading

router = APIRouter(prefix="/v1/events", tags=["events"])

_PAGE_BYTES = 4 * 1024 * 1024
"""About how large an answer is at most."""
_MOST_LOOKED_AT = 10_000
"""How many events a request looks at that the caller may not see, or does not want."""
_KIND = re.compile(r"[\w.]+(?: \[\w+\])?(?=:|$)")
"""The kind of a fault, with which a reason begins: `CheckViolation [23514]`. The rest may quote a payload."""


def _kind(reason: str | None, of_queue: bool) -> str | None:
    # What a worker says of a message is a text of its own, whose first word may be a value.
    found = None if of_queue else _KIND.match(reason or "")
    return found[0] if found else None


class EventState(BaseModel):
    """How far an event is at a destination: the target, a sink or a queue."""

    destination: str = Field(description="target, sink or queue")
    name: str = Field(description="the sink or the queue; empty for the target")
    handlers: list[str] = Field(description="the handlers of the target")
    state: str = Field(
        description="waiting, delivered, dropped, skipped (the sink was moved past it), before (the sink began after "
        "it), passed (no attempt of it is kept), unrouted, deferred, cancelled, dead, replaying, replayed, discarded, "
        "that of a message of a queue, or unknown for a sink that has never been worked"
    )
    attempts: int | None
    since: datetime | None
    until: datetime | None = Field(description="when it is tried next")
    reason: str | None = Field(
        description="the kind of fault, without what it says of the payload; none of a queue"
    )

    @classmethod
    def of(cls, found: EventDestination) -> EventState:
        """Return the state at a destination."""
        return cls(
            destination=found.kind,
            name=found.name,
            handlers=list(found.handlers),
            state=found.state,
            attempts=found.attempts,
            since=found.since,
            until=found.until,
            reason=_kind(found.reason, found.kind == QUEUE),
        )


class EventAttempt(BaseModel):
    """An attempt to deliver an event, or to work its message of a queue, as it is kept."""

    sink: str = Field(description="the sink, or `queue:` and the name of the queue")
    destination: str | None = Field(
        description="where it went within the sink, such as an address; null for a token that is not for every host "
        "and type"
    )
    number: int
    began_at: datetime = Field(description="without seconds, when it ended")
    seconds: float | None
    outcome: str = Field(description="delivered, dropped or failed")
    status: int | None = Field(description="of an HTTP response")
    reason: str | None = Field(description="the kind of fault; none of a queue")
    is_resend: bool

    @classmethod
    def of(cls, kept: KeptAttempt, sees_all: bool) -> EventAttempt:
        """Return an attempt as a caller sees it: one that does not see all is not told of addresses of others."""
        kind = _kind(kept.error, queue_of(kept.consumer) is not None)
        return cls(
            sink=kept.consumer,
            destination=kept.destination if sees_all else None,
            number=kept.number,
            began_at=kept.began_at,
            seconds=kept.seconds,
            outcome=kept.outcome,
            status=kept.status,
            reason=kind,
            is_resend=kept.resent_by is not None,
        )


class EventProgress(BaseModel):
    """An event, and how far it is. Without a row in the outbox, all but the id and the states is null."""

    id: str
    in_outbox: bool
    event_type: str | None
    host_id: str | None
    aggregate_type: str | None
    aggregate_id: str | None
    transaction_id: str | None
    event_ts: str | None
    deliver_at: str | None
    states: list[EventState]
    attempts: list[EventAttempt] = Field(description="those that are kept, the newest first")


class EventListing(BaseModel):
    """A page of events, in the order of the log."""

    events: list[dict[str, Any]] = Field(description="the events, as they were published")
    next: str = Field(description="the position after them: `after` of the next page")
    more: bool = Field(description="whether there may be more now")


_GONE = described_problems(
    {
        410: "retention has removed events after the position, or the database server was replaced by one that may "
        "lack events before it"
    }
)
_After = Annotated[
    str,
    Query(
        max_length=LONGEST,
        description="The position after which to read: `next` or the id of an event, `beginning` or `now`.",
    ),
]


@router.get(
    "",
    dependencies=[IN_TURN],
    responses={200: {"model": EventListing}, **_GONE},
    response_class=JSONResponse,
)
def page(
    request: Request,
    wanted: Annotated[ReadFilter, Depends(asked)],
    after: _After = "beginning",
    limit: Annotated[int, Query(ge=1, le=1000, description="The most events.")] = 100,
) -> Response:
    """Read events of the log, from a position on. A page may have none although there is more."""
    database: ApiDatabase = request.app.state.database
    history: LogHistory = request.app.state.history
    start = parse(after)
    found: list[str] = []
    with database.connection() as conn:
        if start is None:
            end, more = present(conn, history), False
        else:
            found, end, more = _page(conn, history, start, wanted.test(), limit)
    # As PostgreSQL prints them, so that numbers keep every digit.
    events = ",".join(found)
    text = f'{{"events":[{events}],"next":"{end}","more":{"true" if more else "false"}}}'
    return Response(text, media_type="application/json")


def _page(
    conn: Connection,
    history: LogHistory,
    after: LogPosition,
    takes: Callable[[LogEvent], bool],
    limit: int,
) -> tuple[list[str], LogPosition, bool]:
    """Return up to `limit` events after a position, the position after them, and whether there may be more."""
    found: list[str] = []
    bytes_left, looked_at, size = _PAGE_BYTES, 0, PageSize()
    while looked_at < _MOST_LOOKED_AT:
        read = read_kept(conn, history, after, size.events)
        after = read.end
        if not read.transactions:
            return found, after, False
        for transaction in read.transactions:
            for event in transaction.events:
                if not takes(event):
                    continue
                found.append(event.text)
                bytes_left -= len(event.text)
                if len(found) == limit or bytes_left <= 0:
                    return found, transaction.position_after(event), True
        size.note(read)
        looked_at += read.events
    return found, after, True


@router.get(
    "/stream",
    responses={
        200: {
            "description": "Server-sent events. `data` is the event, `id` the position after it.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        },
        204: {
            "description": "more than api.replay events come after the position: read pages first"
        },
        **_GONE,
    },
    response_class=Response,
)
async def stream(
    request: Request,
    wanted: Annotated[ReadFilter, Depends(asked)],
    after: _After = "now",
    last_event_id: Annotated[
        str, Header(max_length=LONGEST, description="What a client that connects again sends.")
    ] = "",
    access_token: Annotated[
        str | None, Query(description="The token, for browsers, whose EventSource sends no header.")
    ] = None,
) -> Response:
    """Stream the events that are published from now on, or from a position on."""
    return EventStream(request.app.state.streams, wanted, parse(last_event_id or after))


@router.get(
    "/{event_id}",
    dependencies=[IN_TURN],
    responses=described_problems({404: "there is no such event"}),
)
def event(request: Request, event_id: UUID, caller: Reading) -> EventProgress:
    """Say how far an event is at each destination that today's routes give it."""
    settings: Settings = request.app.state.settings
    with reading():
        try:
            found = events.find(settings, str(event_id))
        except events.UnknownEvent:
            raise _unknown() from None
    if not _may_see(caller, found):
        raise _unknown()
    return EventProgress(
        id=found.id,
        in_outbox=found.in_outbox,
        event_type=found.event_type,
        host_id=found.host_id,
        aggregate_type=found.aggregate_type,
        aggregate_id=found.aggregate_id,
        transaction_id=found.transaction_id,
        event_ts=found.event_ts,
        deliver_at=found.deliver_at,
        states=[EventState.of(each) for each in found.destinations],
        attempts=[EventAttempt.of(each, _sees_all(caller)) for each in found.attempts],
    )


def _may_see(caller: TokenCaller, found: events.FoundEvent) -> bool:
    """Whether a caller may see an event: of one that is gone, its host and type are not known."""
    if not found.in_outbox:
        return _sees_all(caller)
    return caller.may_see(found.host_id, found.event_type)


def _sees_all(caller: TokenCaller) -> bool:
    return EVERY in caller.hosts and EVERY in caller.types


def _unknown() -> HTTPException:
    # The same for one that the token is not for: nobody learns which ids others have.
    return HTTPException(404, "there is no such event, or the token is not for it")
