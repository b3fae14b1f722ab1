"""A Dagster sensor that requests one run for each day, once relay's table has all events of that day."""

import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import dagster
import psycopg

GRACE = timedelta(minutes=10)
"""How long after midnight a transaction of the day before may commit."""


def complete_before(dsn: str, sink: str, group: str = "default") -> datetime | None:
    """Return the time before which every committed event is in a sink; None where it is not known."""
    with psycopg.connect(dsn) as conn:
        row = conn.execute(
            "select complete_before from relay.watermarks where group_id = %s and reader = %s",
            (group, sink),
        ).fetchone()
    return None if row is None else row[0]


@dagster.op(config_schema={"day": str})
def revenue(context: dagster.OpExecutionContext) -> None:
    """Read the partition of a day."""
    context.log.info(f"reads the events of {context.op_config['day']}")


@dagster.job
def daily() -> None:
    """Compute the revenue of a day."""
    revenue()


@dagster.sensor(job=daily, minimum_interval_seconds=60)
def day_is_complete(
    context: dagster.SensorEvaluationContext,
) -> Iterator[dagster.RunRequest | dagster.SkipReason]:
    """Request a run for each day that has become complete since the last evaluation."""
    reached = complete_before(os.environ["OUTBOX_DSN"], "lake")
    if reached is None:
        yield dagster.SkipReason("it is not known up to when the table is complete")
        return
    today = (reached - GRACE).astimezone(UTC).date()
    day = datetime.fromisoformat(context.cursor).date() if context.cursor else today
    if day >= today:
        yield dagster.SkipReason(f"the table is complete before {reached:%Y-%m-%d %H:%M:%S %Z}")
    while day < today:
        name = day.isoformat()
        config = {"ops": {"revenue": {"config": {"day": name}}}}
        yield dagster.RunRequest(run_key=name, run_config=config)
        day += timedelta(days=1)
    context.update_cursor(today.isoformat())
