"""A sink that keeps what is delivered, and replaces a configured one in tests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from relay.config.handlers import BrokerHandler, DeliveryHandler
from relay.config.settings import Route
from relay.faults import Rejected, Undelivered
from relay.model.events import Event, Transaction
from relay.pipeline.routing import RouteRules
from relay.sinks import ATTEMPT
from relay.sinks.brokers import Message, Publishing


@dataclass(frozen=True, slots=True)
class MemoryAttempt:
    """An attempt to deliver a transaction to a `MemorySink`.

    `keys` are the ordering keys. `messages` are what a broker would have got; a sink that is none has no messages.
    `error` is what the sink has raised, None where the transaction was delivered.
    """

    handler: str
    transaction: Transaction
    keys: Collection[str]
    messages: Sequence[Message]
    error: Exception | None

    @property
    def number(self) -> int:
        """1 for the first attempt, and one more after each that failed and counted."""
        return self.transaction.attempt


class MemorySink:
    """Keeps the transactions that are delivered, and fails as it is told to.

    It replaces a sink of the configuration in `relay.testing.run`. Where that is a broker's, it has the messages
    that the broker would get.
    """

    def __init__(self) -> None:
        self.name = "memory"
        self.attempts: list[MemoryAttempt] = []
        """All attempts, in order."""
        self._rules: list[_Rule] = []
        self._publishing: Publishing | None = None
        self._messages: list[Message] = []

    @property
    def events(self) -> list[Event]:
        """The events that were delivered, in order."""
        return [event for each in self._delivered for event in each.transaction.events]

    @property
    def messages(self) -> list[Message]:
        """The messages of the events that were delivered, in order, where the sink replaces that of a broker."""
        return [message for each in self._delivered for message in each.messages]

    @property
    def _delivered(self) -> list[MemoryAttempt]:
        return [each for each in self.attempts if each.error is None]

    def refuse(self, match: Mapping[str, Any] | None = None, times: int | None = None) -> None:
        """Refuse transactions for ever, as for a dead letter: raise `relay.sinks.Rejected`.

        `match` says which, as that of a route does: those with an event that it matches; all without it. After `times`
        attempts they are accepted. Raises ValueError for a name that is no field.
        """
        self.answer(lambda: Rejected("refused by the test"), match, times)

    def fail(self, match: Mapping[str, Any] | None = None, times: int | None = None) -> None:
        """Fail as in an outage: raise `relay.sinks.Undelivered`; `match` and `times` are as for `refuse`."""
        self.answer(lambda: Undelivered("failed by the test"), match, times)

    def limit(
        self, after: float, match: Mapping[str, Any] | None = None, times: int | None = None
    ) -> None:
        """Fail, and ask for a pause of `after` seconds, as a limit of requests does."""
        self.answer(lambda: Undelivered("limited by the test", after=after), match, times)

    def answer(
        self,
        error: Callable[[], Exception],
        match: Mapping[str, Any] | None = None,
        times: int | None = None,
    ) -> None:
        """Raise what `error` returns; `match` and `times` are as for `refuse`. What was said later comes first."""
        if not callable(error):
            raise ValueError(
                f"error is a {type(error).__name__}: give a function that returns the exception"
            )
        self._rules.insert(0, _Rule(error, _matching(match or {}), times))

    def accept(self) -> None:
        """Accept everything again."""
        self._rules.clear()

    def replace(self, name: str, settings: DeliveryHandler) -> None:
        """Replace the sink of a handler: what is delivered from now on is for it."""
        self.name = name
        self._publishing = None
        if isinstance(settings, BrokerHandler):
            key = getattr(settings, "key", None)
            self._publishing = Publishing(name, settings, _Collecting(self._messages), key)

    # As a sink

    def resume(self, series: str) -> None:
        """Prepare for deliveries of `series`."""
        if self._publishing is not None:
            self._publishing.resume(series)

    async def deliver(self, transaction: Transaction) -> None:
        """Keep a transaction, or raise what was said."""
        error: Exception | None = None
        self._messages.clear()
        try:
            if self._publishing is not None:
                await self._publishing.deliver(transaction)
            self._answer(transaction)
        except Exception as raised:
            error = raised
            raise
        finally:
            keys = ATTEMPT.get().keys
            self.attempts.append(
                MemoryAttempt(self.name, transaction, keys, tuple(self._messages), error)
            )

    async def close(self) -> None:
        """Do nothing: it can be used again."""

    def _answer(self, transaction: Transaction) -> None:
        for rule in self._rules:
            if rule.times != 0 and any(map(rule.matches, transaction.events)):
                if rule.times is not None:
                    rule.times -= 1
                raise rule.error()


@dataclass(slots=True)
class _Rule:
    """What a sink answers, to which events, and how often still; None: for ever."""

    error: Callable[[], Exception]
    matches: Callable[[Event], object]
    times: int | None


class _Collecting:
    """Collects messages in place of a broker. It never waits, so that no other delivery comes between."""

    def __init__(self, messages: list[Message]) -> None:
        self._messages = messages

    async def send(self, messages: Sequence[Message]) -> None:
        """Collect messages."""
        self._messages.extend(messages)

    async def close(self) -> None:
        """Do nothing."""


def _matching(match: Mapping[str, Any]) -> Callable[[Event], object]:
    """What says whether an event matches, as a route does. Raises ValueError."""
    if not isinstance(match, Mapping):
        raise ValueError(
            f"match is a {type(match).__name__}, and no mapping such as {{'event_type': 'order.*'}}"
        )
    try:
        route = Route(match=dict(match), handlers=["memory"])
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise ValueError(str(fault["msg"]).removeprefix("Value error, ")) from None
    return RouteRules([route]).handlers
