"""A connection that leads to the wrong server is closed, so that the next one leads to the right one.

Reports: redis/go-redis#790, redis/redis-py#460, StackExchange/StackExchange.Redis#2264,
alphagov/notifications-utils#1279.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any

import pytest
from pydantic import TypeAdapter

from relay.config.handlers import HandlerSettings
from relay.faults import Undelivered
from relay.sinks import Sink, build_sinks
from tests.jetstream import jetstream
from tests.sinks import make_event, transaction


class RedisProxy(ThreadingTCPServer):
    """Answers as Redis does. Connections that are open when it is `demoted` stay with the former primary."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Client)
        self.demoted_until = 0
        """The connections up to this number lead to a server that does not take writes."""
        self.refusal = b""
        self.connections = 0
        self.appended = 0

    def demote(self, refusal: bytes) -> None:
        self.demoted_until, self.refusal = self.connections, refusal


class _Client(StreamRequestHandler):
    server: RedisProxy

    def handle(self) -> None:
        self.server.connections += 1
        number = self.server.connections
        queued = -1
        try:
            while line := self.rfile.readline():
                words = [self._word() for _ in range(int(line[1:]))]
                is_demoted = number <= self.server.demoted_until
                command = words[0].upper()
                if command == b"MULTI":
                    queued = 0
                    self.wfile.write(b"+OK\r\n")
                elif command == b"XADD" and is_demoted:
                    self.wfile.write(b"-" + self.server.refusal + b"\r\n")
                elif command == b"XADD" and queued < 0:
                    self.server.appended += 1
                    self.wfile.write(b"$3\r\n1-1\r\n")
                elif command == b"XADD":
                    queued += 1
                    self.wfile.write(b"+QUEUED\r\n")
                elif command == b"EXEC" and is_demoted:
                    queued = -1
                    self.wfile.write(b"-EXECABORT Transaction discarded\r\n")
                elif command == b"EXEC":
                    self.server.appended += queued
                    self.wfile.write(b"*%d\r\n" % queued + b"$3\r\n1-1\r\n" * queued)
                    queued = -1
                elif command == b"HELLO":
                    self.wfile.write(b"%1\r\n$5\r\nproto\r\n:3\r\n")
                else:
                    self.wfile.write(b"+OK\r\n")
        except (OSError, ValueError):
            return

    def _word(self) -> bytes:
        size = int(self.rfile.readline()[1:])
        return self.rfile.read(size + 2)[:-2]


@contextmanager
def redis_proxy() -> Iterator[RedisProxy]:
    with RedisProxy() as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


def using(do: Callable[[Sink], Awaitable[None]], **settings: Any) -> None:
    found: Any = TypeAdapter(HandlerSettings).validate_python({"topic": "shop", **settings})
    ((sink, _),) = build_sinks({"broker": found}).values()

    async def run() -> None:
        try:
            await do(sink)
        finally:
            await sink.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "refusal",
    [
        "READONLY You can't write against a read only replica.",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "CLUSTERDOWN The cluster is down",
        "MOVED 3999 127.0.0.1:6381",
    ],
)
@pytest.mark.parametrize("events", [1, 2])
def test_a_redis_that_takes_no_writes_is_left_for_the_one_that_does(
    refusal: str, events: int
) -> None:
    with redis_proxy() as server:

        async def deliver(sink: Sink) -> None:
            some = transaction(*map(make_event, range(events)))
            await sink.deliver(some)
            server.demote(refusal.encode())
            with pytest.raises(Undelivered):
                await sink.deliver(some)
            await sink.deliver(some)

        using(deliver, type="redis", url=f"redis://127.0.0.1:{server.server_address[1]}", timeout=3)
        assert server.appended == 2 * events


def test_a_redis_that_is_loading_is_left_at_once() -> None:
    with redis_proxy() as server:

        async def deliver(sink: Sink) -> None:
            await sink.deliver(transaction(make_event(0)))
            server.demote(b"LOADING Redis is loading the dataset in memory")
            await sink.deliver(transaction(make_event(1)))

        using(deliver, type="redis", url=f"redis://127.0.0.1:{server.server_address[1]}", timeout=3)
        assert (server.appended, server.connections) == (2, 2)


def test_a_redis_that_is_only_full_keeps_its_connection() -> None:
    with redis_proxy() as server:

        async def deliver(sink: Sink) -> None:
            await sink.deliver(transaction(make_event(0)))
            server.demote(b"OOM command not allowed when used memory > 'maxmemory'.")
            for _ in range(5):
                with pytest.raises(Undelivered, match="OutOfMemoryError"):
                    await sink.deliver(transaction(make_event(1)))

        using(deliver, type="redis", url=f"redis://127.0.0.1:{server.server_address[1]}", timeout=3)
        assert server.connections == 1


UNAVAILABLE = '{"error": {"code": 503, "err_code": 10008}}'


@pytest.mark.parametrize("answer", ["NATS/1.0 503", UNAVAILABLE])
def test_a_nats_server_that_is_cut_off_is_left_after_a_while(answer: str) -> None:
    """A server without its cluster keeps its clients, and tells them that there is no stream."""
    with jetstream() as stream:
        stream.refuses["shop"] = answer

        async def deliver(sink: Sink) -> None:
            began = time.monotonic()
            while stream.connections == 1:
                with pytest.raises(Undelivered):
                    await sink.deliver(transaction(make_event(1)))
                assert time.monotonic() - began < 60
                await asyncio.sleep(0.02)

        using(deliver, type="nats", servers=[stream.url], timeout=0.5)


def test_a_subject_without_a_stream_ends_no_connection_that_works() -> None:
    with jetstream() as stream:
        stream.refuses["missing"] = "NATS/1.0 503"

        async def deliver(sink: Sink) -> None:
            began = time.monotonic()
            while time.monotonic() - began < 1:
                with pytest.raises(Undelivered, match="NoStreamResponseError"):
                    await sink.deliver(transaction(make_event(1, event_type="missing")))
                await sink.deliver(transaction(make_event(2)))

        using(deliver, type="nats", servers=[stream.url], timeout=0.5, topic="{event_type}")
        assert stream.connections == 1
