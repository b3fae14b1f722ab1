"""Polls the outbox for a sink: submits the transactions of one difference after the other, in order."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from tempfile import SpooledTemporaryFile
from typing import Any

import numpy as np
import psycopg

from relay.config.settings import Settings
from relay.delivery.checkpoint import Checkpoint, SinkContext
from relay.delivery.progress import SinkCommit, SinkProgress, commits_of
from relay.delivery.submission import Submission
from relay.model.batch import Share
from relay.model.snapshots import Xids
from relay.model.transactions import Mask, Routed, Transactions
from relay.pipeline.routing import BatchRouter
from relay.source.outbox.differences import Difference
from relay.source.outbox.rows import OutboxRows, Portion
from relay.source.outbox.selection import Wanted, everywhere, select
from relay.store.connections import Pool
from relay.store.positions.sinks import BEFORE_FIRST

JOIN_SECONDS = 5.0
"""How long a sink that joins the stream waits for commits that were streamed and are not visible yet."""
JOINING_TRANSACTIONS = 10_000
"""How many transactions are polled at most while a sink joins the stream: all of them are remembered."""
REMEMBERED_COMMITS = 50_000
"""How many commits are polled at most after one that is not done."""
_PLAN_BYTES = 256 * 1024
"""How many bytes of the plan of a difference are in memory; 24 for each transaction."""
FIRST_POLL_SECONDS = 0.01
"""The first wait between two polls that find nothing; it doubles up to `poll.wait_period_ms`."""


class SinkPolling:
    """Polls the outbox, in threads that sinks share, and submits new transactions. For one event loop.

    Raises psycopg.Error and RelayError.
    """

    def __init__(
        self,
        context: SinkContext,
        router: BatchRouter,
        progress: SinkProgress,
        checkpoint: Checkpoint,
        submission: Submission,
    ) -> None:
        self._context = context
        self._reader = LogReader(context.settings, context.name, router, context.connections.source)
        self._progress = progress
        self._checkpoint = checkpoint
        self._submission = submission
        self._in_source = context.connections.in_source

    async def poll(self) -> bool:
        """Submit the next difference; False if the outbox has no new rows, or the sink has no snapshot to start at."""
        end = self._progress.end
        if end is None:
            return False
        following = await self._context.outbox_end.following(end)
        # A source that ends before what was delivered has lost events: relay is about to stop.
        if following is None or following.lsn < self._progress.position.delivered_lsn:
            return False
        self._progress.reach(following.lsn)
        self._progress.open(following.snapshot)
        await self.resume()
        return True

    async def resume(self) -> None:
        """Submit the rest of the difference that is being polled."""
        reading = self._progress.reading
        assert reading is not None  # noqa: S101
        before, after, polled_offset = reading
        async with aclosing(self._read(Difference(before, after), polled_offset)) as portions:
            async for polled in portions:
                await self._submit(polled, self._progress.poll)
                if polled.routed is None:
                    self._progress.poll(SinkCommit(polled.upto, 0, 0, 0.0))
                while self._progress.remembered > REMEMBERED_COMMITS:
                    await self._checkpoint.finished()
        self._progress.read()

    async def catch_up(self, streamed: Xids) -> bool:
        """Submit everything up to a snapshot that sees `streamed` (full xids), while the feed buffers the stream.

        The sink is ready once the snapshot is known. False if there are too many transactions, if the session leaves
        the stream meanwhile, or if some of `streamed` stay invisible for JOIN_SECONDS.
        """
        end = self._progress.end
        if end is None:
            return True
        ends = time.monotonic() + JOIN_SECONDS
        while True:
            seen = await self._context.outbox_end.position()
            if seen.snapshot.covers(end) and seen.snapshot.sees(streamed).all():
                break
            if time.monotonic() > ends:
                return False
            await asyncio.sleep(FIRST_POLL_SECONDS)
        self._context.ready.set()
        self._progress.reach(seen.lsn)
        count = 0
        async with aclosing(self._read(Difference(end, seen.snapshot))) as portions:
            async for polled in portions:
                count += len(polled.xids)
                await self._submit(polled, self._progress.poll_beside)
                if count > JOINING_TRANSACTIONS or not self._context.feed.is_open:
                    return False
        return True

    async def _read(self, between: Difference, after: int = BEFORE_FIRST) -> AsyncGenerator[Polled]:
        """The transactions of a difference after a position in it, without those that are done or in flight."""
        portions = self._reader.read(between, after, self._progress.known)
        try:
            while (polled := await self._in_source(next, portions, None)) is not None:
                yield polled
        finally:
            # A query may still be in flight.
            self._context.connections.submit_to_source(portions.close)

    async def _submit(self, polled: Polled, begin: Callable[..., None]) -> None:
        if polled.routed is not None:
            commits, of_each = commits_of(polled.positions, polled.xids, time.monotonic())
            begin(*commits)
            await self._submission.submit(polled.routed, of_each, polled.large)


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
    """Reads the outbox as a table, for one sink. For one thread at a time; raises psycopg.Error and RelayError.

    It takes a connection of the pool `source` for single calls, and never two at once.
    """

    def __init__(self, settings: Settings, sink: str, router: BatchRouter, source: Pool) -> None:
        self._sink = sink
        self._router = router
        self._rows = OutboxRows(settings)
        self._spool_directory = settings.batch.spool_directory
        self._source = source

    def read(self, between: Difference, after: int, excluded: Xids) -> Generator[Polled]:
        """The transactions of a difference after position `after`, without `excluded` (full xids, int64, any order).

        Raises TransientFault if a standby has not replayed the difference yet.
        """
        with closing(self._plan(between, after)) as portions:
            for portion in portions:
                # Read whole, since the sink may take long, and an open query holds back vacuum.
                yield from self._portion(between, portion.shares, excluded)
                yield Polled(None, (), (), portion.upto, ())

    def _plan(self, between: Difference, after: int) -> Generator[Portion]:
        """Plan a difference; the plan of a large one is kept in a file, since its connection is for other sinks too."""
        directory = None if self._spool_directory is None else str(self._spool_directory)
        with SpooledTemporaryFile(_PLAN_BYTES, dir=directory) as plan:
            with (
                self._source.connection() as conn,
                closing(self._rows.plan(conn, between, after, whole=False)) as portions,
            ):
                for portion in portions:
                    pickle.dump(portion, plan)
            plan.seek(0)
            while True:
                try:
                    yield pickle.load(plan)  # noqa: S301 this process has just written it
                except EOFError:
                    return

    def _portion(
        self, between: Difference, shares: Collection[Share], excluded: Xids
    ) -> list[Polled]:
        def unread(share: Share) -> Mapping[int, Mask]:
            is_marked = not share.unmarked
            return everywhere(share, ~(is_marked & np.isin(share.xids, excluded)))

        polled: list[Polled] = []
        with self._source.connection() as conn:
            large = self._rows.large(conn, shares)
            for wanted in select(shares, unread):
                polled += self._rows_of(conn, between, wanted, large)
        return polled

    def _rows_of(
        self,
        conn: psycopg.Connection[Any],
        between: Difference,
        wanted: Wanted,
        large: Collection[int],
    ) -> Generator[Polled]:
        # Closed before the connection: a COPY in flight would keep it from returning to the pool.
        with closing(self._rows.commits(conn, wanted, large)) as commits:
            for transactions in commits:
                routed = self._routed(transactions)
                if routed is None:
                    continue
                keys, at = wanted.located(routed.transactions)
                positions = at.tolist()
                xids = [0] * len(positions) if wanted.unmarked else keys.tolist()
                yield Polled(routed, positions, xids, positions[0] - 1, large)

    def _routed(self, transactions: Transactions) -> Routed | None:
        return self._router.route(transactions).parts.get(self._sink)
