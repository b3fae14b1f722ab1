"""Finds deferred business transactions that are due, and reads their rows.

One is due when its time has come and no earlier one holds its keys. Rows have the encoding of `model.tuples`: opaque
bytes, one object for each row, in the order of the transaction; those of large ones are in `relay.deferred_rows`.

The statements are never prepared: a plan made while a table was empty would later read all of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, takewhile
from pathlib import Path
from typing import Any, LiteralString, NamedTuple

import numpy as np
from psycopg import sql
from psycopg.rows import class_row, scalar_row, tuple_row

from relay.model.events import Lsn
from relay.model.spool import Spool, SpooledTuples
from relay.model.transactions import FACTS, Rows, Transactions
from relay.store import literals, locks
from relay.store.connections import Connection
from relay.store.deferred import stop_cancelled

_ROUNDS = 20
"""How many times `heads` queries at most, while all transactions that it finds are blocked by others."""
_REPLAYS_TOGETHER = 20
"""About how many replays of a key are returned together if something waits for them: some keys are done before others,
so that what waits does not wait for the replays of all keys."""
_EXAMINED_KEYS = 10_000
"""About how many rows of relay.deferred_keys a claim reads for the transactions that follow the first of each key."""


@dataclass(frozen=True, slots=True)
class DueTransaction:
    """A deferred transaction that may be retried now. The columns of its row, but for the data."""

    id: int
    keys: list[str]
    holds: bool
    attempts: int
    failing_seconds: float | None
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
    resent_by: str | None
    is_cancelled: bool
    """Whether somebody has asked to cancel it: it is not delivered any more."""
    endpoint: str | None = None
    """The only one of several endpoints to which it is delivered."""


DUE_COLUMNS = sql.SQL(
    """
    d.id, d.keys, d.holds, d.attempts,
    extract(epoch from clock_timestamp() - d.first_failed_at)::float8 as failing_seconds, d.handler,
    d.dead_transaction, d.undelivered, d.transaction_id, d.hosts, d.columns, d.commit_lsn::text, d.end_lsn::text,
    d.commit_ts, d.xid, d.first_offset, d.last_offset, d.events, d.size, d.resent_by,
    d.dead_transaction is null and exists (
        select from relay.cancellations as c
         where c.event_id = any (d.event_ids) and c.group_id = ''
           and (c.host_id = '' or c.host_id = any (d.hosts))) as is_cancelled,
    d.endpoint
    """
)
"""The select list that makes a `DueTransaction` of a row `d` of relay.deferred."""


def claim(conn: Connection, group: str, limit: int, size: int) -> list[DueTransaction]:
    """Return the transactions of the target that are due, as `heads` finds them.

    No other session can claim any of the group until the database transaction ends. Empty where one has. Their rows are
    locked: who cancels or moves one waits until it is applied.
    """
    if not locks.try_lock_in_transaction(conn, locks.retries(group)):
        return []
    return heads(conn, group, "", limit, size)


def heads(
    conn: Connection,
    group: str,
    sink: str,
    limit: int,
    size: int,
    in_flight: Collection[int] = (),
) -> list[DueTransaction]:
    """Return at most `limit` transactions that are due, in the order in which they were deferred.

    They have at most `size` bytes together, unless the first one alone has more. A transaction is returned if its time
    has come and every earlier one that holds one of its keys is returned with it: of each key, the first ones. The
    limits keep those that have been due longest. The transactions `in_flight`, by id, are left out; they hold their
    keys.

    One that somebody has asked to cancel is deleted instead. One that another session has locked is left out, with what
    it blocks: whoever cancels or moves it has been told that it stands still. The others are locked, too, to the end of
    the database transaction or, without one, of the statement: who cancels or moves one after that knows that its time
    had come.

    Replayed dead letters, of which an operator may queue any number at once, have half of both limits while others are
    due, but at least one has its turn. Replays that block a transaction that is none belong to the others: those of
    some keys, many of each.

    Example: A and B hold key 1, C holds keys 1 and 2, D holds key 2; all are due. A, B, C and D are returned together.
    If B's time has not come, only A is: B blocks C, and C blocks D.
    """
    known: set[int] = set()
    for _ in range(_ROUNDS):
        ready = _ready(conn, group, sink, limit, in_flight)
        first = [each for each in ready if not each.gives_way]
        replays = [each for each in ready if each.gives_way]
        share = 2 if first and replays else 1
        due = _portion(conn, first, limit // share or 1, size // share, in_flight)
        room = limit - len(due), size - sum(each.size for each in due)
        # One that came between the two queries may have been taken as what follows another.
        taken = {each.id for each in due}
        replays = [each for each in replays if each.due.id not in taken]
        if replays and (not due or min(room) > 0):
            due += _portion(conn, replays, *room, (*in_flight, *taken))
        cancelled = [each.id for each in due if each.is_cancelled]
        if cancelled:
            stop_cancelled(conn, cancelled)
            due = [each for each in due if not each.is_cancelled]
        # Fewer than the limit do not mean that there are no more: of replays that block others, some have their turn.
        found = {each.due.id for each in ready}
        if due or (found <= known and not cancelled):
            break
        known |= found
    return _free(conn, sorted(due, key=lambda each: each.id))


def _free(conn: Connection, due: Sequence[DueTransaction]) -> list[DueTransaction]:
    """Lock the rows of transactions; leaves out those that another session has locked, with what they block."""
    if not due:
        return []
    with conn.cursor(row_factory=scalar_row) as cursor:
        cursor.execute(
            """
            select d.id from relay.deferred as d
             where d.id = any(%s::bigint[]) order by d.id for update skip locked
            """,
            (literals.of_numbers(each.id for each in due),),
            prepare=False,
        )
        locked = set(cursor)
    free: list[DueTransaction] = []
    held: set[str] = set()
    for each in due:
        if each.id in locked and held.isdisjoint(each.keys):
            free.append(each)
        elif each.holds:
            held.update(each.keys)
    return free


def runs(due: Iterable[DueTransaction]) -> Iterator[list[DueTransaction]]:
    """Split transactions, in their order, into those of one table layout each.

    A replay has not the layout of what waits for it.
    """
    return (list(run) for _, run in groupby(due, key=lambda each: each.columns))


def stored(conn: Connection, group: str, sink: str, after: int, limit: int) -> list[DueTransaction]:
    """Return at most `limit` transactions after an id, due or not, in the order of ids; all have one table layout."""
    with conn.cursor(row_factory=class_row(DueTransaction)) as cursor:
        cursor.execute(
            sql.SQL(
                """
                select {} from relay.deferred as d
                 where d.group_id = %s and d.sink = %s and d.id > %s order by d.id limit %s
                """
            ).format(DUE_COLUMNS),
            (group, sink, after, limit),
            prepare=False,
        )
        rows = cursor.fetchall()
    return list(takewhile(lambda each: each.columns == rows[0].columns, rows))


def of_ids(conn: Connection, ids: Collection[int]) -> list[DueTransaction]:
    """Return the transactions with some ids that are still deferred, due or not, in the order of ids."""
    query = sql.SQL(
        "select {} from relay.deferred as d where d.id = any(%s::bigint[]) order by d.id"
    ).format(DUE_COLUMNS)
    with conn.cursor(row_factory=class_row(DueTransaction)) as cursor:
        return cursor.execute(query, (literals.of_numbers(ids),), prepare=False).fetchall()


class _Candidate(NamedTuple):
    """A transaction that may be due. `earlier` is, for each of its keys, the last row before it that holds that key.

    It `gives_way` to others if it is a replay that nothing else waits for.
    """

    due: DueTransaction
    gives_way: bool
    is_early: bool
    earlier: list[int]


_CANDIDATE = sql.SQL(
    """
    d.blocked or d.retry_at > now(),
    array(select distinct before.deferred_id
            from unnest(d.keys) as own (key)
           cross join lateral (
                 select k.deferred_id from relay.deferred_keys as k
                  where k.group_id = d.group_id and k.sink = d.sink and k.key = own.key and k.deferred_id < d.id
                  order by k.deferred_id desc limit 1) as before),
    {due}
    """
).format(due=DUE_COLUMNS)
MAY_BE_DUE = sql.SQL("not d.blocked and d.predecessor is null and d.retry_at <= now()")
"""The condition on a row `d` of relay.deferred that is due, unless an earlier one holds one of its keys.

