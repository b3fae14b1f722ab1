"""Writes batches to files below a path.

Source: Apache Spark documentation, "Parquet Files", dynamic partition overwrite.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from relay.config.handlers import SparkHandler
from relay.spark.writers import BATCH_COLUMN, BatchId
from relay.spark.writers.columns import require_partition_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STALE_SECONDS = 7 * 24 * 3600.0
"""The age at which an attempt's staging folder is removed: its driver has died."""


class FilesWriter:
    """Writes folders whose last partition column is `relay_batch`, so that a batch replaces only its own folders."""

    def __init__(self, name: str, settings: SparkHandler) -> None:
        assert settings.path is not None  # noqa: S101
        self._name = name
        self._settings = settings
        self._path = settings.path

    def check(self, session: SparkSession) -> None:
        """Remove the staging folders of drivers that died more than STALE_SECONDS ago."""
        folders = _Folders.of(session, self._path)
        if folders is not None:
            folders.remove(".spark-staging-*", STALE_SECONDS)

    def write(self, frame: DataFrame, batch: BatchId) -> None:
        """Replace the batch's own folders. Raises MissingPartition."""
        by = self._settings.partition_by
        if batch.tried:
            # If the query, or a table in it, has changed since, the earlier rows may be in other folders.
            folders = _Folders.of(frame.sparkSession, self._path)
            if folders is not None:
                folders.remove("*/" * len(by) + f"{BATCH_COLUMN}={batch.id}")
        require_partition_columns(f"handlers.{self._name}", by, frame.columns)
        frame.write.save(
            self._path,
            self._settings.format,
            "overwrite",
            [*by, BATCH_COLUMN],
            partitionOverwriteMode="dynamic",
            **{name: value.get_secret_value() for name, value in self._settings.options.items()},
        )


class _Folders:
    """The folders below a path, through Hadoop's file systems, which resolve every path that Spark accepts."""

    def __init__(self, system: Any, path: Any, jvm: Any) -> None:
        self._system = system
        self._path = path
        self._jvm = jvm

    @classmethod
    def of(cls, session: SparkSession, path: str) -> _Folders | None:
        """The folders of a path; None on Spark Connect, whose JVM is out of reach."""
        context = getattr(session, "_jsparkSession", None)
        if context is None:
            return None
        jvm: Any = session.sparkContext._jvm
        folder = jvm.org.apache.hadoop.fs.Path(path)
        return cls(folder.getFileSystem(context.sessionState().newHadoopConf()), folder, jvm)

    def remove(self, pattern: str, older_than: float = 0.0) -> None:
        """Remove the folders below the path that match a glob and were not modified for `older_than` seconds."""
        statuses = self._system.globStatus(self._jvm.org.apache.hadoop.fs.Path(self._path, pattern))
        for status in statuses or ():
            if time.time() - status.getModificationTime() / 1000 >= older_than:
                self._system.delete(status.getPath(), True)
