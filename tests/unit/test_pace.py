"""How fast a sink may deliver."""

from __future__ import annotations

import pytest

from relay.sinks.destination import RateLimit


class Clock:
    """The clock that a pace looks at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("relay.delivery.dispatch.time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_pace_is_even(clock: Clock) -> None:
    pace = RateLimit(10)
    assert [round(pace.turn(), 3) for _ in range(3)] == [0.0, 0.1, 0.2]
    clock.now += 1
    assert pace.turn() == 0
