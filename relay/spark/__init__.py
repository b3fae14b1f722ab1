"""Spark: the session, the engine of the pipeline, and the outbox as a data source.

from relay.spark import register

register(spark)
events = spark.read.format("outbox").option("dsn.env", "OUTBOX_DSN").load()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Register `format("outbox")` in a session; the executors need relay too. See docs/reference/data-source.md."""
    from relay.spark.data_source import register as register_source

    register_source(spark)


__all__ = ["register"]
