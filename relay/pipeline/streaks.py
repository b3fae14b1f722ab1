"""Stores how many transactions in a row each handler has dead-lettered, for the brake of the next tasks."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from relay.model.dispositions import DeadLetter, Dispositions
from relay.pipeline.brake import Brake, run_of
from relay.pipeline.routing import Assignment
from relay.store import brakes
from relay.store.connections import Connection

log = logging.getLogger(__name__)


def store_streaks(
    conn: Connection,
    group: str,
    limits: Mapping[str, int],
    assigned: Assignment,
    dispositions: Dispositions,
    brake: Brake,
) -> list[str]:
    """Store the streaks after a task, in the database transaction that writes its dead letters.

    `limits` are the most dead letters in a row of each handler that has a brake. Returns an explanation for each
    handler that the brake has stopped now. Raises Braked if tasks that run at the same time have together exceeded a
    limit.
    """
    failed: dict[str, list[tuple[int, DeadLetter]]] = {}
    for index, disposition in dispositions.items():
        if isinstance(disposition, DeadLetter) and disposition.handler:
            failed.setdefault(disposition.handler, []).append((index, disposition))
    explanations = []
    for handler in sorted(failed.keys() | brake.streaks.keys() | brake.braked.keys()):
        if handler not in limits:
            if handler in brake.streaks:
                brakes.forget(conn, group, handler)
            continue
        reached = np.flatnonzero(assigned.reached(handler)).tolist()
        last = run_of(handler, reached, dispositions)
        stopped = brake.braked.get(handler)
        fault = last.fault or stopped
        if fault is None:
            if last.begins:
                brakes.forget(conn, group, handler)
                _report_release(handler, brake)
            continue
        deaths = brakes.add(
            conn, group, handler, fault, last.deaths, last.begins, stopped is not None
        )
        before = brake.streaks.get(handler)
        if stopped and not (before and before.braked):
            explanations.append(brake.explain(handler))
        elif handler in failed and not stopped and deaths > limits[handler]:
            index, disposition = failed[handler][-1]
            transaction = assigned.transactions[index]
            raise brake.fault(handler, disposition.error, transaction, len(failed[handler]))
    return explanations


def _report_release(handler: str, brake: Brake) -> None:
    """Log that a stopped handler has succeeded: a warning, since Spark's workers print nothing below."""
    streak = brake.streaks.get(handler)
    if streak is not None and streak.braked:
        log.warning("a stopped handler goes on", extra={"handler": handler})
