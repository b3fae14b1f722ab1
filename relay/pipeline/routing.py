"""Finds the handlers of each event by the routes of the configuration, for many transactions at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache, partial
from itertools import chain, islice, repeat
from typing import Any

import numpy as np

from relay.config.fields import dig, split
from relay.config.settings import Route, Scalar, Settings
from relay.faults import NotRouted, Undecodable, Unrouted
from relay.model import exact_json
from relay.model.events import COMMIT_FIELDS, NOTE, Event, Events, Tuples
from relay.model.moments import moment_of
from relay.model.transactions import (
    ColumnDecoder,
    Mask,
    Routed,
    Transactions,
    Undecoded,
    text,
)
from relay.model.tuples import RowDecoder
from relay.queues.declared import Chooser, Declared
from relay.queues.filling import QUEUES

_NOTES_SHOWN = 20

_JSON_FIELDS = frozenset({"payload", "metadata"})

Values = tuple[str | None, ...]
Test = Callable[[Values], bool]
Names = tuple[str, ...]
Parts = Mapping[str, Routed]
"""The routed transactions of each handler."""
Refused = dict[int, NotRouted | Undecodable]
"""Why transactions have no handlers, by index."""


class RouteRules:
    """The routes of a configuration, in order: the first that matches wins unless it says `continue: true`.

    `fields` are the fields that the routes match.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        names = [name for route in routes for name in route.match]
        self.fields = tuple(dict.fromkeys(split(name)[0] for name in names))
        self._routes = [
            (
                [_test(self.fields, name, patterns) for name, patterns in route.match.items()],
                route.handlers,
                route.continue_,
            )
            for route in routes
        ]
        # Event types and aggregates are few. Payloads rarely repeat, and may be large.
        remembered = 0 if not _JSON_FIELDS.isdisjoint(self.fields) else 10_000
        self.choose = lru_cache(maxsize=remembered)(self._choose)

    def handlers(self, event: Event) -> tuple[str, ...]:
        """The names of the event's handlers, each once, in the order of the routes; empty if no route matches."""
        return self.choose(tuple(event.text(field) for field in self.fields))

    def _choose(self, values: Values) -> tuple[str, ...]:
        names: dict[str, None] = {}
        for tests, handlers, goes_on in self._routes:
            if all(test(values) for test in tests):
                names.update(dict.fromkeys(handlers))
                if not goes_on:
                    break
        return tuple(names)


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

    `refused` says why transactions have no handlers, by index. `decoder` decodes the rows; None without transactions.
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
        self.decoder = decoder
        self._every = every
        self._names = names

    def __len__(self) -> int:
        return len(self.transactions)

    @cached_property
    def parts(self) -> Parts:
        """The transactions of each handler, with only the events that go there."""
        if self.decoder is None or not len(self.transactions):
            return {}
        if self._every is not None:
            return dict.fromkeys(self._every, Routed(self.transactions, self.decoder))
        return {
            name: Routed(
                chosen_part(self.transactions, [name in each for each in self._names]), self.decoder
            )
            for name in dict.fromkeys(chain.from_iterable(set(self._names)))
        }

    def take(self, indices: Sequence[int]) -> Assignment:
        """The transactions at `indices`, in that order, with their handlers."""
        ends = np.cumsum(self.transactions.facts["events"]).tolist()
        starts = [0, *ends]
        names = [self._names[starts[index] : ends[index]] for index in indices if self._names]
        refused = {new: self.refused[old] for new, old in enumerate(indices) if old in self.refused}
        return Assignment(
            self.transactions.take(indices),
            self.decoder,
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
            self.decoder,
            self._every,
            self._names[start : start + int(events[first:last].sum())],
            refused,
        )

    def also(self, handler: str, chosen: Sequence[bool]) -> Assignment:
        """The same transactions, of which some events go to one more handler; `chosen` has an element for each event.

        Refused transactions go nowhere.
        """
        if not any(chosen):
            return self
        if self._every is not None and all(chosen):
            return Assignment(self.transactions, self.decoder, (*self._every, handler))
        before = repeat(self._every) if self._every is not None else iter(self._names)
        kept = [index not in self.refused for index in range(len(self))]
        of_events = np.repeat(kept, self.transactions.facts["events"]).tolist()
        names = [
            (*names, handler) if wanted and keep else names
            for names, wanted, keep in zip(before, chosen, of_events, strict=False)
        ]
        return Assignment(self.transactions, self.decoder, None, names, self.refused)

    def without(self, handler: str) -> Assignment:
        """The same transactions, of which no event goes to one handler."""
        return Assignment(
            self.transactions,
            self.decoder,
            None if self._every is None else _besides(self._every, handler),
            [_besides(names, handler) for names in self._names],
            self.refused,
        )

    def reached(self, handler: str) -> Mask:
        """Which transactions have an event for a handler: a mask, bool, in their order."""
        if self._every is not None:
            return np.full(len(self), handler in self._every)
        chosen = np.fromiter((handler in names for names in self._names), np.bool_)
        events = self.transactions.facts["events"]
        found: Mask = np.logical_or.reduceat(chosen, np.cumsum(events) - events)
        return found


