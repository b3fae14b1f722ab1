"""Polling: ranges that end no transaction in its midst, several instances, pinned partitions, rows of long ago."""

from __future__ import annotations

import random
import threading
import uuid
from contextlib import ExitStack
from threading import Thread
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from relay.faults import RelayError
from relay.source.rows import Difference, OutboxRows, prepare_reading
from relay.source.server import sight
from tests.outbox import Outbox, event, host, relaying, wait_until

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
    assert outbox.column("select distinct transaction_id from relay.dead_letter_queue") == [poison]
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


@pytest.mark.parametrize("instances", [2, 4])
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
        with psycopg.connect(outbox.dsn) as conn:
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


def test_the_index_finds_the_rows_of_a_difference(outbox: Outbox) -> None:
    outbox.fill(4_000, events=50, hosts=64)
    before = sight(outbox.conn).snapshot
    outbox.fill(10, events=50, hosts=64)
    outbox.conn.execute("vacuum analyze outbox_message_t")
    prepare_reading(outbox.conn)
    between = Difference(before, sight(outbox.conn).snapshot)
    rows = OutboxRows(outbox.settings())
    plan = "\n".join(
        row[0]
        for row in outbox.conn.execute(
            sql.SQL("explain select from outbox_message_t where {}").format(rows.between(between))
        )
    )
    assert "Scan using outbox_message_t_relay_c_xid" in plan
    assert sum(map(len, rows.xids(outbox.conn, between).values())) == 10


@pytest.mark.parametrize("mode", ["poll", "auto", "wal"])
def test_a_source_that_is_behind_the_group_stops_relay(outbox: Outbox, mode: str) -> None:
    settings = outbox.settings(source={**outbox.config()["source"], "mode": mode})
    outbox.fill(10)
    with relaying(polling(outbox)):
        outbox.wait_handled()
    # What it has applied, the server is still to give.
    outbox.conn.execute("update relay.snapshots set snapshot = '4000000000:4000000000:'")
    ended = ExitStack()
    ended.enter_context(relaying(settings))
    wait_until(lambda: "relay" not in {thread.name for thread in threading.enumerate()})
    with pytest.raises(RelayError, match="has applied what came before 4000000000"):
        ended.close()
    assert outbox.handled() == 50
