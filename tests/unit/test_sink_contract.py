"""relay.testing.SinkContract fails for a sink that breaks a promise, and for no other."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from relay.config import sink_types
from relay.faults import ConfigurationError, Rejected, Undelivered
from relay.model.events import Transaction
from relay.sinks import Alike, Own, SinkSettings
from relay.testing import MemorySink, SinkContract
from tests.packages import install


class Settings(SinkSettings):
    """A list in memory."""

    type: Alike[Literal["memory"]]
    fault: Own[str] = ""


class Destination:
    """Where the sinks of this module deliver to."""

    ids: list[str]
    is_up: bool
    answers: bool
    busy: str
    opened: int
    tried: set[str]


HERE = Destination()


def sink(name: str, settings: Settings) -> Memory:
    return Memory(name, settings.fault)


class Memory:
    """A sink that keeps its promises, but for one."""

    def __init__(self, name: str, fault: str) -> None:
        self.name = "other" if fault == "name" else name
        self._fault = fault
        self._lock = asyncio.Lock()
        self._seen: set[str] = set()
        HERE.opened += 1
        if fault == "connects" and not HERE.is_up:
            raise Undelivered("away")

    def resume(self, series: str) -> None:
        if self._fault == "resume":
            raise ValueError

    async def deliver(self, transaction: Transaction) -> None:
        found = [str(each.id) for each in transaction.events]
        payloads = [each.payload for each in transaction.events]
        if self._fault == "lock":
            await self._lock.acquire()
        await asyncio.sleep(0.001)
        if not HERE.is_up:
            if self._fault == "hangs" or (self._fault == "waits" and not HERE.answers):
                await asyncio.sleep(60)
            raise ValueError if self._fault == "outage" else Undelivered("away")
        if HERE.busy == "all":
            raise Rejected("HTTP 503") if self._fault == "busy" else Undelivered("HTTP 503")
        if HERE.busy == "some":
            for number, each in enumerate(found):
                if number % 7 == 3 and each not in HERE.tried:
                    HERE.tried.add(each)
                    HERE.ids += found[number + 1 :] if self._fault == "overtakes" else []
                    raise Undelivered("busy")
                HERE.ids.append(each)
            return
        if any("refused" in each for each in payloads):
            raise Undelivered("no") if self._fault == "refusal" else Rejected("no")
        if self._fault == "order":
            found.reverse()
        HERE.ids += found[: 500 if self._fault == "large" else None]
        if self._fault == "lock":
            self._lock.release()

    async def close(self) -> None:
        if self._fault == "close":
            await asyncio.sleep(60)
        HERE.opened -= self._fault != "leaks"


class InMemory(SinkContract):
    TIMEOUT = 5.0
    OUTAGE_TIMEOUT = 0.2
    fault = ""

    def settings(self) -> dict[str, Any]:
        return {"type": "memory", "fault": self.fault}

    def received(self) -> list[str]:
        return HERE.ids

    def interrupt(self) -> None:
        HERE.is_up = False

    def silence(self) -> None:
        HERE.is_up = HERE.answers = False

    def overloaded(self) -> None:
        HERE.busy = "all"

    def partial(self) -> None:
        HERE.busy = "some"

    def opened(self) -> int:
        return HERE.opened

    def restore(self) -> None:
        HERE.is_up = HERE.answers = True
        HERE.busy = ""

    def refused(self) -> dict[str, Any]:
        return {"payload": {"refused": True}}


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    install(tmp_path, "relay-memory", {"memory": __name__})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    HERE.ids, HERE.is_up, HERE.answers = [], True, True
    HERE.busy, HERE.opened, HERE.tried = "", 0, set()
    yield
    sink_types.module_of.cache_clear()


class TestMemory(InMemory):
    """All of it holds."""


class TestMemorySink(SinkContract):
    """relay.testing.MemorySink, in the place of a broker: all of it holds."""

    @pytest.fixture(autouse=True)
    def memory(self) -> None:
        self.sink = MemorySink()
        self.restore()

    def settings(self) -> dict[str, Any]:
        return {"type": "redis", "url": "redis://nowhere", "topic": "orders"}

    def received(self) -> list[str]:
        ids = [str(event.id) for event in self.sink.events]
        assert ids == [message.identity for message in self.sink.messages]
        return ids

    def interrupt(self) -> None:
        self.sink.fail()

    def restore(self) -> None:
        self.sink.accept()
        self.sink.refuse({"payload.refused": True})

    def refused(self) -> dict[str, Any]:
        return {"payload": {"refused": True}}

    def _built(self, configured: Any) -> MemorySink:
        self.sink.replace("contract", configured)
        return self.sink


@pytest.mark.parametrize(
    ("fault", "promise"),
    [
        ("name", "test_transactions_of_many_hosts_arrive_at_once_and_in_order"),
        ("order", "test_transactions_of_many_hosts_arrive_at_once_and_in_order"),
        ("large", "test_a_large_transaction_arrives_whole_and_in_order"),
        ("outage", "test_an_outage_is_retried_and_passes"),
        ("hangs", "test_an_outage_is_retried_and_passes"),
        ("waits", "test_a_destination_that_answers_nothing_is_an_outage"),
        ("busy", "test_a_destination_that_is_busy_is_an_outage"),
        ("overtakes", "test_what_is_stored_in_part_arrives_in_order"),
        ("leaks", "test_what_a_sink_has_opened_is_closed"),
        ("refusal", "test_an_event_that_is_refused_concerns_no_other"),
        ("lock", "test_deliveries_that_are_cancelled_leave_nothing_broken"),
        ("resume", "test_what_is_delivered_again_is_there"),
        ("connects", "test_a_sink_that_was_never_used_can_be_closed"),
        ("close", "test_a_sink_that_was_never_used_can_be_closed"),
    ],
)
def test_a_broken_promise_is_found(
    fault: str, promise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.testing.sink_contract._CLOSING_SECONDS", 0.2)
    contract = InMemory()
    contract.fault, contract.DEADLINE = fault, 1.0
    began = time.monotonic()
    with pytest.raises((AssertionError, TimeoutError, ValueError, ConfigurationError)):
        getattr(contract, promise)()
    assert time.monotonic() - began < 10
