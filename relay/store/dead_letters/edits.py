"""Applies payloads that were edited in an export of dead letters.

PostgreSQL reads the JSON, so that numbers keep every digit and no nesting is too deep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import psycopg

from relay.faults import ConfigurationError
from relay.store.connections import Connection
from relay.store.dead_letters import of_queue

Line = tuple[int, str]
"""A line of the file and its number, from 1."""

_LINES_AT_ONCE = 100
_MALFORMED = "must be an object with id and payload, as `relay dlq export` writes it"


def load(conn: Connection, file: Path, queue: str | None = None) -> None:
    """Load an edited export of `relay dlq export` into a table of the current database transaction.

    A line that does not say whose dead letter it is means one of `queue`, or without it one of the target or a sink.
    Raises ConfigurationError with file and line.
    """
    otherwise = "" if queue is None else of_queue(queue)
    _create(conn)
    remaining = _lines(file)
    while lines := list(islice(remaining, _LINES_AT_ONCE)):
        try:
            _store(conn, file, lines, otherwise)
        except psycopg.Error:
            for line in lines:
                _store_one(conn, file, line, otherwise)
    conn.execute("create index on pg_temp.relay_edits (id, line)")
    conn.execute("analyze pg_temp.relay_edits")


def load_one(conn: Connection, dead_letter_id: int, queue: str | None, payload: str) -> None:
    """Load the payload of one event, or message of a queue, as `load` does.

    Raises ConfigurationError if it is not JSON.
    """
    _create(conn)
    try:
        with conn.transaction():
            conn.execute(
                "insert into pg_temp.relay_edits values (1, %s, %s::jsonb, %s)",
                (dead_letter_id, payload, None if queue is None else of_queue(queue)),
            )
    except psycopg.DataError as error:
        what = error.diag.message_primary or "is not text that PostgreSQL accepts"
        raise ConfigurationError(f"payload: is not JSON: {what}") from None


def apply(conn: Connection, group: str, dead: Sequence[int], reason: str | None) -> None:
    """Give the events of dead transactions the loaded payloads, and record which changed.

    The first payload is kept in `original_payload`. Of several lines for one event, the last one wins.
    """
    conn.execute(
        """
        with edits as (
            select d.dead_transaction, d.id, last.payload, d.queue_id is not null as of_queue
              from relay.dead_letters d
             cross join lateral (select payload from pg_temp.relay_edits e
                                  where e.id = d.id and e.queue is not distinct from
                                        case when d.queue_id is not null then d.consumer end
                                  order by e.line desc limit 1) last
             where d.dead_transaction = any(%(dead)s)
        ), events as (
            update relay.dead_letter_queue d
               set original_payload = coalesce(d.original_payload, d.payload), payload = edit.payload,
                   by_reference = false
              from edits edit
             where not edit.of_queue and d.id = edit.id and d.payload is distinct from edit.payload
            returning d.id, d.dead_transaction
        ), messages as (
            update relay.queue_dead_letters d
               set original_payload = coalesce(d.original_payload, d.payload), payload = edit.payload
              from edits edit
             where edit.of_queue and d.dead_transaction = edit.dead_transaction
               and d.payload is distinct from edit.payload
            returning d.id, d.dead_transaction)
        insert into relay.dead_letter_actions
               (group_id, dead_transaction, letters, transaction_id, action, reason, consumer)
        select %(group)s, dead_transaction, array_agg(d.id order by d.id), min(d.transaction_id), 'edit',
               %(reason)s, min(d.consumer)
          from (table events union all table messages) as edited join relay.dead_letters d using (dead_transaction, id)
         group by dead_transaction order by dead_transaction
        """,
        {"group": group, "dead": list(dead), "reason": reason},
    )


def _create(conn: Connection) -> None:
    conn.execute(
        "create temporary table relay_edits (line bigint, id bigint, payload jsonb, queue text) on commit drop"
    )


def _lines(file: Path) -> Iterator[Line]:
    try:
        # A payload may hold other characters that end a line, such as U+2028.
        with file.open(encoding="utf-8", newline="\n") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{file}: is not UTF-8 text") from None


def _store(conn: Connection, file: Path, lines: Sequence[Line], otherwise: str) -> None:
    with conn.transaction():
        malformed = conn.execute(
            """
            with edit as materialized (
                select number, line::json as object
                  from unnest(%s::bigint[], %s::text[]) as given (number, line)
            ), stored as (
                insert into pg_temp.relay_edits
                select number, (object ->> 'id')::bigint, (object -> 'payload')::text::jsonb,
                       case when starts_with(coalesce(object ->> 'sink', %s), %s)
                            then coalesce(object ->> 'sink', %s) end
                  from edit
                 where json_typeof(object -> 'id') = 'number' and object ->> 'id' ~ '^[0-9]{1,18}$')
            select min(number) from edit
             where json_typeof(object -> 'id') is distinct from 'number' or object ->> 'id' !~ '^[0-9]{1,18}$'
                   or object -> 'payload' is null
            """,
            (
                [number for number, _ in lines],
                [line for _, line in lines],
                *(otherwise, of_queue(""), otherwise),
            ),
        ).fetchall()[0][0]
    if malformed is not None:
        raise ConfigurationError(f"{file}:{malformed}: {_MALFORMED}")


def _store_one(conn: Connection, file: Path, line: Line, otherwise: str) -> None:
    try:
        _store(conn, file, [line], otherwise)
    except psycopg.DataError as error:
        what = error.diag.message_primary or "is not text that PostgreSQL accepts"
        raise ConfigurationError(f"{file}:{line[0]}: is not JSON: {what}") from None
