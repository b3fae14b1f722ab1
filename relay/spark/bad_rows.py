"""Finds what of a batch the query or the function of a sink cannot take, by writing parts of it to nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from relay.config.settings import Settings
from relay.faults import Rejected
from relay.model.dispositions import AttemptHistory, DeadLetter
from relay.pipeline.routing import BatchRouter
from relay.pipeline.settlement import Unsettled
from relay.spark import sink_batches
from relay.store.connections import Connection
from relay.store.deferred.due import DueTransaction
from relay.store.positions.spark_batches import Contents

MOST = 20
"""The most commits of a batch that become dead letters: where more fail, the query or the function is at fault."""


Item = int | DueTransaction
"""A commit, by its full xid, or a deferred transaction of a batch."""


class TooManyRefused(Exception):
    """More than MOST of a batch fail; the cause is one fault."""


def find(
    items: Sequence[Item], fault_of: Callable[[Sequence[Item]], Exception | None]
) -> list[tuple[Item, Exception]]:
    """Return those of some items that fail by themselves, each with its fault.

    `fault_of` tries some of the items together, and returns their fault. It is called about MOST times log2 of the
    number of items. Raises TooManyRefused.
    """
    # What is left without any item, such as rows without a c_xid, is in each try.
    if fault_of(()) is not None:
        return []
    found: list[tuple[Item, Exception]] = []
    parts = [items]
    while parts:
        part = parts.pop()
        error = fault_of(part) if part else None
        if error is None:
            continue
        if len(part) == 1:
            found.append((part[0], error))
            if len(found) > MOST:
                raise TooManyRefused from error
            continue
        half = len(part) // 2
        parts += [part[half:], part[:half]]
    return found


def part_of(
    conn: Connection,
    settings: Settings,
    contents: Contents,
    items: Sequence[Item],
    wanted: Sequence[Item],
    host_buckets: int,
) -> Contents:
    """The contents of a batch with only the `wanted` ones of its `items`. Raises psycopg.Error."""
    kept = {each for each in wanted if isinstance(each, int)}
    due = [each for each in wanted if isinstance(each, DueTransaction)]
    others = [each for each in items if isinstance(each, int) and each not in kept]
    return replace(
        contents,
        left_out=[*contents.left_out, *others],
        deferred=[each.id for each in due],
        data=sink_batches.packed_events(conn, settings, due, host_buckets) if due else None,
    )


def dead_letters(
    source: Connection,
    target: Connection,
    settings: Settings,
    sink: str,
    faults: Sequence[tuple[Item, Rejected]],
) -> Iterator[Unsettled]:
    """What was found, as dead letters of the sink. Raises psycopg.Error."""
    router = BatchRouter(settings)
    for item, fault in faults:
        if isinstance(item, DueTransaction):
            dead = DeadLetter(sink, fault, item.attempts + 1)
            before = AttemptHistory.of(item.attempts, item.failing_seconds)
            for rows, events in sink_batches.deferred_part(target, settings, [item]).pairs():
                yield Unsettled(rows, events.events, dead, item.keys, before, item)
            continue
        for routed in sink_batches.parts(source, settings, router, sink, [item]):
            for rows, events in routed.pairs():
                yield Unsettled(rows, events.events, DeadLetter(sink, fault))
