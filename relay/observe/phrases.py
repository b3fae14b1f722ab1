"""Counts and times as commands and the console print them."""

from __future__ import annotations

from datetime import datetime


def counted(count: int, one: str, many: str) -> str:
    """Return a count with its words: those for one, or those for any other number."""
    return f"{count} {one if count == 1 else many}"


def moment(time: datetime | None) -> str:
    """Return a time in its own zone, such as `2026-03-01 12:00:00 UTC`; a dash without one."""
    return f"{time:%Y-%m-%d %H:%M:%S %Z}" if time else "-"


def with_events(transactions: int, events: int) -> str:
    """Return how many transactions there are, and how many events they have."""
    return f"{counted(transactions, 'transaction', 'transactions')} with {counted(events, 'event', 'events')}"
