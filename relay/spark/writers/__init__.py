"""Writers of `type: spark` sinks: each writes a batch exactly once, however often it is called for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from relay.config.handlers import SparkHandler
from relay.config.imports import load
from relay.faults import ConfigurationError
from relay.spark.descriptions import of_function
from relay.store.positions.spark_batches import LastBatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BATCH_COLUMN = "relay_batch"
"""The column of a frame that holds the batch's id; it is the last partition column of files and tables."""


@dataclass(frozen=True, slots=True)
class BatchId:
    """Identifies a batch at its destination.

    `application` is the UUID of the group, sink and target. `number` counts the batches of the application from 1; a
    batch that was dropped because an operator moved the sink leaves a gap. `id` is the batch's UUID, the value of
    `relay_batch` in its frame. `is_first`: the sink has left nothing there since it began, or was moved; only then the
    table may be created. A destination that has the batch has everything that the source's `snapshot` sees, which
    is every event committed before `complete_before`; None where no such time is known. What the snapshot `before`
    does not see is new in the batch; the rest of it is replayed.
    """

    application: str
    number: int
    id: str
    snapshot: str = ""
    complete_before: datetime | None = None
    before: str = ""
    is_first: bool = True

    @property
    def completeness(self) -> dict[str, str]:
        """What a table stores with the batch's commit: `snapshot` and, where known, `complete_before` in ISO 8601."""
        stored = {"relay.snapshot": self.snapshot} if self.snapshot else {}
        if self.complete_before is not None:
            stored["relay.complete_before"] = self.complete_before.astimezone(UTC).isoformat()
        return stored


class MissingPartition(ConfigurationError):
    """The frame lacks a column of partition_by, and no row of the batch is at its destination."""


class LostDestination(ConfigurationError):
    """The destination does not have any more what relay has written to it: the table is gone, another one, or older."""


Facts = Mapping[str, Any]
"""What tells that a destination has a batch, in JSON's types; only the kind of writer that noted it knows more."""


class Writer(Protocol):
    """Writes the batches of one sink.

    `kind` names what it writes to, whose facts it knows.

    A writer that is suspended, loses its claim and goes on later is a danger to what its successor has written. So no
    step of `write` removes or replaces other rows than the batch's, in one commit that the destination rejects or that
    gives the same rows again.
    """

    kind: str

    def check(self, session: SparkSession) -> None:
        """Raise ConfigurationError where the destination cannot be written exactly once."""

    def write(self, frame: DataFrame, batch: BatchId) -> list[str] | None:
        """Write the frame; returns None where the destination has the batch then.

        A StagingWriter may return the names of files that are staged for `publish` instead. After any failure `write`
        is called again for the same batch, with the same rows; the destination has them once. Raises
        ConfigurationError as `check` does, MissingPartition, LostDestination where the table is gone and the batch is
        not the first, and the destination's errors.
        """

    def left(
        self, session: SparkSession | None, batch: LastBatch, files: Sequence[str] | None
    ) -> Facts | None:
        """What tells from now on that the destination has a batch that it was given; None where nothing does.

        `files` are those of a StagingWriter. The batch may be one of long ago: then what is there now counts. Raises
        LostDestination where it is not there, and the destination's errors.
        """

    def lacks(self, session: SparkSession | None, last: LastBatch, facts: Facts) -> str | None:
        """Why the destination does not have any more what a batch left, whose facts these are; None if it may have it.

        Other writers may have written to it meanwhile, and may have merged files or removed old versions. A writer that
        looks with Spark says nothing without a session. Raises the destination's errors: then nothing is known.
        """


@runtime_checkable
class StagingWriter(Writer, Protocol):
    """A writer of files, which become visible when one attempt's files have been stored as those of the batch."""

    def publish(self, session: SparkSession, batch: BatchId, files: Sequence[str]) -> None:
        """Make the staged files of the batch visible, once, however often and by however many it is called."""


@runtime_checkable
class UpkeepWriter(Writer, Protocol):
    """A writer of a table that costs more with every commit unless it is kept small."""

    def upkeep(self, session: SparkSession) -> None:
        """Merge small files, and remove what the table's properties do not keep; the rows stay the same.

        Other writers and readers may use the table meanwhile. Raises ConfigurationError and the destination's errors,
        after which the table holds what it held.
        """


def writer(name: str, settings: SparkHandler) -> Writer:
    """The writer of a sink.

    Raises ConfigurationError for a callable that cannot be imported, or a format whose extra is not installed.
    """
    try:
        return _writer(name, settings)
    except ModuleNotFoundError as error:
        kind = settings.format.lower()
        raise ConfigurationError(
            f"handlers.{name}.format: {kind} needs {error.name}: install relay-outbox[{kind}]"
        ) from None


def _writer(name: str, settings: SparkHandler) -> Writer:
    kind = settings.format.lower()
    if settings.callable is not None:
        return CallableWriter(name, settings.callable)
    if settings.jdbc is not None:
        from relay.spark.writers.jdbc import JdbcWriter

        return JdbcWriter(name, settings.jdbc, settings.evolves)
    if kind == "iceberg":
        from relay.spark.writers.iceberg import IcebergUpserts, IcebergWriter

        return (IcebergUpserts if settings.mode == "upsert" else IcebergWriter)(name, settings)
    if settings.table is not None:
        from relay.spark.writers.table import TableWriter

        return TableWriter(name, settings, settings.table)
    if kind == "delta":
        from relay.spark.writers.delta import DeltaUpserts, DeltaWriter

        return (DeltaUpserts if settings.mode == "upsert" else DeltaWriter)(name, settings)
    from relay.spark.writers.files import FilesWriter

    return FilesWriter(name, settings)


class CallableWriter:
    """Calls `function(frame, batch)` until it returns. The function must tolerate repeated calls for a batch."""

    kind = "callable"

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

    def left(
        self, session: SparkSession | None, batch: LastBatch, files: Sequence[str] | None
    ) -> Facts:
        """Nothing: only the function knows where it writes."""
        return {}

    def lacks(self, session: SparkSession | None, last: LastBatch, facts: Facts) -> None:
        """Say nothing."""


def require_last(writer: Writer, name: str, session: SparkSession | None, last: LastBatch) -> None:
    """Raise LostDestination, with the cure, unless the destination of a sink may have its last batch."""
    facts = last.facts or {}
    if not facts:
        return
    if last.kind == writer.kind:
        why = writer.lacks(session, last, facts)
    else:
        why = (
            None if writer.kind == CallableWriter.kind else f"the sink wrote to {last.kind} before"
        )
    if why is not None:
        raise lost(name, why, last)


def lost(name: str, why: str, last: LastBatch) -> LostDestination:
    """The error about a sink whose destination does not have its last batch, and why."""
    named = ", ".join(
        f"{key} {value}" for key, value in (last.facts or {}).items() if key in _SHOWN
    )
    return LostDestination(
        f"handlers.{name}: {why}: it lacks batch {last.number} of relay:{last.application}"
        f"{f' ({named})' if named else ''}: bring it back, or write everything again with `relay sink rebuild {name}`"
    )


_SHOWN = ("table", "version", "snapshot", "batch")
"""The facts that errors name; others may hold values of events."""
