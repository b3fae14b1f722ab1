"""`python -m bench.retention [ROWS]`: prints publishers' latencies during a conversion and during rotation, in ms.

Publishers insert one event a transaction, at a fixed rate if the machine is fast enough.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from threading import Event, Thread

import psycopg
from psycopg.types.json import Jsonb

from bench.outbox import SERVER_SETTINGS
from relay.admin.install import initialise
from relay.admin.retention import partition
from relay.config.settings import Settings
from relay.demo.embedded import Cluster
from relay.retention.schedule import Schedule
from relay.store.connections import connect

RATE = 500
"""Transactions a second."""
CLIENTS = 4
SECONDS = 15.0
ROUNDS = 3
_DAYS = int(SECONDS * 10)
"""The most days of a round of rotation."""

_FILL = """
    insert into outbox_message_t (host_id, aggregate_type, event_type, payload, transaction_id, transaction_ordinal,
                                  transaction_count)
    select gen_random_uuid(), 'Order', 'order.placed', jsonb_build_object('amount', n, 'note', repeat('x', 100)),
           gen_random_uuid(), 1, 1
      from generate_series(1, %s) as n
"""


def _publish(dsn: str, stopping: Event, latencies: list[float]) -> None:
    event = Jsonb([{"event_type": "a", "aggregate_type": "A", "aggregate_id": "1", "payload": {}}])
    pause = CLIENTS / RATE
    with psycopg.connect(dsn, autocommit=True) as conn:
        due = time.monotonic()
        while not stopping.is_set():
            due += pause
            time.sleep(max(0.0, due - time.monotonic()))
            started = time.monotonic()
            conn.execute("select relay.publish(gen_random_uuid(), null, %s)", (event,))
            latencies.append(time.monotonic() - started)


def _beside_publishers(dsn: str, what: str, act: Callable[[Event], object]) -> None:
    stopping, latencies = Event(), list[float]()
    threads = [Thread(target=_publish, args=(dsn, stopping, latencies)) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    started = time.monotonic()
    act(stopping)
    seconds = time.monotonic() - started
    stopping.set()
    for thread in threads:
        thread.join()
    ordered = sorted(latencies)
    p50, p99 = (ordered[int(len(ordered) * part)] * 1000 for part in (0.5, 0.99))
    print(
        f"{what}: {seconds:.1f} s, {len(ordered)} publications, p50 {p50:.1f} ms, p99 {p99:.1f} ms, "
        f"longest {ordered[-1] * 1000:.0f} ms",
        flush=True,
    )


def _nothing(stopping: Event) -> object:
    return stopping.wait(SECONDS)


def _rotate(settings: Settings, first_day: int) -> Callable[[Event], object]:
    """Rotate by a day every tenth of a second: create a partition, and drop one."""

    def run(stopping: Event) -> None:
        with (
            closing(connect(settings.source_dsn)) as source,
            closing(connect(settings.target_dsn)) as target,
        ):
            until = time.monotonic() + SECONDS
            moment = datetime.now(UTC) + timedelta(days=first_day)
            while time.monotonic() < until:
                moment += timedelta(days=1)
                Schedule(settings, lambda: None, lambda now=moment: now).retain(source, target)  # type: ignore[misc]
                stopping.wait(0.1)
        with connect(settings.source_dsn) as conn:
            (left,) = conn.execute(
                "select min(lower) filter (where lower > '-infinity') from relay.partitions('public.outbox_message_t')"
            ).fetchone() or (None,)
        print(f"rotated up to {moment:%Y-%m-%d}; the oldest partition is that of {left}")

    return run


def main(rows: int) -> None:
    """Measure on a private server."""
    with Cluster(settings=SERVER_SETTINGS) as cluster:
        dsn = cluster.dsn()
        settings = Settings.model_validate(
            {
                "source": {"dsn": dsn, "mode": "poll"},
                "retention": {"keep": "7d"},
                "unrouted": "ignore",
            }
        )
        initialise(settings)
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(_FILL, (rows,))
            conn.execute("vacuum analyze outbox_message_t")
        _beside_publishers(dsn, "neither", _nothing)
        _beside_publishers(dsn, f"conversion of {rows} rows", lambda _: partition(settings, "1d"))
        with psycopg.connect(dsn, autocommit=True) as conn:
            # No instance of the group runs, so its position would hold every partition.
            conn.execute("update relay.snapshots set snapshot = pg_current_snapshot()")
        for number in range(ROUNDS):
            _beside_publishers(dsn, "neither", _nothing)
            _beside_publishers(dsn, "rotation", _rotate(settings, number * _DAYS))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
