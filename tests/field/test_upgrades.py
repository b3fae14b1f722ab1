"""`relay init` turns a former schema into the current one, and publishers, relay and its sinks go on."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from relay.admin.install import initialise
from relay.store import migrations
from tests.outbox import Outbox, event, host, relaying

LANDED = {
    "source/001_source.sql": "7c273b1b3e11920400ab3ffd8942b4541fc4a4549c77e8e32c8f9c1c7a378a20",
    "source/002_retention.sql": "f5236e6a6e3616f8789503b4ccbf1fbf8fa9ad9827eaf2be077db369641cd47b",
    "outbox/001_outbox.sql": "49c831b682c4b6cd0d373bb56e3767b54ae543b3f7622b26610eb87a5b44a555",
    "target/001_target.sql": "b207934c179cea88ec4441ab455bef5ad02cc18ed8210290de321190c02ed7df",
}
"""The editions of the files in the relay that landed before, each of which has changed since."""


def test_the_editions_that_landed_before_are_migrated() -> None:
    """A file that is changed without a word of its former edition makes `relay init` refuse every installed schema."""
    for name, digest in LANDED.items():
        assert digest in migrations.FORMER[name], name


@pytest.mark.parametrize("name", [*LANDED, "all"])
def test_publishers_go_on_after_a_migration(outbox: Outbox, name: str) -> None:
    """A file of the source that was applied again took from PUBLIC a function that `relay.publish` calls."""
    settings = outbox.settings()
    outbox.conn.execute(
        "alter table relay.sinks alter column state set default 'caught up';"
        "insert into relay.sinks (group_id, sink) values ('default', 'unworked')"
    )
    names = list(LANDED) if name == "all" else [name]
    for each in names:
        outbox.conn.execute(
            "update relay.migrations set digest = %s where name = %s", (LANDED[each], each)
        )
    assert initialise(settings) == [f"schema file {each}" for each in names]
    role = f"{outbox.slot}_publishes"
    outbox.conn.execute(f"create role {role} login password 'p' in role relay_publisher".encode())
    try:
        with (
            relaying(settings),
            psycopg.connect(make_conninfo(outbox.dsn, user=role, password="p")) as publisher,
        ):
            publisher.execute(
                "select relay.publish(%s, %s, %s::jsonb)",
                (host(1), host(2), psycopg.types.json.Jsonb([event(1)])),
            )
            publisher.commit()
            outbox.wait_handled()
    finally:
        outbox.conn.execute(f"drop role {role}".encode())
    outbox.assert_exact()
    if "target/001_target.sql" in names:
        # One that nobody has worked yet may begin in mode wal.
        assert outbox.column("select state from relay.sinks") == ["new"]
