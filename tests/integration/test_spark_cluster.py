"""relay on a standalone Spark cluster: everybody who takes part has the secret."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark
import pytest
from psutil import process_iter

from relay.config import Spark
from relay.embedded import free_port
from relay.spark.java import java_home
from relay.spark.session import Session
from tests.outbox import wait_until
from tests.process import ROOT

SECRET = "s3cret-of-the-cluster"
PROTECTED = {
    "spark.authenticate": "true",
    "spark.authenticate.secret": SECRET,
    "spark.network.crypto.enabled": "true",
}


@contextmanager
def daemon(kind: str, folder: Path, *arguments: str, says: str) -> Iterator[None]:
    """A process of a standalone cluster, ready when its log says so."""
    conf = folder / "spark.conf"
    conf.write_text("".join(f"{key} {value}\n" for key, value in PROTECTED.items()))
    log = folder / f"{kind}.log"
    home = Path(pyspark.__file__).parent
    environment = {
        "JAVA_HOME": str(java_home()),
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}"),
                *("--properties-file", str(conf), "--webui-port", "0", *arguments),
            ],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        wait_until(lambda: says in log.read_text(), 120)
        yield
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.rare
@pytest.mark.timeout(600)
def test_a_session_on_a_cluster_authenticates_and_encrypts(tmp_path: Path) -> None:
    master = f"spark://127.0.0.1:{(port := free_port())}"
    conf = {
        "spark.authenticate.secret": SECRET,
        "spark.driver.host": "127.0.0.1",
        "spark.cores.max": "1",
        "spark.executor.memory": "512m",
    }
    session = Session(Spark.model_validate({"master": master, "conf": conf}))
    with (
        daemon(
            "master.Master",
            tmp_path,
            *("--host", "127.0.0.1", "--port", str(port)),
            says="I have been elected leader",
        ),
        daemon(
            "worker.Worker",
            tmp_path,
            *("--host", "127.0.0.1", "--cores", "1", "--memory", "1g"),
            *("--work-dir", str(tmp_path / "work"), master),
            says="Successfully registered with master",
        ),
    ):
        session.start()
        try:
            # A session is ready when its executors have run a task.
            ready = session.get(timeout=240)
            assert ready is not None
            for key in (*PROTECTED, "spark.io.encryption.enabled"):
                assert ready.conf.get(key) == PROTECTED.get(key, "true")
            # Nor does an executor's command line show it: its worker hands the secret over in the environment.
            commands = [" ".join(each.info["cmdline"] or ()) for each in process_iter(["cmdline"])]
            assert any("CoarseGrainedExecutorBackend" in command for command in commands)
            assert not [command for command in commands if SECRET in command]
        finally:
            session.close()
