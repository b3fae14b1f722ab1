"""An HTTP endpoint that answers each POST with 204, and each GET with the number of its events.

It does as little work for a request as possible, because the client is measured. If it hangs, it answers no POST.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import uvloop

from bench.workers.talk import Arrivals, arguments, say

ACCEPTED = b"HTTP/1.1 204 No Content\r\n\r\n"
COUNTED = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s"
LENGTH = re.compile(rb"content-length: *([0-9]+)", re.IGNORECASE)
IDENTITY = re.compile(rb'"id": ?"([^"]+)"')
SUBJECT = re.compile(rb'"subject": ?"([^"]+)"')


class Received:
    """The events of all connections. It notes each event in a file, also one that comes again."""

    def __init__(self, arrivals: str | None) -> None:
        self.identities: set[bytes] = set()
        self._arrivals = Arrivals(arrivals) if arrivals else None

    def add(self, body: bytes) -> None:
        self.identities.update(IDENTITY.findall(body))
        if self._arrivals:
            self._arrivals.note(subject.decode() for subject in SUBJECT.findall(body))


class Connection(asyncio.Protocol):
    """The consecutive requests of one client."""

    def __init__(self, received: Received, hangs: bool) -> None:
        self._received = received
        self._hangs = hangs
        self._buffer = bytearray()
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (head := self._buffer.find(b"\r\n\r\n")) >= 0:
            length = LENGTH.search(self._buffer, 0, head)
            end = head + 4 + (int(length[1]) if length else 0)
            if len(self._buffer) < end:
                return
            line, body = bytes(self._buffer[:16]), bytes(self._buffer[head + 4 : end])
            del self._buffer[:end]
            if line.startswith(b"GET"):
                count = b"%d" % len(self._received.identities)
                self._transport.write(COUNTED % (len(count), count))
                continue
            self._received.add(body)
            if not self._hangs:
                self._transport.write(ACCEPTED)


async def main() -> None:
    job = arguments()
    received = Received(job.get("arrivals"))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Connection(received, job["hangs"]), "127.0.0.1", job["port"], backlog=20_000
    )
    say("ready")
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
