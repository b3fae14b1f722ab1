"""Calls handlers as relay does, with events of plain dictionaries, for the tests of handlers. No service, no outbox."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CoroutineType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg.rows import tuple_row

from relay.causes import MAX_HOPS, Causing, handling
from relay.config.imports import WORK, contained
from relay.event_types.current_version import as_current
from relay.event_types.registry import EventTypes
from relay.event_types.upcasting import Upcasting
from relay.faults import ConfigurationError, transaction_ended
from relay.handlers.python import call
from relay.model.events import Transaction
from relay.model.transactions import Routed
from relay.model.tuples import RowDecoder
from relay.sinks import Attempt
from relay.sinks.function import Delivery, second_block, unfinished_block
from relay.sinks.function_batches import Deliveries, value_returned
from relay.sinks.function_transactions import BlockState, Completing
from relay.source.given import GivenEvent, encode, plain_source
from relay.store.handler_sessions import guarded


def transaction(
    *events: GivenEvent, attempt: int = 1, types: EventTypes | None = None
) -> Transaction:
    """Return a business transaction of events that are given by their fields, as a handler gets it.

    `payload` and `metadata` are documents, `headers` a mapping of texts. What is left out and a publisher does not
    choose gets a value: `id`, `host_id`, `event_ts`, `c_offset` and the fields of the transaction. With `types` the
    events are in the current version of their type, and have its model. Raises ValueError for a field that there is
    not and for a value that it cannot have, and InvalidEvent.
    """
    source = plain_source(events)
    found = encode(events, source, attempt)
    if len(found) > 1:
        raise ValueError(
            "the events have more than one transaction_id: give them the same one, or none"
        )
    (one,) = Routed(found, RowDecoder(found.columns, source.mapping))
    return one if types is None else as_current(one, Upcasting(types))


def deliver(
    function: Callable[[Delivery], Any],
    *events: GivenEvent,
    attempt: int = 1,
    resource: Any = None,
    timeout: float = 30.0,
    conn: psycopg.Connection[Any] | None = None,
    types: EventTypes | None = None,
) -> GivenDelivery:
    """Call a function of `type: function` once with a delivery of these events; returns the delivery.

    An `async def` runs in an event loop of its own. `conn` is what `delivery.transaction()` lends, to an `async def` as
    a connection for coroutines, in a transaction that commits as relay's does. Raises what the function raises.
    """
    if conn is not None:
        require_connection(conn)
    delivery = GivenDelivery(
        transaction(*events, attempt=attempt, types=types), resource, timeout, conn
    )
    with handling(Causing(delivery.events, MAX_HOPS)):
        _call(function, delivery, "deliver_async(…)")
    _require_one_block(delivery)
    return delivery


async def deliver_async(
    function: Callable[[Delivery], Awaitable[Any]],
    *events: GivenEvent,
    attempt: int = 1,
    resource: Any = None,
    timeout: float = 30.0,
    conn: psycopg.AsyncConnection[Any] | None = None,
    types: EventTypes | None = None,
) -> GivenDelivery:
    """The same as `deliver`, in the running event loop, and with a connection for coroutines."""
    if not isinstance(conn, psycopg.AsyncConnection | psycopg.Connection | None):
        raise ValueError(f"conn is of type {type(conn).__name__}: give a psycopg.AsyncConnection")
    delivery = GivenDelivery(
        transaction(*events, attempt=attempt, types=types), resource, timeout, conn
    )
    with handling(Causing(delivery.events, MAX_HOPS)):
        returned = function(delivery)
        if not inspect.isawaitable(returned):
            raise RuntimeError("the function is no async def: call it with deliver")
        _require_done(await returned)
    _require_one_block(delivery)
    return delivery


def deliver_batch(
    function: Callable[[Deliveries], Any],
    *transactions: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    attempt: int = 1,
    resource: Any = None,
    timeout: float = 30.0,
    conn: psycopg.Connection[Any] | None = None,
    types: EventTypes | None = None,
) -> GivenDeliveries:
    """Call a function with `each: batch` once; returns the deliveries, with those that it has named in `failed`.

    Each transaction is given by its events, or by one event. Their key of order is the host of the first event. An
    `async def` runs in an event loop of its own. Raises what the function raises.
    """
    if conn is not None:
        require_connection(conn)
    if not transactions:
        raise ValueError("give at least one transaction")
    given = [[each] if isinstance(each, Mapping) else each for each in transactions]
    deliveries = GivenDeliveries(
        [
            GivenDelivery(transaction(*each, attempt=attempt, types=types), resource, timeout, conn)
            for each in given
        ],
        resource,
        timeout,
        conn,
    )
    with handling(Causing(None, MAX_HOPS)):
        returned = _call(function, deliveries, "asyncio.to_thread(deliver_batch, …)")
    if returned is not None:
        raise value_returned("test", returned)
    for each in deliveries._members:
        _require_one_block(each)
    return deliveries


def handle(
    function: Callable[[Transaction, psycopg.Cursor[Any]], Any],
    conn: psycopg.Connection[Any],
    *events: GivenEvent,
    attempt: int = 1,
    types: EventTypes | None = None,
) -> Transaction:
    """Call a function of `type: python` once, in a database transaction that is rolled back if it raises.

    Returns the business transaction. Raises what the function raises, and what relay raises for a function that goes on
    after a database error, that ends the transaction, or that has only returned a coroutine or a generator.
    """
    found = transaction(*events, attempt=attempt, types=types)
    require_connection(conn)
    with in_target(conn), conn.cursor() as cursor, handling(Causing(found.events, MAX_HOPS)):
        call("test", contained("callable", function), conn, found, cursor)
    return found


class GivenDelivery(Delivery):
    """A delivery of given events: what a function of a test gets."""

    __slots__ = ("_conn",)

    def __init__(
        self,
        transaction: Transaction,
        resource: Any = None,
        timeout: float = 30.0,
        conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any] | None = None,
    ) -> None:
        first = next(iter(transaction.events), None)
        key = None if first is None else first.text("host_id")
        keys = () if key is None else (key,)
        super().__init__(_Given(timeout), transaction, Attempt(keys, None, 0, None), resource)
        self._conn = conn

    def transaction(self) -> Any:
        """A transaction of the given connection. Raises RuntimeError without one."""
        if self._conn is None:
            raise RuntimeError("give the connection that delivery.transaction() is to lend: conn=…")
        return _GivenTransaction(self._conn, self)


class GivenDeliveries(Deliveries):
    """A batch of given deliveries: what a function of a test with `each: batch` gets."""

    __slots__ = ("_conn",)

    def __init__(
        self,
        members: Sequence[GivenDelivery],
        resource: Any = None,
        timeout: float = 30.0,
        conn: psycopg.Connection[Any] | None = None,
    ) -> None:
        super().__init__(_Given(timeout), members, resource)
        self._conn = conn

    @property
    def failed(self) -> dict[int, Exception]:
        """What the function has named with `fail`, by the index of the transaction."""
        return {self._indices[each]: error for each, error in self._failed.items()}

    @property
    def completed(self) -> list[int]:
        """The indices of the transactions that a block has completed."""
        return [index for each, index in self._indices.items() if each.is_completed]

    def transaction(self) -> Any:
        """A transaction of the given connection. Raises RuntimeError without one."""
        if self._conn is None:
            raise RuntimeError(
                "give the connection that deliveries.transaction() is to lend: conn=…"
            )
        self._choose()
        return _GivenTransaction(self._conn, self)


class _Given:
    """What a delivery knows of its sink."""

    name = "test"
    order_by = "host"
    log = logging.getLogger("relay.function.test")

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout


class _GivenTransaction:
    def __init__(self, conn: Any, delivery: Completing) -> None:
        self._conn = conn
        self._is_async = isinstance(conn, psycopg.AsyncConnection)
        self._block: Any = _lent_to_coroutines(conn) if self._is_async else lent(conn)
        self._delivery = delivery

    def __enter__(self) -> Any:
        self._delivery._begin()
        self._block.__enter__()
        return self._conn

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ended = BlockState.NONE
        try:
            self._block.__exit__(kind, error, trace)
            if kind is None:
                ended = BlockState.COMMITTED
        finally:
            self._delivery._end(ended)

    async def __aenter__(self) -> Any:
        conn = self.__enter__()
        return conn if self._is_async else asynchronous(conn)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, trace)


_SHARING: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""By connection, the other one with its session: one object, for as long as the connection, whose owner closes it."""