An index has replays of dead letters, whose `dead_transaction` is not null, another one the others.
"""
# The conditions are those of the indexes deferred_others, deferred_replayed and deferred_waiting. OFFSET 0 keeps the
# lookup by id apart, so that no plan reads the whole table.
_READY = sql.SQL(
    """
    with replayed as materialized (
        select d.id, row_number() over (order by d.retry_at, d.id) as number
          from relay.deferred as d
         where d.group_id = %(group)s and d.sink = %(sink)s and {may_be_due}
           and d.dead_transaction is not null and d.id <> all(%(in_flight)s::bigint[])
         order by d.retry_at, d.id limit %(limit)s),
    others as (
        select d.id, row_number() over (order by d.retry_at, d.id) as number
          from relay.deferred as d
         where d.group_id = %(group)s and d.sink = %(sink)s and {may_be_due}
           and d.dead_transaction is null and d.id <> all(%(in_flight)s::bigint[])
         order by d.retry_at, d.id limit %(limit)s),
    waiting as (
        select d.keys, row_number() over (order by d.retry_at, d.id) as number
          from relay.deferred as d
         where d.group_id = %(group)s and d.sink = %(sink)s and not d.blocked and d.predecessor is not null
           and d.dead_transaction is null and d.retry_at <= now() and exists (select from replayed)
         order by d.retry_at, d.id limit %(limit)s),
    blocking as (
        select replayed.id, min(waiting.number) as number
          from waiting
         cross join unnest(waiting.keys) as own (key)
         cross join lateral (
               select k.deferred_id from relay.deferred_keys as k
                where k.group_id = %(group)s and k.sink = %(sink)s and k.key = own.key
                order by k.deferred_id limit 1) as holding
         cross join lateral (
               select row.id from relay.deferred as row
                where row.id = holding.deferred_id and not row.blocked and row.predecessor is null
                  and row.dead_transaction is not null and row.retry_at <= now()
                  and row.id <> all(%(in_flight)s::bigint[])
               offset 0) as replayed
         group by 1),
    ready as (
        select id, false as gives_way, number from others
        union all (select id, false, number from blocking order by number, id limit %(keys)s)
        union all select id, true, number from replayed where id not in (select id from blocking))
    select ready.gives_way, {candidate}
      from ready cross join lateral (select * from relay.deferred as row where row.id = ready.id offset 0) as d
     order by ready.gives_way, ready.number, ready.id
    """
).format(candidate=_CANDIDATE, may_be_due=MAY_BE_DUE)
# The same number of each key, so that a key with many transactions does not use up the limit.
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
    select false, {candidate}
      from following join relay.deferred as d on d.id = following.deferred_id
     order by following.number, d.id
    """
).format(candidate=_CANDIDATE)


