"""The W3C trace context that publishers put into the metadata of events. No I/O, and no use of OpenTelemetry.

Source: W3C Recommendation "Trace Context", 2. `relay.client` writes the same fields.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import NamedTuple

from relay.model import exact_json
from relay.model.events import Event

MOST_BYTES = 64 * 1024
"""Metadata of more bytes are not parsed."""
MOST_STATE = 512
"""A `tracestate` of more characters is dropped."""

_FIELD = "traceparent"
_PARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})", re.ASCII
)
_STATE = re.compile(r"[\x20-\x7e]*", re.ASCII)
"""A text of characters that a header may have, which excludes line ends."""


Headers = Mapping[str, str]


class TraceContext(NamedTuple):
    """The span in which an event was published: ids in hexadecimal, flags, and `tracestate`, "" where there is none."""

    trace_id: str
    span_id: str
    flags: int
    state: str = ""

    @property
    def sampled(self) -> bool:
        """Whether the publisher's trace is recorded."""
        return bool(self.flags & 1)

    @property
    def headers(self) -> Headers:
        """The headers `traceparent` and `tracestate` of HTTP requests and of messages."""
        parent = {_FIELD: f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"}
        return parent | {"tracestate": self.state} if self.state else parent


def may_have(row: bytes) -> bool:
    """Whether an undecoded row may have a context in its metadata."""
    return _FIELD.encode() in row


def parse(metadata: str | bytes | None) -> TraceContext | None:
    """The context in an event's metadata, which is JSON; None if there is no valid one."""
    if metadata is None or len(metadata) > MOST_BYTES:
        return None
    if not (_FIELD in metadata if isinstance(metadata, str) else _FIELD.encode() in metadata):
        return None
    try:
        value = exact_json.loads(metadata if isinstance(metadata, str) else metadata.decode())
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    parent, state = value.get(_FIELD), value.get("tracestate")
    match = _PARENT.fullmatch(parent) if isinstance(parent, str) else None
    if match is None:
        return None
    if not isinstance(state, str) or len(state) > MOST_STATE or not _STATE.fullmatch(state):
        state = ""
    return TraceContext(match[1], match[2], int(match[3], 16), state)


def trace_id(events: Iterable[Event]) -> str | None:
    """The id of the trace in which the first of some events was published, sampled or not; None if it has none."""
    for event in islice(events, 1):
        context = parse(event.text("metadata"))
        return context.trace_id if context else None
    return None


class PublishOrigin(NamedTuple):
    """The span in which events of a business transaction were published, their number, and the id of the first."""

    context: TraceContext
    events: int
    event_id: str | None


class Traced(NamedTuple):
    """A business transaction with events of sampled traces, and its disposition.

    `disposition` is `applied`, `deferred` or `dead`; `handlers` are the transactional handlers that got events of it.
    `committed` is the time of the source's commit, in microseconds since POSTGRES_EPOCH, 0 where it is not known.
    `attempts` counts the earlier attempts.
    """

    origins: tuple[PublishOrigin, ...]
    transaction_id: str | None
    committed: int
    handlers: tuple[str, ...]
    disposition: str
    handler: str | None = None
    fault: str | None = None
    attempts: int = 0


class TraceRecord(NamedTuple):
    """The traced transactions that one commit of the target applied, and when that began and was committed.

    Times are in nanoseconds since 1970, by the clock of the process that applied them. `left_out` counts the traced
    transactions above the limit.
    """

    traced: tuple[Traced, ...]
    left_out: int = 0
    began: int = 0
    committed: int = 0

    def since(self, began: int) -> TraceRecord:
        """The same record with this beginning, committed now."""
        return self._replace(began=began, committed=time.time_ns())


_NONE: Headers = {}
_headers: ContextVar[Callable[[Event], Headers] | None] = ContextVar("trace headers", default=None)
"""Returns the headers for an event of the current delivery; None outside a span."""


def headers(event: Event) -> Headers:
    """The headers `traceparent` and `tracestate` for an event's message; empty if its trace is not recorded."""
    of = _headers.get()
    return _NONE if of is None else of(event)


@contextmanager
def carrying(of: Callable[[Event], Headers]) -> Iterator[None]:
    """Make `headers` call a function, in the current asyncio task or thread."""
    token = _headers.set(of)
    try:
        yield
    finally:
        _headers.reset(token)
