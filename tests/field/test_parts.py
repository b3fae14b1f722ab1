"""A background part that fails says so, goes on, and keeps nothing else from going on.

Public reports: citusdata/pg_cron#270, brendanlong/lion-reader#1390 (retention ended), L7R7/gitlab-ci-build-statuses#1,
chalie-ai/chalie#1594, opensiddur/opensiddur#9 (a worker that has died looks healthy, or keeps the others from working),
and those of the docstrings.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from threading import Event, Thread, current_thread
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from relay.admin import status
from relay.admin.retention import partition_new
from relay.config.settings import Settings, SparkSettings
from relay.config.source import OWN_OUTBOX
from relay.delivery.sinks import Sinks
from relay.demo.embedded import free_port
from relay.model.batch import Batch, Outcome
from relay.model.events import Lsn
from relay.model.transactions import Transactions
from relay.observe import engines
from relay.observe.engines import EngineCounts
from relay.retention import schedule
from relay.retention.partitions import partitions
from relay.retention.schedule import Schedule
from relay.runtime import parts
from relay.runtime.parts import Condition, Recurring
from relay.service import Service
from relay.source import hybrid
from relay.source.outbox import interval
from relay.spark import session
from relay.spark.session import Session
from relay.spark.sink_worker import SparkWorker
from relay.store import activity, connections, presence, refusals
from relay.store.connections import connect
from tests.observing import Scrape, ask
from tests.outbox import Outbox, event, host, relaying, wait_until

KEEP = {"keep": "7d", "ahead": "3d"}
LARGE_ON_SPARK = {"inline_max_events": 1_000, "max_events": 10_000}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts work often."""
    monkeypatch.setattr(presence, "CHECK_SECONDS", 0.2)
    monkeypatch.setattr(hybrid, "AUDIT_SECONDS", 0.2)
    monkeypatch.setattr(status, "LOCK_SECONDS", 0.1)
    monkeypatch.setattr(parts, "FIRST_PAUSE_SECONDS", 0.1)


def failing(settings: Settings) -> dict[str, str]:
    """The parts that fail, with the reason, as `relay status` has them."""
    return {each.part: each.fault for each in status.read(settings).parts}


@pytest.fixture
def partitioned(database: str) -> Iterator[Outbox]:
    """An outbox with partitions of a day."""
    with Outbox(database) as outbox:
        outbox.install(retention=KEEP)
        partition_new(outbox.settings(retention=KEEP), "1d", outbox.installer_dsn)
        yield outbox


def names(outbox: Outbox) -> list[str]:
    """The names of the partitions without that of their table, oldest first."""
    return [each.name.rpartition("_")[2] for each in partitions(outbox.conn, OWN_OUTBOX)]


