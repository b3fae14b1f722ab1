"""Writes batches with a user's function."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay.config.imports import load
from relay.spark.faults import of_function
from relay.spark.writers import BatchId

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class CallableWriter:
    """Calls `function(frame, batch)` until it returns. The function must tolerate repeated calls for a batch."""

    def __init__(self, name: str, path: str) -> None:
        """Raises ConfigurationError for a callable that cannot be imported."""
        self._key = f"handlers.{name}.callable"
        self._function = load(self._key, path, "frame", "batch")

    def check(self, session: SparkSession) -> None:
        """Check nothing: the function does."""

    def write(self, frame: DataFrame, batch: BatchId) -> None:
        """Call the function. Raises RelayError with the kind, file and line of the function's error."""
        with of_function(self._key):
            self._function(frame, batch)
