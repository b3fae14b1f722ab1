"""The outbox as a publisher sees it: one INSERT for any number of events."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from relay.client import sessions, tracing
from relay.client.errors import EventInvalid, OutboxForbidden, translated
from relay.client.event import Event, Id
from relay.client.payloads import encode

FIELDS = (
    "id",
    "host_id",
    "user_id",
    "aggregate_type",
    "aggregate_id",
    "aggregate_version",
    "event_type",
    "event_ts",
    "payload",
    "metadata",
    "transaction_id",
    "transaction_ordinal",
    "transaction_count",
    "deliver_at",
)
"""What an event has. Each is a column of relay's own outbox with this name."""


@dataclass(frozen=True, slots=True)
class Published:
    """What `publish` was given once."""

    events: Sequence[Event]
    host_id: Id
    user_id: Id | None
    transaction_id: uuid.UUID


class Outbox:
    """Publishes events to a table, by default relay's own, in the transactions of its callers. Safe in any thread.

    With a `message_prefix` it writes messages by pg_logical_emit_message and no table, for `source.message_prefix`.
    `columns` says for a table of your own which column has a field; None for a field that it does not have. Fields
    that are not named keep their names. See `FIELDS`.
    """

    def __init__(
        self,
        table: str = "public.outbox_message_t",
        columns: Mapping[str, str | None] | None = None,
        *,
        message_prefix: str | None = None,
    ) -> None:
        """Raises ValueError for a field that does not exist, and for columns of messages."""
        columns = columns or {}
        if message_prefix is not None and columns:
            raise ValueError("columns: messages have none: leave out columns or message_prefix")
        self._message_prefix = message_prefix
        unknown = sorted(set(columns) - set(FIELDS))
        if unknown:
            raise ValueError(
                f"columns: {unknown[0]} is not a field; the fields are {', '.join(FIELDS)}"
            )
        self.table = table if message_prefix is None else f"messages {message_prefix}"
        self._relation = ".".join(quoted(part) for part in table.split("."))
        chosen = {name: columns.get(name, name) for name in FIELDS}
        self._renamed = (
            {name: column for name, column in chosen.items() if column} if columns else None
        )
        self.recorded: list[Published] | None = None
        """Where a test collects what is published instead of the database, see `relay.client.testing`."""

    def publish(
        self,
        session: Any,
        events: Event | Iterable[Event],
        *,
        host_id: Id,
        user_id: Id | None = None,
        transaction_id: uuid.UUID | None = None,
    ) -> uuid.UUID:
        """Insert the events in one statement into the session's open transaction, which it never commits.

        `session` is a psycopg connection or cursor, an SQLAlchemy Session or Connection, or a Django connection. The
        events are one business transaction, in this order, of the tenant `host_id`. Returns its `transaction_id`, a
        new one unless it is given.

        Raises OutboxError; what does not concern the outbox, as the driver raises it.
        """
        published = _published(events, host_id, user_id, transaction_id)
        if not published.events:
            return published.transaction_id
        statement, text = self._statement(published)
        if self.recorded is not None:
            self.recorded.append(published)
            return published.transaction_id
        try:
            sessions.execute(session, statement, text)
        except Exception as error:
            self._raise(error)
        return published.transaction_id

    async def publish_async(
        self,
        session: Any,
        events: Event | Iterable[Event],
        *,
        host_id: Id,
        user_id: Id | None = None,
        transaction_id: uuid.UUID | None = None,
    ) -> uuid.UUID:
        """`publish` for asynchronous sessions.

        These are a psycopg AsyncConnection or AsyncCursor, an SQLAlchemy AsyncSession or AsyncConnection, and asyncpg's
        connections.
        """
        published = _published(events, host_id, user_id, transaction_id)
        if not published.events:
            return published.transaction_id
        statement, text = self._statement(published)
        if self.recorded is not None:
            self.recorded.append(published)
            return published.transaction_id
        try:
            await sessions.execute_async(session, statement, text)
        except Exception as error:
            self._raise(error)
        return published.transaction_id

    def _raise(self, error: Exception) -> None:
        found = translated(error, self.table)
        if found is None:
            raise error
        if self._message_prefix is not None and isinstance(found, OutboxForbidden):
            found = OutboxForbidden("the role may not execute pg_logical_emit_message: grant it")
        raise found from error

    def _statement(self, published: Published) -> tuple[sessions.Statement, str]:
        rows = self._rows(published)
        if self._message_prefix is not None:
            return _emit(self._message_prefix), encode(rows)
        # A column that no event has a value for gets its default.
        columns = tuple(dict.fromkeys(column for row in rows for column in row))
        return _insert(self._relation, columns), encode(rows)

    def _rows(self, published: Published) -> list[dict[str, Any]]:
        """A row for each event: the values that it has, by column."""
        common = {
            "host_id": _text(published.host_id),
            "transaction_id": str(published.transaction_id),
            "transaction_count": len(published.events),
        }
        if published.user_id is not None:
            common["user_id"] = _text(published.user_id)
        context = tracing.context()
        rows = [
            common | _row(event, number, context) for number, event in enumerate(published.events)
        ]
        if any("event_ts" in row for row in rows):
            now = datetime.now(UTC)
            for row in rows:
                row.setdefault("event_ts", now)
        if self._renamed is not None:
            renamed = self._renamed.items()
            rows = [{column: row[name] for name, column in renamed if name in row} for row in rows]
        for number, (row, event) in enumerate(zip(rows, published.events, strict=True)):
            if event.extra and self._message_prefix is not None:
                raise EventInvalid(f"events[{number}].extra: messages have no further columns")
            row.update(event.extra)
        return rows


