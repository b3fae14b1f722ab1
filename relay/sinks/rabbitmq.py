"""Handlers that publish events to RabbitMQ, persistent, mandatory and with publisher confirms.

Sources: RabbitMQ documentation, "Consumer Acknowledgements and Publisher Confirms" and "Heartbeats"; CloudEvents, "AMQP
Protocol Binding".
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pika
from pika.adapters.asyncio_connection import AsyncioConnection
from pika.channel import Channel
from pika.exceptions import (
    AuthenticationError,
    ChannelClosedByBroker,
    ConnectionClosedByBroker,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
    ShortStringTooLong,
)
from pydantic import SecretStr

from relay.config.handlers import RabbitmqHandler
from relay.config.secrets import known_text, read_aside
from relay.faults import (
    ConfigurationError,
    Rejected,
    SecretUnavailable,
    Unauthorized,
    Undelivered,
)
from relay.sinks.brokers import Message, Publishing, Sending, SendWindow, Shared, Unanswered
from relay.sinks.tls import is_refusal

_REFUSED = frozenset({311, 406, 501})
"""Reply codes for a fault of the message: content too large, precondition failed, frame error."""
_CLOSING_SECONDS = 2.0


class _FrameTooLarge(Exception):
    """A message's header does not fit into a frame; nothing was sent. The server would close the connection."""


class Connection(AsyncioConnection):  # type: ignore[misc] # pika has no types
    """A connection that writes the frames of a message with one system call, if all are as small as was agreed."""

    def _output_marshaled_frames(self, marshaled_frames: Sequence[bytes]) -> None:
        limit = self.params.frame_max
        if limit and any(len(frame) > limit for frame in marshaled_frames):
            raise _FrameTooLarge
        super()._output_marshaled_frames([b"".join(marshaled_frames)])


def sink(name: str, settings: RabbitmqHandler) -> Publishing:
    """The sink of `type: rabbitmq`. Raises ConfigurationError for an address with an unknown option."""
    return Publishing(name, settings, Rabbitmq(name, settings))


class Rabbitmq:
    """One connection with one channel that all transactions share, opened again after it was lost."""

    def __init__(self, name: str, settings: RabbitmqHandler) -> None:
        """Raises ConfigurationError for an address with an unknown option."""
        self._exchange = settings.exchange
        self._timeout = settings.timeout
        self._url = settings.url
        url = known_text(settings.url)
        if url is not None:
            try:
                parameters(url, settings.timeout)
            except SecretUnavailable as error:
                raise ConfigurationError(f"handlers.{name}.{error}") from None
        self._connection = Shared(self._connect, lambda connection: bool(connection.is_open))
        self._channel = Shared(self._open_channel, lambda channel: channel.is_open)
        self._window = SendWindow(settings.timeout, ordered=settings.is_ordered)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()
        connection = await self._connection.close()
        if connection is None or not connection.is_open:
            return
        closed = asyncio.Event()
        connection.add_on_close_callback(lambda *_: closed.set())
        with suppress(Exception):  # the client may raise anything when a connection breaks
            connection.close()
            async with asyncio.timeout(_CLOSING_SECONDS):
                await closed.wait()

    async def send(self, messages: Sequence[Message]) -> None:
        """Publish the messages and wait for the confirms. Raises Undelivered or Rejected."""
        try:
            channel = await self._channel.get()
            sending = self._window.sending(messages)
            try:
                await self._publish(channel, sending)
                return
            except ChannelClosedByBroker:
                # The broker does not say which message caused it; it may be one of another transaction.
                pass
            await self._send_alone(sending.unconfirmed)
        except (Undelivered, Rejected):
            raise
        except Exception as error:
            raise fault_of(error) from None

    async def _send_alone(self, messages: Sequence[Message]) -> None:
        """Send messages one by one on a channel of their own: if the broker closes it, the last message is at fault."""
        channel = await self._open_channel()
        try:
            for message in messages:
                await self._publish(channel, self._window.sending([message]))
        finally:
            channel.close()

    async def _publish(self, channel: _Channel, sending: Sending) -> None:
        try:
            await self._window.send(sending, channel.publish)
        except TimeoutError:
            if channel.unanswered.is_silent(self._timeout):
                channel.unanswered.fail(TimeoutError())
                end(channel.connection)
            raise

    async def _connect(self) -> Connection:
        return await connect(self._url, self._timeout)

    async def _open_channel(self) -> _Channel:
        connection = await self._connection.get()
        channel = _Channel(connection, self._exchange)
        try:
            async with asyncio.timeout(self._timeout):
                await channel.ready
        except TimeoutError:
            end(connection)
            raise
        return channel


def parameters(url: str, timeout: float) -> pika.ConnectionParameters:
    """The parameters of a connection; certificates that the address names are loaded. Raises SecretUnavailable."""
    try:
        found = pika.URLParameters(url)
    except (ValueError, TypeError, OSError):
        raise SecretUnavailable("url: the part after ? has an option that cannot be used") from None
    found.blocked_connection_timeout = timeout
    found.socket_timeout = timeout
    found.stack_timeout = timeout
    # The heartbeat ends an idle connection whose server has vanished.
    found.heartbeat = max(1, round(timeout))
    return found


