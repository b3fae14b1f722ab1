"""The outbox tables of other tools: the column of each field, and the types of ids. No I/O.

Sources: Debezium documentation, "Outbox Event Router" (basic outbox table); the setup scripts of
pg-transactional-outbox; Blumchen's `MessageTableOptions.cs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PROFILES: Mapping[str, Mapping[str, Any]] = {
    "relay": {},
    "debezium": {
        "table": "public.outbox",
        "columns": {
            "host_id": "aggregateid",
            "aggregate_id": "aggregateid",
            "aggregate_type": "aggregatetype",
            "event_type": "type",
        },
        "types": {"host_id": "text"},
    },
    "pg-transactional-outbox": {
        "table": "public.outbox",
        "columns": {
            "host_id": "aggregate_id",
            "event_type": "message_type",
            "event_ts": "created_at",
        },
        "types": {"host_id": "text"},
    },
    "blumchen": {
        "table": "public.outbox",
        "columns": {"host_id": "message_type", "event_type": "message_type", "payload": "data"},
        "types": {"id": "bigint", "host_id": "text"},
    },
}
"""The values of the section `source` that each `source.profile` stands for."""


def expanded(source: Mapping[str, Any]) -> dict[str, Any]:
    """The section with its profile's values; the section's own values, columns and types override them."""
    given = PROFILES.get(str(source.get("profile", "relay")), {})
    values = {**given, **source}
    for key in ("columns", "types"):
        if isinstance(own := source.get(key), Mapping):
            values[key] = {**given.get(key, {}), **own}
    return values
