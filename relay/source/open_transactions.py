"""Which transactions the creation of a slot waits for: all that have written and are open.

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
from relay.store.connections import connect
from relay.threads import Thread

log = logging.getLogger(__name__)

FIRST_SECONDS = 1.0
"""How long the creation of a slot may take before the oldest of these is reported."""
AGAIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction of any database of the server. `pid` is None where it is prepared, `gid` where it is not.

    `seconds` is how long it has been open, None where the role may not know.
    """

    pid: int | None
    application_name: str | None
    gid: str | None
    seconds: float | None

    def __str__(self) -> str:
        lasts = "" if self.seconds is None else f", open for {self.seconds:.0f} s"
        if self.gid is not None:
            return f"the prepared transaction {self.gid!r}{lasts}"
        return (
            f"the transaction of process {self.pid} ({self.application_name or 'no name'}){lasts}"
        )


def oldest_open(conn: psycopg.Connection[Any]) -> OpenTransaction | None:
    """The transaction with the oldest xid of those that have not ended. Raises psycopg.Error."""
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
def reporting_blockers(dsn: str, report_blockers: Callable[[str], None]) -> Iterator[None]:
    """Call `report_blockers` from time to time, in another thread, with the oldest open transaction."""
    ended = Event()
    thread = Thread(target=_watch, args=(dsn, report_blockers, ended), name="waits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _watch(dsn: str, report_blockers: Callable[[str], None], ended: Event) -> None:
    if ended.wait(FIRST_SECONDS):
        return
    try:
        with connect(dsn) as conn:
            while not ended.is_set():
                found = oldest_open(conn)
                if found is not None:
                    report_blockers(str(found))
                ended.wait(AGAIN_SECONDS)
    except psycopg.Error as error:
        log.debug(
            "cannot read which transaction the slot waits for", extra={"fault": describe(error)}
        )
