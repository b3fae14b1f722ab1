"""What can go wrong when events are published, whatever the driver. No message quotes an event.

Faults that do not concern the outbox, such as a serialization failure or a lost connection, stay the driver's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator


class OutboxError(Exception):
    """The events were not published. The driver's error, if there is one, is the cause."""


class EventInvalid(OutboxError, ValueError):
    """An event cannot be stored: the message says which and what of it."""


class EventTooLarge(OutboxError, ValueError):
    """An event's payload and metadata have more bytes than the outbox takes (`source.max_event_bytes`)."""


class DuplicateEvent(OutboxError):
    """An event with this id is in the outbox already."""


class OutboxMissing(OutboxError):
    """The database has no such outbox."""


class OutboxMismatch(OutboxError):
    """The outbox has other columns than the client was told, or asks for one that it was not given."""


class OutboxForbidden(OutboxError):
    """The role may not insert into the outbox."""


class NotInTransaction(OutboxError):
    """The session commits each statement by itself, so the events would not belong to the caller's transaction."""


class UnknownSession(OutboxError, TypeError):
    """The session is of no driver that the client knows, or of its other kind: synchronous, asynchronous."""


_INVALID = {
    "22P02": "a value has the wrong form for its column, such as a host_id that is no UUID",
    "22P05": "a text has a character that the database's encoding lacks",
    "21000": "a value does not fit its column",
    "22001": "a text is too long for its column",
    "22003": "a number is out of its column's range",
    "22007": "a time has the wrong form",
    "22008": "a time is out of range",
    "22021": "a text has a character that the database's encoding lacks",
    "22023": "a value has the wrong form for its column",
    "23514": "a check constraint of the outbox refuses an event",
    "54000": "the events are too large for one statement",
}


def translated(error: BaseException, table: str) -> OutboxError | None:
    """The error of the client that a driver's error means; None if it does not concern the outbox."""
    for each in _chain(error):
        code = _sqlstate(each)
        if code is not None:
            return _of_sqlstate(code, each, table)
    return None


def _of_sqlstate(code: str, error: BaseException, table: str) -> OutboxError | None:
    if code == "23514" and _constraint(error) == "relay_max_event_bytes":
        return EventTooLarge(
            f"{table}: an event is larger than the outbox takes: store large content elsewhere and publish where it "
            "is, or raise source.max_event_bytes and run `relay init`"
        )
    if code in ("42P01", "3F000", "42704"):
        return OutboxMissing(f"{table}: there is no such outbox: run `relay init` in this database")
    if code in ("42703", "23502"):
        column = getattr(getattr(error, "diag", error), "column_name", None) or _quoted(error)
        what = f"column {column}" if column else "a column"
        return OutboxMismatch(
            f"{table}: {what} is missing there, or must have a value: say in Outbox(columns=…) where the fields go"
        )
    if code == "42501":
        return OutboxForbidden(f"{table}: the role may not insert events: grant it relay_publisher")
    if code == "23505":
        return DuplicateEvent(f"{table}: an event with this id is there already")
    if code in _INVALID:
        return EventInvalid(f"{table}: {_INVALID[code]}")
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what drivers wrap in it: SQLAlchemy in `orig`, Django in the cause."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = getattr(found, "orig", None) or found.__cause__


def _sqlstate(error: BaseException) -> str | None:
    code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    return code if isinstance(code, str) else None


def _quoted(error: BaseException) -> str | None:
    """The first name that the server's message quotes: of 42703 the column that is not there."""
    found = re.search(r'"([^"]+)"', str(error).partition("\n")[0])
    return found[1] if found else None


def _constraint(error: BaseException) -> str | None:
    for each in _chain(error):
        name = getattr(getattr(each, "diag", each), "constraint_name", None)
        if isinstance(name, str):
            return name
    return None
