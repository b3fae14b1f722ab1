"""A running relay's series, as a scrape and as a real Prometheus has them."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest
import yaml
from psycopg.types.json import Jsonb

from relay.demo.embedded import free_port
from relay.observe import history, observer
from tests.integration.test_sinks import posting
from tests.observing import DASHBOARD, RULES, Scrape, ask, is_good, used
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.process import relay, running
from tests.webhook import Answer, Webhook

HOOK = "hook0"
PROMETHEUS = shutil.which("prometheus")


def observing(port: int, **more: Any) -> dict[str, Any]:
    return {"observe": {"listen": f"127.0.0.1:{port}", **more}}


def test_what_relay_does_is_in_a_scrape(outbox: Outbox, tmp_path: Path) -> None:
    port = free_port()
    template = {"event_type": "cron.late", "host_id": str(host(1)), "payload": {}}
    outbox.conn.execute(
        "select relay.declare_schedule('late', %s, at => '2999-01-01')", (Jsonb(template),)
    )
    outbox.reader.execute("select relay.declare_reader('billing')")
    with Webhook() as webhook:
        config = outbox.config_file(tmp_path / "relay.yaml", **posting(webhook), **observing(port))
        with running(config) as service:
            service.wait_said("streaming")
            wait_until(lambda: outbox.value("select state from relay.sinks") == "attached")
            for number in range(20):
                outbox.publish(host(number), event(1), event(2))
            outbox.publish(host(99), event(-1))
            outbox.wait_handled()
            wait_until(lambda: len(webhook.accepted) == 41)

            def value(name: str, **labels: str) -> float | None:
                return Scrape(port).value(name, group="default", **labels)

            applied = {"engine": "inline", "outcome": "applied"}
            wait_until(lambda: value("relay_events_total", **applied) == 40)
            # These are read from the databases, every few seconds.
            wait_until(lambda: value("relay_dead_letters", handler="projection") == 1, 30)
            wait_until(lambda: value("relay_sink_attached", sink=HOOK) == 1, 30)
            wait_until(lambda: value("relay_target_lag_events") == 0, 30)
            wait_until(lambda: value("relay_schedule_missed", schedule="late") == 0, 30)
            wait_until(lambda: (value("relay_reader_lag_seconds", reader="billing") or 0) > 0, 30)
            assert value("relay_reader_given_up", reader="billing") == 0
            found = Scrape(port)
            assert value("relay_transactions_total", engine="inline") == 21
            fault = "CheckViolation 23514"
            assert value("relay_dead_lettered_total", handler="projection", fault=fault) == 1
            assert value("relay_deliveries_total", sink=HOOK, result="confirmed") == 21
            assert value("relay_deliveries_total", sink=HOOK, result="failed") == 0
            assert value("relay_delivered_latency_seconds_count", sink=HOOK) == 21
            assert 0 < (value("relay_applied_latency_seconds_sum") or 0) < 60
            assert (value("relay_handler_duration_seconds_count", handler="projection") or 0) > 0
            assert value("relay_source_mode", mode="wal") == 1
            assert value("relay_slot_active") == value("relay_live") == value("relay_ready") == 1
            assert value("relay_instances") == 1
            assert used(DASHBOARD.read_text() + RULES.read_text()) <= found.names
            assert service.terminate() == 0


def test_the_history_that_the_console_draws(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "PROBE_SECONDS", 0.1)
    monkeypatch.setattr(history, "SAMPLE_SECONDS", 0.2)
    kept, began = history.of("default"), time.time()

    def last() -> history.Sample | None:
        return kept.samples(began)[-1] if kept.samples(began) else None

    with relaying(outbox.settings(**observing(0))):
        outbox.publish(host(1), event(1), event(2))
        wait_until(lambda: (found := last()) is not None and "dead_letters" in found.values)
        wait_until(lambda: (found := last()) is not None and found.values["events_total"] == 2)
    found = last()
    assert found is not None
    assert found.values.keys() <= history.VALUES.keys()
    assert all(values.keys() <= history.SINK_VALUES.keys() for values in found.sinks.values())
    assert {"lag_bytes", "lag_events", "dead_letters", "deferred"} <= found.values.keys()


@pytest.mark.rare
def test_a_taken_port_is_one_line(outbox: Outbox, tmp_path: Path) -> None:
    with running(
        outbox.config_file(tmp_path / "one.yaml", **observing(port := free_port()))
    ) as one:
        wait_until(lambda: is_good(port, "/livez"))
        config = outbox.config_file(tmp_path / "two.yaml", **observing(port))
        result = relay("run", "--config", str(config))
        assert result.returncode == 2
        (line,) = [each for each in result.stderr.splitlines() if each.startswith("relay: ")]
        assert f"observe.listen: cannot listen on 127.0.0.1:{port}: " in line
        assert one.terminate() == 0


@contextmanager
def prometheus(folder: Path, target: int) -> Iterator[int]:
    """A Prometheus that scrapes a port of this machine, with relay's rules; gives its own port."""
    port = free_port()
    file = folder / "prometheus.yml"
    job = {"job_name": "relay", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
    intervals = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    file.write_text(
        yaml.safe_dump({"global": intervals, "rule_files": [str(RULES)], "scrape_configs": [job]})
    )
    assert PROMETHEUS is not None
    command = [PROMETHEUS, f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
        )
    try:
        yield port
    finally:
        process.terminate()
        process.wait(20)


def query(port: int, path: str) -> Any:
    try:
        with urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=60) as answer:
            return json.load(answer)["data"]
    except OSError:
        return None