def asynchronous(conn: psycopg.Connection[Any]) -> psycopg.AsyncConnection[Any]:
    """The session of a connection for coroutines."""
    found = _SHARING.get(conn)
    if found is None:
        found = _SHARING[conn] = psycopg.AsyncConnection(conn.pgconn)
    return found


def _synchronous(conn: psycopg.AsyncConnection[Any]) -> psycopg.Connection[Any]:
    """The session of a connection for coroutines, for relay's own statements."""
    found = _SHARING.get(conn)
    if found is None:
        found = _SHARING[conn] = psycopg.Connection(conn.pgconn)
        # What it would prepare has the names of what coroutines prepare in the same session.
        found.prepare_threshold = None
    return found


def require_connection(conn: object) -> None:
    """Raise ValueError for a connection that cannot be lent."""
    if isinstance(conn, psycopg.AsyncConnection) or not hasattr(conn, "transaction"):
        raise ValueError(f"conn is of type {type(conn).__name__}: give a psycopg.Connection")


def require_no_loop(instead: str) -> None:
    """Raise RuntimeError in a thread in which an event loop runs; `instead` is what to await there."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(f"an event loop runs in this thread: await {instead}")


@contextmanager
def in_target(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """A database transaction, or a savepoint if one is open, as a task of relay has it.

    Deferred constraints are checked at its end, since a test rarely commits.
    """
    with lent(conn):
        conn.execute("set constraints all deferred")
        yield
        conn.execute("set constraints all immediate; set constraints all deferred")


@contextmanager
def _lent_to_coroutines(conn: psycopg.AsyncConnection[Any]) -> Iterator[None]:
    """The same as `lent`, for coroutines. relay's own statements block the event loop of the test."""
    factories = conn.row_factory, conn.cursor_factory
    conn.row_factory, conn.cursor_factory = tuple_row, psycopg.AsyncCursor
    try:
        with lent(_synchronous(conn)):
            yield
    finally:
        conn.row_factory, conn.cursor_factory = factories


