"""Spark Connect: the same batches through a server that this process reaches only by its address."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyarrow.dataset
import pyspark
import pytest

from relay.config import Spark
from relay.embedded import free_port
from relay.spark.java import java_home
from relay.spark.session import Session
from tests.outbox import Outbox, wait_until
from tests.process import ROOT, running

pytestmark = pytest.mark.rare


@pytest.fixture
def connect_server(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    events = tmp_path / "events"
    events.mkdir()
    home = Path(pyspark.__file__).parent
    environment = {
        **os.environ,
        "JAVA_HOME": str(java_home()),
        "SPARK_HOME": str(home),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": str(ROOT),
    }
    with (tmp_path / "connect.log").open("wb") as log:
        process = subprocess.Popen(
            [
                str(home / "bin" / "spark-submit"),
                "--class",
                "org.apache.spark.sql.connect.service.SparkConnectServer",
                "--master",
                "local[2]",
                "--conf",
                f"spark.connect.grpc.binding.port={port}",
                "--conf",
                "spark.connect.grpc.binding.address=127.0.0.1",
                "--conf",
                "spark.ui.enabled=false",
                *("--conf", "spark.eventLog.enabled=true"),
                *("--conf", "spark.eventLog.compress=false"),
                *("--conf", "spark.eventLog.rolling.enabled=false"),
                *("--conf", f"spark.eventLog.dir={events.as_uri()}"),
            ],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_until(lambda: answers(port) or process.poll() is not None, 90)
        assert process.poll() is None, (tmp_path / "connect.log").read_text()
        yield f"sc://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def answers(port: int) -> bool:
    with closing(socket.socket()) as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def test_batches_run_through_spark_connect(
    outbox: Outbox, tmp_path: Path, connect_server: str
) -> None:
    config = outbox.config_file(
        tmp_path / "relay.yaml", batch={"inline_max_events": 0}, spark={"remote": connect_server}
    )
    outbox.fill(400)
    with running(config) as service:
        outbox.wait_drained(120)
        assert service.terminate() == 0
        engines = {line["engine"] for line in service.lines() if line["message"] == "batch"}
    assert engines == {"spark"}
    assert outbox.value("select count(*) from projection") == 2_000
    outbox.assert_exact()
    (log,) = (tmp_path / "events").iterdir()
    assert "relay-batch-1" in log.read_text()


def test_the_outbox_is_read_through_spark_connect(outbox: Outbox, connect_server: str) -> None:
    """In a process of its own: a session of Connect and a classic one do not share a process."""
    outbox.fill(20)
    program = (
        "import sys\n"
        "from pyspark.sql import SparkSession\n"
        "from relay.spark import register\n"
        "spark = SparkSession.builder.remote(sys.argv[1]).getOrCreate()\n"
        "register(spark)\n"
        "events = spark.read.format('outbox').option('dsn', sys.argv[2]).load()\n"
        "print(events.select('id').distinct().count())\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, connect_server, outbox.dsn],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )
    assert found.stdout.strip() == "100", found.stderr


def test_a_sink_is_written_through_spark_connect(
    outbox: Outbox, tmp_path: Path, connect_server: str
) -> None:
    sink = {"type": "spark", "every": 0.2, "partition_by": ["kind"]}
    handlers = {
        "lake": {
            **sink,
            "path": str(tmp_path / "lake"),
            "sql": "select id, event_type as kind from events",
        },
        "names": {**sink, "path": str(tmp_path / "names"), "partition_by": ["date"]},
    }
    config = outbox.config_file(
        tmp_path / "relay.yaml",
        handlers=handlers,
        routes=[{"handlers": ["lake", "names"]}],
        spark={"remote": connect_server},
    )
    outbox.fill(400)
    with running(config) as service:
        for name in handlers:
            outbox.wait_delivered(name, 120)
        assert service.terminate() == 0
    ids = sorted(outbox.column("select id::text from outbox_message_t"))
    for name in handlers:
        found = pyarrow.dataset.dataset(tmp_path / name, format="parquet", partitioning="hive")
        assert sorted(found.to_table()["id"].to_pylist()) == ids


def test_a_bad_master_is_said_and_does_not_hold_up_small_batches(
    outbox: Outbox, tmp_path: Path
) -> None:
    config = outbox.config_file(
        tmp_path / "relay.yaml",
        batch={"inline_max_events": 5_000},
        spark={"master": "nonsense", "eager": True},
    )
    outbox.fill(10)
    with running(config) as service:
        outbox.wait_drained(60)
        service.wait_said("the Spark session cannot be built yet", 60)
        assert service.terminate() == 0
    outbox.assert_exact()


def test_a_session_that_cannot_be_had_is_none() -> None:
    session = Session(Spark(master="nonsense"))
    assert session.get() is None
    session.close()
