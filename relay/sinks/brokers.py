"""What sinks for brokers have in common: events as messages, one connection, messages that are not answered yet.

The names of `__all__` are public: a sink of yours for a broker uses them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager
from itertools import takewhile
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from relay.config.fields import Template
from relay.config.handlers import BrokerHandler
from relay.faults import Rejected, Unauthorized, Undelivered
from relay.model import trace_context
from relay.model.events import Event, Transaction
from relay.model.headers import RESEND
from relay.runtime.shielding import shielded
from relay.sinks import cloudevents

__all__ = ["Broker", "BrokerSettings", "Message", "Publishing", "Renewed", "Shared"]

BrokerSettings = BrokerHandler

_PORTION_MESSAGES = 500
_PORTION_BYTES = 4_000_000
"""The limits of what one transaction has in memory at once; a sink has `concurrency` times that."""


class Message(NamedTuple):
    """A broker's message of an event. `identity` is the event's; a structured body has the `attributes`.

    `deduplication` is the same in every attempt of a sink to send the event, until an operator moves the sink, and
    differs from that of every other message. `trace` are headers of the message in every mode. `is_null`: the event has
    no payload, and the body would be nothing else.
    """

    topic: str
    key: str | None
    identity: str
    deduplication: str
    content_type: str
    attributes: dict[str, str]
    body: bytes
    trace: trace_context.Headers = MappingProxyType({})
    is_null: bool = False


class Broker(Protocol):
    """A connection to a broker, opened on demand and again after it was lost. All calls are in one event loop."""

    async def send(self, messages: Sequence[Message]) -> None:
        """Send messages, in order; returns when the broker has confirmed all. Raises Undelivered or Rejected.

        Many calls run concurrently. A message may be stored although it was not confirmed. If the connection is lost,
        the stored messages of a call are the first ones, without a gap; if the broker refuses a single message, later
        ones may be stored, but none of its key (or, where messages have no keys, none).
        """

    async def close(self) -> None:
        """Close the connection. Calls in flight fail."""


class Publishing:
    """Sends the events of a transaction to a broker, in order."""

    def __init__(
        self, name: str, settings: BrokerHandler, broker: Broker, key: str | None = None
    ) -> None:
        """`key` is the template of the messages' keys, for a broker that has keys."""
        self.name = name
        self._broker = broker
        self._source = settings.source
        self._structured = settings.mode == "structured"
        self._as_text = settings.payload == "text"
        self._series = ""
        self._topic = Template(settings.topic)
        self._key = None if key is None else Template(key)
        # Where the configuration says more than the mark itself, it is not the publisher who chooses. A `${event_type}`
        # says no more.
        own = self._topic.beginning
        self._reserved = tuple(
            mark for mark in settings.RESERVED if own == mark or not own.startswith(mark)
        )

    async def close(self) -> None:
        """Close the connection."""
        await self._broker.close()

    def resume(self, series: str) -> None:
        """Send what follows as messages of `series`."""
        self._series = series

    async def deliver(self, transaction: Transaction) -> None:
        """Send the events. Raises Undelivered or Rejected."""
        for messages in self._portions(transaction.events):
            try:
                await self._broker.send(messages)
            except (Undelivered, Rejected):
                raise
            except Exception as error:
                # An unexpected error is a fault of the client library, for which no event is dead-lettered.
                raise Undelivered(type(error).__name__) from error

    def _portions(self, events: Iterable[Event]) -> Iterator[list[Message]]:
        portion: list[Message] = []
        size = 0
        for event in events:
            message = self._message(event)
            portion.append(message)
            size += len(message.body)
            if len(portion) == _PORTION_MESSAGES or size >= _PORTION_BYTES:
                yield portion
                portion, size = [], 0
        if portion:
            yield portion

    def _message(self, event: Event) -> Message:
        topic = _name(self._topic, event)
        if topic.startswith(self._reserved):
            raise Rejected("the topic begins as those do that control the broker")
        key = None if self._key is None or self._key.is_null(event) else _name(self._key, event)
        identity = cloudevents.identity(event)
        # With the row's number, since an adopted outbox may have rows with equal ids.
        deduplication = f"{self._series}/{identity}/{event.text('c_offset') or ''}"
        if RESEND in event.headers:
            deduplication += f"/{event.headers[RESEND]}"
        trace = trace_context.headers(event)
        if self._structured:
            body = cloudevents.structured(event, self._source, self._as_text)
            kind, attributes, is_null = cloudevents.STRUCTURED, {}, False
        else:
            attributes = cloudevents.attributes(event, self._source)
            body = cloudevents.data(event, self._as_text)
            kind, is_null = cloudevents.data_type(self._as_text), event.text("payload") is None
        return Message(topic, key, identity, deduplication, kind, attributes, body, trace, is_null)


def _name(template: Template, event: Event) -> str:
    """Fill a template. Raises Rejected if it has no text, or half of a surrogate pair, which JSON allows."""
    name = template.fill(event)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise Rejected("the topic or the key is not valid Unicode") from None
    return name


Link = TypeVar("Link")


