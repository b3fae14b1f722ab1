"""Writes batches to a Delta table exactly once, without Delta's jar: executors write files, the driver commits them.

Each commit has a transaction identifier (`txn`): the application is `relay:` and the application's UUID, the version is
the batch's number. A driver that was suspended cannot commit a batch that another one has committed meanwhile: delta-rs
rejects a commit if another `txn` of the application was committed after the table was loaded.

Source: Delta Transaction Log Protocol, "Transaction Identifiers"; delta-rs 1.6, `create_write_transaction`.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import deltalake
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction

from relay.config.handlers import SparkHandler
from relay.faults import ConfigurationError, NotNow
from relay.spark.writers import BatchId, Facts, lost
from relay.spark.writers.arrow import (
    MOST_KEY_BYTES,
    MOST_NAME_BYTES,
    arrow_schema,
    long_partition,
    refuse_partition_types,
    require_distinct_columns,
    require_known_types,
    require_partition_columns,
)
from relay.spark.writers.delta_files import (
    FACTS,
    REMOVED,
    BatchFiles,
    absolute_path,
    local_path,
    own_data_files,
    remove_files,
    write_files,
)
from relay.spark.writers.schema_changes import (
    Change,
    accept,
    comment_of,
    quoted,
    spark_statement,
    written,
)
from relay.spark.writers.upserts import SNAPSHOTS, Newest, collected, compared, marked, newest
from relay.store.positions.spark_batches import LastBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import DataFrame, SparkSession

_FORGETS_BATCHES = "delta.setTransactionRetentionDuration"
_UNSAFE_OPTIONS = ("aws_s3_allow_unsafe_rename", "allow_unsafe_rename")
_RULES = ("delta.invariants", "delta.generationExpression", "delta.identity.start")
"""Metadata of columns whose values each writer must compute or check."""
_WRITABLE_FEATURES = frozenset(
    {
        *(
            "appendOnly",
            "changeDataFeed",
            "checkConstraints",
            "columnMapping",
            "deletionVectors",
            "generatedColumns",
        ),
        *("invariants", "timestampNtz", "v2Checkpoint", "variantType", "variantType-preview"),
    }
)
"""The features of tables to which delta-rs 1.6 commits; it refuses others only after the files have been written."""
_IDENTITY_VERSION = 6
"""The writer version that stands for identity columns; from 7 on, the features of a table are listed."""

_APPEND_ONLY = "delta.appendOnly"
_UNREADABLE_FEATURES = frozenset({"deletionVectors", "v2Checkpoint"})
"""The features of tables to which delta-rs 1.6 commits, but whose rows it does not read for pyarrow."""
_DELETED_ROWS = "deletionVectors"
"""The feature of tables whose files may have deleted rows."""
_RETENTION = "delta.deletedFileRetentionDuration"
_FEWEST_HOURS = 24
"""The hours that relay keeps a file that no version has."""
_INTERVAL = re.compile(r"interval\s+(?P<number>\d+)\s+(?P<unit>[a-z]+?)s?")
_SECONDS = {
    "nanosecond": 0,
    "microsecond": 0,
    "millisecond": 0.001,
    "second": 1,
    "minute": 60,
    "hour": 3600,
    "day": 86_400,
    "week": 604_800,
}
_NULL_PARTITIONS = ("", "__HIVE_DEFAULT_PARTITION__")
"""The texts that deltalake reads as null in a partition column."""
_ATTEMPTS = 5
"""How often a merge is made while others commit to the table."""
_FILE_NAME_BYTES = 100
"""More than the bytes of the name of a file that deltalake writes."""
_REMOVING_TASKS = 4
"""The most tasks that remove files."""
_CREATED_WITH = {"delta.checkpointInterval": "20"}
"""The properties of a table that relay creates: each batch reads the commits since the last checkpoint."""


class DeltaWriter:
    """Appends to the Delta table at `path`; the first batch creates it."""

    kind = "delta"

    def __init__(self, name: str, settings: SparkHandler) -> None:
        """Raises ModuleNotFoundError without the extra `delta`, ConfigurationError for a folder that has no address."""
        self._name = name
        self._key = f"handlers.{name}"
        self._path = absolute_path(str(settings.path))
        folder = local_path(self._path)
        if folder is not None and unquote(str(folder)) != str(folder):
            raise ConfigurationError(
                f"{self._key}.path: deltalake takes {folder} for {unquote(str(folder))}: name a folder without %"
            )
        self._partition_by = list(settings.partition_by)
        self._options = settings.plain_options
        self._evolves = settings.evolves
        self._read: tuple[LastBatch, int] | None = None
        """The last batch that was looked for, and up to which version the commits after it have been read."""

    def check(self, session: SparkSession) -> None:
        """Raise ConfigurationError for a table or a store that cannot be written exactly once."""
        for name, value in self._options.items():
            if name.lower() in _UNSAFE_OPTIONS and value.lower() in ("true", "1", "yes", "on"):
                raise ConfigurationError(
                    f"{self._key}.options: with {name} two commits can overwrite each other: remove it"
                )
        folder = local_path(self._path)
        if folder is not None and folder.exists() and not folder.is_dir():
            raise ConfigurationError(f"{self._key}.path: {folder} is a file: name a folder")
        table = self._load()
        if table is not None:
            self._require_writable(table)

    def write(self, frame: DataFrame, batch: BatchId) -> None:
        """Append the batch unless the table has it.

        Raises ConfigurationError if the table does not accept the frame's columns, TransientFault if another program
        creates the table meanwhile, and deltalake's DeltaError.
        """
        # Loaded before the files are written: the commit then fails if another driver commits the batch meanwhile.
        table = self._known(batch)
        if table is not None and _has(table, batch):
            return
        schema = arrow_schema(frame)
        files = self._files(table, schema, batch)
        if table is not None:
            files = replace(files, schema=self._accepted(table, schema))
            if _has(table, batch):
                # Another driver has committed it before the table was changed.
                return
        actions = [
            _action(row) for row in frame.mapInArrow(partial(write_files, files), FACTS).collect()
        ]
        if table is None:
            table = self._created(files)
            if _has(table, batch):
                return
            files = replace(files, schema=self._accepted(table, schema))
            if table.metadata().partition_columns != list(files.partition_by):
                raise NotNow(f"{self._key}.path: another program has created the table meanwhile")
        try:
            self._commit(table, actions, files, batch)
        except DeltaError:
            committed = self._load()
            if committed is None or not _has(committed, batch):
                raise

    def left(
        self, session: SparkSession | None, batch: LastBatch, files: Sequence[str] | None
    ) -> Facts:
        """The table's id, a version that has the batch's transaction, and the version's time in milliseconds."""
        table = self._load()
        if table is None or _newest(table, batch) < batch.number:
            raise lost(self._name, self._absence(table), batch)
        moments = [int(commit.get("timestamp", 0)) for commit in table.history(1)]
        return {
            "table": table.metadata().id,
            "version": table.version(),
            "at": max(moments, default=0),
        }

    def lacks(self, session: SparkSession | None, last: LastBatch, facts: Facts) -> str | None:
        """Why the table is another or an older one, or its rows were removed or restored after the batch."""
        table = self._load()
        if table is None or _newest(table, last) < last.number:
            return self._absence(table)
        if table.version() < facts["version"]:
            return f"the table has been set back to an older copy, of version {table.version()}"
        since = facts["version"]
        if self._read is not None and self._read[0] == last:
            since = max(since, self._read[1])
        why = _removal(table, facts, since)
        if why is None:
            self._read = last, table.version()
        return why

    def _absence(self, table: deltalake.DeltaTable | None) -> str:
        if table is None:
            return f"there is no table at {self._path}"
        return f"the table at {self._path}, {table.metadata().id}, does not have it"

    def _known(self, batch: BatchId) -> deltalake.DeltaTable | None:
        """The table; None before the first batch of the sink. Raises LostDestination for one that is gone."""
        table = self._load()
        if table is None and not batch.is_first:
            raise lost(self._name, self._absence(None), LastBatch(batch.application, batch.number))
        return table

    def upkeep(self, session: SparkSession) -> None:
        """Merge small files, and remove the files that no version has which the table keeps.

        deltalake writes checkpoints and removes old log files with commits, as the table's properties say. Raises
        ConfigurationError as `write` does, and deltalake's DeltaError.
        """
        table = self._load()
        if table is None:
            return
        self._require_writable(table)
        try:
            if _DELETED_ROWS not in (table.protocol().writer_features or ()):
                # A commit that removes one of the files meanwhile makes it fail; they are then merged the next time.
                with suppress(CommitFailedError):
                    table.optimize.compact(self._mergeable(table), max_concurrent_tasks=1)
        finally:
            # Also where deltalake cannot merge others' files, such as those of a partition whose value has a `~`.
            self._remove_old_files(table, session)

    def _mergeable(self, table: deltalake.DeltaTable) -> list[tuple[str, str, list[Any]]] | None:
        """The filter of the partitions whose files deltalake can merge: not those of too long a name."""
        by = table.metadata().partition_columns
        if not by:
            return None
        columns = [f"partition.{name}" for name in by]
        files = pa.table(table.get_add_actions(flatten=True)).select(columns).rename_columns(by)
        long: dict[str, list[Any]] = defaultdict(list)
        for values in files.group_by(by).aggregate([]).to_pylist():
            name = _too_long(self._path, values)
            if name is not None:
                long[name].append(values[name])
        return [(name, "not in", values) for name, values in long.items()] or None

    def _remove_old_files(self, table: deltalake.DeltaTable, session: SparkSession) -> None:
        """Remove the table's own data files that none of its kept versions has, on the executors.

        deltalake's vacuum would remove whatever else lies below the table's path too: other tables, and deletion
        vectors that the table needs. So it only says which files no version has.
        """
        hours = _vacuum_hours(table.metadata().configuration)
        # `full`: the light one misses files once a checkpoint no longer has their removal (delta-io/delta-rs#3644).
        unused = table.vacuum(hours, dry_run=True, full=True)
        is_own = own_data_files(table.metadata().partition_columns)
        old = [path for path in unused if is_own(path)]
        if not old:
            return
        tasks = min(len(old), _REMOVING_TASKS)
        parts = [old[number::tasks] for number in range(tasks)]
        numbers = session.range(0, tasks, 1, tasks)
        numbers.mapInArrow(
            partial(remove_files, self._path, self._options, parts), REMOVED
        ).collect()

    def _files(
        self, table: deltalake.DeltaTable | None, schema: pa.Schema, batch: BatchId
    ) -> BatchFiles:
        """How the files of a batch are written. Raises ConfigurationError and MissingPartition."""
        by = self._partition_by if table is None else table.metadata().partition_columns
        require_distinct_columns(f"{self._key}.path", schema.names)
        require_known_types(f"{self._key}.path", schema, "Delta", _as_delta)
        require_partition_columns(self._key, by, schema.names)
        refuse_partition_types(self._key, by, schema, _has_no_partition_value)
        return BatchFiles(self._path, self._options, schema, by, batch.id)

    def _created(self, files: BatchFiles) -> deltalake.DeltaTable:
        """The table, which is created without rows: where two create it at once, deltalake commits both (1.6)."""
        folder = local_path(self._path)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        try:
            deltalake.DeltaTable.create(
                self._path,
                deltalake.Schema.from_arrow(files.schema),
                mode="error",
                partition_by=list(files.partition_by),
                configuration=_CREATED_WITH,
                storage_options=self._options,
                commit_properties=deltalake.CommitProperties(max_commit_retries=0),
            )
        except DeltaError:
            table = self._load()
            if table is None:
                raise
            return table
        return deltalake.DeltaTable(self._path, storage_options=self._options)

    def _accepted(self, table: deltalake.DeltaTable, schema: pa.Schema) -> pa.Schema:
        """The types with which a batch is written. The table may be changed, and is then read again.

        Raises ConfigurationError for a batch that does not fit, and DeltaError.
        """
        self._require_writable(table)
        changing = _DeltaColumns(table, self._path)
        accept(self._name, f"{self._key}.path", changing, schema, self._evolves)
        return written(changing.schema, schema)

    def _load(self) -> deltalake.DeltaTable | None:
        try:
            return deltalake.DeltaTable(self._path, storage_options=self._options)
        except TableNotFoundError:
            return None

    def _require_writable(self, table: deltalake.DeltaTable) -> None:
        configuration = table.metadata().configuration
        if _FORGETS_BATCHES in configuration:
            raise ConfigurationError(
                f"{self._key}.path: the table's property {_FORGETS_BATCHES} removes the record of committed batches: "
                "unset it"
            )
        mapping = configuration.get("delta.columnMapping.mode", "none")
        rules = [name for name in configuration if name.startswith("delta.constraints.")]
        rules += [
            f"{rule} of {field.name}"
            for field in table.schema().fields
            for rule in _RULES
            if rule in field.metadata
        ]
        protocol = table.protocol()
        unknown = sorted({*(protocol.writer_features or ())} - _WRITABLE_FEATURES)
        if protocol.min_writer_version == _IDENTITY_VERSION:
            unknown = ["identityColumns"]
        rules += [f"the feature {name}" for name in unknown]
        if mapping != "none":
            rules.append("delta.columnMapping.mode")
        if rules:
            raise ConfigurationError(
                f"{self._key}.path: the table has {', '.join(rules)}, which relay does not support: write to a table "
                "without it"
            )

    def _commit(
        self,
        table: deltalake.DeltaTable,
        actions: list[AddAction],
        files: BatchFiles,
        batch: BatchId,
    ) -> None:
        table.create_write_transaction(
            list(actions),
            "append",
            deltalake.Schema.from_arrow(files.schema),
            list(files.partition_by),
            commit_properties=_properties(batch),
        )


