"""What the sinks for Amazon SQS and SNS have in common: their keys, their client, and messages as entries of requests.

Sources: Amazon SQS API Reference, "SendMessageBatch" and "SendMessage"; Amazon SNS API Reference, "PublishBatch".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import AfterValidator

from relay.config.addresses import require_http
from relay.config.fields import Template
from relay.config.handlers import Named
from relay.config.types import Alike, Own
from relay.faults import Rejected, Undelivered
from relay.sinks.batching import Outgoing, RequestLimits
from relay.sinks.brokers import BrokerSettings, Message

REQUESTS = 16
"""The most requests of a sink that are in flight."""
OF_THE_EVENT = re.compile("InvalidMessageContents|InvalidParameter|InvalidAttributeValue|TooLong")
"""Codes of an entry that no other attempt avoids, or of a request that has such an entry."""
_GROUP = re.compile(r"[!-~]{1,128}")

Entry = dict[str, Any]


def _address(value: str) -> str:
    require_http(value)
    return value


class AwsSettings(BrokerSettings):
    """A service of Amazon Web Services; the credentials are those that its SDK finds."""

    mode: Alike[Literal["structured"]] = "structured"
    """The message is the CloudEvent: it has too few attributes for the binary mode."""
    key: Alike[Named] = "{host_id}"
    """Only for FIFO. A template over the event's fields: the message's group, within which the order is kept."""
    region: Own[str | None] = None
    """The region, such as `eu-west-1`; null: that of the environment."""
    endpoint: Own[Annotated[str, AfterValidator(_address)] | None] = None
    """An address instead of the service's own, such as that of a VPC endpoint or an emulator."""

    @property
    def templates(self) -> dict[str, Template]:
        """The keys whose values are templates over an event's fields."""
        return {**super().templates, "key": Template(self.key)}


class ServiceClient(Protocol):
    """The client of a service: `relay.sinks.aws_client`, which only what sends imports."""

    async def open(self) -> None:
        """Open it. Raises Undelivered."""

    async def close(self) -> None:
        """Close the connections."""

    async def call(
        self, operation: str, parameters: dict[str, Any], *, has_entries: bool = True
    ) -> dict[str, Any]:
        """Send a request; returns the response. Raises Undelivered, and Rejected if one of its entries is at fault."""


class AwsService:
    """A service that takes several messages in one request. Its children send them, by `send` of `BatchService`."""

    BODY: ClassVar[str]
    """The field of an entry that has the body of the message."""
    limits: RequestLimits
    """Those of the service."""

    def __init__(self, client: ServiceClient) -> None:
        self.client = client

    async def open(self) -> None:
        """Open the client. Raises Undelivered."""
        await self.client.open()

    async def close(self) -> None:
        """Close the connections."""
        await self.client.close()

    def outgoing(self, message: Message) -> Outgoing[Entry]:
        """The entry of a message."""
        entry = {
            self.BODY: _text(message),
            "MessageAttributes": _attributes(message),
            **_fifo(message),
        }
        # Another destination keeps no order.
        is_fifo = "MessageGroupId" in entry
        return Outgoing(message.topic, entry, _size_of(message), ordered=is_fifo)


def numbered(entries: Sequence[Entry]) -> list[Entry]:
    """The entries, each with its index as `Id`."""
    return [{**entry, "Id": str(index)} for index, entry in enumerate(entries)]


def faults(entries: Sequence[Entry], response: Entry) -> list[Exception | None]:
    """The fault of each entry, as the response of a request reports it: it may have stored some and not others.

    What the response does not call stored is not: a proxy or an emulator may leave out entries.
    """
    stored = {each.get("Id") for each in response.get("Successful") or ()}
    failed = {each.get("Id"): each for each in response.get("Failed") or ()}
    return [
        _fault_of(failed[name])
        if name in failed
        else None
        if name in stored
        else Undelivered("the response does not say that the message is stored")
        for name in map(str, range(len(entries)))
    ]


def _fault_of(failed: Entry) -> Exception:
    code = str(failed.get("Code", "Failed"))
    is_of_event = failed.get("SenderFault") and OF_THE_EVENT.search(code)
    return (Rejected if is_of_event else Undelivered)(code)


def _text(message: Message) -> str:
    """The body of a message, which is JSON: the services take the characters of XML 1.0, and JSON can escape others."""
    body = message.body.decode()
    return body.replace("\ufffe", "\\ufffe").replace("\uffff", "\\uffff")


def _fifo(message: Message) -> dict[str, str]:
    """The group and the identity of a message for FIFO, each of printable ASCII; nothing for another destination."""
    if not message.topic.endswith(".fifo"):
        return {}
    key = message.key or ""
    group = key if _GROUP.fullmatch(key) else _digest(key)
    return {
        "MessageGroupId": group,
        "MessageDeduplicationId": _digest(message.deduplication),
    }


def _attributes(message: Message) -> dict[str, dict[str, str]]:
    """The attributes beside a structured body; a message may have ten."""
    return {name: {"DataType": "String", "StringValue": value} for name, value in _named(message)}


def _size_of(message: Message) -> int:
    """The bytes of a message that count for the limit of a request: its body and the attributes."""
    named = sum(len(name) + len("String") + len(value) for name, value in _named(message))
    return len(message.body) + named


def _named(message: Message) -> Iterator[tuple[str, str]]:
    yield "content-type", message.content_type
    yield from message.trace.items()


def _digest(value: str) -> str:
    return sha256(value.encode()).hexdigest()
