"""Gives each token its own turns at the databases: requests of one do not keep those of others waiting."""

from __future__ import annotations

from asyncio import Semaphore
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from fastapi import Depends, Request
from starlette.exceptions import HTTPException

from relay.api.callers import Reading, TokenCaller

AT_ONCE = 3
"""How many requests and streams of a token read the databases at once: fewer than there are sessions, and readers."""
MOST_REQUESTS = 50
"""How many requests of a token there are at most, with those that wait, beside its streams: half of all."""
RETRY_SECONDS = 1


@dataclass(slots=True)
class _OfToken:
    users: int = 0
    requests: int = 0
    room: Semaphore = field(default_factory=lambda: Semaphore(AT_ONCE))


class Turns:
    """The turns of all tokens that use the databases. Of the event loop."""

    def __init__(self) -> None:
        self._tokens: dict[int, _OfToken] = {}

    @asynccontextmanager
    async def turn(self, caller: TokenCaller) -> AsyncIterator[None]:
        """Wait for a turn of a token; the block has it."""
        own = self._tokens.setdefault(caller.id, _OfToken())
        own.users += 1
        try:
            async with own.room:
                yield
        finally:
            own.users -= 1
            if not own.users:
                del self._tokens[caller.id]

    @asynccontextmanager
    async def request(self, caller: TokenCaller) -> AsyncIterator[None]:
        """Have a turn of a token for a request. Raises HTTPException (429) if too many wait."""
        own = self._tokens.setdefault(caller.id, _OfToken())
        if own.requests >= MOST_REQUESTS:
            raise HTTPException(
                429,
                f"the token {caller.name} has more than {MOST_REQUESTS} requests at once",
                {"retry-after": str(RETRY_SECONDS)},
            )
        own.requests += 1
        try:
            async with self.turn(caller):
                yield
        finally:
            own.requests -= 1


async def _turn(request: Request, caller: Reading) -> AsyncIterator[None]:
    turns: Turns = request.app.state.turns
    async with turns.request(caller):
        yield


IN_TURN = Depends(_turn, scope="function")
"""For a route that reads the databases: it is called when it is the turn of its token."""
