"""Bounds of requests: the size and the time of a body, all bodies together, and wrong tokens of an address."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from threading import Lock

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

BODY_SECONDS = 30.0
"""Longest time until the body of a request is complete."""
BODIES_BYTES = 64 * 1024 * 1024
"""How many bytes of bodies are held at once, over all requests."""
SMALL_BODY_BYTES = 32 * 1024
"""So much of each body does not count, so that few large ones keep out no small one; requests are bounded, too."""

_FAILURES = 10
_WINDOW_SECONDS = 60.0
_ADDRESSES = 1_000


class TooManyFailures(Exception):
    """An address has sent too many wrong tokens; it may try again after so many `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class Failures:
    """Counts wrong tokens by address, and refuses an address with too many. Safe in several threads.

    Each wrong token counts once: a program that still sends a former token must not lock out the other clients of its
    address, which may be that of a reverse proxy.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._counted: OrderedDict[str, tuple[float, set[bytes]]] = OrderedDict()

    def require_few(self, address: str) -> None:
        """Raise TooManyFailures if the address has to wait."""
        with self._lock:
            since, tokens = self._counted.get(address, (0.0, ()))
            count, left = len(tokens), since + _WINDOW_SECONDS - self._clock()
        if count >= _FAILURES and left > 0:
            raise TooManyFailures(left)

    def note(self, address: str, token: str) -> None:
        """Count a wrong token of an address."""
        now = self._clock()
        with self._lock:
            since, tokens = self._counted.pop(address, (now, set()))
            if now - since > _WINDOW_SECONDS:
                since, tokens = now, set()
            tokens.add(sha256(token.encode("utf-8", "replace")).digest())
            self._counted[address] = (since, tokens)
            if len(self._counted) > _ADDRESSES:
                self._counted.popitem(last=False)


def bearer(headers: Mapping[str, str]) -> str | None:
    """Return the token of the header Authorization; None without one."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def is_json(headers: Mapping[str, str]) -> bool:
    """Return whether the header Content-Type says that the body is JSON."""
    kind = headers.get("content-type", "").partition(";")[0]
    return kind.strip().lower() == "application/json"


class Bodies:
    """Bounds the bytes of the bodies that an application holds at once. Of the event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Yield what counts a part of the body of a request; the block holds the body.

        It raises HTTPException (503) if there would be too much.
        """
        read = held = 0

        def count(size: int) -> None:
            nonlocal read, held
            read += size
            more = max(0, read - SMALL_BODY_BYTES) - held
            if self._held + more > self._most:
                raise HTTPException(503, "too many large requests are in flight: try again later")
            held += more
            self._held += more

        try:
            yield count
        finally:
            self._held -= held


def bounded(receive: Receive, limit: int, count: Callable[[int], None]) -> Receive:
    """Wrap `receive` so that it raises HTTPException if the body has more than `limit` bytes or takes too long.

    `count` gets the size of each part, and may refuse it.
    """
    read, complete, deadline = 0, False, time.monotonic() + BODY_SECONDS

    async def receiving() -> Message:
        nonlocal read, complete
        if complete:
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise HTTPException(408, f"the request took longer than {BODY_SECONDS:.0f} s") from None
        size = len(message.get("body", b""))
        read += size
        complete = not message.get("more_body", False)
        if read > limit:
            raise HTTPException(413, f"the request has more than {limit} bytes")
        count(size)
        return message

    return receiving


def where(error: BaseException) -> str:
    """Return the file and the line where an exception was raised."""
    frames = error.__traceback__
    while frames and frames.tb_next:
        frames = frames.tb_next
    return f"{frames.tb_frame.f_code.co_filename}:{frames.tb_lineno}" if frames else "?"
