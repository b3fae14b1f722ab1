"""Sinks for brokers: turns events into messages, and sends them in order, many at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from relay.config.handlers import BrokerHandler
from relay.config.templates import Template
from relay.faults import Rejected, Undelivered
from relay.handlers import cloudevents
from relay.model import trace_context
from relay.model.events import Event, Transaction

_PORTION_MESSAGES = 500
_PORTION_BYTES = 4_000_000
"""The limits of what one transaction has in memory at once; a sink has `concurrency` times that."""


class Message(NamedTuple):
    """A broker's message of an event. `identity` is the event's; a structured body has the `attributes`.

    `deduplication` is the same in every attempt of a sink to send the event, until an operator moves the sink, and
    differs from that of every other message. `trace` are headers of the message in every mode. `is_null`: the event has
    no payload, and the body would be nothing else.
    """

    topic: str
    key: str | None
    identity: str
    deduplication: str
    content_type: str
    attributes: dict[str, str]
    body: bytes
    trace: trace_context.Headers = MappingProxyType({})
    is_null: bool = False


class Broker(Protocol):
    """A connection to a broker, opened on demand and again after it was lost. All calls are in one event loop."""

    async def send(self, messages: Sequence[Message]) -> None:
        """Send messages, in order; returns when the broker has confirmed all. Raises Undelivered or Rejected.

        Many calls run concurrently. A message may be stored although it was not confirmed. If the connection is lost,
        the stored messages of a call are the first ones, without a gap; if the broker refuses a single message, later
        ones may be stored.
        """

    async def close(self) -> None:
        """Close the connection. Calls in flight fail."""


class Publishing:
    """Sends the events of a transaction to a broker, in order."""

    def __init__(
        self, name: str, settings: BrokerHandler, broker: Broker, key: str | None = None
    ) -> None:
        """`key` is the template of the messages' keys, for a broker that has keys."""
        self.name = name
        self._broker = broker
        self._source = settings.source
        self._structured = settings.mode == "structured"
        self._as_text = settings.payload == "text"
        self._series = ""
        self._topic = Template(settings.topic)
        self._key = None if key is None else Template(key)
        # Where the configuration says more than the mark itself, it is not the publisher who chooses. A `${event_type}`
        # says no more.
        own = self._topic.beginning
        self._reserved = tuple(
            mark for mark in settings.RESERVED if own == mark or not own.startswith(mark)
        )

    async def close(self) -> None:
        """Close the connection."""
        await self._broker.close()

    def resume(self, series: str) -> None:
        """Send what follows as messages of `series`."""
        self._series = series

    async def deliver(self, transaction: Transaction) -> None:
        """Send the events. Raises Undelivered or Rejected."""
        for messages in self._portions(transaction.events):
            try:
                await self._broker.send(messages)
            except (Undelivered, Rejected):
                raise
            except Exception as error:
                # An unexpected error is a fault of the client library, for which no event is dead-lettered.
                raise Undelivered(type(error).__name__) from error

    def _portions(self, events: Iterable[Event]) -> Iterator[list[Message]]:
        portion: list[Message] = []
        size = 0
        for event in events:
            message = self._message(event)
            portion.append(message)
            size += len(message.body)
            if len(portion) == _PORTION_MESSAGES or size >= _PORTION_BYTES:
                yield portion
                portion, size = [], 0
        if portion:
            yield portion

    def _message(self, event: Event) -> Message:
        topic = _name(self._topic, event)
        if topic.startswith(self._reserved):
            raise Rejected("the topic begins as those do that control the broker")
        key = None if self._key is None or self._key.is_null(event) else _name(self._key, event)
        identity = cloudevents.identity(event)
        # With the row's number, since an adopted outbox may have rows with equal ids.
        deduplication = f"{self._series}/{identity}/{event.text('c_offset') or ''}"
        trace = trace_context.headers(event)
        if self._structured:
            body = cloudevents.structured(event, self._source, self._as_text)
            kind, attributes, is_null = cloudevents.STRUCTURED, {}, False
        else:
            attributes = cloudevents.attributes(event, self._source)
            body = cloudevents.data(event, self._as_text)
            kind, is_null = cloudevents.data_type(self._as_text), event.text("payload") is None
        return Message(topic, key, identity, deduplication, kind, attributes, body, trace, is_null)


def _name(template: Template, event: Event) -> str:
    """Fill a template. Raises Rejected if it has no text, or half of a surrogate pair, which JSON allows."""
    name = template.fill(event)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise Rejected("the topic or the key is not valid Unicode") from None
    return name
