"""Keeps what became of attempts of a sink until it is stored with what they have changed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, islice
from typing import NamedTuple, cast

from relay.config.handlers import DeliveryHandler
from relay.config.settings import AttemptSettings
from relay.delivery.order import Delivery
from relay.faults import Drop, describe, first_line
from relay.model.transactions import BYTES_AT_ONCE, ROWS_AT_ONCE, ColumnDecoder, portions, text
from relay.sinks import ANSWER, Answer
from relay.store import attempts
from relay.store.attempts import NewAttempt, Outcome
from relay.store.connections import Connection
from relay.store.deferred import event_key

_MOST_UNSTORED = 50_000
"""How many may wait until they are stored; of more the oldest are forgotten, as while the target is away."""
_MOST_EVENTS = 1_000
"""How many events of a delivery are named."""
_LONGEST_ERROR = 1_000
_NOTHING = Answer()


class Ended(NamedTuple):
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
        fault = None
        if error is not None:
            # What is said of a drop is meant for a log.
            said = first_line(error) if isinstance(error, Drop) else describe(error)
            fault = said[:_LONGEST_ERROR]
        self._unstored.append(
            Ended(delivery, time.monotonic(), number, seconds, outcome, ANSWER.get(), fault)
        )

    def take(self) -> Sequence[Ended]:
        """Return what has ended since the last call."""
        taken, self._unstored = self._unstored, deque(maxlen=_MOST_UNSTORED)
        return taken

    def give_back(self, taken: Sequence[Ended]) -> None:
        """Keep what `take` has returned, which was not stored, until the next `take`."""
        self._unstored = deque([*taken, *self._unstored], _MOST_UNSTORED)

    def write(self, conn: Connection, group: str, sink: str, taken: Sequence[Ended]) -> None:
        """Store attempts in the current database transaction. Safe in any thread; raises psycopg.Error."""
        if taken:
            found = [*map(self._attempt, taken, _ids([each.delivery for each in taken]))]
            attempts.add(conn, group, sink, self._settings.keep, found)

    def _attempt(self, ended: Ended, ids: Sequence[str]) -> NewAttempt:
        delivery, answer = ended.delivery, ended.answer or _NOTHING
        return NewAttempt(
            ids,
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


def _ids(deliveries: Sequence[Delivery]) -> Iterator[list[str]]:
    """The ids of the events of each delivery. A single row would take ten times as long to decode as one of many."""
    for decoder, some in groupby(deliveries, lambda each: each.events.events.decoder):
        of_each = [[*islice(each.rows.tuples, _MOST_EVENTS)] for each in some]
        ids = [
            event_key("" if value is None else text(value))
            for rows in portions(chain(*of_each), ROWS_AT_ONCE, BYTES_AT_ONCE)
            for value in cast(ColumnDecoder, decoder).columns(rows, ("id",))[0]
        ]
        rest = iter(ids)
        for rows in of_each:
            yield [*islice(rest, len(rows))]
