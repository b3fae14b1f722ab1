"""Handlers that publish events to RabbitMQ, persistent, mandatory and with publisher confirms.

Sources: RabbitMQ documentation, "Consumer Acknowledgements and Publisher Confirms" and "Heartbeats"; CloudEvents, "AMQP
Protocol Binding".
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from threading import Lock, local

import pika
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import ChannelClosedByBroker, NackError, ShortStringTooLong, UnroutableError

from relay.faults import ConfigurationError, Rejected, Undelivered
from relay.handler_settings import RabbitmqHandler
from relay.handlers.messages import Message

_REFUSED = frozenset({311, 406, 501})
"""Content too large, a precondition that does not hold, a frame that cannot be read: the message's own fault."""


class Rabbitmq:
    """A connection and a channel for each thread, since the client allows no sharing."""

    def __init__(self, name: str, settings: RabbitmqHandler) -> None:
        """Raises ConfigurationError for an address with options that the client does not know."""
        self._exchange = settings.exchange
        try:
            self._parameters = pika.URLParameters(settings.url.get_secret_value())
        except (ValueError, TypeError):
            raise ConfigurationError(
                f"handlers.{name}.url: the part after ? has an option that cannot be used"
            ) from None
        self._parameters.blocked_connection_timeout = settings.timeout
        self._parameters.socket_timeout = settings.timeout
        self._parameters.stack_timeout = settings.timeout
        # What ends the wait for a confirmation when the server is gone without a word.
        self._parameters.heartbeat = max(1, round(settings.timeout))
        self._mine = local()
        self._opened: list[BlockingConnection] = []
        self._lock = Lock()

    def close(self) -> None:
        """Close the connections."""
        for connection in self._opened:
            _close(connection)

    def send(self, messages: Sequence[Message]) -> None:
        """Publish the messages, each confirmed before the next. Raises Undelivered or Rejected."""
        try:
            channel = self._channel()
            for message in messages:
                self._publish(channel, message)
        except (UnroutableError, NackError) as error:
            # A queue that is not there yet, or full, is no fault of the event.
            raise Undelivered(type(error).__name__) from None
        except Exception as error:
            # The client raises much when a connection breaks, and cannot be asked whether it is whole.
            self._forget()
            raise _judged(error) from None

    def _publish(self, channel: BlockingChannel, message: Message) -> None:
        channel.basic_publish(
            self._exchange,
            message.topic,
            message.body,
            pika.BasicProperties(
                content_type=message.content_type,
                headers={f"cloudEvents:{key}": value for key, value in message.attributes.items()},
                message_id=message.identity,
                delivery_mode=pika.DeliveryMode.Persistent,
            ),
            mandatory=True,
        )

    def _channel(self) -> BlockingChannel:
        if not self._is_alive():
            self._forget()
            self._mine.connection = connection = BlockingConnection(self._parameters)
            with self._lock:
                self._opened.append(connection)
            self._mine.channel = connection.channel()
            self._mine.channel.confirm_delivery()
        channel: BlockingChannel = self._mine.channel
        return channel

    def _is_alive(self) -> bool:
        """Also notices that the server has closed an idle connection, since nobody answered its heartbeats."""
        if not hasattr(self._mine, "channel"):
            return False
        try:
            self._mine.connection.process_data_events(0)
        except Exception:  # as above
            return False
        return bool(self._mine.channel.is_open)

    def _forget(self) -> None:
        connection: BlockingConnection | None = self._mine.__dict__.pop("connection", None)
        self._mine.__dict__.clear()
        if connection is not None:
            with self._lock:
                self._opened.remove(connection)
            _close(connection)


def _judged(error: Exception) -> Exception:
    if isinstance(error, ShortStringTooLong):
        return Rejected(type(error).__name__)
    if isinstance(error, ChannelClosedByBroker):
        kind = Rejected if error.reply_code in _REFUSED else Undelivered
        return kind(f"AMQP {error.reply_code}")
    return Undelivered(type(error).__name__)


def _close(connection: BlockingConnection) -> None:
    with suppress(Exception):  # as above
        connection.close()
