"""Which of a transaction's events go to which handler, found for many transactions at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice, repeat

from relay.config import Settings
from relay.events import COMMIT_FIELDS, Commit, Events, Transaction, Tuples, Undecoded
from relay.faults import NotRouted, Unrouted
from relay.routing import Router
from relay.source.spool import SpooledTuples
from relay.source.tuples import RowDecoder

_ROWS_AT_ONCE = 4_000
_BYTES_AT_ONCE = 4 * 1024 * 1024

Names = tuple[str, ...]


@dataclass(slots=True)
class Routed:
    """A business transaction with its events by handler, or the reason why it cannot be routed."""

    undecoded: Undecoded
    events: Events
    parts: Mapping[str, Transaction]
    refusal: NotRouted | None = None


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


class Routing:
    """The routes, over undecoded transactions."""

    def __init__(self, settings: Settings) -> None:
        self._router = Router(settings.routes)
        self._unrouted = settings.unrouted
        self._mapping = settings.source.mapping
        self._decoders: dict[tuple[str, ...], RowDecoder] = {}
        self._by_commit = not set(COMMIT_FIELDS).isdisjoint(self._router.fields)

    def route(self, transactions: Iterable[Undecoded]) -> list[Routed]:
        """Each transaction with its parts. Raises Unrouted where `unrouted` is `fail`."""
        if not self._router.fields:
            return [self._whole(transaction) for transaction in transactions]
        found: list[Routed] = []
        for (columns, _), group in groupby(transactions, self._alike):
            decoder = self._decoder(columns)
            alike = list(group)
            choices = self._choices(decoder, alike)
            for transaction in alike:
                names = list(islice(choices, len(transaction.tuples)))
                found.append(self._routed(transaction, decoder, names))
        return found

    def _alike(self, transaction: Undecoded) -> tuple[tuple[str, ...], Commit | None]:
        """What transactions have in common whose rows are looked at together."""
        return transaction.columns, transaction.commit if self._by_commit else None

    def _choices(self, decoder: RowDecoder, alike: Sequence[Undecoded]) -> Iterator[Names]:
        """The handlers of each event of transactions that are alike."""
        rows = chain.from_iterable(transaction.tuples for transaction in alike)
        return self._chosen(decoder, rows, alike[0].commit)

    def _chosen(
        self, decoder: RowDecoder, rows: Iterator[bytes], commit: Commit
    ) -> Iterator[Names]:
        fields = self._router.fields
        stored = [field for field in fields if field not in COMMIT_FIELDS]
        of_commit = dict(zip(COMMIT_FIELDS, commit.fields, strict=True))
        for some in _portions(rows):
            values: dict[str, Iterable[str | None]] = {
                field: repeat(text, len(some)) for field, text in of_commit.items()
            }
            for field, column in zip(stored, decoder.columns(some, stored), strict=True):
                values[field] = map(_text, column)
            yield from map(
                self._router.choose, zip(*(values[field] for field in fields), strict=True)
            )

    def _whole(self, transaction: Undecoded) -> Routed:
        """Where the routes look at nothing, every event goes the same way."""
        names = self._router.choose(())
        decoder = self._decoder(transaction.columns)
        if not names:
            return self._routed(transaction, decoder, [names])
        events = Events(transaction.tuples, decoder, transaction.commit)
        part = Transaction(transaction.transaction_id, transaction.commit, events)
        return Routed(transaction, events, dict.fromkeys(names, part))

    def _routed(
        self, transaction: Undecoded, decoder: RowDecoder, names: Sequence[Names]
    ) -> Routed:
        events = Events(transaction.tuples, decoder, transaction.commit)
        distinct = set(names)
        refusal = self._refuse(events, names.index(())) if () in distinct else None
        parts = {
            handler: Transaction(
                transaction.transaction_id,
                transaction.commit,
                events
                if len(distinct) == 1
                else self._part(events, [handler in each for each in names]),
            )
            for handler in dict.fromkeys(chain.from_iterable(distinct))
        }
        return Routed(transaction, events, parts, refusal)

    def _part(self, events: Events, chosen: Sequence[bool]) -> Events:
        if all(chosen):
            return events
        rows: Tuples = _Chosen(events.tuples, chosen)
        if not isinstance(events.tuples, SpooledTuples):
            rows = tuple(rows)
        return Events(rows, events.decoder, events.commit)

    def _refuse(self, events: Events, place: int) -> NotRouted | None:
        if self._unrouted == "ignore":
            return None
        (event,) = islice(events, place, place + 1)
        what = f"no route matches the event_type {event.event_type!r}"
        if self._unrouted == "fail":
            raise Unrouted(f"routes: {what}, and unrouted is `fail`: add a route, or set unrouted")
        return NotRouted(what)

    def _decoder(self, columns: tuple[str, ...]) -> RowDecoder:
        decoder = self._decoders.get(columns)
        if decoder is None:
            decoder = self._decoders[columns] = RowDecoder(columns, self._mapping)
        return decoder


def _portions(rows: Iterable[bytes]) -> Iterator[list[bytes]]:
    """As many rows as are looked at together: those of a spooled transaction must not be in memory at once."""
    some: list[bytes] = []
    size = 0
    for row in rows:
        some.append(row)
        size += len(row)
        if len(some) >= _ROWS_AT_ONCE or size >= _BYTES_AT_ONCE:
            yield some
            some, size = [], 0
    if some:
        yield some


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "surrogateescape")
