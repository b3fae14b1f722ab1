"""An outbox without a table: events that `pg_logical_emit_message` writes into the WAL, as rows. No I/O.

A transactional message of the prefix is a JSON object, or an array of them, with the keys of `relay.publish` and with
host_id, user_id and transaction_id. Here it becomes inserts into a relation that does not exist, where it came in the
stream; so whatever holds of rows holds of messages.

Source: PostgreSQL documentation, "Logical Replication Message Formats" (Message) and "System Administration Functions".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from struct import Struct
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid5

from relay.event_types import exact_json
from relay.model.events import FIELDS, NOTE, microseconds, timestamp
from relay.model.tuples import ProtocolError
from relay.source.pgoutput import Begin, Column, LogicalMessage, Relation, encode_tuple
from relay.source.translation import Encoding

if TYPE_CHECKING:
    from psycopg.abc import Buffer

_BEGIN, _MESSAGE = b"BM"
_INSERT = Struct(">cIc")
_OID = 0
"""No relation of PostgreSQL has it."""
_NAMESPACE = UUID("6d0b3c6e-3f0c-5f0e-9a53-2b8d0d3f7a11")
"""Of the ids that are derived from positions."""
_COLUMNS = (*FIELDS, NOTE)
_NEEDED = ("host_id", "event_type", "payload")
_LEAST = len('{"host_id":0,"event_type":0,"payload":0}')
"""How many characters an event has at least."""
_FEW = 100
"""Of so many events each is looked at, whatever they are."""
_COUNTED = ("transaction_ordinal", "transaction_count", "c_offset")
"""What a message does not say of its events."""

Values = dict[str, str | None]


class Emitted:
    """Turns the messages of a prefix into inserts; other messages of `pg_logical_emit_message` are left out.

    `types` are those of SQL, `header` is how many bytes come before each message of pgoutput.
    """

    def __init__(self, prefix: str, types: Mapping[str, str], header: int = 0) -> None:
        self._prefix = prefix
        self._types = types
        self._header = header
        self._ignored = 0
        # What is not a table's has no schema.
        columns = tuple(Column(name, 0, -1, is_key=False) for name in _COLUMNS)
        self.relation = Relation(_OID, "", prefix, "d", columns)
        self.reset()

    def reset(self, encoding: Encoding | None = None) -> None:
        """Forget the open commit; `encoding` is that of messages where it is not UTF-8."""
        self._begin: Begin | None = None
        self._codec = "utf-8" if encoding is None else encoding.codec

    def ignored(self) -> int:
        """How many messages of the prefix belong to no transaction, since the last time: they are not relayed."""
        found, self._ignored = self._ignored, 0
        return found

    def inserts(self, messages: list[Buffer]) -> list[Buffer]:
        """What came of the stream, with inserts in place of messages. Raises ProtocolError for a malformed one."""
        found: list[Buffer] = []
        for each in messages:
            kind = each[self._header]
            if kind == _MESSAGE:
                found += self._inserts_of(bytes(each))
                continue
            if kind == _BEGIN:
                self._begin = Begin.of(bytes(each[self._header :]))
            found.append(each)
        return found

    def _inserts_of(self, data: bytes) -> Iterator[Buffer]:
        message = LogicalMessage.of(data[self._header :])
        if self._text(message.prefix) != self._prefix:
            return
        if not message.transactional:
            self._ignored += 1
            return
        if self._begin is None:
            raise ProtocolError("a message outside its transaction")
        head = data[: self._header] + _INSERT.pack(b"I", _OID, b"N")
        for row in self._rows(message, self._begin):
            cells = [row.get(name) for name in _COLUMNS]
            yield head + encode_tuple(
                [None if each is None else each.encode("utf-8", "replace") for each in cells]
            )

    def _text(self, name: str) -> str:
        """A name that was decoded as UTF-8 with surrogates."""
        return name.encode("utf-8", "surrogateescape").decode(self._codec, "replace")

    def _rows(self, message: LogicalMessage, begin: Begin) -> Iterator[Values]:
        """The message's events, of which one without an id or a transaction_id has the same one whenever it comes."""
        where = f"{message.lsn} {begin.final_lsn} {begin.xid} {begin.ts}"
        defaults = {
            "transaction_id": str(uuid5(_NAMESPACE, where)),
            "event_ts": timestamp(begin.ts),
        }
        text, fault = self._read(message.content)
        events: list[Any] = [None]
        if fault is None:
            events, fault = _events(text)
        for number, event in enumerate(events, start=1):
            defaults["id"] = str(uuid5(_NAMESPACE, f"{where} {number}"))
            row, faults = self._row(event, defaults)
            if row["payload"] is None and (fault or faults):
                # So that the dead letter has what was written.
                row["payload"] = json.dumps(text)
            row["transaction_ordinal"], row["transaction_count"] = str(number), str(len(events))
            if problems := ([fault] if fault else faults):
                # `tuples` looks for nulls from the end of a row: a value that ends in n would look like one.
                row[NOTE] = f"{'; '.join(problems)} (message at {message.lsn})"
            yield row

    def _read(self, content: bytes) -> tuple[str, str | None]:
        """The text of a message, and why it is none."""
        try:
            return content.decode(self._codec), None
        except UnicodeDecodeError:
            return content.decode("ascii", "backslashreplace"), "it is no text"

    def _row(self, event: Any, defaults: Mapping[str, str]) -> tuple[Values, list[str]]:
        """An event's fields as PostgreSQL would print them, and what is wrong with it."""
        if not isinstance(event, dict):
            return self._row({}, defaults)[0], ["it is no JSON object"]
        row: Values = {}
        faults = []
        for name in FIELDS:
            if name in _COUNTED:
                continue
            try:
                row[name] = self._value(name, event, defaults)
            except (ValueError, OverflowError, RecursionError) as error:
                row[name] = None
                why = str(error) if isinstance(error, _Wrong) else f"is no {self._types[name]}"
                faults.append(f"{name} {why}")
        return row, faults

    def _value(self, name: str, event: dict[str, Any], defaults: Mapping[str, str]) -> str | None:
        """The text of a field. Raises ValueError, OverflowError or RecursionError for what it cannot be."""
        value = event.get(name)
        if name == "id" and value == "":
            # It would tell no event from another.
            value = None
        if name == "payload" and name in event:
            return exact_json.dumps(value, name)
        if value is None:
            if name in defaults and self._types[name] in ("uuid", "text", "timestamptz"):
                return defaults[name]
            if name in _NEEDED or name in defaults:
                raise _Wrong("is missing")
            return None
        text = _PRINTED[self._types[name]](value)
        text.encode()
        if "\0" in text:
            raise _Wrong("has a zero character, which PostgreSQL has in no text")
        return text


