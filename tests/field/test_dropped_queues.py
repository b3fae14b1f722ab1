"""Who drops a queue that somebody works keeps the group from nothing: its events are applied meanwhile."""

from __future__ import annotations

from threading import Thread

import psycopg

from tests.outbox import Outbox, event, host, relaying, wait_until

_WAITS = """
    select exists (select from pg_stat_activity where datname = current_database() and query ~ 'drop_queue'
                      and wait_event_type = 'Lock' and pid <> pg_backend_pid())
"""


def test_a_queue_is_dropped_while_a_worker_has_a_message(outbox: Outbox) -> None:
    """relay.drop_queue waited for the worker with the lock of all partitions, so that relay applied nothing."""
    outbox.worker.execute("select relay.declare_queue('q', '{}', key => 'host')")
    with relaying(outbox.settings()), psycopg.connect(outbox.worker_dsn) as working:
        outbox.publish(host(1), event())
        outbox.wait_handled()
        assert working.execute("select id from relay.take('q')").fetchall()
        dropping = Thread(target=_drop, args=(outbox.worker_dsn,))
        dropping.start()
        try:
            wait_until(lambda: outbox.value(_WAITS), 20)
            for number in range(8):
                outbox.publish(host(number), event())
            outbox.wait_handled()
            assert dropping.is_alive()
        finally:
            working.rollback()
            dropping.join(60)
        outbox.publish(host(1), event())
        outbox.wait_handled()
    assert outbox.column("select name from relay.queues") == []
    assert outbox.value("select count(*) from relay.queue_messages") == 0


def _drop(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("select relay.drop_queue('q')")
