"""Reads dead letters as JSON and as text, for commands and exports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from psycopg import sql
from psycopg.rows import dict_row, scalar_row

from relay.store.dead_letters import DeadLetterRow
from relay.store.dead_letters.selection import DeadLetterSelection

if TYPE_CHECKING:
    # The module imports the connection pool, which `relay --help` does not need.
    from relay.store.connections import Connection

_SHOWN = (
    *("id", "group_id", "status", "sink", "handler", "exception", "attempts", "host_id", "user_id"),
    *("transaction_id", "transaction_ordinal", "transaction_count", "event_id", "event_type"),
    *("aggregate_type", "aggregate_id", "aggregate_version", "event_ts", "deliver_at", "c_offset"),
    *("commit_lsn", "payload", "original_payload", "metadata", "headers", "created_dt"),
)
"""The columns of a dead letter that are exported and shown."""

_PRETTY_CHARACTERS = 100_000
"""JSON is indented only up to this length: deep nesting would indent to megabytes."""


def exported(conn: Connection, group: str, wanted: DeadLetterSelection) -> Iterator[str]:
    """Yield every event of the dead transactions that a filter selects, each as the text of a JSON object.

    The events come in the order of publishing and are streamed. PostgreSQL writes the JSON, so that numbers keep every
    digit and no nesting is too deep.
    """
    where, parameters = wanted.where()
    # The JSON is made after sorting, so that the sort moves stored values and not their text.
    query = sql.SQL(
        """
        select row_to_json(event)::text from (
            select {columns}
              from relay.dead_letter_queue d
              join (select d.dead_transaction, min(d.c_offset) as first_offset
                      from relay.dead_letter_queue d
                     where d.dead_transaction in (
                           select d.dead_transaction from relay.dead_letter_queue d where {where})
                     group by d.dead_transaction) whole using (dead_transaction)
             order by whole.first_offset nulls last, d.dead_transaction, d.id) event
        """
    ).format(columns=_columns(_SHOWN), where=where)
    with conn.cursor(row_factory=scalar_row) as cursor:
        yield from cursor.stream(query, {**parameters, "group": group})


def events_as_json(conn: Connection, number: int) -> Iterator[str]:
    """Yield every event of a dead transaction as the text of a JSON object, in order."""
    query = sql.SQL(
        """
        select row_to_json(event)::text from (
            select {columns} from relay.dead_letter_queue d where d.dead_transaction = %s order by d.id) event
        """
    ).format(columns=_columns(_SHOWN))
    with conn.cursor(row_factory=scalar_row) as cursor:
        yield from cursor.stream(query, (number,))


def events_as_text(conn: Connection, number: int, pretty: bool) -> Iterator[DeadLetterRow]:
    """Yield every event of a dead transaction in order, each field as PostgreSQL prints it; `pretty` indents JSON."""
    columns = [
        _indented(name) if pretty and name in _JSON else sql.SQL("{}::text").format(_column(name))
        for name in (*_SHOWN, "refused")
    ]
    query = sql.SQL(
        "select {} from relay.dead_letter_queue d where d.dead_transaction = %s order by d.id"
    ).format(
        sql.SQL(", ").join(
            sql.SQL("{} as {}").format(column, sql.Identifier(name))
            for column, name in zip(columns, (*_SHOWN, "refused"), strict=True)
        )
    )
    with conn.cursor(row_factory=dict_row) as cursor:
        yield from cursor.stream(query, (number,))


_JSON = ("payload", "original_payload", "metadata", "headers")


def _column(name: str) -> sql.Composed:
    return sql.SQL("d.{}").format(sql.Identifier(name))


def _columns(names: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(_column, names))


def _indented(name: str) -> sql.Composed:
    return sql.SQL(
        "case when length(jsonb_pretty({0})) <= {1} then jsonb_pretty({0}) else {0}::text end"
    ).format(_column(name), sql.Literal(_PRETTY_CHARACTERS))
