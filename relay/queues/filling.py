"""Puts events into queues: a transactional handler, so that messages, effects and offsets commit together.

Messages are copied into `relay.queue_messages` in the order of the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, repeat

import numpy as np
from psycopg import sql

from relay.config.fields import dig, split
from relay.event_types.current_version import routed_as_current
from relay.event_types.upcasting import Upcasting
from relay.faults import QueueMissing
from relay.handlers import copy_binary
from relay.model import exact_json
from relay.model.keys import of_host, of_values
from relay.model.transactions import Int64Array, Routed, Values, text
from relay.queues.conditions import Conditions, Message
from relay.queues.declared import Declared, QueueFault, stop
from relay.store import literals
from relay.store.connections import Connection

QUEUES = "relay.queues"
"""The name under which the declared queues are a handler: what routes lead to them is not in the configuration."""

FIELDS: Mapping[str, tuple[str, str]] = {
    "id": ("event_id", "text"),
    "event_type": ("event_type", "text"),
    "host_id": ("host_id", "text"),
    "user_id": ("user_id", "text"),
    "aggregate_type": ("aggregate_type", "text"),
    "aggregate_id": ("aggregate_id", "text"),
    "aggregate_version": ("aggregate_version", "bigint"),
    "event_ts": ("event_ts", "timestamptz"),
    "transaction_id": ("transaction_id", "text"),
    "payload": ("payload", "jsonb"),
    "metadata": ("metadata", "jsonb"),
}
"""The column of a message, and its type, for each field of an event that it has."""
_TYPES = {"key": "text", **dict(FIELDS.values())}
_KEY_FIELDS = {
    "host": ("host_id",),
    "user": ("host_id", "user_id"),
    "aggregate": ("host_id", "aggregate_type", "aggregate_id"),
}
_BEGIN = "select relay.begin_messages()"
_WAKE = "select relay.wake_workers(n) from unnest(%s::bigint[]) as n"
_COPY = sql.SQL("copy relay.queue_messages (queue_id, {}) from stdin (format {})")


class Filling:
    """Puts events into the declared queues that they match, or all of them into one queue."""

    def __init__(
        self,
        name: str,
        known: Callable[[], Declared | None],
        upcaster: Upcasting,
        queue: str | None = None,
        conditions: Conditions | None = None,
    ) -> None:
        """`known` returns the queues that the current task has read, or later ones."""
        self.name = name
        self._known = known
        self._upcaster = upcaster
        self._queue = queue
        self._conditions = conditions or Conditions(FIELDS)
        self._faults: dict[tuple[int, int], QueueFault] = {}
        self._to_stop: dict[int, QueueFault] = {}
        """The queues that lack events and could not be stopped, whatever they are declared to be meanwhile."""

    def configure(self, conn: Connection) -> None:
        """Do nothing: the tables are relay's own."""

    def check(self, conn: Connection) -> None:
        """Do nothing: whoever declares a queue is told at once what is wrong."""

    def statements(self, routed: Routed) -> None:
        """None: the events are loaded by COPY."""

    def apply(self, conn: Connection, routed: Routed) -> None:
        """Copy each event, in the current version of its type, into the queues that it matches as it was published.

        Raises QueueMissing if the queue of the handler is not declared: whoever works it may drop it.
        """
        self.put(conn, routed)

    def put(self, conn: Connection, routed: Routed, stops: bool = True) -> int:
        """Do what `apply` does; returns the number of messages.

        A queue whose condition takes too long is stopped. Raises QueueFault instead if `stops` is False.
        """
        declared = self._known()
        chosen: Iterator[tuple[str, ...]]
        if self._queue is not None:
            if declared is None or self._queue not in declared.queues:
                raise QueueMissing(
                    f"handlers.{self.name}.queue: there is no queue {self._queue!r} that the group fills: declare it "
                    "with relay.declare_queue"
                )
            if declared.queues[self._queue].is_being_filled:
                return 0
            chosen = repeat((self._queue,), routed.events)
        elif declared is not None:
            chosen = declared.choose(routed.transactions, routed.decoder)
        else:
            return 0
        keyed = {field for each in declared.queues.values() for field in _fields_of(each.key)}
        fields = tuple(dict.fromkeys((*FIELDS, *keyed)))
        current = routed_as_current(routed, self._upcaster)
        filled: set[int] = set()
        count = 0
        for rows in routed.transactions.portions():
            messages = [
                (index, declared.queues[name])
                for index, names in enumerate(islice(chosen, len(rows)))
                for name in names
            ]
            if self._faults and self._queue is None:
                messages = self._besides_stopped(conn, declared, messages)
            if not messages:
                continue
            values = dict(zip(fields, current.decoder.columns(rows, fields), strict=True))
            if self._queue is None and any(queue.is_conditional for _, queue in messages):
                messages, slow = self._conditions.satisfied(conn, messages, values)
                for fault in slow:
                    if not stops:
                        raise fault
                    self._faults[fault.queue.id, declared.revision] = fault
                    self._stop(conn, declared, fault)
                if not messages:
                    continue
            if not filled:
                conn.execute(_BEGIN)
            filled |= {queue.id for _, queue in messages}
            count += len(messages)
            columns: dict[str, Values] = {
                column: [values[field][index] for index, _ in messages]
                for field, (column, _) in FIELDS.items()
            }
            columns["key"] = [_key(queue.key, values, index) for index, queue in messages]
            _copy(conn, np.array([queue.id for _, queue in messages], np.int64), columns)
        if filled:
            conn.execute(_WAKE, (literals.of_numbers(filled),))
        return count

    def _besides_stopped(
        self, conn: Connection, declared: Declared, messages: Sequence[Message]
    ) -> list[Message]:
        """Leave out the messages of queues that were stopped since they were read, perhaps in vain: a task may fail."""
        found = {
            queue.id: fault
            for _, queue in messages
            if (fault := self._faults.get((queue.id, declared.revision))) is not None
        }
        faults = {**self._to_stop, **found}
        for number in sorted(faults):
            self._stop(conn, declared, faults[number])
        return [message for message in messages if message[1].id not in found]

    def _stop(self, conn: Connection, declared: Declared, fault: QueueFault) -> None:
        if stop(conn, declared.group, fault):
            self._to_stop.pop(fault.queue.id, None)
        else:
            self._to_stop[fault.queue.id] = fault


