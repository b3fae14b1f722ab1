"""Polls the outbox for a sink: submits the transactions of one difference after the other, in order."""

from __future__ import annotations

import time
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, closing
from dataclasses import dataclass

from relay.config.settings import Settings
from relay.delivery.checkpoint import Checkpoint, SinkContext
from relay.delivery.progress import SinkCommit, SinkProgress, commits_of
from relay.delivery.submission import Submission
from relay.model.batch import Share
from relay.model.snapshots import Xids
from relay.model.transactions import Mask, Routed
from relay.pipeline.routing import BatchRouter
from relay.source.outbox.cursor import Cursor
from relay.source.outbox.differences import Difference
from relay.source.outbox.selection import Unread, everywhere
from relay.store.connections import Pool
from relay.store.positions.sinks import BEFORE_FIRST

JOINING_TRANSACTIONS = 10_000
"""How many transactions are polled at most while a sink joins the stream: all of them are remembered."""
REMEMBERED_COMMITS = 50_000
"""How many commits are polled at most after one that is not done."""


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
        the stream meanwhile, or if some of `streamed` stay invisible.
        """
        end = self._progress.end
        if end is None:
            return True
        seen = await self._context.outbox_end.position(end, streamed)
        if seen is None:
            return False
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
        self._cursor = Cursor(settings, source.connection)

    def read(self, between: Difference, after: int, excluded: Xids) -> Generator[Polled]:
        """The transactions of a difference after position `after`, without `excluded` (full xids, int64, any order).

        Raises TransientFault if a standby has not replayed the difference yet.
        """

        def unread(share: Share) -> Mapping[int, Mask]:
            return everywhere(share, ~share.among(excluded))

        # The connection is for other sinks too.
        with closing(self._cursor.kept_plan(between, after)) as portions:
            for portion in portions:
                # Read whole, since the sink may take long, and an open query holds back vacuum.
                yield from list(self._polled(portion.shares, unread))
                yield Polled(None, (), (), portion.upto, ())

    def _polled(self, shares: Collection[Share], unread: Unread) -> Iterator[Polled]:
        large = self._cursor.large(shares)
        for transactions, wanted in self._cursor.read(shares, unread, large):
            routed = self._router.route(transactions).parts.get(self._sink)
            if routed is None:
                continue
            xids, at = wanted.located(routed.transactions)
            positions = at.tolist()
            yield Polled(routed, positions, xids.tolist(), positions[0] - 1, large)