class Shared(Generic[Link]):
    """A connection that is opened on demand, and again after it was lost.

    Concurrent callers share one attempt to open it, and its outcome.
    """

    def __init__(
        self, open_link: Callable[[], Coroutine[Any, Any, Link]], is_usable: Callable[[Link], bool]
    ) -> None:
        self._open = open_link
        self._is_usable = is_usable
        self._opening: asyncio.Task[Link] | None = None

    async def get(self) -> Link:
        """Return the connection. Raises the errors of opening it, and ConnectionAbortedError if `close` is called."""
        task = self._opening
        if task is None or (task.done() and not self._holds(task)):
            task = self._opening = asyncio.create_task(self._open())
        try:
            # A cancelled delivery must not cancel the attempt, which others wait for.
            return await shielded(task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if task.cancelled() and current is not None and not current.cancelling():
                raise ConnectionAbortedError("the sink is closed") from None
            raise

    def forget(self, link: Link) -> bool:
        """Let the next caller open another connection; returns whether this caller is to close `link`: no other has."""
        task = self._opening
        if task is None or not task.done() or not _succeeded(task) or task.result() is not link:
            return False
        self._opening = None
        return True

    async def close(self) -> Link | None:
        """Cancel an attempt to open it. Returns the open connection, for the caller to close, or None."""
        task, self._opening = self._opening, None
        if task is None:
            return None
        task.cancel()
        await asyncio.wait([task])
        return task.result() if _succeeded(task) else None

    def _holds(self, task: asyncio.Task[Link]) -> bool:
        return _succeeded(task) and self._is_usable(task.result())


FRESH_SECONDS = 1.0
"""A client that was opened less than this ago is not opened again: that costs more than a request."""


class Renewed(Generic[Link]):
    """A client that is opened again after its credentials were refused, since its library does not read them again.

    A refusal may be of one destination among others: the former client is closed once no call uses it.
    """

    def __init__(
        self,
        open_client: Callable[[], Coroutine[Any, Any, Link]],
        close_client: Callable[[Link], Coroutine[Any, Any, None]],
    ) -> None:
        self._shared = Shared(self._open, lambda _: True)
        self._open_client = open_client
        self._close_client = close_client
        self._opened_at = 0.0
        self._users: Counter[Link] = Counter()
        self._refused: set[Link] = set()
        self._closing: set[asyncio.Task[None]] = set()

    async def _open(self) -> Link:
        client = await self._open_client()
        self._opened_at = time.monotonic()
        return client

    async def open(self) -> None:
        """Open the client, unless it is open. Raises the errors of opening it."""
        await self._shared.get()

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Link]:
        """The client, for one call. If the block raises Unauthorized, the next caller gets another one."""
        client = await self._shared.get()
        self._users[client] += 1
        try:
            yield client
        except Unauthorized:
            is_fresh = time.monotonic() - self._opened_at < FRESH_SECONDS
            if not is_fresh and self._shared.forget(client):
                self._refused.add(client)
            raise
        finally:
            self._users[client] -= 1
            if not self._users[client]:
                del self._users[client]
                if client in self._refused:
                    self._refused.discard(client)
                    self._close_soon(client)

    def _close_soon(self, client: Link) -> None:
        closing = asyncio.create_task(self._close_client(client))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close the clients; calls have ended."""
        client = await self._shared.close()
        if client is not None:
            await self._close_client(client)
        await asyncio.gather(*self._closing, return_exceptions=True)


def _succeeded(task: asyncio.Task[Any]) -> bool:
    return not task.cancelled() and task.exception() is None


_MOST_UNANSWERED = 1_000
"""How many messages of a sink may be unanswered at once. Even a slow broker answers that many within `timeout`."""


class Sending:
    """The messages that one delivery sends, and the broker's answers to them."""

    __slots__ = (
        "_answered_at", "_awaits_all", "_confirmed", "_fault", "_loop", "_ordered", "_room", "_unanswered", "_waiter",
        "is_over", "messages"
    )  # fmt: skip

    def __init__(
        self, messages: Sequence[Message], room: asyncio.Semaphore, awaits_all: bool, ordered: bool
    ) -> None:
        self.messages = messages
        self._awaits_all = awaits_all
        self._ordered = ordered
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

        In order, one of a key is sent when those before it are stored: were one refused, it would come after it. Raises
        TimeoutError if there is no room for `timeout` seconds, and none of the sent messages is answered.
        """
        keys = set[str | None]()
        for index, message in enumerate(self.messages):
            if self._ordered and message.key in keys:
                self._answered_at = self._loop.time()
                await self.wait(timeout)
                keys.clear()
            keys.add(message.key)
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
    """Sends messages without waiting for the answers to those of other keys, up to a limit that deliveries share."""

    def __init__(self, timeout: float, awaits_all: bool = False, ordered: bool = True) -> None:
        """`timeout` is in seconds.

        `awaits_all` is for a broker that may store messages after one that it refuses: a fault is then raised when
        all messages that were sent are answered, so that none is stored after those that are sent again. `ordered`:
        messages of a key, and those of a delivery that have none, stay in order whatever the broker refuses, since at
        most one of them is unanswered.
        """
        self._timeout = timeout
        self._awaits_all = awaits_all
        self._ordered = ordered
        self._room = asyncio.Semaphore(_MOST_UNANSWERED)

    def sending(self, messages: Sequence[Message]) -> Sending:
        """A `Sending` of these messages that shares this window's room."""
        return Sending(messages, self._room, self._awaits_all, self._ordered)

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
