"""Publishes the messages of a broker: acknowledged after the commit, and published once however often they come.

The instances of a group share a claim for each intake, so that one works and the events keep the broker's order. The
session that publishes holds it: an instance that has lost it cannot publish either.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import psycopg

from relay.config.dsn import DatabaseAccess
from relay.faults import ConfigurationError, describe
from relay.intake.messages import Fault, IncomingEvents, Invalid, MessageReader, TooMany, derived
from relay.intake.publishing import Accepted, Claimed, Conflict, Publisher, Refused
from relay.runtime.parts import SOON_SECONDS, Condition, Recurring
from relay.store import locks

log = logging.getLogger(__name__)

FETCH_SECONDS = 1.0
"""How long a feed waits for a message before it looks whether relay stops."""
FETCH_MESSAGES = 200
_STANDBY_SECONDS = 2.0
"""How often an instance without the claim asks for it."""
_SHOWN_FAULTS = 3


@dataclass(frozen=True, slots=True)
class Taken:
    """A message that is not acknowledged yet.

    `identity` is what tells it from every other message, the same in each redelivery; empty where the broker has
    nothing of the kind, and its events need ids of their own. `where` names it in a log.
    """

    body: bytes
    identity: tuple[str, ...]
    where: str
    raw: Any


class MessageFeed(Protocol):
    """The messages of one broker. All calls are in one event loop; any exception means that the connection is lost."""

    async def __aenter__(self) -> MessageFeed:
        """Connect. Raises ConfigurationError where there is nothing to take messages from."""

    async def __aexit__(self, *_: object) -> None:
        """Close the connection; what is not acknowledged comes again."""

    async def fetch(self) -> Sequence[Taken]:
        """Return the next messages, in order; none after FETCH_SECONDS without one."""

    async def acknowledge(self, taken: Sequence[Taken]) -> None:
        """Tell the broker that messages are published."""

    async def reject(self, taken: Taken) -> None:
        """Tell the broker that a message will never be published; it goes where the broker puts dead letters."""

    async def extend(self, taken: Sequence[Taken]) -> None:
        """Tell the broker that messages are still being worked on."""

    async def give_back(self, taken: Sequence[Taken]) -> None:
        """Give back the messages that are left, and those that `fetch` has not returned; none is fetched after it."""


class _Poison(Exception):
    """A message cannot be published, and the configuration says to stop at it."""


class BrokerIntake(Recurring):
    """Publishes the messages of a feed. It rejects one that cannot be published, or without `rejects` stops there."""

    def __init__(
        self,
        name: str,
        feed: MessageFeed,
        reader: MessageReader,
        dsn: DatabaseAccess | str,
        group: str,
        rejects: bool,
        count: Callable[[str, int], None],
    ) -> None:
        """`count` gets a result, and how many messages had it."""
        condition = Condition(
            f"intake {name}",
            log,
            f"the messages of the intake {name} cannot be published, and wait",
            f"the messages of the intake {name} are published again",
            SOON_SECONDS,
            longest_pause=10.0,
        )
        super().__init__(condition, ends_at_stop=True, close_seconds=5.0)
        self.name = name
        self._count = count
        self._stands_still = False
        self._feed = feed
        self._reader = reader
        self._rejects = rejects
        self._publisher = Publisher(dsn, locks.intake(group, name))

    def turn(self) -> float:
        """Take messages until relay stops. Raises the faults of the broker and of the database."""
        try:
            self._publisher.claim()
            asyncio.run(self._consume())
        except Claimed:
            self.condition.works()
            return _STANDBY_SECONDS
        except _Poison as error:
            self._stands_still = True
            self.condition.fails(str(error), logging.ERROR, f"the intake {self.name} stands still")
            return self.condition.pause
        return 0.0

    def release(self) -> None:
        """Give the claim up."""
        self._publisher.close()

    async def _consume(self) -> None:
        rest: list[tuple[Taken, IncomingEvents | str]] = []
        async with self._feed as feed:
            try:
                await self._take(feed, rest)
            except Exception:
                # The connection may be the cause.
                with suppress(Exception):
                    await feed.give_back([each for each, _ in rest])
                raise
            await feed.give_back([each for each, _ in rest])

    async def _take(
        self, feed: MessageFeed, rest: list[tuple[Taken, IncomingEvents | str]]
    ) -> None:
        """Take messages until relay stops; `rest` has those that are not answered."""
        while not self.stopping.is_set():
            taken = await feed.fetch()
            if taken:
                rest[:] = await asyncio.to_thread(self._read_all, taken)
                await self._publish(feed, rest)
                self._stands_still &= bool(rest)
            if not self._stands_still:
                self.condition.works()

    def _read_all(self, taken: Sequence[Taken]) -> list[tuple[Taken, IncomingEvents | str]]:
        return [(each, self._read(each)) for each in taken]

    def _read(self, taken: Taken) -> IncomingEvents | str:
        """Return what a message publishes, or why it cannot be published; without a value of it."""
        try:
            return self._reader.read(
                taken.body, id_of=derived(*taken.identity) if taken.identity else _no_id
            )
        except TooMany as error:
            return str(error)
        except Invalid as error:
            return "; ".join(str(each) for each in error.faults[:_SHOWN_FAULTS])

    async def _publish(
        self, feed: MessageFeed, rest: list[tuple[Taken, IncomingEvents | str]]
    ) -> None:
        """Publish messages in order, and answer the broker; what is answered is removed from `rest`.

        Raises _Poison for a message that stops the intake.
        """
        while rest and not self.stopping.is_set():
            first = rest[0][1]
            fault: str | None
            if isinstance(first, str):
                fault = first
            else:
                done, fault = await self._commit(feed, list(_run(rest)), [each for each, _ in rest])
                await feed.acknowledge([each for each, _ in rest[:done]])
                del rest[:done]
            if fault is None:
                continue
            taken = rest[0][0]
            if not self._rejects:
                raise _Poison(f"{taken.where}: {fault}")
            await feed.reject(taken)
            del rest[0]
            self._count("rejected", 1)
            log.warning(
                "a message was rejected",
                extra={"intake": self.name, "at": taken.where, "fault": fault},
            )

    async def _commit(
        self, feed: MessageFeed, run: Sequence[IncomingEvents], pending: Sequence[Taken]
    ) -> tuple[int, str | None]:
        """Publish submissions; returns how many, and the fault of the next one, if it has one of its own.

        Waits while the database is away.
        """
        while not self.stopping.is_set():
            try:
                outcomes = await asyncio.to_thread(self._publisher.publish, run, math.inf)
            except (psycopg.Error, ConfigurationError) as error:
                fault = describe(error)
            else:
                accepted = [each for each in outcomes if isinstance(each, Accepted)]
                repeated = sum(each.is_repeated for each in accepted)
                self._count("repeated", repeated)
                self._count("published", len(accepted) - repeated)
                last = outcomes[-1]
                if isinstance(last, Refused):
                    return len(accepted), f"the database refuses it: {last.fault}"
                if isinstance(last, Conflict):
                    return len(accepted), str(last)
                if accepted:
                    return len(accepted), None
                fault = str(last)
            self.condition.fails(fault)
            await feed.extend(pending)
            await asyncio.to_thread(self.stopping.wait, self.condition.pause)
        return 0, None


def _run(rest: Sequence[tuple[Taken, IncomingEvents | str]]) -> Iterator[IncomingEvents]:
    """Yield the submissions up to the first message that is invalid."""
    for _, each in rest:
        if isinstance(each, str):
            return
        yield each


def _no_id(_: int) -> NoReturn:
    raise Invalid(
        [Fault("$", "has no id, without which a message that comes again would be published again")]
    )
