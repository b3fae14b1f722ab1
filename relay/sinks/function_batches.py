"""Functions that are called with many transactions at once (`each: batch`): `module:function(deliveries)`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextvars import copy_context
from datetime import datetime
from typing import Any

from relay.causes import begin
from relay.config.handlers import FunctionHandler
from relay.config.imports import WORK
from relay.faults import DestinationRefused, Drop, describe
from relay.model.events import Transaction
from relay.sinks import ATTEMPTS, Again, OfBatch, Target
from relay.sinks.function import (
    Delivering,
    Delivery,
    Function,
    Logger,
    as_time,
    second_block,
    unfinished_block,
)
from relay.sinks.function_calls import Call, contained
from relay.sinks.function_transactions import (
    AlreadyCompleted,
    BlockState,
    CompletingTransaction,
)

log = logging.getLogger(__name__)


class Deliveries:
    """A batch of deliveries, each of one business transaction, in order.

    Iterating leaves out those that `fail` has named, and what follows one of these with its ordering keys: relay
    delivers that again after it, whatever becomes of it here. `resource` is that of each delivery.
    """

    __slots__ = (
        "_begun", "_completing", "_failed", "_failed_at", "_found", "_indices", "_is_closed", "_is_over", "_members",
        "_sink", "_state", "resource"
    )  # fmt: skip

    def __init__(self, sink: Delivering, members: Sequence[Delivery], resource: Any) -> None:
        self._sink = sink
        self._members = members
        self._indices = {each: index for index, each in enumerate(members)}
        self._begun = time.monotonic()
        self._failed: dict[Delivery, Exception] = {}
        self._failed_at: dict[str, int] = {}
        """The index of the first one that has failed, by key."""
        self._is_over = self._is_closed = False
        self._state = BlockState.NONE
        self._found: Collection[str] = ()
        self._completing: Sequence[Delivery] = ()
        self.resource = resource

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Delivery]:
        for each in self._members:
            if not self._is_left_out(each):
                yield each

    def fail(self, delivery: Delivery, error: BaseException) -> None:
        """Name a delivery that has failed, with what a function for one transaction would raise.

        That may be `relay.RetryLater`, `relay.Drop` (it is done), `relay.Fail` or any other exception. Raises TypeError
        for what is no exception, ValueError for a delivery that is not of the batch, and RuntimeError once
        `transaction` was entered.
        """
        if not isinstance(error, BaseException):
            raise TypeError(f"the error is a {type(error).__name__}, and no exception")
        index = self._indices.get(delivery)
        if index is None:
            raise ValueError("the delivery is none of this batch")
        if self._is_closed:
            raise RuntimeError(
                "name what has failed before deliveries.transaction(), which completes the others"
            )
        self._failed[delivery] = contained(error)
        if not isinstance(error, Drop):
            for key in delivery._attempt.keys:
                self._failed_at[key] = min(index, self._failed_at.get(key, index))

    def transaction(self) -> CompletingTransaction:
        """A database transaction of the target, whose commit completes the batch but for what has failed.

        As `Delivery.transaction`. A block of which an earlier attempt has committed a part is not entered: the function
        ends there, and is called again with the others.
        """
        self._choose()
        assert isinstance(self._sink, Function)  # noqa: S101
        completions = [each._completion for each in self._completing]
        return CompletingTransaction(self._sink.sessions, completions, self)

    def _choose(self) -> None:
        """Choose what a block completes. Raises RuntimeError if nothing is left."""
        if self._state is BlockState.NONE:
            self._completing = [
                each for each in self._members if not (self._is_left_out(each) or each.is_completed)
            ]
        if not self._completing:
            raise RuntimeError(
                "all deliveries of the batch have failed: there is nothing to complete"
            )
        self._is_closed = True

    @property
    def deadline(self) -> datetime:
        """When relay cancels the call."""
        return as_time(self._begun + self._sink.timeout)

    @property
    def seconds_left(self) -> float:
        """The seconds until the deadline, at least 0: a time-out for what the function calls."""
        return max(0.0, self._begun + self._sink.timeout - time.monotonic())

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger whose lines name the handler."""
        return Logger(self._sink.log, {"handler": self._sink.name})

    def _is_left_out(self, delivery: Delivery) -> bool:
        if delivery in self._failed:
            return True
        if not self._failed_at:
            return False
        index, most = self._indices[delivery], len(self._members)
        return any(self._failed_at.get(key, most) < index for key in delivery._attempt.keys)

    @property
    def _transaction_keys(self) -> Sequence[Hashable]:
        return [each._transaction_key for each in self._members]

    # For its transaction

    def _begin(self) -> None:
        """Note that a block begins. Raises AlreadyCompleted and, beside another one or after it, Fail."""
        if self._state is BlockState.FOUND:
            raise AlreadyCompleted(self._found)
        if any(each._state is not BlockState.NONE for each in self._completing):
            for each in self._completing:
                each._is_misused = True
            raise second_block()
        for each in self._completing:
            each._begin()
        self._state = BlockState.OPEN

    def _end(self, state: BlockState, found: Collection[str] = ()) -> None:
        """Note how a block has ended: NONE if nothing is committed, so that another one may begin."""
        self._state, self._found = state, found
        self._is_closed = state is not BlockState.NONE
        for each in self._completing:
            is_here = state is not BlockState.FOUND or each._identity in found
            each._end(state if is_here else BlockState.NONE)

    def _give_up(self) -> None:
        self._is_over = True
        for each in self._members:
            each._give_up()


