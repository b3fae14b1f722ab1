"""Values and tables on which a Delta, Iceberg or PostgreSQL sink could be poisoned or stand still.

Reports: delta-io/delta#420, delta-io/delta-rs#2193, ClickHouse/ClickHouse#120521, delta-io/delta-kernel-rs#146,
delta-io/delta-rs#1535, delta-io/delta-rs#2292, apache/paimon#9188, confluentinc/kafka-connect-jdbc#327,
postgrespro/pg_pathman#24, delta-io/delta#126 and #5239, apache/iceberg#5408, trinodb/trino#16273 and
databrickslabs/overwatch#419 (names of columns that differ by case), apache/iceberg-python#1551 (a table of version 3),
StarRocks/starrocks#23822 (one of ORC), apache/iceberg-python#1987 (a partition by a bucket needs another package),
ray-project/ray#54447 (a table that another program creates meanwhile, with other partitions), delta-io/delta-rs#1946
and #3387, delta-io/delta#1506 (columns of nulls), TonicAI/condenser#40 and dimitri/pgcopydb#214 (identity columns),
ClickHouse/ClickHouse#120691 (decimals as partitions), delta-io/delta-rs#495 (names of partition columns),
#1156 and #1391 (names of folders), apache/seatunnel#8393 and confluentinc/kafka-connect-jdbc#1216 (NUL characters),
apache/datafusion-comet#5836, lensesio/stream-reactor#1719 and rh-aiservices-bu/s4#30 (partitions with long names).
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import deltalake
import pyarrow as pa
import pyarrow.dataset
import pytest
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, create_table_with_add_actions
from pyiceberg.catalog import load_catalog
from pyiceberg.transforms import BucketTransform

from relay.config.handlers import SparkHandler
from relay.faults import ConfigurationError, RelayError, TransientFault
from relay.spark.session import Session
from relay.spark.writers import BatchId, Writer, delta_files, writer
from tests.lake import LocalFrame, LocalSession
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


def partitioned(column: str, values: pa.Array) -> Any:
    return LocalFrame(pa.table({"id": ["a", "b"], column: values}))


def test_a_decimal_is_no_partition_of_delta(tmp_path: Path) -> None:
    """deltalake wrote -0.01 as 0.-1 when it merged the files, after which nobody could read the table."""
    lake = lake_of("delta", tmp_path, partition_by=["price"])
    prices = pa.array([Decimal("-0.01"), Decimal("1.50")], pa.decimal128(10, 2))
    with pytest.raises(
        ConfigurationError, match=r"lake\.partition_by: the column price is decimal"
    ):
        lake.write(partitioned("price", prices), batch())
    assert not files_below(tmp_path)
    whole = pa.array([Decimal(-1), Decimal(2)], pa.decimal128(10, 0))
    for _ in range(2):
        lake.write(partitioned("price", whole), batch())
    lake.upkeep(LocalSession())  # type: ignore[attr-defined]
    found = deltalake.DeltaTable(tmp_path / "table").to_pyarrow_table()["price"].to_pylist()
    assert sorted(found) == [-1, -1, 2, 2]


@pytest.mark.parametrize("name", ["a:b", "a~b", "a%20b", "größe"])
def test_a_partition_column_of_delta_may_have_any_name(tmp_path: Path, name: str) -> None:
    """delta-rs#495: `a:b=x/part…` is an address of the scheme `a`, and the table could not be read."""
    for _ in range(2):
        lake = lake_of("delta", tmp_path, partition_by=[name])
        lake.write(partitioned(name, pa.array(["x", "y"])), batch())
    lake.upkeep(LocalSession())  # type: ignore[attr-defined]
    table = deltalake.DeltaTable(tmp_path / "table")
    assert len(table.file_uris()) == 2
    query = deltalake.QueryBuilder().register("t", table)
    found = pa.table(query.execute(f'select "{name}" as found from t').read_all())
    assert sorted(found["found"].to_pylist()) == ["x", "x", "y", "y"]


