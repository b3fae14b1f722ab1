"""Publishing with `relay.client` beside an insert written by hand in the same driver."""

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
    """Events a second of so many transactions, one after the other, in one session."""
    outbox.conn.execute("truncate outbox_message_t")
    run = {"psycopg": _psycopg, "SQLAlchemy": _sqlalchemy, "asyncpg": _asyncpg}[driver]
    return {"events/s": transactions * events / run(outbox.dsn, by_hand, transactions, events)}


def _psycopg(dsn: str, by_hand: bool, transactions: int, events: int) -> float:
    statement = _insert(lambda _: "%s").encode()
    with psycopg.connect(dsn) as conn:
        begun = time.perf_counter()
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
        return time.perf_counter() - begun


def _sqlalchemy(dsn: str, by_hand: bool, transactions: int, events: int) -> float:
    engine = sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))
    statement = sqlalchemy.text(_insert(lambda n: f":{COLUMNS[n - 1]}"))
    begun = time.perf_counter()
    for _ in range(transactions):
        with Session(engine) as session, session.begin():
            if by_hand:
                transaction, payload = uuid.uuid4(), Jsonb(PAYLOAD)
                rows = [_values(n, events, transaction, payload) for n in range(events)]
                session.execute(statement, [dict(zip(COLUMNS, row, strict=True)) for row in rows])
            else:
                CLIENT.publish(session, _events(events), host_id=HOST)
    taken = time.perf_counter() - begun
    engine.dispose()
    return taken


def _asyncpg(dsn: str, by_hand: bool, transactions: int, events: int) -> float:
    statement = _insert(lambda n: f"${n}")
    found = conninfo_to_dict(dsn)

    async def run() -> float:
        conn = await asyncpg.connect(
            host=found["host"],
            port=found["port"],
            user=found.get("user"),
            password=found.get("password"),
            database=found["dbname"],
        )
        begun = time.perf_counter()
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
        taken = time.perf_counter() - begun
        await conn.close()
        return taken

    return asyncio.run(run())
