"""Deferred business transactions: `relay.deferred`; the rows of large ones are in `relay.deferred_rows`.

What is deferred belongs to a sink, or to the target's cursor, whose sink is ''. Nothing here costs more where many
transactions of one key are deferred: keys that are held are rows of `relay.deferred_keys`, and a transaction is not
looked at again while the one that is its `predecessor` is there.

A predecessor is only ever noted where whoever removes that row is sure to see the note: in the database transaction
that inserts both, or under a lock of the predecessor's row. A trigger takes the note back.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any, LiteralString, NamedTuple

import numpy as np
import psycopg
from psycopg import sql
from psycopg.rows import class_row, scalar_row, tuple_row

from relay.model.events import Lsn, Tuples
from relay.model.spool import Spool, SpooledTuples
from relay.model.transactions import FACTS, Rows, Transactions, Undecoded
from relay.store import advisory_locks, arrays
from relay.store.deferred_copy import COLUMNS, END, START, DeferredEncoder
from relay.store.encodings import codec_of, writable

Connection = psycopg.Connection[Any]

_DEFERRED_AT_ONCE = 5_000
_PORTION_EVENTS = 10_000
_PORTION_BYTES = 1024 * 1024
_ROUNDS = 20
"""How often a claim goes on where all that it has looked at is behind others."""
_EXAMINED_KEYS = 10_000
"""How many keys a claim looks at, about, for what follows on the first of each."""


@dataclass(frozen=True, slots=True)
class Deferral:
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
    undelivered: bool = False


@dataclass(frozen=True, slots=True)
class Due:
    """A transaction whose turn it is."""

    id: int
    keys: list[str]
    holds: bool
    attempts: int
    first_failed_at: float | None
    handler: str | None
    dead_transaction: int | None
    undelivered: bool
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


DUE_COLUMNS = sql.SQL(
    """
    d.id, d.keys, d.holds, d.attempts, extract(epoch from d.first_failed_at)::float8 as first_failed_at, d.handler,
    d.dead_transaction, d.undelivered, d.transaction_id, d.hosts, d.columns, d.commit_lsn::text, d.end_lsn::text,
    d.commit_ts, d.xid, d.first_offset, d.last_offset, d.events, d.size
    """
)
"""What makes a `Due` of a row `d` of relay.deferred."""


# Statements that are never prepared: a plan that was made while a table was empty would read all of it later.


def held(conn: Connection, group: str, sink: str, keys: Collection[str]) -> set[str]:
    """Those of the keys that a deferred transaction holds."""
    codec = codec_of(conn)
    asked = {writable(key, codec): key for key in keys}
    with conn.cursor(row_factory=scalar_row) as cursor:
        # The order lets only the index be of use: a key that nobody holds would be looked for in the whole table where
        # most rows have the same one.
        cursor.execute(
            """
            select asked.key from unnest(%(asked)s::text[]) as asked (key)
             where (select k.deferred_id from relay.deferred_keys as k
                     where k.group_id = %(group)s and k.sink = %(sink)s and k.key = asked.key
                     order by k.deferred_id limit 1) is not null
            """,
            {"group": group, "sink": sink, "asked": arrays.of_texts(asked)},
            prepare=False,
        )
        return {asked[key] for key in cursor}


_COPY = f"copy relay.deferred ({', '.join(COLUMNS)}) from stdin (format binary)"
_COPIED_AT_ONCE = 64 * 1024


def any_held(conn: Connection, group: str, sink: str) -> bool:
    """Whether a deferred transaction holds any key."""
    found = conn.execute(
        "select from relay.deferred_keys where group_id = %s and sink = %s limit 1",
        (group, sink),
        prepare=False,
    )
    return found.rowcount > 0


def defer(
    conn: Connection, group: str, entries: Iterable[tuple[Undecoded, Deferral]], sink: str = ""
) -> None:
    """Defer transactions, in this order, after all that are deferred already."""
    rest = iter(entries)
    holders: dict[str, int] = {}
    with conn.cursor(row_factory=tuple_row) as cursor:
        while some := list(islice(rest, _DEFERRED_AT_ONCE)):
            ids, now = cursor.execute(
                """
                select array_agg(nextval('relay.deferred_id_seq')),
                       (extract(epoch from clock_timestamp()) * 1000000)::bigint - 946684800000000
                  from generate_series(1, %s)
                """,
                (len(some),),
            ).fetchall()[0]
            encoder = DeferredEncoder(group, sink, conn.info.encoding, now, codec_of(conn))
            large: list[tuple[int, Tuples]] = []
            with cursor.copy(_COPY) as copy:
                portion = bytearray(START)
                for number, (transaction, deferral) in zip(ids, some, strict=True):
                    rows = _inline(transaction)
                    if rows is None:
                        large.append((number, transaction.tuples))
                    predecessor = _predecessor(holders, number, deferral)
                    portion += encoder.row(number, transaction, deferral, predecessor, rows)
                    if len(portion) > _COPIED_AT_ONCE:
                        copy.write(portion)
                        portion = bytearray()
                copy.write(portion + END)
            for number, tuples in large:
                _write_rows(conn, number, tuples)


def _predecessor(holders: dict[str, int], number: int, deferral: Deferral) -> int | None:
    """The last row of a call that holds one of the keys. `holders` has these by key; the next one is `number`."""
    predecessor = None
    for key in deferral.keys:
        before = holders.get(key)
        if before is not None and (predecessor is None or before > predecessor):
            predecessor = before
        if deferral.holds:
            holders[key] = number
    return predecessor


def _inline(transaction: Undecoded) -> list[bytes] | None:
    """The rows of a transaction, where they are in memory and no more than a portion."""
    tuples = transaction.tuples
    if (
        isinstance(tuples, Rows)
        and len(tuples) <= _PORTION_EVENTS
        and transaction.size <= _PORTION_BYTES
    ):
        return list(tuples)
    return None


def _write_rows(conn: Connection, number: int, tuples: Tuples) -> None:
    """Write a transaction's rows, a portion in memory at a time. They may come from the same connection."""
    for portion, rows in enumerate(_portions(tuples)):
        conn.execute(
            "insert into relay.deferred_rows (deferred_id, portion, sizes, data) values (%s, %s, %s, %s)",
            (number, portion, list(map(len, rows)), b"".join(rows)),
        )


