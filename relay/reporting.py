"""The callback by which a long task reports its progress."""

from __future__ import annotations

from typing import Protocol


class ProgressReport(Protocol):
    """Called again and again: what is being done, how many units are done, and of how many, if known.

    A new `what` begins another step. Safe to call often, and from one thread after another.
    """

    def __call__(self, what: str, done: int = 0, total: int | None = None) -> None:
        """Report progress."""


def silent(what: str, done: int = 0, total: int | None = None) -> None:
    """A Report that nobody reads."""
