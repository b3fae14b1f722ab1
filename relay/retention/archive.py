"""Reads the archive, the files that a Spark sink has written, without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from relay.config.handlers import SparkHandler
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.model import headers
from relay.model.events import FIELDS

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS = ("parquet", "orc", "delta")
"""The formats that can be read without Spark."""


def sink_of(settings: Settings) -> tuple[str, SparkHandler]:
    """Return the sink that `retention.archive` names. Raises ConfigurationError unless its files can be read here."""
    name = settings.retention.archive
    if name is None:
        raise ConfigurationError(
            "retention.archive: names no sink: name the sink of the type spark that writes the archive"
        )
    sink = settings.spark_handlers[name]
    if sink.path is None or sink.format not in FORMATS:
        raise ConfigurationError(
            f"handlers.{name}: relay restores only from a path in the format {', '.join(FORMATS)}: read it with Spark"
        )
    return name, sink


def read(settings: Settings, lower: datetime, upper: datetime) -> Iterator[pa.RecordBatch]:
    """Yield the archived events with lower <= event_ts < upper: columns `FIELDS` in their order, then `headers` if any.

    Raises ConfigurationError, and OSError where the archive cannot be read.
    """
    name, sink = sink_of(settings)
    dataset = _dataset(sink)
    missing = [field for field in FIELDS if field not in dataset.schema.names]
    if missing:
        raise ConfigurationError(
            f"handlers.{name}: its files lack {', '.join(missing)}: a sink whose sql or transform changes the columns "
            "cannot be the archive"
        )
    columns = list(FIELDS)
    if settings.source.headers:
        if headers.FIELD not in dataset.schema.names:
            raise ConfigurationError(
                f"handlers.{name}: its files lack {headers.FIELD}: restore them without source.headers; the columns of "
                "headers are null then"
            )
        columns.append(headers.FIELD)
    yield from dataset.to_batches(columns=columns, filter=_between(dataset, lower, upper))


def count(settings: Settings, lower: datetime, upper: datetime) -> int | None:
    """Count the events that `read` yields; None where the archive has no event_ts."""
    dataset = _dataset(sink_of(settings)[1])
    if "event_ts" not in dataset.schema.names:
        return None
    return int(dataset.count_rows(filter=_between(dataset, lower, upper)))


def _between(dataset: Any, lower: datetime, upper: datetime) -> Any:
    """Return the filter lower <= event_ts < upper for a dataset."""
    import pyarrow as pa
    import pyarrow.dataset

    moment = pyarrow.dataset.field("event_ts")
    kind = dataset.schema.field("event_ts").type
    bounds = [pa.scalar(each, pa.timestamp("us", "UTC")).cast(kind) for each in (lower, upper)]
    return (moment >= bounds[0]) & (moment < bounds[1])


def _dataset(sink: SparkHandler) -> Any:
    import pyarrow.dataset

    assert sink.path is not None  # noqa: S101
    if sink.format == "delta":
        import deltalake

        options = {name: value.get_secret_value() for name, value in sink.options.items()}
        return deltalake.DeltaTable(sink.path, storage_options=options).to_pyarrow_dataset()
    return pyarrow.dataset.dataset(sink.path, format=sink.format, partitioning="hive")