def _ready(
    conn: Connection, group: str, sink: str, limit: int, in_flight: Collection[int]
) -> list[_Candidate]:
    return _candidates(
        conn,
        _READY,
        {
            "group": group,
            "sink": sink,
            "limit": limit,
            "keys": math.ceil(limit / _REPLAYS_TOGETHER),
            "in_flight": literals.of_numbers(in_flight),
        },
    )


def _portion(
    conn: Connection,
    ready: Sequence[_Candidate],
    limit: int,
    size: int,
    in_flight: Collection[int],
) -> list[DueTransaction]:
    """Return those of the transactions, and of those that follow them, that may be applied together now.

    They are at most `limit`, of at most `size` bytes but for the first one. Those that are blocked are noted so.
    """
    ready = ready[:limit]
    chosen = _chosen(ready)
    candidates = ready
    if chosen and len(chosen) < limit:
        room = limit - len(chosen)
        candidates = [*ready, *_following(conn, chosen, room, ready, in_flight)]
        chosen = _chosen(candidates)
    _note_predecessors(conn, ready, chosen)
    # What follows may make room for a ready one that waited for it. Whatever each waits for is before it.
    kept = set(sorted(chosen)[:limit])
    return _fitting({each.due.id: each for each in candidates if each.due.id in kept}, size)


