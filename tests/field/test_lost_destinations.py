"""A destination that is gone, replaced or older than what a sink has written to it.

Reports of what is lost: delta-io/delta#1813 (a restored table keeps its transactions, and what they wrote is skipped),
delta-io/delta#6314 (the last commits of a log are gone, and the position is past them), delta-io/delta#6049,
apache/iceberg#14979, apache/iceberg#14337, apache/iceberg-python#2890, apache/gravitino#3705, tenzir/tenzir#6426 (the
table was dropped and created again: a sink goes on in the fresh one), apache/iceberg#16232 (a replacement passes over
what was committed), apache/iceberg#13124 (a table that is set back), confluentinc/kafka-connect-jdbc#849 and
databricks/iceberg-kafka-connect#308 (the table was removed, and nothing is written again), airbytehq/airbyte#83771 and
airbytehq/airbyte#50874 (a table that cannot be seen for a moment, or has another setting, is made again without its
history, in silence), xbapps/xbvr#681, dgtlmoon/changedetection.io#481 and Start9Labs/start-technologies#3961 (an empty
folder where a volume should be).

Reports of what is not lost: delta-io/delta-rs#3274 (a new column gave the table another id), apache/iceberg#5846 (the
snapshot of the last batch has expired), apache/iceberg#12549 (files that are merged).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pyarrow as pa
import pyarrow.dataset
import pytest
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, write_deltalake
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.expressions import EqualTo
from pyiceberg.table import Table
from pyiceberg.table.update import RemoveSnapshotRefUpdate
from pyiceberg.types import StringType

from relay.admin.sinks import listed, rebuild
from relay.admin.status import read
from relay.config.handlers import SparkHandler
from relay.config.settings import Settings
from relay.model.snapshots import BEGINNING, Snapshot
from relay.observe.health import incomplete
from relay.spark import sink_worker
from relay.spark.session import Session
from relay.spark.writers import BatchId, LostDestination, Writer, require_last, writer
from relay.spark.writers.iceberg_upkeep import merge_files
from relay.store import completeness, groups
from relay.store.connections import connect
from relay.store.positions import spark_batches
from relay.store.positions.spark_batches import Contents, LastBatch
from tests.lake import LocalFrame, LocalSession
from tests.outbox import Outbox, event, host, relaying, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NONE: Any = None


class Sink:
    """A sink, its application, and the batch that it has written last."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = {"type": "spark", "partition_by": [], **settings}
        self.application = str(uuid4())
        self.number = 0
        self.last: LastBatch | None = None

    def writer(self, **more: Any) -> Writer:
        return writer("lake", SparkHandler.model_validate({**self.settings, **more}))

    def write(self, *ids: str) -> None:
        self.number += 1
        batch = BatchId(self.application, self.number, str(uuid4()), is_first=self.last is None)
        frame: Any = LocalFrame(pa.table({"id": list(ids), "amount": pa.array([1] * len(ids))}))
        self.writer().write(frame, batch)
        last = LastBatch(self.application, self.number, batch.id, self.writer().kind)
        self.last = LastBatch(
            last.application, last.number, last.id, last.kind, self.writer().left(NONE, last, None)
        )

    def require(self, **more: Any) -> None:
        assert self.last is not None
        require_last(self.writer(**more), "lake", NONE, self.last)


def rows(*ids: str) -> pa.Table:
    return pa.table({"id": list(ids), "amount": pa.array([2] * len(ids))})


# Delta


def delta(folder: Path) -> Sink:
    return Sink({"format": "delta", "path": str(folder / "lake")})


