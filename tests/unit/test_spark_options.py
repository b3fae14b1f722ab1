"""The options of format("outbox"), and cutting a snapshot."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import (
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
)

from relay.faults import ConfigurationError
from relay.model.snapshots import BEGINNING, Snapshot
from relay.source.outbox.differences import up_to
from relay.spark.data_source import SCHEMA, OutboxDataSource, StreamReader, wanted_columns
from relay.spark.data_source_options import parse


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"foo": "1"}, "option foo: unknown; the options are dsn"),
        ({"partitions": "0"}, "option partitions: must be a number from 1 on, not '0'"),
        ({"fromSnapshot": "x"}, "option fromSnapshot: must be a snapshot"),
        ({"toSnapshot": "7:9:8@"}, "option toSnapshot: must be a snapshot"),
        ({"startingPosition": "7:9:8@x"}, "option startingPosition: must be beginning, now or a"),
        (
            {"fromTime": "2026-01-01"},
            "option fromTime: needs an offset from UTC, such as 2026-01-01T00:00:00+00:00",
        ),
        ({"toTime": "noon"}, "option toTime: must be a time such as"),
        ({"fromOffset": "1.5"}, "option fromOffset: must be a c_offset"),
        ({"fromOffset": "9223372036854775808"}, "option fromOffset: must be a c_offset"),
        ({"table": "t"}, "option table: must be schema.table"),
        ({"columns": "{"}, "option columns: is not JSON"),
        ({"columns": '{"body": "x"}'}, "option columns: 'body' is not a field of an event"),
        ({"ordered": "yes"}, "option ordered: must be true or false"),
        ({"dsn.env": "A", "dsn.file": "b"}, "option dsn.file: dsn.env is given too"),
        (
            {"dsn.env": "NO_SUCH"},
            "option dsn: the environment has no variable NO_SUCH: set it before the Spark session",
        ),
        (
            {"dsn": "postgresql://u:hunter2@h:x/"},
            "option dsn: is not a PostgreSQL connection string",
        ),
        (
            {"startingPosition": "soon"},
            "option startingPosition: must be beginning, now or a snapshot",
        ),
        ({"columns": "[1]"}, "option columns: must name the column of each field, such as"),
        ({"columns": '{"payload": 1}'}, "option columns: must name the column of each field"),
        ({"headers": "1"}, "option headers: must name columns, such as"),
        ({"headers": "[1]"}, "option headers: must name columns, such as"),
        (
            {"fromSnapshot": "9:9:", "toSnapshot": "5:5:"},
            "option toSnapshot: 5:5: is before fromSnapshot, 9:9:",
        ),
        (
            {"fromTime": "2026-01-01T01:00:00+00:00", "toTime": "2026-01-01T01:30:00+01:00"},
            "option toTime: 2026-01-01T01:30:00+01:00 is before fromTime",
        ),
        ({"fromOffset": "10", "toOffset": "9"}, "option toOffset: 9 is before fromOffset, 10"),
    ],
)
def test_a_wrong_option_is_one_line(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse(options)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "reading"),
    [
        ("fromTime", "stream"),
        ("toSnapshot", "stream"),
        ("tooffset", "stream"),
        ("startingPosition", "batch"),
        ("maxEventsPerTrigger", "batch"),
    ],
)
def test_an_option_of_the_other_kind_of_query_is_refused(
    name: str, reading: Literal["batch", "stream"]
) -> None:
    with pytest.raises(ConfigurationError, match=rf"(?i)option {name}: is of a .*: leave it out"):
        parse({name: "1"}, reading)


def test_ranges_that_end_where_they_begin_are_empty_and_right() -> None:
    time = "2026-01-01T00:00:00+00:00"
    parse({"fromSnapshot": "9:9:", "toSnapshot": "9:9:", "fromTime": time, "toTime": time})
    parse({"fromOffset": "-9", "toOffset": "10", "fromSnapshot": "5:9:5", "toSnapshot": "7:9:7,8"})


def test_a_position_is_a_snapshot_and_its_witness() -> None:
    for text in ("7:9:8@6f1f5a3e-3c1c-4f6e-9f5b-0d8f3f1f2a11", "7:9:8"):
        options = parse(dict.fromkeys(("fromSnapshot", "toSnapshot", "startingPosition"), text))
        assert {str(options.from_snapshot), str(options.to_snapshot), str(options.starting)} == {
            text
        }
        assert options.from_snapshot.is_proven == ("@" in text)


def test_names_are_case_insensitive() -> None:
    options = parse({"MAXEVENTSPERTRIGGER": "7", "startingposition": "now", "pushfilters": "TRUE"})
    assert (options.max_events, options.starting, options.push_filters) == (7, None, True)


def test_a_password_is_not_shown() -> None:
    assert "hunter2" not in repr(parse({"dsn": "postgresql://u:hunter2@h/d"}))


def test_a_stream_begins_at_the_beginning() -> None:
    reader = StreamReader(parse({"dsn": "postgresql:///"}))
    assert reader.initialOffset() == {"snapshot": str(BEGINNING)}


def test_the_schema_is_typed() -> None:
    kinds = {field.name: field.dataType.simpleString() for field in SCHEMA}
    assert kinds["id"] == kinds["payload"] == "string"
    assert kinds["event_ts"] == "timestamp"
    assert kinds["c_offset"] == kinds["c_xid"] == "bigint"
    assert kinds["partition"] == "int"


snapshots = st.builds(
    lambda xmin, open_: Snapshot(
        min([xmin, *open_]), max([xmin, *(each + 1 for each in open_)]), tuple(sorted(open_))
    ),
    st.integers(3, 60),
    st.sets(st.integers(3, 60), max_size=6),
)


@given(snapshots, st.integers(3, 70))
def test_a_cut_snapshot_sees_what_the_whole_one_does_below_the_xid(
    whole: Snapshot, xid: int
) -> None:
    cut = up_to(whole, xid)
    xids = np.arange(1, 80)
    assert (cut.sees(xids) == (whole.sees(xids) & (xids < xid))).all()
    assert whole.covers(cut)
    assert Snapshot.parse(str(cut)) == cut


TEXT, NUMBER = StringType(), LongType()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([StructField("kind", TEXT)], "there is no column kind: the columns are id, host_id, "),
        ([StructField("ID", TEXT)], "there is no column ID: the columns are id, host_id, "),
        ([StructField("headers", TEXT)], "there is no column headers: set the option headers"),
        (
            [StructField("c_offset", IntegerType())],
            "column c_offset is bigint, not int: read it as that, and cast it",
        ),
        (
            [StructField("event_ts", TimestampNTZType())],
            "column event_ts is timestamp, not timestamp_ntz: read it as that, and cast it",
        ),
        ([StructField("id", TEXT, False)], "column id may be null: leave out `not null`"),
        ([], "it has no column: name at least one"),
        ([StructField("id", TEXT)] * 2, "it names a column twice: name each once"),
    ],
)
def test_a_wrong_schema_is_one_line(columns: list[StructField], message: str) -> None:
    source = OutboxDataSource({"dsn": "postgresql://u@h/x"})
    for reader in (source.reader, source.streamReader):
        with pytest.raises(ConfigurationError) as raised:
            reader(StructType(columns))
        assert str(raised.value).startswith(f"schema: {message}")


def test_a_schema_may_have_fewer_columns_in_another_order_and_comments() -> None:
    given = StructType(
        [StructField("c_xid", NUMBER), StructField("id", TEXT, metadata={"comment": "key"})]
    )
    assert wanted_columns(given, SCHEMA) == ("c_xid", "id")
