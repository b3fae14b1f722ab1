"""Derives series from the samples that a running relay keeps (`relay.observe.history`), and charts of the last hours.

A template draws a chart as SVG, so that pages need no scripts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

from relay.admin.phrases import duration
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


WIDTH, HEIGHT = 560, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 8, 10, 24
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_ROWS = 12
_TICKS = 4
_BINARY = ((1024.0**4, "TB"), (1024.0**3, "GB"), (1024.0**2, "MB"), (1024.0, "kB"))
_SINGULAR = re.compile(r"s(?=/|$)")
_DECIMAL = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis, and its text."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart as the template draws it: SVG paths for each run of known points and the area below, and both axes.

    `rows` are the times and values of the table beside the chart.
    """

    name: str
    title: str
    description: str
    lines: Sequence[str]
    areas: Sequence[str]
    across: Sequence[Tick]
    upward: Sequence[Tick]
    rows: Sequence[tuple[str, str]]
    last: str


def chart(series: Series) -> Chart | None:
    """Return the chart of a series; None if it has no known point."""
    known = [point for point in series.points if point.value is not None]
    if not known:
        return None
    begin, end = series.points[0].at, max(series.points[-1].at, series.points[0].at + 1.0)
    values = [point.value or 0.0 for point in known]
    top = _ceiling(max(values), series.unit)

    def x(at: float) -> float:
        return _LEFT + (at - begin) / (end - begin) * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - value / top * (HEIGHT - _TOP - _BOTTOM)

    now = series.points[-1].value
    last = "not known" if now is None else amount(now, series.unit)
    runs = [[(x(point.at), y(point.value or 0.0)) for point in run] for run in _runs(series.points)]
    return Chart(
        series.name,
        series.title,
        f"{series.title} from {_time(begin)} to {_time(end)} UTC: last {last}, "
        f"least {amount(min(values), series.unit)}, most {amount(max(values), series.unit)}",
        [_path(run) for run in runs],
        [_path([(run[0][0], y(0)), *run, (run[-1][0], y(0))]) + "Z" for run in runs],
        [Tick(round(x(at), 1), _time(at)) for at in _axis_times(begin, end)],
        [
            Tick(round(y(top * part / 2), 1), _mark(top * part / 2, series.unit))
            for part in range(3)
        ],
        [
            (_time(point.at), amount(point.value, series.unit))
            for point in _thinned(series.points)
            if point.value is not None
        ],
        last,
    )


def amount(value: float | None, unit: str) -> str:
    """Format a value for a person: bytes with binary prefixes, other units with decimal ones."""
    if value is None:
        return "-"
    if unit == "bytes":
        return _scaled(value, _BINARY, "B")
    if unit == "seconds":
        return duration(value)
    number = _scaled(value, _DECIMAL, "")
    if number[-1:].isalpha():
        return f"{number}{unit.removeprefix('events')}"
    return f"{number} {_SINGULAR.sub('', unit, 1) if number == '1' else unit}"


def _mark(value: float, unit: str) -> str:
    """Format a value for an axis; the title of the chart names the unit."""
    if unit in ("bytes", "seconds"):
        return amount(value, unit)
    return _scaled(value, _DECIMAL, "")


def _scaled(value: float, scale: Sequence[tuple[float, str]], smallest: str) -> str:
    for size, prefix in scale:
        if value >= size:
            return f"{_digits(value / size)} {prefix}"
    return f"{_digits(value)} {smallest}".strip()


def _digits(value: float) -> str:
    """Return three digits of a number, and all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _ceiling(value: float, unit: str) -> float:
    """Return a round value at or above the greatest one, as the top of an axis."""
    if value <= 0:
        return 1.0
    base = 1024.0 if unit == "bytes" else 1000.0
    scale = base ** math.floor(math.log(value, base))
    exponent = 10.0 ** math.floor(math.log10(value / scale))
    return next(
        (step * exponent * scale for step in _STEPS if step * exponent * scale >= value),
        10 * exponent * scale,
    )


def _runs(points: Sequence[Point]) -> list[list[Point]]:
    """Return the runs of consecutive known points."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if point.value is not None:
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _path(corners: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{across:.1f} {up:.1f}" for across, up in corners)


def _axis_times(begin: float, end: float) -> list[float]:
    return [begin + (end - begin) * part / _TICKS for part in range(_TICKS + 1)]


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    step = max(1, math.ceil(len(points) / _ROWS))
    return points[::-step][::-1]


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M")
