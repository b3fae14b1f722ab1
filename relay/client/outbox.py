"""Publishes events with one INSERT for any number of them."""

from __future__ import annotations

import re
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from relay import causes
from relay.client import sessions
from relay.client.errors import EventInvalid, OutboxForbidden, TooManyHops, translated
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
"""The fields of an event. Each is a column of the same name in relay's own outbox."""


_RELAYS_OWN = "public.outbox_message_t"
_UUIDS = ("host_id", "user_id", "transaction_id", "id")
"""The fields that are UUIDs in relay's own outbox."""
_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""Matches the usual form; faster than to parse it."""
_LARGEST_VERSION = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Published:
    """The arguments of one call of `publish`."""

    events: Sequence[Event]
    host_id: Id
    user_id: Id | None
    transaction_id: uuid.UUID


class Outbox:
    """Publishes events into a table, by default relay's own, in the caller's transaction. Safe in any thread.

    With a `message_prefix` it emits messages with pg_logical_emit_message instead, for `source.message_prefix`.
    `columns` maps fields to the columns of a table of your own, and a field that has no column to None. Fields that it
    does not name have columns of their own name. See `FIELDS`.

    An event that is published while another one is handled, by a handler or function of relay or by a worker, says so
    in its metadata: `correlation_id`, `causation_id` and `hop_count`. One with more than `max_hops` is refused, within
    relay with more than `source.max_hops`.
    """

    def __init__(
        self,
        table: str = _RELAYS_OWN,
        columns: Mapping[str, str | None] | None = None,
        *,
        message_prefix: str | None = None,
        max_hops: int = causes.MAX_HOPS,
    ) -> None:
        """Raises ValueError for an unknown field, and for `columns` together with a `message_prefix`."""
        columns = columns or {}
        self.max_hops = max_hops
        if message_prefix is not None and columns:
            raise ValueError("columns: messages have none: leave out columns or message_prefix")
        self._message_prefix = message_prefix
        unknown = sorted(set(columns) - set(FIELDS))
        if unknown:
            raise ValueError(
                f"columns: {unknown[0]} is not a field; the fields are {', '.join(FIELDS)}"
            )
        self.table = table if message_prefix is None else f"messages {message_prefix}"
        self._is_relays = message_prefix is None and not columns and table == _RELAYS_OWN
        self._relation = ".".join(quoted(part) for part in table.split("."))
        chosen = {name: columns.get(name, name) for name in FIELDS}
        self._renamed = (
            {name: column for name, column in chosen.items() if column} if columns else None
        )
        self.recorded: list[Published] | None = None
        """The list to which `relay.client.testing` has calls appended instead of sent to the database; else None."""

    def publish(
        self,
        session: Any,
        events: Event | Iterable[Event],
        *,
        host_id: Id,
        user_id: Id | None = None,
        transaction_id: uuid.UUID | None = None,
    ) -> uuid.UUID:
        """Insert events with one statement in the session's open transaction, which it does not commit.

        `session` is a psycopg connection or cursor, an SQLAlchemy Session or Connection, or a Django connection. The
        events are one business transaction of the tenant `host_id`, in this order. Returns its `transaction_id`, a
        new one unless it is given.

        Raises OutboxError, and the driver's errors that do not concern the outbox.
        """
        published = _published(events, host_id, user_id, transaction_id)
        statement = self._to_execute(published)
        if statement is not None:
            with self._driver_errors():
                sessions.execute(session, *statement)
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
        """Do what `publish` does, with the same arguments, in an asynchronous session.

        `session` is a psycopg AsyncConnection or AsyncCursor, an SQLAlchemy AsyncSession or AsyncConnection, or a
        connection of asyncpg.
        """
        # The parameters are those of `publish`, written out for editors and type checkers.
        published = _published(events, host_id, user_id, transaction_id)
        statement = self._to_execute(published)
        if statement is not None:
            with self._driver_errors():
                await sessions.execute_async(session, *statement)
        return published.transaction_id

    @contextmanager
    def _driver_errors(self) -> Iterator[None]:
        """Raise the driver's errors that concern the outbox as an OutboxError."""
        try:
            yield
        except Exception as error:
            of_outbox = translated(error, self.table)
            if of_outbox is None:
                raise
            if self._message_prefix is not None and isinstance(of_outbox, OutboxForbidden):
                of_outbox = OutboxForbidden(
                    "the role may not execute pg_logical_emit_message: grant it"
                )
            raise of_outbox from error

    def _to_execute(self, published: Published) -> tuple[sessions.Statement, str] | None:
        """Return the statement and its parameter; None without events, and where a test records the call."""
        if not published.events:
            return None
        statement = self._statement(published)
        if self.recorded is None:
            return statement
        self.recorded.append(published)
        return None

    def _statement(self, published: Published) -> tuple[sessions.Statement, str]:
        rows = self._rows(published)
        if self._message_prefix is not None:
            return _emit(self._message_prefix), encode(rows)
        # A column without a value in any event gets its default.
        columns = tuple(dict.fromkeys(column for row in rows for column in row))
        return _insert(self._relation, columns), encode(rows)

    def _rows(self, published: Published) -> list[dict[str, Any]]:
        """Return a row for each event: its values by column."""
        if published.host_id is None:
            raise EventInvalid("host_id: must not be None")
        common = {
            "host_id": _text(published.host_id),
            "transaction_id": str(published.transaction_id),
            "transaction_count": len(published.events),
        }
        if published.user_id is not None:
            common["user_id"] = _text(published.user_id)
        context = _trace_context()
        causing = causes.current()
        rows = []
        for number, event in enumerate(published.events):
            row = common | _row(event, number)
            metadata = self._metadata(event, number, context, causing)
            rows.append(row | {"metadata": metadata} if metadata else row)
        if self._is_relays:
            _require_uuids(rows)
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

    def _metadata(
        self,
        event: Event,
        number: int,
        context: Mapping[str, str],
        causing: causes.Causing | None,
    ) -> dict[str, Any]:
        """Return an event's metadata, with its trace and its cause. Raises TooManyHops."""
        own = event.metadata or {}
        if causing is None:
            metadata = {**context, **own}
        elif (cause := causing.metadata) is not None:
            metadata = {**context, **cause, **own, causes.HOPS: cause[causes.HOPS]}
        elif causes.hops_of(own):
            metadata = {**context, **own}
        else:
            raise EventInvalid(
                f"events[{number}].metadata: a function of batches publishes: say which event is the cause, with "
                "metadata=caused_by(event) of relay.client"
            )
        most = self.max_hops if causing is None else causing.max_hops
        if causes.HOPS in metadata and causes.hops_of(metadata) > most:
            where = "Outbox(max_hops=…)" if causing is None else "max_hops"
            raise TooManyHops(
                f"events[{number}]: would be hop {causes.hops_of(metadata)} of a chain of events that cause each "
                f"other, and {where} allows {most}: end the loop, or raise the limit"
            )
        return metadata


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
    """Return an identifier in double quotes."""
    return '"' + name.replace('"', '""') + '"'


