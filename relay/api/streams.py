"""Streams of server-sent events: who is connected, what each still has to get, and when one is cut.

All streams of a process have one reader of the log, the tail. A client that resumes reads pages of its own up to where
the tail is, and gets what comes after that from the tail. All but the tail runs in the event loop of the server.

Source: HTML Standard, "Server-sent events".
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from anyio import CapacityLimiter, to_thread
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from relay.api.callers import Callers, TokenCaller
from relay.api.database import ApiDatabase
from relay.api.filters import ReadFilter
from relay.api.positions import LogHistory, read_kept
from relay.api.replies import Waiter, Waiters
from relay.api.tail import Tail
from relay.api.turns import Turns
from relay.config.settings import ApiSettings, Settings
from relay.model.snapshots import Snapshot
from relay.store import log_pages
from relay.store.connections import Connection
from relay.store.log_pages import LogEvent, LogPosition, OutboxPage, OutboxTransaction, PageSize
from relay.web.problems import FAULTS, HttpRefusal, problem, public_refusal_of

T = TypeVar("T")

HEARTBEAT_SECONDS = 15.0
"""How long a stream is silent at most."""
STALL_SECONDS = 30.0
"""How long a client may take nothing before it is cut."""
BUFFER_BYTES = 1024 * 1024
"""How much may wait for a client before it is cut: it resumes where it was."""
CHECK_SECONDS = 4.0
"""How often it is looked whether the tokens of streams are still valid."""
RETRY_SECONDS = 5
"""After how many seconds a client asks again that was refused for want of room."""
_ATTACH_SECONDS = 10.0
_BURST_TURNS, _TURN_SECONDS = 50, 0.002
"""How long the tail waits for clients that are late before it reads on, so that a burst cuts none that reads.

