"""Publishes at a fixed rate and notes the clock just before each COMMIT.

It ends after the job's `seconds`, or within a second after the file `until` exists. It has one connection, publishes
in its own transactions, and its commits are durable.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psycopg

from bench.workers.talk import arguments, say

EVENTS, HOSTS = 5, 64
EVENT_TYPE = "order.placed"
Publish = Callable[[int, list[dict[str, Any]]], None]


def type_of(transaction: int, types: Mapping[str, int]) -> str:
    """The type of a transaction's events: the first of `types` of which this is the n-th transaction."""
    named = (name for name, every in types.items() if transaction % every == every - 1)
    return next(named, EVENT_TYPE)


def events_of(
    transaction: int, count: int = EVENTS, event_type: str = EVENT_TYPE
) -> list[dict[str, Any]]:
    """The events of a transaction, each with its own aggregate, which identifies its arrival."""
    note = "x" * 100
    return [
        {
            "event_type": event_type,
            "aggregate_type": "Order",
            "aggregate_id": str(count * transaction + n),
            "payload": {"order": transaction, "amount": n, "note": note},
        }
        for n in range(count)
    ]


def host_of(transaction: int, hosts: int = HOSTS) -> str:
    return f"00000000-0000-4000-8000-{transaction % hosts:012}"


def user_of(transaction: int) -> str:
    return f"00000000-0000-4000-9000-{transaction % 1000:012}"


def to_relay(conn: psycopg.Connection[Any], hosts: int = HOSTS) -> Publish:
    """Publish with `relay.publish`, one call for all events of the transaction."""

    def publish(transaction: int, events: list[dict[str, Any]]) -> None:
        conn.execute(
            "select relay.publish(%s::uuid, %s::uuid, %s::jsonb)",
            (host_of(transaction, hosts), user_of(transaction), json.dumps(events)),
        )

    return publish


def to_pgqueuer(conn: psycopg.Connection[Any]) -> Publish:
    """Publish with pgqueuer's batch enqueue: a job for each event, in one statement."""
    from pgqueuer.adapters.drivers.psycopg import SyncPsycopgDriver
    from pgqueuer.queries import SyncQueries

    queries = SyncQueries(SyncPsycopgDriver(conn))

    def publish(transaction: int, events: list[dict[str, Any]]) -> None:
        ids = {"host_id": host_of(transaction), "user_id": user_of(transaction)}
        jobs: list[bytes | None] = [
            json.dumps({"id": str(uuid.uuid4()), **ids, **event}).encode() for event in events
        ]
        queries.enqueue(["bench"] * len(jobs), jobs, [0] * len(jobs))

    return publish


def to_outbox(conn: psycopg.Connection[Any]) -> Publish:
    """Insert into the table of pg-transactional-outbox, all rows in one statement; the host is the segment."""
    row = "(gen_random_uuid(), %s, %s, %s, %s, %s::jsonb)"
    statement = (
        "insert into outbox (id, aggregate_type, aggregate_id, message_type, segment, payload)"
        f" values {', '.join([row] * EVENTS)}"
    )

    def publish(transaction: int, events: list[dict[str, Any]]) -> None:
        values: list[Any] = []
        for event in events:
            values += [event["aggregate_type"], event["aggregate_id"], event["event_type"]]
            values += [host_of(transaction), json.dumps(event["payload"])]
        conn.execute(statement.encode(), values)

    return publish


STYLES = {"relay": to_relay, "pgqueuer": to_pgqueuer, "pg-transactional-outbox": to_outbox}


def main() -> None:
    job = arguments()
    rate, transactions = job["rate"], int(job["rate"] * job["seconds"])
    count = job.get("events", EVENTS)
    until = Path(job["until"]) if "until" in job else None
    first, types = job.get("first", 0), job.get("types", {})
    committing: list[int] = []
    with psycopg.connect(job["dsn"], autocommit=True, application_name="bench publisher") as conn:
        publish = STYLES[job["style"]](conn)
        if "hosts" in job:
            publish = to_relay(conn, job["hosts"])
        started = time.perf_counter()
        for transaction in range(transactions):
            if until and transaction % rate == 0 and until.exists():
                break
            number = first + transaction
            events = events_of(number, count, type_of(number, types))
            pause = started + transaction / rate - time.perf_counter()
            if pause > 0:
                time.sleep(pause)
            with conn.transaction():
                publish(number, events)
                committing.append(time.time_ns())
        took = time.perf_counter() - started
    lines = [
        f"{count * transaction + n} {clock}"
        for transaction, clock in enumerate(committing, first)
        for n in range(count)
    ]
    Path(job["file"]).write_text("\n".join(lines))
    say("done", rate=len(committing) / took)


if __name__ == "__main__":
    main()