def move_away(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def unmount(path: Path) -> None:
    move_away(path)
    path.mkdir()


def replace_table(path: Path) -> None:
    move_away(path)
    for each in ("x", "y", "z", "u", "v"):
        write_deltalake(path, rows(each), mode="append")


def create_again(path: Path) -> None:
    schema = DeltaTable(path).schema()
    DeltaTable.create(path, schema, mode="overwrite")


def restore(path: Path) -> None:
    DeltaTable(path).restore(1)


def restore_and_append(path: Path) -> None:
    restore(path)
    write_deltalake(path, rows("x"), mode="append")


def restore_to_a_time(path: Path) -> None:
    first = DeltaTable(path).history()[-1]
    DeltaTable(path).restore(datetime.fromtimestamp(first["timestamp"] / 1000, UTC))


def copy_back(path: Path) -> None:
    """The folder's backup of before the last batch."""
    log = path / "_delta_log"
    (log / f"{DeltaTable(path).version():020}.json").unlink()


def copy_back_and_append(path: Path) -> None:
    copy_back(path)
    write_deltalake(path, rows("x"), mode="append")
    write_deltalake(path, rows("y"), mode="append")


def delete_all(path: Path) -> None:
    DeltaTable(path).delete()


def overwrite(path: Path) -> None:
    write_deltalake(path, rows("x"), mode="overwrite")


def restore_into_nothing(path: Path) -> None:
    """The restore that undoes another one goes to before the batch, too."""
    DeltaTable(path).restore(1)
    DeltaTable(path).restore(2)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (move_away, "there is no table at"),
        (unmount, "there is no table at"),
        (replace_table, "does not have it"),
        (create_again, "CREATE OR REPLACE TABLE, removed"),
        (restore, "restored older one"),
        (restore_and_append, "restored older one"),
        (restore_to_a_time, "restored older one"),
        (restore_into_nothing, "restored older one"),
        (copy_back, "does not have it"),
        (copy_back_and_append, "does not have it"),
        (delete_all, "DELETE, removed the rows"),
        (overwrite, "WRITE, removed the rows"),
    ],
)
def test_a_delta_table_that_lacks_the_last_batch(
    tmp_path: Path, harm: Callable[[Path], None], says: str
) -> None:
    sink = delta(tmp_path)
    sink.write("a")
    sink.write("b")
    sink.write("c")
    sink.require()
    harm(tmp_path / "lake")
    with pytest.raises(LostDestination, match=says) as raised:
        sink.require()
    text = str(raised.value)
    assert "\n" not in text
    assert f"batch 3 of relay:{sink.application}" in text
    assert str(sink.last and sink.last.facts and sink.last.facts["table"]) in text
    assert "relay sink rebuild lake" in text


def test_a_delta_table_is_created_by_the_first_batch_alone(tmp_path: Path) -> None:
    """It goes between the look at it and the write."""
    sink = delta(tmp_path)
    sink.write("a")
    move_away(tmp_path / "lake")
    with pytest.raises(LostDestination):
        sink.write("b")
    assert not (tmp_path / "lake").exists()
    (tmp_path / "elsewhere").rename(tmp_path / "lake")
    sink.number -= 1
    sink.write("b")
    assert DeltaTable(tmp_path / "lake").to_pyarrow_table().num_rows == 2


def compact(path: Path) -> None:
    DeltaTable(path).optimize.compact()


def vacuum(path: Path) -> None:
    compact(path)
    DeltaTable(path).vacuum(0, dry_run=False, enforce_retention_duration=False)


def append(path: Path) -> None:
    write_deltalake(path, rows("x"), mode="append")


def add_column(path: Path) -> None:
    more = pa.table({"id": ["x"], "amount": [1], "more": [True]})
    write_deltalake(path, more, mode="append", schema_mode="merge")


def change_id(path: Path) -> None:
    """What delta-rs 0.25 did with a new column."""
    table = DeltaTable(path)
    id = str(uuid4())
    old, log = str(table.metadata().id), path / "_delta_log"
    append(path)
    newest = log / f"{table.version() + 1:020}.json"
    first = (log / f"{0:020}.json").read_text().splitlines()
    metadata = next(line for line in first if line.startswith('{"metaData"'))
    original = json.loads(metadata)["metaData"]["id"]
    newest.write_text(newest.read_text().rstrip() + "\n" + metadata.replace(original, id) + "\n")
    assert str(DeltaTable(path).metadata().id) not in (old, original)


def delete_some(path: Path) -> None:
    DeltaTable(path).delete("id = 'b'")


