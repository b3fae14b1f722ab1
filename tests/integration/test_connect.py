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

from relay.demo.embedded import free_port
from relay.spark.jvm import java_home
from tests.chaos.test_faults import progress
from tests.outbox import Outbox, wait_until
from tests.process import ROOT, relay, running

pytestmark = [pytest.mark.rare, pytest.mark.timeout(600)]


class ConnectServer:
    """A Spark Connect server on this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self.address = f"sc://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "events").mkdir()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        home = Path(pyspark.__file__).parent
        environment = {
            **os.environ,
            "JAVA_HOME": str(java_home()),
            "SPARK_HOME": str(home),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYTHONPATH": str(ROOT),
        }
        conf = {
            "spark.connect.grpc.binding.port": self._port,
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.rolling.enabled": "false",
            "spark.eventLog.dir": (self._folder / "events").as_uri(),
        }
        with (self._folder / "connect.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(home / "bin" / "spark-submit"),
                    *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
                    *("--master", "local[2]"),
                    *(word for key, value in conf.items() for word in ("--conf", f"{key}={value}")),
                ],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        process = self._process
        wait_until(lambda: answers(self._port) or process.poll() is not None, 90)
        assert process.poll() is None, (self._folder / "connect.log").read_text()

    def kill(self) -> None:
        """SIGKILL, with its Python workers."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)
            self._process = None


@pytest.fixture
def connect_server(tmp_path: Path) -> Iterator[ConnectServer]:
    server = ConnectServer(tmp_path)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def answers(port: int) -> bool:
    with closing(socket.socket()) as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def test_batches_run_through_spark_connect(
    outbox: Outbox, tmp_path: Path, connect_server: ConnectServer
) -> None:
    config = outbox.config_file(
        tmp_path / "relay.yaml",
        batch={"inline_max_events": 0},
        spark={"remote": connect_server.address},
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
    assert f"relay-{outbox.settings().group}-batch-1" in log.read_text()


def test_the_outbox_is_read_through_spark_connect(
    outbox: Outbox, connect_server: ConnectServer
) -> None:
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
        [sys.executable, "-c", program, connect_server.address, outbox.jobs_dsn],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )
    assert found.stdout.strip() == "100", found.stderr


def test_a_sink_is_written_through_spark_connect(
    outbox: Outbox, tmp_path: Path, connect_server: ConnectServer
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
        spark={"remote": connect_server.address},
    )
    outbox.fill(400)
    with running(config) as service:
        for name in handlers:
            outbox.wait_delivered(name, 240)
        assert service.terminate() == 0
    ids = sorted(outbox.column("select id::text from outbox_message_t"))
    for name in handlers:
        found = pyarrow.dataset.dataset(tmp_path / name, format="parquet", partitioning="hive")
        assert sorted(found.to_table()["id"].to_pylist()) == ids
        verified = relay("verify", name, "--config", str(config), "--from", "beginning")
        assert f"{name} has the outbox's {len(ids)} events" in verified.stdout, verified.stderr


@pytest.mark.chaos
@pytest.mark.long
def test_the_server_of_spark_connect_is_killed_and_restarted(
    outbox: Outbox, tmp_path: Path, connect_server: ConnectServer
) -> None:
    """Twice, while the target and a Spark sink work through a backlog."""
    lake = tmp_path / "lake"
    config = outbox.config_file(
        tmp_path / "relay.yaml",
        handlers={
            "projection": outbox.config()["handlers"]["projection"],
            "lake": {"type": "spark", "every": 0.2, "path": str(lake), "start": "beginning"},
        },
        routes=[{"handlers": ["projection", "lake"]}],
        batch={"inline_max_events": 0, "max_events": 500},
        spark={"remote": connect_server.address},
    )
    outbox.fill(400)
    with running(config) as service:
        for _ in range(2):
            before = progress(outbox)
            wait_until(lambda: progress(outbox) > before, 240)  # noqa: B023
            connect_server.kill()
            outbox.fill(400)
            connect_server.start()
        outbox.wait_drained(240)
        outbox.wait_delivered("lake", 240)
        assert service.terminate() == 0
        assert service.said("the Spark session died; rebuilding it")
    outbox.assert_exact()
    ids = sorted(outbox.column("select id::text from outbox_message_t"))
    found = pyarrow.dataset.dataset(lake, format="parquet", partitioning="hive")
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


def test_what_java_says_of_a_bad_configuration_is_logged(outbox: Outbox, tmp_path: Path) -> None:
    config = outbox.config_file(
        tmp_path / "relay.yaml",
        batch={"inline_max_events": 5_000},
        spark={"master": "local[1]", "eager": True, "conf": {"spark.scheduler.mode": "WRONG"}},
    )
    with running(config) as service:
        service.wait_said("the Spark session cannot be built yet", 60)
        (first, *_) = (line for line in service.lines() if "cannot be built yet" in line["message"])
        assert service.terminate() == 0
    assert first["fault"].startswith("SparkIllegalArgumentException: [INVALID_CONF_VALUE")
    assert "The value 'WRONG' in the config \"spark.scheduler.mode\" is invalid" in first["fault"]
