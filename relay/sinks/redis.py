"""Handlers that append events to Redis streams. A message's fields are `id`, the attributes and `data`.

Source: Redis documentation, "XADD", "Transactions" and "Pipelining".
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, TypeGuard
from urllib.parse import parse_qsl, urlsplit

from redis.asyncio import Redis as Client
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    MovedError,
    ReadOnlyError,
    RedisError,
)
from redis.exceptions import ConnectionError as ConnectionLost

from relay.config.handlers import RedisHandler
from relay.config.secrets import file_mark, known_text, marks, read_aside
from relay.faults import (
    ConfigurationError,
    Rejected,
    SecretUnavailable,
    Unauthorized,
    Undelivered,
)
from relay.sinks.brokers import Message, Publishing
from relay.sinks.tls import is_refusal

_ELSEWHERE = (ReadOnlyError, ClusterDownError, MovedError, AskError)
"""Answers of a server that does not take writes, such as a demoted primary (MASTERDOWN is a ClusterDownError)."""
_OF_THE_EVENT = ("WRONGTYPE", "Elements are too large")
"""How the errors of XADD begin that another try of the same event cannot avoid."""
_MOST_BYTES = 512 * 1024 * 1024
"""The server's default `proto-max-bulk-len`: it closes the connection for a longer value."""
_MOST_LOST = 2
"""After how many connections that are lost in a row, each with a single transaction, the server counts as away."""
_SENT_AT_ONCE = 1_000
_SENT_BYTES = 4_000_000
"""About how many messages, and bytes, one round trip sends."""


def sink(name: str, settings: RedisHandler) -> Publishing:
    """The sink of `type: redis`. Raises ConfigurationError for an address with an unknown option."""
    return Publishing(name, settings, Redis(name, settings))


