"""The callback by which a long task reports its progress."""

from __future__ import annotations

from typing import Protocol


class ProgressReport(Protocol):
    """A callback with the current step (`what`), the units done, and their total if it is known.

    A new `what` begins another step. It is cheap to call, from one thread after another.
    """

    def __call__(self, what: str, done: int = 0, total: int | None = None) -> None:
        """Report progress."""


def silent(what: str, done: int = 0, total: int | None = None) -> None:
    """Ignore the progress; a ProgressReport."""
