"""The tables of other outboxes: which column holds each field, and of what type its ids are. No I/O.

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
"""What `source.profile` stands for: values of the section `source`."""


def expanded(source: Mapping[str, Any]) -> dict[str, Any]:
    """The section with what its profile gives, where it does not say otherwise; single columns and types too."""
    given = PROFILES.get(str(source.get("profile", "relay")), {})
    found = {**given, **source}
    for key in ("columns", "types"):
        if isinstance(own := source.get(key), Mapping):
            found[key] = {**given.get(key, {}), **own}
    return found
