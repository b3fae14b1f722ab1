"""psycopg's own adapters for relay's statements, whatever users' modules have registered for all connections."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def own_adapters() -> Any:
    """Return a context of psycopg with the adapters that it comes with."""
    from psycopg.adapt import AdaptersMap
    from psycopg.postgres import register_default_adapters, types
    from psycopg.types.array import register_array

    class Context:
        adapters = AdaptersMap(types=types)
        connection = None

    context = Context()
    register_default_adapters(context)
    for info in types:
        if info.array_oid:
            register_array(info, context)
    return context


def own(conn: Any) -> Any:
    """Open a cursor of the application's connection for a statement of relay, with psycopg's rows and texts."""
    from psycopg.rows import tuple_row
    from psycopg.types.string import StrDumper, TextLoader

    cursor = conn.cursor(row_factory=tuple_row)
    cursor.adapters.register_dumper(str, StrDumper)
    cursor.adapters.register_loader("text", TextLoader)
    return cursor
