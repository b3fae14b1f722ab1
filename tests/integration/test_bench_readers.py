"""The benchmark's workloads of readers: that each does the work that it counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("bench", reason="the archive of sources has no benchmark")

from bench import queue_rows, readers
from bench.backlog import fill
from bench.outbox import SERVER_SETTINGS, Outbox
from bench.plan import Plan
from relay.demo.embedded import Cluster

# What is measured seldom changes.
pytestmark = pytest.mark.rare


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(settings=SERVER_SETTINGS) as running:
        yield running


@pytest.fixture
def outbox(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Outbox]:
    made = readers.new_outbox(cluster, str(request.node.name))
    yield made
    made.conn.close()


def test_each_kind_drains_the_backlog(cluster: Cluster, outbox: Outbox, tmp_path: Path) -> None:
    plan = Plan(cluster, tmp_path, quick=True, rounds=1)
    backlog = outbox.publish(40)
    for kind in ("plain", "async", "loop"):
        assert readers.drain_by(plan, outbox, backlog, kind, looks=True)[readers.FIGURE] > 0
    assert outbox.value("select last from loop_position") == outbox.value(
        "select max(c_offset) from outbox_message_t"
    )
    assert outbox.value("select count(*) from relay.log_readers") == 0


def test_pages_are_of_the_backlog(outbox: Outbox) -> None:
    outbox.conn.execute("select relay.declare_reader('midst')")
    fill(outbox.conn, 200)
    with pytest.raises(AssertionError, match="of 1,000 rows"):
        readers.read_pages(outbox)
    fill(outbox.conn, readers.PAGES * 1_000, events=1)
    assert readers.read_pages(outbox)["p50"] > 0


def test_turns_under_a_snapshot_have_two_parts(outbox: Outbox) -> None:
    outbox.conn.execute("select relay.declare_reader('held')")
    rows = queue_rows.first_and_last(outbox, readers.read_five, 60, 0.1)
    assert rows.keys() == {queue_rows.FIRST, queue_rows.LAST}
    assert all(figures["p50"] > 0 for figures in rows.values())
