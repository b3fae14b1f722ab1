"""Defers business transactions: inserts, updates and deletes rows of `relay.deferred`.

A deferred transaction belongs to a sink, or to the target, whose sink is ''. The cost does not grow with the number of
deferred transactions of one key: each key that is held is a row of `relay.deferred_keys`, and a transaction is not
read again while the row of its `predecessor` exists.

A predecessor is noted only if the session that deletes its row is certain to see the note: in the database transaction
that inserts both, or under a lock on the predecessor's row. A trigger removes the note.

`deferred_due` finds the transactions that are due, `deferred_rows` reads and writes their rows, `deferred_counts`
counts them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice

from psycopg.rows import scalar_row, tuple_row

from relay.model.events import Tuples
from relay.model.transactions import Undecoded
from relay.store import literals, locks
from relay.store.connections import Connection
from relay.store.deferred.copy import COLUMNS, END, START, DeferredEncoder
from relay.store.deferred.rows import inline, write_rows
from relay.store.literals import codec_of, writable

_DEFERRED_AT_ONCE = 5_000


@dataclass(frozen=True, slots=True)
class Deferral:
    """Why a transaction is deferred, and until when.

    It may be applied in `after` seconds, or at the time `until`. If it `holds` its `keys`, later transactions with them
    are blocked. It has failed `attempts` times, first `failing_seconds` ago; None if it has not failed.
    See the comments on the table's columns.
    """

    keys: Collection[str]
    holds: bool = True
    after: float = 0.0
    until: datetime | None = None
    attempts: int = 0
    failing_seconds: float | None = None
    handler: str | None = None
    reason: str | None = None
    blocked: bool = False
    dead_transaction: int | None = None
    undelivered: bool = False


# These statements are never prepared: a plan made while the table was empty would later read all of it.


def held(conn: Connection, group: str, sink: str, keys: Collection[str]) -> set[str]:
    """Return those of the keys that a deferred transaction holds."""
    codec = codec_of(conn)
    asked = {writable(key, codec): key for key in keys}
    with conn.cursor(row_factory=scalar_row) as cursor:
        # ORDER BY forces the index: without it, the planner reads the whole table for a key that is not held if most
        # rows have one key.
        cursor.execute(
            """
            select asked.key from unnest(%(asked)s::text[]) as asked (key)
             where (select k.deferred_id from relay.deferred_keys as k
                     where k.group_id = %(group)s and k.sink = %(sink)s and k.key = asked.key
                     order by k.deferred_id limit 1) is not null
            """,
            {"group": group, "sink": sink, "asked": literals.of_texts(asked)},
            prepare=False,
        )
        return {asked[key] for key in cursor}


_COPY = f"copy relay.deferred ({', '.join(COLUMNS)}) from stdin (format binary)"
_COPIED_AT_ONCE = 64 * 1024


def any_held(conn: Connection, group: str, sink: str) -> bool:
    """Whether a deferred transaction holds any key."""
    rows = conn.execute(
        "select from relay.deferred_keys where group_id = %s and sink = %s limit 1",
        (group, sink),
        prepare=False,
    )
    return rows.rowcount > 0


def defer(
    conn: Connection, group: str, entries: Iterable[tuple[Undecoded, Deferral]], sink: str = ""
) -> None:
    """Defer transactions in this order, after all that are already deferred. Raises psycopg.Error."""
    rest = iter(entries)
    holders: dict[str, int] = {}
    with conn.cursor(row_factory=tuple_row) as cursor:
        while portion := list(islice(rest, _DEFERRED_AT_ONCE)):
            ids, now = cursor.execute(
                """
                select array_agg(nextval('relay.deferred_id_seq')),
                       (extract(epoch from clock_timestamp()) * 1000000)::bigint - 946684800000000
                  from generate_series(1, %s)
                """,
                (len(portion),),
            ).fetchall()[0]
            encoder = DeferredEncoder(group, sink, conn.info.encoding, now, codec_of(conn))
            large: list[tuple[int, Tuples]] = []
            with cursor.copy(_COPY) as copy:
                data = bytearray(START)
                for number, (transaction, deferral) in zip(ids, portion, strict=True):
                    rows = inline(transaction)
                    if rows is None:
                        large.append((number, transaction.tuples))
                    predecessor = _predecessor(holders, number, deferral)
                    data += encoder.row(number, transaction, deferral, predecessor, rows)
                    if len(data) > _COPIED_AT_ONCE:
                        copy.write(data)
                        data = bytearray()
                copy.write(data + END)
            for number, tuples in large:
                write_rows(conn, number, tuples)


def _predecessor(holders: dict[str, int], number: int, deferral: Deferral) -> int | None:
    """Return the last row of this call that holds one of the keys, and set row `number` as their holder.

    `holders` maps each key to the last row that holds it.
    """
    predecessor = None
    for key in deferral.keys:
        before = holders.get(key)
        if before is not None and (predecessor is None or before > predecessor):
            predecessor = before
        if deferral.holds:
            holders[key] = number
    return predecessor


def set_keys(conn: Connection, keys: Mapping[int, Collection[str]]) -> None:
    """Set the ordering keys of transactions, by id. `hold_set_keys` is due afterwards, in the same transaction."""
    codec = codec_of(conn)
    pairs = [(number, writable(key, codec)) for number, each in keys.items() for key in each]
    conn.execute(
        """
        with own as (
            select id, array_agg(key) as keys from unnest(%s::bigint[], %s::text[]) as own (id, key) group by id)
        update relay.deferred as d set predecessor = null, keys = coalesce(own.keys, '{}')
          from unnest(%s::bigint[]) as stored (id) left join own using (id)
         where d.id = stored.id
        """,
        (
            literals.of_numbers(number for number, _ in pairs),
            literals.of_texts([key for _, key in pairs]),
            literals.of_numbers(keys),
        ),
        prepare=False,
    )


def hold_set_keys(conn: Connection, group: str, sink: str) -> None:
    """Let the transactions of a sink, '' for the target, that held their keys hold those that `set_keys` has set."""
    conn.execute("delete from relay.deferred_keys where group_id = %s and sink = %s", (group, sink))
    conn.execute(
        """
        insert into relay.deferred_keys (group_id, sink, key, deferred_id)
        select d.group_id, d.sink, own.key, d.id from relay.deferred as d, unnest(d.keys) as own (key)
         where d.group_id = %s and d.sink = %s and d.holds
        """,
        (group, sink),
    )


def lock(conn: Connection, group: str) -> None:
    """Lock the deferred transactions of the group's target until the database transaction ends; wait for the lock."""
    locks.lock_in_transaction(conn, locks.retries(group))


