"""relay is killed while Spark has two batches: nothing is lost, nothing comes twice, and each host's order holds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos.test_faults import progress
from tests.outbox import Outbox, event, host, wait_until
from tests.process import running

pytestmark = [pytest.mark.chaos, pytest.mark.rare, pytest.mark.usefixtures("stays_live")]

CHANCE = random.Random(16)


@pytest.mark.timeout(300)
def test_killed_with_two_batches_in_flight(outbox: Outbox, tmp_path: Path) -> None:
    outbox.fill(4_000, events=5, hosts=64)
    for number in range(20):
        outbox.publish(host(number % 5), event(1), event(-1))
    outbox.fill(4_000, events=5, hosts=64)
    outbox.watch_positions()
    config = outbox.config_file(
        tmp_path / "relay.yaml",
        batch={"inline_max_events": 0, "max_events": 1_000},
        spark={"master": "local[2]"},
    )
    with running(config) as service:
        goal = CHANCE.randrange(2_000, 24_000)
        wait_until(lambda: progress(outbox) >= goal, 120)
        service.kill()
    with running(config) as service:
        outbox.wait_handled(200)
        assert service.terminate() == 0
    outbox.assert_exact()
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 40
    assert outbox.positions_moved_back() == 0
