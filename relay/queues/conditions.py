"""Evaluates the conditions of queues (`where`) for events: for a bounded time, so that one queue holds back no other.

A condition was written by whoever declared its queue, and runs in the commit that applies the events of all. So each
statement that evaluates some has a time, under a savepoint; when that is over, it is halved to find the queue.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import psycopg
from psycopg import sql

from relay.faults import timed_out
from relay.model.transactions import Values, text
from relay.queues.declared import DeclaredQueue, QueueFault
from relay.store import literals
from relay.store.connections import Connection

log = logging.getLogger(__name__)

Message = tuple[int, DeclaredQueue]
"""The index of an event among some rows, and a queue that it goes into."""

LIMIT_SECONDS = 0.25
"""How long a statement may evaluate conditions, beside the time for reading the events."""
LAST_SECONDS = 2.0
"""The same for the condition of one queue and one event."""
BYTES_A_SECOND = 10e6
"""How much of the texts of events the server reads in a second, at least."""
MOST = 2_000
"""How many conditions a statement evaluates at most."""
FEW = 128
"""How many of one queue do not take a statement's time: those that take it count against the queue."""
STRIKES = 5
"""How often that may be so within STRIKES_SECONDS: a server that is slow for a moment is no queue's fault."""
STRIKES_SECONDS = 60.0

_SATISFYING = """
    with event as materialized (
        select e.index, jsonb_build_object({pairs}) as message
          from unnest(%(indices)s::int[], {columns}) as e (index, {names}))
    select m.number
      from unnest(%(numbers)s::int[], %(events)s::int[], %(queues)s::bigint[]) as m (number, index, queue_id)
      join event as e on e.index = m.index join relay.queues as q on q.id = m.queue_id
     where q.condition is null or relay.satisfies(e.message, q.condition, q.params)
"""
"""Of messages, by their number, those that satisfy the condition of their queue. The fields of events are text."""

_LOCK = "select from relay.queues limit 0"
"""Takes the lock that `_SATISFYING` needs, for the database transaction."""

_TOO_SLOW = "where: it takes too long to evaluate: make it simpler"


class Conditions:
    """Evaluates conditions; `fields` are the column and the type of a message for each field of an event."""

    def __init__(self, fields: Mapping[str, tuple[str, str]]) -> None:
        self._fields = tuple(fields)
        self._query = sql.SQL(_SATISFYING).format(
            pairs=sql.SQL(", ").join(
                sql.SQL("{}, {}::{}").format(
                    sql.Literal(field), sql.Identifier("e", field), sql.SQL(kind)
                )
                for field, (_, kind) in fields.items()
            ),
            columns=sql.SQL(", ").join(
                sql.SQL("{}::text[]").format(sql.Placeholder(field)) for field in fields
            ),
            names=sql.SQL(", ").join(map(sql.Identifier, fields)),
        )
        self._strikes: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=STRIKES))

    def satisfied(
        self, conn: Connection, messages: Sequence[Message], values: Mapping[str, Values]
    ) -> tuple[list[Message], list[QueueFault]]:
        """Leave out messages that do not satisfy the condition of their queue, which may be another one meanwhile.

        Also returns the queues whose condition takes too long, by their ids; of these no message is left. Raises
        psycopg.Error.
        """
        # Nobody's lock of the table takes the time of a condition then.
        conn.execute(_LOCK)
        # Halves then part one queue from the other.
        asked = sorted(
            (number for number, (_, queue) in enumerate(messages) if queue.is_conditional),
            key=lambda number: messages[number][1].id,
        )
        sizes = {
            index: sum(len(each) for each in _texts(self._fields, values, index))
            for index in {messages[number][0] for number in asked}
        }
        kept = set(range(len(messages))) - set(asked)
        slow: dict[int, QueueFault] = {}
        todo = [asked[first : first + MOST] for first in range(0, len(asked), MOST)]
        while todo:
            part = [number for number in todo.pop() if messages[number][1].id not in slow]
            if not part:
                continue
            reading = sum(sizes[index] for index in {messages[number][0] for number in part})
            limit = LIMIT_SECONDS + reading / BYTES_A_SECOND
            found = self._evaluate(conn, messages, values, part, limit)
            queue = messages[part[0]][1]
            is_of_one = queue.id == messages[part[-1]][1].id
            if found is None and is_of_one and len(part) <= FEW and self._strikes_out(queue):
                slow[queue.id] = QueueFault(queue, _TOO_SLOW)
            elif found is None and len(part) == 1:
                last = limit - LIMIT_SECONDS + LAST_SECONDS
                found = self._evaluate(conn, messages, values, part, last)
                if found is None:
                    slow[queue.id] = QueueFault(queue, _TOO_SLOW)
            elif found is None:
                middle = _middle(part, messages)
                todo += [part[middle:], part[:middle]]
            kept |= found or set()
        left = [
            message
            for number, message in enumerate(messages)
            if number in kept and message[1].id not in slow
        ]
        return left, [slow[number] for number in sorted(slow)]

    def _evaluate(
        self,
        conn: Connection,
        messages: Sequence[Message],
        values: Mapping[str, Values],
        part: Sequence[int],
        seconds: float,
    ) -> set[int] | None:
        """Return which messages, by their number, satisfy their condition; None once the time is over."""
        events = list(dict.fromkeys(messages[number][0] for number in part))
        given = {
            field: literals.of_values(
                None if (value := values[field][index]) is None else text(value) for index in events
            )
            for field in self._fields
        }
        pairs = {
            "numbers": literals.of_numbers(part),
            "events": literals.of_numbers(messages[number][0] for number in part),
            "queues": literals.of_numbers(messages[number][1].id for number in part),
            "indices": literals.of_numbers(events),
        }
        limit = sql.SQL("set local statement_timeout = {}").format(int(seconds * 1000))
        try:
            # Rolled back, which gives the session its own time again.
            with conn.transaction(force_rollback=True):
                conn.execute(limit)
                return {number for (number,) in conn.execute(self._query, given | pairs)}
        except psycopg.errors.QueryCanceled as error:
            if not timed_out(error):
                raise
            return None

    def _strikes_out(self, queue: DeclaredQueue) -> bool:
        """Count a statement's time against a queue; returns whether that has happened too often."""
        now = time.monotonic()
        strikes = self._strikes[queue.id]
        strikes.append(now)
        log.warning("the condition of a queue is slow", extra={"queue": queue.name})
        return len(strikes) == STRIKES and now - strikes[0] <= STRIKES_SECONDS


def _texts(fields: Sequence[str], values: Mapping[str, Values], index: int) -> list[bytes]:
    return [value for field in fields if (value := values[field][index]) is not None]


def _middle(part: Sequence[int], messages: Sequence[Message]) -> int:
    """Where messages, in the order of their queues, are halved: between two queues, if there are two."""
    queues = list(dict.fromkeys(messages[number][1].id for number in part))
    if len(queues) == 1:
        return len(part) // 2
    first = queues[len(queues) // 2]
    return next(at for at, number in enumerate(part) if messages[number][1].id == first)
