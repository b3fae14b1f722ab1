"""Runs batches: plan the tasks, choose the engine, try again until every task is durable."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from threading import Event
from typing import Any, Protocol

import psycopg
from psycopg_pool import ConnectionPool
from tenacity import RetryCallState

from relay.batch import Batch, Outcome, Task, TaskOutcome, Work
from relay.config import Settings
from relay.events import Lsn
from relay.faults import (
    Action,
    Braked,
    Interrupted,
    TaskFault,
    TransientFault,
    describe,
    is_transient,
)
from relay.patience import until_it_works
from relay.pipeline.apply import Applier
from relay.pipeline.inline import InlineEngine, Result
from relay.pipeline.plan import Planner
from relay.spark.session import Session
from relay.store import arrays
from relay.store.connections import open_pool

log = logging.getLogger(__name__)

ONE_LANE_EVENTS = 100
"""Up to so many events, a commit costs more than what runs side by side saves."""


class Engine(Protocol):
    """Applies tasks, each in a target transaction of its own."""

    name: str

    @property
    def lanes(self) -> int | None:
        """How many tasks run side by side; None where nobody tells."""

    def run(self, tasks: Sequence[Work], guarded: bool) -> list[Result]:
        """The result of each task, in order. Guarded, one after the other, so that what a process dies of shows."""


Floors = Callable[[Iterable[int]], Mapping[int, Lsn]]


class Pipeline:
    """From a batch to its outcome. Large batches go to Spark, small ones to threads of this process.

    A Spark session that is passed in is shared: it must be started, and stays open at the end. `floors` tells how far
    partitions must have come, of those that the target could have forgotten in a crash.
    """

    def __init__(
        self,
        settings: Settings,
        session: Session | None = None,
        floors: Floors | None = None,
    ) -> None:
        self._floors = floors
        self._limit = settings.batch.inline_max_events
        self._stopping = Event()
        workers = settings.batch.inline_workers
        # One more connection for what is taken up again beside the batches, with the same limits on deliveries.
        self.applier = Applier(settings, workers + 1)
        self._inline = InlineEngine(self.applier, workers)
        self._own_session = session is None
        self.session = session or Session(settings.spark, settings)
        self._source: ConnectionPool[psycopg.Connection[Any]] = open_pool(settings.source_dsn, 1)
        self._planner = Planner(settings.partitions, self._hashtext, settings.poll.partition_ids)
        self._settings = settings
        self._batch_events = settings.batch.max_events
        self._guarded_events = 0
        self._retrying = until_it_works(self._stopping, self._say)
        self._in_hand = 0
        self._said = ""

    @cached_property
    def _spark(self) -> Engine:
        # Most of the time nothing is large enough for Spark, and its libraries take more memory than all the rest.
        from relay.spark.engine import SparkEngine

        return SparkEngine(self._settings, self.session)

    def start(self) -> None:
        """Start the Spark session in the background, unless the first large batch is to start it."""
        eager = self._settings.spark.eager and self._settings.needs_spark
        if (eager or self._limit == 0) and self._own_session:
            self.session.start()

    def guard(self) -> None:
        """A process has died: note which transaction is in flight, for as many events as it can have had in a batch."""
        self._guarded_events = self._batch_events

    def interrupt(self) -> None:
        """Give up waiting to try again: the batch in flight ends or raises Interrupted."""
        self._stopping.set()

    def close(self) -> None:
        """Stop the engines and close the connections."""
        self._stopping.set()
        self._inline.close()
        if self._own_session:
            self.session.close()
        self._source.close()

    def run(self, batch: Batch) -> Outcome:
        """Apply the batch; returns when all of it is durable.

        Tries again as long as faults are transient. Raises RelayError where trying again is no use, and Interrupted
        when the service is stopping; then nothing may be acknowledged.
        """
        done: list[TaskOutcome] = []
        todo: Sequence[Work] | None = None
        engine: Engine = self._inline

        def once() -> None:
            nonlocal todo, engine
            engine = self._engine(batch)
            if todo is None:
                lanes = 1 if batch.events <= ONE_LANE_EVENTS else engine.lanes
                todo = self._with_floors(self._planner.work(batch, lanes))
            results = engine.run(todo, self._guarded_events > 0)
            if any(isinstance(result, TaskFault) and result.died for result in results):
                self.guard()
            todo, faults = _sort(todo, results, done)
            if faults:
                raise _worst(faults)

        self._until_it_works(once, batch)
        outcome = Outcome(engine.name, tuple(done))
        handled = outcome.applied + outcome.deferred + sum(dead.events for dead in outcome.dead)
        self._guarded_events -= handled
        return outcome

    def _with_floors(self, tasks: Sequence[Work]) -> Sequence[Work]:
        if self._floors is None:
            return tasks
        return [
            replace(task, floors=self._floors(task.partitions)) if isinstance(task, Task) else task
            for task in tasks
        ]

    def _until_it_works(self, attempt: Callable[[], None], batch: Batch) -> None:
        self._in_hand, self._said = batch.number, ""
        try:
            self._retrying(attempt)
        except Exception as error:
            if is_transient(error):
                raise Interrupted from None
            raise

    def _say(self, state: RetryCallState) -> None:
        """Log why the batch in flight has to wait, once for each reason."""
        error = state.outcome.exception() if state.outcome else None
        text = str(error) if isinstance(error, TransientFault) else describe(error) if error else ""
        if text != self._said:
            self._said = text
            braked = isinstance(error, Braked)
            log.log(
                logging.ERROR if braked else logging.WARNING,
                "a handler is stopped" if braked else "the batch waits to be tried again",
                extra={"batch": self._in_hand, "fault": text},
            )

    def _engine(self, batch: Batch) -> Engine:
        if batch.spooled or batch.events <= self._limit:
            # A spooled transaction is a file of this machine.
            return self._inline
        if self._limit == 0:
            while not self.session.get(timeout=0.5) and not self._stopping.is_set():
                pass
            return self._spark
        if self.session.get():
            return self._spark
        if self._own_session:
            self.session.start()
        return self._inline

    def _hashtext(self, hosts: Sequence[str]) -> list[int]:
        with self._source.connection() as conn:
            rows = conn.execute(
                "select hashtext(host) from unnest(%s::text[]) with ordinality as t (host, n) order by n",
                (arrays.of_texts(hosts),),
            ).fetchall()
        return [value for (value,) in rows]


def _sort(
    tasks: Sequence[Work], results: Sequence[Result], done: list[TaskOutcome]
) -> tuple[list[Work], list[TaskFault]]:
    """Keep what is done; returns the tasks to try again and why. Raises RelayError for a fault that stops."""
    todo: list[Work] = []
    faults: list[TaskFault] = []
    for task, result in zip(tasks, results, strict=True):
        if isinstance(result, TaskOutcome):
            done.append(result)
        elif result.action is Action.STOP:
            raise result.as_error()
        else:
            todo.append(task)
            faults.append(result)
    return todo, faults


def _worst(faults: Sequence[TaskFault]) -> TransientFault:
    for fault in faults:
        if fault.braked:
            return Braked(fault.text)
    return TransientFault(faults[0].text)
