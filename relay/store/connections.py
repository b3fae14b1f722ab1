"""Connections to the source and the target: how they are opened, and how they are pooled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import psycopg
from psycopg import sql
from psycopg.adapt import Buffer, Dumper
from psycopg.types.json import JsonbDumper
from psycopg_pool import ConnectionPool

from relay.events import Lsn

CONNECT_TIMEOUT_SECONDS = 10
POOL_TIMEOUT_SECONDS = 5.0
"""How long a task waits for a connection before the wait counts as a fault that is tried again."""

_PG_LSN = 3220

TEXT_FORM: Mapping[str, str] = {
    "datestyle": "ISO, YMD",
    "timezone": "UTC",
    "intervalstyle": "postgres",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "lc_monetary": "C",
    "xmlbinary": "base64",
    "quote_all_identifiers": "off",
}
"""Every setting that decides how PostgreSQL prints a value, with the value that relay reads.

Source: PostgreSQL documentation, "Client Connection Defaults"; pg_dump and postgres_fdw pin theirs for the same reason.
"""

Configure = Callable[[psycopg.Connection[Any]], None]


class _LsnDumper(Dumper):
    oid = _PG_LSN

    def dump(self, obj: Lsn) -> Buffer:
        return str(obj).encode()


def connect(dsn: str, **options: Any) -> psycopg.Connection[Any]:
    """One connection in autocommit mode. Raises psycopg.OperationalError."""
    return psycopg.connect(
        dsn,
        autocommit=True,
        connect_timeout=CONNECT_TIMEOUT_SECONDS,
        **{"application_name": "relay", "client_encoding": "UTF8", **options},
    )


def pin_text_form(conn: psycopg.Connection[Any]) -> None:
    """Fix how the session prints values. Every connection that reads events needs it. Raises psycopg.Error.

    A SET in the session overrides the defaults of server, database and role, the `options` of the connection string,
    and PGDATESTYLE and PGTZ, which libpq sends after those options. Handlers' connections keep what their user set.
    """
    settings = sql.SQL(", ").join(
        sql.SQL("set_config({}, {}, false)").format(name, value)
        for name, value in TEXT_FORM.items()
    )
    conn.execute(sql.SQL("select {}").format(settings))


def open_pool(
    dsn: str, size: int, configure: Configure | None = None
) -> ConnectionPool[psycopg.Connection[Any]]:
    """A pool of at most `size` connections in which dicts are written as jsonb and `Lsn` as pg_lsn."""

    def prepare(conn: psycopg.Connection[Any]) -> None:
        conn.adapters.register_dumper(dict, JsonbDumper)
        conn.adapters.register_dumper(Lsn, _LsnDumper)
        if configure is not None:
            configure(conn)

    return ConnectionPool(
        dsn,
        min_size=0,
        max_size=size,
        open=True,
        timeout=POOL_TIMEOUT_SECONDS,
        # A given-up attempt is made again by the next task; the pool's own back-off would sleep through a recovery.
        reconnect_timeout=1.0,
        configure=prepare,
        kwargs={
            "autocommit": True,
            "application_name": "relay",
            "client_encoding": "UTF8",
            "connect_timeout": CONNECT_TIMEOUT_SECONDS,
            "keepalives_idle": 30,
            "keepalives_interval": 10,
            "keepalives_count": 3,
        },
    )
