"""An HTTP endpoint that answers each POST with 204, and the count of what it got to each GET.

It does as little for a request as it can, so that the client is what is measured. One that hangs answers no POST.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import uvloop

from bench.workers.talk import Arrivals, arguments, say

TAKEN = b"HTTP/1.1 204 No Content\r\n\r\n"
COUNTED = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s"
LENGTH = re.compile(rb"content-length: *([0-9]+)", re.IGNORECASE)
IDENTITY = re.compile(rb'"id": ?"([^"]+)"')
SUBJECT = re.compile(rb'"subject": ?"([^"]+)"')


class Taken:
    """The events of all connections. With a file it has a line for each that comes, also for one that comes again."""

    def __init__(self, arrivals: str | None) -> None:
        self.identities: set[bytes] = set()
        self._arrivals = Arrivals(arrivals) if arrivals else None

    def take(self, body: bytes) -> None:
        self.identities.update(IDENTITY.findall(body))
        if self._arrivals:
            self._arrivals.note(found.decode() for found in SUBJECT.findall(body))


class Connection(asyncio.Protocol):
    """One client's requests, one after the other."""

    def __init__(self, taken: Taken, hangs: bool) -> None:
        self._taken = taken
        self._hangs = hangs
        self._received = bytearray()
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (head := self._received.find(b"\r\n\r\n")) >= 0:
            found = LENGTH.search(self._received, 0, head)
            end = head + 4 + (int(found[1]) if found else 0)
            if len(self._received) < end:
                return
            line, body = bytes(self._received[:16]), bytes(self._received[head + 4 : end])
            del self._received[:end]
            if line.startswith(b"GET"):
                count = b"%d" % len(self._taken.identities)
                self._transport.write(COUNTED % (len(count), count))
                continue
            self._taken.take(body)
            if not self._hangs:
                self._transport.write(TAKEN)


async def main() -> None:
    job = arguments()
    taken = Taken(job.get("arrivals"))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Connection(taken, job["hangs"]), "127.0.0.1", job["port"], backlog=20_000
    )
    say("ready")
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
