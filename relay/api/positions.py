"""Positions of clients in the log, as texts, and what is read from one on."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from starlette.exceptions import HTTPException

from relay.config.source import OWN_OUTBOX
from relay.model.snapshots import BEGINNING, Snapshot
from relay.retention.removals import lost_after
from relay.source.server import durable_position
from relay.store import log_pages
from relay.store.connections import Connection
from relay.store.log_pages import AheadOfServer, OutboxPage

LONGEST = 30_000
"""The most characters of a position: it names the transactions that were in progress."""
_POSITION = re.compile(
    r"(\d{1,18}):(\d{1,18}):((?:\d{1,18}(?:,\d{1,18})*)?)(?:~(\d{1,18})\.(\d{1,18}))?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class LogPosition:
    """Everything that `snapshot` sees is read, but for the rest of the transaction `xid`, after its c_offset `offset`.

    It grants nothing: what is read from there on depends on the token.
    """

    snapshot: Snapshot
    xid: int | None = None
    offset: int = 0

    @property
    def before(self) -> Snapshot:
        """What is read as a whole: the snapshot, without the transaction of which something is left."""
        if self.xid is None:
            return self.snapshot
        inside = tuple(sorted({*self.snapshot.in_progress, self.xid}))
        return Snapshot(inside[0], self.snapshot.xmax, inside)

    def __str__(self) -> str:
        """The position as a text for a URL or a header."""
        return (
            f"{self.snapshot}" if self.xid is None else f"{self.snapshot}~{self.xid}.{self.offset}"
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
    xmin, xmax, between, xid, offset = match.groups()
    snapshot = Snapshot.parse(f"{xmin}:{xmax}:{between}")
    inside = snapshot.in_progress
    if list(inside) != sorted(set(inside)) or snapshot.xmin != (inside or (snapshot.xmax,))[0]:
        raise _refused()
    if snapshot.xmin < 1 or any(each >= snapshot.xmax for each in inside):
        raise _refused()
    if xid is None:
        return LogPosition(snapshot)
    if not snapshot.sees(np.array([int(xid)])).all():
        raise _refused()
    return LogPosition(snapshot, int(xid), int(offset))


def _refused() -> HTTPException:
    return HTTPException(
        400, "the position is neither now, beginning, nor one that this API has returned"
    )


class EventsRemoved(Exception):
    """Retention has removed events that a page would have had."""


def present(conn: Connection) -> Snapshot:
    """Read the snapshot of what is committed now, of which a crash takes nothing. Raises psycopg.Error."""
    return durable_position(conn).snapshot


def read_page(
    conn: Connection, after: Snapshot, events: int, until: Snapshot | None = None
) -> OutboxPage:
    """Read a page of the log, from which nothing is missing, and of which a crash of the server takes nothing.

    With `until`, that is so already of what `until` sees. Raises AheadOfServer, EventsRemoved, psycopg.Error.
    """
    page = log_pages.read(conn, after, events, until)
    if until is None and page.end != after:
        durable_position(conn)
    # After it: what was removed before the page was read is known then.
    if lost_after(conn, OWN_OUTBOX, after) is not None:
        raise EventsRemoved
    return page


def read_kept(
    conn: Connection, after: Snapshot, events: int, until: Snapshot | None = None
) -> OutboxPage:
    """Read a page of the log for a request. Raises HTTPException (400, 410), and psycopg.Error."""
    try:
        return read_page(conn, after, events, until)
    except AheadOfServer as error:
        raise HTTPException(400, str(error)) from None
    except EventsRemoved:
        raise HTTPException(
            410, "retention has removed events after this position: go on from `now` or `beginning`"
        ) from None