@contextmanager
def lent(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """A database transaction, or a savepoint, with cursors as relay's own have them, whatever the owner has chosen.

    Raises ConfigurationError if the block ended it, and psycopg.Error if it went on after a database error.
    """
    if not hasattr(conn, "row_factory"):
        # A stand-in of a test.
        with conn.transaction():
            yield
        return
    factories = conn.row_factory, conn.cursor_factory
    conn.row_factory, conn.cursor_factory = tuple_row, psycopg.Cursor
    try:
        with conn.transaction(), guarded(conn):
            yield
    except psycopg.errors.InvalidCursorName:
        raise transaction_ended(["test"]) from None
    finally:
        conn.row_factory, conn.cursor_factory = factories


def _call(function: Callable[[Any], Any], argument: object, instead: str) -> Any:
    """Call a function; if it is an `async def`, in an event loop of its own. Returns what it returns."""
    returned = function(argument)
    if inspect.isawaitable(returned):
        try:
            require_no_loop(instead)
        except RuntimeError:
            _close(returned)
            raise
        returned = asyncio.run(_whole(returned))
    _require_done(returned)
    return returned


def _require_done(returned: object) -> None:
    if isinstance(returned, WORK):
        _close(returned)
        raise ConfigurationError(
            f"the function returned a {type(returned).__name__}, which nobody runs, so that nothing was done: return "
            "when all is done"
        )


def _require_one_block(delivery: Delivery) -> None:
    """Raise what relay raises if the function has suppressed the fault of a second block, or left one open."""
    if delivery._is_misused:
        raise second_block()
    if delivery._state is BlockState.OPEN:
        raise unfinished_block()


def _close(returned: object) -> None:
    if isinstance(returned, CoroutineType):
        # Otherwise Python warns that it was never awaited.
        returned.close()


async def _whole(returned: Awaitable[Any]) -> Any:
    return await returned
