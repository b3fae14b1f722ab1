"""Arrays as PostgreSQL reads them. psycopg writes a list element by element, which large batches feel."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def of_texts(texts: Collection[str]) -> str:
    """The literal of a text array.

    Source: PostgreSQL documentation, "Array Input and Output Syntax".
    """
    if not texts:
        return "{}"
    joined = '","'.join(texts)
    if "\\" in joined or joined.count('"') != 2 * (len(texts) - 1):
        joined = '","'.join(text.replace("\\", "\\\\").replace('"', '\\"') for text in texts)
    return f'{{"{joined}"}}'


def of_numbers(numbers: Iterable[int]) -> str:
    """The literal of an array of integers."""
    return f"{{{','.join(map(str, numbers))}}}"


def of_values(values: Iterable[object]) -> str:
    """The literal of an array of what has a text that PostgreSQL reads, such as numbers, times and texts, or None."""
    return f"{{{','.join(map(_element, values))}}}"


def _element(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, int | float):
        return str(value)
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
