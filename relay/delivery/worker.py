"""Runs one sink in a thread: claims it, works it, and retries after an outage of a database."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event

from relay.config.handlers import DeliveryHandler
from relay.config.settings import Settings
from relay.delivery.checkpoint import SinkContext
from relay.delivery.feed import Feed, Stream, WalHold
from relay.delivery.session import SinkSession
from relay.faults import RelayError, TaskFault, describe, is_transient
from relay.pipeline.listeners import Meter
from relay.runtime.parts import Condition, Due, Recurring
from relay.runtime.retry import FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS
from relay.runtime.threads import pool
from relay.sinks import Sink
from relay.source.server import SourcePosition
from relay.store.positions import sinks
from relay.store.positions.sinks import Claim, SinkMoved, SinkState

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
"""How often the event loop updates the heartbeat."""
SETTLED_SECONDS = 10.0
"""A sink that was interrupted goes on once a session has lasted longer than a failing one does."""
CLAIM_SECONDS = 1.0
"""How often a worker tries to claim a sink that another process works."""


class Worker(Recurring):
    """Works a sink from `start` to `close`, in an event loop that lasts as long: connections of the sink belong to it.

    Every fault that no retry can repair is `error`.
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
    ) -> None:
        super().__init__(
            Condition(
                f"sink {name}",
                log,
                "a sink is interrupted",
                "a sink goes on",
                first_pause=FIRST_WAIT_SECONDS,
                longest_pause=LONGEST_WAIT_SECONDS,
            ),
            failed,
        )
        self.name = name
        self._meter = meter
        self._polls = settings.source.mode != "wal"
        self.feed = Feed(settings.sinks.attach_bytes if self._polls else None, self._wake)
        self.hold = WalHold(self._polls)
        self.ready = Event()
        self._claim = Claim(settings.target_dsn, settings.group, name)
        self._sink = sink
        self._configured = configured
        self._settings = settings
        self._stream = stream
        self._is_elsewhere = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: SinkSession | None = None
        self._began: float | None = None
        self._called: asyncio.Event | None = None

    def stop(self) -> None:
        """End once the deliveries in flight have ended. Safe in a signal handler's thread."""
        self.stopping.set()
        self._call_in_loop(self._stop)

    def claim(self) -> None:
        """Try to claim the sink now; `ready` is set again once that has succeeded or failed."""
        if self._session is None and self.is_alive:
            self.ready.clear()
        self._call_in_loop(self._call)

    def adopt(self, seen: SourcePosition) -> None:
        """Adopt a position of the source: the stream has brought everything up to it. Safe in any thread."""
        self._call_in_loop(self._adopt, seen)

    def _call_in_loop(self, call: Callable[..., None], *arguments: object) -> None:
        """Run a call in the event loop, if there is one."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop has just been closed
                loop.call_soon_threadsafe(call, *arguments)

    def _call(self) -> None:
        if self._called is not None:
            self._called.set()
        if self._session is not None:
            self._session.wake()

    def _wake(self) -> None:
        self._call_in_loop(self._wake_session)

    def _wake_session(self) -> None:
        if self._session is not None:
            self._session.wake()

    def _adopt(self, seen: SourcePosition) -> None:
        if self._session is not None:
            self._session.adopt(seen)

    def _stop(self) -> None:
        self._call()
        if self._session is not None:
            self._session.stop()

    def turn(self) -> float:
        """Work the sink until `stop`. Raises RelayError."""
        try:
            asyncio.run(self._main())
        except Exception as error:
            raise TaskFault.of(error).as_error() from error
        return 0.0

    def release(self) -> None:
        """Keep nobody waiting: whoever waits for the sink to join the stream finds the error."""
        self.ready.set()

    @property
    def session(self) -> SinkSession | None:
        """The session while this process works the sink; otherwise None."""
        return self._session

    async def _keep_heartbeat(self) -> None:
        """Update the heartbeat while the event loop runs; runs until it is cancelled."""
        while True:
            self.heartbeat.update("delivers", Due.LATE)
            self._release_unattended()
            if self._began is not None and time.monotonic() - self._began > SETTLED_SECONDS:
                self.condition.works()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def _release_unattended(self) -> None:
        """Release the WAL of a sink that lags and cannot store that, or that another process does not give up."""
        if self.stopping.is_set() or not self._stream.reads:
            return
        is_stuck = self._session is not None or self._is_elsewhere
        if is_stuck and self.hold.expire(self._settings.sinks.attach_seconds):
            self._stream.confirm()

    async def _main(self) -> None:
        heartbeat_task = asyncio.ensure_future(self._keep_heartbeat())
        self._called = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        try:
            while not self.stopping.is_set():
                try:
                    if not await self._work():
                        self.ready.set()
                        # Longer than other processes, so that one of them claims it first.
                        await self._pause(2 * CLAIM_SECONDS)
                    self.condition.works()
                except Exception as error:
                    if not is_transient(error):
                        raise
                    self._require_polling(describe(error))
                    self.ready.set()
                    self.condition.fails(describe(error), handler=self.name)
                    await self._pause(self.condition.pause)
        finally:
            heartbeat_task.cancel()
            self._claim.release()
            await self._sink.close()

    def _require_polling(self, why: str) -> None:
        """Raise RelayError in mode wal: only the slot has the events in flight, and only a restart gets them."""
        if not self._polls:
            raise RelayError(
                f"handlers.{self.name}: interrupted ({why}), and with source.mode: wal only the slot can send the "
                "events in flight again: restart relay"
            )

    async def _pause(self, seconds: float) -> None:
        """Wait until `claim` or `stop`, at most `seconds`."""
        assert self._called is not None  # noqa: S101
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._called.wait()
        self._called.clear()

    def _load(self) -> SinkState:
        """Load the sink's state; a new sink starts where its configuration says. Raises RelayError."""
        claim, start = self._claim, self._configured.start
        if sinks.begin(claim.conn, self._settings.group, self.name, start):
            log.info("a new sink begins", extra={"handler": self.name, "from": start})
        if self._polls:
            sinks.give_snapshot(claim.conn, self._settings.group, self.name)
        state = claim.load()
        assert state is not None  # noqa: S101
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
        self._is_elsewhere = not await asyncio.to_thread(self._claim.take)
        if self._is_elsewhere:
            return False
        try:
            while not self.stopping.is_set():
                state = await asyncio.to_thread(self._load)
                if not (self._stream.reads or state.lags):
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
                    self._claim,
                    pool(1, f"{self.name} target"),
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
                    log.info(
                        "a sink continues from its stored position", extra={"handler": self.name}
                    )
                finally:
                    self._session = self._began = None
                    self.feed.close()
                    self.hold.leave()
                    self._stream.confirm()
        finally:
            await asyncio.to_thread(self._claim.release)
        return True
