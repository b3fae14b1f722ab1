"""relay declares the queues of its configuration when it starts, and waits while the target cannot be reached."""

from __future__ import annotations

from threading import Thread

import psycopg
import pytest

from relay.config.settings import Settings
from relay.queues import configured
from relay.queues.configured import ConfiguredQueues

SETTINGS = Settings(source={"dsn": "host=localhost"}, queues={"mail": {}})


def test_a_stop_ends_the_wait_for_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise psycopg.OperationalError("the server is down")

    monkeypatch.setattr(configured, "asking", refuse)
    part = ConfiguredQueues(SETTINGS)
    (condition,) = part.conditions
    thread = Thread(target=part.start)
    thread.start()
    while condition.fault is None:
        thread.join(0.01)
    assert thread.is_alive()
    part.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_a_fault_that_lasts_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise psycopg.errors.InsufficientPrivilege("permission denied for table queues")

    monkeypatch.setattr(configured, "asking", refuse)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        ConfiguredQueues(SETTINGS).start()
