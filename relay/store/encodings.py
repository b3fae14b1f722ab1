"""Texts for a database whose encoding may lack some of their characters. No I/O.

Source: PostgreSQL documentation, "Character Set Support".
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg._encodings import pg2pyenc

_ANYTHING = frozenset({"UTF8", "SQL_ASCII"})
"""Encodings that take every text."""


def codec_of(conn: psycopg.Connection[Any]) -> str | None:
    """Python's name for the encoding of the connection's database; None where that takes every text."""
    name = conn.info.parameter_status("server_encoding")
    if name is None or name in _ANYTHING:
        return None
    try:
        return pg2pyenc(name.encode())
    except psycopg.NotSupportedError:
        return "ascii"


def writable(text: str, codec: str | None) -> str:
    """The text, with escapes for the characters that an encoding lacks: the same for the same text."""
    return text if codec is None else text.encode(codec, "backslashreplace").decode(codec)