LONG = pa.array(["ü" * 300, "x" * 300, "a"])
HUGE = pa.array([1e300, 5e-324, 1.0])


def rows_of(place: pa.Array, number: int) -> pa.Table:
    columns = {"id": [f"{number} {each}" for each in range(len(place))], "place": place}
    fixed = {"c_offset": [number] * len(place), "xid": [number] * len(place)}
    return pa.table({**columns, **fixed, "relay_deleted": [False] * len(place)})


@pytest.mark.parametrize("place", [LONG, HUGE], ids=["texts", "numbers"])
def test_a_partition_of_delta_may_have_a_value_of_any_length(
    tmp_path: Path, place: pa.Array, caplog: pytest.LogCaptureFixture
) -> None:
    """relay's folders were short, but deltalake could not merge small files of the whole table for good."""
    for number in (1, 2):
        lake: Any = lake_of("delta", tmp_path, partition_by=["place"])
        lake.write(LocalFrame(rows_of(place, number)), batch())
    lake.upkeep(LocalSession())
    table = deltalake.DeltaTable(tmp_path / "table")
    # One of the last value; of the others as they were.
    assert len(table.file_uris()) == 5
    query = deltalake.QueryBuilder().register("t", table)
    found = pa.table(query.execute("select place from t order by id").read_all())
    assert found["place"].to_pylist() == place.to_pylist() * 2


@pytest.mark.parametrize("columns", [1, 3, 8])
def test_the_folders_of_many_partition_columns_fit_into_a_key(tmp_path: Path, columns: int) -> None:
    """The key of an object has at most 1,024 bytes, with the table's address."""
    names = [f"place_{number}" for number in range(columns)]
    table = pa.table({"id": ["a", "b", "c"], **dict.fromkeys(names, LONG)})
    files = delta_files.BatchFiles(str(tmp_path), {}, table.schema, names, str(uuid4()))
    written = [
        fact
        for facts in delta_files.write_files(files, iter(table.to_batches()))
        for fact in facts.to_pylist()
    ]
    assert len({fact["path"] for fact in written}) == 3
    is_own = delta_files.own_data_files(names)
    for fact in written:
        assert len(fact["path"]) < 600
        assert is_own(fact["path"])
        assert set(json.loads(fact["partition_values"]).values()) < set(LONG.to_pylist())


@pytest.mark.parametrize("place", [LONG, HUGE], ids=["texts", "numbers"])
def test_a_partition_in_which_deltalake_cannot_merge_is_named(
    tmp_path: Path, place: pa.Array
) -> None:
    """The sink said `File name too long` for ever, and each attempt left the files of other partitions."""
    settings = {"mode": "upsert", "key": ["id"], "partition_by": ["place"]}
    lake: Any = lake_of("delta", tmp_path, **settings)
    for rows in (rows_of(place, 1), rows_of(place, 1).slice(0, 1)):
        with pytest.raises(ConfigurationError, match=r"lake\.partition_by: the column place has a"):
            lake.merge(rows, BatchId(str(uuid4()), 1, str(uuid4()), "9:9:"))
    assert not files_below(tmp_path)
    lake.merge(rows_of(place, 1).slice(2), BatchId(str(uuid4()), 1, str(uuid4()), "9:9:"))
    assert len(files_below(tmp_path)) == 1


@pytest.mark.parametrize(
    "value", ["x" * 249, "ü" * 41 + "xyz", "x y" * 49 + "zzzz", "~-_." * 62 + "~"], ids=len
)
def test_a_partition_of_the_longest_name_is_merged(tmp_path: Path, value: str) -> None:
    """If another deltalake names folders in another way, this fails."""
    settings = {"mode": "upsert", "key": ["id"], "partition_by": ["place"]}
    lake: Any = lake_of("delta", tmp_path, **settings)
    lake.merge(rows_of(pa.array([value]), 1), BatchId(str(uuid4()), 1, str(uuid4()), "9:9:"))
    (file,) = files_below(tmp_path)
    assert len(file.parent.name.encode()) == 255
    with pytest.raises(ConfigurationError, match="too long for the name of a folder"):
        lake.merge(
            rows_of(pa.array([value + "x"]), 2), BatchId(str(uuid4()), 1, str(uuid4()), "9:9:")
        )


