"""Whoever may create functions in `public` borrows no rights of relay's role, and changes nothing that it reads.

CVE-2018-1058; jackc/pgx and pg_dump pin the search_path for the same reason: a function whose types fit a call better
than the server's own is called instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from relay.admin.check import examine, require
from relay.admin.install import initialise
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.postgres import Server

PLANTED = {
    "concat(uuid)": "text",
    "to_jsonb(pg_replication_slots)": "jsonb",
    "pg_column_size(jsonb)": "int",
    "pg_column_compression(jsonb)": "text",
    "unnest(bigint[])": "setof bigint",
    "unnest(xid8[])": "setof xid8",
    "format(text, name, name)": "text",
}


@contextmanager
def planter(outbox: Outbox) -> Iterator[None]:
    """A role that owns nothing, and functions of it, each of which notes for whom it is called."""
    role = f"{outbox.slot}_app"
    outbox.conn.execute(
        f"create role {role} login password 'p'; grant create on schema public to {role}".encode()
    )
    try:
        dsn = make_conninfo(outbox.dsn, user=role, password="p")
        with psycopg.connect(dsn, autocommit=True) as app:
            app.execute("create table public.called (by text); grant all on called to public")
            for name, kind in PLANTED.items():
                app.execute(
                    f"create function public.{name} returns {kind} language plpgsql as $$ begin"
                    " insert into public.called values (current_user); return"
                    f"{'' if kind.startswith('setof') else ' null'}; end $$".encode()
                )
        yield
    finally:
        outbox.conn.execute(f"drop owned by {role} cascade; drop role {role}".encode())


@pytest.mark.parametrize("mode", ["auto", "poll"])
def test_functions_of_another_role_are_not_called(
    server: Server, installed: str, outbox: Outbox, mode: str
) -> None:
    name = f"{outbox.slot}_target"
    with (
        Outbox(server.create_database(name, template=installed)) as target,
        outbox.limited_role() as (_, dsn),
        planter(outbox),
    ):
        source = {**outbox.config()["source"], "mode": mode}
        more: dict[str, Any] = {"target": {"dsn": target.dsn}}
        initialise(outbox.settings(source=source, **more))
        settings = outbox.settings(source={**source, "dsn": dsn}, **more)
        require(settings)
        with relaying(settings):
            for number in range(3):
                outbox.publish(host(number), event(number))
            wait_until(lambda: target.handled() == 3, 10)
        assert not outbox.column("select by from called")
    server.drop_database(name)


def test_check_names_a_schema_in_which_everybody_may_create_functions(outbox: Outbox) -> None:
    """Handlers' statements run with the user's search_path, and relay's own in the same sessions."""

    def found() -> list[str]:
        return [each.text for each in examine(outbox.settings()) if each.subject == "search_path"]

    assert not found()
    outbox.conn.execute("grant create on schema public to public")
    (text,) = found()
    assert "revoke create on schema public from public" in text
