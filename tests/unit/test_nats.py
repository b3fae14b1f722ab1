"""TLS to NATS: a password and a payload never go out in plain text where the configuration asks for TLS."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from socket import socket
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any

import pytest
import trustme

from relay.config.handlers import NatsHandler
from relay.faults import Undelivered
from relay.sinks.brokers import Message
from relay.sinks.nats import Nats

MESSAGE = Message("shop.paid", None, "1", "s/1/1", "application/json", {}, b'{"card": "4111"}')


class NatsServer(ThreadingTCPServer):
    """Says INFO, starts TLS where it is told to, and confirms what is published. `plain` and `secure` are what came."""

    daemon_threads = True

    def __init__(
        self, info: Mapping[str, bool], tls: ssl.SSLContext | None, first: bool = False
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Conversation)
        self.info = {"headers": True, "max_payload": 1_000_000, "auth_required": True, **info}
        self.tls = tls
        self.first = first
        self.plain = b""
        self.secure = b""

    @property
    def address(self) -> str:
        return f"user:s3cret@127.0.0.1:{self.server_address[1]}"


class _Conversation(BaseRequestHandler):
    server: NatsServer

    def handle(self) -> None:
        conn: socket = self.request
        if not self.server.first:
            self._say_info(conn)
        if self.server.tls is not None:
            try:
                conn = self.server.tls.wrap_socket(conn, server_side=True)
            except OSError:
                return
        if self.server.first:
            self._say_info(conn)
        self._answer(conn)

    def _say_info(self, conn: socket) -> None:
        conn.sendall(f"INFO {json.dumps(self.server.info)}\r\n".encode())

    def _answer(self, conn: socket) -> None:
        acknowledged = b'{"stream": "s", "seq": 1}'
        while data := conn.recv(65536):
            if isinstance(conn, ssl.SSLSocket):
                self.server.secure += data
            else:
                self.server.plain += data
            for _ in range(data.count(b"PING\r\n")):
                conn.sendall(b"PONG\r\n")
            if found := re.search(rb"HPUB \S+ (\S+)", data):
                conn.sendall(b"MSG %b 1 %d\r\n%b\r\n" % (found[1], len(acknowledged), acknowledged))


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def server_tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


@pytest.fixture
def trust(authority: trustme.CA, tmp_path: Path) -> dict[str, str]:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return {"ca_file": str(tmp_path / "ca.pem")}


@contextmanager
def listening(
    info: Mapping[str, bool], tls: ssl.SSLContext | None = None, first: bool = False
) -> Iterator[NatsServer]:
    with NatsServer(info, tls, first) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


def send(url: str, **settings: Any) -> None:
    handler = NatsHandler(type="nats", servers=[url], topic="t", **settings)

    async def run() -> None:
        client = Nats("h", handler)
        try:
            await client.send([MESSAGE])
        finally:
            await client.close()

    asyncio.run(run())


@pytest.mark.parametrize("settings", [{}, {"tls": {}}])
@pytest.mark.parametrize("info", [{}, {"tls_required": False}])
def test_a_server_without_tls_gets_nothing_at_all(
    info: Mapping[str, bool], settings: Mapping[str, Any]
) -> None:
    with listening(info) as server:
        with pytest.raises(Undelivered, match="the server offers no TLS"):
            send(f"tls://{server.address}", **settings)
        assert server.plain == b""


def test_a_section_tls_asks_for_it_whatever_the_address_says() -> None:
    with listening({}) as server:
        with pytest.raises(Undelivered, match="the server offers no TLS"):
            send(f"nats://{server.address}", tls={})
        assert server.plain == b""


@pytest.mark.parametrize("info", [{"tls_required": True}, {"tls_available": True}])
def test_tls_is_used_where_the_server_requires_or_merely_offers_it(
    info: Mapping[str, bool], server_tls: ssl.SSLContext, trust: dict[str, str]
) -> None:
    with listening(info, server_tls) as server:
        send(f"tls://{server.address}", tls=trust)
        assert server.plain == b""
        assert b"s3cret" in server.secure
        assert b"4111" in server.secure


def test_tls_can_begin_before_the_server_speaks(
    server_tls: ssl.SSLContext, trust: dict[str, str]
) -> None:
    with listening({"tls_required": True}, server_tls, first=True) as server:
        send(f"tls://{server.address}", tls=trust, tls_first=True)
        assert b"s3cret" in server.secure


def test_a_certificate_that_is_not_trusted_gets_nothing(server_tls: ssl.SSLContext) -> None:
    with listening({"tls_required": True}, server_tls) as server:
        with pytest.raises(Undelivered, match="SSLCertVerificationError"):
            send(f"tls://{server.address}")
        assert server.plain == server.secure == b""


def test_without_tls_in_the_configuration_nothing_is_encrypted() -> None:
    with listening({}) as server:
        send(f"nats://{server.address}")
        assert b"4111" in server.plain
