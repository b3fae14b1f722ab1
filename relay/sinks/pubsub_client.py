"""Publishes messages to Google Cloud Pub/Sub.

Sources: Pub/Sub documentation, "Order messages", "Quotas and limits" and "Error codes"; reference of google.pubsub.v1,
"PubsubMessage"; CloudEvents, "Google Cloud Pub/Sub Protocol Binding".
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import google.auth
import grpc.aio
from google.api_core.exceptions import (
    Forbidden,
    GoogleAPICallError,
    InvalidArgument,
    Unauthenticated,
)
from google.auth.exceptions import GoogleAuthError, TransportError
from google.pubsub_v1.services.publisher import PublisherAsyncClient
from google.pubsub_v1.services.publisher.transports import PublisherGrpcAsyncIOTransport
from google.pubsub_v1.types import PubsubMessage

from relay.faults import Rejected, Unauthorized, Undelivered
from relay.sinks.batching import Outgoing, RequestLimits
from relay.sinks.brokers import Message, Renewed

_TOPIC = re.compile(r"projects/[^/]+/topics/[^/]+")
_EMULATOR = "http://"
_KEY_BYTES = 1_024
"""The longest ordering key."""
_CHANNEL = [
    # A request may be larger than gRPC's default.
    ("grpc.max_send_message_length", -1),
    # A server that is gone without a word would be noticed after 15 minutes.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]


class TopicAndKey(NamedTuple):
    """What all messages of a request have in common."""

    topic: str
    key: str


class PubSub:
    """Publishes messages to topics; the service stores all messages of a request or none."""

    limits = RequestLimits(messages=1_000, size=9_000_000, requests=64, whole=True)

    def __init__(self, endpoint: str | None, timeout: float) -> None:
        """`endpoint` is that of the settings; `timeout` counts for a request, in seconds."""
        self._endpoint = endpoint
        self._timeout = timeout
        self._clients = Renewed(self._open, _close)

    async def open(self) -> None:
        """Find the credentials and open the client. Raises Undelivered."""
        try:
            await self._clients.open()
        except GoogleAuthError as error:
            raise _fault(error) from None

    async def close(self) -> None:
        """Close the connections."""
        await self._clients.close()

    def outgoing(self, message: Message) -> Outgoing[PubsubMessage]:
        """The entry of a message. Raises Rejected for a topic that is none, or an ordering key that is too long."""
        key = message.key or ""
        if not _TOPIC.fullmatch(message.topic):
            raise Rejected("the topic is not projects/…/topics/…")
        if len(key.encode()) > _KEY_BYTES:
            raise Rejected(f"the ordering key has more than {_KEY_BYTES} bytes")
        attributes = {f"ce-{name}": text for name, text in message.attributes.items()}
        attributes |= {"content-type": message.content_type, **message.trace}
        entry = PubsubMessage(data=message.body, attributes=attributes, ordering_key=key)
        size = sum(len(name.encode()) + len(text.encode()) for name, text in attributes.items())
        return Outgoing(
            TopicAndKey(message.topic, key), entry, len(message.body) + len(key.encode()) + size
        )

    async def send(
        self, group: TopicAndKey, entries: Sequence[PubsubMessage]
    ) -> list[Exception | None]:
        """Publish entries in one request. Raises Undelivered or Rejected."""
        await self.open()
        async with self._clients.use() as client:
            try:
                response = await client.publish(
                    topic=group.topic, messages=list(entries), retry=None, timeout=self._timeout
                )
            except (GoogleAPICallError, GoogleAuthError, OSError) as error:
                raise _fault(error) from None
        if len(response.message_ids) != len(entries):
            raise Undelivered("the response has not one id for each message")
        return [None] * len(entries)

    async def _open(self) -> PublisherAsyncClient:
        endpoint = self._endpoint
        if endpoint is not None and endpoint.startswith(_EMULATOR):
            channel = grpc.aio.insecure_channel(endpoint.removeprefix(_EMULATOR), _CHANNEL)
        else:
            # It may ask the machine's metadata server.
            found, _ = await asyncio.to_thread(
                google.auth.default, default_scopes=PublisherGrpcAsyncIOTransport.AUTH_SCOPES
            )
            host = endpoint or PublisherAsyncClient.DEFAULT_ENDPOINT
            channel = PublisherGrpcAsyncIOTransport.create_channel(
                host if ":" in host else f"{host}:443", credentials=found, options=_CHANNEL
            )
        return PublisherAsyncClient(transport=PublisherGrpcAsyncIOTransport(channel=channel))


async def _close(client: PublisherAsyncClient) -> None:
    untyped: Any = client.transport
    await untyped.close()


def _fault(error: Exception) -> Exception:
    kind = type(error).__name__
    if isinstance(error, InvalidArgument):
        return Rejected(kind)
    if isinstance(error, TransportError):
        # The server of tokens is away.
        return Undelivered(kind)
    if isinstance(error, Unauthenticated | Forbidden | GoogleAuthError):
        return Unauthorized(f"{kind}: the service refuses relay's credentials, or there are none")
    return Undelivered(kind)
