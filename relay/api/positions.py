"""Positions of clients in the log, as texts, and what is read from one on."""

from __future__ import annotations

import re

import numpy as np
import psycopg
from starlette.exceptions import HTTPException

from relay.config.settings import Settings
from relay.config.source import OWN_OUTBOX
from relay.faults import TransientFault, refused_for_good
from relay.model.snapshots import BEGINNING, Snapshot
from relay.retention.removals import lost_after
from relay.source.server import TimelineHistory, durable_position
from relay.source.stream.walsender import identify, open_replication
from relay.store import log_pages
from relay.store.connections import Connection
from relay.store.log_pages import AheadOfServer, LogPosition, Origin, OutboxPage

LONGEST = 30_000
"""The most characters of a position: it names the transactions that were in progress."""
_POSITION = re.compile(
    r"(\d{1,18}):(\d{1,18}):((?:\d{1,18}(?:,\d{1,18})*)?)(?:~(\d{1,18})\.(\d{1,18}))?"
    r"@(\d{1,20}\.\d{1,10}\.\d{1,20})",
    re.ASCII,
)


def parse(text: str) -> LogPosition | None:
    """Return the position of a text; None for `now`. Raises HTTPException (400) for one that relay has not made."""
    if text == "now":
        return None
    if text == "beginning":
        return LogPosition(BEGINNING)
    match = _POSITION.fullmatch(text) if len(text) <= LONGEST else None
    if match is None:
        raise _refused()
    xmin, xmax, between, xid, offset, origin = match.groups()
    snapshot = Snapshot.parse(f"{xmin}:{xmax}:{between}")
    inside = snapshot.in_progress
    if list(inside) != sorted(set(inside)) or snapshot.xmin != (inside or (snapshot.xmax,))[0]:
        raise _refused()
    if snapshot.xmin < 1 or any(each >= snapshot.xmax for each in inside):
        raise _refused()
    taken = Origin.parse(origin)
    if xid is None:
        return LogPosition(snapshot, taken)
    if not snapshot.sees(np.array([int(xid)])).all():
        raise _refused()
    return LogPosition(snapshot, taken, int(xid), int(offset))


def _refused() -> HTTPException:
    return HTTPException(
        400, "the position is neither now, beginning, nor one that this API has returned"
    )


class EventsRemoved(Exception):
    """Retention has removed events that a page would have had."""


class EventsLost(Exception):
    """The server may lack events that a position has: another one has replaced it."""


class LogHistory:
    """Tells whether a server has all that a position has. Safe in several threads.

    A standby that is promoted goes on from what it has received, on a timeline of its own, and gives the transaction
    ids of what it lacks to others. The LSN at which it left the former timeline decides, as for relay itself.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._read = TimelineHistory(0)

    def has(self, then: Origin, now: Origin) -> bool:
        """Whether a server that is at `now` has everything up to `then`. Raises TransientFault, psycopg.Error."""
        if then.server != now.server:
            return False
        if then.timeline == now.timeline:
            return True
        if self._read.timeline != now.timeline:
            self._read = self._history(now.timeline)
        former = TimelineHistory(then.timeline)
        shared = self._read.since(then.timeline).shared_until(former)
        return shared is None or then.lsn <= shared

    def _history(self, timeline: int) -> TimelineHistory:
        """Read the history of a timeline; without the right to, it shares nothing with others."""
        try:
            with open_replication(self._settings) as conn:
                history = identify(conn).history
        except psycopg.OperationalError as error:
            if not refused_for_good(error):
                raise
            return TimelineHistory(timeline)
        if history.timeline != timeline:
            raise TransientFault("source.dsn: its servers are on different timelines")
        return history


def present(conn: Connection) -> LogPosition:
    """Read the position after all that is committed now, of which a crash takes nothing. Raises psycopg.Error."""
    now = durable_position(conn).snapshot
    return log_pages.read(conn, LogPosition(now), 1, now).end


def read_page(
    conn: Connection,
    history: LogHistory,
    after: LogPosition,
    events: int,
    until: Snapshot | None = None,
) -> OutboxPage:
    """Read a page of the log, from which nothing is missing, and of which a crash of the server takes nothing.

    With `until`, that is so already of what `until` sees. Raises AheadOfServer, EventsLost, EventsRemoved,
    TransientFault, psycopg.Error.
    """
    if until is None:
        # Before the page: its origin has all of these commits.
        until = durable_position(conn).snapshot
    page = log_pages.read(conn, after, events, until)
    if after.origin is not None and not history.has(after.origin, page.origin):
        raise EventsLost
    # After it: what was removed before the page was read is known then.
    if lost_after(conn, OWN_OUTBOX, after.before) is not None:
        raise EventsRemoved
    return page


def read_kept(
    conn: Connection,
    history: LogHistory,
    after: LogPosition,
    events: int,
    until: Snapshot | None = None,
) -> OutboxPage:
    """Read a page of the log for a request. Raises HTTPException (410), TransientFault and psycopg.Error."""
    try:
        return read_page(conn, history, after, events, until)
    except (AheadOfServer, EventsLost):
        raise _gone(
            "the database server has been replaced, and may lack events before this position"
        ) from None
    except EventsRemoved:
        raise _gone("retention has removed events after this position") from None


def _gone(why: str) -> HTTPException:
    return HTTPException(410, f"{why}: go on from `now` or `beginning`")
