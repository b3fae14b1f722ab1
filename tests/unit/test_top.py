"""The lines of `relay top`: what fits on a terminal, and what comes first."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from relay.admin.status import Status
from relay.model.events import Lsn
from relay.observe.top import Size, Trends, lines, sparkline
from relay.source.outbox.unread import Backlog
from relay.source.stream.slot import SlotState
from relay.store.activity import EngineTotals
from relay.store.brakes import BrakedHandler
from relay.store.deferred.selection import DeferredSummary, Reason
from relay.store.positions.offsets import PartitionPosition
from relay.store.positions.sinks import SinkPosition, StoredSink

NOW = datetime.now(UTC)
SLOT = SlotState("s", "pgoutput", "db", True, 1, "reserved", "0/1", 2_500, 31_000_000, None, False)


def sink(name: str, state: str = "attached", fault: str | None = None) -> StoredSink:
    since = NOW - timedelta(minutes=5) if fault else None
    lags = state == "lagging"
    return StoredSink(
        name, state, SinkPosition(None), None, None, None, fault, since, "host:1", lags
    )


def picture(**more: Any) -> Status:
    given = {"source_mode": "wal", "active": "host:1", "instances": ["host:1"], "slot": SLOT}
    read_at = dict.fromkeys(("source.dsn", "target.dsn"), NOW)
    return Status("main", **{**given, "read_at": read_at, "completed": NOW, **more})


def shown(found: Status, width: int = 100, height: int = 40, ascii_only: bool = False) -> list[str]:
    trends = Trends()
    trends.note(found)
    return [line.plain for line in lines(found, trends, Size(width, height, ascii_only))]


def crowded() -> Status:
    partitions = [PartitionPosition(number, 1, Lsn(0), 1, 0, 1) for number in range(1_000)]
    sinks = [sink(f"sink{number}", "lagging") for number in range(50)]
    sinks[33] = sink("broken", "lagging", "HTTP 503")
    unread = {f"sink{number}": Backlog(number) for number in range(50) if number != 33}
    unread[""] = Backlog(9_000, False, 12.0, {number: number for number in range(1, 1_000)})
    return picture(partitions=partitions, sinks=sinks, unread=unread)


def test_what_is_not_known_to_be_read_is_not_said_to_be() -> None:
    """As of an outbox of messages, and while the source is away."""
    partitions = [PartitionPosition(number, 1, Lsn(0), 1, 0, 1) for number in range(8)]
    (line,) = [each for each in shown(picture(partitions=partitions)) if "partitions" in each]
    assert line.split() == ["partitions", "8"]
    (line,) = [
        each
        for each in shown(picture(partitions=partitions, unread={"": Backlog()}))
        if "partitions" in each
    ]
    assert line.endswith("8; all is read")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (200, 60), (20, 3)])
def test_a_thousand_partitions_and_fifty_sinks_fit(width: int, height: int) -> None:
    found = shown(crowded(), width, height)
    assert len(found) <= height
    assert max(map(len, found)) <= width
    assert found[0].startswith("relay  group main")


def test_the_worst_come_first() -> None:
    found = shown(crowded(), 120, 24)
    readers = [line.split()[0] for line in found if "lagging" in line or "down" in line]
    assert readers[:3] == ["broken", "sink49", "sink48"]
    assert any(line.startswith("and") and line.endswith("lag less") for line in found)
    (partitions,) = [line for line in found if line.startswith("partitions")]
    assert "1,000; unread in 999 (999), 998 (998)" in partitions
    assert partitions.endswith("994 more")


def test_everything_that_is_wrong_is_named() -> None:
    waiting = DeferredSummary(7, 1, [Reason("shop", "retry", "shop", "HTTP 503", 7, NOW, NOW, NOW)])
    lost = SlotState("s", "pgoutput", "db", False, None, "lost", "0/1", 1, 1, "wal_removed", False)
    text = "\n".join(
        shown(
            picture(
                source_mode="poll",
                source_reason="the slot is lost",
                active=None,
                slot=lost,
                deferred=waiting,
                dead={("", "orders"): 3, ("shop", "shop"): 9},
                braked=[BrakedHandler("orders", "KeyError", 100, NOW, 0, None, None, None)],
                faults={"source.dsn": "connection refused"},
            ),
            160,
        )
    )
    for part in (
        "source.dsn: connection refused: its values are old",
        "poll: the slot is lost  no instance is active",
        "lost (wal_removed)",
        "7 transactions, 1 holding",
        "sink shop: shop: HTTP 503",
        "12 transactions: shop 9, orders 3",
        "ago, after 100 dead letters in a row: KeyError",
    ):
        assert part in text


def test_what_was_never_read_is_unknown() -> None:
    faults = {"target.dsn": "connection refused", "source.dsn": "connection refused"}
    found = shown(Status("main", "wal", faults=faults, completed=NOW))
    assert found[1:5] == [
        "target.dsn: connection refused",
        "source.dsn: connection refused",
        "source       -  active unknown",
        "slot         unknown",
    ]
    assert "deferred     unknown" in found
    assert "dead letters unknown" in found


def test_what_was_read_before_a_fault_is_shown_as_old() -> None:
    faults = {"target.dsn": "connection refused", "source.dsn": "connection refused"}
    text = "\n".join(shown(picture(faults=faults)))
    assert text.count("connection refused: its values are old") == 2
    assert "active host:1" in text
    assert "slot         s  active reserved" in text


def test_values_cannot_move_the_cursor() -> None:
    found = shown(picture(sinks=[sink("shop", "lagging", "\x1b[2Jgone\nsecond line")]), 120)
    assert any("\\x1b[2Jgone" in line and "second" not in line for line in found)


def test_a_terminal_without_unicode_gets_none() -> None:
    waiting = DeferredSummary(2, 0, [])
    for line in shown(picture(sinks=[sink("a" * 90)], deferred=waiting), 60, 30, ascii_only=True):
        assert line.isascii()


@pytest.mark.parametrize(
    ("series", "bars"),
    [([], ""), ([0, 0], "▁▁"), ([0, 1, 1_000_000], "▁▂█"), ([1, 2, 4], "▃▅█"), (range(99), None)],
)
def test_sparklines(series: Sequence[float], bars: str | None) -> None:
    assert len(sparkline(series)) <= 16
    assert bars is None or sparkline(series) == bars


def test_rates_are_taken_over_several_observations() -> None:
    """relay stores its counts every five seconds, so that two looks would tell nothing, or too much."""
    trends = Trends()
    for second in range(0, 31, 2):
        stored = second // 5 * 5
        engines = [EngineTotals("inline", "small", 1, stored * 100, stored * 10, NOW)]
        taken = NOW + timedelta(seconds=second)
        trends.note(Status("main", "wal", engines=engines, completed=taken))
    rates = trends.rates()
    assert rates is not None
    assert 60 <= rates.events <= 140
    assert rates.events == pytest.approx(10 * rates.transactions)
    assert trends.rates("spark") is not None
    assert trends.rates("spark").events == 0  # type: ignore[union-attr]
