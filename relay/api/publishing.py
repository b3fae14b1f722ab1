"""`POST /v1/events`: publishes events, and responds after their commit, or with the event that answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from http import HTTPStatus
from threading import Lock
from typing import Annotated, Any
from uuid import UUID

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Header, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from relay.api.callers import Publishing, TokenCaller
from relay.api.filters import MOST_PATTERNS, Pattern, ReadFilter
from relay.api.replies import MOST_SECONDS, Waiter
from relay.api.shared_commits import WAIT_SECONDS, CommitWriter
from relay.api.streams import Streams
from relay.config.settings import Settings
from relay.event_types.registry import registered
from relay.event_types.upcasting import Upcasting
from relay.intake.messages import (
    MOST_EVENTS,
    Fault,
    IncomingEvents,
    Invalid,
    MessageReader,
    NotPermitted,
    TooMany,
    derived,
    json_path,
)
from relay.intake.publishing import Accepted, Conflict, NotCommitted, Refused
from relay.store.log_pages import LogEvent
from relay.web.problems import PROBLEM, HttpRefusal, Problem, described_problems, problem
from relay.web.requests import is_json

router = APIRouter(prefix="/v1", tags=["publish"])

_RETRY_AFTER = {"retry-after": "2"}
_ASIDE_BYTES = 32_000
"""A larger body is read in another thread, beside the event loop."""
_READ_AT_ONCE = 2
"""How many larger bodies are read at once: JSON takes up to thirty times its bytes in memory."""
_KEY_CHARACTERS = 255
_GLOB = re.compile(r"[*?\[]")


def _without_default(schema: dict[str, Any]) -> None:
    # It may be left out, and it may not be null.
    del schema["default"]


_Text = Annotated[str, Field(pattern="^[^\\u0000]*$")]
"""A text that PostgreSQL can store."""


class EventMessage(BaseModel):
    """An event to publish, for the description of the API: `MessageReader` reads it."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    host_id: UUID
    """The host (tenant) of the event. The events of a list have one host and one user."""
    event_type: Annotated[_Text, Field(min_length=1)]
    payload: Any
    """Any JSON value, without the character U+0000."""
    id: Annotated[UUID | SkipJsonSchema[None], Field(json_schema_extra=_without_default)] = None
    """The id of the event; without one it gets an id, a derived one with the header `Idempotency-Key`."""
    user_id: UUID | None = None
    aggregate_type: _Text | None = None
    aggregate_id: _Text | int | None = None
    aggregate_version: Annotated[int, Field(gt=-(2**63), lt=2**63)] | None = None
    event_ts: datetime | None = None
    """When the event happened, with an offset; by default, now."""
    deliver_at: datetime | None = None
    """No handler gets the event before that."""
    metadata: dict[str, Any] | None = None


class PublishedEvents(BaseModel):
    """Events that are committed: the business transaction that they are, and their ids in order."""

    transaction_id: UUID
    ids: list[UUID]
    reply: dict[str, Any] | None = None
    """With `wait`: the event that answers, as it was published; null if none came in time."""


class InvalidMessage(Problem):
    """A message that was not published. `errors` has each fault, with the JSONPath of the value."""

    errors: list[dict[str, str]] = Field(default_factory=list)


class Intake:
    """What reads and publishes messages, for one outbox. The writer starts with the first message."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigurationError for an event type of the configuration that cannot be used."""
        self.reader = MessageReader(Upcasting(registered(settings.events)))
        self.writer = CommitWriter(settings.source_dsn)
        self._large = CapacityLimiter(_READ_AT_ONCE)
        self._lock = Lock()
        self._is_started = False

    async def read(self, body: bytes, caller: TokenCaller, key: str | None) -> IncomingEvents:
        """Read what a caller sends. Raises what `MessageReader.read` raises."""
        id_of = () if key is None else (derived(caller.sender, key),)
        arguments = (body, caller.may_see, *id_of)
        if len(body) > _ASIDE_BYTES:
            return await to_thread.run_sync(self.reader.read, *arguments, limiter=self._large)
        if self.reader.runs_code:
            return await run_in_threadpool(self.reader.read, *arguments)
        return self.reader.read(*arguments)

    async def publish(self, submission: IncomingEvents) -> Accepted:
        """Publish a submission. Raises Conflict, Refused and NotCommitted."""
        with self._lock:
            if not self._is_started:
                self._is_started = True
                self.writer.start()
        future = self.writer.submit(submission)
        try:
            # The writer answers in time, unless its connection hangs.
            async with asyncio.timeout(WAIT_SECONDS + 1.0):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise NotCommitted("the database does not answer") from None

    def close(self) -> None:
        """Stop the writer."""
        with self._lock:
            self.writer.close()


