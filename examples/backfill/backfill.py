"""Fills a new projection from all events before relay's position, on Spark; relay continues from there.

relay init --config relay.yaml
relay offsets show --config relay.yaml --json      # shows the snapshot at which the new group begins
OUTBOX_DSN=postgresql://… spark-submit backfill.py 'SNAPSHOT'
relay run --config relay.yaml
"""

from __future__ import annotations

import os
import sys

import psycopg
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from relay.spark import register


def sales(events: DataFrame) -> DataFrame:
    """Orders and their amounts for each customer and day."""
    orders = events.where("event_type = 'order.placed'").select(
        f.col("aggregate_id").alias("customer"),
        f.to_date("event_ts").alias("day"),
        f.get_json_object("payload", "$.amount").cast("decimal(18,2)").alias("amount"),
    )
    return orders.groupBy("customer", "day").agg(f.count("*").alias("orders"), f.sum("amount"))


def backfill(spark: SparkSession, snapshot: str, dsn: str) -> int:
    """Fill the projection from a snapshot's events, in one transaction, and return its rows. Stop relay before."""
    events = (
        spark.read.format("outbox").options(dsn=dsn, toSnapshot=snapshot, ordered="false").load()
    )
    rows = sales(events).collect()
    with psycopg.connect(dsn) as conn:
        conn.execute("truncate daily_sales")
        with conn.cursor().copy(
            "copy daily_sales (customer, day, orders, amount) from stdin"
        ) as copy:
            for row in rows:
                copy.write_row(row)
    return len(rows)


if __name__ == "__main__":
    session = SparkSession.builder.appName("backfill").getOrCreate()
    session.conf.set("spark.sql.session.timeZone", "UTC")
    register(session)
    print(backfill(session, sys.argv[1], os.environ["OUTBOX_DSN"]), "rows")
