"""The time up to which a reader has everything: exact, whatever commits late, and stored with the commit of a table."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import re
import shlex
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event, Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import deltalake
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from relay.admin import sinks as admin_sinks
from relay.admin.status import read
from relay.config.files import load
from relay.model.snapshots import Snapshot
from relay.retention import reader_positions
from relay.source import hybrid, polling
from relay.source.server import current_position
from relay.spark.session import Session
from relay.spark.sink_worker import SparkWorker
from relay.store import completeness, deferred
from relay.store.completeness import Completeness, Watermark
from relay.store.connections import connect
from relay.store.deferred import Deferral
from relay.store.positions.sinks import Claims
from tests.deferrals import undecoded
from tests.outbox import APPEND, Outbox, event, host, relaying, wait_until
from tests.process import ROOT, relay


@pytest.fixture(autouse=True)
def notes_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid, "AUDIT_SECONDS", 0.2)
    monkeypatch.setattr(polling, "NOTE_SECONDS", 0.1)
    monkeypatch.setattr(completeness, "NOTE_SECONDS", 0.1)


def lake(path: Path, **more: Any) -> dict[str, Any]:
    handlers = {
        "projection": {"type": "sql", "statement": APPEND},
        "lake": {"type": "spark", "path": str(path), "format": "delta", "every": 0.2, **more},
    }
    return {"handlers": handlers, "routes": [{"handlers": list(handlers)}]}


def mark(outbox: Outbox, reader: str) -> Watermark | None:
    found = completeness.watermarks(outbox.conn, "default")
    return next((each for each in found if each.reader == reader), None)


def time_of(outbox: Outbox, reader: str) -> datetime:
    """The time before which a reader is complete; the beginning of time where it is not known."""
    found = mark(outbox, reader)
    return (found and found.complete_before) or datetime.min.replace(tzinfo=UTC)


def now(outbox: Outbox) -> datetime:
    moment: datetime = outbox.value("select clock_timestamp()")
    return moment


def wait_complete(outbox: Outbox, reader: str, before: datetime) -> None:
    wait_until(lambda: time_of(outbox, reader) >= before, 60)


def test_the_time_is_before_the_snapshot(outbox: Outbox) -> None:
    before = now(outbox)
    seen = current_position(outbox.conn)
    after = now(outbox)
    assert seen.at is not None
    assert before <= seen.at <= after
    with outbox.conn.transaction():
        outbox.conn.execute("select pg_sleep(0.05)")
        later = current_position(outbox.conn)
        assert later.at is not None
        assert now(outbox) > later.at >= after


@pytest.mark.parametrize("mode", ["auto", "poll", pytest.param("wal", marks=pytest.mark.rare)])
def test_the_target_is_complete_up_to_a_time_that_goes_on(outbox: Outbox, mode: str) -> None:
    """Also while nothing is published; a transaction that commits late is before no time that was told earlier."""
    settings = outbox.settings(source={**outbox.config()["source"], "mode": mode})
    with relaying(settings):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        first = now(outbox)
        wait_complete(outbox, "", first)
        with psycopg.connect(outbox.publisher_dsn) as late:
            late.execute(
                "insert into outbox_message_t (id, host_id, event_type, payload) values (%s, %s, 'late', '{}')",
                (host(77), host(2)),
            )
            opened = now(outbox)
            # The open transaction holds up nothing: it is not committed.
            wait_complete(outbox, "", opened)
            told = time_of(outbox, "")
            late.commit()
            returned = now(outbox)
        assert told < returned
        wait_complete(outbox, "", returned)
        assert outbox.value("select count(*) from projection") == 2
    found = mark(outbox, "")
    assert found is not None
    assert (found.dead_letters, found.deferred) == (0, 0)


def newest_xid(outbox: Outbox) -> int:
    found: int = outbox.value("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
    return found


def test_idle_sinks_take_a_transaction_id_only_to_note_their_times_together(
    outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None for a look, one for the times of all sinks of a process, none for retention without news."""
    names = [f"lake{number}" for number in range(5)]
    given = {"type": "spark", "format": "delta", "every": 1, "start": "beginning"}
    handlers = {name: {**given, "path": str(tmp_path / name)} for name in names}
    settings = outbox.settings(handlers=handlers, routes=[{"handlers": names}])
    outbox.install_again(settings)
    notes = completeness.CaughtUpNotes("default")
    session = Session(settings.spark)
    workers = [SparkWorker(name, settings, session, None, notes) for name in names]
    try:
        for worker in workers:
            assert worker._claim.take()
            worker.work()
        assert outbox.column("select distinct state from relay.sinks") == ["caught up"]

        def looks(number: int) -> int:
            began = newest_xid(outbox)
            for _ in range(number):
                for worker in workers:
                    worker.work()
            return newest_xid(outbox) - began

        monkeypatch.setattr(completeness, "NOTE_SECONDS", math.inf)
        assert looks(3) == 0
        before = now(outbox)
        assert looks(1) == 0
        monkeypatch.setattr(completeness, "NOTE_SECONDS", 0)
        began = newest_xid(outbox)
        workers[0].work()
        assert newest_xid(outbox) == began + 1
        assert all(time_of(outbox, name) >= before for name in names)
    finally:
        for worker in workers:
            worker.release()
    with connect(settings.source_dsn) as source, connect(settings.target_dsn) as target:
        reader_positions.note(source, target, "default", settings.source.table)
        began = newest_xid(outbox)
        reader_positions.note(source, target, "default", settings.source.table)
        assert newest_xid(outbox) == began


