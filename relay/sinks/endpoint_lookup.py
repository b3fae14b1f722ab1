"""Finds the rows of an event's endpoints, by a query of the user's in the target, and remembers them for a while."""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import LiteralString

import psycopg

from relay.config.fields import Row, bound
from relay.config.handlers import EndpointsSettings, lookup_names
from relay.faults import ConfigurationError, EndpointRejected, Undelivered, describe
from relay.model.events import Event
from relay.runtime.shielding import shielded
from relay.sinks import Target
from relay.store import session_settings, statements
from relay.store.connections import Connection, Pool, new_pool
from relay.store.session_settings import LOCK_TIMEOUT, SessionKind

MOST_ROWS = 100
"""How many endpoints one event may have."""
MOST_REMEMBERED = 10_000
"""How many combinations of values are remembered: each has about a kilobyte."""
_IDLE_SECONDS = 10.0
_OF_VALUES = "22"
"""The class of SQLSTATEs that speak of values, such as a text that is cast to a number."""
_PLACEHOLDER = re.compile(r"%(?:%|\(([^)]*)\)s)")

_Values = tuple[str | None, ...]


class Lookup:
    """The query `endpoints.select` of a sink. For one event loop; the query runs in threads."""

    def __init__(self, name: str, settings: EndpointsSettings, target: Target) -> None:
        self._key = f"handlers.{name}.endpoints.select"
        self._settings = settings
        self._target = target
        select = settings.select or ""
        self.names = tuple(lookup_names(select))
        self._types: Mapping[str, LiteralString] = {
            each: target.types.get(each, "text") for each in self.names
        }
        self._select = _PLACEHOLDER.sub(self._typed, select).encode()
        self._known: OrderedDict[_Values, tuple[float, Sequence[Row]]] = OrderedDict()
        self._running: dict[_Values, asyncio.Task[Sequence[Row]]] = {}
        self._room = asyncio.Semaphore(target.connections)
        self._pool: Pool | None = None

    def _typed(self, match: re.Match[str]) -> str:
        name = match[1]
        return "%%" if name is None else f"(%({name})s::{self._types[name]})"

    def check(self, conn: Connection, columns: Mapping[str, str]) -> None:
        """Let the server parse and plan the query. `columns` are those that templates need, each with a key.

        Raises ConfigurationError.
        """
        index = {name: number for number, name in enumerate(self.names, start=1)}

        def numbered(match: re.Match[str]) -> str:
            name = match[1]
            return "%" if name is None else f"(${index[name]}::{self._types[name]})"

        text = _PLACEHOLDER.sub(numbered, self._settings.select or "")
        found = statements.parse(conn, self._key, text, len(self.names))
        for column, key in columns.items():
            if column not in found:
                raise ConfigurationError(
                    f"{self._key}: has no column {column}, which {key} needs (columns: {', '.join(found) or 'none'})"
                )
        nulls = dict.fromkeys(self.names)
        statements.explain(conn, self._key, self._select, nulls)
        statements.require_read_only(conn, self._key, self._select, nulls)

    async def rows(self, event: Event) -> Sequence[Row]:
        """The rows of an event's endpoints: one at most, unless they have ids.

        Raises Undelivered if the query fails, EndpointRejected for too many rows or values that the query does not
        take, and Rejected for what is no JSON.
        """
        values = tuple(bound(event, name) for name in self.names)
        known = self._known.get(values)
        if known is not None and time.monotonic() < known[0]:
            self._known.move_to_end(values)
            return known[1]
        running = self._running.get(values)
        if running is None:
            # A task of its own: those that wait for the same row do not depend on each other.
            running = asyncio.create_task(self._queried(values))
            self._running[values] = running
            running.add_done_callback(lambda _: self._running.pop(values))
        return await shielded(running)

    def forget(self, event: Event) -> None:
        """Query the rows of an event's endpoints again when they are needed next."""
        self._known.pop(tuple(bound(event, name) for name in self.names), None)

    async def _queried(self, values: _Values) -> Sequence[Row]:
        async with self._room:
            if self._pool is None:
                self._pool = _pool(self._target)
            try:
                rows = await asyncio.to_thread(self._query, self._pool, values)
            except psycopg.Error as error:
                fault = f"endpoints.select: {describe(error)}"
                # Without SQLSTATE, psycopg itself cannot send a value: a text with NUL.
                is_of_value = error.sqlstate is None and isinstance(error, psycopg.DataError)
                if is_of_value or (error.sqlstate or "").startswith(_OF_VALUES):
                    raise EndpointRejected(fault) from None
                raise Undelivered(fault) from None
        if self._settings.cache:
            self._known[values] = time.monotonic() + self._settings.cache, rows
            self._known.move_to_end(values)
            while len(self._known) > MOST_REMEMBERED:
                self._known.popitem(last=False)
        return rows

    def _query(self, pool: Pool, values: _Values) -> Sequence[Row]:
        milliseconds = max(1, int(self._settings.timeout * 1000))
        with pool.connection() as conn, conn.transaction():
            conn.execute(
                b"set transaction read only; set local statement_timeout = %d; " % milliseconds
                + session_settings.USERS_PATH_LOCALLY
            )
            cursor = conn.execute(self._select, dict(zip(self.names, values, strict=True)))
            columns = [each.name for each in cursor.description or ()]
            found = cursor.pgresult
        if found is None or not found.ntuples:
            return ()
        if found.ntuples > 1 and self._settings.id is None:
            raise EndpointRejected(
                "endpoints.select returns more than one row for the event: name the column that identifies an endpoint "
                "in endpoints.id, or return one row"
            )
        if found.ntuples > MOST_ROWS:
            raise EndpointRejected(f"endpoints.select returns more than {MOST_ROWS} rows")
        # As the server writes them: Python has not all values that the server has, such as a date of infinity.
        return [
            {
                column: None if (value := found.get_value(row, number)) is None else value.decode()
                for number, column in enumerate(columns)
            }
            for row in range(found.ntuples)
        ]

    def close(self) -> None:
        """Close the sessions."""
        if self._pool is not None:
            self._pool.close()


def _pool(target: Target) -> Pool:
    session = session_settings.statements(
        SessionKind.HANDLER, defaults={"lock_timeout": LOCK_TIMEOUT}
    )
    return new_pool(target.dsn, target.connections, session, max_idle=_IDLE_SECONDS)
