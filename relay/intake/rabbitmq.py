"""Takes messages from a queue of RabbitMQ.

What is not acknowledged when the connection ends is at its former position in the queue again. The event loop answers
heartbeats while the database is away.

Source: RabbitMQ documentation, "Consumer Acknowledgements and Publisher Confirms", "Consumer Prefetch".
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Self

import pika
from pika.channel import Channel
from pika.exceptions import ChannelClosedByBroker

from relay.config.intake import RabbitmqSource
from relay.config.secrets import known_text
from relay.faults import ConfigurationError, Rejected, SecretUnavailable, Undelivered
from relay.intake.consuming import FETCH_MESSAGES, FETCH_SECONDS, Taken
from relay.sinks.rabbitmq import Connection, connect, end, fault_of, parameters

_NOT_FOUND = 404


class RabbitmqFeed:
    """The messages of a queue."""

    def __init__(self, name: str, settings: RabbitmqSource) -> None:
        """Raises ConfigurationError for an address with an unknown option."""
        self._name = name
        self._settings = settings
        self._connection: Connection | None = None
        self._channel: Channel | None = None
        self._come: asyncio.Queue[Taken | Exception] = asyncio.Queue()
        url = known_text(settings.url)
        if url is not None:
            try:
                parameters(url, settings.timeout)
            except SecretUnavailable as error:
                raise ConfigurationError(f"intake.{name}.{error}") from None

    async def __aenter__(self) -> Self:
        """Connect, and consume. Raises ConfigurationError, Undelivered and SecretUnavailable."""
        self._come = asyncio.Queue()
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            self._connection = await connect(self._settings.url, self._settings.timeout)
            self._channel = self._connection.channel(
                on_open_callback=lambda channel: self._consume(channel, opened)
            )
            self._channel.add_on_close_callback(lambda _, reason: self._closed(opened, reason))
            async with asyncio.timeout(self._settings.timeout):
                await opened
        except BaseException as error:
            await self.__aexit__()
            if isinstance(error, ChannelClosedByBroker) and error.reply_code == _NOT_FOUND:
                raise ConfigurationError(
                    f"intake.{self._name}.queue: the server has no queue {self._settings.queue}: declare it"
                ) from None
            if isinstance(error, SecretUnavailable) or not isinstance(error, Exception):
                raise
            raise _undelivered(error) from None
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            end(connection)

    async def fetch(self) -> Sequence[Taken]:
        """Return the messages that have come, or the next one. Raises Undelivered."""
        found: list[Taken] = []
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                each = await self._come.get()
        except TimeoutError:
            return found
        while True:
            if isinstance(each, Exception):
                raise _undelivered(each)
            found.append(each)
            if self._come.empty() or len(found) == FETCH_MESSAGES:
                return found
            each = self._come.get_nowait()

    async def acknowledge(self, taken: Sequence[Taken]) -> None:
        """Acknowledge messages, before which there are none that are not answered."""
        if taken:
            self._open.basic_ack(taken[-1].raw, multiple=True)

    async def reject(self, taken: Taken) -> None:
        """Send a message to the dead-letter exchange of the queue."""
        self._open.basic_reject(taken.raw, requeue=False)

    async def extend(self, taken: Sequence[Taken]) -> None:
        """Nothing: the heartbeat says that relay is there. Raises Undelivered if the connection is lost."""
        _ = self._open

    async def give_back(self, taken: Sequence[Taken]) -> None:
        """Nothing: what is not acknowledged comes again when the connection ends."""

    @property
    def _open(self) -> Channel:
        if self._channel is None or not self._channel.is_open:
            raise Undelivered("the connection is lost")
        return self._channel

    def _consume(self, channel: Channel, opened: asyncio.Future[None]) -> None:
        def is_consuming(_: Any) -> None:
            if not opened.done():
                opened.set_result(None)

        def has_limit(_: Any) -> None:
            channel.basic_consume(self._settings.queue, self._arrived, callback=is_consuming)

        channel.add_on_cancel_callback(
            lambda _: self._come.put_nowait(Undelivered("the queue was deleted"))
        )
        channel.basic_qos(prefetch_count=2 * FETCH_MESSAGES, callback=has_limit)

    def _arrived(
        self, _: Channel, method: Any, properties: pika.BasicProperties, body: bytes
    ) -> None:
        queue, sent = self._settings.queue, properties.message_id
        # The broker has no name of its own for a message.
        identity = ("rabbitmq", queue, sent) if sent else ()
        where = f"message {sent or 'without message_id'} of the queue {queue}"
        self._come.put_nowait(Taken(body, identity, where, method.delivery_tag))

    def _closed(self, opened: asyncio.Future[None], reason: Exception) -> None:
        if opened.done():
            self._come.put_nowait(reason)
        else:
            opened.set_exception(reason)


def _undelivered(error: Exception) -> Exception:
    fault = error if isinstance(error, Undelivered) else fault_of(error)
    return Undelivered(str(fault)) if isinstance(fault, Rejected) else fault