def remove(conn: Connection, ids: Collection[int]) -> set[int]:
    """Delete deferred transactions by id; returns the ids that still existed, since some may have been cancelled."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        cursor.execute(
            "delete from relay.deferred where id = any(%s::bigint[]) returning id",
            (literals.of_numbers(ids),),
            prepare=False,
        )
        return set(cursor)


def defer_again(conn: Connection, deferrals: Collection[tuple[int, Deferral]]) -> set[int]:
    """Defer transactions again, by id: they keep their order and their keys, and still block later ones.

    Returns the ids that are still deferred.
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
        (literals.of_numbers(number for number, deferral in deferrals if deferral.holds),),
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
                   blocked = w.blocked, attempts = w.attempts,
                   first_failed_at =
                       coalesce(d.first_failed_at, clock_timestamp() - make_interval(secs => w.failing_seconds)),
                   handler = w.handler, reason = w.reason, dead_transaction = w.dead_transaction
              from unnest(%s::bigint[], %s::boolean[], %s::float8[], %s::timestamptz[], %s::int[], %s::float8[],
                          %s::text[], %s::text[], %s::bigint[])
                   as w (id, blocked, after, until, attempts, failing_seconds, handler, reason, dead_transaction)
             where d.id = w.id
            returning d.id
            """,
            [literals.of_values(column) for column in columns],
            prepare=False,
        )
        return set(cursor)


def _deferred_again(number: int, deferral: Deferral) -> tuple[object, ...]:
    """The values for the row of a transaction that failed again."""
    return (
        number,
        deferral.blocked,
        deferral.after,
        deferral.until,
        deferral.attempts,
        deferral.failing_seconds,
        deferral.handler,
        deferral.reason,
        deferral.dead_transaction,
    )


def blocked(conn: Connection, dead: Sequence[int]) -> dict[int, int]:
    """Lock the rows of dead transactions that still hold their keys; returns the row id by dead transaction."""
    rows = conn.execute(
        "select dead_transaction, id from relay.deferred where blocked and dead_transaction = any(%s) for update",
        (list(dead),),
    )
    return dict(rows.fetchall())


def release(conn: Connection, deferred_id: int, transaction: Undecoded) -> None:
    """Make a dead transaction that holds its keys due, with the rows of `transaction`; it keeps its order."""
    rows = inline(transaction)
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
        write_rows(conn, deferred_id, transaction.tuples)


def forget(conn: Connection, group: str, sink: str) -> int:
    """Delete all deferred transactions of a sink; returns how many there were."""
    return conn.execute(
        "delete from relay.deferred where group_id = %s and sink = %s", (group, sink)
    ).rowcount
