"""relay.spark.read: over Spark's JDBC source the same rows as format("outbox") has, or an error.

Reports, of what others met with this source and with ranges of a table: apache/spark#45599, apache/spark#45638 and
pgjdbc/pgjdbc#1515 (`infinity`), pgjdbc/pgjdbc#2488, pgjdbc/pgjdbc#1539 and debezium/debezium#1879 (BC, and days before
the Gregorian calendar), apache/spark#16021, duckdb/duckdb-postgres#68 and vesoft-inc/nebula-exchange#65 (char is
padded), apache/spark#11063 (rows without the column of the ranges), trinodb/trino#8681, trinodb/trino#9746 and
awslabs/aws-athena-query-federation#2216 (a comparison of texts that the server makes with its collation),
apache/spark#10452, apache/spark#56630 and AbsaOSS/spline-spark-agent#368 (a password in the plan),
confluentinc/kafka-connect-jdbc#915, juicedata/juicefs#7521 and MemberJunction/MJ#3085 (who commits late is skipped),
ClickHouse/ClickHouse#114930 (the position is committed before the rows), Kotlin/kotlin-jupyter#426 (no driver).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltalake
import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb
from pyspark.sql.types import StructType

from bench.workers.spark_reader import JAR
from relay.admin.retention import partition
from relay.faults import ConfigurationError, RelayError
from relay.spark import jdbc_reads, position, position_of, read, register
from relay.spark.session import Session
from tests.field.test_removed_events import KEEP, kept, remove
from tests.outbox import LONG_SECONDS, Outbox, event, host, wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["kept"]

pytestmark = pytest.mark.skipif(not JAR, reason="there is no JDBC driver of PostgreSQL")

ODD = 'a "quoted",\n\r\nline\t\\N é 🙂 \\. \x01\x02'
TIMES = (
    *("infinity", "-infinity", "0044-03-15 12:00:00+00 BC", "0001-01-01 00:00:00+00"),
    *("9999-12-31 23:59:59.999999+00", "10000-01-01 00:00:00+00", "1969-12-31 23:59:59.999999+00"),
    *("1582-10-10 00:00:00.000001+00", "1883-11-18 12:03:58-05", "2026-02-03T04:05:06.000007+01"),
)


@pytest.fixture
def spark(spark_session: Session) -> SparkSession:
    """The shared session, which has the driver's jar."""
    session = spark_session.get(timeout=120)
    assert session is not None
    register(session)
    return session


def types(frame: DataFrame) -> list[tuple[str, Any]]:
    return [(each.name, each.dataType) for each in frame.schema]


def plan(frame: Any) -> str:
    explain = frame._sc._jvm.PythonSQLUtils.explainString
    return str(explain(frame._jdf.queryExecution(), "extended"))


def rows(frame: DataFrame) -> list[Any]:
    """The rows, with microseconds for times, which Python may not have."""
    exact = [
        f"unix_micros({each.name}) as {each.name}"
        if each.dataType.simpleString() == "timestamp"
        else f"`{each.name}`"
        for each in frame.schema
    ]
    return sorted(map(repr, frame.selectExpr(*exact).collect()))


def require_same(
    spark: SparkSession, options: Mapping[str, str], *names: str, over_jdbc: bool = True
) -> list[Any]:
    """Read over both, and return the rows."""
    frame = read(spark, options, names or None)
    known = spark.read.format("outbox").options(**options)
    same = known.load()
    if names:
        same = known.schema(StructType([same.schema[name] for name in names])).load()
    assert ("JDBCRelation" in plan(frame)) is over_jdbc
    assert types(frame) == types(same)
    assert frame.columns == list(names or same.columns)
    found = rows(frame)
    assert found == rows(same)
    return found


def publish_values(outbox: Outbox) -> None:
    payload = {"text": ODD, "n": 12345678901234567890.5, "none": None}
    outbox.publish(host(1), event(1, aggregate_id=ODD, payload=payload, metadata={"k": "v"}))
    least = event(2, aggregate_id="", aggregate_version=-(2**63))
    outbox.publish(host(1), least, event(3, aggregate_id=None, payload=None))
    outbox.publish(host(1), event(4, aggregate_id="\ufeffmark ", aggregate_version=2**63 - 1))
    for number, time in enumerate(TIMES):
        outbox.publish(host(number), event(10 + number, event_ts=time))


