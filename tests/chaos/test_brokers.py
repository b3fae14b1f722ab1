"""Brokers that are killed while events go to them, and relay beside."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.brokers import BROKERS, assert_complete_and_in_order, sending, started
from tests.outbox import Outbox, wait_until
from tests.process import running

pytestmark = [
    pytest.mark.brokers,
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.usefixtures("stays_live"),
]

RETRIED_AT_ONCE = {"wait": 0.2, "max_wait": 0.5, "jitter": 0.05, "defer_after": 60}
"""So that most deliveries in the outage are retried at once, without being deferred."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", BROKERS)
def test_forty_thousand_events_with_the_broker_and_relay_killed_twice(
    outbox: Outbox, kind: str, tmp_path: Path
) -> None:
    with started(BROKERS[kind], tmp_path / "broker") as broker:
        outbox.fill(8_000, events=5, hosts=64)
        file = outbox.config_file(
            tmp_path / "relay.yaml",
            **sending(broker, concurrency=16, retry=RETRIED_AT_ONCE),
            batch={"inline_max_events": 1_000_000_000, "max_events": 2_000},
        )

        def arrived(count: int) -> None:
            wait_until(lambda: broker.count() >= count, 200, every=0.3)

        for goal in (8_000, 24_000):
            with running(file) as service:
                arrived(goal)
                broker.kill()
                broker.start()
                arrived(goal + 6_000)
                service.kill()
        with running(file) as service:
            outbox.wait_handled(300)
            outbox.wait_delivered("broker", 300)
            assert service.terminate() == 0
        assert_complete_and_in_order(outbox, broker.events())
