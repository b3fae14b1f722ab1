"""An HTTP endpoint that answers each POST with one status, and each GET with the number of its events.

It does as little work for a request as possible, because the client is measured. If it hangs, it answers no POST. An
event that is posted to `/events/NAME` is noted as `NAME:` and its aggregate, and counted for each name.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import uvloop

from bench.workers.talk import Arrivals, arguments, say

ANSWER = b"HTTP/1.1 %d Answered\r\n\r\n"
REFUSAL = b"HTTP/1.1 %d Answered\r\ncontent-length: 0\r\n\r\n"
COUNTED = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s"
LENGTH = re.compile(rb"content-length: *([0-9]+)", re.IGNORECASE)
IDENTITY = re.compile(rb'"id": ?"([^"]+)"')
SUBJECT = re.compile(rb'"subject": ?"([^"]+)"')
NAMED = re.compile(rb"POST /events/([^ ]+) ")


class Received:
    """The events of all connections. It notes each event in a file, also one that comes again."""

    def __init__(self, arrivals: str | None) -> None:
        self.identities: set[bytes] = set()
        self._arrivals = Arrivals(arrivals) if arrivals else None

    def add(self, body: bytes, sink: bytes) -> None:
        self.identities.update(sink + identity for identity in IDENTITY.findall(body))
        if self._arrivals:
            self._arrivals.note((sink + subject).decode() for subject in SUBJECT.findall(body))


class Connection(asyncio.Protocol):
    """The consecutive requests of one client."""

    def __init__(self, received: Received, answer: bytes | None, delay: float) -> None:
        """`answer` is the answer to each POST after `delay` seconds; None for none."""
        self._received = received
        self._answer = answer
        self._delay = delay
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
            body = bytes(self._buffer[head + 4 : end])
            named = NAMED.match(self._buffer)
            sink = named[1] + b":" if named else b""
            counts = self._buffer.startswith(b"GET")
            del self._buffer[:end]
            if counts:
                count = b"%d" % len(self._received.identities)
                self._transport.write(COUNTED % (len(count), count))
                continue
            self._received.add(body, sink)
            if self._answer is None:
                continue
            if self._delay:
                asyncio.get_running_loop().call_later(
                    self._delay, self._transport.write, self._answer
                )
            else:
                self._transport.write(self._answer)


async def main() -> None:
    job = arguments()
    received = Received(job.get("arrivals"))
    loop = asyncio.get_running_loop()
    status = job["status"]
    answer = (ANSWER if status == 204 else REFUSAL) % status
    sent = None if job["hangs"] else answer
    server = await loop.create_server(
        lambda: Connection(received, sent, job["delay"]),
        "127.0.0.1",
        job["port"],
        backlog=20_000,
    )
    say("ready")
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