def test_every_value_is_that_of_the_data_source(spark: SparkSession, outbox: Outbox) -> None:
    publish_values(outbox)
    outbox.conn.execute('alter table outbox_message_t add region text, add "odd `name\'" jsonb')
    outbox.conn.execute("update outbox_message_t set region = event_type where c_offset % 2 = 0")
    options = {
        "dsn": outbox.jobs_dsn,
        "partitions": "3",
        "toSnapshot": position(options_of(outbox)),
    }
    before = spark.conf.get("spark.sql.session.timeZone")
    for zone in ("UTC", "America/New_York"):
        spark.conf.set("spark.sql.session.timeZone", zone)
        assert len(require_same(spark, options)) == 4 + len(TIMES)
    spark.conf.set("spark.sql.session.timeZone", str(before))
    require_same(spark, options, "event_type", "id")
    require_same(spark, options, "partition", "c_xid", "deliver_at", "payload")
    with_headers = options | {"headers": '{"region": "region", "odd": "odd `name\'"}'}
    require_same(spark, with_headers)
    require_same(spark, with_headers, "headers", "id")


def options_of(outbox: Outbox) -> dict[str, str]:
    return {"dsn": outbox.jobs_dsn}


@pytest.mark.parametrize(
    "change",
    [
        "alter aggregate_version type numeric",
        "alter event_type type char(20)",
        "alter event_ts type date using event_ts::date",
    ],
)
def test_what_pgjdbc_reads_otherwise_is_read_over_the_data_source(
    spark: SparkSession, outbox: Outbox, change: str
) -> None:
    outbox.publish(host(1), event(1), event(2, aggregate_version=7))
    for name in outbox.column(
        "select conname from pg_constraint"
        " where contype = 'c' and conrelid = 'outbox_message_t'::regclass"
    ):
        outbox.conn.execute(f"alter table outbox_message_t drop constraint {name}")
    outbox.conn.execute("alter table outbox_message_t alter event_ts drop default")
    outbox.conn.execute(f"alter table outbox_message_t {change}")
    require_same(spark, options_of(outbox), over_jdbc=False)
    require_same(spark, options_of(outbox), "id", "payload")


def test_times_without_a_zone_and_columns_of_other_names(
    spark: SparkSession, outbox: Outbox
) -> None:
    publish_values(outbox)
    outbox.conn.execute("alter table outbox_message_t rename payload to body")
    outbox.conn.execute("alter table outbox_message_t alter event_ts drop default")
    outbox.conn.execute("alter table outbox_message_t alter event_ts type timestamp")
    named = {"columns": '{"payload": "body", "metadata": null, "deliver_at": null}'}
    require_same(spark, options_of(outbox) | named)


def test_ranges_have_each_row_once_whatever_is_in_flight(
    spark: SparkSession, outbox: Outbox
) -> None:
    """Steps over snapshots with open transactions, and rows of before relay."""
    shuffled = random.Random(51)
    outbox.fill(4, events=2)
    outbox.conn.execute("update outbox_message_t set c_xid = null where c_offset <= 3")
    options, before, read_rows = options_of(outbox) | {"partitions": "2"}, "1:1:", []
    opened: list[psycopg.Connection[Any]] = []
    for _ in range(4):
        slow = psycopg.connect(outbox.publisher_dsn)
        slow.execute("select relay.publish(%s, null, %s)", (host(1), Jsonb([event(1)])))
        opened.append(slow)
        outbox.fill(2, events=2)
        if len(opened) > 1:
            ended = opened.pop(shuffled.randrange(len(opened)))
            ended.commit()
            ended.close()
        after = position(options)
        read_rows += require_same(
            spark, options | {"fromSnapshot": before, "toSnapshot": after}, "id"
        )
        before = after
    for slow in opened:
        slow.commit()
        slow.close()
    read_rows += require_same(spark, options | {"fromSnapshot": before}, "id")
    stored = outbox.column("select concat('Row(id=''', id, ''')') from outbox_message_t")
    assert sorted(read_rows) == sorted(stored)


def test_times_and_offsets_bound_it(spark: SparkSession, outbox: Outbox) -> None:
    outbox.fill(10, events=2)
    middle = outbox.value(
        "select percentile_disc(0.5) within group (order by c_offset) from outbox_message_t"
    )
    some = require_same(spark, options_of(outbox) | {"fromOffset": str(middle)}, "payload")
    assert 0 < len(some) < 20
    later = options_of(outbox) | {"fromTime": "2100-01-01T00:00:00+00:00"}
    assert require_same(spark, later) == []


