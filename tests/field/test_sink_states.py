"""What is shown of a sink is what it does: whether it is down or worked at all, what it has delivered, how far it is.

Public reports: contribsys/faktory#37, littlehorse-enterprises/littlehorse#2427 (a stopped worker is still listed as
connected), HumanCellAtlas/data-store#2255, NangoHQ/nango#6912, Vexa-ai/vexa#841 (what was delivered and what failed is
nowhere to be seen).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from relay.admin import sinks
from relay.cli.app import app
from relay.config.settings import Settings
from relay.delivery import checkpoint
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.webhook import Answer, Webhook


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was attempted is stored at once."""
    monkeypatch.setattr(checkpoint, "ACTIVITY_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint, "STORE_SECONDS", 0.1)


def posting(webhook: Webhook, **more: Any) -> dict[str, Any]:
    """A configuration with one sink."""
    url = webhook.url.replace("http://", "http://anna:s3cret@") + "?token=t0ken"
    hook = {"type": "http", "url": url, "retry": {"wait": 60, "defer_after": 0}, **more}
    return {"handlers": {"hook": hook}, "routes": [{"handlers": ["hook"]}]}


def shown(settings: Settings) -> sinks.SinkStatus:
    """The sink, as `relay sink list` shows it."""
    (found,) = sinks.listed(settings)
    return found


def test_a_sink_says_what_it_does(outbox: Outbox, tmp_path: Path) -> None:
    with Webhook() as webhook:
        overrides = posting(webhook, circuit_breaker={"failures": 3, "cool_down": 1})
        settings = outbox.settings(sinks={"attach_seconds": 0.5}, **overrides)
        with relaying(settings):
            for number in range(5):
                outbox.publish(host(number), event(number))
            wait_until(lambda: len(webhook.accepted) == 5)
            wait_until(
                lambda: (recent := shown(settings).recent) is not None and recent.confirmed == 5
            )
            wait_until(lambda: shown(settings).state == "attached")
            webhook.answers = lambda headers, body: Answer(503)
            for number in range(8):
                outbox.publish(host(number), event(number))
            wait_until(
                lambda: (
                    (found := shown(settings)).state == "down"
                    and found.recent is not None
                    and found.recent.failed >= 3
                )
            )
            found = shown(settings)
            assert found.recent is not None
            assert found.recent.confirmed == 5
            assert found.recent.fault == found.fault == "Undelivered: HTTP 503"
            assert found.recent.mean_seconds is not None
            webhook.answers = lambda headers, body: Answer()
        assert shown(settings).state == "not running"
        config = outbox.config_file(tmp_path / "relay.yaml", **overrides)
        printed = CliRunner().invoke(app, ["sink", "list", "--config", str(config)]).stdout
        assert "s3cret" not in printed
        assert "t0ken" not in printed
        assert f"http {webhook.url.partition('//')[2].partition('/')[0]}" in printed


def test_a_backlog_says_how_long_it_takes(outbox: Outbox) -> None:
    with Webhook() as webhook:
        settings = outbox.settings(
            sinks={"attach_seconds": 0.5}, **posting(webhook, concurrency=1, rate_limit=100)
        )
        outbox.fill(600, events=1)
        with relaying(settings):
            wait_until(lambda: 0 < (shown(settings).seconds_left or 0) < 30, 20)
