"""Stores what became of attempts to deliver: `relay.attempts`, which `relay.prune_attempts` keeps small."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, NamedTuple

from psycopg.rows import class_row

from relay.store import literals
from relay.store.connections import Connection
from relay.store.literals import codec_of, writable

Outcome = Literal["delivered", "dropped", "failed"]


class Attempt(NamedTuple):
    """An attempt that has ended: which events, how many seconds ago it began, how long it took, and what came of it."""

    event_ids: Collection[str]
    hosts: Collection[str]
    number: int
    ago: float
    seconds: float
    outcome: Outcome
    destination: str | None
    status: int | None
    error: str | None
    answer: str | None
    resent_by: str | None


def add(
    conn: Connection, group: str, consumer: str, keep: timedelta, attempts: Iterable[Attempt]
) -> None:
    """Store attempts, in the current database transaction. Raises psycopg.Error."""
    columns = zip(*(_values(each, codec_of(conn)) for each in attempts), strict=True)
    conn.execute(
        """
        insert into relay.attempts (slice, kept_until, group_id, consumer, event_ids, hosts, number, began_at, seconds,
                                    outcome, destination, status, error, answer, resent_by)
        select extract(epoch from kept.until)::bigint / 86400 %% 9, kept.until, %s, %s, a.event_ids::text[],
               a.hosts::text[], a.number, clock_timestamp() - make_interval(secs => a.ago), a.seconds, a.outcome,
               a.destination, a.status, a.error, a.answer, a.resent_by
          from (select now() + %s) as kept (until),
               unnest(%s::text[], %s::text[], %s::int[], %s::float8[], %s::real[], %s::text[], %s::text[], %s::int[],
                      %s::text[], %s::text[], %s::text[])
                   as a (event_ids, hosts, number, ago, seconds, outcome, destination, status, error, answer, resent_by)
        """,
        (group, consumer, keep, *map(literals.of_values, columns)),
    )


def _values(attempt: Attempt, codec: str | None) -> tuple[object, ...]:
    """The values of a row, as the database's encoding has them."""
    ids, hosts, *others = attempt
    return (
        *(literals.of_texts([_text(one, codec) for one in each]) for each in (ids, hosts)),
        *(_text(value, codec) if isinstance(value, str) else value for value in others),
    )


def _text(text: str, codec: str | None) -> str:
    return writable(text, codec).replace("\0", "\ufffd")


@dataclass(frozen=True, slots=True)
class KeptAttempt:
    """An attempt of a consumer, as it is kept: the columns of `relay.attempts` without the events."""

    consumer: str
    destination: str | None
    number: int
    began_at: datetime
    seconds: float
    outcome: str
    status: int | None
    error: str | None
    answer: str | None
    resent_by: str | None


def of_event(conn: Connection, group: str, event: str, limit: int) -> list[KeptAttempt]:
    """Read the last attempts to deliver an event, the newest first. Raises psycopg.Error."""
    with conn.cursor(row_factory=class_row(KeptAttempt)) as cursor:
        return cursor.execute(
            """
            select consumer, destination, number, began_at, seconds, outcome, status, error, answer, resent_by
              from relay.attempts
             where event_ids @> array[relay.event_key(%s)] and group_id = %s and kept_until > now()
             order by began_at desc limit %s
            """,
            (event, group, limit),
            prepare=False,
        ).fetchall()
