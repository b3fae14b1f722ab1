"""A query gets a column, or a wider type: `schema: evolve` changes the table, and each event is there once.

Reports: delta-io/delta-rs#1386, #1667, #4009, #3943, pola-rs/polars#20642 and #25871,
memiiso/debezium-server-iceberg#68 (a column that is added), PostHog/posthog#74674,
confluentinc/kafka-connect-jdbc#183, estuary/connectors#823 (it is nullable), ray-project/ray#64923 (a column was left
out in silence, or a type was committed that nobody could read), delta-io/delta#2622, OLake's
datazip-inc/olake-docs#162, apache/hudi#5519, pola-rs/polars#28794 (wider types), apache/iceberg-python#3613 (a
decimal of another scale), memiiso/debezium-server-iceberg#572 and sidequery/dlt-iceberg#9 (a text that became a time,
times with and without a zone), memiiso/debezium-server-iceberg#49 (values that are converted in silence),
bruin-data/ingestr#627 (a batch that is narrower than the table), dlt-hub/dlt#1011 and #1454 (a contract that cannot
be changed), confluentinc/kafka-connect-jdbc#1193 (what to do).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import deltalake
import psycopg
import pyarrow as pa
import pytest
from deltalake.exceptions import DeltaError
from psycopg import sql
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import CommitFailedException

from relay.admin.verification import verify
from relay.config.handlers import SparkHandler
from relay.config.settings import Settings
from relay.faults import ConfigurationError, NotNow
from relay.spark.session import Session
from relay.spark.writers import BatchId, Writer, delta, iceberg, jdbc, writer
from relay.spark.writers.schema_changes import Change, quoted, spark_statement
from tests.lake import LocalFrame, LocalSession
from tests.outbox import Outbox, event, host, relaying, wait_until

KINDS = ["delta", "iceberg", "jdbc"]
WIDENING = ["iceberg", "jdbc"]
MODULES = {"delta": delta, "iceberg": iceberg, "jdbc": jdbc}
CHANGING: dict[str, Any] = {
    "delta": delta._DeltaColumns,
    "iceberg": iceberg._IcebergColumns,
    "jdbc": jdbc._PostgresqlColumns,
}


@dataclass
class Table:
    """A table with the columns `id` and `n`, and how it is written and read."""

    kind: str
    settings: dict[str, Any]
    rows: Callable[[], list[dict[str, Any]]]
    comments: Callable[[], dict[str, str | None]]
    application: str = ""

    def writer(self, schema: str = "evolve", **more: Any) -> Writer:
        given = {"type": "spark", "schema": schema, **self.settings, **more}
        return writer("lake", SparkHandler.model_validate(given))

    def batch(self, number: int) -> BatchId:
        identity = f"00000000-0000-4000-8000-{number:012}"
        return BatchId(self.application, number, identity, "5:5:", is_first=number == 1)

    def write(self, number: int, rows: pa.Table, schema: str = "evolve") -> None:
        """Write a batch, which is repeated as after a lost answer."""
        frame: Any = LocalFrame(rows)
        for _ in range(2):
            self.writer(schema).write(frame, self.batch(number))

    def values(self, name: str) -> dict[str, Any]:
        return {row["id"]: row.get(name) for row in self.rows()}

    def count(self) -> int:
        return len(self.rows())


def catalog(folder: Path) -> dict[str, str]:
    return {"type": "sql", "uri": f"sqlite:///{folder}/c.db", "warehouse": f"file://{folder}/w"}


def made(kind: str, folder: Path, outbox: Outbox | None) -> Table:
    if kind == "delta":
        path = str(folder / "table")
        return Table(
            kind,
            {"format": "delta", "path": path, "partition_by": []},
            lambda: deltalake.DeltaTable(path).to_pyarrow_table().to_pylist(),
            lambda: {
                each.name: each.metadata.get("comment")
                for each in deltalake.DeltaTable(path).schema().fields
            },
            str(uuid4()),
        )
    if kind == "iceberg":
        options = catalog(folder)

        def loaded() -> Any:
            return load_catalog("relay", **options).load_table("shop.events")

        return Table(
            kind,
            {"format": "iceberg", "table": "shop.events", "options": options, "partition_by": []},
            lambda: loaded().scan().to_arrow().to_pylist(),
            lambda: {each.name: each.doc for each in loaded().schema().fields},
            str(uuid4()),
        )
    assert outbox is not None
    conn = outbox.conn
    conn.execute('create table "Shop Events" (id text, n integer)')
    conn.execute(f'alter table "Shop Events" owner to {role_of(outbox)}')
    return Table(
        kind,
        {"jdbc": {"dsn": outbox.lake_dsn, "table": '"Shop Events"'}},
        lambda: [row for (row,) in conn.execute('select to_jsonb(t) from "Shop Events" as t')],
        lambda: dict(
            conn.execute(
                "select attname, col_description(attrelid, attnum) from pg_attribute"
                " where attrelid = '\"Shop Events\"'::regclass and attnum > 0"
            ).fetchall()
        ),
        str(uuid4()),
    )


def role_of(outbox: Outbox) -> str:
    with psycopg.connect(outbox.lake_dsn) as conn:
        return conn.info.user


@pytest.fixture(params=KINDS)
def table(request: pytest.FixtureRequest, tmp_path: Path, outbox: Outbox) -> Table:
    return begun(made(request.param, tmp_path, outbox))


@pytest.fixture(params=WIDENING)
def widening(request: pytest.FixtureRequest, tmp_path: Path, outbox: Outbox) -> Table:
    return begun(made(request.param, tmp_path, outbox))


def begun(table: Table) -> Table:
    table.write(1, batch_of("a"))
    return table


def batch_of(name: str, n: pa.DataType | None = None, **columns: Any) -> pa.Table:
    """A row with an id, the number 1, and more columns."""
    return pa.table({"id": [name], "n": pa.array([1], n or pa.int32()), **columns})


def with_comment(rows: pa.Table, name: str, text: str) -> pa.Table:
    """As a function of a sink adds it: `frame.withMetadata(name, {"comment": text})`."""
    index = rows.schema.get_field_index(name)
    field = rows.schema.field(index).with_metadata({"comment": text})
    return rows.cast(rows.schema.set(index, field))


def test_a_column_is_added_and_older_rows_have_null(table: Table) -> None:
    table.write(2, batch_of("b", note=["new"], relay_batch=["2"]))
    table.write(3, batch_of("c"))
    assert table.values("note") == {"a": None, "b": "new", "c": None}
    if table.kind != "jdbc":
        assert table.values("relay_batch")["b"] == "2"
    assert table.count() == 3


def test_a_fixed_table_names_the_statement_and_evolves_once_it_may(table: Table) -> None:
    """Also for a sink that was fixed before."""
    rows = batch_of("b", amount=pa.array([Decimal("1.50")], pa.decimal128(18, 2)))
    with pytest.raises(ConfigurationError, match=r"has no column amount: run `alter table") as said:
        table.write(2, rows, "fixed")
    assert "set `schema: evolve`, or leave it out with `sql`" in str(said.value)
    assert table.values("amount") == {"a": None}
    table.write(2, rows)
    assert float(table.values("amount")["b"]) == 1.5


def test_the_statement_that_a_fixed_postgresql_table_names_is_run(
    tmp_path: Path, outbox: Outbox
) -> None:
    table = begun(made("jdbc", tmp_path, outbox))
    rows = batch_of("b", **{'odd "name"': ["x"]})
    with pytest.raises(ConfigurationError) as said:
        table.write(2, rows, "fixed")
    (statement,) = re.findall("`(alter table [^`]*)`", str(said.value))
    outbox.conn.execute(sql.SQL(statement))
    table.write(2, rows, "fixed")
    assert table.values('odd "name"') == {"a": None, "b": "x"}


def test_an_integer_becomes_a_long(widening: Table) -> None:
    """Old and new values are read, and so is a batch of a host that still has the former query."""
    table = widening
    table.write(2, pa.table({"id": ["b"], "n": pa.array([1 << 40])}))
    table.write(3, batch_of("c", pa.int32()))
    table.write(4, batch_of("d", pa.int16()))
    assert table.values("n") == {"a": 1, "b": 1 << 40, "c": 1, "d": 1}


def test_a_float_becomes_a_double_and_a_decimal_gets_digits(widening: Table) -> None:
    table = widening
    small = {
        "f": pa.array([0.5], pa.float32()),
        "d": pa.array([Decimal("1.25")], pa.decimal128(9, 2)),
    }
    wide = {"f": pa.array([0.1]), "d": pa.array([Decimal("123456789012.25")], pa.decimal128(20, 2))}
    table.write(2, batch_of("b", **small))
    table.write(3, batch_of("c", **wide))
    table.write(4, batch_of("d", **small))
    assert table.values("f") == {"a": None, "b": 0.5, "c": 0.1, "d": 0.5}
    found = {name: value and Decimal(str(value)) for name, value in table.values("d").items()}
    assert found == {
        "a": None,
        "b": Decimal("1.25"),
        "c": Decimal("123456789012.25"),
        "d": Decimal("1.25"),
    }


def test_a_delta_table_says_that_its_types_stay(tmp_path: Path) -> None:
    """Spark can with the feature `typeWidening`, which deltalake neither sets nor reads."""
    table = begun(made("delta", tmp_path, None))
    with pytest.raises(ConfigurationError, match="n is int32 and the batch's is int64, and relay"):
        table.write(2, batch_of("b", pa.int64()))
    table.write(2, batch_of("b", pa.int16()))
    assert table.values("n") == {"a": 1, "b": 1}


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["1"]),
        pa.array([1.0]),
        pa.array([Decimal("1.0")], pa.decimal128(9, 1)),
        pa.array([{"a": 1}]),
    ],
    ids=["text", "double", "decimal", "struct"],
)
@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_what_is_no_wider_type_is_refused(tmp_path: Path, kind: str, column: pa.Array) -> None:
    table = begun(made(kind, tmp_path, None))
    with pytest.raises(ConfigurationError, match=r"the table's column n is int32 .* cast it with"):
        table.write(2, pa.table({"id": ["b"], "n": column}))
    assert table.values("n") == {"a": 1}


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_times_with_and_without_a_zone_are_other_types(tmp_path: Path, kind: str) -> None:
    table = made(kind, tmp_path, None)
    table.write(1, pa.table({"id": ["a"], "at": pa.array([0], pa.timestamp("us"))}))
    with pytest.raises(ConfigurationError, match="the table's column at is timestamp"):
        table.write(2, pa.table({"id": ["b"], "at": pa.array([0], pa.timestamp("us", "UTC"))}))


def test_a_decimal_of_another_scale_is_refused(tmp_path: Path) -> None:
    """PyIceberg 0.11 read 1.23 as 0.0123 then."""
    table = made("iceberg", tmp_path, None)
    one = pa.array([Decimal("1.23")], pa.decimal128(9, 2))
    table.write(1, pa.table({"id": ["a"], "d": one}))
    with pytest.raises(ConfigurationError, match="column d is decimal128"):
        table.write(2, pa.table({"id": ["b"], "d": one.cast(pa.decimal128(18, 4))}))


def test_a_comment_comes_with_a_column_and_is_changed(table: Table) -> None:
    """apache/incubator-xtable#525, delta-io/delta#3975, delta-io/delta-rs#2850: no schema is another one for it."""
    quoted = 'it\'s `new` "one"'
    table.write(2, with_comment(batch_of("b", note=["x"]), "note", quoted))
    table.write(3, with_comment(batch_of("c", note=["x"]), "n", "the number"))
    table.write(4, batch_of("d", note=["x"]))
    assert table.comments() == {"id": None, "n": "the number", "note": quoted}
    assert table.count() == 4


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_comment_is_there_from_the_beginning(tmp_path: Path, kind: str) -> None:
    table = made(kind, tmp_path, None)
    table.write(1, with_comment(batch_of("a"), "n", "the number"), "fixed")
    assert table.comments() == {"id": None, "n": "the number"}


