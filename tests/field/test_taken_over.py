"""A process that no longer reads the slot, or whose slot is gone, believes neither too much nor too little of it.

Public reports: estuary/connectors#1705 (another reader is reported as a slot that was dropped and created again),
hapostgres/pg_auto_failover#373 and citusdata/citus#124 (a line of the log a second for what is no fault),
airbytehq/airbyte#33754 (a slot was replaced, no error, and the check of the connection passes).
"""

from __future__ import annotations

import threading
from contextlib import ExitStack

import psycopg
import pytest

from relay.config.settings import Settings
from relay.source.stream import replication
from relay.source.walsender import open_replication
from relay.store.connections import Connection
from tests.outbox import Outbox, event, host, relaying, run_until_fault, wait_until


@pytest.mark.parametrize("mode", ["auto", "wal"])
def test_an_instance_that_was_frozen_stands_by_without_a_word_of_other_clients(
    outbox: Outbox, mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has read the slot, and another instance has read on: in mode wal it ended, and logged a line a second."""
    settings = outbox.settings(source={**outbox.config()["source"], "mode": mode})
    outbox.install_again(settings)
    opened, frozen, tries = open_replication, set[threading.Thread](), list[str]()

    def freezing(settings: Settings) -> Connection:
        if threading.current_thread() in frozen:
            raise psycopg.OperationalError("connection refused")
        if "thawed" in tries:
            tries.append("again")
        return opened(settings)

    monkeypatch.setattr(replication, "open_replication", freezing)
    with relaying(settings) as former, ExitStack() as later:
        outbox.publish(host(0), event(0))
        outbox.wait_handled()
        assert former._source.receiver is not None
        frozen.add(former._source.receiver._thread)
        other = later.enter_context(relaying(settings))
        end_stream(outbox.conn, outbox.slot)
        assert other._source.receiver is not None
        wait_until(lambda: other._source.receiver.state.connections > 0)  # type: ignore[union-attr]
        outbox.publish(host(0), event(1))
        outbox.wait_drained()
        tries.append("thawed")
        frozen.clear()
        wait_until(lambda: tries.count("again") > 2)
        assert not former._source.receiver.state.connections > 1
        later.close()
        # It takes over again, and what the other one has done is no fault either.
        wait_until(lambda: former._source.receiver.state.connections > 1)  # type: ignore[union-attr]
        outbox.publish(host(0), event(2))
        outbox.wait_handled()
    assert "another client has advanced the slot" not in caplog.text
    outbox.assert_exact()


def test_a_slot_that_was_made_again_is_not_followed_in_mode_wal(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """relay said `run relay init`; that made a slot, `relay check` was content, and an event was lost in silence."""
    settings = outbox.settings(source={**outbox.config()["source"], "mode": "wal"})
    outbox.install_again(settings)
    running = ExitStack()
    running.enter_context(relaying(settings))
    outbox.publish(host(0), event(0))
    outbox.wait_handled()
    outbox.wait_drained()

    def refusing(settings: Settings) -> Connection:
        raise psycopg.OperationalError("connection refused")

    monkeypatch.setattr(replication, "open_replication", refusing)
    end_stream(outbox.conn, outbox.slot)
    outbox.conn.execute("select pg_drop_replication_slot(%s)", (outbox.slot,))
    monkeypatch.undo()
    outbox.publish(host(0), event(1))
    assert "events of commits that no slot has are not delivered" in wait_for_end(running)
    outbox.install_again(settings)
    for _ in range(2):
        assert "does not continue where group 'default' left it" in run_until_fault(settings)


def end_stream(conn: Connection, slot: str) -> None:
    """End the stream, as an administrator does."""
    conn.execute(
        "select pg_terminate_backend(active_pid, 5000) from pg_replication_slots where slot_name = %s and active",
        (slot,),
    )


def wait_for_end(running: ExitStack) -> str:
    """Wait until relay ends by itself, and return why."""
    wait_until(lambda: "relay" not in {thread.name for thread in threading.enumerate()})
    with pytest.raises(Exception, match="slot") as raised:
        running.close()
    return str(raised.value)
