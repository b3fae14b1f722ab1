"""Tells who sends a request, by its token, and what the token gives a right to."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from threading import Lock
from typing import Annotated

import psycopg
from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Security
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import Request

from relay.api.database import ApiDatabase
from relay.faults import NotNow, describe
from relay.runtime.parts import SOON_SECONDS, Condition
from relay.store import api_tokens
from relay.store.api_tokens import EVERY, TokenRow
from relay.store.connections import Connection
from relay.web.problems import FAULTS

log = logging.getLogger(__name__)

KNOWN_SECONDS = 3.0
"""How long the tokens are known before they are read again: so long a revoked one may still be accepted."""
_UNKNOWN_SECONDS = 0.25
"""How long it takes until an unknown token is refused: meanwhile they are read again, once for all who wait."""
ANSWER_SECONDS = 8.0
"""How long a request waits for the tokens, such as from a server that has frozen."""
_NO_ANSWER = "the database does not answer"
_FAULT_SECONDS = 1.0
"""How long it is not tried again to read them."""
_STALE_SECONDS = 60.0
"""After how many seconds without an attempt nobody needs the tokens any more, so that a fault does not count."""
_USE_SECONDS = 60.0
"""How often it is noted that a token is in use."""


@dataclass(frozen=True, slots=True)
class TokenCaller:
    """The holder of a token, and what the token gives a right to. `id` is that of the token.

    `hosts` are ids as PostgreSQL prints them, or `*`, `types` are globs. `sender` is a secret of all tokens of a name,
    one after the other.
    """

    id: int
    name: str
    rights: frozenset[str]
    hosts: frozenset[str]
    types: tuple[str, ...]
    expires_at: datetime | None
    sender: str

    @classmethod
    def of(cls, row: TokenRow, sender: str) -> TokenCaller:
        """Return the caller of a token."""
        return cls(
            row.id,
            row.name,
            frozenset(row.rights),
            frozenset(row.hosts),
            tuple(row.types),
            row.expires_at,
            sender,
        )

    @property
    def has_expired(self) -> bool:
        """Whether the token is refused from now on."""
        return self.expires_at is not None and self.expires_at <= datetime.now(UTC)

    def is_for(self, host_id: str | None) -> bool:
        """Whether the token is for the events of a host."""
        return EVERY in self.hosts or host_id in self.hosts

    def may_see_type(self, event_type: str | None) -> bool:
        """Whether the token is for the events of a type."""
        return any(fnmatchcase(event_type or "", each) for each in self.types)

    def may_see(self, host_id: str | None, event_type: str | None) -> bool:
        """Whether the token is for the events of a host that are of a type."""
        return self.is_for(host_id) and self.may_see_type(event_type)


class Callers:
    """The callers by their tokens, which are read from the outbox's database. Safe in several threads.

    All valid tokens are read at once, so that a flood of wrong ones costs no query for each, and no right one is
    refused because of the wrong ones that others of its address have sent.
    """

    def __init__(self, database: ApiDatabase) -> None:
        self._database = database
        self._lock = Lock()
        self._reading = asyncio.Lock()
        self._threads = CapacityLimiter(1)
        self._known: Mapping[bytes, TokenCaller] = {}
        self._read_at: float | None = None
        self._fault: tuple[Exception, float] | None = None
        """Why the tokens could not be read, and when."""
        self._condition = Condition(
            "API",
            log,
            "the API cannot read its tokens, and refuses those who ask",
            "the API reads its tokens again",
            SOON_SECONDS,
        )
        self._used: set[int] = set()
        self._noted: dict[int, float] = {}
        """When it was last noted that a token is in use, by its id."""

    async def find(self, token: str) -> TokenCaller | None:
        """Return the caller of a token, without a query if the token was just read; None for a wrong one.

        Raises ConfigurationError, psycopg.Error, and TransientFault after ANSWER_SECONDS.
        """
        digest = api_tokens.digest(token)
        if self._is_fresh():
            caller = self._used_by(self._known.get(digest))
            if caller is not None:
                return caller
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self._find(digest, _deadline())
        except TimeoutError:
            raise NotNow(_NO_ANSWER) from None

    async def _find(self, digest: bytes, until: float) -> TokenCaller | None:
        asked_at = time.monotonic()
        caller = await self._found(digest, until, self._is_fresh)
        if caller is None:
            # It may have been made since. Those who guess wait, too, and have no thread meanwhile.
            await asyncio.sleep(_UNKNOWN_SECONDS)
            caller = await self._found(digest, until, lambda: (self._read_at or 0.0) > asked_at)
        return self._used_by(caller)

    async def _found(
        self, digest: bytes, until: float, is_fresh: Callable[[], bool]
    ) -> TokenCaller | None:
        """Return the caller of a digest, after reading the tokens again if what is known is not fresh."""
        if not is_fresh():
            # One reads, in a thread of its own, and the others have what it has read.
            async with self._reading:
                if not is_fresh():
                    await to_thread.run_sync(self._read_in_turn, until, limiter=self._threads)
        return self._known.get(digest)

    def _read_in_turn(self, until: float) -> None:
        with self._turn(until):
            self._read()

    def valid(self) -> frozenset[TokenCaller]:
        """Return the callers of all tokens that are valid now. Raises what `find` raises."""
        with self._turn(_deadline()):
            if not self._is_fresh():
                self._read()
            known = self._known
        return frozenset(each for each in known.values() if not each.has_expired)

    @contextmanager
    def _turn(self, until: float) -> Iterator[None]:
        """Be the only one who reads. Raises TransientFault if somebody still does at a time."""
        if not self._lock.acquire(timeout=max(0.0, until - time.monotonic())):
            raise NotNow(_NO_ANSWER)
        try:
            yield
        finally:
            self._lock.release()

    @property
    def is_failing(self) -> bool:
        """Whether those who ask are refused because the tokens cannot be read."""
        fault = self._fault
        if fault is None or self._condition.fault is None:
            return False
        return time.monotonic() - fault[1] < _STALE_SECONDS

    def _used_by(self, caller: TokenCaller | None) -> TokenCaller | None:
        if caller is None or caller.has_expired:
            return None
        self._used.add(caller.id)
        return caller

    def _is_fresh(self) -> bool:
        return self._read_at is not None and time.monotonic() - self._read_at < KNOWN_SECONDS

    def _read(self) -> None:
        now = time.monotonic()
        if self._fault is not None and now - self._fault[1] < _FAULT_SECONDS:
            # Those who wait for their turn do not all wait for the database.
            raise self._fault[0]
        try:
            with self._database.connection() as conn:
                found = api_tokens.valid(conn)
                self._note_use(conn, now)
        except FAULTS as error:
            self._fault = error, time.monotonic()
            self._condition.fails(describe(error))
            raise
        self._condition.works()
        self._known = {digest: TokenCaller.of(*token) for digest, token in found.items()}
        self._read_at = time.monotonic()

    def _note_use(self, conn: Connection, now: float) -> None:
        used, self._used = self._used, set()
        due = [each for each in used if now - self._noted.get(each, -_USE_SECONDS) >= _USE_SECONDS]
        if due:
            # Nothing is noted on a standby.
            with suppress(psycopg.errors.ReadOnlySqlTransaction):
                api_tokens.note_use(conn, due)
            self._noted |= dict.fromkeys(due, now)


def _deadline() -> float:
    """Return until when somebody who begins now waits for the tokens."""
    return time.monotonic() + ANSWER_SECONDS


_bearer = Security(HTTPBearer(auto_error=False, description="A token of `relay token create`."))


# Coroutines, which need no thread for each request.
async def _caller(request: Request, _: Annotated[object, _bearer]) -> TokenCaller:
    """Return the caller, whom the gate has authenticated."""
    caller: TokenCaller = request.state.caller
    return caller


def _with(right: str) -> Callable[[TokenCaller], Awaitable[TokenCaller]]:
    async def require(caller: Annotated[TokenCaller, Depends(_caller)]) -> TokenCaller:
        if right not in caller.rights:
            raise HTTPException(403, f"the token {caller.name} gives no right to {right}")
        return caller

    return require


Reading = Annotated[TokenCaller, Depends(_with("read"))]
"""A caller who may read."""
Publishing = Annotated[TokenCaller, Depends(_with("publish"))]
"""A caller who may publish."""
