"""relay's handlers in the benchmark: `type: python`, named in the configuration."""

from __future__ import annotations

import os
import time
from typing import Any

import psycopg

from bench.workers.talk import Arrivals
from relay.faults import RetryLater
from relay.model.events import Transaction

ARRIVALS = "BENCH_ARRIVALS"

_INSERT = """
    insert into projection (id, host_id, user_id, aggregate_id, amount, payload)
    values (%s, %s, %s, %s, (%s::jsonb->>'amount')::numeric, %s::jsonb)
"""
_PARAMETERS = ("id", "host_id", "user_id", "aggregate_id", "payload", "payload")
_arrivals: list[Arrivals] = []
_deferred: set[str | None] = set()


def nothing(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Do nothing."""


def wait(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Wait 5 ms, like a call to another service."""
    time.sleep(0.005)


def compute(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Use 5 ms of CPU time."""
    _compute(0.005)


def compute_1_ms(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Use 1 ms of CPU time."""
    _compute(0.001)


def note(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Note the time of each event's arrival; no effect."""
    _file().note(event.text("aggregate_id") for event in transaction.events)


def note_and_insert(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Note the time of the events' arrival, then insert a row for each."""
    note(transaction, cursor)
    cursor.executemany(
        _INSERT, [tuple(map(event.text, _PARAMETERS)) for event in transaction.events]
    )


def later(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Fail with an outage at the first attempt, so that the transaction is deferred for a second."""
    first = next(iter(transaction.events)).text("id")
    if first in _deferred:
        _deferred.discard(first)
        return
    _deferred.add(first)
    raise RetryLater("not yet", after=1.0)


def poison(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Fail for good, so that the transaction is dead-lettered."""
    raise ValueError("poison")


def _compute(seconds: float) -> None:
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        pass


def _file() -> Arrivals:
    if not _arrivals:
        _arrivals.append(Arrivals(os.environ[ARRIVALS]))
    return _arrivals[0]
