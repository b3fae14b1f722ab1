"""Reports the progress of an index build, which the server shows in another session.

Source: PostgreSQL documentation, "CREATE INDEX Progress Reporting".
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Event
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from relay.faults import describe
from relay.runtime.reporting import ProgressReport, silent
from relay.runtime.threads import beside
from relay.store.connections import connect

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5


@contextmanager
def reported(conn: psycopg.Connection[Any], what: str, report: ProgressReport) -> Iterator[None]:
    """Report the blocks read while `conn` builds an index, from another thread; `silent` needs no thread."""
    if report is silent:
        yield
        return
    report(what)
    dsn = make_conninfo(conn.info.dsn, password=conn.info.password or None)
    with beside(partial(_watch, dsn, conn.info.backend_pid, what, report), "index build"):
        yield


def _watch(dsn: str, pid: int, what: str, report: ProgressReport, ended: Event) -> None:
    try:
        with connect(dsn) as conn:
            while not ended.wait(_POLL_SECONDS):
                row = conn.execute(
                    "select blocks_done, blocks_total from pg_stat_progress_create_index where pid = %s",
                    (pid,),
                ).fetchone()
                if row is not None and row[1]:
                    report(what, row[0], row[1])
    except psycopg.Error as error:
        log.debug("cannot read the progress of the index build", extra={"fault": describe(error)})
