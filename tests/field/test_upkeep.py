"""Upkeep of Delta and Iceberg tables while relay and others write: no row is lost or doubled, and a batch stays cheap.

Reports: delta-io/delta-rs#2700 (compaction beside appends), #3645 (vacuum removes what is not committed yet), #3644
(vacuum forgets files after a checkpoint), #3337 (compaction with a stale snapshot), delta-io/delta#1470 (a retention of
nothing), apache/iceberg-python#3758 (replaced rows of a partition stay), apache/iceberg#7383 (files that no
snapshot has), apache/iceberg-python#2409 (snapshots removed by two), delta-io/delta#1676 and trinodb/trino#30741
(vacuum and the deletion vectors that a version needs), delta-io/delta-rs#2349 (what a full vacuum takes for the
table's), apache/iceberg#8255, #2131, #17304 and #10982 (a file that was removed and added again is deleted).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from threading import Barrier, Event, Thread
from typing import Any
from uuid import uuid4

import deltalake
import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.table import Table

from relay.config.handlers import SparkHandler
from relay.spark import upkeep
from relay.spark.writers import (
    BatchId,
    UpkeepWriter,
    Writer,
    iceberg_commits,
    iceberg_upkeep,
    writer,
)
from relay.store.positions.spark_batches import LastBatch
from tests.lake import LocalFrame, LocalSession

MOMENT = 1_764_000_000_000_000
DAY = 86_400_000_000
SCHEMA = pa.schema(
    [("id", pa.string()), ("amount", pa.int64()), ("event_ts", pa.timestamp("us", "UTC"))]
)


class Lake:
    """A table, and what relay and others do with it."""

    def __init__(self, **settings: Any) -> None:
        configured = {"type": "spark", "partition_by": [], **settings}
        self.handler = SparkHandler.model_validate(configured)
        self.application = str(uuid4())
        self.number = 0

    def writer(self) -> UpkeepWriter:
        made = writer("lake", self.handler)
        assert isinstance(made, UpkeepWriter)
        return made

    def write(self, rows: int = 4, application: str = "", number: int = 0) -> BatchId:
        self.number += not number
        number = number or self.number
        batch = BatchId(application or self.application, number, str(uuid4()))
        self.writer().write(LocalFrame(rows_of(application, number, rows)), batch)  # type: ignore[arg-type]
        return batch

    def upkeep(self) -> None:
        self.writer().upkeep(LocalSession())  # type: ignore[arg-type]


def rows_of(application: str, number: int, rows: int) -> pa.Table:
    return pa.table(
        {
            "id": [f"{application}{number}-{n}" for n in range(rows)],
            "amount": list(range(rows)),
            "event_ts": [MOMENT + (n % 2) * DAY for n in range(rows)],
        },
        schema=SCHEMA,
    )


def ids_of(application: str, numbers: range, rows: int = 4) -> list[str]:
    return sorted(f"{application}{number}-{n}" for number in numbers for n in range(rows))


# Delta


@pytest.fixture
def delta(tmp_path: Path) -> Lake:
    return Lake(format="delta", path=str(tmp_path / "lake"))


def delta_table(lake: Lake) -> deltalake.DeltaTable:
    return deltalake.DeltaTable(str(lake.handler.path))


def delta_ids(lake: Lake) -> list[str]:
    found: list[str] = delta_table(lake).to_pyarrow_table(columns=["id"])["id"].to_pylist()
    return sorted(found)


def test_delta_files_are_merged_and_batches_stay_known(delta: Lake) -> None:
    batches = [delta.write() for _ in range(30)]
    assert len(delta_table(delta).file_uris()) == 60
    delta.upkeep()
    assert len(delta_table(delta).file_uris()) == 1
    for batch in (batches[0], batches[-1]):
        delta.write(number=batch.number)
    delta.write()
    assert delta_ids(delta) == ids_of("", range(1, 32))


def test_delta_forgets_log_files_and_knows_the_batches(delta: Lake) -> None:
    """Identity is in checkpoints: without a single log file of a batch, the batch is still recognised."""
    delta.write()
    delta_table(delta).alter.set_table_properties(
        {"delta.logRetentionDuration": "interval 0 seconds", "delta.checkpointInterval": "5"}
    )
    for _ in range(20):
        delta.write()
    log = Path(str(delta.handler.path)) / "_delta_log"
    assert len(list(log.glob("*.json"))) < 8
    delta.upkeep()
    for number in range(1, 22):
        delta.write(number=number)
    assert delta_ids(delta) == ids_of("", range(1, 22))


def test_two_drivers_create_a_delta_table_with_the_same_batch(
    delta: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """delta-rs#2609: deltalake commits both tables, and with them both drivers' files, one after the other."""
    batch = BatchId(delta.application, 1, str(uuid4()))
    both = Barrier(2)
    create = deltalake.DeltaTable.create
    failures: list[BaseException] = []

    def together(*arguments: Any, **more: Any) -> Any:
        both.wait()
        return create(*arguments, **more)

    def writes() -> None:
        try:
            delta.writer().write(LocalFrame(rows_of("", 1, 4)), batch)  # type: ignore[arg-type]
        except deltalake.exceptions.DeltaError as error:
            failures.append(error)

    monkeypatch.setattr(deltalake.DeltaTable, "create", together)
    threads = [Thread(target=writes) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failures) < 2
    assert delta_ids(delta) == ids_of("", range(1, 2))


