"""Takes messages from a durable consumer of NATS JetStream.

At most one pull request is open at the server, for a second; the server sends messages as they come.

Sources: NATS documentation, "Consumer Details" (pull consumers, acknowledgements) and "JetStream wire API Reference".
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import ConnectionClosedError, NoServersError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from relay.config.intake import NatsSource
from relay.faults import ConfigurationError, Undelivered
from relay.intake.consuming import FETCH_MESSAGES, FETCH_SECONDS, Taken
from relay.sinks.nats import NoTls, SecureClient, connect
from relay.sinks.tls import Certificates

_CLOSING_SECONDS = 2.0
_OVER = ("404", "408")
"""The statuses with which a pull request ends in order."""


class NatsFeed:
    """The messages of a consumer."""

    def __init__(self, name: str, settings: NatsSource) -> None:
        """Raises ConfigurationError where a certificate cannot be used."""
        self._name = name
        self._settings = settings
        self._tls = Certificates(name, settings.tls, section="intake")
        self._client: SecureClient | None = None
        self._subscription: Any = None
        self._requested = 0

    async def __aenter__(self) -> Self:
        """Connect, and make the consumer if there is none. Raises ConfigurationError and errors of the client."""
        settings = self._settings
        client = SecureClient(always_tls="tls" in settings.model_fields_set)
        try:
            await connect(client, settings, settings.timeout, self._tls, _nothing)
        except (NoTls, NoServersError, OSError, TimeoutError) as error:
            reason = str(error) if isinstance(error, NoTls) else type(error).__name__
            raise Undelivered(f"no server accepts a connection: {reason}") from None
        self._client = client
        try:
            await self._require_consumer(client)
            self._subscription = await client.subscribe(client.new_inbox())
            self._requested = 0
        except BaseException:
            client.abandon()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):
                async with asyncio.timeout(_CLOSING_SECONDS):
                    await client.close()
            client.abandon()

    async def fetch(self) -> Sequence[Taken]:
        """Return the messages that have come, or the next one. Raises Undelivered."""
        if not self._requested:
            await self._request()
        found: list[Taken] = []
        while self._requested and (not found or self._subscription.pending_msgs):
            found += await self._next()
        return found

    async def _next(self) -> list[Taken]:
        """Return the next message of the request; none if it has ended. Raises Undelivered."""
        try:
            msg = await self._subscription.next_msg(timeout=2 * FETCH_SECONDS)
        except TimeoutError:
            raise Undelivered("the server does not end a request") from None
        status = None if msg.reply else (msg.headers or {}).get("Status")
        if status is None:
            self._requested -= 1
            return [self._taken(msg)]
        if status not in _OVER:
            raise Undelivered(f"the server ends a request with status {status}")
        self._requested = 0
        return []

    async def acknowledge(self, taken: Sequence[Taken]) -> None:
        """Acknowledge messages. An acknowledgement that is lost makes the message come again."""
        for each in taken:
            await each.raw.ack()

    async def reject(self, taken: Taken) -> None:
        """Tell the server never to send a message again."""
        await taken.raw.term()

    async def extend(self, taken: Sequence[Taken]) -> None:
        """Tell the server that messages are being worked on, so that they do not come again."""
        for each in taken:
            await each.raw.in_progress()

    async def give_back(self, taken: Sequence[Taken]) -> None:
        """Have the server send messages again at once, in order, to whoever asks next."""
        left = list(taken)
        # Otherwise the server would send them to the request that is open.
        while self._requested:
            left += await self._next()
        for each in left:
            await each.raw.nak()
        await self._connected.flush(math.ceil(self._settings.timeout))

    @property
    def _connected(self) -> SecureClient:
        if self._client is None or self._client.is_closed:
            raise ConnectionClosedError
        return self._client

    async def _request(self) -> None:
        settings = self._settings
        request = {"batch": FETCH_MESSAGES, "expires": int(FETCH_SECONDS * 1e9)}
        await self._connected.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{settings.stream}.{settings.consumer}",
            json.dumps(request).encode(),
            self._subscription.subject,
        )
        self._requested = FETCH_MESSAGES

    def _taken(self, msg: Msg) -> Taken:
        position = msg.metadata
        sent = (msg.headers or {}).get("Nats-Msg-Id")
        stored = f"{position.sequence.stream} {position.timestamp.isoformat()}"
        # What the sender calls the message, else where the stream has it.
        name = ("id", sent) if sent else ("stored", stored)
        return Taken(
            msg.data,
            ("nats", position.stream, *name),
            f"message {position.sequence.stream} of the stream {position.stream}",
            msg,
        )

    async def _require_consumer(self, client: Client) -> None:
        settings = self._settings
        stream = client.jetstream(timeout=settings.timeout)
        try:
            try:
                found = await stream.consumer_info(settings.stream, settings.consumer)
            except NotFoundError:
                wanted = ConsumerConfig(
                    durable_name=settings.consumer,
                    ack_policy=AckPolicy.EXPLICIT,
                    deliver_policy=DeliverPolicy.ALL,
                    filter_subject=settings.subject,
                    max_ack_pending=2 * FETCH_MESSAGES,
                )
                found = await stream.add_consumer(settings.stream, wanted)
        except NotFoundError:
            raise ConfigurationError(
                f"intake.{self._name}.stream: the server has no stream {settings.stream}: create it"
            ) from None
        config = found.config
        if config.ack_policy != AckPolicy.EXPLICIT or config.deliver_subject:
            raise ConfigurationError(
                f"intake.{self._name}.consumer: {settings.consumer} is no pull consumer with explicit "
                "acknowledgements: name another one"
            )


async def _nothing() -> None:
    """Closing is noticed with the next call."""
