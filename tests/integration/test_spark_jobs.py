"""What Spark's event log, and so its user interface, tells of relay's jobs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from relay.spark.session import Session
from tests.outbox import Outbox


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind in the log of the only application."""
    (log,) = (path for path in folder.iterdir() if not path.name.startswith("."))
    found = map(json.loads, log.read_text().splitlines())
    return [each for each in found if each["Event"].rsplit(".", 1)[-1] == kind]


def test_a_job_is_named_after_its_batch_and_its_rows_tell_what_they_carry(
    outbox: Outbox, spark_session: Session, event_log: Path
) -> None:
    known = len(events(event_log, "SparkListenerJobStart"))
    outbox.fill(50, events=4, hosts=7)
    outbox.drain(outbox.settings("spark"), spark_session)
    outbox.assert_exact()
    started = events(event_log, "SparkListenerJobStart")[known:]
    assert started
    for number, job in enumerate(started, 1):
        properties = job["Properties"]
        assert properties["spark.jobGroup.id"] == f"relay default batch {number}"
        form = (
            rf"batch {number}: [0-9,]+ events, [0-9A-F]+/[0-9A-F]+–[0-9A-F]+/[0-9A-F]+, attempt 1"
        )
        assert re.fullmatch(form, properties["spark.job.description"])
    counts = [
        re.findall(r"([0-9,]+) events", job["Properties"]["spark.job.description"])[0]
        for job in started
    ]
    assert sum(int(count.replace(",", "")) for count in counts) == 200
    plan = events(event_log, "SparkListenerSQLExecutionStart")[-1]["physicalPlanDescription"]
    for column in (
        "task",
        "partitions",
        "first_lsn",
        "last_lsn",
        "transactions",
        "events",
        "bytes",
    ):
        assert f"{column}#" in plan
    assert outbox.jobs_dsn not in plan
    assert "password" not in plan
