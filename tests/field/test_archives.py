"""The archive of retention gives back what was published: each event once, with its own values.

Reports: getsentry/self-hosted#2081 and #1972 (a restore ends at a unique constraint), apache/iceberg#17340 and #16282
(a sink that began again has written files twice), apache/arrow#43303, prestodb/presto#2233 (a partition of the text 04
is read as 4), apache/arrow#42579, pola-rs/polars#27280 (columns that the first file does not have are left out).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from relay.admin.retention import partition_new, restore
from relay.config.settings import Settings
from relay.model.events import FIELDS, SQL_TYPES
from tests.integration.test_retention import KEEP
from tests.outbox import Copied, Outbox

BEGIN, END = "2026-01-01", "2026-01-03"
CONTENT = f"select {', '.join(FIELDS)} from outbox_message_t order by c_offset"


def install(outbox: Outbox) -> None:
    outbox.install(**KEEP)
    partition_new(outbox.settings(**KEEP), "1d", outbox.installer_dsn)


@pytest.fixture
def rotated(copied: Copied) -> Iterator[Outbox]:
    """An outbox with partitions and events of January, whose partition is dropped once they are archived."""
    with copied("archives", install) as made:
        made.fill(4)
        made.conn.execute(
            "update outbox_message_t set event_ts = '2026-01-01 12:00+00',"
            " aggregate_id = lpad(c_offset::text, 3, '0')"
        )
        yield made


def archived(outbox: Outbox) -> pa.Table:
    """The events as a Spark sink writes them."""
    kinds = {"timestamptz": pa.timestamp("us", "UTC"), "bigint": pa.int64(), "int": pa.int32()}
    schema = pa.schema([(name, kinds.get(SQL_TYPES[name], pa.string())) for name in FIELDS])
    listed = ", ".join(
        f"{name}::text" if schema.field(name).type == pa.string() else name for name in FIELDS
    )
    rows = outbox.conn.execute(f"select {listed} from outbox_message_t order by c_offset".encode())
    values = [dict(zip(FIELDS, row, strict=True)) for row in rows]
    return pa.Table.from_pylist(values, schema=schema)


def write(rows: pa.Table, path: Path, batch: str, *partition_by: str) -> None:
    """Write the files of a batch."""
    marked = rows.append_column("relay_batch", pa.array([batch] * rows.num_rows))
    columns = [*partition_by, "relay_batch"]
    pyarrow.parquet.write_to_dataset(marked, path, partition_cols=columns)


def settings_of(outbox: Outbox, path: Path, **source: Any) -> Settings:
    lake = {"type": "spark", "path": str(path), "start": "beginning"}
    return outbox.settings(
        handlers={**outbox.config()["handlers"], "lake": lake},
        retention={"keep": "7d", "archive": "lake"},
        **source,
    )


def dropped(outbox: Outbox) -> list[Any]:
    """Drop the events; returns them."""
    content = outbox.conn.execute(CONTENT.encode()).fetchall()
    outbox.conn.execute("truncate outbox_message_t")
    outbox.conn.execute("drop table outbox_message_t_before")
    return content


def test_an_event_that_the_archive_has_twice_comes_back_once(
    rotated: Outbox, tmp_path: Path
) -> None:
    """As a sink leaves it whose target was restored: what the backup does not know is in two batches."""
    rows = archived(rotated)
    write(rows, tmp_path / "lake", "a")
    write(rows.slice(5), tmp_path / "lake", "b")
    content = dropped(rotated)
    assert restore(
        settings_of(rotated, tmp_path / "lake"), BEGIN, END, rotated.installer_dsn
    ).events == len(content)
    assert rotated.conn.execute(CONTENT.encode()).fetchall() == content


def test_a_partition_of_a_text_that_looks_like_a_number_comes_back_as_the_text(
    rotated: Outbox, tmp_path: Path
) -> None:
    write(archived(rotated), tmp_path / "lake", "a", "aggregate_id", "aggregate_version")
    content = dropped(rotated)
    assert content[0][FIELDS.index("aggregate_id")].startswith("0")
    restore(settings_of(rotated, tmp_path / "lake"), BEGIN, END, rotated.installer_dsn)
    assert rotated.conn.execute(CONTENT.encode()).fetchall() == content


def test_headers_come_back_where_the_first_files_are_older_than_they(
    rotated: Outbox, tmp_path: Path
) -> None:
    rotated.conn.execute("alter table outbox_message_t add column region text")
    rows = archived(rotated)
    half = rows.num_rows // 2
    write(rows.slice(0, half), tmp_path / "lake", "a")
    kind = pa.map_(pa.string(), pa.string())
    later = rows.slice(half)
    regions = pa.array([[("region", "eu")]] * later.num_rows, kind)
    write(later.append_column("headers", regions), tmp_path / "lake", "b")
    dropped(rotated)
    source = {**rotated.config()["source"], "headers": ["region"]}
    restore(
        settings_of(rotated, tmp_path / "lake", source=source), BEGIN, END, rotated.installer_dsn
    )
    found = rotated.column("select region from outbox_message_t order by c_offset")
    assert found == [None] * half + ["eu"] * later.num_rows
