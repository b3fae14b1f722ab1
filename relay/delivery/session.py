"""A sink while one process works it: takes its events from the stream or polls the log, and stores how far it is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import aclosing, suppress
from dataclasses import dataclass
from itertools import groupby, repeat
from typing import Any, Protocol, TypeVar

import numpy as np
import psycopg

from relay.config.handlers import DeliveryHandler
from relay.config.settings import Settings
from relay.delivery.checkpoint import STORE_SECONDS, Checkpoint
from relay.delivery.dispatch import Dispatcher
from relay.delivery.feed import Feed, Streamed
from relay.delivery.log_reader import LogReader, Polled
from relay.delivery.progress import SinkCommit, SinkProgress
from relay.delivery.queues import Delivery
from relay.delivery.submission import Submission
from relay.handlers import Sink
from relay.meter import Meter
from relay.model.dispositions import Blocked
from relay.model.events import Lsn
from relay.model.snapshots import Xids, full_xids
from relay.model.transactions import Routed
from relay.pipeline.brake import Brake
from relay.pipeline.routing import BatchRouter
from relay.source.differences import Difference
from relay.source.server import SourcePosition
from relay.store.presence import instances
from relay.store.sinks import ATTACHED, BEFORE_FIRST, CAUGHT_UP, LAGGING, Claim, SinkState
from relay.threads import pool

log = logging.getLogger(__name__)

Done = TypeVar("Done")

CHECK_SECONDS = 0.2
"""How often it is looked whether the sink lags."""
JOIN_SECONDS = 5.0
"""How long a sink that joins the stream waits for commits that were streamed and are not visible yet."""
JOINING_TRANSACTIONS = 10_000
"""How many transactions are polled at most while the stream is buffered: all of them are remembered."""
REMEMBERED_COMMITS = 50_000
"""How many commits are polled at most beyond one that is not done."""
FIRST_POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class JoinPoint:
    """Where the stream begins to be buffered: after the position `lsn`, when `streamed` (full xids) had come."""

    lsn: Lsn
    streamed: Xids


class Stream(Protocol):
    """The stream, as a sink's worker sees it. Safe in any thread."""

    def join(self, feed: Feed) -> JoinPoint | None:
        """Open the feed from now on; None if this process does not read the stream now."""

    def confirm(self) -> None:
        """A feed holds back less WAL than before."""

    @property
    def reads(self) -> bool:
        """Whether this process reads the source, so that it works the sinks that do not lag."""

    @property
    def is_stalled(self) -> bool:
        """Whether the stream does not go on, since the target does not take what it has brought."""


