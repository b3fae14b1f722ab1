"""What the target knows of an event, by its id: dead letters, deferred transactions and messages of queues."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg.rows import class_row

from relay.store.connections import Connection

_DEAD = """
    select distinct on (d.sink)
           'dead letter' as found, d.sink as name, d.id, d.status as state, d.attempts, d.created_dt as since,
           null::timestamptz as until, d.exception as reason
      from relay.dead_letter_queue as d
     where d.group_id = %(group)s and d.event_id = %(event)s
       and (%(transaction)s::text is null or d.transaction_id = %(transaction)s)
     order by d.sink, d.id desc
"""
_DEFERRED = """
    select distinct on (d.sink)
           'deferred' as found, d.sink as name, d.id, 'deferred' as state, d.attempts, d.deferred_at as since,
           d.retry_at as until, d.reason
      from relay.deferred as d
     where d.group_id = %(group)s and d.dead_transaction is null and %(offset)s between d.first_offset and d.last_offset
       and (%(transaction)s::text is null or d.transaction_id = %(transaction)s)
     order by d.sink, d.id
"""
_QUEUED = """
    select 'message' as found, i.queue as name, i.id, i.state, i.attempts, i.enqueued_at as since,
           i.available_at as until, i.error as reason
      from relay.queue_items as i
     where i.event_id = %(event)s and i.queue in (select q.name from relay.queues as q where q.group_id = %(group)s)
     order by i.queue, i.id
"""


@dataclass(frozen=True, slots=True)
class StoredState:
    """What a row of the target says of an event: a dead letter, a deferred transaction or a message of a queue.

    `name` is that of the sink, empty for the target, or of the queue; `until` is when it is tried next.
    """

    found: str
    name: str
    id: int
    state: str
    attempts: int
    since: datetime
    until: datetime | None
    reason: str | None


def of(
    conn: Connection, group: str, event: str, transaction: str | None, offset: int | None
) -> list[StoredState]:
    """Read what the target knows of an event. The tables are read as a whole where no index has the event's id.

    Raises psycopg.Error.
    """
    given = {"group": group, "event": event, "transaction": transaction, "offset": offset}
    with conn.cursor(row_factory=class_row(StoredState)) as cursor:
        return [
            state
            for query in (_DEAD, _DEFERRED, _QUEUED)
            if query is not _DEFERRED or offset is not None
            for state in cursor.execute(query, given).fetchall()
        ]