def _published(
    events: Event | Iterable[Event],
    host_id: Id,
    user_id: Id | None,
    transaction_id: uuid.UUID | None,
) -> Published:
    """Return the arguments of a call. Raises EventInvalid for what is no Event."""
    listed = tuple(events) if isinstance(events, Iterable) else (events,)
    for number, event in enumerate(listed):
        if not isinstance(event, Event):
            raise EventInvalid(f"events[{number}]: is not a relay.client.Event")
    return Published(listed, host_id, user_id, transaction_id or uuid.uuid4())


def _row(event: Event, number: int) -> dict[str, Any]:
    """Return the values of an event by field, without its metadata and those of its business transaction."""
    for name in ("payload", "id", "event_type"):
        if getattr(event, name) is None:
            raise EventInvalid(f"events[{number}].{name}: must not be None")
    if event.event_type == "":
        raise EventInvalid(f"events[{number}].event_type: must not be empty")
    if event.aggregate is not None and None in event.aggregate:
        raise EventInvalid(
            f"events[{number}].aggregate: {event.aggregate!r} has no id or no type: flush the session first, which "
            "gives a new row its id"
        )
    row = {
        "id": _text(event.id),
        "event_type": event.event_type,
        "payload": event.payload,
        "transaction_ordinal": number + 1,
    }
    if event.aggregate is not None:
        row["aggregate_type"], row["aggregate_id"] = event.aggregate
    if event.version is not None:
        if type(event.version) is not int or abs(event.version) > _LARGEST_VERSION:
            raise EventInvalid(f"events[{number}].version: must be a whole number below 2^63")
        row["aggregate_version"] = event.version
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


def _require_uuids(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise EventInvalid for an id that relay's own outbox refuses, also where a test collects the events."""
    for number, row in enumerate(rows):
        for name in _UUIDS:
            if name in row and not _is_uuid(row[name]):
                of_event = f"events[{number}]." if name == "id" else ""
                raise EventInvalid(f"{of_event}{name}: is not a UUID")


def _is_uuid(value: object) -> bool:
    if not isinstance(value, str):
        return False
    if _UUID.fullmatch(value):
        return True
    try:
        uuid.UUID(value)
    except ValueError:
        return False
    return True


def _text(value: Id) -> str | int:
    """Return an id as JSON has it; faster than the encoder's `default`."""
    return str(value) if isinstance(value, uuid.UUID) else value


def _trace_context() -> dict[str, str]:
    """Return W3C `traceparent` and its companions for an event's metadata; empty without a current span."""
    # A service that has a span has imported this module.
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or not trace.get_current_span().get_span_context().is_valid:
        return {}
    from opentelemetry.propagate import inject

    carrier: dict[str, str] = {}
    inject(carrier)
    return carrier
