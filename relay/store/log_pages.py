"""Pages of the log after a position, by `relay.read_log`, for readers without a name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import psycopg

from relay.model.page_snapshots import PageSnapshots
from relay.model.snapshots import Snapshot
from relay.store.connections import Connection

_READ = """
    select reached, c_xid::text::bigint, c_offset, host_id::text, event_type, aggregate_type, aggregate_id, event
      from relay.read_log(%s, %s, %s)
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
_TEXT = "select event from relay.read_log(%s, 100000, %s) where c_offset = %s"


ANSWER_DISTANCE = 100_000
"""How many events after an event an answer to it is looked for, so that no index has to have it."""
_ANSWER_DISTANCE_BEFORE = 10_000
"""How many events before it, too: what answers it may be of a transaction that had begun already."""
_FIRST_EVENTS, _MOST_EVENTS = 100, 1_000
_PAGE_BYTES = 256 * 1024


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
    """The events of a database transaction. `after` is the snapshot that sees it and those before it."""

    xid: int
    events: Sequence[LogEvent]
    after: Snapshot


@dataclass(frozen=True, slots=True)
class OutboxPage:
    """Whole transactions, in order, and the snapshot `end` that sees all of them. Without any, all is read."""

    transactions: Sequence[OutboxTransaction]
    end: Snapshot

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


def read(conn: Connection, after: Snapshot, most: int, until: Snapshot | None = None) -> OutboxPage:
    """Read about `most` events after a snapshot: only what `until` sees, or what is committed now.

    Raises AheadOfServer, psycopg.Error.
    """
    try:
        rows = conn.execute(
            _READ, (str(after), most, None if until is None else str(until))
        ).fetchall()
    except psycopg.errors.InvalidParameterValue as error:
        raise AheadOfServer(error.diag.message_primary) from None
    end = Snapshot.parse(rows[0][0])
    if rows[0][1] is None:
        return OutboxPage((), end)
    events = [LogEvent(*row[1:]) for row in rows]
    grouped = [(xid, tuple(each)) for xid, each in groupby(events, attrgetter("xid"))]
    ends = _snapshots([xid for xid, _ in grouped], after, end)
    return OutboxPage(
        [
            OutboxTransaction(xid, each, seen)
            for (xid, each), seen in zip(grouped, ends, strict=True)
        ],
        end,
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
    xid = found.xid
    alone = Snapshot(xid, xid + 1, (xid,)), Snapshot(xid + 1, xid + 1, ())
    texts = conn.execute(_TEXT, (*map(str, alone), found.offset)).fetchone()
    # Retention may have removed it meanwhile.
    return None if texts is None else found._replace(text=texts[0])


def _snapshots(xids: Sequence[int], after: Snapshot, end: Snapshot) -> Iterator[Snapshot]:
    """Yield the snapshot after each transaction of a page."""
    within = PageSnapshots(xids, after.xmax, end.in_progress)
    for index in range(len(xids) - 1):
        yield Snapshot(*within.after(index))
    yield end
