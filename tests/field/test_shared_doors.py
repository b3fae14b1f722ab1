"""Whoever only connects, guesses or sends much keeps nobody else out: of observe.listen, the API and the console.

xorbitsai/inference#5213: half-sent requests held uvicorn's connections for minutes. kite-org/kite#461 and
ethereum/hive#880: the same of servers without a time for the head. userver-framework/userver#1303: idle connections.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from relay.api import callers, events, filters, streams, turns
from relay.api import server as server_of_api
from relay.config.settings import Address
from relay.console import server as server_of_console
from relay.intake.messages import MOST_VALUES, MessageReader, TooMany
from relay.observe import server as observe_server
from relay.observe.server import MOST_CLIENTS, listen
from tests import console
from tests.api import Source, authorized, new_token, served, settings_of
from tests.outbox import Outbox, event, host, wait_until


@contextmanager
def _connections(host: str, port: int, count: int, sent: bytes) -> Iterator[list[socket.socket]]:
    """Connections that send a beginning of a request, or nothing, and then wait."""
    with ExitStack() as opened:
        found = []
        for _ in range(count):
            each = opened.enter_context(socket.create_connection((host, port), 10))
            each.sendall(sent)
            found.append(each)
        yield found


def test_half_sent_requests_keep_no_probe_out() -> None:
    """40 of them failed 25 of 25 probes of /livez, so that the kubelet restarted relay."""
    listener = listen(Address("127.0.0.1", 0))
    try:
        url = f"http://127.0.0.1:{listener.port}/livez"
        begun = b"GET /metrics HTTP/1.1\r\nHost: x\r\n"
        with _connections("127.0.0.1", listener.port, 40, begun):
            for _ in range(25):
                with urllib.request.urlopen(url, timeout=10) as answer:
                    assert answer.status == 200
    finally:
        listener.close()


def test_a_client_that_takes_no_answer_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has sent its head keeps its connection until others have waited."""
    held = threading.Event()
    answer = observe_server.HttpListener.answer

    def slow(self: observe_server.HttpListener, target: str, accept: str | None) -> object:
        if target == "/slow":
            held.wait(60)
        return answer(self, target, accept)

    monkeypatch.setattr(observe_server.HttpListener, "answer", slow)
    listener = listen(Address("127.0.0.1", 0))
    try:
        slow_ones = b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"
        with (
            _connections("127.0.0.1", listener.port, MOST_CLIENTS - 1, slow_ones),
            _connections("127.0.0.1", listener.port, 10, b""),
            urllib.request.urlopen(f"http://127.0.0.1:{listener.port}/livez", timeout=10) as found,
        ):
            assert found.status == 200
        held.set()
    finally:
        held.set()
        listener.close()


