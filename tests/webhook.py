"""An HTTP endpoint that answers as a test decides."""

from __future__ import annotations

import gzip
import json
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass(frozen=True)
class Request:
    """A request, its time (monotonic clock, seconds), and the status of its answer."""

    headers: dict[str, str]
    body: bytes
    at: float
    status: int
    path: str = ""

    @property
    def event(self) -> dict[str, Any]:
        """The CloudEvent of a structured request."""
        event: dict[str, Any] = json.loads(self.body)
        return event


@dataclass(frozen=True)
class Answer:
    """The answer to a request, sent `after` seconds; status 0 closes the connection instead.

    `drip` is a wait in seconds before each byte of the body. The body is sent `times` times, without its last `short`
    bytes.
    """

    status: int = 204
    headers: tuple[tuple[str, str], ...] = ()
    after: float = 0.0
    body: bytes = b""
    drip: float = 0.0
    times: int = 1
    short: int = 0


Answers = Callable[[dict[str, str], bytes], Answer]


def hanging_until(let_go: threading.Event, status: int = 204) -> Answers:
    """Answers nothing before `let_go`."""

    def answer(_: dict[str, str], __: bytes) -> Answer:
        let_go.wait(60)
        return Answer(status)

    return answer


class _Server(ThreadingHTTPServer):
    request_queue_size = 1_000

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore the errors of clients, which some tests kill."""


class Webhook:
    """An HTTP server on a free port; `answers` returns the answer to headers and a body."""

    def __init__(
        self,
        answers: Answers = lambda headers, body: Answer(),
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.answers = answers
        self.requests: list[Request] = []
        self.connections = 0
        self.sent = 0
        """The bytes of bodies that were sent."""
        self._released = threading.Event()
        self._server = _Server((host, port), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self.port = self._server.server_address[1]
        named = f"[{host}]" if ":" in host else host
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.url = f"{'https' if tls else 'http'}://{named}:{self.port}/events"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def accepted(self) -> list[Request]:
        """The requests that were answered with 2xx."""
        return [request for request in list(self.requests) if 200 <= request.status < 300]

    def ids(self) -> Counter[str]:
        """How often each event was accepted."""
        return Counter(request.event["id"] for request in self.accepted)

    def order(self, host: object) -> list[int]:
        """The c_offsets of a host's events, in the order in which they were first accepted."""
        events = [r.event for r in self.accepted if r.event["hostid"] == str(host)]
        return list(dict.fromkeys(int(event["sequence"]) for event in events))

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        webhook = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                webhook.connections += 1

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                body = self.rfile.read(length)
                if len(body) < length:
                    self.close_connection = True
                    return
                headers = {key.lower(): value for key, value in self.headers.items()}
                if headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                at = time.monotonic()
                answer = webhook.answers(headers, body)
                webhook._released.wait(answer.after)
                webhook.requests.append(Request(headers, body, at, answer.status, self.path))
                if not answer.status:
                    self.close_connection = True
                    return
                with suppress(OSError):
                    self.send_response(answer.status)
                    for key, value in answer.headers:
                        self.send_header(key, value)
                    if answer.status != 204:
                        self.send_header("content-length", str(len(answer.body) * answer.times))
                    self.end_headers()
                    self._send_body(answer)
                    return
                # The client has disconnected.
                self.close_connection = True

            def _send_body(self, answer: Answer) -> None:
                for _ in range(answer.times):
                    if answer.drip:
                        for byte in answer.body:
                            webhook._released.wait(answer.drip)
                            self.wfile.write(bytes([byte]))
                    else:
                        self.wfile.write(answer.body[: len(answer.body) - answer.short])
                    webhook.sent += len(answer.body) - answer.short
                if answer.short:
                    self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler
