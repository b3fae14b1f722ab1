"""Metrics without a database: names, the dashboard and the rules that use them, the table, the server."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from relay.batch import DeadTransaction
from relay.config import Settings
from relay.events import Lsn
from relay.faults import ConfigurationError
from relay.observe import metrics, server
from relay.observe.metrics import OTHER, Metrics
from relay.observe.series import SERIES, table
from relay.observe.server import Listener, listen
from relay.observe.settings import Address
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
    assert len(rules) == 12


@needs_promtool
@pytest.mark.parametrize("arguments", [("check", "rules", RULES), ("test", "rules", RULES_TEST)])
def test_promtool_takes_the_rules(arguments: tuple[str | Path, ...]) -> None:
    result = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_table_of_the_documentation_is_current() -> None:
    assert table() in (ROOT / "docs" / "metrics.md").read_text(), (
        "write it again: python -m relay.observe.series"
    )


def test_kinds_of_fault_are_bounded() -> None:
    counted = Metrics(Settings(handlers={}))
    counted.settled(
        "hook",
        0,
        [
            DeadTransaction(None, Lsn(1), 1, "hook", "", kind=f"Kind{number}")
            for number in range(500)
        ],
    )
    (family,) = [each for each in counted.collect() if each.name == "relay_dead_lettered"]
    kinds = {sample.labels["fault"]: sample.value for sample in family.samples}
    assert len(kinds) == metrics._KINDS_OF_FAULT + 1
    assert sum(kinds.values()) == 500
    assert kinds[OTHER] == 500 - metrics._KINDS_OF_FAULT


@pytest.fixture
def listener() -> Iterator[Listener]:
    found = listen(Address("127.0.0.1", 0))
    yield found
    found.close()


def test_before_a_service_runs_it_is_live_and_not_ready(listener: Listener) -> None:
    assert ask(listener.port, "/livez").text.splitlines()[0] == "live"
    found = ask(listener.port, "/readyz")
    assert (found.status, found.text.splitlines()[0]) == (503, "not ready")
    assert json.loads(ask(listener.port, "/healthz", Accept="application/json").text) == {
        "live": True,
        "ready": False,
        "groups": {},
    }


def test_only_get_and_head_of_known_paths(listener: Listener) -> None:
    head = ask(listener.port, "/metrics", "HEAD")
    assert (head.status, head.text) == (200, "")
    assert int(head.headers["Content-Length"]) > 0
    assert ask(listener.port, "/").status == 404
    assert ask(listener.port, "/metrics", "POST").status == 501
    assert "relay_build_info" in ask(listener.port, "/metrics").text


def test_a_slow_client_keeps_nobody_waiting(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(5)]
    for each in slow:
        each.sendall(b"GET /met")
    assert ask(listener.port, "/livez").status == 200
    # As many as are answered side by side: others are refused at once, and it ends all the same.
    more = [
        socket.create_connection(("127.0.0.1", listener.port)) for _ in range(server.MOST_CLIENTS)
    ]
    with pytest.raises(OSError, match=r"closed|reset|refused|aborted"):
        ask(listener.port, "/livez")
    for each in (*slow, *more):
        each.close()


def test_groups_of_one_process_share_an_address_and_a_taken_one_is_told(listener: Listener) -> None:
    address = Address("127.0.0.1", listener.port)
    with pytest.raises(ConfigurationError, match=r"^observe\.listen: 127\.0\.0\.1:\d+ is taken"):
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
