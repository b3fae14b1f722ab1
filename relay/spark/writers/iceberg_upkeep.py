"""Keeps an Iceberg table small: merges its small files, and removes the snapshots that its properties do not keep.

Each commit reads and writes the list of all snapshots, and readers open every data file. PyIceberg removes snapshots
only on request, and neither merges data files nor removes those that no snapshot has.

Source: Iceberg documentation, "Table properties", "Maintenance"; Iceberg Table Spec, "Snapshot Retention Policy".
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyiceberg.exceptions import CommitFailedException, ValidationException
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.manifest import DataFile, ManifestFile
from pyiceberg.table import FileScanTask, Table, TableProperties
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Snapshot, ancestors_of
from pyiceberg.table.update import AssertRefSnapshotId, AssertTableUUID, RemoveSnapshotsUpdate
from pyiceberg.utils.properties import property_as_bool, property_as_int

from relay.spark.writers.iceberg_commits import OWN, replace
from relay.spark.writers.iceberg_files import data_files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CREATED_WITH = {
    TableProperties.MAX_SNAPSHOT_AGE_MS: "86400000",
    TableProperties.METADATA_DELETE_AFTER_COMMIT_ENABLED: "true",
    TableProperties.METADATA_PREVIOUS_VERSIONS_MAX: "100",
}
"""The properties of a table that relay creates: it keeps the snapshots of a day, and the last 100 metadata files."""
_SHARES_FILES = "gc.enabled"
"""The property that, if false, says that other tables may use this one's files."""
_FEWEST = 20
"""The fewest snapshots that are removed at once."""
_SMALL = 16 << 20
"""The bytes of a file below which it is merged with others."""
_MERGED = 2 * _SMALL
"""The bytes of the files that become one: an executor has their rows in memory."""
_MERGED_FILES = "number int, file binary"
_MERGED_SCHEMA = pa.schema([("number", pa.int32()), ("file", pa.binary())])


# Merging small files


def merge_files(table: Table, session: SparkSession) -> None:
    """Merge the small files of each partition, on the executors, in one commit.

    Files with deleted rows are left alone: the ids of deletes hold for rows where they are. Nothing changes where
    another program commits a conflicting change meanwhile. Raises PyIceberg's and Spark's errors.
    """
    bins = _bins(table)
    if not bins:
        return
    described = pickle.dumps((table.metadata, table.io))
    parts = tuple(pickle.dumps(each) for each in bins)
    numbers = session.range(0, len(parts), 1, len(parts))
    rows = numbers.mapInArrow(partial(write_merged, described, parts), _MERGED_FILES).collect()
    new: list[DataFile] = [pickle.loads(row.file) for row in rows]  # noqa: S301
    old = [task.file for each in bins for task in each]
    if sum(file.record_count for file in new) != sum(file.record_count for file in old):
        raise ValueError("the merged files do not have the rows of the small ones")
    with suppress(CommitFailedException, ValidationException):
        replace(table, old, new)


def _bins(table: Table) -> list[list[FileScanTask]]:
    """The small files of each partition, in groups of which each becomes one file."""
    spec = table.metadata.default_spec_id
    partitions: dict[Any, list[FileScanTask]] = defaultdict(list)
    for task in table.scan().plan_files():
        file = task.file
        if file.spec_id == spec and not task.delete_files and file.file_size_in_bytes < _SMALL:
            partitions[file.partition].append(task)
    bins: list[list[FileScanTask]] = []
    for tasks in partitions.values():
        size = _MERGED
        for task in tasks:
            if size >= _MERGED:
                bins.append([])
                size = 0
            bins[-1].append(task)
            size += task.file.file_size_in_bytes
    return [each for each in bins if len(each) > 1]


