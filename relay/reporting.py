"""How a long task tells what it does and how far it is, to whoever wants to show it."""

from __future__ import annotations

from typing import Protocol


class ProgressReport(Protocol):
    """Told again and again: what is being done, how many units of it, and of how many where that is known.

    Other words for `what` begin another step. Safe to call often, and from one thread after another.
    """

    def __call__(self, what: str, done: int = 0, total: int | None = None) -> None:
        """Take note of it."""


def silent(what: str, done: int = 0, total: int | None = None) -> None:
    """A Report that nobody reads."""
