"""Python handlers of the tests; Spark's workers import them by name."""

from __future__ import annotations

from typing import Any

import psycopg

from relay.events import Transaction


def record(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Append every event to the projection; 13 is not an amount."""
    for event in transaction.events:
        if event.payload["amount"] == 13:
            raise ValueError("thirteen is not an amount")
        cursor.execute(
            "insert into projection (id, host_id, c_offset, transaction_id, amount) values (%s, %s, %s, %s, %s)",
            (
                event.id,
                event.host_id,
                event.c_offset,
                event.transaction_id,
                event.payload["amount"],
            ),
        )
