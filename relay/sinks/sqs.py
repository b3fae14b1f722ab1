"""Sinks that send events to Amazon SQS.

Source: Amazon SQS Developer Guide, "Amazon SQS message quotas" and "Exactly-once processing".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from relay.config.types import Alike
from relay.faults import Undelivered
from relay.sinks import aws
from relay.sinks.aws import AwsService, AwsSettings, Entry, ServiceClient
from relay.sinks.batching import Batching, RequestLimits
from relay.sinks.brokers import Publishing


class Settings(AwsSettings):
    """Amazon SQS; `topic` is the name of a queue, or its URL."""

    RESERVED = ("http:", "https:")

    type: Alike[Literal["sqs"]]


def sink(name: str, settings: Settings) -> Publishing:
    """The sink of `type: sqs`."""
    # Only what sends needs the SDK, whose import takes long.
    from relay.sinks.aws_client import AwsClient

    service = Sqs(AwsClient("sqs", settings))
    return Publishing(name, settings, Batching(service, settings.timeout), settings.key)


class Sqs(AwsService):
    """Sends messages to queues."""

    BODY = "MessageBody"
    limits = RequestLimits(messages=10, size=256 * 1024, requests=aws.REQUESTS)

    def __init__(self, client: ServiceClient) -> None:
        super().__init__(client)
        self._urls: dict[str, str] = {}

    async def send(self, group: str, entries: Sequence[Entry]) -> list[Exception | None]:
        """Send entries to a queue in one request; returns the fault of each. Raises Undelivered or Rejected."""
        url = await self._url(group)
        try:
            response = await self.client.call(
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
            found = await self.client.call("get_queue_url", {"QueueName": name}, has_entries=False)
            self._urls[name] = found["QueueUrl"]
        return self._urls[name]
