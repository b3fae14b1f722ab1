"""Random histories of publishers, one step at a time, and what a consumer of the log has to have of them."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any, Literal, Self
from uuid import UUID

import psycopg
from psycopg.types.json import Jsonb

from tests.outbox import Outbox, event, host

Order = Literal["log", "host", "none"]
"""What a consumer keeps in order: everything as the log has it, the events of each host, or nothing."""

_HOSTS = 5
_UNDONE = 1 << 64
"""From here on are the numbers of what is rolled back."""


def id_of(number: int) -> str:
    """The id of the event with a number."""
    return str(UUID(int=number))


def number_of(event_id: object) -> int:
    """The number of the event with an id."""
    return UUID(str(event_id)).int


class History:
    """Transactions of several sessions: which were committed when, and when each inserted last.

    They have savepoints, are rolled back, are prepared, and some stay open for long.
    """

    def __init__(self, outbox: Outbox, seed: int, count: int = 6) -> None:
        self.random = random.Random(seed)
        self._outbox = outbox
        self._sessions = [psycopg.connect(outbox.publisher_dsn) for _ in range(count)]
        self._open: dict[int, list[int]] = {}
        self._prepared: dict[str, list[int]] = {}
        self._clock = 0
        self.committed: dict[int, int] = {}
        self.transactions: list[list[int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._sessions:
            each.close()
        for name in self._prepared:
            self._outbox.publisher.execute(f"rollback prepared '{name}'".encode())

    def steps(self, count: int) -> None:
        """Make so many steps."""
        for _ in range(count):
            self.step()

    def step(self) -> None:
        """Begin, publish, roll a savepoint back, commit, prepare or roll back in a session."""
        self._clock += 1
        if self._prepared and self.random.random() < 0.05:
            self._end_prepared(next(iter(self._prepared)))
            return
        index = self.random.randrange(len(self._sessions))
        conn = self._sessions[index]
        numbers = self._open.setdefault(index, [])
        # So that the blocks below are savepoints.
        conn.execute("select 1")
        # The first session has transactions that stay open for long.
        ends = self.random.random() < (0.01 if index == 0 else 0.5)
        if ends and numbers:
            self._end(index)
            return
        if not numbers and self.random.random() < 0.3:
            # Its id is assigned long before it publishes.
            conn.execute("select pg_current_xact_id()")
            return
        if self.random.random() < 0.3:
            with suppress(ZeroDivisionError), conn.transaction():
                self._publish(conn, _UNDONE + self._clock)
                raise ZeroDivisionError
            return
        with conn.transaction():
            self._publish(conn, self._clock)
        numbers.append(self._clock)

    def end_all(self) -> None:
        """End the transactions that are open."""
        for index in list(self._open):
            self._end(index)
        for name in list(self._prepared):
            self._end_prepared(name)

    def require_read(self, read: list[int], order: Order) -> None:
        """Assert that a consumer has each committed event once and, of what it keeps in order, in order."""
        assert sorted(read) == sorted(self.committed)
        if order == "none":
            return
        place = {number: at for at, number in enumerate(read)}
        last = {number: number for number in read}
        for numbers in filter(None, self.transactions):
            if order == "log":
                # All of a transaction together.
                first = place[numbers[0]]
                assert read[first : first + len(numbers)] == numbers
                last.update(dict.fromkeys(numbers, numbers[-1]))
            for of in range(_HOSTS):
                places = [place[number] for number in numbers if number % _HOSTS == of]
                assert places == sorted(places)
        for kept in (
            [read]
            if order == "log"
            else [[n for n in read if n % _HOSTS == h] for h in range(_HOSTS)]
        ):
            # From the end: whatever was read later was not committed before this one inserted last.
            soonest = float("inf")
            for number in reversed(kept):
                assert soonest > last[number], number
                soonest = min(soonest, self.committed[number])

    def _publish(self, conn: psycopg.Connection[Any], number: int) -> None:
        conn.execute(
            "select relay.publish(%s, null, %s)",
            (host(number % _HOSTS), Jsonb([event(number % 1000, id=id_of(number))])),
        )

    def _end(self, index: int) -> None:
        numbers = self._open.pop(index, [])
        conn = self._sessions[index]
        how = self.random.random()
        if how < 0.15:
            conn.rollback()
        elif how < 0.25 and numbers and not self._prepared:
            name = f"{self._outbox.slot} {self._clock}"
            conn.execute(f"prepare transaction '{name}'".encode())
            self._prepared[name] = numbers
        else:
            conn.commit()
            self._note(numbers)

    def _end_prepared(self, name: str) -> None:
        numbers = self._prepared.pop(name)
        is_kept = self.random.random() < 0.7
        self._outbox.publisher.execute(
            f"{'commit' if is_kept else 'rollback'} prepared '{name}'".encode()
        )
        if is_kept:
            self._note(numbers)

    def _note(self, numbers: list[int]) -> None:
        self._clock += 1
        self.transactions.append(numbers)
        self.committed.update(dict.fromkeys(numbers, self._clock))
