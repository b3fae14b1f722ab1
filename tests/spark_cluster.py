"""A standalone Spark cluster of processes on this machine, which tests can kill, freeze and restart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import psutil
import pyspark

from relay.demo.embedded import free_port
from relay.spark.jvm import java_home
from tests.outbox import wait_until
from tests.process import ROOT

SECRET = "s3cret-of-the-cluster"
PROTECTED = {
    "spark.authenticate": "true",
    "spark.authenticate.secret": SECRET,
    "spark.network.crypto.enabled": "true",
}
PYTHON = {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
EXECUTOR = "CoarseGrainedExecutorBackend"
WORKER_SECONDS = 30
"""After so many seconds without a heartbeat the master takes a worker for lost; Spark's default is 60."""


class Daemon:
    """A master or a worker. It is ready when its log has the text `says` once more."""

    def __init__(
        self, name: str, command: list[str], log: Path, says: str, environment: dict[str, str]
    ) -> None:
        self.name = name
        self._environment = environment
        self._command = command
        self._log = log
        self._says = says
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        begun = self.logged(self._says)
        home = Path(pyspark.__file__).parent
        environment = {
            "JAVA_HOME": str(java_home()),
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            **self._environment,
        }
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [str(home / "bin" / "spark-class"), *self._command],
                env={key: value for key, value in os.environ.items() if key not in PYTHON}
                | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        wait_until(lambda: self.logged(self._says) > begun or not self.runs, 300)
        assert self.runs, self._log.read_text()[-4_000:]

    @property
    def runs(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """End it with SIGKILL; a worker's executors detect it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(30)

    @property
    def process(self) -> psutil.Process:
        """The running process."""
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def logged(self, text: str) -> int:
        """How often its log has a text."""
        return self._log.read_text().count(text) if self._log.exists() else 0

    def stop(self) -> None:
        """End it with SIGTERM, or with SIGKILL after 15 seconds."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self.kill()


class StandaloneCluster:
    """A master that recovers its applications, and workers of one core.

    Each worker has its own address, because Spark starts no speculative copy of a task on the same host. Executors can
    import relay and its dependencies, unless they are `bare`.
    """

    def __init__(self, folder: Path, workers: int, bare: bool = False) -> None:
        environment = {} if bare else PYTHON
        self._folder = folder
        port = free_port()
        self.url = f"spark://127.0.0.1:{port}"
        conf = folder / "spark.conf"
        daemons = {
            "spark.master.rest.enabled": "false",
            "spark.deploy.recoveryMode": "FILESYSTEM",
            "spark.deploy.recoveryDirectory": str(folder / "recovery"),
            "spark.worker.cleanup.enabled": "false",
            "spark.worker.timeout": str(WORKER_SECONDS),
        }
        conf.write_text("".join(f"{key} {value}\n" for key, value in (PROTECTED | daemons).items()))
        options = ["--properties-file", str(conf), "--webui-port", "0"]
        self.master = Daemon(
            "master",
            [
                *("org.apache.spark.deploy.master.Master", *options),
                *("--host", "127.0.0.1", "--port", str(port)),
            ],
            folder / "master.log",
            "I have been elected leader",
            environment,
        )
        self.workers = [
            Daemon(
                f"worker-{number}",
                [
                    *("org.apache.spark.deploy.worker.Worker", *options, "--cores", "1"),
                    *("--host", f"127.0.0.{number + 2}", "--memory", "1g"),
                    *("--work-dir", str(folder / f"work-{number}"), self.url),
                ],
                folder / f"worker-{number}.log",
                "Successfully registered with master",
                environment,
            )
            for number in range(workers)
        ]

    def __enter__(self) -> Self:
        try:
            for daemon in (self.master, *self.workers):
                daemon.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in (*self.workers, self.master):
            daemon.stop()
        for each in self.executors():
            each.kill()

    def conf(self, **more: str) -> dict[str, Any]:
        """The section `spark` for relay on this cluster; `__` in a name stands for a dot."""
        return {
            "master": self.url,
            "conf": {
                "spark.authenticate.secret": SECRET,
                "spark.driver.host": "127.0.0.1",
                "spark.driver.memory": "512m",
                "spark.executor.memory": "512m",
                "spark.executor.cores": "1",
                **{name.replace("__", "."): value for name, value in more.items()},
            },
        }

    def executors(self) -> list[psutil.Process]:
        """The JVMs of the running executors."""
        folder = str(self._folder)
        return [
            each
            for each in psutil.process_iter(["cmdline", "cwd", "status"])
            if EXECUTOR in " ".join(each.info["cmdline"] or ())
            and str(each.info["cwd"]).startswith(folder)
            and each.info["status"] != psutil.STATUS_ZOMBIE
        ]


@contextmanager
def frozen(process: psutil.Process, alone: bool = False) -> Iterator[None]:
    """Stop a process with SIGSTOP until the end of the context; its children too, unless `alone`."""
    family = [process, *([] if alone else process.children(recursive=True))]
    _signal(family, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(family, signal.SIGCONT)


def _signal(family: list[psutil.Process], number: signal.Signals) -> None:
    for each in family:
        try:
            each.send_signal(number)
        except psutil.NoSuchProcess:
            continue
