"""What a crash of the database takes that a client of the HTTP API has read already.

With `synchronous_commit = off` a commit is seen before it is on disk, and the server gives its transaction id again.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api import Program, Source, new_token, served, settings_of
from tests.outbox import Outbox, event, host
from tests.postgres import Server, start_server

HOST = host(1)


@pytest.fixture
def server() -> Iterator[Server]:
    """A server that writes commits to the disk only when somebody waits for that."""
    with start_server({"wal_writer_delay": "10s"}) as running:
        yield running


@pytest.fixture
def outbox(server: Server) -> Iterator[Outbox]:
    with Outbox(server.create_database("crash")) as made:
        made.install()
        yield made


def crash(server: Server, outbox: Outbox) -> None:
    """Kill the server, and publish the next event."""
    server.kill()
    server.start()
    outbox.reconnect()
    outbox.publish(HOST, event(2))


def test_a_page_has_nothing_that_a_crash_can_take(server: Server, outbox: Outbox) -> None:
    """Otherwise the position that follows passes the event that gets the transaction id again."""
    settings = settings_of(outbox)
    token = new_token(settings)
    with served(settings) as address:
        reader = Program(address, token)
        after = reader.get("/events", after="now")["next"]
        outbox.conn.execute("set synchronous_commit = off")
        outbox.publish(HOST, event(1))
        page = reader.get("/events", after=after)
        assert [each["payload"] for each in page["events"]] == [{"amount": 1}]
        crash(server, outbox)
    with served(settings) as address:
        found = Program(address, token).get("/events", after=page["next"])["events"]
    assert [each["payload"] for each in found] == [{"amount": 2}]


def test_the_end_of_the_log_is_none_that_a_crash_can_take(server: Server, outbox: Outbox) -> None:
    settings = settings_of(outbox)
    token = new_token(settings)
    with served(settings) as address:
        reader = Program(address, token)
        reader.get("/events", after="now")
        outbox.conn.execute("set synchronous_commit = off")
        outbox.publish(HOST, event(1))
        after = reader.get("/events", after="now")["next"]
        crash(server, outbox)
    with served(settings) as address:
        found = Program(address, token).get("/events", after=after)["events"]
    assert [each["payload"] for each in found] == [{"amount": 2}]


def test_a_stream_has_nothing_that_a_crash_can_take(server: Server, outbox: Outbox) -> None:
    settings = settings_of(outbox)
    token = new_token(settings)
    with served(settings) as address, Source(address, token).ready() as source:
        outbox.conn.execute("set synchronous_commit = off")
        outbox.publish(HOST, event(1))
        assert [each["payload"] for each in source.take(1)] == [{"amount": 1}]
        crash(server, outbox)
    with served(settings) as address, Source(address, token, last=source.last) as source:
        # So that something comes in any case.
        outbox.publish(HOST, event(3))
        assert [each["payload"] for each in source.take(1)] == [{"amount": 2}]
