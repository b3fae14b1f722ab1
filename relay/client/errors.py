"""Errors of publishing, of workers and of readers, the same for every driver. No message quotes an event.

Errors that do not concern the outbox, such as a serialization failure or a lost connection, are raised as the driver
raises them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from relay.outcomes import Fail


class OutboxError(Exception):
    """The events were not published. The driver's error, if there is one, is the cause."""


class EventInvalid(OutboxError, ValueError):
    """An event cannot be stored; the message names the event and the field."""


class EventTooLarge(OutboxError, ValueError):
    """An event has more bytes of text than `source.max_event_bytes`."""


class TooManyHops(OutboxError, Fail):
    """The event would be one too many in a chain of events that cause each other: a loop.

    A handler or worker that lets it pass has failed for good, so that the chain ends as a dead letter.
    """


class DuplicateEvent(OutboxError):
    """The outbox has an event with this id already."""


class OutboxMissing(OutboxError):
    """The outbox does not exist in this database."""


class OutboxMismatch(OutboxError):
    """The outbox has other columns than `Outbox(columns=…)` names, or a required column got no value."""


class OutboxForbidden(OutboxError):
    """The role may not insert into the outbox."""


class NotInTransaction(OutboxError):
    """The session is in autocommit mode, so the events would not commit with the caller's changes."""


class UnknownSession(OutboxError, TypeError):
    """The session has no supported driver, or several engines, or needs the other of `publish` and `publish_async`."""


class WorkerError(Exception):
    """A worker cannot work: its queue does not exist, is another role's, or the worker is set up in a wrong way."""


class LeaseLost(Exception):
    """Another worker has the message meanwhile. What the block has changed is undone."""


class NoHandler(LookupError):
    """The worker has no handler for an event type."""


class ReaderError(Exception):
    """A reader cannot go on: there is none, it is another role's, was given up, or is of another server."""


class ReaderMoved(ReaderError):
    """Another session has moved the reader, or reads now: what was read is not its next, and nothing was moved."""


_INVALID = {
    "22P02": "a value has the wrong format for its column, such as a host_id that is not a UUID",
    "22P05": "a text has a character that is not in the database's encoding",
    "21000": "a value does not fit its column",
    "22001": "a text is too long for its column",
    "22003": "a number is out of its column's range",
    "22007": "a time has the wrong format",
    "22008": "a time is out of range",
    "22021": "a text has a character that is not in the database's encoding",
    "22023": "a value has the wrong format for its column",
    "23514": "a check constraint of the outbox refuses an event",
    "54000": "the events are too large for one statement",
}


def translated(error: BaseException, table: str) -> OutboxError | None:
    """Return the client's error for a driver's error; None if that does not concern the outbox."""
    for each in _chain(error):
        code = _sqlstate(each)
        if code is not None:
            return _of_sqlstate(code, each, table)
    return None


def _of_sqlstate(code: str, error: BaseException, table: str) -> OutboxError | None:
    if code == "23514" and _constraint(error) == "relay_max_event_bytes":
        return EventTooLarge(
            f"{table}: an event is larger than source.max_event_bytes: store large content elsewhere and publish its "
            "location, or raise source.max_event_bytes and run `relay init`"
        )
    if code in ("42P01", "3F000", "42704"):
        return OutboxMissing(
            f"{table}: the outbox does not exist: run `relay init` in this database"
        )
    if code in ("42703", "23502"):
        column = getattr(getattr(error, "diag", error), "column_name", None) or _quoted(error)
        what = f"column {column}" if column else "a column"
        return OutboxMismatch(
            f"{table}: {what} does not exist, or must have a value: map the fields to columns with Outbox(columns=…)"
        )
    if code == "42501":
        return OutboxForbidden(f"{table}: the role may not insert events: grant it relay_publisher")
    if code == "23505":
        return DuplicateEvent(f"{table}: an event with this id exists already")
    if code in _INVALID:
        return EventInvalid(f"{table}: {_INVALID[code]}")
    return None


