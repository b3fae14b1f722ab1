"""Defers business transactions: inserts, updates and deletes rows of `relay.deferred`.

A deferred transaction belongs to a sink, or to the target, whose sink is ''. The cost does not grow with the number of
deferred transactions of one key: each key that is held is a row of `relay.deferred_keys`, and a transaction is not
read again while the row of its `predecessor` exists.

A predecessor is noted only if the session that deletes its row is certain to see the note: in the database transaction
that inserts both, or under a lock on the predecessor's row. A trigger removes the note.

`due` finds the transactions that are due and reads their rows, `selection` lists and counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from hashlib import sha256
from itertools import islice
from struct import Struct

from psycopg.rows import scalar_row, tuple_row

from relay.model.events import Decoder, Events, Tuples, microseconds
from relay.model.keys import at_any
from relay.model.transactions import Rows, Undecoded
from relay.store import literals, locks
from relay.store.connections import Connection
from relay.store.literals import codec_of, storable, writable

_DEFERRED_AT_ONCE = 5_000


@dataclass(frozen=True, slots=True)
class Deferral:
    """Why a transaction is deferred, and until when.

    It may be applied in `after` seconds, or at the time `until`. If it `holds` its `keys`, later transactions with them
    are blocked. It has failed `attempts` times, first `failing_seconds` ago; None if it has not failed.
    `event_ids` is as `ids_of` returns it. See the comments on the table's columns.
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
    event_ids: Sequence[str] | None = None
    endpoint: str | None = None
    resent_by: str | None = None


# These statements are never prepared: a plan made while the table was empty would later read all of it.


def held(conn: Connection, group: str, sink: str, keys: Collection[str]) -> set[str]:
    """Return those of the keys that a deferred transaction holds, and those of them at single endpoints."""
    codec = codec_of(conn)
    asked = {writable(key, codec): key for key in keys}
    with conn.cursor(row_factory=scalar_row) as cursor:
        # ORDER BY forces the index: without it, the planner reads the whole table for a key that is not held if most
        # rows have one key. The first of the two spans has the key itself, the second what follows it with U+001F.
        cursor.execute(
            """
            with recursive held as (
                select span.before, (
                       select k.key from relay.deferred_keys as k
                        where k.group_id = %(group)s and k.sink = %(sink)s and k.key >= span.since
                          and k.key < span.before
                        order by k.key limit 1) as key
                  from unnest(%(asked)s::text[]) as asked (key)
                 cross join lateral (values (asked.key, asked.key || chr(1)),
                                            (asked.key || chr(31), asked.key || ' ')) as span (since, before)
                union all
                select held.before, (
                       select k.key from relay.deferred_keys as k
                        where k.group_id = %(group)s and k.sink = %(sink)s and k.key > held.key
                          and k.key < held.before
                        order by k.key limit 1)
                  from held where held.key is not null)
            select key from held where key is not null
            """,
            {"group": group, "sink": sink, "asked": literals.of_texts(asked)},
            prepare=False,
        )
        # As they were asked for: those that are stored have escapes for what the encoding lacks.
        return {
            key.replace(stored, asked[stored], 1) for key in cursor for stored in (at_any(key),)
        }


def any_held(conn: Connection, group: str, sink: str) -> bool:
    """Whether a deferred transaction holds any key."""
    rows = conn.execute(
        "select from relay.deferred_keys where group_id = %s and sink = %s limit 1",
        (group, sink),
        prepare=False,
    )
    return rows.rowcount > 0


