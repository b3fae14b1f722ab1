"""The outbox as a publisher sees it: one INSERT for any number of events."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from relay.client import sessions, tracing
from relay.client.errors import EventInvalid, translated
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

    `columns` says for a table of your own which column has a field; None for a field that it does not have. Fields
    that are not named keep their names. See `FIELDS`.
    """

    def __init__(
        self,
        table: str = "public.outbox_message_t",
        columns: Mapping[str, str | None] | None = None,
    ) -> None:
        """Raises ValueError for a field that does not exist."""
        columns = columns or {}
        unknown = sorted(set(columns) - set(FIELDS))
        if unknown:
            raise ValueError(
                f"columns: {unknown[0]} is not a field; the fields are {', '.join(FIELDS)}"
            )
        self.table = table
        self._relation = ".".join(quoted(part) for part in table.split("."))
        chosen = ((name, columns.get(name, name)) for name in FIELDS)
        self._columns = [(name, column) for name, column in chosen if column]
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
        raise found from error

    def _statement(self, published: Published) -> tuple[sessions.Statement, str]:
        rows = self._rows(published)
        # A column that no event has a value for gets its default.
        columns = tuple(dict.fromkeys(column for row in rows for column in row))
        return _insert(self._relation, columns), encode(rows)

    def _rows(self, published: Published) -> list[dict[str, Any]]:
        """A row for each event: the values that it has, by column."""
        context = tracing.context()
        numbered = enumerate(published.events, start=1)
        rows = [_row(event, number, published, context) for number, event in numbered]
        if any("event_ts" in row for row in rows):
            now = datetime.now(UTC)
            for row in rows:
                row.setdefault("event_ts", now)
        return [
            {column: row[name] for name, column in self._columns if name in row} | dict(event.extra)
            for row, event in zip(rows, published.events, strict=True)
        ]


@lru_cache(maxsize=256)
def _insert(relation: str, columns: tuple[str, ...]) -> sessions.Statement:
    listed = ", ".join(quoted(column) for column in columns)
    return sessions.Statement(
        f"insert into {relation} ({listed}) "  # noqa: S608
        f"select {listed} from jsonb_populate_recordset(null::{relation}, cast(",
        " as text)::jsonb)",
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


def _row(
    event: Event, number: int, published: Published, context: Mapping[str, str]
) -> dict[str, Any]:
    where = f"events[{number - 1}]"
    if event.payload is None:
        raise EventInvalid(f"{where}.payload: must not be None")
    row = {
        "id": event.id,
        "host_id": published.host_id,
        "user_id": published.user_id,
        "aggregate_version": event.version,
        "event_type": event.event_type,
        "event_ts": _zoned(event.event_ts, f"{where}.event_ts"),
        "payload": event.payload,
        "metadata": {**context, **(event.metadata or {})} or None,
        "transaction_id": published.transaction_id,
        "transaction_ordinal": number,
        "transaction_count": len(published.events),
        "deliver_at": _zoned(event.deliver_at, f"{where}.deliver_at"),
    }
    if event.aggregate is not None:
        row["aggregate_type"], row["aggregate_id"] = event.aggregate
    return {name: value for name, value in row.items() if value is not None}


def _zoned(moment: datetime | None, where: str) -> datetime | None:
    if moment is not None and moment.utcoffset() is None:
        raise EventInvalid(f"{where}: has no time zone: give it one, such as datetime.now(UTC)")
    return moment
