"""Tables with a file that is missing or damaged, and a stream that appends to a table without a jar.

Reports: PostHog/posthog#70237 (the log is readable and writing goes on, while one of its files is gone: no error shows
it), delta-io/delta#1470 (nothing tells which file, or what to do), apache/paimon#9666 (a micro-batch that is repeated
after a crash is committed twice), delta-io/delta#1141 (identity of a micro-batch in the commit).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from uuid import uuid4

import deltalake
import psycopg
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException

from relay.admin import verification
from relay.config.handlers import SparkHandler
from relay.faults import ConfigurationError, RelayError
from relay.spark import destinations, frames, upkeep
from relay.spark.writers import BatchId, UpkeepWriter, writer
from tests.lake import LocalFrame, LocalSession

ROWS = pa.table({"id": [f"id-{n}" for n in range(4)]})


def handler_of(kind: str, folder: Path) -> SparkHandler:
    settings: dict[str, Any] = {"type": "spark", "format": kind, "upkeep": 1, "partition_by": []}
    if kind == "delta":
        return SparkHandler.model_validate(settings | {"path": str(folder / "lake")})
    (folder / "lake").mkdir()
    catalog = {
        "type": "sql",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": f"file://{folder}/lake",
    }
    return SparkHandler.model_validate(settings | {"table": "shop.events", "options": catalog})


def written(handler: SparkHandler) -> UpkeepWriter:
    """Write two batches, of a file for each of two tasks."""
    made, application = writer("lake", handler), str(uuid4())
    assert isinstance(made, UpkeepWriter)
    for number in (1, 2):
        made.write(LocalFrame(ROWS), BatchId(application, number, str(uuid4())))  # type: ignore[arg-type]
    return made


def remove(file: Path) -> None:
    file.unlink()


def damage(file: Path) -> None:
    file.write_bytes(b"PAR1 and nothing else PAR1")


@pytest.mark.parametrize("harm", [remove, damage])
@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, harm: Callable[[Path], None]
) -> None:
    handler = handler_of(kind, tmp_path)
    made = written(handler)
    file = min((tmp_path / "lake").glob("**/*.parquet"))
    harm(file)
    with pytest.raises(RelayError) as raised:
        destinations.stored(LocalSession(), "lake", handler, frames.arrow_schema(["id"]), 2)  # type: ignore[arg-type]
    said = str(raised.value)
    assert said.startswith("handlers.lake.")
    assert f"the file {file.name}, which cannot be read: " in said
    assert "\n" not in said
    with caplog.at_level(logging.WARNING):
        upkeep.after_batch("lake", handler, made, 1, LocalSession(), nullcontext())  # type: ignore[arg-type]
    assert "`relay verify lake` tells whether its files can be read" in caplog.text


def test_what_spark_raises_is_a_line_of_relay_verify() -> None:
    with (
        pytest.raises(ConfigurationError, match="lake: it cannot be compared: AnalysisException: "),
        verification.one_line("lake", quoted=True),
    ):
        raise AnalysisException("[UNRESOLVED_COLUMN] no such column: amount\nJVM stacktrace: …")
    with (
        pytest.raises(
            ConfigurationError,
            match=r"lake: it cannot be compared: ValueError \(test_damaged_tables\.py:\d+\)$",
        ),
        verification.one_line("lake", quoted=False),
    ):
        raise ValueError("a payload")
    for error in (ConfigurationError("known"), psycopg.OperationalError("known")):
        with pytest.raises(type(error), match=r"^known$"), verification.one_line("lake", True):
            raise error


def test_a_retention_that_deltalake_does_not_know_leaves_its_default(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handler = handler_of("delta", tmp_path)
    made = written(handler)
    table = deltalake.DeltaTable(str(handler.path))
    table.alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 1 month"})
    with caplog.at_level(logging.INFO):
        upkeep.after_batch("lake", handler, made, 1, LocalSession(), nullcontext())  # type: ignore[arg-type]
    assert "kept the table of a sink small" in caplog.text
