"""Reads and writes the rows of deferred transactions: in `relay.deferred`, or in `relay.deferred_rows` for large ones.

Rows have the encoding of `model.tuples`: opaque bytes, one object for each row, in the order of the transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import LiteralString

import numpy as np
from psycopg.rows import tuple_row

from relay.model.events import Lsn, Tuples
from relay.model.spool import Spool, SpooledTuples
from relay.model.transactions import FACTS, Rows, Transactions, Undecoded
from relay.store import literals
from relay.store.connections import Connection
from relay.store.deferred.due import DueTransaction

_PORTION_EVENTS = 10_000
_PORTION_BYTES = 1024 * 1024


def inline(transaction: Undecoded) -> list[bytes] | None:
    """Return the rows of a transaction that is in memory and fits into one portion; None for others."""
    tuples = transaction.tuples
    if (
        isinstance(tuples, Rows)
        and len(tuples) <= _PORTION_EVENTS
        and transaction.size <= _PORTION_BYTES
    ):
        return list(tuples)
    return None


def write_rows(conn: Connection, number: int, tuples: Tuples) -> None:
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
    stored = _rows(conn, [each.id for each in due])
    if sum(each.size for each in due) <= spool_above:
        rows: dict[int, list[bytes]] = {each.id: [] for each in due}
        for deferred_id, row in stored:
            rows[deferred_id].append(row)
        return Transactions(columns, facts, ids, hosts, Rows.of([*chain(*rows.values())]))
    spool = Spool(spool_directory)
    spooled = {each.id: SpooledTuples(spool) for each in due}
    for deferred_id, row in stored:
        spool.append(row, spooled[deferred_id])
    spool.seal()
    return Transactions(columns, facts, ids, hosts, Rows.of([]), list(spooled.values()))


def _rows(conn: Connection, ids: Collection[int]) -> Iterator[tuple[int, bytes]]:
    """Yield (id, row), the rows of each transaction in order, one portion in memory at a time."""
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
        for deferred_id, sizes, data in cursor.stream(query, (literals.of_numbers(ids),)):
            start = 0
            for size in sizes:
                yield deferred_id, data[start : start + size]
                start += size
