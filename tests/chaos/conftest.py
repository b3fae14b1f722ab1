"""Repeats every chaos test `RELAY_CHAOS_ROUNDS` times: once in `make test`, more often in `make chaos`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from relay.demo.embedded import free_port
from tests.observing import Poller
from tests.outbox import Outbox

ROUNDS = int(os.environ.get("RELAY_CHAOS_ROUNDS", "1"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Chance is not seeded, so each round kills and cuts at other moments."""
    if ROUNDS > 1:
        metafunc.fixturenames.append("chaos_round")
        metafunc.parametrize("chaos_round", range(ROUNDS))


@pytest.fixture
def stays_live(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever is done to relay in the test: while it runs, its /livez is good."""
    port = free_port()
    config = Outbox.config

    def observed(self: Outbox, **overrides: Any) -> dict[str, Any]:
        return config(self, observe={"listen": f"127.0.0.1:{port}"}, **overrides)

    monkeypatch.setattr(Outbox, "config", observed)
    poller = Poller(port)
    yield
    poller.close()
    assert poller.bad == []
    assert poller.good
