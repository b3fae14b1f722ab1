"""A stream that stands still without a fault is replaced by polling, with the reason.

Public reports: EnterpriseDB/pg_failover_slots#46, timescale/timescaledb-docker-ha#676 (synchronized_standby_slots stops
decoding), multigres/multigres#1394.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from relay.admin import status
from relay.model.events import Lsn
from relay.service import Service
from relay.source import hybrid, walsender
from relay.source.stream.receiver import Receiver
from relay.store import presence
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.postgres import Server

STREAMS = "select active from pg_replication_slots where slot_name = %s"


@contextmanager
def frozen(outbox: Outbox) -> Iterator[None]:
    """Stop the process that reads the slot, which then neither sends nor ends."""
    pid = outbox.value(
        "select active_pid from pg_replication_slots where slot_name = %s", (outbox.slot,)
    )
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def reason(outbox: Outbox) -> str:
    """Why relay polls, as `relay status` shows it."""
    return str(
        outbox.value("select source_mode || ': ' || coalesce(source_reason, '') from relay.groups")
    )


def observed(service: Service) -> Lsn:
    """The position that the stream has to reach, as relay has observed it."""
    source = service._source
    assert isinstance(source, hybrid.StreamSource)
    seen = source._audit.seen
    return Lsn(0) if seen is None else seen.lsn


@pytest.mark.rare
@pytest.mark.server(17)
@pytest.mark.parametrize("quiet", [False, True])
def test_a_standby_slot_that_nobody_reads_holds_back_the_stream(
    killable_server: Server, monkeypatch: pytest.MonkeyPatch, quiet: bool
) -> None:
    """Also where nothing is published at first: relay has then observed a position that the stream never passes."""
    monkeypatch.setattr(hybrid, "STILL_SECONDS", 1.0)
    with psycopg.connect(killable_server.dsn(), autocommit=True) as admin:
        admin.execute("select pg_create_physical_replication_slot('away')")
        with Outbox(killable_server.create_database("app")) as outbox:
            outbox.install()
            with relaying(outbox.settings()) as service:
                outbox.publish(host(0), event(0))
                outbox.wait_handled()
                admin.execute("alter system set synchronized_standby_slots = 'away'")
                admin.execute("select pg_reload_conf()")
                wait_until(lambda: outbox.value("show synchronized_standby_slots") == "away")
                if quiet:
                    # WAL of others, which is held back too.
                    before = Lsn.parse(outbox.wal_end())
                    outbox.conn.execute("create table unrelated ()")
                    wait_until(lambda: observed(service) > before)
                for number in range(1, 6):
                    outbox.publish(host(number), event(number))
                outbox.wait_handled(20)
                wait_until(lambda: "away, which no standby reads" in reason(outbox))
                admin.execute("alter system reset synchronized_standby_slots")
                admin.execute("select pg_reload_conf()")
                wait_until(lambda: reason(outbox) == "wal: ")
                outbox.publish(host(6), event(6))
                outbox.wait_handled()
            outbox.assert_exact()


@pytest.mark.rare
@pytest.mark.parametrize("quiet", [False, True])
def test_a_walsender_hangs(outbox: Outbox, monkeypatch: pytest.MonkeyPatch, quiet: bool) -> None:
    monkeypatch.setattr(hybrid, "STILL_SECONDS", 1.0)
    with relaying(outbox.settings()) as service:
        outbox.publish(host(0), event(0))
        outbox.wait_handled()
        with frozen(outbox):
            if quiet:
                before = Lsn.parse(outbox.wal_end())
                outbox.conn.execute("create table unrelated ()")
                wait_until(lambda: observed(service) > before)
            outbox.publish(host(1), event(1))
            outbox.wait_handled(20)
            assert "the stream stands still: process" in reason(outbox)
        outbox.publish(host(1), event(2))
        outbox.wait_handled()
        wait_until(lambda: reason(outbox) == "wal: ")
    outbox.assert_exact()


def test_a_walsender_hangs_whose_reader_is_gone(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walsender, "APPLICATION_NAME", "relay elsewhere:1")
    former = Receiver(outbox.settings())
    former.start()
    wait_until(lambda: outbox.value(STREAMS, (outbox.slot,)))
    monkeypatch.undo()
    with frozen(outbox):
        former.close(0.1)
        outbox.publish(host(0), event(0))
        with relaying(outbox.settings()):
            outbox.wait_handled(20)
            wait_until(lambda: "held for no running instance" in reason(outbox))
    outbox.assert_exact()


def test_a_table_that_is_locked_does_not_hold_back_the_stream(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old partition is rewritten, or waits for its lock, while publishers go on: alphagov/notifications-api#3901."""
    monkeypatch.setattr(hybrid, "AUDIT_SECONDS", 0.5)
    with Outbox(database) as outbox:
        outbox.conn.execute(
            """
            create table own (id uuid default gen_random_uuid(), host_id uuid not null, event_type text default 'e',
                              payload jsonb default '{"amount": 1}', part text not null,
                              c_xid xid8 default pg_current_xact_id(), c_offset bigserial) partition by list (part);
            create table own_a partition of own for values in ('a');
            create table own_b partition of own for values in ('b')
            """
        )
        source = {**outbox.config()["source"], "table": "public.own"}
        statement = "insert into projection (id) values (%(id)s)"
        handlers = {"projection": {"type": "sql", "statement": statement}}
        outbox.install(source=source, handlers=handlers)
        settings = outbox.settings(source=source, handlers=handlers)
        with relaying(settings), psycopg.connect(database) as administrator:
            outbox.conn.execute("insert into own (host_id, part) values (%s, 'a')", (host(0),))
            wait_until(lambda: outbox.handled() == 1)
            outbox.wait_compared()
            administrator.execute("lock table own_b in access exclusive mode")
            for number in range(1, 9):
                outbox.conn.execute("insert into own (host_id, part) values (%s, 'a')", (host(0),))
                wait_until(lambda number=number: outbox.handled() > number)  # type: ignore[misc]
                time.sleep(0.2)
            assert outbox.column("select 1 from relay.applied_commits limit 1")
            administrator.rollback()
            outbox.wait_compared()


@pytest.mark.rare
def test_a_walsender_hangs_in_mode_wal(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """lukashes/outboxx#108: the process looks healthy on a stream that brings nothing; nothing can be polled here."""
    monkeypatch.setattr(hybrid, "REPORT_SECONDS", 0.5)
    monkeypatch.setattr(presence, "CHECK_SECONDS", 0.2)
    caplog.set_level("INFO")
    settings = outbox.settings(source={**outbox.config()["source"], "mode": "wal"})

    def stalled() -> list[str]:
        return [each.fault for each in status.read(settings).parts if each.part == "stream"]

    with relaying(settings):
        outbox.publish(host(0), event(0))
        outbox.wait_handled()
        with frozen(outbox):
            outbox.publish(host(1), event(1))
            wait_until(lambda: bool(stalled()), 20)
            assert "is not received: process" in stalled()[0]
            assert "the stream stands still" in caplog.messages
        outbox.wait_handled()
        wait_until(lambda: not stalled(), 20)
        assert "the stream goes on" in caplog.messages
    outbox.assert_exact()