def _portions(tuples: Tuples) -> Iterator[list[bytes]]:
    some: list[bytes] = []
    size = 0
    for row in tuples:
        some.append(row)
        size += len(row)
        if len(some) >= _PORTION_EVENTS or size >= _PORTION_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def lock(conn: Connection, group: str) -> None:
    """Wait until nobody claims what the group's target has deferred; to the end of the database transaction."""
    advisory_locks.lock_in_transaction(conn, advisory_locks.retries(group))


def claim(conn: Connection, group: str, limit: int) -> list[Due]:
    """The transactions of the target's cursor whose turn it is, as `heads` finds them.

    Until the end of the database transaction nobody else can claim any of the group.
    """
    if not advisory_locks.try_lock_in_transaction(conn, advisory_locks.retries(group)):
        return []
    return heads(conn, group, "", limit)


def heads(
    conn: Connection, group: str, sink: str, limit: int, in_flight: Collection[int] = ()
) -> list[Due]:
    """At most `limit` transactions whose turn it is, in the order in which they were deferred.

    For each key the first ones, so many of one key together; none whose time has not come, and none before which
    another one holds one of its keys that is not returned with it. They are of one table layout. What is due longest
    goes first. Those `in_flight`, by id, were returned before: they are left out, and hold their keys.
    """
    for _ in range(_ROUNDS):
        ready = _ready(conn, group, sink, limit, in_flight)
        chosen = _chosen(ready)
        found = ready
        if chosen and len(chosen) < limit:
            room = limit - len(chosen)
            found = [*ready, *_following(conn, chosen, room, ready, in_flight)]
            chosen = _chosen(found)
        _note_predecessors(conn, ready, chosen)
        if chosen or len(ready) < limit:
            break
    else:
        return []
    due = [
        each.due for each in sorted(found, key=lambda each: each.due.id) if each.due.id in chosen
    ]
    return list(takewhile(lambda each: each.columns == due[0].columns, due[:limit]))


class _Found(NamedTuple):
    """A transaction that may be due, with the last row before it that holds each of its keys."""

    due: Due
    is_early: bool
    earlier: list[int]