def _following(
    conn: Connection,
    chosen: Collection[int],
    room: int,
    ready: Sequence[_Candidate],
    in_flight: Collection[int],
) -> list[_Candidate]:
    """Return the transactions that follow the chosen ones and have a key of theirs."""
    keys = sum(len(each.due.keys) for each in ready if each.due.id in chosen)
    if not keys:
        return []
    known = (*(each.due.id for each in ready), *in_flight)
    return _candidates(
        conn,
        _FOLLOWING,
        {
            "chosen": literals.of_numbers(chosen),
            "known": literals.of_numbers(known),
            "each": min(room, max(math.ceil(room / keys), _EXAMINED_KEYS // keys)),
            "room": room,
        },
    )


def _candidates(
    conn: Connection, query: sql.Composed, parameters: dict[str, Any]
) -> list[_Candidate]:
    rows = conn.execute(query, parameters, prepare=False)
    return [
        _Candidate(DueTransaction(*due), gives_way, is_early, earlier)
        for gives_way, is_early, earlier, *due in rows
    ]


def _chosen(candidates: Iterable[_Candidate]) -> set[int]:
    """Return the ids that may be applied together: every earlier holder of one of their keys is among them."""
    chosen: set[int] = set()
    for each in sorted(candidates, key=lambda each: each.due.id):
        if not each.is_early and chosen.issuperset(each.earlier):
            chosen.add(each.due.id)
    return chosen


def _fitting(chosen: Mapping[int, _Candidate], size: int) -> list[DueTransaction]:
    """Return the first of the chosen transactions that have at most `size` bytes together, and at least one.

    Those that a transaction follows are taken before it, although they may come later in `chosen`.
    """
    fitting: dict[int, DueTransaction] = {}
    for number in chosen:
        needed, found = {number}, [number]
        while found:
            earlier = set(chosen[found.pop()].earlier) - needed - fitting.keys()
            needed |= earlier
            found += earlier
        for each in sorted(needed - fitting.keys()):
            size -= chosen[each].due.size
            if fitting and size < 0:
                return list(fitting.values())
            fitting[each] = chosen[each].due
    return list(fitting.values())


def _note_predecessors(conn: Connection, ready: Sequence[_Candidate], chosen: set[int]) -> None:
    """Note for each blocked transaction the last one that blocks it: it is not read again until that one is deleted.

    A predecessor whose row is locked is not noted: it may be deleted without its trigger seeing the note.
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
            (literals.of_numbers(predecessors), literals.of_numbers(predecessors.values())),
            prepare=False,
        )


class DeferredTimes(NamedTuple):
    """Whether a transaction's time has come, and the seconds until that of the next one comes; None without one.

    One whose time has come may still wait for an earlier one that holds a key of its.
    """

    may_be_due: bool
    seconds_to_next: float | None


# Each min() reads one end of an index, whatever the table looked like when it was analysed.
_TIMES = b"""
    select coalesce(least(
           (select min(retry_at) from relay.deferred
             where group_id = %(group)s and sink = %(sink)s and not blocked and predecessor is null
               and dead_transaction is null),
           (select min(retry_at) from relay.deferred
             where group_id = %(group)s and sink = %(sink)s and not blocked and predecessor is null
               and dead_transaction is not null)) <= now(), false) as may_be_due,
           extract(epoch from nullif(least(
           (select min(retry_at) from relay.deferred
             where group_id = %(group)s and sink = %(sink)s and not blocked and predecessor is null
               and dead_transaction is null and retry_at > now()),
           (select min(retry_at) from relay.deferred
             where group_id = %(group)s and sink = %(sink)s and not blocked and predecessor is null
               and dead_transaction is not null and retry_at > now())), 'infinity') - now())::float8 as seconds_to_next
    """


def times(conn: Connection, group: str, sink: str = "") -> DeferredTimes:
    """Return when transactions are due."""
    with conn.cursor(row_factory=class_row(DeferredTimes)) as cursor:
        found = cursor.execute(_TIMES, {"group": group, "sink": sink}, prepare=False).fetchone()
    assert found is not None  # noqa: S101
    return found


def transactions(
    conn: Connection, due: Sequence[DueTransaction], spool_above: int, spool_directory: Path | None
) -> Transactions:
    """Read transactions of one table layout; above `spool_above` bytes in total, their rows go to a spool file.

    The result has one element for each of `due`, in their order. Raises psycopg.Error and OSError.
    """
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
    attempts = [each.attempts + 1 for each in due]
    size = sum(each.size for each in due)
    stored = _rows(conn, [each.id for each in due], size)
    if size <= spool_above:
        rows: dict[int, list[bytes]] = {each.id: [] for each in due}
        for deferred_id, row in stored:
            rows[deferred_id].append(row)
        return Transactions(
            columns, facts, ids, hosts, Rows.of([*chain(*rows.values())]), attempts=attempts
        )
    spool = Spool(spool_directory)
    spooled = {each.id: SpooledTuples(spool) for each in due}
    for deferred_id, row in stored:
        spool.append(row, spooled[deferred_id])
    spool.seal()
    return Transactions(columns, facts, ids, hosts, Rows.of([]), list(spooled.values()), attempts)


_AT_ONCE_BYTES = 1024 * 1024
"""Up to so many bytes are received at once: one at a time, each row costs a wait for the connection."""


def _rows(conn: Connection, ids: Collection[int], size: int) -> Iterator[tuple[int, bytes]]:
    """Yield (id, row), the rows of each transaction in order; above _AT_ONCE_BYTES one portion in memory at a time."""
    others = set(ids)
    for deferred_id, row in _portions(
        conn,
        "select id, sizes, data from relay.deferred where id = any(%s::bigint[]) and data is not null",
        ids,
        size,
    ):
        others.discard(deferred_id)
        yield deferred_id, row
    if others:
        yield from _portions(
            conn,
            """
            select deferred_id, sizes, data from relay.deferred_rows where deferred_id = any(%s::bigint[])
             order by deferred_id, portion
            """,
            others,
            size,
        )


def _portions(
    conn: Connection, query: LiteralString, ids: Collection[int], size: int
) -> Iterator[tuple[int, bytes]]:
    given = (literals.of_numbers(ids),)
    with conn.cursor(binary=True, row_factory=tuple_row) as cursor:
        received = (
            cursor.execute(query, given, prepare=False)
            if size <= _AT_ONCE_BYTES
            else cursor.stream(query, given)
        )
        for deferred_id, sizes, data in received:
            start = 0
            for size in sizes:
                yield deferred_id, data[start : start + size]
                start += size
