"""Which changes make a table accept a batch: a pure function of the columns of both."""

from __future__ import annotations

import itertools

import pyarrow as pa
import pytest

from relay.config.handlers import SparkHandler
from relay.faults import ConfigurationError
from relay.spark.writers.schema_changes import comment_of, plan, sql_type, written

KINDS = [
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.decimal128(10, 2),
    pa.decimal128(18, 2),
    pa.decimal128(18, 4),
    pa.string(),
    pa.bool_(),
    pa.date32(),
    pa.timestamp("us", "UTC"),
    pa.timestamp("us"),
    pa.binary(),
    pa.list_(pa.int32()),
    pa.struct([("a", pa.int32())]),
    pa.struct([("a", pa.int32()), ("b", pa.int32())]),
]
WIDER = {
    (old, new)
    for same in (KINDS[:4], KINDS[4:6], KINDS[6:8])
    for old, new in itertools.combinations(same, 2)
}


def one(kind: pa.DataType, name: str = "n", comment: str | None = None) -> pa.Schema:
    return pa.schema([pa.field(name, kind, metadata={"comment": comment} if comment else None)])


def changed(table: pa.Schema, batch: pa.Schema, *rigid: str) -> list[tuple[str, str, str]]:
    return [
        (each.kind, each.column.name, sql_type(each.column.type))
        for each in plan("handlers.lake.path", table, batch, rigid)
    ]


def test_a_type_is_widened_kept_or_refused(subtests: pytest.Subtests) -> None:
    """Nothing is narrowed: a batch of a narrower type is written with the table's."""
    for old, new in itertools.product(KINDS, KINDS):
        with subtests.test(f"{old} and {new}"):
            if (old, new) in WIDER:
                assert changed(one(old), one(new)) == [("widen", "n", sql_type(new))]
                with pytest.raises(ConfigurationError, match="relay cannot widen it there: cast"):
                    changed(one(old), one(new), "n")
            elif (new, old) in WIDER or new == old:
                assert changed(one(old), one(new), "n") == []
                assert written(one(old), one(new)) == one(old)
            else:
                with pytest.raises(ConfigurationError, match=r"column n is .* cast it with"):
                    changed(one(old), one(new))


def test_a_column_is_added_whatever_its_type(subtests: pytest.Subtests) -> None:
    table = one(pa.string(), "id")
    for kind in KINDS:
        with subtests.test(str(kind)):
            batch = pa.schema([*one(kind), *table])
            assert changed(table, batch, "id") == [("add", "n", sql_type(kind))]
            assert changed(batch, batch) == []


def test_what_the_batch_lacks_stays() -> None:
    table = pa.schema([("id", pa.string()), ("old", pa.int64())])
    assert changed(table, one(pa.string(), "id")) == []


def test_a_comment_is_set_and_never_taken() -> None:
    with_comment = one(pa.string(), comment="it's new")
    (change,) = plan("k", one(pa.string()), with_comment)
    assert (change.kind, comment_of(change.column)) == ("comment", "it's new")
    assert plan("k", with_comment, one(pa.string())) == []
    assert plan("k", with_comment, with_comment) == []


@pytest.mark.parametrize(
    ("table", "batch", "says"),
    [
        (one(pa.string(), "Amount"), one(pa.string(), "amount"), "the table's Amount but for case"),
        (one(pa.string()), one(pa.null(), "new"), "new column new has no type: cast it"),
        (one(pa.string()), one(pa.string(), "relay_snapshots"), "name another table"),
        (
            pa.schema([pa.field("n", pa.string(), nullable=False)]),
            one(pa.string()),
            "n is NOT NULL",
        ),
    ],
)
def test_what_cannot_be_changed_is_named(table: pa.Schema, batch: pa.Schema, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        plan("handlers.lake.path", table, batch)


@pytest.mark.parametrize(
    "where",
    [{"path": "lake"}, {"table": "lake.events"}, {"callable": "json:dumps"}],
    ids=["files", "table", "callable"],
)
def test_only_a_table_of_relay_is_changed(where: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="schema: evolve is for Delta tables"):
        SparkHandler.model_validate({"type": "spark", "schema": "evolve", **where})
