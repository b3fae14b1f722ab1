"""A stop that reaches every process of relay: systemd's `KillMode=control-group`, Ctrl-C, `kill -- -PGID`.

Java and the Python workers get the signal too, so Spark ends before relay does.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import psycopg
import pytest
from psycopg.types.json import Jsonb

from relay.runtime.threads import beside
from tests.integration.test_spark_handler import files, lake
from tests.outbox import Outbox, event, host, wait_until
from tests.process import running

pytestmark = [pytest.mark.timeout(600)]


def published(outbox: Outbox) -> Any:
    """Publish all the time."""

    def publish(stop: Event) -> None:
        number = 0
        with psycopg.connect(outbox.publisher_dsn, autocommit=True) as conn:
            while not stop.wait(0.05):
                number += 1
                events = [event(number) for _ in range(20)]
                conn.execute(
                    "select relay.publish(%s, null, %s)", (host(number % 9), Jsonb(events))
                )

    return beside(publish, "publisher")


def signal_all(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to a process and to all that it has started."""
    for each in (*process.children(recursive=True), process):
        with suppress(psutil.NoSuchProcess):
            each.send_signal(number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.rare
def test_relay_ends_with_spark_and_says_nothing(
    outbox: Outbox, tmp_path: Path, number: signal.Signals
) -> None:
    file = outbox.config_file(
        tmp_path / "relay.yaml",
        **lake(tmp_path / "lake", every=0.05),
        spark={"master": "local[2]"},
        batch={"inline_max_events": 0},
    )
    with running(file) as service:
        with published(outbox):
            wait_until(
                lambda: service.said("wrote a batch with Spark") and outbox.handled() > 200, 120
            )
            mark = service.log.stat().st_size
            signal_all(psutil.Process(service.process.pid), number)
            status = service.process.wait(30)
        said = service.log.read_text()[mark:]
    assert status == 0
    assert "Traceback" not in said
    assert "rebuilding" not in said
    assert [line for line in said.splitlines() if '"level": "error"' in line] == []
    with running(file) as service:
        outbox.wait_drained(180)
        outbox.wait_delivered("lake", 120)
        assert service.terminate() == 0
    outbox.assert_exact()
    found = files(tmp_path / "lake")["id"].to_pylist()
    assert sorted(found) == sorted(outbox.column("select id::text from outbox_message_t"))
