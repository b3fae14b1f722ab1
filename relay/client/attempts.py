"""The slots of a worker, each of which handles one message at a time: claim it, call its handler, and end the attempt.

The two classes do the same; one of them awaits.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from relay.causes import Causing, handling
from relay.client.databases import AsyncLink, Link
from relay.client.errors import LeaseLost, NoHandler
from relay.client.idle import Left
from relay.client.messages import (
    CLAIM,
    COMPLETE,
    EXTEND,
    LEASE,
    NOTE,
    RELEASE,
    Ends,
    Lease,
    LeasedMessage,
    Message,
    attempt_of,
    end_of,
    has_more,
    values_of,
)
from relay.client.outbox import Outbox
from relay.client.sessions import Statement
from relay.outcomes import Drop, RetryLater
from relay.renewal import renew_sessions, renew_sessions_async

log = logging.getLogger("relay.worker")

Taken = Callable[[bool], object]
"""Called in the slot's thread for a message that was taken: there may be more messages, or there are none."""
Follows = Callable[[Left], bool]
"""Called before the commit with what it will leave; returns whether the slot looks for a message again at once."""
Attempt = tuple[int, int]
"""The id of a message, and the number of the attempt."""
Around = Callable[[Message], AbstractContextManager[Any] | AbstractAsyncContextManager[Any]]
"""Returns a context manager that a handler's call runs in: it sees what the handler raises, and may raise another."""


_NO_HANDLER_SECONDS = 600.0
"""How long after it was first taken a message without a handler is left to workers that may have one."""
_GIVEN_BACK_SECONDS = 5.0
"""How long at most such a message waits before the next worker sees it."""


@dataclass
class Handling:
    """How the messages of a queue are handled.

    `choose` returns the handler of a message, and raises NoHandler if there is none. `lease` and `deadline` are in
    seconds.
    """

    queue: str
    choose: Callable[[Message], Callable[..., Any]]
    around: Sequence[Around]
    outbox: Outbox
    lease: float | None
    deadline: float | None
    loop: asyncio.AbstractEventLoop = field(init=False)
    """Where the slots run."""
    leased: dict[Attempt, tuple[LeasedMessage, asyncio.Timeout | None]] = field(
        default_factory=dict
    )
    """The messages under a lease, whose handlers run. One whose lease has expired may have the next attempt beside."""

    def asked(self) -> tuple[Statement, str]:
        """Return the statement that claims or leases a message, and its parameter."""
        if self.lease is None:
            return CLAIM, json.dumps({"queue": self.queue})
        return LEASE, json.dumps({"queue": self.queue, "seconds": self.lease})

    def ending(self, message: Message, error: BaseException) -> tuple[Statement, str]:
        """Return the statement that ends an attempt which raised an error, and log the error without its text."""
        statement, parameters = end_of(message.of_attempt, error)
        if isinstance(error, NoHandler) and _age(message) < _NO_HANDLER_SECONDS:
            seconds = _GIVEN_BACK_SECONDS * random.uniform(0.5, 1)  # noqa: S311
            statement, parameters = RELEASE, parameters | {"seconds": seconds}
        if isinstance(error, Ends) and error.__cause__ is not None:
            error = error.__cause__
        known = isinstance(error, Drop | RetryLater)
        log.log(
            logging.INFO if known else logging.WARNING,
            "a message was not handled",
            extra={
                "queue": self.queue,
                "id": message.id,
                "event_type": message.event_type,
                "attempt": message.attempt,
                "error": type(error).__name__,
            },
        )
        return statement, json.dumps(parameters)

    def again(
        self, message: Message, ending: tuple[Statement, str] | None, error: Exception
    ) -> tuple[Statement, str]:
        """Return what ends an attempt whose transaction was lost: as its handler had failed, or else with the error."""
        if ending is None or ending[0] is COMPLETE or ending in message.endings:
            return self.ending(message, error)
        return ending

    def leased_message(self, row: str, lease: Lease) -> LeasedMessage:
        """Return the message of a row. Raises for one whose values Python cannot hold."""
        return LeasedMessage(queue=self.queue, lease=lease, **values_of(row))

    def unreadable(self, row: str, error: Exception) -> tuple[Statement, str]:
        """Return the statement that ends the attempt of a message whose values Python cannot hold."""
        attempt = attempt_of(row)
        statement, parameters = end_of({"queue": self.queue, **attempt}, error)
        log.warning(
            "a message cannot be read",
            extra={"queue": self.queue, **attempt, "error": type(error).__name__},
        )
        return statement, json.dumps(parameters)

    def held(self) -> list[LeasedMessage]:
        """The messages whose leases have to be prolonged: their handlers run, and are not past the deadline."""
        now = self.loop.time()
        return [
            message
            for message, limit in list(self.leased.values())
            if limit is None or (when := limit.when()) is None or when > now
        ]

    def lost(self, message: LeasedMessage) -> None:
        """Note, in any thread, that another worker has a message, and end the call of its handler if it is awaited."""
        message.lease.is_lost = True
        self.loop.call_soon_threadsafe(self._cancel, _attempt(message))
        log.warning(
            "the lease of a message was lost", extra={"queue": self.queue, "id": message.id}
        )

    def _cancel(self, attempt: Attempt) -> None:
        _, limit = self.leased.get(attempt, (None, None))
        if limit is not None:
            limit.reschedule(self.loop.time())

    def causing(self, message: Message) -> Causing:
        """Return what a handler is called for, for what it publishes."""
        return Causing([message], self.outbox.max_hops)

    def extension(self, message: LeasedMessage) -> tuple[Statement, str]:
        """Return the statement that prolongs a lease, and its parameter."""
        return EXTEND, json.dumps(message.of_attempt | {"seconds": self.lease})


