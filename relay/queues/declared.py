"""The declared queues of a group, as tasks know them.

Whoever declares a queue raises the group's revision in the same transaction. Each task reads the revision in its own
database transaction, after it has received its events: so an event that was published after a declaration had committed
is applied by a task that knows it. The queues themselves are read again only where the revision has changed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

import psycopg

from relay.config.settings import Route
from relay.faults import RelayError
from relay.model.transactions import ColumnDecoder, Transactions
from relay.store import queues

log = logging.getLogger(__name__)

_UNREADABLE = "match: relay cannot read a value of it"

REVISION = "relay.queues_revision(%s)"
"""The SQL expression of a group's revision, null for a group that never had a queue."""


Chooser = Callable[[Transactions, ColumnDecoder], Iterator[tuple[str, ...]]]
"""Yields the names of the queues that each event goes into, in order."""


class DeclaredQueue(NamedTuple):
    """A queue, what orders its messages, and whether the events that match must satisfy a condition, too.

    `is_being_filled`: relay fills it from the log, also with what tasks apply meanwhile. `is_stopped`: nothing of the
    log goes into it, since its match or condition cannot be evaluated.
    """

    id: int
    name: str
    key: str
    is_conditional: bool
    is_being_filled: bool = False
    is_stopped: bool = False


@dataclass(frozen=True, slots=True)
class Declared:
    """The queues of a group at a revision, or at a later one, and what chooses among them."""

    group: str
    revision: int
    queues: Mapping[str, DeclaredQueue]
    choose: Chooser


_READ = """
    select id, name, key, condition is not null,
           exists (select from relay.queue_fills as f where f.queue_id = q.id and f.ended_at is null),
           stopped_at is not null, match
      from relay.queues as q where group_id = %s order by id
"""


class DeclaredQueues:
    """Keeps the queues of a group. Threads share it; it never goes back to an older revision."""

    def __init__(self, group: str, chooser: Callable[[Sequence[Route]], Chooser]) -> None:
        """`chooser` makes of routes to queues what chooses among these."""
        self._group = group
        self._chooser = chooser
        self._lock = threading.Lock()
        self._known: Declared | None = None

    @property
    def known(self) -> Declared | None:
        """The queues as they were read last; None before the first declaration."""
        return self._known

    def at(self, conn: psycopg.Connection[Any], revision: int | None) -> Declared | None:
        """The queues at a revision or at a later one; None where no queue was ever declared. Raises psycopg.Error."""
        if revision is None:
            return None
        known = self._known
        if known is not None and known.revision >= revision:
            return known
        found = self._read(conn, revision)
        with self._lock:
            if self._known is None or self._known.revision < revision:
                self._known = found
            return self._known

    def current(self, conn: psycopg.Connection[Any]) -> Declared | None:
        """The queues as a statement of this transaction sees them. Raises psycopg.Error."""
        row = conn.execute("select " + REVISION, (self._group,)).fetchone()
        return self.at(conn, row[0] if row else None)

    def _read(self, conn: psycopg.Connection[Any], revision: int) -> Declared:
        known: dict[str, DeclaredQueue] = {}
        routes: list[Route] = []
        for *of, match in conn.execute(_READ, (self._group,)):
            queue = DeclaredQueue(*of)
            known[queue.name] = queue
            if match is None or queue.is_being_filled or queue.is_stopped:
                continue
            try:
                routes.append(route_to(queue, match))
            except QueueFault as fault:
                stop(conn, self._group, fault)
                known[queue.name] = queue._replace(is_stopped=True)
        return Declared(self._group, revision, known, self._chooser(routes))


class QueueFault(RelayError):
    """A queue cannot be filled as it was declared. That stops this queue alone."""

    def __init__(self, queue: DeclaredQueue, text: str) -> None:
        super().__init__(text)
        self.queue = queue


def route_to(queue: DeclaredQueue, match: dict[str, Any]) -> Route:
    """The route to a queue. Raises QueueFault for a match that no declaration of this edition accepts."""
    try:
        route = Route.model_validate({"match": match, "handlers": [queue.name], "continue": True})
    except ValueError:
        raise QueueFault(queue, _UNREADABLE) from None
    patterns = [each for of_field in route.match.values() for each in of_field]
    if not all(isfinite(each) for each in patterns if isinstance(each, float)):
        raise QueueFault(queue, _UNREADABLE)
    return route


def stop(conn: psycopg.Connection[Any], group: str, fault: QueueFault) -> bool:
    """Stop a queue that is not stopped, and say so; returns False if it is to be stopped again later.

    Raises psycopg.Error.
    """
    stopped = queues.stop(conn, group, fault.queue.id, str(fault))
    if stopped:
        log.error(
            "a queue is stopped: no more events of the log go into it until it is declared otherwise or rebuilt",
            extra={"queue": fault.queue.name, "fault": str(fault)},
        )
    return stopped is not None
