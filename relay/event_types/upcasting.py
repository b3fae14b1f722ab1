"""Upcasts events to the current version of their type and validates them, when a handler reads them. No I/O.

relay stores, routes and dead-letters events as they were published.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel, PydanticUserError, ValidationError
from pydantic_core import ErrorDetails, PydanticKnownError

from relay.config.fields import dig
from relay.event_types.event_type import EventType
from relay.faults import FaultAction, InvalidEvent, action_for
from relay.model import exact_json
from relay.model.events import Event, Row, TypedEvent
from relay.model.transactions import Values

Path = tuple[str | int, ...]

_FAULTS_SHOWN = 10
_VERSION_DIGITS = 9
_REFUSED = "is refused by a validator of the model"
_MESSAGES = {
    "value_error": _REFUSED,
    "assertion_error": _REFUSED,
    "union_tag_invalid": "Input should have one of the expected tags",
    "bytes_invalid_encoding": "Input should be encoded validly",
    "timezone_offset": "Input should have the expected timezone offset",
}
"""Replace the messages of pydantic that quote the value."""


class _Typed:
    """Upcasts and validates the events of one type."""

    def __init__(self, event_type: EventType) -> None:
        self._type = event_type
        self._current = event_type.current
        self._head, *self._path = event_type.version_from.split(".")
        model = event_type.model
        self._keys = frozenset[str]() if model is None else _keys_of(model)

    def current(self, event: Event) -> TypedEvent:
        """Return the event in the current version. Raises InvalidEvent, and errors of upcasters that are retried."""
        try:
            return self._checked(event)
        except InvalidEvent as error:
            which = f"{self._type.name} {event.text('id') or event.text('c_offset')}"
            raise InvalidEvent(f"{which}: {error}", error.faults) from error.__cause__

    def _checked(self, event: Event) -> TypedEvent:
        version = self._version(event)
        row = event.row if version == self._current else self._upcast(event, version)
        return TypedEvent(
            row, self._validated(Event(row).text("payload")), dict(event.headers) or None
        )

    def _version(self, event: Event) -> int:
        """Return the version that the event was published in."""
        exists, value = dig(_parsed(event, self._head), self._path)
        if not exists or value is None:
            value = 1
        if isinstance(value, str) and value.isdecimal() and len(value) <= _VERSION_DIGITS:
            value = int(value)
        where = (self._head, *self._path)
        if isinstance(value, bool) or not isinstance(value, int):
            raise _invalid(where, "is not a version, a whole number from 1")
        if not self._type.oldest <= value <= self._current:
            raise _invalid(where, f"an unknown version; known are {self._span()}")
        return value

    def _span(self) -> str:
        oldest = self._type.oldest
        return f"{oldest} to {self._current}" if oldest < self._current else f"only {oldest}"

    def _upcast(self, event: Event, version: int) -> Row:
        payload = _parsed(event, "payload")
        for step in range(version, self._current):
            upcaster = self._type.upcasters[step]
            where = f"upcast.{step} ({_name(upcaster)})"
            try:
                payload = upcaster(payload)
            except BaseException as error:
                _raise_unless_of_event(error)
                raise _of_code(where, f"raised {type(error).__name__}") from error
            if payload is None:
                raise _of_code(where, "returned None: return the payload of the next version")
        documents = {"payload": payload}
        if self._head not in documents:
            documents[self._head] = _parsed(event, self._head)
        documents[self._head] = _with_version(documents[self._head], self._path, self._current)
        return event.with_texts({name: _text(each, name) for name, each in documents.items()})

    def _validated(self, payload: str | None) -> Any:
        model = self._type.model
        if model is None:
            return None
        try:
            return model.model_validate_json("null" if payload is None else payload)
        except ValidationError as error:
            raise _described(error, self._keys) from None
        except BaseException as error:
            _raise_unless_of_event(error)
            where = f"model ({_name(model)})"
            raise _of_code(where, f"raised {type(error).__name__}") from error


class Upcasting:
    """Upcasts the events of a configuration's event types. False where there are none."""

    def __init__(self, types: Iterable[EventType]) -> None:
        self._types = {each.name: _Typed(each) for each in types}
        self._names = frozenset(name.encode() for name in self._types)

    def __bool__(self) -> bool:
        return bool(self._types)

    def current(self, event: Event) -> Event:
        """Return the event in the current version of its type; the same event if its type is not known.

        Raises InvalidEvent, and errors of upcasters that are retried.
        """
        typed = self._types.get(event.text("event_type") or "")
        return event if typed is None else typed.current(event)

    def knows(self, event: Event) -> bool:
        """Return whether the type of an event is known."""
        return event.text("event_type") in self._types

    def among(self, kinds: Values) -> list[int]:
        """Return the indices in `kinds` of the known types."""
        if self.none_of(kinds):
            return []
        return [index for index, kind in enumerate(kinds) if kind in self._names]

    def none_of(self, kinds: Values) -> bool:
        """Return whether none of the types is known."""
        return self._names.isdisjoint(kinds)


