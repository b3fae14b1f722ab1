"""A live view of a group for `relay top` and `relay demo`: a thread polls the group, and the caller renders.

Derives rates, and series for sparklines, from the last polls, and formats them as lines for a terminal of any size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from math import ceil
from threading import Event, Thread
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from relay.admin.phrases import duration, moment, printable
from relay.admin.status import SOURCE, TARGET, Status, Watch
from relay.config.settings import Settings
from relay.source.outbox.unread import Backlog
from relay.source.stream.slot import SlotState
from relay.store.positions.sinks import StoredSink

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


_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.:-=+*#"
_NARROW = 70
"""Least number of columns at which sparklines are shown."""
_SPARK = 16
_WORST_PARTITIONS = 5
_REASONS = 3
_LABEL = 12
_OLD_SECONDS = 10.0
"""An older status is marked as such, whatever the interval is."""

GOOD, BAD, WEAK = "green", "bold red", "dim"


@dataclass(frozen=True, slots=True)
class Size:
    """Columns and lines of a terminal, and whether it shows only ASCII."""

    width: int
    height: int
    ascii_only: bool = False


def lines(status: Status, trends: Trends, size: Size) -> list[Text]:
    """Return the lines of a group, at most `size.height`: faults come first, and the last lines are dropped."""
    head = [
        _title(status),
        *_faults(status),
        _source(status),
        _slot(status),
        _rate(trends, size),
    ]
    tail = [
        *_deferred(status),
        *_dead(status),
        *_stopped(status),
        *_engines(status, trends),
        *_partitions(status),
    ]
    # On a small terminal, three lines of readers matter more than the lines after them.
    room = max(3, size.height - len(head) - len(tail))
    shown = [*head, *_readers(status, trends, size, room), *tail][: size.height]
    for line in shown:
        line.no_wrap = True
        line.truncate(size.width, overflow="ellipsis" if not size.ascii_only else "crop")
    return shown


def _title(status: Status) -> Text:
    line = Text.assemble(
        ("relay", "bold"),
        f"  group {_plain(status.group)}  {status.completed.astimezone():%H:%M:%S}",
    )
    age = (datetime.now(UTC) - status.completed).total_seconds()
    if age > _OLD_SECONDS:
        line.append(f"  no answer for {duration(age)}", BAD)
    return line


def _faults(status: Status) -> list[Text]:
    return [
        Text(
            f"{key}: {_plain(why)}{': its values are old' if status.is_known(key) else ''}",
            style=BAD,
        )
        for key, why in status.faults.items()
    ]


def _source(status: Status) -> Text:
    since = f" since {moment(status.source_since)}" if status.source_since else ""
    line = _labelled("source", f"{_mode(status)}{since}")
    if status.source_reason:
        line.append(f": {_plain(status.source_reason)}", "yellow")
    standby = [name for name in status.instances if name != status.active]
    if status.active:
        line.append(f"  active {_plain(status.active)}")
    elif TARGET in status.faults:
        line.append("  active unknown", WEAK)
    else:
        line.append("  no instance is active", BAD)
    if standby:
        line.append(f", {len(standby)} on standby")
    return line


def _mode(status: Status) -> str:
    return status.source_mode if status.is_known(TARGET) else "-"


def _slot(status: Status) -> Text:
    slot = status.slot
    if slot is None and SOURCE in status.faults:
        return _labelled("slot", "unknown", WEAK)
    if slot is None:
        return _labelled("slot", "none", WEAK if status.source_mode == "poll" else BAD)
    line = _labelled("slot", slot.name)
    word, style = _slot_state(slot)
    line.append(f"  {word}", style)
    if slot.wal_status and not slot.lost:
        line.append(
            f" {slot.wal_status}", GOOD if slot.wal_status in ("reserved", "extended") else BAD
        )
    return line.append(
        f"  lag {_bytes(slot.lag_bytes)}  retains {_bytes(slot.retained_bytes)} of WAL"
    )


def _slot_state(slot: SlotState) -> tuple[str, str]:
    if slot.lost:
        return f"lost ({slot.invalidation_reason})", BAD
    if slot.creating:
        return "being created", "yellow"
    return ("active", GOOD) if slot.active else ("inactive", BAD)


def _rate(trends: Trends, size: Size) -> Text:
    rates = trends.rates()
    if rates is None:
        return _labelled("throughput", "-")
    line = _labelled(
        "throughput", f"{rates.events:,.0f} events/s  {rates.transactions:,.0f} transactions/s  "
    )
    if size.width >= _NARROW:
        line.append(sparkline(trends.series(RATE), size.ascii_only), "cyan")
    return line


def _readers(status: Status, trends: Trends, size: Size, room: int) -> list[Text]:
    """Return a line for the target and for each sink, the worst first, at most `room`."""
    by_lag = sorted(status.sinks, key=lambda sink: _severity(sink, status.unread.get(sink.sink)))
    names = ["target", *(_plain(each.sink) for each in by_lag)]
    column = min(24, max(map(len, names)))
    wide = size.width >= _NARROW
    heading = f"{'reader':{column}}  {'state':10}  {'unread':>9}  {'oldest':>7}  {'bytes':>8}"
    shown = [Text(heading + ("  history" if wide else ""), style=WEAK)]
    lag = status.slot.lag_bytes if status.slot else None
    state = "stopped" if any(each.handler not in _names(status) for each in status.braked) else ""
    row = _Row(
        "target",
        state or _mode(status),
        status.unread.get(""),
        lag,
        "",
        trends.series(""),
    )
    shown.append(_reader(row, column, wide, size.ascii_only))
    count = max(1, room - 2 - (len(by_lag) > room - 2))
    for sink in islice(by_lag, count):
        row = _Row(
            _plain(sink.sink),
            sink.state_in(status.instances),
            status.unread.get(sink.sink),
            lag if sink.state == "attached" else None,
            _why(sink),
            trends.series(sink.sink),
        )
        shown.append(_reader(row, column, wide, size.ascii_only))
    if len(by_lag) > count:
        shown.append(Text(f"and {len(by_lag) - count} sinks that lag less", style=WEAK))
    return shown


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    state: str
    backlog: Backlog | None
    lag_bytes: int | None
    why: str
    series: Sequence[float]


def _reader(row: _Row, column: int, wide: bool, ascii_only: bool) -> Text:
    unread, oldest = "-", "-"
    if row.backlog is not None:
        more = ">" if row.backlog.more else ""
        unread = f"{more}{row.backlog.events:,}"
        if row.backlog.oldest_seconds is not None:
            oldest = f"{more}{duration(row.backlog.oldest_seconds)}"
    good = row.state in ("attached", "caught up", "wal") and not row.why
    line = Text(f"{row.name[:column]:{column}}  ")
    line.append(f"{row.state[:10]:10}", GOOD if good else "yellow")
    line.append(f"  {unread:>9}  {oldest:>7}  {_bytes(row.lag_bytes):>8}")
    if wide:
        line.append(f"  {sparkline(row.series, ascii_only):{_SPARK}}", "cyan")
    if row.why:
        line.append(f"  {row.why}", BAD if row.state != "paused" else "yellow")
    return line


def _names(status: Status) -> set[str]:
    return {each.sink for each in status.sinks}


def _severity(sink: StoredSink, backlog: Backlog | None) -> tuple[int, int, str]:
    """Return a key that sorts the worst sink first."""
    return (0 if sink.fault else 1, -(backlog.events if backlog else 0), sink.sink)


def _why(sink: StoredSink) -> str:
    if sink.state == "paused":
        reason = f": {_plain(sink.reason)}" if sink.reason else ""
        return f"by {_plain(sink.paused_by or '?')}{reason}"
    if not sink.fault:
        return ""
    since = f"{_since(sink.fault_since)}: " if sink.fault_since else ""
    return f"{since}{_plain(sink.fault)}"


def _deferred(status: Status) -> list[Text]:
    summary = status.deferred
    if summary is None:
        return [_labelled("deferred", _uncounted(status), WEAK)]
    if not summary.transactions:
        return [_labelled("deferred", "0")]
    line = _labelled(
        "deferred", f"{_transactions(summary.transactions)}, {summary.holding:,} holding", "yellow"
    )
    lines = [line]
    for each in summary.reasons[:_REASONS]:
        whose = f"sink {_plain(each.sink)}: " if each.sink else ""
        cause = f"{_plain(each.handler or '-')}: {_plain(each.reason or '-')}"
        shown = cause if each.kind in ("retry", "holding") else each.kind
        lines.append(
            Text(f"{'':{_LABEL}}{each.transactions:,} since {_since(each.since)}: {whose}{shown}")
        )
    return lines


def _dead(status: Status) -> list[Text]:
    if status.dead is None:
        return [_labelled("dead letters", _uncounted(status), WEAK)]
    if not status.dead:
        return [_labelled("dead letters", "0")]
    most = sorted(status.dead.items(), key=lambda item: -item[1])
    each = ", ".join(
        f"{_plain(sink or handler or 'no handler')} {count:,}"
        for (sink, handler), count in most[:6]
    )
    return [_labelled("dead letters", f"{_transactions(sum(status.dead.values()))}: {each}", BAD)]


def _transactions(count: int) -> str:
    return f"{count:,} {'transaction' if count == 1 else 'transactions'}"


def _uncounted(status: Status) -> str:
    """Return why the target has no number of transactions."""
    return "unknown" if TARGET in status.faults else "not counted: it takes too long"


def _stopped(status: Status) -> list[Text]:
    return [
        _labelled(
            "stopped",
            f"{_plain(each.handler)} {_since(each.braked_at)}, after {each.count}: {_plain(each.fault)}"
            + (f", such as {_plain(each.sample)}" if each.sample else ""),
            BAD,
        )
        for each in status.braked
    ]


def _engines(status: Status, trends: Trends) -> list[Text]:
    if not status.engines:
        return []
    events: dict[str, int] = {}
    for each in status.engines:
        events[each.engine] = events.get(each.engine, 0) + each.events
    shown = []
    for engine, count in sorted(events.items()):
        rates = trends.rates(engine)
        rate = f", {rates.events:,.0f}/s" if rates and rates.events >= 1 else ""
        shown.append(f"{_plain(engine)} {count:,} {'event' if count == 1 else 'events'}{rate}")
    return [_labelled("engines", "; ".join(shown))]


def _partitions(status: Status) -> list[Text]:
    """Return the number of partitions, and those that lag most."""
    if not status.partitions:
        return []
    backlog = status.unread.get("")
    if backlog is None:
        return [_labelled("partitions", f"{len(status.partitions):,}")]
    worst = sorted(backlog.partitions.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{number} ({count:,})" for number, count in worst[:_WORST_PARTITIONS])
    more = f", {len(worst) - _WORST_PARTITIONS:,} more" if len(worst) > _WORST_PARTITIONS else ""
    unread = f"; unread in {shown}{more}" if shown else "; all is read"
    return [_labelled("partitions", f"{len(status.partitions):,}{unread}")]


def sparkline(series: Sequence[float], ascii_only: bool = False) -> str:
    """Return the last values of a series as bars, scaled to the greatest one."""
    last = series[-_SPARK:]
    bars = _ASCII_BARS if ascii_only else _BARS
    most = max(last, default=0)
    if most <= 0:
        return bars[0] * len(last)
    # Rounded up, so that every value above 0 is visible.
    return "".join(bars[ceil(value / most * (len(bars) - 1))] for value in last)


def _labelled(label: str, text: str, style: str = "") -> Text:
    # A space after the column, since a label may fill it.
    return Text.assemble((f"{label:{_LABEL}} ", WEAK), (text, style))


def _plain(text: str) -> str:
    """Return the first line of a text, with control characters escaped."""
    return printable(text.partition("\n")[0])


def _since(moment: datetime) -> str:
    return f"{duration((datetime.now(UTC) - moment).total_seconds())} ago"


def _bytes(count: int | None) -> str:
    """Format a size with a decimal prefix."""
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 10 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


CLOSE_SECONDS = 1.0


class View:
    """A Rich renderable of the last poll of a group. As a context manager it polls every `interval` seconds.

    It has `height` lines at most, by default those of the terminal.
    """

    def __init__(self, settings: Settings, interval: float, height: int | None = None) -> None:
        self._watch = Watch(settings)
        self._interval = interval
        self._height = height
        self._trends = Trends()
        self._status: Status | None = None
        self._closing = Event()
        # A daemon, so that a server that does not answer does not keep the process alive.
        self._thread = Thread(target=self._run, name="view", daemon=True)
        self.refreshed = Event()
        """Set by each poll; the renderer clears it."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._status is None:
            yield Text("querying the databases", style="dim")
            return
        height = self._height or console.size.height
        # Some terminals wrap at the last column.
        size = Size(console.size.width - 1, height, console.options.ascii_only)
        yield Text("\n").join(lines(self._status, self._trends, size))

    def _run(self) -> None:
        try:
            while True:
                status = self._watch.read()
                self._trends.note(status)
                self._status = status
                self.refreshed.set()
                if self._closing.wait(self._interval):
                    return
        finally:
            self._watch.close()
