"""Tables of the present state: the newest event of each key, whatever is late, replayed, killed or done twice.

Reports: delta-io/delta-rs#2407, #2961 (a key twice in the source becomes two rows), #4572 (a merge of 100,000 rows
fails), #2609 (two that create a table both write), delta-io/delta#527 (a source that differs between two passes),
apache/iceberg-python#3758 (rows of a partition that an upsert did not touch come twice), #2120 (upserts at once),
memiiso/debezium-server-iceberg#661 (insert, delete and insert in one batch), databricks/iceberg-kafka-connect#318 (a
delete without the partition's column finds no row), apache/hudi#9475 (positions compared as texts).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import uuid4

import deltalake
import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

from relay.config.handlers import SparkHandler
from relay.faults import ConfigurationError
from relay.model.snapshots import BEGINNING, Snapshot
from relay.spark.writers import BatchId
from relay.spark.writers.delta import DeltaUpserts
from relay.spark.writers.iceberg import IcebergUpserts
from relay.spark.writers.upserts import newest
from tests.lake import LocalSession

SCHEMA = pa.schema(
    [
        ("aggregate_type", pa.string()),
        ("aggregate_id", pa.string()),
        ("payload", pa.string()),
        ("date", pa.string()),
        ("c_offset", pa.int64()),
        ("xid", pa.int64()),
        ("relay_batch", pa.string()),
        ("relay_deleted", pa.bool_()),
    ]
)
KEY = ["aggregate_type", "aggregate_id"]
EPOCH = 3 << 32
"""Full xids have an epoch, which a frame's xid does not have."""


@dataclass(frozen=True)
class Change:
    """An event of a key."""

    key: str | None
    offset: int
    xid: int
    deletes: bool = False

    @property
    def row(self) -> dict[str, Any]:
        return {
            "aggregate_type": "Order",
            "aggregate_id": self.key,
            "payload": f"{self.xid}-{self.offset}",
            "date": f"day {self.offset % 3}",
            "c_offset": self.offset,
            "xid": self.xid % (1 << 32),
            "relay_deleted": self.deletes,
        }


class Table:
    """A table of a format, its writer, and what it shows."""

    def __init__(self, folder: Path, kind: str, partition_by: Sequence[str] = ()) -> None:
        settings: dict[str, Any] = {"format": kind, "path": str(folder / "lake")}
        if kind == "iceberg":
            (folder / "warehouse").mkdir()
            options = {
                "type": "sql",
                "uri": f"sqlite:///{folder}/catalog.db",
                "warehouse": f"file://{folder}/warehouse",
            }
            settings = {"format": kind, "table": "shop.state", "options": options}
        self.kind = kind
        self.application = str(uuid4())
        self.handler = SparkHandler.model_validate(
            {
                "type": "spark",
                "mode": "upsert",
                "key": KEY,
                "sql": "select * from events",
                "partition_by": list(partition_by),
                **settings,
            }
        )

    def merge(
        self,
        number: int,
        changes: Sequence[Change],
        before: Snapshot,
        after: Snapshot,
        application: str = "",
    ) -> None:
        """Write a batch, as a driver does that has begun again."""
        identity = BatchId(
            application or self.application, number, str(uuid4()), str(after), None, str(before)
        )
        rows = pa.Table.from_pylist(
            [{**each.row, "relay_batch": identity.id} for each in changes], schema=SCHEMA
        )
        if self.kind == "delta":
            DeltaUpserts("lake", self.handler).merge(rows, identity)
        else:
            IcebergUpserts("lake", self.handler).merge(rows, identity, LocalSession())  # type: ignore[arg-type]

    def upkeep(self) -> None:
        """Merge the table's files."""
        made = (DeltaUpserts if self.kind == "delta" else IcebergUpserts)("lake", self.handler)
        made.upkeep(LocalSession())  # type: ignore[arg-type]

    def rows(self) -> list[dict[str, Any]]:
        """All rows, with those of deleted keys."""
        if self.kind == "delta":
            found = deltalake.DeltaTable(str(self.handler.path)).to_pyarrow_table()
        else:
            catalog = load_catalog("relay", **self.handler.plain_options)
            found = catalog.load_table("shop.state").scan().to_arrow()
        rows: list[dict[str, Any]] = found.to_pylist()
        return sorted(rows, key=lambda row: str(row["aggregate_id"]))

    def state(self) -> dict[str, str]:
        """The payload of each key that is not deleted; each key has one row."""
        rows = self.rows()
        assert len({row["aggregate_id"] for row in rows}) == len(rows)
        return {row["aggregate_id"]: row["payload"] for row in rows if not row["relay_deleted"]}


