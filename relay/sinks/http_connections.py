"""The client's connections: which of them a request may use, and what counts as the answer to it.

A connection is kept for the next request, but HTTP/1.1 does not say which request a response belongs to. What a server
sends unasked, such as a second response, would be taken for the answer to the next event.

Sources: RFC 9112, "Message Body Length" and "Connection Management"; RFC 9110, "Idempotent Methods".
"""

from __future__ import annotations

import asyncio
import re
import socket
from functools import partial
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.helpers import set_exception
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import EMPTY_PAYLOAD
from multidict import CIMultiDict, CIMultiDictProxy

from relay.runtime.threads import pool
from relay.sinks.egress import EgressGuard

READ_BYTES = 8_000
"""How much of a response is read to use its connection again; after a longer response it is closed."""
_RESOLVING = 16
"""How many names of endpoints are resolved at once."""
_KEPT_SECONDS = 5.0
"""How long an idle connection is kept: shorter than by most servers, which may be closing it when it is used."""
_BEGINNING_BYTES = 4_096
"""About how much of what a server sends is remembered, to find its status where it is not valid HTTP."""
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d)(?: [^\r\n]*)?\r?\n")
_OF_ANY_SERVER = frozenset({400, 409, 413, 422, 425, 429, 431})
"""Statuses that every server behind an address would answer alike."""


class KeptConnectionLost(aiohttp.ClientConnectionError):
    """A kept connection has ended before a response: its server may have closed it before the request arrived."""


class Malformed(aiohttp.ClientError):
    """The rest of a response, whose status is known, is not valid HTTP."""


class Connector(aiohttp.TCPConnector):
    """Opens connections, and lends none on which its server has sent anything since its last response."""

    def __init__(
        self, limit: int, keeps: bool, guard: EgressGuard, resolver: Resolver | None
    ) -> None:
        """At most `limit` connections are in use at once. Without `keeps` each is for one request.

        `guard` is asked before each connection is opened: connecting to an address that it refuses raises
        AddressRefused, as the cause of aiohttp's error.
        """
        kept: dict[str, Any] = {"keepalive_timeout": _KEPT_SECONDS} if keeps else {}
        factory = partial(_socket, guard)
        super().__init__(
            limit=limit,
            force_close=not keeps,
            socket_factory=factory,
            resolver=resolver,
            **kept,
        )
        self._factory: Any = partial(_Server, loop=self._loop)

    async def connect(self, *arguments: Any, **options: Any) -> Connection:
        """Lend a connection, or open one."""
        while True:
            connection = await super().connect(*arguments, **options)
            server: Any = connection.protocol
            # A server that speaks first on a new connection would do so again.
            if server is None or not (server.has_served and server.should_close):
                return connection
            connection.close()


class ConnectorOfMany(Connector):
    """Keeps no more idle connections than may be in use: with many servers, one to each would stay open."""

    def _release(self, key: Any, protocol: ResponseHandler, *, should_close: bool = False) -> None:
        if not should_close and len(self._conns) > self.limit:
            should_close = key not in self._conns
        super()._release(key, protocol, should_close=should_close)


class Resolver(AbstractResolver):
    """Resolves names in threads of its own: where data choose names, the servers of some may never answer."""

    def __init__(self) -> None:
        self._threads = pool(_RESOLVING, "endpoint names")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The addresses of a name. Raises OSError."""
        call = partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        return [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=int(address[1]),
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for kind, _, protocol, _, address in found
        ]

    async def close(self) -> None:
        """Let go of the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Server(ResponseHandler):
    """The server's end of a connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._beginning = b""
        self._requests = 0

    @property
    def has_served(self) -> bool:
        """Whether it has had a request."""
        return self._requests > 0

    @property
    def was_kept(self) -> bool:
        """Whether the current request is not the first one."""
        return self._requests > 1

    @property
    def status(self) -> int | None:
        """The status in what the server has sent since the request, however malformed the rest is; None without one."""
        at = 0
        while found := _STATUS_LINE.match(self._beginning, at):
            status = int(found[1])
            if status >= 200:
                return status
            at = self._beginning.find(b"\r\n\r\n", at) + 4
            if at < 4:
                return None
        return None

    def set_response_params(self, **options: Any) -> None:
        """Prepare for the response to the next request."""
        self._beginning = b""
        self._requests += 1
        super().set_response_params(**options)

    def data_received(self, data: bytes) -> None:
        """Parse what the server has sent."""
        if len(self._beginning) < _BEGINNING_BYTES:
            self._beginning += data
        super().data_received(data)

    def set_exception(self, exc: BaseException, *cause: BaseException) -> None:
        """Fail the response; aiohttp's own method leaves the reader of its body waiting."""
        payload = self._payload
        super().set_exception(exc, *cause)
        if payload is not None and isinstance(exc, HttpProcessingError):
            set_exception(payload, Malformed(str(exc)))


class Response(aiohttp.ClientResponse):
    """A response whose connection is not used again where its status may be that of one server among several.

    A balancer of connections would lead each retry on it to the same server.
    """

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        """Read the head of the response; a malformed one counts by its status. Raises KeptConnectionLost."""
        server: Any = connection.protocol
        try:
            await super().start(connection)
        except aiohttp.ClientResponseError:
            status = server.status
            if status is not None:
                self._begin(status)
                connection.close()
                return self
            if server.was_kept:
                raise KeptConnectionLost from None
            raise
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
            if server.was_kept:
                raise KeptConnectionLost from error
            raise
        if server is None or self.is_success or self.status in _OF_ANY_SERVER:
            return self
        # A response without a body has already given the connection back.
        if self.connection is None:
            server.close()
        else:
            server.force_close()
        return self

    def _begin(self, status: int) -> None:
        """Be a response that has a status and nothing else."""
        self.status, self.reason = status, "(not valid HTTP)"
        self._headers = CIMultiDictProxy(CIMultiDict())
        self.content = EMPTY_PAYLOAD

    @property
    def is_success(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300


def _socket(
    guard: EgressGuard, address: tuple[int, int, int, str, tuple[Any, ...]]
) -> socket.socket:
    """Open a socket with a small receive buffer, so that the kernel does not buffer a large response.

    It will be connected to `address`, as getaddrinfo returns it. Raises AddressRefused.
    """
    family, kind, protocol, _, to = address
    guard.require(str(to[0]))
    opened = socket.socket(family, kind, protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BYTES)
    return opened