_FOUND = sql.SQL(
    """
    select d.blocked or d.retry_at > now(),
           array(select distinct before.deferred_id
                   from unnest(d.keys) as own (key)
                  cross join lateral (
                        select k.deferred_id from relay.deferred_keys as k
                         where k.group_id = d.group_id and k.sink = d.sink and k.key = own.key and k.deferred_id < d.id
                         order by k.deferred_id desc limit 1) as before),
           {due}
    """
).format(due=DUE_COLUMNS)
_READY = sql.SQL(
    """
    {found}
      from relay.deferred as d
     where d.group_id = %(group)s and d.sink = %(sink)s and not d.blocked and d.predecessor is null
       and d.retry_at <= now() and d.id <> all(%(in_flight)s::bigint[])
     order by d.retry_at, d.id limit %(limit)s
    """
).format(found=_FOUND)
# Of each key as many, so that one with a long run does not take all of the room.
_FOLLOWING = sql.SQL(
    """
    with following as (
        select next.deferred_id, min(next.number) as number
          from relay.deferred as d
         cross join unnest(d.keys) as own (key)
         cross join lateral (
               select k.deferred_id, row_number() over (order by k.deferred_id) as number
                 from relay.deferred_keys as k
                where k.group_id = d.group_id and k.sink = d.sink and k.key = own.key and k.deferred_id > d.id
                order by k.deferred_id limit %(each)s) as next
         where d.id = any(%(chosen)s::bigint[]) and next.deferred_id <> all(%(known)s::bigint[])
         group by next.deferred_id
         order by 2, 1 limit %(room)s)
    {found}
      from following join relay.deferred as d on d.id = following.deferred_id
    """
).format(found=_FOUND)


def _ready(
    conn: Connection, group: str, sink: str, limit: int, in_flight: Collection[int]
) -> list[_Found]:
    return _found(
        conn,
        _READY,
        {
            "group": group,
            "sink": sink,
            "limit": limit,
            "in_flight": arrays.of_numbers(in_flight),
        },
    )


