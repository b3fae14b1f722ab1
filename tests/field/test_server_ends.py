"""The source's server ends while relay reads it: it does not wait for relay, and nothing is lost.

A walsender of a server that shuts down waits until its client has confirmed everything that was sent. Public reports:
Mooncake-Labs/moonlink#819, patroni/patroni#3522, replicase/pgcapture#55, Nextdoor/pg-bifrost#45, pgjdbc/pgjdbc#1490.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager
from typing import Any

import psycopg
import pytest

from relay.model.events import Lsn
from relay.runtime.threads import beside
from relay.source.decode.assembler import OpenCommit
from relay.source.stream.receiver import ReceiverSuspects
from tests.outbox import Outbox, event, host, initialise, relaying, wait_until
from tests.postgres import EmbeddedServer, Server

STOPS_SECONDS = 8.0


def publishing(dsn: str, hosts: int = 8) -> AbstractContextManager[None]:
    """Publish without a pause in another thread, also after the server was away."""

    def publish(ends: threading.Event) -> None:
        number = 0
        while not ends.is_set():
            try:
                with Outbox(dsn) as outbox:
                    while not ends.is_set():
                        outbox.publish(host(number % hosts), event(number))
                        number += 1
                        ends.wait(0.002)
            except psycopg.Error:
                ends.wait(0.05)

    return beside(publish, "publisher")


def stop_fast(server: Server) -> float:
    """Stop a server as an administrator does; returns the seconds that it took."""
    assert isinstance(server, EmbeddedServer)
    began = time.monotonic()
    server.cluster.stop("fast", timeout=STOPS_SECONDS)
    return time.monotonic() - began


@pytest.mark.parametrize("mode", [pytest.param("auto", marks=pytest.mark.rare), "wal"])
def test_a_fast_shutdown_does_not_wait_for_relay(killable_server: Server, mode: str) -> None:
    dsn = killable_server.create_database("app")
    with Outbox(dsn) as outbox:
        settings = outbox.settings(
            source={"dsn": dsn, "slot": "app", "publication": "app", "mode": mode}
        )
        outbox.install(source={"dsn": dsn, "slot": "app", "publication": "app", "mode": mode})
        with relaying(settings):
            with publishing(dsn):
                wait_until(lambda: outbox.handled() > 0)
                for _ in range(3):
                    stop_fast(killable_server)
                    killable_server.start()
                    outbox.reconnect()
                    before = outbox.handled()
                    wait_until(lambda before=before: outbox.handled() > before)  # type: ignore[misc]
            outbox.wait_handled()
            outbox.assert_exact()


def test_a_fast_shutdown_does_not_wait_for_another_database(
    killable_server: Server, outbox: Outbox
) -> None:
    """The target is blocked, and the buffer is full, so that relay reads nothing."""
    with Outbox(killable_server.create_database("source")) as source:
        config: dict[str, Any] = {
            "group": "two-servers",
            "target": {"dsn": outbox.relay_dsn},
            "source": {**source.config()["source"], "buffer_bytes": 1 << 20},
        }
        initialise(source.settings(**config))
        blocker = psycopg.connect(outbox.superuser_dsn)
        with relaying(source.settings(**config)) as service:
            source.publish(host(0), event())
            wait_until(lambda: outbox.handled() == 1)
            blocker.execute("lock table relay.positions")
            for number in range(1, 30):
                source.publish(host(number), event(payload={"amount": 1, "note": "x" * 100_000}))
            receiver = service._source.receiver
            assert receiver is not None
            wait_until(lambda: receiver.received.buffered_bytes > 1 << 20)
            assert stop_fast(killable_server) < STOPS_SECONDS
            blocker.close()
            killable_server.start()
            wait_until(lambda: outbox.handled() == 30)
            source.reconnect()
            source.publish(host(30), event())
            wait_until(lambda: outbox.handled() == 31)


def test_the_target_ends_when_a_commit_is_passed_over(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note of a commit that could not be received is deleted in the target, whose session may have ended."""
    forget, refusals = ReceiverSuspects.forget, [1, 2]

    def refuse(self: ReceiverSuspects, commit: OpenCommit) -> None:
        if refusals:
            refusals.pop()
            raise psycopg.errors.AdminShutdown("terminating connection")
        forget(self, commit)

    monkeypatch.setattr(ReceiverSuspects, "forget", refuse)
    with relaying(outbox.settings()) as service:
        outbox.publish(host(0), event())
        outbox.wait_handled()
        xid = outbox.value("select c_xid::text::bigint from outbox_message_t")
        receiver = service._source.receiver
        assert receiver is not None
        receiver._replication.publish(stuck=OpenCommit(Lsn(1), int(xid)))
        wait_until(lambda: receiver.state.stuck is None)
        outbox.publish(host(0), event())
        outbox.wait_handled()
    assert not refusals
    outbox.assert_exact()
