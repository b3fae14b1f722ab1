"""A NATS server with one JetStream stream of all subjects, in a thread: what a test needs of its limits and its memory.

Source: NATS documentation, "Client Protocol"; nats-server, `server/parser.go` and `server/client.go`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Lock, Thread
from typing import NamedTuple

_CONTROL_LINE = 4_096
"""The server's default `max_control_line`, in bytes; INFO does not announce it."""


class Stored(NamedTuple):
    """A message of the stream."""

    subject: str
    headers: dict[str, str]
    body: bytes


class JetStream(ThreadingTCPServer):
    """Stores what is published, once for each `Nats-Msg-Id`, and closes connections as nats-server does."""

    daemon_threads = True

    def __init__(self, max_payload: int = 1_048_576) -> None:
        super().__init__(("127.0.0.1", 0), _Conversation)
        self.max_payload = max_payload
        self.stored: list[Stored] = []
        self.duplicates = 0
        self.connections = 0
        self.errors: list[str] = []
        """The errors with which it has closed a connection."""
        self.refuses: dict[str, str] = {}
        """The answer to a subject, in place of an acknowledgement."""
        self.clients: list[BufferedIOBase] = []
        self.interrupts = b""
        """What another subscriber of every subject answers before the stream does."""
        self._ids: set[str] = set()
        self._lock = Lock()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.server_address[1]}"

    def announce(self, max_payload: int) -> None:
        """Change the limit, and tell the clients."""
        self.max_payload = max_payload
        for each in self.clients:
            each.write(self.info)

    @property
    def info(self) -> bytes:
        """The line that opens a conversation."""
        info = {"headers": True, "max_payload": self.max_payload}
        return f"INFO {json.dumps(info)}\r\n".encode()

    def purge(self) -> None:
        """Remove all messages; like the server, keep the ids of the window."""
        with self._lock:
            self.stored.clear()

    def store(self, message: Stored) -> bytes:
        """Store a message unless its id is known; returns the acknowledgement."""
        if message.subject in self.refuses:
            return self.refuses[message.subject].encode()
        identity = message.headers.get("Nats-Msg-Id", "")
        with self._lock:
            if identity and identity in self._ids:
                self.duplicates += 1
                return b'{"stream": "s", "seq": 1, "duplicate": true}'
            self._ids.add(identity)
            self.stored.append(message)
            return json.dumps({"stream": "s", "seq": len(self.stored)}).encode()


class _Conversation(StreamRequestHandler):
    server: JetStream

    def handle(self) -> None:
        self.server.connections += 1
        self.server.clients.append(self.wfile)
        self.wfile.write(self.server.info)
        try:
            while line := self.rfile.readline():
                if not self._answer(line):
                    return
        except OSError:
            return

    def _answer(self, line: bytes) -> bool:
        """Answer one line of the protocol; False to close the connection."""
        if len(line) - 2 > _CONTROL_LINE:
            return self._fail("maximum control line exceeded")
        verb, *words = line.split()
        if verb == b"PING":
            self.wfile.write(b"PONG\r\n")
        elif verb == b"HPUB":
            subject, reply, of_headers, size = words[0], words[1], int(words[2]), int(words[3])
            if size > self.server.max_payload:
                return self._fail("Maximum Payload Violation")
            whole = self.rfile.read(size + 2)
            headers = dict(
                each.split(": ", 1)
                for each in whole[:of_headers].decode().split("\r\n")[1:]
                if each
            )
            stored = Stored(subject.decode(), headers, whole[of_headers:-2])
            if other := self.server.interrupts:
                self.wfile.write(b"MSG %b 1 %d\r\n%b\r\n" % (reply, len(other), other))
            acknowledged = self.server.store(stored)
            if acknowledged.startswith(b"NATS/1.0 503"):
                head = b"NATS/1.0 503\r\n\r\n"
                self.wfile.write(b"HMSG %b 1 %d %d\r\n%b\r\n" % (reply, len(head), len(head), head))
            else:
                self.wfile.write(
                    b"MSG %b 1 %d\r\n%b\r\n" % (reply, len(acknowledged), acknowledged)
                )
        return True

    def _fail(self, error: str) -> bool:
        self.server.errors.append(error)
        self.wfile.write(f"-ERR '{error}'\r\n".encode())
        return False


@contextmanager
def jetstream(max_payload: int = 1_048_576) -> Iterator[JetStream]:
    """A running server."""
    with JetStream(max_payload) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()
