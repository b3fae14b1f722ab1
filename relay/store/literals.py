"""Formats values for statements: literals of arrays, and text that an encoding may lack. No I/O.

psycopg dumps a list element by element, which is slow in large batches.

Source: PostgreSQL documentation, "Character Set Support".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import psycopg
from psycopg._encodings import pg2pyenc


def of_texts(texts: Collection[str]) -> str:
    """Return the literal of a text array.

    Source: PostgreSQL documentation, "Array Input and Output Syntax".
    """
    if not texts:
        return "{}"
    joined = '","'.join(texts)
    if "\\" in joined or joined.count('"') != 2 * (len(texts) - 1):
        joined = '","'.join(text.replace("\\", "\\\\").replace('"', '\\"') for text in texts)
    return f'{{"{joined}"}}'


def of_numbers(numbers: Iterable[int]) -> str:
    """Return the literal of an array of integers."""
    return f"{{{','.join(map(str, numbers))}}}"


def of_values(values: Iterable[object]) -> str:
    """Return the literal of an array of numbers, None, and values whose `str` PostgreSQL reads, such as times."""
    return f"{{{','.join(map(_element, values))}}}"


def _element(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, int | float):
        return str(value)
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


_COMPLETE = frozenset({b"UTF8", b"SQL_ASCII"})
"""Encodings that accept every text."""


def codec_of(conn: psycopg.Connection[Any]) -> str | None:
    """Return Python's name for the encoding of the database; None if that accepts every text."""
    name = conn.pgconn.parameter_status(b"server_encoding")
    if name is None or name in _COMPLETE:
        return None
    try:
        return pg2pyenc(name)
    except psycopg.NotSupportedError:
        return "ascii"


def writable(text: str, codec: str | None) -> str:
    """Return the text with escapes for the characters that an encoding lacks; the same text gives the same result."""
    return text if codec is None else text.encode(codec, "backslashreplace").decode(codec)


def storable(conn: psycopg.Connection[Any], text: str | None) -> str | None:
    """Return a text with escapes for the characters that the encoding of the database lacks."""
    return None if text is None else writable(text, codec_of(conn))
