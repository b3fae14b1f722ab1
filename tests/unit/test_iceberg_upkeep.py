"""Snapshots of Iceberg tables are removed as the table's properties say, and nothing else is.

Reports: apache/iceberg#2931, apache/iceberg#7383, apache/iceberg#4901, apache/iceberg-python#1199,
apache/iceberg-python#2409, apache/iceberg-go#716, apache/iceberg#2493, Basekick-Labs/arc#632.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread
from uuid import uuid4

import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.io.pyarrow import _dataframe_to_data_files
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from relay.spark.writers import BatchId, iceberg_upkeep
from relay.spark.writers.iceberg_commits import AlreadyCommitted, commit
from relay.spark.writers.iceberg_upkeep import CREATED_WITH, expire_snapshots

NAME = "shop.events"
SCHEMA = pa.schema([("id", pa.int64())])
AT_ONCE = {**CREATED_WITH, "history.expire.max-snapshot-age-ms": "-60000"}
"""Snapshots are old a minute before they are made."""
QUICK = {"commit.retry.min-wait-ms": "1", "commit.retry.max-wait-ms": "20"}


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    monkeypatch.setattr(iceberg_upkeep, "_FEWEST", 1)
    return opened(tmp_path)


def opened(folder: Path) -> Catalog:
    (folder / "warehouse").mkdir(exist_ok=True)
    return load_catalog(
        "relay",
        type="sql",
        uri=f"sqlite:///{folder}/catalog.db",
        warehouse=f"file://{folder}/warehouse",
    )


def table_of(catalog: Catalog, commits: int, **properties: str) -> Table:
    catalog.create_namespace("shop")
    table = catalog.create_table(NAME, SCHEMA, properties=properties)
    append(table, range(commits))
    return catalog.load_table(NAME)


def append(table: Table, numbers: range) -> None:
    for number in numbers:
        table.append(pa.table({"id": [number]}, schema=SCHEMA))


def files_of(table: Table, number: int) -> list[DataFile]:
    rows = pa.table({"id": [number]}, schema=SCHEMA)
    return list(_dataframe_to_data_files(table.metadata, rows, table.io, uuid4()))


def ids(catalog: Catalog) -> list[int]:
    found: list[int] = catalog.load_table(NAME).scan().to_arrow()["id"].to_pylist()
    return sorted(found)


def snapshots(catalog: Catalog) -> list[int]:
    return [each.snapshot_id for each in catalog.load_table(NAME).metadata.snapshots]


def lists(folder: Path) -> int:
    return len(list(folder.glob("warehouse/**/snap-*.avro")))


def test_only_tables_with_the_property_are_touched(catalog: Catalog) -> None:
    expire_snapshots(table_of(catalog, 4))
    assert len(snapshots(catalog)) == 4


def test_old_snapshots_and_their_lists_are_removed(catalog: Catalog, tmp_path: Path) -> None:
    table = table_of(catalog, 5, **AT_ONCE)
    expire_snapshots(table)
    assert snapshots(catalog) == [table.metadata.current_snapshot_id]
    assert lists(tmp_path) == 1
    assert ids(catalog) == [0, 1, 2, 3, 4]


def test_young_snapshots_are_kept(catalog: Catalog) -> None:
    expire_snapshots(table_of(catalog, 4, **{"history.expire.max-snapshot-age-ms": "3600000"}))
    assert len(snapshots(catalog)) == 4


def test_the_fewest_that_the_table_keeps(catalog: Catalog) -> None:
    expire_snapshots(
        table_of(catalog, 5, **AT_ONCE, **{"history.expire.min-snapshots-to-keep": "3"})
    )
    assert len(snapshots(catalog)) == 3


def test_a_table_whose_files_others_use_is_not_touched(catalog: Catalog, tmp_path: Path) -> None:
    expire_snapshots(table_of(catalog, 4, **AT_ONCE, **{"gc.enabled": "false"}))
    assert len(snapshots(catalog)) == lists(tmp_path) == 4


def test_tags_and_branches_keep_what_they_name(catalog: Catalog) -> None:
    table = table_of(catalog, 5, **AT_ONCE)
    known = [each.snapshot_id for each in table.metadata.snapshots]
    table.manage_snapshots().create_tag(known[1], "audit").commit()
    table.manage_snapshots().create_branch(known[3], "trial", min_snapshots_to_keep=2).commit()
    expire_snapshots(catalog.load_table(NAME))
    assert snapshots(catalog) == [known[index] for index in (1, 2, 3, 4)]
    tagged = catalog.load_table(NAME).scan(snapshot_id=known[1]).to_arrow()
    assert sorted(tagged["id"].to_pylist()) == [0, 1]


def test_a_branch_that_is_moved_meanwhile_keeps_its_snapshot(catalog: Catalog) -> None:
    table = table_of(catalog, 5, **AT_ONCE)
    second = table.metadata.snapshots[1].snapshot_id
    moved = catalog.load_table(NAME)
    moved.manage_snapshots().set_current_snapshot(second).commit()
    expire_snapshots(table)
    assert len(snapshots(catalog)) == 5
    assert ids(catalog) == [0, 1]


def test_removal_waits_until_it_is_worth_a_commit(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iceberg_upkeep, "_FEWEST", 5)
    table = table_of(catalog, 5, **AT_ONCE)
    expire_snapshots(table)
    assert len(snapshots(catalog)) == 5
    append(table, range(5, 6))
    expire_snapshots(catalog.load_table(NAME))
    assert len(snapshots(catalog)) == 1
    assert ids(catalog) == [0, 1, 2, 3, 4, 5]


def test_a_commit_that_began_before_a_removal_is_there(catalog: Catalog) -> None:
    table_of(catalog, 5, **AT_ONCE)
    begun = catalog.load_table(NAME).transaction()
    begun.append(pa.table({"id": [5]}, schema=SCHEMA))
    expire_snapshots(catalog.load_table(NAME))
    assert len(snapshots(catalog)) == 1
    begun.commit_transaction()
    assert len(snapshots(catalog)) == 2
    assert ids(catalog) == [0, 1, 2, 3, 4, 5]


def test_a_commit_finds_its_first_snapshot_removed(catalog: Catalog) -> None:
    """PyIceberg repeats a commit only while the snapshot it began with is there: relay begins it again."""
    table_of(catalog, 5, **AT_ONCE)
    begun = catalog.load_table(NAME)
    append(catalog.load_table(NAME), range(5, 6))
    expire_snapshots(catalog.load_table(NAME))
    assert len(snapshots(catalog)) == 1
    batch = BatchId(str(uuid4()), 1, str(uuid4()))
    commit(begun, batch, files_of(begun, 6))
    assert ids(catalog) == [0, 1, 2, 3, 4, 5, 6]
    with pytest.raises(AlreadyCommitted):
        commit(begun, batch, files_of(begun, 6))


@pytest.mark.rare
def test_two_writers_and_removals_at_once(tmp_path: Path, catalog: Catalog) -> None:
    """Each batch is there once; apache/iceberg-python#2409 and what it calls a race are none of relay's."""
    table_of(catalog, 0, **AT_ONCE, **QUICK)
    failures: list[BaseException] = []

    def writes(first: int) -> None:
        mine, application = opened(tmp_path), str(uuid4())
        try:
            for number in range(1, 21):
                table = mine.load_table(NAME)
                batch = BatchId(application, number, str(uuid4()))
                commit(table, batch, files_of(table, first + number))
                expire_snapshots(table)
        except BaseException as error:
            failures.append(error)

    threads = [Thread(target=writes, args=(first,)) for first in (0, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert ids(catalog) == [*range(1, 21), *range(101, 121)]


def test_a_snapshot_is_old_when_another_has_been_the_newest_for_the_age(catalog: Catalog) -> None:
    """A table without commits for a day: whoever has begun with its newest snapshot must find it."""
    table = table_of(catalog, 3, **{"history.expire.max-snapshot-age-ms": "3600000"})
    now = datetime.now(UTC) + timedelta(days=1)
    append(table, range(3, 4))
    known = [each.snapshot_id for each in catalog.load_table(NAME).metadata.snapshots]
    aged = catalog.load_table(NAME)
    # The last commit is a minute old, the one before a day.
    moment = int(now.timestamp() * 1000) - 60_000
    log = [*aged.metadata.snapshot_log]
    log[-1] = log[-1].model_copy(update={"timestamp_ms": moment})
    aged.metadata = aged.metadata.model_copy(update={"snapshot_log": log})
    gone = [each.snapshot_id for each in iceberg_upkeep._expired(aged, now)]
    assert gone == known[:2]


def test_a_removal_that_began_before_a_commit_loses_nothing(
    catalog: Catalog, tmp_path: Path
) -> None:
    stale = table_of(catalog, 5, **AT_ONCE)
    append(catalog.load_table(NAME), range(5, 6))
    expire_snapshots(stale)
    assert len(snapshots(catalog)) == lists(tmp_path) == 6
    assert ids(catalog) == [0, 1, 2, 3, 4, 5]
    expire_snapshots(catalog.load_table(NAME))
    assert len(snapshots(catalog)) == lists(tmp_path) == 1
    assert ids(catalog) == [0, 1, 2, 3, 4, 5]


def test_two_that_remove_the_same_snapshots(catalog: Catalog, tmp_path: Path) -> None:
    table_of(catalog, 5, **AT_ONCE)
    first, second = catalog.load_table(NAME), catalog.load_table(NAME)
    expire_snapshots(first)
    expire_snapshots(second)
    assert len(snapshots(catalog)) == lists(tmp_path) == 1
    assert ids(catalog) == [0, 1, 2, 3, 4]
