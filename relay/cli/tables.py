"""Tables for people at a terminal, tab-separated lines for everything else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from relay.cli.options import out
from relay.observe.terminal import printable


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
