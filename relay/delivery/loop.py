"""The event loop of all sinks of an instance, in one thread, and what the sinks do together in it.

They claim in one session of the target, and store their progress in one transaction. One statement tells which of them
were moved or paused, or have deferred transactions that are due.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psycopg

import relay
from relay.config.settings import Settings
from relay.delivery import checkpoint
from relay.delivery.checkpoint import Checkpoint, Progress
from relay.delivery.connections import Connections
from relay.faults import RelayError, TaskFault, is_transient, spoils_session
from relay.runtime.parts import Condition, Due, Heartbeat, Recurring
from relay.runtime.threads import Thread, pool, position_of
from relay.store import activity
from relay.store.positions.sinks import SinkState

log = logging.getLogger(__name__)

Given = TypeVar("Given")
Result = TypeVar("Result")

CHECK_SECONDS = 0.2
"""How often it is checked whether sinks lag."""
WATCH_SECONDS = 0.5
"""How often due transactions are queried while a sink has deferred ones; otherwise that is done with each store."""
BLOCKED_SECONDS = 10.0
"""After how long it is logged that a call holds up all sinks."""
_WATCH_SHORTEST = 0.1
_ASIDE = 4
"""How many threads there are for calls that may block, beside two for each sink: they are started when needed."""
_CALLERS = (str(Path(relay.__file__).parent), str(Path(asyncio.__file__).parent))
"""What calls the code of a sink: relay and asyncio."""


class Member(Protocol):
    """A sink in the loop. All calls are in the loop's thread."""

    name: str

    async def run(self) -> None:
        """Work the sink until it is stopped. Raises nothing but what cancels it."""

    def check(self) -> None:
        """Do what is due every CHECK_SECONDS."""

    def wake(self) -> None:
        """Continue: the feed of the sink has changed."""

    def end(self, error: RelayError) -> None:
        """Note that the sink ends because of a fault of the loop. In the loop's thread."""

    @property
    def checkpoint(self) -> Checkpoint | None:
        """What is to be stored of the sink while this process works it; otherwise None."""


