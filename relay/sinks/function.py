"""Sinks that call a function of the user, which may call other services: `module:function(delivery)`."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Collection, Hashable, Mapping, MutableMapping, Sequence
from contextvars import copy_context
from datetime import UTC, datetime, timedelta
from itertools import islice
from types import CoroutineType
from typing import Any, Protocol

from relay.causes import MAX_HOPS, Causing, begin
from relay.config.handlers import FunctionHandler
from relay.config.imports import ASYNC, WORK, find_function, unfinished_kind
from relay.faults import (
    ConfigurationError,
    DestinationRefused,
    Fail,
    NotTried,
    Undelivered,
    describe,
)
from relay.logs import RepeatedLines
from relay.model import trace_context
from relay.model.events import Event, Events, Headers, Transaction
from relay.model.headers import RESEND
from relay.sinks import ATTEMPT, Attempt, Target, cloudevents, function_calls
from relay.sinks.brokers import Shared
from relay.sinks.function_calls import Call, Calls, Held, LoopCalls, ThreadCalls, contained
from relay.sinks.function_transactions import (
    AlreadyCompleted,
    BlockState,
    CompletingTransaction,
    TargetSessions,
)
from relay.store.positions.completions import Completion

log = logging.getLogger(__name__)

_KEY_FIELDS = {"host": "host_id", "user": "user_id", "aggregate": "aggregate_id"}


def sink(name: str, settings: FunctionHandler, target: Target | None) -> Function:
    """The sink of `type: function`. Raises ConfigurationError for a function that cannot be imported or called so."""
    return Function(name, settings, target)


class Delivering(Protocol):
    """What a delivery knows of the sink that makes it."""

    name: str
    timeout: float
    order_by: str
    log: logging.Logger


class Delivered(Protocol):
    """What a function is called with."""

    _transaction_keys: Sequence[Hashable]

    def _give_up(self) -> None: ...


class Delivery:
    """The events of one business transaction that are routed to a function, and one attempt to deliver them.

    `resource` is the value of what the configuration's `open` has opened, None without it.
    """

    __slots__ = (
        "_attempt", "_begun", "_first", "_is_misused", "_is_over", "_sink", "_state", "_transaction", "is_completed",
        "resource"
    )  # fmt: skip

    def __init__(
        self, sink: Delivering, transaction: Transaction, attempt: Attempt, resource: Any
    ) -> None:
        self._sink = sink
        self._transaction = transaction
        self._attempt = attempt
        self._begun = time.monotonic()
        self._first: Event | None = None
        self._is_misused = self._is_over = False
        self._state = BlockState.NONE
        self.resource = resource
        self.is_completed = False
        """Whether a `transaction` was committed, so that the delivery is done, whatever the function does then."""

    @property
    def events(self) -> Events:
        """The events, in order; each iteration decodes them."""
        return self._transaction.events

    def __len__(self) -> int:
        return len(self._transaction.events)

    @property
    def transaction_id(self) -> str | None:
        """The id of the business transaction."""
        return self._transaction.transaction_id

    @property
    def attempt(self) -> int:
        """1 for the first attempt, and one more after each that failed and counted."""
        return self._transaction.attempt

    @property
    def first_attempt_at(self) -> datetime:
        """When the first attempt began; once the transaction was deferred, when the first attempt failed."""
        since = self._attempt.since
        return as_time(self._begun if since is None else since)

    @property
    def deadline(self) -> datetime:
        """When relay cancels the call."""
        return as_time(self._begun + self._sink.timeout)

    @property
    def seconds_left(self) -> float:
        """The seconds until the deadline, at least 0: a time-out for what the function calls."""
        return max(0.0, self._begun + self._sink.timeout - time.monotonic())

    @property
    def key(self) -> str | None:
        """The ordering key, as `order_by` says: the first event's host, user or aggregate; None without order."""
        field = _KEY_FIELDS.get(self._sink.order_by)
        return None if field is None else self._first_event.text(field)

    @property
    def idempotency_key(self) -> str:
        """A text that is the same in every attempt, and another one for each transaction: the id of the first event."""
        return cloudevents.identity(self._first_event)

    @property
    def headers(self) -> Headers:
        """The extra columns of the first event, by their names in `source.headers`."""
        return self._first_event.headers

    @property
    def trace(self) -> Mapping[str, str]:
        """The headers `traceparent` and `tracestate` for requests that the function makes; empty without a trace."""
        found = trace_context.headers(self._first_event)
        if found:
            return found
        context = trace_context.parse(self._first_event.text("metadata"))
        return {} if context is None else context.headers

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger whose lines name the handler, the transaction and the attempt."""
        return Logger(
            self._sink.log,
            {
                "handler": self._sink.name,
                "transaction_id": self.transaction_id,
                "attempt": self.attempt,
            },
        )

    def transaction(self) -> CompletingTransaction:
        """A database transaction of the target, whose commit completes the delivery.

        `async with delivery.transaction() as conn` in an `async def`, `with` in a plain function. What the block writes
        through the connection and the completion are committed together, once, however often the delivery is repeated.
        A block that an earlier attempt has committed is not entered: the function ends there, and the delivery is done.
        A second block beside an open or after a committed one is refused: the delivery becomes a dead letter.
        """
        assert isinstance(self._sink, Function)  # noqa: S101
        return CompletingTransaction(
            self._sink.sessions,
            [self._completion],
            self,
        )

    @property
    def _first_event(self) -> Event:
        if self._first is None:
            (self._first,) = islice(self._transaction.events, 1)
        return self._first

    @property
    def _may_have_trace(self) -> bool:
        """Whether the first event may have a trace, without decoding it."""
        return any(map(trace_context.may_have, islice(self._transaction.events.tuples, 1)))

    @property
    def _identity(self) -> str:
        # With the row's number, since an adopted outbox may have rows with equal ids; a resend is to
        # be done again.
        event = self._first_event
        resend = event.headers.get(RESEND)
        identity = f"{self.idempotency_key}/{event.text('c_offset') or ''}"
        return identity if resend is None else f"{identity}/{resend}"

    @property
    def _completion(self) -> Completion:
        assert isinstance(self._sink, Function)  # noqa: S101
        return self._sink.completion(self._attempt, self._transaction, self._identity)

    @property
    def _transaction_key(self) -> Hashable:
        """The same for the transaction from the stream, polled or deferred, without decoding an event."""
        return self.transaction_id, self._transaction.commit.xid & 0xFFFFFFFF

    @property
    def _transaction_keys(self) -> Sequence[Hashable]:
        return (self._transaction_key,)

    def _give_up(self) -> None:
        self._is_over = True

    # For its transactions

    def _begin(self) -> None:
        """Note that a block begins. Raises AlreadyCompleted and, beside another one or after it, Fail."""
        if self._state is BlockState.FOUND:
            raise AlreadyCompleted([self._identity])
        if self._state is not BlockState.NONE:
            self._is_misused = True
            raise second_block()
        self._state = BlockState.OPEN

    def _end(self, state: BlockState, found: Collection[str] = ()) -> None:
        """Note how a block has ended: NONE if nothing is committed, so that another one may begin."""
        self._state = state
        self.is_completed = state in (BlockState.COMMITTED, BlockState.FOUND)


def second_block() -> Fail:
    """The fault of a function that enters a second transaction of a delivery."""
    return Fail(
        "the function entered delivery.transaction() a second time: a delivery has one such block, and only what the "
        "first one wrote is committed: write all effects in it"
    )


def unfinished_block() -> Undelivered:
    """The fault of a function that leaves a transaction open."""
    return Undelivered("the function returned before its delivery.transaction() had ended")


def as_time(moment: float) -> datetime:
    """The time of a moment of the monotonic clock."""
    return datetime.now(UTC) + timedelta(seconds=moment - time.monotonic())


class Logger(logging.LoggerAdapter[logging.Logger]):
    """Adds fields to those of each line."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the fields to a line."""
        return msg, {**kwargs, "extra": {**(self.extra or {}), **(kwargs.get("extra") or {})}}


