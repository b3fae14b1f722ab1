"""The endpoints of one sink: which of them count as down or are disabled, and how many requests each gets.

What an endpoint does concerns its own events only: while it fails, they are deferred without an attempt that counts.
Memory is bounded: an endpoint that works and has no request in flight is forgotten once there are many.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import psycopg

from relay.config.handlers import HttpHandler
from relay.faults import (
    EndpointBusy,
    EndpointDisabled,
    EndpointDown,
    EndpointFailed,
    EndpointRejected,
    Rejected,
    Unauthorized,
    Undelivered,
    describe,
)
from relay.sinks import ATTEMPT, Target
from relay.sinks.destination import Destination
from relay.store import endpoints as stored
from relay.store import session_settings
from relay.store.connections import Pool, new_pool
from relay.store.endpoints import StoredEndpoint
from relay.store.session_settings import LOCK_TIMEOUT, SessionKind

log = logging.getLogger(__name__)

READ_SECONDS = 2.0
"""How often it is read what operators have enabled or disabled, while there are deliveries."""
FRESH_SECONDS = 0.1
"""The same while there are deliveries for disabled endpoints: who enables one replays its dead letters next."""
STORE_SECONDS = 60.0
"""After so long, a failing endpoint is stored, so that a restart goes on counting; each is a row written."""
LONGEST_TURN_SECONDS = 1.0
"""A delivery whose turn comes later is deferred: while it waits in memory, it takes room from other endpoints'."""
LONGEST_BUSY_SECONDS = 300.0
"""The longest wait for a turn at an endpoint that works, which may have become faster meanwhile."""
MOST_REFUSED = 100
"""After so many refusals of single events in a row, it is the endpoint that fails: no more dead letters are made."""
SUSPECTS_SHARE = 4
"""Endpoints whose last attempt has failed use a part of the sink's `concurrency` together: one of so many."""
LEAST_FAILURES = 5
"""So many attempts of this process have to fail before it disables an endpoint that failed before it was started."""
MOST_IDLE = 10_000
"""How many endpoints are remembered that neither fail nor have anything in flight."""


@dataclass(frozen=True, slots=True)
class EndpointId:
    """What identifies an endpoint without secrets: its id or the beginning of its URL's SHA-256; scheme, host, port."""

    digest: str
    address: str


class Endpoint(Destination):
    """The state of an endpoint. `since` is when the first of the failures in a row was; `refused` counts refusals.

    `seconds` is how long its last request took, `promised` the time (monotonic clock) of the last turn promised.
    """

    def __init__(self, id: EndpointId, sink: str, settings: HttpHandler, concurrency: int) -> None:
        self.id = id
        self.room = asyncio.Semaphore(concurrency)
        self.users = 0
        self.is_stored = False
        self.host: str | None = None
        self.seconds = LONGEST_TURN_SECONDS
        self.promised = 0.0
        super().__init__(sink, settings)

    def forget(self) -> None:
        """Forget what it has answered, and that it is disabled."""
        super().forget()
        self.failures = self.refused = 0
        self.since: datetime | None = None
        self.disabled: StoredEndpoint | None = None

    @property
    def fields(self) -> dict[str, object]:
        """What a line of the log says of it."""
        return {
            **super().fields,
            "endpoint": self.id.digest,
            "address": self.id.address,
            "host_id": self.host,
        }

    def later(self, interval: float) -> float:
        """The seconds until a turn that nobody else was told: those who come back together would find it taken."""
        now = time.monotonic()
        self.promised = max(self.promised, now + LONGEST_TURN_SECONDS) + interval
        if self.promised > now + LONGEST_BUSY_SECONDS:
            self.promised = now + LONGEST_BUSY_SECONDS
            return random.uniform(LONGEST_BUSY_SECONDS / 2, LONGEST_BUSY_SECONDS)  # noqa: S311 no secret
        return self.promised - now

    @property
    def is_forgettable(self) -> bool:
        """Whether nothing would be lost with it but what the next attempt finds again."""
        return not (self.users or self.failures or self.is_stored or self.disabled)


@dataclass(slots=True)
class _Unstored:
    failing: dict[str, StoredEndpoint] = field(default_factory=dict)
    works: set[str] = field(default_factory=set)


