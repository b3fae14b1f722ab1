"""Stores and reads what became of attempts: `relay.attempts`, which `relay.prune_attempts` keeps small.

`relay.note_attempt` adds those of queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, NamedTuple

from psycopg.rows import class_row

from relay.config.settings import AttemptSettings
from relay.store import literals
from relay.store.connections import Connection
from relay.store.literals import codec_of, of_texts, writable

Outcome = Literal["delivered", "dropped", "failed"]


class NewAttempt(NamedTuple):
    """An attempt that has ended: how many seconds ago it began, how long it took, and what came of it."""

    event_ids: Sequence[str]
    hosts: Sequence[str]
    number: int
    ago: float
    seconds: float
    outcome: Outcome
    destination: str | None
    status: int | None
    error: str | None
    answer: str | None
    resent_by: str | None


_MOST_SHOWN = 100


def add(
    conn: Connection, group: str, consumer: str, keep: timedelta, attempts: Sequence[NewAttempt]
) -> None:
    """Store attempts, in the current database transaction. Raises psycopg.Error."""
    codec = codec_of(conn)
    rows = [
        (*(of_texts([writable(each, codec) for each in texts]) for texts in (ids, hosts)), *rest)
        for ids, hosts, *rest in attempts
    ]
    conn.execute(
        """
        insert into relay.attempts (slice, kept_until, group_id, consumer, event_ids, hosts, number, began_at, seconds,
                                    outcome, destination, status, error, answer, resent_by)
        select extract(epoch from kept.until)::bigint / 86400 %% 9, kept.until, %s, %s,
               a.event_ids::text[], a.hosts::text[], a.number,
               clock_timestamp() - make_interval(secs => a.ago), a.seconds, a.outcome, a.destination, a.status, a.error,
               a.answer, a.resent_by
          from (select now() + %s) as kept (until),
               unnest(%s::text[], %s::text[], %s::int[], %s::float8[], %s::real[], %s::text[], %s::text[], %s::int[],
                      %s::text[], %s::text[], %s::text[])
                   as a (event_ids, hosts, number, ago, seconds, outcome, destination, status, error, answer, resent_by)
        """,
        (group, consumer, keep, *(_literal(each, codec) for each in zip(*rows, strict=True))),
    )


def _literal(column: Sequence[object], codec: str | None) -> str:
    """The literal of an array of a column's values, as the database's encoding has them."""
    if set(column) == {None}:
        # An array without elements is filled with nulls.
        return "{}"
    # A response may have what no column can.
    return literals.of_values(
        writable(value.replace("\0", "\ufffd"), codec) if isinstance(value, str) else value
        for value in column
    )


@dataclass(frozen=True, slots=True)
class KeptAttempt:
    """An attempt of a sink, or of a queue's worker, as it is kept: columns of `relay.attempts`.

    `consumer` is `queue:NAME` for a queue, and `message_id` the message. Without `seconds`, it ended at `began_at`.
    """

    consumer: str
    destination: str | None
    message_id: int | None
    number: int
    began_at: datetime
    seconds: float | None
    outcome: str
    status: int | None
    error: str | None
    answer: str | None
    resent_by: str | None


def prune(conn: Connection, group: str, settings: AttemptSettings) -> None:
    """Note what a group keeps, also for its queues, and empty the slices for which there is no time or room.

    The room is that of all groups together. Writes only what has changed. Raises psycopg.Error.
    """
    conn.execute(
        """
        insert into relay.attempt_settings (group_id, record, keep, max_bytes)
        select n.* from (values (%s, %s, %s::interval, %s::bigint)) as n (group_id, record, keep, max_bytes)
         where not exists (select from relay.attempt_settings as s where s = n)
            on conflict (group_id) do update
           set record = excluded.record, keep = excluded.keep, max_bytes = excluded.max_bytes
        """,
        (group, settings.record, settings.keep, settings.max_bytes),
    )
    conn.execute("select relay.prune_attempts(sum(max_bytes)::bigint) from relay.attempt_settings")


def of_event(conn: Connection, group: str, event: str) -> list[KeptAttempt]:
    """Read the last attempts of an event, the newest first. Raises psycopg.Error."""
    with conn.cursor(row_factory=class_row(KeptAttempt)) as cursor:
        return cursor.execute(
            """
            select consumer, destination, message_id, number, began_at, seconds, outcome, status, error, answer,
                   resent_by
              from relay.attempts
             where event_ids @> array[relay.event_key(%s)] and group_id = %s and kept_until > now()
             order by began_at desc limit %s
            """,
            (event, group, _MOST_SHOWN),
            prepare=False,
        ).fetchall()
