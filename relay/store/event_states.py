"""What the target knows of an event, by its id: dead letters, deferred transactions and messages of queues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from psycopg.rows import class_row

from relay.store.actions import Acted
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
           d.retry_at as until,
           coalesce(d.reason, (select 'cancelled by ' || c.requested_by || ': it is not delivered'
                                 from relay.cancellations as c
                                where c.event_id = any (d.event_ids) and c.group_id = ''
                                  and (c.host_id = '' or c.host_id = any (d.hosts)) limit 1)) as reason
      from relay.deferred as d
     where d.id = any (%(deferred)s) and d.dead_transaction is null
     order by d.sink, d.id
"""
_CANCELLED = """
    select 'cancelled' as found, c.sink as name, null::bigint as id, 'cancelled' as state, null::int as attempts,
           c.noted_at as since, null::timestamptz as until,
           case c.outcome when 'in doubt' then 'a delivery may have been in flight, cancelled by '
                          else 'cancelled by ' end || c.requested_by as reason
      from relay.cancellations as c
     where c.event_id = relay.event_key(%(event)s) and c.group_id = %(group)s and c.outcome in ('cancelled', 'in doubt')
     order by c.sink
"""
_QUEUED = """
    select 'message' as found, i.queue as name, i.id, i.state, i.attempts, i.enqueued_at as since,
           i.available_at as until, i.error as reason
      from relay.queue_items as i
     where i.event_id = %(event)s and i.queue in (select q.name from relay.queues as q where q.group_id = %(group)s)
     order by i.queue, i.id
"""


_ACTIONS = """
    select d.consumer as sink, a.action, a.reason, a.acted_by, a.operator, a.acted_at
      from (select distinct dead_transaction, consumer from relay.dead_letters
             where group_id = %(group)s and event_id = %(event)s) as d
      join relay.dead_letter_actions as a using (dead_transaction)
     order by a.id desc limit 100
"""


@dataclass(frozen=True, slots=True)
class EventAction(Acted):
    """An action on a dead letter of an event; `sink` is empty for that of the target, `queue:NAME` for a queue."""

    sink: str


@dataclass(frozen=True, slots=True)
class StoredState:
    """What the target says of an event: a dead letter, a deferred transaction, a message, a cancellation, an attempt.

    `name` is that of the sink, empty for the target, or of the queue; `until` is when it is tried next.
    """

    found: str
    name: str
    id: int | None
    state: str
    attempts: int | None
    since: datetime | None
    until: datetime | None
    reason: str | None


def of(
    conn: Connection, group: str, event: str, transaction: str | None, deferred: Sequence[int]
) -> list[StoredState]:
    """Read what the target knows of an event; `deferred` are the ids of its deferred transactions.

    The table of dead letters is read as a whole where no index has the event's id. Raises psycopg.Error.
    """
    given = {
        "group": group,
        "event": event,
        "transaction": transaction,
        "deferred": list(deferred),
    }
    with conn.cursor(row_factory=class_row(StoredState)) as cursor:
        return [
            state
            for query in (_DEAD, _DEFERRED, _CANCELLED, _QUEUED)
            for state in cursor.execute(query, given).fetchall()
        ]


def actions(conn: Connection, group: str, event: str) -> list[EventAction]:
    """Read the actions on the dead letters of an event, the newest first. Raises psycopg.Error."""
    with conn.cursor(row_factory=class_row(EventAction)) as cursor:
        return cursor.execute(_ACTIONS, {"group": group, "event": event}).fetchall()
