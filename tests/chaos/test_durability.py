"""Without synchronous commits, a crash: what the target lost comes again, what the source lost was not seen."""

from __future__ import annotations

import threading

import pytest

from relay.admin.offsets import plan_seek, seek
from relay.config.settings import Settings
from relay.faults import RelayError
from tests.outbox import PROJECTION, Outbox, event, host, relaying, wait_until
from tests.postgres import Server, start_server

pytestmark = pytest.mark.chaos

ALL_IS_FLUSHED = "select pg_current_wal_flush_lsn() >= pg_current_wal_insert_lsn()"


def crash(outbox: Outbox, server: Server, settings: Settings) -> None:
    """Crash the server while the last commit of relay's is not on its disk; returns when relay has ended."""
    with relaying(settings):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        outbox.publish(host(1), event(2))  # whose commit flushes the one before
        outbox.wait_handled()
        while outbox.value(
            ALL_IS_FLUSHED
        ):  # by a commit of another session, such as that of retention
            outbox.publish(host(1), event(3))
            outbox.wait_handled()
        server.kill()
        server.start()
        wait_until(lambda: "relay" not in {thread.name for thread in threading.enumerate()})


@pytest.mark.rare
def test_without_synchronous_commit_nothing_is_confirmed_that_a_crash_can_take(
    killable_server: Server,
) -> None:
    with Outbox(killable_server.create_database("app")) as outbox:
        outbox.conn.execute("alter system set wal_writer_delay = '10s'")
        outbox.conn.execute("select pg_reload_conf()")
        outbox.install()
        settings = outbox.settings(target={"synchronous_commit": "off"})
        with pytest.raises(RelayError, match="lost commits"):
            crash(outbox, killable_server, settings)
        outbox.reconnect()
        published = outbox.value("select count(*) from outbox_message_t")
        assert outbox.value("select count(*) from projection") == published - 1
        outbox.drain(settings)
        outbox.assert_exact()


LAZY = {
    "synchronous_commit": "off",
    "wal_writer_delay": "10s",
    "wal_writer_flush_after": "2GB",
}


@pytest.mark.rare
@pytest.mark.parametrize("mode", ["auto", "poll"])
def test_no_snapshot_sees_what_a_crash_of_the_source_can_take_back(
    database: str, mode: str
) -> None:
    """Events that come after the crash take over the transaction ids of those that it took."""
    with start_server(LAZY) as server, Outbox(database) as target:
        with Outbox(server.create_database("app")) as outbox:
            target.conn.execute(PROJECTION)
            source = {**outbox.config()["source"], "mode": mode}
            settings = outbox.settings(source=source, target={"dsn": target.relay_dsn})
            outbox.install_again(settings)
            for number in range(3):
                outbox.publish(host(1), event(number))
            assert outbox.value("select pg_current_wal_flush_lsn() < pg_current_wal_insert_lsn()")
            seek(settings, plan_seek(settings, "end", None), None)
            server.kill()
            server.start()
            outbox.reconnect()
            published = [outbox.publish(host(1), event(number)) for number in range(6)]
            with relaying(settings):
                wait_until(lambda: target.value("select count(*) from projection") >= 6, 20)
        assert target.column("select transaction_id from projection order by seq") == published
