"""An end is an end at each moment: it is heeded at once, it does not hang without a word, and it says why.

Public reports: those of the docstrings, and timgit/pg-boss#631 (started and stopped at once), #361 and #318 (what goes
on after a stop), riverqueue/river#78 (a job that does not heed the end), airbytehq/airbyte#11910 (threads that keep the
process), EnterpriseDB/repmgr#643 (a connection more at each reconnection).
"""

from __future__ import annotations

import logging
import signal
import time
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any

import psycopg
import pytest

from relay.admin import status
from relay.faults import ConfigurationError, RelayError
from relay.observe.engines import EngineCounts
from relay.runtime import parts
from relay.runtime.parts import Condition, Recurring
from relay.service import Service
from relay.source import polling
from relay.source.hybrid import StreamSource
from relay.store import admission, groups, locks, presence
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.process import running


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts work often."""
    monkeypatch.setattr(presence, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(parts, "FIRST_PAUSE_SECONDS", 0.01)


def test_a_stop_ends_the_wait_for_the_groups_lock(
    outbox: Outbox, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ignored SIGTERM, and its supervisor killed it: dbos-inc/dbos-transact-py#637.

    Whoever holds the lock moves positions: no part may begin meanwhile.
    """
    began: list[object] = []
    monkeypatch.setattr(StreamSource, "start", began.append)
    with psycopg.connect(outbox.superuser_dsn, autocommit=True) as other:
        assert locks.try_lock(other, locks.instance("default"))
        with relaying(outbox.settings()) as service:
            wait_until(lambda: any("waiting for a session" in each for each in caplog.messages))
            service.stop()
    assert began == []


def test_a_stop_while_it_starts_is_not_forgotten(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that was stopped while it started ran on, for ever: procrastinate-org/procrastinate#1563."""
    start = EngineCounts.start

    def stopped(part: EngineCounts) -> None:
        service.stop()
        start(part)

    monkeypatch.setattr(EngineCounts, "start", stopped)
    service = Service(outbox.settings())
    running = Thread(target=service.run)
    running.start()
    running.join(30)
    assert not running.is_alive()
    wait_until(lambda: presence.instances(outbox.conn, "default") == [])


def test_an_error_ends_the_process_although_a_handler_hangs(outbox: Outbox, tmp_path: Path) -> None:
    """A task failed, its process stayed, and nobody was told: debezium/debezium#2602, #2933, procrastinate#1596."""
    config = outbox.config_file(
        tmp_path / "relay.yaml",
        shutdown_timeout=1,
        handlers={"projection": {"type": "python", "callable": "tests.callables:hang_or_commit"}},
    )
    hangs = "select from pg_stat_activity where query = 'select pg_sleep(600)' and state = 'active'"
    outbox.conn.execute("create table ready (at timestamptz)")
    with running(config) as relayed:
        outbox.publish(host(2), event(2))
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 1)
        outbox.publish(host(1), event(1))
        wait_until(lambda: outbox.conn.execute(hangs).rowcount == 1)
        outbox.conn.execute("insert into ready values (now())")
        assert relayed.process.wait(20) == 2
        lines = relayed.lines()
    (end,) = (each for each in lines if "took longer than shutdown_timeout" in each["message"])
    assert end["waits_for"] == "applies a batch: handler projection"
    (error,) = (each for each in lines if each["message"] == "ended by an error")
    assert error["fault"].startswith(
        "handlers.projection.callable: the function ended the database"
    )


