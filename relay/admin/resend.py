"""Has events delivered again to one sink, while relay runs or not: `relay sink resend`.

What is resent is deferred, due now: the sink's retries deliver it, in order with all that its keys hold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from psycopg import sql
from psycopg.rows import scalar_row

from relay.admin.connections import reach_source, reach_target
from relay.admin.sinks import require_begun
from relay.config.handlers import DeliveryHandler, HttpHandler
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.model.events import INSERTED_BY
from relay.model.transactions import Transactions, Undecoded, text
from relay.pipeline.deferral import DeferralRules, to_defer
from relay.pipeline.routing import BatchRouter, chosen_part
from relay.source.outbox.rows import OutboxRows, prepare_reading
from relay.source.outbox.search import EventSearch, SearchedOutbox
from relay.source.outbox.selection import Wanted
from relay.source.outbox.table import OutboxTable
from relay.store import actions, deferred, literals, locks
from relay.store.connections import Connection
from relay.store.deferred import Deferral

MOST = 10_000
"""How many events are resent at once; of more, the sink is moved: `relay sink seek`."""
_PAGE = 1_000


@dataclass(frozen=True, slots=True)
class Resend:
    """Events of the outbox that are to be delivered to a sink again, by their ids as PostgreSQL prints them.

    Of several endpoints of their hosts, they go to `endpoint` alone; None: to each that takes them. Those that are
    `named` are resent all or none; of a selection, those are left out that are not to be delivered now.
    """

    sink: str
    ids: Sequence[str]
    endpoint: str | None
    named: bool


@dataclass(frozen=True, slots=True)
class Resent:
    """How many deliveries there are, and how many events none has: they are for later, or cancelled."""

    deliveries: int
    left_out: int


def plan(
    settings: Settings,
    sink: str,
    ids: Collection[str],
    wanted: EventSearch,
    endpoint: str | None = None,
) -> Resend:
    """Find the events with some ids, or if there are none those that a search selects. Raises ConfigurationError."""
    if bool(ids) is (wanted != EventSearch()):
        raise ConfigurationError("events: give either the ids of events, or what selects them")
    _require_delivering(settings, sink)
    handler = settings.handlers[sink]
    if endpoint is not None and not (isinstance(handler, HttpHandler) and handler.has_ids):
        raise ConfigurationError(
            f"handlers.{sink}.endpoints.id: names no endpoints, so none can be chosen"
        )
    with reach_target(settings) as target:
        require_begun(target, settings, sink)
    with reach_source(settings) as source:
        found = _named(settings, source, ids) if ids else _searched(settings, source, wanted)
    if len(found) > MOST:
        raise ConfigurationError(
            f"more than {MOST:,} events are selected: select fewer, or move the sink with `relay sink seek {sink}`"
        )
    return Resend(sink, found, endpoint, named=bool(ids))


def resend(settings: Settings, planned: Resend, reason: str | None) -> Resent:
    """Have events delivered again.

    Raises ConfigurationError if today's routes do not lead one of them to the sink, or a named one is not to be
    delivered now; nothing is resent then.
    """
    sink, group = planned.sink, settings.group
    with (
        reach_target(settings) as target,
        reach_source(settings) as source,
        target.transaction(),
    ):
        # Nothing of a host is resent while it is erased.
        locks.lock_in_transaction(target, locks.done(group))
        require_begun(target, settings, sink)
        with target.cursor(row_factory=scalar_row) as cursor:
            by = cursor.execute(f"select {actions.WHO}").fetchone()
        parts = _Parts(settings, planned, str(by), target)
        deferred.defer(target, group, parts.read(source), sink)
        if parts.left:
            raise ConfigurationError(
                f"the event {min(parts.left)!r} is not routed to handlers.{sink}, or is gone: it cannot be resent"
            )
        if parts.withheld and planned.named:
            raise ConfigurationError(
                f"the event {min(parts.withheld)!r} is for later, or cancelled: it cannot be resent; `relay event` "
                "tells its state"
            )
        resent = [each for each in planned.ids if each not in parts.withheld]
        if resent:
            detail = {"events": len(resent), "deliveries": parts.count, "first": resent[:10]}
            actions.record(target, group, sink, "sink resend", reason, detail)
    return Resent(parts.count, len(parts.withheld))


def _require_delivering(settings: Settings, sink: str) -> None:
    handler = settings.handlers.get(sink)
    if handler is not None and not isinstance(handler, DeliveryHandler):
        raise ConfigurationError(
            f"handlers.{sink}: is of type {handler.type}, to which no single events are delivered: use `relay sink "
            "seek` or `relay sink rebuild` for a sink of type spark"
        )
    if handler is None:
        raise ConfigurationError(f"handlers.{sink}: there is no such handler")


def _named(settings: Settings, source: Connection, ids: Collection[str]) -> list[str]:
    """The ids as PostgreSQL prints them. Raises ConfigurationError for one that the outbox does not have."""
    table, found = OutboxTable(settings), dict[str, None]()
    for each in ids:
        event = None if "\0" in each else table.event(source, each)
        if event is None:
            raise ConfigurationError(f"the outbox has no event {each!r}: it cannot be resent")
        found[event.text("id") or ""] = None
    return list(found)


def _searched(settings: Settings, source: Connection, wanted: EventSearch) -> list[str]:
    """The ids of the events that a search selects, at most one more than MOST, in no order."""
    searched, found, before = SearchedOutbox(settings), list[str](), None
    while len(found) <= MOST:
        page = searched.newest(source, wanted, before, _PAGE)
        found += [each.id for each in page.rows]
        before = page.next
        if before is None:
            break
    return found


class _Located(OutboxRows):
    """Finds commits of the outbox by the ids of their events."""

    def wanted(self, conn: Connection, ids: Collection[str]) -> list[Wanted]:
        """The commits that inserted events: those of rows that are older than the column c_xid first."""
        query = sql.SQL(
            """
            select {xid} is null, case when {xid} is null then {offset}::bigint else {xid}::text::bigint end as key,
                   coalesce(max({offset}), 0)::bigint
              from {table} where {id} = any(%s) group by 1, 2
            """
        ).format(
            xid=sql.Identifier(INSERTED_BY),
            offset=self._offset,
            table=self._table,
            id=sql.Identifier(self._mapping["id"]),
        )
        rows = conn.execute(query, (literals.of_texts([*ids]),), prepare=False).fetchall()
        found = []
        for unmarked in (True, False):
            keys = [row[1:] for row in rows if row[0] is unmarked]
            if keys:
                xids, positions = np.array(keys, np.int64).T
                found.append(Wanted(xids, positions, unmarked=unmarked))
        return found


class _Parts:
    """The parts of transactions that are resent: of each only the wanted events.

    `left` are the ids that are not found yet, `withheld` those of events that are for later, or cancelled.
    """

    def __init__(self, settings: Settings, planned: Resend, by: str, target: Connection) -> None:
        self._located = _Located(settings)
        self._router = BatchRouter(settings)
        self._rules = DeferralRules(settings, self._router)
        self._sink, self._endpoint, self._by = planned.sink, planned.endpoint, by
        self._target = target
        self.left = set(planned.ids)
        self.withheld = set[str]()
        self.count = 0

    def read(self, source: Connection) -> Iterator[tuple[Undecoded, Deferral]]:
        """Yield the parts in the order of publishing, each with a deferral that is due now."""
        prepare_reading(source)
        for wanted in self._located.wanted(source, self.left):
            with closing(self._located.commits(source, wanted)) as commits:
                for transactions in commits:
                    routed = self._router.route(transactions).parts.get(self._sink)
                    if routed is None:
                        continue
                    ids = [
                        "" if value is None else text(value) for (value,) in routed.values(("id",))
                    ]
                    self.withheld |= self._withheld(routed.transactions, ids) & self.left
                    self.left.difference_update(self.withheld)
                    part = chosen_part(routed.transactions, [each in self.left for each in ids])
                    self.left.difference_update(ids)
                    for index in range(len(part)):
                        one = part.part(index, index + 1)
                        self.count += 1
                        yield (
                            one[0],
                            Deferral(
                                self._rules.delivery_keys(one, self._sink, self._endpoint),
                                endpoint=self._endpoint,
                                event_ids=deferred.ids_of(one[0], routed.decoder),
                                resent_by=self._by,
                            ),
                        )

    def _withheld(self, transactions: Transactions, ids: Sequence[str]) -> set[str]:
        """Those of the events that are deferred until their time, and those that somebody has cancelled."""
        times = self._router.delivery_times(transactions)
        later = to_defer(self._target, self._router, transactions, times)
        of = np.repeat(np.arange(len(transactions)), transactions.facts["events"]).tolist()
        keys = {number: [deferred.event_key(each)] for number, each in enumerate(ids)}
        cancelled = deferred.cancelled(self._target, keys)
        return {
            each for number, each in enumerate(ids) if number in cancelled or of[number] in later
        }
