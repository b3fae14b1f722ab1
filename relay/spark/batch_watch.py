"""Watches whether the batch that a Spark sink writes makes progress."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread, get_native_id
from typing import TYPE_CHECKING

from relay.config.settings import Settings
from relay.runtime.threads import processor_seconds
from relay.spark.descriptions import safe_description
from relay.spark.engine import tasks_of
from relay.store.connections import APPLICATION_NAME, connect
from relay.store.positions import sinks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

TASKS_SECONDS = 5.0
"""Seconds between two polls of the tasks of a batch."""
STILL_SECONDS = 120.0
"""Seconds without a task that begins or ends after which `relay status` shows that a batch makes no progress."""
COMPUTING_SECONDS = 0.1
"""Seconds of processor time between two such polls from which on relay's process works at a batch without a task."""


class BatchWatch:
    """Tells whether the batches of one sink make progress, by the tasks of its jobs, which are in `job_group`.

    `shows_fault`: the sink's row may have a fault. At the beginning a former process may have left one.
    """

    def __init__(self, name: str, settings: Settings) -> None:
        self.job_group = f"relay sink {name}"
        self.shows_fault = True
        self._name = name
        self._settings = settings
        self._noting = Lock()

    @contextmanager
    def during(self, session: SparkSession, number: int) -> Iterator[None]:
        """Store for `relay status` that the batch of the context, by its number, makes no progress while that is so.

        Where no task is left, computing in this process is progress, such as a merge by deltalake. A query or function
        may take long, so nothing is cancelled. Spark Connect does not report tasks.
        """
        if self._settings.spark.remote:
            yield
            return
        ended = Event()
        watch = Thread(
            target=self._watch,
            args=(session, number, ended, get_native_id()),
            name="spark-sink-watch",
            daemon=True,
        )
        watch.start()
        try:
            yield
        finally:
            with self._noting:
                ended.set()

    def _watch(self, session: SparkSession, number: int, ended: Event, thread: int) -> None:
        before, since, fault = (0, 0), time.monotonic(), ""
        computed = processor_seconds(thread)
        while not ended.wait(TASKS_SECONDS):
            try:
                running, unfinished = tasks_of(session, self.job_group)
                former_seconds, computed = computed, processor_seconds(thread)
                computes = not unfinished and computed - former_seconds >= COMPUTING_SECONDS
                if computes or (running, unfinished) != before:
                    before, since = (running, unfinished), time.monotonic()
                    if fault:
                        fault = ""
                        self._note_still(None, ended)
                    continue
                if time.monotonic() - since < STILL_SECONDS:
                    continue
                why = (
                    f"no Spark task has ended for {STILL_SECONDS:.0f} s: {running} running, "
                    f"{unfinished - running} without a slot"
                )
                if not unfinished:
                    why = (
                        f"no Spark task runs, and relay's process has computed nothing for {STILL_SECONDS:.0f} s: the "
                        "destination does not respond, or your function waits"
                    )
                former, fault = fault, f"batch {number}: {why}"
                if fault != former:
                    self._note_still(fault, ended)
            except Exception as error:
                # Of the session that has died, or of the target: the batch fails of it.
                log.debug("cannot watch a batch", extra={"fault": safe_description(error)})

    def _note_still(self, fault: str | None, ended: Event) -> None:
        """Store that a batch makes no progress, None where it does again, unless it has ended. Raises psycopg.Error."""
        with (
            self._noting,
            connect(self._settings.target_dsn, application_name=APPLICATION_NAME) as conn,
        ):
            if ended.is_set():
                return
            sinks.note_fault(conn, self._settings.group, self._name, fault)
            self.shows_fault = True
        if fault is None:
            log.info("a batch of a Spark sink goes on", extra={"handler": self._name})
            return
        log.warning(
            "a batch of a Spark sink makes no progress",
            extra={"handler": self._name, "fault": fault},
        )
