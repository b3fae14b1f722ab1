"""A Delta sink while relay is killed again and again: the table has each committed event once."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired

import deltalake
import pytest

from tests.outbox import Outbox, wait_until
from tests.process import running

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.rare,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("stays_live"),
]

CHANCE = random.Random(7)
KILLS = 2
EVENTS = 20_000
BATCHES = "select coalesce(max(number), 0) from relay.spark_batches"


def test_a_delta_table_has_each_event_once_with_relay_killed(
    outbox: Outbox, tmp_path: Path
) -> None:
    """Killed at any point from before a batch is begun to after the next one is.

    Each life finds events of its own: a fast machine is through with a shared backlog before the last kill.
    """
    path = tmp_path / "lake"
    lake = {
        "type": "spark",
        "format": "delta",
        "path": str(path),
        "partition_by": ["host_bucket"],
        "host_buckets": 2,
        "every": 0.05,
        "max_events": 5_000,
        "start": "beginning",
    }
    file = outbox.config_file(
        tmp_path / "relay.yaml",
        handlers={"lake": lake},
        routes=[{"handlers": ["lake"]}],
        batch={"inline_max_events": 1_000_000_000},
    )
    for _ in range(KILLS):
        before = outbox.value(BATCHES)
        outbox.fill(EVENTS // KILLS // 5, events=5)
        with running(file) as service:
            wait_until(lambda: outbox.value(BATCHES) > before, 120)  # noqa: B023
            with suppress(TimeoutExpired):
                service.process.wait(CHANCE.uniform(0, 1.5))
            assert service.process.poll() is None, service.log.read_text()
            service.kill()
    with running(file) as service:
        wait_until(lambda: deltalake.DeltaTable(path).count() >= EVENTS, 240)
        wait_until(
            lambda: (
                outbox.value("select count(*) from relay.spark_batches where batch is not null")
                == 0
            ),
            60,
        )
        assert service.terminate() == 0
    found = deltalake.DeltaTable(path).to_pyarrow_table(columns=["id"])["id"].to_pylist()
    assert len(found) == EVENTS
    assert sorted(found) == sorted(outbox.column("select id::text from outbox_message_t"))
