"""Sinks: their protocol, and one module for each type, which is imported only if a handler has the type.

A package of yours brings a type of its own with the names of `__all__`, and with those of `relay.sinks.brokers` and
`relay.sinks.batching`, on which relay's own sinks for brokers stand. The page "Write a sink" is the guide.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import LiteralString, Protocol, Self, cast

from relay.causes import MAX_HOPS
from relay.config import sink_types
from relay.config.handlers import (
    KINDS,
    DeliveryHandler,
    FunctionHandler,
    HandlerSettings,
    HttpHandler,
)
from relay.config.secrets import Secret
from relay.config.settings import Settings
from relay.config.types import Alike, Own
from relay.event_types.current_version import as_current, is_current
from relay.event_types.upcasting import Upcasting
from relay.faults import (
    ConfigurationError,
    DestinationRefused,
    Rejected,
    Unauthorized,
    Undelivered,
)
from relay.model.events import SQL_TYPES, Transaction
from relay.store.connections import Dsn

__all__ = [
    "Alike",
    "DestinationRefused",
    "Own",
    "Rejected",
    "Secret",
    "Sink",
    "SinkSettings",
    "Unauthorized",
    "Undelivered",
]

SinkSettings = DeliveryHandler


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a function is told of an attempt beside the transaction, and what a commit of its own needs.

    `keys` are the ordering keys. `since` is when the first attempt failed (monotonic clock, seconds), None in the first
    one. `claim` is the number of the sink's claim. `xid` is the full xid of the commit, 0 for one that is older than
    the column c_xid, and None for one that was deferred. `key` is what circuit breakers count.
    `endpoint` is the only one of several to which the transaction is delivered; None where they are not known yet.
    """

    keys: Collection[str]
    since: float | None
    claim: int
    xid: int | None
    key: Hashable = None
    endpoint: str | None = None


ATTEMPT: ContextVar[Attempt] = ContextVar("attempt")
"""The attempt that a function's sink makes in the current asyncio task."""


ATTEMPTS: ContextVar[Sequence[Attempt]] = ContextVar("attempts")
"""The same for each transaction of a batch."""


@dataclass(slots=True)
class Answer:
    """What a sink tells of an attempt that may be kept: where it went, without anything secret, and what came back."""

    destination: str | None = None
    status: int | None = None
    text: str | None = None


ANSWER: ContextVar[Answer | None] = ContextVar("answer", default=None)
"""The answer that the sink fills in the current asyncio task; None where no attempts are kept."""


class OfBatch(Exception):
    """A fault of a batch that does not say which of its transactions is the culprit."""

    def __init__(self, fault: Exception) -> None:
        super().__init__(fault)
        self.fault = fault


class ToEndpoints(Exception):
    """Nothing was tried: the transaction is to be delivered to each of these `endpoints` by itself."""

    def __init__(self, endpoints: Collection[str]) -> None:
        super().__init__(f"{len(endpoints)} endpoints")
        self.endpoints = endpoints


class Again(Exception):
    """A transaction of a batch was not tried, since another one of the batch has ended the call; nothing counts."""


@dataclass(frozen=True, slots=True)
class Target:
    """The target, for a sink that uses it: how to reach it, the group, and how many connections to open at most.

    `types` are the PostgreSQL types of an event's fields. When relay stops, calls of a function that are cancelled have
    `close_seconds` to end. `max_hops` is `source.max_hops`.
    """

    dsn: Dsn
    group: str
    connections: int
    types: Mapping[str, LiteralString] = field(default_factory=lambda: SQL_TYPES)
    close_seconds: float = 5.0
    max_hops: int = MAX_HOPS

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """The target of a configuration."""
        return cls(
            settings.target_dsn,
            settings.group,
            settings.sinks.connections,
            settings.source.sql_types,
            # Deliveries in flight have had half of it.
            settings.shutdown_timeout / 4,
            settings.source.max_hops,
        )


async def deliver_once(
    sink: Sink, transaction: Transaction, attempt: Attempt
) -> dict[str | None, Exception | None]:
    """Deliver a transaction, to each of its endpoints where there are several; returns what each has raised."""
    ATTEMPT.set(attempt)
    try:
        await sink.deliver(transaction)
    except ToEndpoints as found:
        raised: dict[str | None, Exception | None] = {}
        for each in found.endpoints:
            raised |= await deliver_once(sink, transaction, replace(attempt, endpoint=each))
        return raised
    except Exception as error:
        return {attempt.endpoint: error}
    return {attempt.endpoint: None}


