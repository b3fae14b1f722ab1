"""What the tables of others made of Spark's JDBC source and of readers into Arrow, tried on `format("outbox")`.

Reports: apache/spark#40678 and #45513 (times without a zone are shifted), apache/spark#41843 and AbsaOSS/pramen#375
(`infinity`), evidence-dev/evidence#1348 (JSON null), confluentinc/kafka-connect-jdbc#480 and apache/spark#23458
(numeric), sfu-db/connector-x#331, #352 and #390 and apache/spark#19567 (enum, arrays, jsonb), apache/spark#50531
(columns of one type in another order), apache/spark#14124 (a schema with `not null`), apache/hudi#8376 and
apache/spark#20698 (skewed tasks), apache/arrow#51394 (a byte order mark is taken away), apache/arrow#51368 (of a line
end in a text that two buffers share a byte is lost).
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.sql.types import StringType, StructField, StructType

from relay.faults import ConfigurationError, RelayError
from relay.model.snapshots import BEGINNING, Snapshot
from relay.source.outbox.differences import Difference
from relay.spark import reading, register
from relay.spark.data_source import DifferenceReader, OutboxDataSource
from relay.spark.data_source_options import parse
from relay.spark.reading import by_xid, read
from relay.spark.session import Session
from tests.outbox import Outbox, event, host


def rows(outbox: Outbox, *names: str, **options: str) -> list[dict[str, Any]]:
    """What a query over an outbox reads, in order of c_offset."""
    parsed = parse({"dsn": outbox.jobs_dsn, "partitions": "2", "ordered": "false", **options})
    reader = DifferenceReader(parsed, [*names, "c_offset"])
    found = [
        row
        for partition in reader.partitions()
        for batch in reader.read(partition)
        for row in batch.to_pylist()
    ]
    found.sort(key=lambda row: row["c_offset"])
    return [{name: row[name] for name in names} for row in found]


@pytest.fixture
def table(outbox: Outbox) -> Outbox:
    """An outbox that takes other types, as one of one's own does."""
    for name in outbox.column(
        "select conname from pg_constraint"
        " where contype = 'c' and conrelid = 'outbox_message_t'::regclass"
    ):
        outbox.conn.execute(f"alter table outbox_message_t drop constraint {name}")
    outbox.conn.execute("alter table outbox_message_t alter event_ts drop default")
    return outbox


@pytest.fixture
def elsewhere(spark_session: Session) -> Iterator[Any]:
    """A Spark session whose time zone is not UTC."""
    session = spark_session.get(timeout=120)
    assert session is not None
    register(session)
    session.conf.set("spark.sql.session.timeZone", "America/Los_Angeles")
    yield session
    session.conf.set("spark.sql.session.timeZone", "UTC")


@pytest.mark.parametrize("kind", ["timestamptz", "timestamp", "text"])
def test_a_time_is_the_same_moment_in_every_time_zone(
    elsewhere: Any, table: Outbox, kind: str
) -> None:
    """A text was null: compared with the limits of Python's years as a text, it is after the last one."""
    table.publish(host(1), event(event_ts="2026-03-08T10:30:00.000001+00:00"))
    table.conn.execute("set timezone to 'UTC'")
    table.conn.execute(f"alter table outbox_message_t alter event_ts type {kind}")
    frame = elsewhere.read.format("outbox").schema("event_ts timestamp").options(dsn=table.jobs_dsn)
    (row,) = frame.load().selectExpr("unix_micros(event_ts) as at").collect()
    assert row.at == int(datetime(2026, 3, 8, 10, 30, tzinfo=UTC).timestamp()) * 1_000_000 + 1


@pytest.mark.parametrize("kind", ["timestamptz", "timestamp", "text", "date"])
def test_infinity_is_null(table: Outbox, kind: str) -> None:
    table.publish(host(1), event(event_ts="infinity"), event(event_ts="-infinity"))
    table.publish(host(1), event(event_ts="2026-03-08T00:00:00+00:00"))
    table.conn.execute("set timezone to 'UTC'")
    table.conn.execute(f"alter table outbox_message_t alter event_ts type {kind}")
    found = [row["event_ts"] for row in rows(table, "event_ts")]
    assert found == [None, None, datetime(2026, 3, 8, tzinfo=UTC)]