def replace_some(path: Path) -> None:
    write_deltalake(path, rows("b"), mode="overwrite", predicate="id = 'b'")


def restore_of_others(path: Path) -> None:
    """Somebody takes back a commit of their own."""
    version = DeltaTable(path).version()
    append(path)
    DeltaTable(path).restore(version)


def restore_and_undo(path: Path) -> None:
    version = DeltaTable(path).version()
    DeltaTable(path).restore(1)
    DeltaTable(path).restore(version)


def restore_to_a_time_after(path: Path) -> None:
    newest = DeltaTable(path).history(1)[0]["timestamp"]
    append(path)
    DeltaTable(path).restore(datetime.fromtimestamp((newest + 1) / 1000, UTC))


def clean_log(path: Path) -> None:
    for _ in range(3):
        append(path)
    table = DeltaTable(path)
    table.create_checkpoint()
    log = path / "_delta_log"
    for number in range(table.version()):
        (log / f"{number:020}.json").unlink(missing_ok=True)


def write_without_log_cleanup(path: Path) -> None:
    write_deltalake(
        path,
        rows("x"),
        mode="append",
        post_commithook_properties=PostCommitHookProperties(create_checkpoint=True),
        commit_properties=CommitProperties(custom_metadata={"by": "others"}),
    )


@pytest.mark.parametrize(
    "change",
    [
        compact,
        vacuum,
        append,
        add_column,
        change_id,
        delete_some,
        replace_some,
        restore_of_others,
        restore_and_undo,
        restore_to_a_time_after,
        clean_log,
        write_without_log_cleanup,
    ],
)
def test_a_delta_table_that_others_use_is_not_lost(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    sink = delta(tmp_path)
    sink.write("a")
    sink.write("b")
    kept = sink.writer()
    for _ in range(2):
        change(tmp_path / "lake")
        sink.require()
        assert sink.last is not None
        require_last(kept, "lake", NONE, sink.last)
    sink.write("c")
    sink.require()


def test_a_delta_table_that_is_moved_with_the_configuration_is_the_same(tmp_path: Path) -> None:
    sink = delta(tmp_path)
    sink.write("a")
    move_away(tmp_path / "lake")
    sink.require(path=str(tmp_path / "elsewhere"))
    with pytest.raises(LostDestination, match="there is no table"):
        sink.require(path=str(tmp_path / "third"))
    with pytest.raises(LostDestination, match="the sink wrote to delta before"):
        sink.require(path=str(tmp_path / "elsewhere"), format="parquet")


# Iceberg


def iceberg_options(folder: Path) -> dict[str, str]:
    (folder / "warehouse").mkdir(exist_ok=True)
    return {
        "type": "sql",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": f"file://{folder}/warehouse",
    }


def iceberg(folder: Path) -> Sink:
    options = iceberg_options(folder)
    return Sink({"format": "iceberg", "table": "shop.events", "options": options})


def drop(catalog: Catalog, table: Table) -> None:
    catalog.drop_table("shop.events")


def drop_and_create(catalog: Catalog, table: Table) -> None:
    catalog.drop_table("shop.events")
    catalog.create_table("shop.events", table.schema()).append(rows("x"))


def register_older(catalog: Catalog, table: Table) -> None:
    """A catalog that is restored from a backup has a pointer to an older metadata file."""
    older = table.metadata.metadata_log[-1].metadata_file
    catalog.drop_table("shop.events")
    catalog.register_table("shop.events", older)


def set_back(catalog: Catalog, table: Table) -> None:
    first = table.metadata.snapshots[0].snapshot_id
    table.manage_snapshots().set_current_snapshot(first).commit()


def set_back_and_append(catalog: Catalog, table: Table) -> None:
    set_back(catalog, table)
    catalog.load_table("shop.events").append(rows("x"))


def delete_all_rows(catalog: Catalog, table: Table) -> None:
    table.delete()


def overwrite_all(catalog: Catalog, table: Table) -> None:
    table.overwrite(rows("x"))


def replace_all(catalog: Catalog, table: Table) -> None:
    """What `create or replace table` of Spark leaves: the former snapshots, and one without a parent."""
    with table.transaction() as change:
        change._apply((RemoveSnapshotRefUpdate(ref_name="main"),), ())
    catalog.load_table("shop.events").append(rows("x"))


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (drop, "there is no table shop.events"),
        (drop_and_create, "does not have it"),
        (register_older, "does not have it"),
        (set_back, "set back to snapshot"),
        (set_back_and_append, "set back to snapshot"),
        (delete_all_rows, "removed all rows"),
        (overwrite_all, "removed all rows"),
        (replace_all, "replaced the table"),
    ],
)
def test_an_iceberg_table_that_lacks_the_last_batch(
    tmp_path: Path, harm: Callable[[Catalog, Table], None], says: str
) -> None:
    sink = iceberg(tmp_path)
    for each in "abc":
        sink.write(each)
    sink.require()
    catalog = load_catalog("relay", **sink.settings["options"])
    harm(catalog, catalog.load_table("shop.events"))
    with pytest.raises(LostDestination, match=says) as raised:
        sink.require()
    text = str(raised.value)
    assert "\n" not in text
    assert f"batch 3 of relay:{sink.application}" in text
    assert "snapshot" in text
    assert "relay sink rebuild lake" in text


