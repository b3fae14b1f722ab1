"""Deferred transactions for tests that need no outbox."""

from __future__ import annotations

from collections.abc import Sequence

from relay.model.events import Commit, Lsn
from relay.model.transactions import Rows, Undecoded


def undecoded(
    *rows: bytes,
    hosts: Sequence[str] = ("h",),
    transaction_id: str | None = "t",
    columns: Sequence[str] = ("c",),
    offset: int = 1,
) -> Undecoded:
    """An undecoded transaction, whose rows no test decodes."""
    tuples = Rows.of(rows or (b"row",))
    return Undecoded(
        Commit(Lsn(offset), Lsn(offset + 1), 7, 9),
        transaction_id,
        tuple(hosts),
        tuple(columns),
        tuples,
        tuples.size,
        offset,
        offset,
    )
