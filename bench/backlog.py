"""The backlog: orders of five events, each in its own commit, over 64 hosts and 1,000 users."""

from __future__ import annotations

from typing import Any

import psycopg

PROJECTION = """
    create table if not exists projection (
        id uuid, host_id uuid, user_id uuid, aggregate_id text, amount numeric, payload jsonb
    )
"""

STATEMENTS = {
    "each: event": {
        "type": "sql",
        "each": "event",
        "statement": "insert into projection values (%(id)s, %(host_id)s, %(user_id)s, %(aggregate_id)s,"
        " (%(payload)s->>'amount')::numeric, %(payload)s)",
    },
    "each: batch": {
        "type": "sql",
        "each": "batch",
        "statement": "insert into projection select id, host_id, user_id, aggregate_id,"
        " (payload->>'amount')::numeric, payload from batch",
    },
}
"""The same effect as a statement for each event, and as one over the relation `batch`."""


NOTE = "repeat('x', 100)"
LARGE_NOTE = "(select string_agg(md5((t * 1000 + i)::text), '') from generate_series(1, 312) i)"
"""SQL for a text in each payload: 100 characters, or 10 kB that hardly compress."""


def fill(
    conn: psycopg.Connection[Any],
    transactions: int,
    events: int = 5,
    one_commit: bool = False,
    note: str = NOTE,
) -> None:
    """Publish transactions of `events` events, each in its own commit or all in one. `conn` must be in autocommit."""
    commit = "" if one_commit else "commit;"
    conn.execute(
        f"""
        do $$
        begin
            for t in 1..{transactions} loop
                set local synchronous_commit = off;
                perform relay.publish(
                    ('00000000-0000-4000-8000-' || lpad((t % 64)::text, 12, '0'))::uuid,
                    ('00000000-0000-4000-9000-' || lpad((t % 1000)::text, 12, '0'))::uuid,
                    (select jsonb_agg(jsonb_build_object(
                        'event_type', 'order.placed', 'aggregate_type', 'Order', 'aggregate_id', t::text,
                        'payload', jsonb_build_object('order', t, 'amount', n, 'note', {note})))
                     from generate_series(1, {events}) n));
                {commit}
            end loop;
        end $$
        """.encode()
    )