def test_json_null_is_not_sql_null(table: Outbox) -> None:
    table.publish(host(1), event(), event())
    table.conn.execute("update outbox_message_t set payload = 'null', metadata = null")
    assert rows(table, "payload", "metadata") == [{"payload": "null", "metadata": None}] * 2


def test_a_text_keeps_its_byte_order_mark(table: Outbox) -> None:
    """arrow#51394: that of the first row was taken for the file's, in a query whose first column it is."""
    marked = "\ufefforder-1"
    table.publish(host(1), event(aggregate_id=marked), event(aggregate_id=marked))
    assert rows(table, "aggregate_id") == [{"aggregate_id": marked}] * 2


@pytest.mark.parametrize("length", [0, 1, 32_767, 65_535, 1 << 20])
def test_a_text_keeps_its_line_ends_wherever_they_are(length: int) -> None:
    text = "z" * length + "\r\n\r" + "y" * length + "\n"
    names = ("aggregate_id", "event_type")
    block = bytearray(f"\x02{text}\x02\x01a\n\x02\r\n\x02\x01b\n".encode())
    (batch,) = reading._parsed([block], None, names, ())
    assert batch.column("aggregate_id").to_pylist() == [text, "\r\n"]


def test_a_whole_numeric_is_a_number(table: Outbox) -> None:
    table.publish(host(1), event(aggregate_version=9223372036854775807))
    table.conn.execute("alter table outbox_message_t alter aggregate_version type numeric")
    assert rows(table, "aggregate_version") == [{"aggregate_version": 2**63 - 1}]


@pytest.mark.parametrize(
    ("field", "kind", "value", "type_"),
    [
        ("aggregate_version", "numeric(10, 2)", "7.5", "bigint"),
        ("aggregate_version", "numeric", "'NaN'", "bigint"),
        ("aggregate_version", "numeric", "9223372036854775808", "bigint"),
        ("aggregate_version", "text", "'v-secret'", "bigint"),
        ("transaction_count", "bigint", "3000000000", "int"),
    ],
)
def test_a_value_of_another_type_is_one_line_without_it(
    table: Outbox, field: str, kind: str, value: str, type_: str
) -> None:
    table.publish(host(1), event())
    table.conn.execute(f"alter table outbox_message_t alter {field} type {kind}")
    table.conn.execute(f"update outbox_message_t set {field} = {value}")
    with pytest.raises(RelayError) as raised:
        rows(table, "id", field)
    assert str(raised.value) == (
        f"table: public.outbox_message_t cannot be read: {field} has a value that is not of type {type_}: give the"
        " field another column with the option or setting `columns`, or none"
    )
    assert rows(table, field, columns=f'{{"{field}": null}}') == [{field: None}]


def test_a_column_that_is_no_time_is_refused_on_the_driver(table: Outbox) -> None:
    table.publish(host(1), event())
    table.conn.execute("alter table outbox_message_t alter event_ts type bigint using 1")
    reader = DifferenceReader(parse({"dsn": table.jobs_dsn}))
    with pytest.raises(RelayError, match="cannot cast type bigint to timestamp with time zone"):
        reader.partitions()


@pytest.mark.parametrize("value", ["v-secret", "2026-13-45", "2026-01-01 10:00 Secret/Zone"])
def test_a_text_that_is_no_time_is_one_line_without_it(table: Outbox, value: str) -> None:
    table.publish(host(1), event())
    table.conn.execute("alter table outbox_message_t alter event_ts type text")
    table.conn.execute("update outbox_message_t set event_ts = %s", (value,))
    with pytest.raises(
        RelayError, match="a value that is no time: give the field another"
    ) as raised:
        rows(table, "id", "event_ts")
    assert value.lower() not in str(raised.value).lower()
    assert "secret" not in str(raised.value).lower()