def _besides(names: Names, handler: str) -> Names:
    return tuple(name for name in names if name != handler)


class BatchRouter:
    """Applies the routes to undecoded transactions."""

    def __init__(self, settings: Settings) -> None:
        self._rules = RouteRules(settings.routes)
        self._unrouted = settings.unrouted
        self._mapping = settings.source.mapping
        self._decoders: dict[tuple[str, ...], RowDecoder] = {}

    def route(self, transactions: Transactions, declared: Declared | None = None) -> Assignment:
        """Find the handlers of all events; a refused transaction has none.

        Events that go into a queue of `declared` have the handler QUEUES too. Queues are no routes: an event that no
        route matches is refused all the same. Raises Unrouted for an event without a route if `unrouted` is `fail`.
        """
        assigned = self._by_routes(transactions)
        if declared is None or assigned.decoder is None:
            return assigned
        chosen = declared.choose(transactions, assigned.decoder)
        return assigned.also(QUEUES, [bool(names) for names in chosen])

    def _by_routes(self, transactions: Transactions) -> Assignment:
        if not len(transactions):
            return Assignment(transactions, None, ())
        decoder = self.decoder(transactions.columns)
        # Whatever matches an event that cannot be decoded says nothing.
        refused = self._undecodable(transactions) if NOTE in transactions.columns else {}
        if self._rules.fields:
            chosen = list(handlers_of_events(self._rules, transactions, decoder))
        else:
            every = self._rules.choose(())
            if every and not refused:
                return Assignment(transactions, decoder, every)
            chosen = [every] * transactions.events
        if () in set(chosen):
            refused |= self._without_route(transactions, chosen, refused)
        if refused:
            kept = [index not in refused for index in range(len(transactions))]
            of_events = np.repeat(kept, transactions.facts["events"]).tolist()
            chosen = [names if keep else () for names, keep in zip(chosen, of_events, strict=True)]
        return Assignment(transactions, decoder, None, chosen, refused)

    def events(self, transaction: Undecoded) -> Events:
        """All events of a transaction, decoded on iteration."""
        decoder = self.decoder(transaction.columns)
        return Events(transaction.tuples, decoder, transaction.commit)

    def whole(self, transactions: Transactions) -> Routed:
        """Transactions with all of their events, whatever the routes say."""
        return Routed(transactions, self.decoder(transactions.columns))

    def delivery_times(self, transactions: Transactions) -> dict[int, datetime]:
        """The transactions with a time of delivery (`deliver_at`), by index, with the latest of their times."""
        found: dict[int, datetime] = {}
        present = list(self._present(transactions, "deliver_at"))
        if not present:
            return found
        ends = np.cumsum(transactions.facts["events"])
        for row, value in present:
            moment = moment_of(value)
            index = int(np.searchsorted(ends, row, side="right"))
            found[index] = max(moment, found.get(index, moment))
        return found

    def _present(self, transactions: Transactions, field: str) -> Iterator[tuple[int, str]]:
        """The values of a field that few events have, each with the event's index among all events."""
        decoder = self.decoder(transactions.columns)
        first = 0
        for rows in transactions.portions():
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

    def _without_route(
        self, transactions: Transactions, chosen: Sequence[Names], refused: Collection[int]
    ) -> Refused:
        """The transactions, besides those `refused`, with an event that no route matches; its type is named."""
        if self._unrouted == "ignore":
            return {}
        ends = np.cumsum(transactions.facts["events"])
        lost = np.flatnonzero([not names for names in chosen])
        indices, first = np.unique(np.searchsorted(ends, lost, side="right"), return_index=True)
        found: Refused = {}
        for index, row in zip(indices.tolist(), lost[first].tolist(), strict=True):
            if index in refused:
                continue
            undecoded = transactions[index]
            within = row - int(ends[index]) + len(undecoded.tuples)
            (event,) = islice(self.events(undecoded), within, within + 1)
            what = f"no route matches the event_type {event.event_type!r}"
            if self._unrouted == "fail":
                raise Unrouted(
                    f"routes: {what}, and unrouted is `fail`: add a route, or set unrouted"
                )
            found[index] = NotRouted(what)
        return found

    def decoder(self, columns: tuple[str, ...]) -> RowDecoder:
        """The decoder of rows with these columns; one for each set of columns is kept."""
        decoder = self._decoders.get(columns)
        if decoder is None:
            decoder = self._decoders[columns] = RowDecoder(columns, self._mapping)
        return decoder