async def connect(url: SecretStr, timeout: float) -> Connection:
    """Open a connection. Raises SecretUnavailable, TimeoutError, and the client's errors."""
    found = parameters(await read_aside("url", url), timeout)
    opened: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    connection = Connection(
        found,
        on_open_callback=partial(_open, opened),
        on_open_error_callback=partial(_fail, opened),
    )
    try:
        async with asyncio.timeout(timeout):
            return await opened
    except BaseException:
        end(connection)
        raise


class _Channel:
    """A channel in confirm mode, which numbers published messages from 1. `ready` is done once it is open."""

    def __init__(self, connection: Connection, exchange: str) -> None:
        self.connection = connection
        self.unanswered = Unanswered()
        self.ready = asyncio.get_running_loop().create_future()
        self._exchange = exchange
        self._fault: Exception | None = None
        self._number = 0
        self._returned: Counter[tuple[str, str]] = Counter()
        self._channel: Channel = connection.channel(on_open_callback=self._on_open)
        self._channel.add_on_close_callback(self._on_close)

    @property
    def is_open(self) -> bool:
        return bool(self._channel.is_open)

    def close(self) -> None:
        if self._channel.is_open:
            self._channel.close()

    async def publish(self, sending: Sending, index: int) -> None:
        if self._fault is not None:
            raise self._fault
        message = sending.messages[index]
        attributes = {f"cloudEvents:{key}": value for key, value in message.attributes.items()}
        self._channel.basic_publish(
            self._exchange,
            message.topic,
            message.body,
            pika.BasicProperties(
                content_type=message.content_type,
                headers={**attributes, **message.trace},
                message_id=message.identity,
                delivery_mode=pika.DeliveryMode.Persistent,
            ),
            mandatory=True,
        )
        self._number += 1
        self.unanswered.add(self._number, sending, index)

    def _on_open(self, channel: Channel) -> None:
        channel.add_on_return_callback(self._on_return)
        channel.confirm_delivery(self._on_confirm, self._on_select)

    def _on_select(self, _: Any) -> None:
        if self.ready.done():
            # The caller has timed out.
            self.close()
        else:
            self.ready.set_result(None)

    def _on_return(self, _: Channel, method: Any, properties: Any, __: bytes) -> None:
        # The broker returns an unroutable message before it confirms it, and without its number. An id may be in
        # flight twice: in rows of an adopted outbox, or in an attempt that was not answered in time.
        self._returned[properties.message_id, method.routing_key] += 1

    def _on_confirm(self, frame: Any) -> None:
        confirm = frame.method
        number = confirm.delivery_tag
        for each in self.unanswered.up_to(number) if confirm.multiple else (number,):
            message = self.unanswered.message(each)
            fault: Exception | None = None
            # A missing or full queue is not a fault of the event.
            if isinstance(confirm, pika.spec.Basic.Nack):
                fault = Undelivered("NackError")
            elif message and self._took_return(message):
                fault = Undelivered("UnroutableError")
            self.unanswered.answer(each, fault)

    def _took_return(self, message: Message) -> bool:
        """Whether a message was returned; a return counts for one message."""
        key = message.identity, message.topic
        if key not in self._returned:
            return False
        self._returned[key] -= 1
        if not self._returned[key]:
            del self._returned[key]
        return True

    def _on_close(self, _: Channel, reason: Exception) -> None:
        self._fault = reason
        _fail(self.ready, None, reason)
        self.unanswered.fail(reason)


def _open(future: asyncio.Future[Connection], connection: Connection) -> None:
    if not future.done():
        future.set_result(connection)


def _fail(future: asyncio.Future[Any], _: object, error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        # Marks the exception as retrieved: there may be no waiter.
        future.exception()


def fault_of(error: Exception) -> Exception:
    """The Rejected or Undelivered for an error of the client."""
    if isinstance(error, ShortStringTooLong):
        return Rejected(type(error).__name__)
    if isinstance(error, _FrameTooLarge):
        return Rejected("the headers are larger than frame_max")
    if isinstance(error, ChannelClosedByBroker):
        kind = Rejected if error.reply_code in _REFUSED else Undelivered
        return kind(f"AMQP {error.reply_code}")
    if _refuses_credentials(error):
        return Unauthorized(f"{type(error).__name__}: the server refuses relay's credentials")
    for each in _causes(error):
        if isinstance(each, OSError):
            reason = f": {each.strerror}" if each.strerror else ""
            return Undelivered(f"no connection: {type(each).__name__}{reason}")
    return Undelivered(type(error).__name__)


_OF_CREDENTIALS = (AuthenticationError, ProbableAuthenticationError, ProbableAccessDeniedError)
_ACCESS_REFUSED = 403


def _refuses_credentials(error: BaseException) -> bool:
    """Whether the client or the server reports a refused login, an expired token or a certificate."""
    return any(
        isinstance(each, _OF_CREDENTIALS)
        or (isinstance(each, ConnectionClosedByBroker) and each.reply_code == _ACCESS_REFUSED)
        or is_refusal(each)
        for each in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it wraps: the client wraps those of a connection that it cannot make."""
    yield error
    attempts = getattr(error, "exceptions", ())
    inner = [*error.args, *attempts[-1:], getattr(error, "exception", None)]
    for each in inner:
        if isinstance(each, BaseException):
            yield from _causes(each)


def end(connection: Connection) -> None:
    """Close a connection without waiting for the server; the heartbeat ends it if the server has vanished."""
    with suppress(Exception):  # the client may raise anything when a connection breaks
        if not connection.is_closing and not connection.is_closed:
            connection.close()
