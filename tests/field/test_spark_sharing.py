"""Spark sinks and the pipeline share one Spark session: none stops another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import DataFrame

from relay.spark.session import Session
from relay.spark.sink import SparkWorker
from relay.spark.writers import BatchId
from tests.outbox import Outbox, event, host

HERE = "tests.field.test_spark_sharing"

reached = threading.Event()
opened = threading.Event()
written: dict[str, int] = {}


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    reached.clear()
    opened.clear()
    written.clear()
    yield
    opened.set()


def slow(frame: DataFrame, batch: BatchId) -> None:
    """A sink's callable, whose destination hangs."""
    reached.set()
    assert opened.wait(60)
    # A later batch, of the other sink's events, has none for this one.
    written["slow"] = written.get("slow", 0) + frame.count()
    written["view"] = written.get("view", 0) + frame.sparkSession.table("events").count()


def quick(frame: DataFrame, batch: BatchId) -> None:
    """A sink's callable."""
    written["quick"] = written.get("quick", 0) + frame.count()


def sinks(*names: str, **more: Any) -> dict[str, Any]:
    handlers = {
        name: {
            "type": "spark",
            "every": 0.001,
            "start": "beginning",
            "callable": f"{HERE}:{name}",
            **more,
        }
        for name in names
    }
    return {
        "handlers": handlers,
        "routes": [
            {"match": {"event_type": f"order.{name}"}, "handlers": [name]} for name in names
        ],
    }


def test_a_slow_sink_with_a_query_stops_no_other(outbox: Outbox, spark_session: Session) -> None:
    """Each has a view `events` of its own.

    starlake-ai/starflow#1785, pyspark-ai/pyspark-ai#75, apache/iceberg#11094.
    """
    settings = outbox.settings(**sinks("slow", "quick", sql="select id from events"))
    outbox.publish(host(1), event(1, "order.slow"), transaction_id=host(1))
    workers = [SparkWorker(name, settings) for name in settings.spark_handlers]
    try:
        workers[0].start(spark_session)
        assert reached.wait(60)
        for number in (2, 3):
            outbox.publish(host(number), event(1, "order.quick"), transaction_id=host(number))
        workers[1].start(spark_session)
        outbox.wait_delivered("quick")
        assert written == {"quick": 2}
        opened.set()
        outbox.wait_delivered("slow")
    finally:
        opened.set()
        for worker in workers:
            worker.close(30)
    # Between its batch and this, the other sink has made its view.
    assert (written["slow"], written["view"]) == (1, 1)