def _fields_of(key: str) -> tuple[str, ...]:
    """The fields of events that a queue's key is made of."""
    if key == "none":
        return ()
    return _KEY_FIELDS.get(key) or ("host_id", split(key)[0])


def _key(kind: str, values: Mapping[str, Values], index: int) -> bytes | None:
    """The key of the event at an index for a queue; None where nothing orders it."""
    if kind == "none":
        return None
    host, *within = (_text(values[field][index]) for field in _fields_of(kind))
    if kind == "host":
        return of_host(host).encode()
    if kind not in _KEY_FIELDS:
        _, path = split(kind)
        try:
            found, value = dig(exact_json.loads(within[0]), path)
        except ValueError:
            return None
        if not found or value is None:
            return None
        within = [value if isinstance(value, str) else exact_json.dumps(value, "")]
    return of_values(kind, host, within).encode()


def _text(value: bytes | None) -> str:
    return "" if value is None else text(value)


def _copy(conn: Connection, numbers: Int64Array, columns: Mapping[str, Values]) -> None:
    """Copy messages: the id of the queue of each, and its columns as PostgreSQL's text."""
    binary = copy_binary.rows(numbers, columns, _TYPES)
    with conn.cursor() as cursor:
        if binary is not None:
            order, data = binary
            with cursor.copy(_statement(order, "binary")) as copy:
                copy.write(copy_binary.START)
                copy.write(data)
                copy.write(copy_binary.END)
            return
        with cursor.copy(_statement(columns, "text")) as copy:
            for number, *row in zip(numbers.tolist(), *columns.values(), strict=True):
                copy.write_row([number, *(None if each is None else text(each) for each in row)])


def _statement(columns: Iterable[str], form: str) -> sql.Composed:
    return _COPY.format(sql.SQL(", ").join(map(sql.Identifier, columns)), sql.Identifier(form))