def chooser(routes: Sequence[Route]) -> Chooser:
    """What yields the handlers of each event by some routes."""
    return partial(handlers_of_events, RouteRules(routes))


def handlers_of_events(
    rules: RouteRules, transactions: Transactions, decoder: ColumnDecoder
) -> Iterator[Names]:
    """Yield the names of the handlers of each event, in order, by some rules."""
    fields = rules.fields
    if not fields:
        yield from repeat(rules.choose(()), transactions.events)
        return
    stored = [field for field in fields if field not in COMMIT_FIELDS]
    of_commits = _of_commits(transactions) if len(stored) < len(fields) else {}
    for rows in transactions.portions():
        values: dict[str, Iterable[str | None]] = {
            field: islice(found, len(rows)) for field, found in of_commits.items()
        }
        for field, column in zip(stored, decoder.columns(rows, stored), strict=True):
            values[field] = (None if value is None else text(value) for value in column)
        yield from map(rules.choose, zip(*(values[field] for field in fields), strict=True))


def _of_commits(transactions: Transactions) -> dict[str, Iterator[str | None]]:
    """For each field of commits, its value for each event."""
    events = transactions.facts["events"].tolist()
    columns = zip(*(each.commit.fields for each in transactions), strict=True)
    return {
        field: chain.from_iterable(map(repeat, values, events))
        for field, values in zip(COMMIT_FIELDS, columns, strict=True)
    }


def _few(notes: Sequence[str]) -> str:
    more = len(notes) - _NOTES_SHOWN
    shown = "; ".join(notes[:_NOTES_SHOWN])
    return f"{shown}; and {more} more events" if more > 0 else shown


def chosen_part(transactions: Transactions, chosen: Sequence[bool]) -> Transactions:
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


def shadowed(routes: Sequence[Route]) -> Iterator[tuple[int, int]]:
    """Yield the index of each route that can never apply, and of an earlier one that matches all of its events."""
    for index, route in enumerate(routes):
        for before, earlier in enumerate(routes[:index]):
            if not earlier.continue_ and _covers(earlier, route):
                yield index, before
                break


def _covers(earlier: Route, later: Route) -> bool:
    return all(
        name in later.match
        and all(any(_includes(each, given) for each in patterns) for given in later.match[name])
        for name, patterns in earlier.match.items()
    )


def _includes(pattern: Scalar, other: Scalar) -> bool:
    """Whether a pattern certainly matches all that another one matches."""
    if pattern == "*" or (pattern == other and type(pattern) is type(other)):
        return True
    if not _is_glob(other):
        return _matches(other, pattern)
    # Two globs: only a beginning is compared.
    beginning = pattern[:-1] if isinstance(pattern, str) and pattern.endswith("*") else None
    return beginning is not None and not _is_glob(beginning) and str(other).startswith(beginning)


def _is_glob(pattern: Scalar) -> bool:
    return isinstance(pattern, str) and any(sign in pattern for sign in "*?[")


def _test(fields: Sequence[str], name: str, patterns: Sequence[Scalar]) -> Test:
    head, path = split(name)
    index = fields.index(head)
    if not path:
        return lambda values: any(_matches(values[index], pattern) for pattern in patterns)

    def test(values: Values) -> bool:
        text = values[index]
        if text is None:
            return False
        try:
            found, value = dig(exact_json.loads(text), path)
        except ValueError:
            return False  # a mapped text column need not hold JSON
        return found and any(_matches(value, pattern) for pattern in patterns)

    return test


def _matches(value: Any, pattern: Scalar) -> bool:
    """Whether a value equals the pattern or, as text, matches it as a glob (case-sensitive)."""
    if value is None:
        return False
    if isinstance(pattern, str):
        return fnmatchcase(value if isinstance(value, str) else _text(value), pattern)
    if isinstance(value, str):
        return not isinstance(pattern, bool) and value == str(pattern)
    return isinstance(value, bool) is isinstance(pattern, bool) and bool(value == pattern)


def _text(value: Any) -> str:
    """A number, or an array or object, as PostgreSQL prints it; empty if it cannot be written."""
    try:
        return exact_json.dumps(value, "")
    except ValueError:
        return ""