class DeltaUpserts(DeltaWriter):
    """Keeps the newest event of each key in the Delta table at `path`; deltalake merges a batch, in this process.

    The merge is made of the version from which the rows were read. Any other commit in between makes it begin again, so
    two sinks may write the same table.
    """

    def __init__(self, name: str, settings: SparkHandler) -> None:
        """Raises ModuleNotFoundError without the extra `delta`."""
        super().__init__(name, settings)
        self._by = list(settings.key)
        self._deletes = settings.deletes

    def _require_writable(self, table: deltalake.DeltaTable) -> None:
        super()._require_writable(table)
        # deltalake finds out only when it reads, or after it has written files.
        features = {*(table.protocol().reader_features or ())} & _UNREADABLE_FEATURES
        unfit = [f"the feature {name}" for name in sorted(features)]
        if table.metadata().configuration.get(_APPEND_ONLY, "false").lower() == "true":
            unfit.append(_APPEND_ONLY)
        if unfit:
            raise ConfigurationError(
                f"{self._key}.path: the table has {', '.join(unfit)}, with which rows cannot be replaced: use "
                "mode: append, or a table without it"
            )

    def write(self, frame: DataFrame, batch: BatchId) -> None:
        """Merge the batch unless the table has it. Raises as `DeltaWriter.write` does."""
        table = self._known(batch)
        if table is not None and _has(table, batch):
            return
        self.merge(collected(marked(self._key, frame, self._by, self._deletes)), batch)

    def merge(self, rows: pa.Table, batch: BatchId) -> None:
        """Merge the rows of a batch unless the table has it. Raises ConfigurationError and DeltaError."""
        table = self._known(batch)
        by = self._partition_by if table is None else table.metadata().partition_columns
        events = newest(_with_null_partitions(rows, by), self._by, batch)
        self._require_short_partitions(events.rows, by)
        for attempt in range(1, _ATTEMPTS + 1):
            if attempt > 1:
                table = self._known(batch)
            if table is None:
                table = self._created(self._files(None, events.rows.schema, batch))
            if _has(table, batch):
                return
            try:
                self._merge(table, events, batch)
            except DeltaError:
                if attempt == _ATTEMPTS:
                    raise
            else:
                return

    def _merge(self, table: deltalake.DeltaTable, events: Newest, batch: BatchId) -> None:
        self._files(table, events.rows.schema, batch)
        types = self._accepted(table, events.rows.schema)
        if _has(table, batch):
            return
        rows = events.without(self._stale(table, events)).cast(types)
        if not rows.num_rows:
            self._commit(table, [], self._files(table, rows.schema, batch), batch)
            return
        columns = {quoted(name): f"s.{quoted(name)}" for name in rows.column_names}
        same = [f"(t.{quoted(name)} is not distinct from s.{quoted(name)})" for name in self._by]
        merge = table.merge(
            rows,
            predicate=" and ".join(same),
            source_alias="s",
            target_alias="t",
            # The rows were compared with those of this version.
            commit_properties=_properties(batch, max_commit_retries=0),
        )
        merge.when_matched_update(columns).when_not_matched_insert(columns).execute()

    def _require_short_partitions(self, rows: pa.Table, partition_by: Sequence[str]) -> None:
        """Raise ConfigurationError for a partition in which deltalake could not write a file, before it writes any."""
        by = [name for name in partition_by if name in rows.column_names]
        for values in rows.group_by(by).aggregate([]).to_pylist() if by else ():
            name = _too_long(self._path, values)
            if name is not None:
                raise long_partition(self._key, name)

    def _stale(self, table: deltalake.DeltaTable, events: Newest) -> NDArray[np.int64]:
        """The indices of the events that are not newer than the row of their key."""
        columns = [*self._by, "c_offset", SNAPSHOTS]
        stale = [
            compared(pa.Table.from_batches([rows]), self._by, events)[1]
            for rows in table.to_pyarrow_dataset().to_batches(columns=columns)
            if rows.num_rows
        ]
        return np.unique(np.concatenate(stale)) if stale else np.empty(0, np.int64)


