"""The event loop that all sinks share."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from relay.delivery import loop
from relay.delivery.loop import LoopWatch, SinkLoop
from tests.outbox import wait_until


class Blocks:
    """A sink of which a call does not return for a while."""

    name = "blocks"
    checkpoint = error = None
    is_blocked = False

    async def run(self) -> None:
        self.is_blocked = True
        time.sleep(1)

    def check(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def end(self, error: Exception) -> None:
        raise AssertionError


def test_a_call_that_blocks_all_sinks_is_logged_with_its_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def in_claims(call: object) -> None:
        pass

    connections = SimpleNamespace(
        close=lambda: None, in_claims=in_claims, claims=SimpleNamespace(close=None)
    )
    monkeypatch.setattr(loop, "Connections", lambda settings: connections)
    monkeypatch.setattr(loop, "BLOCKED_SECONDS", 0.2)
    settings: Any = SimpleNamespace(source=SimpleNamespace(mode="auto"))
    sink = Blocks()
    sinks = SinkLoop(settings, lambda: None)
    watch = LoopWatch(sinks)
    sinks.start([sink])
    wait_until(lambda: sink.is_blocked)
    blocked = datetime.now(UTC)
    wait_until(lambda: sinks.blocked is not None)
    # Named at once, and since when it is: not twice BLOCKED_SECONDS later, with half of that.
    assert watch.turn() == 0.1
    fault = watch.condition.fault
    assert fault is not None
    assert fault.since <= blocked + timedelta(seconds=0.1)
    assert watch.condition.failing_seconds >= 0.2
    assert fault.fault.startswith(f"a call does not return at {__file__}:")
    assert fault.fault.endswith(" in run")
    assert [each.getMessage() for each in caplog.records] == [
        "all sinks wait for a call of one of them"
    ]
    sinks.join(10)
    with caplog.at_level(logging.INFO):
        watch.turn()
    assert caplog.records[-1].getMessage() == "the sinks go on"
    assert watch.condition.fault is None