def test_a_folder_of_files_with_too_long_a_name_is_named(
    spark: SparkSession, tmp_path: Path
) -> None:
    """stream-reactor#1719: the sink said `IOException` for ever."""
    lake = writing(path=str(tmp_path / "lake"), sql="…", partition_by=["place"])
    identity = batch()
    frame = frame_of(spark, "repeat('x', 300) as place", identity=identity)
    with pytest.raises(
        ConfigurationError, match=r"lake\.partition_by: the column place has a value"
    ):
        lake.write(frame, identity)
    assert lake.write(frame_of(spark, "'x' as place", identity=identity), identity)


@pytest.mark.parametrize("mode", ["append", "upsert"])
@pytest.mark.parametrize("layout", ["", "object-storage"])
def test_a_partition_of_iceberg_may_have_a_value_of_any_length(
    tmp_path: Path, mode: str, layout: str
) -> None:
    """datafusion-comet#5836: the name of the folder was too long, and the sink stood still."""
    (tmp_path / "warehouse").mkdir()
    key = {"mode": "upsert", "key": ["id"]} if mode == "upsert" else {}
    lake: Any = lake_of("iceberg", tmp_path, partition_by=["place"], **key)

    def write(number: int, place: pa.Array) -> None:
        rows, identity = rows_of(place, number), BatchId(str(uuid4()), 1, str(uuid4()), "9:9:")
        if mode == "append":
            lake.write(LocalFrame(rows), identity)
        else:
            lake.merge(rows, identity, LocalSession())

    write(1, LONG.slice(2))
    table = load_catalog("relay", **iceberg_options(tmp_path)).load_table("shop.events")
    if layout:
        given = {"write.object-storage.enabled": "true"}
        table.transaction().set_properties(given).commit_transaction()
    for number in (2, 3):
        write(number, LONG)
    # The first rows again, which replaces them in an upsert table.
    if mode == "upsert":
        rows = rows_of(LONG, 2).set_column(2, "c_offset", pa.array([9, 9, 9]))
        lake.merge(
            rows, BatchId(str(uuid4()), 1, str(uuid4()), "20:20:", None, "9:9:"), LocalSession()
        )
    lake.upkeep(LocalSession())
    table.refresh()
    assert not [each for each in table.properties if "location-provider" in each]
    for value in LONG.to_pylist():
        found = table.scan(row_filter=f"place == '{value}'").to_arrow()
        assert found.num_rows == (3 if value == "a" else 2)
        files = list(table.scan(row_filter=f"place == '{value}'").plan_files())
        assert [each.file.partition[0] for each in files] == [value]
        assert ("place=a" in files[0].file.file_path) == (value == "a")


@pytest.mark.parametrize("mode", ["append", "upsert"])
@pytest.mark.parametrize("folder", ["100%", "my lake", "ü#1", "a~b?"])
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_table_of_delta_may_be_in_a_folder_of_any_name(
    tmp_path: Path, folder: str, scheme: str, mode: str
) -> None:
    """delta-rs#1156, #1391: the files of an address `file:///my%20lake` were in another folder than its log."""
    path = tmp_path / folder
    where = path.as_uri() if scheme else str(path)
    key = {"mode": "upsert", "key": ["id"]} if mode == "upsert" else {}
    rows = pa.table({"id": ["a"], "c_offset": [1], "xid": [1], "relay_deleted": [False]})
    for number in (1, 2):
        lake: Any = lake_of("delta", tmp_path, path=where, **key)
        identity = BatchId(str(uuid4()), number, str(uuid4()), "9:9:")
        lake.write(LocalFrame(rows), identity) if mode == "append" else lake.merge(rows, identity)
    lake.upkeep(LocalSession())
    assert [each.name for each in tmp_path.iterdir()] == [folder]
    found = pyarrow.dataset.dataset([str(each) for each in path.glob("*.parquet")])
    assert found.count_rows() >= 1
    assert len(list(path.glob("_delta_log/*.json"))) >= 2


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_folder_that_deltalake_takes_for_another_one_is_refused(
    tmp_path: Path, scheme: str
) -> None:
    path = tmp_path / "a%20b"
    where = path.as_uri() if scheme else str(path)
    with pytest.raises(
        ConfigurationError, match=r"lake\.path: deltalake takes .*/a%20b for .*/a b"
    ):
        lake_of("delta", tmp_path, path=where)


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


