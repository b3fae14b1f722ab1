"""format("outbox"): what a batch and a stream read, against a real PostgreSQL and a local Spark."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb
from pyspark.errors import AnalysisException
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from relay.faults import RelayError, is_transient
from relay.model.snapshots import BEGINNING, Snapshot
from relay.source.outbox.differences import Difference, cut
from relay.spark import register
from relay.spark.data_source import DifferenceReader as BatchReader
from relay.spark.data_source import StreamReader
from relay.spark.data_source_options import parse
from relay.spark.reading import COLUMNS, TaskPortion, by_host, read
from relay.spark.session import Session
from tests.outbox import Outbox, event, host
from tests.postgres import Server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture
def spark(spark_session: Session) -> SparkSession:
    session = spark_session.get(timeout=120)
    assert session is not None
    register(session)
    return session


def load(spark: SparkSession, outbox: Outbox, **options: str) -> DataFrame:
    return (
        spark.read.format("outbox").options(dsn=outbox.jobs_dsn, partitions="2", **options).load()
    )


def ids(frame: DataFrame) -> list[str]:
    return sorted(row.id for row in frame.select("id").collect())


def stored(outbox: Outbox, condition: str = "true") -> list[str]:
    return sorted(outbox.column(f"select id::text from outbox_message_t where {condition}"))


def now(outbox: Outbox) -> str:
    return str(outbox.value("select pg_current_snapshot()::text"))


def kept(outbox: Outbox) -> str:
    """A position of all that is committed."""
    taken = "select concat(snapshot, '@', witness) from relay.take_witness()"
    return str(outbox.value(taken))


def test_every_value_arrives_as_it_is(spark: SparkSession, outbox: Outbox) -> None:
    odd = 'a "quoted",\n\r\nline\t\\N é 🙂 \\.'
    payload = {"text": odd, "n": 12345678901234567890.5, "none": None}
    outbox.publish(host(1), event(1, aggregate_id=odd, payload=payload, metadata={"k": "v"}))
    outbox.publish(host(2), event(2, aggregate_id="", event_ts="infinity"))
    outbox.publish(
        host(2), event(3, aggregate_id=None, event_ts="2026-02-03T04:05:06.000007+01:00")
    )
    outbox.publish(host(2), event(4, event_ts="0044-03-15 12:00:00+00 BC", aggregate_version=7))
    frame = load(spark, outbox)
    assert frame.columns == list(COLUMNS)
    rows = {row.c_offset: row for row in frame.collect()}
    wanted = outbox.conn.execute(
        "select c_offset, id::text, host_id::text, payload::text, metadata::text, c_xid::text::bigint"
        " from outbox_message_t order by c_offset"
    ).fetchall()
    assert [
        (r.c_offset, r.id, r.host_id, r.payload, r.metadata, r.c_xid)
        for _, r in sorted(rows.items())
    ] == wanted
    first, second, third, fourth = (rows[offset] for offset in sorted(rows))
    assert (first.aggregate_id, second.aggregate_id, third.aggregate_id) == (odd, "", None)
    assert json.loads(first.payload)["text"] == odd
    assert (second.event_ts, fourth.event_ts, fourth.aggregate_version) == (None, None, 7)
    micros = frame.selectExpr("unix_micros(event_ts) as t").where("t is not null").collect()
    third_ts = datetime(2026, 2, 3, 3, 5, 6, 7, tzinfo=UTC)
    assert int(third_ts.timestamp()) * 1_000_000 + 7 in [row.t for row in micros]
    assert third.event_ts is not None
    partitions = outbox.column(
        "select distinct mod(abs(hashtext(host_id::text)::bigint), 2)::int from outbox_message_t"
    )
    assert {row.partition for row in rows.values()} == set(partitions)


@pytest.mark.parametrize("ordered", ["true", "false"])
def test_a_batch_reads_a_range(spark: SparkSession, outbox: Outbox, ordered: str) -> None:
    outbox.fill(20, events=3)
    before = kept(outbox)
    outbox.fill(10, events=3)
    after = kept(outbox)
    outbox.fill(5, events=3)
    assert ids(load(spark, outbox, ordered=ordered)) == stored(outbox)
    snapshot, _, _ = before.partition("@")
    for end in (before, snapshot):
        assert ids(load(spark, outbox, ordered=ordered, toSnapshot=end)) == stored(
            outbox, f"pg_visible_in_snapshot(c_xid, '{snapshot}')"
        )
    between = load(spark, outbox, ordered=ordered, fromSnapshot=before, toSnapshot=after)
    assert between.count() == 30
    middle = outbox.value(
        "select percentile_disc(0.5) within group (order by c_offset) from outbox_message_t"
    )
    assert ids(load(spark, outbox, ordered=ordered, fromOffset=str(middle))) == stored(
        outbox, f"c_offset >= {middle}"
    )
    later = load(spark, outbox, ordered=ordered, fromTime="2100-01-01T00:00:00+00:00")
    assert later.count() == 0


@pytest.mark.rare
def test_a_row_that_is_larger_than_what_is_parsed_at_once(
    spark: SparkSession, outbox: Outbox
) -> None:
    outbox.publish(host(1), event(1), event(2, payload={"text": "é\n" * 2_000_000}), event(3))
    rows = load(spark, outbox).selectExpr("length(payload) as n").collect()
    assert sorted(row.n for row in rows) == sorted(
        outbox.column("select length(payload::text) from outbox_message_t")
    )


def test_rows_from_before_relay_are_read_once(spark: SparkSession, outbox: Outbox) -> None:
    outbox.fill(10)
    outbox.conn.execute("update outbox_message_t set c_xid = null where c_offset <= 20")
    outbox.fill(10)
    for ordered in ("true", "false"):
        assert ids(load(spark, outbox, ordered=ordered)) == stored(outbox)
    assert ids(load(spark, outbox, fromSnapshot="3:3:")) == stored(outbox, "c_xid is not null")


def test_columns_of_other_names(spark: SparkSession, outbox: Outbox) -> None:
    outbox.publish(host(1), event(1))
    outbox.conn.execute("alter table outbox_message_t rename payload to body")
    frame = load(spark, outbox, columns='{"payload": "body", "metadata": null}')
    assert [row.payload for row in frame.collect()] == ['{"amount": 1}']


def test_a_password_is_not_in_the_plan(spark: SparkSession, outbox: Outbox) -> None:
    outbox.publish(host(1), event(1))
    dsn = psycopg.conninfo.make_conninfo(outbox.jobs_dsn, application_name="hunter2")
    frame = spark.read.format("outbox").option("dsn", dsn).load()
    assert frame.count() == 1
    plan: str = frame._sc._jvm.PythonSQLUtils.explainString(frame._jdf.queryExecution(), "extended")  # type: ignore[union-attr]
    assert "hunter2" not in plan


SCHEMAS = (
    "id string, event_type string",
    "event_type string, c_xid bigint, id string",
    "partition int, event_ts timestamp",
    "payload string",
    "aggregate_id string",
)


@pytest.mark.parametrize("ordered", ["true", "false"])
def test_a_schema_of_fewer_columns_has_the_same_values(
    spark: SparkSession, outbox: Outbox, subtests: pytest.Subtests, ordered: str
) -> None:
    outbox.publish(host(1), event(1, aggregate_id=None), event(2, aggregate_id=""))
    outbox.publish(host(2), event(3, aggregate_id='a,"b"\n'), event(4, aggregate_id=None))
    options = {"dsn": outbox.jobs_dsn, "partitions": "2", "ordered": ordered}
    everything = load(spark, outbox, ordered=ordered).collect()
    for schema in SCHEMAS:
        with subtests.test(schema):
            frame = spark.read.format("outbox").schema(schema).options(**options).load()
            assert frame.columns == [each.split()[0] for each in schema.split(", ")]
            found = [tuple(row) for row in frame.collect()]
            wanted = [tuple(row[name] for name in frame.columns) for row in everything]
            assert sorted(found, key=str) == sorted(wanted, key=str)


def test_a_schema_in_a_stream_and_in_sql(
    spark: SparkSession, outbox: Outbox, tmp_path: Path
) -> None:
    outbox.fill(5, events=2)
    frame = spark.readStream.format("outbox").schema("event_type string, id string")
    writer = frame.options(dsn=outbox.jobs_dsn).load().writeStream.trigger(availableNow=True)
    writer = writer.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
    assert writer.start(str(tmp_path / "q")).awaitTermination(60)
    assert written(spark, tmp_path) == stored(outbox)
    assert spark.read.parquet(str(tmp_path / "q")).columns == ["event_type", "id"]
    name = f"two_{outbox.slot}"
    spark.sql(
        f"create temporary view {name} (id string, payload string) using outbox options (dsn '{outbox.jobs_dsn}')"
    )
    assert ids(spark.table(name)) == stored(outbox)
    spark.sql(f"drop view {name}")


def test_a_schema_with_headers(spark: SparkSession, outbox: Outbox) -> None:
    outbox.publish(host(1), event(1), event(2))
    outbox.conn.execute("alter table outbox_message_t add region text")
    outbox.conn.execute("update outbox_message_t set region = 'eu' where transaction_ordinal = 1")
    for schema in ("headers map<string,string>, id string", "headers map<string,string>"):
        frame = spark.read.format("outbox").schema(schema)
        rows = frame.options(dsn=outbox.jobs_dsn, headers='["region"]').load().collect()
        regions = [row.headers["region"] for row in rows]
        assert sorted(regions, key=str) == sorted(
            outbox.column("select region from outbox_message_t"), key=str
        )


def test_columns_that_a_schema_leaves_out_are_not_read(
    spark: SparkSession, outbox: Outbox, other_role: str
) -> None:
    """A role that may not see payloads reads the rest."""
    outbox.fill(3)
    outbox.conn.execute(
        "grant select (id, host_id, c_xid, c_offset, event_type) on outbox_message_t"
        f" to s_{outbox.slot}"
    )
    for ordered in ("true", "false"):
        options = {"dsn": other_role, "partitions": "2", "ordered": ordered}
        reader = spark.read.format("outbox").options(**options)
        assert ids(reader.schema("event_type string, id string").load()) == stored(outbox)
        with pytest.raises(Exception, match=r"cannot be read: permission .* or on the columns"):
            reader.schema("id string, payload string").load().collect()
    outbox.conn.execute(f"drop owned by s_{outbox.slot}")


def test_a_wrong_schema_is_one_line_on_the_driver(spark: SparkSession, outbox: Outbox) -> None:
    frame = (
        spark.read.format("outbox").schema("id string, kind string").options(dsn=outbox.jobs_dsn)
    )
    with pytest.raises(AnalysisException) as raised:
        frame.load().collect()
    line = "relay.faults.ConfigurationError: schema: there is no column kind: the columns are id, "
    assert line in str(raised.value)


@pytest.fixture
def other_role(outbox: Outbox) -> Iterator[str]:
    """The dsn of a role that may read nothing."""
    outbox.conn.execute(f"create role s_{outbox.slot} login password 'hunter2'")
    yield outbox.dsn_as(f"s_{outbox.slot}", "hunter2")
    outbox.conn.execute(f"drop role s_{outbox.slot}")


WRONG: dict[str, tuple[dict[str, str], str]] = {
    "table": ({"table": "public.nope"}, "table: there is no table public.nope in database"),
    "column": (
        {"columns": '{"payload": "body"}'},
        "columns: public.outbox_message_t has no column body: name one that it has",
    ),
    "header": (
        {"headers": '["region"]'},
        "headers: public.outbox_message_t has no column region: name one that it has",
    ),
    "server": (
        {"dsn": "postgresql://u:hunter2@127.0.0.1:1/x"},
        'option dsn: no connection: connection to server at "127.0.0.1"',
    ),
    "right": ({"dsn": "stranger"}, "table: public.outbox_message_t cannot be read: permission"),
}


def planned_batch(options: dict[str, str]) -> None:
    BatchReader(parse(options)).partitions()


def planned_stream(options: dict[str, str]) -> None:
    reader = StreamReader(parse(options))
    try:
        reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    finally:
        reader.stop()


@pytest.mark.parametrize("reading", ["batch", "stream"])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_one_line_on_the_driver(
    outbox: Outbox, other_role: str, wrong: str, reading: str
) -> None:
    options, expected = WRONG[wrong]
    outbox.publish(host(1), event(1))
    given = {"dsn": outbox.jobs_dsn, "ordered": "false"} | options
    if given["dsn"] == "stranger":
        given["dsn"] = other_role
    plan = planned_stream if reading == "stream" else planned_batch
    with pytest.raises(RelayError) as raised:
        plan(given)
    assert str(raised.value).startswith(expected)
    assert len(str(raised.value).splitlines()) == 1
    assert "hunter2" not in str(raised.value)


def test_a_checkpoint_of_another_outbox_is_refused(outbox: Outbox) -> None:
    """On the same server its snapshot is valid there: what the other outbox had before was skipped without a word."""
    outbox.fill(2)
    outbox.conn.execute("create table orders_outbox (like outbox_message_t including all)")
    outbox.conn.execute("insert into orders_outbox select * from outbox_message_t")
    reader = StreamReader(parse({"dsn": outbox.jobs_dsn}))
    other = StreamReader(
        parse({"dsn": outbox.jobs_dsn, "table": "public.orders_outbox", "reader": "o"})
    )
    try:
        end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
        outbox.fill(1)
        assert reader.latestOffset(end, ReadAllAvailable()) != end
        with pytest.raises(
            RelayError, match=r"the checkpoint is of the outbox .*message_t, not of"
        ):
            other.latestOffset(end, ReadAllAvailable())
        assert outbox.value("select count(*) from relay.readers where reader = 'o'") == 0
        # One that an earlier relay has written does not name its outbox.
        former = {"snapshot": end["snapshot"]}
        assert reader.latestOffset(former, ReadAllAvailable()) != former
    finally:
        reader.stop()
        other.stop()


def test_a_checkpoint_of_another_server_is_refused(outbox: Outbox) -> None:
    """Where this one had given more transaction ids, rows up to the checkpoint's were skipped without a word."""
    outbox.fill(1)
    reader = StreamReader(parse({"dsn": outbox.jobs_dsn, "startingPosition": "now"}))
    now = reader.initialOffset()
    assert set(now) == {"snapshot", "witness", "outbox", "server"}
    outbox.fill(1)
    end = reader.latestOffset(now, ReadAllAvailable())
    assert end == {**now, "snapshot": end["snapshot"], "witness": end["witness"]}
    # One that an earlier relay has written names no witness.
    former, former_end = without_witness(now), without_witness(end)
    refused = pytest.raises(
        RelayError, match=r"is of the server 1, not of \d+, .*and startingPosition \d+:\S*@[-\w]+$"
    )
    anything = ReadAllAvailable()
    try:
        with refused:
            reader.latestOffset({**former, "server": "1"}, anything)
        # A query that begins again repeats its last micro-batch first.
        with refused:
            reader.partitions(former, {**former_end, "server": "1"})
        # pg_upgrade makes another server, which has the witnesses.
        of_same = {"server": "1"}
        assert reader.latestOffset({**now, **of_same}, anything)["server"] == end["server"]
        assert reader.partitions({**now, **of_same}, {**end, **of_same})
        # One of an earlier relay goes on on its server, whatever else it knew, and gets a witness.
        for known in ({}, {"installed": "1.0"}):
            assert reader.latestOffset({**former, **known}, anything)["witness"]
            assert reader.partitions({**former, **known}, {**former_end, **known})
    finally:
        reader.stop()


