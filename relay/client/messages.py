"""The messages of a work queue as workers get them, and the statements that take and end them. No I/O."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any

from relay.client.errors import EventInvalid, WorkerError
from relay.client.event import Event, caused_by
from relay.client.payloads import encode_object
from relay.client.sessions import Statement
from relay.model.moments import moment_of
from relay.outcomes import Drop, Fail, named_wait

_LONGEST_ERROR = 4_000
"""In characters: what is stored of an error."""


def application_name(queue: str) -> str:
    """Return the name that connections of a queue's workers give the server, which keeps 63 characters of ASCII.

    The view `relay.queue_figures` counts them by it.
    """
    is_kept = len(queue) <= 50 and queue.isascii() and queue.isprintable()
    named = queue if is_kept else hashlib.sha256(queue.encode()).hexdigest()
    return f"relay worker {named}"[:63]


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A queue that its worker declares when it starts, as `relay.declare_queue` does; what is None has its default.

    `match` says which events of the log go into the queue, as in a route; None: direct messages only. `key` is what
    orders its messages: "none", "host", "user", "aggregate" or a path into payload or metadata. `backoff` and
    `max_backoff` are in seconds, and so is `keep_done`, for which done messages stay in `relay.queue_items`. `where` is
    a path of SQL/JSON which the events that match must satisfy, such as `$.payload.amount >= $least`; `params` has its
    variables. `workers` is the role whose members may take from it, `group_id` the group of relay that fills it.
    `start` puts events into it that were published before it was made: "beginning", a c_offset, or a time.
    """

    name: str
    match: Mapping[str, Any] | None = field(default_factory=dict)
    key: str | None = None
    attempts: int | None = None
    backoff: float | None = None
    max_backoff: float | None = None
    keep_done: float | None = None
    where: str | None = None
    params: Mapping[str, Any] | None = None
    workers: str | None = None
    group_id: str | None = None
    start: str | None = None

    def declaration(self) -> tuple[Statement, str]:
        """Return the statement that declares the queue, and its parameter.

        Raises WorkerError, which names the argument, for a value that JSON cannot represent.
        """
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        given = {
            name: value for name, value in values.items() if value is not None or name == "match"
        }
        listed = ", ".join(f'"{name}" => {_DECLARED[name]}' for name in given)
        statement = Statement.selecting(f"relay.declare_queue({listed})::text")
        return statement, _encoded(self.name, given)


_DECLARED = {
    "name": "p.a->>'name'",
    "match": "nullif((p.a->'match')::jsonb, 'null')",
    "key": "p.a->>'key'",
    "attempts": "(p.a->>'attempts')::int",
    "backoff": "make_interval(secs => (p.a->>'backoff')::float8)",
    "max_backoff": "make_interval(secs => (p.a->>'max_backoff')::float8)",
    "keep_done": "make_interval(secs => (p.a->>'keep_done')::float8)",
    "where": "p.a->>'where'",
    "params": "(p.a->'params')::jsonb",
    "workers": "p.a->>'workers'",
    "group_id": "p.a->>'group_id'",
    "start": "p.a->>'start'",
}


def _encoded(queue: str, given: Mapping[str, Any]) -> str:
    for name, value in given.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise WorkerError(
                f"queue {queue}: {name}: cannot be written as JSON: {error}"
            ) from None
    return json.dumps(given)


def call_of(function: str, *arguments: str, result: str = "to_json(t)") -> Statement:
    """Return a statement that calls a function of SQL with values of its parameter, a JSON object."""
    return Statement.selecting(
        f"{result}::text", f", lateral {function}({', '.join(arguments)}) as t"
    )


_SECONDS = "make_interval(secs => (p.a->>'seconds')::float8)"
_OF_ATTEMPT = ("p.a->>'queue'", "(p.a->>'id')::bigint", "(p.a->>'attempt')::int")

_TAKEN = (
    "json_build_object('more', current_setting('relay.more_messages', true) is distinct from 'false', "
    "'message', t)"
)

