"""Searches the outbox for events by their fields, and for what an event has caused, at a bounded cost.

Where an index begins with a column of the search, the server may use it. The other searches read at most SCANNED rows,
the newest first, along the index on c_xid, and say where the next one goes on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql

from relay.causes import CAUSATION
from relay.faults import ConfigurationError
from relay.model.events import INSERTED_BY
from relay.source.outbox.table import OutboxTable
from relay.store.connections import Connection

SCANNED = 100_000
"""How many rows a search without an index reads at most."""
SHOWN = (
    "event_type",
    "host_id",
    "aggregate_type",
    "aggregate_id",
    "transaction_id",
    "event_ts",
    "deliver_at",
)
"""The fields of an event that are shown of it, beside its id."""
_COLUMNS = ("id", *SHOWN)
_XID = sql.Identifier(INSERTED_BY)
_POSITION = re.compile(r"(\d{1,20})-(-?\d{1,19})")


@dataclass(frozen=True, slots=True)
class EventSearch:
    """Conditions on events, each of which is met; None is no condition. `since` is inclusive, `until` is not."""

    host_id: str | None = None
    event_type: str | None = None
    aggregate_type: str | None = None
    aggregate_id: str | None = None
    since: datetime | None = None
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class EventRow:
    """An event of the outbox without its payload; the values are texts, as PostgreSQL prints them."""

    id: str
    event_type: str | None
    host_id: str | None
    aggregate_type: str | None
    aggregate_id: str | None
    transaction_id: str | None
    event_ts: str | None
    deliver_at: str | None


@dataclass(frozen=True, slots=True)
class EventPage:
    """Events, the newest first. `next` is `before` of the following page; None at the end.

    `is_partial`: SCANNED rows were read before the page was full.
    """

    rows: Sequence[EventRow]
    next: str | None
    is_partial: bool


class SearchedOutbox(OutboxTable):
    """The outbox of a configuration, searched. Raises psycopg.Error."""

    def newest(
        self, conn: Connection, wanted: EventSearch, before: str | None, limit: int
    ) -> EventPage:
        """Return the newest events that a search selects, or those before a position.

        Raises ConfigurationError for a field that the outbox lacks, and for a position that is none.
        """
        self._require_searchable(conn)
        conditions, values = self._conditions(conn, wanted)
        inner = [sql.SQL("{} is not null").format(_XID)]
        if before is not None:
            match = _POSITION.fullmatch(before)
            if match is None:
                raise ConfigurationError(f"before: {before!r} is not `next` of a page of events")
            inner.append(
                sql.SQL(
                    "{xid} <= {at}::xid8 and ({xid}, {offset}) < ({at}::xid8, {row}::bigint)"
                ).format(xid=_XID, offset=self._offset, at=match[1], row=match[2])
            )
        order = sql.SQL("order by {} desc, {} desc").format(_XID, self._offset)
        matches = sql.SQL(" and ").join(conditions) if conditions else sql.SQL("true")
        if self._has_index(conn, wanted):
            query = sql.SQL(
                "select {shown}, {xid}::text, {offset}::text, true, 0::bigint from {table}"
                " where {inner} and {matches} {order} limit {limit}"
            )
        else:
            query = sql.SQL(
                """
                select * from (
                    select {shown}, {xid}::text, {offset}::text, ({matches}) is true as matches,
                           row_number() over ({order}) as number
                      from (select * from {table} where {inner} {order} limit {scanned}) as newest) as numbered
                 where matches or number = {scanned} order by number limit {limit}
                """
            )
        rows = self._rows(
            conn,
            query.format(
                shown=self._shown(conn),
                xid=_XID,
                offset=self._offset,
                table=self._table,
                inner=sql.SQL(" and ").join(inner),
                matches=matches,
                order=order,
                scanned=SCANNED,
                limit=limit + 1,
            ),
            values,
        )
        last = rows[-1] if rows and rows[-1][-1] == SCANNED else None
        found = [row for row in rows if row[-2]]
        more = found[limit - 1] if len(found) > limit else last
        return EventPage(
            [EventRow(*row[: len(_COLUMNS)]) for row in found[:limit]],
            None if more is None else f"{more[-4]}-{more[-3]}",
            len(found) <= limit and last is not None,
        )

    def caused(self, conn: Connection, event_id: str, limit: int) -> list[EventRow] | None:
        """Return events that name an event of the outbox as their cause, the oldest first; None if that is not known.

        Reads SCANNED rows from that event on.
        """
        names, column = self._names(conn), self._mapping.get("metadata")
        if column not in names or INSERTED_BY not in names:
            return None
        query = sql.SQL(
            """
            select {shown} from (
                select * from {table}
                 where {xid} >= (select coalesce(min({xid}::text)::xid8, '3') from {table} where {id} = %s)
                 order by {xid} limit {scanned}) as later
             where {metadata}::jsonb ->> {causation} = %s order by {xid}, {offset} limit {limit}
            """
        ).format(
            shown=self._shown(conn),
            table=self._table,
            xid=_XID,
            id=sql.Identifier(self._mapping["id"]),
            scanned=SCANNED,
            metadata=sql.Identifier(str(column)),
            causation=CAUSATION,
            offset=self._offset,
            limit=limit,
        )
        try:
            rows = conn.execute(query, (event_id, event_id), prepare=False).fetchall()
        except psycopg.DataError:
            return None  # a column of text has no JSON
        return [EventRow(*row) for row in rows]

    def _rows(
        self, conn: Connection, query: sql.Composed, values: Sequence[object]
    ) -> list[tuple[Any, ...]]:
        try:
            return conn.execute(query, values, prepare=False).fetchall()
        except psycopg.errors.InvalidTextRepresentation:
            return []  # no host of this outbox can be the text

    def _conditions(
        self, conn: Connection, wanted: EventSearch
    ) -> tuple[list[sql.Composed], list[object]]:
        found = [
            (*("{} = %s", name), getattr(wanted, name))
            for name in ("host_id", "event_type", "aggregate_type", "aggregate_id")
        ]
        found += [("{} >= %s", "event_ts", wanted.since), ("{} < %s", "event_ts", wanted.until)]
        given = [each for each in found if each[2] is not None]
        for _, name, _ in given:
            if self._mapping.get(name) not in self._names(conn):
                raise ConfigurationError(f"the outbox has no column of {name}: leave it out")
        return (
            [sql.SQL(text).format(sql.Identifier(self._mapping[name])) for text, name, _ in given],
            [value for _, _, value in given],
        )

    def _shown(self, conn: Connection) -> sql.Composed:
        return sql.SQL(", ").join(self._texts(conn))

    def _texts(self, conn: Connection) -> Iterator[sql.Composable]:
        names = self._names(conn)
        for field in _COLUMNS:
            column = self._mapping.get(field)
            yield (
                sql.SQL("{}::text").format(sql.Identifier(column))
                if column is not None and column in names
                else sql.SQL("null::text")
            )

    def _has_index(self, conn: Connection, wanted: EventSearch) -> bool:
        """Whether an index of all rows begins with a column that the search gives a value."""
        given = [
            self._mapping[name]
            for name in ("host_id", "event_type", "aggregate_type", "aggregate_id")
            if getattr(wanted, name) is not None
        ]
        rows = conn.execute(
            """
            select from pg_index as i
              join pg_attribute as a on a.attrelid = i.indrelid and a.attnum = i.indkey[0]
             where i.indrelid = to_regclass(%s) and i.indisvalid and i.indpred is null and a.attname = any(%s) limit 1
            """,
            (self._table.as_string(conn), given),
        )
        return rows.rowcount > 0

    def _require_searchable(self, conn: Connection) -> None:
        if INSERTED_BY not in self._names(conn):
            raise ConfigurationError(
                f"{self._settings.source.table} has no column {INSERTED_BY}, along which events are searched: run "
                "`relay init`, which adds it, or give the id of an event"
            )