@router.post(
    "/events",
    status_code=202,
    response_model=PublishedEvents,
    summary="Publish events",
    responses={
        200: {
            "model": PublishedEvents,
            "description": "with `wait`: the event is published, and `reply` answers it; without: the same events were "
            "published before",
        },
        202: {"description": "the events are published; with `wait`: no answer came in time"},
        **described_problems(
            {
                400: "an event is invalid; `errors` has each fault",
                409: "an id is that of an event with other content",
            },
            InvalidMessage,
        ),
        **described_problems(
            {
                413: "there are too many events, or one is too large",
                415: "the body is not application/json",
            }
        ),
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "description": "An event, or a list of events of one business transaction.",
            "content": {
                "application/json": {
                    "schema": {
                        "anyOf": [
                            EventMessage.model_json_schema(),
                            {
                                "type": "array",
                                "items": EventMessage.model_json_schema(),
                                "minItems": 1,
                                "maxItems": MOST_EVENTS,
                            },
                        ]
                    }
                }
            },
        }
    },
)
async def publish(
    request: Request,
    caller: Publishing,
    idempotency_key: Annotated[
        str | None,
        Header(
            min_length=1,
            max_length=_KEY_CHARACTERS,
            description="Events without an id get ids that are derived from the name's first token and this key: "
            "a repetition is not published again.",
        ),
    ] = None,
    wait: Annotated[
        int | None,
        Query(
            ge=1,
            le=MOST_SECONDS,
            description="How many seconds to wait for the event that answers a single one. Needs the right to read.",
        ),
    ] = None,
    reply_type: Annotated[
        list[Pattern] | None,
        Query(
            max_length=MOST_PATTERNS,
            description="With `wait`: only events of these types, or that match these globs, answer.",
        ),
    ] = None,
) -> Response:
    """Publish an event, or a list of events of one business transaction; the response comes after the commit.

    Repeat a request that was not responded to, or with 503, with the same ids or the same `Idempotency-Key`.
    """
    if not is_json(request.headers):
        return problem(HttpRefusal(415, "send the body with Content-Type: application/json"))
    if wait is None and reply_type:
        return problem(HttpRefusal(400, "reply_type: is for a request with wait"))
    if wait is not None and (refusal := _refusal_to_wait(caller, reply_type or [])) is not None:
        return problem(refusal)
    body = await request.body()
    until = asyncio.get_running_loop().time() + (wait or 0)
    intake: Intake = request.app.state.intake
    streams: Streams = request.app.state.streams
    reply: LogEvent | None = None
    try:
        submission = await intake.read(body, caller, idempotency_key)
        if wait is None:
            accepted = await intake.publish(submission)
        else:
            if len(submission.ids) > 1:
                return problem(
                    HttpRefusal(400, "wait: is for a single event, and the list has more")
                )
            wanted = await ReadFilter.of(
                frozenset([submission.host_id]), tuple(reply_type or ()), None, None, caller
            )
            if (full := streams.refusal(wanted)) is not None:
                return problem(full)
            waiter = Waiter(wanted, submission.ids[0])
            with streams.registered(waiter):
                accepted = await intake.publish(submission)
                if accepted.is_repeated:
                    waiter.look()
                reply = await _reply(request, streams, waiter, until)
    except Invalid as error:
        return _invalid(400, "the message is invalid", error.faults)
    except TooMany as error:
        return problem(HttpRefusal(413, str(error)))
    except NotPermitted:
        return problem(
            HttpRefusal(
                403, f"the token {caller.name} may not publish events of this host and type"
            )
        )
    except Conflict as error:
        return _conflict(error, is_list=body.lstrip()[:1] == b"[")
    except Refused as error:
        if error.is_too_large:
            return problem(HttpRefusal(413, str(error)))
        return _invalid(400, "the database refuses the events", [Fault("$", str(error))])
    except NotCommitted as error:
        return problem(
            HttpRefusal(503, f"{error}: repeat the request with the same ids", _RETRY_AFTER)
        )
    ids = ",".join(f'"{each}"' for each in submission.ids)
    text = f'"transaction_id":"{accepted.transaction_id}","ids":[{ids}]'
    is_done = accepted.is_repeated
    if wait is not None:
        is_done = reply is not None
        # As PostgreSQL prints it, so that numbers keep every digit.
        text += f',"reply":{"null" if reply is None else reply.text}'
    return Response(
        f"{{{text}}}",
        200 if is_done else 202,
        {"location": f"/v1/events/{submission.ids[0]}"},
        media_type="application/json",
    )


def _refusal_to_wait(caller: TokenCaller, reply_types: Sequence[str]) -> HttpRefusal | None:
    """Return why the caller may not wait for answers of these types."""
    if "read" not in caller.rights:
        return HttpRefusal(
            403, f"wait: the token {caller.name} gives no right to read, which an answer needs"
        )
    for each in reply_types:
        if not caller.may_see_type(each) and not _GLOB.search(each):
            return HttpRefusal(
                403, f"reply_type: the token {caller.name} may not read events of the type {each}"
            )
    return None


async def _reply(
    request: Request, streams: Streams, waiter: Waiter, until: float
) -> LogEvent | None:
    """Return the event that answers a request; None if there is none `until` then, or the client goes before."""
    watcher = asyncio.create_task(_watch(request, waiter))
    try:
        async with asyncio.timeout_at(until):
            read = partial(streams.read, waiter.filter.caller)
            await waiter.wait(read, streams.waiters.condition)
    except TimeoutError:
        pass
    finally:
        watcher.cancel()
    streams.waiters.count(waiter)
    return waiter.answer


async def _watch(request: Request, waiter: Waiter) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    waiter.end()


def _conflict(error: Conflict, is_list: bool) -> Response:
    faults = [
        Fault(
            json_path((ordinal - 1, "id") if is_list else ("id",)),
            "an event of this id is published already, with other content or in another list",
        )
        for ordinal in error.ordinals
    ]
    return _invalid(409, "an id is that of an event that is published already", faults)


def _invalid(status: int, detail: str, faults: Sequence[Fault]) -> Response:
    content: dict[str, Any] = InvalidMessage(
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        errors=[{"path": each.path, "message": each.message} for each in faults],
    ).model_dump()
    return JSONResponse(content, status, media_type=PROBLEM)
