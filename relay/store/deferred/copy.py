"""Encodes rows of `relay.deferred` in COPY's binary format, which costs both sides half as much as text. No I/O.

Sources: PostgreSQL documentation, "COPY", Binary Format; each type's receive function in PostgreSQL's source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING

from relay.model.events import microseconds
from relay.store.literals import writable

if TYPE_CHECKING:
    from relay.model.transactions import Undecoded
    from relay.store.deferred import Deferral

COLUMNS = (
    *("id", "holds", "blocked", "retry_at", "attempts", "undelivered", "commit_lsn", "end_lsn"),
    *("commit_ts", "xid", "first_offset", "last_offset", "events", "size"),
    *("predecessor", "first_failed_at", "dead_transaction", "group_id", "sink", "keys", "handler"),
    *("reason", "transaction_id", "hosts", "columns", "sizes", "data"),
)
"""The columns in the order in which `DeferredEncoder.row` writes them."""
_COUNT = len(COLUMNS)
START = b"PGCOPY\n\xff\r\n\0" + bytes(8)
"""The signature, no flags, no extension."""
END = b"\xff\xff"

# The number of columns, then the columns of fixed size, each after its size.
_HEAD = Struct(">h" + "iq" + "i?" * 2 + "iq" + "ii" + "i?" + "iQ" * 2 + "iq" * 6)
_NUMBER = Struct(">iq")
_LENGTH = Struct(">i")
_ARRAY = Struct(">iiiii")
_NULL = _LENGTH.pack(-1)
_TEXT_OID = 25
_INT4_OID = 23


class DeferredEncoder:
    """Encodes transactions of one group and sink, for a connection whose encoding Python calls `encoding`.

    `now` is the server's time, in microseconds since POSTGRES_EPOCH; `codec` is that of `encodings.codec_of`.
    """

    def __init__(
        self, group: str, sink: str, encoding: str, now: int, codec: str | None = None
    ) -> None:
        self._encoding = encoding
        self._codec = codec
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
                self._known_text(deferral.handler),
                self._known_text(deferral.reason),
                self._text(transaction.transaction_id),
                self._known_texts(transaction.hosts),
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
