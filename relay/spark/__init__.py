"""Spark: the session, the engine of the pipeline, and the outbox as a data source.

from relay.spark import register

register(spark)
events = spark.read.format("outbox").option("dsn.env", "OUTBOX_DSN").load()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Register `format("outbox")` in a session; the executors need relay too. See docs/reference/data-source.md."""
    from relay.spark.data_source import register as register_source

    register_source(spark)


def java_home() -> Path:
    """Return a JAVA_HOME for a session of yours: the system's Java, or the runtime of the extra `java`.

    Raises ConfigurationError when there is no Java 17 or later.
    """
    from relay.spark.jvm import java_home as found

    return found()


__all__ = ["java_home", "register"]
