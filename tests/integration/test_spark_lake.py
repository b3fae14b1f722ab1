"""Writers of Delta, Iceberg and PostgreSQL tables: a batch that is written again, or by two drivers, is there once."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog

from relay.config.handlers import SparkHandler
from relay.faults import ConfigurationError
from relay.spark.session import Session
from relay.spark.writers import BatchId, Writer, delta_files, writer
from tests.outbox import Outbox

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = "id string, host_id string, date date, event_ts timestamp, amount bigint, payload string"
MOMENT = datetime(2026, 11, 23, 1, 2, 3, 4, tzinfo=UTC)

Row = tuple[Any, ...]


@pytest.fixture
def spark(spark_session: Session) -> SparkSession:
    session = spark_session.get(timeout=120)
    assert session is not None
    return session


class Lake:
    """A destination, its writer, and what is in it."""

    def __init__(self, settings: dict[str, Any], ids: Callable[[], list[str]]) -> None:
        self.settings = settings
        self.ids = ids

    def writer(self, **more: Any) -> Writer:
        configured = SparkHandler.model_validate({"type": "spark", **self.settings, **more})
        return writer("lake", configured)


@pytest.fixture(
    params=[
        "delta",
        pytest.param("iceberg", marks=pytest.mark.rare),
        pytest.param("jdbc", marks=pytest.mark.rare),
    ]
)
def lake(request: pytest.FixtureRequest, tmp_path: Path, outbox: Outbox) -> Lake:
    if request.param == "delta":
        path = tmp_path / "lake"

        def delta_ids() -> list[str]:
            found = deltalake.DeltaTable(path).to_pyarrow_table(columns=["id"])
            return sorted(found["id"].to_pylist())

        return Lake({"path": str(path), "format": "delta", "partition_by": ["host_id"]}, delta_ids)
    if request.param == "iceberg":
        options = iceberg_options(tmp_path)

        def iceberg_ids() -> list[str]:
            table = load_catalog("relay", **options).load_table("shop.events")
            return sorted(table.scan(selected_fields=("id",)).to_arrow()["id"].to_pylist())

        settings = {"table": "shop.events", "format": "iceberg", "options": options}
        return Lake({**settings, "partition_by": ["host_id"]}, iceberg_ids)
    outbox.conn.execute(
        "create table lake (id text, host_id text, date date, event_ts timestamptz, amount bigint, payload jsonb)"
    )
    return Lake(
        {"jdbc": {"dsn": outbox.lake_dsn, "table": "public.lake"}},
        lambda: outbox.column("select id from lake order by id"),
    )


def iceberg_options(folder: Path) -> dict[str, str]:
    (folder / "warehouse").mkdir(exist_ok=True)
    return {
        "type": "sql",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": f"file://{folder}/warehouse",
    }


def rows(prefix: str, count: int = 4) -> list[Row]:
    payload = '{"text": "a \\"quoted\\" é, \\\\n"}'
    return [
        (f"{prefix}{n}", ["h/1", "", None, "ü=2"][n % 4], date(2026, 11, n + 1), MOMENT, n, payload)
        for n in range(count)
    ]


def frame_of(spark: SparkSession, found: list[Row], batch: BatchId) -> DataFrame:
    from pyspark.sql import functions

    made = spark.createDataFrame(found, SCHEMA).repartition(2)
    return made.withColumn("relay_batch", functions.lit(batch.id))


def batch_of(application: str, number: int) -> BatchId:
    return BatchId(application, number, str(uuid4()))


def test_a_batch_is_there_once_however_often_it_is_written(spark: SparkSession, lake: Lake) -> None:
    application, other = str(uuid4()), str(uuid4())
    first, second = batch_of(application, 1), batch_of(application, 2)
    wanted: list[str] = []
    for batch, prefix in ((first, "a"), (first, "a"), (second, "b"), (first, "a"), (second, "b")):
        lake.writer().check(spark)
        lake.writer().write(frame_of(spark, rows(prefix), batch), batch)
        if f"{prefix}0" not in wanted:
            wanted += [f"{prefix}{n}" for n in range(4)]
        assert lake.ids() == sorted(wanted)
    # Another application counts for itself.
    third = batch_of(other, 1)
    lake.writer().write(frame_of(spark, rows("c"), third), third)
    assert lake.ids() == sorted([*wanted, "c0", "c1", "c2", "c3"])


def test_a_batch_that_fails_before_it_is_committed_leaves_nothing(
    spark: SparkSession, lake: Lake
) -> None:
    first, second = batch_of(str(uuid4()), 1), batch_of(str(uuid4()), 1)
    lake.writer().write(frame_of(spark, rows("a"), first), first)
    broken = frame_of(spark, rows("b"), second).selectExpr(
        "id", "host_id", "date", "event_ts", "payload", "relay_batch",
        "if(amount = 3, raise_error('the executor fails'), amount) as amount",
    )  # fmt: skip
    with pytest.raises(Exception, match="the executor fails"):
        lake.writer().write(broken, second)
    assert lake.ids() == ["a0", "a1", "a2", "a3"]
    lake.writer().write(frame_of(spark, rows("b"), second), second)
    assert len(lake.ids()) == 8


def test_a_driver_that_was_paused_commits_nothing(
    spark: SparkSession, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have read that the batch is not there; the second commits while the first still writes its files."""
    application = str(uuid4())
    first, second = batch_of(application, 1), batch_of(application, 2)
    lake.writer().write(frame_of(spark, rows("a"), first), first)
    from pyspark.sql.classic.dataframe import DataFrame as Classic

    collect = Classic.collect
    pauses = [True]

    def late(self: Any) -> Any:
        found = collect(self)
        if pauses:
            pauses.clear()
            lake.writer().write(frame_of(spark, rows("b"), second), second)
        return found

    monkeypatch.setattr(Classic, "collect", late)
    lake.writer().write(frame_of(spark, rows("b"), second), second)
    assert not pauses
    assert lake.ids() == ["a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3"]


