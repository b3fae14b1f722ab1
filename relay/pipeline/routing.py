"""Routes the events of many transactions at once: finds the handlers of each event."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice, repeat

import numpy as np

from relay.config.settings import Settings
from relay.faults import NotRouted, Undecodable, Unrouted
from relay.model.events import COMMIT_FIELDS, NOTE, Commit, Events, Tuples
from relay.model.transactions import Mask, Routed, Transactions, Undecoded, text
from relay.model.tuples import RowDecoder
from relay.pipeline.route_rules import RouteRules

_NOTES_SHOWN = 20
_ROWS_AT_ONCE = 4_000
_BYTES_AT_ONCE = 4 * 1024 * 1024

Names = tuple[str, ...]
Parts = Mapping[str, Routed]
"""The routed transactions of each handler."""
Refused = dict[int, NotRouted | Undecodable]
"""Why transactions have no handlers, by index."""


class _Chosen:
    """The rows of a spooled transaction that go to one handler."""

    def __init__(self, tuples: Tuples, chosen: Sequence[bool]) -> None:
        self._tuples = tuples
        self._chosen = chosen
        self._count = sum(chosen)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        return (row for row, wanted in zip(self._tuples, self._chosen, strict=True) if wanted)


class Assignment:
    """Transactions with the handlers of each of their events. `take` and `part` keep these, so that routing runs once.

    `refused` says why transactions have no handlers, by index.
    """

    def __init__(
        self,
        transactions: Transactions,
        decoder: RowDecoder | None,
        every: Names | None,
        names: Sequence[Names] = (),
        refused: Refused | None = None,
    ) -> None:
        """`every` are the handlers of all events; if it is None, `names` has the handlers of each event, in order."""
        self.transactions = transactions
        self.refused: Refused = refused or {}
        self._decoder = decoder
        self._every = every
        self._names = names

    def __len__(self) -> int:
        return len(self.transactions)

    @cached_property
    def parts(self) -> Parts:
        """The transactions of each handler, with only the events that go there."""
        if self._decoder is None or not len(self.transactions):
            return {}
        if self._every is not None:
            return dict.fromkeys(self._every, Routed(self.transactions, self._decoder))
        return {
            name: Routed(
                _part(self.transactions, [name in each for each in self._names]), self._decoder
            )
            for name in dict.fromkeys(chain.from_iterable(set(self._names)))
        }

    def names(self) -> Iterator[Names]:
        """The handlers of each event, in order."""
        if self._every is None:
            return iter(self._names)
        return repeat(self._every, self.transactions.events)

    def take(self, indices: Sequence[int]) -> Assignment:
        """The transactions at `indices`, in that order, with their handlers."""
        ends = np.cumsum(self.transactions.facts["events"]).tolist()
        starts = [0, *ends]
        names = [self._names[starts[index] : ends[index]] for index in indices if self._names]
        refused = {new: self.refused[old] for new, old in enumerate(indices) if old in self.refused}
        return Assignment(
            self.transactions.take(indices),
            self._decoder,
            self._every,
            list(chain.from_iterable(names)),
            refused,
        )

    def part(self, first: int, last: int) -> Assignment:
        """The transactions from index `first` up to, but without, `last`, with their handlers."""
        events = self.transactions.facts["events"]
        start = int(events[:first].sum())
        # Over the shorter of both: refused transactions may be many, and parts are often a single one.
        indices = self.refused.keys() & range(first, last) if self.refused else ()
        refused = {index - first: self.refused[index] for index in indices}
        return Assignment(
            self.transactions.part(first, last),
            self._decoder,
            self._every,
            self._names[start : start + int(events[first:last].sum())],
            refused,
        )

    def reached(self, handler: str) -> Mask:
        """Which transactions have an event for a handler: a mask, bool, in their order."""
        if self._every is not None:
            return np.full(len(self), handler in self._every)
        chosen = np.fromiter((handler in names for names in self._names), np.bool_)
        events = self.transactions.facts["events"]
        found: Mask = np.logical_or.reduceat(chosen, np.cumsum(events) - events)
        return found


class BatchRouter:
    """Applies the routes to undecoded transactions."""

    def __init__(self, settings: Settings) -> None:
        self._rules = RouteRules(settings.routes)
        self._unrouted = settings.unrouted
        self._mapping = settings.source.mapping
        self._decoders: dict[tuple[str, ...], RowDecoder] = {}
        self._by_commit = not set(COMMIT_FIELDS).isdisjoint(self._rules.fields)

    def route(self, transactions: Transactions) -> Assignment:
        """Find the handlers of all events; a refused transaction has none.

        Raises Unrouted for an event without a route if `unrouted` is `fail`.
        """
        if not len(transactions):
            return Assignment(transactions, None, ())
        if NOTE not in transactions.columns or not (undecodable := self._undecodable(transactions)):
            return self._route(transactions)
        # An event that cannot be decoded cannot be matched.
        indices = transactions.besides(undecodable)
        routed = self._route(transactions.take(indices))
        refused = undecodable | {indices[at]: why for at, why in routed.refused.items()}
        found = routed.names()
        names = [next(found) if kept else () for kept in _kept(transactions, undecodable)]
        return Assignment(transactions, self.decoder(transactions.columns), None, names, refused)

    def _route(self, transactions: Transactions) -> Assignment:
        decoder = self.decoder(transactions.columns)
        if not self._rules.fields and (names := self._rules.choose(())):
            return Assignment(transactions, decoder, names)
        chosen = list(self._handlers_of_events(transactions, decoder))
        if () not in set(chosen) or not (refused := self._refused(transactions, decoder, chosen)):
            return Assignment(transactions, decoder, None, chosen)
        kept = _kept(transactions, refused)
        chosen = [names if keep else () for names, keep in zip(chosen, kept, strict=True)]
        return Assignment(transactions, decoder, None, chosen, refused)

    def events(self, transaction: Undecoded) -> Events:
        """All events of a transaction, decoded on iteration."""
        decoder = self.decoder(transaction.columns)
        return Events(transaction.tuples, decoder, transaction.commit)

    def whole(self, transactions: Transactions) -> Routed:
        """Transactions with all of their events, whatever the routes say."""
        return Routed(transactions, self.decoder(transactions.columns))

    def times(self, transactions: Transactions) -> Iterator[tuple[int, str]]:
        """The times (`deliver_at`) of the events that have one, each with the event's index among all events."""
        return self._present(transactions, "deliver_at")

    def _present(self, transactions: Transactions, field: str) -> Iterator[tuple[int, str]]:
        """The values of a field that few events have, each with the event's index among all events."""
        decoder = self.decoder(transactions.columns)
        first = 0
        for rows in transactions.portions(_ROWS_AT_ONCE, _BYTES_AT_ONCE):
            found = decoder.present(rows, field)
            if len(found):
                (values,) = decoder.columns(rows.take(found), [field])
                for index, value in zip((found + first).tolist(), values, strict=True):
                    if value:
                        yield index, text(value)
            first += len(rows)

    def _undecodable(self, transactions: Transactions) -> Refused:
        """The transactions with an event whose bytes could not be decoded, by index."""
        ends = np.cumsum(transactions.facts["events"])
        notes: dict[int, list[str]] = {}
        for row, note in self._present(transactions, NOTE):
            index = int(np.searchsorted(ends, row, side="right"))
            number = row - int(ends[index]) + int(transactions.facts["events"][index]) + 1
            notes.setdefault(index, []).append(f"event {number}: {note}")
        return {index: Undecodable(_few(shown)) for index, shown in notes.items()}

    def _handlers_of_events(
        self, transactions: Transactions, decoder: RowDecoder
    ) -> Iterator[Names]:
        """The handlers of each event."""
        if not self._rules.fields:
            return repeat((), transactions.events)
        if not self._by_commit:
            return self._chosen(decoder, transactions, None)
        return chain.from_iterable(
            self._chosen(decoder, transactions.part(index, index + 1), each.commit)
            for index, each in enumerate(transactions)
        )

    def _chosen(
        self, decoder: RowDecoder, transactions: Transactions, commit: Commit | None
    ) -> Iterator[Names]:
        fields = self._rules.fields
        stored = [field for field in fields if field not in COMMIT_FIELDS]
        of_commit = dict(zip(COMMIT_FIELDS, commit.fields, strict=True)) if commit else {}
        for rows in transactions.portions(_ROWS_AT_ONCE, _BYTES_AT_ONCE):
            values: dict[str, Iterable[str | None]] = {
                field: repeat(value, len(rows)) for field, value in of_commit.items()
            }
            for field, column in zip(stored, decoder.columns(rows, stored), strict=True):
                values[field] = (None if value is None else text(value) for value in column)
            yield from map(
                self._rules.choose, zip(*(values[field] for field in fields), strict=True)
            )

    def _refused(
        self, transactions: Transactions, decoder: RowDecoder, chosen: Sequence[Names]
    ) -> Refused:
        """The transactions with an event that no route matches, by index; the first such event is named."""
        if self._unrouted == "ignore":
            return {}
        ends = np.cumsum(transactions.facts["events"])
        lost = np.flatnonzero([not names for names in chosen])
        indices, first = np.unique(np.searchsorted(ends, lost, side="right"), return_index=True)
        refused: Refused = {}
        for index, row in zip(indices.tolist(), lost[first].tolist(), strict=True):
            undecoded = transactions[index]
            within = row - int(ends[index]) + len(undecoded.tuples)
            (event,) = islice(self.events(undecoded), within, within + 1)
            what = f"no route matches the event_type {event.event_type!r}"
            if self._unrouted == "fail":
                raise Unrouted(
                    f"routes: {what}, and unrouted is `fail`: add a route, or set unrouted"
                )
            refused[index] = NotRouted(what)
        return refused

    def decoder(self, columns: tuple[str, ...]) -> RowDecoder:
        """The decoder of rows with these columns; one for each set of columns is kept."""
        decoder = self._decoders.get(columns)
        if decoder is None:
            decoder = self._decoders[columns] = RowDecoder(columns, self._mapping)
        return decoder


def _kept(transactions: Transactions, refused: Collection[int]) -> Iterator[bool]:
    """For each event, whether its transaction is not refused."""
    kept = [index not in refused for index in range(len(transactions))]
    return iter(np.repeat(kept, transactions.facts["events"]).tolist())


def _few(notes: Sequence[str]) -> str:
    more = len(notes) - _NOTES_SHOWN
    shown = "; ".join(notes[:_NOTES_SHOWN])
    return f"{shown}; and {more} more events" if more > 0 else shown


def _part(transactions: Transactions, chosen: Sequence[bool]) -> Transactions:
    """The transactions with only the chosen events; `chosen` has an element for each event."""
    if all(chosen):
        return transactions
    if transactions.spooled is None:
        return transactions.where(np.array(chosen))
    counts = iter(chosen)
    spooled = [_Chosen(rows, list(islice(counts, len(rows)))) for rows in transactions.spooled]
    left = np.flatnonzero([len(rows) for rows in spooled])
    facts = transactions.facts.copy()
    facts["events"] = [len(rows) for rows in spooled]
    return replace(transactions, facts=facts, spooled=spooled).take(left)
