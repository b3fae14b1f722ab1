"""What a shipped deployment opens to its network, and what anybody there may do through it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pyspark
import pytest
import yaml

from relay.demo.embedded import free_port
from relay.spark.jvm import java_home
from tests.outbox import wait_until
from tests.process import ROOT

JAR = {
    "action": "CreateSubmissionRequest",
    "appResource": "file:///tmp/evil.jar",
    "mainClass": "Evil",
    "appArgs": [],
    "clientSparkVersion": "4.0.0",
    "environmentVariables": {},
    "sparkProperties": {"spark.app.name": "evil", "spark.jars": "file:///tmp/evil.jar"},
}
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


def kubernetes_scripts() -> list[str]:
    """The start scripts of the Deployments of Spark, for the pod 127.0.0.9."""
    documents = yaml.safe_load_all((ROOT / "config/kubernetes/spark.yaml").read_text())
    pods = [each["spec"]["template"]["spec"] for each in documents if each["kind"] == "Deployment"]
    return [pod["containers"][0]["command"][-1] for pod in pods]


@contextmanager
def daemon(script: str, folder: Path, *arguments: str) -> Iterator[int]:
    """Run a shipped start script without a container; yields the id of its JVM."""
    folder.mkdir()
    home = Path(pyspark.__file__).parent
    process = subprocess.Popen(
        ["sh", "-c", script.replace("/tmp/spark.conf", str(folder / "spark.conf")), *arguments],
        env={
            **os.environ,
            "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
            "JAVA_HOME": str(java_home()),
            "SPARK_HOME": str(home),
            "SPARK_SECRET": "s3cret",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_LOCAL_IP": COMPOSE["spark-master"]["environment"]["SPARK_LOCAL_IP"],
            "POD_IP": "127.0.0.9",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait(30)


def doors(pid: int) -> set[tuple[str, int]]:
    """The addresses and ports on which a process listens for others than its own machine."""
    return {
        (address.ip.removeprefix("::ffff:"), address.port)
        for each in psutil.Process(pid).net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and (address := each.laddr)
        # A daemon on 127.0.0.9 stands for one on the network: only this address is its loopback.
        if address.ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1")
    }


def pages(port: int) -> bool:
    """Whether the web page of a daemon answers on the loopback, as its health check asks."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/json/", trust_env=False).is_success
    except httpx.HTTPError:
        return False


def compose_scripts() -> list[str]:
    """The start script of the services of Spark, twice, for the container 127.0.0.9."""
    script = COMPOSE["spark-master"]["entrypoint"][-1].replace("$$", "$")
    return [script.replace("$(hostname -i)", "127.0.0.9")] * 2


@pytest.mark.rare
@pytest.mark.parametrize(
    "scripts", [compose_scripts(), kubernetes_scripts()], ids=["compose", "kubernetes"]
)
def test_nobody_runs_code_on_the_shipped_cluster_without_its_secret(
    tmp_path: Path, scripts: list[str]
) -> None:
    """The master's REST server runs a jar of anybody, and `spark.authenticate` does not cover it: it is off.

    Each daemon listens to its network on the port of the protocol that the secret protects, and on no other; the pages
    that show logs and environments are on the loopback.
    """
    port, web, worker_web = free_port(), free_port(), free_port()
    overview = f"http://127.0.0.1:{web}/json/"
    with ExitStack() as running:
        master = running.enter_context(
            daemon(
                scripts[0].replace("/tmp/recovery", str(tmp_path / "recovery")),
                tmp_path / "master",
                "org.apache.spark.deploy.master.Master",
                *("--host", "127.0.0.9", "--port", str(port), "--webui-port", str(web)),
            )
        )
        wait_until(lambda: pages(web), 60)
        worker = running.enter_context(
            daemon(
                scripts[1],
                tmp_path / "worker",
                "org.apache.spark.deploy.worker.Worker",
                *("--cores", "1", "--memory", "512m", "--work-dir", str(tmp_path / "work")),
                *("--webui-port", str(worker_web), f"spark://127.0.0.9:{port}"),
            )
        )
        wait_until(lambda: pages(worker_web), 60)
        wait_until(lambda: httpx.get(overview, trust_env=False).json()["aliveworkers"] == 1, 60)
        assert doors(master) == {("127.0.0.9", port)}
        assert len(doors(worker)) == 1
        for address, opened in doors(master) | doors(worker):
            with pytest.raises(httpx.TransportError):
                submit(address, opened)
        assert not httpx.get(overview, trust_env=False).json()["activedrivers"]


def submit(address: str, port: int) -> Any:
    """Post a jar to run, as any client of the network may."""
    return httpx.post(
        f"http://{address}:{port}/v1/submissions/create", json=JAR, trust_env=False, timeout=10
    )


def test_every_shipped_start_script_turns_the_rest_server_off() -> None:
    """The quick form of the test above."""
    master = kubernetes_scripts()[0]
    for script in (COMPOSE["spark-master"]["entrypoint"][-1], master):
        assert re.search(r"spark\.master\.rest\.enabled false", script)