def test_filters_compare_as_spark_does(spark: SparkSession, outbox: Outbox) -> None:
    """Under a collation in which a comes before B, and with JSON that is another text."""
    for collation in outbox.column(
        "select quote_ident(collname) from pg_collation where collname = 'en-x-icu' limit 1"
    ):
        kind = f"text collate {collation}"
        outbox.conn.execute(f"alter table outbox_message_t alter event_type type {kind}")
    names = ("alpha", "Beta", "beta", "Zeta", "\u00e9ta")
    outbox.publish(host(1), *(event(n, event_type=name) for n, name in enumerate(names)))
    frame = read(spark, options_of(outbox))
    known = spark.read.format("outbox").options(**options_of(outbox)).load()
    for where in (
        "event_type < 'a'",
        "event_type >= 'b'",
        """payload = '{"amount":1}'""",
        "c_xid > 3",
    ):
        assert rows(frame.where(where)) == rows(known.where(where))
    assert frame.where("event_type < 'a'").count() == 2


def test_a_partitioned_outbox(spark: SparkSession, kept: Outbox) -> None:
    kept.fill(3)
    source = {**kept.config()["source"], "mode": "poll"}
    partition(kept.settings(**KEEP, source=source), "1d", kept.installer_dsn)
    kept.fill(3)
    assert (
        kept.value("select relkind::text from pg_class where relname = 'outbox_message_t'") == "p"
    )
    assert len(require_same(spark, options_of(kept))) == 30


def test_rows_that_retention_removes_in_between_are_an_error(
    spark: SparkSession, kept: Outbox
) -> None:
    start = position(options_of(kept))
    kept.fill(3)
    options = options_of(kept) | {"partitions": "2"}
    frames = {
        "while this query read it": read(spark, options, ["id"]),
        f"come after this query's position {start.partition('@')[0]}": read(
            spark, options | {"fromSnapshot": start}, ["id"]
        ),
        "": read(spark, options | {"fromTime": "2000-01-01T00:00:00+00:00"}, ["id"]),
    }
    over_the_source = spark.read.format("outbox").options(
        **options, ordered="false", toSnapshot=position(options)
    )
    assert all(frame.count() == 15 for frame in frames.values())
    remove(kept)
    for line, frame in frames.items():
        assert "JDBCRelation" in plan(frame)
        if line:
            with pytest.raises(Exception, match="failOnDataLoss: retention has removed") as raised:
                frame.collect()
            assert line in str(raised.value)
        else:
            assert frame.count() == 0
    # What there is, and what was removed before it began.
    assert over_the_source.load().count() == 0
    assert read(spark, options, ["id"]).count() == 0
    with pytest.raises(RelayError, match="failOnDataLoss: retention has removed"):
        read(spark, options | {"fromSnapshot": start})
    lossy = options | {"fromSnapshot": start, "failOnDataLoss": "false"}
    assert read(spark, lossy).count() == 0


def test_a_reader_holds_what_its_batch_has_to_read(spark: SparkSession, kept: Outbox) -> None:
    options = {"dsn": kept.relay_dsn, "reader": "nightly"}
    kept.fill(3)
    first = position(options)
    frame = read(spark, options | {"toSnapshot": first}, ["id"])
    assert remove(kept) == 0
    assert frame.count() == 15
    kept.fill(2)
    frame = read(spark, options | {"fromSnapshot": first}, ["id"])
    assert remove(kept) > 0
    assert frame.count() == kept.value("select count(*) from outbox_message_t") == 10


def test_a_server_without_the_witness_of_the_range_is_an_error(
    spark: SparkSession, outbox: Outbox
) -> None:
    outbox.fill(2)
    frame = read(spark, options_of(outbox), ["id"])
    assert frame.count() == 10
    outbox.conn.execute("delete from relay.witnesses")
    with pytest.raises(Exception, match="this server does not have its witness"):
        frame.collect()


