"""Tracks the messages of concurrent deliveries that were sent to a broker and are not answered yet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import takewhile

from relay.handlers.messages import Message

_MOST_UNANSWERED = 1_000
"""How many messages of a sink may be unanswered at once. Even a slow broker answers that many within `timeout`."""


class Sending:
    """The messages that one delivery sends, and the broker's answers to them."""

    __slots__ = (
        "_answered_at", "_awaits_all", "_confirmed", "_fault", "_loop", "_room", "_unanswered", "_waiter", "is_over",
        "messages"
    )  # fmt: skip

    def __init__(
        self, messages: Sequence[Message], room: asyncio.Semaphore, awaits_all: bool
    ) -> None:
        self.messages = messages
        self._awaits_all = awaits_all
        self.is_over = False
        """Whether the delivery has ended, so that answers are ignored."""
        self._confirmed = bytearray(len(messages))
        self._fault: Exception | None = None
        self._unanswered = 0
        self._room = room
        self._loop = asyncio.get_running_loop()
        self._answered_at = 0.0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def unconfirmed(self) -> list[Message]:
        """The messages that the broker has not confirmed, in order."""
        return [
            message
            for message, confirmed in zip(self.messages, self._confirmed, strict=True)
            if not confirmed
        ]

    @property
    def rest(self) -> Sequence[Message]:
        """The messages from the first one on that the broker has not confirmed."""
        return self.messages[self._confirmed.find(0) :]

    def answer(self, index: int, fault: Exception | None = None) -> None:
        """Record the answer to a message: stored, or a fault. Called at most once for each message that was sent."""
        if self.is_over:
            return
        self._unanswered -= 1
        self._room.release()
        self._answered_at = self._loop.time()
        if fault is None:
            self._confirmed[index] = 1
        elif self._fault is None:
            self._fault = fault
        if self._waiter and self._is_decided:
            _wake(self._waiter)

    @property
    def _is_decided(self) -> bool:
        return not self._unanswered or (self._fault is not None and not self._awaits_all)

    async def publish(
        self, publish: Callable[[Sending, int], Awaitable[None]], timeout: float
    ) -> None:
        """Send the messages, each when there is room for it, until the first fault is known.

        Raises TimeoutError if there is no room for `timeout` seconds, and none of the sent messages is answered.
        """
        for index in range(len(self.messages)):
            await self._take_room(timeout)
            self._unanswered += 1
            await publish(self, index)
            if self._fault is not None:
                break
        self._answered_at = self._loop.time()

    async def _take_room(self, timeout: float) -> None:
        if self._room.locked():
            self._answered_at = self._loop.time()
        while True:
            # A delivery that has sent nothing waits for others, which have a deadline.
            deadline = self._answered_at + timeout if self._unanswered else None
            try:
                async with asyncio.timeout_at(deadline):
                    await self._room.acquire()
                return
            except TimeoutError:
                if self._unanswered and self._loop.time() >= self._answered_at + timeout:
                    raise

    async def wait(self, timeout: float) -> None:
        """Wait for all answers. Raises the first fault, or TimeoutError if none comes for `timeout` seconds."""
        while not self._is_decided:
            deadline = self._answered_at + timeout
            if self._loop.time() >= deadline:
                raise TimeoutError
            self._waiter = self._loop.create_future()
            timer = self._loop.call_at(deadline, _wake, self._waiter)
            try:
                await self._waiter
            finally:
                timer.cancel()
        if self._fault is not None:
            raise self._fault

    def end(self) -> None:
        """Ignore further answers, and give the room of the unanswered messages to other deliveries."""
        self.is_over = True
        for _ in range(self._unanswered):
            self._room.release()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class SendWindow:
    """Sends messages without waiting for the answer to the one before, up to a limit that all deliveries share."""

    def __init__(self, timeout: float, awaits_all: bool = False) -> None:
        """`timeout` is in seconds.

        `awaits_all` is for a broker that may store messages after one that it refuses: a fault is then raised when
        all messages that were sent are answered, so that none is stored after those that are sent again.
        """
        self._timeout = timeout
        self._awaits_all = awaits_all
        self._room = asyncio.Semaphore(_MOST_UNANSWERED)

    def sending(self, messages: Sequence[Message]) -> Sending:
        """A `Sending` of these messages that shares this window's room."""
        return Sending(messages, self._room, self._awaits_all)

    async def send(
        self, sending: Sending, publish: Callable[[Sending, int], Awaitable[None]]
    ) -> None:
        """Publish messages, in order, and wait until the broker has stored all of them.

        `publish` sends one message, given by its index; its answer goes to `Sending.answer`. Raises the errors of
        `publish`, the first fault that is answered, or TimeoutError if no message is answered within the timeout.
        """
        try:
            await sending.publish(publish, self._timeout)
            await sending.wait(self._timeout)
        finally:
            sending.end()


class Unanswered:
    """The unanswered messages of one connection, by number, in order."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, tuple[Sending, int]] = {}
        self._answered_at = self._loop.time()

    def add(self, number: int, sending: Sending, index: int) -> None:
        """Add a message that is being sent."""
        if not self._pending:
            self._answered_at = self._loop.time()
        self._pending[number] = sending, index

    def discard(self, number: int) -> None:
        """Remove a message that could not be sent."""
        self._pending.pop(number, None)

    def message(self, number: int) -> Message | None:
        """The unanswered message with a number; None if there is none."""
        entry = self._pending.get(number)
        return entry[0].messages[entry[1]] if entry else None

    def up_to(self, number: int) -> list[int]:
        """The numbers of the unanswered messages up to and including `number`."""
        return list(takewhile(lambda each: each <= number, self._pending))

    def answer(self, number: int, fault: Exception | None = None) -> None:
        """Record the broker's answer to a message."""
        self._answered_at = self._loop.time()
        entry = self._pending.pop(number, None)
        if entry is not None:
            sending, index = entry
            sending.answer(index, fault)

    def fail(self, fault: Exception) -> None:
        """Answer all messages with `fault`, since the connection is lost."""
        for number in list(self._pending):
            self.answer(number, fault)

    def is_silent(self, seconds: float) -> bool:
        """Whether messages are unanswered and the last answer is at least `seconds` ago.

        Also removes the messages of deliveries that have ended, whose answers may never come.
        """
        silent = bool(self._pending) and self._loop.time() - self._answered_at >= seconds
        self._pending = {n: (s, i) for n, (s, i) in self._pending.items() if not s.is_over}
        return silent
