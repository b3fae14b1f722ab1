"""Reads differences of the outbox for a consumer: plans one in portions, and reads what the consumer has not read yet.

Who uses it says what that is, where the rows go, and stores how far it is: after the last transaction of a portion,
which is at the position `upto`, `plan` goes on. Polling plans for tasks, which read their ranges themselves; sinks that
lag keep the plan in a file; a fill of a queue reads each portion within the commit that stores its progress.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing
from tempfile import SpooledTemporaryFile
from typing import NamedTuple

from relay.config.settings import Settings
from relay.model.batch import Share
from relay.model.snapshots import RowCounts
from relay.model.transactions import Transactions
from relay.source.outbox.differences import Difference
from relay.source.outbox.rows import OutboxRows, Portion
from relay.source.outbox.selection import Unread, Wanted, select
from relay.store.connections import Connection
from relay.store.positions.offsets import FIRST

_PLAN_BYTES = 256 * 1024
"""How many bytes of a plan that is kept are in memory; 24 for each transaction."""


class Found(NamedTuple):
    """Some transactions that were read, and those that were wanted, of which they are."""

    transactions: Transactions
    wanted: Wanted


class Cursor:
    """Reads differences over connections that `connected` lends: one for the time of a plan, one for each read.

    Connections are in autocommit mode. Raises psycopg.Error, and TransientFault where the server does not show yet what
    is to be read; see `OutboxRows.commits` for rows that cannot be read.
    """

    def __init__(
        self, settings: Settings, connected: Callable[[], AbstractContextManager[Connection]]
    ) -> None:
        self.rows = OutboxRows(settings)
        self._connected = connected
        self._spool_directory = settings.batch.spool_directory

    def plan(
        self,
        between: Difference,
        after: int = FIRST,
        whole: bool = False,
        applied: RowCounts | None = None,
        most: int | None = None,
    ) -> Generator[Portion]:
        """Yield a difference in portions, as `OutboxRows.plan` does; close it, to give back its connection."""
        with (
            self._connected() as conn,
            closing(self.rows.plan(conn, between, after, whole, applied, most)) as portions,
        ):
            yield from portions

    def kept_plan(self, between: Difference, after: int = FIRST) -> Generator[Portion]:
        """The same with the plan, where it is large, in a file: no connection is in use once the first one is there."""
        directory = None if self._spool_directory is None else str(self._spool_directory)
        with SpooledTemporaryFile(_PLAN_BYTES, dir=directory) as plan:
            with closing(self.plan(between, after)) as portions:
                for portion in portions:
                    pickle.dump(portion, plan)
            plan.seek(0)
            while True:
                try:
                    yield pickle.load(plan)  # noqa: S301 this process has just written it
                except EOFError:
                    return

    def shares(self, between: Difference) -> Iterator[Share]:
        """All transactions of a difference, which should be small."""
        for portion in self.plan(between):
            yield from portion.shares

    def large(self, shares: Collection[Share]) -> list[int]:
        """The c_offsets of the rows of some transactions that are too large to be read."""
        with self._connected() as conn:
            return self.rows.large(conn, shares)

    def read(
        self, shares: Iterable[Share], unread: Unread, by_reference: Collection[int] = ()
    ) -> Generator[Found]:
        """Read the transactions of some shares that are unread, in order, first those older than the column c_xid.

        The contents of rows with a c_offset in `by_reference` are not read.
        """
        for wanted in select(shares, unread):
            with (
                self._connected() as conn,
                # Closed before the connection: a COPY in flight would keep it from returning to a pool.
                closing(self.rows.commits(conn, wanted, by_reference)) as commits,
            ):
                for transactions in commits:
                    yield Found(transactions, wanted)
