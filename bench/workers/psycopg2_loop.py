"""Reads pgoutput with psycopg2 and decodes it in Python.

Source: PostgreSQL documentation, "Logical Replication Message Formats"; psycopg2 documentation, "Replication support".
"""

from __future__ import annotations

import struct
import time
from typing import Any

import psycopg2
from psycopg2.extras import LogicalReplicationConnection, StopReplication, execute_values

from bench.workers.talk import Arrivals, arguments, say

ACK_EVERY = 1_000
EFFECT = "insert into projection (id, host_id, user_id, aggregate_id, amount, payload) values %s"
ROW = "(%s, %s, %s, %s, (%s::jsonb->>'amount')::numeric, %s::jsonb)"
ID, HOST_ID, USER_ID, AGGREGATE_ID, PAYLOAD = 0, 1, 2, 3, 8

_LENGTH = struct.Struct(">I")


def columns(message: bytes) -> list[str | None]:
    """The values of an Insert, as text."""
    count = int.from_bytes(message[6:8], "big")
    offset = 8
    values: list[str | None] = []
    for _ in range(count):
        kind = message[offset]
        offset += 1
        if kind != ord("t"):
            values.append(None)
            continue
        (length,) = _LENGTH.unpack_from(message, offset)
        offset += 4
        values.append(message[offset : offset + length].decode())
        offset += length
    return values


class Loop:
    """Counts events, and ends after `events` of them; with None it never ends."""

    def __init__(self, events: int | None, effect: str | None, arrivals: str | None) -> None:
        self._left = events
        self._commits = 0
        self._rows: list[list[str | None]] = []
        self._target = psycopg2.connect(effect) if effect else None
        self._arrivals = Arrivals(arrivals) if arrivals else None

    def __call__(self, message: Any) -> None:
        """Handle one message of the stream."""
        kind = message.payload[:1]
        if kind == b"I":
            self._rows.append(columns(message.payload))
        elif kind == b"C":
            self._commit(message)

    def _commit(self, message: Any) -> None:
        rows, self._rows = self._rows, []
        self._commits += 1
        if self._arrivals:
            self._arrivals.note(row[AGGREGATE_ID] for row in rows)
        if self._target:
            self._apply(rows)
        if self._target or self._arrivals or self._commits % ACK_EVERY == 0:
            message.cursor.send_feedback(flush_lsn=message.data_start)
        if self._left is None:
            return
        self._left -= len(rows)
        if self._left <= 0:
            message.cursor.send_feedback(flush_lsn=message.data_start, force=True)
            say("done", at=time.monotonic())
            raise StopReplication

    def _apply(self, rows: list[list[str | None]]) -> None:
        assert self._target is not None
        values = [
            (r[ID], r[HOST_ID], r[USER_ID], r[AGGREGATE_ID], r[PAYLOAD], r[PAYLOAD]) for r in rows
        ]
        with self._target.cursor() as cursor:
            execute_values(cursor, EFFECT, values, template=ROW)
        self._target.commit()


def main() -> None:
    job = arguments()
    loop = Loop(job["events"], job["dsn"] if job["effect"] else None, job.get("arrivals"))
    conn = psycopg2.connect(job["dsn"], connection_factory=LogicalReplicationConnection)
    cursor = conn.cursor()
    options = {"proto_version": "1", "publication_names": job["publication"]}
    cursor.start_replication(slot_name=job["slot"], decode=False, options=options)
    try:
        cursor.consume_stream(loop)
    except StopReplication:
        conn.close()


if __name__ == "__main__":
    main()