def test_a_batch_without_rows_is_one(spark: SparkSession, lake: Lake) -> None:
    application = str(uuid4())
    first, second = batch_of(application, 1), batch_of(application, 2)
    lake.writer().write(frame_of(spark, [], first), first)
    lake.writer().write(frame_of(spark, rows("b"), second), second)
    lake.writer().write(frame_of(spark, rows("a"), first), first)
    assert lake.ids() == ["b0", "b1", "b2", "b3"]


def test_values_of_a_delta_table(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "lake"
    lake = Lake({"path": str(path), "format": "delta", "partition_by": ["date", "host_id"]}, list)
    batch = batch_of(str(uuid4()), 1)
    lake.writer().write(frame_of(spark, rows("a"), batch), batch)
    table = deltalake.DeltaTable(path)
    found = table.to_pyarrow_table().sort_by("id").to_pylist()
    assert [
        tuple(row[name] for name in ("id", "date", "event_ts", "amount", "payload"))
        for row in found
    ] == [(each[0], *each[2:]) for each in rows("a")]
    # An empty partition value is null in Delta's log.
    assert [row["host_id"] for row in found] == ["h/1", None, None, "ü=2"]
    assert table.to_pyarrow_table(filters=[("amount", ">", 2)]).num_rows == 1
    actions = pa.table(table.get_add_actions(flatten=True))
    assert sum(actions["num_records"].to_pylist()) == 4
    assert {row["relay_batch"] for row in found} == {batch.id}


def test_a_table_of_the_users_is_appended_to_or_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = tmp_path / "mine"
    mine = pa.table({"id": ["1"], "amount": pa.array([7], pa.int64())})
    deltalake.write_deltalake(path, mine)
    lake = Lake({"path": str(path), "format": "delta", "partition_by": []}, list)
    batch = batch_of(str(uuid4()), 1)
    with pytest.raises(ConfigurationError, match="has no column host_id: run `alter table"):
        lake.writer().write(frame_of(spark, rows("a"), batch), batch)
    wide = frame_of(spark, rows("a"), batch)
    with pytest.raises(
        ConfigurationError, match="column amount is int64 and the batch's is string"
    ):
        lake.writer().write(wide.selectExpr("id", "string(amount) as amount"), batch)
    lake.writer().write(wide.select("id", "amount"), batch)
    found = deltalake.DeltaTable(path).to_pyarrow_table().sort_by("id").to_pylist()
    assert [row["id"] for row in found] == ["1", "a0", "a1", "a2", "a3"]


def test_a_postgresql_table_that_does_not_fit_is_refused(
    spark: SparkSession, outbox: Outbox
) -> None:
    batch = batch_of(str(uuid4()), 1)
    lake = Lake({"jdbc": {"dsn": outbox.lake_dsn, "table": "public.nowhere"}}, list)
    with pytest.raises(ConfigurationError, match="there is no table public"):
        lake.writer().check(spark)
    outbox.conn.execute("create table nowhere (id text)")
    with pytest.raises(ConfigurationError, match="has no column host_id"):
        lake.writer().write(frame_of(spark, rows("a"), batch), batch)
    assert outbox.value("select count(*) from nowhere") == 0
    left = "select count(*) from pg_class where starts_with(relname, 'relay_') and relpersistence = 'u'"
    assert outbox.value(left) == 0


def test_long_values_of_a_partition_are_no_names_of_folders(tmp_path: Path) -> None:
    """A folder's name may have 255 bytes; a publisher cannot stop the sink with a longer text."""
    schema = pa.schema([("id", pa.string()), ("kind", pa.string())])
    kinds = ["x" * 300, "x" * 301, "../..", "a/b=c%20", " "]
    rows = pa.RecordBatch.from_pydict({"id": list("abcde"), "kind": kinds}, schema=schema)
    files = delta_files.BatchFiles(str(tmp_path / "table"), {}, schema, ["kind"], "b")
    (facts,) = delta_files.write_files(files, iter([rows]))
    found = {
        json.loads(fact["partition_values"])["kind"]: pq.read_table(
            str(tmp_path / "table" / fact["path"]), partitioning=None
        )["id"].to_pylist()
        for fact in facts.to_pylist()
    }
    assert found == dict(zip(kinds, [["a"], ["b"], ["c"], ["d"], ["e"]], strict=True))
