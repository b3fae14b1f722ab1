"""Derives series for charts from the samples that a running relay keeps (`relay.observe.history`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from relay.observe.history import Sample

_POINTS = 180
"""Largest number of points of a series: more would not be visible in a chart."""


@dataclass(frozen=True, slots=True)
class Point:
    """A value at a time in seconds since 1970; None if it was unknown then."""

    at: float
    value: float | None


@dataclass(frozen=True, slots=True)
class Series:
    """Measured values, oldest first. `unit` is bytes, seconds, events/s, transactions/s or a plural."""

    name: str
    title: str
    unit: str
    points: Sequence[Point]


Value = Callable[[Sample], float | None]


def of_group(samples: Sequence[Sample]) -> list[Series]:
    """Return throughput, lag and deferred transactions of the whole group."""
    return [
        Series("throughput", "Throughput", "events/s", _rates(samples, _value("events_total"))),
        Series(
            "lag_seconds", "Lag of the target", "seconds", _most(samples, _value("lag_seconds"))
        ),
        Series("lag_bytes", "Unconfirmed WAL", "bytes", _most(samples, _value("lag_bytes"))),
        Series("deferred", "Deferred", "transactions", _most(samples, _value("deferred"))),
    ]


def of_sink(samples: Sequence[Sample], sink: str) -> list[Series]:
    """Return throughput and lag of one sink."""
    return [
        Series(
            "delivered",
            "Delivered",
            "transactions/s",
            _rates(samples, _sink_value(sink, "delivered_total")),
        ),
        Series("lag_seconds", "Lag", "seconds", _most(samples, _sink_value(sink, "lag_seconds"))),
    ]


def _value(name: str) -> Value:
    return lambda sample: sample.values.get(name)


def _sink_value(sink: str, name: str) -> Value:
    return lambda sample: sample.sinks.get(sink, {}).get(name)


def _most(samples: Sequence[Sample], value: Value) -> list[Point]:
    """Return the greatest value of each interval."""
    return _by_interval([Point(each.at, value(each)) for each in samples], max)


def _rates(samples: Sequence[Sample], value: Value) -> list[Point]:
    """Return the average growth of a count per second in each interval."""
    rates = [
        Point(after.at, _rate(value(before), value(after), after.at - before.at))
        for before, after in pairwise(samples)
    ]
    return _by_interval(rates, lambda values: sum(values) / len(values))


def _rate(before: float | None, after: float | None, seconds: float) -> float | None:
    if before is None or after is None or after < before or seconds <= 0:
        return None
    return (after - before) / seconds


def _by_interval(points: Sequence[Point], joined: Callable[[list[float]], float]) -> list[Point]:
    size = math.ceil(len(points) / _POINTS)
    return [
        Point(points[at].at, _joined(points[at : at + size], joined))
        for at in range(0, len(points), size or 1)
    ]


def _joined(points: Iterable[Point], joined: Callable[[list[float]], float]) -> float | None:
    known = [point.value for point in points if point.value is not None]
    return joined(known) if known else None