def test_an_iceberg_table_is_created_by_the_first_batch_alone(tmp_path: Path) -> None:
    sink = iceberg(tmp_path)
    sink.write("a")
    catalog = load_catalog("relay", **sink.settings["options"])
    catalog.drop_table("shop.events")
    with pytest.raises(LostDestination):
        sink.write("b")
    assert not catalog.table_exists("shop.events")


def append_rows(catalog: Catalog, table: Table) -> None:
    table.append(rows("x"))


def expire(catalog: Catalog, table: Table) -> None:
    for each in ("x", "y"):
        table.append(rows(each))
    table.refresh()
    current = table.current_snapshot()
    assert current is not None
    others = [each.snapshot_id for each in table.metadata.snapshots if each != current]
    table.maintenance.expire_snapshots().by_ids(others).commit()


def merge(catalog: Catalog, table: Table) -> None:
    session: Any = LocalSession()
    merge_files(table, session)


def evolve(catalog: Catalog, table: Table) -> None:
    with table.update_schema() as update:
        update.add_column(f"more{table.metadata.last_column_id}", StringType())


def delete_some_rows(catalog: Catalog, table: Table) -> None:
    table.delete(EqualTo(term="id", value="b"))


def tag(catalog: Catalog, table: Table) -> None:
    current = table.current_snapshot()
    assert current is not None
    name = f"t{current.snapshot_id}"
    table.manage_snapshots().create_tag(current.snapshot_id, name).commit()
    table.append(rows("x"))


def set_back_of_others(catalog: Catalog, table: Table) -> None:
    current = table.current_snapshot()
    assert current is not None
    table.append(rows("x"))
    table.manage_snapshots().set_current_snapshot(current.snapshot_id).commit()


@pytest.mark.parametrize(
    "change",
    [append_rows, expire, merge, evolve, delete_some_rows, tag, set_back_of_others],
)
def test_an_iceberg_table_that_others_use_is_not_lost(
    tmp_path: Path, change: Callable[[Catalog, Table], None]
) -> None:
    sink = iceberg(tmp_path)
    for each in "ab":
        sink.write(each)
    catalog = load_catalog("relay", **sink.settings["options"])
    for _ in range(2):
        change(catalog, catalog.load_table("shop.events"))
        sink.require()
    sink.write("c")
    sink.require()


def test_an_iceberg_table_that_is_renamed_with_the_configuration_is_the_same(
    tmp_path: Path,
) -> None:
    sink = iceberg(tmp_path)
    sink.write("a")
    catalog = load_catalog("relay", **sink.settings["options"])
    catalog.rename_table("shop.events", "shop.orders")
    with pytest.raises(LostDestination, match="there is no table"):
        sink.require()
    sink.require(table="shop.orders")


