"""Polling: ranges that end no transaction in its midst, several instances, pinned partitions, rows of long ago."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from relay.admin.check import examine
from relay.admin.findings import Severity
from relay.admin.offsets import plan_seek, seek
from relay.config.settings import Settings
from relay.faults import ConfigurationError, RelayError
from relay.model.snapshots import BEGINNING
from relay.model.tuples import columns
from relay.pipeline.apply import Applier
from relay.pipeline.plan import Planner
from relay.pipeline.runner import Pipeline
from relay.source.outbox.differences import Difference, condition
from relay.source.outbox.rows import OutboxRows, prepare_reading
from relay.source.outbox.selection import Wanted
from relay.source.polling import Poller
from relay.source.server import current_position
from relay.spark.engine import SparkEngine
from relay.spark.session import Session
from relay.store.positions.offsets import FIRST
from tests.outbox import Outbox, event, host, initialise, relaying, wait_until
from tests.process import running

CHANCE = random.Random(3)


def polling(outbox: Outbox, engine: str = "inline", **overrides: Any) -> Any:
    source = {**outbox.config()["source"], "mode": "poll"}
    return outbox.settings(engine, source=source, **overrides)


def test_published_events_arrive_without_a_slot(
    outbox: Outbox, engine: str, request: pytest.FixtureRequest
) -> None:
    session = request.getfixturevalue("spark_session") if engine == "spark" else None
    outbox.conn.execute("select pg_drop_replication_slot(%s)", (outbox.slot,))
    with relaying(polling(outbox, engine), session):
        for number in range(20):
            outbox.publish(host(number % 5), *(event(n) for n in range(3)))
        poison = outbox.publish(host(1), event(1), event(-1))
        outbox.publish(host(1), event(5))
        outbox.wait_handled()
    assert outbox.column("select distinct transaction_id::uuid from relay.dead_letter_queue") == [
        poison
    ]
    assert outbox.value("select count(*) from projection") == 61
    outbox.assert_exact()
    assert (
        outbox.value(
            "select count(*) from pg_replication_slots where slot_name = %s", (outbox.slot,)
        )
        == 0
    )


def test_what_the_wal_applied_is_not_polled_and_what_was_polled_is_not_streamed(
    outbox: Outbox, engine: str, request: pytest.FixtureRequest
) -> None:
    session = request.getfixturevalue("spark_session") if engine == "spark" else None
    for _ in range(3):
        for number in range(40):
            outbox.publish(host(number % 7), event(number), event(number))
        outbox.drain(outbox.settings(engine), session)
        for number in range(40):
            outbox.publish(host(number % 7), event(number), event(number))
        with relaying(polling(outbox, engine), session):
            outbox.wait_handled()
    outbox.drain(outbox.settings(engine), session)
    outbox.assert_exact()
    assert outbox.value("select count(*) from projection") == 480


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_a_range_never_ends_inside_a_business_transaction(outbox: Outbox, batch_size: int) -> None:
    outbox.conn.execute(
        """
        create table seen (transaction_id uuid, events int, upto bigint);
        create function whole() returns trigger language plpgsql as $$ begin
            insert into seen select transaction_id, count(*), txid_current() from added group by transaction_id;
            return null; end $$;
        create trigger whole after insert on projection referencing new table as added
            for each statement execute function whole();
        """
    )
    batch = (
        "insert into projection (id, host_id, c_offset, transaction_id, amount)"
        " select id, host_id, c_offset, transaction_id, 1 from batch"
    )
    sizes = {}
    for number in range(30):
        size = CHANCE.choice([1, 2, 5, 30])
        sizes[outbox.publish(host(number % 4), *(event(n) for n in range(size)))] = size
    # Two that interleave in one commit, without ordinals, over several partitions; and one that is large.
    first, second, large = uuid.uuid4(), uuid.uuid4(), uuid.uuid4()
    with outbox.conn.transaction():
        for number in range(12):
            outbox.conn.execute(
                "insert into outbox_message_t (host_id, event_type, payload, transaction_id)"
                " values (%s, 'x', '{}', %s)",
                (host(number % 6), first if number % 2 else second),
            )
    outbox.conn.execute(
        "insert into outbox_message_t (host_id, event_type, payload, transaction_id)"
        " select %s, 'x', '{}', %s from generate_series(1, 500)",
        (host(2), large),
    )
    sizes |= {first: 6, second: 6, large: 500}
    outbox.publish(host(2), event(1))
    settings = polling(
        outbox,
        poll={"batch_size": batch_size},
        batch={"max_events": 10, "max_bytes": 4096, "inline_max_events": 10**9},
        handlers={"projection": {"type": "sql", "each": "batch", "statement": batch}},
    )
    with relaying(settings):
        outbox.wait_handled()
    outbox.assert_exact()
    for transaction_id, size in sizes.items():
        assert (
            outbox.column("select events from seen where transaction_id = %s", (transaction_id,))
            == [size]
            or outbox.value(
                "select count(distinct upto) from seen where transaction_id = %s", (transaction_id,)
            )
            == 1
        )


@pytest.mark.parametrize("instances", [2, pytest.param(4, marks=pytest.mark.rare)])
def test_instances_share_the_partitions_and_each_event_is_processed_once(
    outbox: Outbox, instances: int
) -> None:
    outbox.fill(2_000, events=5, hosts=32)
    settings = polling(outbox, poll={"batch_size": 50}, batch={"max_events": 200})
    with ExitStack() as stack:
        for _ in range(instances):
            stack.enter_context(relaying(settings))
        outbox.fill(500, events=3, hosts=32)
        outbox.wait_handled(120)
    assert outbox.value("select count(*) from projection") == 11_500
    outbox.assert_exact()


def test_pinned_instances_process_their_own_partitions(outbox: Outbox) -> None:
    outbox.fill(200, events=5, hosts=32)
    partition = "mod(abs(hashtext(host_id::text)::bigint), 8)"
    with relaying(polling(outbox, poll={"partition_ids": [0, 1, 2]})):
        mine = outbox.value(f"select count(*) from outbox_message_t where {partition} in (0, 1, 2)")
        wait_until(lambda: outbox.handled() >= mine)
        # Hosts of partitions of both instances in one transaction: the least partition's instance takes them.
        with outbox.conn.transaction():
            shared = uuid.uuid4()
            for number in range(16):
                outbox.publish(host(number), event(number), transaction_id=shared)
        assert outbox.handled() == mine
        with relaying(polling(outbox, poll={"partition_ids": [3, 4, 5, 6, 7]})):
            outbox.wait_handled()
    outbox.assert_exact()


@pytest.mark.parametrize("mode", ["poll", "auto"])
def test_concurrent_publishers_lose_nothing(outbox: Outbox, mode: str) -> None:
    def publish(number: int) -> None:
        chance = random.Random(number)
        with psycopg.connect(outbox.publisher_dsn) as conn:
            for _ in range(25):
                for _ in range(chance.randrange(1, 4)):
                    conn.execute(
                        "select relay.publish(%s, null, %s)",
                        (
                            host(chance.randrange(20)),
                            Jsonb([event(n) for n in range(chance.randrange(1, 6))]),
                        ),
                    )
                if chance.random() < 0.1:
                    conn.execute("select pg_sleep(0.3)")
                conn.rollback() if chance.random() < 0.3 else conn.commit()

    settings = outbox.settings(
        source={**outbox.config()["source"], "mode": mode}, poll={"batch_size": 5}
    )
    with relaying(settings), relaying(settings):
        threads = [Thread(target=publish, args=(number,)) for number in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        outbox.wait_handled(120)
    outbox.assert_complete()


def poll_whole(poller: Poller, pipeline: Pipeline) -> None:
    while batch := poller.window():
        pipeline.run(batch)


def poll_all(settings: Settings) -> None:
    """Poll what there is now, and no more."""
    with (
        closing(Poller(settings)) as poller,
        closing(Session(settings.spark, settings)) as session,
        closing(Pipeline(settings, SparkEngine(settings, session))) as pipeline,
    ):
        poll_whole(poller, pipeline)


def test_a_range_of_before_a_seek_that_comes_late_applies_nothing(outbox: Outbox) -> None:
    settings = polling(outbox, group="late")
    for number in range(5):
        outbox.publish(host(1), event(number))
    initialise(settings)
    for number in range(5, 10):
        outbox.publish(host(1), event(number))
    with closing(Poller(settings)) as poller, closing(Applier(settings, 1)) as frozen:
        batch = poller.window()
        assert batch is not None
        (work,) = Planner(settings.partitions).work(batch, None)
        poll_all(settings)
        assert outbox.column("select amount from projection order by seq") == [5, 6, 7, 8, 9]
        outbox.conn.execute("truncate projection")
        seek(settings, plan_seek(settings, "beginning", None), None)
        assert frozen.apply(work).applied == 0
    assert outbox.value("select count(*) from projection") == 0
    poll_all(settings)
    assert outbox.value("select count(*) from projection") == 10
    outbox.assert_exact()


def test_another_instance_may_go_on_between_any_two_statements_of_a_poll(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = polling(outbox)
    execute = psycopg.Connection.execute
    left: int | None = None

    def interrupted(conn: psycopg.Connection[Any], *arguments: Any, **more: Any) -> Any:
        nonlocal left
        found = execute(conn, *arguments, **more)
        # Within a transaction of the one, the other could only wait for its end.
        idle = conn.info.transaction_status is psycopg.pq.TransactionStatus.IDLE
        if left is not None and idle and threading.current_thread() is threading.main_thread():
            left -= 1
            if not left:
                left = None
                outbox.publish(host(1), event(1))
                poll_whole(quick, pipeline)
        return found

    monkeypatch.setattr(psycopg.Connection, "execute", interrupted)
    with (
        closing(Poller(settings)) as slow,
        closing(Poller(settings)) as quick,
        closing(Session(settings.spark, settings)) as session,
        closing(Pipeline(settings, SparkEngine(settings, session))) as pipeline,
    ):
        for number in count(1):
            outbox.publish(host(number), event(number))
            # Applied, but no partition has gone on yet.
            batch = quick.window()
            assert batch is not None
            pipeline.run(batch)
            waiting: int | None = number
            while True:
                left = waiting
                batch = slow.window()
                waiting, left = left, None
                if batch is None:
                    break
                pipeline.run(batch)
            outbox.assert_exact()
            if waiting is not None:
                break
    assert number > 5


@pytest.mark.parametrize("modes", [("poll", "auto"), ("auto", "poll")], ids=" then ".join)
def test_an_event_without_a_host_is_applied_either_way(
    outbox: Outbox, modes: tuple[str, str]
) -> None:
    outbox.conn.execute("alter table outbox_message_t alter host_id drop not null")
    for mode in modes:
        outbox.conn.execute(
            "insert into outbox_message_t (host_id, event_type, payload) values (null, 'x', '{\"amount\": 1}')"
        )
        outbox.publish(host(1), event(1))
        with relaying(outbox.settings(source={**outbox.config()["source"], "mode": mode})):
            outbox.wait_handled()
            if mode == "auto":
                outbox.wait_drained()
    assert outbox.value("select count(*) from projection where host_id is null") == 2
    outbox.assert_exact()


def test_old_rows_that_share_an_offset_are_refused_until_they_are_numbered(outbox: Outbox) -> None:
    for number in range(4):
        outbox.publish(host(number), event(number))
    outbox.conn.execute("update outbox_message_t set c_xid = null, c_offset = 7")
    settings = polling(outbox, group="late")
    with pytest.raises(ConfigurationError, match="share a c_offset: number each of them"):
        initialise(settings, start="beginning")
    initialise(settings)
    with pytest.raises(ConfigurationError, match="share a c_offset: number each of them"):
        plan_seek(settings, "beginning", None)
    poll_all(settings)
    assert outbox.value("select count(*) from projection") == 0
    outbox.conn.execute(
        "update outbox_message_t as o set c_offset = n"
        " from (select id, row_number() over (order by id) as n from outbox_message_t) as i where i.id = o.id"
    )
    seek(settings, plan_seek(settings, "beginning", None), None)
    poll_all(settings)
    assert outbox.value("select count(*) from projection") == 4
    outbox.assert_exact()


def test_the_index_finds_the_rows_of_a_difference(outbox: Outbox) -> None:
    outbox.fill(4_000, events=50, hosts=64)
    before = current_position(outbox.conn).snapshot
    outbox.fill(10, events=50, hosts=64)
    outbox.conn.execute("vacuum analyze outbox_message_t")
    prepare_reading(outbox.conn)
    between = Difference(before, current_position(outbox.conn).snapshot)
    rows = OutboxRows(outbox.settings())
    plan = "\n".join(
        row[0]
        for row in outbox.conn.execute(
            sql.SQL("explain select from public.outbox_message_t where {}").format(
                condition(between)
            )
        )
    )
    assert "Scan using outbox_message_t_relay_c_xid" in plan
    assert len(rows.inserted(outbox.conn, between)[0].xids) == 10


def test_the_rows_of_a_portion_are_read_without_statistics(outbox: Outbox) -> None:
    """Each portion of a new table took the longer, the more rows it had: they were joined with the whole index."""
    outbox.conn.execute("alter table outbox_message_t set (autovacuum_enabled = off)")
    outbox.fill(8_000)
    # Then the size is known, but nothing of the columns.
    outbox.conn.execute("vacuum outbox_message_t")
    prepare_reading(outbox.conn)
    xids = outbox.column(
        "select distinct c_xid::text::bigint as x from outbox_message_t order by x"
    )
    last = np.array(xids[-200:], np.int64)
    rows = OutboxRows(outbox.settings())
    reading = rows._reading(rows.columns(outbox.conn), Wanted(last, last), ())
    query = reading.as_string(outbox.conn).removeprefix("copy (").removesuffix(") to stdout")
    (plan,) = outbox.value(f"explain (analyze, format json) {query}")
    read = [
        each["Actual Rows"] * each["Actual Loops"]
        for each in nodes(plan["Plan"])
        if each.get("Relation Name") == "outbox_message_t"
    ]
    assert sum(read) == 1_000


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for each in plan.get("Plans", ()):
        yield from nodes(each)


@pytest.mark.parametrize("text", ["\b\f\n\r\t\v", "\\", "\\N", "\\t\\x41\\101", "a\\\nb\tü\\."])
def test_a_text_is_polled_as_it_is(outbox: Outbox, text: str) -> None:
    outbox.publish(host(1), event(1, aggregate_id=text))
    rows = OutboxRows(outbox.settings())
    between = Difference(BEGINNING, current_position(outbox.conn).snapshot)
    (portion,) = rows.plan(outbox.conn, between, FIRST)
    (share,) = portion.shares
    (transactions,) = rows.commits(outbox.conn, Wanted(share.xids, share.positions))
    index = transactions.columns.index("aggregate_id")
    assert columns(transactions.rows, [index]) == [(text.encode(),)]


@pytest.mark.parametrize("mode", ["poll", "auto"])
def test_rows_of_another_cluster_are_refused_and_found_by_check(outbox: Outbox, mode: str) -> None:
    settings = outbox.settings(source={**outbox.config()["source"], "mode": mode})
    outbox.fill(100)
    outbox.conn.execute("update outbox_message_t set c_xid = null where c_offset > 490")
    assert not [each for each in examine(settings) if each.level is Severity.ERROR]
    outbox.conn.execute("update outbox_message_t set c_xid = '4000000000' where c_offset = 7")
    (found,) = (each for each in examine(settings) if each.level is Severity.ERROR)
    assert found.subject == "positions"
    assert "has rows whose c_xid this server has not assigned yet" in found.text
    with pytest.raises(
        ConfigurationError, match="has rows whose c_xid this server has not assigned"
    ):
        poll_all(settings)


def test_a_relay_that_polls_says_so(outbox: Outbox, tmp_path: Path) -> None:
    source = {**outbox.config()["source"], "mode": "poll"}
    with running(outbox.config_file(tmp_path / "relay.yaml", source=source)) as service:
        service.wait_said("polling")
        assert service.terminate() == 0
        (said,) = (line for line in service.lines() if line["message"] == "polling")
        assert said["reason"] == "source.mode is poll"
        (stopped,) = (line for line in service.lines() if line["message"] == "stopped")
        assert "lsn" not in stopped


@pytest.mark.parametrize("mode", ["poll", "auto", "wal"])
def test_a_source_that_lags_the_group_stops_relay(outbox: Outbox, mode: str) -> None:
    settings = outbox.settings(source={**outbox.config()["source"], "mode": mode})
    outbox.fill(10)
    with relaying(polling(outbox)):
        outbox.wait_handled()
    # What it has applied, the server is still to give.
    outbox.conn.execute("update relay.snapshots set snapshot = '4000000000:4000000000:'")
    ended = ExitStack()
    ended.enter_context(relaying(settings))
    wait_until(lambda: "relay" not in {thread.name for thread in threading.enumerate()})
    with pytest.raises(RelayError, match="has applied transactions below 4000000000"):
        ended.close()
    assert outbox.handled() == 50


def test_old_rows_that_share_an_offset_since_the_group_began_are_applied_once(
    outbox: Outbox,
) -> None:
    settings = polling(outbox, group="late")
    initialise(settings, start="beginning")
    for number in range(4):
        outbox.publish(host(number), event(number))
    outbox.conn.execute("update outbox_message_t set c_xid = null, c_offset = 7")
    poll_all(settings)
    assert outbox.value("select count(*) from projection") == 4
    outbox.assert_exact()


def test_a_partition_at_a_snapshot_that_is_gone_stops_relay(outbox: Outbox) -> None:
    outbox.conn.execute("update relay.snapshots set id = -id")
    outbox.publish(host(1), event(1))
    with pytest.raises(RelayError, match=r"which relay\.snapshots does not have"):
        poll_all(polling(outbox))