def _age(message: Message) -> float:
    """Return the seconds since a message was first taken."""
    return (datetime.now(UTC) - message.first_taken_at).total_seconds()


def _left(message: Message | None, is_completed: bool) -> Left:
    """Return what the end of an attempt leaves; without a message it could not be read."""
    if message is None or not is_completed:
        return Left.AGAIN
    return Left.NOTHING if message.key is None else Left.KEY


def _require_own(message: LeasedMessage, is_own: list[str]) -> None:
    if is_own != ["true"]:
        raise LeaseLost(f"message {message.id} of the queue {message.queue} is another worker's")


class Slot:
    """A slot of a worker whose database is synchronous."""

    def __init__(self, handling: Handling, link: Link) -> None:
        self._handling = handling
        self._link = link

    def attempt(self, taken: Taken) -> Left | None:
        """Handle a message; returns what its end leaves to be taken, None if there was no message.

        Raises what the driver raises, unless a handler has.
        """
        return self._take(taken) if self._handling.lease is None else self._lease(taken)

    def _take(self, taken: Taken) -> Left | None:
        message: Message | None = None
        ending: tuple[Statement, str] | None = None
        try:
            with self._link.claiming(*self._handling.asked()) as claimed:
                for row in claimed.rows:
                    taken(has_more(row))
                    try:
                        message = Message(queue=self._handling.queue, **values_of(row))
                    except Exception as error:
                        claimed.ending = self._handling.unreadable(row, error)
                        continue
                    ending = claimed.ending = self._handle(message, claimed.session)
        except Exception as error:
            if message is None:
                raise
            self._link.run(*self._handling.again(message, ending, error))
            return Left.AGAIN
        is_completed = ending is not None and ending[0] is COMPLETE
        return _left(message, is_completed) if claimed.rows else None

    def _handle(self, message: Message, session: Any) -> tuple[Statement, str]:
        """Call the handler in a savepoint; returns the statement that ends the attempt, and its parameter."""
        try:
            with self._link.savepoint(session):
                self._call(message, session)
                self._reply(message, session)
        except BaseException as error:
            return self._handling.ending(message, error)
        return message.ending

    def _lease(self, taken: Taken) -> Left | None:
        rows = self._link.run(*self._handling.asked())
        left: Left | None = None
        for row in rows:
            left = Left.AGAIN
            taken(has_more(row))
            try:
                message = self._handling.leased_message(row, Lease(self._completing, self._note))
            except Exception as error:
                self._link.run(*self._handling.unreadable(row, error))
                continue
            self._handling.leased[_attempt(message)] = message, None
            try:
                self._call(message)
                if not message.lease.is_completed:
                    with message.transaction():
                        pass
            except LeaseLost:
                self._handling.lost(message)
            except BaseException as error:
                if not message.is_lost:
                    self._link.run(*self._handling.ending(message, error))
            finally:
                del self._handling.leased[_attempt(message)]
            left = _left(message, message.lease.is_completed)
        return left

    def _call(self, message: Message, *session: Any) -> None:
        handler = self._handling.choose(message)
        renew_sessions()
        with ExitStack() as stack:
            stack.enter_context(handling(self._handling.causing(message)))
            for each in self._handling.around:
                entered: Any = each(message)
                stack.enter_context(entered)
            handler(message, *session)

    @contextmanager
    def _completing(self, message: LeasedMessage) -> Iterator[Any]:
        with self._link.transaction() as session:
            yield session
            self._reply(message, session)
            _require_own(message, self._link.fetch(session, COMPLETE, message.of_completion))
        message.lease.is_completed = True

    def _note(self, message: LeasedMessage, parameter: str) -> None:
        with self._link.transaction() as session:
            _require_own(message, self._link.fetch(session, NOTE, parameter))

    def _reply(self, message: Message, session: Any) -> None:
        if message.replies and message.host_id is not None:
            with handling(self._handling.causing(message)):
                self._handling.outbox.publish(session, message.replies, host_id=message.host_id)

    def execute(self, statement: Statement, text: str) -> None:
        """Run a statement in a transaction of its own. Raises what the driver raises."""
        self._link.run(statement, text)

    def extend(self) -> None:
        """Prolong the leases of the worker's messages."""
        for message in self._handling.held():
            extended = self._link.run(*self._handling.extension(message))
            if extended != ["true"] and _attempt(message) in self._handling.leased:
                self._handling.lost(message)


