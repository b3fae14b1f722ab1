"""A Spark sink with `mode: upsert`, from the outbox to the table: its rows are the present state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deltalake
import psycopg
import pytest
from psycopg.types.json import Jsonb
from pyiceberg.catalog import load_catalog

from relay.admin.dead_letters import DeadLetters
from relay.spark.session import Session
from relay.store.connections import connect
from relay.store.dead_letters.selection import DeadLetterSelection
from tests.outbox import Event, Outbox, event, host, relaying, wait_until

KEY = ["aggregate_type", "aggregate_id"]


@pytest.fixture(params=["delta", pytest.param("iceberg", marks=pytest.mark.rare)])
def sink(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {"path": str(tmp_path / "lake")}
    if request.param == "iceberg":
        (tmp_path / "warehouse").mkdir()
        options = {
            "type": "sql",
            "uri": f"sqlite:///{tmp_path}/catalog.db",
            "warehouse": f"file://{tmp_path}/warehouse",
        }
        settings = {"table": "shop.orders", "options": options}
    return {
        "type": "spark",
        "format": request.param,
        "every": 0.1,
        "start": "beginning",
        "mode": "upsert",
        "key": KEY,
        "deletes": "event_type = 'order.deleted'",
        **settings,
    }


def config(sink: dict[str, Any], event_types: str = "*") -> dict[str, Any]:
    return {
        "handlers": {"lake": sink},
        "routes": [{"match": {"event_type": event_types}, "handlers": ["lake"]}],
    }


def order(number: int, amount: int, event_type: str = "order.changed") -> Event:
    return event(amount, event_type, aggregate_id=str(number))


def rows(sink: dict[str, Any]) -> list[dict[str, Any]]:
    if sink["format"] == "delta":
        found = deltalake.DeltaTable(sink["path"]).to_pyarrow_table()
    else:
        found = load_catalog("relay", **sink["options"]).load_table("shop.orders").scan().to_arrow()
    listed: list[dict[str, Any]] = found.to_pylist()
    return listed


def state(sink: dict[str, Any]) -> dict[str, str]:
    found = rows(sink)
    assert len({row["aggregate_id"] for row in found}) == len(found)
    return {row["aggregate_id"]: row["payload"] for row in found if not row["relay_deleted"]}


def amount(number: int) -> str:
    return f'{{"amount": {number}}}'


def test_a_table_of_the_present_state(
    outbox: Outbox, spark_session: Session, sink: dict[str, Any]
) -> None:
    with relaying(outbox.settings("inline", **config(sink)), spark_session):
        outbox.publish(host(1), order(1, 1), order(2, 1), order(1, 2), order(3, 1))
        outbox.wait_delivered("lake", 120)
        assert state(sink) == {"1": amount(2), "2": amount(1), "3": amount(1)}
        with psycopg.connect(outbox.publisher_dsn) as slow:
            # It has the lower c_offset, and commits last.
            slow.execute(
                "select relay.publish(%s, %s, %s)", (host(2), host(999), Jsonb([order(2, 7)]))
            )
            outbox.publish(host(1), order(2, 5), order(3, 0, "order.deleted"))
            outbox.wait_delivered("lake", 120)
            assert state(sink) == {"1": amount(2), "2": amount(5)}
        outbox.wait_delivered("lake", 120)
        assert state(sink) == {"1": amount(2), "2": amount(7)}
    (deleted,) = (row for row in rows(sink) if row["relay_deleted"])
    assert (deleted["aggregate_id"], deleted["payload"], deleted["id"]) == ("3", None, None)


def test_a_replay_of_an_old_dead_letter_changes_nothing_newer(
    outbox: Outbox, spark_session: Session, sink: dict[str, Any]
) -> None:
    outbox.publish(host(1), order(1, 1, "stock.moved"))
    outbox.publish(host(1), order(2, 1, "stock.moved"))
    outbox.publish(host(1), order(4, 1, "stock.moved"))
    with relaying(outbox.settings("inline", **config(sink, "order.*")), spark_session):
        outbox.publish(host(1), order(1, 5), order(2, 6, "order.deleted"))
        wait_until(lambda: outbox.value("select count(*) from relay.dead_letter_queue") == 3, 120)
        outbox.wait_delivered("lake", 120)
    assert state(sink) == {"1": amount(5)}
    with relaying(outbox.settings("inline", **config(sink)), spark_session):
        with connect(outbox.relay_dsn) as conn:
            dead_letters = DeadLetters(outbox.settings(**config(sink)), conn)
            dead_letters.replay(dead_letters.find(DeadLetterSelection()), None)
        statuses = "select distinct status from relay.dead_letter_queue"
        wait_until(lambda: outbox.column(statuses) == ["replayed"], 120)
        outbox.wait_delivered("lake", 120)
    assert state(sink) == {"1": amount(5), "4": amount(1)}


def test_what_cannot_be_told_apart_is_refused(
    outbox: Outbox, spark_session: Session, sink: dict[str, Any]
) -> None:
    for query, why in (
        (
            "select aggregate_id, c_offset, xid from events",
            "upsert needs the column aggregate_type",
        ),
        (
            "select aggregate_type, aggregate_id, xid from events",
            "upsert needs the column c_offset",
        ),
        ("select * except (event_type) from events", "handlers.lake.deletes: "),
    ):
        wrong = config({**sink, "sql": query})
        with relaying(outbox.settings("inline", **wrong), spark_session):
            outbox.publish(host(1), order(1, 1))
            wait_until(lambda: why in str(outbox.value("select max(fault) from relay.sinks")), 120)  # noqa: B023
