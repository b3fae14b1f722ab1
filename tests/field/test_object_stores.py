"""Delta and Iceberg tables in an object store: written once, though answers are lost, and kept small.

Reports: delta-io/delta-rs#2894 (a table in MinIO cannot be written), #268 (a commit that was stored counts as failed,
and is made again), ClickHouse/ClickHouse#112081 and apache/iceberg#3717 (an answer that is lost, taken for a conflict),
delta-io/delta-rs#4646 (files of folders with odd names).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import deltalake
import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

from relay.config.handlers import SparkHandler
from relay.model.snapshots import Snapshot
from relay.spark.writers import BatchId, delta, writer
from relay.spark.writers.delta import DeltaUpserts
from tests.lake import LocalFrame, LocalSession
from tests.object_store import ObjectStore, object_store


@pytest.fixture(scope="module")
def running() -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


@pytest.fixture
def store(running: ObjectStore) -> Iterator[ObjectStore]:
    yield running
    running.lose(0)


def handler(store: ObjectStore, folder: Path, kind: str, **more: Any) -> SparkHandler:
    name = f"t{uuid4().hex}"
    settings: dict[str, Any] = {
        "format": "delta",
        "path": f"s3a://lake/{name}",
        "options": store.options,
    }
    if kind == "iceberg":
        catalog = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db"}
        options = catalog | {"warehouse": "s3://lake/warehouse"} | store.properties
        settings = {"format": "iceberg", "table": f"shop.{name}", "options": options}
    return SparkHandler.model_validate(
        {"type": "spark", "partition_by": ["region"], "sql": "select 1", **settings, **more}
    )


def frame(number: int) -> Any:
    return LocalFrame(
        pa.table({"id": [f"{number}-{n}" for n in range(3)], "region": ["e u", "u~s", None]})
    )


def ids(made: SparkHandler) -> list[str]:
    if made.format == "delta":
        table = deltalake.DeltaTable(str(made.path), storage_options=made.plain_options)
        return sorted(table.to_pyarrow_table()["id"].to_pylist())
    catalog = load_catalog("relay", **made.plain_options)
    return sorted(catalog.load_table(str(made.table)).scan().to_arrow()["id"].to_pylist())


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_table_in_an_object_store(store: ObjectStore, tmp_path: Path, kind: str) -> None:
    made, application = handler(store, tmp_path, kind, partition_by=[]), str(uuid4())
    for number in (1, 2, 3, 3, 2):
        writer("lake", made).write(frame(number), BatchId(application, number, str(uuid4())))
    upkept: Any = writer("lake", made)
    upkept.upkeep(LocalSession())
    assert ids(made) == sorted(f"{number}-{n}" for number in (1, 2, 3) for n in range(3))


def test_a_commit_whose_answer_is_lost_is_made_once(store: ObjectStore, tmp_path: Path) -> None:
    made, application = handler(store, tmp_path, "delta"), str(uuid4())
    store.lose(every=2)
    for number in range(1, 7):
        writer("lake", made).write(frame(number), BatchId(application, number, str(uuid4())))
    assert ids(made) == sorted(f"{number}-{n}" for number in range(1, 7) for n in range(3))


def test_a_merge_whose_answer_is_lost_is_made_once(store: ObjectStore, tmp_path: Path) -> None:
    made = handler(store, tmp_path, "delta", mode="upsert", key=["id"])
    application = str(uuid4())
    store.lose(every=2)
    for number in range(1, 6):
        rows = pa.table(
            {
                "id": ["a", f"b{number}"],
                "region": ["e u", None],
                "c_offset": [number * 2, number * 2 + 1],
                "xid": [number, number],
                "relay_deleted": [False, False],
            }
        )
        before, after = Snapshot(number, number, ()), Snapshot(number + 1, number + 1, ())
        batch = BatchId(application, number, str(uuid4()), str(after), None, str(before))
        DeltaUpserts("lake", made).merge(rows, batch)
    assert ids(made) == ["a", *(f"b{number}" for number in range(1, 6))]


def test_old_files_are_removed_by_executors(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """delta-rs keeps Python's lock until the store has answered: in relay's process, every thread would stand still."""
    made, application = handler(store, tmp_path, "delta", partition_by=[]), str(uuid4())
    for number in range(1, 4):
        writer("lake", made).write(frame(number), BatchId(application, number, str(uuid4())))
    monkeypatch.setattr(delta, "_FEWEST_HOURS", 0)
    table = deltalake.DeltaTable(str(made.path), storage_options=made.plain_options)
    table.alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 0 seconds"})
    removed: list[int] = []

    class Session(LocalSession):
        def range(self, start: int, end: int, step: int, tasks: int) -> LocalFrame:
            removed.append(end)
            return super().range(start, end, step, tasks)

    upkept: Any = writer("lake", made)
    upkept.upkeep(Session())
    time.sleep(0.01)
    upkept.upkeep(Session())
    assert removed
    files = deltalake.DeltaTable(str(made.path), storage_options=made.plain_options)
    assert len(files.file_uris()) == 1
    assert len(ids(made)) == 9