def iceberg_options(folder: Path) -> dict[str, str]:
    uri, warehouse = f"sqlite:///{folder}/catalog.db", f"file://{folder}/warehouse"
    return {"type": "sql", "uri": uri, "warehouse": warehouse}


def lake_of(kind: str, folder: Path, **settings: Any) -> Writer:
    where: dict[str, Any] = {"path": str(folder / "table")}
    if kind == "iceberg":
        where = {"table": "shop.events", "options": iceberg_options(folder)}
    return writing(format=kind, sql="…", **{"partition_by": [], **where, **settings})


def ids(*names: str) -> Any:
    return LocalFrame(pa.table({"id": list(names), "place": ["a", "b"]}))


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        *((kind, pa.nulls(2)) for kind in ("delta", "iceberg")),
        *((kind, pa.array([1, 2], pa.duration("us"))) for kind in ("delta", "iceberg")),
    ],
)
def test_a_column_of_a_type_that_no_table_has_is_named(
    tmp_path: Path, kind: str, column: pa.Array
) -> None:
    """Delta refused it once files were written, or made a table that others do not read; Iceberg did not say where."""
    frame: Any = LocalFrame(pa.table({"id": ["a", "b"], "note": column}))
    with pytest.raises(ConfigurationError, match=r"the batch's column note is of type .* cast it"):
        lake_of(kind, tmp_path).write(frame, batch())
    assert not files_below(tmp_path)


def changed_to(kind: str, options: dict[str, str], folder: Path) -> None:
    """Make a table that PyIceberg does not write of one that it does."""
    catalog = load_catalog("relay", **options)
    table = catalog.load_table("shop.events")
    if kind == "orc":
        table.transaction().set_properties({"write.format.default": "orc"}).commit_transaction()
    elif kind == "bucket":
        with table.update_spec() as spec:
            spec.add_field("id", BucketTransform(4), "id_bucket")
    else:
        metadata = json.loads(Path(table.metadata_location.removeprefix("file://")).read_text())
        newer = folder / "00009-v3.metadata.json"
        newer.write_text(json.dumps({**metadata, "format-version": 3, "next-row-id": 0}))
        catalog.drop_table("shop.events")
        catalog.register_table("shop.events", f"file://{newer}")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("version", "format version 3"),
        ("orc", "write.format.default orc"),
        ("bucket", "install pyiceberg-core"),
    ],
)
@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_an_iceberg_table_that_cannot_be_written_gets_no_files(
    tmp_path: Path, kind: str, why: str, mode: str
) -> None:
    """PyIceberg refuses version 3 when it commits, once data files and manifests are written, at each attempt."""
    (tmp_path / "warehouse").mkdir()
    lake_of("iceberg", tmp_path).write(ids("a", "b"), batch())
    changed_to(kind, iceberg_options(tmp_path), tmp_path)
    before = files_below(tmp_path)
    key = {"mode": "upsert", "key": ["id"]} if mode == "upsert" else {}
    lake: Any = lake_of("iceberg", tmp_path, **key)
    attempts: list[Callable[[], None]] = [
        lambda: lake.check(None),
        lambda: lake.write(ids("c", "d"), batch()),
        lambda: lake.upkeep(None),
    ]
    for attempt in attempts:
        with pytest.raises(ConfigurationError, match=re.escape(why)):
            attempt()
    assert files_below(tmp_path) == before


