"""JSON read into Python's values and written again with every digit of its numbers. No I/O.

PostgreSQL's jsonb keeps numbers exactly, `json` reads them as binary floating point: 0.1000000000000000055 would come
back as 0.1. Here a number that a float cannot repeat is a float that remembers its text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from json.encoder import encode_basestring
from math import isfinite
from typing import Any, Self

from relay.paths import safe_key

_LONG_NUMBER = 4_000
"""Digits; Python itself refuses to convert an integer of more than 4,300."""


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


def loads(text: str) -> Any:
    """Read JSON. Raises ValueError, and RecursionError where it is nested too deeply."""
    return json.loads(text, parse_float=_float, parse_int=_integer)


def dumps(value: Any, name: str) -> str:
    """Write JSON as PostgreSQL prints jsonb, with a blank after each comma and colon; keys keep their order.

    Raises ValueError, which names the field below `name` and no value, for what JSON or UTF-8 does not have, and
    RecursionError where it is nested too deeply.
    """
    text = "".join(_pieces(value, name))
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}: half of a surrogate pair is no text") from None
    return text


def _pieces(value: Any, name: str) -> Iterator[str]:
    if value is None or isinstance(value, bool):
        yield {None: "null", True: "true", False: "false"}[value]
    elif isinstance(value, str):
        yield encode_basestring(value)
    elif isinstance(value, Number):
        yield value.text
    elif isinstance(value, int):
        yield int.__repr__(value)
    elif isinstance(value, float) and isfinite(value):
        yield float.__repr__(value)
    elif isinstance(value, dict):
        yield from _object(value, name)
    elif isinstance(value, list | tuple):
        yield from _array(value, name)
    else:
        raise ValueError(f"{name}: JSON has no {type(value).__name__} such as this")


def _object(value: dict[Any, Any], name: str) -> Iterator[str]:
    before = "{"
    for key, item in value.items():
        if not isinstance(key, str):
            raise ValueError(f"{name}: a key of an object must be a str, not {type(key).__name__}")
        yield f"{before}{encode_basestring(key)}: "
        yield from _pieces(item, f"{name}.{safe_key(key)}")
        before = ", "
    yield "}" if value else "{}"


def _array(value: list[Any] | tuple[Any, ...], name: str) -> Iterator[str]:
    before = "["
    for index, item in enumerate(value):
        yield before
        yield from _pieces(item, f"{name}.{index}")
        before = ", "
    yield "]" if value else "[]"