# The present state


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_merge_begins_no_table_in_the_middle(tmp_path: Path, kind: str) -> None:
    """A table that was dropped had the keys of the next batch alone, with no word of the others."""
    sink = delta(tmp_path) if kind == "delta" else iceberg(tmp_path)
    merging: Any = sink.writer(mode="upsert", key=["id"])
    session: Any = LocalSession()

    def merge(number: int, is_first: bool) -> LastBatch:
        columns = {"c_offset": [number], "xid": [number], "relay_deleted": [False]}
        rows = pa.table({"id": [f"k{number}"], **columns})
        batch = BatchId(
            sink.application,
            number,
            str(uuid4()),
            f"{number + 1}:{number + 1}:",
            None,
            f"{number}:{number}:",
            is_first,
        )
        merging.merge(rows, batch, *([session] if kind == "iceberg" else []))
        last = LastBatch(sink.application, number, batch.id, merging.kind)
        return replace(last, facts=merging.left(NONE, last, None))

    merge(1, True)
    last = merge(2, False)
    require_last(merging, "lake", NONE, last)
    if kind == "delta":
        move_away(tmp_path / "lake")
    else:
        load_catalog("relay", **sink.settings["options"]).drop_table("shop.events")
    with pytest.raises(LostDestination, match="there is no table"):
        require_last(merging, "lake", NONE, last)
    with pytest.raises(LostDestination, match="there is no table"):
        merge(3, False)
    merge(3, True)


# PostgreSQL


@pytest.fixture
def jdbc(outbox: Outbox) -> Sink:
    outbox.conn.execute("create table lake (id text, amount bigint)")
    return Sink({"jdbc": {"dsn": outbox.lake_dsn, "table": "public.lake"}})


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ("drop table lake", "there is no table public.lake"),
        ("alter table lake rename to former", "there is no table public.lake"),
        (
            "drop table lake; create table lake (id text, amount bigint)",
            "public.lake is another table",
        ),
        ("truncate lake", "public.lake was emptied"),
        ("truncate relay_batches", "the ledger relay_batches beside public.lake does not have it"),
        ("drop table relay_batches", "the ledger relay_batches beside public.lake"),
        ("delete from relay_batches where number = 2", "the ledger relay_batches"),
    ],
)
def test_a_postgresql_table_that_lacks_the_last_batch(
    outbox: Outbox, jdbc: Sink, harm: str, says: str
) -> None:
    jdbc.settings.pop("partition_by")
    jdbc.write("a")
    jdbc.write("b")
    jdbc.require()
    outbox.conn.execute(harm.encode())
    with pytest.raises(LostDestination, match=says) as raised:
        jdbc.require()
    assert "relay sink rebuild lake" in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        "vacuum full lake",
        "delete from lake",
        "alter table lake add column more text",
        "alter table lake alter amount type numeric",
        "insert into lake values ('x', 1)",
        "delete from relay_batches where number < 2",
        "create schema if not exists other",
    ],
)
def test_a_postgresql_table_that_others_use_is_not_lost(
    outbox: Outbox, jdbc: Sink, change: str
) -> None:
    jdbc.settings.pop("partition_by")
    jdbc.write("a")
    jdbc.write("b")
    outbox.conn.execute(change.encode())
    jdbc.require()
    jdbc.write("c")
    jdbc.require()


# What is stored of the last batch


class Stored:
    """The batches of a sink in a target."""

    def __init__(self, target: psycopg.Connection[Any]) -> None:
        self.target = target
        target.execute(
            "insert into relay.sink_claims (group_id, sink, epoch) values ('g', 'lake', 1)"
        )

    def begin(self, epoch: int, place: str = "delta path a") -> spark_batches.OpenBatch:
        contents = Contents(BEGINNING, Snapshot(9, 9, ()))
        spark_batches.begin(self.target, "g", "lake", place, epoch, ([], 1), contents)
        batch = spark_batches.begun(self.target, "g", "lake", place)
        assert batch is not None
        return batch

    def write(
        self, epoch: int, facts: dict[str, Any] | None, place: str = "delta path a"
    ) -> LastBatch:
        batch = self.begin(epoch, place)
        last = LastBatch(batch.application, batch.number, batch.id, "delta", facts)
        assert spark_batches.end(self.target, "g", "lake", batch.id, last)
        return last

    def last(self, epoch: int) -> LastBatch | None:
        return spark_batches.last(self.target, "g", "lake", epoch)


