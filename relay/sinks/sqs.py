"""Sinks that send events to Amazon SQS.

Source: Amazon SQS Developer Guide, "Amazon SQS message quotas" and "Exactly-once processing".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from relay.config.types import Alike
from relay.faults import Undelivered
from relay.sinks import aws
from relay.sinks.aws import AwsSettings, Entry
from relay.sinks.batching import Batching, Outgoing
from relay.sinks.brokers import Message, Publishing

if TYPE_CHECKING:
    from relay.sinks.aws_client import AwsClient


class Settings(AwsSettings):
    """Amazon SQS; `topic` is the name of a queue, or its URL."""

    RESERVED = ("http:", "https:")

    type: Alike[Literal["sqs"]]
    mode: Alike[Literal["structured"]] = "structured"
    """The message is the CloudEvent: a message of SQS has too few attributes for the binary mode."""


def sink(name: str, settings: Settings) -> Publishing:
    """The sink of `type: sqs`."""
    # Only what sends needs the SDK, whose import takes long.
    from relay.sinks.aws_client import AwsClient

    service = Sqs(AwsClient("sqs", settings))
    return Publishing(name, settings, Batching(service, settings.timeout), settings.key)


class Sqs:
    """Sends messages to queues."""

    limits = aws.LIMITS

    def __init__(self, client: AwsClient) -> None:
        self._client = client
        self._urls: dict[str, str] = {}

    async def open(self) -> None:
        """Open the client. Raises Undelivered."""
        await self._client.open()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    def outgoing(self, message: Message) -> Outgoing[Entry]:
        """The entry of a message."""
        entry = {
            "MessageBody": aws.text(message),
            "MessageAttributes": aws.attributes(message),
            **aws.fifo(message),
        }
        return Outgoing(message.topic, entry, aws.size_of(message))

    async def send(self, group: str, entries: Sequence[Entry]) -> list[Exception | None]:
        """Send entries to a queue in one request; returns the fault of each. Raises Undelivered or Rejected."""
        url = await self._url(group)
        try:
            response = await self._client.call(
                "send_message_batch", {"QueueUrl": url, "Entries": aws.numbered(entries)}
            )
        except Undelivered:
            # A queue that was made again may be elsewhere.
            self._urls.pop(group, None)
            raise
        return aws.faults(entries, response)

    async def _url(self, name: str) -> str:
        """The URL of a queue, which does not change while the queue is there."""
        if name.startswith(Settings.RESERVED):
            return name
        if name not in self._urls:
            found = await self._client.call("get_queue_url", {"QueueName": name}, has_entries=False)
            self._urls[name] = found["QueueUrl"]
        return self._urls[name]
