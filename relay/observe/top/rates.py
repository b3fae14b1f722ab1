"""Derives rates, and series for sparklines, from the counts of the last polls of a group."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from relay.admin.status import TARGET, Status

KEPT = 60
"""How many polls are kept."""
RATE_SECONDS = 12.0
"""The time over which rates are averaged; relay stores its counts every five seconds."""
RATE = "events/s"
"""The name of the series of rates; the others are named after a sink, or '' for the target."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Events and transactions per second, of one engine or of all."""

    events: float
    transactions: float


@dataclass(frozen=True, slots=True)
class _Counts:
    at: datetime
    events: dict[str, int]
    transactions: dict[str, int]


class Trends:
    """The counts and series of the last polls of a group."""

    def __init__(self) -> None:
        self._counts: deque[_Counts] = deque(maxlen=KEPT)
        self._series: dict[str, deque[float]] = {}

    def note(self, status: Status) -> None:
        """Add the counts of a poll."""
        events: dict[str, int] = {}
        transactions: dict[str, int] = {}
        for each in status.engines:
            events[each.engine] = events.get(each.engine, 0) + each.events
            transactions[each.engine] = transactions.get(each.engine, 0) + each.transactions
        if TARGET not in status.faults:
            self._counts.append(_Counts(status.completed, events, transactions))
        rates = self.rates()
        if rates is not None:
            self._add(RATE, rates.events)
        for name, backlog in status.unread.items():
            self._add(name, backlog.events)
        for sink in status.sinks:
            if sink.sink not in status.unread:
                self._add(sink.sink, 0)

    def series(self, name: str) -> Sequence[float]:
        """Return the last values of a series, oldest first."""
        return tuple(self._series.get(name, ()))

    def rates(self, engine: str | None = None) -> Rates | None:
        """Return the current rates of an engine, by default of all; None until there are two polls."""
        if len(self._counts) < 2:
            return None
        last = self._counts[-1]
        # Over several intervals at which relay stores its counts: shorter ones would make the rate jump.
        older = [
            each for each in self._counts if (last.at - each.at).total_seconds() >= RATE_SECONDS
        ]
        first = older[-1] if older else self._counts[0]
        seconds = (last.at - first.at).total_seconds()
        if seconds <= 0:
            return None
        return Rates(
            _grown(first.events, last.events, engine) / seconds,
            _grown(first.transactions, last.transactions, engine) / seconds,
        )

    def _add(self, name: str, value: float) -> None:
        self._series.setdefault(name, deque(maxlen=KEPT)).append(value)


def _grown(before: dict[str, int], after: dict[str, int], engine: str | None) -> int:
    """Return the growth of a count; 0 if retention has removed the count."""
    names = after if engine is None else (engine,)
    return sum(max(0, after.get(name, 0) - before.get(name, 0)) for name in names)