class SinkSession:
    """One sink, claimed. Everything runs in one event loop; what blocks runs in two threads, one for each database.

    `left` says that another process is to have it: one that reads the stream, or one that has less to do. Raises Moved,
    psycopg.Error, and RelayError for what no retry mends.
    """

    def __init__(
        self,
        name: str,
        sink: Sink,
        configured: DeliveryHandler,
        settings: Settings,
        stream: Stream,
        feed: Feed,
        claim: Claim,
        state: SinkState,
        ready: Callable[[], None],
        meter: Meter,
    ) -> None:
        """`ready` is called once it is clear whether the stream is buffered from where it is now."""
        self._name = name
        self._settings = settings
        self._stream = stream
        self._feed = feed
        self._claim = claim
        self._paused = state.paused
        self._polls = settings.source.mode != "wal"
        self._progress = SinkProgress(state.position, state.done, self._polls)
        self._router = BatchRouter(settings)
        self._reader = LogReader(settings, name, self._router)
        brake = Brake(settings.brakes, state.streaks)
        self._checkpoint = Checkpoint(
            name,
            settings,
            claim,
            state,
            self._progress,
            brake,
            feed,
            self._in_target,
            lambda: self._dispatcher.fault,
            self._stored,
            meter,
        )
        self._dispatcher: Dispatcher = Dispatcher(
            sink,
            configured,
            settings.sinks.attach_bytes,
            brake,
            self._checkpoint.complete,
            self._fail,
        )
        self._submission = Submission(
            name,
            settings,
            self._router,
            claim,
            self._checkpoint,
            self._dispatcher,
            self._in_target,
            self._released,
        )
        self._tasks: list[asyncio.Future[None]] = []
        self._ready = ready
        self.left = False
        self._stopping = asyncio.Event()
        self._woken = asyncio.Event()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._target: Executor = pool(1, f"{name} target")
        self._source: Executor = pool(1, f"{name} source")

    @property
    def state(self) -> str:
        """What the sink does: see `relay.delivery.checkpoint`."""
        return self._checkpoint.state

    @property
    def is_down(self) -> bool:
        """Whether the circuit breaker is open."""
        return self._dispatcher.breaker.is_open

    @property
    def deliveries(self) -> int:
        """How many deliveries are under way or wait for their turn."""
        return self._dispatcher.count

    @property
    def since(self) -> float | None:
        """When the oldest of what is not done came (monotonic clock, seconds). Safe in any thread."""
        times = (self._progress.since, self._feed.oldest)
        return min((each for each in times if each is not None), default=None)

    def wake(self) -> None:
        """There is something to take, or to look at."""
        self._woken.set()

    def stop(self) -> None:
        """End after what is under way."""
        self._stopping.set()
        self.wake()

    def adopt(self, seen: SourcePosition) -> None:
        """The stream has brought everything that a sight shows, and nothing of it is under way."""
        self._checkpoint.adopt(seen)

    async def run(self, timeout: float) -> None:
        """Work until `stop`, or until the sink is left; then what is under way has so many seconds to end."""
        if self._paused:
            self._dispatcher.pause()
        self._tasks = [
            asyncio.ensure_future(self._advance()),
            asyncio.ensure_future(self._submission.retry()),
            asyncio.ensure_future(self._checkpoint.keep()),
            asyncio.ensure_future(self._watch()),
        ]
        tasks: list[asyncio.Future[Any]] = [
            *self._tasks,
            asyncio.ensure_future(self._stopping.wait()),
            self._ended,
        ]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            try:
                for task in ended:
                    task.result()
            except psycopg.Error:
                # Where only the source is away, what is under way can still be stored.
                if not self._claim.conn.closed:
                    await self._finish(timeout)
                raise
            await self._finish(timeout)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._dispatcher.close()
            self._source.submit(self._reader.close)
            self._source.shutdown(wait=False)
            self._target.shutdown(wait=False)

    async def _finish(self, timeout: float) -> None:
        # What is being stored is stored whole.
        async with self._checkpoint.storing:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._dispatcher.pause()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._dispatcher.wait_idle()
        self._defer_partial_commits()
        await self._checkpoint.store()

    def _defer_partial_commits(self) -> None:
        """Defer what is left of commits of which something is delivered: their position says all or nothing."""
        rests: dict[SinkCommit, list[Delivery]] = defaultdict(list)
        for delivery in self._dispatcher.pending:
            if delivery.commit is not None and delivery.commit.is_begun:
                rests[delivery.commit].append(delivery)
        for commit, rest in rests.items():
            # Of a very large one not all is in memory.
            if len(rest) == commit.deliveries:
                for delivery in rest:
                    self._checkpoint.record(delivery, Blocked())

    def _fail(self, error: BaseException) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)

    async def _in_target(self, call: Callable[..., Done], *arguments: object) -> Done:
        return await asyncio.get_running_loop().run_in_executor(self._target, call, *arguments)

    async def _in_source(self, call: Callable[..., Done], *arguments: object) -> Done:
        return await asyncio.get_running_loop().run_in_executor(self._source, call, *arguments)

    async def _wait(self, seconds: float) -> None:
        """Wait until somebody wakes the session, at most for so long."""
        # In Python 3.11 wait_for swallows a cancellation that comes together with what it waits for.
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        self._woken.clear()

    # Where events come from

    async def _advance(self) -> None:
        """Take what the stream brings while the sink is attached, otherwise poll, until the sink is left."""
        wait = FIRST_POLL_SECONDS
        while not self.left:
            self._dispatcher.yield_to_others(self._stream.reads and not self._attached)
            if self._paused and self._polls:
                self._ready()
                await self._wait(STORE_SECONDS)
            elif self._attached:
                await self._take()
            elif self._polls and self._progress.reading is not None:
                await self._read()
            elif await self._join() or await self._poll():
                wait = FIRST_POLL_SECONDS
            elif not (self._stream.reads or self._progress.since):
                self._checkpoint.state = CAUGHT_UP
                self._leave()
            else:
                await self._wait(wait)
                wait = min(wait * 2, self._settings.poll.wait_period_ms / 1000)

    @property
    def _attached(self) -> bool:
        return self._checkpoint.state == ATTACHED

    async def _take(self) -> None:
        """Submit what the stream has brought; leave the sink if this process does not read it any more."""
        taken = self._feed.take()
        if taken is not None:
            routed, commits = self._of_stream(taken)
            await self._submission.submit(routed, commits)
        elif self._stream.reads:
            await self._wait(CHECK_SECONDS)
        else:
            self._leave()

    @property
    def _lags(self) -> bool:
        if self._feed.overflowed or self._paused or self._stream.is_stalled:
            return True
        if self._feed.lower_bound is not None and self._is_old(
            self._checkpoint.at + 2 * STORE_SECONDS
        ):
            # Delivered or not: what is not stored as done would be delivered again from there.
            return True
        return self._is_old(self._progress.since or self._feed.oldest)

    def _is_old(self, since: float | None) -> bool:
        """Whether it is so long ago that the stream does not wait for it."""
        return since is not None and time.monotonic() - since > self._settings.sinks.attach_seconds

    async def _lag(self) -> None:
        """Let the WAL go that the sink holds back."""
        if not self._polls:
            self._dispatcher.spill(True)
        elif self._attached:
            await self._detach()
        else:
            # It was about to join the stream.
            self._leave_stream()

    async def _detach(self) -> None:
        """Leave the stream: what it has brought is ended, the rest is polled."""
        self._checkpoint.state = LAGGING
        has_more = self._feed.overflowed or self._feed.oldest is not None
        self._leave_stream()
        await self._checkpoint.store()
        log.info("a sink lags, and polls", extra={"handler": self._name})
        is_down = self._paused or self._dispatcher.breaker.is_open
        if has_more and not is_down and await self._has_others():
            self._leave()

    def _leave(self) -> None:
        self.left = True
        self.stop()

    async def _has_others(self) -> bool:
        """Whether other instances of the group run, which may have less to do."""
        found = await self._in_target(instances, self._claim.conn, self._settings.group)
        return len(found) > 1

    def _leave_stream(self) -> None:
        self._feed.close()
        self._stream.confirm()

    async def _join(self) -> bool:
        """Attach to the stream; False if that is not possible now.

        The stream is buffered first. Then everything is polled that a snapshot sees which sees all that was streamed
        before. What is polled is remembered, and what the stream brings besides is delivered, seen or not: its rows may
        have been deleted.
        """
        async with self._checkpoint.storing:
            # Where nothing can be stored, the WAL would be held back again.
            pass
        end = self._progress.end
        # Of rows from before there was c_xid only the position in a difference tells what is done.
        may_join = not (
            self._is_old(self._progress.since) or (end is not None and end.is_beginning)
        )
        junction = self._stream.join(self._feed) if may_join else None
        if junction is None:
            self._ready()
            return False
        self._progress.join(junction.lsn)
        try:
            if await self._catch_up(junction.streamed) and self._feed.is_open:
                self._checkpoint.attach()
                log.info("a sink is attached to the stream", extra={"handler": self._name})
        finally:
            self._ready()
            if not self._attached:
                self._leave_stream()
        return self._attached

    async def _catch_up(self, streamed: Xids) -> bool:
        """Submit what lies before the stream; False if that is too much, or some transactions stay invisible."""
        end = self._progress.end
        if end is None or not self._polls:
            return True
        ends = time.monotonic() + JOIN_SECONDS
        while True:
            seen = await self._in_source(self._reader.current_position)
            if seen.snapshot.covers(end) and seen.snapshot.sees(streamed).all():
                break
            if time.monotonic() > ends:
                return False
            await asyncio.sleep(FIRST_POLL_SECONDS)
        self._ready()
        self._progress.reach(seen.lsn)
        count = 0
        async with aclosing(self._find(Difference(end, seen.snapshot))) as found:
            async for polled in found:
                count += len(polled.xids)
                await self._submit_polled(polled, self._progress.poll_beside)
                if count > JOINING_TRANSACTIONS or not self._feed.is_open:
                    # There may be more, or the stream has brought too much meanwhile.
                    return False
        return True

    async def _poll(self) -> bool:
        """Submit one difference, if there is one; returns whether there was."""
        end = self._progress.end
        if end is None or not self._polls:
            return False
        following = await self._in_source(self._reader.following, end)
        if following is None:
            return False
        self._progress.reach(following.lsn)
        self._progress.open(following.snapshot)
        await self._read()
        return True

    async def _read(self) -> None:
        """Submit what is left of the difference that is being polled."""
        reading = self._progress.reading
        assert reading is not None  # noqa: S101
        before, after, polled_offset = reading
        async with aclosing(self._find(Difference(before, after), polled_offset)) as found:
            async for polled in found:
                await self._submit_polled(polled, self._progress.poll)
                if polled.routed is None:
                    self._progress.poll(SinkCommit(polled.upto, 0, 0, 0.0))
                while self._progress.remembered > REMEMBERED_COMMITS:
                    await self._checkpoint.finished()
        self._progress.read()

    async def _find(self, between: Difference, after: int = BEFORE_FIRST) -> AsyncGenerator[Polled]:
        """What a difference has after a position in it, but what is done or under way."""
        found = self._reader.read(between, after, self._progress.known)
        try:
            while (polled := await self._in_source(next, found, None)) is not None:
                yield polled
        finally:
            self._source.submit(found.close)

    async def _submit_polled(self, polled: Polled, begin: Callable[[SinkCommit], None]) -> None:
        if polled.routed is not None:
            commits = _commits(polled.positions, polled.xids, time.monotonic(), begin)
            await self._submission.submit(polled.routed, list(commits), polled.large)

    def _of_stream(self, taken: Streamed) -> tuple[Routed, list[SinkCommit]]:
        """The transactions that are new, with the commit of each."""
        routed = taken.routed
        facts = routed.transactions.facts
        xids = full_xids(facts["xid"], taken.next_xid)
        new = self._progress.is_new(facts["end_lsn"], xids)
        if not new.all():
            chosen = np.flatnonzero(new)
            routed = Routed(routed.transactions.take(chosen), routed.decoder)
            xids = xids[chosen]
        ends = routed.transactions.facts["end_lsn"].tolist()
        commits = list(_commits(ends, xids.tolist(), taken.since, self._progress.stream))
        # Also where nothing of it was new.
        self._progress.stream(SinkCommit(int(facts["end_lsn"][-1]), 0, 0, taken.since))
        return routed, commits

    async def _watch(self) -> None:
        """Leave the stream if the sink lags, even if nothing can be stored now; never ends by itself."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            if self._feed.is_open and self._lags:
                await self._lag()

    def _released(self) -> None:
        """No key is held any more: what comes need not be deferred."""
        if not self._lags:
            self._dispatcher.spill(False)

    def _stored(self, paused: bool) -> None:
        """Progress is stored, and an operator wants the sink to be paused, or not."""
        self._stream.confirm()
        if paused == self._paused:
            return
        self._paused = paused
        if paused:
            self._dispatcher.pause()
        else:
            self._dispatcher.resume()
        log.info(
            "a sink is paused" if paused else "a sink is resumed", extra={"handler": self._name}
        )
        self.wake()


def _commits(
    positions: Sequence[int], xids: Sequence[int], since: float, add: Callable[[SinkCommit], None]
) -> Iterator[SinkCommit]:
    """The commit of each transaction; those that follow each other with one position are of one commit."""
    for (position, xid), alike in groupby(zip(positions, xids, strict=True)):
        count = sum(1 for _ in alike)
        commit = SinkCommit(position, xid, count, since)
        add(commit)
        yield from repeat(commit, count)
