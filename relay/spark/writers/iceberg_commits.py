"""Commits to an Iceberg table: each once for a batch, and those that replace files by others with the same rows.

Source: Iceberg Table Spec, "Optimistic Concurrency", "Snapshots"; PyIceberg 0.12, `commit_transaction`,
`_SnapshotProducer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pyiceberg.exceptions import CommitFailedException, ValidationException
from pyiceberg.manifest import DataFile, ManifestFile
from pyiceberg.table import Table, TableProperties, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Snapshot, Summary
from pyiceberg.table.update import AddSnapshotUpdate, TableUpdate, UpdatesAndRequirements
from pyiceberg.table.update.snapshot import _FastAppendFiles, _MergeAppendFiles, _OverwriteFiles
from pyiceberg.table.update.validate import _validate_no_new_deletes_for_data_files
from pyiceberg.utils.properties import property_as_bool

from relay.spark.writers import BatchId, Facts
from relay.store.positions.spark_batches import LastBatch

_ATTEMPTS = 5
"""How often a commit is begun again on the newest snapshot. PyIceberg repeats each beginning by itself, too."""
OWN = "relay.application"
"""The key in the summary of a snapshot that relay has made of a batch."""
_NUMBER = "relay.number"


class AlreadyCommitted(Exception):
    """Another driver has committed the batch."""


def has(table: Table, batch: BatchId | LastBatch) -> bool:
    """Whether the table has the batch."""
    return int(table.metadata.properties.get(_property(batch), "0")) >= batch.number


def facts_of(table: Table, batch: LastBatch) -> Facts:
    """What tells that the table has a batch that was committed to it: its id, and the batch's snapshot.

    Where the snapshot has been removed, the present one stands for it.
    """
    own = (
        each
        for each in reversed(table.metadata.snapshots)
        if _stated_by(each, OWN) == batch.application
        and _stated_by(each, _NUMBER) == str(batch.number)
    )
    snapshot = next(own, None) or table.current_snapshot()
    if snapshot is None:
        return {"table": str(table.metadata.table_uuid)}
    return {
        "table": str(table.metadata.table_uuid),
        "snapshot": snapshot.snapshot_id,
        "order": _order(snapshot),
        "rows": _rows(snapshot),
    }


def removal(table: Table, facts: Facts) -> str | None:
    """Why a table does not have any more what a batch left; None where it has.

    A rollback keeps the table's properties, so only the snapshots tell: the batch's is an ancestor of the present one.
    One that has been removed, with all before it, was an ancestor if every snapshot that is left came after it.
    """
    if str(table.metadata.table_uuid) != facts["table"]:
        return f"{'.'.join(table.name())} is another table, {table.metadata.table_uuid}"
    if "snapshot" not in facts:
        return None
    known = {each.snapshot_id: each for each in table.metadata.snapshots}
    snapshot = table.current_snapshot()
    if snapshot is None:
        return "the table has no snapshot"
    while snapshot.snapshot_id != facts["snapshot"]:
        if _order(snapshot) < facts["order"]:
            return f"the table has been set back to snapshot {snapshot.snapshot_id}, which is older"
        if facts["rows"] and _rows(snapshot) == 0:
            return f"snapshot {snapshot.snapshot_id} removed all rows of the table"
        before = known.get(snapshot.parent_snapshot_id or 0)
        if before is None and facts["snapshot"] in known:
            return f"snapshot {snapshot.snapshot_id} replaced the table"
        if before is None:
            return None
        snapshot = before
    return None


def _order(snapshot: Snapshot) -> int:
    """A number that grows with each snapshot of a table; the sequence numbers of format version 1 are all 0."""
    return snapshot.sequence_number or snapshot.timestamp_ms


def _rows(snapshot: Snapshot) -> int | None:
    """The rows of a snapshot; None where its summary does not tell."""
    rows = _stated_by(snapshot, "total-records")
    return int(rows) if rows.isdigit() else None


def _stated_by(snapshot: Snapshot, key: str) -> str:
    summary = snapshot.summary
    return "" if summary is None else summary.additional_properties.get(key, "")


def commit(table: Table, batch: BatchId, files: Iterable[DataFile]) -> None:
    """Append the files of a batch. Raises AlreadyCommitted, and PyIceberg's errors.

    PyIceberg repeats a commit only while the snapshot that it began with is in the table. Where that has been removed
    meanwhile, and nothing has been committed therefore, the commit begins again with the same files.
    """
    fenced = _Fenced(table, batch)
    added = list(files)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            _append(fenced, batch, added)
        except (CommitFailedException, ValidationException, FileNotFoundError):
            if attempt == _ATTEMPTS:
                raise
            fenced.refresh()
        else:
            return


def upsert(table: Table, batch: BatchId, old: Iterable[DataFile], new: Iterable[DataFile]) -> None:
    """Commit a batch whose rows are in `new`, which has the other rows of the files `old` too.

    Raises AlreadyCommitted, ValidationException where another program has committed to the table meanwhile, and
    PyIceberg's other errors.
    """
    transaction = _Transaction(_Fenced(table, batch))
    transaction.set_properties(_stated(batch))
    with _Upsert(
        Operation.OVERWRITE, transaction, table.io, snapshot_properties=_summary(batch)
    ) as change:
        for file in old:
            change.delete_data_file(file)
        for file in new:
            change.append_data_file(file)
    transaction.commit_transaction()


def replace(table: Table, old: Iterable[DataFile], new: Iterable[DataFile]) -> None:
    """Replace files by others with the same rows. Raises PyIceberg's errors.

    It fails where another program has removed one of the old files meanwhile, or rows of it.
    """
    transaction = _Transaction(table)
    with _Replacement(Operation.OVERWRITE, transaction, table.io) as replacement:
        for file in old:
            replacement.delete_data_file(file)
        for file in new:
            replacement.append_data_file(file)
    transaction.commit_transaction()


class _Fenced(Table):
    """A table whose `refresh` raises AlreadyCommitted if the table has the batch."""

    def __init__(self, table: Table, batch: BatchId) -> None:
        super().__init__(
            table.name(),
            table.metadata,
            table.metadata_location,
            table.io,
            table.catalog,
            table.config,
        )
        self._batch = batch

    def refresh(self) -> Table:
        """Read the table again. Raises AlreadyCommitted."""
        super().refresh()
        if has(self, self._batch):
            raise AlreadyCommitted
        return self


class _Transaction(Transaction):
    """A transaction that computes its metadata once for each change.

    PyIceberg computes it some 15 times for a commit, each time with a copy of all snapshots.
    """

    _known: tuple[TableMetadata, tuple[Any, ...], TableMetadata] | None = None

    @property
    def table_metadata(self) -> TableMetadata:
        """The table's metadata with the changes of this transaction; nobody may change it."""
        known = self._known
        if known is None or known[0] is not self._table.metadata or known[1] is not self._updates:
            known = self._table.metadata, self._updates, super().table_metadata
            self._known = known
        return known[2]