def any_deferred(conn: Connection, group: str, sink: str) -> bool:
    """Whether a transaction is deferred for a sink, when ever it is due."""
    rows = conn.execute(
        "select from relay.deferred where group_id = %s and sink = %s limit 1",
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
            encoder = _Encoder(conn, group, sink, now)
            large: list[tuple[int, Tuples]] = []
            with cursor.copy(_COPY) as copy:
                data = bytearray(_START)
                for number, (transaction, deferral) in zip(ids, portion, strict=True):
                    rows = _inline(transaction)
                    if rows is None:
                        large.append((number, transaction.tuples))
                    predecessor = _predecessor(holders, number, deferral)
                    data += encoder.row(number, transaction, deferral, predecessor, rows)
                    if len(data) > _COPIED_AT_ONCE:
                        copy.write(data)
                        data = bytearray()
                copy.write(data + _END)
            for number, tuples in large:
                _write_rows(conn, number, tuples)


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


# Rows are sent in COPY's binary format, which costs both sides half as much as text; psycopg's `Copy.write_row` takes
# three times as long to encode one. Sources: PostgreSQL documentation, "COPY", Binary Format; each type's receive
# function in PostgreSQL's source.
_COLUMNS = (
    *("id", "holds", "blocked", "retry_at", "attempts", "undelivered", "commit_lsn", "end_lsn"),
    *("commit_ts", "xid", "first_offset", "last_offset", "events", "size"),
    *(
        "predecessor",
        "first_failed_at",
        "dead_transaction",
        "group_id",
        "sink",
        "keys",
        "endpoint",
        "handler",
    ),
    *("reason", "resent_by", "transaction_id", "hosts", "event_ids", "columns", "sizes", "data"),
)
"""The columns in the order in which `_Encoder.row` writes them."""
_COUNT = len(_COLUMNS)
_START = b"PGCOPY\n\xff\r\n\0" + bytes(8)
"""The signature, no flags, no extension."""
_END = b"\xff\xff"

# The number of columns, then the columns of fixed size, each after its size.
_HEAD = Struct(">h" + "iq" + "i?" * 2 + "iq" + "ii" + "i?" + "iQ" * 2 + "iq" * 6)
_NUMBER = Struct(">iq")
_LENGTH = Struct(">i")
_ARRAY = Struct(">iiiii")
_NULL = _LENGTH.pack(-1)
_TEXT_OID = 25
_INT4_OID = 23
_COPY = f"copy relay.deferred ({', '.join(_COLUMNS)}) from stdin (format binary)"
_COPIED_AT_ONCE = 64 * 1024


class _Encoder:
    """Encodes transactions of one group and sink; `now` is the server's time, in microseconds since POSTGRES_EPOCH."""

    def __init__(self, conn: Connection, group: str, sink: str, now: int) -> None:
        self._encoding = conn.info.encoding
        self._codec = codec_of(conn)
        self._now = now
        self._owner = self._text(group) + self._text(sink)
        # Cached, since many rows have few different values.
        self._known_texts: Callable[[Sequence[str]], bytes] = lru_cache(1_000)(self._texts)
        self._known_names: Callable[[Sequence[str]], bytes] = lru_cache(1_000)(self._names)
        self._known_text: Callable[[str | None], bytes] = lru_cache(1_000)(self._text)

    def row(
        self,
        number: int,
        transaction: Undecoded,
        deferral: Deferral,
        predecessor: int | None,
        rows: Sequence[bytes] | None,
    ) -> bytes:
        """The row with the id `number`; `rows` are those of the transaction, None if they are stored elsewhere."""
        retry_at = self._now + round(deferral.after * 1_000_000)
        if deferral.until is not None:
            retry_at = microseconds(deferral.until)
        failing = deferral.failing_seconds
        lsn, end_lsn, ts, xid = transaction.commit
        head = _HEAD.pack(
            *(
                _COUNT,
                8,
                number,
                1,
                deferral.holds,
                1,
                deferral.blocked,
                8,
                retry_at,
                4,
                deferral.attempts,
            ),
            *(1, deferral.undelivered, 8, lsn, 8, end_lsn, 8, ts, 8, xid),
            *(8, transaction.first_offset, 8, transaction.last_offset),
            *(8, len(transaction.tuples), 8, transaction.size),
        )
        return b"".join(
            (
                head,
                _number(predecessor),
                _number(None if failing is None else self._now - round(failing * 1_000_000)),
                _number(deferral.dead_transaction),
                self._owner,
                self._texts(sorted(deferral.keys)),
                self._known_text(deferral.endpoint),
                self._known_text(deferral.handler),
                self._known_text(deferral.reason),
                self._known_text(deferral.resent_by),
                self._text(transaction.transaction_id),
                self._known_texts(transaction.hosts),
                _NULL if deferral.event_ids is None else self._texts(deferral.event_ids),
                self._known_names(transaction.columns),
                *((_NULL, _NULL) if rows is None else _sizes_and_data(rows)),
            )
        )

    def _text(self, value: str | None) -> bytes:
        if value is None:
            return _NULL
        return _bytes(writable(value, self._codec).encode(self._encoding))

    def _texts(self, values: Sequence[str]) -> bytes:
        return _array(_TEXT_OID, [self._text(value) for value in values])

    def _names(self, values: Sequence[str]) -> bytes:
        """Encode names, which must match exactly. Raises UnicodeEncodeError for a character that the encoding lacks."""
        return _array(_TEXT_OID, [_bytes(value.encode(self._encoding)) for value in values])


def _number(value: int | None) -> bytes:
    return _NULL if value is None else _NUMBER.pack(8, value)


def _bytes(value: bytes) -> bytes:
    return _LENGTH.pack(len(value)) + value


_SIZE = Struct(">ii")
_ONE_SIZE = Struct(">iiiiiiii")


def _sizes_and_data(rows: Sequence[bytes]) -> tuple[bytes, bytes]:
    """The lengths of rows as an array of int4, and the rows."""
    if len(rows) == 1:
        (row,) = rows
        return _ONE_SIZE.pack(28, 1, 0, _INT4_OID, 1, 1, 4, len(row)), _bytes(row)
    return _array(_INT4_OID, [_SIZE.pack(4, len(row)) for row in rows]), _bytes(b"".join(rows))


def _array(oid: int, elements: Sequence[bytes]) -> bytes:
    """An array of elements that begin with their sizes: dimensions, no nulls, type, length, lower bound, elements."""
    body = b"".join(elements)
    if not elements:
        return _LENGTH.pack(12) + _ARRAY.pack(0, 0, oid, 0, 0)[:12]
    return _LENGTH.pack(20 + len(body)) + _ARRAY.pack(1, 0, oid, len(elements), 1) + body


_PORTION_EVENTS = 10_000
_PORTION_BYTES = 1024 * 1024


def _inline(transaction: Undecoded) -> list[bytes] | None:
    """Return the rows of a transaction that is in memory and fits into one portion; None for others."""
    return list(transaction.tuples) if _fits(transaction) else None


def _fits(transaction: Undecoded) -> bool:
    tuples = transaction.tuples
    return (
        isinstance(tuples, Rows)
        and len(tuples) <= _PORTION_EVENTS
        and transaction.size <= _PORTION_BYTES
    )


_LONGEST_ID = 1_000
"""In octets: an entry of an index has a limited length."""


def ids_of(transaction: Undecoded, decoder: Decoder) -> tuple[str, ...] | None:
    """Return the ids of a transaction's events as `event_key` has them; None if its rows are stored in portions."""
    if not _fits(transaction):
        return None
    events = Events(transaction.tuples, decoder, transaction.commit)
    return tuple(event_key(event.text("id") or "") for event in events)


def event_key(event_id: str) -> str:
    """Return an event's id as it is stored for lookups: a digest of one that is too long, as `relay.event_key` does."""
    octets = event_id.encode("utf-8", "surrogateescape")
    return sha256(octets).hexdigest() if len(octets) > _LONGEST_ID else event_id


def _write_rows(conn: Connection, number: int, tuples: Tuples) -> None:
    """Write the rows of a transaction, one portion in memory at a time. `tuples` may read from the same connection."""
    for portion, rows in enumerate(_portions(tuples)):
        conn.execute(
            "insert into relay.deferred_rows (deferred_id, portion, sizes, data) values (%s, %s, %s, %s)",
            (number, portion, list(map(len, rows)), b"".join(rows)),
        )


def _portions(tuples: Tuples) -> Iterator[list[bytes]]:
    portion: list[bytes] = []
    size = 0
    for row in tuples:
        portion.append(row)
        size += len(row)
        if len(portion) >= _PORTION_EVENTS or size >= _PORTION_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


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


def stop_cancelled(conn: Connection, ids: Collection[int]) -> None:
    """Delete cancelled transactions by id, unless another session has locked them, and note where they stopped."""
    conn.execute(
        """
        with gone as (
            delete from relay.deferred
             where id = any(array(select d.id from relay.deferred as d
                                   where d.id = any(%s::bigint[]) order by d.id for update skip locked))
            returning group_id, sink, event_ids)
        insert into relay.cancellations (event_id, group_id, sink, outcome, requested_by)
        select distinct own.id, g.group_id, g.sink, 'cancelled', relay.acting_role()
          from gone as g cross join unnest(g.event_ids) as own (id)
            on conflict do nothing
        """,
        (literals.of_numbers(ids),),
        prepare=False,
    )


def note_delivered(conn: Connection, group: str, sink: str, event_ids: Collection[str]) -> None:
    """Note that a sink has got events although they were cancelled: their deliveries were in flight."""
    conn.execute(
        """
        update relay.cancellations set outcome = 'delivered'
         where event_id = any(%s::text[]) and group_id = %s and sink = %s
        """,
        (literals.of_texts(event_ids), group, sink),
        prepare=False,
    )


def has_requests(conn: Connection) -> bool:
    """Whether somebody has asked to cancel any event of the last seven days."""
    rows = conn.execute(
        "select from relay.cancellations where group_id = '' limit 1", prepare=False
    )
    return rows.rowcount > 0


def cancelled(conn: Connection, events: Mapping[int, Collection[str]]) -> set[int]:
    """Return the indices of the transactions, given with the ids of their events, that somebody has asked to cancel."""
    codec = codec_of(conn)
    pairs = [(index, writable(each, codec)) for index, ids in events.items() for each in ids]
    if not pairs:
        return set()
    with conn.cursor(row_factory=scalar_row) as cursor:
        cursor.execute(
            """
            select distinct own.index from unnest(%s::bigint[], %s::text[]) as own (index, id)
              join relay.cancellations as c on c.event_id = own.id and c.group_id = ''
            """,
            (
                literals.of_numbers(index for index, _ in pairs),
                literals.of_texts([each for _, each in pairs]),
            ),
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
        *(_deferred_again(conn, number, deferral) for number, deferral in deferrals), strict=True
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


def _deferred_again(conn: Connection, number: int, deferral: Deferral) -> tuple[object, ...]:
    """The values for the row of a transaction that failed again."""
    return (
        number,
        deferral.blocked,
        deferral.after,
        deferral.until,
        deferral.attempts,
        deferral.failing_seconds,
        deferral.handler,
        storable(conn, deferral.reason),
        deferral.dead_transaction,
    )


def blocked(conn: Connection, dead: Sequence[int]) -> dict[int, int]:
    """Lock the rows of dead transactions that still hold their keys; returns the row id by dead transaction."""
    rows = conn.execute(
        "select dead_transaction, id from relay.deferred where blocked and dead_transaction = any(%s) for update",
        (list(dead),),
    )
    return dict(rows.fetchall())


def release(conn: Connection, dead: Mapping[int, Undecoded]) -> None:
    """Make dead transactions that hold their keys due, by the ids of their rows, each with the rows of a transaction.

    They keep their order.
    """
    if not dead:
        return
    large: dict[int, Tuples] = {}
    rows_of: list[tuple[object, ...]] = []
    for number, transaction in dead.items():
        rows = _inline(transaction)
        if rows is None:
            large[number] = transaction.tuples
        rows_of.append(
            (
                list(transaction.columns),
                len(transaction.tuples),
                transaction.size,
                None if rows is None else list(map(len, rows)),
                None if rows is None else b"".join(rows),
                number,
            )
        )
    with conn.cursor() as cursor:
        cursor.executemany(
            """
            update relay.deferred
               set blocked = false, retry_at = clock_timestamp(), attempts = 0, first_failed_at = null, handler = null,
                   reason = null, columns = %s, events = %s, size = %s, sizes = %s, data = %s
             where id = %s
            """,
            rows_of,
        )
    conn.execute("delete from relay.deferred_rows where deferred_id = any(%s)", (list(dead),))
    for number, tuples in large.items():
        _write_rows(conn, number, tuples)


def forget(conn: Connection, group: str, sink: str) -> int:
    """Delete all deferred transactions of a sink; returns how many there were."""
    return conn.execute(
        "delete from relay.deferred where group_id = %s and sink = %s", (group, sink)
    ).rowcount