def _emit(prefix: str) -> sessions.Statement:
    literal = "'" + prefix.replace("'", "''") + "'"
    return sessions.Statement(
        f"select pg_logical_emit_message(true, {literal}, cast(", " as text))"
    )


@lru_cache(maxsize=256)
def _insert(relation: str, columns: tuple[str, ...]) -> sessions.Statement:
    listed = ", ".join(quoted(column) for column in columns)
    return sessions.Statement(
        f"insert into {relation} ({listed}) "  # noqa: S608
        f"select {listed} from json_populate_recordset(null::{relation}, cast(",
        " as text)::json)",
    )


def quoted(name: str) -> str:
    """An identifier in double quotes."""
    return '"' + name.replace('"', '""') + '"'


def _published(
    events: Event | Iterable[Event],
    host_id: Id,
    user_id: Id | None,
    transaction_id: uuid.UUID | None,
) -> Published:
    found = (events,) if isinstance(events, Event) else tuple(events)
    return Published(found, host_id, user_id, transaction_id or uuid.uuid4())


def _row(event: Event, number: int, context: Mapping[str, str]) -> dict[str, Any]:
    """What an event has of its own, by field."""
    if event.payload is None:
        raise EventInvalid(f"events[{number}].payload: must not be None")
    row = {
        "id": _text(event.id),
        "event_type": event.event_type,
        "payload": event.payload,
        "transaction_ordinal": number + 1,
    }
    if event.aggregate is not None:
        row["aggregate_type"], row["aggregate_id"] = event.aggregate
    if event.version is not None:
        row["aggregate_version"] = event.version
    if context or event.metadata:
        row["metadata"] = {**context, **(event.metadata or {})}
    for name in ("event_ts", "deliver_at"):
        moment = getattr(event, name)
        if moment is None:
            continue
        if moment.utcoffset() is None:
            raise EventInvalid(
                f"events[{number}].{name}: has no time zone: give it one, such as datetime.now(UTC)"
            )
        row[name] = moment
    return row


def _text(value: Id) -> str | int:
    """An id without the detour of what JSON does not know."""
    return str(value) if isinstance(value, uuid.UUID) else value