class _DeltaColumns:
    """The columns of a table. deltalake 1.6 does not know the feature `typeWidening`, so no type is changed."""

    def __init__(self, table: deltalake.DeltaTable, path: str) -> None:
        self._table = table
        self._path = path

    @property
    def schema(self) -> pa.Schema:
        return pa.schema(self._table.schema().to_arrow())

    @property
    def rigid(self) -> Collection[str]:
        return list(self.schema.names)

    def statement(self, change: Change) -> str:
        return spark_statement(f"delta.{quoted(self._path)}", change)

    def change(self, changes: Sequence[Change]) -> None:
        """Add columns in one commit, and set comments; deltalake refuses it once another one has changed columns."""
        added = [deltalake.Field.from_arrow(each.column) for each in changes if each.kind == "add"]
        if added:
            self._table.alter.add_columns(added)
        for each in changes:
            if each.kind == "comment":
                comment = {"comment": comment_of(each.column) or ""}
                self._table.alter.set_column_metadata(each.column.name, comment)


def _as_delta(frame: pa.Schema) -> deltalake.Schema:
    """The frame's schema as Delta's; raises an error for a type that Delta's protocol does not have."""
    if any(map(pa.types.is_null, frame.types)):
        raise ValueError("void")  # deltalake 1.6 takes it, and other readers do not
    return deltalake.Schema.from_arrow(frame)


