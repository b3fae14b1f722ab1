"""Text that is safe to print: a value of somebody else must not move the terminal's cursor."""

from __future__ import annotations

import json


def printable(cell: object, kept: str = "") -> str:
    """A cell as text with control characters escaped, but for those in `kept`: a value must not move the cursor."""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in str(cell))


def printable_json(text: str) -> str:
    """The same JSON with control characters, which only strings can hold, as JSON escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
