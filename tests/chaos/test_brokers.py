"""Brokers that are killed while events go to them, and relay beside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.brokers import BROKERS, assert_complete_and_in_order, sending, started
from tests.outbox import Outbox, wait_until
from tests.process import running

pytestmark = [pytest.mark.brokers, pytest.mark.chaos, pytest.mark.slow]

PATIENT = {"wait": 0.2, "max_wait": 0.5, "jitter": 0.05, "defer_after": 60}
"""So that what meets the outage waits in place, and most of it goes the short way."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", BROKERS)
def test_a_hundred_thousand_events_with_the_broker_and_relay_killed_twice(
    outbox: Outbox, kind: str, tmp_path: Path
) -> None:
    with started(BROKERS[kind], tmp_path / "broker") as broker:
        outbox.fill(20_000, events=5, hosts=64)
        file = outbox.config_file(
            tmp_path / "relay.yaml",
            **sending(broker, concurrency=16, retry=PATIENT),
            batch={"inline_max_events": 1_000_000_000, "max_events": 2_000},
        )

        def applied(count: int) -> Callable[[], bool]:
            return lambda: outbox.value("select count(*) from projection") >= count

        for goal in (20_000, 60_000):
            with running(file) as service:
                wait_until(applied(goal), 200)
                broker.kill()
                broker.start()
                wait_until(applied(goal + 15_000), 200)
                service.kill()
        with running(file) as service:
            wait_until(applied(100_000), 300)
            assert service.terminate() == 0
        assert_complete_and_in_order(outbox, broker.events())
