"""What was dead when a Spark sink came to it is left out of its batches, and nothing else is.

Report: Altinity/clickhouse-sink-connector#140 (after a failover, other transactions have the ids of earlier ones).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relay.config.settings import Settings
from relay.spark.session import Session
from relay.spark.sink_worker import SparkWorker
from relay.store.positions.spark_batches import OpenBatch
from tests.outbox import APPEND, Outbox, event, host, relaying, wait_until


@pytest.fixture
def unrouted(outbox: Outbox) -> Outbox:
    """An outbox whose first event has no route and is dead, and whose second one is applied."""
    outbox.publish(host(1), event(1, "stock.moved"))
    outbox.publish(host(1), event(2))
    with relaying(
        outbox.settings(routes=[{"match": {"event_type": "order.*"}, "handlers": ["projection"]}])
    ):
        outbox.wait_handled()
        wait_until(lambda: outbox.column("select status from relay.dead_letter_queue") == ["dead"])
    return outbox


def lake(outbox: Outbox, path: Path) -> Settings:
    """The same with a route for every event, and a sink that begins at the beginning."""
    handlers: dict[str, Any] = {
        "projection": {"type": "sql", "statement": APPEND},
        "lake": {"type": "spark", "path": str(path), "every": 0.001, "start": "beginning"},
    }
    return outbox.settings(handlers=handlers, routes=[{"handlers": list(handlers)}])


def begun(outbox: Outbox, path: Path) -> OpenBatch:
    """The sink's first batch, which no Spark writes."""
    settings = lake(outbox, path)
    worker = SparkWorker("lake", settings, Session(settings.spark))
    wait_until(worker._claim.take)
    found: list[OpenBatch] = []

    def has_begun() -> bool:
        batch = worker._store_due_batch(worker._load())
        found.extend([] if batch is None else [batch])
        return bool(found)

    wait_until(has_begun)
    worker._disconnect()
    return found[0]


def xid_of(outbox: Outbox, amount: int) -> int:
    return int(
        outbox.value(
            "select c_xid::text::bigint from outbox_message_t where payload->>'amount' = %s::text",
            (amount,),
        )
    )


def test_an_event_that_is_dead_is_left_out(unrouted: Outbox, tmp_path: Path) -> None:
    batch = begun(unrouted, tmp_path)
    assert list(batch.contents.left_out) == [xid_of(unrouted, 1)]


@pytest.mark.parametrize("refused", [(), ("event_id",), ("c_offset",)])
def test_an_event_whose_id_was_refused_is_left_out_too(
    unrouted: Outbox, tmp_path: Path, refused: tuple[str, ...]
) -> None:
    for name in refused:
        unrouted.conn.execute(f"update relay.dead_letter_queue set {name} = null".encode())
    assert list(begun(unrouted, tmp_path).contents.left_out) == [xid_of(unrouted, 1)]


def test_a_dead_letter_of_a_lost_timeline_hides_no_event_with_its_transaction_id(
    unrouted: Outbox, tmp_path: Path
) -> None:
    """It was lost in a failover after it had been dead-lettered, and the new primary gave its xid to another one."""
    unrouted.conn.execute("update relay.dead_letter_queue set xid = %s", (xid_of(unrouted, 2),))
    assert list(begun(unrouted, tmp_path).contents.left_out) == []
