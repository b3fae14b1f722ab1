"""Compares what a Spark sink has written with the outbox, for a range of the past, on Spark.

Both sides become one row for each event id: how often it is there, and the sum of the hashes of its rows. A sum does
not depend on the order of rows. A full outer join finds what differs, so the work is the same however much that is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from psycopg import sql

from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.model.events import FIELDS
from relay.source.outbox.differences import Difference, condition
from relay.spark import destinations, frames
from relay.spark.frames import Transform
from relay.spark.reading import MappedTable
from relay.spark.writers import BATCH_COLUMN
from relay.store import literals
from relay.store.connections import Connection, Dsn, connect
from relay.store.positions.spark_batches import Contents, OpenBatch

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_SLOTS = 8
"""The tasks of an exchange where the session does not report its Spark slots."""
_EXCHANGED_ROWS = 200_000
"""The rows of one task of an exchange, of an id and two numbers each."""

MISSING, TWICE, CHANGED, ONLY_THERE = "missing", "more than once", "changed", "only there"
"""How an event differs: the outbox has it, the table does not; the table has it more often; with other contents; or the
table has it, the outbox does not."""


class DeferredRows(NamedTuple):
    """Rows of the outbox that are deferred: those of a transaction (its 32-bit xid) between two c_offsets."""

    xid: int
    first_offset: int
    last_offset: int


@dataclass(frozen=True, slots=True)
class Exceptions:
    """What is not compared: events by id that are dead letters or were edited, and rows that are deferred."""

    ids: Sequence[str] = ()
    deferred: Sequence[DeferredRows] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result. `hashes` are those of the outbox and of the table, equal unless something differs.

    `events` is how many of the outbox were compared, by `columns`. `counts` has for each kind of difference how many
    ids there are, and `ids` some of them. `removed` counts events of the table that are no longer in the outbox, where
    retention may have removed them: nothing tells whether they were there. `left_out` counts exceptions.
    """

    events: int
    columns: Sequence[str]
    hashes: tuple[str, str]
    counts: Mapping[str, int]
    removed: int
    left_out: int
    ids: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not any(self.counts.values())


