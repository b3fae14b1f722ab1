"""Escapes text for terminals, so that a value from outside cannot move the cursor."""

from __future__ import annotations

import json


def printable(cell: object, kept: str = "") -> str:
    """Return a cell as text with control characters escaped, except those in `kept`."""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in str(cell))


def printable_json(text: str) -> str:
    """Return the same JSON with control characters, which only strings can hold, as JSON escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
