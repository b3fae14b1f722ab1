"""relay on a standalone Spark cluster: everybody who takes part has the secret, and slots follow the executors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from psutil import process_iter

from relay.config.settings import SparkSettings
from relay.spark.session import Session
from tests.outbox import wait_until
from tests.spark_cluster import PROTECTED, SECRET, StandaloneCluster

pytestmark = [pytest.mark.rare, pytest.mark.timeout(600)]


@contextmanager
def session_on(cluster: StandaloneCluster, **conf: str) -> Iterator[Session]:
    session = Session(SparkSettings.model_validate(cluster.conf(**conf)))
    session.start()
    try:
        # A session is ready when its executors have run a task.
        assert session.get(timeout=240) is not None
        yield session
    finally:
        session.close()


def test_a_session_on_a_cluster_authenticates_and_encrypts(cluster: StandaloneCluster) -> None:
    with session_on(cluster) as session:
        ready = session.get()
        assert ready is not None
        for key in (*PROTECTED, "spark.io.encryption.enabled"):
            assert ready.conf.get(key) == PROTECTED.get(key, "true")
        # Nor does an executor's command line show it: its worker hands the secret over in the environment.
        commands = [" ".join(each.info["cmdline"] or ()) for each in process_iter(["cmdline"])]
        assert cluster.executors()
        assert not [command for command in commands if SECRET in command]


def test_slots_follow_the_executors(cluster: StandaloneCluster) -> None:
    """A worker that ends takes its executor along, and one that starts brings one. Spark counts two at least."""
    with session_on(cluster) as session:
        wait_until(lambda: session.slots == 3, 60, 0.2)
        cluster.workers[0].kill()
        wait_until(lambda: session.slots == 2, 120, 0.2)
        cluster.workers[0].start()
        wait_until(lambda: session.slots == 3, 120, 0.2)


def test_dynamic_allocation_grows_while_tasks_wait(cluster: StandaloneCluster) -> None:
    """A batch gets one task more than there are executors, so that Spark sees a reason to add one."""
    dynamic = {
        "spark__dynamicAllocation__enabled": "true",
        "spark__dynamicAllocation__minExecutors": "0",
        "spark__dynamicAllocation__maxExecutors": "3",
        "spark__dynamicAllocation__executorIdleTimeout": "3s",
        "spark__dynamicAllocation__schedulerBacklogTimeout": "1s",
    }
    with session_on(cluster, **dynamic) as session:
        wait_until(lambda: not cluster.executors(), 60, 0.2)
        assert session.slots == 3
        assert session.get() is not None
