"""What an endpoint answers counts for the event that it was asked about, and for no other; malformed answers count too.

Reports: aio-libs/aiohttp#13656, projectdiscovery/nuclei#7671, aio-libs/aiohttp#2782 (a response that nobody has asked
for); aio-libs/aiohttp#3507 and #3609, psf/requests#3458, encode/httpx#3515, StevenLooman/async_upnp_client#93 (a server
that closes a kept connection); apache/httpcomponents-core#57, ArekSredzki/electron-release-server#152 (a body of 204).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from pydantic import TypeAdapter

from relay.config.handlers import HttpHandler
from relay.faults import Rejected, Undelivered
from relay.sinks.http import Http
from tests.sinks import make_event, transaction

Respond = Callable[[int, asyncio.StreamWriter], Awaitable[bool]]
"""Answers the n-th request of a server; returns whether the connection is kept."""


class Endpoint:
    """A server that sends what a test gives, whether it is HTTP or not."""

    def __init__(self, respond: Respond, banner: bytes = b"") -> None:
        """`banner` is what it sends on each new connection."""
        self._respond = respond
        self._banner = banner
        self.requests = 0
        self.connections = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        writer.write(self._banner)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                (length,) = (
                    int(line.partition(b":")[2])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length:")
                )
                await reader.readexactly(length)
                self.requests += 1
                is_kept = await self._respond(self.requests, writer)
                await writer.drain()
                if not is_kept:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def deliver(self, count: int, pause: float = 0.0, timeout: float = 3.0) -> list[Any]:
        """What became of some events that are delivered to it, one after the other."""

        async def run() -> list[Any]:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            settings = TypeAdapter(HttpHandler).validate_python(
                {"type": "http", "url": f"http://127.0.0.1:{port}/", "timeout": timeout}
            )
            sink = Http("hook", settings)
            results: list[Any] = []
            for number in range(count):
                delivery = sink.deliver(transaction(make_event(number)))
                results += await asyncio.gather(delivery, return_exceptions=True)
                await asyncio.sleep(pause)
            await sink.close()
            server.close()
            return results

        return asyncio.run(run())


def always(data: bytes, is_kept: bool = True) -> Endpoint:
    """An endpoint that sends these bytes for each request."""

    async def respond(_: int, writer: asyncio.StreamWriter) -> bool:
        writer.write(data)
        return is_kept

    return Endpoint(respond)


REFUSAL = b"HTTP/1.1 500 Bad\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    "response",
    [b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"],
)
def test_a_second_response_does_not_confirm_the_next_event(response: bytes) -> None:
    """The event counted as delivered, and was lost: the endpoint had not even read it."""

    async def respond(number: int, writer: asyncio.StreamWriter) -> bool:
        if number > 1:
            writer.write(REFUSAL)
            return True
        writer.write(response)
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.write(response)
        return True

    endpoint = Endpoint(respond)
    first, *others = endpoint.deliver(3, pause=0.1)
    assert first is None
    assert list(map(str, others)) == ["HTTP 500"] * 2
    assert endpoint.requests == 3


def test_an_event_is_posted_again_at_once_if_its_kept_connection_was_closed() -> None:
    """Each second event was deferred for a second, and its attempt counted."""
    endpoint = always(b"HTTP/1.1 204 No Content\r\n\r\n", is_kept=False)
    assert endpoint.deliver(6) == [None] * 6


def test_a_new_connection_that_is_closed_is_a_failed_attempt() -> None:
    endpoint = always(b"", is_kept=False)
    (failed,) = endpoint.deliver(1)
    assert isinstance(failed, Undelivered)
    assert endpoint.requests == 1


def test_a_server_that_closes_each_connection_at_an_event_gets_it_twice_in_an_attempt() -> None:
    async def respond(number: int, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n" if number == 1 else b"")
        return number == 1

    endpoint = Endpoint(respond)
    first, second = endpoint.deliver(2)
    assert first is None
    assert isinstance(second, Undelivered)
    assert endpoint.requests == 3


CHUNKED = b"Transfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    "rest",
    [
        b"Content-Length: 2\r\n\r\nok",
        b"Content-Length: 2\r\n" + CHUNKED + b"\r\n2\r\nok\r\n0\r\n\r\n",
        b"Content-Length: 0\r\nContent-Length: 0\r\n\r\n",
        b"Name with blanks : x\r\nContent-Length: 0\r\n\r\n",
        b"no colon\r\nContent-Length: 0\r\n\r\n",
        b"x: a\0b\r\nContent-Length: 0\r\n\r\n",
        b"".join(b"x-%d: y\r\n" % number for number in range(300)) + b"Content-Length: 0\r\n\r\n",
        b"x: " + b"y" * 70_000 + b"\r\nContent-Length: 0\r\n\r\n",
        CHUNKED + b"\r\nno size\r\n",
    ],
)
def test_an_answer_that_is_not_valid_http_counts_by_its_status(rest: bytes) -> None:
    """A success was posted again for ever, and an event that was refused held its host."""
    for line in (b"HTTP/1.1 204 No Content\r\n", b"HTTP/1.0 200\r\n"):
        early = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
        assert always(early + line + rest).deliver(2, pause=0.05) == [None] * 2
    for failed in always(b"HTTP/1.1 422 Unprocessable\r\n" + rest).deliver(2, pause=0.05):
        assert isinstance(failed, Rejected)
        assert str(failed) == "HTTP 422"


def test_a_body_that_turns_out_malformed_later_does_not_last_until_the_timeout() -> None:
    async def respond(_: int, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\n" + CHUNKED + b"\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(b"no size\r\n")
        return True

    assert Endpoint(respond).deliver(1, timeout=60) == [None]


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\n" + CHUNKED + b"\r\n5\r\nsh",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 103 Early Hints\r\n\r\n",
        b"ok",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"",
    ],
)
def test_what_is_cut_short_or_has_no_status_confirms_nothing(response: bytes) -> None:
    (failed,) = always(response, is_kept=False).deliver(1)
    assert isinstance(failed, Undelivered)


def test_a_server_that_speaks_first_is_asked_once() -> None:
    async def respond(_: int, writer: asyncio.StreamWriter) -> bool:
        return True

    endpoint = Endpoint(respond, banner=b"220 mail.example ESMTP\r\n")
    (failed,) = endpoint.deliver(1, timeout=1)
    assert isinstance(failed, Undelivered)
    assert endpoint.connections == 1
