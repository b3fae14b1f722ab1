"""Revenue by hour from the outbox: a stream that goes on where it stopped, and counts each order once.

OUTBOX_DSN=postgresql://… spark-submit revenue.py /lake/revenue
"""

from __future__ import annotations

import os
import sys

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from relay.spark import register


def revenue(events: DataFrame) -> DataFrame:
    """Orders and their amounts for each hour; an hour is final when events two hours later have come."""
    orders = events.where("event_type = 'order.placed'").select(
        "event_ts", f.get_json_object("payload", "$.amount").cast("decimal(18,2)").alias("amount")
    )
    hours = orders.withWatermark("event_ts", "2 hours").groupBy(f.window("event_ts", "1 hour"))
    return hours.agg(f.count("*").alias("orders"), f.sum("amount").alias("amount")).select(
        "window.start", "window.end", "orders", "amount"
    )


def write(spark: SparkSession, dsn: str, path: str) -> None:
    """Write the hours that have become final, then end; run it as often as the figures are wanted."""
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
    # Windows are few: a shuffle of 200 partitions would take longer than everything else.
    session.conf.set("spark.sql.shuffle.partitions", "4")
    register(session)
    write(session, os.environ["OUTBOX_DSN"], sys.argv[1])
