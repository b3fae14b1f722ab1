"""Administrators that are no superusers, whose rights over roles differ between PostgreSQL 15 and 16.

cyrilgdn/terraform-provider-postgresql#407, fazer-ai/agents#195, larskanis/pg-ldap-sync#55,
movetokube/postgres-operator#161.
"""

from __future__ import annotations

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.outbox import Outbox, event, host, initialise
from tests.postgres import start_server

ROLES = ("relay_publisher", "relay", "relay_owner", "relay_worker", "relay_reader")


@pytest.mark.parametrize("attribute", ["nocreaterole", "createrole"])
def test_publishers_publish_where_another_administrator_has_made_the_roles(attribute: str) -> None:
    """The outbox has a database of its own; the installer is a member of relay_owner, and may not grant it."""
    with (
        start_server() as server,
        Outbox(server.create_database("source")) as outbox,
        Outbox(server.create_database("target")) as target,
    ):
        for name in ROLES:
            outbox.conn.execute(f"create role {name} nologin".encode())
        outbox.conn.execute(
            f"create role installer login replication {attribute} password 'p' in role relay_owner;"
            "create role shop login password 'p' in role relay_publisher;"
            "alter database source owner to installer;"
            "alter database target owner to installer".encode()
        )
        initialise(
            outbox.settings(target={"dsn": target.relay_dsn}),
            outbox.dsn_as("installer", "p"),
            target.dsn_as("installer", "p"),
        )
        owner = "select proowner::regrole::text from pg_proc where oid = 'relay.publish'::regproc"
        assert outbox.value(owner) == "relay_owner"
        with psycopg.connect(outbox.dsn_as("shop", "p")) as shop:
            shop.execute(
                "select relay.publish(%s, %s, %s::jsonb)", (host(1), host(2), Jsonb([event()]))
            )
        assert outbox.value("select count(*) from outbox_message_t") == 1
