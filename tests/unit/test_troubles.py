"""The list of what needs attention: each trouble has an alert with a runbook, and each alert that can has a trouble."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from relay.admin.status import Status
from relay.observe import troubles as listed
from relay.observe.troubles import ALERTS, MOST, Urgency, troubles
from relay.source.outbox.unread import Backlog
from relay.source.stream.slot import SlotState
from relay.store.brakes import BrakedHandler
from relay.store.deferred.selection import DeferredSummary, Reason
from relay.store.endpoints import EndpointCounts
from relay.store.positions.sinks import SinkPosition, StoredSink
from relay.store.presence import StoredPartFault
from relay.store.queues import QueueFigures
from relay.store.schedules import ScheduleFigures

ROOT = Path(__file__).parents[2]
NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
LONG_AGO = NOW - timedelta(hours=2)
SLOT = SlotState("relay", "pgoutput", "x", True, 1, "reserved", "0/1", 0, 0, None, True)
QUEUE = QueueFigures("mail", None, 0, 0, 0, 0, 0.0, 1)
SINK = StoredSink(
    "hook", "attached", SinkPosition(None), None, None, None, None, None, "one", False
)
SCHEDULE = ScheduleFigures("nightly", 1, 0, 0.0, False, None)
HEALTHY = Status(
    "default",
    "wal",
    instances=["one"],
    slot=SLOT,
    slot_reader="one",
    sinks=[SINK],
    endpoints=[EndpointCounts("hook", 0, 0)],
    queues=[QUEUE],
    schedules=[SCHEDULE],
    dead_letters=0,
    deferred=DeferredSummary(0, 0),
    unread={"": Backlog(0, False, None)},
    read_at={"source.dsn": NOW, "target.dsn": NOW},
    completed=NOW,
)


def lag(seconds: float) -> dict[str, Backlog]:
    return {"": Backlog(1, False, seconds)}


def deferred(kind: str) -> DeferredSummary:
    return DeferredSummary(1, 0, [Reason("hook", kind, "hook", "503", 1, LONG_AGO, NOW, NOW)])


SCENES: dict[str, tuple[str, dict[str, Any]]] = {
    "an instance": ("RelayDown", {"instances": [], "source_mode": "poll"}),
    "the source": ("RelaySourceUnreachable", {"faults": {"source.dsn": "refused"}}),
    "the target": ("RelayTargetUnreachable", {"faults": {"target.dsn": "refused"}}),
    "no slot": ("RelaySlotLost", {"slot": None}),
    "a lost slot": ("RelaySlotLost", {"slot": replace(SLOT, wal_status="lost")}),
    "a slot in the making": (
        "RelayStreamStalled",
        {"slot": replace(SLOT, confirmed_flush_lsn=None)},
    ),
    "an unread slot": ("RelayStreamStalled", {"slot": replace(SLOT, active=False)}),
    "a foreign reader": ("RelayStreamStalled", {"slot_reader": "pg_recvlogical"}),
    "an old event": ("RelayStreamStalled", {"unread": lag(301)}),
    "WAL": ("RelaySlotRetainsWal", {"slot": replace(SLOT, retained_bytes=11_000_000_000)}),
    "polling": ("RelayPolling", {"source_mode": "poll", "source_since": LONG_AGO}),
    "a brake": (
        "RelayHandlerStopped",
        {"braked": [BrakedHandler("orders", "23505", 5, LONG_AGO, 0, None, None, None)]},
    ),
    "a part": ("RelayPartFailing", {"parts": [StoredPartFault("one", "retention", "denied", NOW)]}),
    "Spark": ("RelaySparkUnavailable", {"parts": [StoredPartFault("one", "spark", "Java", NOW)]}),
    "a sink": ("RelaySinkDown", {"sinks": [replace(SINK, fault="503", fault_since=NOW)]}),
    "a paused sink": (
        "RelaySinkLagging",
        {"sinks": [replace(SINK, state="paused", paused_by="anna", paused_at=NOW)]},
    ),
    "a reader given up": (
        "RelaySinkLagging",
        {"readers": [SimpleNamespace(reader="hook", group_id="default", given_up_at=NOW)]},
    ),
    "a failing endpoint": ("RelayEndpointDisabled", {"endpoints": [EndpointCounts("hook", 1, 0)]}),
    "dead letters": ("RelayDeadLetters", {"dead_letters": 2}),
    "deferred": ("RelayDeferredOld", {"deferred": deferred("retry")}),
    "a stopped queue": (
        "RelayQueueStopped",
        {"queues": [replace(QUEUE, stopped_at=NOW, fault="match")]},
    ),
    "an old message": ("RelayQueueOld", {"queues": [replace(QUEUE, oldest_seconds=301)]}),
    "a dead message": ("RelayQueueDead", {"queues": [replace(QUEUE, dead=2)], "dead_letters": 2}),
    "a stuck saga": ("RelaySagaStuck", {"queues": [replace(QUEUE, stuck=1)]}),
    "a late schedule": (
        "RelayScheduleMissed",
        {"schedules": [replace(SCHEDULE, overdue_seconds=61)]},
    ),
    "a schedule in no words": (
        "RelayScheduleMissed",
        {"schedules": [replace(SCHEDULE, fault="words")]},
    ),
    "another history": ("RelayReaderGivenUp", {"other_histories": ["billing"]}),
}


@pytest.mark.parametrize(("alert", "change"), SCENES.values(), ids=SCENES)
def test_each_trouble_is_one_line_of_its_alert(alert: str, change: dict[str, Any]) -> None:
    """And the healthy state beside it has none."""
    found = troubles(replace(HEALTHY, **change), "auto")
    assert [each.alert for each in found] == [alert]
    assert "\n" not in found[0].line


def test_what_is_healthy_or_soon_over_is_no_trouble() -> None:
    assert not troubles(HEALTHY, "auto")
    assert not troubles(replace(HEALTHY, source_mode="poll", source_since=LONG_AGO), "poll")
    assert not troubles(replace(HEALTHY, source_mode="poll", source_since=NOW), "auto")
    assert not troubles(replace(HEALTHY, deferred=deferred("scheduled")), "auto")


def test_each_alert_has_a_runbook_and_those_of_the_status_a_trouble() -> None:
    """The list, the rules, the runbooks and the scenes above name the same alerts, with one severity and one limit."""
    rules = yaml.safe_load((ROOT / "config/prometheus/relay.rules.yaml").read_text())
    alerts = {each["alert"]: each for each in rules["groups"][0]["rules"]}
    books = re.findall(r"^### (Relay\w+)$", (ROOT / "docs/operations.md").read_text(), re.MULTILINE)
    assert set(alerts) == set(books)
    # These count what happened, which the status does not keep.
    assert set(alerts) - set(ALERTS) == {"RelaySlotRecreated", "RelayApiFailing"}
    assert {alert for alert, _ in SCENES.values()} == set(ALERTS)
    severities = {name: Urgency(each["labels"]["severity"]) for name, each in alerts.items()}
    assert {name: severities[name] for name in ALERTS} == dict(ALERTS)
    limits = {
        "RelayStreamStalled": listed.STALLED_SECONDS,
        "RelayQueueOld": listed.QUEUE_SECONDS,
        "RelayDeferredOld": listed.DEFERRED_SECONDS,
        "RelayScheduleMissed": listed.OVERDUE_SECONDS,
    }
    for name, limit in limits.items():
        assert f"> {limit}" in alerts[name]["expr"], name
    assert "> 10e9" in alerts["RelaySlotRetainsWal"]["expr"]
    assert listed.RETAINED_BYTES == 10e9
    assert alerts["RelayPolling"]["for"] == f"{listed.POLLING_SECONDS // 60}m"


def test_the_most_urgent_stands_first_and_many_are_counted() -> None:
    stopped = [
        replace(QUEUE, queue=f"q{n}", stopped_at=NOW, fault="match") for n in range(MOST + 5)
    ]
    found = troubles(replace(HEALTHY, queues=stopped, instances=[], source_mode="poll"), "poll")
    assert [each.alert for each in found] == ["RelayDown", *["RelayQueueStopped"] * (MOST + 1)]
    assert found[-1].text == "and 5 more"
    urgencies = [each.urgency for each in found]
    assert urgencies == sorted(urgencies)
