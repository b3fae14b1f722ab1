"""Logs what a task that takes long waits for, so that an instance does not stand still without a word."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import psycopg

from relay.faults import describe
from relay.pipeline.active_jobs import ActiveJobs, Job
from relay.runtime.parts import Condition, Recurring
from relay.store.connections import Dsn, connect

log = logging.getLogger(__name__)

LONG_SECONDS = 10.0
"""How long a task makes no progress before that is logged."""
AGAIN_SECONDS = 60.0
"""After how long it is logged again."""

_IDLE = {"Client ClientRead": "the handler, which runs no statement"}
_WAITS = """
    select a.pid, coalesce(a.wait_event_type || ' ' || a.wait_event, a.state),
           (select string_agg(b.pid || ' (' || coalesce(nullif(b.application_name, ''), b.usename) || ')', ', ')
              from pg_stat_activity as b where b.pid = any(pg_blocking_pids(a.pid)))
      from pg_stat_activity as a where a.pid = any(%s)
"""


class LongTasks(Recurring):
    """A thread that logs the tasks of this process which make no progress, and what their sessions wait for."""

    def __init__(self, dsn: Dsn, jobs: ActiveJobs) -> None:
        self._dsn = dsn
        self._jobs = jobs
        self._logged: Mapping[Job, float] = {}
        super().__init__(
            Condition("long tasks", log, "cannot look after tasks", "tasks are looked after again")
        )

    def turn(self) -> float:
        """Log the tasks that make no progress, and those that have ended since."""
        self._check(time.monotonic())
        self.condition.works()
        return LONG_SECONDS / 2

    def _check(self, now: float) -> None:
        jobs = self._jobs.jobs()
        self._report_ended(jobs)
        long = [job for job in jobs if now - job.at >= LONG_SECONDS]
        due = [job for job in long if now - self._logged.get(job, -AGAIN_SECONDS) >= AGAIN_SECONDS]
        if not due:
            return
        self._logged = {
            job: self._logged[job] for job in long if job in self._logged
        } | dict.fromkeys(due, now)
        try:
            waits = self._waits([job.pid for job in due if job.pid is not None])
            otherwise = "a session of the target"
        except psycopg.Error as error:
            # The target may be the reason why the task is in flight for long.
            waits, otherwise = {}, f"the target, which does not answer: {describe(error)}"
        for job in due:
            state, blockers = waits.get(job.pid or 0, (None, None))
            fields = {
                "seconds": round(now - job.at),
                "handler": job.handler,
                "waits_for": "the source"
                if job.reads
                else _IDLE.get(state or "", state) or otherwise,
                "blocked_by": blockers,
            }
            log.warning(
                "a task is in flight for long",
                extra={name: value for name, value in fields.items() if value is not None},
            )

    def _report_ended(self, jobs: Sequence[Job]) -> None:
        """Log the tasks that took long and have ended."""
        ended = [job for job in self._logged if job not in jobs]
        self._logged = {job: at for job, at in self._logged.items() if job not in ended}
        for job in ended:
            log.info(
                "a task that was in flight for long has ended",
                # `at` is when it has gone on at last. Its end is noticed later.
                extra={
                    "seconds": round(job.at - job.began),
                    "handler": max(job.seconds, key=job.seconds.__getitem__, default=None),
                },
            )

    def _waits(self, pids: Sequence[int]) -> Mapping[int, tuple[str | None, str | None]]:
        """What sessions of the target wait for, and the sessions that block them, by pid."""
        if not pids:
            return {}
        with connect(self._dsn) as conn:
            return {
                pid: (state, blockers)
                for pid, state, blockers in conn.execute(_WAITS, (list(pids),))
            }
