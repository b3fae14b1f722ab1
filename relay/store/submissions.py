"""Publishes events that may have been published before, into relay's own outbox."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from relay.model import exact_json
from relay.store.connections import Connection


class Submitted(Protocol):
    """Events of one business transaction. `events` is the JSON array that `relay.publish` takes, with an `id` each."""

    @property
    def host_id(self) -> str: ...

    @property
    def user_id(self) -> str | None: ...

    @property
    def ids(self) -> Sequence[str]: ...

    @property
    def events(self) -> str: ...

    @property
    def transaction_id(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Stored:
    """An event of a submission whose id the outbox has. `ordinal` counts from 1.

    `is_same`: it has the same content, in a business transaction of as many events.
    """

    ordinal: int
    transaction_id: str | None
    is_same: bool


def published(conn: Connection, ids: Sequence[str]) -> set[str]:
    """Return which of the ids the outbox has."""
    rows = conn.execute(
        "select id::text from public.outbox_message_t where id = any (%s::uuid[])", (list(ids),)
    )
    return {each for (each,) in rows}


def publish(conn: Connection, submissions: Iterable[Submitted]) -> None:
    """Publish submissions, in order, each as one business transaction, with one statement."""
    calls = ", ".join(f'{{"head": {_head(each)}, "events": {each.events}}}' for each in submissions)
    conn.execute(
        """
        select relay.publish((call #>> '{head,host_id}')::uuid, (call #>> '{head,user_id}')::uuid, call -> 'events',
                             (call #>> '{head,transaction_id}')::uuid)
          from jsonb_array_elements(%s::jsonb) as call
        """,
        (f"[{calls}]",),
    )


def _head(submitted: Submitted) -> str:
    values = {
        "host_id": submitted.host_id,
        "user_id": submitted.user_id,
        "transaction_id": submitted.transaction_id,
    }
    return exact_json.dumps(values, "head")


def stored(conn: Connection, submitted: Submitted) -> list[Stored]:
    """Return the events of a submission whose ids the outbox has.

    What a trace has put into the metadata is no part of the content.
    """
    rows = conn.execute(
        """
        select ordinal, old.transaction_id::text,
               old.host_id = %(host_id)s::uuid
                   and old.user_id is not distinct from %(user_id)s::uuid
                   and old.event_type = new ->> 'event_type'
                   and old.aggregate_type is not distinct from new ->> 'aggregate_type'
                   and old.aggregate_id is not distinct from new ->> 'aggregate_id'
                   and old.aggregate_version is not distinct from (new ->> 'aggregate_version')::bigint
                   and old.payload = new -> 'payload'
                   and coalesce(case jsonb_typeof(old.metadata) when 'object' then old.metadata - traces
                                else old.metadata end, '{}') = coalesce(new -> 'metadata', '{}') - traces
                   and old.deliver_at is not distinct from (new ->> 'deliver_at')::timestamptz
                   and coalesce(old.event_ts = (new ->> 'event_ts')::timestamptz, true)
                   and old.transaction_ordinal is not distinct from ordinal
                   and old.transaction_count is not distinct from %(count)s
          from jsonb_array_elements(%(events)s::jsonb) with ordinality as listed (new, ordinal)
          join public.outbox_message_t as old on old.id = (new ->> 'id')::uuid,
               (select array['traceparent', 'tracestate', 'baggage'] as traces) as traced
         order by ordinal
        """,
        {
            "host_id": submitted.host_id,
            "user_id": submitted.user_id,
            "events": submitted.events,
            "count": len(submitted.ids),
        },
    )
    return [Stored(*row) for row in rows]