def without_witness(offset: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in offset.items() if name != "witness"}


def test_a_role_that_may_keep_no_position_reads_batches_and_what_may_be_lost(
    outbox: Outbox, other_role: str, caplog: pytest.LogCaptureFixture
) -> None:
    role = f"s_{outbox.slot}"
    outbox.conn.execute(f"grant select on outbox_message_t to {role}")
    outbox.fill(1)
    planned_batch({"dsn": other_role})
    planned_batch({"dsn": other_role, "toSnapshot": now(outbox)})
    grants = (
        rf"a position cannot be kept: .*run `grant usage on schema relay to \"{role}\"; grant execute on function "
        rf"relay\.recent_witness\(\), relay\.holds_witness\(uuid\) to \"{role}\"`, or set the option failOnDataLoss"
    )
    with pytest.raises(RelayError, match=grants):
        planned_stream({"dsn": other_role})
    for option in ({"fromSnapshot": now(outbox)}, {"fromSnapshot": kept(outbox)}):
        with pytest.raises(RelayError, match="grant execute on function"):
            planned_batch({"dsn": other_role, **option})
    options = {"dsn": other_role, "startingPosition": "now", "failOnDataLoss": "false"}
    planned_batch({"dsn": other_role, "failOnDataLoss": "false", "fromSnapshot": now(outbox)})
    reader = StreamReader(parse(options))
    try:
        first = reader.initialOffset()
        assert "does not notice another history" in caplog.text
        assert set(first) == {"snapshot", "outbox", "server"}
        outbox.fill(1)
        assert reader.latestOffset(first, ReadAllAvailable()) != first
        # One that was begun by a role that may.
        known = {**first, "witness": kept(outbox).partition("@")[2]}
        assert reader.latestOffset(known, ReadAllAvailable()) != known
        with pytest.raises(RelayError, match=r"is of the server 1, .*and startingPosition \d+:"):
            reader.latestOffset({**first, "server": "1"}, ReadAllAvailable())
    finally:
        reader.stop()
    grant = grants_of(str(planned_refusal(other_role)))
    outbox.conn.execute(grant.encode())
    planned_stream({"dsn": other_role})
    outbox.conn.execute(f"drop owned by {role}")


