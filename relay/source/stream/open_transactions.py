"""Finds the transactions that the creation of a slot waits for: all that have written and are open.

Source: PostgreSQL documentation, "pg_stat_activity" and "pg_prepared_xacts".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Any

import psycopg
from psycopg.rows import class_row

from relay.faults import describe
from relay.runtime.threads import Thread
from relay.store.connections import Dsn, connect

log = logging.getLogger(__name__)

FIRST_SECONDS = 1.0
"""How long the creation of a slot may take before the oldest open transaction is reported."""
AGAIN_SECONDS = 10.0
"""How often it is reported after that."""


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction of any database of the server. `pid` is None if it is prepared, otherwise `gid` is None.

    `seconds` is how long it has been open; None if the role may not see that.
    """

    pid: int | None
    application_name: str | None
    gid: str | None
    seconds: float | None

    def __str__(self) -> str:
        duration = "" if self.seconds is None else f", open for {self.seconds:.0f} s"
        if self.gid is not None:
            return f"the prepared transaction {self.gid!r}{duration}"
        return f"the transaction of process {self.pid} ({self.application_name or 'no name'}){duration}"


def oldest_open(conn: psycopg.Connection[Any]) -> OpenTransaction | None:
    """Return the open transaction with the oldest xid. Raises psycopg.Error."""
    with conn.cursor(row_factory=class_row(OpenTransaction)) as cursor:
        return cursor.execute(
            """
            select pid, application_name, gid, extract(epoch from clock_timestamp() - since)::float8 as seconds
              from (select pid, application_name, null as gid, xact_start as since, backend_xid as xid
                      from pg_stat_activity where backend_xid is not null
                    union all
                    select null, null, gid, prepared, transaction from pg_prepared_xacts) as open
             order by age(xid) desc limit 1
            """
        ).fetchone()


@contextmanager
def reporting_blockers(dsn: Dsn, report_blockers: Callable[[str], None]) -> Iterator[None]:
    """Call `report_blockers` every AGAIN_SECONDS, in another thread, with the oldest open transaction."""
    ended = Event()
    thread = Thread(target=_watch, args=(dsn, report_blockers, ended), name="blockers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _watch(dsn: Dsn, report_blockers: Callable[[str], None], ended: Event) -> None:
    if ended.wait(FIRST_SECONDS):
        return
    try:
        with connect(dsn) as conn:
            while not ended.is_set():
                oldest = oldest_open(conn)
                if oldest is not None:
                    report_blockers(str(oldest))
                ended.wait(AGAIN_SECONDS)
    except psycopg.Error as error:
        log.debug(
            "cannot read which transaction the slot waits for", extra={"fault": describe(error)}
        )