@pytest.fixture(params=["delta", "iceberg"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Table:
    return Table(tmp_path, request.param)


def at(xmax: int, *in_progress: int) -> Snapshot:
    """A snapshot of xids, counted from 1."""
    return Snapshot(
        EPOCH + min([xmax, *in_progress]), EPOCH + xmax, tuple(EPOCH + each for each in in_progress)
    )


def change(key: str | None, offset: int, xid: int, deletes: bool = False) -> Change:
    return Change(key, offset, EPOCH + xid, deletes)


# One thing at a time


def test_the_newest_of_a_batch_is_the_row(table: Table) -> None:
    """delta-rs#2407, #2961: a key that is in the batch twice; hudi#9475: 10 is more than 9."""
    table.merge(1, [change("a", 9, 1), change("a", 10, 1), change("b", 3, 2)], BEGINNING, at(3))
    assert table.state() == {"a": f"{EPOCH + 1}-10", "b": f"{EPOCH + 2}-3"}
    table.merge(2, [change("a", 11, 4)], at(3), at(5))
    assert table.state()["a"] == f"{EPOCH + 4}-11"


def test_insert_delete_and_insert_in_one_batch(table: Table) -> None:
    """debezium-server-iceberg#661: a delete has no precedence, and neither has an insert."""
    changes = [change("a", 1, 1), change("a", 2, 1, True), change("a", 3, 1)]
    more = [change("b", 4, 1), change("b", 5, 1, True)]
    table.merge(1, [*changes, *more], BEGINNING, at(2))
    assert table.state() == {"a": f"{EPOCH + 1}-3"}


def test_a_commit_that_was_open_longer_is_the_newer_one(table: Table) -> None:
    """Not c_offset alone: xid 1 inserted first and committed last."""
    table.merge(1, [change("a", 6, 2)], BEGINNING, at(3, 1))
    table.merge(2, [change("a", 5, 1)], at(3, 1), at(3))
    assert table.state() == {"a": f"{EPOCH + 1}-5"}
    # A replay of the event that had the greater c_offset, and the older commit.
    table.merge(3, [change("a", 6, 2), change("b", 8, 4)], at(3), at(5))
    assert table.state() == {"a": f"{EPOCH + 1}-5", "b": f"{EPOCH + 4}-8"}


def test_a_deleted_key_is_not_brought_back(table: Table) -> None:
    table.merge(1, [change("a", 1, 1), change("b", 2, 1)], BEGINNING, at(2))
    table.merge(2, [change("a", 5, 2, True)], at(2), at(3))
    # A dead letter of an older event, alone and beside others, and one of a time before the delete.
    table.merge(3, [change("a", 1, 1)], at(3), at(3))
    table.merge(4, [change("a", 4, 2), change("c", 9, 4)], at(3), at(5))
    assert set(table.state()) == {"b", "c"}
    (deleted,) = (row for row in table.rows() if row["relay_deleted"])
    assert (deleted["aggregate_id"], deleted["payload"], deleted["c_offset"]) == ("a", None, 5)
    # A newer event does.
    table.merge(5, [change("a", 10, 5)], at(5), at(6))
    assert set(table.state()) == {"a", "b", "c"}


def test_an_old_dead_letter_of_an_unknown_key_is_a_row(table: Table) -> None:
    table.merge(1, [change("a", 7, 3)], BEGINNING, at(4))
    table.merge(2, [change("b", 2, 1)], at(4), at(4))
    table.merge(3, [change("b", 1, 1)], at(4), at(4))
    table.merge(4, [change("b", 3, 2)], at(4), at(4))
    assert table.state() == {"a": f"{EPOCH + 3}-7", "b": f"{EPOCH + 2}-3"}


def test_a_key_of_bytes_is_refused() -> None:
    rows = pa.table({"payload": [b"a"], "c_offset": [1], "xid": [1], "relay_deleted": [False]})
    with pytest.raises(ConfigurationError, match="key: the column payload is binary"):
        newest(rows, ["payload"], BatchId("", 1, "", str(at(2))))


def test_a_key_of_null_is_one(table: Table) -> None:
    for number in range(1, 4):
        table.merge(number, [change(None, number, number)], at(number), at(number + 1))
    assert table.state() == {None: f"{EPOCH + 3}-3"}


def test_two_zeros_are_one_key() -> None:
    """apache/spark#23265: deltalake took both for the row of either, and failed at each attempt."""
    values = pa.array([-0.0, 0.0, 1.0, math.nan, math.nan])
    rows = pa.table({"k": values, "c_offset": [1, 2, 3, 4, 5], "xid": [1] * 5})
    rows = rows.append_column("relay_deleted", pa.array([False] * 5))
    found = newest(rows, ["k"], BatchId("", 1, "", str(at(2))))
    assert found.rows["c_offset"].to_pylist() == [2, 3, 5]


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_key_moves_between_partitions(tmp_path: Path, kind: str) -> None:
    """iceberg-kafka-connect#318, iceberg-python#3758: the row is replaced wherever it is, and no other is."""
    table = Table(tmp_path, kind, ["date"])
    table.merge(1, [change(key, n, 1) for n, key in enumerate("abcdef")], BEGINNING, at(2))
    table.merge(2, [change("a", 10, 2), change("b", 12, 2, True)], at(2), at(3))
    state = table.state()
    assert set(state) == {"a", "c", "d", "e", "f"}
    assert state["a"] == f"{EPOCH + 2}-10"
    assert len(table.rows()) == 6


@pytest.mark.parametrize("key", ["", "__HIVE_DEFAULT_PARTITION__"])
def test_a_key_that_a_partition_of_delta_holds_as_null_has_one_row(
    tmp_path: Path, key: str
) -> None:
    """PostHog/posthog#75601: it matched no row of the table, and each batch added one."""
    table = Table(tmp_path, "delta", ["aggregate_id"])
    for number in range(1, 4):
        table.merge(number, [change(key, number, number)], at(number), at(number + 1))
    assert table.state() == {None: f"{EPOCH + 3}-3"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("delta.appendOnly", "true"), ("delta.enableDeletionVectors", "true")],
)
def test_a_table_whose_rows_cannot_be_replaced_is_refused_before_files_are_written(
    tmp_path: Path, name: str, value: str
) -> None:
    """delta-io/delta-rs#2908: a merge that fails after it has written its files leaves them, at each attempt."""
    table = Table(tmp_path, "delta")
    folder = Path(str(table.handler.path))
    schema = deltalake.Schema.from_arrow(pa.schema([*SCHEMA, ("relay_snapshots", pa.string())]))
    deltalake.DeltaTable.create(folder, schema, configuration={name: value})
    with pytest.raises(
        ConfigurationError, match=r"^handlers\.lake\.path: the table has .*: use mode: append"
    ):
        table.merge(1, [change("a", 1, 1)], BEGINNING, at(2))
    assert not list(folder.glob("*.parquet"))


def test_a_driver_that_was_paused_merges_nothing(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.merge(1, [change("a", 1, 1)], BEGINNING, at(2))
    paused = [True]
    compared = "relay.spark.writers.delta.compared"
    if table.kind == "iceberg":
        compared = "relay.spark.writers.iceberg.compared"
    from relay.spark.writers import upserts

    def later(*arguments: Any) -> Any:
        if paused:
            paused.clear()
            table.merge(2, [change("a", 2, 2)], at(2), at(3))
            table.merge(3, [change("a", 3, 3)], at(3), at(4))
        return upserts.compared(*arguments)

    monkeypatch.setattr(compared, later)
    table.merge(2, [change("a", 2, 2)], at(2), at(3))
    assert not paused
    assert table.state() == {"a": f"{EPOCH + 3}-3"}


def test_two_sinks_insert_the_same_key(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """iceberg-python#2120: neither has seen the other's row when it compares."""
    table.merge(1, [change("a", 1, 1)], BEGINNING, at(2))
    other = str(uuid4())
    paused = [True]
    from relay.spark.writers import upserts

    def later(*arguments: Any) -> Any:
        if paused:
            paused.clear()
            table.merge(1, [change("b", 5, 2)], at(2), at(3), other)
        return upserts.compared(*arguments)

    monkeypatch.setattr(f"relay.spark.writers.{table.kind}.compared", later)
    table.merge(2, [change("b", 5, 2), change("c", 6, 2)], at(2), at(3))
    assert not paused
    assert set(table.state()) == {"a", "b", "c"}


def test_files_are_merged_between_reading_and_writing(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge of files that the batch's merge does not see would leave the old row beside the new one."""
    for number in range(1, 4):
        table.merge(number, [change("abc"[number - 1], number, number)], at(number), at(number + 1))
    paused = [True]
    from relay.spark.writers import upserts

    def later(*arguments: Any) -> Any:
        if paused:
            paused.clear()
            table.upkeep()
        return upserts.compared(*arguments)

    monkeypatch.setattr(f"relay.spark.writers.{table.kind}.compared", later)
    table.merge(4, [change("b", 9, 4)], at(4), at(5))
    assert not paused
    assert table.state()["b"] == f"{EPOCH + 4}-9"


@pytest.mark.rare
def test_a_large_batch(tmp_path: Path) -> None:
    """delta-rs#4572: a merge of 120,000 rows into as many."""
    table = Table(tmp_path, "delta")
    keys = [f"k{n}" for n in range(120_000)]
    random.Random(1).shuffle(keys)
    table.merge(1, [change(key, n, 1) for n, key in enumerate(keys)], BEGINNING, at(2))
    table.merge(2, [change(key, 200_000 + n, 2) for n, key in enumerate(keys)], at(2), at(3))
    state = table.state()
    assert len(state) == 120_000
    assert all(payload.startswith(f"{EPOCH + 2}-") for payload in state.values())


# Any history


@dataclass
class History:
    """Commits of an outbox as polls have seen them, and what is in the table after each batch."""

    chooses: random.Random
    offset: int = 0
    xid: int = 1
    open: dict[int, list[Change]] = field(default_factory=dict)
    past: list[tuple[int, Change]] = field(default_factory=list)
    before: Snapshot = BEGINNING
    rows: dict[str, tuple[int, Change, bool]] = field(default_factory=dict)
    """The row of each key: the number of the batch that wrote it, its event, and whether it was a replay."""

    def inserts(self) -> None:
        """Some transactions begin, insert, and commit in any order."""
        committed: list[Change] = []
        for _ in range(self.chooses.randrange(1, 12)):
            if self.chooses.random() < 0.4 or not self.open:
                self.open[self.xid] = []
                self.xid += 1
            xid = self.chooses.choice(list(self.open))
            self.offset += self.chooses.randrange(1, 3)
            key = self.chooses.choice("abcdefgh")
            self.open[xid].append(change(key, self.offset, xid, self.chooses.random() < 0.25))
            if self.chooses.random() < 0.5:
                committed += self.open.pop(xid)
        self.committed = committed

    def batch(self, number: int) -> tuple[list[Change], Snapshot, Snapshot]:
        """The next batch: what has been committed, and replays; the model follows."""
        self.inserts()
        before, after = self.before, at(self.xid, *self.open)
        replayed = [
            each
            for _, each in self.chooses.sample(self.past, min(len(self.past), 3))
            if self.chooses.random() < 0.3
        ]
        for each in sorted(replayed, key=lambda each: each.offset):
            self._apply(number, each, is_replay=True)
        for each in sorted(self.committed, key=lambda each: each.offset):
            self._apply(number, each, is_replay=False)
        self.past += [(number, each) for each in self.committed]
        self.before = after
        changes = [*self.committed, *replayed]
        self.chooses.shuffle(changes)
        return changes, before, after

    def _apply(self, number: int, each: Change, is_replay: bool) -> None:
        assert each.key is not None
        known = self.rows.get(each.key)
        if known is not None and is_replay:
            (of,) = {first for first, event in self.past if event == each}
            wrote, event, was_replay = known
            if was_replay and wrote != number:
                # Nothing is known of such a row's commit but that it is older than the batch.
                is_newer = of >= wrote or each.offset > event.offset
            elif was_replay:
                is_newer = each.offset > event.offset
            else:
                is_newer = (of, each.offset) > (wrote, event.offset)
            if not is_newer:
                return
        self.rows[each.key] = (number, each, is_replay)

    def state(self) -> dict[str, str]:
        return {
            key: str(event.row["payload"])
            for key, (_, event, _) in self.rows.items()
            if not event.deletes
        }


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(each, marks=pytest.mark.rare) for each in (1, 2, 3))]
)
def test_any_history_with_replays_kills_and_upkeep(
    table: Table, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chooses = random.Random(seed)
    history = History(chooses)
    batches: list[tuple[int, list[Change], Snapshot, Snapshot]] = []
    for number in range(1, 13):
        batch = (number, *history.batch(number))
        batches.append(batch)
        with monkeypatch.context() as patched:
            if chooses.random() < 0.3:
                _kill(table, patched)
                with pytest.raises(KeyboardInterrupt):
                    table.merge(*batch)
        table.merge(*batch)
        for late in chooses.sample(batches, min(2, len(batches))):
            table.merge(*late)
        if chooses.random() < 0.2:
            table.upkeep()
        assert table.state() == history.state()
    # All of it again from the beginning, cut in another way, as a sink that is moved back reads it.
    changes = [each for _, each in history.past]
    middle = batches[5][3]
    first = [each for of, each in history.past if of <= 6]
    table.merge(13, first, BEGINNING, middle)
    table.merge(14, changes[len(first) :], middle, history.before)
    moved, known = table.state(), history.state()
    # Of a row that a replay has written, only the c_offset is known.
    exact = [key for key, (_, _, is_replay) in history.rows.items() if not is_replay]
    assert [moved.get(key) for key in exact] == [known.get(key) for key in exact]


def _kill(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver ends before or after it commits: what follows has begun again."""

    def dies(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    if table.kind == "delta":
        monkeypatch.setattr("relay.spark.writers.delta._properties", dies)
    else:
        monkeypatch.setattr("relay.spark.writers.iceberg.upsert", dies)


@pytest.mark.parametrize("seed", range(2))
def test_two_drivers_work_the_same_batches(table: Table, seed: int) -> None:
    history = History(random.Random(seed))
    batches = [(number, *history.batch(number)) for number in range(1, 8)]
    failures: list[BaseException] = []

    def drives() -> None:
        for batch in batches:
            for attempt in range(10):
                try:
                    table.merge(*batch)
                    break
                except Exception as error:
                    if attempt == 9:
                        failures.append(error)

    threads = [Thread(target=drives) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert table.state() == history.state()


# The configuration


def refused() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"path": "lake", "mode": "upsert", "key": ["id"]}, "is for Delta tables"
    yield {"path": "lake", "format": "delta", "mode": "upsert"}, "needs key"
    yield {"path": "lake", "format": "delta", "key": ["id"]}, "are for mode: upsert"
    yield {"path": "lake", "format": "delta", "deletes": "true"}, "are for mode: upsert"
    yield {"path": "lake", "format": "delta", "mode": "upsert", "key": ["order"]}, "'order' is not"


@pytest.mark.parametrize(("settings", "why"), list(refused()))
def test_what_cannot_be_upserted_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        SparkHandler.model_validate({"type": "spark", **settings})
