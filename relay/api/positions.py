"""Positions of clients in the log, as texts, and what is read from one on."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import replace
from uuid import UUID

import numpy as np
import psycopg
from starlette.exceptions import HTTPException

from relay.config.settings import Settings
from relay.config.source import OWN_OUTBOX
from relay.faults import NotNow, refused_for_good
from relay.model.snapshots import BEGINNING, Snapshot
from relay.retention.lost_events import lost_after
from relay.source.server import TimelineHistory, durable_position
from relay.source.walsender import identify, open_replication
from relay.source.witnesses import HeldWitnesses, newest_of, recent
from relay.store import log_pages
from relay.store.connections import Connection
from relay.store.log_pages import AheadOfServer, KnownWitness, LogPosition, Origin, OutboxPage

LONGEST = 30_000
"""The most characters of a position: it names the transactions that were in progress."""
_POSITION = re.compile(
    r"(\d{1,18}):(\d{1,18}):((?:\d{1,18}(?:,\d{1,18})*)?)(?:~(\d{1,18})\.(\d{1,18}))?"
    r"@(\d{1,20}\.\d{1,10}\.\d{1,20})(?:([.~])([0-9a-f]{32}))?",
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
    xmin, xmax, between, xid, offset, origin, proof, witness = match.groups()
    snapshot = Snapshot.parse(f"{xmin}:{xmax}:{between}")
    inside = snapshot.in_progress
    if list(inside) != sorted(set(inside)) or snapshot.xmin != (inside or (snapshot.xmax,))[0]:
        raise _refused()
    if snapshot.xmin < 1 or any(each >= snapshot.xmax for each in inside):
        raise _refused()
    given = LogPosition(
        snapshot,
        Origin.parse(origin),
        witness=None if witness is None else UUID(witness),
        covered=proof == ".",
    )
    if xid is None:
        return given
    if given.covered or not snapshot.shows(np.array([int(xid)])):
        raise _refused()
    return replace(given, xid=int(xid), offset=int(offset))


def _refused() -> HTTPException:
    return HTTPException(
        400, "the position is neither now, beginning, nor one that this API has returned"
    )


class EventsRemoved(Exception):
    """Retention has removed events that a page would have had."""


class EventsLost(Exception):
    """The server may lack events that a position has: another one has replaced it."""


_WITNESS_SECONDS = 1.0
"""How old the witness that positions name is, at least, before another one is taken."""


class LogHistory:
    """Tells whether a server has all that a position has, and takes witnesses of that. Safe in several threads.

    A standby that is promoted goes on from what it has received, on a timeline of its own, and gives the transaction
    ids of what it lacks to others. The LSN at which it left the former timeline decides, as for relay itself. Where
    that is not known, or is no answer, as on a server that was restored from an older image, or made by pg_upgrade, the
    witness of the position decides.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._read = TimelineHistory(0)
        self.known: KnownWitness | None = None
        """The newest witness that this process knows."""
        self._looked = -_WITNESS_SECONDS
        self._held = HeldWitnesses()

    def covered(self, conn: Connection, end: LogPosition) -> LogPosition:
        """Return the end of the log as a position that a witness covers, where that is possible.

        It looks for one at most once a second, and takes one only where the newest does not see all of the log. Raises
        psycopg.Error.
        """
        origin, now = end.origin, time.monotonic()
        if end.covered or end.xid is not None or origin is None:
            return end
        if now < self._looked + _WITNESS_SECONDS:
            return end
        self._looked = now
        newest, sees_all = newest_of(conn, OWN_OUTBOX)
        if not sees_all:
            newest = recent(conn)
        if newest is None:
            return end
        self.known = KnownWitness(newest, origin.server, origin.timeline)
        is_covered = sees_all or newest.proves(end.snapshot)
        return replace(end, witness=newest.id, covered=is_covered)

    def has(self, conn: Connection, position: LogPosition, now: Origin) -> bool:
        """Whether the server of a session, which is at `now`, has all that a position has, by its WAL.

        Raises TransientFault, psycopg.Error.
        """
        then, witness = position.origin, position.witness
        if then is None:
            return True
        if then.server != now.server:
            return False
        if then.timeline == now.timeline:
            return witness is None or self._held.has(conn, witness)
        if self._read.timeline != now.timeline:
            self._read = self._history(now.timeline)
        former = TimelineHistory(then.timeline)
        shared = self._read.since(then.timeline).shared_until(former)
        return shared is None or then.lsn <= shared

    def proven(self, conn: Connection, position: LogPosition) -> LogPosition | None:
        """Return a position by its witness: as it is, or as the witness sees it, where the server holds that one.

        Raises psycopg.Error.
        """
        if position.witness is None or not self._held.has(conn, position.witness):
            return None
        row = conn.execute(
            "select snapshot::text from relay.witnesses where id = %s", (position.witness,)
        ).fetchone()
        if row is None:
            return None
        seen, snapshot = Snapshot.parse(row[0]), position.snapshot
        if not seen.covers(snapshot):
            if not position.covered or not snapshot.covers(seen):
                return None
            snapshot = seen
        return replace(position, snapshot=snapshot, origin=None)

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
            raise NotNow("source.dsn: its servers are on different timelines")
        return history


def present(conn: Connection, history: LogHistory) -> LogPosition:
    """Read the position after all that is committed now, of which a crash takes nothing. Raises psycopg.Error."""
    now = durable_position(conn).snapshot
    end = log_pages.read(conn, LogPosition(now), 1, now, history.known).end
    return history.covered(conn, end)


def read_page(
    conn: Connection,
    history: LogHistory,
    after: LogPosition,
    events: int,
    until: Snapshot | None = None,
) -> OutboxPage:
    """Read a page of the log, from which nothing is missing, and of which a crash of the server takes nothing.

    With `until`, that is so already of what `until` sees; without it, the end of the log is covered by a witness where
    that is possible. Raises EventsLost, EventsRemoved, TransientFault, psycopg.Error.
    """
    # Before the page: its origin has all of these commits.
    seen = until or durable_position(conn).snapshot
    page = None
    with suppress(AheadOfServer):
        page = log_pages.read(conn, after, events, seen, history.known)
    if page is None or not history.has(conn, after, page.origin):
        proven = history.proven(conn, after)
        if proven is None:
            raise EventsLost
        after, page = proven, log_pages.read(conn, proven, events, seen, history.known)
    # After it: what was removed before the page was read is known then.
    if lost_after(conn, OWN_OUTBOX, after.before) is not None:
        raise EventsRemoved
    if until is None and not page.transactions:
        return replace(page, end=history.covered(conn, page.end))
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
    except EventsLost:
        raise _gone(
            "the database server has been replaced, or restored from a backup or a dump, and may lack events before "
            "this position"
        ) from None
    except EventsRemoved:
        raise _gone("retention has removed events after this position") from None


def _gone(why: str) -> HTTPException:
    return HTTPException(410, f"{why}: go on from `now` or `beginning`")