class SinkLoop:
    """Runs sinks in one event loop, in a thread from `start` until all of them have ended.

    What blocks the thread delays all of them: statements, and calls of user code, have threads of their own.
    """

    def __init__(self, settings: Settings, confirm: Callable[[], None]) -> None:
        """`confirm` is called once progress is stored, since the sinks may need less of the WAL."""
        self._confirm = confirm
        self.heartbeat = Heartbeat()
        self._started = 0.0
        self._settings = settings
        self._polls = settings.source.mode != "wal"
        self._members: Sequence[Member] = ()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections: Connections | None = None
        self._thread = Thread(target=self._run, name="sinks")
        self._to_wake: deque[Member] = deque()
        self._is_waking = False
        self._wanted: dict[str, tuple[str, asyncio.Future[SinkState | None]]] = {}
        self._claiming: asyncio.Task[None] | None = None

    def start(self, members: Sequence[Member]) -> None:
        """Start the thread, which runs these sinks."""
        self._members = members
        self._started = time.monotonic()
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait up to `seconds` until the thread has ended."""
        if self._thread.is_alive():
            self._thread.join(seconds)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def silent_seconds(self) -> float:
        """For how many seconds a call has held up the thread, and with it all sinks; 0 where there is no thread."""
        if not self.is_alive:
            return 0.0
        return time.monotonic() - max(self.heartbeat.at, self._started)

    @property
    def blocked(self) -> str | None:
        """In which line a call holds up the thread for BLOCKED_SECONDS; None while it goes on."""
        if self.silent_seconds < BLOCKED_SECONDS:
            return None
        return f"a call does not return{position_of(self._thread.ident, _CALLERS)}"

    @property
    def connections(self) -> Connections:
        """The connections that the sinks share, while the thread runs."""
        assert self._connections is not None  # noqa: S101
        return self._connections

    def call(self, call: Callable[..., None], *arguments: object) -> None:
        """Run a call in the loop, if there is one. Safe in any thread."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop has just been closed
                loop.call_soon_threadsafe(call, *arguments)

    def wake(self, member: Member) -> None:
        """Wake a sink. Safe in any thread.

        A batch wakes many: each call into the loop would let go of the interpreter, which the loop might keep for long.
        """
        self._to_wake.append(member)
        if not self._is_waking:
            self._is_waking = True
            self.call(self._wake_all)

    def _wake_all(self) -> None:
        self._is_waking = False
        while self._to_wake:
            self._to_wake.popleft().wake()

    def _run(self) -> None:
        try:
            with closing(Connections(self._settings)) as self._connections:
                asyncio.run(self._main())
        except BaseException as error:
            # A task that a library has made may have ended the loop with SystemExit.
            for each in self._members:
                each.end(TaskFault.of(error).as_error())

    async def _main(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(pool(_ASIDE + 2 * len(self._members), "sinks aside"))
        self._loop = loop
        self._wake_all()
        sinks = [asyncio.create_task(each.run()) for each in self._members]
        together = [asyncio.create_task(each) for each in (self._check(), self._keep())]
        try:
            first: list[asyncio.Future[Any]] = [asyncio.gather(*sinks), *together]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            for ended in filter(asyncio.Task.done, together):
                ended.result()
        finally:
            for task in (*sinks, *together):
                task.cancel()
            await asyncio.gather(*sinks, *together, return_exceptions=True)
            # Before a thread that hangs is waited for.
            await self.connections.in_claims(self.connections.claims.close)

    async def _check(self) -> None:
        """Let the sinks do what is due every CHECK_SECONDS; runs until it is cancelled."""
        while True:
            self.heartbeat.update("delivers", Due.LATE)
            for each in self._members:
                each.check()
            await asyncio.sleep(CHECK_SECONDS)

    # Claims

    async def claim(self, sink: str, start: str) -> SinkState | None:
        """Claim a sink, or load it again; returns its state, None if another process works it or its row is locked.

        A new sink begins at `start`. Those that ask at the same time are claimed together. Raises psycopg.Error.
        """
        answer: asyncio.Future[SinkState | None] = asyncio.get_running_loop().create_future()
        self._wanted[sink] = start, answer
        if self._claiming is None:
            self._claiming = asyncio.create_task(self._claim_wanted())
        return await answer

    async def _claim_wanted(self) -> None:
        # After those that were woken at the same time have asked, too.
        await asyncio.sleep(0)
        self._claiming, wanted, self._wanted = None, self._wanted, {}
        starts = {sink: start for sink, (start, _) in wanted.items()}
        try:
            states = await self.connections.in_claims(self._claimed, starts)
        except Exception as error:
            await self._lose(error)
            states = dict.fromkeys(starts, error)
        for sink, (_, answer) in wanted.items():
            state = states.get(sink)
            if answer.done():
                await self.release(sink)
            elif isinstance(state, Exception):
                answer.set_exception(state)
            else:
                answer.set_result(state)

    def _claimed(self, starts: Mapping[str, str]) -> dict[str, SinkState | Exception]:
        """Claim and load sinks; what fails with one of them only is its result. Raises what fails with the session."""
        claims = self.connections.claims
        taken = {sink: starts[sink] for sink in claims.take(starts)}
        states, failed = self._together(taken, lambda some: claims.load(some, self._polls))
        for sink in taken.keys() - states.keys():
            claims.release(sink)
        return {**states, **failed}

    def _together(
        self,
        given: Mapping[str, Given],
        call: Callable[[Mapping[str, Given]], Mapping[str, Result]],
    ) -> tuple[Mapping[str, Result], dict[str, Exception]]:
        """Call it for all sinks at once or, if that fails, for each alone; returns the results, and the faults.

        Raises what fails with the session of the claims.
        """
        try:
            return call(given), {}
        except psycopg.Error as error:
            self._require_session(error)
        results: dict[str, Result] = {}
        failed: dict[str, Exception] = {}
        for sink, each in given.items():
            try:
                results |= call({sink: each})
            except psycopg.Error as error:
                self._require_session(error)
                failed[sink] = error
        return results, failed

    def _require_session(self, error: psycopg.Error) -> None:
        """Raise an error that has ended the session of the claims."""
        if self.connections.claims.conn.closed or spoils_session(error):
            raise error

    async def release(self, sink: str) -> None:
        """Give up a claim: another process may work the sink."""
        try:
            await self.connections.in_claims(self.connections.claims.release, sink)
        except psycopg.Error as error:
            await self._lose(error)

    async def _lose(self, error: Exception) -> None:
        """Give up all claims after a fault of their session; each sink claims again, as after any outage."""
        for each in self._members:
            if each.checkpoint is not None:
                each.checkpoint.fail(error)
        await self.connections.in_claims(self.connections.claims.close)

    # Progress

    async def _keep(self) -> None:
        """Store the progress of the sinks, and watch what others change; runs until it is cancelled."""
        next_store = 0.0
        while True:
            await asyncio.sleep(min(WATCH_SECONDS, checkpoint.STORE_SECONDS))
            worked = {
                each.name: each.checkpoint
                for each in self._members
                if each.checkpoint is not None and not each.checkpoint.has_failed
            }
            if not worked:
                continue
            is_due = time.monotonic() >= next_store
            if not (is_due or any(each.has_deferred for each in worked.values())):
                continue
            try:
                if is_due:
                    # The sleeps are not exact: without the margin every second store would come a turn late.
                    next_store = time.monotonic() + checkpoint.STORE_SECONDS - CHECK_SECONDS
                    await self._store(worked)
                seen = await self.connections.in_claims(self.connections.claims.watch, worked)
            except Exception as error:
                if not is_transient(error):
                    raise
                await self._lose(error)
                continue
            for sink, each in worked.items():
                if not each.has_failed:
                    each.see(seen.get(sink))

    async def _store(self, worked: Mapping[str, Checkpoint]) -> None:
        """Store the progress of sinks in one transaction; what fails with one of them ends its session only."""
        begun: dict[str, Progress] = {}
        failed: Mapping[str, Exception] = {}
        stored: Mapping[str, None] = {}
        try:
            for sink, each in worked.items():
                progress = await each.begin()
                if progress is not None:
                    begun[sink] = progress
            if begun:
                stored, failed = await self.connections.in_claims(
                    self._together, begun, self._write
                )
        finally:
            for sink, progress in begun.items():
                worked[sink].end(progress, sink in stored)
        for sink, error in failed.items():
            worked[sink].fail(error)
        self._confirm()

    def _write(self, begun: Mapping[str, Progress]) -> dict[str, None]:
        """Write progress in one transaction; returns the sinks that are stored."""
        claims = self.connections.claims
        entries = [each.entry for each in begun.values() if each.is_new]
        with claims.conn.transaction():
            stored = set(claims.store(entries)) if entries else set()
            # Nothing but attempts is new of these.
            stored.update(sink for sink, each in begun.items() if not each.is_new)
            attempts = {
                sink: each for sink in stored for sink, each in begun[sink].attempts.items()
            }
            if attempts:
                activity.add_attempts(claims.conn, self._settings.group, attempts)
            for sink in stored:
                begun[sink].write_ended(claims.conn, self._settings.group)
        return dict.fromkeys(stored)


class LoopWatch(Recurring):
    """A thread that tells what holds up the loop of the sinks."""

    def __init__(self, loop: SinkLoop) -> None:
        self._loop = loop
        super().__init__(
            Condition(
                "sinks",
                log,
                "all sinks wait for a call of one of them",
                "the sinks go on",
                remind_seconds=60.0,
            )
        )

    def turn(self) -> float:
        """Report whether the loop goes on."""
        seconds, blocked = self._loop.silent_seconds, self._loop.blocked
        if blocked is None:
            self.condition.works()
            return max(_WATCH_SHORTEST, BLOCKED_SECONDS - seconds)
        self.condition.fails(blocked, lasts=seconds)
        return BLOCKED_SECONDS / 2
