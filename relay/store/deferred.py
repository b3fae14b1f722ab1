"""Business transactions that wait: `relay.deferred`, and their rows in `relay.deferred_rows`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby, islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
from psycopg.rows import class_row, scalar_row

from relay.events import Lsn
from relay.source.spool import Spool, SpooledTuples
from relay.transactions import FACTS, Rows, Transactions, Undecoded, portions

Connection = psycopg.Connection[Any]

_CLAIM_LOCK = 0x72656C61
"""Of the advisory locks, those for claiming; the other half is the group's."""
_PARKED_AT_ONCE = 1_000
_PORTION_EVENTS = 10_000
_PORTION_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Wait:
    """What a transaction waits for.

    `after` is in how many seconds it may be tried, `until` a time instead. It has failed `attempts` times, the first of
    them `first_failed_at` (seconds since 1970). See the comments on the table's columns.
    """

    keys: Collection[str]
    holds: bool = True
    after: float = 0.0
    until: datetime | None = None
    attempts: int = 0
    first_failed_at: float | None = None
    handler: str | None = None
    reason: str | None = None
    blocked: bool = False
    dead_transaction: int | None = None


@dataclass(frozen=True, slots=True)
class Due:
    """A transaction whose turn it is."""

    id: int
    attempts: int
    first_failed_at: float | None
    dead_transaction: int | None
    transaction_id: str | None
    hosts: list[str]
    columns: list[str]
    commit_lsn: str
    end_lsn: str
    commit_ts: int
    xid: int
    first_offset: int
    last_offset: int
    events: int
    size: int


