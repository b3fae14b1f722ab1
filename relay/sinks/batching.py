"""Sends messages to services that take several in one request, which concurrent deliveries share."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from relay.faults import Rejected, Undelivered
from relay.sinks.brokers import Message

__all__ = ["BatchService", "Batching", "Outgoing", "RequestLimits"]

Entry = TypeVar("Entry")

OPEN_SECONDS = 30.0
"""How long a service may take to prepare its client: the library alone may need seconds to load."""


class RequestLimits(NamedTuple):
    """The most messages and bytes of a request, and the most requests in flight.

    A larger message is sent alone; whether it is too large the service decides. `whole`: the service stores all entries
    of a request or none, so that a request may have several messages of a key. Otherwise it has one: were that refused
    and the next one stored, the first would come after it.
    """

    messages: int
    size: int
    requests: int
    whole: bool = False


class Outgoing(NamedTuple, Generic[Entry]):
    """A message as an entry of a request, and its size in bytes. All entries of a request have one `group`.

    `ordered`: where the message goes, messages of a key, or of a delivery without keys, are kept in order.
    """

    group: Hashable
    entry: Entry
    size: int
    ordered: bool = True


class BatchService(Protocol[Entry]):
    """A service that takes several messages in one request. All calls are in one event loop."""

    limits: RequestLimits

    async def open(self) -> None:
        """Prepare the client, unless it is prepared. Raises Undelivered."""

    def outgoing(self, message: Message) -> Outgoing[Entry]:
        """The entry of a message. Raises Rejected."""

    async def send(self, group: Any, entries: Sequence[Entry]) -> Sequence[Exception | None]:
        """Send entries of a group in one request; returns the fault of each, None for those that are stored.

        Raises Undelivered where the whole request has failed, and Rejected where one of its entries is at fault.
        """

    async def close(self) -> None:
        """Close the connections."""


class _Portion(Generic[Entry]):
    """Messages of one delivery that are sent in one request. `fault` is the result: None if all are stored."""

    def __init__(self, group: Hashable, entries: Sequence[Entry], size: int) -> None:
        self.group = group
        self.entries = entries
        self.size = size
        self.fault: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def complete(self, fault: Exception | None) -> None:
        if not self.fault.done():
            self.fault.set_result(fault)


class Batching(Generic[Entry]):
    """Sends the messages of a delivery in order; while requests are in flight, those of other deliveries collect."""

    def __init__(self, service: BatchService[Entry], timeout: float) -> None:
        """`timeout` is in seconds, for one request."""
        self._service = service
        self._timeout = timeout
        self._waiting: defaultdict[Hashable, deque[_Portion[Entry]]] = defaultdict(deque)
        self._requests: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Close the connections. Deliveries in flight fail."""
        waiting = [each for queue in self._waiting.values() for each in queue]
        self._waiting.clear()
        for portion in waiting:
            portion.complete(Undelivered("the sink is closed"))
        requests = list(self._requests)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        await self._service.close()

    async def send(self, messages: Sequence[Message]) -> None:
        """Send messages, in order. Raises Undelivered or Rejected."""
        for portion in self._portions(messages):
            self._waiting[portion.group].append(portion)
            self._start()
            fault = await portion.fault
            if fault is not None:
                raise fault

    def _portions(self, messages: Sequence[Message]) -> Iterator[_Portion[Entry]]:
        group: Hashable = None
        entries, size, keys = list[Entry](), 0, set[str | None]()
        for message in messages:
            outgoing = self._service.outgoing(message)
            fits = self._fits(len(entries) + 1, size + outgoing.size) and outgoing.group == group
            if entries and not (fits and message.key not in keys):
                yield _Portion(group, entries, size)
                entries, size, keys = [], 0, set()
            group, size = outgoing.group, size + outgoing.size
            entries.append(outgoing.entry)
            if outgoing.ordered and not self._service.limits.whole:
                keys.add(message.key)
        if entries:
            yield _Portion(group, entries, size)

    def _fits(self, messages: int, size: int) -> bool:
        return messages <= self._service.limits.messages and size <= self._service.limits.size

    def _start(self) -> None:
        """Start requests, as many as may be in flight."""
        while self._waiting and len(self._requests) < self._service.limits.requests:
            group = next(iter(self._waiting))
            request = asyncio.create_task(self._request(group, self._take(group)))
            self._requests.add(request)
            request.add_done_callback(self._ended)

    def _ended(self, request: asyncio.Task[None]) -> None:
        self._requests.discard(request)
        self._start()

    def _take(self, group: Hashable) -> list[_Portion[Entry]]:
        """Remove and return the next portions that fit into one request, without those of cancelled deliveries.

        What is left of a group takes its turn after the other groups.
        """
        queue, taken, count, size = self._waiting.pop(group), list[_Portion[Entry]](), 0, 0
        while queue:
            portion = queue[0]
            if portion.fault.done():
                queue.popleft()
                continue
            count, size = count + len(portion.entries), size + portion.size
            if taken and not self._fits(count, size):
                self._waiting[group] = queue
                break
            taken.append(queue.popleft())
        return taken

    async def _request(self, group: Hashable, portions: Sequence[_Portion[Entry]]) -> None:
        try:
            entries = [each for portion in portions for each in portion.entries]
            faults = await self._faults(group, entries) if entries else []
            if isinstance(faults, Rejected):
                refused = faults if len(portions) == 1 else None
                for portion in portions:
                    portion.complete(await self._alone(group, portion.entries, refused))
            else:
                _complete(portions, faults)
        except asyncio.CancelledError:
            for portion in portions:
                portion.complete(Undelivered("the sink is closed"))
            raise

    async def _alone(
        self, group: Hashable, entries: Sequence[Entry], refused: Rejected | None = None
    ) -> Exception | None:
        """Send the entries of one delivery without those of others; if they are refused, or were, each alone.

        A limit may be one of the request. Returns the first fault, after which nothing is sent.
        """
        if refused is None:
            faults = await self._faults(group, entries)
            if not isinstance(faults, Rejected):
                return faults if isinstance(faults, Exception) else _first(faults)
            refused = faults
        if len(entries) == 1:
            return refused
        for entry in entries:
            fault = await self._alone(group, [entry])
            if fault is not None:
                return fault
        return None

    async def _faults(
        self, group: Hashable, entries: Sequence[Entry]
    ) -> Sequence[Exception | None] | Exception:
        """Send entries in one request; returns the fault of each, or that of the whole request."""
        limit = OPEN_SECONDS
        try:
            async with asyncio.timeout(limit):
                await self._service.open()
            limit = self._timeout
            async with asyncio.timeout(limit):
                faults = await self._service.send(group, entries)
            if len(faults) != len(entries):
                return Undelivered("the sink does not know what became of each message")
            return faults
        except TimeoutError:
            return Undelivered(f"no answer in {limit:g} s")
        except (Undelivered, Rejected) as fault:
            return fault
        except Exception as error:
            # A fault of the client library, for which no event is dead-lettered.
            return Undelivered(type(error).__name__)


def _complete(
    portions: Sequence[_Portion[Any]], faults: Sequence[Exception | None] | Exception
) -> None:
    first = 0
    for portion in portions:
        end = first + len(portion.entries)
        portion.complete(faults if isinstance(faults, Exception) else _first(faults[first:end]))
        first = end


def _first(faults: Sequence[Exception | None]) -> Exception | None:
    return next(filter(None, faults), None)