def test_vacuum_keeps_what_is_not_committed_yet(
    delta: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """delta-rs#3645, delta#1470: even in a table that keeps nothing, upkeep between a batch's files and its commit."""
    delta.write()
    delta_table(delta).alter.set_table_properties(
        {"delta.deletedFileRetentionDuration": "interval 0 seconds"}
    )
    made = delta.writer()
    commit = made._commit  # type: ignore[attr-defined]

    def later(*arguments: Any) -> None:
        delta.upkeep()
        commit(*arguments)

    monkeypatch.setattr(made, "_commit", later)
    batch = BatchId(delta.application, 2, str(uuid4()))
    made.write(LocalFrame(rows_of("", 2, 4)), batch)  # type: ignore[arg-type]
    assert delta_ids(delta) == ids_of("", range(1, 3))


def test_vacuum_finds_files_whose_removal_a_checkpoint_has_forgotten(
    delta: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """delta-rs#3644: deltalake's light vacuum finds none of them."""
    monkeypatch.setattr("relay.spark.writers.delta._FEWEST_HOURS", 0)
    delta.write()
    delta_table(delta).alter.set_table_properties(
        {"delta.deletedFileRetentionDuration": "interval 0 seconds"}
    )
    for _ in range(5):
        delta.write()
    delta_table(delta).optimize.compact()
    for _ in range(20):
        delta.write()  # with a checkpoint
    assert not [
        each for each in delta_table(delta).vacuum(dry_run=True) if "part-00000" not in each
    ]
    delta.upkeep()
    folder = Path(str(delta.handler.path))
    assert len(list(folder.glob("*.parquet"))) == len(delta_table(delta).file_uris()) == 1
    assert delta_ids(delta) == ids_of("", range(1, 27))


def test_a_delta_table_with_deleted_rows_is_not_merged(
    delta: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        delta.write()
    delta_table(delta).alter.add_feature(
        deltalake.TableFeatures.DeletionVectors, allow_protocol_versions_increase=True
    )
    delta.upkeep()
    assert len(delta_table(delta).file_uris()) == 6
    delta.write()
    assert delta_table(delta).count() == 16


@pytest.mark.parametrize("partition_by", [[], ["id"]], ids=["whole", "partitioned"])
def test_vacuum_removes_nothing_but_data_files_of_the_table(
    tmp_path: Path, partition_by: list[str]
) -> None:
    """deltalake's full vacuum removes all that no version names: deletion vectors in use, and other tables."""
    lake = Lake(format="delta", path=str(tmp_path), partition_by=partition_by)
    nested = Lake(format="delta", path=str(tmp_path / "orders"), partition_by=partition_by)
    batches = [lake.write(), lake.write()]
    nested.write()
    others = ["deletion_vector_1.bin", "README.md", "part-1.csv", "archive/part-1.parquet"]
    # Of an attempt that failed, by relay; and, in a folder whose name is escaped, by Spark.
    orphans = [f"part-{batches[0].id}-1.zstd.parquet", "part-00000-1-c000.snappy.parquet"]
    folders = ["id=1-1/", "id=a b%2F/"] if partition_by else ["", ""]
    orphans = [folder + name for folder, name in zip(folders, orphans, strict=True)]
    for name in (*others, *orphans):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    aged(tmp_path)
    lake.upkeep()
    assert [name for name in others if not (tmp_path / name).exists()] == []
    assert [name for name in orphans if (tmp_path / name).exists()] == []
    assert delta_ids(lake) == ids_of("", range(1, 3))
    assert delta_ids(nested) == ids_of("", range(1, 2))


def aged(folder: Path) -> None:
    """Make everything a month old, but for logs."""
    moment = time.time() - 30 * 86_400
    for each in folder.rglob("*"):
        if each.is_file() and "_delta_log" not in each.parts:
            os.utime(each, (moment, moment))


def test_two_drivers_and_upkeep_at_once(tmp_path: Path) -> None:
    """delta-rs#2700, #3337: two sinks, each worked by two drivers, beside one that merges and removes all the time."""
    lake = Lake(format="delta", path=str(tmp_path / "lake"))
    lake.write(application="a", number=1)
    over = Event()
    failures: list[BaseException] = []

    def writes(application: str) -> None:
        for number in range(1, 21):
            for attempt in range(20):
                try:
                    lake.write(application=application, number=number)
                    break
                except Exception as error:
                    if attempt == 19:
                        failures.append(error)

    def keeps() -> None:
        while not over.is_set():
            lake.upkeep()

    threads = [Thread(target=writes, args=(each,)) for each in ("a", "a", "b", "b")]
    keeper = Thread(target=keeps)
    for thread in (*threads, keeper):
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    keeper.join()
    assert not failures
    assert delta_ids(lake) == sorted(ids_of("a", range(1, 21)) + ids_of("b", range(1, 21)))


# Iceberg


@pytest.fixture
def iceberg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    monkeypatch.setattr(iceberg_upkeep, "_FEWEST", 1)
    (tmp_path / "warehouse").mkdir()
    options = {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": f"file://{tmp_path}/warehouse",
    }
    return Lake(format="iceberg", table="shop.events", options=options)


def catalog_of(lake: Lake) -> Catalog:
    return load_catalog("relay", **lake.handler.plain_options)


def iceberg_table(lake: Lake) -> Table:
    return catalog_of(lake).load_table("shop.events")


def iceberg_ids(lake: Lake) -> list[str]:
    found: list[str] = iceberg_table(lake).scan().to_arrow()["id"].to_pylist()
    return sorted(found)


def keep_nothing(lake: Lake) -> None:
    table = iceberg_table(lake)
    table.transaction().set_properties(
        {"history.expire.max-snapshot-age-ms": "-60000"}
    ).commit_transaction()


def data_files(folder: Path) -> Iterator[Path]:
    return folder.glob("warehouse/**/*.parquet")


def test_iceberg_files_are_merged_and_batches_stay_known(iceberg: Lake, tmp_path: Path) -> None:
    batches = [iceberg.write() for _ in range(6)]
    keep_nothing(iceberg)
    assert len(list(iceberg_table(iceberg).scan().plan_files())) == 12
    iceberg.upkeep()
    table = iceberg_table(iceberg)
    assert len(list(table.scan().plan_files())) == 1
    # Only the newest snapshot is left, with its one file, and readers of changes pass it over.
    (snapshot,) = table.metadata.snapshots
    assert snapshot.summary is not None
    assert snapshot.summary.operation.value == "replace"
    assert snapshot.summary["total-records"] == "24"
    assert len(list(data_files(tmp_path))) == 1
    for batch in (batches[0], batches[-1]):
        iceberg.write(number=batch.number)
    iceberg.write()
    assert iceberg_ids(iceberg) == ids_of("", range(1, 8))


def test_partitions_are_merged_each_by_itself(iceberg: Lake) -> None:
    """iceberg-python#3758: where PyIceberg misses manifests of a partition, the replaced rows stay there."""
    iceberg.handler = iceberg.handler.model_copy(update={"partition_by": ["amount"]})
    for _ in range(5):
        iceberg.write()
    iceberg.upkeep()
    found = list(iceberg_table(iceberg).scan().plan_files())
    assert sorted(task.file.record_count for task in found) == [5, 5, 5, 5]
    assert iceberg_ids(iceberg) == ids_of("", range(1, 6))


def test_a_batch_that_is_committed_while_files_are_merged(
    iceberg: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        iceberg.write()
    replace = iceberg_commits.replace

    def later(*arguments: Any) -> None:
        iceberg.write()
        replace(*arguments)

    monkeypatch.setattr(iceberg_upkeep, "replace", later)
    iceberg.upkeep()
    assert iceberg_ids(iceberg) == ids_of("", range(1, 5))
    assert len(list(iceberg_table(iceberg).scan().plan_files())) == 3


def test_rows_that_another_program_deletes_meanwhile_stay_deleted(
    iceberg: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        iceberg.write()
    replace = iceberg_commits.replace

    def later(*arguments: Any) -> None:
        iceberg_table(iceberg).delete("id = '2-1'")
        replace(*arguments)

    monkeypatch.setattr(iceberg_upkeep, "replace", later)
    iceberg.upkeep()
    wanted = ids_of("", range(1, 4))
    wanted.remove("2-1")
    assert iceberg_ids(iceberg) == wanted


def test_a_snapshot_that_a_tag_keeps_has_its_files(iceberg: Lake) -> None:
    """iceberg#7383: a merge replaces the files of a tagged snapshot; the removal leaves them."""
    for _ in range(3):
        iceberg.write()
    keep_nothing(iceberg)
    table = iceberg_table(iceberg)
    tagged = table.metadata.current_snapshot_id
    assert tagged is not None
    table.manage_snapshots().create_tag(tagged, "audit").commit()
    for _ in range(3):
        iceberg.write()
    iceberg.upkeep()
    table = iceberg_table(iceberg)
    assert len(table.metadata.snapshots) == 2
    found = table.scan(snapshot_id=tagged).to_arrow()["id"].to_pylist()
    assert sorted(found) == ids_of("", range(1, 4))
    assert iceberg_ids(iceberg) == ids_of("", range(1, 7))


@pytest.mark.parametrize("removed_once_more", [False, True])
def test_a_file_that_was_removed_and_added_again_stays(
    iceberg: Lake, removed_once_more: bool
) -> None:
    """iceberg#8255, #2131, #17304: it is in an expired snapshot, and not in the oldest that is kept.

    As in iceberg#10982 it is then in the newest, or in none but one between that a query may still read.
    """
    iceberg.write()
    table = iceberg_table(iceberg)
    files = [task.file for task in table.scan().plan_files()]
    iceberg_commits.replace(table, files, [])
    table = iceberg_table(iceberg)
    with table.transaction() as transaction, transaction.update_snapshot().fast_append() as append:
        for file in files:
            append.append_data_file(file)
    table = iceberg_table(iceberg)
    has_them = table.metadata.current_snapshot_id
    if removed_once_more:
        iceberg_commits.replace(table, files, [])
    iceberg.write()
    table = iceberg_table(iceberg)
    fewest = 4 if removed_once_more else 3
    kept = {"history.expire.max-snapshot-age-ms": "-60000"}
    kept["history.expire.min-snapshots-to-keep"] = str(fewest)
    table.transaction().set_properties(kept).commit_transaction()
    iceberg_upkeep.expire_snapshots(iceberg_table(iceberg))
    table = iceberg_table(iceberg)
    assert len(table.metadata.snapshots) == fewest
    found = table.scan(snapshot_id=has_them).to_arrow()["id"].to_pylist()
    assert sorted(found) == ids_of("", range(1, 2))
    assert iceberg_ids(iceberg) == ids_of("", range(2 if removed_once_more else 1, 3))


def test_a_tag_that_is_made_while_snapshots_are_removed_keeps_its_own(
    iceberg: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        iceberg.write()
    keep_nothing(iceberg)
    tagged = iceberg_table(iceberg).metadata.current_snapshot_id
    assert tagged is not None
    only_in = iceberg_upkeep._only_in

    def slowly(*arguments: Any) -> list[str]:
        found = only_in(*arguments)
        iceberg_table(iceberg).manage_snapshots().create_tag(tagged, "month-end").commit()
        return found

    monkeypatch.setattr(iceberg_upkeep, "_only_in", slowly)
    iceberg.upkeep()
    found = iceberg_table(iceberg).scan().use_ref("month-end").to_arrow()["id"].to_pylist()
    assert sorted(found) == ids_of("", range(1, 4))


def test_manifests_are_merged_unless_the_table_says_otherwise(iceberg: Lake) -> None:
    iceberg.write()
    table = iceberg_table(iceberg)
    table.transaction().set_properties(
        {"commit.manifest.min-count-to-merge": "5"}
    ).commit_transaction()

    def manifests() -> int:
        snapshot = iceberg_table(iceberg).current_snapshot()
        assert snapshot is not None
        return len(snapshot.manifests(table.io))

    for _ in range(10):
        iceberg.write()
    assert manifests() < 6
    table = iceberg_table(iceberg)
    table.transaction().set_properties(
        {"commit.manifest-merge.enabled": "false"}
    ).commit_transaction()
    before = manifests()
    for _ in range(6):
        iceberg.write()
    assert manifests() == before + 6
    assert iceberg_ids(iceberg) == ids_of("", range(1, 18))


# Both


def test_upkeep_comes_after_every_so_many_batches_and_never_fails_a_sink(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done: list[int] = []

    class Kept:
        kind = "delta"

        def check(self, session: Any) -> None: ...

        def left(self, session: Any, batch: LastBatch, files: Any) -> None: ...

        def lacks(self, session: Any, last: LastBatch, facts: Any) -> None: ...

        def write(self, frame: Any, batch: BatchId) -> None: ...

        def upkeep(self, session: Any) -> None:
            done.append(1)
            raise PermissionError("a value that is in no log")

    handler = SparkHandler(type="spark", format="delta", path="lake", upkeep=3)
    kept: Writer = Kept()
    with caplog.at_level(logging.WARNING):
        for number in range(1, 8):
            upkeep.after_batch("lake", handler, kept, number, None, nullcontext())  # type: ignore[arg-type]
    assert len(done) == 2
    assert "PermissionError" in caplog.text
    assert "a value" not in caplog.text
    never = handler.model_copy(update={"upkeep": None})
    upkeep.after_batch("lake", never, kept, 3, None, nullcontext())  # type: ignore[arg-type]
    assert len(done) == 2


@pytest.mark.parametrize("settings", [{"path": "lake"}, {"table": "shop.events"}])
def test_upkeep_of_what_is_no_table_of_relays_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="upkeep: is for Delta tables"):
        SparkHandler(type="spark", upkeep=10, **settings)
    assert SparkHandler(type="spark", upkeep=None, **settings).upkeep is None
