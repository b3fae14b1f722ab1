"""What executors hold while nothing is to be done."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.outbox import Outbox, wait_until
from tests.process import running

SESSIONS = "select count(*) from pg_stat_activity where application_name = 'relay' and datname = current_database()"


@pytest.mark.rare
def test_the_sessions_of_executors_are_closed_when_they_are_idle(
    outbox: Outbox, tmp_path: Path
) -> None:
    """Spark ends Python workers that are idle for a minute, and with them their sessions."""
    file = outbox.config_file(
        tmp_path / "relay.yaml", batch={"inline_max_events": 0}, spark={"master": "local[4]"}
    )
    with running(file) as service:
        outbox.fill(400, hosts=64)
        outbox.wait_drained(120)
        busy = outbox.value(SESSIONS)
        wait_until(lambda: outbox.value(SESSIONS) <= busy - 4, 180, 0.5)
        # The next batch brings them back.
        outbox.fill(400, hosts=64)
        outbox.wait_drained(120)
        assert service.terminate() == 0
    outbox.assert_exact()