def sink(name: str, settings: FunctionHandler, target: Target | None) -> FunctionOfBatches:
    """The sink of `type: function` with `batch`. Raises ConfigurationError as that of `relay.sinks.function`."""
    return FunctionOfBatches(name, settings, target)


class FunctionOfBatches(Function):
    """Calls the function for many transactions at once."""

    async def deliver_batch(
        self, transactions: Sequence[Transaction]
    ) -> Sequence[Exception | None]:
        """Call the function. Returns what has become of each transaction."""
        resource = await self._resource()
        attempts = ATTEMPTS.get()
        members = [
            Delivery(self, transaction, attempt, resource)
            for transaction, attempt in zip(transactions, attempts, strict=True)
        ]
        if self._unended:
            found = [self._unended_fault(each) for each in members]
            if any(found):
                return [fault or Again() for fault in found]
            self._require_fewer_others()
        deliveries = Deliveries(self, members, resource)
        call = Call(deliveries, copy_context(), asyncio.get_running_loop().create_future())
        call.context.run(begin, self._causing(None))
        error = await self._ended(call)
        return self._results(call, deliveries, error)

    def _results(
        self, call: Call, deliveries: Deliveries, error: BaseException | None
    ) -> list[Exception | None]:
        rest: Exception | None = None
        if isinstance(error, AlreadyCompleted) or deliveries._state is BlockState.FOUND:
            rest = Again()
        elif error is not None:
            rest = OfBatch(self._fault(call, error))
        elif call.returned is not None:
            self._refuse_returned(call.returned)
        results: list[Exception | None] = []
        for each in deliveries._members:
            if each._is_misused:
                results.append(second_block())
            elif each.is_completed:
                results.append(None)
            elif error is None and each._state is BlockState.OPEN:
                results.append(unfinished_block())
            elif each in deliveries._failed:
                results.append(deliveries._failed[each])
            else:
                # What the function was not given is not done, even where its predecessor holds no key any more.
                results.append(Again() if deliveries._is_left_out(each) else rest)
        if isinstance(rest, OfBatch) and any(each.is_completed for each in deliveries._members):
            log.warning(
                "a function has failed after transactions were committed: their deliveries are done",
                extra={"handler": self.name, "fault": describe(rest.fault)},
            )
        return results

    def _refuse_returned(self, returned: Any) -> None:
        if isinstance(returned, WORK):
            self._refuse_work(returned)
        raise value_returned(self.name, returned)


def value_returned(name: str, returned: object) -> DestinationRefused:
    """The fault of a function of batches, of the handler `name`, that returns a value."""
    return DestinationRefused(
        f"handlers.{name}.callable: the function returned a {type(returned).__name__}, and relay does not know whether "
        "it names deliveries that have failed: name them with deliveries.fail(delivery, error), and return nothing"
    )
