"""Events of several versions reach handlers and sinks in the current one; what does not is a dead letter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relay.spark.session import Session
from tests.event_types import EVENTS
from tests.outbox import APPEND, Outbox, event, host, relaying, wait_until
from tests.process import relay, running
from tests.webhook import Webhook

SEEN = "create table seen (seq bigserial, id uuid, payload jsonb, metadata jsonb, model text)"
PYTHON = {"type": "python", "callable": "tests.event_types:record"}
DEAD = "select exception from relay.dead_letter_queue order by seq"


def overrides(events: Any = EVENTS, **handlers: Any) -> dict[str, Any]:
    """A configuration with event types, and handlers that get every event."""
    return {"events": events, "handlers": handlers, "routes": [{"handlers": list(handlers)}]}


def versions(outbox: Outbox) -> None:
    """Publish an event of each version, and one of a type that is not known."""
    outbox.publish(host(1), event(1))
    outbox.publish(
        host(1),
        event(2, payload={"amount": 2, "currency": "SEK"}, metadata={"version": 2, "trace": "x"}),
        event(
            3,
            payload={"amount": 3, "currency": "DKK", "items": [{"price": 1}]},
            metadata={"version": "3"},
        ),
    )
    outbox.publish(host(1), event(4, "order.shipped"))


@pytest.mark.parametrize("events", [EVENTS, "tests.event_types:registry"])
def test_a_python_handler_gets_the_current_version(
    outbox: Outbox, engine: str, session: Session | None, events: Any
) -> None:
    outbox.conn.execute(SEEN)
    versions(outbox)
    published = outbox.column("select payload from outbox_message_t order by c_offset")
    outbox.drain(outbox.settings(engine, **overrides(events, python=PYTHON)), session)
    assert outbox.conn.execute("select payload, metadata, model from seen order by seq").fetchall() == [
        (
            {"amount": 1, "currency": "EUR", "items": [{"price": 1}]},
            {"version": 3},
            "OrderPlaced 1",
        ),
        (
            {"amount": 2, "currency": "SEK", "items": [{"price": 2}]},
            {"version": 3, "trace": "x"},
            "OrderPlaced 2",
        ),
        (
            {"amount": 3, "currency": "DKK", "items": [{"price": 1}]},
            {"version": "3"},
            "OrderPlaced 1",
        ),
        ({"amount": 4}, None, None),
    ]
    assert published == outbox.column("select payload from outbox_message_t order by c_offset")
