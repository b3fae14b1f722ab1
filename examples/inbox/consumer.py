"""Makes an invoice for each order of a topic once.

python consumer.py DSN SERVERS TOPIC
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from decimal import Decimal
from typing import Any

import psycopg
from confluent_kafka import Consumer, KafkaException, Message

from relay.client.inbox import Inbox, key

inbox = Inbox("invoices", keep=timedelta(days=30))


def handle(conn: psycopg.Connection[Any], message: Message) -> bool:
    """Make the invoice of an order, unless it was made, in one transaction with the id; return whether it was new."""
    event = json.loads(message.value() or b"", parse_float=Decimal)
    with conn.transaction(), inbox.once(conn, key(dict(message.headers() or ()))) as first:
        if first:
            conn.execute(
                "insert into invoices values (%s, %s)", (event["subject"], event["data"]["amount"])
            )
    return first


def consume(consumer: Consumer, conn: psycopg.Connection[Any]) -> None:
    """Handle messages for ever; an offset is stored only after the transaction of its message."""
    while True:
        message = consumer.poll(1.0)
        if message is None:
            continue
        error = message.error()
        if error is not None:
            raise KafkaException(error)
        handle(conn, message)
        consumer.store_offsets(message)


def main(dsn: str, servers: str, topic: str) -> None:
    """Consume the topic as the group `invoices`."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "invoices",
            "auto.offset.reset": "earliest",
            "enable.auto.offset.store": False,
        }
    )
    consumer.subscribe([topic])
    try:
        with psycopg.connect(dsn) as conn:
            consume(consumer, conn)
    finally:
        consumer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
