"""Publishes submissions in order, many with one commit; each has an outcome of its own.

One that the database refuses harms itself only: the others are written again in halves without it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psycopg

from relay.config.dsn import DatabaseAccess
from relay.faults import ConfigurationError, describe, first_line
from relay.intake.messages import IncomingEvents
from relay.store import locks, submissions
from relay.store.connections import (
    APPLICATION_NAME,
    SHORT_TIMEOUTS,
    Connection,
    connect,
    sessions_with,
)

_LIMITS = {"lock_timeout": "500ms", "statement_timeout": "8s"}
_CONNECT_SECONDS = 5


@dataclass(frozen=True, slots=True)
class Accepted:
    """The commit of a submission. `is_repeated`: the outbox had its events before, with the same content."""

    transaction_id: str
    is_repeated: bool = False


class MayNotPublish(ConfigurationError):
    """The role of `source.dsn` has no right to publish, which no submission is to blame for."""


class Conflict(Exception):
    """The outbox has events of these ids already, with other content; `ordinals` says which, from 1."""

    def __init__(self, ordinals: Sequence[int]) -> None:
        super().__init__(f"events {', '.join(map(str, ordinals))} have ids of other events")
        self.ordinals = ordinals


class Refused(Exception):
    """The database refuses the events for what they are. `is_too_large`: an event has more than the limit of bytes."""

    def __init__(self, text: str, fault: str, is_too_large: bool = False) -> None:
        """`text` may quote the events, `fault` does not."""
        super().__init__(text)
        self.fault = fault
        self.is_too_large = is_too_large


class NotCommitted(Exception):
    """The submission was not committed in time, or that is not known: repeat it with the same ids."""


class Claimed(Exception):
    """Another instance has the claim."""


class _NotTogether(Exception):
    """A group has a conflict, after which nothing may be published."""


Outcome = Accepted | Conflict | Refused | NotCommitted


class Publisher:
    """Publishes with one connection, which it opens when it needs one. For one thread at a time.

    With a `claim` the connection holds this lock, and it publishes nothing after a submission that is not accepted.
    """

    def __init__(self, dsn: DatabaseAccess | str, claim: locks.Key | None = None) -> None:
        self.commits = 0
        """How many transactions were committed."""
        self._dsn = dsn
        self._claim = claim
        self._conn: Connection | None = None

    def claim(self) -> None:
        """Connect, and take the claim. Raises Claimed, psycopg.Error and ConfigurationError."""
        try:
            self._connection()
        except BaseException:
            self.close()
            raise

    def publish(self, group: Sequence[IncomingEvents], until: float) -> list[Outcome]:
        """Publish submissions, and return the outcome of each after its commit.

        After `until` (monotonic clock, seconds) what is left is NotCommitted. With a claim the list ends with the first
        that is not accepted. Raises psycopg.Error and ConfigurationError in an outage, and Claimed; some may be
        committed then, and are found when they are published again.
        """
        try:
            return self._published(group, until)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()

    def _published(self, group: Sequence[IncomingEvents], until: float) -> list[Outcome]:
        if time.monotonic() >= until:
            return [NotCommitted("the database is busy") for _ in group]
        try:
            return self._committed(group)
        except _NotTogether:
            pass
        except psycopg.errors.InsufficientPrivilege as error:
            raise MayNotPublish(
                f"source.dsn: {first_line(error)}: run `relay init --handlers-publish`, and connect as a member of "
                "relay"
            ) from error
        except psycopg.Error as error:
            if not _is_of_events(error):
                raise
            if len(group) == 1:
                return [self._alone(group[0], error)]
        middle = len(group) // 2
        outcomes = self._published(group[:middle], until)
        if self._claim is not None and not isinstance(outcomes[-1], Accepted):
            return outcomes
        return outcomes + self._published(group[middle:], until)

    def _alone(self, submission: IncomingEvents, error: psycopg.Error) -> Outcome:
        """Return the outcome of a submission that was refused in a transaction of its own."""
        if isinstance(error, psycopg.errors.UniqueViolation):
            # Another publisher's event, which is committed now.
            try:
                return self._committed([submission])[0]
            except psycopg.Error as again:
                if not _is_of_events(again):
                    raise
                error = again
        if _is_too_large(error):
            text = "an event is larger than source.max_event_bytes"
            return Refused(text, text, is_too_large=True)
        if isinstance(error, psycopg.OperationalError) and not isinstance(
            error, psycopg.errors.ProgramLimitExceeded
        ):
            return NotCommitted(describe(error))
        return Refused(first_line(error), describe(error))

    def _committed(self, group: Sequence[IncomingEvents]) -> list[Outcome]:
        """Publish a group in one transaction. Raises psycopg.Error."""
        conn = self._connection()
        outcomes: list[Outcome] = []
        with conn.transaction():
            locks.lock_events(conn, [each for submission in group for each in submission.ids])
            for part in _without_repetitions(group):
                outcomes += _write(conn, part)
            has_conflict = any(isinstance(each, Conflict) for each in outcomes)
            if has_conflict and self._claim is not None and len(group) > 1:
                raise _NotTogether
        self.commits += 1
        return outcomes

    def _connection(self) -> Connection:
        if self._conn is None:
            options = {**SHORT_TIMEOUTS, "connect_timeout": _CONNECT_SECONDS}
            with sessions_with(_LIMITS):
                self._conn = connect(self._dsn, application_name=APPLICATION_NAME, **options)
            if self._claim is not None and not locks.try_lock(self._conn, self._claim):
                raise Claimed
        return self._conn


def _without_repetitions(group: Sequence[IncomingEvents]) -> Iterator[list[IncomingEvents]]:
    """Yield the group in parts of which none has an id twice."""
    part: list[IncomingEvents] = []
    ids: set[str] = set()
    for each in group:
        if not ids.isdisjoint(each.ids):
            yield part
            part, ids = [], set()
        part.append(each)
        ids.update(each.ids)
    yield part


def _write(conn: Connection, part: Sequence[IncomingEvents]) -> Iterator[Outcome]:
    known = submissions.published(conn, [each for submission in part for each in submission.ids])
    new = [each for each in part if not known or known.isdisjoint(each.ids)]
    if new:
        submissions.publish(conn, new)
    is_new = {each.transaction_id for each in new}
    for each in part:
        if each.transaction_id in is_new:
            yield Accepted(each.transaction_id)
        else:
            yield _compared(conn, each)


def _compared(conn: Connection, submission: IncomingEvents) -> Accepted | Conflict:
    """Return the outcome of a submission of which the outbox has events."""
    found = submissions.stored(conn, submission)
    same = {each.ordinal: each.transaction_id for each in found if each.is_same}
    if len(same) == len(submission.ids) and len(set(same.values())) == 1:
        transaction_id = same[1] or ""
        # An attempt whose answer was lost has published it.
        return Accepted(transaction_id, transaction_id != submission.transaction_id)
    other = {each.ordinal for each in found} - set(same)
    return Conflict(sorted(other or same))


_OF_EVENTS = ("22", "23", "40", "54", "P0", "RL")
"""The classes of SQLSTATEs of which the events may be the cause, or those who publish beside them."""


def _is_of_events(error: psycopg.Error) -> bool:
    """Return whether a submission of the group may be the cause, so that others do without it."""
    state = error.sqlstate or ""
    return state.startswith(_OF_EVENTS) or state in ("55P03", "57014")


def _is_too_large(error: psycopg.Error) -> bool:
    return "max_event_bytes" in (error.diag.message_hint or "") or (
        error.diag.constraint_name == "relay_max_event_bytes"
    )
