"""Reads events that somebody sends as JSON, and finds every fault in them. No I/O but the user's models."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from relay.event_types.upcasting import Upcasting
from relay.faults import InvalidEvent
from relay.model import exact_json
from relay.model.events import EVENT_FIELDS, Event

MOST_EVENTS = 1_000
"""The most events of one business transaction."""
_MOST_FAULTS = 100
"""How many faults are reported at most."""
_DEEPEST = 200
"""The most levels of nesting in a payload or in metadata."""
_MOST_DIGITS = 16 * 1024 * 1024
"""The most digits that exponents add to the numbers of a message: PostgreSQL writes 1e131071 with all of its zeros."""
_EXPONENT = re.compile(r"[eE][+-]?(\d{1,9})")
_LARGEST_VERSION = 2**63 - 1
_OF_NAMESPACE = uuid.UUID("8d6a0c1e-6f53-5a0b-9a57-6b1a6c1f7a3d")
"""The namespace of the ids that are derived. It must never change: repetitions would be published again."""

_KNOWN = (
    "id",
    "host_id",
    "user_id",
    "event_type",
    "aggregate_type",
    "aggregate_id",
    "aggregate_version",
    "event_ts",
    "deliver_at",
    "payload",
    "metadata",
)
"""The keys of an event."""
MOST_VALUES = 500_000
"""The most values of a message, as counted before it is read: each takes some 100 bytes, however short its text is."""
_BETWEEN_VALUES = (b",", b"[", b"{")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", re.ASCII)
_BLANK: tuple[str | None, ...] = (None,) * len(EVENT_FIELDS)

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a message, and the JSONPath of the value at fault, such as `$[1].payload.lines[0].sku`.

    It names no value.
    """

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class Invalid(Exception):
    """A message cannot be published. `faults` has all that is wrong with it, a hundred at most."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("; ".join(str(each) for each in faults))
        self.faults = list(faults)


class TooMany(Exception):
    """A message has more than MOST_EVENTS events or MOST_VALUES values, or too many digits for a database."""


class NotPermitted(Exception):
    """The sender may not publish an event of this host, or of this type."""


@dataclass(frozen=True, slots=True)
class IncomingEvents:
    """Valid events of one business transaction. `events` is the JSON array that `relay.publish` takes."""

    host_id: str
    user_id: str | None
    ids: tuple[str, ...]
    events: str = field(repr=False)
    transaction_id: str = field(default_factory=lambda: str(uuid.uuid4()))


Permitted = Callable[[str, str], bool]
"""Says whether the sender may publish for a host, an event of a type."""
IdOf = Callable[[int], uuid.UUID]
"""Returns the id of the event of an ordinal, from 1, that has none of its own."""


def derived(*named: str) -> IdOf:
    """Return a function for ids that are the same in every repetition: of a sender, and of what it calls a message."""
    return lambda ordinal: uuid.uuid5(_OF_NAMESPACE, json.dumps([*named, ordinal]))


def _new(ordinal: int) -> uuid.UUID:
    return uuid.uuid4()


class MessageReader:
    """Reads messages, and validates them against the event types of a configuration. Safe in any thread."""

    def __init__(self, types: Upcasting | None = None) -> None:
        self._types = types or Upcasting([])

    @property
    def runs_code(self) -> bool:
        """Whether reading may call the user's models and upcasters, which may take long."""
        return bool(self._types)

    def read(
        self,
        body: bytes,
        permitted: Permitted = lambda host, event_type: True,
        id_of: IdOf = _new,
    ) -> IncomingEvents:
        """Read an event, or an array of events of one business transaction.

        Raises Invalid, NotPermitted, TooMany, and what the user's code raises in an outage.
        """
        values = sum(map(body.count, _BETWEEN_VALUES))
        if values > MOST_VALUES:
            raise TooMany(f"the message has about {values} values, and {MOST_VALUES} are allowed")
        try:
            document = exact_json.loads(body.decode("utf-8-sig"))
        except UnicodeDecodeError:
            raise Invalid([Fault("$", "is not UTF-8 text")]) from None
        except json.JSONDecodeError as error:
            where = f" at line {error.lineno}, column {error.colno}" if error.doc else ""
            raise Invalid([Fault("$", f"is not JSON: {error.msg}{where}")]) from None
        except ValueError as error:
            raise Invalid([Fault("$", f"is not JSON: {error}")]) from None
        return self.read_document(document, permitted, id_of)

    def read_document(
        self,
        document: Any,
        permitted: Permitted = lambda host, event_type: True,
        id_of: IdOf = _new,
    ) -> IncomingEvents:
        """Do what `read` does with JSON that is read already."""
        is_list = isinstance(document, list)
        events = document if is_list else [document]
        if len(events) > MOST_EVENTS:
            raise TooMany(f"the message has {len(events)} events, and {MOST_EVENTS} are allowed")
        found = _Faults()
        if not events:
            found.add((), "has no event")
        for index, event in enumerate(events):
            path: Path = (index,) if is_list else ()
            for where, message in _faults_of(event):
                found.add(path + where, message)
        rows = [each for each in events if isinstance(each, dict)]
        for row in rows:
            host, kind = row.get("host_id"), row.get("event_type")
            is_known = _is_uuid(host) and isinstance(kind, str)
            if is_known and not permitted(str(host).lower(), str(kind)):
                raise NotPermitted
        if not found:
            for index, row in enumerate(rows):
                path = (index,) if is_list else ()
                for where, message in self._faults_of_type(row):
                    found.add(path + where, message)
            for where, message in _faults_together(rows):
                found.add(where, message)
        if found:
            raise Invalid(found.listed)
        if (
            sum(_digits(row.get(name)) for row in rows for name in ("payload", "metadata"))
            > _MOST_DIGITS
        ):
            raise TooMany(f"the numbers of the message have more than {_MOST_DIGITS} digits")
        written = [_written(row, number, id_of) for number, row in enumerate(rows, start=1)]
        first = rows[0]
        user = first.get("user_id")
        return IncomingEvents(
            first["host_id"].lower(),
            None if user is None else user.lower(),
            tuple(each["id"] for each in written),
            exact_json.dumps(written, "events"),
        )

    def _faults_of_type(self, row: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
        if not self._types:
            return
        metadata = row.get("metadata")
        texts = {
            "event_type": row["event_type"],
            "payload": exact_json.dumps(row["payload"], "payload"),
            "metadata": None if metadata is None else exact_json.dumps(metadata, "metadata"),
        }
        event = Event(Event(_BLANK).with_texts(texts))
        try:
            self._types.current(event)
        except InvalidEvent as error:
            yield from error.faults


class _Faults:
    """The faults of a message. False without one."""

    def __init__(self) -> None:
        self.listed: list[Fault] = []

    def __bool__(self) -> bool:
        return bool(self.listed)

    def add(self, path: Path, message: str) -> None:
        if len(self.listed) < _MOST_FAULTS:
            self.listed.append(Fault(json_path(path), message))


def json_path(path: Path) -> str:
    """Return a path as JSONPath writes it (RFC 9535); `*` stands for a key that may be a value."""
    parts = ["$"]
    for part in path:
        if isinstance(part, int):
            parts.append(f"[{part}]")
        elif part == "*" or _NAME.fullmatch(part):
            parts.append(f".{part}")
        else:
            quoted = part.replace("\\", "\\\\").replace("'", "\\'")
            parts.append(f"['{quoted}']")
    return "".join(parts)


def _faults_of(event: Any) -> Iterator[tuple[Path, str]]:
    if not isinstance(event, dict):
        yield (), "must be an object"
        return
    for name in event:
        if name not in _KNOWN:
            yield (_shown(name),), f"is not a key of an event; the keys are {', '.join(_KNOWN)}"
    for name in ("host_id", "event_type", "payload"):
        if name not in event:
            yield (name,), "is missing"
    for name in ("id", "host_id", "user_id"):
        value = event.get(name)
        is_optional = name == "user_id" or name not in event
        if not (_is_uuid(value) or (value is None and is_optional)):
            yield (name,), "must be a UUID"
    yield from _faults_of_names(event)
    version = event.get("aggregate_version")
    if version is not None and (type(version) is not int or abs(version) > _LARGEST_VERSION):
        yield ("aggregate_version",), "must be a whole number below 2^63"
    for name in ("event_ts", "deliver_at"):
        if (fault := _fault_of_time(event.get(name))) is not None:
            yield (name,), fault
    metadata = event.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        yield ("metadata",), "must be an object"
    for name in ("payload", "metadata"):
        yield from _faults_of_json(event.get(name), (name,))


def _faults_of_names(event: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    kind = event.get("event_type", "…")
    if not isinstance(kind, str) or not kind:
        yield ("event_type",), "must be a text that is not empty"
    for name in ("aggregate_type", "aggregate_id"):
        value = event.get(name)
        is_number = name == "aggregate_id" and type(value) is int
        if not (value is None or isinstance(value, str) or is_number):
            yield (name,), "must be a text"
    for name in ("event_type", "aggregate_type", "aggregate_id"):
        value = event.get(name)
        if isinstance(value, str) and (fault := _fault_of_text(value)) is not None:
            yield (name,), fault


def _faults_together(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Path, str]]:
    """Yield the faults of a list of events that are valid each."""
    ids: set[str] = set()
    for index, row in enumerate(rows):
        for name in ("host_id", "user_id"):
            if (row.get(name) or "").lower() != (rows[0].get(name) or "").lower():
                yield (
                    (index, name),
                    "is not that of the first event: the events of a list are one business transaction of one host "
                    "and user",
                )
        if "id" in row:
            if row["id"].lower() in ids:
                yield (index, "id"), "is that of an event before it"
            ids.add(row["id"].lower())


def _faults_of_json(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Yield the parts of a JSON value that jsonb cannot store."""
    if isinstance(value, str):
        if (fault := _fault_of_text(value)) is not None:
            yield path, fault
    elif isinstance(value, dict | list):
        if len(path) > _DEEPEST:
            yield path[:_SHOWN_LEVELS], "is nested too deeply"
            return
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            if isinstance(key, str) and (fault := _fault_of_text(key)) is not None:
                yield (*path, "*"), f"the key {fault}"
            if isinstance(each, str | dict | list):
                yield from _faults_of_json(each, (*path, key))


def _digits(value: Any) -> int:
    """Return how many digits the exponents in a JSON value stand for."""
    if isinstance(value, dict):
        return sum(map(_digits, value.values()))
    if isinstance(value, list):
        return sum(map(_digits, value))
    if not isinstance(value, float):
        return 0
    exponent = _EXPONENT.search(value.text if isinstance(value, exact_json.Number) else repr(value))
    return int(exponent[1]) if exponent else 0


_SHOWN_LEVELS = 10


def _shown(key: str) -> str:
    return exact_json.safe_key(key)


def _fault_of_text(text: str) -> str | None:
    if "\0" in text:
        return "has a NUL character, which PostgreSQL cannot store"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "has a lone surrogate, which is not a character"
    return None


def _fault_of_time(value: Any) -> str | None:
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(value)
        # Python accepts every character between the date and the time.
        is_valid = moment.utcoffset() is not None and value.isascii() and value.isprintable()
    except (TypeError, ValueError):
        is_valid = False
    return None if is_valid else "must be a time with its offset, such as 2026-11-27T09:30:00Z"


def _is_uuid(value: Any) -> bool:
    return isinstance(value, str) and _UUID.fullmatch(value) is not None


def _written(row: Mapping[str, Any], number: int, id_of: IdOf) -> dict[str, Any]:
    """Return an event as `relay.publish` takes it."""
    event = {name: row[name] for name in _KNOWN if row.get(name) is not None}
    event = {name: value for name, value in event.items() if name not in ("host_id", "user_id")}
    event["id"] = row["id"].lower() if "id" in row else str(id_of(number))
    event.setdefault("aggregate_type", None)
    event.setdefault("aggregate_id", None)
    event["payload"] = row["payload"]
    return event
