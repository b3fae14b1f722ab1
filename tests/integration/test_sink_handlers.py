"""The HTTP sink against endpoints that are slow, hang, say too much or lie. No database."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import socket
import ssl
import struct
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError, Event, Thread
from typing import Any

import pytest
import trustme

from relay.config.handlers import HttpHandler
from relay.faults import ConfigurationError, Rejected, Undelivered, describe, exception_text
from relay.sinks.http import Http, signatures
from tests.sinks import make_event, transaction
from tests.webhook import Answer, Webhook

SECRET = "hunter2"


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as server:
        yield server


def using(url: str, do: Callable[[Http], Awaitable[None]], **settings: Any) -> None:
    """Build a sink and run a test with it, in an event loop of its own."""
    sink = Http("hook", HttpHandler(type="http", url=url, **settings))

    async def run() -> None:
        try:
            await do(sink)
        finally:
            await sink.close()

    asyncio.run(run())


def fault_of(url: str, payload: str = "{}", **settings: Any) -> Undelivered | Rejected:
    """What a delivery raises."""
    raised: list[Any] = []

    async def deliver(sink: Http) -> None:
        with pytest.raises((Undelivered, Rejected)) as found:
            await sink.deliver(transaction(make_event(1, payload=payload)))
        raised.append(found.value)

    using(url, deliver, **settings)
    found: Undelivered | Rejected = raised[0]
    return found


@contextmanager
def raw_server(conversation: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that does with each connection what a test says; gives its address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def converse(conn: socket.socket) -> None:
        with conn, suppress(OSError):
            conversation(conn)

    def accept() -> None:
        while True:
            try:
                conn, _ = listener.accept()
            except OSError:
                return
            Thread(target=converse, args=(conn,), daemon=True).start()

    Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/events"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def read_request(conn: socket.socket) -> None:
    received = b""
    while b"\r\n\r\n" not in received:
        received += conn.recv(65536)


# What is sent.


def test_a_transaction_is_posted_in_order_over_one_connection(webhook: Webhook) -> None:
    async def deliver(sink: Http) -> None:
        for first in (0, 10):
            await sink.deliver(transaction(*(make_event(first + each) for each in range(10))))

    using(webhook.url, deliver)
    assert [request.event["data"]["amount"] for request in webhook.requests] == list(range(20))
    assert webhook.connections == 1


@pytest.mark.parametrize("mode", ["structured", "binary", "batch", "transaction"])
def test_each_way_to_carry_events_is_signed_and_compressed(webhook: Webhook, mode: str) -> None:
    more: dict[str, Any] = {"each": "transaction"} if mode == "transaction" else {"mode": mode}

    async def deliver(sink: Http) -> None:
        await sink.deliver(
            transaction(make_event(1), make_event(2, payload=f'"{"x" * 3_000_000}"'))
        )

    using(webhook.url, deliver, signing_secret="s3cret", compress_above=1_000, **more)
    requests = webhook.requests
    assert len(requests) == (1 if mode == "transaction" else 2)
    assert requests[-1].headers["content-encoding"] == "gzip"
    assert int(requests[-1].headers["content-length"]) < 10_000
    for request in requests:
        identity, clock = (request.headers[f"webhook-{name}"] for name in ("id", "timestamp"))
        assert request.headers["idempotency-key"] == identity
        assert signatures([b"s3cret"], identity, int(clock), request.body).items() <= (
            request.headers.items()
        )
    data = json.loads(requests[-1].body)
    if mode == "binary":
        assert requests[0].headers["ce-type"] == "order.placed"
    elif mode == "structured":
        data = data["data"]
    else:
        data = data[-1]["data"]
    assert len(data) == 3_000_000


def test_many_transactions_at_once_have_a_connection_each(webhook: Webhook) -> None:
    together = Barrier(50)

    def answers(_: dict[str, str], __: bytes) -> Answer:
        with suppress(BrokenBarrierError):
            together.wait(60)
        return Answer()

    async def deliver(sink: Http) -> None:
        await asyncio.gather(*(sink.deliver(transaction(make_event(each))) for each in range(50)))

    webhook.answers = answers
    using(webhook.url, deliver, concurrency=50, timeout=120)
    assert not together.broken
    assert len(webhook.requests) == 50
    assert webhook.connections == 50


def test_no_more_connections_than_concurrency(webhook: Webhook) -> None:
    async def deliver(sink: Http) -> None:
        await asyncio.gather(*(sink.deliver(transaction(make_event(each))) for each in range(30)))

    using(webhook.url, deliver, concurrency=3)
    assert len(webhook.requests) == 30
    assert webhook.connections <= 3


def test_credentials_and_query_of_the_address_are_sent_as_they_are_written(
    webhook: Webhook,
) -> None:
    url = webhook.url.replace("http://", "http://me:p%40ss@")

    async def deliver(sink: Http) -> None:
        await sink.deliver(transaction(make_event(1)))

    using(f"{url}/a%2Fb?sig=a%2Fb%3D+c%20d&é#part", deliver)
    (request,) = webhook.requests
    assert request.path == "/events/a%2Fb?sig=a%2Fb%3D+c%20d&%C3%A9"
    expected = base64.b64encode(b"me:p@ss").decode()
    assert request.headers["authorization"] == f"Basic {expected}"


@pytest.mark.parametrize("identity", ["a\r\nx-evil: 1", "é", "a" * 3_000, "50%"])
def test_an_identity_that_no_header_can_have_is_encoded(webhook: Webhook, identity: str) -> None:
    async def deliver(sink: Http) -> None:
        await sink.deliver(transaction(make_event(1, id=identity)))

    using(webhook.url, deliver, signing_secret="s")
    (request,) = webhook.requests
    assert request.event["id"] == identity
    assert "x-evil" not in request.headers
    assert request.headers["webhook-id"] == request.headers["idempotency-key"]


def test_a_redirect_is_not_followed(webhook: Webhook) -> None:
    webhook.answers = lambda headers, body: Answer(307, (("location", webhook.url),))
    assert describe(fault_of(webhook.url)) == "Undelivered: HTTP 307"
    assert len(webhook.requests) == 1


def test_a_long_header_of_a_response_does_not_hide_its_status(webhook: Webhook) -> None:
    """aio-libs/aiohttp#2304: a proxy's cookies and policies exceed the 8 kB that the client allows by default."""
    webhook.answers = lambda headers, body: Answer(headers=(("set-cookie", "a" * 30_000),))

    async def deliver(sink: Http) -> None:
        await sink.deliver(transaction(make_event(1)))

    using(webhook.url, deliver)
    assert len(webhook.requests) == 1