def test_an_end_that_waits_for_a_lock_names_it(outbox: Outbox, tmp_path: Path) -> None:
    """An end that waited for a lock on relay.sink_claims took shutdown_timeout, and said "closes Sinks" only."""
    outbox.conn.execute(
        "create table effects (id uuid, host_id uuid, c_offset bigint, attempt int)"
    )
    function = {"type": "function", "callable": "tests.callables:complete"}
    config = outbox.config_file(
        tmp_path / "relay.yaml",
        shutdown_timeout=1,
        handlers={"calls": function},
        routes=[{"handlers": ["calls"]}],
    )
    with running(config) as relayed, psycopg.connect(outbox.superuser_dsn) as other:
        outbox.publish(host(1), event(1))
        wait_until(lambda: outbox.value("select count(*) from effects") == 1)
        other.execute("lock table relay.sink_claims")
        outbox.publish(host(1), event(2))
        # Retention reads it too, and what it waits for holds up no end.
        waits = """
            select count(*) from pg_locks
             where relation = 'relay.sink_claims'::regclass and not granted and mode <> 'AccessShareLock'
        """
        wait_until(lambda: outbox.value(waits) > 0)
        assert relayed.terminate() == 1
        (end,) = [each for each in relayed.lines() if "the end took longer" in each["message"]]
        assert f"held by {other.info.backend_pid} " in str(end["locks"])
        assert "relay.sink_claims" in str(end["locks"])