def write_merged(
    described: bytes, parts: Sequence[bytes], numbers: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """On an executor: write the rows of each group of files to a new file; yields its number and a pickled DataFile.

    `described` is a pickled tuple: the table's metadata and its FileIO.
    """
    metadata, io = pickle.loads(described)  # noqa: S301
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            tasks = pickle.loads(parts[number])  # noqa: S301
            rows = ArrowScan(metadata, io, metadata.schema(), AlwaysTrue()).to_table(tasks)
            for file in data_files(metadata, rows, io):
                yield pa.RecordBatch.from_pylist(
                    [{"number": number, "file": pickle.dumps(file)}], schema=_MERGED_SCHEMA
                )


# Removing snapshots


def expire_snapshots(table: Table) -> None:
    """Remove the snapshots that the table's `history.expire.*` do not keep, and the files that only they have.

    A table without `history.expire.max-snapshot-age-ms` is left as it is. The removal waits until there are at least 20
    such snapshots. Nothing changes where another program commits meanwhile. Raises PyIceberg's errors.
    """
    expired = _expired(table, datetime.now(UTC))
    if len(expired) < _FEWEST:
        return
    metadata = table.metadata
    files = _only_in(table, expired)
    if table.catalog.load_table(table.name()).metadata.refs != metadata.refs:
        # A tag or branch that is made meanwhile keeps its snapshot, and the catalog would remove both.
        return
    # A branch that is set back to an old snapshot meanwhile keeps it.
    unchanged = (
        AssertRefSnapshotId(ref=name, snapshot_id=ref.snapshot_id)
        for name, ref in metadata.refs.items()
    )
    ids = [snapshot.snapshot_id for snapshot in expired]
    try:
        table.catalog.commit_table(
            table,
            (AssertTableUUID(uuid=metadata.table_uuid), *unchanged),
            (RemoveSnapshotsUpdate(snapshot_ids=ids),),
        )
    except (CommitFailedException, ValueError):
        return  # another program has moved a branch, or removed one of the snapshots
    for file in files:
        with suppress(FileNotFoundError):
            table.io.delete(file)


def _expired(table: Table, now: datetime) -> list[Snapshot]:
    """The snapshots that the table's policy does not keep, and no branch or tag names.

    A snapshot counts as old once another one has been the newest for that time: readers and writers may have begun with
    it until then.
    """
    metadata = table.metadata
    age = property_as_int(metadata.properties, TableProperties.MAX_SNAPSHOT_AGE_MS)
    if age is None or not property_as_bool(metadata.properties, _SHARES_FILES, True):
        return []
    fewest = property_as_int(
        metadata.properties,
        TableProperties.MIN_SNAPSHOTS_TO_KEEP,
        TableProperties.MIN_SNAPSHOTS_TO_KEEP_DEFAULT,
    )
    kept: set[int] = set()
    for ref in metadata.refs.values():
        # A branch's own policy may keep more than the table's.
        age = max(age, ref.max_snapshot_age_ms or age)
        newest = ancestors_of(metadata.snapshot_by_id(ref.snapshot_id), metadata)
        most = max(1, fewest or 1, ref.min_snapshots_to_keep or 1)
        kept.update(snapshot.snapshot_id for snapshot in islice(newest, most))
    oldest = int(now.timestamp() * 1000) - age
    kept.update(
        each.snapshot_id
        for each, following in pairwise(metadata.snapshot_log)
        if following.timestamp_ms >= oldest
    )
    return [
        snapshot
        for snapshot in metadata.snapshots
        if snapshot.timestamp_ms < oldest and snapshot.snapshot_id not in kept
    ]


def _only_in(table: Table, expired: Sequence[Snapshot]) -> list[str]:
    """The files that only these snapshots have: their lists, manifests, and data files."""
    gone = {snapshot.snapshot_id for snapshot in expired}
    remaining = _telling(
        [each for each in table.metadata.snapshots if each.snapshot_id not in gone], table.metadata
    )
    kept: dict[str, ManifestFile] = {}
    for snapshot in remaining:
        kept.update(_manifests(table, snapshot))
    ours: dict[str, ManifestFile] = {}
    for snapshot in expired:
        # Without its list, the snapshot is being removed by another program.
        with suppress(FileNotFoundError):
            ours.update(_manifests(table, snapshot))
    dropped = [each for path, each in ours.items() if path not in kept]
    files = set(_data_files(table, dropped))
    if files:
        files.difference_update(_data_files(table, kept.values()))
    lists = [snapshot.manifest_list for snapshot in expired]
    return [*lists, *(manifest.manifest_path for manifest in dropped), *sorted(files)]


def _telling(snapshots: list[Snapshot], metadata: TableMetadata) -> list[Snapshot]:
    """Those of the snapshots that have every file which one of them has, and which an older snapshot had.

    In a chain, each of which has been made of the one before, what the oldest does not have any more is in none of the
    others, unless a program adds a file again that had been removed. relay adds new files only.
    """
    ordered = sorted(snapshots, key=lambda each: each.sequence_number or 0)
    is_chain = all(
        after.parent_snapshot_id == each.snapshot_id for each, after in pairwise(ordered)
    )
    if not is_chain or metadata.format_version == 1:
        return ordered
    return [*ordered[:1], *(each for each in ordered[1:] if _may_add_again(each))]


def _may_add_again(snapshot: Snapshot) -> bool:
    """Whether a snapshot is another program's that adds files. One that merges files writes new ones."""
    summary = snapshot.summary
    return summary is None or (
        summary.operation in (Operation.APPEND, Operation.OVERWRITE)
        and OWN not in summary.additional_properties
    )


def _manifests(table: Table, snapshot: Snapshot) -> dict[str, ManifestFile]:
    return {manifest.manifest_path: manifest for manifest in snapshot.manifests(table.io)}


def _data_files(table: Table, manifests: Iterable[ManifestFile]) -> Iterator[str]:
    for manifest in manifests:
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
            yield entry.data_file.file_path
