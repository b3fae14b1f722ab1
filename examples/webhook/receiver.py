"""Receives events from relay, verifies their signature, and prints each once.

SIGNING_SECRET=whsec_… python receiver.py PORT DATABASE
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
"""Older requests are refused: a third party may have recorded them."""
MAX_BODY_BYTES = 1 << 20
"""Larger bodies are refused."""


def is_genuine(secret: bytes, identity: str, timestamp: str, signatures: str, body: bytes) -> bool:
    """Whether the holder of the secret has signed the body recently. `signatures` is a list such as `v1,… v1,…`."""
    if not timestamp.isdecimal() or abs(time.time() - int(timestamp)) > TOLERANCE_SECONDS:
        return False
    digest = hmac.digest(secret, f"{identity}.{timestamp}.".encode() + body, "sha256")
    expected = f"v1,{base64.b64encode(digest).decode()}"
    return any(hmac.compare_digest(expected, each) for each in signatures.split())


class Receiver(HTTPServer):
    """Stores the ids of the events that it has handled, because relay delivers at least once."""

    def __init__(self, port: int, database: str, secret: bytes) -> None:
        super().__init__(("127.0.0.1", port), _Request)
        self.secret = secret
        self._handled = sqlite3.connect(database)
        self._handled.execute("create table if not exists handled (id text primary key)")

    def handle_event(self, identity: str, body: bytes) -> None:
        """Handle an event, unless it is known. One transaction has the work and the event's id."""
        with self._handled:
            inserted = self._handled.execute(
                "insert or ignore into handled values (?)", (identity,)
            )
            if inserted.rowcount:
                print(body.decode(), flush=True)


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Receiver

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        if length > MAX_BODY_BYTES:
            self.close_connection = True
            self._answer(413)
            return
        body = self.rfile.read(length)
        names = ("webhook-id", "webhook-timestamp", "webhook-signature")
        identity, timestamp, signatures = (self.headers.get(name, "") for name in names)
        if not is_genuine(self.server.secret, identity, timestamp, signatures, body):
            self._answer(401)
            return
        self.server.handle_event(identity, body)
        self._answer(204)

    def _answer(self, status: int) -> None:
        self.send_response(status)
        if status != 204:
            self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the output has events only."""


if __name__ == "__main__":
    secret = base64.b64decode(os.environ["SIGNING_SECRET"].removeprefix("whsec_"))
    Receiver(int(sys.argv[1]), sys.argv[2], secret).serve_forever()
