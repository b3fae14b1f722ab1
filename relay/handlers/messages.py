"""What handlers for brokers have in common: events as messages, in order, some in one step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from relay.events import Event, Transaction
from relay.faults import Rejected, Undelivered
from relay.handler_settings import BrokerHandler
from relay.handlers import cloudevents
from relay.template import Template

_AT_ONCE = 500


class Message(NamedTuple):
    """An event for a broker. `identity` is the same in every attempt; a structured body has the `attributes` in it."""

    topic: str
    key: str | None
    identity: str
    content_type: str
    attributes: dict[str, str]
    body: bytes


class Broker(Protocol):
    """A connection to a broker, made when it is needed and again after it was lost. Used by several threads."""

    def send(self, messages: Sequence[Message]) -> None:
        """Return when the broker has confirmed all of them; raises Undelivered or Rejected.

        A message may be stored although it was not confirmed, but none before one that precedes it.
        """

    def close(self) -> None:
        """Close the connection."""


class Publishing:
    """Sends the events of a transaction to a broker, in order."""

    def __init__(
        self, name: str, settings: BrokerHandler, broker: Broker, key: str | None = None
    ) -> None:
        """`key` is the template of the messages' keys, where the broker has such."""
        self.name = name
        self._broker = broker
        self._source = settings.source
        self._structured = settings.mode == "structured"
        self._topic = Template(settings.topic)
        self._key = None if key is None else Template(key)

    def close(self) -> None:
        """Close the connection."""
        self._broker.close()

    def deliver(self, transaction: Transaction) -> None:
        """Send the events. Raises Undelivered or Rejected."""
        events = iter(transaction.events)
        while some := list(islice(events, _AT_ONCE)):
            messages = [self._message(event) for event in some]
            try:
                self._broker.send(messages)
            except (Undelivered, Rejected):
                raise
            except Exception as error:
                # What a client did not mean to raise is its own fault, and no event is to be dead-lettered for it.
                raise Undelivered(type(error).__name__) from error

    def _message(self, event: Event) -> Message:
        topic = self._topic.fill(event)
        key = None if self._key is None else self._key.fill(event)
        identity = cloudevents.identity(event)
        if self._structured:
            body = cloudevents.structured(event, self._source)
            return Message(topic, key, identity, cloudevents.STRUCTURED, {}, body)
        attributes = cloudevents.attributes(event, self._source)
        return Message(topic, key, identity, cloudevents.DATA, attributes, cloudevents.data(event))
