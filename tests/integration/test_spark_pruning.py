"""A Spark sink reads the columns that its query needs, and no others, wherever the plan tells them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from relay.spark import frames, pruning
from relay.spark.session import Session
from tests.integration.test_spark_handler import files, lake, relayed, written_all
from tests.outbox import Outbox, event, host, wait_until

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

NAMES = ("id", "host_id", "event_type", "payload", "c_offset")


def none(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The function on the executors, which no test runs."""
    yield from batches


@pytest.fixture
def spark(spark_session: Session) -> SparkSession:
    session = spark_session.get(timeout=120)
    assert session is not None
    return session.newSession()


@pytest.fixture
def events(spark: SparkSession) -> DataFrame:
    frame = spark.range(0, 4, 1, 2).mapInArrow(none, ", ".join(f"{each} string" for each in NAMES))
    frame.createOrReplaceTempView("events")
    return frame


QUERIES: dict[str, set[str] | None] = {
    "select id, event_type from events": {"id", "event_type"},
    "select upper(id) as i from events where event_type = 'x'": {"id", "event_type"},
    "select host_id, count(*) as n from events group by host_id": {"host_id"},
    "select count(*) as n from events": set(),
    "select a.id from events a join events b on a.id = b.host_id": {"id", "host_id"},
    "select id from events union all select payload from events": {"id", "payload"},
    "select id from events where host_id in (select id from events where payload is null)": {
        *("id", "host_id", "payload")
    },
    "select id, (select max(c_offset) from events) as m from events": {"id", "c_offset"},
    "select id, row_number() over (partition by host_id order by c_offset) as r from events": {
        *("id", "host_id", "c_offset")
    },
    "with e as (select id, payload from events) select id from e": {"id"},
    "select id from values ('a') as t(id) join events using (id)": {"id"},
    "select * from events": None,
    "select * from events where id = 'a'": None,
    "select 'a' as id": None,
}


@pytest.mark.parametrize("query", QUERIES)
def test_the_plan_of_a_query_tells_what_it_needs(
    spark: SparkSession, events: DataFrame, query: str
) -> None:
    assert pruning.needed(spark.sql(query), NAMES) == QUERIES[query]


def test_a_frame_inside_another_is_read_whole(spark: SparkSession, events: DataFrame) -> None:
    """Its jobs have the same property, and it may need what the rest of the plan does not."""
    hidden = spark.createDataFrame(events.select("payload").rdd, "id string")
    assert pruning.needed(events.select("id").union(hidden), NAMES) is None
    cached = events.select("payload").cache()
    try:
        assert pruning.needed(events.select("id").union(cached), NAMES) is None
    finally:
        cached.unpersist()


def counts(frame: Any) -> Any:
    """A function that runs a job of its own over what the query leaves out."""
    payloads = {row.payload for row in frame.select("payload").collect()}
    assert None not in payloads
    return frame.select("event_type", "aggregate_id", "xid", "date", "host_bucket")


def toast_reads(outbox: Outbox) -> int:
    """How many blocks sessions that have ended, and this one, read from where the outbox stores large values."""
    outbox.conn.execute("select pg_stat_force_next_flush()")
    return int(
        outbox.value(
            "select toast_blks_hit + toast_blks_read from pg_statio_user_tables"
            " where relname = 'outbox_message_t'"
        )
    )


CHANGES: dict[str, dict[str, Any]] = {
    "sql": {
        "sql": "select event_type, aggregate_id, xid, date, host_bucket from events where transaction_ordinal > 0"
    },
    "transform": {"transform": "tests.integration.test_spark_pruning:counts"},
    "all": {"sql": "select * from events"},
}


@pytest.mark.server(15)
@pytest.mark.parametrize("kind", CHANGES)
def test_a_sink_reads_the_columns_of_its_query(
    outbox: Outbox,
    spark_session: Session,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """No large payload is fetched for a query that leaves payloads out, and nothing that is written is missing."""
    monkeypatch.setattr(frames, "PRUNED_ROWS", 0)
    config = lake(tmp_path / "lake", partition_by=["date"], **CHANGES[kind])
    config["routes"] = [{"match": {"aggregate_id": ["a", "b"]}, "handlers": ["lake"]}]
    config["unrouted"] = "ignore" if kind == "sql" else "dead_letter"
    large = {"text": secrets.token_hex(20_000)}
    outbox.publish(host(1), event(aggregate_id="a", payload=large), event(aggregate_id="b"))
    outbox.publish(host(2), event(aggregate_id="b", payload=large))
    outbox.publish(host(2), event(aggregate_id="c", payload=large))
    outbox.publisher.execute("select pg_stat_force_next_flush()")
    before = toast_reads(outbox)
    assert before > 0
    with relayed(outbox, "inline", spark_session, **config):
        written_all(outbox)
    rows = files(tmp_path / "lake").to_pylist()
    assert sorted((row["event_type"], row["aggregate_id"]) for row in rows) == [
        ("order.placed", each) for each in "abb"
    ]
    assert {row["xid"] for row in rows} == set(
        outbox.column("select c_xid::text::bigint from outbox_message_t where aggregate_id <> 'c'")
    )
    assert {type(row["host_bucket"]) for row in rows} == {int}
    if kind == "sql":
        assert toast_reads(outbox) == before
    else:
        wait_until(lambda: toast_reads(outbox) > before)
