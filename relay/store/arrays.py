"""Formats literals of PostgreSQL arrays: psycopg dumps a list element by element, which is slow in large batches."""

from __future__ import annotations

from collections.abc import Collection, Iterable


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