def _has_no_partition_value(kind: pa.DataType) -> bool:
    """Whether the log, which has partition values as text, cannot keep those of a type.

    Readers decode bytes in different ways. deltalake 1.6 writes the decimal -0.01 as 0.-1 when it merges rows or files,
    and then nobody can read the table.
    """
    has_fraction: bool = pa.types.is_decimal(kind) and kind.scale > 0
    return has_fraction or pa.types.is_binary(kind)


def _with_null_partitions(rows: pa.Table, partition_by: Sequence[str]) -> pa.Table:
    """The rows as a merge leaves them in the table: an empty text of a partition column is null, and a key too."""
    for name in set(partition_by) & set(rows.column_names):
        if pa.types.is_string(rows.schema.field(name).type):
            is_null = pc.is_in(rows[name], pa.array(_NULL_PARTITIONS))
            values = pc.if_else(is_null, pa.scalar(None, pa.string()), rows[name])
            rows = rows.set_column(rows.column_names.index(name), name, values)
    return rows


def _too_long(path: str, values: Mapping[str, Any]) -> str | None:
    """The column whose value makes the folder of a partition too long for deltalake; None if it can write there.

    It writes values with all characters into the names of folders; relay's own folders are short (`delta_files`).
    """
    sizes = {
        name: len(name.encode()) + len(quote(_text(value), safe="")) + 1
        for name, value in values.items()
    }
    if not sizes:
        return None
    longest = max(sizes, key=lambda name: sizes[name])
    if local_path(path) is not None:
        return longest if sizes[longest] > MOST_NAME_BYTES else None
    whole = len(path.encode()) + sum(sizes.values()) + len(sizes) + _FILE_NAME_BYTES
    return longest if whole > MOST_KEY_BYTES else None


