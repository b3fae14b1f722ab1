"""Tables for people at a terminal, tab-separated lines for everything else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from relay.cli.options import out


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows below their headings. At a terminal long cells are folded; piped, each row is one whole line."""
    if not out.is_terminal:
        for row in (headings, *rows):
            print("\t".join(printable(cell) for cell in row))
        return
    table = Table()
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    out.print(table)


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Print names with their values, one below the other. Piped, each pair is one whole line."""
    if not out.is_terminal:
        for name, value in facts:
            print(f"{printable(name)}\t{printable(value)}")
        return
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(Text(printable(name)), Text(printable(value, kept="\n")))
    out.print(table)


def printable(cell: object, kept: str = "") -> str:
    """A cell as text with control characters escaped, but for those in `kept`: a value must not move the cursor."""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in str(cell))


def printable_json(text: str) -> str:
    """The same JSON with control characters, which only strings can hold, as JSON escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
