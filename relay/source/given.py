"""Encodes events that are given by their fields as rows of an outbox, as the stream brings them. No I/O."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from math import isfinite
from typing import Any
from uuid import UUID, uuid4

from relay.config.fields import JSON_FIELDS, nearest
from relay.config.source import SourceSettings
from relay.model import exact_json, headers
from relay.model.events import FIELDS, ID_FIELDS, NEEDED_FIELDS
from relay.model.printed import InvalidValue, printed
from relay.model.transactions import Rows, Transactions
from relay.source.decode.grouping import Grouping
from relay.source.decode.layout import Layout, polled
from relay.source.decode.pgoutput import encode_tuple

GivenEvent = Mapping[str, Any]
"""An event by its fields: `payload` and `metadata` are documents, `headers` a mapping of texts."""

_BITS = 62
"""Of an id of type bigint that is chosen at random."""


def plain_source(events: Iterable[GivenEvent]) -> SourceSettings:
    """The section `source` of events without a configuration: relay's own outbox, with ids of any text.

    It has the headers that the events have. Raises ValueError for an invalid name of one.
    """
    _require_mappings(events)
    names = dict.fromkeys(name for each in events for name in each.get(headers.FIELD) or ())
    headers.require_names(names)
    return SourceSettings(
        types=dict.fromkeys(ID_FIELDS, "text"), headers={name: name for name in names}
    )


def encode(events: Sequence[GivenEvent], source: SourceSettings, attempt: int = 1) -> Transactions:
    """Encode events of one commit, and group them by business transaction as the stream's are.

    A field that is left out and that a publisher does not choose gets a value; in a table of the user's only where
    `source.columns` names its column. Raises ValueError for a field that there is not, and for a value that its column
    cannot have.
    """
    if not events:
        raise ValueError("give at least one event")
    if attempt < 1:
        raise ValueError(f"attempt is {attempt}, and the first one is 1")
    _require_mappings(events)
    mapping = source.mapping
    columns = tuple(dict.fromkeys(filter(None, mapping.values())))
    rows = [encode_tuple([row.get(name) for name in columns]) for row in _rows(events, source)]
    grouping = Grouping(mapping, sys.maxsize)
    layout = Layout.of(columns, mapping, source.outbox)
    grouping.take(layout, Rows.of(rows), polled([(len(rows), 0)]))
    found = Transactions.joined(grouping.fetch())
    found.attempts = [attempt] * len(found)
    return found


def _require_mappings(events: Iterable[object]) -> None:
    for number, each in enumerate(events, 1):
        if not isinstance(each, Mapping):
            raise ValueError(f"event {number} is a {type(each).__name__}, and no mapping of fields")
        of_headers = each.get(headers.FIELD)
        if of_headers is not None and not isinstance(of_headers, Mapping):
            raise ValueError(
                f"event {number}: headers is a {type(of_headers).__name__}, and no mapping of texts"
            )


def _rows(events: Sequence[GivenEvent], source: SourceSettings) -> list[dict[str, bytes | None]]:
    """The undecoded values of each event, by column."""
    rows = [_given(number, each, source) for number, each in enumerate(events, 1)]
    types = source.sql_types
    common = {
        "host_id": _id_of(types["host_id"], UUID(int=1)),
        "transaction_id": _id_of(types["transaction_id"], uuid4()),
        "event_ts": printed("timestamptz", datetime.now(UTC).isoformat()),
    }
    _complete(rows, common, source)
    column = source.mapping["transaction_id"]
    counts = Counter(row.get(column) for row in rows)
    so_far = Counter[bytes | None]()
    for number, row in enumerate(rows, 1):
        of_transaction = row.get(column)
        so_far[of_transaction] += 1
        own = {
            "id": _id_of(types["id"], uuid4()),
            "c_offset": str(number),
            "transaction_ordinal": str(so_far[of_transaction]),
            "transaction_count": str(counts[of_transaction]),
        }
        _complete([row], own, source)
    return rows


def _complete(
    rows: Sequence[dict[str, bytes | None]], texts: Mapping[str, str], source: SourceSettings
) -> None:
    """Set the fields in `texts` where the event has not given them."""
    for name, text in texts.items():
        column = source.mapping[name]
        if column and (source.owns_table or name in NEEDED_FIELDS or name in source.columns):
            for row in rows:
                row.setdefault(column, text.encode())


def _id_of(kind: str, chosen: UUID) -> str:
    return str(chosen.int & (1 << _BITS) - 1) if kind == "bigint" else str(chosen)


def _given(number: int, event: GivenEvent, source: SourceSettings) -> dict[str, bytes | None]:
    """The undecoded values that an event gives, by column; `number` is that of the event in errors."""
    unknown = event.keys() - {*FIELDS, headers.FIELD}
    if unknown:
        raise ValueError(
            f"an event has no {_listed(unknown)}; it has {_listed([*FIELDS, headers.FIELD])}{_meant(unknown)}"
        )
    of_headers = event.get(headers.FIELD) or {}
    values = {name: event[name] for name in FIELDS if name in event}
    values |= {headers.PREFIX + name: value for name, value in of_headers.items()}
    row: dict[str, bytes | None] = {}
    for name, value in values.items():
        column = source.mapping.get(name)
        if not column:
            section = "headers" if name.startswith(headers.PREFIX) else "columns"
            raise ValueError(f"event {number}: source.{section} has no column for {name}")
        text = _text(number, name, value, source)
        if row.setdefault(column, text) != text:
            raise ValueError(
                f"event {number}: {name} is the column {column}, which another field gives another value"
            )
    return row


def _text(number: int, name: str, value: Any, source: SourceSettings) -> bytes | None:
    """A value as PostgreSQL prints that of the field."""
    if value is None:
        return None
    if isinstance(value, UUID):
        value = str(value)
    elif isinstance(value, datetime):
        value = value.isoformat()
    kind = source.sql_types.get(name, "text")
    try:
        # The fault of a document names the key in it.
        text = (
            exact_json.dumps(_as_jsonb(value), name)
            if name in JSON_FIELDS
            else printed(kind, value)
        )
    except (ValueError, OverflowError) as error:
        if name in JSON_FIELDS:
            raise ValueError(f"event {number}: {error}") from None
        fault = str(error) if isinstance(error, InvalidValue) else f"is not of type {kind}"
        raise ValueError(f"event {number}: {name} {fault}") from None
    return text.encode()


def _as_jsonb(value: Any) -> Any:
    """A document with the order of keys, and the form of numbers, in which jsonb is printed."""
    try:
        return _ordered(value)
    except RecursionError:
        # Nobody tests the order of keys in so many levels; or it contains itself, which is found when it is printed.
        return value


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        keys = sorted(value, key=_order_of_key)
        return {key: _ordered(value[key]) for key in keys}
    if isinstance(value, list | tuple):
        return [_ordered(each) for each in value]
    if isinstance(value, float) and isfinite(value):
        return exact_json.Number(format(Decimal(repr(value or 0.0)), "f"))
    return value


def _order_of_key(key: object) -> tuple[int, bytes]:
    """Shorter keys first, and those of a length by their octets; what is no text is found when it is printed.

    Source: PostgreSQL's `jsonb_util.c`, lengthCompareJsonbStringValue.
    """
    octets = str(key).encode("utf-8", "surrogatepass")
    return len(octets), octets


def _meant(unknown: Iterable[str]) -> str:
    found = (nearest(str(name), [*FIELDS, headers.FIELD]) for name in sorted(unknown, key=str))
    names = ", ".join(filter(None, found))
    return f"; did you mean {names}?" if names else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, names)))