def test_a_loop_commits_its_position_with_its_rows(
    spark: SparkSession, outbox: Outbox, tmp_path: Path
) -> None:
    """A step that ends before its commit is repeated, with what has come since."""
    table, options = str(tmp_path / "orders"), options_of(outbox)
    faults = iter([True, False, True, False, False])

    def step(*_: object) -> None:
        until = position(options)
        between = {"fromSnapshot": position_of(table), "toSnapshot": until}
        rows = read(spark, options | between, ["id"]).toArrow()
        if next(faults, False):
            return
        done = deltalake.CommitProperties(custom_metadata={"relay.position": until})
        deltalake.write_deltalake(table, rows, mode="append", commit_properties=done)

    for _ in range(3):
        outbox.fill(2)
        step()
    ticks = spark.readStream.format("rate").load().writeStream.foreachBatch(step)
    query = ticks.option("checkpointLocation", str(tmp_path / "ticks")).start()
    outbox.fill(2)
    stored = sorted(outbox.column("select id::text from outbox_message_t"))

    def found() -> list[str]:
        known = deltalake.DeltaTable(table).to_pyarrow_table()["id"].to_pylist()
        return sorted(known)

    try:
        wait_until(lambda: found() == stored or not query.isActive, LONG_SECONDS)
    finally:
        query.stop()
    assert found() == stored


def test_settings_of_the_role_change_nothing(spark: SparkSession, outbox: Outbox) -> None:
    publish_values(outbox)
    login = sql.Identifier(str(psycopg.conninfo.conninfo_to_dict(outbox.jobs_dsn)["user"]))
    database = sql.Identifier(outbox.conn.info.dbname)
    settings = {
        "default_transaction_isolation": "serializable",
        "timezone": "America/New_York",
        "datestyle": "German, DMY",
        "search_path": "public",
        "bytea_output": "escape",
    }
    for name, value in settings.items():
        outbox.conn.execute(
            sql.SQL("alter role {} in database {} set {} = {}").format(
                login, database, sql.Identifier(name), sql.Literal(value)
            )
        )
    require_same(spark, options_of(outbox))


def test_a_password_is_not_in_the_plan(spark: SparkSession, outbox: Outbox) -> None:
    outbox.publish(host(1), event(1))
    dsn = psycopg.conninfo.make_conninfo(outbox.jobs_dsn, options="-c relay.word=hunter2")
    frame = read(spark, {"dsn": dsn})
    assert frame.count() == 1
    shown = plan(frame)
    assert "JDBCRelation" in shown
    assert "hunter2" not in shown


def test_without_the_driver_it_is_the_data_source(
    spark: SparkSession, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox.fill(3)
    monkeypatch.setattr(jdbc_reads, "DRIVER", "org.postgresql.Absent")
    options = options_of(outbox)
    frame = read(spark, options, ["event_type", "id"])
    assert frame.columns == ["event_type", "id"]
    outbox.fill(1)
    # The range ends where it was fixed.
    assert frame.count() == 15
    require_same(spark, options, over_jdbc=False)


def test_a_role_that_keeps_no_position_reads_over_the_data_source(
    spark: SparkSession, outbox: Outbox
) -> None:
    outbox.fill(1)
    outbox.conn.execute("revoke execute on function relay.recent_witness() from public")
    for grantee in outbox.column(
        "select distinct grantee::regrole::text from pg_proc, aclexplode(proacl)"
        " where proname = 'recent_witness' and grantee <> 0 and grantee <> proowner"
    ):
        outbox.conn.execute(f"revoke execute on function relay.recent_witness() from {grantee}")
    with pytest.raises(RelayError, match="a position cannot be kept"):
        position(options_of(outbox))
    frame = read(spark, options_of(outbox))
    assert "JDBCRelation" not in plan(frame)
    assert frame.count() == 5


def test_what_is_wrong_is_one_line(spark: SparkSession, outbox: Outbox) -> None:
    options = options_of(outbox)
    with pytest.raises(ConfigurationError, match="schema: there is no column body"):
        read(spark, options, ["id", "body"])
    with pytest.raises(ConfigurationError, match="schema: it has no column"):
        read(spark, options, [])
    with pytest.raises(ConfigurationError, match="option ordered: rows come in no order"):
        read(spark, options | {"ordered": "true"})
    with pytest.raises(ConfigurationError, match="option startingPosition: is of a stream"):
        read(spark, options | {"startingPosition": "now"})
    with pytest.raises(RelayError, match="option dsn: no connection"):
        read(spark, {"dsn": "postgresql://nobody@127.0.0.1:1/none"})
    with pytest.raises(RelayError, match="table: there is no table"):
        read(spark, options | {"table": "public.absent"})
