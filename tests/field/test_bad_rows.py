"""One row that a query or a function of a Spark sink cannot take: the others are written, and it is a dead letter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.dataset
import pytest

from relay.admin.dead_letters import DeadLetters
from relay.config.settings import Settings
from relay.spark import bad_rows
from relay.spark.session import Session
from relay.store.connections import connect
from relay.store.dead_letters.selection import DeadLetterSelection
from tests.outbox import Outbox, event, host, relaying, wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

CAST = (
    "select id, cast(get_json_object(payload, '$.amount') as decimal(18, 2)) as amount from events"
)
TRY_CAST = CAST.replace("cast(", "try_cast(")


def number(text: str) -> int:
    return int(text)


def with_udf(frame: DataFrame) -> DataFrame:
    """A function whose Python code raises for one row."""
    from pyspark.sql import functions

    amount = functions.get_json_object("payload", "$.amount")
    return frame.select("id", functions.udf(number, "int")(amount).alias("amount"))


def away(text: str) -> int:
    raise ConnectionError(text)


def with_service(frame: DataFrame) -> DataFrame:
    """A function that asks a service, which is down."""
    from pyspark.sql import functions

    return frame.select(functions.udf(away, "int")("payload").alias("amount"))


def lake(outbox: Outbox, path: Path, **more: Any) -> Settings:
    """A sink of all events."""
    given = {"type": "spark", "path": str(path), "every": 0.1, "start": "beginning", **more}
    return outbox.settings(handlers={"lake": given}, routes=[{"handlers": ["lake"]}])


def amounts(path: Path) -> list[Any]:
    found = pyarrow.dataset.dataset(path, format="parquet").to_table()
    return sorted(map(str, found["amount"].to_pylist()))


def dead(outbox: Outbox) -> list[tuple[str, str]]:
    rows = outbox.conn.execute(
        "select payload::jsonb->>'amount', exception from relay.dead_letter_queue where status = 'dead' order by 1"
    )
    return rows.fetchall()


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ({"sql": CAST}, "CAST_INVALID_INPUT: sqlstate 22018: in cast("),
        (
            {
                "sql": "select id, 1 / cast(get_json_object(payload, '$.amount') as int) as amount from events"
            },
            "DIVIDE_BY_ZERO",
        ),
        ({"transform": f"{__name__}:with_udf"}, "ValueError (" + __file__),
    ],
    ids=["cast", "division", "udf"],
)
def test_the_others_are_written(
    outbox: Outbox,
    spark_session: Session,
    tmp_path: Path,
    query: dict[str, str],
    fault: str,
) -> None:
    """One value that could not be converted stopped a sink or failed a whole batch, or was left out and not kept.

    databricks/iceberg-kafka-connect#152, apache/iceberg#12759, #15032 and #16876, apache/beam#21247,
    logstash-plugins/logstash-output-google_bigquery#5 and #44, mozilla/gcp-ingestion#353, dlt-hub/dlt#1980,
    ClickHouse/flink-connector-clickhouse#105, databricks-industry-solutions/pixels#205, pipelinedb/pipelinedb#1995
    """
    bad: Any = 0 if "1 /" in str(query) else "n/a"
    settings = lake(outbox, tmp_path, **query)
    outbox.install_again(settings)
    for each in (1, 2, bad, 3):
        outbox.publish(host(1), event(each))
    with relaying(settings, spark_session):
        outbox.wait_delivered("lake", 120)
        ((value, exception),) = dead(outbox)
        outbox.publish(host(1), event(4))
        outbox.wait_delivered("lake", 120)
    assert value == str(bad)
    assert fault in exception
    assert len(amounts(tmp_path)) == 4
    assert outbox.column("select deaths from relay.brakes") == []


def test_a_row_is_written_by_a_replay_once_the_query_is_mended(
    outbox: Outbox, spark_session: Session, tmp_path: Path
) -> None:
    """A row that was refused could not be written later: databricks/iceberg-kafka-connect#233, dlt-hub/dlt#1980."""
    settings = lake(outbox, tmp_path, sql=CAST)
    outbox.install_again(settings)
    for each in ("n/a", 1):
        outbox.publish(host(1), event(each))

    def replay() -> None:
        with connect(settings.target_dsn) as conn:
            letters = DeadLetters(settings, conn)
            letters.replay(letters.find(DeadLetterSelection(), ["dead"]), "mended")

    with relaying(settings, spark_session):
        outbox.wait_delivered("lake", 120)
        assert [value for value, _ in dead(outbox)] == ["n/a"]
        # Not mended yet: it is dead again, and keeps nothing else from being written.
        replay()
        outbox.publish(host(1), event(2))
        outbox.wait_delivered("lake", 120)
        assert [value for value, _ in dead(outbox)] == ["n/a"]
    replay()
    with relaying(lake(outbox, tmp_path, sql=TRY_CAST), spark_session):
        outbox.wait_delivered("lake", 120)
        wait_until(lambda: not dead(outbox))
    assert amounts(tmp_path) == ["1.00", "2.00", "None"]


@pytest.mark.parametrize(
    ("more", "values", "brake", "fault"),
    [
        ({"transform": f"{__name__}:with_service"}, [1], 100, "ConnectionError"),
        ({"sql": CAST, "on_bad_row": "stop"}, [1, "n/a"], 100, "CAST_INVALID_INPUT"),
        (
            {"sql": CAST},
            ["n/a"] * 3,
            100,
            "more than 2 commits of a batch fail with NumberFormatException: CAST_INVALID",
        ),
        ({"sql": CAST}, ["n/a", "n/a"], 1, "more than 1 transactions in a row"),
    ],
    ids=["outage", "stop", "many", "brake"],
)
def test_what_is_not_of_single_rows_stops_the_sink(
    outbox: Outbox,
    spark_session: Session,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: dict[str, Any],
    values: list[Any],
    brake: int,
    fault: str,
) -> None:
    """Bad rows without a limit hid a broken load: bruin-data/ingestr#1147, googleapis/nodejs-bigquery#329."""
    monkeypatch.setattr(bad_rows, "MOST", 2)
    settings = lake(outbox, tmp_path, **more).model_copy(
        update={"dead_letters": outbox.settings(dead_letters={"brake": brake}).dead_letters}
    )
    outbox.install_again(settings)
    for each in values:
        outbox.publish(host(1), event(each))
    with relaying(settings, spark_session):
        shown = "select coalesce(max(fault), '') from relay.sinks where sink = 'lake'"
        wait_until(lambda: fault in outbox.value(shown), 120)
    assert dead(outbox) == []


@pytest.mark.parametrize("seed", range(20))
def test_all_that_fail_are_found_and_no_other(seed: int) -> None:
    chance = random.Random(seed)
    items = list(range(chance.choice((1, 2, 100, 1_000))))
    bad = set(chance.sample(items, min(len(items), chance.choice((0, 1, 5, bad_rows.MOST)))))
    tries = 0

    def fault_of(wanted: Sequence[bad_rows.Item]) -> Exception | None:
        nonlocal tries
        tries += 1
        return ValueError() if bad.intersection(wanted) else None

    assert {item for item, _ in bad_rows.find(items, fault_of)} == bad
    assert tries <= 2 + 2 * len(bad) * (len(items).bit_length() + 1)


def test_more_than_the_most_are_refused_and_what_each_try_has_is_nobodys() -> None:
    with pytest.raises(bad_rows.TooManyRefused):
        bad_rows.find(range(100), lambda wanted: ValueError() if wanted else None)
    assert bad_rows.find(range(100), lambda _: ValueError()) == []