def _events(text: str) -> tuple[list[Any], str | None]:
    """The events of a message; one that stands for all of it, and why, where there are none."""
    try:
        found = exact_json.loads(text)
    except (ValueError, RecursionError):
        return [None], "it is not JSON"
    events = found if isinstance(found, list) else [found]
    if not events:
        return [None], "it has no events"
    if len(events) > _FEW and len(text) < len(events) * _LEAST:
        # Each would be a row of its own, hundreds of times as large as what stands for it.
        return [None], f"most of its {len(events)} events have nothing in them"
    return events, None


class _Wrong(ValueError):
    """What is wrong with a field, in words that show no value."""


def _uuid(value: Any) -> str:
    if not isinstance(value, str):
        raise _Wrong("is no uuid")
    return str(UUID(value))


def _scalar(value: Any) -> str:
    """The text of a value, as ->> has it."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict | list):
        raise _Wrong("is no text")
    return exact_json.dumps(value, "")


def _bigint(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _Wrong("is no whole number")
    number = int(value)
    if not -(2**63) <= number < 2**63:
        raise _Wrong("is out of range")
    return str(number)


def _time(value: Any) -> str:
    if not isinstance(value, str):
        raise _Wrong("is no time")
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise _Wrong("is no time such as 2026-11-01T00:00:00+00:00") from None
    if moment.tzinfo is None:
        raise _Wrong("has no time zone")
    return timestamp(microseconds(moment))


_PRINTED: Mapping[str, Callable[[Any], str]] = {
    "uuid": _uuid,
    "text": _scalar,
    "bigint": _bigint,
    "int": _bigint,
    "timestamptz": _time,
    "jsonb": lambda value: exact_json.dumps(value, ""),
}
"""A value of JSON as PostgreSQL prints it. Each raises ValueError, which shows no value, or OverflowError."""
