"""Which engine has applied how much, and why, as `relay status` shows it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from relay.admin.status import read
from relay.observe import engines
from relay.observe.engines import EngineCounts
from relay.spark.session import Session
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.process import relay
from tests.unit.test_batch_log import OUTCOME, batch


def applied(outbox: Outbox) -> dict[tuple[str, str], int]:
    """Events by engine and reason."""
    found: dict[tuple[str, str], int] = defaultdict(int)
    for each in read(outbox.settings()).engines:
        assert each.batches > 0
        found[each.engine, each.reason] = each.events
    return dict(found)


def test_small_and_spooled_batches_stay_in_this_process(outbox: Outbox, tmp_path: Path) -> None:
    outbox.fill(10, events=3)
    outbox.drain(outbox.settings())
    assert applied(outbox) == {("inline", "small"): 30}
    outbox.publish(host(1), *(event(note="x" * 1000) for _ in range(400)))
    outbox.drain(
        outbox.settings(batch={"max_bytes": 65_536, "spool_directory": str(tmp_path)}),
    )
    assert applied(outbox) == {("inline", "small"): 30, ("inline", "spooled"): 400}


def test_large_batches_go_to_spark_and_the_command_shows_both(
    outbox: Outbox, spark_session: Session, tmp_path: Path
) -> None:
    outbox.fill(100, events=4)
    outbox.drain(outbox.settings("spark"), spark_session)
    assert applied(outbox) == {("spark", "large"): 400}
    config = outbox.config_file(tmp_path / "relay.yaml")
    (shown,) = json.loads(relay("status", "--config", str(config), "--json").stdout)["engines"]
    assert shown["engine"] == "spark"
    assert shown["reason"] == "large"
    assert shown["events"] == 400
    assert shown["since"]
    assert "400 events since" in relay("status", "--config", str(config)).stdout


def test_without_a_session_large_batches_stay_in_this_process(outbox: Outbox) -> None:
    class Unready:
        slots = None

        def start(self) -> None:
            pass

        def get(self, timeout: float = 0.0) -> None:
            return None

        def end(self) -> None:
            pass

    outbox.fill(100, events=4)
    session: Session = Unready()  # type: ignore[assignment]
    outbox.drain(outbox.settings(batch={"inline_max_events": 1}), session)
    assert applied(outbox) == {("inline", "session not ready"): 400}


def test_guarded_batches_are_told_apart(outbox: Outbox) -> None:
    outbox.fill(20, events=2)
    outbox.conn.execute(
        "insert into relay.groups (group_id, running, instances) values (%s, true, '{elsewhere:1}')"
        " on conflict (group_id) do update set running = true, instances = '{elsewhere:1}'",
        (outbox.settings().group,),
    )
    outbox.drain(outbox.settings())
    assert applied(outbox) == {("inline", "guarded"): 40}


def test_counts_are_stored_together_and_kept_while_the_target_is_away(
    outbox: Outbox, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("DEBUG", "relay")
    monkeypatch.setattr(engines, "STORE_SECONDS", 0.01)
    group = outbox.settings().group
    away = EngineCounts("host=/nowhere dbname=none", group)
    away.start()
    away.durable(batch(1, 0), OUTCOME, 0.1)
    wait_until(lambda: "cannot write counts of the engines" in caplog.messages)
    away._dsn = outbox.relay_dsn
    wait_until(lambda: applied(outbox) == {("inline", ""): 3})
    away.close()
    counts = EngineCounts(outbox.relay_dsn, group)
    counts.start()
    for number in range(3):
        counts.durable(batch(number, 0), OUTCOME, 0.1)
    wait_until(lambda: applied(outbox) == {("inline", ""): 12})
    counts.durable(batch(4, 0), OUTCOME, 0.1)
    counts.close()
    assert applied(outbox) == {("inline", ""): 15}


def test_one_instance_adds_to_what_another_has_applied(outbox: Outbox) -> None:
    for number in range(2):
        outbox.fill(5 + number, events=1)
        with relaying(outbox.settings()):
            outbox.wait_drained()
    assert applied(outbox) == {("inline", "small"): 11}
