"""Positions in the log, and pages of it after one, by `relay.read_log`, for readers without a name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple
from uuid import UUID

import psycopg

from relay.model.page_snapshots import PageSnapshots
from relay.model.snapshots import Snapshot, Witness
from relay.store.connections import Connection

_READ = """
    select reached, origin, c_xid::text::bigint, c_offset, host_id::text, event_type, aggregate_type, aggregate_id,
           event
      from relay.read_log(%s, %s, %s, %s, %s)
"""
_IS_FAR = """
    select count(*) > %(most)s
      from (select from public.outbox_message_t where c_xid >= %(xmax)s::text::xid8 limit %(most)s + 1) as unread
"""
_CAUSED = """
    with asked as (select c_xid, c_offset from public.outbox_message_t where id = %(id)s::uuid limit 1)
    select c_xid::text::bigint, c_offset, host_id::text, event_type, aggregate_type, aggregate_id, ''
      from ((select * from public.outbox_message_t where c_xid >= (select c_xid from asked) order by c_xid
              limit %(most)s)
            union all
            (select * from public.outbox_message_t where c_xid < (select c_xid from asked) order by c_xid desc
              limit %(most_before)s)) as near
     where c_offset > (select c_offset from asked)
       and %(id)s::uuid::text in (metadata ->> 'causation_id', metadata ->> 'correlation_id')
     order by c_offset
