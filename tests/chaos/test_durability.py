"""A target without synchronous commits that crashes: what it lost was not confirmed, and comes again."""

from __future__ import annotations

import threading

import pytest

from relay.config import Settings
from relay.faults import RelayError
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.postgres import Server

pytestmark = pytest.mark.chaos


def crash(outbox: Outbox, server: Server, settings: Settings) -> None:
    """Crash the server while the last commit of relay's is not on its disk; returns when relay has ended."""
    with relaying(settings):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        outbox.publish(host(1), event(2))  # whose commit flushes the one before
        outbox.wait_handled()
        server.kill()
        server.start()
        wait_until(lambda: "relay" not in {thread.name for thread in threading.enumerate()})


def test_without_synchronous_commit_nothing_is_confirmed_that_a_crash_can_take(
    mortal_server: Server,
) -> None:
    with Outbox(mortal_server.create_database("app")) as outbox:
        outbox.conn.execute("alter system set wal_writer_delay = '10s'")
        outbox.conn.execute("select pg_reload_conf()")
        outbox.install()
        settings = outbox.settings(target={"synchronous_commit": "off"})
        with pytest.raises(RelayError, match="lost commits"):
            crash(outbox, mortal_server, settings)
        outbox.reconnect()
        assert outbox.value("select count(*) from projection") == 1
        outbox.drain(settings)
        outbox.assert_exact()