def worker_error(error: BaseException, queue: str) -> WorkerError | None:
    """Return the error of a worker for a driver's error that no retry repairs; None for any other."""
    for each in _chain(error):
        if isinstance(each, NotInTransaction):
            return WorkerError(f"queue {queue}: {each}: what handlers change could not be undone")
        code = _sqlstate(each)
        if code in _UNUSABLE:
            return WorkerError(f"queue {queue}: {_UNUSABLE[code]}")
        if code in _TOLD:
            diag = getattr(each, "diag", None)
            text = getattr(diag, "message_primary", None) or each
            by_server = (
                getattr(diag, "source_function", None)
                or getattr(each, "server_source_function", None)
            ) == "aclcheck_error"
            cure = ": grant the role relay_worker" if by_server else ""
            return WorkerError(f"queue {queue}: {text}{cure}")
        refused = _refusal(each, code)
        if refused is not None:
            return WorkerError(f"queue {queue}: {refused}")
    return None


def _refusal(error: BaseException, code: str | None) -> str | None:
    """Return what a server, or its driver, says of a statement of the client that it will refuse each time; else None.

    No outage has class 22 or 42. Nor has one that psycopg raises for a value which no adapter of it takes.
    """
    names = [(kind.__module__, kind.__name__) for kind in type(error).__mro__]
    if code is None and ("psycopg", "ProgrammingError") in names:
        return f"psycopg refuses a statement of relay: {type(error).__name__}"
    if code is None or not code.startswith(("22", "42")):
        return None
    text = getattr(getattr(error, "diag", None), "message_primary", None) or type(error).__name__
    return f"the server refuses a statement of relay: {text} (SQLSTATE {code})"


def outage_of(error: BaseException) -> str:
    """Return what a log says of an outage: the text of a connection that failed, which quotes no event, or the class.

    psycopg has no SQLSTATE for a server that refuses a connection, such as to a database that does not exist: only the
    text tells it from a server that is away.
    """
    for each in _chain(error):
        names = [(kind.__module__, kind.__name__) for kind in type(each).__mro__]
        if isinstance(each, OSError) or (
            ("psycopg", "OperationalError") in names and _sqlstate(each) is None
        ):
            text = " ".join(str(each).split())[:_LONGEST_TEXT]
            return f"{type(each).__name__}: {text}" if text else type(each).__name__
    return type(error).__name__


_LONGEST_TEXT = 300
_UNUSABLE = {
    "3D000": "the database does not exist",
    "3F000": "the database has no queues: run `relay init` with it as target.dsn",
    "42883": "the database has no queues, or those of another version: run `relay init` with it as target.dsn",
    "28000": "the server refuses the role",
    "28P01": "the server refuses the password of the role",
}
_NO_READERS = _UNUSABLE | {
    "3F000": "the database has no readers: run `relay init` with it as source.dsn",
    "42883": "the database has no readers, or those of another version: run `relay init` with it as source.dsn",
}
_TOLD = ("22023", "42501", "42704")
"""Raised by the functions of queues and readers, with messages for people."""


def reader_error(error: BaseException, name: str) -> ReaderError | None:
    """Return the error of a reader for a driver's error that no retry repairs; None for any other."""
    chain = list(_chain(error))
    tags = {getattr(getattr(each, "diag", each), "constraint_name", None) for each in chain}
    if "relay_reader_moved" in tags:
        return ReaderMoved(f"reader {name}: another session has moved it, or reads now")
    for each in chain:
        code = _sqlstate(each)
        if code in _NO_READERS:
            return ReaderError(f"reader {name}: {_NO_READERS[code]}")
        if code in _TOLD or (code == "55000" and "relay_reader_standby" not in tags):
            diag = getattr(each, "diag", None)
            hint = getattr(diag or each, "message_hint", None) or getattr(each, "hint", None)
            text = getattr(diag, "message_primary", None) or str(each)
            return ReaderError(f"reader {name}: {text}{f': {hint}' if hint else ''}")
        refused = _refusal(each, code)
        if refused is not None:
            return ReaderError(f"reader {name}: {refused}")
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and those that it wraps: SQLAlchemy's in `orig`, Django's in the cause."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = getattr(current, "orig", None) or current.__cause__


def _sqlstate(error: BaseException) -> str | None:
    code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    return code if isinstance(code, str) else None


def _quoted(error: BaseException) -> str | None:
    """Return the first name that the server's message quotes: of 42703, the column that does not exist."""
    name = re.search(r'"([^"]+)"', str(error).partition("\n")[0])
    return name[1] if name else None


def _constraint(error: BaseException) -> str | None:
    for each in _chain(error):
        name = getattr(getattr(each, "diag", each), "constraint_name", None)
        if isinstance(name, str):
            return name
    return None
