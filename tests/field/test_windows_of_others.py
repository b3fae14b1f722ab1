"""Instances that share a group while one of them stands still: the others back off, and every log says why.

Issue 28, F.21: for 50 seconds two instances planned the same window of 12,124 events six times a second and logged
"relayed events=715316 applied=0", and the third held it without a word.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import psycopg
import pytest

from relay.observe import batch_log, long_tasks
from relay.source.polling import LONGEST_BUSY_SECONDS, Poller
from tests.outbox import Outbox, event, host, relaying, wait_until


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_window_that_another_instance_holds_is_not_planned_again_and_again(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "relay")
    monkeypatch.setattr(batch_log.Summary.__init__, "__defaults__", (0.2,))
    planned: list[float] = []
    begin = Poller._begin

    def counted(self: Poller, opening: bool) -> Any:
        planned.append(time.monotonic())
        return begin(self, opening)

    monkeypatch.setattr(Poller, "_begin", counted)
    settings = outbox.settings(source={**outbox.config()["source"], "mode": "poll"})
    with relaying(settings):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
    caplog.clear()
    with psycopg.connect(outbox.superuser_dsn) as other:
        other.execute("select from relay.group_partitions for update")
        for number in range(20):
            outbox.publish(host(number), event(number))
        with relaying(settings):
            wait_until(lambda: "other instances apply what is polled" in messages(caplog))
            # The pauses between plans grow up to their limit.
            wait_until(
                lambda: len(planned) > 2 and planned[-1] - planned[-2] >= LONGEST_BUSY_SECONDS
            )
            assert "relayed" not in messages(caplog)
            other.rollback()
            outbox.wait_handled()
    outbox.assert_exact()


def test_a_task_that_waits_says_for_what(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "relay")
    monkeypatch.setattr(long_tasks, "LONG_SECONDS", 0.4)
    settings = outbox.settings(source={**outbox.config()["source"], "mode": "poll"})
    with psycopg.connect(outbox.superuser_dsn, application_name="a report") as other:
        other.execute("lock table projection in exclusive mode")
        outbox.publish(host(1), event(1))
        with relaying(settings):
            wait_until(lambda: "a task is in flight for long" in messages(caplog))
            other.rollback()
            outbox.wait_handled()
            wait_until(lambda: "a task that was in flight for long has ended" in messages(caplog))
    (line,) = [
        vars(record)
        for record in caplog.records
        if record.getMessage() == "a task is in flight for long"
    ]
    assert line["waits_for"] == "Lock relation"
    assert "(a report)" in line["blocked_by"]
    assert line["handler"] == "projection"
    (end,) = [vars(each) for each in caplog.records if each.getMessage().endswith("has ended")]
    assert end["handler"] == "projection"


def test_what_is_applied_one_at_a_time_after_a_death_is_committed_in_small_windows(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """The cause of the 50 s: a window was guarded as a whole, in one commit, and the next kill undid it."""
    caplog.set_level(logging.DEBUG, "relay")
    settings = outbox.settings(
        source={**outbox.config()["source"], "mode": "poll"}, batch={"max_events": 1_200}
    )
    with relaying(settings):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
    outbox.conn.execute("update relay.groups set running = true, instances = array['gone:1']")
    outbox.fill(800, 5)
    caplog.clear()
    with relaying(settings):
        outbox.wait_handled(60)
    windows = [vars(record) for record in caplog.records if record.getMessage() == "batch"]
    guarded = [each["events"] for each in windows if each["reason"] == "guarded"]
    assert sum(guarded) < 4_000
    assert max(guarded) <= 510
    assert max(each["events"] for each in windows) > 510
    outbox.assert_exact()
