"""Runs a sink that this process has claimed, and decides whether it takes the stream or polls the outbox."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any, cast

import numpy as np
import psycopg

from relay.config.handlers import BatchHandler, DeliveryHandler
from relay.delivery.attempts import AttemptLog
from relay.delivery.batches import BatchDispatcher
from relay.delivery.checkpoint import STORE_SECONDS, Checkpoint, SinkContext
from relay.delivery.dispatch import Dispatcher
from relay.delivery.feed import Streamed
from relay.delivery.order import rests_of_partial_commits
from relay.delivery.outbox_end import FIRST_POLL_SECONDS
from relay.delivery.polling import SinkPolling
from relay.delivery.progress import SinkCommit, SinkProgress, commits_of
from relay.delivery.submission import Submission
from relay.faults import Undelivered, describe
from relay.model.dispositions import BLOCKED
from relay.model.snapshots import full_xids
from relay.model.transactions import Routed
from relay.pipeline.failure_limit import FailureLimit
from relay.pipeline.routing import BatchRouter
from relay.sinks import BatchSink, Sink
from relay.store.positions.sinks import ATTACHED, CAUGHT_UP, LAGGING, SinkState
from relay.store.presence import instances
from relay.waits import Backoff

log = logging.getLogger(__name__)

STREAM_SECONDS = 5.0
"""How long an attached sink waits for the stream. Whatever changes wakes it before."""


class SinkSession:
    """Runs one claimed sink in the event loop of all sinks. Blocking calls run in threads.

    A session ends itself and sets `left` when another process should have the sink: the one that reads the stream, or
    one with less to do. Raises SinkMoved, psycopg.Error, and RelayError for a fault that no retry can repair.
    """

    def __init__(
        self, context: SinkContext, sink: Sink, configured: DeliveryHandler, state: SinkState
    ) -> None:
        settings = context.settings
        self._context = context
        self._sink = sink
        self._series = state.series
        self._progress = SinkProgress(state.position, state.done, context.polls)
        most, limit = (
            settings.sinks.attach_bytes,
            FailureLimit(settings.brakes, state.streaks, gradual=True),
        )
        kept = AttemptLog(settings.attempts, configured)
        self._dispatcher = (
            BatchDispatcher(cast(BatchSink, sink), configured, most, limit, state.claim, kept)
            if isinstance(configured, BatchHandler) and configured.in_batches
            else Dispatcher(sink, configured, most, limit, state.claim, kept)
        )
        self.checkpoint = Checkpoint(context, state, self._progress, self._dispatcher)
        router = BatchRouter(settings)
        self._submission = Submission(context, router, self.checkpoint, self._dispatcher)
        self._polling = SinkPolling(
            context,
            router,
            self._progress,
            self.checkpoint,
            self._submission,
        )
        self._tasks: list[asyncio.Future[None]] = []
        self._stopping = asyncio.Event()
        self._lagging = asyncio.Event()
        self.left = False

    @property
    def state(self) -> str:
        """The state in the sink's row: attached, caught up or lagging."""
        return self.checkpoint.state

    @property
    def is_down(self) -> bool:
        """Whether the circuit breaker is open."""
        return self._dispatcher.breaker.is_open

    @property
    def deliveries(self) -> int:
        """How many deliveries are in flight or queued."""
        return self._dispatcher.count

    @property
    def since(self) -> float | None:
        """When the oldest unfinished commit was read (monotonic, seconds); None without one. Safe in any thread."""
        times = (self._progress.since, self._context.feed.oldest)
        return min((each for each in times if each is not None), default=None)

    def wake(self) -> None:
        """Wake the session: the feed or the claim has changed."""
        self._context.woken.set()

    def stop(self) -> None:
        """End once the deliveries in flight have ended."""
        self._stopping.set()
        self.wake()

    async def run(self, timeout: float) -> None:
        """Run until `stop`, or until the session leaves the sink; deliveries in flight then have `timeout` s to end."""
        try:
            self._sink.resume(self._series)
        except Exception as error:
            # No event is to blame; the sink is interrupted until it can be resumed.
            raise Undelivered(f"the sink cannot be resumed: {describe(error)}") from error
        if self.checkpoint.paused:
            self._dispatcher.pause()
        self._tasks = [
            asyncio.ensure_future(self._advance()),
            asyncio.ensure_future(self._submission.retry()),
            asyncio.ensure_future(self.checkpoint.complete()),
            asyncio.ensure_future(self.checkpoint.keep()),
            asyncio.ensure_future(self._watch()),
        ]
        tasks: list[asyncio.Future[Any]] = [
            *self._tasks,
            asyncio.ensure_future(self._stopping.wait()),
            self._dispatcher.failure,
        ]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            try:
                for task in ended:
                    task.result()
            except psycopg.Error:
                # If only the source is unreachable, deliveries in flight can still be stored.
                if not (self._context.connections.target_failed or self.checkpoint.has_failed):
                    await self._finish(timeout)
                raise
            await self._finish(timeout)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._dispatcher.close()

    async def _finish(self, timeout: float) -> None:
        # A cancelled task must not interrupt a store.
        async with self.checkpoint.storing:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._dispatcher.pause()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._dispatcher.wait_idle()
        self._dispatcher.defer_early()
        # Only what is stored says which commits are begun.
        await self.checkpoint.flush()
        self._defer_partial_commits()
        await self.checkpoint.store()

    def _defer_partial_commits(self) -> None:
        """Defer the rest of each commit of which some deliveries are done, and what precedes it with its keys."""
        for delivery in rests_of_partial_commits(self._dispatcher.pending):
            self._dispatcher.end(delivery, BLOCKED)

    async def _wait(self, seconds: float) -> None:
        """Wait until `wake`, for `seconds` at most."""
        # In Python 3.11 wait_for swallows a cancellation that comes together with the result.
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._context.woken.wait()
        self._context.woken.clear()

    # Where events come from

    async def _advance(self) -> None:
        """Take the stream while the sink is attached, otherwise poll, until the session leaves the sink."""
        context = self._context
        waits = Backoff(FIRST_POLL_SECONDS, context.settings.poll.wait_period_ms / 1000)
        while not self.left:
            if self.checkpoint.paused and context.polls:
                context.ready.set()
                await self._wait(STORE_SECONDS)
            elif self._attached:
                await self._take()
            elif context.polls and self._progress.reading is not None:
                await context.outbox_end.require_history()
                await self._polling.resume()
            elif await self._join() or (context.polls and await self._polling.poll()):
                waits.reset()
            elif not (context.stream.reads or self._progress.since):
                self.checkpoint.state = CAUGHT_UP
                self._leave()
            else:
                await self._wait(_together(waits.take()))

    @property
    def _attached(self) -> bool:
        return self.checkpoint.state == ATTACHED

    async def _take(self) -> None:
        """Submit the next commits of the feed; leave the sink if this process no longer reads the stream."""
        streamed = self._context.feed.take()
        if streamed is not None:
            routed, commits = self._new_in(streamed)
            await self._submission.submit(routed, commits)
        elif self._context.stream.reads:
            await self._wait(STREAM_SECONDS)
        else:
            self._leave()

    async def _lag(self) -> None:
        """Stop holding back WAL: defer deliveries, or leave the stream."""
        if not self._context.polls:
            self._dispatcher.defer_new(True)
        elif self._attached:
            await self._detach()
        else:
            # The sink is joining the stream.
            self._leave_stream()

    async def _detach(self) -> None:
        """Leave the stream and poll. Submitted deliveries continue; commits that are still in the feed are polled."""
        self.checkpoint.state = LAGGING
        feed = self._context.feed
        has_more = feed.overflowed or feed.oldest is not None
        self._leave_stream()
        await self.checkpoint.store()
        # It may wait for the stream.
        self.wake()
        log.info("a sink lags, and polls", extra={"handler": self._context.name})
        is_down = self.checkpoint.paused or self._dispatcher.breaker.is_open
        if has_more and not is_down and await self._has_others():
            self._leave()

    def _leave(self) -> None:
        self.left = True
        self.stop()

    async def _has_others(self) -> bool:
        """Whether other instances of the group run, which may have less to do."""
        running = await self._context.connections.in_target(instances, self._context.group)
        return len(running) > 1

    def _leave_stream(self) -> None:
        self._context.feed.close()
        self._context.hold.leave()
        self._context.stream.confirm()

    async def _join(self) -> bool:
        """Attach to the stream; False if that is not possible now.

        First the feed buffers the stream. Then the sink polls up to a snapshot that sees everything streamed before,
        and remembers the transactions. From the feed it delivers those that it does not remember, whether the snapshot
        sees them or not: their rows may have been deleted before they were polled.
        """
        async with self.checkpoint.storing:
            # Waits for a store in flight: while none succeeds, the sink would hold back WAL again.
            pass
        end = self._progress.end
        # It would leave the stream again at once while a commit is old. Before its first snapshot its progress is a
        # position in a difference, which cannot be compared with the stream.
        may_join = not (
            self.checkpoint.is_old(self._progress.since) or (end is not None and end.is_beginning)
        )
        context = self._context
        join_point = context.stream.join(context.feed, context.hold) if may_join else None
        if join_point is None:
            context.ready.set()
            return False
        self._progress.join(join_point.lsn)
        try:
            caught_up = not context.polls or await self._polling.catch_up(join_point.streamed)
            if caught_up and context.feed.is_open:
                self.checkpoint.attach()
                log.info("a sink is attached to the stream", extra={"handler": context.name})
        finally:
            context.ready.set()
            if not self._attached:
                self._leave_stream()
        return self._attached

    def _new_in(self, streamed: Streamed) -> tuple[Routed, list[SinkCommit]]:
        """The transactions of a batch of the stream that are new to the sink, with the commit of each."""
        routed = streamed.routed
        facts = routed.transactions.facts
        xids = full_xids(facts["xid"], streamed.next_xid)
        new = self._progress.is_new(facts["end_lsn"], xids)
        if not new.all():
            indices = np.flatnonzero(new)
            routed = Routed(routed.transactions.take(indices), routed.decoder)
            xids = xids[indices]
        ends = routed.transactions.facts["end_lsn"].tolist()
        commits, of_each = commits_of(ends, xids.tolist(), streamed.since)
        # The last one notes the end of the batch, even if nothing in it is new.
        end = SinkCommit(int(facts["end_lsn"][-1]), 0, 0, streamed.since)
        self._progress.stream(*commits, end)
        return routed, of_each

    def check(self) -> None:
        """Let the sink leave the stream if it lags."""
        if self._context.feed.is_open and self.checkpoint.lags:
            self._lagging.set()

    async def _watch(self) -> None:
        """Leave the stream when the sink lags, even while nothing can be stored; runs until it is cancelled."""
        while True:
            await self._lagging.wait()
            self._lagging.clear()
            await self._lag()


def _together(seconds: float) -> float:
    """The seconds until the next multiple of them, so that sinks that poll equally often share their queries."""
    return seconds - time.monotonic() % seconds