def test_retention_goes_on_past_a_partition_that_it_cannot_drop(
    partitioned: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """One table fails, and maintenance stops for all: pgpartman/pg_partman#421, #717, propeller-heads/tycho#1323."""
    outbox = partitioned
    settings = outbox.settings(retention=KEEP)
    first, second = names(outbox)[:2]
    # Whoever restored the first one owns it: the outbox's owner may neither read nor drop it.
    other, owner = f"{outbox.slot}_other", f"{outbox.slot}_owner"
    outbox.conn.execute(
        f"create role {other}; create role {owner}; grant create on schema public to {owner}".encode()
    )
    outbox.conn.execute(f"alter table outbox_message_t owner to {owner}".encode())
    for name in names(outbox):
        of = other if name == first else owner
        outbox.conn.execute(f"alter table outbox_message_t_{name} owner to {of}".encode())
    outbox.conn.execute(
        "select relay.retain('outbox_message_t', 'public.outbox_message_t', 'c_offset')"
    )
    later = datetime.now(UTC) + timedelta(days=9)
    try:
        retention = turned(outbox, settings, later)
        assert first in names(outbox)
        assert second not in names(outbox)
        assert f"p{later + timedelta(days=3):%Y%m%d}" in names(outbox)
    finally:
        for role in (other, owner):
            outbox.conn.execute(f"reassign owned by {role} to current_user".encode())
            outbox.conn.execute(f"drop owned by {role}; drop role {role}".encode())
    assert retention.condition.fault is not None
    assert retention.condition.fault.fault.startswith(
        f"partition public.outbox_message_t_{first}: "
    )
    assert "retention fails and is retried" in caplog.messages


def turned(outbox: Outbox, settings: Settings, later: datetime) -> Schedule:
    """Retention after a turn at another time, when all is read."""
    with relaying(settings):
        outbox.publish(host(1), event(1))
        outbox.wait_drained()
        outbox.wait_compared()
    retention = Schedule(settings, lambda: None, lambda _: later)
    with connect(settings.source_dsn) as source, connect(settings.target_dsn) as target:
        retention.retain(source, target)
    return retention


def test_retention_outlives_every_kind_of_fault(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect in one turn ends neither the thread nor, silently, all removal."""
    settings = outbox.settings()
    turns: list[int] = []

    def turn(self: Schedule, source: object, target: object) -> None:
        turns.append(1)
        if len(turns) == 1:
            raise KeyError("a defect")

    monkeypatch.setattr(Schedule, "retain", turn)
    monkeypatch.setattr(parts, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(schedule, "NOTE_SECONDS", 0.01)
    retention = Schedule(settings, lambda: None)
    retention.start()
    try:
        wait_until(lambda: len(turns) > 2)
    finally:
        retention.close()
    assert retention.error is None


def test_counts_of_engines_are_stored_after_a_defect(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that stores them ended with the first fault that was not the database's."""
    stored: list[object] = []

    def add(*arguments: object) -> None:
        stored.append(arguments)
        if len(stored) == 1:
            raise KeyError("a defect")

    monkeypatch.setattr(activity, "add_batches", add)
    monkeypatch.setattr(engines, "STORE_SECONDS", 0.01)
    counts = EngineCounts(outbox.relay_dsn, "default")
    counts.start()
    batch = Batch(1, Transactions.none(), Lsn(0), 1, 1)
    counts.durable(batch, Outcome("inline", (), "small"), 0.1)
    wait_until(lambda: len(stored) > 1)
    counts.close()
    assert counts.condition.fault is None


def test_a_listener_that_cannot_listen_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events came at the poll interval, and nothing said why."""
    monkeypatch.setattr(interval, "RETRY_SECONDS", 0.01)
    condition = Condition("listener", logging.getLogger("relay"), "cannot listen", "listens again")
    listens = interval.Listener("host=/nowhere", lambda: None, condition)
    try:
        wait_until(lambda: condition.fault is not None)
    finally:
        listens.close()


@pytest.mark.rare
def test_an_audit_that_is_cancelled_again_and_again_is_shown(
    outbox: Outbox, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream can lack commits, and nobody looks, since the comparison does not end in time."""
    monkeypatch.setattr(connections, "LOCK_TIMEOUT", "100ms")
    port = free_port()
    settings = outbox.settings(observe={"listen": f"127.0.0.1:{port}"})
    with relaying(settings):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        assert failing(settings) == {}
        with psycopg.connect(outbox.superuser_dsn) as other:
            # Whoever compares waits here until the timeout; the stream needs no lock.
            other.execute("lock table outbox_message_t in access exclusive mode")
            wait_until(lambda: "audit" in failing(settings), 30)
            assert "lock timeout" in failing(settings)["audit"]
            assert "the stream cannot be compared with the outbox" in caplog.messages
            wait_until(lambda: Scrape(port).value("relay_part_failing", part="audit") == 1)
            assert "audit: note: fails for" in ask(port, "/readyz").text
        wait_until(lambda: failing(settings) == {}, 30)


def test_a_part_that_uses_no_database_shows_its_faults_too(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing showed that the watch for refused credentials did not watch."""

    def read(_: object) -> None:
        raise KeyError("a defect")

    settings = outbox.settings()
    with relaying(settings):
        with monkeypatch.context() as patched:
            patched.setattr(refusals, "refusal", read)
            wait_until(lambda: "refusals" in failing(settings))
        wait_until(lambda: failing(settings) == {})


@pytest.fixture
def broken() -> Iterator[Event]:
    """Set while a part of Spark is to fail."""
    broken = Event()
    broken.set()
    yield broken
    broken.clear()


def test_a_spark_session_that_cannot_be_built_is_shown(
    outbox: Outbox,
    broken: Event,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the log said it, once for each attempt, where batches go on without Spark."""

    def build(_: Session) -> None:
        if broken.is_set():
            raise RuntimeError("no master answers")

    caplog.set_level(logging.INFO, "relay.spark")
    monkeypatch.setattr(Session, "_build", build)
    monkeypatch.setattr(session, "_FIRST_WAIT_SECONDS", 0.05)
    port = free_port()
    settings = outbox.settings(
        observe={"listen": f"127.0.0.1:{port}"}, batch=LARGE_ON_SPARK, spark={"eager": True}
    )
    with relaying(settings):
        wait_until(lambda: failing(settings) == {"spark": "RuntimeError: no master answers"})
        wait_until(lambda: Scrape(port).value("relay_part_failing", part="spark") == 1)
        (line,) = (line for line in ask(port, "/readyz").text.splitlines() if "spark" in line)
        assert "spark: note: no session can be built for" in line
        assert line.endswith("s: RuntimeError: no master answers")
        assert caplog.messages.count("the Spark session cannot be built yet") == 1
        broken.clear()
        wait_until(lambda: failing(settings) == {})
        assert "the Spark session could be built again" in caplog.messages
        assert Scrape(port).value("relay_part_failing", part="spark") == 0


def test_a_spark_session_that_waits_for_executors_is_shown(
    outbox: Outbox, broken: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen master replaces no executor, and relay waited without a word.

    It stays live: a process that is started again would wait for the same executors.
    """
    waits_for_executors(broken, monkeypatch)
    port = free_port()
    settings = outbox.settings(
        observe={"listen": f"127.0.0.1:{port}", "stall_seconds": 2}, batch={"inline_max_events": 0}
    )
    with relaying(settings):
        outbox.publish(host(1), event(1))
        fault = "no executor has run the first tasks for 0 s: how many there are is unknown"
        wait_until(lambda: failing(settings) == {"spark": fault})
        line = f"spark: not ready: no session can be built for 3 s: {fault}"
        wait_until(lambda: line in ask(port, "/readyz").text)
        assert ask(port, "/livez").status == 200


def test_executors_that_come_late_end_the_fault(
    broken: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_for_executors(broken, monkeypatch)
    late = Session(SparkSettings())
    late.start()
    wait_until(lambda: late.condition.fault is not None and late.is_late)
    broken.clear()
    wait_until(lambda: late.is_ready and late.condition.fault is None)
    assert not late.is_late


def waits_for_executors(broken: Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until `broken` is cleared a session is prepared, which is reported soon; the shared one of the tests stays."""
    monkeypatch.setattr(session, "_clear_remains", lambda: None)
    monkeypatch.setattr(session, "_open", lambda _: SimpleNamespace(version="4", stop=lambda: None))
    monkeypatch.setattr(Session, "_prepare", lambda *_: wait_until(lambda: not broken.is_set()))
    monkeypatch.setattr(session, "_LATE_SECONDS", 0.05)


@pytest.mark.parametrize("keys", [{"master": "spark://{}"}, {"remote": "sc://{}/;token=s3cret"}])
def test_what_spark_waits_for_is_told(
    keys: dict[str, str], broken: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A master that is frozen, or a port where nobody listens: after a minute, "Spark has not started"."""
    waits_for_executors(broken, monkeypatch)
    opened = session._open

    def wait_and_open(settings: SparkSettings) -> Any:
        wait_until(lambda: not broken.is_set())
        return opened(settings)

    monkeypatch.setattr(session, "_open", wait_and_open)
    sessions = []
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        away = f"127.0.0.1:{free_port()}"
        here = f"127.0.0.1:{frozen.getsockname()[1]}"
        for address, why in (
            (away, "cannot be reached (Connection refused)"),
            (here, "accepts connections and does not answer"),
        ):
            given: dict[str, Any] = {key: value.format(address) for key, value in keys.items()}
            if "master" in given:
                given["conf"] = {"spark.authenticate": "false"}
            late = Session(SparkSettings.model_validate(given))
            sessions.append(late)
            late.start()
            fault = f"Spark has not started for 0 s: {address} {why}"
            wait_until(lambda late=late: late.condition.fault is not None)  # type: ignore[misc]
            assert late.condition.fault is not None
            assert late.condition.fault.fault == fault
    broken.clear()
    # Otherwise their threads would go on with what is no longer replaced, and end the shared session.
    wait_until(lambda: all(each.is_ready for each in sessions))


def test_groups_that_share_a_spark_session_show_it_alike(outbox: Outbox) -> None:
    """A group that needs no Spark does not."""
    shared = Session(outbox.settings().spark)
    shared.condition.fails("no master answers")
    found = [
        [fault.part for fault in parts.faults(Service(settings, shared).conditions)]
        for settings in (outbox.settings(batch=LARGE_ON_SPARK), outbox.settings())
    ]
    assert found == [["spark"], []]


def test_a_spark_sink_that_cannot_write_is_shown(
    outbox: Outbox,
    broken: Event,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a part of relay, and as the sink's last fault."""

    def work(self: SparkWorker) -> None:
        if broken.is_set():
            raise RuntimeError("s3cret")
        self.pause(0.05)

    caplog.set_level(logging.INFO, "relay.spark")
    monkeypatch.setattr(SparkWorker, "work", work)
    port = free_port()
    settings = outbox.settings(
        observe={"listen": f"127.0.0.1:{port}"},
        handlers={"lake": {"type": "spark", "path": "/nowhere"}},
        routes=[{"handlers": ["lake"]}],
    )
    with relaying(settings):
        wait_until(lambda: "sink lake" in failing(settings))
        assert failing(settings)["sink lake"].startswith("RuntimeError")
        wait_until(lambda: Scrape(port).value("relay_part_failing", part="sink lake") == 1)
        wait_until(lambda: "sink lake: note: fails for" in ask(port, "/readyz").text)
        assert ask(port, "/readyz").text.count("sink lake") == 1
        assert caplog.messages.count("handlers.lake: cannot write with Spark yet") == 1
        assert "s3cret" not in caplog.text
        broken.clear()
        wait_until(lambda: failing(settings) == {})
        assert "handlers.lake: writes with Spark again" in caplog.messages


def left_open(outbox: Outbox) -> list[object]:
    """What an instance leaves in the databases that has not closed all of its parts."""
    return [
        outbox.column(
            "select slot_name from pg_replication_slots where active and database = current_database()"
        ),
        presence.instances(outbox.conn, "default"),
        outbox.column("select group_id from relay.groups where running or instances <> '{}'"),
    ]


def test_a_part_that_cannot_be_closed_leaves_no_other_open(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that came after it in the shutdown was left to the end of the process, which other groups may outlive."""

    def close(_: object) -> None:
        raise KeyError("a defect")

    for part in (Sinks, Schedule):
        monkeypatch.setattr(part, "close", close)
    outbox.publish(host(1), event(1))
    service = Service(outbox.settings())

    def stop() -> None:
        outbox.wait_drained()
        service.stop()

    stopping = Thread(target=stop, daemon=True)
    stopping.start()
    with pytest.raises(KeyError, match="a defect"):
        service.run()
    stopping.join(10)
    wait_until(lambda: left_open(outbox) == [[], [], []])
    monkeypatch.undo()
    with relaying(outbox.settings()):
        outbox.publish(host(1), event(2))
        outbox.wait_drained()
    outbox.assert_exact()


def test_a_part_that_cannot_start_leaves_no_other_open(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(Sinks, "start", start)
    with pytest.raises(KeyError, match="a defect"):
        Service(outbox.settings()).run()
    wait_until(lambda: left_open(outbox) == [[], [], []])


def test_what_a_stop_causes_is_no_fault_of_a_part(caplog: pytest.LogCaptureFixture) -> None:
    """A warning at each orderly stop hides those that matter. The thread itself closes what it uses."""
    begun = Event()
    released: list[str] = []

    class Waiting(Recurring):
        def turn(self) -> float:
            begun.set()
            self.stopping.wait()
            raise psycopg.OperationalError("the connection is closed")

        def release(self) -> None:
            released.append(current_thread().name)

    condition = Condition("waiting", logging.getLogger("relay"), "fails", "goes on")
    part = Waiting(condition, close_seconds=10)
    part.start()
    assert begun.wait(10)
    part.close()
    assert (condition.fault, released, caplog.messages) == (None, ["waiting"], [])
