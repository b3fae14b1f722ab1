"""A worker of a sink, without databases."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from relay.config.settings import Settings
from relay.delivery import worker
from relay.delivery.worker import SinkWorker
from relay.model.events import Lsn
from relay.pipeline.listeners import Meter


def test_a_stop_while_the_sink_is_claimed_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes in the midst of what follows an outage, when there is no session to be stopped."""
    hook = {"type": "http", "url": "http://localhost/"}
    settings = Settings(
        source={"dsn": "dbname=shop"}, handlers={"hook": hook}, routes=[{"handlers": ["hook"]}]
    )
    released: list[str] = []

    class Loop:
        is_alive = True

        def call(self, call: Any, *arguments: Any) -> None:
            call(*arguments)

        async def claim(self, name: str, start: str) -> Any:
            stopped.stop()
            return SimpleNamespace(
                position=SimpleNamespace(applied_lsn=Lsn(1)), attached=False, lags=True
            )

        async def release(self, name: str) -> None:
            released.append(name)

    class NoSink:
        name = "hook"

        async def close(self) -> None:
            """Nothing is open."""

    def no_session(*_: Any) -> Any:
        raise AssertionError("a session begins after the stop")

    monkeypatch.setattr(worker, "SinkSession", no_session)
    sink: Any = NoSink()
    stream: Any = SimpleNamespace(reads=True)
    loop: Any = Loop()
    loop.connections = SimpleNamespace(of_sink=lambda: None, outbox_end=None)
    configured: Any = settings.handlers["hook"]
    stopped = SinkWorker("hook", sink, configured, settings, stream, lambda: None, Meter(), loop)
    asyncio.run(asyncio.wait_for(stopped.run(), 5))
    assert stopped.error is None
    assert released == ["hook"]