class AsyncSlot:
    """A slot of a worker whose database is asynchronous."""

    def __init__(self, handling: Handling, link: AsyncLink) -> None:
        self._handling = handling
        self._link = link

    async def attempt(self, taken: Taken, follows: Follows) -> Left | None:
        """Handle a message; returns what its end leaves to be taken, None if there was no message.

        Raises what the driver raises, unless a handler has.
        """
        if self._handling.lease is None:
            return await self._take(taken, follows)
        return await self._lease(taken)

    async def _take(self, taken: Taken, follows: Follows) -> Left | None:
        message: Message | None = None
        ending: tuple[Statement, str] | None = None
        try:
            async with self._link.claiming(*self._handling.asked()) as claimed:
                for row in claimed.rows:
                    taken(has_more(row))
                    try:
                        message = Message(queue=self._handling.queue, **values_of(row))
                    except Exception as error:
                        claimed.ending = self._handling.unreadable(row, error)
                        continue
                    ending = claimed.ending = await self._handle(message, claimed.session)
                    # In one trip with the commit; a slot in a thread would have to wait for the answer.
                    claimed.is_followed = ending[0] is COMPLETE and follows(_left(message, True))
        except Exception as error:
            if message is None:
                raise
            await self._link.run(*self._handling.again(message, ending, error))
            return Left.AGAIN
        is_completed = ending is not None and ending[0] is COMPLETE
        return _left(message, is_completed) if claimed.rows else None

    async def _handle(self, message: Message, session: Any) -> tuple[Statement, str]:
        """Call the handler in a savepoint; returns the statement that ends the attempt, and its parameter."""
        try:
            async with (
                asyncio.timeout(self._handling.deadline) as limit,
                self._link.savepoint(session),
            ):
                await self._call(message, session)
                await self._reply(message, session)
        except BaseException as error:
            if _is_stopping(error):
                raise
            return self._handling.ending(message, self._ended(error, limit))
        return message.ending

    def _ended(self, error: BaseException, limit: asyncio.Timeout) -> BaseException:
        """Return what has ended a call: the deadline, if that has passed."""
        if not (isinstance(error, TimeoutError) and limit.expired()):
            return error
        return TimeoutError(
            f"the call took longer than its deadline of {self._handling.deadline:g} s"
        )

    async def _lease(self, taken: Taken) -> Left | None:
        rows = await self._link.run(*self._handling.asked())
        left: Left | None = None
        for row in rows:
            left = Left.AGAIN
            taken(has_more(row))
            try:
                message = self._handling.leased_message(row, Lease(self._completing, self._note))
            except Exception as error:
                await self._link.run(*self._handling.unreadable(row, error))
                continue
            try:
                async with asyncio.timeout(self._handling.deadline) as limit:
                    self._handling.leased[_attempt(message)] = message, limit
                    await self._call(message)
                    if not message.lease.is_completed:
                        async with message.transaction():
                            pass
            except LeaseLost:
                self._handling.lost(message)
            except BaseException as error:
                if _is_stopping(error):
                    await self._link.run(RELEASE, json.dumps(message.of_attempt))
                    raise
                if not message.is_lost:
                    ended = self._ended(error, limit)
                    await self._link.run(*self._handling.ending(message, ended))
            finally:
                del self._handling.leased[_attempt(message)]
            left = _left(message, message.lease.is_completed)
        return left

    async def _call(self, message: Message, *session: Any) -> None:
        handler = self._handling.choose(message)
        await renew_sessions_async()
        async with AsyncExitStack() as stack:
            stack.enter_context(handling(self._handling.causing(message)))
            for each in self._handling.around:
                entered: Any = each(message)
                if hasattr(entered, "__aenter__"):
                    await stack.enter_async_context(entered)
                else:
                    stack.enter_context(entered)
            await handler(message, *session)

    @asynccontextmanager
    async def _completing(self, message: LeasedMessage) -> AsyncIterator[Any]:
        async with self._link.transaction() as session:
            yield session
            await self._reply(message, session)
            _require_own(message, await self._link.fetch(session, COMPLETE, message.of_completion))
        message.lease.is_completed = True

    async def _note(self, message: LeasedMessage, parameter: str) -> None:
        async with self._link.transaction() as session:
            _require_own(message, await self._link.fetch(session, NOTE, parameter))

    async def _reply(self, message: Message, session: Any) -> None:
        if message.replies and message.host_id is not None:
            with handling(self._handling.causing(message)):
                await self._handling.outbox.publish_async(
                    session, message.replies, host_id=message.host_id
                )

    async def execute(self, statement: Statement, text: str) -> None:
        """Run a statement in a transaction of its own. Raises what the driver raises."""
        await self._link.run(statement, text)

    async def extend(self) -> None:
        """Prolong the leases of the worker's messages."""
        for message in self._handling.held():
            extended = await self._link.run(*self._handling.extension(message))
            if extended != ["true"] and _attempt(message) in self._handling.leased:
                self._handling.lost(message)


def _attempt(message: Message) -> Attempt:
    return message.id, message.attempt


def _is_stopping(error: BaseException) -> bool:
    """Return whether an error is the cancellation of the slot, and not one that a handler has raised."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
