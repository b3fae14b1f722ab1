"""What a newcomer does wrong with a table of a lake: one line says what, where and what to do, and no secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest

from relay.config.handlers import SparkHandler
from relay.faults import ConfigurationError
from relay.spark.descriptions import safe_description
from relay.spark.destinations import stored
from relay.spark.writers import BatchId, writer
from relay.spark.writers.schema_changes import plan
from tests.lake import LocalFrame, LocalSession

SECRET = "hunter2"


def handler(kind: str, folder: Path, **more: Any) -> SparkHandler:
    settings: dict[str, Any] = {"type": "spark", "format": kind, "partition_by": []}
    if kind == "delta":
        return SparkHandler.model_validate(settings | {"path": str(folder / "lake")} | more)
    options = {"type": "sql", "uri": f"sqlite:///{folder}/c.db", "warehouse": f"file://{folder}"}
    return SparkHandler.model_validate(
        settings | {"table": "shop.events", "options": options} | more
    )


def refused(made: SparkHandler, rows: pa.Table) -> str:
    """The line of the fault with which a batch of these rows fails."""
    frame: Any = LocalFrame(rows)
    session: Any = LocalSession()
    destination = writer("lake", made)
    said = ""
    try:
        destination.check(session)
        destination.write(frame, BatchId(str(uuid4()), 1, str(uuid4())))
    except Exception as error:
        said = safe_description(error)
    assert said
    assert "\n" not in said
    assert SECRET not in said
    return said


ROWS = pa.table({"id": ["a"]})


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "lake").write_text("")
    said = refused(handler("delta", tmp_path), ROWS)
    assert said == f"handlers.lake.path: {tmp_path}/lake is a file: name a folder"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "PyIceberg cannot load the catalog: give its type and uri, such as {type: rest, uri"),
        ({"type": "rst", "uri": f"http://u:{SECRET}@h"}, "PyIceberg cannot load the catalog"),
        ({"uri": f"mysql://u:{SECRET}@h/d"}, "PyIceberg cannot load the catalog"),
        ({"type": "sql", "uri": "sqlite:///:memory:"}, "shop.events cannot be created: No default"),
    ],
)
def test_a_catalog_that_is_not_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], says: str
) -> None:
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG.config", {})
    made = handler("iceberg", tmp_path, options=options)
    assert refused(made, ROWS).startswith(f"handlers.lake.options: {says}")


def test_a_catalog_that_cannot_be_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG.config", {})
    made = handler("iceberg", tmp_path, options={})
    session: Any = LocalSession()
    with pytest.raises(ConfigurationError, match=r"^handlers\.lake\.options: PyIceberg cannot"):
        stored(session, "lake", made, ["id"], 1)


def test_a_bucket_that_is_away(tmp_path: Path) -> None:
    options = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "nowhere",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_ALLOW_HTTP": "true",
        "max_retries": "0",
    }
    said = refused(handler("delta", tmp_path, path="s3a://lake/events", options=options), ROWS)
    assert said.startswith("OSError")
    assert "error sending request" in said or "Connection refused" in said


def test_a_table_without_a_column_of_relay() -> None:
    """A table of events that is to be one of the present state: no query can leave the column out."""
    frame = pa.schema([("id", pa.string()), ("relay_snapshots", pa.string())])
    with pytest.raises(ConfigurationError, match=r"into each row: add it, or name another table$"):
        plan("handlers.lake.path", pa.schema([("id", pa.string())]), frame)