CLAIM = call_of("relay.claim", "p.a->>'queue'", result=_TAKEN)
LEASE = call_of("relay.lease", "p.a->>'queue'", "1", _SECONDS, result=_TAKEN)
EXTEND = call_of("relay.extend", *_OF_ATTEMPT, _SECONDS)
COMPLETE = call_of("relay.complete", *_OF_ATTEMPT, "(p.a->'result')::jsonb", "p.a->>'dropped'")
NOTE = call_of("relay.note_message", *_OF_ATTEMPT, "(p.a->'note')::jsonb")
RELEASE = call_of("relay.release", *_OF_ATTEMPT, _SECONDS, "p.a->>'error'")
RETRY = call_of("relay.retry", *_OF_ATTEMPT, _SECONDS, "p.a->>'error'")
FAIL = call_of("relay.fail", *_OF_ATTEMPT, "p.a->>'error'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message of a queue, in one attempt.

    `attempt` counts from 1. `key` orders it: one message of a key is worked at a time. `enqueued_at` and
    `first_taken_at` are times of the database's clock. The other fields are those of the event; a direct message has
    only some of them. An `event_ts` that Python has not, such as infinity or the year 12026, is the nearest that it
    has.
    """

    queue: str
    id: int
    attempt: int
    key: str | None
    event_id: str
    event_type: str
    host_id: str | None
    user_id: str | None
    aggregate_type: str | None
    aggregate_id: str | None
    aggregate_version: int | None
    event_ts: datetime | None
    transaction_id: str | None
    payload: Any
    metadata: Any
    enqueued_at: datetime
    first_taken_at: datetime
    replies: list[Event] = field(default_factory=list, repr=False, compare=False)
    """What `reply` has collected."""
    results: list[Any] = field(default_factory=list, repr=False, compare=False)
    """What `keep` was given; the last one counts."""

    endings: list[tuple[Statement, str]] = field(default_factory=list, repr=False, compare=False)
    """What ends the attempt instead of its completion, in the handler's transaction; the last one counts."""

    def reply(self, event: Event) -> None:
        """Publish an event in answer, in the commit that completes the message, with this message's host.

        Its metadata say what it answers: `causation_id` is this event's id, `correlation_id` that of the first event of
        the conversation, `hop_count` one more than this event's. All replies to a message are one business transaction.
        Raises EventInvalid for a message without a host.
        """
        if self.host_id is None:
            raise EventInvalid("reply: the message has no host_id, which an event must have")
        self.replies.append(replace(event, metadata=caused_by(self) | dict(event.metadata or {})))

    def keep(self, result: Any) -> None:
        """Have a result shown in `relay.queue_items` for the queue's `keep_done`, once the message is completed.

        It is a value that the payload of an `Event` can be; the last call counts. Raises EventInvalid for another one.
        """
        encode_object({"result": result})
        self.results.append(result)

    @property
    def ending(self) -> tuple[Statement, str]:
        """The statement that ends this attempt if its handler returns, and its parameter."""
        return self.endings[-1] if self.endings else (COMPLETE, self.of_completion)

    @property
    def of_completion(self) -> str:
        """The parameters of the statement that completes this attempt."""
        kept = {"result": self.results[-1]} if self.results else {}
        return encode_object(self.of_attempt | kept)

    @property
    def of_attempt(self) -> dict[str, Any]:
        """The parameters that name this attempt in a statement."""
        return {"queue": self.queue, "id": self.id, "attempt": self.attempt}


@dataclass(slots=True)
class Lease:
    """A leased message in its worker; `begin` opens the transaction that completes it, `note` runs NOTE."""

    begin: Callable[[LeasedMessage], Any]
    note: Callable[[LeasedMessage, str], Any]
    is_lost: bool = False
    is_completed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedMessage(Message):
    """A message under a lease, which the worker prolongs while the handler runs."""

    lease: Lease = field(repr=False, compare=False)

    @property
    def is_lost(self) -> bool:
        """Whether another worker has the message meanwhile: what the handler does now is in vain."""
        return self.lease.is_lost

    def note(self, value: Any) -> Any:
        """Say how far the work is: `relay.queue_items` shows it at once. Await it in an asynchronous worker.

        It is a value that the payload of an `Event` can be. Raises EventInvalid for another one, LeaseLost if another
        worker has the message meanwhile, and what the driver raises. Not within `transaction`.
        """
        return self.lease.note(self, encode_object(self.of_attempt | {"note": value}))

    def transaction(self) -> Any:
        """Return a context manager whose transaction completes the message, together with the effects of its block.

        It yields a session of the worker's database, and is asynchronous where that is. Raises LeaseLost at its end,
        and undoes the block, if another worker has the message meanwhile or it is completed.
        """
        return self.lease.begin(self)


_TIMES = ("event_ts", "enqueued_at", "first_taken_at")


def has_more(row: str) -> bool:
    """Return whether a row of CLAIM or LEASE says that there may be more messages; it need not be readable."""
    return not row.startswith(_LAST)


def values_of(row: str) -> dict[str, Any]:
    """Return the fields of a message from a row of CLAIM or LEASE."""
    values: dict[str, Any] = json.loads(row)["message"]
    for name in _TIMES:
        if values[name] is not None:
            values[name] = moment_of(values[name])
    return values


_LAST = '{"more" : false,'
_ATTEMPT = re.compile(r'\{"more" : \w+, "message" : \{"id":(\d+),"attempt":(\d+),')


def attempt_of(row: str) -> dict[str, Any]:
    """Return the id and the attempt of a row whose other values cannot be read, such as a number of 5,000 digits."""
    found = _ATTEMPT.match(row)
    if found is None:
        raise ValueError("a row of a queue does not begin with its id and attempt")
    return {"id": int(found[1]), "attempt": int(found[2])}


class Ends(Exception):
    """Undoes what a handler has changed, and ends the attempt with a statement of its own; the cause says why."""

    def __init__(self, statement: Statement, parameters: dict[str, Any]) -> None:
        super().__init__()
        self.ending = statement, parameters


def end_of(attempt: Mapping[str, Any], error: BaseException) -> tuple[Statement, dict[str, Any]]:
    """Return the statement, and its parameters, that ends an attempt which raised an error."""
    if isinstance(error, Ends):
        return error.ending
    text = text_of(error)
    if isinstance(error, Drop):
        return COMPLETE, {**attempt, "dropped": text}
    told = {**attempt, "error": text}
    if isinstance(error, Fail):
        return FAIL, told
    return RETRY, told | {"seconds": named_wait(error)}


def text_of(error: BaseException) -> str:
    """Return an error's text for the message's row, which holds the payload anyway; not for a log."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:
        text = ""
    if error.__cause__ is not None and not text:
        return text_of(error.__cause__)
    return stored(f"{name}: {text}" if text else name)


def stored(text: str) -> str:
    """Return a text as the database has it, cut: its type text holds neither NUL nor half of a surrogate pair."""
    cut = text[:_LONGEST_ERROR].replace("\0", "\\x00")
    return cut.encode("utf-8", "backslashreplace").decode()