Counted in turns of the event loop: in each of them a client gets what its socket takes, however long a turn takes.
"""
_LINGER_SECONDS = 30.0
"""How long the tail reads on without a stream."""
_UNAVAILABLE: tuple[type[Exception], ...] = (TimeoutError, *FAULTS)
_READERS = 4
"""How many clients read pages of their own at once; it bounds sessions. None waits for another one to take a page."""
_SEND_BYTES = 64 * 1024

Cut = Literal["slow", "revoked", "gap", "unavailable", "refused", "stopping"]
"""Why relay ends a stream."""


class Client:
    """A connected client: the chunks that wait for it, and why it ends."""

    __slots__ = ("abort", "chunks", "ended", "filter", "position", "ready", "size", "takes")

    def __init__(self, wanted: ReadFilter, abort: Callable[[], None]) -> None:
        self.filter = wanted
        self.takes = wanted.test()
        self.abort = abort
        self.chunks: deque[bytes] = deque()
        self.size = 0
        self.position = ""
        """The position after all chunks."""
        self.ended: Cut | Literal["gone"] | None = None
        self.ready = asyncio.Event()

    def put(self, chunks: list[bytes], size: int) -> None:
        """Add chunks with so many bytes; a client for which too much waits is cut."""
        if self.ended is not None:
            return
        if self.size > BUFFER_BYTES:
            self.end("slow")
            self.abort()
            return
        self.chunks.extend(chunks)
        self.size += size
        self.ready.set()

    def take(self) -> bytes:
        """Remove and return chunks, about as many as are sent at once."""
        taken = _take(self.chunks)
        self.size -= len(taken)
        return taken

    def end(self, why: Cut | Literal["gone"]) -> None:
        """End the stream."""
        if self.ended is None:
            self.ended = why
            self.chunks.clear()
            self.size = 0
        self.ready.set()


class Streams:
    """The streams of a process. Its methods are of the event loop, but for `close`."""

    def __init__(
        self,
        settings: Settings,
        api: ApiSettings,
        database: ApiDatabase,
        callers: Callers,
        history: LogHistory,
        turns: Turns,
    ) -> None:
        self.database = database
        self.history = history
        self.api = api
        self.sent = 0
        """How many events were put into streams."""
        self.cut: dict[Cut, int] = dict.fromkeys(get_args(Cut), 0)
        """How many streams relay has ended, by reason."""
        self.waiters = Waiters()
        """The requests that wait for an answer, which count as clients."""
        self._callers = callers
        self._turns = turns
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tail = Tail(
            settings,
            history,
            partial(self._in_loop, self._begin),
            partial(self._in_loop, self._deliver),
        )
        self._connected: set[Client | Waiter] = set()
        self._attached: dict[object, set[Client]] = {}
        """The clients that the tail serves, by what they take."""
        self._position: LogPosition | None = None
        self._moved = asyncio.Event()
        self._checking: asyncio.Task[None] | None = None
        self._lingering: asyncio.TimerHandle | None = None
        self._readers = CapacityLimiter(_READERS)
        self._is_closed = False

    @property
    def connected(self) -> int:
        """How many streams are connected."""
        return len(self._connected) - len(self.waiters)

    @property
    def is_failing(self) -> bool:
        """Whether clients get nothing because the log cannot be read."""
        conditions = self._tail.condition, self.waiters.condition
        return any(each.fault is not None for each in conditions)

    def refusal(self, wanted: ReadFilter) -> HttpRefusal | None:
        """Return why one more client is refused; None if it is not."""
        later = {"retry-after": str(RETRY_SECONDS)}
        if len(self._connected) >= self.api.streams or self._is_closed:
            return HttpRefusal(
                503, "there are too many streams (api.streams): try again later", later
            )
        own = sum(each.filter.caller.id == wanted.caller.id for each in self._connected)
        if own >= self.api.streams_per_token:
            detail = "the token has too many streams (api.streams_per_token): close one"
            return HttpRefusal(429, detail, later)
        return None

    @contextmanager
    def registered(self, waiter: Waiter) -> Iterator[None]:
        """Let the tail answer a request in the block."""
        if self._position is None:
            # The answer may come before the tail begins.
            waiter.look()
        self.join(waiter)
        self.waiters.add(waiter)
        try:
            yield
        finally:
            self.waiters.remove(waiter)
            self.leave(waiter)

    def join(self, client: Client | Waiter) -> None:
        """Count a client, until it leaves."""
        self._connected.add(client)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._tail.start()
        self._tail.wanted.set()
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check())

    def leave(self, client: Client | Waiter) -> None:
        """Forget a client."""
        self._connected.discard(client)
        if isinstance(client, Client):
            group = self._attached.get(client.filter.key)
            if group is not None:
                group.discard(client)
                if not group:
                    del self._attached[client.filter.key]
            if client.ended is not None and client.ended != "gone":
                self.cut[client.ended] += 1
        if not self._connected and self._loop is not None:
            if self._lingering is not None:
                self._lingering.cancel()
            self._lingering = self._loop.call_later(_LINGER_SECONDS, self._sleep)

    async def attach(self, client: Client, after: LogPosition | None) -> LogPosition | None:
        """Let the tail serve a client, and return from where on: a position that has all that `after` has.

        None if the tail moves on, and is not there yet. Raises TimeoutError if it stands still.
        """
        before = self._position
        try:
            async with asyncio.timeout(_ATTACH_SECONDS):
                while (position := self._whole_position(after)) is None:
                    await self._moved.wait()
        except TimeoutError:
            if self._position in (None, before):
                raise
            return None
        self._attached.setdefault(client.filter.key, set()).add(client)
        client.position = str(position)
        return position

    def _whole_position(self, after: LogPosition | None) -> LogPosition | None:
        """Return the position of the tail if it has all that `after` has, and is not within a transaction."""
        position = self._position
        if position is None or position.xid is not None:
            return None
        if after is not None and not position.snapshot.covers(after.snapshot):
            return None
        return position

    async def read(self, caller: TokenCaller, act: Callable[..., T], *arguments: Any) -> T:
        """Run a function with a session of the database, in a thread, when it is the turn of a token."""

        def with_session() -> T:
            with self.database.connection() as conn:
                return act(conn, *arguments)

        async with self._turns.turn(caller):
            return await to_thread.run_sync(with_session, limiter=self._readers)

    def close(self) -> None:
        """End all streams, and the tail. Safe in any thread."""
        self._is_closed = True
        if self._loop is None:
            return
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._end, "stopping")
        self._tail.close()

    def _in_loop(self, call: Callable[[Any], None], what: Any) -> None:
        """Let the event loop do something, and wait for that: the tail does not run ahead of clients that read."""
        assert self._loop is not None  # noqa: S101

        with suppress(CancelledError):
            asyncio.run_coroutine_threadsafe(self._paced(call, what), self._loop).result()

    async def _paced(self, call: Callable[[Any], None], what: Any) -> None:
        """Do something, and wait for clients that are late."""
        call(what)
        for _ in range(_BURST_TURNS):
            if all(each.size <= BUFFER_BYTES // 2 for each in self._all_attached()):
                break
            await asyncio.sleep(_TURN_SECONDS)

    def _begin(self, position: LogPosition) -> None:
        # Those that were attached before would miss what was not read.
        for client in list(self._all_attached()):
            client.end("gap")
        self.waiters.look()
        self._advance(position)

    def _deliver(self, page: OutboxPage) -> None:
        self.waiters.deliver(page)
        for group in self._attached.values():
            takes = next(iter(group)).takes
            chunks = []
            for transaction in page.transactions:
                events = [each for each in transaction.events if takes(each)]
                if events:
                    chunks.append(formatted(transaction, events))
                    self.sent += len(events) * len(group)
            if chunks:
                size = sum(map(len, chunks))
                for client in group:
                    client.put(chunks, size)
        text = str(page.end)
        for client in self._all_attached():
            client.position = text
        self._advance(page.end)

    def _advance(self, position: LogPosition) -> None:
        self._position = position
        self._moved.set()
        self._moved.clear()

    def _all_attached(self) -> Iterable[Client]:
        return (client for group in self._attached.values() for client in group)

    def _end(self, why: Cut, but: frozenset[TokenCaller] = frozenset()) -> None:
        """End the streams and the waits of requests, but those of some callers."""
        for client in self._connected:
            if client.filter.caller in but:
                continue
            if isinstance(client, Client):
                client.end(why)
            else:
                client.end()

    def _sleep(self) -> None:
        if not self._connected:
            self._tail.wanted.clear()
            self._position = None

    async def _check(self) -> None:
        """End the streams whose tokens are no longer valid, as long as there are streams."""
        while self._connected:
            await asyncio.sleep(CHECK_SECONDS)
            try:
                valid = await to_thread.run_sync(self._callers.valid)
            except FAULTS:
                continue  # nothing is read from the log either
            self._end("revoked", but=valid)


@dataclass(slots=True)
class _Read:
    """A page for a client that resumes: its `end`, its number of `events`, and those `taken`, as `chunks`."""

    end: LogPosition
    events: int
    taken: int = 0
    chunks: deque[bytes] = field(default_factory=deque)


class EventStream(Response):
    """The response of a stream: server-sent events from a position on, or from now on."""

    def __init__(self, streams: Streams, wanted: ReadFilter, start: LogPosition | None) -> None:
        super().__init__()
        self._streams = streams
        self._wanted = wanted
        self._takes = wanted.test()
        self._start = start
        self._send: Send
        self._client: Client
        self._size = PageSize()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the stream, or serve it until the client goes or is cut."""
        refusal = self._streams.refusal(self._wanted)
        if refusal is not None:
            await problem(refusal)(scope, receive, send)
            return
        transport = scope.get("relay.transport")
        client = Client(self._wanted, (lambda: None) if transport is None else transport.abort)
        self._client, self._send = client, send
        self._streams.join(client)
        watcher = asyncio.create_task(_watch(receive, client))
        try:
            refusal = await self._refusal()
            if refusal is not None:
                await _response(refusal)(scope, receive, send)
                return
            await self._serve()
            if client.ended != "gone":
                # A client that does not take the end is cut.
                try:
                    async with asyncio.timeout(1.0):
                        await send({"type": "http.response.body", "body": b"", "more_body": False})
                except TimeoutError:
                    client.abort()
                    await asyncio.wait([watcher], timeout=1.0)
        finally:
            watcher.cancel()
            self._streams.leave(client)

    async def _refusal(self) -> HttpRefusal | None:
        """Return why the stream cannot begin at its position."""
        if self._start is None:
            return None
        try:
            return await self._streams.read(self._wanted.caller, self._refusal_at, self._start)
        except FAULTS as error:
            return public_refusal_of(error)

    async def _serve(self) -> None:
        await self._send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-store"),
                    (b"x-accel-buffering", b"no"),
                ],
            }
        )
        # Those that a restart has cut do not all come back at once.
        await self._write(f"retry: {random.randint(1000, 3000)}\n\n".encode())  # noqa: S311
        try:
            await self._catch_up()
        except _UNAVAILABLE:
            # The next request is told why.
            self._client.end("unavailable")
            return
        await self._go_on()

    async def _catch_up(self) -> None:
        """Send what is between the start and the position of the tail, and let the tail go on."""
        client, after = self._client, self._start
        while after is not None and client.ended is None:
            page = await self._send_page(after, None)
            after = page.end
            if after.xid is None and page.events < self._size.events // 2:
                break
        while (reached := await self._streams.attach(client, after)) is None:
            await self._write(b":\n\n")
        while after is not None and client.ended is None:
            page = await self._send_page(after, reached.snapshot)
            after = page.end
            if not page.events:
                break
        if self._start is None:
            await self._write(f"id: {reached}\n\n".encode())

    async def _send_page(self, after: LogPosition, until: Snapshot | None) -> _Read:
        page = await self._streams.read(self._wanted.caller, self._read_page, after, until)
        await self._send_read(page)
        if page.events:
            # Also if nothing matches, the client is further now.
            await self._write(f"id: {page.end}\n\n".encode())
        return page

    async def _send_read(self, page: _Read) -> None:
        self._streams.sent += page.taken
        while page.chunks and self._client.ended is None:
            await self._write(_take(page.chunks))

    def _read_page(self, conn: Connection, after: LogPosition, until: Snapshot | None) -> _Read:
        page = read_kept(conn, self._streams.history, after, self._size.events, until)
        self._size.note(page)
        read = _Read(page.end, page.events)
        for transaction in page.transactions:
            taken = [each for each in transaction.events if self._takes(each)]
            if taken:
                read.taken += len(taken)
                read.chunks.append(formatted(transaction, taken))
        return read

    def _refusal_at(self, conn: Connection, start: LogPosition) -> HttpRefusal | None:
        read_kept(conn, self._streams.history, start, 1, start.snapshot)
        if log_pages.is_far(conn, start.snapshot, self._streams.api.replay):
            return HttpRefusal(204, "")
        return None

    async def _go_on(self) -> None:
        """Send what the tail brings, and heartbeats."""
        client, told, before = self._client, "", ""
        while client.ended is None:
            if client.chunks:
                await self._write(client.take())
                before = ""
                continue
            client.ready.clear()
            try:
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await client.ready.wait()
            except TimeoutError:
                # The position of a client of which little matches moves on, too, one heartbeat late: after a failover,
                # others get the ids of transactions that were rolled back and that the standby has not seen.
                known, before = before, client.position
                if known in ("", told):
                    await self._write(b":\n\n")
                else:
                    told = known
                    await self._write(f":\nid: {known}\n\n".encode())

    async def _write(self, chunk: bytes) -> None:
        """Send a chunk; a client that does not take it in time is cut."""
        if self._client.ended is not None:
            return
        try:
            async with asyncio.timeout(STALL_SECONDS):
                await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        except TimeoutError:
            self._client.end("slow")
            self._client.abort()


def formatted(transaction: OutboxTransaction, events: Sequence[LogEvent]) -> bytes:
    """Return events of a transaction as server-sent events.

    The id of the last one is the position after all that was read of it, that of another one names what is left of it.
    """
    *others, last = events
    parts = [f"id: {transaction.position_after(each)}\ndata: {each.text}\n\n" for each in others]
    parts.append(f"id: {transaction.end}\ndata: {last.text}\n\n")
    return "".join(parts).encode()


def _response(refusal: HttpRefusal) -> Response:
    # By this status, a browser does not connect again.
    return Response(status_code=204) if refusal.status == 204 else problem(refusal)


async def _watch(receive: Receive, client: Client) -> None:
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    except HTTPException:
        # The request has a body, which is too large or does not end.
        client.end("refused")
    else:
        client.end("gone")


def _take(chunks: deque[bytes]) -> bytes:
    """Remove and return chunks, about as many as are sent at once."""
    taken, size = [], 0
    while chunks and size < _SEND_BYTES:
        chunk = chunks.popleft()
        taken.append(chunk)
        size += len(chunk)
    return b"".join(taken)
