"""Two batches in flight: order and exactness whatever becomes of either, in whatever order their tasks run."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

import relay.service
from relay.config.settings import Settings
from relay.faults import FaultAction, TaskFault
from relay.model.batch import JobName, Task, TaskOutcome, Work
from relay.pipeline.apply import Applier
from relay.pipeline.inline import Result, attempt
from relay.service import Service
from relay.spark.engine import SparkEngine
from relay.spark.session import Session
from tests.outbox import Outbox, event, host, relaying, wait_until

SMALL = {"max_events": 200, "inline_max_events": 0}


class ReadySession:
    """Stands for a Spark session that is there."""

    slots = 4

    def start(self) -> None:
        pass

    def get(self, timeout: float = 0.0) -> object:
        return self

    def end(self) -> None:
        pass


@dataclass
class Job:
    """A job that a fake engine has run: whether it was the later of two, and what became of its tasks."""

    name: JobName
    tasks: Sequence[Work]
    guarded: bool
    ahead: bool
    results: list[Result] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        return any(isinstance(each, TaskOutcome) and each.busy for each in self.results)


class ThreadsEngine:
    """Applies on threads of this process, in any order; `meddle` may hold a job up or say what becomes of a task."""

    name = "spark"
    workers = 4
    is_busy = False

    def __init__(self, settings: Settings, meddle: Callable[[Job, Work], Result | None]) -> None:
        self._applier = Applier(settings, 8)
        self._meddle = meddle
        self._lock = threading.Lock()
        self._running = 0
        self.most = 0
        self.jobs: list[Job] = []
        self.abandoned: list[JobName] = []

    def run(self, tasks: Sequence[Work], guarded: bool, name: JobName) -> list[Result]:
        job = Job(name, tasks, guarded, any(isinstance(t, Task) and t.after for t in tasks))
        with self._lock:
            self.jobs.append(job)
            self._running += 1
            self.most = max(self.most, self._running)
        order = random.sample(range(len(tasks)), len(tasks))
        with ThreadPoolExecutor(2) as threads:
            done = dict(
                zip(order, threads.map(lambda n: self._one(job, tasks[n]), order), strict=True)
            )
        job.results = [done[number] for number in range(len(tasks))]
        with self._lock:
            self._running -= 1
        return job.results

    def _one(self, job: Job, task: Work) -> Result:
        fault = self._meddle(job, task)
        return fault or attempt(self._applier, task, job.guarded)

    def start(self) -> None:
        pass

    def is_ready(self, timeout: float = 0.0) -> bool:
        return True

    def abandon(self, name: JobName) -> None:
        self.abandoned.append(name)

    def close(self) -> None:
        self._applier.close()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ThreadsEngine]:
    """Replaces Spark's engine by a fake one in the pipelines of a test."""

    def install(
        settings: Settings, meddle: Callable[[Job, Work], Result | None] = lambda *_: None
    ) -> ThreadsEngine:
        engine = ThreadsEngine(settings, meddle)
        monkeypatch.setattr(relay.service, "SparkEngine", lambda *_: engine)
        return engine

    return install


def drain(outbox: Outbox, settings: Settings) -> None:
    session: Any = ReadySession()
    outbox.drain(settings, session)


def test_two_batches_are_in_flight_and_never_three(
    outbox: Outbox, fake: Callable[..., ThreadsEngine]
) -> None:
    outbox.fill(600, events=5, hosts=30)
    settings = outbox.settings("spark", batch=SMALL)
    engine = fake(settings)
    outbox.watch_positions()
    drain(outbox, settings)
    outbox.assert_exact()
    assert engine.most == 2
    assert any(job.ahead for job in engine.jobs)
    assert outbox.positions_moved_back() == 0


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(each, marks=pytest.mark.rare) for each in (1, 2))]
)
def test_order_and_exactness_whatever_fails_in_whatever_order(
    outbox: Outbox, fake: Callable[..., ThreadsEngine], seed: int
) -> None:
    chance = random.Random(seed)
    settings = outbox.settings("spark", batch=SMALL)
    applier = Applier(settings, 8)

    def meddle(job: Job, task: Work) -> Result | None:
        dice = chance.random()
        if dice < 0.1:
            return TaskFault(FaultAction.RETRY, "the connection is lost")
        if dice < 0.2:
            # The task commits, but the driver gets no result.
            attempt(applier, task, False)
            return TaskFault(FaultAction.RETRY, "the connection is lost after the commit")
        threading.Event().wait(chance.random() * 0.02)
        return None

    for number in range(400):
        amount = -1 if number % 131 == 70 else number
        outbox.publish(host(number % 12), event(amount), event(amount), event(amount))
    engine = fake(settings, meddle)
    drain(outbox, settings)
    applier.close()
    outbox.assert_exact()
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 9
    assert engine.most == 2


