"""Serves /metrics, /livez, /readyz and /healthz. Groups of a process with the same address share its server."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from threading import BoundedSemaphore, Lock, Thread, Timer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from prometheus_client.exposition import choose_encoder

from relay import __version__
from relay.config.settings import Address
from relay.faults import ConfigurationError
from relay.observe.liveness import Health, Level
from relay.observe.metrics import Metrics, Site
from relay.runtime import forks

log = logging.getLogger(__name__)

CLIENT_SECONDS = 5.0
"""Longest pause of a client between two packets of its request, or of the response."""
ANSWER_SECONDS = 10.0
"""Longest time of a whole request, so that slow clients cannot keep a health check out."""
MOST_CLIENTS = 16
"""Largest number of concurrent requests; with a further one, the oldest that has not sent its head is ended."""
_GIVE_WAY_SECONDS = 1.0
"""How long the further one waits for that."""

Check = Callable[[], Health]
TEXT = "text/plain; charset=utf-8"


class HttpListener:
    """The server of one address, in daemon threads."""

    def __init__(self, address: Address) -> None:
        """Raises ConfigurationError if relay cannot listen at the address."""
        self._site = Site(__version__)
        self._checks: list[Check] = []
        self._users = 0
        self._address = address
        try:
            self._server = _server(self, address)
        except OSError as error:
            raise ConfigurationError(
                f"observe.listen: cannot listen on {address}: {error.strerror}: choose another "
                "address or port"
            ) from None
        self.port = int(self._server.server_address[1])
        thread = Thread(target=self._server.serve_forever, name="observe http", daemon=True)
        thread.start()
        log.info("metrics and health", extra={"listen": str(address._replace(port=self.port))})

    def add(self, metrics: Metrics, check: Check) -> None:
        """Serve the metrics and the health of a group."""
        self._site.add(metrics)
        self._checks.append(check)

    def remove(self, metrics: Metrics, check: Check) -> None:
        """Stop serving a group."""
        self._site.remove(metrics)
        self._checks.remove(check)

    def close(self) -> None:
        """Remove a user; without users the server ends."""
        with _lock:
            self._users -= 1
            if self._users:
                return
            _listeners.pop(self._address, None)
        # In a thread, since it takes up to half a second.
        Thread(target=self._server.shutdown, daemon=True).start()
        self._server.socket.close()

    def add_user(self) -> HttpListener:
        """Add a user, and return the server."""
        self._users += 1
        return self

    def answer(self, target: str, accept: str | None) -> tuple[HTTPStatus, str, bytes]:
        """Return status, content type and body for a path with its query, from memory, without waiting."""
        path, query = urlsplit(target).path, parse_qs(urlsplit(target).query)
        if path == "/metrics":
            encode, kind = choose_encoder(accept or "")
            return HTTPStatus.OK, kind, encode(self._site.registry)
        if path not in ("/livez", "/readyz", "/healthz"):
            text = "there are /metrics, /livez, /readyz and /healthz\n"
            return HTTPStatus.NOT_FOUND, TEXT, text.encode()
        healths = [check() for check in tuple(self._checks)]
        live = all(each.live for each in healths)
        ready = bool(healths) and all(each.ready for each in healths)
        good = live if path == "/livez" else live and ready
        status = HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE
        if query.get("format") == ["json"] or "application/json" in (accept or ""):
            return status, "application/json", _as_json(live, ready, healths)
        return status, TEXT, _as_text(path, good, healths).encode()


_listeners: dict[Address, HttpListener] = {}
_lock = Lock()


def listen(address: Address) -> HttpListener:
    """Return the server of an address; the caller closes it once for each call. Port 0 opens a new one on a free port.

    Raises ConfigurationError if relay cannot listen at the address.
    """
    with _lock:
        listener = _listeners.get(address) or HttpListener(address)
        if address.port:
            _listeners[address] = listener
        return listener.add_user()


def _server(listener: HttpListener, address: Address) -> ThreadingHTTPServer:
    (family, *_, resolved), *_ = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )

    class Server(_BoundedServer):
        address_family = family

    class Requests(_Requests):
        answers = listener

    return Server(resolved[:2], Requests)


class _BoundedServer(ThreadingHTTPServer):
    """A server with a thread for each request, and MOST_CLIENTS of them at most."""

    daemon_threads = True
    request_queue_size = 16

    def __init__(self, *arguments: Any) -> None:
        self._free = BoundedSemaphore(MOST_CLIENTS)
        # In the order in which they came: those that have not sent their head, and those that are answered.
        self._waiting: dict[socket.socket, None] = {}
        self._answered: dict[socket.socket, None] = {}
        self._clients_lock = Lock()
        super().__init__(*arguments)

    def server_bind(self) -> None:
        # As the base class does, but without resolving the host's name, which may take long.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        forks.keep(self.socket)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            with self._clients_lock:
                oldest = next(chain(self._waiting, self._answered), None)
            if oldest is not None:
                _end(oldest)
            if not self._free.acquire(timeout=_GIVE_WAY_SECONDS):
                self.shutdown_request(request)
                return
        with self._clients_lock:
            self._waiting[request] = None
        super().process_request(request, client_address)

    def note_head(self, request: socket.socket) -> None:
        """Note that a client has sent the head of its request: those that have not give way first."""
        with self._clients_lock:
            self._waiting.pop(request, None)
            self._answered[request] = None

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        timeout = Timer(ANSWER_SECONDS, _end, (request,))
        timeout.daemon = True
        timeout.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            timeout.cancel()
            with self._clients_lock:
                self._waiting.pop(request, None)
                self._answered.pop(request, None)
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request to observe.listen failed", exc_info=True)


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Requests(BaseHTTPRequestHandler):
    """Answers GET and HEAD; other methods are refused."""

    answers: HttpListener
    timeout = CLIENT_SECONDS
    server_version = "relay"
    sys_version = ""

    def parse_request(self) -> bool:
        """Read the head."""
        is_whole = super().parse_request()
        if is_whole and isinstance(self.server, _BoundedServer):
            self.server.note_head(self.connection)
        return is_whole

    def do_GET(self) -> None:
        self._send(with_body=True)

    def do_HEAD(self) -> None:
        self._send(with_body=False)

    def _send(self, with_body: bool) -> None:
        status, kind, text = self.answers.answer(self.path, self.headers.get("Accept"))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if with_body:
            self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


_SHOWN = {
    "/livez": (Level.HANGS, Level.NOT_READY),
    "/readyz": (Level.HANGS, Level.NOT_READY, Level.NOTE),
}


def _as_text(path: str, good: bool, healths: Sequence[Health]) -> str:
    word = {"/livez": "live", "/readyz": "ready", "/healthz": "healthy"}[path]
    lines = [word if good else f"not {word}"]
    if not healths:
        lines.append("relay is starting: it waits for the databases")
    for health in healths:
        shown = health.states
        if path != "/healthz":
            shown = tuple(each for each in shown if each.level in _SHOWN[path])
        lines += [f"{health.group}: {each.part}: {each.level}: {each.text}" for each in shown]
    return "\n".join([*lines, ""])


def _as_json(live: bool, ready: bool, healths: Sequence[Health]) -> bytes:
    groups = {
        each.group: {
            "live": each.live,
            "ready": each.ready,
            "states": [
                {"part": state.part, "level": state.level, "text": state.text}
                for state in each.states
            ],
        }
        for each in healths
    }
    return json.dumps({"live": live, "ready": ready, "groups": groups}, indent=2).encode() + b"\n"
