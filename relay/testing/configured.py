"""Runs the handlers of a configuration with events of plain dictionaries, for tests. No service, no outbox."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from os import PathLike
from pathlib import Path
from secrets import token_hex
from typing import Any, cast

import psycopg

from relay.config import loading
from relay.config.fields import nearest
from relay.config.handlers import (
    AnyHandler,
    BatchHandler,
    DeliveryHandler,
    FunctionHandler,
    QueueHandler,
)
from relay.config.settings import Settings
from relay.event_types.current_version import routed_as_current
from relay.event_types.registry import registered
from relay.event_types.upcasting import Upcasting
from relay.faults import Undelivered
from relay.model.events import Transaction
from relay.model.transactions import Routed
from relay.model.tuples import RowDecoder
from relay.pipeline.deferral import Ordering
from relay.pipeline.handling import build
from relay.pipeline.routing import BatchRouter, RouteRules, chooser, handlers_of_events
from relay.queues.declared import DeclaredQueues
from relay.sinks import (
    ATTEMPTS,
    Again,
    Attempt,
    BatchSink,
    OfBatch,
    Sink,
    Target,
    build_sinks,
    deliver_once,
)
from relay.sinks.function import Function
from relay.sinks.function_transactions import Completing, TargetSessions
from relay.source.given import GivenEvent, encode
from relay.store.positions.completions import Completion
from relay.testing.calls import asynchronous, in_target, lent, require_connection, require_no_loop
from relay.testing.memory_sink import MemorySink

Config = str | PathLike[str] | Mapping[str, Any]
"""The path of a configuration, or the mapping that its file would have."""


def run(
    config: Config,
    name: str,
    *events: GivenEvent,
    conn: psycopg.Connection[Any] | None = None,
    sink: MemorySink | None = None,
    attempt: int = 1,
) -> list[Transaction]:
    """Run a handler of a configuration once, with those of the events that the routes lead to it.

    `config` is the path of the configuration, or the mapping that its file would have. Returns the business
    transactions that the handler got. `sql`, `python` and `queue` handlers run in a database transaction of `conn`, or
    in a savepoint if one is open; it is rolled back if the handler raises. A sink delivers to its destination, or to
    `sink` instead; `delivery.transaction()` of a function lends `conn`. `attempt` is the number of the attempt.

    Raises what the handler raises, NotRouted if no route matches an event, ValueError if the handler gets none of the
    events or cannot be run so, ConfigurationError, and RuntimeError for a sink in the thread of an event loop.
    """
    if conn is not None:
        require_connection(conn)
    settings = _settings(config)
    handler = _handler(settings, name)
    own = _routed_to(settings, name, events, attempt)
    if isinstance(handler, DeliveryHandler):
        if sink is not None and not isinstance(sink, MemorySink):
            raise ValueError(
                f"sink is a {type(sink).__name__}, and no MemorySink, such as MemorySink()"
            )
        if conn is not None and not isinstance(handler, FunctionHandler):
            raise ValueError(
                f"handlers.{name}: is of type {handler.type}, which does not use a connection"
            )
        require_no_loop("asyncio.to_thread(run, …)")
        built = _sink(settings, name, handler, conn, sink)
        asyncio.run(_deliver(built, name, handler, own))
    elif sink is not None:
        raise ValueError(f"handlers.{name}: is of type {handler.type}, which a sink cannot replace")
    elif conn is None:
        raise ValueError(
            f"handlers.{name}: is of type {handler.type}, which writes to the target: give a connection: conn=…"
        )
    else:
        _apply(settings, name, handler, own, conn)
    return list(own)


def routed(config: Config, *events: GivenEvent) -> list[tuple[str, ...]]:
    """The names of the handlers that the routes of a configuration lead each event to; none if no route matches.

    Raises ConfigurationError, and ValueError for an event that cannot be.
    """
    settings = _settings(config)
    rules, source = RouteRules(settings.routes), settings.source
    each = (encode([event], source) for event in events)
    return list(
        chain.from_iterable(
            handlers_of_events(rules, one, RowDecoder(one.columns, source.mapping)) for one in each
        )
    )


def _settings(config: Config) -> Settings:
    return loading.of_mapping(config) if isinstance(config, Mapping) else loading.load(Path(config))


def _handler(settings: Settings, name: str) -> AnyHandler:
    """A handler that can be run. Raises ValueError for another one."""
    handler = settings.handlers.get(name)
    if handler is None:
        meant = nearest(name, settings.handlers)
        raise ValueError(
            f"there is no handler {name!r}; "
            + (f"did you mean {meant}?" if meant else f"there are {', '.join(settings.handlers)}")
        )
    if name in settings.spark_handlers:
        raise ValueError(
            f"handlers.{name}: is of type spark, which reads the outbox by itself: run it with `relay run`"
        )
    return handler


def _routed_to(settings: Settings, name: str, events: Sequence[GivenEvent], attempt: int) -> Routed:
    """The events that the routes lead to a handler, in the current version of their types.

    Raises NotRouted, and ValueError if there is none.
    """
    assigned = BatchRouter(settings).route(encode(events, settings.source, attempt))
    for refusal in assigned.refused.values():
        raise refusal
    found = assigned.parts.get(name)
    if found is None:
        others = ", ".join(assigned.parts) or "no handler"
        raise ValueError(f"routes: no event goes to {name}: they go to {others}")
    upcaster = Upcasting(registered(settings.events))
    return routed_as_current(found, upcaster) if upcaster else found


# In the target


def _apply(
    settings: Settings,
    name: str,
    handler: AnyHandler,
    own: Routed,
    conn: psycopg.Connection[Any],
) -> None:
    """Run a transactional handler as a task does."""
    queues = DeclaredQueues(settings.group, chooser)
    alone = settings.model_copy(update={"handlers": {name: handler}, "events": {}})
    built = build(alone, queues)[name]
    with in_target(conn):
        if isinstance(handler, QueueHandler):
            try:
                queues.current(conn)
            except psycopg.errors.InvalidSchemaName:
                raise ValueError(
                    f"handlers.{name}: the database has no tables of relay: create them with `relay init`"
                ) from None
        built.configure(conn)
        built.apply(conn, own)


# Sinks


def _sink(
    settings: Settings,
    name: str,
    handler: DeliveryHandler,
    conn: psycopg.Connection[Any] | None,
    memory: MemorySink | None,
) -> Sink:
    if memory is not None:
        memory.replace(name, handler)
        return memory
    target = Target.of(settings)
    ((built, _),) = build_sinks({name: handler}, None, target).values()
    if isinstance(built, Function):
        built._sessions = _GivenSessions(conn, target, name, built.timeout)
    return built


async def _deliver(sink: Sink, name: str, handler: DeliveryHandler, own: Routed) -> None:
    """Deliver transactions in order, in batches where the handler does so. Raises the first fault."""
    transactions = list(own)
    keys = Ordering({name: handler}).delivery_keys(name, own)
    attempts = [Attempt(each, None, 0, None) for each in keys]
    sink.resume(token_hex(8))
    try:
        if (
            isinstance(handler, BatchHandler)
            and handler.in_batches
            and not isinstance(sink, MemorySink)
        ):
            await _deliver_batch(cast(BatchSink, sink), transactions, attempts)
            return
        for transaction, each in zip(transactions, attempts, strict=True):
            for fault in (await deliver_once(sink, transaction, each)).values():
                if fault is not None:
                    raise fault
    finally:
        await sink.close()


async def _deliver_batch(
    sink: BatchSink, transactions: Sequence[Transaction], attempts: Sequence[Attempt]
) -> None:
    ATTEMPTS.set(attempts)
    for fault in await sink.deliver_batch(transactions):
        if isinstance(fault, OfBatch):
            raise fault.fault
        if fault is not None and not isinstance(fault, Again):
            raise fault


class _GivenSessions(TargetSessions):
    """Lends the connection of a test to the calls of a function, one block after the other."""

    def __init__(
        self, conn: psycopg.Connection[Any] | None, target: Target, sink: str, timeout: float
    ) -> None:
        super().__init__(target, sink, timeout)
        self._conn = conn

    @contextmanager
    def begun(
        self, completions: Sequence[Completion], delivery: Completing
    ) -> Iterator[psycopg.Connection[Any]]:
        """Run a transaction, or a savepoint. Raises RuntimeError without a connection, Undelivered if it is late."""
        if self._conn is None:
            raise RuntimeError("give the connection that delivery.transaction() is to lend: conn=…")
        with lent(self._conn):
            if delivery._is_over:
                raise Undelivered("the attempt was given up")
            yield self._conn

    def asynchronous(self, conn: psycopg.Connection[Any]) -> psycopg.AsyncConnection[Any]:
        """The same session for coroutines."""
        return asynchronous(conn)
