"""Sinks that send events to Amazon SNS.

Source: Amazon SNS Developer Guide, "Message deduplication for FIFO topics" and "Message filtering".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from relay.config.types import Alike
from relay.sinks import aws
from relay.sinks.aws import AwsSettings, Entry
from relay.sinks.batching import Batching, Outgoing
from relay.sinks.brokers import Message, Publishing

if TYPE_CHECKING:
    from relay.sinks.aws_client import AwsClient


class Settings(AwsSettings):
    """Amazon SNS; `topic` is the ARN of a topic."""

    type: Alike[Literal["sns"]]
    mode: Alike[Literal["structured"]] = "structured"
    """The message is the CloudEvent: a message of SNS has too few attributes for the binary mode."""


def sink(name: str, settings: Settings) -> Publishing:
    """The sink of `type: sns`."""
    # Only what sends needs the SDK, whose import takes long.
    from relay.sinks.aws_client import AwsClient

    service = Sns(AwsClient("sns", settings))
    return Publishing(name, settings, Batching(service, settings.timeout), settings.key)


class Sns:
    """Publishes messages to topics."""

    limits = aws.LIMITS

    def __init__(self, client: AwsClient) -> None:
        self._client = client

    async def open(self) -> None:
        """Open the client. Raises Undelivered."""
        await self._client.open()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    def outgoing(self, message: Message) -> Outgoing[Entry]:
        """The entry of a message."""
        entry = {
            "Message": aws.text(message),
            "MessageAttributes": aws.attributes(message),
            **aws.fifo(message),
        }
        return Outgoing(message.topic, entry, aws.size_of(message))

    async def send(self, group: str, entries: Sequence[Entry]) -> list[Exception | None]:
        """Publish entries to a topic in one request; returns the fault of each. Raises Undelivered or Rejected."""
        response = await self._client.call(
            "publish_batch",
            {"TopicArn": group, "PublishBatchRequestEntries": aws.numbered(entries)},
        )
        return aws.faults(entries, response)
