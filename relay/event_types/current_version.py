"""Reads events in the current version of their types, as handlers get them if the configuration has `events`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from relay.event_types.upcasting import Upcasting
from relay.model.events import COMMIT_FIELDS, Decoder, Event, Events, Row, Transaction
from relay.model.transactions import ColumnDecoder, Routed, Rows, Values

_CHANGED = ("payload", "metadata")
_NO_COMMIT: Row = (None,) * len(COMMIT_FIELDS)
_KEPT_BYTES = 1024 * 1024
"""Up to this size a transaction is upcast once and kept; a larger one is validated, and upcast again when read."""


class _CurrentDecoder:
    """Decodes rows as events in the current version of their types."""

    __slots__ = ("_decoder", "_upcaster")

    def __init__(self, decoder: Decoder, upcaster: Upcasting) -> None:
        self._decoder = decoder
        self._upcaster = upcaster

    def event(self, data: bytes, commit_fields: Row) -> Event:
        """One row as an event."""
        return self._upcaster.current(self._decoder.event(data, commit_fields))


class _CurrentColumns(_CurrentDecoder):
    """A `_CurrentDecoder` that decodes columns too."""

    __slots__ = ("_columns",)

    def __init__(self, decoder: ColumnDecoder, upcaster: Upcasting) -> None:
        super().__init__(decoder, upcaster)
        self._columns = decoder

    def columns(self, rows: Rows, fields: Sequence[str]) -> list[Values]:
        """The values of `fields`, one sequence for each field, with an element for each row.

        Validates every event, even if its payload is not among the fields.
        """
        *columns, kinds = self._columns.columns(rows, (*fields, "event_type"))
        indices = self._upcaster.among(kinds)
        changed = {
            field: list(columns[fields.index(field)]) for field in _CHANGED if field in fields
        }
        for index, row in zip(indices, rows.take(np.array(indices, np.int64)), strict=True):
            event = self._upcaster.current(self._decoder.event(row, _NO_COMMIT))
            for field, column in changed.items():
                text = event.text(field)
                column[index] = None if text is None else text.encode()
        return [changed.get(field, column) for field, column in zip(fields, columns, strict=True)]


class _DecodedEvents(Events):
    """Events that are decoded once and kept."""

    __slots__ = ("_events",)

    def __init__(self, events: Events) -> None:
        super().__init__(events.tuples, events.decoder, events.commit)
        self._events = list(events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)


class _CurrentRouted(Routed):
    """Routed transactions. All events of a transaction are validated before a handler gets the first one."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Transaction]:
        for each in super().__iter__():
            if _is_small(each.events):
                yield replace(each, events=_DecodedEvents(each.events))
            else:
                for _ in each.events:
                    pass
                yield each


def routed_as_current(routed: Routed, upcaster: Upcasting) -> Routed:
    """Return routed transactions whose events are in the current version, or `routed` itself if none has a known type.

    Reading them raises InvalidEvent, and the errors of upcasters.
    """
    portions = routed.transactions.portions()
    if all(
        upcaster.none_of(kinds)
        for rows in portions
        for kinds in routed.decoder.columns(rows, ("event_type",))
    ):
        return routed
    return _CurrentRouted(routed.transactions, _CurrentColumns(routed.decoder, upcaster))


def is_current(transaction: Transaction, upcaster: Upcasting) -> bool:
    """Return whether no event of a transaction is of a known type; False for a large one, which is not read."""
    events = transaction.events
    return _is_small(events) and not any(upcaster.knows(each) for each in events)


def as_current(transaction: Transaction, upcaster: Upcasting) -> Transaction:
    """Return a transaction whose events are in the current version, after all of them have been found valid.

    Raises InvalidEvent, and the errors of upcasters.
    """
    published = transaction.events
    decoder = _CurrentDecoder(published.decoder, upcaster)
    events = Events(published.tuples, decoder, published.commit)
    if _is_small(events):
        events = _DecodedEvents(events)
    else:
        for _ in events:
            pass
    return replace(transaction, events=events)


def _is_small(events: Events) -> bool:
    return isinstance(events.tuples, Rows) and events.tuples.size <= _KEPT_BYTES
