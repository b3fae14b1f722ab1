"""Keeps what became of attempts of a sink until it is stored with what they have changed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from relay.config.handlers import DeliveryHandler
from relay.config.settings import AttemptSettings
from relay.delivery.queues import Delivery
from relay.faults import describe
from relay.sinks import ANSWER, Answer
from relay.store import attempts
from relay.store.attempts import Attempt, Outcome
from relay.store.connections import Connection
from relay.store.deferred import event_key

_MOST_UNSTORED = 50_000
"""How many may wait until they are stored; of more the oldest are forgotten, as while the target is away."""
_MOST_EVENTS = 1_000
"""How many events of a delivery are named."""
_LONGEST_ERROR = 1_000


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """An attempt that ended at `at` (monotonic clock, seconds)."""

    delivery: Delivery
    at: float
    number: int
    seconds: float
    outcome: Outcome
    answer: Answer | None
    error: str | None


class AttemptLog:
    """The attempts of one sink that are to be stored; those that are not `recorded` are forgotten at once."""

    def __init__(self, settings: AttemptSettings, of: DeliveryHandler) -> None:
        recorded = of.attempts or settings.record
        self._records = recorded != "none"
        self._records_all = recorded == "all"
        self._settings = settings
        self._unstored: deque[Ended] = deque(maxlen=_MOST_UNSTORED)

    def begin(self) -> None:
        """Let the sink say what it is answered by the attempt that begins in the current task."""
        if self._records:
            ANSWER.set(Answer())

    def ended(
        self,
        delivery: Delivery,
        seconds: float,
        outcome: Outcome = "delivered",
        error: Exception | None = None,
    ) -> None:
        """Note an attempt that has ended in the current task."""
        if outcome == "failed":
            delivery.has_failed = True
        if not self._records:
            return
        number = delivery.events.attempt
        if outcome == "delivered" and not (
            self._records_all or number > 1 or delivery.has_failed or delivery.due is not None
        ):
            return
        text = None if error is None else describe(error)[:_LONGEST_ERROR]
        self._unstored.append(
            Ended(delivery, time.monotonic(), number, seconds, outcome, ANSWER.get(), text)
        )

    def take(self) -> Sequence[Ended]:
        """Return what has ended since the last call."""
        taken, self._unstored = self._unstored, deque(maxlen=_MOST_UNSTORED)
        return taken

    def give_back(self, taken: Sequence[Ended]) -> None:
        """Store again what `take` has returned: it was not stored."""
        self._unstored.extendleft(reversed(taken))

    def write(self, conn: Connection, group: str, sink: str, taken: Sequence[Ended]) -> None:
        """Store attempts in the current database transaction. Safe in any thread; raises psycopg.Error."""
        if taken:
            attempts.add(conn, group, sink, self._settings.keep, map(self._attempt, taken))

    def _attempt(self, ended: Ended) -> Attempt:
        delivery, answer = ended.delivery, ended.answer or Answer()
        return Attempt(
            tuple(_ids(delivery)),
            delivery.rows.hosts,
            ended.number,
            time.monotonic() - ended.at + ended.seconds,
            ended.seconds,
            ended.outcome,
            answer.destination,
            answer.status,
            ended.error,
            answer.text if self._settings.answers else None,
            delivery.due.resent_by if delivery.due else None,
        )


def _ids(delivery: Delivery) -> Iterator[str]:
    events = islice(delivery.events.events, _MOST_EVENTS)
    return (event_key(event.text("id") or "") for event in events)
