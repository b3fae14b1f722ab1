"""Nothing grows with time: lost sessions, changed secrets, faults that stay.

Public reports: risingwavelabs/risingwave#25922, element-hq/synapse#19471, debezium/debezium#2768,
debezium/debezium-connector-jdbc#44, apache/flink-cdc#2980, MagicStack/asyncpg#210, psycopg/psycopg2#148,
powersync-ja/powersync-service#395, miguelgrinberg/python-socketio#1569, redis/redis-py#2831.
"""

from __future__ import annotations

import os
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from relay.sinks.circuit_breaker import CircuitBreaker
from relay.store.connections import open_pool
from tests.outbox import Outbox, event, host, wait_until
from tests.process import Running, running
from tests.webhook import Webhook

CUTS = 3
"""How often all sessions of relay are ended: some ten each time, after which the pauses of its parts grow."""
LATER_SESSIONS = 5
"""What is opened after the first seconds only: of another worker, of the counts of metrics."""
LATER_THREADS = CUTS - 1
"""Pools start threads when they are needed; one that is left behind each time would be more."""
_OF_RELAY = """
    from pg_stat_activity
     where datname = current_database() and application_name ~ '^relay'
       and backend_type in ('client backend', 'walsender')
"""


@dataclass(frozen=True)
class Used:
    """What a process of relay takes. `lost` are sockets that the other end has closed."""

    lost: int
    sessions: int
    descriptors: int
    threads: int
    files: int

    @classmethod
    def by(cls, running: Running, outbox: Outbox, folder: Path) -> Used:
        """Count it now; `folder` is the folder of temporary files."""
        process = psutil.Process(running.process.pid)
        sockets = process.net_connections(kind="tcp")
        return cls(
            sum(each.status == psutil.CONN_CLOSE_WAIT for each in sockets),
            int(outbox.value(f"select count(*) {_OF_RELAY}")),
            process.num_fds(),
            process.num_threads(),
            sum(len(inner) + len(names) for _, inner, names in os.walk(folder)),
        )


@pytest.mark.rare
def test_lost_sessions_and_new_secrets_leave_nothing_behind(outbox: Outbox, tmp_path: Path) -> None:
    secret, temporary = tmp_path / "token", tmp_path / "temporary"
    temporary.mkdir()
    secret.write_text("token 0")
    published = 0

    def reaches_all() -> None:
        nonlocal published
        for number in range(8):
            outbox.publish(host(number), event())
        published += 8
        wait_until(lambda: outbox.handled() == published, 30)
        wait_until(lambda: len({each.event["id"] for each in webhook.requests}) == published, 30)

    with Webhook() as webhook:
        headers = {"authorization": {"file": str(secret)}}
        file = outbox.config_file(
            tmp_path / "relay.yaml",
            handlers={
                **outbox.config()["handlers"],
                "sink": {"type": "http", "url": webhook.url, "headers": headers},
            },
            routes=[{"handlers": ["projection", "sink"]}],
            observe={"listen": "127.0.0.1:0"},
        )
        with running(file, TMPDIR=str(temporary)) as process:
            process.wait_said("a sink is attached to the stream")
            reaches_all()
            before = Used.by(process, outbox, temporary)
            lost = 0
            for number in range(CUTS):
                lost += len(outbox.column(f"select pg_terminate_backend(pid) {_OF_RELAY}"))
                fresh = secret.with_suffix(".new")
                fresh.write_text(f"token {number + 1}")
                fresh.replace(secret)
                reaches_all()
            # A part whose pause has not ended keeps the socket of its lost session until then.
            wait_until(lambda: Used.by(process, outbox, temporary).lost == 0, 20, 0.2)
            after = Used.by(process, outbox, temporary)
    assert lost > 18
    assert webhook.requests[-1].headers["authorization"] == f"token {CUTS}"
    assert after.threads <= before.threads + LATER_THREADS
    assert after.files <= before.files
    assert after.sessions <= before.sessions + LATER_SESSIONS
    assert after.descriptors <= before.descriptors + LATER_SESSIONS


def test_a_session_that_cannot_be_prepared_is_closed(outbox: Outbox) -> None:
    """Each attempt of a pool, such as while a right is missing, would leave an open session."""

    def prepare(conn: psycopg.Connection[Any]) -> None:
        conn.execute("select 1 / 0")

    pool = open_pool(outbox.relay_dsn, 2, prepare)
    try:
        for _ in range(3):
            with pytest.raises(psycopg.errors.DivisionByZero), pool.connection():
                pass
        wait_until(lambda: outbox.value(f"select count(*) {_OF_RELAY}") == 0)
    finally:
        pool.close()


def test_a_destination_that_is_away_for_days_costs_no_memory() -> None:
    """Each key that has failed would be remembered until the destination is back."""
    breaker = CircuitBreaker(None)
    tracemalloc.start()
    try:
        for number in range(20_000):
            breaker.failed(f"host {number}")
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 100_000