@pytest.fixture
def stored_batches(outbox: Outbox) -> Iterator[Stored]:
    with connect(outbox.relay_dsn) as target:
        yield Stored(target)


def test_the_last_batch_is_one_that_was_finished_and_left_something(
    stored_batches: Stored,
) -> None:
    given_up = stored_batches.begin(1)
    assert stored_batches.last(1) is None
    assert spark_batches.end(stored_batches.target, "g", "lake", given_up.id)
    assert stored_batches.last(1) is None
    first = stored_batches.write(1, {"table": "a"})
    assert stored_batches.last(1) == first
    # It has no rows, and nothing tells that it is there.
    stored_batches.write(1, None)
    stored_batches.begin(1)
    assert stored_batches.last(1) == first


def test_a_sink_that_is_moved_has_no_last_batch(stored_batches: Stored) -> None:
    stored_batches.write(1, {"table": "a"})
    assert stored_batches.last(2) is None
    stored_batches.write(2, None)
    assert stored_batches.last(2) is None
    again = stored_batches.write(2, {"table": "b"})
    assert stored_batches.last(2) == again


def test_the_last_batch_is_of_the_former_destination_too(stored_batches: Stored) -> None:
    former = stored_batches.write(1, {"table": "a"}, "delta path a")
    stored_batches.begin(1, "delta path b")
    assert stored_batches.last(1) == former


def test_another_source_does_not_excuse_the_destination(stored_batches: Stored) -> None:
    """Its snapshots were compared with those of the former one, so the sink goes on."""
    last = stored_batches.write(1, {"table": "a"})
    stored_batches.target.execute(
        "insert into relay.groups (group_id, system_identifier, timeline) values ('g', '1', 1)"
    )
    groups.follow(stored_batches.target, "g", "1", 2, "1 0/1 history", reset=False)
    assert stored_batches.last(2) == last


def test_a_batch_of_a_former_edition_tells_nothing_but_its_number(stored_batches: Stored) -> None:
    last = stored_batches.write(1, {"table": "a"})
    target = stored_batches.target
    target.execute("update relay.spark_batches set last_epoch = null, last_batch = null")
    assert stored_batches.last(1) == LastBatch(last.application, last.number)
    assert stored_batches.last(2) is None
    spark_batches.adopt(target, "g", "lake", 1, last)
    assert stored_batches.last(1) == last
    # One that is open says nothing of the one before.
    target.execute("update relay.spark_batches set last_epoch = null, last_batch = null")
    stored_batches.begin(1)
    target.execute("update relay.spark_batches set last_epoch = null")
    assert stored_batches.last(1) is None


# A sink at work


class Work:
    """A sink that relay works, how its destination is lost and brought back, and the ids that are there."""

    def __init__(
        self,
        settings: dict[str, Any],
        lose: Callable[[], object],
        bring_back: Callable[[], object],
        ids: Callable[[], list[str]],
    ) -> None:
        self.sink = {"type": "spark", "every": 0.1, "start": "beginning", **settings}
        self.config: dict[str, Any] = {
            "handlers": {"lake": self.sink},
            "routes": [{"handlers": ["lake"]}],
        }
        self.lose = lose
        self.bring_back = bring_back
        self.ids = ids


