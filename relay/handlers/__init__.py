"""What is done with events: one module for each kind of handler, behind one small protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import psycopg

from relay.events import Transaction
from relay.faults import ConfigurationError
from relay.handler_settings import Handler as Configured
from relay.handler_settings import (
    HttpHandler,
    KafkaHandler,
    NatsHandler,
    OutsideHandler,
    PythonHandler,
    RabbitmqHandler,
    RedisHandler,
    SparkHandler,
    SqlHandler,
)
from relay.transactions import Routed

Connection = psycopg.Connection[Any]


class Handler(Protocol):
    """Applies transactions inside the target's database transaction. Stateless, so that tasks may share it."""

    name: str

    def configure(self, conn: Connection) -> None:
        """Prepare a new connection."""

    def check(self, conn: Connection) -> None:
        """Raise ConfigurationError if the handler cannot work on this database at all."""

    def apply(self, conn: Connection, routed: Routed) -> None:
        """Apply transactions, in order. What it raises is judged by `relay.faults`."""


class Outside(Protocol):
    """Delivers transactions to the outside world, one at a time in each thread."""

    name: str

    def deliver(self, transaction: Transaction) -> None:
        """Deliver; raises TransientFault where it is worth another attempt, and anything else where it is not."""

    def close(self) -> None:
        """Let go of connections."""


def build(configured: Mapping[str, Configured], group: str) -> dict[str, Handler]:
    """The handlers that work inside the target, by name, in the configuration's order; `group` is whose they are.

    Raises ConfigurationError for one that cannot be built.
    """
    from relay.handlers.python import Python
    from relay.handlers.spark import Spark
    from relay.handlers.sql import SqlBatch, SqlEvent

    handlers: dict[str, Handler] = {}
    for name, settings in configured.items():
        match settings:
            case PythonHandler():
                handlers[name] = Python(name, settings)
            case SparkHandler():
                handlers[name] = Spark(name, settings, group)
            case SqlHandler(each="event"):
                handlers[name] = SqlEvent(name, settings)
            case SqlHandler():
                handlers[name] = SqlBatch(name, settings.statement)
    return handlers


def build_outside(
    configured: Mapping[str, Configured],
) -> dict[str, tuple[Outside, OutsideHandler]]:
    """The handlers that act outside the target, with their configuration, by name in its order.

    Raises ConfigurationError for one that cannot be built, or whose extra is not installed.
    """
    handlers: dict[str, tuple[Outside, OutsideHandler]] = {}
    for name, settings in configured.items():
        if isinstance(settings, OutsideHandler):
            handlers[name] = (_outside(name, settings), settings)
    return handlers


def _outside(name: str, settings: OutsideHandler) -> Outside:
    try:
        return _build(name, settings)
    except ModuleNotFoundError as error:
        kind = getattr(settings, "type")  # noqa: B009
        raise ConfigurationError(
            f"handlers.{name}.type: {kind} needs {error.name}: install relay-outbox[{kind}]"
        ) from None


def _build(name: str, settings: OutsideHandler) -> Outside:
    from relay.handlers.messages import Publishing

    match settings:
        case HttpHandler():
            from relay.handlers.http import Http

            return Http(name, settings)
        case RedisHandler():
            from relay.handlers.redis import Redis

            return Publishing(name, settings, Redis(name, settings))
        case NatsHandler():
            from relay.handlers.nats import Nats

            return Publishing(name, settings, Nats(name, settings))
        case RabbitmqHandler():
            from relay.handlers.rabbitmq import Rabbitmq

            return Publishing(name, settings, Rabbitmq(name, settings))
        case KafkaHandler():
            from relay.handlers.kafka import Kafka

            return Publishing(name, settings, Kafka(name, settings), settings.key)
    raise AssertionError(settings)
