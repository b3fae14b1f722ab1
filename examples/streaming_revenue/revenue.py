"""Computes revenue by hour from the outbox, as a stream that continues where it stopped and counts each order once.

OUTBOX_DSN=postgresql://… spark-submit revenue.py /lake/revenue
"""

from __future__ import annotations

import os
import sys

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from relay.spark import register


def revenue(events: DataFrame) -> DataFrame:
    """Orders and their amounts for each hour; an hour is final when an event two hours later has arrived.

    No event counts as newer than now: one whose publisher's clock is wrong would end the hours of all others.
    """
    orders = events.where("event_type = 'order.placed'").select(
        f.least("event_ts", f.current_timestamp()).alias("event_ts"),
        f.get_json_object("payload", "$.amount").cast("decimal(18,2)").alias("amount"),
    )
    hours = orders.withWatermark("event_ts", "2 hours").groupBy(f.window("event_ts", "1 hour"))
    return hours.agg(f.count("*").alias("orders"), f.sum("amount").alias("amount")).select(
        "window.start", "window.end", "orders", "amount"
    )


def write(spark: SparkSession, dsn: str, path: str) -> None:
    """Write the hours that have become final since the last call."""
    events = spark.readStream.format("outbox").option("dsn", dsn).load()
    query = (
        revenue(events)
        .writeStream.format("parquet")
        .option("path", path)
        .option("checkpointLocation", f"{path}.checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    session = SparkSession.builder.appName("revenue").getOrCreate()
    # There are few windows: with the default, a shuffle of 200 partitions takes most of the time.
    session.conf.set("spark.sql.shuffle.partitions", "4")
    register(session)
    write(session, os.environ["OUTBOX_DSN"], sys.argv[1])