def work_of(kind: str, folder: Path, outbox: Outbox, spark: SparkSession) -> Work:
    path, elsewhere = folder / "lake", folder / "elsewhere"

    def move() -> None:
        path.rename(elsewhere)

    def move_back() -> None:
        elsewhere.rename(path)

    if kind == "files":

        def file_ids() -> list[str]:
            found = pyarrow.dataset.dataset(path, format="parquet").to_table(columns=["id"])
            return sorted(found["id"].to_pylist())

        return Work({"path": str(path)}, move, move_back, file_ids)
    if kind == "delta":

        def delta_ids() -> list[str]:
            return sorted(DeltaTable(path).to_pyarrow_table(columns=["id"])["id"].to_pylist())

        return Work({"path": str(path), "format": "delta"}, move, move_back, delta_ids)
    if kind == "iceberg":
        options = iceberg_options(folder)
        catalog = load_catalog("relay", **options)

        def iceberg_ids() -> list[str]:
            scan = catalog.load_table("shop.events").scan(selected_fields=("id",))
            return sorted(scan.to_arrow()["id"].to_pylist())

        return Work(
            {"format": "iceberg", "table": "shop.events", "options": options},
            lambda: catalog.rename_table("shop.events", "shop.former"),
            lambda: catalog.rename_table("shop.former", "shop.events"),
            iceberg_ids,
        )
    table = f"lake_{outbox.slot}"
    if kind == "jdbc":
        outbox.conn.execute(f"create table {table} (id text, host_id text)".encode())
        return Work(
            {
                "jdbc": {"dsn": outbox.lake_dsn, "table": table},
                "sql": "select id, host_id from events",
            },
            lambda: outbox.conn.execute(f"alter table {table} rename to former".encode()),
            lambda: outbox.conn.execute(f"alter table former rename to {table}".encode()),
            lambda: outbox.column(f"select id from {table} order by id"),
        )
    return Work(
        {"table": table, "format": "parquet"},
        lambda: spark.sql(f"alter table {table} rename to former_{table}"),
        lambda: spark.sql(f"alter table former_{table} rename to {table}"),
        lambda: sorted(row.id for row in spark.table(table).collect()),
    )


@pytest.fixture(
    params=[
        "delta",
        "files",
        *(pytest.param(kind, marks=pytest.mark.rare) for kind in ("iceberg", "jdbc", "table")),
    ]
)
def work(
    request: pytest.FixtureRequest, tmp_path: Path, outbox: Outbox, spark_session: Session
) -> Iterator[Work]:
    spark = spark_session.get(timeout=120)
    assert spark is not None
    yield work_of(request.param, tmp_path, outbox, spark)
    if request.param == "table":
        for name in (f"lake_{outbox.slot}", f"former_lake_{outbox.slot}"):
            spark.sql(f"drop table if exists {name}")


def stored_ids(outbox: Outbox) -> list[str]:
    return outbox.column("select id::text from outbox_message_t order by 1")


def fault(outbox: Outbox) -> str:
    return str(outbox.value("select coalesce(fault, '') from relay.sinks where sink = 'lake'"))


def complete_before(outbox: Outbox) -> datetime | None:
    """Up to when the sink is complete, as sensors read it."""
    found: datetime | None = outbox.value(
        "select complete_before from relay.watermarks where reader = 'lake'"
    )
    return found


