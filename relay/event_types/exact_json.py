"""JSON read into Python's values and written again with every digit of its numbers. No I/O.

PostgreSQL's jsonb keeps numbers exactly, `json` reads them as binary floating point: 0.1000000000000000055 would come
back as 0.1. Here a number that a float cannot repeat is a float that remembers its text.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring
from math import isfinite
from typing import Any, Self

from relay.config.fields import safe_key

_LONG_NUMBER = 4_000
"""Digits; Python itself refuses to convert an integer of more than 4,300."""


_CONSTANTS = {None: "null", True: "true", False: "false"}


class Number(float):
    """A float that is written as it was read. What is computed from it is an ordinary float."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str | float) -> Self:
        """`text` is a number of JSON; a copy is made from the float, and gets the text afterwards."""
        number = super().__new__(cls, text)
        number.text = str(text)
        return number


def _float(text: str) -> float:
    number = float(text)
    return number if repr(number) == text else Number(text)


def _integer(text: str) -> int | float:
    return int(text) if len(text) < _LONG_NUMBER else Number(text)


_DECODER = json.JSONDecoder(parse_float=_float, parse_int=_integer)


def loads(text: str) -> Any:
    """Read JSON. Raises ValueError, and RecursionError where it is nested too deeply."""
    return _DECODER.decode(text)


def dumps(value: Any, name: str) -> str:
    """Write JSON as PostgreSQL prints jsonb, with a blank after each comma and colon; keys keep their order.

    Raises ValueError, which names the field below `name` and no value, for what JSON or UTF-8 does not have, and
    RecursionError where it is nested too deeply.
    """
    pieces: list[str] = []
    try:
        _write(value, pieces)
        text = "".join(pieces)
        text.encode()
    except _NotJson as error:
        raise ValueError(f"{'.'.join((name, *reversed(error.path)))}: {error}") from None
    except UnicodeEncodeError:
        raise ValueError(f"{name}: half of a surrogate pair is no text") from None
    return text


class _NotJson(ValueError):
    """Something that JSON does not have; `path` leads to it from the innermost step on."""

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
        raise _NotJson(f"JSON has no {type(value).__name__} such as this")


def _write_object(value: dict[Any, Any], pieces: list[str]) -> None:
    before = "{"
    for key, item in value.items():
        if not isinstance(key, str):
            raise _NotJson(f"a key of an object must be a str, not {type(key).__name__}")
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
