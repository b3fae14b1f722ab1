"""A group as lines for a terminal of any size: what `relay top` shows, and `relay demo` while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from math import ceil

from rich.text import Text

from relay.observe.rates import RATE, Observations
from relay.observe.terminal import printable
from relay.observe.watch import Picture
from relay.source.backlog import Backlog
from relay.source.slot import SlotState
from relay.store.sinks import StoredSink

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.:-=+*#"
_NARROW = 70
"""Columns, below which sparklines are left out."""
_SPARK = 16
_WORST_PARTITIONS = 5
_REASONS = 3
_LABEL = 12
_OLD_SECONDS = 10.0
"""A picture that is older says so, whatever the interval is."""

GOOD, BAD, WEAK = "green", "bold red", "dim"


@dataclass(frozen=True, slots=True)
class Size:
    """Columns and lines of a terminal, and whether it can show more than ASCII."""

    width: int
    height: int
    ascii_only: bool = False


def lines(picture: Picture, observations: Observations, size: Size) -> list[Text]:
    """The group on at most so many lines: what is wrong comes first, what does not fit is left out from below."""
    head = [
        _title(picture),
        *_away(picture),
        _source(picture),
        _slot(picture),
        _rate(observations, size),
    ]
    tail = [
        *_deferred(picture),
        *_dead(picture),
        *_stopped(picture),
        *_engines(picture, observations),
        *_partitions(picture),
    ]
    # Three lines of readers are more than all of what follows them.
    room = max(3, size.height - len(head) - len(tail))
    found = [*head, *_readers(picture, observations, size, room), *tail][: size.height]
    for line in found:
        line.no_wrap = True
        line.truncate(size.width, overflow="ellipsis" if not size.ascii_only else "crop")
    return found


def _title(picture: Picture) -> Text:
    line = Text.assemble(
        ("relay", "bold"),
        f"  group {_plain(picture.group)}  {picture.taken.astimezone():%H:%M:%S}",
    )
    age = (datetime.now(UTC) - picture.taken).total_seconds()
    if age > _OLD_SECONDS:
        line.append(f"  no answer for {_age(age)}", BAD)
    return line


def _away(picture: Picture) -> list[Text]:
    return [
        Text(f"{key}: {_plain(why)}: what is shown of it is old", style=BAD)
        for key, why in picture.away.items()
    ]


def _source(picture: Picture) -> Text:
    since = f" since {picture.since:%Y-%m-%d %H:%M:%S %Z}" if picture.since else ""
    line = _labelled("source", f"{picture.mode or '-'}{since}")
    if picture.reason:
        line.append(f": {_plain(picture.reason)}", "yellow")
    standby = [name for name in picture.instances if name != picture.active]
    if picture.active:
        line.append(f"  active {_plain(picture.active)}")
    else:
        line.append("  nobody is active", BAD)
    if standby:
        line.append(f", {len(standby)} standing by")
    return line


def _slot(picture: Picture) -> Text:
    slot = picture.slot
    if slot is None:
        return _labelled("slot", "none", WEAK if picture.mode == "poll" else BAD)
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
        return "being made", "yellow"
    return ("read", GOOD) if slot.active else ("not read", BAD)


def _rate(observations: Observations, size: Size) -> Text:
    rates = observations.rates()
    if rates is None:
        return _labelled("throughput", "-")
    line = _labelled(
        "throughput", f"{rates.events:,.0f} events/s  {rates.transactions:,.0f} transactions/s  "
    )
    if size.width >= _NARROW:
        line.append(spark(observations.series(RATE), size.ascii_only), "cyan")
    return line


def _readers(picture: Picture, observations: Observations, size: Size, room: int) -> list[Text]:
    """The target and the sinks, the worst first, on so many lines."""
    by_lag = sorted(picture.sinks, key=lambda sink: _severity(sink, picture.unread.get(sink.sink)))
    names = ["target", *(_plain(each.sink) for each in by_lag)]
    column = min(24, max(map(len, names)))
    wide = size.width >= _NARROW
    heading = f"{'reader':{column}}  {'state':10}  {'unread':>9}  {'oldest':>7}  {'bytes':>8}"
    found = [Text(heading + ("  history" if wide else ""), style=WEAK)]
    lag = picture.slot.lag_bytes if picture.slot else None
    state = (
        "stopped" if any(each.handler not in _names(picture) for each in picture.stopped) else ""
    )
    row = _Row(
        "target",
        state or (picture.mode or "-"),
        picture.unread.get(""),
        lag,
        "",
        observations.series(""),
    )
    found.append(_reader(row, column, wide, size.ascii_only))
    shown = max(1, room - 2 - (len(by_lag) > room - 2))
    for sink in islice(by_lag, shown):
        row = _Row(
            _plain(sink.sink),
            sink.state,
            picture.unread.get(sink.sink),
            lag if sink.state == "attached" else None,
            _why(sink),
            observations.series(sink.sink),
        )
        found.append(_reader(row, column, wide, size.ascii_only))
    if len(by_lag) > shown:
        found.append(Text(f"and {len(by_lag) - shown} sinks that lag less", style=WEAK))
    return found


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
            oldest = f"{more}{_age(row.backlog.oldest_seconds)}"
    good = row.state in ("attached", "caught up", "wal") and not row.why
    line = Text(f"{row.name[:column]:{column}}  ")
    line.append(f"{row.state[:10]:10}", GOOD if good else "yellow")
    line.append(f"  {unread:>9}  {oldest:>7}  {_bytes(row.lag_bytes):>8}")
    if wide:
        line.append(f"  {spark(row.series, ascii_only):{_SPARK}}", "cyan")
    if row.why:
        line.append(f"  {row.why}", BAD if row.state != "paused" else "yellow")
    return line


def _names(picture: Picture) -> set[str]:
    return {each.sink for each in picture.sinks}


def _severity(sink: StoredSink, backlog: Backlog | None) -> tuple[int, int, str]:
    """A key by which the worst sink comes first."""
    return (0 if sink.fault else 1, -(backlog.events if backlog else 0), sink.sink)


def _why(sink: StoredSink) -> str:
    if sink.state == "paused":
        reason = f": {_plain(sink.reason)}" if sink.reason else ""
        return f"by {_plain(sink.paused_by or '?')}{reason}"
    if not sink.fault:
        return ""
    since = f"{_since(sink.fault_since)}: " if sink.fault_since else ""
    return f"{since}{_plain(sink.fault)}"


def _deferred(picture: Picture) -> list[Text]:
    summary = picture.deferred
    if summary is None:
        return [_labelled("deferred", "not counted: it takes too long", WEAK)]
    if not summary.transactions:
        return [_labelled("deferred", "0")]
    line = _labelled(
        "deferred", f"{summary.transactions:,} transactions, {summary.holding:,} holding", "yellow"
    )
    found = [line]
    for each in summary.reasons[:_REASONS]:
        whose = f"sink {_plain(each.sink)}: " if each.sink else ""
        cause = f"{_plain(each.handler or '-')}: {_plain(each.reason or '-')}"
        shown = cause if each.kind in ("retry", "holding") else each.kind
        found.append(
            Text(f"{'':{_LABEL}}{each.transactions:,} since {_since(each.since)}: {whose}{shown}")
        )
    return found


def _dead(picture: Picture) -> list[Text]:
    if picture.dead is None:
        return [_labelled("dead letters", "not counted: it takes too long", WEAK)]
    if not picture.dead:
        return [_labelled("dead letters", "0")]
    most = sorted(picture.dead.items(), key=lambda item: -item[1])
    each = ", ".join(
        f"{_plain(sink or handler or 'no handler')} {count:,}"
        for (sink, handler), count in most[:6]
    )
    return [_labelled("dead letters", f"{sum(picture.dead.values()):,} transactions: {each}", BAD)]


def _stopped(picture: Picture) -> list[Text]:
    return [
        _labelled(
            "stopped",
            f"{_plain(each.handler)} {_since(each.braked_at)}, after {each.deaths} dead letters in a row: "
            f"{_plain(each.fault)}",
            BAD,
        )
        for each in picture.stopped
    ]


def _engines(picture: Picture, observations: Observations) -> list[Text]:
    if not picture.engines:
        return []
    events: dict[str, int] = {}
    for each in picture.engines:
        events[each.engine] = events.get(each.engine, 0) + each.events
    shown = []
    for engine, count in sorted(events.items()):
        rates = observations.rates(engine)
        rate = f", {rates.events:,.0f}/s" if rates and rates.events >= 1 else ""
        shown.append(f"{_plain(engine)} {count:,} events{rate}")
    return [_labelled("engines", "; ".join(shown))]


def _partitions(picture: Picture) -> list[Text]:
    """How many partitions there are, and those that lag most."""
    if not picture.partitions:
        return []
    backlog = picture.unread.get("")
    if backlog is None:
        return [_labelled("partitions", f"{len(picture.partitions):,}")]
    worst = sorted(backlog.partitions.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{number} ({count:,})" for number, count in worst[:_WORST_PARTITIONS])
    more = f", {len(worst) - _WORST_PARTITIONS:,} more" if len(worst) > _WORST_PARTITIONS else ""
    what = f"; unread in {shown}{more}" if shown else "; all is read"
    return [_labelled("partitions", f"{len(picture.partitions):,}{what}")]


def spark(series: Sequence[float], ascii_only: bool = False) -> str:
    """The last values of a series as bars, the greatest one as the highest."""
    last = series[-_SPARK:]
    bars = _ASCII_BARS if ascii_only else _BARS
    most = max(last, default=0)
    if most <= 0:
        return bars[0] * len(last)
    # Rounded up: what is not nothing is seen.
    return "".join(bars[ceil(value / most * (len(bars) - 1))] for value in last)


def _labelled(label: str, text: str, style: str = "") -> Text:
    # The gap belongs to the text: a label may fill its column.
    return Text.assemble((f"{label:{_LABEL}} ", WEAK), (text, style))


def _plain(text: str) -> str:
    """The first line of a text, with control characters as escapes."""
    return printable(text.partition("\n")[0])


def _since(moment: datetime) -> str:
    return f"{_age((datetime.now(UTC) - moment).total_seconds())} ago"


def _age(seconds: float) -> str:
    """A duration in two figures or so."""
    seconds = max(0.0, seconds)
    for limit, divisor, unit in ((60, 1, "s"), (3600, 60, "min"), (86_400, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def _bytes(count: int | None) -> str:
    """A size in words."""
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 10 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