def assert_down(outbox: Outbox, settings: Settings) -> None:
    """The sink is down, names the cure, and no time is complete."""
    wait_until(lambda: "relay sink rebuild lake" in fault(outbox), 60)
    assert fault(outbox).startswith("handlers.lake: ")
    assert "it lacks batch " in fault(outbox)
    assert complete_before(outbox) is None
    assert completeness.is_lost(outbox.conn, "default", "lake")
    (listed_sink,) = listed(settings)
    assert listed_sink.state == "down"
    found = list(incomplete(read(settings), datetime(2000, 1, 1, tzinfo=UTC), ["lake"]))
    assert len(found) == 1


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completeness, "NOTE_SECONDS", 0.1)
    monkeypatch.setattr(sink_worker, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(sink_worker, "LONGEST_WAIT_SECONDS", 0.5)


def publish(outbox: Outbox, *numbers: int) -> None:
    for number in numbers:
        outbox.publish(host(number), event(number))


@pytest.mark.parametrize("is_idle", [False, True], ids=["busy", "idle"])
def test_a_sink_whose_destination_is_lost_is_down_until_it_is_brought_back(
    outbox: Outbox, spark_session: Session, work: Work, quick_looks: None, is_idle: bool
) -> None:
    settings = outbox.settings(**work.config)
    with relaying(settings, spark_session):
        publish(outbox, 1, 2)
        outbox.wait_delivered("lake", 120)
        wait_until(lambda: complete_before(outbox) is not None)
        work.lose()
        if not is_idle:
            publish(outbox, 3)
        assert_down(outbox, settings)
        work.bring_back()
        if is_idle:
            publish(outbox, 3)
        outbox.wait_delivered("lake")
        wait_until(lambda: complete_before(outbox) is not None and not fault(outbox))
        assert not completeness.is_lost(outbox.conn, "default", "lake")
    assert work.ids() == stored_ids(outbox)


def test_a_lost_destination_is_written_again_by_a_rebuild(
    outbox: Outbox, spark_session: Session, work: Work, quick_looks: None
) -> None:
    settings = outbox.settings(**work.config)
    with relaying(settings, spark_session):
        publish(outbox, 1, 2)
        outbox.wait_delivered("lake", 120)
    work.lose()
    publish(outbox, 3)
    with relaying(settings, spark_session):
        assert_down(outbox, settings)
        with pytest.raises(Exception):  # noqa: B017, PT011
            work.ids()
        if "jdbc" in work.sink:
            table = work.sink["jdbc"]["table"]
            outbox.conn.execute(f"create table {table} (id text, host_id text)".encode())
        rebuild(settings, "lake")
        outbox.wait_delivered("lake")
        publish(outbox, 4)
        outbox.wait_delivered("lake")
        wait_until(lambda: complete_before(outbox) is not None and not fault(outbox))
        assert not completeness.is_lost(outbox.conn, "default", "lake")
    assert work.ids() == stored_ids(outbox)


def test_a_configuration_that_names_another_place_is_told_of(
    outbox: Outbox, spark_session: Session, tmp_path: Path, quick_looks: None
) -> None:
    """It began an empty table there, which had only what came later."""
    spark = spark_session.get()
    assert spark is not None
    work = work_of("delta", tmp_path, outbox, spark)
    with relaying(outbox.settings(**work.config), spark_session):
        publish(outbox, 1, 2)
        outbox.wait_delivered("lake", 120)
    sink = {**work.sink, "path": str(tmp_path / "new")}
    settings = outbox.settings(**{**work.config, "handlers": {"lake": sink}})
    with relaying(settings, spark_session):
        publish(outbox, 3)
        assert_down(outbox, settings)
    assert not (tmp_path / "new").exists()
    # The table moved to there is the same one.
    (tmp_path / "lake").rename(tmp_path / "new")
    with relaying(settings, spark_session):
        outbox.wait_delivered("lake")
    found = DeltaTable(tmp_path / "new").to_pyarrow_table(columns=["id"])
    assert sorted(found["id"].to_pylist()) == stored_ids(outbox)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_batch_of_a_former_edition_is_looked_for_too(
    outbox: Outbox,
    spark_session: Session,
    tmp_path: Path,
    quick_looks: None,
    caplog: pytest.LogCaptureFixture,
    is_there: bool,
) -> None:
    """relay is upgraded: nothing was noted of what the last batch left."""
    spark = spark_session.get()
    assert spark is not None
    work = work_of("delta", tmp_path, outbox, spark)
    settings = outbox.settings(**work.config)
    with relaying(settings, spark_session):
        publish(outbox, 1, 2)
        outbox.wait_delivered("lake", 120)
    outbox.conn.execute("update relay.spark_batches set last_epoch = null, last_batch = null")
    if not is_there:
        work.lose()
    publish(outbox, 3)
    with relaying(settings, spark_session):
        if not is_there:
            assert_down(outbox, settings)
            return
        outbox.wait_delivered("lake")
    assert work.ids() == stored_ids(outbox)
    assert len([each for each in caplog.records if "it is not proved" in each.message]) == 1