class Function:
    """Calls the function for each transaction. What it does concerns this sink only."""

    def __init__(self, name: str, settings: FunctionHandler, target: Target | None) -> None:
        self.name = name
        self.timeout = settings.timeout
        self.order_by: str = settings.order_by
        self.log = logging.getLogger(f"relay.function.{name}")
        self._settings = settings
        self._target = target
        key = f"handlers.{name}"
        self._function = find_function(
            f"{key}.callable", settings.callable, "delivery", may_await=True
        )
        self._opens = None if settings.open is None else _opening(f"{key}.open", settings.open)
        self._calls: Calls | None = None
        self._shared: Shared[Held] | None = None
        self._held: Held | None = None
        self._sessions: TargetSessions | None = None
        self._series = ""
        self._is_closing = False
        self._running: dict[Call, float] = {}
        """The calls before their deadlines, which come in this order: a timer for each would cost as much as a call."""
        self._timer: asyncio.TimerHandle | None = None
        self._unended: dict[Hashable, Call] = {}
        self._late_ends = RepeatedLines(
            log, logging.WARNING, "calls of a function do not end after their deadline", "calls"
        )

    def resume(self, series: str) -> None:
        """Complete what follows in `series`."""
        self._series = series

    @property
    def sessions(self) -> TargetSessions:
        """The sessions of the target that calls may use."""
        if self._sessions is None:
            assert self._target is not None  # noqa: S101
            self._sessions = TargetSessions(self._target, self.name, self.timeout)
        return self._sessions

    def completion(self, attempt: Attempt, transaction: Transaction, identity: str) -> Completion:
        """What says in the target that a delivery is done."""
        first, *_ = transaction.events
        return Completion(
            self.sessions.group,
            self.name,
            self._series,
            attempt.claim,
            identity,
            attempt.xid,
            transaction.commit.end_lsn,
            first.c_offset or 0,
        )

    async def deliver(self, transaction: Transaction) -> None:
        """Call the function. Raises what it raises, and Undelivered if it does not end in time."""
        has_none = self._opens is None and self._calls is not None
        resource = None if has_none else await self._resource()
        delivery = Delivery(self, transaction, ATTEMPT.get(), resource)
        if self._unended:
            self._require_no_other(delivery)
        loop = asyncio.get_running_loop()
        call = Call(delivery, copy_context(), loop.create_future())
        call.context.run(begin, self._causing(transaction))
        if "opentelemetry.trace" in sys.modules:
            call.context.run(_continue_trace, delivery)
        self._judge(call, delivery, await self._ended(call))

    def _causing(self, transaction: Transaction | None) -> Causing:
        """What a call is for, for what it publishes; None: many transactions."""
        most = MAX_HOPS if self._target is None else self._target.max_hops
        return Causing(None if transaction is None else transaction.events, most)

    async def _resource(self) -> Any:
        """What `open` has opened, None without it. Raises Undelivered."""
        if self._calls is None:
            self._begin()
        if self._opens is None:
            return None
        held = self._held
        if held is None or not held.is_open:
            held = await self._open()
        return held.value

    async def _ended(self, call: Call) -> BaseException | None:
        """Run a call, until its end or some time after its deadline; returns what it raised."""
        assert self._calls is not None  # noqa: S101
        loop = asyncio.get_running_loop()
        self._calls.start(call)
        deadline = self._running[call] = loop.time() + self.timeout
        if self._timer is None:
            self._timer = loop.call_at(deadline, self._cancel_late)
        try:
            return await call.ended
        except asyncio.CancelledError:
            self._give_up(call)
            raise
        finally:
            self._running.pop(call, None)
            # What goes on of the function begins no transaction beside a later attempt, or after it.
            call.argument._give_up()

    def _begin(self) -> Calls:
        if unfinished_kind(self._function) == ASYNC:
            self._calls = LoopCalls(self.name, self._function, self._has_ended)
        else:
            # As many again for calls that do not end.
            most = 2 * self._settings.concurrency
            self._calls = ThreadCalls(self.name, self._function, most, self._has_ended)
        return self._calls

    # What `open` opens

    async def _open(self) -> Held:
        if self._shared is None:
            self._shared = Shared(self._enter, lambda held: held.is_open)
        self._held = await self._shared.get()
        return self._held

    async def _enter(self) -> Held:
        assert self._calls is not None  # noqa: S101
        assert self._opens is not None  # noqa: S101
        try:
            async with asyncio.timeout(self.timeout):
                return await self._calls.enter(self._opens)
        except TimeoutError:
            raise Undelivered(f"open has not ended in {self.timeout:g} s") from None
        except Exception as error:
            # No fault of an event.
            raise Undelivered(f"open failed: {describe(error)}") from error

    # Deadlines

    def _cancel_late(self) -> None:
        """Cancel the calls whose deadline has come, and come again at the next one's."""
        self._timer = None
        assert self._calls is not None  # noqa: S101
        loop = asyncio.get_running_loop()
        for call, deadline in list(self._running.items()):
            if deadline > loop.time():
                self._timer = loop.call_at(deadline, self._cancel_late)
                return
            del self._running[call]
            call.is_late = True
            self._calls.cancel(call)
            loop.call_later(function_calls.END_SECONDS, self._end_attempt, call)

    def _end_attempt(self, call: Call) -> None:
        """End the attempt whose call does not end. Its transaction is not delivered again beside that call."""
        if call.is_done or call.ended.done():
            return
        assert self._calls is not None  # noqa: S101
        where = self._calls.where(call)
        self._abandon(call)
        self._late_ends.note(1, handler=self.name, fault=where)
        call.is_over = True
        call.ended.set_result(Undelivered(f"the call does not end after its deadline: {where}"))

    def _abandon(self, call: Call) -> None:
        """Note that nobody waits for a call that goes on: its transactions are not delivered beside it."""
        argument: Delivered = call.argument
        argument._give_up()
        for key in argument._transaction_keys:
            self._unended[key] = call

    def _give_up(self, call: Call) -> None:
        call.is_over = True
        if call.is_done:
            call.argument._give_up()
        else:
            self._abandon(call)
        if self._calls is not None:
            self._calls.cancel(call)

    def _has_ended(self, call: Call) -> None:
        if self._unended:
            self._unended = {name: each for name, each in self._unended.items() if each is not call}

    def _require_no_other(self, delivery: Delivery) -> None:
        """Raise Undelivered while an earlier call of the transaction has not ended, or too many others have not."""
        fault = self._unended_fault(delivery)
        if fault is not None:
            raise fault
        self._require_fewer_others()

    def _unended_fault(self, delivery: Delivery) -> Undelivered | None:
        """The fault of a delivery whose earlier call has not ended; of a batch, nobody knows which one it is about."""
        call = self._unended.get(delivery._transaction_key)
        if call is None:
            return None
        is_of_one = len(call.argument._transaction_keys) == 1
        kind = Undelivered if is_of_one else NotTried
        return kind("an earlier call for the transaction has not ended")

    def _require_fewer_others(self) -> None:
        """Raise DestinationRefused while too many calls have not ended."""
        others = len(set(self._unended.values()))
        if others >= self._settings.concurrency:
            raise DestinationRefused(f"{others} calls have not ended long after their deadlines")

    def _judge(self, call: Call, delivery: Delivery, error: BaseException | None) -> None:
        """Raise what a call's end means; nothing if the delivery is done."""
        if delivery._is_misused:
            raise second_block()
        if delivery.is_completed:
            if error is not None and delivery._state is BlockState.COMMITTED:
                log.warning(
                    "a function has failed after its transaction was committed: the delivery is done",
                    extra={"handler": self.name, "fault": describe(error)},
                )
            return
        if error is not None:
            raise self._fault(call, error)
        if delivery._state is BlockState.OPEN:
            raise unfinished_block()
        if isinstance(call.returned, WORK):
            self._refuse_work(call.returned)

    def _fault(self, call: Call, error: BaseException) -> Exception:
        """What the error of a call means."""
        if call.is_over:
            assert isinstance(error, Exception)  # noqa: S101
            return error
        if call.is_late:
            late = Undelivered(f"not done in {self.timeout:g} s")
            late.__cause__ = error
            return late
        if self._is_closing and isinstance(error, asyncio.CancelledError):
            return Undelivered("its call was cancelled: the sink is closed")
        return contained(error)

    def _refuse_work(self, returned: Any) -> None:
        if isinstance(returned, CoroutineType):
            # Otherwise Python warns that it was never awaited.
            returned.close()
        raise DestinationRefused(
            f"handlers.{self.name}.callable: the function returned a {type(returned).__name__}, which nobody runs, so "
            "that nothing was done: make it an `async def`, or return when all is done"
        )

    async def close(self) -> None:
        """End the calls, and leave what `open` has opened."""
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        if self._shared is not None:
            await self._shared.close()
        if self._calls is not None:
            seconds = function_calls.END_SECONDS
            if self._target is not None:
                seconds = min(seconds, self._target.close_seconds)
            await self._calls.close(seconds)
        if self._sessions is not None:
            self._sessions.close()


def _opening(key: str, path: str) -> Callable[[], Any]:
    try:
        return find_function(key, path)
    except ConfigurationError as error:
        if "yield" in str(error):
            raise ConfigurationError(
                f"{error}: decorate it with contextlib.asynccontextmanager, or contextlib.contextmanager"
            ) from None
        raise


def _continue_trace(delivery: Delivery) -> None:
    """Make the publisher's span the current one in this context, unless relay has made one for the delivery."""
    from opentelemetry import context, trace

    if trace.get_current_span().get_span_context().is_valid or not delivery._may_have_trace:
        return
    found = trace_context.parse(delivery._first_event.text("metadata"))
    if found is None:
        return
    span = trace.SpanContext(
        int(found.trace_id, 16),
        int(found.span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(found.flags),
        trace_state=trace.TraceState.from_header([found.state]) if found.state else None,
    )
    context.attach(trace.set_span_in_context(trace.NonRecordingSpan(span)))
