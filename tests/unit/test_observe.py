"""Metrics without a database: names, the dashboard and the rules that use them, the table, the server."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from relay.config.settings import Address, Settings
from relay.faults import ConfigurationError
from relay.model.batch import DeadLetterReport
from relay.model.events import Lsn
from relay.observe import databases, metrics, server
from relay.observe.databases import Counted, Databases
from relay.observe.liveness import Level, Liveness
from relay.observe.long_tasks import LongTasks
from relay.observe.metrics import OTHER, SERIES, Metrics, table
from relay.observe.observer import ServiceGauges
from relay.observe.server import HttpListener, listen
from relay.pipeline.active_jobs import ActiveJobs
from relay.source.outbox.unread import Backlog
from tests.observing import DASHBOARD, LABELS, RULES, ask, used
from tests.process import ROOT

NAMES = {each.name for each in SERIES} | LABELS
RULES_TEST = ROOT / "tests" / "prometheus" / "relay.rules.test.yaml"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian's package prometheus)"
)


def test_names_follow_the_conventions() -> None:
    assert len({each.name for each in SERIES}) == len(SERIES)
    for each in SERIES:
        assert each.name.endswith("_total") == (each.kind == "counter"), each.name
        assert each.kind != "histogram" or each.name.endswith("_seconds")
        assert each.text.endswith(".")


def test_the_dashboard_uses_every_series_and_no_other() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])
    ]
    assert used(" ".join(expressions)) == NAMES
    identifiers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(identifiers)) == len(identifiers)


def test_every_alert_uses_known_series_and_names_its_runbook() -> None:
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    for rule in rules:
        assert used(rule["expr"]) <= NAMES
        runbook = rule["annotations"]["runbook_url"]
        assert runbook == f"docs/operations.md#{rule['alert'].lower()}"
    assert len(rules) == 23


@needs_promtool
@pytest.mark.parametrize("arguments", [("check", "rules", RULES), ("test", "rules", RULES_TEST)])
def test_promtool_takes_the_rules(arguments: tuple[str | Path, ...]) -> None:
    result = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_table_of_the_documentation_is_current() -> None:
    assert table() in (ROOT / "docs" / "reference" / "metrics.md").read_text(), (
        "write it again: python -m relay.observe.metrics"
    )


def test_kinds_of_fault_are_bounded() -> None:
    counted = Metrics(Settings(handlers={}))
    counted.stored(
        "hook",
        0,
        [
            DeadLetterReport(None, Lsn(1), 1, "hook", "", kind=f"Kind{number}")
            for number in range(500)
        ],
    )
    (family,) = [each for each in counted.collect() if each.name == "relay_dead_lettered"]
    kinds = {sample.labels["fault"]: sample.value for sample in family.samples}
    assert len(kinds) == metrics._KINDS_OF_FAULT + 1
    assert sum(kinds.values()) == 500
    assert kinds[OTHER] == 500 - metrics._KINDS_OF_FAULT


@pytest.fixture
def listener() -> Iterator[HttpListener]:
    found = listen(Address("127.0.0.1", 0))
    yield found
    found.close()


def test_before_a_service_runs_it_is_live_and_not_ready(listener: HttpListener) -> None:
    assert ask(listener.port, "/livez").text.splitlines()[0] == "live"
    found = ask(listener.port, "/readyz")
    assert (found.status, found.text.splitlines()[0]) == (503, "not ready")
    assert json.loads(ask(listener.port, "/healthz", Accept="application/json").text) == {
        "live": True,
        "ready": False,
        "groups": {},
    }


def test_only_get_and_head_of_known_paths(listener: HttpListener) -> None:
    head = ask(listener.port, "/metrics", "HEAD")
    assert (head.status, head.text) == (200, "")
    assert int(head.headers["Content-Length"]) > 0
    assert ask(listener.port, "/").status == 404
    assert ask(listener.port, "/metrics", "POST").status == 501
    assert "relay_build_info" in ask(listener.port, "/metrics").text


def test_a_slow_client_keeps_nobody_waiting(
    listener: HttpListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(5)]
    for each in slow:
        each.sendall(b"GET /met")
    assert ask(listener.port, "/livez").status == 200
    # As many as are answered side by side: the oldest gives way.
    more = [
        socket.create_connection(("127.0.0.1", listener.port)) for _ in range(server.MOST_CLIENTS)
    ]
    assert ask(listener.port, "/livez").status == 200
    for each in (*slow, *more):
        each.close()


def test_groups_of_one_process_share_an_address_and_a_taken_one_is_reported(
    listener: HttpListener,
) -> None:
    address = Address("127.0.0.1", listener.port)
    with pytest.raises(
        ConfigurationError, match=r"^observe\.listen: cannot listen on 127\.0\.0\.1:\d+: "
    ):
        listen(address)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = Address("127.0.0.1", free.getsockname()[1])
    first, second = listen(address), listen(address)
    assert first is second
    one, other = Metrics(Settings(group="one")), Metrics(Settings(group="other"))
    first.add(one, lambda: None)  # type: ignore[arg-type, return-value]
    second.add(other, lambda: None)  # type: ignore[arg-type, return-value]
    text = ask(first.port, "/metrics").text
    assert text.count("# TYPE relay_events_total counter") == 1
    assert {'group="one"', 'group="other"'} <= {
        each for each in ('group="one"', 'group="other"') if each in text
    }
    first.close()
    assert ask(second.port, "/metrics").status == 200
    second.close()


def test_who_is_not_observed_pays_nothing() -> None:
    """Not even the import, which takes a tenth of a second."""
    script = "import sys, relay.service; print('prometheus_client' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize("key", ["stall_seconds", "busy_seconds"])
def test_limits_that_would_call_everything_a_hang(key: str) -> None:
    with pytest.raises(ValidationError, match=key):
        Settings.model_validate({"observe": {key: 1}})


def test_a_client_that_sends_byte_by_byte_ends(
    listener: HttpListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time; without an end of all of it, a few such clients would keep a health check out."""
    monkeypatch.setattr(server, "ANSWER_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", listener.port), timeout=5) as slow:
        slow.settimeout(0.05)
        while not _has_ended(slow):
            pass


