"""Handlers that are one SQL statement: for each event, or once over the relation `batch`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain, islice

import psycopg

from relay.config import SqlHandler
from relay.events import EVENT_FIELDS, SQL_TYPES, Transaction
from relay.faults import Action, ConfigurationError, action_for
from relay.handlers import Connection

_PLACEHOLDER = re.compile(r"%(?:%|\((\w*)\)s|(.?))", re.DOTALL)
_CHUNK = 1_000
"""How many statements are in flight at once: what bounds memory in a large transaction."""

_COLUMNS = ", ".join(f"{name} {SQL_TYPES[name]}" for name in EVENT_FIELDS)
_CREATE_BATCH = f"create temporary table if not exists batch ({_COLUMNS}) on commit delete rows"
_CLEAR_BATCH = "delete from pg_temp.batch"
_COPY_BATCH = "copy pg_temp.batch from stdin"


class SqlEvent:
    """Runs its statement for each event, in pipeline mode, with the event's fields as named parameters."""

    def __init__(self, name: str, settings: SqlHandler) -> None:
        self.name = name
        names = _placeholders(name, settings.statement)
        self._names = tuple(dict.fromkeys(names))
        self._statement = _PLACEHOLDER.sub(_typed, settings.statement).encode()
        self._numbered = _numbered(settings.statement, self._names)

    def configure(self, conn: Connection) -> None:
        """Nothing to prepare."""

    def check(self, conn: Connection) -> None:
        """Let the server parse the statement, and plan it for its rights."""
        _parse(conn, self.name, self._numbered)
        _explain(conn, self.name, self._statement, dict.fromkeys(self._names))

    def apply(self, conn: Connection, transactions: Sequence[Transaction]) -> None:
        """Run the statement for every event, in order."""
        names = self._names
        events = chain.from_iterable(transaction.events for transaction in transactions)
        parameters = ({name: event.text(name) for name in names} for event in events)
        with conn.cursor() as cursor:
            while chunk := list(islice(parameters, _CHUNK)):
                cursor.executemany(self._statement, chunk)


class SqlBatch:
    """Runs its statement once over `batch`, a temporary relation that holds the routed events in commit order."""

    def __init__(self, name: str, settings: SqlHandler) -> None:
        self.name = name
        self._statement = settings.statement.encode()

    def configure(self, conn: Connection) -> None:
        """Create the relation that the statement reads."""
        conn.execute(_CREATE_BATCH)

    def check(self, conn: Connection) -> None:
        """Let the server parse the statement, and plan it for its rights."""
        _parse(conn, self.name, self._statement.decode())
        _explain(conn, self.name, self._statement, None)

    def apply(self, conn: Connection, transactions: Sequence[Transaction]) -> None:
        """Load the events by COPY, then run the statement."""
        with conn.cursor() as cursor:
            cursor.execute(_CLEAR_BATCH)
            with cursor.copy(_COPY_BATCH) as copy:
                for transaction in transactions:
                    for event in transaction.events:
                        copy.write_row(event.row)
            cursor.execute(self._statement)


def _placeholders(name: str, statement: str) -> list[str]:
    found = []
    for match in _PLACEHOLDER.finditer(statement):
        field, other = match.groups()
        if other is not None:
            raise ConfigurationError(
                f"handlers.{name}.statement: {match.group()!r} is no placeholder: write %(field)s for a field and "
                "%% for a percent sign"
            )
        if field is None:
            continue
        if field not in EVENT_FIELDS:
            raise ConfigurationError(
                f"handlers.{name}.statement: {match.group()} names no field of an event; the fields are "
                f"{', '.join(EVENT_FIELDS)}"
            )
        found.append(field)
    return found


def _typed(match: re.Match[str]) -> str:
    """The placeholder with its field's type, so that `%(payload)s->>'amount'` means what it says."""
    field = match.group(1)
    return "%%" if field is None else f"(%({field})s::{SQL_TYPES[field]})"


def _numbered(statement: str, names: tuple[str, ...]) -> str:
    """The statement as the server parses it, with numbered parameters."""
    place = {name: position for position, name in enumerate(names, start=1)}

    def number(match: re.Match[str]) -> str:
        field = match.group(1)
        return "%" if field is None else f"(${place[field]}::{SQL_TYPES[field]})"

    return _PLACEHOLDER.sub(number, statement)


def _parse(conn: Connection, name: str, statement: str) -> None:
    """Let the server parse and analyse a statement without running it; raises ConfigurationError if it refuses."""
    with conn.transaction(force_rollback=True):
        result = conn.pgconn.prepare(b"", statement.encode())
        if result.error_message:
            error = psycopg.errors.error_from_result(result, encoding="utf-8")
            if action_for(error) is Action.RETRY:
                raise error
            message = (error.diag.message_primary or str(error)).strip()
            raise ConfigurationError(
                f"handlers.{name}.statement: {message}: correct the statement, or create and grant what it names"
            )


def _explain(
    conn: Connection, name: str, statement: bytes, parameters: dict[str, None] | None
) -> None:
    """Raise ConfigurationError if the role lacks a right: the server looks when it starts to execute, not before."""
    try:
        with conn.transaction(force_rollback=True):
            conn.execute(b"explain " + statement, parameters)
    except psycopg.errors.InsufficientPrivilege as error:
        raise ConfigurationError(
            f"handlers.{name}.statement: {error.diag.message_primary}: grant it to the role of target.dsn"
        ) from None
    except psycopg.Error as error:
        if action_for(error) is Action.RETRY:
            raise
        # Not every statement can be explained (CALL), nor with parameters that are null; it was parsed before.