def test_files_of_other_partitions_are_not_added_to_a_table_that_is_created_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rows had nulls in the table's partition column, for good."""
    late, identity = lake_of("delta", tmp_path, partition_by=[]), batch()
    create = deltalake.DeltaTable.create

    def second(*arguments: Any, **more: Any) -> Any:
        monkeypatch.setattr(deltalake.DeltaTable, "create", create)
        lake_of("delta", tmp_path, partition_by=["place"]).write(ids("a", "b"), batch())
        return create(*arguments, **more)

    monkeypatch.setattr(deltalake.DeltaTable, "create", second)
    with pytest.raises(TransientFault, match="another program has created the table"):
        late.write(ids("c", "d"), identity)
    late.write(ids("c", "d"), identity)
    found = deltalake.DeltaTable(tmp_path / "table").to_pyarrow_table().sort_by("id")
    assert found.select(["id", "place"]).to_pydict() == {
        "id": ["a", "b", "c", "d"],
        "place": ["a", "b", "a", "b"],
    }


def test_an_identity_column_takes_the_batchs_values(outbox: Outbox) -> None:
    outbox.conn.execute(
        "create table lake (id bigint generated always as identity, note text,"
        " twice bigint generated always as (id * 2) stored)"
    )
    lake = writing(jdbc={"dsn": outbox.lake_dsn, "table": "public.lake"}, sql="…")
    frame: Any = LocalFrame(pa.table({"id": [7, 9], "note": ["a", None]}))
    lake.write(frame, batch())
    assert outbox.conn.execute("select * from lake order by id").fetchall() == [
        (7, "a", 14),
        (9, None, 18),
    ]


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        (
            "text",
            "a\0b",
            "the batch's column note has a NUL character, which PostgreSQL cannot store: remove it with `sql`, such as"
            " with replace(note, char(0), '')",
        ),
        (
            "varchar(3)",
            "a secret",
            "of the batch's column note (StringDataRightTruncation, sqlstate",
        ),
        (
            "jsonb",
            '{"a": "\\u0000"}',
            "of the batch's column note (UntranslatableCharacter, sqlstate 22",
        ),
        (
            "int",
            "a secret",
            "of the batch's column note (InvalidTextRepresentation, sqlstate 22P02",
        ),
    ],
    ids=["NUL", "too long", "NUL in JSON", "no number"],
)
def test_a_value_that_a_postgresql_table_refuses_is_named(
    outbox: Outbox, kind: str, value: str, says: str
) -> None:
    """The sink said `CharacterNotInRepertoire` for ever, of a batch of 100,000 events with some 20 columns."""
    outbox.conn.execute(f"create table lake (id text, note {kind})".encode())
    lake = writing(jdbc={"dsn": outbox.lake_dsn, "table": "public.lake"}, sql="…")
    identity = batch()
    refused: Any = LocalFrame(pa.table({"id": ["a", "b"], "note": [None, value]}))
    with pytest.raises(RelayError) as raised:
        lake.write(refused, identity)
    said = str(raised.value)
    assert said.startswith("handlers.lake.jdbc.table: ")
    assert says in said
    assert "secret" not in said
    converted: Any = LocalFrame(pa.table({"id": ["a", "b"], "note": pa.nulls(2, pa.string())}))
    lake.write(converted, identity)
    assert outbox.column("select id from lake order by id") == ["a", "b"]


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
    lake = writing(jdbc={"dsn": outbox.lake_dsn, "table": "public.lake"}, sql="…")
    identity = batch()
    for _ in range(2):
        lake.write(spark.range(4), identity)
    assert outbox.column("select id from lake order by id") == [1, 3]
    assert outbox.value("select count(*) from relay_batches") == 1