"""
_TEXT = "select event from relay.read_log(%s, 1, within => %s, past => %s) where c_offset = %s"


ANSWER_DISTANCE = 100_000
"""How many events after an event an answer to it is looked for, so that no index has to have it."""
_ANSWER_DISTANCE_BEFORE = 10_000
"""How many events before it, too: what answers it may be of a transaction that had begun already."""
_FIRST_EVENTS, _MOST_EVENTS = 100, 1_000
_PAGE_BYTES = 256 * 1024


class Origin(NamedTuple):
    """Where a snapshot was taken: the system identifier and the timeline of the server, and an LSN.

    The WAL up to there has the end of each transaction that the snapshot sees as ended.
    """

    server: int
    timeline: int
    lsn: int

    @classmethod
    def parse(cls, text: str) -> Origin:
        """Parse the text of an origin. Raises ValueError for any other text."""
        server, timeline, lsn = map(int, text.split("."))
        return cls(server, timeline, lsn)

    def __str__(self) -> str:
        return f"{self.server}.{self.timeline}.{self.lsn}"


class KnownWitness(NamedTuple):
    """A witness that a server holds, and which server that is, on which timeline."""

    witness: Witness
    server: int
    timeline: int


@dataclass(frozen=True, slots=True)
class LogPosition:
    """Everything that `snapshot` sees is read, but for the rest of the transaction `xid`, after its c_offset `offset`.

    It grants nothing: what is read from there on depends on the token. The beginning has no origin.

    `witness` is the newest one that was known. With `covered` its snapshot sees every event that this one sees: what
    they differ in has published nothing.
    """

    snapshot: Snapshot
    origin: Origin | None = None
    xid: int | None = None
    offset: int = 0
    witness: UUID | None = None
    covered: bool = False

    @property
    def before(self) -> Snapshot:
        """What is read as a whole: the snapshot, without the transaction of which something is left."""
        if self.xid is None:
            return self.snapshot
        inside = tuple(sorted({*self.snapshot.in_progress, self.xid}))
        return Snapshot(inside[0], self.snapshot.xmax, inside)

    def __str__(self) -> str:
        """The position as a text for a URL or a header."""
        rest = "" if self.xid is None else f"~{self.xid}.{self.offset}"
        origin = "" if self.origin is None else f"@{self.origin}"
        if origin and self.witness is not None:
            origin += f"{'.' if self.covered else '~'}{self.witness.hex}"
        return f"{self.snapshot}{rest}{origin}"


class LogEvent(NamedTuple):
    """An event of the log. `text` is the event as a JSON object on one line; `offset` orders those of a transaction."""

    xid: int
    offset: int
    host_id: str
    event_type: str
    aggregate_type: str | None
    aggregate_id: str | None
    text: str


@dataclass(frozen=True, slots=True)
class OutboxTransaction:
    """Events of a database transaction, and the position after them and the transactions before it."""

    events: Sequence[LogEvent]
    end: LogPosition

    def position_after(self, event: LogEvent) -> LogPosition:
        """Return the position after one of the events."""
        if event is self.events[-1]:
            return self.end
        return replace(self.end, xid=event.xid, offset=event.offset)


@dataclass(frozen=True, slots=True)
class OutboxPage:
    """Transactions in order, and the position after them. Without any, all is read.

    They are whole, but for the last one of a page that ends within it, and the first one of a page that begins there.
    `origin` is the server's at present.
    """

    transactions: Sequence[OutboxTransaction]
    end: LogPosition
    origin: Origin

    @property
    def events(self) -> int:
        """How many events it has."""
        return sum(len(each.events) for each in self.transactions)


class PageSize:
    """How many events the next page should have, so that it is not too large."""

    def __init__(self) -> None:
        self.events = _FIRST_EVENTS

    def note(self, page: OutboxPage) -> None:
        """Note a page that was read."""
        size = sum(len(each.text) for one in page.transactions for each in one.events)
        if size:
            fitting = int(_PAGE_BYTES * page.events / size)
            self.events = max(1, min(_MOST_EVENTS, 2 * self.events, fitting))


class AheadOfServer(ValueError):
    """The snapshot is of another server: this one has not come so far."""


def read(
    conn: Connection,
    after: LogPosition,
    most: int,
    until: Snapshot | None = None,
    known: KnownWitness | None = None,
) -> OutboxPage:
    """Read up to about `most` events after a position: only what `until` sees, or what is committed now.

    A transaction that has more is read in several pages. Positions name the witness that is `known`, if the server
    holds it. Raises AheadOfServer, psycopg.Error.
    """
    xid, offset = (None, None) if after.xid is None else (str(after.xid), after.offset)
    present = None if until is None else str(until)
    try:
        rows = conn.execute(_READ, (str(after.snapshot), most, present, xid, offset)).fetchall()
    except psycopg.errors.InvalidParameterValue as error:
        raise AheadOfServer(error.diag.message_primary) from None
    reached, now = Snapshot.parse(rows[0][0]), Origin.parse(rows[0][1])
    origin = after.origin
    if origin is None or origin.timeline != now.timeline:
        origin = now
    elif reached != after.snapshot:
        origin = max(origin, now)
    newest = None if known is None or known[1:] != now[:2] else known.witness
    if after.origin is not None and after.origin[:2] != now[:2]:
        # A failover that has lost nothing else may have lost its witness.
        after = replace(after, witness=None, covered=False)
    witness = after.witness if newest is None else newest.id
    whole = LogPosition(reached, origin, witness=witness)
    if rows[0][2] is None:
        if after.covered:
            whole = replace(whole, witness=after.witness, covered=True)
        elif newest is not None and newest.proves(after.snapshot):
            whole = replace(whole, covered=True)
        if after.xid is not None:
            return read(conn, whole, most, until, known)
        return OutboxPage((), whole, now)
    events = [LogEvent(*row[2:]) for row in rows]
    if len(events) > most or after.xid is not None:
        # All are of one transaction; the last one only shows that there are more.
        taken = events[:most]
        last = taken[-1]
        page_end = replace(whole, xid=last.xid, offset=last.offset) if len(events) > most else whole
        return OutboxPage([OutboxTransaction(taken, page_end)], page_end, now)
    grouped = [(xid, tuple(each)) for xid, each in groupby(events, attrgetter("xid"))]
    ends = _snapshots([xid for xid, _ in grouped], after.snapshot, reached)
    return OutboxPage(
        [
            OutboxTransaction(each, replace(whole, snapshot=seen))
            for (_, each), seen in zip(grouped, ends, strict=True)
        ],
        whole,
        now,
    )


def is_far(conn: Connection, after: Snapshot, most: int) -> bool:
    """Whether more than `most` events come after a snapshot, those of late transactions apart. Raises psycopg.Error."""
    row = conn.execute(_IS_FAR, {"xmax": str(after.xmax), "most": most}).fetchone()
    return bool(row and row[0])


def answer(conn: Connection, event_id: str, takes: Callable[[LogEvent], bool]) -> LogEvent | None:
    """Return the first event that names another one as its cause, or as the first of its chain, and is taken.

    `takes` gets an event without its text. Raises psycopg.Error.
    """
    with conn.cursor() as cursor:
        cursor.execute(
            _CAUSED,
            {"id": event_id, "most": ANSWER_DISTANCE, "most_before": _ANSWER_DISTANCE_BEFORE},
        )
        for row in cursor:
            found = LogEvent(*row)
            if takes(found):
                break
        else:
            return None
    seen = Snapshot(found.xid + 1, found.xid + 1)
    of_event = str(seen), str(found.xid), found.offset - 1, found.offset
    texts = conn.execute(_TEXT, of_event).fetchone()
    # Retention may have removed it meanwhile.
    return None if texts is None else found._replace(text=texts[0])


def _snapshots(xids: Sequence[int], after: Snapshot, end: Snapshot) -> Iterator[Snapshot]:
    """Yield the snapshot after each transaction of a page."""
    within = PageSnapshots(xids, after.xmax, end.in_progress)
    for index in range(len(xids) - 1):
        yield Snapshot(*within.after(index))
    yield end