def test_a_note_of_a_sink_that_has_moved_or_lost_its_claim_is_not_stored(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stores the notes of a process knows of the others only what they said last."""
    outbox.install_again(outbox.settings(**lake(Path("lake"))))
    monkeypatch.setattr(completeness, "NOTE_SECONDS", 0)
    claims = Claims(outbox.relay_dsn, "default")
    try:
        claims.take(["lake"])
        state = claims.load({"lake": "beginning"}, by_spark=True)["lake"]
        since = state.position.snapshot
        assert since is not None
        at = now(outbox)
        good = completeness.CaughtUp(
            "lake", state.claim, state.epoch, since, Completeness(since, at)
        )
        notes = completeness.CaughtUpNotes("default")
        for other in (replace(good, claim=good.claim - 1), replace(good, epoch=good.epoch + 1)):
            notes.note(claims.conn, other)
            assert time_of(outbox, "lake") < at
        monkeypatch.setattr(completeness, "NOTE_SECONDS", math.inf)
        notes.note(claims.conn, good)
        notes.discard("lake")
        monkeypatch.setattr(completeness, "NOTE_SECONDS", 0)
        notes.note(claims.conn, replace(good, sink="other"))
        assert time_of(outbox, "lake") < at
        notes.note(claims.conn, good)
        assert time_of(outbox, "lake") == at
    finally:
        claims.close()


def committed_before(outbox: Outbox, moment: datetime) -> set[str]:
    return set(outbox.column("select id::text from returned where at < %s", (moment,)))


def test_a_table_has_all_that_was_committed_before_its_time(
    outbox: Outbox, spark_session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publishers with transactions of all lengths, batches that are cut, and each version of the table by itself."""
    outbox.conn.execute("create table returned (id text, at timestamptz)")
    outbox.conn.execute("grant insert on returned to public")
    rng, stopping = random.Random(32), Event()

    def publish(number: int) -> None:
        with psycopg.connect(outbox.publisher_dsn, autocommit=True) as conn:
            count = 0
            while not stopping.is_set():
                count += 1
                ids = [str(host(number * 100_000 + count * 10 + n)) for n in range(3)]
                with conn.transaction():
                    for each in ids:
                        conn.execute(
                            "insert into outbox_message_t (id, host_id, event_type, payload)"
                            " values (%s, %s, 'x', '{}')",
                            (each, host(number)),
                        )
                    conn.execute("select pg_sleep(%s)", (rng.choice([0, 0.01, 0.3, 1.5]),))
                conn.execute(
                    "insert into returned select unnest(%s::text[]), clock_timestamp()", (ids,)
                )

    path = tmp_path / "lake"
    publishers = [Thread(target=publish, args=(number,)) for number in range(1, 5)]
    with relaying(outbox.settings(**lake(path, max_events=7)), spark_session):
        for each in publishers:
            each.start()
        try:
            wait_until(lambda: has_versions(path, 6), 120)
        finally:
            stopping.set()
            for each in publishers:
                each.join()
        end = now(outbox)
        wait_complete(outbox, "lake", end)
    checked = 0
    table = deltalake.DeltaTable(path)
    for commit in table.history():
        told = commit.get("relay.complete_before")
        if not commit["version"]:
            # The table was created without rows.
            assert deltalake.DeltaTable(path, version=0).file_uris() == []
            continue
        assert commit["relay.snapshot"]
        if told is None:
            continue
        checked += 1
        moment = datetime.fromisoformat(told)
        version = deltalake.DeltaTable(path, version=commit["version"])
        present = set(version.to_pyarrow_table(columns=["id"])["id"].to_pylist())
        assert committed_before(outbox, moment) <= present
    assert checked >= 2
    everything = set(table.to_pyarrow_table(columns=["id"])["id"].to_pylist())
    assert everything == set(outbox.column("select id::text from outbox_message_t"))


def test_a_sink_has_a_row_before_its_first_batch(outbox: Outbox, tmp_path: Path) -> None:
    """A query for the sink's row says that the time is not known, instead of no row."""
    outbox.install_again(outbox.settings(**lake(tmp_path / "lake", start="beginning")))
    found = mark(outbox, "lake")
    assert found is not None
    assert found.complete_before is None
    assert (found.dead_letters, found.deferred) == (0, 0)
    begun = outbox.value("select snapshot::text from relay.sinks where sink = 'lake'")
    assert found.since == found.snapshot == begun
    # A delivery's sink has none: it is not complete up to a time.
    assert {each.reader for each in completeness.watermarks(outbox.conn, "default")} == {"", "lake"}


def test_a_sink_that_begins_in_the_middle_is_complete_from_its_first_batch_on(
    outbox: Outbox,
) -> None:
    """Of what comes after its position it may have left out a part."""
    outbox.begin_sink("lake", "'10:10:'")
    completeness.expect(outbox.conn, "default", ["lake"])
    first, second = Snapshot.parse("20:20:"), Snapshot.parse("30:30:")
    noted = datetime(2026, 11, 1, tzinfo=UTC)
    for reached in (Completeness(first, noted), Completeness(second, noted)):
        completeness.note(outbox.conn, "default", "lake", reached.snapshot, reached, is_part=True)
    found = mark(outbox, "lake")
    assert found is not None
    assert (found.since, found.snapshot) == (str(first), str(second))


def has_versions(path: Path, count: int) -> bool:
    return deltalake.DeltaTable.is_deltatable(str(path)) and (
        deltalake.DeltaTable(path).version() >= count
    )


def test_a_sink_that_is_moved_begins_again(
    outbox: Outbox, spark_session: Session, tmp_path: Path
) -> None:
    settings = outbox.settings(**lake(tmp_path / "lake"))
    with relaying(settings, spark_session):
        outbox.publish(host(1), event(1))
        wait_complete(outbox, "lake", now(outbox))
    first = mark(outbox, "lake")
    assert first is not None
    admin_sinks.seek(settings, "lake", to="end")
    waiting = mark(outbox, "lake")
    assert waiting is not None
    assert waiting.complete_before is None
    position = outbox.value("select snapshot::text from relay.sinks where sink = 'lake'")
    assert waiting.since == waiting.snapshot == position
    with relaying(settings, spark_session):
        wait_complete(outbox, "lake", now(outbox))
    moved = mark(outbox, "lake")
    assert moved is not None
    assert moved.since == waiting.since != first.since


def invoke(file: Path, *options: str) -> tuple[int, str]:
    found = relay("status", "--config", str(file), *options)
    return found.returncode, " ".join((found.stdout + found.stderr).split())


def test_the_command_tells_whether_a_time_is_reached(
    outbox: Outbox, spark_session: Session, tmp_path: Path
) -> None:
    file = outbox.config_file(tmp_path / "relay.yaml", **lake(tmp_path / "lake"))
    settings = load([file])
    begun = now(outbox)
    assert "lake is not complete before" in invoke(file, "--complete-before", begun.isoformat())[1]
    with relaying(settings, spark_session):
        outbox.publish(host(1), event(1))
        wait_complete(outbox, "lake", now(outbox))
        wait_complete(outbox, "", now(outbox))
        reached = now(outbox)
        wait_complete(outbox, "lake", reached)
    assert invoke(file, "--complete-before", begun.isoformat())[0] == 0
    assert invoke(file, "--complete-before", begun.isoformat(), "--sink", "lake")[0] == 0
    code, said = invoke(file, "--complete-before", "2100-01-01T00:00", "--sink", "lake")
    assert code == 1
    assert "sink lake is not complete before 2100-01-01 00:00:00 UTC, only before 20" in said
    assert "the target" not in said
    assert "the target is not complete" in invoke(file, "--complete-before", "2100-01-01")[1]
    for options, says in (
        (("--complete-before", "noon"), "'noon' is not a time such as"),
        (("--complete-before", "2026-01-01", "--sink", "projection"), "no sink 'projection'"),
        (("--sink", "lake"), "needs --complete-before"),
    ):
        code, said = invoke(file, *options)
        assert code == 2
        assert says in said
    shown = json.loads(invoke(file, "--json")[1])["watermarks"]
    assert {each["reader"] for each in shown} == {"", "lake"}
    (listed,) = admin_sinks.listed(settings)
    (told,) = (each for each in read(settings).watermarks if each.reader == "lake")
    assert listed.complete_before == told.complete_before


def test_what_is_dead_or_deferred_is_counted(outbox: Outbox, tmp_path: Path) -> None:
    """What is dead or deferred in the target counts for a sink only where no sink has had it."""
    file = outbox.config_file(tmp_path / "relay.yaml", **lake(tmp_path / "lake", start="beginning"))
    settings = load([file])
    outbox.install_again(settings)
    outbox.conn.execute(
        "insert into relay.dead_letter_queue (group_id, sink, undelivered, exception, status)"
        " values ('default', '', true, 'x', 'dead'), ('default', '', false, 'x', 'dead'),"
        " ('default', 'lake', false, 'x', 'replaying'), ('default', '', true, 'x', 'replayed')"
    )
    for sink, *undelivered in (("", True, True, False), ("lake", False), ("hook", False)):
        entries = ((undecoded(), Deferral((), undelivered=each)) for each in undelivered)
        deferred.defer(outbox.conn, "default", entries, str(sink))
    counted = {
        each.reader: (each.dead_letters, each.deferred) for each in read(settings).watermarks
    }
    assert counted == {"": (2, 3), "lake": (2, 3)}
    outbox.conn.execute("update relay.completeness set complete_before = now()")
    assert "but for 2 dead letters and 3 deferred transactions" in invoke(file)[1]


def stubs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins for what the examples import of Airflow and Dagster; returns the sensors and the requests."""
    made: dict[str, Any] = {}

    class Task:
        def __init__(self, **settings: Any) -> None:
            made[settings["task_id"]] = settings

        def __rshift__(self, other: Task) -> Task:
            return other

    class Dag:
        def __init__(self, name: str, **settings: Any) -> None:
            made["dag"] = {"name": name, **settings}

        def __enter__(self) -> Dag:
            return self

        def __exit__(self, *_: object) -> None: ...

    class Request:
        def __init__(self, run_key: str, run_config: Any) -> None:
            assert run_config["ops"]["revenue"]["config"]["day"] == run_key
            self.run_key = run_key

    class Skipped:
        def __init__(self, why: str) -> None:
            self.run_key = None

    def plain(function: Any = None, **_: Any) -> Any:
        return function if function is not None else lambda decorated: decorated

    modules: dict[str, dict[str, Any]] = {
        "airflow.providers.standard.operators.bash": {"BashOperator": Task},
        "airflow.providers.standard.sensors.bash": {"BashSensor": Task},
        "airflow.sdk": {"DAG": Dag},
        "dagster": {
            "op": plain,
            "job": plain,
            "sensor": plain,
            "OpExecutionContext": object,
            "SensorEvaluationContext": object,
            "RunRequest": Request,
            "SkipReason": Skipped,
        },
    }
    for name, contents in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            package = ModuleType(".".join(parts[:end]))
            if end == len(parts):
                vars(package).update(contents)
            monkeypatch.setitem(sys.modules, package.__name__, package)
    return made


def example(name: str) -> ModuleType:
    path = ROOT / "examples" / "completeness" / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_airflow_example_polls_until_the_status_is_0(
    outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BashSensor: 0 is done, `retry_exit_code` is not yet, any other status fails the task."""
    sensor = stubs(monkeypatch)
    example("airflow_dag.py")
    file = outbox.config_file(tmp_path / "relay.yaml", **lake(tmp_path / "lake"))
    command = sensor["complete"]["bash_command"]
    template = re.search(r"'\{\{ (.*) \}\}'", command)
    assert template is not None
    wanted = datetime(2026, 3, 2, tzinfo=UTC)
    moment = eval(
        template[1], {"data_interval_end": wanted, "macros": SimpleNamespace(timedelta=timedelta)}
    )
    assert moment == "2026-03-02T00:10:00+00:00"
    options = [
        *shlex.split(
            command.replace(template[0], moment).replace("/etc/relay/relay.yaml", str(file))
        )
    ]
    assert options[:2] == ["relay", "status"]
    assert relay(*options[1:]).returncode == sensor["complete"]["retry_exit_code"] == 1
    since = Snapshot(3, 3)
    early = completeness.Completeness(since, wanted)
    completeness.note(outbox.conn, "default", "lake", since, early)
    assert relay(*options[1:]).returncode == 1
    late = completeness.Completeness(since, wanted + timedelta(minutes=10))
    completeness.note(outbox.conn, "default", "lake", since, late)
    assert relay(*options[1:]).returncode == 0
    # An outage while the sensor polls: BashSensor fails the task for good with any other status.
    away = {"dsn": make_conninfo(outbox.relay_dsn, port=1), "slot": outbox.slot}
    outbox.config_file(file, **lake(tmp_path / "lake"), source=away)
    assert relay(*options[1:]).returncode == 1
    # A sink that is none is no outage, although nothing can be asked.
    unknown = ["lakes" if each == "lake" else each for each in options[1:]]
    assert unknown != options[1:]
    assert relay(*unknown).returncode == 2
    file.write_text("nonsense: 1")
    assert relay(*options[1:]).returncode == 2


def test_the_dagster_example_requests_each_day_once(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs(monkeypatch)
    found = example("dagster_sensor.py")
    monkeypatch.setenv("OUTBOX_DSN", outbox.relay_dsn)
    context = SimpleNamespace(cursor=None)
    context.update_cursor = lambda text: setattr(context, "cursor", text)

    def evaluated(reached: datetime | None) -> list[str]:
        if reached is not None:
            since = Snapshot(3, 3)
            complete = completeness.Completeness(since, reached)
            completeness.note(outbox.conn, "default", "lake", since, complete)
        return [each.run_key for each in found.day_is_complete(context) if each.run_key]

    assert evaluated(None) == []
    assert evaluated(datetime(2026, 3, 1, 12, tzinfo=UTC)) == []
    assert evaluated(datetime(2026, 3, 2, 0, 9, tzinfo=UTC)) == []
    assert evaluated(datetime(2026, 3, 2, 0, 11, tzinfo=UTC)) == ["2026-03-01"]
    assert evaluated(datetime(2026, 3, 2, 0, 12, tzinfo=UTC)) == []
    # A watermark that jumps leaves no day out.
    assert evaluated(datetime(2026, 3, 4, 9, tzinfo=UTC)) == ["2026-03-02", "2026-03-03"]
