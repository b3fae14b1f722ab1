"""A Spark cluster whose parts die, freeze, come and go while relay works on it: each event once, in order.

Each test is a row of the table of docs/how-to/spark.md, "What happens when things die".
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.chaos.test_faults import progress
from tests.integration.test_spark_handler import assert_each_once, lake, written_all
from tests.outbox import Outbox, wait_until
from tests.process import Running, running
from tests.spark_cluster import WORKER_SECONDS, Daemon, StandaloneCluster, frozen

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.rare,
    pytest.mark.timeout(1500),
    pytest.mark.usefixtures("stays_live"),
]

CHANCE = random.Random(16)
TRANSACTIONS = 2_000
MORE = 300
LOST_WORKER, REGISTERED_WORKER = "Removing worker ", "Registering worker "
"""What the master logs of a worker."""
DYNAMIC = {
    "spark__dynamicAllocation__enabled": "true",
    "spark__dynamicAllocation__minExecutors": "1",
    "spark__dynamicAllocation__maxExecutors": "3",
    "spark__dynamicAllocation__executorIdleTimeout": "2s",
    "spark__dynamicAllocation__schedulerBacklogTimeout": "1s",
}


@dataclass
class Scene:
    """A relay that works on a cluster, and what happens to them."""

    outbox: Outbox
    cluster: StandaloneCluster
    config: Path
    relays: ExitStack
    inline: bool
    """Whether the pipeline's engine is inline, so that only the sink uses the cluster."""
    service: Running = field(init=False)

    def start(self) -> None:
        """Start relay, and wait until it has applied something, and for the session if only the sink uses it."""
        self.service = self.relays.enter_context(running(self.config))
        self.go_on()
        if self.inline:
            self.service.wait_said("the Spark session is ready", 480)
            self.wait_executors()

    def go_on(self) -> None:
        """Publish some more, and wait until as many events are applied."""
        # Before they are published: inline, some are applied while the last ones are published.
        goal = progress(self.outbox) + 5 * MORE
        self.outbox.fill(MORE, events=5, hosts=64)
        ends = self.service.process.poll
        wait_until(lambda: progress(self.outbox) >= goal or ends() is not None, 480)
        assert ends() is None, self.service.log.read_text()[-4_000:]

    def wait_executors(self, timeout: float = 120.0) -> None:
        """Wait until each worker has its executor."""
        cluster = self.cluster
        wait_until(lambda: len(cluster.executors()) == len(cluster.workers), timeout, 0.2)

    def sink_fault(self) -> Any:
        """What `relay status` says of the sink; None while it works."""
        return self.outbox.value("select fault from relay.sinks where sink = 'lake'")

    def executor(self) -> psutil.Process:
        """One of the executors."""
        wait_until(lambda: bool(self.cluster.executors()), 120)
        return CHANCE.choice(self.cluster.executors())


def executor_killed(scene: Scene) -> None:
    for _ in range(3):
        scene.executor().kill()
        scene.go_on()


def worker_killed(scene: Scene) -> None:
    worker = CHANCE.choice(scene.cluster.workers)
    worker.kill()
    scene.go_on()
    worker.start()


def master_restarted(scene: Scene) -> None:
    scene.cluster.master.kill()
    scene.go_on()
    scene.cluster.master.start()
    scene.executor().kill()
    scene.go_on()


def driver_killed(scene: Scene) -> None:
    for _ in range(2):
        scene.service.kill()
        scene.start()


def executor_frozen(scene: Scene) -> None:
    scene.outbox.fill(TRANSACTIONS, events=5, hosts=64)
    with frozen(scene.executor()):
        before = progress(scene.outbox)
        # With a speculative copy Spark continues without it, except for tasks that wait for its locks.
        wait_until(lambda: _waits(scene) or progress(scene.outbox) > before + 1_000, 120)


def executor_frozen_for_long(scene: Scene) -> None:
    scene.outbox.fill(TRANSACTIONS, events=5, hosts=64)
    with frozen(scene.executor()):
        before = progress(scene.outbox)
        # Spark takes it for lost after two minutes (`spark.network.timeout`).
        wait_until(lambda: progress(scene.outbox) > before + 2_000, 100)


def executor_frozen_for_good(scene: Scene) -> None:
    scene.outbox.fill(TRANSACTIONS, events=5, hosts=64)
    with frozen(scene.executor()):
        # Spark takes it for lost, and the sink's tasks run elsewhere.
        scene.outbox.wait_handled(240)
        written_all(scene.outbox, 240)


def worker_frozen(scene: Scene) -> None:
    """The worker's process alone: its executor goes on, and the master takes both for lost."""
    worker = CHANCE.choice(scene.cluster.workers)
    _frozen_until_lost(scene, worker, alone=True)


def machine_frozen(scene: Scene) -> None:
    """A worker with its executor and Python workers, which have tasks, locks and sessions of the target."""
    worker = CHANCE.choice(scene.cluster.workers)
    scene.outbox.fill(TRANSACTIONS, events=5, hosts=64)
    _frozen_until_lost(scene, worker, alone=False)


def _frozen_until_lost(scene: Scene, worker: Daemon, alone: bool) -> None:
    master = scene.cluster.master
    lost, registered = master.logged(LOST_WORKER), master.logged(REGISTERED_WORKER)
    with frozen(worker.process, alone):
        scene.go_on()
        wait_until(lambda: master.logged(LOST_WORKER) > lost, 120)
        scene.go_on()
        if scene.inline:
            # The sink's task that is frozen runs on another worker.
            written_all(scene.outbox, 240)
    wait_until(lambda: master.logged(REGISTERED_WORKER) > registered, 120)
    scene.wait_executors()
    scene.go_on()


