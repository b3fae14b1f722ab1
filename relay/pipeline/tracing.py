"""Which transactions of a task belong to traces that are recorded. No I/O, and nothing of OpenTelemetry.

It runs where the task is applied, on executors too; the driver makes spans of what it finds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import numpy as np

from relay.faults import describe
from relay.model.dispositions import Failure, Fate, is_dead
from relay.model.trace_context import Origin, TraceContext, Traced, Trail, parse
from relay.model.transactions import Transactions, text
from relay.pipeline.routing import Routing

MOST_TRACED = 1_000
"""How many business transactions of a task are traced at most."""
MOST_ORIGINS = 128
"""How many contexts of one business transaction are traced at most."""

_SAMPLED = re.compile(rb'-[0-9a-f]{16}-[0-9a-f][13579bdf]"')
"""The end of each traceparent with the sampled flag: to parse all metadata would take ten times as long."""
_FIELDS = ("metadata", "id")
_ROWS_AT_ONCE = 4_000
_BYTES_AT_ONCE = 4 * 1024 * 1024


class Tracing:
    """Finds the traced transactions among many."""

    def __init__(self, routing: Routing, handlers: tuple[str, ...]) -> None:
        """`handlers` are the transactional ones."""
        self._routing = routing
        self._handlers = handlers

    def trail(
        self, transactions: Transactions, judge: Callable[[int], Traced | None]
    ) -> Trail | None:
        """What became of the traced transactions, at most MOST_TRACED; None where there are none.

        `judge` says what became of the one at an index, None where it was not tried.
        """
        found, left_out = self._origins(transactions)
        if not found:
            return None
        indices = list(found)
        some = transactions.take(indices)
        reached = {name: self._routing.reached(some, name) for name in self._handlers}
        traced = []
        for number, index in enumerate(indices):
            verdict = judge(index)
            names = tuple(name for name, mask in reached.items() if mask[number])
            # What goes to sinks only is traced where it is delivered.
            if verdict is None or not (names or verdict.disposition == "dead"):
                continue
            transaction_id = some.ids[number]
            traced.append(
                verdict._replace(
                    origins=found[index],
                    transaction_id=None if transaction_id is None else text(transaction_id),
                    committed=int(some.facts["ts"][number]),
                    handlers=names,
                )
            )
        return Trail(tuple(traced), left_out) if traced else None

    def _origins(self, transactions: Transactions) -> tuple[dict[int, tuple[Origin, ...]], int]:
        """The sampled contexts of the first MOST_TRACED transactions that have any, and how many more there are."""
        decoder = self._routing.decoder(transactions.columns)
        facts = transactions.facts["events"]
        index_of = np.repeat(np.arange(len(facts)), facts).tolist()
        found: dict[int, dict[TraceContext, Origin]] = {}
        left_out: set[int] = set()
        first = 0
        for rows in transactions.portions(_ROWS_AT_ONCE, _BYTES_AT_ONCE):
            columns = zip(*decoder.columns(rows, _FIELDS), strict=True)
            for row, (metadata, event_id) in enumerate(columns, first):
                if metadata is None or not _SAMPLED.search(metadata):
                    continue
                index = index_of[row]
                if index not in found and len(found) >= MOST_TRACED:
                    left_out.add(index)
                    continue
                context = parse(metadata)
                if context is not None and context.sampled:
                    add(found.setdefault(index, {}), context, event_id and text(event_id))
            first += len(rows)
        return {index: tuple(origins.values()) for index, origins in found.items()}, len(left_out)


def judged(fate: Fate | None, waits: bool, attempts: int = 0) -> Traced | None:
    """What became of a transaction; None where it was not tried, since it is still blocked."""
    if isinstance(fate, Failure):
        disposition = "dead" if is_dead(fate) else "deferred"
        fault = describe(fate.error)
        return Traced((), None, 0, (), disposition, fate.handler, fault, attempts)
    if fate is not None and not waits:
        return None
    return Traced((), None, 0, (), "deferred" if waits else "applied", attempts=attempts)


def joined(trails: Iterable[Trail | None]) -> Trail | None:
    """The trails of one target transaction as one."""
    found = [trail for trail in trails if trail is not None]
    if not found:
        return None
    traced = tuple(one for trail in found for one in trail.traced)
    left_out = sum(trail.left_out for trail in found) + max(0, len(traced) - MOST_TRACED)
    return Trail(traced[:MOST_TRACED], left_out)


def add(origins: dict[TraceContext, Origin], context: TraceContext, event_id: str | None) -> None:
    """Count an event that was published in a context, unless there are too many contexts."""
    before = origins.get(context)
    if before is not None:
        origins[context] = before._replace(events=before.events + 1)
    elif len(origins) < MOST_ORIGINS:
        origins[context] = Origin(context, 1, event_id)
