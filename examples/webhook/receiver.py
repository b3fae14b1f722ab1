"""Takes events from relay: verifies who sent them, and prints each once.

SIGNING_SECRET=… python receiver.py PORT DATABASE
"""

from __future__ import annotations

import base64
import hmac
import os
import sqlite3
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

TOLERANCE_SECONDS = 300
"""Older requests are refused, since somebody may send a recorded one again."""
LONGEST = 1 << 20
"""Larger bodies are refused, in bytes."""


def is_genuine(secret: bytes, identity: str, timestamp: str, signatures: str, body: bytes) -> bool:
    """Whether the body is from the holder of the secret, and new. `signatures` is a list such as `v1,… v1,…`."""
    if not timestamp.isdecimal() or abs(time.time() - int(timestamp)) > TOLERANCE_SECONDS:
        return False
    digest = hmac.digest(secret, f"{identity}.{timestamp}.".encode() + body, "sha256")
    expected = f"v1,{base64.b64encode(digest).decode()}"
    return any(hmac.compare_digest(expected, each) for each in signatures.split())


class Receiver(HTTPServer):
    """Remembers in a database which events it has taken: relay delivers at least once."""

    def __init__(self, port: int, database: str, secret: bytes) -> None:
        super().__init__(("127.0.0.1", port), _Request)
        self.secret = secret
        self._taken = sqlite3.connect(database)
        self._taken.execute("create table if not exists taken (id text primary key)")

    def take(self, identity: str, body: bytes) -> None:
        """Handle an event that was not taken before. What it does and its id are one transaction."""
        with self._taken:
            new = self._taken.execute("insert or ignore into taken values (?)", (identity,))
            if new.rowcount:
                print(body.decode(), flush=True)


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Receiver

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        if length > LONGEST:
            self.close_connection = True
            self._answer(413)
            return
        body = self.rfile.read(length)
        names = ("webhook-id", "webhook-timestamp", "webhook-signature")
        identity, timestamp, signatures = (self.headers.get(name, "") for name in names)
        if not is_genuine(self.server.secret, identity, timestamp, signatures, body):
            self._answer(401)
            return
        self.server.take(identity, body)
        self._answer(204)

    def _answer(self, status: int) -> None:
        self.send_response(status)
        if status != 204:
            self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print events and nothing else."""


if __name__ == "__main__":
    Receiver(int(sys.argv[1]), sys.argv[2], os.environ["SIGNING_SECRET"].encode()).serve_forever()