def test_the_error_is_not_that_of_a_part_that_cannot_be_closed(
    outbox: Outbox, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception at the end hid the one that led to it: debezium/debezium#5995."""

    def close(_: object) -> None:
        raise KeyError("a defect")

    def batches(*_: object) -> None:
        raise ConfigurationError("what ends relay")

    monkeypatch.setattr(EngineCounts, "close", close)
    monkeypatch.setattr(StreamSource, "batches", batches)
    with pytest.raises(ConfigurationError, match="what ends relay"):
        Service(outbox.settings()).run()
    (line,) = [each for each in caplog.records if each.getMessage() == "cannot close a part"]
    assert line.__dict__["part"] == "EngineCounts"
    assert line.__dict__["fault"].startswith("KeyError ")


def test_a_part_that_does_not_end_relay_goes_on_after_any_error() -> None:
    """Its thread ended, nothing said so, and relay ended with that error when it was stopped, days later.

    procrastinate-org/procrastinate#494.
    """
    turns: list[int] = []

    class Counting(Recurring):
        def turn(self) -> float:
            turns.append(1)
            if len(turns) == 1:
                raise ConfigurationError("the role lacks a right")
            self.condition.works()
            return 0.01

    condition = Condition("counting", logging.getLogger("relay"), "fails", "goes on")
    part = Counting(condition, close_seconds=10)
    part.start()
    try:
        wait_until(lambda: len(turns) > 2)
    finally:
        part.close()
    assert (part.error, condition.fault) == (None, None)


def test_an_error_that_ends_relay_ends_its_part() -> None:
    """The other kind: without it relay must not go on."""
    ended: list[int] = []

    class Deciding(Recurring):
        def turn(self) -> float:
            raise RelayError("another instance has replaced the configuration")

    condition = Condition("deciding", logging.getLogger("relay"), "fails", "goes on")
    part = Deciding(condition, lambda: ended.append(1), close_seconds=10)
    part.start()
    wait_until(lambda: not part.is_alive)
    assert (str(part.error), ended) == ("another instance has replaced the configuration", [1])


def test_what_fails_is_shown_again_after_another_instance_has_started(outbox: Outbox) -> None:
    """An instance that starts removes what those left that have died; one may only have lost its session.

    oban-bg/oban#1365.
    """
    settings = outbox.settings()
    with relaying(settings) as service:
        wait_until(lambda: presence.instances(outbox.conn, "default") != [])
        (condition,) = [each for each in service.conditions if each.part == "retention"]
        condition.works = lambda: None  # type: ignore[method-assign]
        condition.fails("a partition is locked")
        wait_until(lambda: status.read(settings).parts != [])
        with outbox.conn.transaction():
            outbox.conn.execute("delete from relay.part_faults")
            outbox.conn.execute(
                "select pg_terminate_backend(pid) from pg_locks join pg_stat_activity using (pid)"
                " where locktype = 'advisory' and mode = 'ShareLock' and datname = current_database()"
            )
        wait_until(
            lambda: "a partition is locked" in [each.fault for each in status.read(settings).parts],
        )


def test_an_instance_that_is_refused_leaves_what_died_under_its_name(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container the next process has the same name: oban-bg/oban#862.

    Its end, before it had begun, took the death for an orderly end, and the next one guarded nothing.
    """
    groups.begin(outbox.conn, "default", lambda _: [])

    def refuse(*_: object) -> None:
        raise ConfigurationError("an instance runs with another configuration")

    monkeypatch.setattr(admission, "admit", refuse)
    with pytest.raises(ConfigurationError, match="another configuration"):
        Service(outbox.settings()).run()
    assert groups.begin(outbox.conn, "default", lambda _: [])


def test_a_locked_table_does_not_keep_an_instance_from_ending(outbox: Outbox) -> None:
    """What is written at the end waited for the lock without a limit: supabase/etl#881."""
    with psycopg.connect(outbox.superuser_dsn) as other, relaying(outbox.settings()) as service:
        outbox.publish(host(1), event(1))
        outbox.wait_drained()
        other.execute("lock table relay.engines in access exclusive mode")
        service.stop()
    outbox.assert_exact()


def test_a_stop_is_heeded_while_the_outbox_is_locked(
    outbox: Outbox, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that waits for a lock was ended by force, and the next one took that for a death.

    tembo-io/tembo-stacks#370, mergestat/mergestat#325.
    """
    monkeypatch.setattr(polling, "POLLING_LOCK_TIMEOUT", "200ms")
    source = {**outbox.config()["source"], "mode": "poll"}
    with (
        psycopg.connect(outbox.superuser_dsn) as other,
        relaying(outbox.settings(source=source)) as service,
    ):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        other.execute("lock table outbox_message_t in access exclusive mode")
        wait_until(lambda: "cannot poll yet" in caplog.messages)
        service.stop()
    assert outbox.value("select not running from relay.groups")


def replicating(outbox: Outbox, name: str) -> psycopg.Connection[Any]:
    """Another client, which can read the slot."""
    return psycopg.connect(
        outbox.superuser_dsn,
        replication="database",
        autocommit=True,
        application_name=name,
        cursor_factory=psycopg.ClientCursor,
    )


def read_slot(outbox: Outbox, conn: psycopg.Connection[Any]) -> None:
    """Read the slot once it is free."""
    command = (
        f"START_REPLICATION SLOT {outbox.slot} LOGICAL 0/0"
        f" (proto_version '1', publication_names '{outbox.slot}')"
    )
    copies = psycopg.pq.ExecStatus.COPY_BOTH
    wait_until(lambda: conn.pgconn.exec_(command.encode()).status == copies)


def test_the_reason_why_relay_polls_is_that_of_now(outbox: Outbox) -> None:
    """A state was shown with the error of an earlier one: ConduitIO/conduit#55."""
    settings = outbox.settings()

    def why() -> tuple[str | None, str | None]:
        return service._source.state().reason, status.read(settings).source_reason

    def wait_for(name: str) -> None:
        reason = f"cannot stream yet: another client reads the slot: {name}"
        wait_until(lambda: why() == (reason, reason))

    with relaying(settings) as service:
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        outbox.conn.execute(
            "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s",
            (outbox.slot,),
        )
        # Connected before the first one ends, the second one has the slot before relay tries again.
        with closing(replicating(outbox, "second")) as second:
            with closing(replicating(outbox, "first")) as first:
                read_slot(outbox, first)
                wait_for("first")
                since = status.read(settings).source_since
            read_slot(outbox, second)
            wait_for("second")
            assert status.read(settings).source_since == since
        wait_until(lambda: why() == (None, None))


def test_a_signal_that_comes_while_it_ends_does_not_change_the_exit_status(
    outbox: Outbox, tmp_path: Path
) -> None:
    """An end in order was a failure: mongrel2/mongrel2#318, GoogleCloudPlatform/cloud-sql-proxy-operator#355."""
    with running(outbox.config_file(tmp_path / "relay.yaml")) as service:
        service.wait_said("reading the WAL")
        while service.process.poll() is None:
            service.process.send_signal(signal.SIGTERM)
            time.sleep(0.001)
        assert service.process.returncode == 0
