"""Polls the outbox for a sink: submits the transactions of one difference after the other, in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from contextlib import aclosing
from typing import TypeVar

from relay.delivery.checkpoint import Checkpoint, SinkContext
from relay.delivery.log_reader import LogReader, Polled
from relay.delivery.progress import SinkCommit, SinkProgress, commits_of
from relay.delivery.submission import Submission
from relay.model.snapshots import Xids
from relay.runtime.threads import pool
from relay.source.outbox.differences import Difference
from relay.store.positions.sinks import BEFORE_FIRST

Done = TypeVar("Done")

JOIN_SECONDS = 5.0
"""How long a sink that joins the stream waits for commits that were streamed and are not visible yet."""
JOINING_TRANSACTIONS = 10_000
"""How many transactions are polled at most while a sink joins the stream: all of them are remembered."""
REMEMBERED_COMMITS = 50_000
"""How many commits are polled at most after one that is not done."""
FIRST_POLL_SECONDS = 0.01
"""The first wait between two polls that find nothing; it doubles up to `poll.wait_period_ms`."""


class SinkPolling:
    """Polls the outbox in a thread of its own and submits new transactions. For one event loop.

    Raises psycopg.Error and RelayError.
    """

    def __init__(
        self,
        context: SinkContext,
        reader: LogReader,
        progress: SinkProgress,
        checkpoint: Checkpoint,
        submission: Submission,
    ) -> None:
        self._context = context
        self._reader = reader
        self._progress = progress
        self._checkpoint = checkpoint
        self._submission = submission
        self._source: Executor = pool(1, f"{context.name} source")

    def close(self) -> None:
        """Close the connections to the source as soon as the query in flight has ended, without waiting for it."""
        self._source.submit(self._reader.close)
        self._source.shutdown(wait=False)

    async def poll(self) -> bool:
        """Submit the next difference; False if the outbox has no new rows, or the sink has no snapshot to start at."""
        end = self._progress.end
        if end is None:
            return False
        following = await self._in_source(self._reader.following, end)
        if following is None:
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
            seen = await self._in_source(self._reader.current_position)
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
            self._source.submit(portions.close)

    async def _submit(self, polled: Polled, begin: Callable[[SinkCommit], None]) -> None:
        if polled.routed is not None:
            commits = commits_of(polled.positions, polled.xids, time.monotonic(), begin)
            await self._submission.submit(polled.routed, list(commits), polled.large)

    async def _in_source(self, call: Callable[..., Done], *arguments: object) -> Done:
        return await asyncio.get_running_loop().run_in_executor(self._source, call, *arguments)