def _parsed(event: Event, name: str) -> Any:
    text = event.text(name)
    try:
        return None if text is None else exact_json.loads(text)
    except ValueError:
        raise _invalid((name,), "cannot be read as JSON") from None


def _text(document: Any, name: str) -> str:
    try:
        return exact_json.dumps(document, name)
    except ValueError as error:
        raise InvalidEvent(str(error), [((name,), "cannot be written as JSON")]) from None


def _with_version(document: Any, path: Sequence[str], version: int) -> Any:
    """Set the version at a path of a document, if its values are objects; returns the document."""
    document = {} if document is None else document
    holder = document
    *above, last = path
    for step in above:
        if isinstance(holder, dict):
            holder = holder.setdefault(step, {})
    if isinstance(holder, dict):
        holder[last] = version
    return document


def _raise_unless_of_event(error: BaseException) -> None:
    """Raise an error of the user's code again unless the event is its cause."""
    if isinstance(error, Exception) and action_for(error) is not FaultAction.DEAD_LETTER:
        raise error


def _name(code: Any) -> str:
    """Return the name of a function or a class as the configuration has it."""
    return f"{code.__module__}:{getattr(code, '__qualname__', type(code).__name__)}"


def _invalid(path: Path, message: str) -> InvalidEvent:
    return InvalidEvent(f"{_shown(path)}: {message}", [(path, message)])


def _of_code(where: str, message: str) -> InvalidEvent:
    """Return the fault of a payload that the user's code refuses."""
    return InvalidEvent(f"{where}: {message}", [(("payload",), f"{where} {message}")])


def _described(error: ValidationError, keys: frozenset[str]) -> InvalidEvent:
    """Describe the faults field by field: pydantic's messages without the values that they quote."""
    faults = [
        (_path(each["type"], each["loc"], keys), _message(each))
        for each in error.errors(include_url=False, include_input=False)
    ]
    faults = list(dict.fromkeys(faults))
    shown = [f"{_shown(path)}: {message}" for path, message in faults]
    more = len(shown) - _FAULTS_SHOWN
    text = "; ".join(shown[:_FAULTS_SHOWN]) + (f"; and {more} more" if more > 0 else "")
    return InvalidEvent(text, faults)


def _shown(path: Path) -> str:
    return ".".join(str(part) for part in path)


def _path(kind: str, location: Sequence[int | str], keys: frozenset[str]) -> Path:
    """Return the path of a field, with `*` for a key that the model does not name: it may be a value."""
    extra: list[str] = []
    if kind == "extra_forbidden":
        *location, key = location
        extra = [exact_json.safe_key(str(key))]
    parts = [
        part if isinstance(part, int) or part in keys else "*"
        for part in location
        if isinstance(part, int) or "[" not in part  # a validator's own step
    ]
    return ("payload", *parts, *extra)


def _message(fault: ErrorDetails) -> str:
    if fault["type"] in _MESSAGES:
        return _MESSAGES[fault["type"]]
    try:
        template = PydanticKnownError(fault["type"], fault.get("ctx")).message_template  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError):
        return _REFUSED  # a validator's own kind of error
    message, quoting, _ = template.partition("{error}")
    return message.rstrip(" ,:") if quoting else fault["msg"]


def _keys_of(model: type[BaseModel]) -> frozenset[str]:
    """Return the keys that a model and its nested models name."""
    try:
        return frozenset(_named(model.model_json_schema()))
    except PydanticUserError:
        return frozenset(model.model_fields)  # a field's type has no JSON Schema


def _named(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        properties = schema.get("properties")
        yield from properties if isinstance(properties, dict) else ()
        for each in schema.values():
            yield from _named(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from _named(each)
