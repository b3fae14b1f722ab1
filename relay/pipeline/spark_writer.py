"""Writes what was put aside for handlers of `type: spark`, beside the batches.

The executors read the events themselves. A batch is written until that has worked, and always has the same events under
the same id.
"""

from __future__ import annotations

import gc
import logging
import pickle
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from relay.config import Settings
from relay.events import SQL_TYPES
from relay.faults import TransientFault, Undelivered, describe
from relay.handler_settings import SPARK_COLUMNS
from relay.handlers.spark import BATCH_COLUMN, writer
from relay.patience import say_once, until_it_works
from relay.spark.session import Session
from relay.store import spark_batches
from relay.store.connections import connect

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
"""How often it is looked whether a batch is due."""
TASK_EVENTS = 10_000
"""From so many events on, a batch is written by more than one task."""
_AT_ONCE = 1_000

_TYPES = {
    **{
        name: {"timestamptz": "timestamp", "bigint": "bigint", "int": "int"}.get(kind, "string")
        for name, kind in SQL_TYPES.items()
    },
    "date": "date",
    "host_bucket": "int",
}
_SCHEMA = ", ".join(f"`{name}` {_TYPES[name]}" for name in SPARK_COLUMNS)


class SparkWriter:
    """A thread beside the batches that writes those of one handler."""

    def __init__(self, name: str, settings: Settings, session: Session) -> None:
        self._name = name
        self._settings = settings
        self._handler = settings.spark_handlers[name]
        self._write = writer(name, self._handler)
        self._configuration = pickle.dumps(settings)
        self._session = session
        self._conn: spark_batches.Connection | None = None
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="spark-writer", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the batch in flight. Safe in a signal handler's thread."""
        self._stopping.set()

    def close(self) -> None:
        """Stop, and wait for the batch in flight, as long as `shutdown_timeout`; else the next process writes it."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join(self._settings.shutdown_timeout)

    def _run(self) -> None:
        say = say_once(log, f"handlers.{self._name}: cannot write with Spark yet")
        retrying = until_it_works(self._stopping, say)
        with suppress(TransientFault):  # which comes out only when stopping
            while not self._stopping.is_set():
                if not retrying(self._look):
                    self._stopping.wait(PAUSE_SECONDS)
        self._disconnect()

    def _look(self) -> bool:
        """Write a batch if one is due; returns whether one was."""
        try:
            conn = self._connected()
            return conn is not None and self._write_due(conn)
        except Exception as error:
            # Whatever it is, such as a place to write to that is wrong or away: the events are safe until it is mended.
            self._disconnect()
            raise Undelivered(describe(error)) from None

    def _write_due(self, conn: spark_batches.Connection) -> bool:
        group, each = self._settings.group, self._handler
        batch = spark_batches.take(
            conn, group, self._name, each.max_events, each.every, each.host_buckets
        )
        if batch is None:
            return False
        session = self._ready_session()
        try:
            self._write(self._frame(session, batch), batch.number)
        except Exception:
            self._session.replace_if_dead(session)
            raise
        finally:
            # What py4j holds of the JVM is in cycles.
            gc.collect(1)
        spark_batches.finish(conn, batch)
        log.info(
            "written with Spark",
            extra={"handler": self._name, "batch": batch.number, "events": sum(batch.sizes)},
        )
        return True

    def _frame(self, session: SparkSession, batch: spark_batches.SparkBatch) -> DataFrame:
        import pyarrow as pa
        from pyspark.sql import functions

        wanted = 1 + sum(batch.sizes) // TASK_EVENTS
        tasks = min(self._session.slots or 8, wanted, len(batch.portions))
        # As Arrow batches of their own the tasks become partitions of their own.
        table = pa.Table.from_batches(
            [
                pa.record_batch(
                    {"portion": batch.portions[at::tasks], "size": batch.sizes[at::tasks]}
                )
                for at in range(tasks)
            ]
        )
        frame = session.createDataFrame(table).mapInArrow(
            partial(read, self._configuration, batch.host_buckets), _SCHEMA
        )
        return frame.withColumn(BATCH_COLUMN, functions.lit(batch.id))

    def _ready_session(self) -> SparkSession:
        session = self._session.get()
        while session is None:
            if self._stopping.is_set():
                raise TransientFault("stopping")
            self._session.start()
            session = self._session.get(timeout=0.5)
        return session

    def _connected(self) -> spark_batches.Connection | None:
        """The connection whose session may write; None while that of another instance does."""
        if self._conn is None:
            conn = connect(self._settings.target_dsn)
            if not spark_batches.claim(conn, self._settings.group, self._name):
                conn.close()
                return None
            self._conn = conn
        return self._conn

    def _disconnect(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()


# On the executors.


def read(
    configuration: bytes, buckets: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """The events of portions, as the columns of `SPARK_COLUMNS`.

    Raises LookupError where some are gone: another process has written them, and a part must not replace the whole.
    """
    settings: Settings = pickle.loads(configuration)  # noqa: S301
    schema = _arrow_schema()
    with connect(settings.target_dsn) as conn:
        for batch in batches:
            for portion, size in zip(
                *(column.to_pylist() for column in batch.columns), strict=True
            ):
                found = 0
                for rows in spark_batches.rows(conn, portion, buckets, _AT_ONCE):
                    found += len(rows)
                    yield _record_batch(rows, schema)
                if found != size:
                    raise LookupError(f"portion {portion} has {found} of {size} events")


def _arrow_schema() -> pa.Schema:
    import pyarrow as pa

    kinds = {
        "string": pa.string(),
        "bigint": pa.int64(),
        "int": pa.int32(),
        "timestamp": pa.timestamp("us", "UTC"),
        "date": pa.date32(),
    }
    return pa.schema([(name, kinds[_TYPES[name]]) for name in SPARK_COLUMNS])


def _record_batch(rows: Sequence[Any], schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    columns = [
        pa.array(column, kind)
        for column, kind in zip(zip(*rows, strict=True), schema.types, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
