"""Counts and times as commands and the console print them."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from relay.admin.phrases import counted, duration, moment, with_events
from tests.process import ROOT


def test_one_is_singular() -> None:
    assert counted(1, "batch", "batches") == "1 batch"
    assert counted(0, "batch", "batches") == "0 batches"
    assert with_events(1, 1) == "1 transaction with 1 event"
    assert with_events(2, 20) == "2 transactions with 20 events"


def test_commands_print_times_in_one_format() -> None:
    assert moment(datetime(2026, 3, 1, 12, tzinfo=UTC)) == "2026-03-01 12:00:00 UTC"
    assert moment(None) == "-"
    sources = "".join(path.read_text() for path in (ROOT / "relay" / "cli").glob("*.py"))
    assert not re.search(r"%H:%M|\.isoformat\(", sources)


def test_durations_are_short() -> None:
    """Seconds, minutes, hours or days, of which there are two; never negative, whatever a clock says."""
    assert [duration(each) for each in (-1, 0.42, 12, 119, 300, 7200, 200_000)] == [
        *("0.0 s", "0.4 s", "12 s", "119 s", "5 min", "2 h", "2 d"),
    ]
