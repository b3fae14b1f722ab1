"""Reserves stock for orders, in the transaction that moves relay's position, so that each order counts once."""

from __future__ import annotations

from typing import Any

import psycopg

from relay import RetryLater, Transaction


def reserve(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Reserve the stock of all orders of a transaction, or none.

    Raises RetryLater if the stock does not suffice, and LookupError for an article that does not exist.
    """
    for event in transaction.events:
        order = event.payload
        row = cursor.execute(
            "select free from stock where sku = %s for update", (order["sku"],)
        ).fetchone()
        if row is None:
            # Every exception but RetryLater and those of an outage dead-letters the transaction.
            raise LookupError("no such article")
        if row[0] < order["quantity"]:
            raise RetryLater("not enough in stock")
        cursor.execute(
            "update stock set free = free - %(quantity)s where sku = %(sku)s",
            order,
        )
        cursor.execute(
            "insert into reservations (event_id, order_id, sku, quantity) values (%s, %s, %s, %s)",
            (event.id, event.aggregate_id, order["sku"], order["quantity"]),
        )