def _following(
    conn: Connection,
    chosen: Collection[int],
    room: int,
    ready: Sequence[_Found],
    in_flight: Collection[int],
) -> list[_Found]:
    """What comes after the chosen ones with their keys."""
    keys = sum(len(each.due.keys) for each in ready if each.due.id in chosen)
    if not keys:
        return []
    known = (*(each.due.id for each in ready), *in_flight)
    return _found(
        conn,
        _FOLLOWING,
        {
            "chosen": arrays.of_numbers(chosen),
            "known": arrays.of_numbers(known),
            "each": min(room, max(math.ceil(room / keys), _EXAMINED_KEYS // keys)),
            "room": room,
        },
    )


def _found(conn: Connection, query: sql.Composed, parameters: dict[str, Any]) -> list[_Found]:
    rows = conn.execute(query, parameters, prepare=False)
    return [_Found(Due(*due), is_early, earlier) for is_early, earlier, *due in rows]


def _chosen(found: Iterable[_Found]) -> set[int]:
    """Those that may be tried together: whatever holds one of their keys before them is among them."""
    chosen: set[int] = set()
    for each in sorted(found, key=lambda each: each.due.id):
        if not each.is_early and chosen.issuperset(each.earlier):
            chosen.add(each.due.id)
    return chosen


def _note_predecessors(conn: Connection, ready: Sequence[_Found], chosen: set[int]) -> None:
    """Let those that are due but follow on others be left alone until the last of these is gone.

    A row that somebody has locked may be gone soon, without its trigger seeing the note: it is not noted.
    """
    predecessors = {
        each.due.id: max(set(each.earlier) - chosen) for each in ready if each.due.id not in chosen
    }
    if predecessors:
        conn.execute(
            """
            update relay.deferred as d set predecessor = noted.predecessor
              from (select n.id, p.id as predecessor
                      from unnest(%s::bigint[], %s::bigint[]) as n (id, predecessor)
                      join relay.deferred as p on p.id = n.predecessor
                       for key share of p skip locked) as noted
             where d.id = noted.id
            """,
            (arrays.of_numbers(predecessors), arrays.of_numbers(predecessors.values())),
            prepare=False,
        )


def seconds_to_next(conn: Connection, group: str, sink: str = "") -> float | None:
    """How long it is until the next transaction's time comes; None if none waits for a time."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        found = cursor.execute(
            """
            select extract(epoch from retry_at - clock_timestamp())::float8 from relay.deferred
             where group_id = %s and sink = %s and not blocked and predecessor is null and retry_at > clock_timestamp()
             order by retry_at limit 1
            """,
            (group, sink),
            prepare=False,
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
                index,
            )
            for index, each in enumerate(due)
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
        rows: dict[int, list[bytes]] = {each.id: [] for each in due}
        for deferred_id, row in found:
            rows[deferred_id].append(row)
        return Transactions(columns, facts, ids, hosts, Rows.of([*chain(*rows.values())]))
    spool = Spool(spool_directory)
    spooled = {each.id: SpooledTuples(spool) for each in due}
    for deferred_id, row in found:
        spool.append(row, spooled[deferred_id])
    spool.seal()
    return Transactions(columns, facts, ids, hosts, Rows.of([]), list(spooled.values()))


def _rows(conn: Connection, ids: Collection[int]) -> Iterator[tuple[int, bytes]]:
    """The rows of transactions, with whose they are; each one's in order, a portion in memory at a time."""
    others = set(ids)
    for deferred_id, row in _stored(
        conn,
        "select id, sizes, data from relay.deferred where id = any(%s::bigint[]) and data is not null",
        ids,
    ):
        others.discard(deferred_id)
        yield deferred_id, row
    if others:
        yield from _stored(
            conn,
            """
            select deferred_id, sizes, data from relay.deferred_rows where deferred_id = any(%s::bigint[])
             order by deferred_id, portion
            """,
            others,
        )


def _stored(
    conn: Connection, query: LiteralString, ids: Collection[int]
) -> Iterator[tuple[int, bytes]]:
    with conn.cursor(binary=True, row_factory=tuple_row) as cursor:
        for deferred_id, sizes, data in cursor.stream(query, (arrays.of_numbers(ids),)):
            start = 0
            for size in sizes:
                yield deferred_id, data[start : start + size]
                start += size


def remove(conn: Connection, ids: Collection[int]) -> set[int]:
    """Transactions are deferred no longer; returns those that still were, by id: somebody may have cancelled others."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        cursor.execute(
            "delete from relay.deferred where id = any(%s::bigint[]) returning id",
            (arrays.of_numbers(ids),),
            prepare=False,
        )
        return set(cursor)


def defer_again(conn: Connection, deferrals: Collection[tuple[int, Deferral]]) -> set[int]:
    """Transactions, by id, have failed once more: they keep their turn, and what follows on them waits on.

    Returns those that are still deferred. Their keys stay what they are.
    """
    if not deferrals:
        return set()
    conn.execute(
        """
        with newly as (
            update relay.deferred set holds = true where id = any(%s::bigint[]) and not holds
            returning group_id, sink, keys, id)
        insert into relay.deferred_keys (group_id, sink, key, deferred_id)
        select d.group_id, d.sink, own.key, d.id from newly as d, unnest(d.keys) as own (key)
        """,
        (arrays.of_numbers(number for number, deferral in deferrals if deferral.holds),),
        prepare=False,
    )
    columns = zip(
        *(_deferred_again(number, deferral) for number, deferral in deferrals), strict=True
    )
    with conn.cursor(row_factory=scalar_row) as cursor:
        cursor.execute(
            """
            update relay.deferred as d
               set retry_at = coalesce(w.until, clock_timestamp() + make_interval(secs => w.after)),
                   blocked = w.blocked, attempts = w.attempts, first_failed_at = to_timestamp(w.first_failed_at),
                   handler = w.handler, reason = w.reason, dead_transaction = w.dead_transaction
              from unnest(%s::bigint[], %s::boolean[], %s::float8[], %s::timestamptz[], %s::int[], %s::float8[],
                          %s::text[], %s::text[], %s::bigint[])
                   as w (id, blocked, after, until, attempts, first_failed_at, handler, reason, dead_transaction)
             where d.id = w.id
            returning d.id
            """,
            [arrays.of_values(column) for column in columns],
            prepare=False,
        )
        return set(cursor)


def _deferred_again(number: int, deferral: Deferral) -> tuple[object, ...]:
    """The values for a row that is tried again."""
    return (
        number,
        deferral.blocked,
        deferral.after,
        deferral.until,
        deferral.attempts,
        deferral.first_failed_at,
        deferral.handler,
        deferral.reason,
        deferral.dead_transaction,
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
    rows = _inline(transaction)
    conn.execute(
        """
        update relay.deferred
           set blocked = false, retry_at = clock_timestamp(), attempts = 0, first_failed_at = null, handler = null,
               reason = null, columns = %s, events = %s, size = %s, sizes = %s, data = %s
         where id = %s
        """,
        (
            list(transaction.columns),
            len(transaction.tuples),
            transaction.size,
            None if rows is None else list(map(len, rows)),
            None if rows is None else b"".join(rows),
            deferred_id,
        ),
    )
    conn.execute("delete from relay.deferred_rows where deferred_id = %s", (deferred_id,))
    if rows is None:
        _write_rows(conn, deferred_id, transaction.tuples)


KIND = sql.SQL(
    """
    case when d.blocked then 'holding'
         when d.attempts > 0 then 'retry'
         when d.dead_transaction is not null then 'replay'
         when d.holds then 'blocked'
         else 'scheduled' end
    """
)
"""Why a row `d` is deferred: see `Reason`."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why some transactions are deferred, and since and until when.

    `kind` is `retry` (the handler failed with `reason`), `holding` (a dead transaction that holds its key),
    `replay`, `scheduled` (deliver_at) or `blocked` (an earlier transaction holds one of their keys). `since` is when
    the first of them failed or was deferred, `next` when the first of them may be tried and `until` when the last; both
    are null where that is no question of time. `sink` is empty for the target.
    """

    sink: str
    kind: str
    handler: str | None
    reason: str | None
    transactions: int
    since: datetime
    next: datetime | None
    until: datetime | None


@dataclass(frozen=True, slots=True)
class DeferredSummary:
    """How many transactions of a group are deferred, how many of these are dead letters, and the commonest reasons."""

    transactions: int
    holding: int
    reasons: Sequence[Reason] = ()


_REASONS = 20
"""How many reasons are told."""


def deferred_for_others(conn: Connection, group: str, handlers: Collection[str]) -> dict[str, int]:
    """How many transactions of the target wait because of a handler that is not among these, by its name."""
    return dict(
        conn.execute(
            """
            select handler, count(*) from relay.deferred
             where group_id = %s and sink = '' and handler <> all(%s::text[]) group by 1 order by 1
            """,
            (group, list(handlers)),
        ).fetchall()
    )


def deferred_for_sinks(conn: Connection, group: str, sinks: Collection[str]) -> dict[str, int]:
    """How many transactions are deferred for a sink that is not among these, by its name."""
    return dict(
        conn.execute(
            """
            select sink, count(*) from relay.deferred
             where group_id = %s and sink <> '' and sink <> all(%s::text[]) group by 1 order by 1
            """,
            (group, list(sinks)),
        ).fetchall()
    )


def count_by_sink(conn: Connection, group: str) -> dict[str, int]:
    """How many transactions are deferred for each sink; '' is the target."""
    rows = conn.execute(
        "select sink, count(*) from relay.deferred where group_id = %s group by sink", (group,)
    )
    return dict(rows.fetchall())


@dataclass(frozen=True, slots=True)
class Count:
    """Deferred transactions of a sink, or ('') of the target, by `kind`, as in Reason. `since`: the oldest of them."""

    sink: str
    kind: str
    transactions: int
    since: datetime


def count_by_kind(conn: Connection, group: str) -> list[Count]:
    """How many transactions are deferred, by sink and kind. Reads all of them."""
    with conn.cursor(row_factory=class_row(Count)) as cursor:
        return cursor.execute(
            sql.SQL(
                """
                select d.sink, {kind} as kind, count(*) as transactions,
                       min(coalesce(d.first_failed_at, d.deferred_at)) as since
                  from relay.deferred as d where d.group_id = %s group by 1, 2
                """
            ).format(kind=KIND),
            (group,),
        ).fetchall()


def count_keys(conn: Connection, group: str) -> dict[str, int]:
    """How many ordering keys deferred transactions hold, of each sink; '' is the target."""
    rows = conn.execute(
        "select sink, count(distinct key) from relay.deferred_keys where group_id = %s group by 1",
        (group,),
    )
    return dict(rows.fetchall())


def forget(conn: Connection, group: str, sink: str) -> int:
    """Forget what is deferred for a sink; returns how many transactions."""
    return conn.execute(
        "delete from relay.deferred where group_id = %s and sink = %s", (group, sink)
    ).rowcount


def count(conn: Connection, group: str) -> DeferredSummary:
    """How many transactions of the group are deferred, and why. Reads all of them."""
    with conn.cursor(row_factory=class_row(Reason)) as cursor:
        found = cursor.execute(
            sql.SQL(
                """
                with reasons as (
                    select d.sink, {kind} as kind, d.handler, d.reason, d.deferred_at, d.first_failed_at, d.retry_at
                      from relay.deferred as d where d.group_id = %s)
                select sink, kind, handler, reason, count(*) as transactions,
                       min(coalesce(first_failed_at, deferred_at)) as since,
                       case when kind in ('retry', 'scheduled') then least(min(retry_at), '9999-01-01') end as next,
                       case when kind in ('retry', 'scheduled') then least(max(retry_at), '9999-01-01') end as until
                  from reasons group by sink, kind, handler, reason
                 order by count(*) desc, sink, kind, handler, reason
                """
            ).format(kind=KIND),
            (group,),
        ).fetchall()
    return DeferredSummary(
        sum(each.transactions for each in found),
        sum(each.transactions for each in found if each.kind == "holding"),
        tuple(found[:_REASONS]),
    )