def _text(value: Any) -> str:
    return format(Decimal(repr(value)), "f") if isinstance(value, float) else str(value)


def _properties(batch: BatchId, **more: int) -> deltalake.CommitProperties:
    return deltalake.CommitProperties(
        app_transactions=[deltalake.Transaction(_application(batch), batch.number)],
        custom_metadata={"relay.batch": batch.id, **batch.completeness},
        **more,
    )


def _application(batch: BatchId | LastBatch) -> str:
    return f"relay:{batch.application}"


def _has(table: deltalake.DeltaTable, batch: BatchId) -> bool:
    return _newest(table, batch) >= batch.number


def _newest(table: deltalake.DeltaTable, batch: BatchId | LastBatch) -> int:
    """The number of the newest batch of an application that has been committed to a table; 0 if there is none."""
    return table.transaction_version(_application(batch)) or 0


def _removal(table: deltalake.DeltaTable, facts: Facts, since: int) -> str | None:
    """Which commit after the version `since` took from a table what a batch left; None where none did.

    A table that is restored keeps its transactions, so only the commits tell. Those whose log the table has removed by
    its retention are passed over.
    """
    count = table.version() - since
    commits = table.history(count) if count > 0 else []
    has: dict[int, bool] = {}
    why: str | None = None
    if len(commits) < count and table.metadata().id != facts["table"]:
        # Some writers give a table another id with another schema, so where the commits are there, these tell.
        return f"it is another table, {table.metadata().id}"
    for commit in sorted(commits, key=lambda each: int(each["version"])):
        version, operation = int(commit["version"]), str(commit.get("operation", "")).upper()
        parameters = commit.get("operationParameters") or {}
        if operation == "RESTORE":
            to = _restored_version(parameters, commits, facts)
            has_it = to is not None and has.get(to, to >= facts["version"])
            why = None if has_it else f"version {version} of the table is a restored older one"
        elif _replaces_all(operation, parameters):
            why = f"version {version} of the table, {operation}, removed the rows before it"
        has[version] = why is None
    return why


