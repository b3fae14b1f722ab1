"""Transforms the events of a sink of `type: spark` before they are written: with `sql`, then with `transform`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay.config.handlers import SparkHandler
from relay.config.imports import load
from relay.faults import ConfigurationError
from relay.spark.faults import of_function, safe_description

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VIEW = "events"
"""The name of the frame in a sink's query."""


class Transform:
    """The query and the function of one sink."""

    def __init__(self, name: str, handler: SparkHandler) -> None:
        """Raises ConfigurationError for a callable that cannot be imported."""
        self._key = f"handlers.{name}"
        self._query = handler.sql
        self._function = (
            load(f"{self._key}.transform", handler.transform, "frame")
            if handler.transform
            else None
        )

    @property
    def has_function(self) -> bool:
        """Whether the sink has a user's function, whose errors may quote values."""
        return self._function is not None

    def applied(self, session: SparkSession, frame: DataFrame) -> DataFrame:
        """The frame to write: `frame` itself where the sink has neither a query nor a function.

        The view is one of `session`, which no other sink may use: a Connect server resolves it when the frame is
        written. Raises ConfigurationError.
        """
        if self._query:
            frame.createOrReplaceTempView(VIEW)
            frame = self._queried(session, self._query)
        return self._transformed(frame) if self._function else frame

    def _queried(self, session: SparkSession, query: str) -> DataFrame:
        from pyspark.errors import AnalysisException

        try:
            return session.sql(query)
        except AnalysisException as error:
            raise ConfigurationError(f"{self._key}.sql: {safe_description(error)}") from error

    def _transformed(self, frame: DataFrame) -> DataFrame:
        from pyspark.sql import DataFrame

        assert self._function is not None  # noqa: S101
        key = f"{self._key}.transform"
        with of_function(key):
            transformed = self._function(frame)
        if not isinstance(transformed, DataFrame):
            raise ConfigurationError(
                f"{key}: the function returned {type(transformed).__name__}: return the DataFrame to write"
            )
        return transformed
