"""Durations, and the beginnings of ranges."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from pydantic import ValidationError

from relay.config.settings import RetentionSettings, Settings
from relay.config.types import duration, written
from relay.model.events import FIELDS
from relay.retention.partitions import aligned
from relay.retention.restoration import unfit
from relay.spark.session import Session
from relay.spark.sink_worker import SparkWorker


@pytest.mark.parametrize(
    ("text", "seconds"), [("30m", 1800), ("6h", 21600), ("7d", 604800), ("2w", 1209600)]
)
def test_durations(text: str, seconds: int) -> None:
    assert duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["30m", "90m", "6h", "36h", "7m", "1d", "10d", "2w"])
def test_a_duration_is_written_as_it_is_read(text: str) -> None:
    assert written(duration(text)) == text


@pytest.mark.parametrize("text", ["", "0d", "7", "-1d", "1y", "1.5d", 7, None])
def test_what_is_no_duration(text: object) -> None:
    with pytest.raises(ValueError, match="30m, 6h, 7d, 2w"):
        duration(text)


def test_ranges_begin_at_midnight_in_utc_whatever_the_clocks_do() -> None:
    day = timedelta(days=1)
    zurich = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Zurich"))
    assert aligned(zurich.astimezone(UTC), day) == datetime(2026, 10, 25, tzinfo=UTC)
    assert aligned(datetime(2026, 11, 23, 23, 59, tzinfo=UTC), day / 4) == datetime(
        2026, 11, 23, 18, tzinfo=UTC
    )
    # Weeks begin on Mondays, before the year 2000 too.
    assert aligned(datetime(2026, 11, 26, tzinfo=UTC), 7 * day) == datetime(
        2026, 11, 23, tzinfo=UTC
    )
    assert aligned(datetime(1999, 12, 30, tzinfo=UTC), 7 * day) == datetime(
        1999, 12, 27, tzinfo=UTC
    )


def test_an_archive_is_a_spark_sink() -> None:
    with pytest.raises(ValidationError, match=r"'lake' is not a handler of type: spark"):
        Settings.model_validate({"retention": {"archive": "lake"}})


def test_a_table_of_the_present_is_no_archive() -> None:
    """Retention would remove the events of which the table keeps only the newest of each key."""
    present = {
        "type": "spark",
        "format": "delta",
        "path": "lake",
        "mode": "upsert",
        "key": ["aggregate_id"],
    }
    with pytest.raises(ValidationError, match="'lake' has mode: upsert, which keeps one event"):
        Settings.model_validate({"handlers": {"lake": present}, "retention": {"archive": "lake"}})


def test_an_archive_begins_with_what_the_outbox_has() -> None:
    """Retention counted what was older than the sink as written, and removed it."""
    lake = {"type": "spark", "path": "lake"}
    given = {"handlers": {"lake": lake}, "retention": {"archive": "lake"}}
    with pytest.raises(ValidationError, match=r"'lake' has start: now, .*: set start: beginning"):
        Settings.model_validate(given)
    Settings.model_validate({**given, "handlers": {"lake": {**lake, "start": "beginning"}}})


@pytest.mark.parametrize(
    ("sink", "columns", "why"),
    [
        ({}, None, None),
        ({"sql": "select * from events where host_bucket < 4"}, None, None),
        ({"sql": f"select {', '.join(FIELDS)} from events"}, None, None),
        (
            {"sql": f"SELECT {', '.join(FIELDS[1:])}, upper(event_type) FROM events"},
            None,
            "handlers.lake: its sql or transform leaves out id, and relay could not restore events",
        ),
        # Only the result tells.
        ({"sql": "select * except (payload) from events"}, None, None),
        ({"transform": "json:dumps"}, None, None),
        (
            {"transform": "json:dumps"},
            [each for each in FIELDS if each not in ("payload", "metadata")],
            "handlers.lake: its sql or transform leaves out payload, metadata, and relay could not",
        ),
        ({"format": "csv"}, None, "handlers.lake: relay restores only from a path in the format"),
    ],
)
def test_an_archive_that_could_not_be_restored_is_named_before_events_are_removed(
    caplog: pytest.LogCaptureFixture,
    sink: dict[str, str],
    columns: list[str] | None,
    why: str | None,
) -> None:
    """`relay restore` refused it, years later."""
    settings = Settings.model_validate(
        {
            "group": "shop",
            "source": {"dsn": "dbname=shop"},
            "handlers": {"lake": {"type": "spark", "path": "/lake", "start": "beginning", **sink}},
            "routes": [{"handlers": ["lake"]}],
            "retention": {"keep": "7d", "archive": "lake"},
        }
    )
    found = unfit(settings, columns)
    assert (found is None) == (why is None)
    assert str(found).startswith(str(why))
    if columns is None:
        return
    worker = SparkWorker("lake", settings, Session(settings.spark))
    for _ in range(2):
        worker._warn_of_archive(columns)
    (record,) = caplog.records
    assert record.getMessage() == f"retention.archive: {found}"


def test_extra_columns_belong_into_an_archive() -> None:
    settings = Settings.model_validate(
        {
            "source": {"headers": ["region"]},
            "handlers": {"lake": {"type": "spark", "path": "/lake", "start": "beginning"}},
            "retention": {"archive": "lake"},
        }
    )
    assert unfit(settings) is None
    assert "leaves out headers, and" in str(unfit(settings, FIELDS))


def test_a_table_that_is_left_untouched_has_no_retention() -> None:
    with pytest.raises(ValidationError, match=r"retention\.keep: source\.mode: wal"):
        Settings.model_validate(
            {"source": {"mode": "wal", "table": "shop.events"}, "retention": {"keep": "7d"}}
        )


def test_letters_are_kept_for_a_day_at_least() -> None:
    with pytest.raises(ValidationError):
        RetentionSettings.model_validate({"keep_letters": "1h"})