def _has_ended(slow: socket.socket) -> bool:
    try:
        slow.sendall(b"G")
        return not slow.recv(1)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_database_that_does_not_answer_concerns_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    released = Event()
    monkeypatch.setattr(databases, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(Databases, "_read_target", lambda _, pids: pids)
    monkeypatch.setattr(Databases, "_read_source", lambda _: released.wait())
    looking: Any = Databases(Settings(handlers={}))
    for pid in (1, 2):
        looking.probe([pid], True)
        assert looking.target_readings == [pid]
        assert looking.target.is_up(1)
        assert looking.source_readings is None
        assert not looking.source.is_up(1)
    released.set()
    looking.source.thread.join()
    assert looking.source.is_up(1)


def test_counting_keeps_no_probe_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    released, found = Event(), Counted()

    def count(_: Databases) -> Counted:
        released.wait()
        return found

    monkeypatch.setattr(Databases, "_read_target", lambda _, pids: pids)
    monkeypatch.setattr(Databases, "_read_source", lambda _: 1)
    monkeypatch.setattr(Databases, "_counted", count)
    looking: Any = Databases(Settings(handlers={}))
    looking.probe([1], True)
    looking.probe([2], True)
    assert (looking.target_readings, looking.counted) == ([2], None)
    released.set()
    looking._counting.join()
    assert looking.counted is found


def test_an_age_does_not_grow_until_the_next_count() -> None:
    """Where counting takes long the next one comes late: the event is applied by then, and the lag would be false."""
    parts: Any = None
    looking: Any = Databases(Settings(handlers={}))
    gauges = ServiceGauges(Settings(handlers={}), parts, looking, parts)
    before = datetime.now(UTC) - timedelta(hours=1)
    looking.counted = Counted(Backlog(3, oldest_seconds=7.0, oldest=before))
    values: Any = defaultdict(dict)
    gauges._counts(values)
    assert values["relay_target_lag_events"] == {(): 3}
    assert values["relay_target_lag_seconds"] == {(): 7.0}


def test_a_spark_sink_is_not_late_while_it_may_wait_for_more_events() -> None:
    """With `every` of ten minutes the alert RelaySinkLagging would fire before each batch."""
    parts: Any = None
    looking: Any = Databases(Settings(handlers={}))
    lake = {"type": "spark", "path": "lake", "every": 600}
    gauges = ServiceGauges(Settings(handlers={"lake": lake}), parts, looking, parts)
    values: Any = defaultdict(dict)
    lags = []
    for age in (None, 500.0, 660.0):
        looking.counted = Counted(sinks={"lake": Backlog(3, oldest_seconds=age)})
        values.clear()
        gauges._counts(values)
        lags.append(values["relay_sink_lag_seconds"][("lake",)])
    assert lags == [0.0, 0.0, 60.0]


def test_a_service_that_stops_and_does_not_end_hangs() -> None:
    """One that starts may have to wait for a database for hours."""
    active_jobs, runs = ActiveJobs(), False
    pipeline = SimpleNamespace(applier=SimpleNamespace(active_jobs=active_jobs))
    parts: Any = SimpleNamespace(pipeline=pipeline, running=lambda: runs)
    databases: Any = SimpleNamespace(target_readings=None)
    limits: Any = {"busy_seconds": 30, "stall_seconds": 2}
    judge = Liveness(Settings(handlers={}, observe=limits), parts, databases)
    judge._limits = SimpleNamespace(busy_seconds=0.0)  # type: ignore[assignment]
    judge.sample()
    assert judge.health().live
    runs = True
    judge.sample()
    runs = False
    assert judge.health().live
    judge.sample()
    time.sleep(0.01)
    assert not judge.health().live


@pytest.mark.parametrize(("sessions", "live"), [({}, True), ({7: datetime.now(UTC)}, False)])
def test_a_task_whose_session_nobody_sees_is_not_judged(
    sessions: dict[int, datetime], live: bool
) -> None:
    """A pooler tells another number than the server's. A session that was seen, and has ended, is another matter."""
    active_jobs = ActiveJobs()
    parts: Any = SimpleNamespace(
        pipeline=SimpleNamespace(applier=SimpleNamespace(active_jobs=active_jobs)),
        running=lambda: True,
    )
    refreshed: Any = SimpleNamespace(
        target_readings=SimpleNamespace(active=frozenset(), began=sessions)
    )
    judge = Liveness(Settings(handlers={}), parts, refreshed)
    judge._limits = SimpleNamespace(busy_seconds=900.0, stall_seconds=0.05)  # type: ignore[assignment]
    with active_jobs.job() as job:
        job.pid, job.thread = 7, -1
        judge.sample()
        refreshed.target_readings.began = {}
        time.sleep(0.1)
        judge.sample()
        assert [each.level for each in judge._jobs()] == ([] if live else [Level.HANGS])


def test_a_long_task_says_what_it_waits_for_and_how_long_it_took(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that slept had "waits_for": "Client ClientRead", the server's word for it.

    The end of a task of 26 s had "seconds": 3, the time since its last progress.
    """
    jobs = ActiveJobs()
    caplog.set_level("INFO")
    looks = LongTasks(lambda: "", jobs)  # type: ignore[arg-type]
    monkeypatch.setattr(looks, "_waits", lambda pids: {1: ("Client ClientRead", None)})
    with jobs.job() as job:
        job.pid = 1
        job.began -= 26
        job.at -= 26
        looks._check(time.monotonic())
        with jobs.handler("orders"):
            pass
    looks._check(time.monotonic())
    (record,) = [each for each in caplog.records if each.getMessage().endswith("has ended")]
    assert vars(record)["seconds"] == 26
    (begun,) = [each for each in caplog.records if each.getMessage().endswith("in flight for long")]
    assert vars(begun)["waits_for"] == "the handler, which runs no statement"
    assert vars(record)["handler"] == "orders"


def test_a_task_that_waits_for_the_source_says_so() -> None:
    """In between, while what it has read is applied, it does not."""
    active_jobs, seen = ActiveJobs(), []

    def rows() -> Iterator[int]:
        seen.append(job.reads)
        yield 1
        seen.append(job.reads)
        raise ConnectionError

    with active_jobs.job() as job:
        found = active_jobs.reading(rows())
        assert next(found) == 1
        seen.append(job.reads)
        with pytest.raises(ConnectionError):
            next(found)
        assert seen == [True, False, True]
        assert not job.reads
