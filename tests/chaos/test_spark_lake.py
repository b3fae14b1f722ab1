"""Spark sinks while relay is killed again and again: each committed event once, or the present state of each key."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import deltalake
import pytest
from pyiceberg.catalog import load_catalog

from tests.outbox import Outbox, event, host, wait_until
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
KEYS = 40
BATCHES = "select coalesce(max(number), 0) from relay.spark_batches"
UNCOMMITTED = "select count(*) from relay.spark_batches where batch is not null"
PRESENT = """
    select aggregate_id, (payload->>'amount')::int
      from (select distinct on (aggregate_id) * from outbox_message_t order by aggregate_id, c_offset desc) newest
     where event_type <> 'order.deleted'
"""


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
            lambda: outbox.value(UNCOMMITTED) == 0,
            60,
        )
        assert service.terminate() == 0
    found = deltalake.DeltaTable(path).to_pyarrow_table(columns=["id"])["id"].to_pylist()
    assert len(found) == EVENTS
    assert sorted(found) == sorted(outbox.column("select id::text from outbox_message_t"))


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_table_has_the_present_state_with_relay_killed(
    outbox: Outbox, tmp_path: Path, kind: str
) -> None:
    """Killed from just after a batch is begun on; a part of the keys is deleted, and some of these come again."""
    place: dict[str, Any] = {"path": str(tmp_path / "lake")}
    if kind == "iceberg":
        (tmp_path / "warehouse").mkdir()
        options = {
            "type": "sql",
            "uri": f"sqlite:///{tmp_path}/catalog.db",
            "warehouse": f"file://{tmp_path}/warehouse",
        }
        place = {"table": "shop.orders", "options": options}
    lake = {
        "type": "spark",
        "format": kind,
        "mode": "upsert",
        "key": ["aggregate_type", "aggregate_id"],
        "deletes": "event_type = 'order.deleted'",
        "every": 0.05,
        "max_events": 100,
        "start": "beginning",
        **place,
    }
    file = outbox.config_file(
        tmp_path / "relay.yaml",
        handlers={"lake": lake},
        routes=[{"handlers": ["lake"]}],
        batch={"inline_max_events": 1_000_000_000},
    )
    for _ in range(KILLS):
        before = outbox.value(BATCHES)
        _publish(outbox)
        with running(file) as service:
            wait_until(
                lambda: outbox.value(BATCHES) > before or service.process.poll() is not None,  # noqa: B023
                120,
            )
            with suppress(TimeoutExpired):
                service.process.wait(CHANCE.uniform(0, 1.5))
            assert service.process.poll() is None, service.log.read_text()
            service.kill()
    _publish(outbox)
    with running(file) as service:
        # The sink may have no row yet.
        wait_until(lambda: outbox.value("select count(*) from relay.sinks") == 1, 120)
        outbox.wait_delivered("lake", 120)
        wait_until(lambda: outbox.value(UNCOMMITTED) == 0, 60)
        assert service.terminate() == 0
    if kind == "delta":
        rows = deltalake.DeltaTable(lake["path"]).to_pyarrow_table().to_pylist()
    else:
        rows = (
            load_catalog("relay", **lake["options"])
            .load_table(lake["table"])
            .scan()
            .to_arrow()
            .to_pylist()
        )
    assert len({row["aggregate_id"] for row in rows}) == len(rows) == KEYS
    found = {
        row["aggregate_id"]: json.loads(row["payload"])["amount"]
        for row in rows
        if not row["relay_deleted"]
    }
    assert found == dict(outbox.conn.execute(PRESENT).fetchall())


def _publish(outbox: Outbox) -> None:
    """Changes of all keys, in two hundred commits, so that a life has more than one batch."""
    for number in range(200):
        changes = [
            event(
                CHANCE.randrange(1_000),
                CHANCE.choice(["order.changed", "order.changed", "order.deleted"]),
                aggregate_id=str((number * 2 + part) % KEYS),
            )
            for part in range(2)
        ]
        outbox.publish(host(number % 5), *changes)
