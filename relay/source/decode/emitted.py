"""Turns events that `pg_logical_emit_message` writes into the WAL into rows: an outbox without a table. No I/O.

A transactional message of the prefix is a JSON object, or an array of them, with the keys of `relay.publish` and with
host_id, user_id and transaction_id. It becomes inserts into a relation that does not exist, at the message's position
in the stream, so that everything after this module handles rows only.

Source: PostgreSQL documentation, "Logical Replication Message Formats" (Message) and "System Administration Functions".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from struct import Struct
from typing import Any
from uuid import UUID, uuid5

from relay.model import exact_json
from relay.model.events import FIELDS, NOTE, timestamp
from relay.model.printed import InvalidValue, printed
from relay.model.transactions import Buffer
from relay.model.tuples import ProtocolError
from relay.source.decode.pgoutput import Begin, Column, LogicalMessage, Relation, encode_tuple
from relay.source.decode.translation import Encoding

_BEGIN, _MESSAGE = b"BM"
_INSERT = Struct(">cIc")
_OID = 0
"""An oid that no relation of PostgreSQL has."""
_NAMESPACE = UUID("6d0b3c6e-3f0c-5f0e-9a53-2b8d0d3f7a11")
"""The namespace of the ids that are derived from positions."""
_COLUMNS = (*FIELDS, NOTE)
_NEEDED = ("host_id", "event_type", "payload")
_LEAST = len('{"host_id":0,"event_type":0,"payload":0}')
"""The length in characters of the shortest valid event."""
_FEW = 100
"""Up to this number of events, each becomes a row, even an empty one."""
_COUNTED = ("transaction_ordinal", "transaction_count", "c_offset")
"""The fields that a message cannot set."""

Values = dict[str, str | None]


class Emitted:
    """Turns the logical messages of a prefix into inserts, and leaves out those of other prefixes.

    `types` are the SQL types of the fields, `header` is the size in bytes of what precedes each message of pgoutput.
    """

    def __init__(self, prefix: str, types: Mapping[str, str], header: int = 0) -> None:
        self._prefix = prefix
        self._types = types
        self._header = header
        self._ignored = 0
        # The relation has no schema, since there is no table.
        columns = tuple(Column(name, 0) for name in _COLUMNS)
        self.relation = Relation(_OID, "", prefix, columns)
        self.reset()

    def reset(self, encoding: Encoding | None = None) -> None:
        """Forget the open commit; `encoding` is that of messages where it is not UTF-8."""
        self._begin: Begin | None = None
        self._codec = "utf-8" if encoding is None else encoding.codec

    def ignored(self) -> int:
        """The number of non-transactional messages of the prefix since the last call. They are not relayed."""
        ignored, self._ignored = self._ignored, 0
        return ignored

    def inserts(self, messages: list[Buffer]) -> list[Buffer]:
        """Replace logical messages by inserts. Raises ProtocolError for a malformed message."""
        replaced: list[Buffer] = []
        for each in messages:
            kind = each[self._header]
            if kind == _MESSAGE:
                replaced += self._inserts_of(bytes(each))
                continue
            if kind == _BEGIN:
                self._begin = Begin.of(bytes(each[self._header :]))
            replaced.append(each)
        return replaced

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
        """Decode again, with the codec of messages, a name that was decoded as UTF-8 with surrogates."""
        return name.encode("utf-8", "surrogateescape").decode(self._codec, "replace")

    def _rows(self, message: LogicalMessage, begin: Begin) -> Iterator[Values]:
        """The rows of a message's events.

        An id or a transaction_id that an event does not have is derived from the position, so that it is the same each
        time the message is received.
        """
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
                # The dead letter keeps the text of the message.
                row["payload"] = json.dumps(text)
            row["transaction_ordinal"], row["transaction_count"] = str(number), str(len(events))
            if problems := ([fault] if fault else faults):
                # `tuples` searches nulls from the end of a row, where it would take a value that ends in n for one.
                row[NOTE] = f"{'; '.join(problems)} (message at {message.lsn})"
            yield row

    def _read(self, content: bytes) -> tuple[str, str | None]:
        """The text of a message, and the fault if it is not text."""
        try:
            return content.decode(self._codec), None
        except UnicodeDecodeError:
            return content.decode("ascii", "backslashreplace"), "it is not text"

    def _row(self, event: Any, defaults: Mapping[str, str]) -> tuple[Values, list[str]]:
        """An event's fields as PostgreSQL would print them, and its faults."""
        if not isinstance(event, dict):
            return self._row({}, defaults)[0], ["it is not a JSON object"]
        row: Values = {}
        faults = []
        for name in FIELDS:
            if name in _COUNTED:
                continue
            try:
                row[name] = self._value(name, event, defaults)
            except (ValueError, OverflowError) as error:
                row[name] = None
                known = isinstance(error, InvalidValue)
                fault = str(error) if known else f"is not of type {self._types[name]}"
                faults.append(f"{name} {fault}")
        return row, faults

    def _value(self, name: str, event: dict[str, Any], defaults: Mapping[str, str]) -> str | None:
        """The text of a field. Raises ValueError or OverflowError for an invalid value."""
        value = event.get(name)
        if name == "id" and value == "":
            # An empty id would make all events with it one event.
            value = None
        if name == "payload" and name in event:
            return exact_json.dumps(value, name)
        if value is None:
            if name in defaults and self._types[name] in ("uuid", "text", "timestamptz"):
                return defaults[name]
            if name in _NEEDED or name in defaults:
                raise InvalidValue("is missing")
            return None
        return printed(self._types[name], value)


def _events(text: str) -> tuple[list[Any], str | None]:
    """The events of a message, and None; or one None that stands for the whole message, and the fault."""
    try:
        value = exact_json.loads(text)
    except ValueError:
        return [None], "it is not JSON"
    events = value if isinstance(value, list) else [value]
    if not events:
        return [None], "it has no events"
    if len(events) > _FEW and len(text) < len(events) * _LEAST:
        # Each would become a row that is hundreds of times as large as the event.
        return [None], f"most of its {len(events)} events are empty"
    return events, None