class Endpoints:
    """The endpoints of one sink. For one event loop; statements run in threads."""

    def __init__(self, sink: str, settings: HttpHandler, target: Target) -> None:
        self._sink = sink
        self._target = target
        self._settings = settings
        own = settings.endpoints_or_default
        self._concurrency = min(own.concurrency, settings.concurrency)
        self._disable_after = own.disable_after
        self._room = asyncio.Semaphore(settings.concurrency)
        self._suspects = asyncio.Semaphore(max(1, settings.concurrency // SUSPECTS_SHARE))
        self._known: OrderedDict[str, Endpoint] = OrderedDict()
        self._unstored = _Unstored()
        self._pool: Pool | None = None
        self._reading: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._read_at = -READ_SECONDS
        self._after: datetime | None = None

    def reset(self) -> None:
        """Forget everything: another process may have worked the sink meanwhile."""
        self._known.clear()
        self._unstored = _Unstored()
        self._read_at, self._after = -READ_SECONDS, None

    def of(self, id: EndpointId) -> Endpoint:
        """The endpoint of an id."""
        known = self._known.get(id.digest)
        if known is None:
            known = Endpoint(id, self._sink, self._settings, self._concurrency)
            self._known[id.digest] = known
            self._forget()
        else:
            # One with an id may have another URL.
            known.id = id
            self._known.move_to_end(id.digest)
        return known

    def _forget(self) -> None:
        # Those that fail stay: there are no more of them than rows in the table, or deliveries in flight.
        for _ in range(min(2, len(self._known) - MOST_IDLE)):
            digest, oldest = next(iter(self._known.items()))
            if oldest.is_forgettable:
                del self._known[digest]
            else:
                self._known.move_to_end(digest)

    async def refresh(self, seconds: float = READ_SECONDS) -> None:
        """Store what has become of endpoints, and read what operators want, unless that is known since `seconds` ago.

        Raises Undelivered if the target does not answer.
        """
        least = time.monotonic() - seconds
        while self._read_at <= least:
            # One that has begun before comes too early.
            await asyncio.shield(self._begin_reading())

    async def _refresh(self) -> None:
        """The same at once."""
        if self._reading is not None:
            # It may have begun before what is to be stored was known.
            await asyncio.gather(self._reading, return_exceptions=True)
        await asyncio.shield(self._begin_reading())

    def _begin_reading(self) -> asyncio.Task[None]:
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
            self._reading.add_done_callback(self._has_read)
        return self._reading

    def _has_read(self, ended: asyncio.Task[None]) -> None:
        self._reading = None
        if not ended.cancelled():
            # Whoever waits has it too; nobody may be waiting.
            ended.exception()

    async def _read(self) -> None:
        began = time.monotonic()
        unstored, self._unstored = self._unstored, _Unstored()
        if self._pool is None:
            session = session_settings.statements(SessionKind.OWN, {"lock_timeout": LOCK_TIMEOUT})
            self._pool = new_pool(self._target.dsn, 1, session, max_idle=10 * READ_SECONDS)
        try:
            rows, after = await asyncio.to_thread(self._exchange, self._pool, unstored)
        except psycopg.Error as error:
            for digest, each in unstored.failing.items():
                self._unstored.failing.setdefault(digest, each)
            self._unstored.works |= unstored.works - self._unstored.failing.keys()
            raise Undelivered(f"relay.endpoints cannot be read: {describe(error)}") from None
        self._read_at, self._after = began, after
        for row in rows:
            self._note(row)

    def _exchange(self, pool: Pool, unstored: _Unstored) -> tuple[list[StoredEndpoint], datetime]:
        group, sink = self._target.group, self._sink
        with pool.connection() as conn, conn.transaction():
            if unstored.failing or unstored.works:
                works = [(sink, digest) for digest in sorted(unstored.works)]
                failing = [unstored.failing[digest] for digest in sorted(unstored.failing)]
                stored.store(conn, group, failing, works)
            return stored.changed(conn, group, sink, self._after)

    def _note(self, row: StoredEndpoint) -> None:
        """Note a row that was changed, by this process, an earlier one or an operator."""
        endpoint = self.of(EndpointId(row.endpoint, row.address))
        if row.disabled_at is not None:
            endpoint.disabled = row
            return
        if endpoint.disabled is not None and row.endpoint not in self._unstored.failing:
            log.info("an endpoint is enabled", extra=endpoint.fields)
            endpoint.forget()
        if endpoint.since is None and row.failing_since is not None:
            endpoint.since, endpoint.last_fault = row.failing_since, row.fault or ""
        endpoint.is_stored = True

    def require(self, endpoint: Endpoint) -> None:
        """Raise EndpointDisabled or EndpointDown if the endpoint is not to be tried now."""
        if endpoint.disabled is not None:
            if endpoint.disabled.waits:
                raise EndpointDown(_disabled(endpoint.disabled), tried=False)
            raise EndpointDisabled(_disabled(endpoint.disabled))
        seconds = endpoint.breaker.seconds_to_trial()
        if seconds is None or seconds > 0:
            raise EndpointDown(
                f"the endpoint is down: {endpoint.last_fault}", after=seconds or 1.0, tried=False
            )

    @asynccontextmanager
    async def turn(self, endpoint: Endpoint) -> AsyncIterator[None]:
        """Wait for the endpoint's rate and for room, and count the attempt as in flight.

        Raises EndpointDown if the turn comes too late, or the endpoint counts as down meanwhile.
        """
        endpoint.users += 1
        try:
            await self._wait(endpoint)
            try:
                async with self._share(endpoint), self._room:
                    self.require(endpoint)
                    is_trial = endpoint.breaker.begin()
                    began = time.monotonic()
                    try:
                        yield
                    finally:
                        endpoint.seconds = time.monotonic() - began
                        if is_trial:
                            endpoint.breaker.give_up()
            finally:
                endpoint.room.release()
        finally:
            endpoint.users -= 1

    @asynccontextmanager
    async def _share(self, endpoint: Endpoint) -> AsyncIterator[None]:
        """Wait for a failing endpoint's turn among all that fail: each may take as long as `timeout`.

        Raises EndpointDown if the turn comes too late.
        """
        if not endpoint.failures:
            yield
            return
        try:
            async with asyncio.timeout(LONGEST_TURN_SECONDS):
                await self._suspects.acquire()
        except TimeoutError:
            raise EndpointDown(
                f"the endpoint fails, as many others do: {endpoint.last_fault}",
                after=LONGEST_TURN_SECONDS,
                tried=False,
            ) from None
        try:
            yield
        finally:
            self._suspects.release()

    async def _wait(self, endpoint: Endpoint) -> None:
        pace = endpoint.pace
        if pace is not None and pace.ahead > LONGEST_TURN_SECONDS:
            raise EndpointBusy(
                "the endpoint is at its rate_limit", after=endpoint.later(pace.interval)
            )
        try:
            async with asyncio.timeout(LONGEST_TURN_SECONDS):
                await endpoint.room.acquire()
        except TimeoutError:
            raise EndpointBusy(
                f"the endpoint has {self._concurrency} requests in flight",
                after=endpoint.later(endpoint.seconds / self._concurrency),
            ) from None
        if pace is not None:
            try:
                await asyncio.sleep(pace.turn())
            except BaseException:
                endpoint.room.release()
                raise

    # What has become of an attempt

    def succeeded(self, endpoint: Endpoint, host: str | None) -> None:
        """Note that the endpoint has accepted an event of a host."""
        endpoint.answered(_key(host))
        endpoint.failures = endpoint.refused = 0
        endpoint.since = None
        if endpoint.is_stored or endpoint.id.digest in self._unstored.failing:
            self._unstored.failing.pop(endpoint.id.digest, None)
            self._unstored.works.add(endpoint.id.digest)
            endpoint.is_stored = False
            self._store_soon()

    async def refused(
        self, endpoint: Endpoint, host: str | None, error: Rejected | Undelivered
    ) -> Exception:
        """Note that the endpoint refuses an event for good; returns the fault to raise.

        After too many in a row it is the endpoint that fails.
        """
        endpoint.refused += 1
        if endpoint.refused <= MOST_REFUSED:
            endpoint.answered(_key(host))
            return EndpointRejected(str(error), detail=error.detail)
        self._fail(endpoint, host, error, stop=True)
        return await self._fault(endpoint, f"the endpoint refuses every event: {error}", error)

    async def failed(self, endpoint: Endpoint, host: str | None, error: Undelivered) -> Exception:
        """Note that an attempt has failed; returns the fault to raise."""
        self._fail(endpoint, host, error)
        return await self._fault(endpoint, str(error), error)

    async def gone(self, endpoint: Endpoint, host: str | None, error: Undelivered) -> Exception:
        """Disable an endpoint that wants no more events; returns the fault to raise."""
        endpoint.last_fault, endpoint.host = describe(error), host
        self._disable(endpoint)
        return await self._fault(endpoint, str(error), error)

    async def _fault(
        self, endpoint: Endpoint, reason: str, error: Rejected | Undelivered
    ) -> Exception:
        detail = error.detail
        if endpoint.disabled is not None:
            # Before its events are dead letters.
            await self._refresh()
            return EndpointDisabled(_disabled(endpoint.disabled), detail=detail)
        after = error.after if isinstance(error, Undelivered) else None
        if endpoint.breaker.is_open or isinstance(error, Unauthorized):
            return EndpointDown(reason, after=after, detail=detail, tried=True)
        return EndpointFailed(reason, after=after, detail=detail)

    def _fail(
        self, endpoint: Endpoint, host: str | None, error: Exception, *, stop: bool = False
    ) -> None:
        now = datetime.now(UTC)
        endpoint.host = host
        endpoint.failures += 1
        if endpoint.since is None:
            endpoint.since = now
        endpoint.failed(_key(host), error, stop=stop)
        failing = now - endpoint.since
        if (
            self._disable_after is not None
            and failing >= self._disable_after
            and endpoint.failures >= LEAST_FAILURES
        ):
            self._disable(endpoint)
        elif not endpoint.is_stored and failing >= timedelta(seconds=STORE_SECONDS):
            self._store(endpoint, None)

    def _disable(self, endpoint: Endpoint) -> None:
        """Disable the endpoint: what is for it becomes dead letters, until an operator enables it."""
        now = datetime.now(UTC)
        endpoint.since = endpoint.since or now
        endpoint.disabled = self._store(endpoint, now)
        log.error("an endpoint is disabled", extra=endpoint.fields)

    def _store(self, endpoint: Endpoint, disabled_at: datetime | None) -> StoredEndpoint:
        row = StoredEndpoint(
            self._sink,
            endpoint.id.digest,
            endpoint.id.address,
            endpoint.host,
            endpoint.since,
            endpoint.last_fault,
            disabled_at,
        )
        self._unstored.failing[endpoint.id.digest] = row
        self._unstored.works.discard(endpoint.id.digest)
        endpoint.is_stored = True
        self._store_soon()
        return row

    def _store_soon(self) -> None:
        """Store what has become of endpoints, even if no delivery follows."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(READ_SECONDS, self._store_now)

    def _store_now(self) -> None:
        self._timer = None
        if self._unstored.failing or self._unstored.works:
            self._begin_reading().add_done_callback(self._store_again)

    def _store_again(self, ended: asyncio.Task[None]) -> None:
        if not ended.cancelled() and ended.exception() is not None:
            self._store_soon()

    async def close(self) -> None:
        """Store what is not stored yet, and close the session."""
        if self._timer is not None:
            self._timer.cancel()
        if self._unstored.failing or self._unstored.works:
            with suppress(Undelivered):
                await self._refresh()
        if self._pool is not None:
            await asyncio.to_thread(self._pool.close)


def _key(host: str | None) -> Hashable:
    """The key that the breaker counts: that of the attempt, and the host where there is none."""
    attempt = ATTEMPT.get(None)
    return host if attempt is None else attempt.key


def _disabled(row: StoredEndpoint) -> str:
    since = row.disabled_at.isoformat(timespec="seconds") if row.disabled_at is not None else ""
    return (
        f"the endpoint {row.endpoint} is {row.state} since {since}: {row.why or 'no reason given'}"
    )
