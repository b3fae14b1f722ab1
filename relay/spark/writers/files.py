"""Writes batches to files below a path.

Source: Apache Spark documentation, "Parquet Files", dynamic partition overwrite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from relay.config.handlers import SparkHandler
from relay.spark.writers import BATCH_COLUMN, BatchId
from relay.spark.writers.columns import require_partition_columns
from relay.spark.writers.staged_files import StagedFiles

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class FilesWriter:
    """Writes folders whose last partition column is `relay_batch`, so that each batch has folders of its own."""

    def __init__(self, name: str, settings: SparkHandler) -> None:
        assert settings.path is not None  # noqa: S101
        self._name = name
        self._settings = settings
        self._path = settings.path

    def check(self, session: SparkSession) -> None:
        """Remove the staged files of drivers that died long ago."""
        staging = StagedFiles.of(session, self._path)
        if staging is not None:
            staging.remove_stale()

    def write(self, frame: DataFrame, batch: BatchId) -> list[str] | None:
        """Stage the batch; through Spark Connect, replace the batch's own folders. Raises MissingPartition."""
        by = [*self._settings.partition_by, BATCH_COLUMN]
        require_partition_columns(f"handlers.{self._name}", by, frame.columns)
        options = {name: text.get_secret_value() for name, text in self._settings.options.items()}
        staging = StagedFiles.of(frame.sparkSession, self._path)
        if staging is not None:
            return staging.write(frame, batch.id, self._settings.format, by, options)
        frame.write.save(
            self._path,
            self._settings.format,
            "overwrite",
            by,
            partitionOverwriteMode="dynamic",
            **options,
        )
        return None

    def publish(self, session: SparkSession, batch: BatchId, files: Sequence[str]) -> None:
        """Move the batch's files to their folders. Raises RelayError, and errors of the file system."""
        staging = StagedFiles.of(session, self._path)
        assert staging is not None  # noqa: S101
        staging.publish(batch.id, files)
