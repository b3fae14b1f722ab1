"""Measures publishing with `relay.client` beside a hand-written insert with the same driver."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable

import asyncpg
import psycopg
import sqlalchemy
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.json import Jsonb
from sqlalchemy.orm import Session

from bench.outbox import Outbox
from bench.results import Measurement
from relay.client import Event
from relay.client import Outbox as Client

COLUMNS = (
    "id",
    "host_id",
    "aggregate_type",
    "aggregate_id",
    "event_type",
    "payload",
    "transaction_id",
    "transaction_ordinal",
    "transaction_count",
)
HOST = uuid.UUID(int=1)
PAYLOAD = {"order": 42, "amount": "19.99", "note": "x" * 100}
CLIENT = Client()

Publish = Callable[[int, int], None]


def _values(number: int, count: int, transaction: uuid.UUID, payload: object) -> tuple[object, ...]:
    placed = ("Order", str(number), "order.placed", payload)
    return (uuid.uuid4(), HOST, *placed, transaction, number + 1, count)


def _events(count: int) -> list[Event]:
    return [Event("order.placed", ("Order", number), payload=PAYLOAD) for number in range(count)]


def _insert(placeholder: Callable[[int], str]) -> str:
    marks = ", ".join(placeholder(number) for number in range(1, len(COLUMNS) + 1))
    return f"insert into outbox_message_t ({', '.join(COLUMNS)}) values ({marks})"


def measure(
    outbox: Outbox, driver: str, by_hand: bool, transactions: int, events: int
) -> Measurement:
    """Events a second of consecutive transactions in one session."""
    outbox.conn.execute("truncate outbox_message_t")
    run = {"psycopg": _psycopg, "SQLAlchemy": _sqlalchemy, "asyncpg": _asyncpg}[driver]
    return {"events/s": transactions * events / run(outbox.dsn, by_hand, transactions, events)}


def _psycopg(dsn: str, by_hand: bool, transactions: int, events: int) -> float:
    statement = _insert(lambda _: "%s").encode()
    with psycopg.connect(dsn) as conn:
        started = time.perf_counter()
        for _ in range(transactions):
            if by_hand:
                transaction, payload = uuid.uuid4(), Jsonb(PAYLOAD)
                rows = [_values(n, events, transaction, payload) for n in range(events)]
                if events == 1:
                    conn.execute(statement, rows[0])
                else:
                    conn.cursor().executemany(statement, rows)
            else:
                CLIENT.publish(conn, _events(events), host_id=HOST)
            conn.commit()
        return time.perf_counter() - started


def _sqlalchemy(dsn: str, by_hand: bool, transactions: int, events: int) -> float:
    engine = sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))
    statement = sqlalchemy.text(_insert(lambda n: f":{COLUMNS[n - 1]}"))
    started = time.perf_counter()
    for _ in range(transactions):
        with Session(engine) as session, session.begin():
            if by_hand:
                transaction, payload = uuid.uuid4(), Jsonb(PAYLOAD)
                rows = [_values(n, events, transaction, payload) for n in range(events)]
                session.execute(statement, [dict(zip(COLUMNS, row, strict=True)) for row in rows])
            else:
                CLIENT.publish(session, _events(events), host_id=HOST)
    seconds = time.perf_counter() - started
    engine.dispose()
    return seconds


def _asyncpg(dsn: str, by_hand: bool, transactions: int, events: int) -> float:
    statement = _insert(lambda n: f"${n}")
    fields = conninfo_to_dict(dsn)

    async def run() -> float:
        conn = await asyncpg.connect(
            host=fields["host"],
            port=fields["port"],
            user=fields.get("user"),
            password=fields.get("password"),
            database=fields["dbname"],
        )
        started = time.perf_counter()
        for _ in range(transactions):
            async with conn.transaction():
                if by_hand:
                    transaction, payload = uuid.uuid4(), json.dumps(PAYLOAD)
                    rows = [_values(n, events, transaction, payload) for n in range(events)]
                    if events == 1:
                        await conn.execute(statement, *rows[0])
                    else:
                        await conn.executemany(statement, rows)
                else:
                    await CLIENT.publish_async(conn, _events(events), host_id=HOST)
        seconds = time.perf_counter() - started
        await conn.close()
        return seconds

    return asyncio.run(run())