def planned_refusal(dsn: str) -> RelayError:
    with pytest.raises(RelayError) as raised:
        planned_stream({"dsn": dsn})
    return raised.value


def grants_of(text: str) -> str:
    return text.split("`")[1]


def test_where_relay_is_not_installed_a_stream_is_told_what_to_run(outbox: Outbox) -> None:
    outbox.fill(1)
    outbox.conn.execute("drop function relay.recent_witness()")
    with pytest.raises(RelayError, match=r"cannot be kept: .*: run `relay init`, which brings"):
        planned_stream({"dsn": outbox.jobs_dsn})
    planned_batch({"dsn": outbox.jobs_dsn})


def test_a_snapshot_that_names_no_witness_is_no_position(outbox: Outbox) -> None:
    outbox.fill(1)
    plain = now(outbox)
    refused = rf"the snapshot {plain} names no witness, .*is of this server, (\S+), or set the option failOn"
    with pytest.raises(RelayError, match=f"option fromSnapshot: {refused}") as raised:
        planned_batch({"dsn": outbox.jobs_dsn, "fromSnapshot": plain})
    named = re.search(refused, str(raised.value))
    assert named is not None
    with pytest.raises(RelayError, match=f"option startingPosition: {refused}"):
        planned_stream({"dsn": outbox.jobs_dsn, "startingPosition": plain})
    for position, more in ((named[1], {}), (plain, {"failOnDataLoss": "false"}), ("3:3:", {})):
        planned_batch({"dsn": outbox.jobs_dsn, "fromSnapshot": position, **more})
        planned_stream({"dsn": outbox.jobs_dsn, "startingPosition": position, **more})


