"""The stream under real conditions: idleness, slow handlers, large transactions, altered tables, standby."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
from psycopg.conninfo import make_conninfo

from relay.admin.offsets import plan_seek, seek
from relay.source import hybrid
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.process import running


def lag(outbox: Outbox) -> Any:
    """The bytes of WAL that the slot holds back."""
    return outbox.value(
        "select pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn) from pg_replication_slots"
        " where slot_name = %s",
        (outbox.slot,),
    )


def test_an_idle_outbox_does_not_hold_the_wal_of_others(outbox: Outbox) -> None:
    outbox.conn.execute(
        "create table noise (filler text); alter table noise alter filler set storage external"
    )
    before = outbox.value("select pg_current_wal_lsn()::text")
    with relaying(outbox.settings()):
        outbox.publish(host(1), event(1))
        for _ in range(5):
            # Five statements, since the walsender decodes a transaction as a whole.
            outbox.conn.execute(
                "insert into noise select repeat(md5(n::text), 250) from generate_series(1, 13000) n"
            )
        written = outbox.value(
            "select pg_wal_lsn_diff(pg_current_wal_lsn(), %s::pg_lsn)", (before,)
        )
        assert written > 500_000_000
        outbox.wait_drained()
        # Not at once: the server goes on writing, such as the pages of a checkpoint.
        wait_until(lambda: lag(outbox) < written / 50)
    outbox.assert_exact()


def test_a_handler_slower_than_wal_sender_timeout_keeps_the_connection(outbox: Outbox) -> None:
    dsn = make_conninfo(outbox.relay_dsn, options="-c wal_sender_timeout=1s")
    handlers = {
        "slow": {
            "type": "sql",
            "statement": "insert into projection (id) select %(id)s from pg_sleep(4)",
        }
    }
    settings = outbox.settings(
        source={**outbox.config()["source"], "dsn": dsn},
        handlers=handlers,
        routes=[{"handlers": ["slow"]}],
    )
    outbox.publish(host(1), event(1))
    with relaying(settings):
        wait_until(lambda: bool(reader(outbox)))
        first = reader(outbox)
        outbox.wait_drained()
        assert reader(outbox) == first
    assert outbox.value("select count(*) from projection") == 1


def reader(outbox: Outbox) -> int | None:
    found = outbox.value(
        "select active_pid from pg_replication_slots where slot_name = %s", (outbox.slot,)
    )
    return int(found) if found else None


def test_a_lost_replication_connection_is_made_again(outbox: Outbox) -> None:
    with relaying(outbox.settings()):
        for number in range(5):
            outbox.publish(host(number), event(number))
            outbox.wait_drained()
            pid = reader(outbox)
            outbox.conn.execute("select pg_terminate_backend(%s)", (pid,))
            wait_until(lambda gone=pid: reader(outbox) not in (None, gone))  # type: ignore[misc]
        outbox.publish(host(1), event(9))
        outbox.wait_drained()
    outbox.assert_exact()
    assert outbox.value("select count(*) from projection") == 6


def test_a_second_relay_stands_by_and_takes_over(outbox: Outbox) -> None:
    with relaying(outbox.settings()):
        wait_until(lambda: bool(reader(outbox)))
        first = reader(outbox)
        with relaying(outbox.settings()) as second:
            outbox.publish(host(1), event(1))
            outbox.wait_drained()
            assert reader(outbox) == first
            assert second.flushed == 0
    with relaying(outbox.settings()) as successor:
        outbox.publish(host(1), event(2))
        outbox.wait_drained()
        assert successor.flushed > 0
    outbox.assert_exact()


def test_the_table_may_be_altered_in_mid_stream(outbox: Outbox) -> None:
    with relaying(outbox.settings()):
        outbox.publish(host(1), event(1))
        outbox.conn.execute("alter table outbox_message_t add column extra text default 'x'")
        outbox.publish(host(1), event(2))
        outbox.conn.execute(
            "alter table outbox_message_t drop column aggregate_version, drop column extra"
        )
        # relay.publish names the dropped column, an insert of one's own does not.
        with outbox.conn.transaction():
            insert = (
                "insert into outbox_message_t (host_id, event_type, payload) "
                "values (%s, 'x', jsonb_build_object('amount', %s::int))"
            )
            outbox.conn.execute(insert, (host(1), 3))
            outbox.conn.execute("alter table outbox_message_t add column extra text default 'y'")
            outbox.conn.execute(insert, (host(1), 4))
        outbox.wait_drained()
    assert outbox.column("select amount from projection order by seq") == [1, 2, 3, 4]
    outbox.assert_exact()


def test_copies_of_rows_are_left_out_and_said(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hybrid, "AUDIT_SECONDS", 0.2)
    outbox.conn.execute("create table staging (like outbox_message_t including all)")
    outbox.conn.execute(
        "insert into staging (host_id, event_type, payload)"
        " select %s, 'x', jsonb_build_object('amount', n) from generate_series(10, 11) n",
        (host(1),),
    )
    # Every snapshot of the group sees who has inserted them.
    settings = outbox.settings()
    seek(settings, plan_seek(settings, "end", None), None)
    with relaying(settings):
        outbox.publish(host(1), event(1))
        outbox.wait_drained()
        with outbox.conn.transaction():
            outbox.conn.execute("insert into outbox_message_t select * from staging")
            outbox.publish(host(1), event(2))
        outbox.conn.execute("update staging set id = gen_random_uuid()")
        outbox.conn.execute("insert into outbox_message_t select * from staging")
        outbox.publish(host(1), event(3))
        outbox.wait_drained()
        outbox.wait_compared()
    assert outbox.column("select amount from projection order by seq") == [1, 2, 3]
    assert outbox.value("select count(*) from outbox_message_t") == 7
    said = [
        (record.name, record.levelname, record.__dict__["rows"])
        for record in caplog.records
        if record.getMessage()
        == "the stream has copies of rows, whose c_xid is that of another transaction; polling applies them unless "
        "that transaction is applied"
    ]
    assert {each[:2] for each in said} == {("relay.source.stream.receiver", "WARNING")}
    assert sum(rows for _, _, rows in said) == 4


def test_a_large_transaction_is_spooled_and_applied_whole(outbox: Outbox) -> None:
    settings = outbox.settings(batch={"max_bytes": 4096})
    outbox.publish(host(1), event(1))
    large = outbox.publish(host(2), *(event(n) for n in range(500)))
    with outbox.conn.transaction():
        poison = outbox.publish(host(2), *(event(n) for n in range(300)), event(-1))
        outbox.publish(host(3), *(event(n) for n in range(100)))
    outbox.publish(host(2), event(2))
    outbox.drain(settings)
    assert (
        outbox.value("select count(*) from projection where transaction_id = %s", (large,)) == 500
    )
    assert outbox.value("select count(*) from projection") == 602
    assert outbox.column("select distinct transaction_id::uuid from relay.dead_letter_queue") == [
        poison
    ]
    outbox.assert_exact()


def test_a_commit_larger_than_the_receive_buffer_is_spooled(outbox: Outbox) -> None:
    settings = outbox.settings(
        source={**outbox.config()["source"], "buffer_bytes": 65_536},
        batch={"max_bytes": 16 * 1024 * 1024},
    )
    # More than the receiver reads at once, so that it has to read with the commit open.
    outbox.publish(host(2), *(event(n, metadata={"note": "x" * 8000}) for n in range(800)))
    outbox.publish(host(1), event(1))
    outbox.drain(settings)
    assert outbox.value("select count(*) from projection") == 801
    outbox.assert_exact()


@pytest.mark.rare
@pytest.mark.timeout(900)
def test_a_million_events_in_one_transaction_stay_out_of_memory(
    outbox: Outbox, tmp_path: Path
) -> None:
    handlers = {
        "projection": {
            "type": "sql",
            "each": "batch",
            "statement": "insert into projection (id, host_id, c_offset, amount)"
            " select id, host_id, c_offset, (payload->>'amount')::numeric from batch",
        }
    }
    # The default limits, so that a Spark session is there as well.
    config = outbox.config_file(
        tmp_path / "relay.yaml", handlers=handlers, batch={}, spark={"eager": True}
    )
    count = 1_000_000
    outbox.conn.execute(
        f"""
        insert into outbox_message_t (host_id, event_type, payload, transaction_id)
        select %s, 'order.placed', jsonb_build_object('order', n, 'amount', n, 'note', repeat('x', 100)),
               '00000000-0000-4000-8000-000000000001'
          from generate_series(1, {count}) n
        """.encode(),
        (host(1),),
    )
    with running(config, memory="own") as service:
        service.wait_said("the Spark session is ready", 120)
        process = psutil.Process(service.process.pid)
        tip = outbox.wal_end()
        peak = 0

        def drained() -> bool:
            nonlocal peak
            peak = max(peak, process.memory_info().rss)
            return outbox.confirmed(tip)

        wait_until(drained, 600)
        assert service.terminate() == 0
    assert outbox.value("select count(*) from projection") == count
    assert outbox.value("select count(distinct id) from projection") == count
    print(f"peak resident set {peak / 1e6:.0f} MB")
    assert peak < 300_000_000


def test_the_last_position_is_confirmed_at_a_clean_stop(outbox: Outbox, tmp_path: Path) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml")
    with running(config) as service:
        outbox.fill(500)
        wait_until(lambda: outbox.value("select count(*) from projection") == 2500)
        assert service.terminate() == 0
    tip = outbox.value("select max(applied_lsn)::text from relay.consumer_offsets")
    assert outbox.confirmed(tip)