class Redis:
    """Appends the messages of concurrent deliveries in one round trip, while the next ones collect."""

    def __init__(self, name: str, settings: RedisHandler) -> None:
        """Raises ConfigurationError for an address with an unknown option."""
        self._url = settings.url
        self._max_length = settings.max_length
        self._timeout = settings.timeout
        self._pending: deque[_Append] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._client: Client | None = None
        self._made_of: Hashable = None
        self._is_refused = False
        self._files: tuple[str, ...] = ()
        url = known_text(settings.url)
        if url is not None:
            try:
                self._client = self._opened(url)
            except SecretUnavailable as error:
                raise ConfigurationError(f"handlers.{name}.{error}") from None

    async def close(self) -> None:
        """Close the connection."""
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.wait([self._sender])
        if self._client is not None:
            await self._client.aclose()

    def _opened(self, url: str) -> Client:
        """A client for an address, which connects with its first command. Raises SecretUnavailable."""
        options = parse_qsl(urlsplit(url).query)
        self._files = tuple(value for key, value in options if key.startswith("ssl_"))
        self._made_of = self._marks()
        try:
            client = Client.from_url(
                url,
                # `_send_together` has a deadline for the whole round trip; one for each answer costs as much again.
                socket_timeout=None,
                socket_connect_timeout=self._timeout,
                # One retry at once: the server may have closed an idle connection. Longer retries are the worker's.
                retry=Retry(NoBackoff(), 1),
            )
            client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        except (ValueError, TypeError, RedisError):
            raise SecretUnavailable(
                "url: the part after ? has an option that cannot be used"
            ) from None
        return client

    def _marks(self) -> Hashable:
        return marks([self._url]), tuple(map(file_mark, self._files))

    async def _current(self) -> Client:
        """The client; another one if the address or a certificate has changed, or was refused."""
        client = self._client
        if client is not None and not self._is_refused and self._made_of == self._marks():
            return client
        try:
            opened = self._opened(await read_aside("url", self._url))
        except SecretUnavailable:
            if client is None or self._is_refused:
                raise
            # The file is being written: the connections that are open serve on.
            return client
        self._client, self._is_refused = opened, False
        if client is not None:
            await client.aclose()
        return opened

    async def send(self, messages: Sequence[Message]) -> None:
        """Append all messages or none. Raises Undelivered or Rejected."""
        if any(len(message.body) > _MOST_BYTES for message in messages):
            raise Rejected("larger than proto-max-bulk-len")
        append = _Append(messages)
        self._pending.append(append)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        fault = await append.fault
        if fault is not None:
            raise fault

    async def _send(self) -> None:
        while self._pending:
            appends = self._take()
            try:
                fault = await self._send_together(appends)
                if len(appends) > 1 and _is_lost(fault):
                    await self._send_singly(appends, fault)
                    continue
                if fault is not None:
                    refusal = self._fault_of(fault)
                    for append in appends:
                        append.complete(refusal)
            except asyncio.CancelledError:
                for append in (*appends, *self._pending):
                    append.complete(Undelivered("the sink is closed"))
                raise

    async def _send_singly(self, appends: Sequence[_Append], fault: Exception) -> None:
        """Send each by itself: the server closes the connection for one that is above its own limits."""
        lost = 0
        for append in appends:
            if lost < _MOST_LOST:
                alone = await self._send_together([append])
                if alone is None:
                    lost = 0
                    continue
                # Any other fault, such as silence, is not the one's.
                lost = lost + 1 if _is_lost(alone) else _MOST_LOST
                fault = alone
            append.complete(self._fault_of(fault))

    async def _send_together(self, appends: Sequence[_Append]) -> Exception | None:
        """Send in one round trip, and complete what the server has answered; returns the fault if it has not."""
        try:
            async with asyncio.timeout(self._timeout):
                client = await self._current()
                answers = await self._execute(client, appends)
            if any(isinstance(answer, _ELSEWHERE) for answer in answers):
                # A new connection may lead to another server, by its name or through a proxy.
                await client.connection_pool.disconnect()
            for append in appends:
                append.complete(append.take(answers))
        except Exception as error:
            return error
        return None

    def _fault_of(self, error: Exception) -> Undelivered:
        """The fault of messages that the server did not answer."""
        if isinstance(error, SecretUnavailable):
            return error
        if isinstance(error, AuthenticationError) or is_refusal(error):
            self._is_refused = True
            return Unauthorized(f"{type(error).__name__}: the server refuses relay's credentials")
        return Undelivered(type(error).__name__)

    def _take(self) -> list[_Append]:
        appends: list[_Append] = []
        count = size = 0
        while self._pending and count < _SENT_AT_ONCE and size < _SENT_BYTES:
            append = self._pending.popleft()
            # A cancelled delivery is not sent.
            if not append.fault.done():
                appends.append(append)
                count += len(append.messages)
                size += sum(len(message.body) for message in append.messages)
        return appends

    async def _execute(self, client: Client, appends: Sequence[_Append]) -> deque[Any]:
        pipeline = client.pipeline(transaction=False)
        for append in appends:
            if append.is_atomic:
                pipeline.execute_command("MULTI")
            for message in append.messages:
                fields: dict[Any, Any] = {
                    "id": message.identity,
                    **message.attributes,
                    **message.trace,
                    "data": message.body,
                }
                pipeline.xadd(message.topic, fields, maxlen=self._max_length)
            if append.is_atomic:
                pipeline.execute_command("EXEC")
        return deque(await pipeline.execute(raise_on_error=False))


def _is_lost(fault: Exception | None) -> TypeGuard[ConnectionLost]:
    """Whether a connection has ended; the client derives the refusal of a password from that error."""
    return isinstance(fault, ConnectionLost) and not isinstance(fault, AuthenticationError)


class _Append:
    """Messages that are appended together, several in MULTI and EXEC. `fault` is the result: None if all are stored."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages
        self.fault: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    @property
    def is_atomic(self) -> bool:
        """Whether they need a transaction of Redis: a single command is one by itself."""
        return len(self.messages) > 1

    def complete(self, fault: Exception | None) -> None:
        if not self.fault.done():
            self.fault.set_result(fault)

    def take(self, answers: deque[Any]) -> Exception | None:
        """Remove the answers to these commands from `answers`; returns the fault that they report, or None."""
        if not self.is_atomic:
            return _fault_in(answers.popleft())
        queued = [answers.popleft() for _ in range(len(self.messages) + 1)]
        done = answers.popleft()
        for answer in (*queued, done):
            if isinstance(answer, Exception):
                # The server did not queue the command: it is full, or a replica.
                return Undelivered(type(answer).__name__)
        return next(filter(None, map(_fault_in, done)), None)


def _fault_in(answer: Any) -> Exception | None:
    """The fault that the answer to XADD reports; None if the message is stored."""
    if not isinstance(answer, Exception):
        return None
    is_refused = str(answer).startswith(_OF_THE_EVENT)
    kind = Rejected if is_refused else Undelivered
    return kind(str(answer).partition(" ")[0] if is_refused else type(answer).__name__)
