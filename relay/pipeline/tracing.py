"""Finds the transactions of a task that belong to sampled traces. No I/O, and no import of OpenTelemetry.

It runs where the task is applied, also on executors; the driver makes spans of the result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import assert_never

import numpy as np

from relay.faults import describe
from relay.model.dispositions import (
    Applied,
    Blocked,
    DeadLetter,
    Disposition,
    RetryLater,
    Scheduled,
)
from relay.model.trace_context import PublishOrigin, TraceContext, Traced, TraceRecord, parse
from relay.model.transactions import text
from relay.pipeline.routing import Assignment

MOST_TRACED = 1_000
"""How many business transactions of a task are traced at most."""
MOST_ORIGINS = 128
"""How many contexts of one business transaction are traced at most."""

_SAMPLED = re.compile(rb'-[0-9a-f]{16}-[0-9a-f][13579bdf]"')
"""The end of each traceparent with the sampled flag: parsing all metadata takes ten times as long."""
_FIELDS = ("metadata", "id")


def trace_record(
    assigned: Assignment, handlers: Sequence[str], find: Callable[[int], Traced | None]
) -> TraceRecord | None:
    """The traced transactions with their dispositions, at most MOST_TRACED; None if there are none.

    `handlers` are the names of the transactional handlers. `find` returns the disposition of the transaction at an
    index, None if it was not tried.
    """
    found, left_out = _origins(assigned)
    if not found:
        return None
    indices = list(found)
    traces = assigned.take(indices)
    some = traces.transactions
    reached = {name: traces.reached(name) for name in handlers}
    traced = []
    for number, index in enumerate(indices):
        one = find(index)
        names = tuple(name for name, mask in reached.items() if mask[number])
        # Sinks trace what goes to sinks only.
        if one is None or not (names or one.disposition == "dead"):
            continue
        transaction_id = some.ids[number]
        traced.append(
            one._replace(
                origins=found[index],
                transaction_id=None if transaction_id is None else text(transaction_id),
                committed=int(some.facts["ts"][number]),
                handlers=names,
            )
        )
    return TraceRecord(tuple(traced), left_out) if traced else None


def _origins(assigned: Assignment) -> tuple[dict[int, tuple[PublishOrigin, ...]], int]:
    """The sampled contexts of the first MOST_TRACED transactions that have any, and how many more there are."""
    transactions, decoder = assigned.transactions, assigned.decoder
    if decoder is None:
        return {}, 0
    facts = transactions.facts["events"]
    index_of = np.repeat(np.arange(len(facts)), facts).tolist()
    found: dict[int, dict[TraceContext, PublishOrigin]] = {}
    left_out: set[int] = set()
    first = 0
    for rows in transactions.portions():
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


def traced_as(disposition: Disposition, is_retry: bool, attempts: int = 0) -> Traced | None:
    """The disposition of a transaction for its trace; None if it was not tried, since it is still blocked."""
    match disposition:
        case DeadLetter() | RetryLater():
            name = "dead" if isinstance(disposition, DeadLetter) else "deferred"
            fault = describe(disposition.error)
            return Traced((), None, 0, (), name, disposition.handler, fault, attempts)
        case Blocked() if is_retry:
            return None
        case Blocked() | Scheduled():
            return Traced((), None, 0, (), "deferred", attempts=attempts)
        case Applied():
            return Traced((), None, 0, (), "applied", attempts=attempts)
    assert_never(disposition)


def joined(trace_records: Iterable[TraceRecord | None]) -> TraceRecord | None:
    """Join the trace records of one database transaction of the target; None if there are none."""
    found = [trace_record for trace_record in trace_records if trace_record is not None]
    if not found:
        return None
    traced = tuple(one for trace_record in found for one in trace_record.traced)
    left_out = sum(trace_record.left_out for trace_record in found) + max(
        0, len(traced) - MOST_TRACED
    )
    return TraceRecord(traced[:MOST_TRACED], left_out)


def add(
    origins: dict[TraceContext, PublishOrigin], context: TraceContext, event_id: str | None
) -> None:
    """Add an event that was published in a context, unless there are MOST_ORIGINS other contexts."""
    before = origins.get(context)
    if before is not None:
        origins[context] = before._replace(events=before.events + 1)
    elif len(origins) < MOST_ORIGINS:
        origins[context] = PublishOrigin(context, 1, event_id)
