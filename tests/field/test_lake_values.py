"""Values and tables on which a Delta, Iceberg or PostgreSQL sink could be poisoned or stand still.

Reports: delta-io/delta#420, delta-io/delta-rs#2193, ClickHouse/ClickHouse#120521, delta-io/delta-kernel-rs#146,
delta-io/delta-rs#1535, delta-io/delta-rs#2292, apache/paimon#9188, confluentinc/kafka-connect-jdbc#327,
postgrespro/pg_pathman#24, delta-io/delta#126 and #5239, apache/iceberg#5408, trinodb/trino#16273 and
databrickslabs/overwatch#419 (names of columns that differ by case).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import deltalake
import pyarrow as pa
import pytest
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, create_table_with_add_actions
from pyiceberg.catalog import load_catalog

from relay.config.handlers import SparkHandler
from relay.faults import ConfigurationError
from relay.spark.session import Session
from relay.spark.writers import BatchId, Writer, delta_files, writer
from tests.lake import LocalFrame
from tests.outbox import Outbox

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture
def spark(spark_session: Session) -> SparkSession:
    session = spark_session.get(timeout=120)
    assert session is not None
    return session


@pytest.fixture
def executor_in_new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def writing(**settings: Any) -> Writer:
    return writer("lake", SparkHandler.model_validate({"type": "spark", **settings}))


def batch() -> BatchId:
    return BatchId(str(uuid4()), 1, str(uuid4()))


def frame_of(spark: SparkSession, *columns: str, identity: BatchId) -> DataFrame:
    return spark.range(2).selectExpr("id", *columns, f"'{identity.id}' as relay_batch")


def files_below(folder: Path) -> list[Path]:
    return list(folder.rglob("*.parquet"))


@pytest.mark.usefixtures("executor_in_new_york")
@pytest.mark.parametrize(
    ("kind", "values", "texts"),
    [
        pytest.param(
            pa.timestamp("us"),
            [datetime(2026, 1, 1, 12, 0, 0, 5), datetime(1, 1, 1)],  # noqa: DTZ001
            ["2026-01-01 12:00:00.000005", "0001-01-01 00:00:00.000000"],
            id="times without a zone",
        ),
        pytest.param(
            pa.decimal128(38, 10),
            [Decimal("0E-10"), Decimal("-1.5"), Decimal("1E-10")],
            ["0.0000000000", "-1.5000000000", "0.0000000001"],
            id="decimals",
        ),
        pytest.param(pa.date32(), [date(1, 1, 1)], ["0001-01-01"], id="dates"),
        pytest.param(pa.bool_(), [True, False], ["true", "false"], id="booleans"),
    ],
)
def test_a_partition_value_of_delta_is_read_as_it_was(
    tmp_path: Path, kind: pa.DataType, values: list[Any], texts: list[str]
) -> None:
    table = pa.table({"value": pa.array(values, kind), "id": pa.array(range(len(values)))})
    files = delta_files.BatchFiles(str(tmp_path), {}, table.schema, ["value"], "b")
    written = [
        fact
        for facts in delta_files.write_files(files, iter(table.to_batches()))
        for fact in facts.to_pylist()
    ]
    found = [json.loads(fact["partition_values"]) for fact in written]
    assert sorted(value["value"] for value in found) == sorted(texts)
    actions = [
        AddAction(fact["path"], fact["size"], value, 1, True, fact["stats"])
        for fact, value in zip(written, found, strict=True)
    ]
    schema = deltalake.Schema.from_arrow(table.schema)
    create_table_with_add_actions(str(tmp_path), schema, actions, "error", ["value"])
    query = deltalake.QueryBuilder().register("t", deltalake.DeltaTable(tmp_path))
    read = pa.table(query.execute("select value from t order by id").read_all())
    assert read["value"].to_pylist() == table["value"].to_pylist()


@pytest.mark.parametrize("column", ["binary('a') as value", "array(id) as value"])
def test_a_column_that_cannot_be_a_partition_of_delta_is_refused(
    spark: SparkSession, tmp_path: Path, column: str
) -> None:
    lake = writing(path=str(tmp_path), format="delta", sql="…", partition_by=["value"])
    identity = batch()
    with pytest.raises(ConfigurationError, match=r"lake\.partition_by: the column value is .*hex"):
        lake.write(frame_of(spark, column, identity=identity), identity)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [math.nan, -0.0])
def test_a_partition_of_iceberg_is_no_floating_point_number(
    spark: SparkSession, tmp_path: Path, value: float
) -> None:
    """NaN was retried for ever; the rows of 0.0 and of -0.0 came twice each."""
    options = {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": f"file://{tmp_path}/warehouse",
    }
    settings = {"table": "shop.events", "format": "iceberg", "options": options, "sql": "…"}
    identity = batch()
    frame = frame_of(spark, f"double('{value}') * id as value", identity=identity)
    lake = writing(**settings, partition_by=["value"])
    with pytest.raises(ConfigurationError, match="the column value is double"):
        lake.write(frame, identity)
    assert not files_below(tmp_path)
    writing(**settings, partition_by=[]).write(frame, identity)
    table = load_catalog("relay", **options).load_table("shop.events")
    assert table.scan().to_arrow().num_rows == 2


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
@pytest.mark.parametrize("name", ["ID", "id"])
def test_two_columns_of_one_name_make_no_table(tmp_path: Path, kind: str, name: str) -> None:
    """Iceberg made one with `id` and `ID`, which Spark does not read; Delta refused it once files were written."""
    settings: dict[str, Any] = {"path": str(tmp_path / "table")}
    if kind == "iceberg":
        uri, warehouse = f"sqlite:///{tmp_path}/catalog.db", f"file://{tmp_path}/warehouse"
        options = {"type": "sql", "uri": uri, "warehouse": warehouse}
        settings = {"table": "shop.events", "options": options}
    frame: Any = LocalFrame(pa.table([["a"], ["b"]], names=["id", name]))
    lake = writing(format=kind, sql="…", partition_by=[], **settings)
    with pytest.raises(ConfigurationError, match=f"the batch has the columns id and {name}, which"):
        lake.write(frame, batch())
    assert not files_below(tmp_path)


FEATURES = [
    *("appendOnly", "invariants", "checkConstraints", "changeDataFeed", "generatedColumns"),
    *("deletionVectors", "v2Checkpoint", "columnMapping", "timestampNtz", "variantType"),
    *("variantType-preview", "identityColumns", "rowTracking", "domainMetadata", "typeWidening"),
    *("icebergCompatV1", "icebergCompatV2", "vacuumProtocolCheck", "clustering"),
    *("inCommitTimestamp", "allowColumnDefaults", "checkpointProtection"),
    *("materializePartitionColumns", "collations-preview"),
]
OF_READERS = {
    *("deletionVectors", "v2Checkpoint", "columnMapping", "timestampNtz", "typeWidening"),
    *("vacuumProtocolCheck", "variantType", "variantType-preview"),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_is_refused_where_delta_rs_refuses_it(
    spark: SparkSession, tmp_path: Path, feature: str
) -> None:
    """Before any file is written: each retry left files that no commit named."""
    table_with_feature(tmp_path, feature)
    lake = writing(path=str(tmp_path), format="delta")
    refused: str | None = None
    try:
        lake.check(spark)
    except ConfigurationError as error:
        refused = str(error)
    table = deltalake.DeltaTable(tmp_path)
    action = AddAction("a.parquet", 1, {}, 1, True, '{"numRecords":1}')
    commit: Callable[[], None] = lambda: table.create_write_transaction(  # noqa: E731
        [action], "append", table.schema(), []
    )
    if refused is None:
        commit()
        return
    assert feature in refused
    assert "\n" not in refused
    with pytest.raises(DeltaError, match="Unsupported table features"):
        commit()


def table_with_feature(folder: Path, feature: str) -> None:
    schema = pa.schema([("id", pa.int64())])
    names = [feature, *(["domainMetadata"] if feature in ("rowTracking", "clustering") else [])]
    protocol = {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": names}
    if feature in OF_READERS:
        protocol |= {"minReaderVersion": 3, "readerFeatures": names}
    metadata = {
        "id": "1",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": deltalake.Schema.from_arrow(schema).to_json(),
        "partitionColumns": [],
        "configuration": {},
        "createdTime": 1,
    }
    (folder / "_delta_log").mkdir()
    log = folder / "_delta_log" / "00000000000000000000.json"
    log.write_text(f"{json.dumps({'protocol': protocol})}\n{json.dumps({'metaData': metadata})}\n")


def test_an_unsupported_table_gets_no_files(spark: SparkSession, tmp_path: Path) -> None:
    table_with_feature(tmp_path, "rowTracking")
    identity = batch()
    lake = writing(path=str(tmp_path), format="delta", sql="…")
    with pytest.raises(ConfigurationError, match="the feature domainMetadata, the feature rowTr"):
        lake.write(spark.range(2), identity)
    assert not files_below(tmp_path)


def test_the_time_zone_of_a_session_is_utc(spark: SparkSession) -> None:
    own = spark.newSession()
    assert own.conf.get("spark.sql.session.timeZone") == "UTC"


@pytest.mark.parametrize(
    "suppressing",
    [
        pytest.param(
            "create function odd() returns trigger language plpgsql as"
            " $$begin if new.id % 2 = 0 then return null; end if; return new; end$$;"
            " create trigger odd before insert on lake for each row execute function odd()",
            id="a trigger that returns null",
        ),
        pytest.param(
            "create rule odd as on insert to lake where new.id % 2 = 0 do instead nothing",
            id="a rule",
        ),
    ],
)
def test_rows_that_the_table_leaves_out_do_not_stop_the_sink(
    spark: SparkSession, outbox: Outbox, suppressing: str
) -> None:
    outbox.conn.execute("create table lake (id bigint)")
    outbox.conn.execute(suppressing)
    lake = writing(jdbc={"dsn": outbox.dsn, "table": "public.lake"}, sql="…")
    identity = batch()
    for _ in range(2):
        lake.write(spark.range(4), identity)
    assert outbox.column("select id from lake order by id") == [1, 3]
    assert outbox.value("select count(*) from relay_batches") == 1