def _append(table: Table, batch: BatchId, files: Iterable[DataFile]) -> None:
    transaction = _Transaction(table)
    transaction.set_properties(_stated(batch))
    # A snapshot even without files: only an update of the snapshot makes the catalog compare it.
    with _appending(transaction, table, _summary(batch)) as append:
        for file in files:
            append.append_data_file(file)
    transaction.commit_transaction()


def _appending(
    transaction: Transaction, table: Table, summary: Mapping[str, str]
) -> _FastAppendFiles:
    # Iceberg's own default is to merge manifests; PyIceberg's is not to.
    merges = property_as_bool(
        table.metadata.properties, TableProperties.MANIFEST_MERGE_ENABLED, True
    )
    update = transaction.update_snapshot(snapshot_properties=dict(summary))
    append = update.merge_append()
    assert isinstance(append, _MergeAppendFiles)  # noqa: S101
    append._merge_enabled = merges
    return append


def _stated(batch: BatchId) -> dict[str, str]:
    # As properties of the table too, since the newest snapshot may be another program's.
    stated = {f"{_property(batch)}.{name}": text for name, text in batch.completeness.items()}
    return {_property(batch): str(batch.number), **stated}


def _summary(batch: BatchId) -> dict[str, str]:
    return {
        OWN: batch.application,
        _NUMBER: str(batch.number),
        "relay.batch": batch.id,
        **batch.completeness,
    }


def _property(batch: BatchId | LastBatch) -> str:
    return f"relay.{batch.application}"


class _Rewrite(_OverwriteFiles):
    """Replaces files that the snapshot it began with has."""

    def _build_delete_files_partition_predicate(self) -> None:
        """Select no manifests: all are read.

        PyIceberg 0.12 compares the values of a transform, such as a day, with those of its column, and so misses some.
        """

    def _build_manifest_evaluator(self, spec_id: int) -> Callable[[ManifestFile], bool]:
        return lambda _: True


class _Upsert(_Rewrite):
    """Replaces files by those of a batch, unless another program has committed to the table since they were read."""

    def _validate_concurrency(self) -> None:
        """Raise ValidationException if the table has another snapshot than the one that was read."""
        window = self._commit_window
        if window is not None and not window.is_empty():
            raise ValidationException("another program has committed to the table")


class _Replacement(_Rewrite):
    """Replaces files by others with the same rows, in a snapshot that readers of changes pass over."""

    def _commit(self) -> UpdatesAndRequirements:
        updates, requirements = super()._commit()
        return tuple(map(_as_replacement, updates)), requirements

    def _validate_concurrency(self) -> None:
        """Raise ValidationException if rows of the old files have been deleted since the replacement began.

        What others have added is no conflict. That the old files are still there is checked by the snapshot itself.
        """
        window = self._commit_window
        if window is None or window.is_empty() or window.head is None:
            return
        _validate_no_new_deletes_for_data_files(
            self._transaction._table, window.head, None, self._deleted_data_files, window.base
        )


def _as_replacement(update: TableUpdate) -> TableUpdate:
    if not isinstance(update, AddSnapshotUpdate) or update.snapshot.summary is None:
        return update
    stated = update.snapshot.summary.additional_properties
    summary = Summary(operation=Operation.REPLACE, **stated)
    return AddSnapshotUpdate(snapshot=update.snapshot.model_copy(update={"summary": summary}))
