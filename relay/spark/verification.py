"""Compares what a Spark sink has written with the outbox, for a range of the past, on Spark.

Both sides become one row for each event id: how often it is there, and the sum of the hashes of its rows. A sum does
not depend on the order of rows. A full outer join finds what differs, so the work is the same however much that is.

With `mode: upsert` they become one row for each key. The table's row has the snapshots of its batch, so it is known of
each event of the key whether it is newer, exactly as when a batch is merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from psycopg import sql

from relay.config.handlers import SparkHandler
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.model.events import FIELDS
from relay.model.snapshots import Snapshot
from relay.source.outbox.differences import Difference, condition
from relay.spark import destinations, frames
from relay.spark.frames import Transform
from relay.spark.reading import MappedTable
from relay.spark.writers import BATCH_COLUMN, upserts
from relay.spark.writers.arrow import arrow_schema
from relay.store import literals
from relay.store.connections import Connection, Dsn, connect
from relay.store.positions.spark_batches import Contents, OpenBatch

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

_SLOTS = 8
"""The tasks of an exchange where the session does not report its Spark slots."""
_HASH = "decimal(38,0)"
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

    `events` is how many of the outbox were compared, by `columns`, or how many keys where `is_by_key`. `counts` has
    for each kind of difference how many ids there are, and `ids` some of them. `removed` counts events of the table
    that are no longer in the outbox, where retention may have removed them: nothing tells whether they were there.
    `left_out` counts exceptions.
    """

    events: int
    columns: Sequence[str]
    hashes: tuple[str, str]
    counts: Mapping[str, int]
    removed: int
    left_out: int
    ids: Mapping[str, Sequence[str]] = field(default_factory=dict)
    is_by_key: bool = False

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
    is_by_key = handler.mode == "upsert"
    wanted = frames.arrow_schema(FIELDS)
    if is_by_key:
        expected_keys = upserts.marked(f"handlers.{sink}", expected, handler.key, handler.deletes)
        wanted = _upserted(arrow_schema(expected_keys))
    there = destinations.stored(session, sink, handler, wanted, slots or 1)
    if not is_by_key:
        _require_id(there, f"handlers.{sink}: the destination")
    # A query or a function may compute the other columns, from other tables too.
    columns = (
        ["id"] if expected is not events else [each for each in FIELDS if each in there.columns]
    )
    has_offsets = "c_offset" in there.columns
    aside = _set_aside(session, events, exceptions)
    if first is None or last is None:
        there, first, last = there.limit(0), 0, 0
    if is_by_key:
        keyed = _Keyed(handler, columns, between.after)
        joined = keyed.joined(expected_keys, there, aside, first, last).persist()
    else:
        if has_offsets:
            there = there.where(there["c_offset"].between(first, last))
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
    return Comparison(events_there, columns, hashes, counts, removed, left_out, ids, is_by_key)


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

    hashed = functions.xxhash64(*(side[name] for name in columns)).cast(_HASH)
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


