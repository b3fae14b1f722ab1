"""Reads and writes JSON without losing a digit of its numbers. No I/O.

PostgreSQL's jsonb keeps numbers exactly; `json` reads them as binary floating point, so that 0.1000000000000000055 is
written as 0.1. Here a number that a float does not reproduce becomes a `Number`, a float that keeps its text. And
`json` refuses what jsonb stores: integers of more than 4,300 digits, and values that are nested more deeply than
Python's stack.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from json.encoder import encode_basestring
from math import isfinite
from typing import Any, NoReturn, Self

_KEY = re.compile(r"[A-Za-z_][\w-]{0,62}", re.ASCII)
_BLANKS = re.compile(r"[ \t\n\r]*")
_DEEPEST = 100_000
"""The most levels of nesting that are read: more than PostgreSQL's stack allows, and not all memory for `[[[[…`."""
_SHOWN_KEYS = 20
"""How many keys an error shows of a value that is nested more deeply than Python's stack, the innermost ones."""
_LONG_NUMBER = 4_000
"""In digits: from this length on an integer becomes a `Number`. Python refuses to convert one of more than 4,300."""

_CONSTANTS = {None: "null", True: "true", False: "false"}


class Number(float):
    """A float that is written as it was read. Arithmetic with it returns ordinary floats."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str | float) -> Self:
        """`text` is a JSON number; `copy` and `pickle` pass a float, and set `text` afterwards."""
        number = super().__new__(cls, text)
        number.text = str(text)
        return number


def _float(text: str) -> float:
    number = float(text)
    return number if repr(number) == text else Number(text)


def _integer(text: str) -> int | float:
    return int(text) if len(text) < _LONG_NUMBER else Number(text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_PLAIN = json.JSONDecoder(parse_constant=_refuse)
_DECODER = json.JSONDecoder(parse_float=_float, parse_constant=_refuse)
_SCALARS = json.JSONDecoder(parse_float=_float, parse_int=_integer, parse_constant=_refuse)


def loads(text: str) -> Any:
    """Read JSON. Raises ValueError, also for more than 100,000 levels of nesting."""
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError):
        # A long integer or many levels, which cost the decoder's speed.
        return _read(text)


def loads_floats(text: str) -> Any:
    """Read JSON as `loads` does, but with ordinary floats, for users' code: up to three times as fast.

    Raises ValueError.
    """
    try:
        return _PLAIN.decode(text)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError):
        return _read(text)


def _read(text: str) -> Any:
    """Read JSON of any length and depth, without recursion."""
    at = _skip(text, 0)
    holders: list[Any] = []
    keys: list[str] = []
    while True:
        opening = text[at : at + 1]
        if opening and opening in "[{":
            value: Any = [] if opening == "[" else {}
            at = _skip(text, at + 1)
            if text[at : at + 1] != _CLOSING[type(value)]:
                holders.append(value)
                if len(holders) > _DEEPEST:
                    raise ValueError("is nested too deeply")
                if opening == "{":
                    key, at = _key(text, at)
                    keys.append(key)
                continue
            at += 1
        else:
            value, at = _SCALARS.raw_decode(text, at)
        while True:
            at = _skip(text, at)
            if not holders:
                if at != len(text):
                    raise json.JSONDecodeError("Extra data", "", at)
                return value
            holder = holders[-1]
            if isinstance(holder, dict):
                holder[keys[-1]] = value
            else:
                holder.append(value)
            following = text[at : at + 1]
            if following == ",":
                at = _skip(text, at + 1)
                if isinstance(holder, dict):
                    keys[-1], at = _key(text, at)
                break
            if following != _CLOSING[type(holder)]:
                raise json.JSONDecodeError("Expecting a comma or an end", "", at)
            at += 1
            value = holders.pop()
            if isinstance(value, dict):
                keys.pop()


_CLOSING: dict[type, str] = {list: "]", dict: "}"}


def _skip(text: str, at: int) -> int:
    """The index of the next character that is no blank."""
    match = _BLANKS.match(text, at)
    return match.end() if match else at


def _key(text: str, at: int) -> tuple[str, int]:
    """The key of an object at an index, and the index of its value."""
    if text[at : at + 1] != '"':
        raise json.JSONDecodeError("Expecting a key", "", at)
    key, at = _SCALARS.raw_decode(text, at)
    at = _skip(text, at)
    if text[at : at + 1] != ":":
        raise json.JSONDecodeError("Expecting a colon", "", at)
    return key, _skip(text, at + 1)


def safe_key(key: str) -> str:
    """A JSON object's key as logs show it: `*` for one that does not look like a field's name and may be a value."""
    return key if _KEY.fullmatch(key) else "*"


def dumps(value: Any, name: str) -> str:
    """Write JSON as PostgreSQL prints jsonb, with a blank after each comma and colon; keys keep their order.

    Raises ValueError for a value that JSON or UTF-8 cannot represent, or with more than 100,000 levels of nesting; it
    names the field below `name` and no value.
    """
    pieces: list[str] = []
    try:
        try:
            _write(value, pieces)
        except RecursionError:
            pieces = _written(value)
        text = "".join(pieces)
        text.encode()
    except _NotJson as error:
        raise ValueError(f"{'.'.join((name, *reversed(error.path)))}: {error}") from None
    except UnicodeEncodeError:
        raise ValueError(f"{name}: has a lone surrogate, which is not a character") from None
    return text


class _NotJson(ValueError):
    """A value that JSON cannot represent. `path` has the keys and indices that lead to it, the innermost first."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.path: list[str] = []


