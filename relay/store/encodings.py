"""Escapes text for a database whose encoding lacks some of its characters. No I/O.

Source: PostgreSQL documentation, "Character Set Support".
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg._encodings import pg2pyenc

_COMPLETE = frozenset({"UTF8", "SQL_ASCII"})
"""Encodings that accept every text."""


def codec_of(conn: psycopg.Connection[Any]) -> str | None:
    """Return Python's name for the encoding of the database; None if that accepts every text."""
    name = conn.info.parameter_status("server_encoding")
    if name is None or name in _COMPLETE:
        return None
    try:
        return pg2pyenc(name.encode())
    except psycopg.NotSupportedError:
        return "ascii"


def writable(text: str, codec: str | None) -> str:
    """Return the text with escapes for the characters that an encoding lacks; the same text gives the same result."""
    return text if codec is None else text.encode(codec, "backslashreplace").decode(codec)