def _restored_version(
    parameters: Mapping[str, Any], commits: Sequence[Mapping[str, Any]], facts: Facts
) -> int | None:
    """The version that a table was restored to; None where it is older than a batch, or nobody can tell."""
    version = str(parameters.get("version"))
    if version.isdigit():
        return int(version)
    moment = str(parameters.get("datetime"))  # delta-rs: milliseconds; Spark's text has no zone
    if not moment.isdigit() or int(moment) < facts["at"]:
        return None
    before = [
        int(each["version"]) for each in commits if int(each.get("timestamp", 0)) <= int(moment)
    ]
    return max(before, default=int(facts["version"]))


def _replaces_all(operation: str, parameters: Mapping[str, Any]) -> bool:
    """Whether a commit removes all rows that the table had, whatever they are."""
    is_whole = str(parameters.get("predicate", "[]")) in ("[]", '["true"]', "None")
    if operation in ("DELETE", "TRUNCATE"):
        return is_whole
    overwrites = str(parameters.get("mode", "")).lower() == "overwrite"
    is_dynamic = str(parameters.get("isDynamicPartitionOverwrite", "")).lower() == "true"
    return (overwrites and is_whole and not is_dynamic) or "REPLACE TABLE" in operation


def _vacuum_hours(configuration: Mapping[str, str]) -> int | None:
    """The hours that a file without a version is kept; None: as the table or deltalake's default says.

    A table's own retention may be too short for files that a batch has written and not yet committed.
    """
    found = _INTERVAL.fullmatch(configuration.get(_RETENTION, ""))
    if found is None or found["unit"] not in _SECONDS:
        return None
    seconds = int(found["number"]) * _SECONDS[found["unit"]]
    return _FEWEST_HOURS if seconds < _FEWEST_HOURS * 3600 else None


def _action(row: Any) -> AddAction:
    return AddAction(
        path=row.path,
        size=row.size,
        partition_values=json.loads(row.partition_values),
        modification_time=time.time_ns() // 1_000_000,
        data_change=True,
        stats=row.stats,
    )