def _write(value: Any, pieces: list[str]) -> None:
    if isinstance(value, str):
        pieces.append(encode_basestring(value))
    elif value is None or isinstance(value, bool):
        pieces.append(_CONSTANTS[value])
    elif isinstance(value, int):
        pieces.append(int.__repr__(value))
    elif isinstance(value, dict):
        _write_object(value, pieces)
    elif isinstance(value, list | tuple):
        _write_array(value, pieces)
    elif isinstance(value, Number):
        pieces.append(value.text)
    elif isinstance(value, float) and isfinite(value):
        pieces.append(float.__repr__(value))
    else:
        raise _NotJson(f"JSON cannot represent this {type(value).__name__}")


def _written(value: Any) -> list[str]:
    """The pieces that `_write` appends, of a value of any depth, without recursion."""
    pieces: list[str] = []
    holders: list[_Holder] = []
    try:
        while True:
            if isinstance(value, dict | list | tuple) and value:
                holders.append(_Holder(value))
                if len(holders) > _DEEPEST:
                    # It may contain itself.
                    holders.clear()
                    raise _NotJson("is nested too deeply")
            else:
                _write(value, pieces)
            while holders and not holders[-1].advance(pieces):
                holders.pop()
            if not holders:
                return pieces
            value = holders[-1].item
    except _NotJson as error:
        error.path += [each.shown_key for each in reversed(holders[-_SHOWN_KEYS:])]
        raise


class _Holder:
    """A non-empty object or array that is being written, and the item in it that is next."""

    __slots__ = ("_before", "_closing", "_items", "item", "shown_key")

    def __init__(self, value: Any) -> None:
        is_object = isinstance(value, dict)
        self._items: Iterator[tuple[Any, Any]] = iter(
            value.items() if is_object else enumerate(value)
        )
        self._before, self._closing = ("{", "}") if is_object else ("[", "]")
        self.item: Any = None
        self.shown_key = ""

    def advance(self, pieces: list[str]) -> bool:
        """Move to the next item, and write what is before it; False at the end, which is written."""
        following = next(self._items, None)
        if following is None:
            pieces.append(self._closing)
            return False
        key, self.item = following
        pieces.append(self._before)
        if self._closing == "}":
            _require_text(key)
            pieces += encode_basestring(key), ": "
            key = safe_key(key)
        self.shown_key = str(key)
        self._before = ", "
        return True


def _require_text(key: Any) -> None:
    if not isinstance(key, str):
        raise _NotJson(f"a key of an object must be a str, not {type(key).__name__}")


# `_write_object` and `_write_array` share no function: a third frame for each level of nesting would lower the depth
# at which Python raises RecursionError.
def _write_object(value: dict[Any, Any], pieces: list[str]) -> None:
    before = "{"
    for key, item in value.items():
        _require_text(key)
        pieces += before, encode_basestring(key), ": "
        try:
            _write(item, pieces)
        except _NotJson as error:
            error.path.append(safe_key(key))
            raise
        before = ", "
    pieces.append("}" if value else "{}")


def _write_array(value: list[Any] | tuple[Any, ...], pieces: list[str]) -> None:
    before = "["
    for index, item in enumerate(value):
        pieces.append(before)
        try:
            _write(item, pieces)
        except _NotJson as error:
            error.path.append(str(index))
            raise
        before = ", "
    pieces.append("]" if value else "[]")