def test_without_a_dsn_the_option_is_named(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOST", "127.0.0.1")
    monkeypatch.setenv("PGPORT", "1")
    with pytest.raises(RelayError, match=r"option dsn: no .*: set the option dsn, dsn\.env, "):
        planned_batch({})


def test_in_sql_the_outbox_is_a_temporary_view(spark: SparkSession, outbox: Outbox) -> None:
    """Spark gives the reader of a table none of the options of `create table`, and its `owner` to the source."""
    outbox.publish(host(1), event(1))
    name = f"outbox_{outbox.slot}"
    using = f"using outbox options (dsn '{outbox.jobs_dsn}', partitions '1')"
    with pytest.raises(AnalysisException, match="write `create temporary view … using outbox"):
        spark.sql(f"create table {name} {using}")
    spark.sql(f"create temporary view {name} {using}")
    assert ids(spark.table(name)) == stored(outbox)
    spark.sql(f"drop view {name}")


def test_a_reader_that_cannot_be_noted_is_one_line(outbox: Outbox, other_role: str) -> None:
    outbox.conn.execute(f"grant select on outbox_message_t to s_{outbox.slot}")
    outbox.conn.execute("select relay.let_keep_positions('outbox_message_t')")
    with pytest.raises(RelayError, match=r"option reader: .*relay\.readers, such as `relay`$"):
        planned_stream({"dsn": other_role, "reader": "r"})
    outbox.conn.execute(f"drop owned by s_{outbox.slot}")


def test_a_snapshot_of_the_future_is_refused(outbox: Outbox) -> None:
    with pytest.raises(RelayError, match="this server's next transaction"):
        planned_batch({"dsn": outbox.jobs_dsn, "fromSnapshot": "999999:999999:"})


def test_a_field_without_a_column_of_its_own_name_is_null(
    spark: SparkSession, outbox: Outbox
) -> None:
    outbox.publish(host(1), event(1))
    outbox.conn.execute("alter table outbox_message_t rename metadata to more")
    assert [row.metadata for row in load(spark, outbox).collect()] == [None]


def test_an_option_of_a_stream_is_refused_in_a_batch_and_the_other_way_round(
    spark: SparkSession, outbox: Outbox, tmp_path: Path
) -> None:
    with pytest.raises(
        AnalysisException,
        match="option startingPosition: is of a stream, and this is a batch",
    ):
        load(spark, outbox, startingPosition="1:1:").count()
    with (
        pytest.raises(Exception, match="option toOffset: is of a batch, and this is a stream"),
        query(spark, outbox, tmp_path, toOffset="7") as running,
    ):
        running.processAllAvailable()


def test_a_filter_is_applied_by_the_server_where_asked(spark: SparkSession, outbox: Outbox) -> None:
    outbox.publish(host(1), event(1), event(2, event_type="order.shipped"))
    outbox.publish(host(2), event(3, aggregate_id=None))
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = load(spark, outbox, pushFilters="true")
        for condition in (
            "event_type = 'order.shipped'",
            f"host_id = '{host(1)}'",
            "aggregate_id is not null",
            "c_offset >= 2",
            "event_type in ('order.placed', 'x') and transaction_ordinal < 2",
            "payload like '%3%'",
        ):
            wanted = condition.replace("payload like '%3%'", "payload::text = '{\"amount\": 3}'")
            assert ids(frame.where(condition)) == stored(outbox, wanted)
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_a_filter_on_a_column_of_fixed_width(spark: SparkSession, outbox: Outbox) -> None:
    outbox.publish(host(1), event(1))
    outbox.conn.execute("alter table outbox_message_t alter event_type type char(16)")
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        for condition in ("event_type = 'order.placed    '", "event_type in ('order.placed    ')"):
            frame = load(spark, outbox, pushFilters="true").where(condition)
            assert ids(frame) == stored(outbox)
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_times_without_a_zone_are_compared_in_utc(outbox: Outbox) -> None:
    outbox.publish(host(1), event(1, event_ts="2026-01-01T10:00:00+00:00"))
    outbox.conn.execute(
        "set timezone to 'UTC'; alter table outbox_message_t alter event_ts type timestamp"
    )
    for start, expected in (
        ("2026-01-01T10:30:00+02:00", 1),
        ("2026-01-01T09:30:00-02:00", 0),
    ):
        options = parse({"dsn": outbox.jobs_dsn, "fromTime": start})
        between = Difference(Snapshot(1, 1), Snapshot.parse(now(outbox)))
        found = read(options.dsn, options.table, TaskPortion(between), 8, options.conditions)
        assert sum(len(batch) for batch in found) == expected


@pytest.mark.parametrize(("encoding", "byte"), [("SQL_ASCII", b"\xe9"), ("WIN1252", b"\x81")])
def test_a_byte_that_the_encoding_does_not_have_stops_nobody(
    server: Server, outbox: Outbox, encoding: LiteralString, byte: bytes
) -> None:
    name = f"{outbox.slot}_{encoding.lower()}"
    dsn = server.create_database(name, f"template template0 encoding '{encoding}' locale 'C'")
    try:
        with Outbox(dsn) as other:
            other.install()
            other.publish(host(1), event(1))
        with psycopg.connect(dsn, autocommit=True, client_encoding=encoding) as conn:
            conn.execute(b"update outbox_message_t set aggregate_id = 'a,\"" + byte + b"\"'")
        with psycopg.connect(dsn, client_encoding="UTF8") as conn:
            (seen,) = conn.execute("select pg_current_snapshot()::text").fetchall()[0]
        options = parse({"dsn": dsn})
        between = Difference(Snapshot(1, 1), Snapshot.parse(seen))
        condition = sql.SQL("event_type <> {}").format(sql.Literal("注文 é"))
        (batch,) = read(options.dsn, options.table, TaskPortion(between), 8, condition)
    finally:
        server.drop_database(name)
    assert batch.column("aggregate_id").to_pylist() == ['a,"\N{REPLACEMENT CHARACTER}"']
    assert batch.column("event_type").to_pylist() == ["order.placed"]


def portion_of(outbox: Outbox) -> TaskPortion:
    return TaskPortion(Difference(Snapshot(1, 1), Snapshot.parse(now(outbox))))


READERS = (
    "from pg_stat_activity where application_name = 'relay spark' and datname = current_database()"
)


def test_an_error_amid_the_rows_is_one_line(outbox: Outbox) -> None:
    outbox.fill(20)
    options = parse({"dsn": outbox.jobs_dsn})
    last = sql.SQL(
        "1 / (c_offset - (select max(c_offset) from public.outbox_message_t)) is not null"
    )
    found = read(options.dsn, options.table, portion_of(outbox), 8, last)
    with pytest.raises(RelayError, match=r"cannot be read: DivisionByZero 22012$"):
        list(found)


def test_a_session_that_ends_amid_the_rows_is_a_transient_fault(outbox: Outbox) -> None:
    large = event(payload={"text": "x" * 8_000_000})
    outbox.publish(host(1), large, large, large)
    options = parse({"dsn": outbox.jobs_dsn})
    found = read(options.dsn, options.table, portion_of(outbox), 8, None)
    assert len(next(found)) == 1
    outbox.conn.execute(f"select pg_terminate_backend(pid) {READERS}")
    with pytest.raises(psycopg.OperationalError) as raised:
        list(found)
    assert is_transient(raised.value)


def test_rows_that_nobody_takes_are_not_waited_for(outbox: Outbox) -> None:
    for _ in range(3):
        outbox.publish(host(1), event(payload={"text": "x" * 2_000_000}))
    options = parse({"dsn": outbox.jobs_dsn})
    portion = replace(portion_of(outbox), xids=(3, 1 << 40), unmarked=False)
    slow = sql.SQL("case when c_offset > 1 then pg_sleep(60) end is null")
    found = read(options.dsn, options.table, portion, 8, slow, ["payload"])
    assert len(next(found)) == 1
    assert isinstance(found, Generator)
    closing = Thread(target=found.close)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    assert outbox.value(f"select count(*) {READERS} and state = 'active'") == 0


def test_an_older_server_is_refused(spark: SparkSession, outbox: Outbox) -> None:
    frame = load(spark, outbox, toSnapshot="4000000000:4000000000:")
    with pytest.raises(Exception, match="an older backup, another cluster, or a replica that lags"):
        frame.count()


def test_cuts_of_a_difference_are_disjoint_and_complete(outbox: Outbox) -> None:
    """Also where transactions of before the difference end in it."""
    options = parse({"dsn": outbox.jobs_dsn})
    with (
        psycopg.connect(outbox.publisher_dsn) as early,
        psycopg.connect(outbox.publisher_dsn) as open_still,
    ):
        publish_on(early, 1)
        outbox.fill(5, events=2)
        before = Snapshot.parse(now(outbox))
        publish_on(open_still, 2)
        outbox.fill(20, events=3)
        early.commit()
        outbox.fill(3, events=3)
        seen = Snapshot.parse(now(outbox))
        found: list[str] = []
        sizes = []
        position = before
        while True:
            end, _ = cut(outbox.conn, options.table.identifier, Difference(position, seen), 10)
            rows = [
                row for portion in [Difference(position, end)] for row in rows_of(outbox, portion)
            ]
            assert end.covers(position)
            found += rows
            sizes.append(len(rows))
            if end == seen:
                break
            position = end
        assert sorted(found) == stored(
            outbox,
            f"pg_visible_in_snapshot(c_xid, '{seen}') and not pg_visible_in_snapshot(c_xid, '{before}')",
        )
        assert len(found) == len(set(found)) == 70
        assert max(sizes) <= 12
        open_still.rollback()


def hosts_of(outbox: Outbox, between: Difference, tasks: int) -> list[list[tuple[str, str, int]]]:
    """What each task of an ordered reading reads: host, id and c_offset."""
    table = parse({"dsn": outbox.jobs_dsn}).table
    names = ["host_id", "id", "c_offset"]
    return [
        [
            (row["host_id"], row["id"], row["c_offset"])
            for batch in read(outbox.jobs_dsn, table, portion, 8, None, names)
            for row in batch.to_pylist()
        ]
        for portion in by_host(outbox.conn, table, between, tasks)
    ]


@pytest.mark.parametrize("planned", [1_000_000, 20])
def test_each_host_is_read_by_one_task_in_order(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, planned: int
) -> None:
    """With commits of several hosts, stragglers, rows from before relay, and more rows than are planned."""
    monkeypatch.setattr("relay.spark.reading.MOST_PLANNED_ROWS", planned)
    outbox.fill(3, events=2)
    outbox.conn.execute("update outbox_message_t set c_xid = null")
    with (
        psycopg.connect(outbox.publisher_dsn) as early,
        psycopg.connect(outbox.publisher_dsn) as open_still,
    ):
        publish_on(early, 1)
        outbox.fill(10, events=2, hosts=5)
        before = Snapshot.parse(now(outbox))
        publish_on(open_still, 2)
        for number in (1, 2, 3):
            publish_on(early, number)
        outbox.fill(20, events=3, hosts=7)
        early.commit()
        outbox.fill(3, events=1)
        after = Snapshot.parse(now(outbox))
        for start in (BEGINNING, before):
            visible = f"(c_xid is null or pg_visible_in_snapshot(c_xid, '{after}'))"
            if start == before:
                visible = f"pg_visible_in_snapshot(c_xid, '{after}') and not pg_visible_in_snapshot(c_xid, '{before}')"
            for tasks in (1, 3, 8):
                found = hosts_of(outbox, Difference(start, after), tasks)
                ids = [id_ for rows in found for _, id_, _ in rows]
                assert sorted(ids) == stored(outbox, visible)
                readers: dict[str, int] = {}
                for number, rows in enumerate(found):
                    assert [row[2] for row in rows] == sorted(row[2] for row in rows)
                    assert all(readers.setdefault(name, number) == number for name, _, _ in rows)
        open_still.rollback()


@pytest.mark.server(15)
def test_an_ordered_reading_reads_each_row_once(outbox: Outbox) -> None:
    """And once more to look up whose it is. A residue without rows needs no task."""
    outbox.fill(2_000, events=5)
    outbox.conn.execute("vacuum analyze outbox_message_t")
    between = Difference(BEGINNING, Snapshot.parse(now(outbox)))

    def read_rows() -> int:
        outbox.conn.execute("select pg_stat_force_next_flush()")
        return int(
            outbox.value(
                "select seq_tup_read + idx_tup_fetch from pg_stat_user_tables where relname = 'outbox_message_t'"
            )
        )

    earlier = read_rows()
    found = hosts_of(outbox, between, 16)
    assert sum(map(len, found)) == 10_000
    assert read_rows() - earlier <= 3 * 10_000
    position = Snapshot.parse(now(outbox))
    outbox.publish(host(1), event(1))
    assert len(hosts_of(outbox, Difference(position, Snapshot.parse(now(outbox))), 16)) == 1


@pytest.mark.parametrize("ordered", ["true", "false"])
def test_a_range_without_rows_is_empty(spark: SparkSession, outbox: Outbox, ordered: str) -> None:
    outbox.fill(2)
    position = kept(outbox)
    frame = load(spark, outbox, ordered=ordered, fromSnapshot=position, toSnapshot=position)
    assert frame.count() == 0


def rows_of(outbox: Outbox, between: Difference) -> list[str]:
    from relay.spark.reading import by_xid

    options = parse({"dsn": outbox.jobs_dsn})
    portions = by_xid(outbox.conn, options.table, between, 3)
    return [
        str(each)
        for portion in portions
        for batch in read(outbox.jobs_dsn, options.table, portion, 8, None)
        for each in batch.column("id")
    ]


def publish_on(conn: psycopg.Connection[Any], number: int) -> None:
    conn.execute("select relay.publish(%s, null, %s)", (host(number), Jsonb([event(number)])))


# Streams


@contextmanager
def query(
    spark: SparkSession, outbox: Outbox, folder: Path, name: str = "q", **options: str
) -> Iterator[Any]:
    """A query that appends to files, with a trigger of 100 ms unless it is AvailableNow."""
    available = options.pop("available", None)
    frame = (
        spark.readStream.format("outbox")
        .options(dsn=outbox.jobs_dsn, partitions="2", **options)
        .load()
    )
    writer = (
        frame.writeStream.format("parquet")
        .option("checkpointLocation", str(folder / f"{name}.checkpoint"))
        .option("path", str(folder / name))
    )
    trigger = {"availableNow": True} if available else {"processingTime": "100 milliseconds"}
    running = writer.trigger(**trigger).start()
    try:
        yield running
    finally:
        running.stop()


def run_to_the_end(spark: SparkSession, outbox: Outbox, folder: Path, **options: str) -> list[Any]:
    with query(spark, outbox, folder, available="true", **options) as running:
        assert running.awaitTermination(60)
        return list(running.recentProgress)


def written(spark: SparkSession, folder: Path, name: str = "q") -> list[str]:
    return ids(spark.read.parquet(str(folder / name)))


def test_a_stream_reads_what_is_committed_once(
    spark: SparkSession, outbox: Outbox, tmp_path: Path
) -> None:
    """Around a transaction that stays open, one that rolls back, savepoints, and a restart from the checkpoint."""
    with (
        psycopg.connect(outbox.publisher_dsn) as long,
        psycopg.connect(outbox.publisher_dsn) as failing,
    ):
        publish_on(long, 1)
        publish_on(failing, 2)
        outbox.fill(10)
        run_to_the_end(spark, outbox, tmp_path)
        assert written(spark, tmp_path) == stored(outbox)
        with long.transaction():
            publish_on(long, 3)
        outbox.fill(10)
        failing.rollback()
        run_to_the_end(spark, outbox, tmp_path)
        assert written(spark, tmp_path) == stored(outbox)
        assert len(stored(outbox)) == 100
        long.commit()
    run_to_the_end(spark, outbox, tmp_path)
    assert written(spark, tmp_path) == stored(outbox)
    assert len(stored(outbox)) == 102


def test_available_now_in_small_batches(
    spark: SparkSession, outbox: Outbox, tmp_path: Path
) -> None:
    outbox.fill(25, events=4)
    progress = run_to_the_end(spark, outbox, tmp_path, maxEventsPerTrigger="20", ordered="false")
    sizes = [each.numInputRows for each in progress if each.numInputRows]
    assert sum(sizes) == 100
    assert max(sizes) <= 24
    assert written(spark, tmp_path) == stored(outbox)


def test_progress_tells_how_many_rows_are_after_a_micro_batch(
    spark: SparkSession, outbox: Outbox, tmp_path: Path
) -> None:
    outbox.fill(10, events=4)
    progress = run_to_the_end(spark, outbox, tmp_path, maxEventsPerTrigger="16", ordered="false")
    read, behind = 0, []
    for each in progress:
        read += each.numInputRows
        if each.numInputRows:
            latest, end = map(json.loads, (each.sources[0].latestOffset, each.sources[0].endOffset))
            assert latest["position"] == f"{end['snapshot']}@{end['witness']}"
            behind.append(latest["rowsBehind"])
            assert behind[-1] == 40 - read
    assert behind[0] > 0 == behind[-1]


def test_rows_behind_are_counted_up_to_a_limit_and_a_lost_session_is_no_fault(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.spark.data_source.MOST_ROWS_BEHIND", 5)
    outbox.fill(10, events=1)
    reader = StreamReader(parse({"dsn": outbox.jobs_dsn}))
    try:
        start = reader.initialOffset()
        assert reader.reportLatestOffset() is None
        end = reader.latestOffset(start, ReadMaxRows(7))
        report = reader.reportLatestOffset()
        assert report is not None
        assert (report["rowsBehind"], report["moreRowsBehind"]) == (3, False)
        reader.latestOffset(start, ReadMaxRows(1))
        report = reader.reportLatestOffset()
        assert report is not None
        assert (report["rowsBehind"], report["moreRowsBehind"]) == (5, True)
        everything = reader.latestOffset(start, ReadAllAvailable())
        report = reader.reportLatestOffset()
        assert report is not None
        assert Snapshot.parse(report.pop("snapshot")).covers(Snapshot.parse(everything["snapshot"]))
        assert report == {
            "outbox": everything["outbox"],
            "server": everything["server"],
            "position": f"{everything['snapshot']}@{everything['witness']}",
            "rowsBehind": 0,
            "moreRowsBehind": False,
        }
        reader.latestOffset(end, ReadMaxRows(1))
        outbox.conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = 'relay spark' and datname = current_database()"
        )
        assert reader.reportLatestOffset() is None
        assert reader.latestOffset(end, ReadAllAvailable()) != end
    finally:
        reader.stop()


@pytest.mark.rare
def test_two_queries_follow_and_one_starts_now(
    spark: SparkSession, outbox: Outbox, tmp_path: Path
) -> None:
    outbox.fill(4)
    old = stored(outbox)
    with (
        query(spark, outbox, tmp_path, name="all") as everything,
        query(spark, outbox, tmp_path, name="new", startingPosition="now") as later,
    ):
        everything.processAllAvailable()
        later.processAllAvailable()
        outbox.fill(6)
        everything.processAllAvailable()
        later.processAllAvailable()
    assert written(spark, tmp_path, "all") == stored(outbox)
    assert written(spark, tmp_path, "new") == sorted(set(stored(outbox)) - set(old))
    assert outbox.value(f"select count(*) {READERS} and state = 'active'") == 0