@pytest.mark.parametrize("body", [b"", b"no route" * 10])
def test_a_retry_does_not_use_the_connection_to_a_server_that_refused(body: bytes) -> None:
    """traefik/traefik#13390: a balancer of connections leads a kept one to the same bad replica."""
    connections = 0

    def converse(conn: socket.socket) -> None:
        nonlocal connections
        connections += 1
        head = b"404 Not Found" if connections == 1 else b"200 OK"
        received = conn.makefile("rb")
        length = 0
        while line := received.readline():
            if line.lower().startswith(b"content-length:"):
                length = int(line[15:])
            if line != b"\r\n":
                continue
            received.read(length)
            conn.sendall(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n" % (head, len(body)))
            time.sleep(0.02)
            conn.sendall(body)

    async def deliver(sink: Http) -> None:
        with pytest.raises(Undelivered, match="HTTP 404") as raised:
            await sink.deliver(transaction(make_event(1)))
        assert (raised.value.detail or "").endswith(body.decode() or "404 Not Found")
        await sink.deliver(transaction(make_event(1), make_event(2)))

    with raw_server(converse) as url:
        using(url, deliver)
    assert connections == 2


@pytest.mark.parametrize("reads", [False, True])
def test_an_endpoint_that_refuses_a_body_before_it_has_come(reads: bool) -> None:
    """psf/requests#2422, httpie/cli#600: 413 and an end of the connection while the body is being sent."""

    def refuse(conn: socket.socket) -> None:
        conn.recv(1_000)
        conn.sendall(
            b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        )
        if reads:
            conn.shutdown(socket.SHUT_WR)
            while conn.recv(100_000):
                pass

    payload = '{"a": "' + "x" * 6_000_000 + '"}'
    with raw_server(refuse) as url:
        assert describe(fault_of(url, payload)) == "Rejected: HTTP 413"


# Deadlines.


@pytest.mark.parametrize("status", [200, 503])
def test_a_response_that_drips_ends_at_the_deadline(webhook: Webhook, status: int) -> None:
    """The whole would take half an hour."""
    webhook.answers = lambda headers, body: Answer(status, body=b"x" * 10_000, drip=0.2)
    began = time.monotonic()
    fault = fault_of(webhook.url, timeout=1)
    assert time.monotonic() - began > 0.9
    assert isinstance(fault, Undelivered)
    assert str(fault) == ("no complete response in 1 s" if status == 200 else "HTTP 503")


def test_a_refusal_that_drips_is_a_refusal(webhook: Webhook) -> None:
    webhook.answers = lambda headers, body: Answer(422, body=b"no such product", drip=0.2)
    fault = fault_of(webhook.url, timeout=1)
    assert isinstance(fault, Rejected)
    assert exception_text(fault).endswith(": 422 Unprocessable Entity\nno s")


@pytest.mark.parametrize("kind", ["hangs", "drips its head", "hangs in TLS", "sends 100 for ever"])
def test_an_endpoint_that_never_answers_is_given_up_at_the_deadline(kind: str) -> None:
    given_up = Event()

    def converse(conn: socket.socket) -> None:
        if kind == "hangs in TLS":
            given_up.wait()
            return
        read_request(conn)
        while not given_up.wait(0.1):
            if kind == "drips its head":
                conn.sendall(b"H")
            elif kind == "sends 100 for ever":
                conn.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

    with raw_server(converse) as url:
        if kind == "hangs in TLS":
            url = url.replace("http://", "https://")
        try:
            fault = fault_of(url, timeout=1)
        finally:
            given_up.set()
    assert isinstance(fault, Undelivered)
    if kind != "drips its head":
        assert str(fault) == "no complete response in 1 s"


def test_a_hanging_endpoint_holds_no_other_delivery_up(webhook: Webhook) -> None:
    webhook.answers = lambda headers, body: Answer(204, after=30 if b'"amount": 0}' in body else 0)

    async def deliver(sink: Http) -> None:
        hanging = asyncio.create_task(sink.deliver(transaction(make_event(0))))
        await sink.deliver(transaction(*(make_event(each) for each in range(1, 21))))
        assert not hanging.done()
        hanging.cancel()

    using(webhook.url, deliver, timeout=600)


# Responses that are too large.


@pytest.mark.parametrize("status", [200, 400, 503])
def test_gigabytes_of_a_response_are_neither_read_nor_held(webhook: Webhook, status: int) -> None:
    megabyte = b"x" * 1_000_000
    webhook.answers = lambda headers, body: Answer(status, body=megabyte, times=4_000)

    async def deliver(sink: Http) -> None:
        tracemalloc.start()
        try:
            results = await asyncio.gather(
                *(sink.deliver(transaction(make_event(each))) for each in range(1, 11)),
                return_exceptions=True,
            )
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 2_000_000
        for result in results:
            if status == 200:
                assert result is None
            else:
                assert isinstance(result, Rejected if status == 400 else Undelivered)
                assert len(exception_text(result)) < 1_200

    using(webhook.url, deliver, timeout=5)
    assert webhook.sent < 100_000_000


def test_a_small_response_is_read_so_that_its_connection_is_used_again(webhook: Webhook) -> None:
    webhook.answers = lambda headers, body: Answer(200, body=b"x" * 7_000)

    async def deliver(sink: Http) -> None:
        await sink.deliver(transaction(*(make_event(each) for each in range(10))))

    using(webhook.url, deliver)
    assert webhook.connections == 1


def test_headers_without_end_are_given_up() -> None:
    sent = 0

    def converse(conn: socket.socket) -> None:
        nonlocal sent
        read_request(conn)
        conn.sendall(b"HTTP/1.1 500 Bad\r\n")
        line = b"x-padding: " + b"x" * 4_000 + b"\r\n"
        while True:
            conn.sendall(line)
            sent += len(line)

    with raw_server(converse) as url:
        fault = fault_of(url, timeout=5)
    assert isinstance(fault, Undelivered)
    assert sent < 50_000_000


def test_a_compressed_response_is_not_inflated(webhook: Webhook) -> None:
    bomb = gzip.compress(bytes(50_000_000))
    webhook.answers = lambda headers, body: Answer(400, (("content-encoding", "gzip"),), body=bomb)
    tracemalloc.start()
    try:
        fault = fault_of(webhook.url)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(fault, Rejected)
    assert peak < 5_000_000


# Retry-After.


@pytest.mark.parametrize("value", ["99999999999999", "-1", "é", "nan", "9" * 4_000])
def test_a_strange_retry_after_of_an_endpoint(webhook: Webhook, value: str) -> None:
    webhook.answers = lambda headers, body: Answer(503, (("retry-after", value),))
    fault = fault_of(webhook.url)
    assert isinstance(fault, Undelivered)
    assert fault.after in (None, 86_400)


# What goes wrong.


def test_a_connection_that_ends_before_the_response_does(webhook: Webhook) -> None:
    for answer in (Answer(0), Answer(200, body=b"x" * 100, short=50)):
        webhook.answers = lambda headers, body, answer=answer: answer  # type: ignore[misc]
        assert isinstance(fault_of(webhook.url), Undelivered)
    webhook.answers = lambda headers, body: Answer(422, body=b"x" * 100, short=50)
    assert isinstance(fault_of(webhook.url), Rejected)


def test_an_idle_connection_that_the_endpoint_closed_is_not_used() -> None:
    connections = 0

    def answer_one(conn: socket.socket) -> None:
        nonlocal connections
        connections += 1
        read_request(conn)
        conn.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx")
        time.sleep(0.1)

    async def deliver(sink: Http) -> None:
        for number in range(3):
            await sink.deliver(transaction(make_event(number)))
            await asyncio.sleep(0.3)

    with raw_server(answer_one) as url:
        using(url, deliver)
    assert connections == 3


def test_a_fault_says_what_went_wrong_on_the_network(webhook: Webhook) -> None:
    def garble(conn: socket.socket) -> None:
        read_request(conn)
        conn.sendall(b"%s/1.1 200 OK\r\n\r\n" % SECRET.encode())

    def reset(conn: socket.socket) -> None:
        read_request(conn)
        conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def output(url: str) -> str:
        return describe(fault_of(url)).removeprefix("Undelivered: ")

    assert output("http://127.0.0.1:1/") == "ClientConnectorError: Connection refused"
    assert output("http://nowhere.invalid/") in (
        "ClientConnectorDNSError: Name or service not known",
        "ClientConnectorDNSError: Temporary failure in name resolution",
    )
    assert output(webhook.url.replace("http", "https")).startswith("ClientConnectorSSLError: ")
    with raw_server(garble) as url:
        assert output(url) == "ClientResponseError: the response is not valid HTTP"
    with raw_server(reset) as url:
        assert output(url) == "ClientOSError: Connection reset by peer"


def test_no_fault_tells_a_secret() -> None:
    def refuse(conn: socket.socket) -> None:
        read_request(conn)
        conn.sendall(b"HTTP/1.1 abc def\r\n\r\n")

    def disconnect(conn: socket.socket) -> None:
        read_request(conn)

    def too_long(conn: socket.socket) -> None:
        read_request(conn)
        conn.sendall(b"HTTP/1.1 500 Bad\r\nx: " + b"x" * 100_000 + b"\r\n\r\n")

    def output(url: str, **settings: Any) -> str:
        url = url.replace("://", f"://me:{SECRET}@") + f"?token={SECRET}"
        fault = fault_of(url, timeout=1, **settings)
        assert isinstance(fault, Undelivered)
        assert "POST http" in exception_text(fault)
        return f"{describe(fault)} {exception_text(fault)}"

    for conversation in (refuse, disconnect, too_long):
        with raw_server(conversation) as url:
            assert SECRET not in output(url)
    assert SECRET not in output("http://127.0.0.1:1/events")
    assert SECRET not in output("http://nowhere.invalid/events")
    assert SECRET not in output("https://127.0.0.1:1/events")


def test_a_sink_that_is_closed_meanwhile_rejects_nothing(webhook: Webhook) -> None:
    webhook.answers = lambda headers, body: Answer(204, after=0.05)

    async def deliver(sink: Http) -> None:
        running = asyncio.create_task(
            sink.deliver(transaction(*(make_event(each) for each in range(9))))
        )
        await asyncio.sleep(0.12)
        await sink.close()
        with pytest.raises(Undelivered):
            await running
        with pytest.raises(Undelivered):
            await sink.deliver(transaction(make_event(1)))

    using(webhook.url, deliver)


def test_a_delivery_that_is_cancelled_leaves_nothing_broken(webhook: Webhook) -> None:
    webhook.answers = lambda headers, body: Answer(
        200, after=0.3 if b'"amount": 0}' in body else 0, body=body[:20]
    )

    async def deliver(sink: Http) -> None:
        for after in (0.0, 0.001, 0.01, 0.1):
            task = asyncio.create_task(sink.deliver(transaction(make_event(0))))
            await asyncio.sleep(after)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await sink.deliver(transaction(*(make_event(each) for each in range(1, 6))))

    using(webhook.url, deliver, concurrency=1)
    amounts = [json.loads(request.body)["data"]["amount"] for request in webhook.accepted]
    assert [amount for amount in amounts if amount] == list(range(1, 6)) * 4


# The way there.


def test_proxies_of_the_environment_are_used(
    webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deliver(sink: Http) -> None:
        await sink.deliver(transaction(make_event(1)))

    proxy = webhook.url.removesuffix("/events").replace("://", "://me:pass@")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        with monkeypatch.context() as environment:
            environment.setenv(name, proxy)
            using("http://shop.example/events?a=1", deliver)
            (request,) = webhook.requests
            assert request.path == "http://shop.example/events?a=1"
            assert request.headers["host"] == "shop.example"
            pair = base64.b64encode(b"me:pass").decode()
            assert request.headers["proxy-authorization"] == f"Basic {pair}"
            environment.setenv("NO_PROXY", "example,127.0.0.1")
            using(webhook.url, deliver)
            assert webhook.requests[1].path == "/events"
            webhook.requests.clear()


def test_a_proxy_that_is_not_http_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://me:hunter2@127.0.0.1:1")
    with pytest.raises(ConfigurationError, match="names a proxy") as found:
        Http("hook", HttpHandler(type="http", url="http://shop.example"))
    assert SECRET not in str(found.value)


def test_an_endpoint_behind_tls(tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    server.verify_mode = ssl.CERT_REQUIRED
    authority.configure_trust(server)
    known, other, mine = (str(tmp_path / name) for name in ("ca.pem", "other.pem", "mine.pem"))
    authority.cert_pem.write_to_path(known)
    stranger.cert_pem.write_to_path(other)
    authority.issue_cert("relay.example").private_key_and_cert_chain_pem.write_to_path(mine)

    async def deliver(sink: Http) -> None:
        await sink.deliver(transaction(make_event(1), make_event(2)))

    with Webhook(tls=server) as webhook:
        fault = fault_of(webhook.url, tls={"ca_file": other, "cert_file": mine})
        assert isinstance(fault, Undelivered)
        assert "certificate verify failed" in exception_text(fault)
        assert "ClientConnectorCertificateError: self-signed" in describe(fault)
        fault = fault_of(webhook.url, tls={"ca_file": known})
        assert isinstance(fault, Undelivered)
        assert "not permitted" not in describe(fault)
        assert webhook.requests == []
        using(webhook.url, deliver, tls={"ca_file": known, "cert_file": mine})
        using(webhook.url, deliver, tls={"verify": False, "cert_file": mine})
        assert len(webhook.requests) == 4
