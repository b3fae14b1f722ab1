"""How fast a sink may deliver, in all and of a processor."""

from __future__ import annotations

import pytest

from relay.delivery.dispatch import ProcessorShare, RateLimit


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


def test_work_gets_its_share_of_a_processor(clock: Clock) -> None:
    share = ProcessorShare(0.5)
    for _ in range(1_000):
        while (wait := share.wait()) > 0:
            clock.now += wait + 1e-6
        clock.now += 0.001
        share.use(0.001)
    assert pytest.approx((clock.now - 100) / 2, rel=0.02) == 1.0


def test_shares_of_a_share_are_no_more_than_that(clock: Clock) -> None:
    whole = ProcessorShare(0.5)
    parts = [ProcessorShare(0.3, whole) for _ in range(3)]
    used = [0.0, 0.0, 0.0]
    for step in range(3_000):
        waits = [each.wait() for each in parts]
        chosen = step % 3
        if waits[chosen] == 0:
            parts[chosen].use(0.001)
            used[chosen] += 0.001
        clock.now += 0.001
    assert sum(used) == pytest.approx(1.5, rel=0.05)
    assert min(used) > 0.4


def test_who_uses_less_than_its_share_does_not_wait_and_saves_little(clock: Clock) -> None:
    share = ProcessorShare(0.5)
    for _ in range(100):
        clock.now += 0.01
        share.use(0.001)
        assert share.wait() == 0
    clock.now += 0.1
    share.use(0.1)
    assert share.wait() == pytest.approx(0.09)
