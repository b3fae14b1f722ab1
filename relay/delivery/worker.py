"""Runs one sink: claims it, works it, and retries after an outage of a database."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event

from relay.config.handlers import DeliveryHandler
from relay.config.settings import Settings
from relay.delivery.checkpoint import Checkpoint, SinkContext
from relay.delivery.feed import Feed, Stream, WalHold
from relay.delivery.loop import SinkLoop
from relay.delivery.session import SinkSession
from relay.faults import RelayError, TaskFault, describe, is_transient
from relay.pipeline.listeners import Meter
from relay.runtime.parts import Condition, Heartbeat
from relay.runtime.retry import FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS
from relay.sinks import Sink
from relay.source.server import SourcePosition
from relay.store.positions import sinks
from relay.store.positions.sinks import SinkMoved, SinkState

log = logging.getLogger(__name__)

SETTLED_SECONDS = 10.0
"""A sink that was interrupted goes on once a session has lasted longer than a failing one does."""
CLAIM_SECONDS = 2
"""How often a worker tries to claim a sink that another process works: all workers at the same time, in one query."""


class SinkWorker:
    """Works a sink in the event loop of all sinks, until `stop`.

    A fault that no retry can repair is `error`; `failed` is called then.
    """

    def __init__(
        self,
        name: str,
        sink: Sink,
        configured: DeliveryHandler,
        settings: Settings,
        stream: Stream,
        failed: Callable[[], None],
        meter: Meter,
        loop: SinkLoop,
    ) -> None:
        self.condition = Condition(
            f"sink {name}",
            log,
            "a sink is interrupted",
            "a sink goes on",
            first_pause=FIRST_WAIT_SECONDS,
            longest_pause=LONGEST_WAIT_SECONDS,
        )
        self.name = name
        self._meter = meter
        self._polls = settings.source.mode != "wal"
        self._loop = loop
        self.feed = Feed(settings.sinks.attach_bytes if self._polls else None, self._wake_soon)
        self.hold = WalHold(self._polls)
        self.ready = Event()
        self.error: RelayError | None = None
        self._failed = failed
        self._sink = sink
        self._configured = configured
        self._settings = settings
        self._stream = stream
        self._stopping = Event()
        self._has_ended = False
        self._is_elsewhere = False
        self._session: SinkSession | None = None
        self._began: float | None = None
        self._called: asyncio.Event | None = None

    # Safe in any thread

    def stop(self) -> None:
        """End once the deliveries in flight have ended. Safe in a signal handler's thread."""
        self._stopping.set()
        self._loop.call(self._stop)

    def claim(self) -> None:
        """Try to claim the sink now; `ready` is set again once that has succeeded or failed."""
        if self._session is None and self.is_alive:
            self.ready.clear()
        self._loop.call(self._call)

    def adopt(self, seen: SourcePosition) -> None:
        """Adopt a position of the source: the stream has brought everything up to it."""
        self._loop.call(self._adopt, seen)

    def _wake_soon(self) -> None:
        self._loop.wake(self)

    @property
    def is_alive(self) -> bool:
        """Whether the sink is worked, or tried to be."""
        return self._loop.is_alive and not self._has_ended

    @property
    def heartbeat(self) -> Heartbeat:
        """The heartbeat of the thread, which all sinks have in common."""
        return self._loop.heartbeat

    @property
    def session(self) -> SinkSession | None:
        """The session while this process works the sink; otherwise None."""
        return self._session

    # In the event loop

    @property
    def checkpoint(self) -> Checkpoint | None:
        """What is to be stored of the sink while this process works it; otherwise None."""
        session = self._session
        return None if session is None else session.checkpoint

    def wake(self) -> None:
        """Continue: the feed has changed."""
        if self._session is not None:
            self._session.wake()

    def _call(self) -> None:
        if self._called is not None:
            self._called.set()
        self.wake()

    def _adopt(self, seen: SourcePosition) -> None:
        if self._session is not None:
            self._session.checkpoint.adopt(seen)

    def _stop(self) -> None:
        self._call()
        if self._session is not None:
            self._session.stop()

    async def run(self) -> None:
        """Work the sink until `stop`, or until a fault that no retry can repair."""
        try:
            await self._main()
        except Exception as error:
            self.end(TaskFault.of(error).as_error())
        finally:
            self._has_ended = True
            # Whoever waits for the sink to join the stream finds the error.
            self.ready.set()

    def end(self, error: RelayError) -> None:
        """Note that the sink ends because of a fault."""
        self._has_ended = True
        if self.error is None:
            self.error = error
            self._failed()
        self.ready.set()

    def check(self) -> None:
        """Let the sink leave the stream if it lags, and release WAL that nobody takes."""
        if self._session is not None:
            self._session.check()
        self._release_unattended()
        if self._began is not None and time.monotonic() - self._began > SETTLED_SECONDS:
            self.condition.works()

    def _release_unattended(self) -> None:
        """Release the WAL of a sink that lags and cannot store that, or that another process does not give up."""
        if self._stopping.is_set() or not self._stream.reads:
            return
        is_stuck = self._session is not None or self._is_elsewhere
        if is_stuck and self.hold.expire(self._settings.sinks.attach_seconds):
            self._stream.confirm()

    async def _main(self) -> None:
        self._called = asyncio.Event()
        try:
            while not self._stopping.is_set():
                try:
                    if not await self._work():
                        self.ready.set()
                        await self._pause_between_claims()
                    self.condition.works()
                except Exception as error:
                    if not is_transient(error):
                        raise
                    self._require_polling(describe(error))
                    self.ready.set()
                    self.condition.fails(describe(error), handler=self.name)
                    await self._pause(self.condition.pause)
        finally:
            try:
                await self._sink.close()
            except Exception as error:
                # All that matters is stored.
                log.warning(
                    "a sink has failed to close its connections",
                    extra={"handler": self.name, "fault": describe(error)},
                )

    def _require_polling(self, why: str) -> None:
        """Raise RelayError in mode wal: only the slot has the events in flight, and only a restart gets them."""
        if not self._polls:
            raise RelayError(
                f"handlers.{self.name}: interrupted ({why}), and with source.mode: wal only the slot can send the "
                "events in flight again: restart relay"
            )

    async def _pause_between_claims(self) -> None:
        """Wait until all workers try again. After this one has left its sink, another process tries before it."""
        now = time.monotonic()
        turns = CLAIM_SECONDS if self._is_elsewhere else CLAIM_SECONDS + 1
        await self._pause(math.floor(now) + turns - now)

    async def _pause(self, seconds: float) -> None:
        """Wait until `claim` or `stop`, at most `seconds`."""
        assert self._called is not None  # noqa: S101
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._called.wait()
        self._called.clear()

    async def _load(self) -> SinkState | None:
        """Claim the sink or load it again; None if another process works it.

        A new sink starts where its configuration says. Raises RelayError and psycopg.Error.
        """
        state = await self._loop.claim(self.name, self._configured.start)
        self._is_elsewhere = state is None
        if state is None:
            return None
        if not self._polls:
            why = sinks.why_not_wal(self.name, state.position, state.needs_outbox)
            if why is not None:
                raise RelayError(why)
            if self.hold.lacks(state.position.applied_lsn):
                self._require_polling("another process read the slot meanwhile")
        self.hold.load(state.position.applied_lsn, state.attached)
        return state

    async def _work(self) -> bool:
        """Claim the sink and work it until `stop`; False if another process has it or should have it."""
        settings = self._settings
        try:
            while not self._stopping.is_set():
                state = await self._load()
                if self._stopping.is_set():
                    # Meanwhile, when there was no session to be stopped.
                    break
                if state is None or not (self._stream.reads or state.lags):
                    return False
                if not self._polls and state.left_out_since is not None:
                    log.warning(
                        "a sink is configured again: nothing was kept for it meanwhile",
                        extra={"handler": self.name, "since": str(state.left_out_since)},
                    )
                context = SinkContext(
                    self.name,
                    settings,
                    self._stream,
                    self.feed,
                    self.hold,
                    self.ready,
                    self._loop.connections.of_sink(),
                    self._loop.connections.outbox_end,
                    self._meter,
                )
                self._session = SinkSession(context, self._sink, self._configured, state)
                self._began = time.monotonic()
                try:
                    await self._session.run(settings.shutdown_timeout / 2)
                    if self._session.left:
                        return False
                except SinkMoved:
                    self._require_polling("it was moved")
                    sinks.log_move(self.name)
                finally:
                    self._session = self._began = None
                    self.feed.close()
                    self.hold.leave()
                    self._stream.confirm()
        finally:
            await self._loop.release(self.name)
        return True