def compare(
    session: SparkSession,
    slots: int | None,
    source: Connection,
    settings: Settings,
    sink: str,
    between: Difference,
    exceptions: Exceptions,
    *,
    is_retained: bool,
    most_ids: int,
) -> Comparison:
    """Compare a range of the outbox with the sink's destination; `most_ids` bounds the ids of each kind.

    `session` is used by nobody else. `is_retained`: retention may have removed events of the range from the outbox.
    Raises ConfigurationError where they cannot be compared, psycopg.Error, and Spark's errors.
    """
    handler = settings.spark_handlers[sink]
    table = MappedTable(settings.source.table_name, settings.source.mapping)
    rows, first, last = _bounds(source, table, between)
    # Spark's default is 200 tasks for each exchange, whatever the number of rows.
    exchanged = max(slots or _SLOTS, rows // _EXCHANGED_ROWS)
    session.conf.set("spark.sql.shuffle.partitions", str(exchanged))
    contents = Contents(between.before, between.after, rows=rows)
    batch = OpenBatch("", 0, "", 0, [], handler.host_buckets, contents)
    events = frames.frame(session, slots, source, settings, sink, batch).drop(BATCH_COLUMN)
    transform = Transform(sink, handler)
    expected = transform.applied(session, events)
    _require_id(
        expected, f"handlers.{sink}.{'transform' if transform.has_function else 'sql'}: its result"
    )
    there = destinations.stored(session, sink, handler, FIELDS, slots or 1)
    _require_id(there, f"handlers.{sink}: the destination")
    # A query or a function may compute the other columns, from other tables too.
    columns = (
        ["id"] if expected is not events else [each for each in FIELDS if each in there.columns]
    )
    has_offsets = "c_offset" in there.columns
    if first is None or last is None:
        there = there.limit(0)
    elif has_offsets:
        there = there.where(there["c_offset"].between(first, last))
    aside = _set_aside(session, events, exceptions)
    joined = _joined(_by_id(expected, aside, columns), _by_id(there, aside, columns)).persist()
    try:
        counts, events_there, hashes = _summed(joined)
        ids = {kind: _some(joined.where(joined["kind"] == kind), most_ids) for kind in counts}
        removed = 0
        # Without c_offset, nothing tells which rows of the table are of the range.
        if counts.pop(ONLY_THERE, 0) and has_offsets:
            ids.pop(ONLY_THERE)
            looked_up = _looked_up(joined, _Lookup(settings.source_dsn, table, between))
            removed = looked_up.where("removed").count() if is_retained else 0
            wrong = looked_up.where("not removed") if is_retained else looked_up
            if number := wrong.count():
                counts[ONLY_THERE] = number
                ids[ONLY_THERE] = _some(wrong, most_ids)
    finally:
        joined.unpersist()
    left_out = len(exceptions.ids) + len(exceptions.deferred)
    ids = {kind: found for kind, found in ids.items() if kind in counts}
    return Comparison(events_there, columns, hashes, counts, removed, left_out, ids)


def _require_id(frame: DataFrame, what: str) -> None:
    if "id" not in frame.columns:
        raise ConfigurationError(
            f"{what} has no column id, so its rows cannot be told apart: keep the id to verify them"
        )


def _bounds(
    source: Connection, table: MappedTable, between: Difference
) -> tuple[int, int | None, int | None]:
    """How many rows a range of the outbox has, and their least and greatest c_offset."""
    offset = sql.Identifier(table.mapping["c_offset"])
    row = source.execute(
        sql.SQL(
            "select count(*), min({offset})::bigint, max({offset})::bigint from {table} where {between}"
        ).format(offset=offset, table=table.identifier, between=condition(between)),
        prepare=False,
    ).fetchone()
    assert row is not None  # noqa: S101
    return int(row[0]), row[1], row[2]


def _set_aside(
    session: SparkSession, events: DataFrame, exceptions: Exceptions
) -> DataFrame | None:
    """The ids that are not compared; None where there are none."""
    aside = None
    if exceptions.ids:
        aside = session.createDataFrame([(each,) for each in exceptions.ids], "id string")
    if exceptions.deferred:
        later = session.createDataFrame(
            [tuple(each) for each in exceptions.deferred], "xid bigint, first bigint, last bigint"
        )
        matches = (events["xid"] == later["xid"]) & events["c_offset"].between(
            later["first"], later["last"]
        )
        found = events.join(later, matches, "left_semi").select("id")
        aside = found if aside is None else aside.union(found)
    return aside


def _by_id(side: DataFrame, aside: DataFrame | None, columns: Sequence[str]) -> DataFrame:
    """For each id how often it is there, and the sum of the hashes of its rows."""
    from pyspark.sql import functions

    hashed = functions.xxhash64(*(side[name] for name in columns)).cast("decimal(38,0)")
    rows = side.select(side["id"].cast("string").alias("id"), hashed.alias("hash"))
    rows = rows.where(rows["id"].isNotNull())
    if aside is not None:
        rows = rows.join(aside, "id", "left_anti")
    return rows.groupBy("id").agg(
        functions.count("*").alias("rows"), functions.sum("hash").alias("hash")
    )


def _joined(ours: DataFrame, theirs: DataFrame) -> DataFrame:
    """For each id the rows and the hash of both sides, and the kind of difference; null where they are equal."""
    from pyspark.sql import functions

    left = ours.select("id", ours["rows"].alias("rows"), ours["hash"].alias("ours"))
    right = theirs.select("id", theirs["rows"].alias("there"), theirs["hash"].alias("theirs"))
    joined = left.join(right, "id", "full_outer")
    kind = (
        functions.when(joined["there"].isNull() | (joined["there"] < joined["rows"]), MISSING)
        .when(joined["rows"].isNull(), ONLY_THERE)
        .when(joined["there"] > joined["rows"], TWICE)
        .when(joined["ours"] != joined["theirs"], CHANGED)
    )
    return joined.withColumn("kind", kind)


def _summed(joined: DataFrame) -> tuple[dict[str, int], int, tuple[str, str]]:
    """The number of ids of each kind of difference, the events of the outbox, and the hashes of both sides.

    What is only in the table is not part of its hash: it may be of another range.
    """
    from pyspark.sql import functions

    counts: dict[str, int] = {}
    events, ours, theirs = 0, 0, 0
    sums = joined.groupBy("kind").agg(
        functions.count("*"), functions.sum("rows"), functions.sum("ours"), functions.sum("theirs")
    )
    for kind, ids, rows, our_sum, their_sum in sums.collect():
        if kind is not None:
            counts[kind] = int(ids)
        if kind != ONLY_THERE:
            events += int(rows or 0)
            ours += int(our_sum or 0)
            theirs += int(their_sum or 0)
    return counts, events, (_hex(ours), _hex(theirs))


def _hex(total: int) -> str:
    return f"{total & (1 << 64) - 1:016x}"


def _some(frame: DataFrame, most: int) -> list[str]:
    """The first ids of a frame, sorted."""
    return [row[0] for row in frame.select("id").orderBy("id").limit(most).collect()]


def _looked_up(joined: DataFrame, lookup: _Lookup) -> DataFrame:
    """What is only in the table: each id with whether the outbox has no such row; without those of other ranges."""
    only = joined.where(joined["kind"] == ONLY_THERE).select("id")
    return only.mapInArrow(lookup, "id string, removed boolean")


# On the executors.


@dataclass(frozen=True)
class _Lookup:
    """Looks ids up in the outbox. `dsn` may hold a password."""

    dsn: Dsn
    table: MappedTable
    between: Difference

    def __repr__(self) -> str:
        return f"_Lookup({'.'.join(self.table.name)})"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        schema = pa.schema([("id", pa.string()), ("removed", pa.bool_())])
        with connect(self.dsn, application_name="relay spark") as conn:
            statement = self._statement(conn)
            for batch in batches:
                ids = batch.column(0).to_pylist()
                found = dict(conn.execute(statement, (literals.of_texts(ids),)).fetchall())
                rows = [
                    {"id": each, "removed": each not in found}
                    for each in ids
                    if found.get(each, True)
                ]
                yield pa.RecordBatch.from_pylist(rows, schema=schema)

    def _statement(self, conn: Connection) -> sql.Composed:
        """The ids that the outbox has, each with whether a row of it is in the range."""
        column = self.table.mapping["id"]
        row = conn.execute(
            "select format_type(atttypid, atttypmod) from pg_attribute where attrelid = %s::regclass and attname = %s",
            (self.table.identifier.as_string(conn), column),
        ).fetchone()
        assert row is not None  # noqa: S101
        kind: Any = row[0]
        return sql.SQL(
            "select {id}::text, bool_or({between}) from {table} where {id} = any(%s::text[]::{kind}[]) group by 1"
        ).format(
            id=sql.Identifier(column),
            between=condition(self.between),
            table=self.table.identifier,
            # The server's own name of the column's type.
            kind=sql.SQL(kind),
        )
