"""Handlers of the tests that publish: each event `step.N` causes one `step.N+1`, up to `step.3`."""

from __future__ import annotations

from typing import Any

import psycopg

from relay.client import Event, Outbox
from relay.model.events import Transaction

CLIENT = Outbox()


def next_step(event_type: str) -> str:
    """The type of the next event."""
    return f"step.{int(event_type.removeprefix('step.')) + 1}"


def step(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Publish the next event with the client."""
    for event in transaction.events:
        assert event.event_type is not None
        assert event.host_id is not None
        following = Event(next_step(event.event_type), ("Order", 1), payload=event.payload)
        CLIENT.publish(cursor, following, host_id=event.host_id)


def step_in_sql(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Publish the next event with relay.publish."""
    for event in transaction.events:
        assert event.event_type is not None
        cursor.execute(
            "select relay.publish(%s, null, jsonb_build_array(jsonb_build_object('event_type', %s::text, "
            "'aggregate_type', 'Order', 'aggregate_id', '1', 'payload', '{}'::jsonb)))",
            (event.host_id, next_step(event.event_type)),
        )


_PUBLISH = """
    select relay.publish({host_id}, null, jsonb_build_array(jsonb_build_object(
        'event_type', 'step.' || (split_part({event_type}, '.', 2)::int + 1), 'aggregate_type', 'Order',
        'aggregate_id', '1', 'payload', {payload}{more})))
"""
_FIELDS = ("host_id", "event_type", "payload")
EACH = _PUBLISH.format(more="", **{name: f"%({name})s" for name in _FIELDS})
BATCH = (
    _PUBLISH.format(
        more=", 'metadata', relay.caused_by(id, metadata)", **{name: name for name in _FIELDS}
    )
    + " from batch order by c_offset"
)

HANDLERS: dict[str, dict[str, Any]] = {
    "python": {"type": "python", "callable": f"{__name__}:step", "publishes": True},
    "python-sql": {"type": "python", "callable": f"{__name__}:step_in_sql", "publishes": True},
    "sql": {"type": "sql", "statement": EACH, "publishes": True},
    "batch": {"type": "sql", "each": "batch", "statement": BATCH, "publishes": True},
}
"""A handler of each kind."""


def chain(*kinds: str) -> dict[str, Any]:
    """The handlers and routes with which the n-th kind handles `step.N`."""
    return {
        "handlers": {kind: HANDLERS[kind] for kind in kinds},
        "routes": [
            {"match": {"event_type": f"step.{number}"}, "handlers": [kind]}
            for number, kind in enumerate(kinds)
        ],
        "unrouted": "ignore",
    }


def loop(kind: str) -> dict[str, Any]:
    """The handlers and routes with which an event of any step causes the next one."""
    return {"handlers": {kind: HANDLERS[kind]}, "routes": [{"handlers": [kind]}]}


STEPS = """
    select event_type, coalesce((metadata ->> 'hop_count')::int, 0), metadata ->> 'causation_id', id::text,
           metadata ->> 'correlation_id'
      from outbox_message_t order by c_offset
"""