def master_frozen(scene: Scene) -> None:
    """Work goes on until executors are lost too; then relay applies by itself, and says why."""
    with frozen(scene.cluster.master.process):
        thaws = time.monotonic() + 1.5 * WORKER_SECONDS
        scene.go_on()
        for each in scene.cluster.executors():
            each.kill()
        scene.go_on()
        wait_until(lambda: _named(scene), 300, 0.2)
        scene.go_on()
        # Thawed, the master takes every worker for lost until it has read their heartbeats.
        time.sleep(max(0.0, thaws - time.monotonic()))
    scene.wait_executors()
    scene.go_on()


def _named(scene: Scene) -> bool:
    """Whether `relay status` says that there is no executor: for the pipeline, or for the sink alone."""
    if scene.inline:
        return "no Spark task has ended" in str(scene.sink_fault())
    return "no Spark slot free" in scene.outbox.column("select reason from relay.engines")


def master_frozen_at_start(scene: Scene) -> None:
    """A relay that starts meanwhile has no session for its sink, says so, and gets one from the thawed master."""

    def fault() -> str:
        found = scene.outbox.column("select fault from relay.part_faults where part = 'spark'")
        return "".join(found)

    scene.service.kill()
    scene.outbox.fill(MORE, events=5, hosts=64)
    with frozen(scene.cluster.master.process):
        scene.service = scene.relays.enter_context(running(scene.config))
        wait_until(lambda: "no master" in fault(), 480, 0.2)
        wait_until(lambda: "no master" in str(scene.sink_fault()), 120, 0.2)
        scene.go_on()
    wait_until(lambda: not fault(), 480, 0.2)
    scene.go_on()


def executors_come_and_go(scene: Scene) -> None:
    scene.outbox.wait_handled(240)
    wait_until(lambda: len(scene.cluster.executors()) == 1, 120, 0.2)
    scene.outbox.fill(TRANSACTIONS, events=5, hosts=64)
    wait_until(lambda: len(scene.cluster.executors()) > 1, 120, 0.1)


def _waits(scene: Scene) -> bool:
    """Whether a session waits for a lock, such as that of a stopped task."""
    waiting = scene.outbox.value(
        "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
    )
    return bool(waiting)


FAULTS: dict[str, tuple[Callable[[Scene], None], dict[str, str]]] = {
    "executor killed": (executor_killed, {}),
    "executor killed, one failure allowed": (executor_killed, {"spark__task__maxFailures": "1"}),
    "worker killed": (worker_killed, {}),
    "master restarted": (master_restarted, {}),
    "driver killed": (driver_killed, {}),
    "executor frozen": (
        executor_frozen,
        {
            "spark__speculation": "true",
            "spark__speculation__interval": "100ms",
            "spark__speculation__quantile": "0.5",
            "spark__speculation__minTaskRuntime": "100ms",
        },
    ),
    "executor frozen, no speculation": (executor_frozen_for_long, {}),
    "executor frozen for good": (
        executor_frozen_for_good,
        {
            "spark__network__timeout": "20s",
            "spark__network__timeoutInterval": "5s",
            "spark__executor__heartbeatInterval": "2s",
        },
    ),
    "worker frozen": (worker_frozen, {}),
    "machine frozen": (machine_frozen, {}),
    "master frozen": (master_frozen, {}),
    "master frozen at start": (master_frozen_at_start, {}),
    "dynamic allocation": (executors_come_and_go, DYNAMIC),
}
_SHORT = ("executor killed", "executor frozen")
"""The others, and these by polling, take minutes each."""
_INLINE = ("machine frozen", "master frozen", "master frozen at start")
"""Those that are also tried with an inline pipeline; the last one only so: else batches wait, and /livez fails."""
_CASES = [
    *((fault, mode) for mode in ("drain", "catch-up") for fault in FAULTS if fault != _INLINE[-1]),
    *((fault, "inline") for fault in _INLINE),
]


@pytest.mark.parametrize(
    ("fault", "mode"),
    [
        pytest.param(
            *case,
            id="-".join(case),
            marks=[] if case[0] in _SHORT and case[1] == "drain" else [pytest.mark.long],
        )
        for case in _CASES
    ],
)
def test_exact_on_a_cluster(
    outbox: Outbox, cluster: StandaloneCluster, tmp_path: Path, fault: str, mode: str
) -> None:
    """A Spark sink writes files beside the target; the pipeline drains or catches up on Spark, or is inline."""
    happens, conf = FAULTS[fault]
    outbox.watch_positions()
    outbox.fill(TRANSACTIONS, events=5, hosts=64)
    path = tmp_path / "lake"
    config = lake(path, start="beginning", max_events=4_000, host_buckets=2)
    if mode == "catch-up":
        config["source"] = outbox.config()["source"] | {"mode": "poll"}
    file = outbox.config_file(
        tmp_path / "relay.yaml",
        **config,
        batch={"inline_max_events": 1_000_000_000 if mode == "inline" else 0, "max_events": 500},
        poll={"batch_size": 500},
        spark=cluster.conf(**conf),
    )
    with ExitStack() as relays:
        scene = Scene(outbox, cluster, file, relays, mode == "inline")
        scene.start()
        happens(scene)
        outbox.wait_handled(240)
        written_all(outbox, 480)
        # What `relay status` said of the sink is over.
        wait_until(lambda: scene.sink_fault() is None, 60)
        assert scene.service.terminate() == 0
    outbox.assert_exact()
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0
    assert outbox.positions_moved_back() == 0
    assert_each_once(outbox, path)
