"""The benchmark's workloads of queues: that each does the work that it counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("bench", reason="the archive of sources has no benchmark")

from bench import queue_rows
from bench.outbox import SERVER_SETTINGS, Outbox
from bench.plan import Plan
from bench.queues import CREATE, FIGURE, Taking
from relay.demo.embedded import Cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(settings=SERVER_SETTINGS) as running:
        yield running


@pytest.fixture
def outbox(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Outbox]:
    made = Outbox(cluster, str(request.node.name))
    yield made
    made.conn.close()


@pytest.fixture
def plan(cluster: Cluster, tmp_path: Path) -> Plan:
    return Plan(cluster, tmp_path, quick=True, rounds=1)


def test_workers_take_all_messages(outbox: Outbox, plan: Plan) -> None:
    outbox.conn.execute(CREATE)
    for batch in (1, 10):
        taking = Taking(plan, outbox, 100, 2, batch)
        for measure in (taking.plain, lambda of=taking: of.take("unordered"), taking.claim):
            assert measure()[FIGURE] > 0
            assert outbox.value("select count(*) from relay.queue_messages") == 0
        assert outbox.value("select count(*) from plain_messages") == 0
    assert Taking(plan, outbox, 100, 4, 1).in_python("relay")[FIGURE] > 0


@pytest.mark.rare
def test_relay_fills_as_many_queues_as_are_declared(outbox: Outbox, plan: Plan) -> None:
    backlog = queue_rows.backlog_of_types(outbox, 500)
    assert queue_rows.fill(plan, outbox, backlog, 1, watched=True)[FIGURE] > 0
    with pytest.raises(AssertionError, match="15 of 500"):
        queue_rows.fill(plan, outbox, backlog, 3)


def test_takes_under_a_snapshot_have_two_parts(outbox: Outbox) -> None:
    queue_rows.declare(outbox, "mail", f"{outbox.name}_base", None)
    rows = queue_rows.first_and_last(outbox, queue_rows.take_ten, 60, 0.1)
    assert rows.keys() == {queue_rows.FIRST, queue_rows.LAST}
    assert all(figures["p50"] > 0 for figures in rows.values())