def test_a_column_that_differs_by_case_is_refused(table: Table) -> None:
    """databricks/iceberg-kafka-connect#324: it was added again, or its values went to the other one."""
    with pytest.raises(ConfigurationError, match="column N is the table's n but for case"):
        table.write(2, pa.table({"id": ["b"], "N": pa.array([1], pa.int32())}))


def test_names_are_quoted(table: Table) -> None:
    """apache/spark#30041, apache/gravitino#13026, snowflakedb/snowflake-kafka-connector#712."""
    names = ["a.b", "a`b", 'a"b', "a b", "ä", "select", "a%sb", "a{b"]
    rows = batch_of("b", **{name: ["x"] for name in names})
    for name in names:
        rows = with_comment(rows, name, f"about {name}")
    table.write(2, rows)
    for name in names:
        assert table.values(name) == {"a": None, "b": "x"}
        assert table.comments()[name] == f"about {name}"


# Kills, and other drivers


class Killed(BaseException):
    """The end of a process."""


def killing(monkeypatch: pytest.MonkeyPatch, table: Table, when: str) -> None:
    """Let the next change of a table's columns end the process, before or after it is made."""
    changing = CHANGING[table.kind]
    change = changing.change

    def killed(self: Any, changes: Any) -> None:
        monkeypatch.setattr(changing, "change", change)
        if when == "between":
            change(self, changes[:1])
        if when == "after":
            change(self, changes)
        raise Killed

    monkeypatch.setattr(changing, "change", killed)


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_a_kill_around_a_change_costs_nothing(
    table: Table, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """bruin-data/ingestr#627, ray-project/ray#64872, MaterializeInc/materialize#38460: half of it was made."""
    rows = with_comment(batch_of("b", note=["x"], more=pa.array([2])), "n", "the number")
    killing(monkeypatch, table, when)
    with pytest.raises(Killed):
        table.write(2, rows)
    assert table.count() == 1
    table.write(2, rows)
    assert table.values("note") == {"a": None, "b": "x"}
    assert table.values("more") == {"a": None, "b": 2}
    assert table.comments()["n"] == "the number"
    assert table.count() == 2


def test_a_batch_that_fails_after_the_change_is_written_once(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = MODULES[table.kind]
    name = {"delta": "write_files", "iceberg": "write_files", "jdbc": "copy_rows"}[table.kind]

    def fails(*_: Any) -> Iterator[pa.RecordBatch]:
        raise OSError("the store is away")

    with monkeypatch.context() as broken:
        broken.setattr(module, name, fails)
        with pytest.raises(OSError, match="the store is away"):
            table.write(2, batch_of("b", note=["x"]))
    table.write(2, batch_of("b", note=["x"]))
    assert table.values("note") == {"a": None, "b": "x"}
    assert table.count() == 2


@pytest.mark.parametrize("late", ["same", "wider", "before"])
def test_two_drivers_change_a_table(
    table: Table, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """One was suspended with its plan, and its successor has changed the table and written the batch, or the next.

    apache/iceberg-python#2707, apache/iceberg#8254, databricks/iceberg-kafka-connect#95.
    """
    changing = CHANGING[table.kind]
    change = changing.change
    own = batch_of("b", note=["x"], k=pa.array([1], pa.int32()))
    other = own
    if late == "wider":
        other = batch_of("b", note=["x"], k=pa.array([1], pa.int64()))

    def suspended(self: Any, changes: Any) -> None:
        monkeypatch.setattr(changing, "change", change)
        table.write(2, other)
        if late == "before":
            table.write(3, batch_of("c", other=["y"]))
        change(self, changes)

    monkeypatch.setattr(changing, "change", suspended)
    with suppress(DeltaError, CommitFailedException, NotNow):
        table.writer().write(LocalFrame(own), table.batch(2))  # type: ignore[arg-type]
    expected = {"a": None, "b": "x"} | ({"c": None} if late == "before" else {})
    assert table.values("note") == expected
    assert table.count() == len(expected)
    table.write(4, batch_of("d", k=pa.array([1], pa.int32())))
    assert table.values("k") == {"a": None, "b": 1, "d": 1} | (
        {"c": None} if late == "before" else {}
    )


# Tables that others use


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_small_files_of_all_columns_are_merged(tmp_path: Path, kind: str) -> None:
    """delta-io/delta-rs#2347, apache/amoro#728, apache/iceberg-python#3744: merging knew one of the schemas."""
    table = begun(made(kind, tmp_path, None))
    wide = pa.int64() if kind == "iceberg" else pa.int32()
    for number in range(2, 8):
        table.write(number, batch_of(f"b{number}", wide, note=[f"x{number}"]))
    before = sorted(table.rows(), key=str)
    upkeep: Any = table.writer()
    session: Any = LocalSession()
    upkeep.upkeep(session)
    assert sorted(table.rows(), key=str) == before
    table.write(8, batch_of("c", wide, note=["y"], more=["z"]))
    assert table.values("note")["b3"] == "x3"
    assert table.values("more")["c"] == "z"


def keyed(name: str, offset: int, **columns: Any) -> pa.Table:
    """An event of a key, as the batch of a sink with `mode: upsert` has it."""
    return pa.table(
        {
            "id": [name],
            "c_offset": pa.array([offset]),
            "xid": pa.array([offset]),
            **columns,
            "relay_deleted": [False],
        }
    )


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_the_newest_event_stays_across_a_change(tmp_path: Path, kind: str) -> None:
    """Of a key whose row lacks the column, and an older event that comes later.

    delta-io/delta#786, apache/iceberg-python#3865.
    """
    table = made(kind, tmp_path, None)
    table.settings |= {"mode": "upsert", "key": ["id"]}
    session: Any = LocalSession()

    def merge(number: int, rows: pa.Table, before: int) -> None:
        batch = replace(
            table.batch(number),
            before=f"{before}:{before}:",
            snapshot=f"{before + 10}:{before + 10}:",
        )
        merging: Any = table.writer()
        for _ in range(2):
            merging.merge(rows, batch, *([session] if kind == "iceberg" else []))

    merge(1, pa.concat_tables([keyed("a", 11), keyed("b", 12)]), 10)
    merge(2, keyed("a", 21, note=["new"]), 20)
    merge(3, keyed("b", 5, note=["old"]), 30)
    merge(4, keyed("c", 41, note=["c"], more=pa.array([1])), 40)
    merge(5, keyed("a", 51, note=["newest"], more=pa.array([2])), 50)
    assert table.values("note") == {"a": "newest", "b": None, "c": "c"}
    assert table.values("more") == {"a": 2, "b": None, "c": 1}
    assert table.count() == 3


def test_a_key_that_is_widened_is_the_same_key(tmp_path: Path) -> None:
    """The float 0.1 is not the double 0.1, but what the table has is the double of the float."""
    table = made("iceberg", tmp_path, None)
    table.settings |= {"mode": "upsert", "key": ["k"], "sql": "…"}
    session: Any = LocalSession()
    small = pa.array([0.1], pa.float32())
    for number, key in enumerate([small, small.cast(pa.float64()), small], 1):
        batch = replace(table.batch(number), before=f"{number}0:{number}0:", snapshot="90:90:")
        merging: Any = table.writer()
        merging.merge(keyed(str(number), 10 * number + 1, k=key), batch, session)
    assert [row["id"] for row in table.rows()] == ["3"]


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_table_of_events_does_not_become_one_of_the_present_state(
    tmp_path: Path, kind: str
) -> None:
    table = begun(made(kind, tmp_path, None))
    table.settings |= {"mode": "upsert", "key": ["id"]}
    merging: Any = table.writer()
    rows = keyed("b", 1, n=pa.array([1], pa.int32())).drop_columns(["c_offset", "xid"])
    rows = rows.append_column("c_offset", pa.array([1])).append_column("xid", pa.array([1]))
    with pytest.raises(ConfigurationError, match=r"no column relay_\w+: relay writes it"):
        merging.merge(rows, table.batch(2), *([LocalSession()] if kind == "iceberg" else []))
    assert table.values("n") == {"a": 1}


# PostgreSQL


@pytest.fixture
def postgresql(tmp_path: Path, outbox: Outbox) -> Table:
    return begun(made("jdbc", tmp_path, outbox))


def test_a_column_that_a_view_has_keeps_its_type(postgresql: Table, outbox: Outbox) -> None:
    """stripe/pg-schema-diff#280, IntersectMBO/cardano-db-sync#1822."""
    outbox.conn.execute('create view totals as select n from "Shop Events"')
    with pytest.raises(
        ConfigurationError, match=r"the server refuses `alter table .* view or rule"
    ):
        postgresql.write(2, batch_of("b", pa.int64()))
    outbox.conn.execute("drop view totals")
    postgresql.write(2, batch_of("b", pa.int64()))
    assert postgresql.values("n") == {"a": 1, "b": 1}


def test_only_the_owner_of_a_table_changes_it(postgresql: Table, outbox: Outbox) -> None:
    role = role_of(outbox)
    outbox.conn.execute(
        f'alter table "Shop Events" owner to current_user; grant all on "Shop Events" to {role}'
    )
    session: Any = LocalSession()
    with pytest.raises(
        ConfigurationError, match=r"^handlers\.lake\.schema: evolve changes .* owner"
    ):
        postgresql.writer().check(session)
    with pytest.raises(ConfigurationError, match="must be owner of table"):
        postgresql.write(2, batch_of("b", note=["x"]))
    postgresql.writer("fixed").check(session)
    assert postgresql.count() == 1


def test_others_that_use_a_table_are_waited_for(
    postgresql: Table, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change waits for no more than its limit, since all new users wait behind it."""
    monkeypatch.setattr(jdbc, "_CHANGE_LOCK_TIMEOUT", "10ms")
    with psycopg.connect(outbox.superuser_dsn) as reader:
        reader.execute('select from "Shop Events"')
        with pytest.raises(NotNow, match="others use the table"):
            postgresql.write(2, batch_of("b", note=["x"]))
    postgresql.write(2, batch_of("b", note=["x"]))
    assert postgresql.values("note") == {"a": None, "b": "x"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("x" * 64, "has more than 63 bytes"),
        ("xmin", "conflicts with a system column name"),
        ("made", "the column made is generated by the server"),
    ],
)
def test_a_name_that_no_column_can_have_is_named(
    postgresql: Table, outbox: Outbox, name: str, says: str
) -> None:
    outbox.conn.execute(
        'alter table "Shop Events" add column made text generated always as (id) stored'
    )
    with pytest.raises(ConfigurationError, match=says):
        postgresql.write(2, batch_of("b", **{name: ["x"]}))
    assert postgresql.count() == 1


def test_values_that_the_server_converts_stay_its_matter(postgresql: Table, outbox: Outbox) -> None:
    """A column of another sort keeps its type, and a fixed one takes what fits into it."""
    outbox.conn.execute('alter table "Shop Events" add column doc jsonb, add column price numeric')
    rows = batch_of("b", pa.int64(), doc=['{"a": 1}'], price=pa.array([1.5]))
    postgresql.write(2, rows, "fixed")
    postgresql.write(3, batch_of("c", doc=['{"a": 2}'], price=pa.array([2.5])))
    assert postgresql.values("doc") == {"a": None, "b": {"a": 1}, "c": {"a": 2}}
    types = "string_agg(format_type(atttypid, null), ' ' order by attnum)"
    own = "attrelid = '\"Shop Events\"'::regclass and attnum > 0"
    assert (
        outbox.value(f"select {types} from pg_attribute where {own}")
        == "text integer jsonb numeric"
    )


# With Spark


FIRST = "select id, c_offset, xid, cast(get_json_object(payload, '$.amount') as int) as amount from events"


@pytest.mark.parametrize(
    "kind", ["delta", *(pytest.param(kind, marks=pytest.mark.rare) for kind in WIDENING)]
)
def test_the_query_of_a_spark_sink_gets_columns(
    outbox: Outbox, spark_session: Session, tmp_path: Path, kind: str
) -> None:
    """While it stands still with `fixed`, beside a row that does not fit; `relay verify` finds every event once."""
    wide = "int" if kind == "delta" else "bigint"
    then = FIRST.replace("as int)", f"as {wide})").replace(
        "amount from", "amount, 'EUR' as note from"
    )
    place = made(kind, tmp_path, outbox).settings
    if kind == "jdbc":
        outbox.conn.execute(
            'alter table "Shop Events" add c_offset bigint, add xid bigint, add amount integer'
        )
    else:
        place |= {"mode": "upsert", "key": ["id"]}

    def configured(query: str, **more: Any) -> Settings:
        given = {"type": "spark", "every": 0.1, "start": "beginning", "sql": query, **place, **more}
        return outbox.settings(handlers={"lake": given}, routes=[{"handlers": ["lake"]}])

    outbox.install_again(configured(FIRST))
    outbox.publish(host(1), event(1))
    with relaying(configured(FIRST), spark_session):
        outbox.wait_delivered("lake", 120)
    outbox.publish(host(2), event(2))
    outbox.publish(host(3), event("n/a"))
    fault = "select fault from relay.sinks where fault ~ 'run .alter table .*, set .schema: evolve'"
    with relaying(configured(then), spark_session):
        wait_until(lambda: bool(outbox.column(fault)), 120)
    evolving = configured(then, schema="evolve")
    with relaying(evolving, spark_session):
        outbox.wait_delivered("lake", 120)
        outbox.publish(host(4), event(4 if kind == "delta" else 1 << 40))
        outbox.wait_delivered("lake", 120)
    dead = "select payload::jsonb->>'amount' from relay.dead_letter_queue where status = 'dead'"
    assert outbox.column(dead) == ["n/a"]
    comparison = verify(evolving, "lake", None, None, most_ids=3, session=spark_session)
    assert comparison.result.is_equal
    assert comparison.result.events == 3
    assert not outbox.column("select 1 from relay.sinks where fault is not null")


def test_spark_reads_the_statements(spark_session: Session) -> None:
    session: Any = spark_session.get(timeout=120)
    parser = session._jsparkSession.sessionState().sqlParser()
    field = pa.field("it's `odd`", pa.decimal128(18, 2))
    for kind in ("add", "widen"):
        change: Any = Change(kind, field)
        parser.parsePlan(spark_statement(quoted("/lake/a`b"), change))