def test_what_a_function_of_a_view_says_is_in_no_line(table: Outbox) -> None:
    table.publish(host(1), event())
    table.conn.execute("""
        create function failing(given jsonb) returns text language plpgsql as
            $$ begin raise exception 'secret %', given; end $$;
        create view seen as select id, c_xid, c_offset, failing(payload) as payload from outbox_message_t
    """)
    with pytest.raises(RelayError, match=r"public\.seen cannot be read: RaiseException P0001$"):
        rows(table, "id", "payload", table="public.seen")


def test_enums_arrays_and_domains_are_texts(table: Outbox) -> None:
    table.publish(host(1), event(aggregate_id="3"))
    table.conn.execute("""
        create type kind as enum ('order.placed');
        create domain document as jsonb;
        alter table outbox_message_t alter event_type type kind using event_type::kind,
            alter aggregate_id type int[] using array[aggregate_id::int, null],
            alter payload type document,
            add tenants uuid[] default array['00000000-0000-4000-8000-000000000001'::uuid]
    """)
    names = ("event_type", "aggregate_id", "payload", "headers")
    assert rows(table, *names, headers='["tenants"]') == [
        {
            "event_type": "order.placed",
            "aggregate_id": "{3,NULL}",
            "payload": '{"amount": 1}',
            "headers": [("tenants", "{00000000-0000-4000-8000-000000000001}")],
        }
    ]


def test_columns_of_one_type_in_another_order_keep_their_values(table: Outbox) -> None:
    table.publish(host(1), event(aggregate_id="a"))
    expected = {"event_type": "order.placed", "aggregate_id": "a", "host_id": str(host(1))}
    for names in (("host_id", "event_type", "aggregate_id"), ("aggregate_id", "host_id")):
        (found,) = rows(table, *names)
        assert found == {name: expected[name] for name in names}


def test_a_schema_that_denies_nulls_is_refused() -> None:
    source = OutboxDataSource({"dsn": "postgresql://u@h/x"})
    given = StructType([StructField("aggregate_id", StringType(), nullable=False)])
    with pytest.raises(ConfigurationError, match="column aggregate_id may be null"):
        source.reader(given)


def test_tasks_have_as_many_rows_each_where_xids_are_sparse(outbox: Outbox) -> None:
    """Nine tenths of the rows are in one thousandth of the xids, as after a night of other writes."""
    outbox.fill(200, events=5)
    outbox.conn.execute(
        "update outbox_message_t set c_xid = (10 * c_offset)::text::xid8 where c_offset <= 100"
    )
    outbox.conn.execute(
        "update outbox_message_t set c_xid = (1000000 + c_offset)::text::xid8 where c_offset > 100"
    )
    table = parse({"dsn": outbox.jobs_dsn}).table
    between = Difference(BEGINNING, Snapshot(2_000_000, 2_000_000))

    def sizes() -> list[int]:
        found = []
        for portion in by_xid(outbox.conn, table, between, 4):
            assert portion.xids is not None
            low, high = portion.xids
            found.append(
                outbox.value(
                    f"select count(*) from outbox_message_t where c_xid >= '{low}' and c_xid < '{high}'"
                )
            )
        assert sum(found) == 1_000
        return found

    assert max(sizes()) == 900
    outbox.conn.execute("analyze outbox_message_t")
    assert max(sizes()) < 300
    outbox.conn.execute(
        "update outbox_message_t set c_xid = (1001100 + c_offset)::text::xid8 where c_offset > 500"
    )
    assert max(sizes()) < 600


def test_portions_of_a_sparse_table_have_each_row_once(outbox: Outbox) -> None:
    outbox.fill(60, events=5)
    outbox.conn.execute("analyze outbox_message_t")
    outbox.fill(20, events=5)
    table = parse({"dsn": outbox.jobs_dsn}).table
    seen = Snapshot.parse(outbox.value("select pg_current_snapshot()::text"))
    for tasks in (1, 2, 7, 64):
        portions = by_xid(outbox.conn, table, Difference(BEGINNING, seen), tasks)
        assert len(portions) <= tasks + 1
        found = [
            str(each)
            for portion in portions
            for batch in read(outbox.jobs_dsn, table, portion, 8, None, ["id"])
            for each in batch.column("id")
        ]
        assert sorted(found) == sorted(outbox.column("select id::text from outbox_message_t"))
