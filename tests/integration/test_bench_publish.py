"""The benchmark's workload `publish`: what its plain table is, and that it sees publishers wait for locks."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("bench", reason="the archive of sources has no benchmark")

from bench.outbox import SERVER_SETTINGS, Outbox
from bench.publishing import CREATE_PLAIN_TABLE, PLAIN_TABLE, RELAY_TABLE, Publishers
from bench.results import Contender, Workload, run
from relay.demo.embedded import Cluster

COLUMNS = "select attname from pg_attribute where attrelid = %s::regclass and attnum > 0 and not attisdropped"
ONE_AT_A_TIME = f"""
    create table turn (taken bigint);
    insert into turn values (0);
    create function take_turn() returns trigger language plpgsql as $$
        begin update turn set taken = taken + 1; return new; end $$;
    create trigger take_turn before insert on {PLAIN_TABLE} for each row execute function take_turn();
"""


# What is measured seldom changes.
pytestmark = pytest.mark.rare


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(settings=SERVER_SETTINGS) as running:
        yield running


@pytest.fixture
def outbox(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Outbox]:
    """A database with relay's outbox, as the workload has it, and the plain table."""
    made = Outbox(cluster, str(request.node.name))
    made.conn.execute(CREATE_PLAIN_TABLE)
    yield made
    made.conn.close()


def test_plain_table_is_the_outbox_without_relay(outbox: Outbox) -> None:
    def columns(table: str) -> set[str]:
        return {name for (name,) in outbox.conn.execute(COLUMNS, (table,))}

    assert columns(PLAIN_TABLE) == columns(RELAY_TABLE) - {"c_offset", "c_xid"}
    assert (
        outbox.value("select count(*) from pg_index where indrelid = %s::regclass", PLAIN_TABLE)
        == 1
    )
    assert (
        outbox.value("select count(*) from pg_trigger where tgrelid = %s::regclass", PLAIN_TABLE)
        == 0
    )
    limits = "select count(*) from pg_constraint where conrelid = %s::regclass and contype = 'c'"
    assert outbox.value(limits, PLAIN_TABLE) == outbox.value(limits, RELAY_TABLE)


def test_each_commit_is_one_event_of_either_table(outbox: Outbox, tmp_path: Path) -> None:
    for table in (PLAIN_TABLE, RELAY_TABLE):
        found = Publishers(clients=2, work_ms=0, seconds=1).measure(outbox, table, tmp_path)
        rows, commits = outbox.conn.execute(
            f"select count(*), count(distinct xmin::text) from {table}".encode()
        ).fetchone() or (0, 0)
        assert rows == commits > 0
        # pgbench leaves the time to connect out of its rate.
        assert found["commits/s"] == pytest.approx(rows, rel=0.5)


def test_publishers_that_wait_for_a_lock_are_seen(outbox: Outbox, tmp_path: Path) -> None:
    publishers = Publishers(clients=8, work_ms=5, seconds=1)
    assert publishers.measure(outbox, PLAIN_TABLE, tmp_path)["lock waits"] == 0
    outbox.conn.execute(ONE_AT_A_TIME)
    found = publishers.measure(outbox, PLAIN_TABLE, tmp_path)
    assert found["lock waits"] > found["samples"] > 0
    assert found["commits/s"] < 1000 / publishers.work_ms


def test_publishers_of_numbers_without_gaps_take_turns(outbox: Outbox, tmp_path: Path) -> None:
    publishers = Publishers(clients=8, work_ms=5, seconds=1)
    assert publishers.measure(outbox, RELAY_TABLE, tmp_path, gapless=True)["lock waits"] > 0
    numbers = f"select max(c_offset) = count(*), max(c_offset) from {RELAY_TABLE}"
    assert outbox.value(numbers)
    assert publishers.measure(outbox, RELAY_TABLE, tmp_path)["lock waits"] == 0


def test_publishers_that_fail_are_not_measured(outbox: Outbox, tmp_path: Path) -> None:
    outbox.conn.execute(
        f"alter table {PLAIN_TABLE} add check (event_type <> 'order.placed')".encode()
    )
    with pytest.raises(RuntimeError, match="violates check constraint"):
        Publishers(clients=1, work_ms=0, seconds=1).measure(outbox, PLAIN_TABLE, tmp_path)


def test_a_lock_wait_of_one_round_stays_in_the_result(tmp_path: Path) -> None:
    waits = iter([0.0, 3.0, 0.0])
    rounds = Contender("relay", lambda: {"commits/s": 1.0, "lock waits": next(waits)}, rounds=3)
    run(Workload("publish", "", [rounds]), Console(file=io.StringIO()), tmp_path)
    (row,) = json.loads((tmp_path / "publish.json").read_text())["contenders"]
    assert row["median"] == {"commits/s": 1.0, "lock waits": 3.0}