def held(conn: Connection, group: str, keys: Collection[str]) -> set[str]:
    """Those of the keys that a transaction of the group holds."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        cursor.execute(
            """
            select distinct key from relay.deferred, unnest(keys) as key
             where group_id = %(group)s and holds and keys && %(asked)s::text[] and key = any(%(asked)s)
            """,
            {"group": group, "asked": list(keys)},
        )
        return set(cursor)


_PARK = """
    with parked as (
        insert into relay.deferred (
            group_id, keys, holds, blocked, retry_at, attempts, first_failed_at, handler, reason, dead_transaction,
            transaction_id, hosts, columns, commit_lsn, end_lsn, commit_ts, xid, first_offset, last_offset,
            events, size)
        values (%s, %s, %s, %s, coalesce(%s, clock_timestamp() + make_interval(secs => %s)), %s, to_timestamp(%s),
                %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
        returning id)
    insert into relay.deferred_rows (deferred_id, portion, sizes, data) select id, 0, %s, %s from parked
    returning deferred_id
"""


def park(conn: Connection, group: str, waiting: Iterable[tuple[Undecoded, Wait]]) -> None:
    """Let transactions wait, in this order, behind all that wait already."""
    rest = iter(waiting)
    with conn.cursor() as cursor:
        while some := list(islice(rest, _PARKED_AT_ONCE)):
            for large, alike in groupby(some, key=lambda each: each[0].size > _PORTION_BYTES):
                if not large:
                    cursor.executemany(
                        _PARK,
                        [_parked(group, *each, next(_portions(each[0]))) for each in alike],
                    )
                    continue
                for transaction, wait in alike:
                    portions = _portions(transaction)
                    cursor.execute(_PARK, _parked(group, transaction, wait, next(portions)))
                    (deferred_id,) = next(cursor)
                    _write_rows(cursor, deferred_id, portions, first=1)


def _parked(group: str, transaction: Undecoded, wait: Wait, rows: Rows) -> Sequence[Any]:
    commit = transaction.commit
    return (
        group,
        sorted(wait.keys),
        wait.holds,
        wait.blocked,
        wait.until,
        wait.after,
        wait.attempts,
        wait.first_failed_at,
        wait.handler,
        wait.reason,
        wait.dead_transaction,
        transaction.transaction_id,
        list(transaction.hosts),
        list(transaction.columns),
        str(commit.lsn),
        str(commit.end_lsn),
        commit.ts,
        commit.xid,
        transaction.first_offset,
        transaction.last_offset,
        len(transaction.tuples),
        transaction.size,
        rows.sizes.tolist(),
        b"".join(rows),
    )


def _write_rows(
    cursor: psycopg.Cursor[Any], deferred_id: int, portions: Iterable[Rows], first: int = 0
) -> None:
    """Write portions of a transaction's rows, numbered from `first` on."""
    for number, rows in enumerate(portions, start=first):
        cursor.execute(
            "insert into relay.deferred_rows (deferred_id, portion, sizes, data) values (%s, %s, %s, %s)",
            (deferred_id, number, rows.sizes.tolist(), b"".join(rows)),
        )


def _portions(transaction: Undecoded) -> Iterator[Rows]:
    return portions(transaction.tuples, _PORTION_EVENTS, _PORTION_BYTES)


def claim(conn: Connection, group: str, limit: int) -> list[Due]:
    """Transactions whose time has come, oldest first, but none behind one of its keys that is not among them.

    They are of one table layout. Until the end of the database transaction nobody else can claim any of the group.
    """
    with conn.cursor(row_factory=scalar_row) as cursor:
        if not cursor.execute(
            "select pg_try_advisory_xact_lock(%s, hashtext(%s))", (_CLAIM_LOCK, group)
        ).fetchone():
            return []
    with conn.cursor(row_factory=class_row(Due)) as cursor:
        found = cursor.execute(
            """
            with recursive barred (key, id) as (
                select own.key, d.id from relay.deferred d, unnest(d.keys) as own (key)
                 where d.group_id = %(group)s and d.holds and (d.blocked or d.retry_at > now())
                union
                select own.key, d.id
                  from barred
                  join relay.deferred d on d.holds and d.keys @> array[barred.key] and d.id > barred.id
                       and cardinality(d.keys) > 1,
                       unnest(d.keys) as own (key)
                 where d.group_id = %(group)s
            ), first_barred as (
                select key, min(id) as id from barred group by key
            ), due as (
                select d.id from relay.deferred d
                  left join lateral unnest(d.keys) as own (key) on true
                  left join first_barred on first_barred.key = own.key and first_barred.id < d.id
                 where d.group_id = %(group)s and not d.blocked and d.retry_at <= now()
                 group by d.id
                having count(first_barred.key) = 0
                 order by d.id
                 limit %(limit)s
            )
            select id, attempts, extract(epoch from first_failed_at)::float8 as first_failed_at, dead_transaction,
                   transaction_id, hosts, columns, commit_lsn::text, end_lsn::text, commit_ts, xid, first_offset,
                   last_offset, events, size
              from relay.deferred join due using (id)
             order by id
            """,
            {"group": group, "limit": limit},
            prepare=False,
        ).fetchall()
    return list(takewhile(lambda each: each.columns == found[0].columns, found))


def seconds_to_next(conn: Connection, group: str) -> float | None:
    """How long it is until the next transaction's time comes; None if none waits for a time."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        found = cursor.execute(
            """
            select extract(epoch from min(retry_at) - clock_timestamp())::float8 from relay.deferred
             where group_id = %s and not blocked and retry_at > clock_timestamp()
            """,
            (group,),
        ).fetchone()
    return None if found is None else float(found)


def transactions(
    conn: Connection, due: Sequence[Due], spool_above: int, spool_directory: Path | None
) -> Transactions:
    """Claimed transactions of one table layout, as they came; where they are large, in a file."""
    facts = np.array(
        [
            (
                Lsn.parse(each.commit_lsn),
                Lsn.parse(each.end_lsn),
                each.commit_ts,
                each.xid,
                each.first_offset,
                each.last_offset,
                each.events,
                each.size,
                place,
            )
            for place, each in enumerate(due)
        ],
        FACTS,
    )
    ids = [
        None
        if each.transaction_id is None
        else each.transaction_id.encode("utf-8", "surrogateescape")
        for each in due
    ]
    hosts = [tuple(each.hosts) for each in due]
    columns = tuple(due[0].columns)
    found = _rows(conn, [each.id for each in due])
    if sum(each.size for each in due) <= spool_above:
        return Transactions(columns, facts, ids, hosts, Rows.of([row for _, row in found]))
    spool = Spool(spool_directory)
    spooled = {each.id: SpooledTuples(spool) for each in due}
    for deferred_id, row in found:
        spool.append(row, spooled[deferred_id])
    spool.seal()
    return Transactions(columns, facts, ids, hosts, Rows.of([]), list(spooled.values()))


def _rows(conn: Connection, ids: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """The rows of transactions, with whose they are, as they were parked; a portion in memory at a time."""
    with conn.cursor(binary=True) as cursor:
        found = cursor.stream(
            "select deferred_id, sizes, data from relay.deferred_rows where deferred_id = any(%s)"
            " order by deferred_id, portion",
            (list(ids),),
        )
        for deferred_id, sizes, data in found:
            start = 0
            for size in sizes:
                yield deferred_id, data[start : start + size]
                start += size


def settle(conn: Connection, ids: Sequence[int]) -> None:
    """Claimed transactions wait no longer."""
    conn.execute("delete from relay.deferred where id = any(%s)", (list(ids),))


def wait_again(conn: Connection, deferred_id: int, wait: Wait) -> None:
    """A claimed transaction has failed once more: it keeps its place, and what is behind it waits on."""
    conn.execute(
        """
        update relay.deferred
           set holds = %s, blocked = %s, retry_at = clock_timestamp() + make_interval(secs => %s), attempts = %s,
               first_failed_at = to_timestamp(%s), handler = %s, reason = %s, dead_transaction = %s
         where id = %s
        """,
        (
            wait.holds,
            wait.blocked,
            wait.after,
            wait.attempts,
            wait.first_failed_at,
            wait.handler,
            wait.reason,
            wait.dead_transaction,
            deferred_id,
        ),
    )


def blocked(conn: Connection, dead: Sequence[int]) -> dict[int, int]:
    """Which of the dead transactions still hold their keys, each with the id of its row. Locks the rows."""
    found = conn.execute(
        "select dead_transaction, id from relay.deferred where blocked and dead_transaction = any(%s) for update",
        (list(dead),),
    )
    return dict(found.fetchall())


def release(conn: Connection, deferred_id: int, transaction: Undecoded) -> None:
    """Try a blocked transaction again, with the rows that it has now; it keeps its turn."""
    conn.execute(
        """
        update relay.deferred
           set blocked = false, retry_at = clock_timestamp(), attempts = 0, first_failed_at = null, handler = null,
               reason = null, columns = %s, events = %s, size = %s
         where id = %s
        """,
        (list(transaction.columns), len(transaction.tuples), transaction.size, deferred_id),
    )
    conn.execute("delete from relay.deferred_rows where deferred_id = %s", (deferred_id,))
    with conn.cursor() as cursor:
        _write_rows(cursor, deferred_id, _portions(transaction))


@dataclass(frozen=True, slots=True)
class Reason:
    """Why some transactions are deferred, and since and until when.

    `kind` is `retry` (the handler failed with `reason`), `blocked` (a dead transaction that holds its key),
    `replay`, `scheduled` (deliver_at) or `behind` (an earlier transaction holds one of their keys). `since` is when the
    first of them failed or was deferred, `next` when the first of them may be tried and `until` when the last; both
    are null where that is no question of time.
    """

    kind: str
    handler: str | None
    reason: str | None
    transactions: int
    since: datetime
    next: datetime | None
    until: datetime | None


@dataclass(frozen=True, slots=True)
class Waiting:
    """How many transactions of a group are deferred, how many of these are blocked, and the most frequent reasons."""

    transactions: int
    blocked: int
    reasons: Sequence[Reason] = ()


_REASONS = 20
"""How many reasons are told."""


def waiting_for_others(conn: Connection, group: str, handlers: Collection[str]) -> dict[str, int]:
    """How many transactions wait because of a handler that is not among these, by its name."""
    return dict(
        conn.execute(
            "select handler, count(*) from relay.deferred where group_id = %s and handler <> all(%s::text[])"
            " group by 1 order by 1",
            (group, list(handlers)),
        ).fetchall()
    )


def count(conn: Connection, group: str) -> Waiting:
    """How many transactions of the group are deferred, and why."""
    with conn.cursor(row_factory=class_row(Reason)) as cursor:
        found = cursor.execute(
            """
            with reasons as (
                select case when blocked then 'blocked'
                            when attempts > 0 then 'retry'
                            when dead_transaction is not null then 'replay'
                            when holds then 'behind'
                            else 'scheduled' end as kind,
                       handler, reason, deferred_at, first_failed_at, retry_at
                  from relay.deferred where group_id = %s)
            select kind, handler, reason, count(*) as transactions,
                   min(coalesce(first_failed_at, deferred_at)) as since,
                   case when kind in ('retry', 'scheduled') then least(min(retry_at), '9999-01-01') end as next,
                   case when kind in ('retry', 'scheduled') then least(max(retry_at), '9999-01-01') end as until
              from reasons group by kind, handler, reason order by count(*) desc, kind, handler, reason
            """,
            (group,),
        ).fetchall()
    return Waiting(
        sum(each.transactions for each in found),
        sum(each.transactions for each in found if each.kind == "blocked"),
        tuple(found[:_REASONS]),
    )
