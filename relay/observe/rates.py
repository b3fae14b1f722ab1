"""Rates and series for sparklines, from the counts of the last polls of a group."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from relay.observe.watch import Picture

KEPT = 60
"""How many looks are remembered."""
RATE_SECONDS = 12.0
"""Over how long rates are taken: relay stores its counts every five seconds."""
RATE = "events/s"
"""The name of the series of rates; the others have the target (the empty name) or a sink."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What an engine, or all of them, did in a second."""

    events: float
    transactions: float


@dataclass(frozen=True, slots=True)
class _Counted:
    taken: datetime
    events: dict[str, int]
    transactions: dict[str, int]


class Observations:
    """Keeps the counts of the last polls."""

    def __init__(self) -> None:
        self._counted: deque[_Counted] = deque(maxlen=KEPT)
        self._series: dict[str, deque[float]] = {}

    def note(self, picture: Picture) -> None:
        """Add the counts of a poll."""
        events: dict[str, int] = {}
        transactions: dict[str, int] = {}
        for each in picture.engines:
            events[each.engine] = events.get(each.engine, 0) + each.events
            transactions[each.engine] = transactions.get(each.engine, 0) + each.transactions
        if "target.dsn" not in picture.away:
            self._counted.append(_Counted(picture.taken, events, transactions))
        rates = self.rates()
        if rates is not None:
            self._add(RATE, rates.events)
        for name, backlog in picture.unread.items():
            self._add(name, backlog.events)
        for sink in picture.sinks:
            if sink.sink not in picture.unread:
                self._add(sink.sink, 0)

    def series(self, name: str) -> Sequence[float]:
        """The last values of a series, oldest first."""
        return tuple(self._series.get(name, ()))

    def rates(self, engine: str | None = None) -> Rates | None:
        """What an engine, by default all of them, did in a second lately; None before there are two looks."""
        if len(self._counted) < 2:
            return None
        last = self._counted[-1]
        # The latest one that is old enough, so that the counts which are stored now and then weigh alike.
        older = [
            each
            for each in self._counted
            if (last.taken - each.taken).total_seconds() >= RATE_SECONDS
        ]
        first = older[-1] if older else self._counted[0]
        seconds = (last.taken - first.taken).total_seconds()
        if seconds <= 0:
            return None
        return Rates(
            _grown(first.events, last.events, engine) / seconds,
            _grown(first.transactions, last.transactions, engine) / seconds,
        )

    def _add(self, name: str, value: float) -> None:
        self._series.setdefault(name, deque(maxlen=KEPT)).append(value)


def _grown(before: dict[str, int], after: dict[str, int], engine: str | None) -> int:
    """By how much a count has grown; retention may have removed it meanwhile."""
    names = after if engine is None else (engine,)
    return sum(max(0, after.get(name, 0) - before.get(name, 0)) for name in names)
