"""Handlers that run one SQL statement: for each event, or once over the relation `batch`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import repeat
from typing import LiteralString

from psycopg import sql

from relay.causes import MAX_HOPS, Causing
from relay.config.handlers import SqlHandler
from relay.faults import ConfigurationError
from relay.handlers import causes, relation
from relay.model.events import COMMIT_FIELDS, SQL_TYPES
from relay.model.transactions import Routed
from relay.store import statements, trips
from relay.store.connections import Connection

_PLACEHOLDER = re.compile(r"%(?:%|\((\w*)\)s|(.?))", re.DOTALL)
_NOTHING = r"(?:[\s;]|--[^\n]*(?:\n|$)|/\*.*?\*/)*"
"""Matches white space, comments and empty statements."""
_ENDS_TRANSACTION = re.compile(
    # A command that begins or ends a transaction or a savepoint.
    _NOTHING + r"(abort|begin|commit|end|prepare\s+transaction|release|rollback|savepoint|start)\b",
    re.IGNORECASE | re.DOTALL,
)
_COPIES = re.compile(
    _NOTHING + r"copy\b.*\b(?:from\s+stdin|to\s+stdout)\b", re.IGNORECASE | re.DOTALL
)
_PUBLISHES = re.compile(r'"?\brelay"?\s*\.\s*"?publish"?\s*\(', re.IGNORECASE)
_CAUSE_FIELDS = ("id", "metadata")
_BEGIN_CAUSE = "select relay.begin_cause(%(id)s, %(metadata)s, {})"
FEW_EVENTS = 50
"""Up to this number of events, to send the statements costs less than the round trips that load the events."""
_IN_FLIGHT = 1_000
"""How many statements are sent before their results are read."""


class SqlEvent:
    """Runs its statement for each event, in order, with the event's fields as parameters.

    A few statements are sent one by one, in pipeline mode. For many events, these are loaded into a temporary relation,
    and a temporary function with the statement as its body is called for each row: without a message for each.
    """

    def __init__(
        self,
        name: str,
        settings: SqlHandler,
        types: Mapping[str, LiteralString] = SQL_TYPES,
        max_hops: int = MAX_HOPS,
    ) -> None:
        """`types` are the PostgreSQL types of the fields."""
        self.name = name
        self._key = f"handlers.{name}.statement"
        self._types = types
        self._publishes = settings.publishes
        _require_of_data(name, settings.statement)
        _require_declared(name, settings)
        names = tuple(dict.fromkeys(_placeholders(name, settings.statement, types)))
        self._parameters = len(names)
        more = _CAUSE_FIELDS if settings.publishes else ()
        self._names = tuple(dict.fromkeys((*names, *more)))
        self._reads_commit = not set(COMMIT_FIELDS).isdisjoint(self._names)
        self._statement = _typed(settings.statement, types).encode()
        self._numbered = _numbered(settings.statement, self._names, types)
        self._body = self._numbered
        if settings.publishes:
            cause = _numbered(_BEGIN_CAUSE.format(max_hops), self._names, types)
            self._body = f"{cause}; {self._numbered}"
        # Named after its content, since a handler's name may be too long for PostgreSQL.
        digest = sha256(self._body.encode()).hexdigest()
        self._function = sql.Identifier("pg_temp", f"relay_{digest[:32]}")
        # Each event's cause is told in its own round trip, by the body of the function.
        self._sent = (self._calling() if settings.publishes else self._numbered).encode()

    def _calling(self) -> str:
        """A call of the function with numbered parameters."""
        given = (
            sql.SQL(f"${n}::{self._types[name]}") for n, name in enumerate(self._names, start=1)
        )
        return (
            sql.SQL("select {}({})").format(self._function, sql.SQL(", ").join(given)).as_string()
        )

    def configure(self, conn: Connection) -> None:
        """Create the relation, and the function that is called over it; its body is not checked until it is called."""
        relation.create(conn, self._types)
        with conn.transaction():
            conn.execute("set local check_function_bodies = off")
            conn.execute(
                sql.SQL("create or replace function {}({}) returns void language sql as {}").format(
                    self._function,
                    sql.SQL(", ").join(sql.SQL(self._types[name]) for name in self._names),
                    sql.Literal(self._body),
                )
            )

    def check(self, conn: Connection) -> None:
        """Let the server parse the statement, and plan it to check privileges. Raises ConfigurationError."""
        relation.require_reserved(conn)
        statements.parse(conn, self._key, self._numbered, self._parameters)
        statements.explain(conn, self._key, self._statement, dict.fromkeys(self._names))

    def statements(self, routed: Routed) -> Sequence[trips.BoundStatement]:
        """The statement of each event, with its values."""
        of_events = [trips.BoundStatement(self._sent, values) for values in self._values(routed)]
        return [*of_events, causes.END] if self._publishes else of_events

    def apply(self, conn: Connection, routed: Routed) -> None:
        """Run the statement for every event, in order."""
        if routed.events <= FEW_EVENTS:
            trips.run_each(conn, self.statements(routed))
        elif self._names:
            self._call(conn, routed)
        else:
            for first in range(0, routed.events, _IN_FLIGHT):
                events = min(_IN_FLIGHT, routed.events - first)
                trips.run_each(conn, [trips.BoundStatement(self._sent)] * events)

    def _values(self, routed: Routed) -> Iterator[tuple[bytes | None, ...]]:
        if not self._names:
            return repeat((), routed.events)
        if not self._reads_commit:
            return routed.values(self._names)
        return (
            values
            for chunk in relation.chunks(routed)
            for values in zip(*relation.columns(chunk, self._names), strict=True)
        )

    def _call(self, conn: Connection, routed: Routed) -> None:
        call = sql.SQL("select {}({}) from pg_temp.relay_batch").format(
            self._function, sql.SQL(", ").join(map(sql.Identifier, self._names))
        )
        for number, chunk in enumerate(relation.chunks(routed)):
            relation.clear(conn, truncate=number > 0)
            relation.load(conn, [chunk], self._types, self._names)
            conn.execute(call)
        if self._publishes:
            causes.end(conn)


class SqlBatch:
    """Runs its statement once over `batch`, a relation that holds the routed events in commit order."""

    def __init__(
        self,
        name: str,
        settings: SqlHandler,
        types: Mapping[str, LiteralString] = SQL_TYPES,
        max_hops: int = MAX_HOPS,
    ) -> None:
        """`types` are the PostgreSQL types of the fields."""
        self.name = name
        self._key = f"handlers.{name}.statement"
        self._types = types
        _require_of_data(name, settings.statement)
        _require_declared(name, settings)
        # A statement for many events has no cause of its own.
        self._causing = Causing(None, max_hops) if settings.publishes else None
        self._written = settings.statement
        self._statement = relation.bound(settings.statement)
        self._columns: tuple[str, ...] = tuple(types)

    def configure(self, conn: Connection) -> None:
        """Create the relation, and determine which of its columns the statement reads: only these are loaded."""
        relation.create(conn, self._types)
        self._columns = relation.columns_read(conn, self._written, self._types)

    def check(self, conn: Connection) -> None:
        """Let the server parse the statement, and plan it to check privileges. Raises ConfigurationError."""
        relation.require_reserved(conn)
        statements.parse(conn, self._key, self._statement, 0)
        statements.explain(conn, self._key, self._statement.encode(), None)

    def statements(self, routed: Routed) -> None:
        """None: the events are loaded by COPY."""

    def apply(self, conn: Connection, routed: Routed) -> None:
        """Load the events by COPY, then run the statement."""
        relation.clear(conn)
        relation.load(conn, relation.chunks(routed), self._types, self._columns)
        if self._causing is not None:
            causes.begin(conn, self._causing)
        conn.execute(self._statement.encode())
        if self._causing is not None:
            causes.end(conn)


def _require_of_data(name: str, statement: str) -> None:
    """Raise ConfigurationError for a statement such as COMMIT, or one that exchanges data with the client."""
    if _COPIES.match(statement):
        raise ConfigurationError(
            f"handlers.{name}.statement: COPY from stdin or to stdout: relay neither sends nor reads its rows: write a "
            "statement over the fields of an event"
        )
    if match := _ENDS_TRANSACTION.match(statement):
        raise ConfigurationError(
            f"handlers.{name}.statement: {match[1].upper()}: a handler runs in relay's transaction, which commits its "
            "effects with offsets and dead letters: write a statement that changes data"
        )


def _require_declared(name: str, settings: SqlHandler) -> None:
    """Raise ConfigurationError for a handler that publishes and does not say so: a loop would not be seen."""
    if not settings.publishes and _PUBLISHES.search(settings.statement):
        raise ConfigurationError(
            f"handlers.{name}.statement: calls relay.publish: set handlers.{name}.publishes: true, so that an event "
            "that causes itself is seen"
        )


def _placeholders(name: str, statement: str, fields: Collection[str]) -> list[str]:
    names = []
    for match in _PLACEHOLDER.finditer(statement):
        field, other = match.groups()
        if other is not None:
            raise ConfigurationError(
                f"handlers.{name}.statement: {match.group()!r} is not a placeholder: write %(field)s for a field and "
                "%% for a percent sign"
            )
        if field is None:
            continue
        if field not in fields:
            raise ConfigurationError(
                f"handlers.{name}.statement: {match.group()} is not a field of an event; the fields are "
                f"{', '.join(fields)}"
            )
        names.append(field)
    return names


def _typed(statement: str, types: Mapping[str, LiteralString]) -> str:
    """The statement, each placeholder with its field's type, so that `%(payload)s->>'amount'` is resolved for jsonb."""

    def typed(match: re.Match[str]) -> str:
        field = match.group(1)
        return "%%" if field is None else f"(%({field})s::{types[field]})"

    return _PLACEHOLDER.sub(typed, statement)


def _numbered(statement: str, names: tuple[str, ...], types: Mapping[str, LiteralString]) -> str:
    """The statement as the server parses it, with numbered parameters."""
    index = {name: number for number, name in enumerate(names, start=1)}

    def number(match: re.Match[str]) -> str:
        field = match.group(1)
        return "%" if field is None else f"(${index[field]}::{types[field]})"

    return _PLACEHOLDER.sub(number, statement)