def test_a_task_of_the_later_batch_is_busy_until_the_one_before_is_applied(
    outbox: Outbox, fake: Callable[..., ThreadsEngine]
) -> None:
    """The batch in front fails while the later one is in flight, which then applies nothing and runs again."""
    outbox.fill(100, events=4, hosts=5)
    settings = outbox.settings("spark", batch=SMALL)
    later = threading.Event()

    def meddle(job: Job, _: Work) -> Result | None:
        if job.name.description.startswith("batch 1:") and "attempt 1" in job.name.description:
            assert later.wait(30)
            return TaskFault(FaultAction.RETRY, "the connection is lost")
        return None

    class Watching(ThreadsEngine):
        def run(self, tasks: Sequence[Work], guarded: bool, name: JobName) -> list[Result]:
            results = super().run(tasks, guarded, name)
            if self.jobs and any(job.busy for job in self.jobs):
                later.set()
            return results

    engine = fake(settings, meddle)
    engine.__class__ = Watching
    drain(outbox, settings)
    outbox.assert_exact()
    (ahead,) = [job for job in engine.jobs if job.name.description.startswith("batch 2:")][:1]
    assert all(isinstance(each, TaskOutcome) and each.busy for each in ahead.results)
    # What is tried again goes alone, and so does the batch after a failure.
    assert [job.name.description[:8] for job in engine.jobs[:4]] == [
        "batch 1:",
        "batch 2:",
        "batch 1:",
        "batch 2:",
    ]


def test_the_later_batch_is_given_up_and_is_applied_in_this_process_at_once(
    outbox: Outbox, fake: Callable[..., ThreadsEngine]
) -> None:
    """On Spark again, it would stand still for as long once more, and `relay.engines` would not have the reason."""
    outbox.fill(100, events=4, hosts=5)
    settings = outbox.settings("spark", batch=SMALL)
    later = threading.Event()

    def meddle(job: Job, _: Work) -> Result | None:
        if job.name.description.startswith("batch 1:"):
            assert later.wait(30)
            return None
        later.set()
        return TaskFault(FaultAction.RETRY, "the job stood still", stalled="a Spark task was late")

    engine = fake(settings, meddle)
    drain(outbox, settings)
    outbox.assert_exact()
    assert [job.name.description[:8] for job in engine.jobs].count("batch 2:") == 1
    assert outbox.value("select reason from relay.engines where engine = 'inline'") == (
        "a Spark task was late"
    )


def test_after_a_dead_letter_one_batch_goes_alone(
    outbox: Outbox, fake: Callable[..., ThreadsEngine]
) -> None:
    outbox.publish(host(1), event(-1), *(event(1) for _ in range(199)))
    outbox.fill(300, events=4, hosts=10)
    settings = outbox.settings("spark", batch=SMALL)
    engine = fake(settings)
    drain(outbox, settings)
    outbox.assert_exact()
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 200
    # The second was started before the first one's outcome was known. While it is in front, no third is.
    ahead = {
        job.name.group: job.ahead for job in engine.jobs if "attempt 1" in job.name.description
    }
    assert not ahead["relay default batch 3"]
    assert any(ahead.values())


def test_a_stop_ends_both_batches_and_the_later_is_recognised(
    outbox: Outbox, fake: Callable[..., ThreadsEngine]
) -> None:
    outbox.fill(200, events=4, hosts=10)
    settings = outbox.settings("spark", batch=SMALL)
    both = threading.Event()
    services: list[Service] = []

    def meddle(job: Job, _: Work) -> Result | None:
        if job.ahead and not both.is_set():
            services[0].stop()
            both.set()
        elif not job.ahead:
            both.wait(10)
        return None

    engine = fake(settings, meddle)
    session: Any = ReadySession()
    with relaying(settings, session) as service:
        services.append(service)
        wait_until(both.is_set)
    assert not engine.abandoned
    assert all(job.results for job in engine.jobs)
    assert 0 < outbox.handled() < 800
    fake(settings)
    drain(outbox, settings)
    outbox.assert_exact()


def test_guarded_batches_go_one_at_a_time(
    outbox: Outbox, fake: Callable[..., ThreadsEngine]
) -> None:
    outbox.fill(100, events=4, hosts=10)
    settings = outbox.settings("spark", batch=SMALL)
    outbox.conn.execute(
        "insert into relay.groups (group_id, running, instances) values (%s, true, '{elsewhere:1}')"
        " on conflict (group_id) do update set running = true, instances = '{elsewhere:1}'",
        (settings.group,),
    )
    engine = fake(settings)
    drain(outbox, settings)
    outbox.assert_exact()
    # As many events as two batches can have had in flight when the process died.
    assert all(job.guarded for job in engine.jobs)
    assert engine.most == 1


def test_a_window_is_polled_with_nothing_else_in_flight(
    outbox: Outbox, fake: Callable[..., ThreadsEngine]
) -> None:
    outbox.fill(200, events=4, hosts=10)
    settings = outbox.settings(
        "spark", batch=SMALL, source={**outbox.config()["source"], "mode": "auto"}
    )
    outbox.conn.execute(
        "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = %s",
        (outbox.slot,),
    )
    engine = fake(settings)
    session: Any = ReadySession()
    with relaying(settings, session):
        outbox.wait_handled()
    outbox.assert_exact()
    assert engine.most == 1


def test_spark_has_two_batches_in_flight(
    outbox: Outbox, spark_session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox.fill(1_500, events=4, hosts=30)
    running, most = [0], [0]
    real = SparkEngine.run

    def run(self: SparkEngine, tasks: Sequence[Work], guarded: bool, name: JobName) -> list[Result]:
        running[0] += 1
        most[0] = max(most[0], running[0])
        try:
            return real(self, tasks, guarded, name)
        finally:
            running[0] -= 1

    monkeypatch.setattr(SparkEngine, "run", run)
    outbox.drain(outbox.settings("spark", batch={"max_events": 1_000}), spark_session)
    outbox.assert_exact()
    assert most == [2]