def test_idle_connections_keep_nobody_out_of_the_api(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,200 of them did, and 120 of the console."""
    monkeypatch.setattr(server_of_api, "_REQUESTS", 15)
    settings = settings_of(outbox, streams=5)
    with served(settings) as address:
        token = new_token(settings)
        url = urlsplit(address)
        assert url.hostname is not None
        assert url.port is not None
        for sent in (b"", b"GET /v1/events HTTP/1.1\r\nHost: x\r\n"):
            with _connections(url.hostname, url.port, 60, sent):
                for _ in range(5):
                    found = httpx.get(f"{address}/v1/events", headers=authorized(token), timeout=30)
                    assert found.status_code == 200, found.text


def test_wrong_tokens_take_no_thread_from_a_right_one(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 clients with wrong tokens slowed a right one from 0.02 to 1.5 s: each slept in one of forty threads."""
    settings = settings_of(outbox)
    with served(settings) as address:
        token = new_token(settings)

        async def ask(client: httpx.AsyncClient, sent: str) -> int:
            found = await client.get(f"{address}/v1/events", headers=authorized(sent))
            return found.status_code

        async def work() -> None:
            limits = httpx.Limits(max_connections=200)
            async with httpx.AsyncClient(timeout=60, limits=limits) as client:
                assert await ask(client, token) == 200
                monkeypatch.setattr(callers, "_UNKNOWN_SECONDS", 7.0)
                monkeypatch.setattr(callers, "KNOWN_SECONDS", 0.0)
                wrong = [asyncio.create_task(ask(client, f"wrong {n % 5}")) for n in range(80)]
                await asyncio.sleep(0.5)
                assert await ask(client, token) == 200
                assert not any(each.done() and each.result() == 401 for each in wrong)
                for each in wrong:
                    each.cancel()

        asyncio.run(work())


_LOGIN = (
    b"POST /login HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-www-form-urlencoded\r\n"
    b"Expect: 100-continue\r\nContent-Length: 100\r\n\r\n"
)
"""A login whose form does not come; the server says when it waits for it."""


def test_half_sent_logins_keep_nobody_out_of_the_console(outbox: Outbox) -> None:
    """64 of them, by anybody, and everybody else had status 503 for thirty seconds, again and again.

    CVE-2007-6750, and Kludex/uvicorn#3029: whoever is connected counts, whatever they have sent.
    """
    settings = outbox.settings(observe=console.console_of())
    with console.served(settings) as address, ExitStack() as opened:
        url = urlsplit(address)
        for _ in range(3):
            for _ in range(server_of_console._REQUESTS):
                each = opened.enter_context(socket.create_connection((url.hostname, url.port)))
                each.settimeout(30)
                each.sendall(_LOGIN)
                assert each.recv(12) == b"HTTP/1.1 100"
            found = httpx.get(
                f"{address}/groups/default/sinks", headers=authorized(console.TOKEN), timeout=30
            )
            assert found.status_code == 200, found.text


def test_half_sent_events_keep_nobody_out_of_the_api(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one token kept out the others (jmrplens/gitlab-mcp-server#540)."""
    monkeypatch.setattr(server_of_api, "_REQUESTS", 15)
    settings = settings_of(outbox, streams=5)
    with served(settings) as address, ExitStack() as opened:
        mallory, token = new_token(settings, "mallory", ["publish"]), new_token(settings)
        url = urlsplit(address)
        head = (
            f"POST /v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {mallory}\r\n"
            "Content-Type: application/json\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n"
        )
        for _ in range(40):
            each = opened.enter_context(socket.create_connection((url.hostname, url.port)))
            each.settimeout(30)
            each.sendall(head.encode())
            assert each.recv(12) == b"HTTP/1.1 100"
        found = httpx.get(f"{address}/v1/events", headers=authorized(token), timeout=30)
        assert found.status_code == 200, found.text


def test_wrong_tokens_keep_nobody_out_of_the_api(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever guesses waits, and took the room of those who may come in: the right token had status 503."""
    monkeypatch.setattr(server_of_api, "_REQUESTS", 15)
    monkeypatch.setattr(callers, "_UNKNOWN_SECONDS", 60.0)
    settings = settings_of(outbox, streams=5)
    with served(settings) as address, ExitStack() as opened:
        token = new_token(settings)
        url = urlsplit(address)
        waiting: list[str] = []
        connected: list[socket.socket] = []
        find = callers.Callers.find

        async def finding(self: callers.Callers, sent: str) -> callers.TokenCaller | None:
            waiting.append(sent)
            return await find(self, sent)

        monkeypatch.setattr(callers.Callers, "find", finding)
        for n in range(1, 40):
            each = opened.enter_context(socket.create_connection((url.hostname, url.port)))
            each.sendall(
                f"GET /v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer w{n}\r\n\r\n".encode()
            )
            # What the server refuses does not come so far.
            connected.append(each)
            wait_until(lambda: len(waiting) == len(connected))
        found = httpx.get(f"{address}/v1/events", headers=authorized(token), timeout=30)
        assert found.status_code == 200, found.text


def test_requests_of_one_token_keep_no_other_waiting(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """250 pages of one token that match little: a page of another took 27 s instead of 0.06 s.

    PostgREST/postgrest#3517, #2348: whoever asks for what is slow has the whole pool.
    eclipse-hawkbit/hawkbit#3345: one tenant's requests ended all others'.
    """
    slow = threading.Event()
    asked: list[None] = []
    page = events._page

    def paging(conn: Any, history: Any, after: Any, takes: Any, limit: int) -> Any:
        if limit == 7:
            asked.append(None)
            assert slow.wait(60)
        return page(conn, history, after, takes, limit)

    monkeypatch.setattr(events, "_page", paging)
    settings = settings_of(outbox)
    with served(settings) as address:
        mallory, token = new_token(settings, "mallory"), new_token(settings)
        url = f"{address}/v1/events"

        async def ask(client: httpx.AsyncClient, sent: str, limit: int) -> int:
            found = await client.get(url, headers=authorized(sent), params={"limit": limit})
            assert found.status_code != 429 or found.headers["retry-after"]
            return found.status_code

        async def work() -> None:
            limits = httpx.Limits(max_connections=100)
            async with httpx.AsyncClient(timeout=60, limits=limits) as client:
                theirs = [
                    asyncio.create_task(ask(client, mallory, 7))
                    for _ in range(turns.MOST_REQUESTS + 10)
                ]
                while sum(each.done() for each in theirs) < 10 or len(asked) < turns.AT_ONCE:
                    await asyncio.sleep(0.02)
                for _ in range(3):
                    assert await ask(client, token, 1) == 200
                assert len(asked) == turns.AT_ONCE
                slow.set()
                answered = await asyncio.gather(*theirs)
                assert sorted(answered) == [200] * turns.MOST_REQUESTS + [429] * 10

        try:
            asyncio.run(work())
        finally:
            slow.set()


def test_streams_of_one_token_keep_no_other_waiting(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """240 that caught up made another one wait for five seconds instead of 0.1 s for each of its pages."""
    slow = threading.Event()
    asked: list[None] = []
    read_page = streams.EventStream._read_page

    def reading(self: streams.EventStream, conn: Any, after: Any, until: Any) -> Any:
        if self._wanted.caller.name == "mallory":
            asked.append(None)
            assert slow.wait(60)
        return read_page(self, conn, after, until)

    monkeypatch.setattr(streams.EventStream, "_read_page", reading)
    settings = settings_of(outbox)
    outbox.publish(host(1), event())
    with served(settings) as address:
        mallory, token = new_token(settings, "mallory"), new_token(settings)
        url = urlsplit(address)
        head = (
            "GET /v1/events/stream?after=beginning HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {mallory}\r\n\r\n"
        )
        try:
            assert url.hostname is not None
            assert url.port is not None
            with _connections(url.hostname, url.port, 20, head.encode()):
                wait_until(lambda: len(asked) == turns.AT_ONCE)
                with Source(address, token, after="beginning") as source:
                    assert len(source.take(1)) == 1
                assert len(asked) == turns.AT_ONCE
        finally:
            slow.set()


def test_a_client_that_goes_is_no_fault_of_the_console(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """Each was a line of level ERROR, "the console failed", which anybody could cause at will.

    modelcontextprotocol/python-sdk#3469, fastapi/fastapi#15315: a client that disconnects in its body is an error.
    """
    settings = outbox.settings(observe=console.console_of())
    with console.served(settings) as address:
        url = urlsplit(address)
        with socket.create_connection((url.hostname, url.port)) as conn:
            conn.sendall(_LOGIN)
            assert conn.recv(12) == b"HTTP/1.1 100"
        for _ in range(3):
            httpx.get(f"{address}/login")
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


def test_a_body_of_tiny_values_is_refused_before_it_is_read() -> None:
    """Two of 15.9 MB took 1.1 GB of memory, and were not answered within 60 s."""
    body = b'{"payload": [' + b"1," * 8_000_000 + b"1]}"
    reader = MessageReader()
    with pytest.raises(TooMany, match=f"{MOST_VALUES} are allowed"):
        reader.read(body)


def test_new_patterns_are_compiled_beside_the_event_loop(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """240 streams with 40 new globs each: every request waited for 17 s."""
    compiled: list[str] = []
    compiling = filters._compiled

    def noting(patterns: tuple[str, ...]) -> object:
        compiled.append(threading.current_thread().name)
        return compiling(patterns)

    monkeypatch.setattr(filters, "_compiled", noting)
    settings = settings_of(outbox)
    with served(settings) as address:
        token = new_token(settings)
        asked = "&".join(f"type=*{n}*[ab]?{time.monotonic_ns()}*" for n in range(40))
        found = httpx.get(f"{address}/v1/events?{asked}", headers=authorized(token), timeout=30)
        assert found.status_code == 200
    wait_until(lambda: bool(compiled))
    assert all(name.startswith("api patterns") for name in compiled)
