"""What a Delta sink says of each file's values: readers skip files by it, and miss rows where it lacks something.

Reports: delta-io/delta-rs#3201 (a filter on a column without bounds finds no row), #4652 (nested fields that deltalake
takes for others), #2731 (a column of a nested type ends the merge of files), #1411 (bounds that are no number of JSON
make a table that cannot be read), delta-io/delta#7101 (a bound beside NaN, which is more than it).
"""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import deltalake
import pyarrow as pa
import pyarrow.dataset
import pytest

from relay.config.handlers import SparkHandler
from relay.spark.writers import BatchId, writer
from tests.lake import LocalFrame, LocalSession

MOST = "\U0010ffff"


class Lake:
    """A Delta table, whose batches have one file each."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lake"
        settings = {"type": "spark", "format": "delta", "path": str(self.path), "partition_by": []}
        self._writer: Any = writer("lake", SparkHandler.model_validate(settings))
        self._application = str(uuid4())
        self._number = 0

    def write(self, **columns: Any) -> None:
        self._number += 1
        batch = BatchId(self._application, self._number, str(uuid4()))
        self._writer.write(LocalFrame(pa.table(columns), tasks=1), batch)

    def upkeep(self) -> None:
        self._writer.upkeep(LocalSession())

    def table(self) -> deltalake.DeltaTable:
        return deltalake.DeltaTable(self.path)

    def found(self, condition: pyarrow.dataset.Expression) -> list[str]:
        """The ids that deltalake and Arrow find, which skip files."""
        rows = self.table().to_pyarrow_dataset().to_table(filter=condition)
        ids: list[str] = rows["id"].to_pylist()
        return sorted(ids)

    def statistics(self) -> list[dict[str, Any]]:
        """Those of each file."""
        found = []
        for log in sorted(self.path.glob("_delta_log/*.json")):
            added = (json.loads(line).get("add") for line in log.read_text().splitlines())
            found += [json.loads(each["stats"]) for each in added if each]
        assert len(found) == len(self.table().file_uris())
        return found


value_of = pyarrow.dataset.field("value")
KINDS = [
    pytest.param(pa.string(), "a", "b" * 300, "b" * 300 + "c", id="long texts"),
    pytest.param(pa.string(), "a", MOST * 80, MOST * 90, id="greatest characters"),
    pytest.param(pa.float64(), -1e-300, 1e300, 1.5e300, id="doubles"),
    pytest.param(pa.float32(), -1.5, 0.5, 3.25, id="floats"),
    pytest.param(pa.bool_(), False, True, True, id="booleans"),
    pytest.param(
        pa.decimal128(38, 10),
        Decimal("-1234567890123456789012345678.0000000001"),
        Decimal("0.0000000001"),
        Decimal("1234567890123456789012345678.9999999999"),
        id="decimals",
    ),
    pytest.param(
        pa.decimal128(2, 2), Decimal("-0.99"), Decimal("0.01"), Decimal("0.99"), id="0.99"
    ),
    pytest.param(
        pa.timestamp("us"),
        datetime(1, 1, 1),  # noqa: DTZ001
        datetime(2026, 1, 1, 0, 0, 0, 999_999),  # noqa: DTZ001
        datetime(9999, 12, 31, 23, 59, 59, 999_000),  # noqa: DTZ001
        id="times without a zone",
    ),
    pytest.param(
        pa.timestamp("us", "UTC"),
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(2026, 1, 1, 0, 0, 0, 999_999, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC),
        id="times",
    ),
    pytest.param(pa.date32(), date(1, 1, 1), date(999, 1, 1), date(9999, 12, 31), id="dates"),
    pytest.param(pa.int64(), -(1 << 63), 0, (1 << 63) - 1, id="integers"),
]


@pytest.mark.parametrize(("kind", "least", "middle", "most"), KINDS)
def test_a_filter_finds_each_row(
    tmp_path: Path, kind: pa.DataType, least: Any, middle: Any, most: Any
) -> None:
    lake = Lake(tmp_path)
    for value in (least, middle, most, None):
        lake.write(id=[str(value)], value=pa.array([value], kind))
    lake.write(id=["all"], value=pa.array([middle], kind))
    high = sorted([str(middle), str(most), "all"])
    for with_checkpoint in (False, True):
        if with_checkpoint:
            lake.table().create_checkpoint()
        assert lake.found(value_of >= pa.scalar(middle, kind)) == high
        assert lake.found(value_of < pa.scalar(middle, kind)) == [str(least)]
        assert lake.found(value_of == pa.scalar(most, kind)) == (
            high if most == middle else [str(most)]
        )
        assert lake.found(value_of.is_null()) == ["None"]


def test_a_struct_beside_a_boolean_leaves_a_table_that_can_be_read(tmp_path: Path) -> None:
    """Its nulls were counted as one number, and then deltalake could not open the table any more."""
    lake = Lake(tmp_path)
    inner = pa.struct([("number", pa.int64()), ("tags", pa.list_(pa.string()))])
    kind = pa.struct([("text", pa.string()), ("inner", inner)])
    given = [{"text": "a", "inner": {"number": 1, "tags": ["x"]}}, {"text": None}, None]
    for _ in range(2):
        lake.write(
            id=["a", "b", "c"],
            value=pa.array(given, kind),
            paid=[True, False, None],
            headers=pa.array([[("k", "v")], None, []], pa.map_(pa.string(), pa.string())),
            bytes=[b"a", None, b"c"],
        )
    assert lake.found(pyarrow.dataset.field("paid")) == ["a", "a"]
    assert lake.found(pyarrow.dataset.field("value", "text") == "a") == ["a", "a"]
    assert lake.found(pyarrow.dataset.field("value", "inner", "number") >= 1) == ["a", "a"]
    first = lake.statistics()[0]
    assert first["nullCount"] == {
        "id": 0,
        "value": {"text": 2, "inner": {"number": 2}},
        "paid": 1,
    }
    assert first["maxValues"]["value"] == {"text": "a", "inner": {"number": 1}}
    lake.upkeep()
    assert lake.table().to_pyarrow_table().num_rows == 6


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_lacks_has_no_bounds(tmp_path: Path, value: float) -> None:
    """Spark counts NaN as more than any number: with a bound of the others it would skip the file."""
    lake = Lake(tmp_path)
    lake.write(id=["a", "b"], value=[value, 1.0])
    lake.write(id=["c"], value=[2.0])
    first, second = lake.statistics()
    assert first["minValues"] == {"id": "a"}
    assert second["maxValues"] == {"id": "c", "value": 2.0}
    assert lake.table().to_pyarrow_table().num_rows == 3
