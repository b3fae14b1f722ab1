"""How long a request waits for the tokens of the HTTP API."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import pytest

from relay.api import callers
from relay.api.callers import ANSWER_SECONDS, Callers
from relay.api.database import ApiDatabase
from relay.faults import TransientFault
from relay.store import api_tokens


@dataclass
class Clock:
    """The time, which passes while somebody waits."""

    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Turns:
    """The lock of those who read, which another request has for some seconds each time."""

    clock: Clock
    seconds: float

    def acquire(self, timeout: float) -> bool:
        self.clock.sleep(min(timeout, self.seconds))
        return timeout >= self.seconds

    def release(self) -> None: ...


class Database:
    """A database, whose sessions are not used."""

    @contextmanager
    def connection(self) -> Iterator[None]:
        yield


@pytest.mark.parametrize("seconds", [2.0, 7.0, 60.0])
def test_a_request_waits_once_for_the_tokens(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """A token that is unknown after they were read is looked for once more, for which nobody takes a turn again."""
    clock = Clock()
    monkeypatch.setattr(callers, "time", clock)
    monkeypatch.setattr(api_tokens, "valid", lambda conn: {})
    tokens: Any = Callers(cast("ApiDatabase", Database()))
    tokens._lock = Turns(clock, seconds)
    began = clock.now
    if seconds < ANSWER_SECONDS:
        assert asyncio.run(tokens.find("wrong")) is None
    else:
        with pytest.raises(TransientFault, match="does not answer"):
            asyncio.run(tokens.find("wrong"))
    assert clock.now - began <= ANSWER_SECONDS
