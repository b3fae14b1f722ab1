"""What every sink promises, as tests: a sink of yours passes them, as relay's own do."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from uuid import UUID

from pydantic import TypeAdapter

from relay.config.handlers import HandlerSettings
from relay.faults import FaultAction, Rejected, action_for
from relay.model.events import Transaction
from relay.sinks import ATTEMPT, Attempt, Sink, build_sinks
from relay.testing.calls import transaction

_NAME = "contract"
_CLOSING_SECONDS = 5.0
_EVENTUALLY_SECONDS = 30.0
EVENT_TYPE = "contract.checked"


class SinkContract(ABC):
    """The tests; a child of it, whose name begins with `Test`, says how to reach the destination.

    For each test the destination is empty: the child prepares it in a fixture. The sink is built of its settings, by
    its entry point, as relay does.

    Example::

        class TestMySink(SinkContract):
            @pytest.fixture(autouse=True)
            def destination(self):
                with MyServer() as self.server:
                    yield

            def settings(self):
                return {"type": "mine", "url": self.server.url}

            def received(self):
                return [message["id"] for message in self.server.messages()]

            def interrupt(self):
                self.server.kill()

            def restore(self):
                self.server.start()
    """

    LARGE = 1_000
    """The events of the largest transaction."""
    SMALL = 50
    """The events of a transaction that is cancelled."""
    TIMEOUT = 20.0
    """The `timeout` of the sinks under test, in seconds."""
    OUTAGE_TIMEOUT = 2.0
    """The same where the destination is away."""
    DEADLINE = 120.0
    """The seconds after which a test has failed."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The settings of a handler for the destination, with its `type`."""

    @abstractmethod
    def received(self) -> list[str]:
        """The ids of the events that the destination has stored, in its order; repetitions may be in it."""

    @abstractmethod
    def interrupt(self) -> None:
        """Make the destination unreachable; it keeps what it has stored."""

    @abstractmethod
    def restore(self) -> None:
        """Make it reachable again."""

    def silence(self) -> None:
        """Make it take what is sent and answer nothing, until `restore`. Without this method, that is not tested."""
        raise NotImplementedError

    def overloaded(self) -> None:
        """Make it refuse everything as busy, such as with HTTP 503, until `restore`. Without it, not tested."""
        raise NotImplementedError

    def partial(self) -> None:
        """Make it refuse some messages of a request as busy and store the others, until `restore`.

        Without it, that is not tested.
        """
        raise NotImplementedError

    def opened(self) -> int | None:
        """How many connections to the destination are open; None: not tested whether the sink closes them."""
        return None

    def refused(self) -> Mapping[str, Any] | None:
        """The fields of an event that the destination never accepts, such as a payload; None if there is none."""
        return None

    def test_transactions_of_many_hosts_arrive_at_once_and_in_order(self) -> None:
        """Of one host, events arrive in the order in which their transactions are delivered."""

        async def deliver(sink: Sink) -> None:
            assert sink.name == _NAME

            async def of(host: int) -> None:
                for first in range(0, 30, 3):
                    await sink.deliver(events(host, first, 3))

            await asyncio.gather(*map(of, range(1, 33)))

        self._use(deliver)
        received = self._received()
        for host in range(1, 33):
            assert received.get(host) == list(range(30))

    def test_a_large_transaction_arrives_whole_and_in_order(self) -> None:
        """Also if it is more than the destination takes at once."""
        self._use(lambda sink: sink.deliver(events(1, 0, self.LARGE)))
        assert self._received().get(1) == list(range(self.LARGE))

    def test_an_outage_is_retried_and_passes(self) -> None:
        """What is sent during an outage fails in time, by no fault of the event; afterwards the same sink delivers."""
        self._pass_outage(self.interrupt)

    def test_a_destination_that_answers_nothing_is_an_outage(self) -> None:
        """The same: relay has no deadline for a delivery, and one that waits for ever holds its key as long."""
        if type(self).silence is not SinkContract.silence:
            self._pass_outage(self.silence)

    def test_a_destination_that_is_busy_is_an_outage(self) -> None:
        """What it refuses as busy is retried, by no fault of the event, and arrives in order."""
        if type(self).overloaded is not SinkContract.overloaded:
            self._pass_outage(self.overloaded)

    def test_what_is_stored_in_part_arrives_in_order(self) -> None:
        """An event that is refused as busy is not overtaken by a later one of its host: relay delivers all again."""
        if type(self).partial is SinkContract.partial:
            return

        async def deliver(sink: Sink) -> None:
            async def of(host: int) -> None:
                for first in range(0, 40, 20):
                    await _eventually(sink, events(host, first, 20), pause=0.001)

            await asyncio.to_thread(self.partial)
            await asyncio.gather(*map(of, range(1, 9)))
            await asyncio.to_thread(self.restore)

        self._use(deliver)
        received = self._received()
        for host in range(1, 9):
            assert received.get(host) == list(range(40)), (
                f"host {host}: an event came before an earlier one: send one of a key in a request"
            )

    def test_what_a_sink_has_opened_is_closed(self) -> None:
        """Its connections are closed with it."""
        before = self.opened()
        if before is None:
            return
        self._use(lambda sink: sink.deliver(events(1, 0, 3)))
        ends = time.monotonic() + _CLOSING_SECONDS
        while (self.opened() or 0) > before:
            assert time.monotonic() < ends, f"{self.opened()} connections are open after close()"
            time.sleep(0.01)

    def _pass_outage(self, begin: Callable[[], None]) -> None:
        async def deliver(sink: Sink) -> None:
            await _eventually(sink, events(1, 0, 2))
            await asyncio.to_thread(begin)
            # What is sent while the client has not noticed, what notices it, and what comes later.
            for first in (2, 4, 6):
                began = time.monotonic()
                found = await asyncio.gather(
                    *(sink.deliver(events(1, first, 2)) for _ in range(10)),
                    return_exceptions=True,
                )
                assert all(map(_is_outage, found)), f"{found}: raise Undelivered in an outage"
                assert time.monotonic() - began < 2 * self.OUTAGE_TIMEOUT + 1
            await asyncio.to_thread(self.restore)
            await _eventually(sink, events(1, 2, 2))

        self._use(deliver, self.OUTAGE_TIMEOUT)
        assert [number for number in self._received().get(1, []) if number < 4] == [0, 1, 2, 3]

    def test_an_event_that_is_refused_concerns_no_other(self) -> None:
        """It raises Rejected; deliveries that are sent at the same time succeed."""
        fields = self.refused()
        if fields is None:
            return

        async def deliver(sink: Sink) -> None:
            first, refused, last = await asyncio.gather(
                sink.deliver(events(1, 0, 3)),
                sink.deliver(events(2, 0, 3, **fields)),
                sink.deliver(events(3, 0, 3)),
                return_exceptions=True,
            )
            assert isinstance(refused, Rejected), f"{refused!r}: raise relay.sinks.Rejected"
            assert first is last is None
            await sink.deliver(events(2, 10, 3))

        self._use(deliver)
        received = self._received()
        assert received.get(1) == received.get(3) == [0, 1, 2]
        assert received.get(2, [])[-3:] == [10, 11, 12]

    def test_deliveries_that_are_cancelled_leave_nothing_broken(self) -> None:
        """Neither others in flight, nor those that come later."""

        async def deliver(sink: Sink) -> None:
            for after in (0.0, 0.0002, 0.001, 0.003, 0.01):
                tasks = [
                    asyncio.create_task(sink.deliver(events(host, 0, self.SMALL)))
                    for host in range(100, 120)
                ]
                kept = asyncio.create_task(sink.deliver(events(2, 0, self.SMALL)))
                await asyncio.sleep(after)
                for task in tasks:
                    task.cancel()
                found = await asyncio.gather(*tasks, return_exceptions=True)
                assert all(
                    each is None or isinstance(each, asyncio.CancelledError) for each in found
                ), found
                await kept
            await sink.deliver(events(1, 0, self.SMALL))

        self._use(deliver)
        received = self._received()
        assert received.get(1) == received.get(2) == list(range(self.SMALL))

    def test_what_is_delivered_again_is_there(self) -> None:
        """Once or twice: relay delivers at least once, and a move of the sink delivers all again."""

        async def deliver(sink: Sink) -> None:
            for series in ("one", "one", "two"):
                sink.resume(series)
                await sink.deliver(events(1, 0, 3))

        self._use(deliver)
        assert self._received().get(1) == [0, 1, 2]

    def test_a_sink_that_was_never_used_can_be_closed(self) -> None:
        """Nor does it connect: `relay check` builds sinks while their destinations are away."""
        self.interrupt()

        async def nothing(_: Sink) -> None:
            pass

        self._use(nothing)

    def test_a_sink_can_be_closed_while_it_delivers(self) -> None:
        """A delivery in flight ends: it has succeeded, fails as in an outage, or is cancelled."""

        async def deliver(sink: Sink) -> None:
            tasks = [
                asyncio.create_task(sink.deliver(events(host, 0, self.SMALL)))
                for host in range(1, 20)
            ]
            await asyncio.sleep(0.01)
            async with asyncio.timeout(_CLOSING_SECONDS):
                await sink.close()
                found = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(
                each is None or isinstance(each, asyncio.CancelledError) or _is_outage(each)
                for each in found
            ), found

        self._use(deliver, closes=False)

    def _configured(self, timeout: float | None = None) -> Any:
        given = {**self.settings(), "timeout": timeout or self.TIMEOUT}
        return TypeAdapter[Any](HandlerSettings).validate_python(given)

    def _built(self, configured: Any) -> Sink:
        ((sink, _),) = build_sinks({_NAME: configured}).values()
        return sink

    def _use(
        self,
        do: Callable[[Sink], Awaitable[None]],
        timeout: float | None = None,
        closes: bool = True,
    ) -> None:
        """Build a sink, run `do` with it in an event loop of its own, and close it, unless `do` does."""
        sink = self._built(self._configured(timeout))

        async def run() -> None:
            ATTEMPT.set(Attempt((), None, 0, None))
            try:
                async with asyncio.timeout(self.DEADLINE):
                    await do(sink)
            finally:
                if closes:
                    async with asyncio.timeout(_CLOSING_SECONDS):
                        await sink.close()

        asyncio.run(run())

    def _received(self) -> dict[int, list[int]]:
        """The numbers of each host's events, in the order in which they first arrived."""
        found: dict[int, list[int]] = {}
        for each in dict.fromkeys(self.received()):
            identity = UUID(each)
            found.setdefault(identity.time_low, []).append(identity.node)
        return found


def events(host: int, first: int, count: int, **fields: Any) -> Transaction:
    """A transaction of `count` events of a host, numbered from `first` on."""
    return transaction(
        *(
            {
                "id": f"{host:08x}-0000-0000-0000-{number:012x}",
                "host_id": UUID(int=host),
                "event_type": EVENT_TYPE,
                "c_offset": number,
                "payload": {"number": number},
                **fields,
            }
            for number in range(first, first + count)
        )
    )


def _is_outage(found: object) -> bool:
    """Whether relay would retry after it."""
    return isinstance(found, Exception) and action_for(found) is FaultAction.RETRY


async def _eventually(sink: Sink, sent: Transaction, pause: float = 0.1) -> None:
    """Deliver, as often as it takes."""
    async with asyncio.timeout(_EVENTUALLY_SECONDS):
        while True:
            try:
                return await sink.deliver(sent)
            except Exception as error:
                if not _is_outage(error):
                    raise
                await asyncio.sleep(pause)