@dataclass(frozen=True)
class _Keyed:
    """Compares the rows of a table with `mode: upsert` with the newest events of their keys, up to a snapshot."""

    handler: SparkHandler
    columns: Sequence[str]
    after: Snapshot

    def joined(
        self, events: DataFrame, there: DataFrame, aside: DataFrame | None, first: int, last: int
    ) -> DataFrame:
        """As `_joined`, for each key with the id of its newest event, and of rows whose event is not in the range.

        Of a key with an event that is not compared nothing is.
        """
        from pyspark.sql import functions

        ours = self._side(events, functions.col(upserts.DELETED), "xid")
        theirs = self._side(there, functions.col(upserts.DELETED), upserts.SNAPSHOTS)
        if aside is not None:
            keys = ours.join(aside, "id", "left_semi").select("key").distinct()
            ours, theirs = (each.join(keys, "key", "left_anti") for each in (ours, theirs))
        rows = theirs.groupBy("key").agg(
            functions.count("*").alias("there"),
            functions.max("c_offset").alias("row_offset"),
            functions.max_by(upserts.SNAPSHOTS, "c_offset").alias(upserts.SNAPSHOTS),
            functions.max_by("hash", "c_offset").alias("theirs"),
        )
        pairs = ours.join(rows, "key", "left").mapInArrow(
            _Newer(self.after),
            "key string, id string, c_offset bigint, ours bigint, there bigint, row_offset bigint, "
            "theirs bigint, newer boolean",
        )
        return self._of_keys(pairs).union(self._of_rows(theirs, ours, first, last))

    def _side(self, frame: DataFrame, deleted: Column, more: str) -> DataFrame:
        """The key of each row as a text, its id, c_offset and hash; that of a deleted key is 0."""
        from pyspark.sql import functions

        known = frame
        if self.handler.format.lower() == "delta":
            # An empty text in a partition column is null.
            for name in set(self.handler.partition_by) & set(frame.columns):
                if dict(frame.dtypes)[name] == "string":
                    known = known.withColumn(name, functions.expr(f"nullif(`{name}`, '')"))
        hashed = functions.xxhash64(
            *(known[name] for name in self.columns if name in known.columns)
        )
        identity = known["id"] if "id" in known.columns else functions.lit(None)
        return known.select(
            self._key(known).alias("key"),
            identity.cast("string").alias("id"),
            known["c_offset"].cast("bigint").alias("c_offset"),
            functions.when(deleted, functions.lit(0).cast("bigint"))
            .otherwise(hashed)
            .alias("hash"),
            known[more],
        )

    def _key(self, frame: DataFrame) -> Column:
        """The values of the key with their lengths, so that no two keys have the same text; -0.0 is 0.0."""
        from pyspark.sql import functions

        parts = []
        kinds = dict(frame.dtypes)
        for name in self.handler.key:
            value = frame[name] + 0 if kinds[name] in ("float", "double") else frame[name]
            text = value.cast("string")
            part = functions.concat(functions.length(text), functions.lit(":"), text)
            parts.append(functions.coalesce(part, functions.lit("-")))
        return functions.concat(*parts)

    def _of_keys(self, pairs: DataFrame) -> DataFrame:
        from pyspark.sql import functions

        own = functions.when(pairs["c_offset"] == pairs["row_offset"], pairs["ours"])
        keys = pairs.groupBy("key").agg(
            functions.max_by("id", "c_offset").alias("id"),
            functions.max_by("ours", "c_offset").alias("newest"),
            functions.max(own).alias("own"),
            functions.max("there").alias("there"),
            functions.max("theirs").alias("theirs"),
            functions.bool_or("newer").alias("lags"),
        )
        kind = (
            functions.when(keys["there"].isNull() | keys["lags"], MISSING)
            .when(keys["there"] > 1, TWICE)
            .when(keys["own"] != keys["theirs"], CHANGED)
        )
        # A row without an event in the range is newer than all of it.
        is_there = kind.isNull()
        ours = functions.when(is_there, keys["own"]).otherwise(keys["newest"])
        theirs = functions.when(is_there, keys["own"]).otherwise(keys["theirs"])
        return keys.select(
            keys["id"],
            functions.lit(1).cast("bigint").alias("rows"),
            ours.cast(_HASH).alias("ours"),
            keys["there"],
            theirs.cast(_HASH).alias("theirs"),
            kind.alias("kind"),
        )

    def _of_rows(self, theirs: DataFrame, ours: DataFrame, first: int, last: int) -> DataFrame:
        """The rows of the range whose event the outbox does not have in it."""
        from pyspark.sql import functions

        events = ours.select("key", "c_offset")
        alone = theirs.join(events, ["key", "c_offset"], "left_anti")
        alone = alone.where(alone["id"].isNotNull() & alone["c_offset"].between(first, last))
        return alone.select(
            alone["id"],
            functions.lit(None).cast("bigint").alias("rows"),
            functions.lit(None).cast(_HASH).alias("ours"),
            functions.lit(1).cast("bigint").alias("there"),
            alone["hash"].cast(_HASH).alias("theirs"),
            functions.lit(ONLY_THERE).alias("kind"),
        )


def _upserted(events: pa.Schema) -> pa.Schema:
    """The columns of a table that a sink with `mode: upsert` writes."""
    import pyarrow as pa

    return events.append(pa.field(upserts.SNAPSHOTS, pa.string()))


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
class _Newer:
    """Tells of events, each with its key's row, whether they are newer. All their commits are before `after`."""

    after: Snapshot

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for batch in batches:
            pairs = pa.Table.from_batches([batch])
            xids = upserts.full_ids(pairs["xid"], self.after)
            rows = pa.table(
                {"c_offset": pairs["row_offset"], upserts.SNAPSHOTS: pairs[upserts.SNAPSHOTS]}
            )
            newer = upserts.are_newer(xids, pairs["c_offset"].to_numpy(), rows)
            kept = pairs.select(["key", "id", "c_offset", "hash", "there", "row_offset", "theirs"])
            kept = kept.rename_columns(
                ["key", "id", "c_offset", "ours", "there", "row_offset", "theirs"]
            )
            yield from kept.append_column("newer", pa.array(newer)).to_batches()


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