class Sink(Protocol):
    """Delivers transactions to another system. Its methods run in one event loop, which other sinks share.

    It is built before relay needs the destination, and connects when it delivers: a destination that is away when relay
    starts is an outage like any other.
    """

    name: str
    """The name of the handler."""

    def resume(self, series: str) -> None:
        """Prepare for deliveries from the sink's stored position; called before the first one, and after a move.

        `series` identifies the group, the sink and its last move. Within it, an event that is delivered again is a
        repetition; in another one it is not.
        """

    async def deliver(self, transaction: Transaction) -> None:
        """Deliver all events of a transaction, in order; returns when the receiver has confirmed them.

        Many calls run concurrently, but never two for the same ordering key. Cancelling one call must not disturb the
        others; its events may arrive nevertheless.

        What the receiver refuses decides what is raised:

        - an event, which it will never accept, even alone: Rejected. Its transaction is dead-lettered.
        - a batch: nothing yet. The sink sends the batch's messages again, each alone; one that fails alone is refused.
        - the connection, or this server (another one is the primary): the sink closes the connection, so that the next
          attempt opens another, and raises Undelivered.
        - the destination, for now: Undelivered, with the seconds that the receiver asks for as `after`. The attempt is
          repeated; if all keys fail, the circuit breaker stops the sink.
        - the destination, until a person acts: DestinationRefused. The sink stops at its position at once.
        - relay's credentials, which may be changing: Unauthorized. The attempt does not count.

        When in doubt it is not the event: Undelivered costs a retry, Rejected an event. For any other exception
        `relay.faults.action_for` decides.
        """

    async def close(self) -> None:
        """Close the connections. Deliveries in flight fail."""


class BatchSink(Sink, Protocol):
    """A sink that can deliver many transactions at once."""

    async def deliver_batch(
        self, transactions: Sequence[Transaction]
    ) -> Sequence[Exception | None]:
        """Deliver transactions, those of a key in their order.

        Returns for each None if it is done, else what `deliver` would raise; `OfBatch` where it is not known whose the
        fault is, `Again` where it was not tried. What is raised is a fault of the whole batch.
        """


_UPCAST_AT_ONCE = 2
"""How many transactions of a sink are upcast at once, in threads that other sinks share."""


class TypedSink:
    """A sink that gets events in the current version of their type.

    No event of a transaction is sent unless all of them are valid.
    """

    def __init__(self, sink: Sink, upcaster: Upcasting) -> None:
        self.name = sink.name
        self._sink = sink
        self._upcaster = upcaster
        self._turns = asyncio.Semaphore(_UPCAST_AT_ONCE)

    def resume(self, series: str) -> None:
        """Prepare for deliveries from the sink's stored position."""
        self._sink.resume(series)

    async def deliver(self, transaction: Transaction) -> None:
        """Deliver all events of a transaction. Raises InvalidEvent, and the errors of the sink and of upcasters."""
        if not is_current(transaction, self._upcaster):
            # Upcasters and models are the user's code, which may take long.
            async with self._turns:
                transaction = await asyncio.to_thread(as_current, transaction, self._upcaster)
        await self._sink.deliver(transaction)

    async def deliver_batch(
        self, transactions: Sequence[Transaction]
    ) -> Sequence[Exception | None]:
        """Deliver many transactions. While one of them has an invalid event, the others are not tried."""
        current, faults = list(transactions), dict[int, Exception]()
        for index, transaction in enumerate(transactions):
            if is_current(transaction, self._upcaster):
                continue
            try:
                async with self._turns:
                    current[index] = await asyncio.to_thread(
                        as_current, transaction, self._upcaster
                    )
            except Exception as error:
                faults[index] = error
        if faults:
            return [faults.get(index) or Again() for index in range(len(current))]
        return await cast(BatchSink, self._sink).deliver_batch(current)

    async def close(self) -> None:
        """Close the connections."""
        await self._sink.close()


def build_sinks(
    configured: Mapping[str, HandlerSettings],
    upcaster: Upcasting | None = None,
    target: Target | None = None,
) -> dict[str, tuple[Sink, DeliveryHandler]]:
    """Build the sinks; returns each with its settings, by name, in the configuration's order.

    A sink connects with its first delivery. With an upcaster it gets events in the current version of their type.
    Functions may commit in the `target`, and sinks whose endpoints data choose query it.
    Raises ConfigurationError for one that cannot be built, or whose extra is not installed.
    """
    return {
        name: (_sink(name, settings, upcaster, target), settings)
        for name, settings in configured.items()
        if isinstance(settings, DeliveryHandler)
    }


def _module_of(settings: DeliveryHandler) -> str:
    """The module with the sink of a type that relay brings."""
    if isinstance(settings, HttpHandler) and settings.has_templates:
        return "http_endpoints"
    if isinstance(settings, FunctionHandler | HttpHandler) and settings.in_batches:
        return f"{settings.type}_batches"
    return str(settings.type)


def _sink(
    name: str, settings: DeliveryHandler, upcaster: Upcasting | None, target: Target | None
) -> Sink:
    kind = settings.type
    sink: Sink
    try:
        # The module's imports may need the extra of the type.
        if kind not in KINDS:
            sink = sink_types.build(name, kind, settings)
        else:
            module = import_module(f"relay.sinks.{_module_of(settings)}")
            sink = (
                module.sink(name, settings, target)
                if isinstance(settings, FunctionHandler | HttpHandler)
                else module.sink(name, settings)
            )
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"handlers.{name}.type: {sink_types.missing(kind, error)}"
        ) from None
    return TypedSink(sink, upcaster) if upcaster else sink
