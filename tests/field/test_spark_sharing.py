"""Spark sinks and the pipeline share one Spark session: none stops another."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from relay.spark import engine
from relay.spark.engine import JobLimits
from relay.spark.session import Session
from relay.spark.sink_worker import SparkWorker
from relay.spark.writers import BatchId
from tests.outbox import Outbox, event, host, relaying, wait_until

HERE = "tests.field.test_spark_sharing"

reached = threading.Event()
opened = threading.Event()
written: dict[str, int] = {}


@pytest.fixture(autouse=True)
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file for which the tasks of `takes_every_slot` wait."""
    path = tmp_path / "gate"
    monkeypatch.setenv("RELAY_TEST_GATE", str(path))
    reached.clear()
    opened.clear()
    written.clear()
    yield path
    opened.set()
    path.touch()


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
    workers = [SparkWorker(name, settings, spark_session) for name in settings.spark_handlers]
    try:
        workers[0].start()
        assert reached.wait(60)
        for number in (2, 3):
            outbox.publish(host(number), event(1, "order.quick"), transaction_id=host(number))
        workers[1].start()
        outbox.wait_delivered("quick")
        assert written == {"quick": 2}
        opened.set()
        outbox.wait_delivered("slow")
    finally:
        opened.set()
        for worker in workers:
            worker.stop()
            worker.join(30)
    # Between its batch and this, the other sink has made its view.
    assert (written["slow"], written["view"]) == (1, 1)


def takes_every_slot(frame: DataFrame, batch: BatchId) -> None:
    """A sink's callable whose tasks wait for the file that the environment's `RELAY_TEST_GATE` names."""
    gate = str(Path(os.environ["RELAY_TEST_GATE"]))

    def wait(rows: Any) -> None:
        deadline = time.monotonic() + 60
        while not Path(gate).exists() and time.monotonic() < deadline:
            time.sleep(0.05)

    frame.sparkSession.range(0, 2, 1, 2).foreachPartition(wait)


@pytest.mark.rare
def test_the_pipeline_goes_on_while_a_slow_sink_has_every_slot(
    outbox: Outbox, spark_session: Session, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """apache/spark#27862, apache/spark#12951: no share of a fair scheduler ends a task that runs."""
    monkeypatch.setattr(engine, "LIMITS", JobLimits(poll=0.2, starved=1.0))
    config = sinks("takes_every_slot")
    spark = spark_session.get()
    assert spark is not None
    projection = outbox.config()["handlers"]
    config["handlers"] |= projection
    config["routes"] = [{"handlers": list(config["handlers"])}]
    outbox.publish(host(1), event(1))
    with relaying(outbox.settings("spark", **config), spark_session):
        # A task of the pipeline, for the first event, may have one of the slots before.
        wait_until(lambda: sinks_tasks(spark) == 2)
        for number in range(3):
            outbox.publish(host(number), event(1))
        outbox.wait_handled(45)
        wait_until(lambda: "no Spark slot free" in reasons(outbox), 20)
        assert sinks_tasks(spark) == 2
        gate.touch()
        outbox.wait_handled()
        outbox.wait_delivered("takes_every_slot")

        def goes_to_spark() -> bool:
            """Each event goes to the sink, too, whose tasks may have the slots for a moment."""
            outbox.publish(host(9), event(9))
            return "large" in reasons(outbox)

        wait_until(goes_to_spark, 30, 1.0)
        outbox.wait_handled()
    outbox.assert_exact()


def running_tasks(spark: SparkSession) -> int:
    return sum(engine._running_by_pool(spark).values())


def sinks_tasks(spark: SparkSession) -> int:
    running = engine._running_by_pool(spark)
    return sum(tasks for pool, tasks in running.items() if pool != engine.POOL)


def reasons(outbox: Outbox) -> set[str]:
    return set(outbox.column("select reason from relay.engines"))


def test_a_job_with_many_tasks_does_not_go_before_the_pipeline(
    spark_session: Session, outbox: Outbox
) -> None:
    """apache/spark#20881: jobs of one pool are in FIFO order, also with the fair scheduler."""
    spark = spark_session.get()
    assert spark is not None

    def sleep(rows: Any) -> None:
        time.sleep(0.2)

    def runs_long() -> None:
        with suppress(Exception):
            spark.range(0, 60, 1, 60).foreachPartition(sleep)

    thread = threading.Thread(target=runs_long, name="long job")
    thread.start()
    try:
        wait_until(lambda: running_tasks(spark) == 2)
        outbox.publish(host(1), event(1))
        outbox.drain(outbox.settings("spark"), spark_session)
        assert thread.is_alive()
        assert reasons(outbox) == {"large"}
    finally:
        spark.sparkContext.cancelAllJobs()
        thread.join(30)