@pytest.mark.rare
@pytest.mark.skipif(PROMETHEUS is None, reason="Debian's package prometheus is not installed")
def test_a_real_prometheus_scrapes_relay_and_evaluates_its_rules(
    outbox: Outbox, tmp_path: Path
) -> None:
    port = free_port()
    config = outbox.config_file(tmp_path / "relay.yaml", **observing(port))
    with running(config) as service, prometheus(tmp_path, port) as server:
        service.wait_said("streaming")
        outbox.publish(host(1), event(1), event(2), event(3))
        outbox.publish(host(2), event(-1))

        def value(expression: str) -> list[str]:
            found = query(server, f"query?query={quote(expression)}")
            return [each["value"][1] for each in found["result"]] if found else []

        wait_until(lambda: value('up{job="relay"}') == ["1"])
        wait_until(lambda: value('sum(relay_events_total{outcome="applied"})') == ["3"])
        wait_until(lambda: value("max(relay_ready)") == ["1"])
        metadata = query(server, "metadata")
        # In OpenMetrics a counter's family has no suffix.
        names = {name.removesuffix("_total") for name in metadata}
        assert {name.removesuffix("_total") for name in used(DASHBOARD.read_text())} <= names
        for panel in json.loads(DASHBOARD.read_text())["panels"]:
            for target in panel.get("targets", []):
                text = target["expr"].replace("$__rate_interval", "1m").replace("$group", ".*")
                assert query(server, f"query?query={quote(text)}") is not None, text
        rules = query(server, "rules")["groups"][0]["rules"]
        assert {each["health"] for each in rules} <= {"ok", "unknown"}
        assert service.terminate() == 0


@pytest.mark.rare
def test_a_sink_that_is_down_is_reported_and_makes_relay_neither_dead_nor_unready(
    outbox: Outbox, tmp_path: Path
) -> None:
    port = free_port()
    with Webhook() as webhook:
        webhook.answers = lambda *_: Answer(503)
        given = posting(webhook, circuit_breaker={"failures": 2})
        config = outbox.config_file(tmp_path / "relay.yaml", **given, **observing(port))
        with running(config) as service:
            service.wait_said("streaming")
            for number in range(9):
                outbox.publish(host(number), event(1))
            wait_until(lambda: Scrape(port).value("relay_sink_breaker_open", sink=HOOK) == 1, 30)
            wait_until(lambda: Scrape(port).value("relay_sink_down", sink=HOOK) == 1, 30)
            assert (Scrape(port).value("relay_deliveries_total", result="failed") or 0) > 0
            assert ask(port, "/livez").status == ask(port, "/readyz").status == 200
            output = ask(port, "/healthz")
            assert output.status == 200
            assert f"default: sink {HOOK}: note: nothing is delivered: " in output.text
            assert service.terminate() == 0
