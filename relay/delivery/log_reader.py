"""Reads the outbox for a lagging sink: the transactions of a difference with events for the sink, in order."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import psycopg
from psycopg_pool import ConnectionPool

from relay.config.settings import Settings
from relay.model.batch import Share
from relay.model.snapshots import Snapshot, Xids, full_xids
from relay.model.transactions import Routed, Transactions
from relay.pipeline.routing import BatchRouter
from relay.source.outbox.differences import Difference
from relay.source.outbox.rows import OutboxRows, Wanted, prepare_reading
from relay.source.server import SourcePosition, current_position, durable_position
from relay.store.connections import open_pool


@dataclass(frozen=True, slots=True, eq=False)
class Polled:
    """Some transactions of a difference that have events for the sink; `routed` is None at the end of a portion.

    `positions` (in the difference) and `xids` (full; 0 for rows that are older than the column c_xid) have an element
    for each transaction. Everything up to the position `upto` has been read then. `large` are the c_offsets of rows
    that are too large to be read.
    """

    routed: Routed | None
    positions: Sequence[int]
    xids: Sequence[int]
    upto: int
    large: Collection[int]


class LogReader:
    """Reads the outbox as a table, for one sink. For one thread at a time; raises psycopg.Error and RelayError."""

    def __init__(self, settings: Settings, sink: str, router: BatchRouter) -> None:
        self._sink = sink
        self._router = router
        self._rows = OutboxRows(settings)
        # One connection holds the plan of a difference open, the other reads its rows.
        self._source: ConnectionPool[psycopg.Connection[Any]] = open_pool(
            settings.source_dsn, 2, prepare_reading
        )

    def close(self) -> None:
        """Close the connections."""
        self._source.close()

    def current_position(self) -> SourcePosition:
        """Read the current position of the source, whose commits are durable there."""
        with self._source.connection() as conn:
            return durable_position(conn)

    def following(self, snapshot: Snapshot) -> SourcePosition | None:
        """Read a position that sees rows which `snapshot` does not see; None without such rows."""
        with self._source.connection() as conn:
            seen = current_position(conn).snapshot
            # A standby may lag.
            if not seen.covers(snapshot):
                return None
            # At the beginning the query would miss rows that are older than the column c_xid.
            if not snapshot.is_beginning and self._rows.is_empty(conn, Difference(snapshot, seen)):
                return None
            return durable_position(conn)

    def read(self, between: Difference, after: int, excluded: Xids) -> Generator[Polled]:
        """The transactions of a difference after position `after`, without `excluded` (full xids, int64, any order).

        Raises TransientFault if a standby has not replayed the difference yet.
        """
        with (
            self._source.connection() as planning,
            closing(self._rows.plan(planning, between, after, whole=False)) as portions,
        ):
            for portion in portions:
                # Read whole, since the sink may take long, and an open query holds back vacuum.
                yield from self._portion(between, portion.shares, excluded)
                yield Polled(None, (), (), portion.upto, ())

    def _portion(
        self, between: Difference, shares: Collection[Share], excluded: Xids
    ) -> list[Polled]:
        polled: list[Polled] = []
        with self._source.connection() as conn:
            large = self._rows.large(conn, shares)
            for unmarked in (True, False):
                wanted = _wanted(shares, unmarked, excluded)
                if len(wanted.xids):
                    polled += self._rows_of(conn, between, wanted, unmarked, large)
        return polled

    def _rows_of(
        self,
        conn: psycopg.Connection[Any],
        between: Difference,
        wanted: Wanted,
        unmarked: bool,
        large: Collection[int],
    ) -> Generator[Polled]:
        position_of = dict(zip(wanted.xids.tolist(), wanted.positions.tolist(), strict=True))
        # Closed before the connection: a COPY in flight would keep it from returning to the pool.
        with closing(self._rows.commits(conn, wanted, unmarked, large)) as commits:
            for transactions in commits:
                routed = self._routed(transactions)
                if routed is None:
                    continue
                facts = routed.transactions.facts
                keys = facts["last_offset"] if unmarked else _full(facts["xid"], between)
                positions = [position_of[key] for key in keys.tolist()]
                xids = [0] * len(positions) if unmarked else keys.tolist()
                yield Polled(routed, positions, xids, positions[0] - 1, large)

    def _routed(self, transactions: Transactions) -> Routed | None:
        return self._router.route(transactions).parts.get(self._sink)


def _full(xids: np.ndarray[Any, np.dtype[np.int64]], between: Difference) -> Xids:
    return full_xids(xids, between.after.xmax)


def _wanted(shares: Collection[Share], unmarked: bool, excluded: Xids) -> Wanted:
    """The transactions of `shares`, without `excluded`, ordered by position, then xid."""
    chosen = [share for share in shares if share.unmarked == unmarked]
    none = np.zeros(0, np.int64)
    xids = np.concatenate([none, *(share.xids for share in chosen)])
    positions = np.concatenate([none, *(share.positions for share in chosen)])
    if not unmarked and len(excluded):
        kept = ~np.isin(xids, excluded)
        xids, positions = xids[kept], positions[kept]
    order = np.lexsort((xids, positions))
    return Wanted(xids[order], positions[order])
