"""A Spark sink's session of its own on Spark Connect has a channel, which is closed while its threads run.

Left to the finalizer at the end of the process it would wait for ever: seen once the server had been killed.
"""

from __future__ import annotations

from typing import Any, cast

from relay.config.settings import Settings
from relay.spark.session import Session
from relay.spark.sink_worker import SparkWorker


class Remote:
    """A session of Spark Connect, and the sessions that were cloned of it."""

    def __init__(self) -> None:
        self.clones: list[Remote] = []
        self.client = self
        self.closed = 0

    def cloneSession(self) -> Remote:  # noqa: N802
        self.clones.append(Remote())
        return self.clones[-1]

    def close(self) -> None:
        self.closed += 1


def test_the_channel_of_a_sinks_session_is_closed_when_it_is_replaced_and_at_the_end() -> None:
    settings = Settings(
        group="shop",
        source={"dsn": "dbname=shop"},
        handlers={"lake": {"type": "spark", "path": "/lake"}},
        routes=[{"handlers": ["lake"]}],
        spark={"remote": "sc://spark:15002"},
    )
    worker = SparkWorker("lake", settings, Session(settings.spark))
    first, second = Remote(), Remote()
    for each in (first, first, second):
        worker._own_session(cast(Any, each))
    assert [clone.closed for clone in first.clones] == [1]
    assert [clone.closed for clone in second.clones] == [0]
    worker.release()
    assert [clone.closed for clone in second.clones] == [1]
    assert not first.closed
    assert not second.closed
