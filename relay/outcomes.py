"""What the code of users raises to say how its part of a transaction, or its message, ends.

Imports nothing: handlers, functions and workers raise the same classes, whatever is installed.
"""

from __future__ import annotations

from datetime import timedelta

SHORTEST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.1, 86_400.0
"""What `RetryLater(after=…)` may ask for: what is outside is moved to the nearer one."""


class TransientFault(Exception):
    """An outage, and no fault of the event: the transaction is retried.

    `after` is the wait in seconds; None leaves it to the retry settings.
    """

    def __init__(self, *reasons: object, after: float | None = None) -> None:
        super().__init__(*reasons)
        self.after = after


class RetryLater(TransientFault):
    """Raise it in a handler to retry the transaction later: an outage, and no fault of the event.

    `after` is the wait: seconds or a timedelta, from a tenth of a second to a day; None, or less than 0, leaves it to
    the retry settings. It counts as an attempt. Raises TypeError for what is no number.
    """

    def __init__(self, *reasons: object, after: float | timedelta | None = None) -> None:
        seconds = after.total_seconds() if isinstance(after, timedelta) else after
        if not isinstance(seconds, int | float | None):
            raise TypeError(f"after is a {type(after).__name__}: give seconds or a timedelta")
        super().__init__(*reasons, after=seconds)


def named_wait(error: BaseException | None) -> float | None:
    """Return the wait that a RetryLater asks for, in seconds; None if it leaves it to the settings, as below 0."""
    after = error.after if isinstance(error, RetryLater) else None
    if after is None or not after >= 0:
        return None
    # An integer may be too large for a float.
    return float(max(SHORTEST_WAIT_SECONDS, min(after, LONGEST_WAIT_SECONDS)))


class Drop(Exception):
    """Raise it in a handler to end its part of a transaction as done, without effects and without a retry.

    What the handler has changed for the transaction is undone; other handlers are not concerned. relay logs how many
    were dropped, with the reason of one, so a reason must not quote what may not be in a log.
    """


class Fail(Exception):
    """Raise it in a handler to dead-letter the transaction at once, whatever `retry` says.

    The reason is stored with the dead letter.
    """
