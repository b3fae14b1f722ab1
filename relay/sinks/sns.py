"""Sinks that send events to Amazon SNS.

Source: Amazon SNS Developer Guide, "Message deduplication for FIFO topics" and "Message filtering".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from relay.config.types import Alike
from relay.sinks import aws
from relay.sinks.aws import AwsService, AwsSettings, Entry
from relay.sinks.batching import Batching, RequestLimits
from relay.sinks.brokers import Publishing


class Settings(AwsSettings):
    """Amazon SNS; `topic` is the ARN of a topic."""

    type: Alike[Literal["sns"]]


def sink(name: str, settings: Settings) -> Publishing:
    """The sink of `type: sns`."""
    # Only what sends needs the SDK, whose import takes long.
    from relay.sinks.aws_client import AwsClient

    service = Sns(AwsClient("sns", settings))
    return Publishing(name, settings, Batching(service, settings.timeout), settings.key)


class Sns(AwsService):
    """Publishes messages to topics."""

    BODY = "Message"
    limits = RequestLimits(messages=10, size=256 * 1024, requests=aws.REQUESTS)

    async def send(self, group: str, entries: Sequence[Entry]) -> list[Exception | None]:
        """Publish entries to a topic in one request; returns the fault of each. Raises Undelivered or Rejected."""
        response = await self.client.call(
            "publish_batch",
            {"TopicArn": group, "PublishBatchRequestEntries": aws.numbered(entries)},
        )
        return aws.faults(entries, response)
