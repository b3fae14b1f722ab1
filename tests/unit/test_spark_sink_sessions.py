"""What a Spark sink's worker does with its session, without Spark.

Its own session on Spark Connect has a channel, which is closed while its threads run. Left to the finalizer at the end
of the process it would wait for ever: seen once the server had been killed.
"""

from __future__ import annotations

from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relay.config.settings import Settings, SparkSettings
from relay.spark import batch_watch, session, sink_worker
from relay.spark.session import Session, _why_not_built
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


def worker_of(**spark: str) -> SparkWorker:
    settings = Settings(
        group="shop",
        source={"dsn": "dbname=shop"},
        handlers={"lake": {"type": "spark", "path": "/lake"}},
        routes=[{"handlers": ["lake"]}],
        spark=spark,
    )
    return SparkWorker("lake", settings, Session(settings.spark))


def test_the_channel_of_a_sinks_session_is_closed_when_it_is_replaced_and_at_the_end() -> None:
    worker = worker_of(remote="sc://spark:15002")
    first, second = Remote(), Remote()
    for each in (first, first, second):
        worker._own_session(cast(Any, each))
    assert [clone.closed for clone in first.clones] == [1]
    assert [clone.closed for clone in second.clones] == [0]
    worker.release()
    assert [clone.closed for clone in second.clones] == [1]
    assert not first.closed
    assert not second.closed


@pytest.mark.parametrize(
    ("thrown", "why"),
    [
        (
            "java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext.\nThis stopped …",
            "no master of the cluster answers, or it has removed the application",
        ),
        (
            "org.apache.spark.SparkException: Invalid master URL: spark",
            "SparkException: Invalid master URL: spark",
        ),
    ],
)
def test_why_a_session_cannot_be_built(thrown: str, why: str) -> None:
    error = Exception()
    cast(Any, error).java_exception = SimpleNamespace(toString=lambda: thrown)
    assert _why_not_built(error) == why


class Probed:
    """A session whose job gets a slot once `free` is set, and succeeds unless `died`."""

    def __init__(self, free: Event, died: bool = False) -> None:
        self._free = free
        self._died = died
        self.jobs = 0

    def range(self, rows: int) -> Probed:
        self.jobs += 1
        return self

    def count(self) -> int:
        assert self._free.wait(60)
        if self._died:
            raise RuntimeError("stopped")
        return 1


def test_a_failed_job_waits_for_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task that checks the session did, where others had all slots or a frozen master replaced no executor."""
    monkeypatch.setattr(session, "_PROBE_SECONDS", 0.05)
    made, free, done = Session(SparkSettings()), Event(), []
    monkeypatch.setattr(made, "start", lambda: done.append("start"))
    monkeypatch.setattr(made, "_discard", lambda: done.append("discard"))
    for died, expected in ((False, []), (True, ["discard", "start"])):
        free.clear()
        spark: Any = Probed(free, died)
        monkeypatch.setattr(made, "_session", spark)
        for _ in range(2):
            made.replace_if_dead(spark)
        assert (spark.jobs, done) == (1, [])
        free.set()
        assert made._probe is not None
        made._probe.join(60)
        monkeypatch.setattr(session, "_PROBE_SECONDS", 60)
        made.replace_if_dead(spark)
        monkeypatch.setattr(session, "_PROBE_SECONDS", 0.05)
        assert (spark.jobs, done) == (2, expected)


class Table:
    """A writer whose upkeep takes until `watched` is set."""

    kind = "table"

    def __init__(self, watched: Event) -> None:
        self._watched = watched

    def check(self, session: object) -> None:
        """It can be written."""

    def write(self, frame: object, batch: object) -> None:
        """It is not asked."""

    def left(self, session: object, batch: object, files: object) -> None:
        """It is not asked."""

    def lacks(self, session: object, last: object, facts: object) -> None:
        """It is not asked."""

    def upkeep(self, session: object) -> None:
        assert self._watched.wait(60)


def test_upkeep_whose_tasks_do_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the write of a batch was watched, so a sink whose upkeep stood still lagged without a reason."""
    watched, said = Event(), []

    def note(fault: str, ended: Event) -> None:
        said.append(fault)
        watched.set()

    monkeypatch.setattr(batch_watch, "TASKS_SECONDS", 0.01)
    monkeypatch.setattr(batch_watch, "STILL_SECONDS", 0.05)
    monkeypatch.setattr(batch_watch, "tasks_of", lambda *_: (1, 2))
    monkeypatch.setattr(sink_worker, "writer", lambda *_: Table(watched))
    worker = worker_of()
    spark = SimpleNamespace(newSession=object)
    for name, instead in {
        "_ready_session": lambda: spark,
        "_look": lambda *_: None,
        "_deliver": lambda *_: None,
        "_finish": lambda *_: None,
    }.items():
        monkeypatch.setattr(worker, name, instead)
    monkeypatch.setattr(worker._watch, "_note_still", note)
    contents = SimpleNamespace(rows=1)
    batch = SimpleNamespace(
        number=100, epoch=0, files=None, partition_by=[], host_buckets=8, contents=contents
    )
    worker._write(cast(Any, batch))
    assert said[0] == "batch 100: no Spark task has ended for 0 s: 1 running, 1 without a slot"


def test_a_pause_is_told_as_that_of_any_sink(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """docs/reference/status-and-logs.md names the lines for all sinks, and those of Spark had none."""
    caplog.set_level("INFO")
    worker = worker_of()
    for paused in (True, True, False, False, True):
        state = SimpleNamespace(paused=paused)
        monkeypatch.setattr(worker._claim, "load", lambda _, state=state: state)
        assert worker._load() is cast(Any, state)
    assert caplog.messages == ["a sink is resumed", "a sink is paused"]
