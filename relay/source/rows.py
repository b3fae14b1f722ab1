"""Reads the outbox as a table: which transactions lie between two snapshots, and their rows."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import Any, LiteralString, NamedTuple

import numpy as np
import psycopg
from psycopg import sql
from psycopg.abc import Buffer
from psycopg.adapt import Loader

from relay.config.fields import JSON_FIELDS
from relay.config.settings import Settings
from relay.faults import ConfigurationError, RelayError, TransientFault, first_line, is_transient
from relay.model.batch import Share
from relay.model.events import INSERTED_BY
from relay.model.snapshots import BEGINNING, Snapshot, Xids
from relay.model.transactions import Int64Array, Rows, Transactions
from relay.source.applied import AppliedPosition
from relay.source.differences import Difference, array, condition
from relay.source.grouping import Grouping, Layout, polled
from relay.source.pgoutput import encode_tuple
from relay.source.server import current_position
from relay.source.translation import Encoding, Translation
from relay.store.connections import pin_text_form
from relay.store.sinks import Position
from relay.store.snapshots import xids_of

Connection = psycopg.Connection[Any]
_FETCHED_AT_ONCE = 1_000
_FETCHED_BYTES = 1 << 20
"""How many rows, and bytes of them, are grouped together."""

_MOST_COMPRESSED = 4096
"""How many times smaller than its text a value may be stored: compressed, and with numbers such as 1e9999."""

UNMARKED = "2"
"""Stands for the c_xid of a row from before there was one: FrozenTransactionId, which every snapshot sees."""

# Python knows no others.
_OLDEST = sql.SQL(
    "case when min(happened) is not null then least(greatest(min(happened), '0001-01-02'), '9999-12-30') end"
)


@dataclass(frozen=True, slots=True)
class Portion:
    """Transactions of a difference that are applied together: up to a position, and how many events come later."""

    upto: int
    left: int
    shares: tuple[Share, ...]


class Wanted(NamedTuple):
    """Transactions to be read, in order: `partitions` has -1 where the rows of all partitions are wanted."""

    xids: Xids
    positions: Int64Array
    partitions: Int64Array


class _Raw(Loader):
    """Values as the server's bytes, as the WAL brings them."""

    def load(self, data: Buffer) -> bytes:
        return bytes(data)


def prepare_reading(conn: Connection) -> None:
    """Prepare a new connection that reads rows of the outbox. Raises psycopg.Error."""
    pin_text_form(conn)
    # Rows that were inserted together lie together, which the planner does not know: it counts a page for each.
    conn.execute("set random_page_cost = 0.3")


@contextmanager
def _as_stored(conn: Connection, encoding: Encoding | None) -> Iterator[None]:
    """Let the server send values as it stores them, unless it is the one to convert them."""
    if encoding is None:
        yield
        return
    conn.execute(sql.SQL("set client_encoding to {}").format(encoding.name))
    try:
        yield
    finally:
        if not conn.closed:
            conn.execute("set client_encoding to utf8")


class OutboxRows:
    """The outbox of a configuration as a table. Connections are in autocommit mode; raises psycopg.Error.

    A transaction's position in a difference is the greatest c_offset of its rows: whoever publishes after another's
    commit has a greater one.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._mapping = settings.source.mapping
        self._table = sql.Identifier(*settings.source.table_name)
        self._offset = sql.Identifier(self._mapping["c_offset"])
        self._partition = sql.SQL(
            "mod(abs(hashtext(coalesce({}::text, ''))::bigint), {})::int"
        ).format(sql.Identifier(self._mapping["host_id"]), sql.Literal(settings.partitions))
        self._known: frozenset[str] | None = None

    def columns(self, conn: Connection) -> list[tuple[str, int]]:
        """The outbox's columns that hold fields, in the order of the table, each with the oid of its type."""
        wanted = set(self._mapping.values())
        cursor = conn.execute(sql.SQL("select * from {} limit 0").format(self._table))
        return [
            (column.name, column.type_code)
            for column in cursor.description or ()
            if column.name in wanted
        ]

    def next_offset(self, conn: Connection) -> int:
        """One more than the greatest c_offset there is; 1 without rows."""
        row = conn.execute(
            sql.SQL("select max({}) + 1 from {}").format(self._offset, self._table)
        ).fetchone()
        return int(row[0]) if row and row[0] is not None else 1

    def split_at(self, conn: Connection, offset: int) -> list[int]:
        """The transactions with rows both up to a c_offset and after it, by the ids that the WAL has."""
        xid = sql.Identifier(INSERTED_BY)
        rows = conn.execute(
            sql.SQL(
                "select mod({xid}::text::numeric, 4294967296)::bigint from {table} where {xid} is not null"
                " group by {xid} having min({offset}) <= %(at)s and max({offset}) > %(at)s"
            ).format(xid=xid, table=self._table, offset=self._offset),
            {"at": offset},
        )
        return [found for (found,) in rows]

    def first_since(self, conn: Connection, moment: datetime) -> int | None:
        """The least c_offset of a row whose event_ts is not before `moment`."""
        row = conn.execute(
            sql.SQL("select min({}) from {} where {} >= %s").format(
                self._offset, self._table, self._or_null(conn, "event_ts", "null::timestamptz")
            ),
            (moment,),
        ).fetchone()
        return int(row[0]) if row and row[0] is not None else None

    def require_marked(self, conn: Connection) -> None:
        """Raise ConfigurationError unless the table has the columns that polling needs."""
        missing = [
            name
            for name in (INSERTED_BY, self._mapping["c_offset"])
            if name not in self._names(conn)
        ]
        if missing:
            raise ConfigurationError(
                f"source.table: {self._settings.source.table} has no column {missing[0]}, which polling needs: "
                "run `relay init`, which adds it, or set source.mode: wal"
            )
        marks = conn.execute(
            "select from pg_attribute where attrelid = to_regclass(%s) and attname = %s and atthasdef",
            (self._table.as_string(conn), INSERTED_BY),
        )
        if not marks.rowcount:
            raise ConfigurationError(
                f"source.table: the column {INSERTED_BY} of {self._settings.source.table} has no default, so new rows "
                "would not tell which transaction inserted them: run `relay init`, which sets it"
            )
        if self._settings.source.offsets == "sequence":
            self._require_order(conn)

    def _require_order(self, conn: Connection) -> None:
        """Raise ConfigurationError if c_offset does not tell the order of insertion."""
        found = conn.execute(
            """
            select s.seqrelid::regclass::text
              from pg_sequence as s
              join pg_depend as d on s.seqrelid in (d.objid, d.refobjid)
              left join pg_attrdef as a on d.classid = 'pg_attrdef'::regclass and d.objid = a.oid
              join pg_attribute as c
                on (c.attrelid, c.attnum) in ((d.refobjid, d.refobjsubid), (a.adrelid, a.adnum))
             where c.attrelid = to_regclass(%s) and c.attname = %s
               and (d.deptype = 'i' or a.oid is not null) and (s.seqcache > 1 or s.seqincrement < 0)
            """,
            (self._table.as_string(conn), self._mapping["c_offset"]),
        ).fetchone()
        if found:
            raise ConfigurationError(
                f"source.table: the sequence {found[0]} does not number the rows of "
                f"{self._settings.source.table} in the order in which they are inserted, which polling needs: "
                f"run `alter sequence {found[0]} increment 1 cache 1`, or set source.mode: wal"
            )

    def require_offsets(self, conn: Connection, then: str) -> None:
        """Raise ConfigurationError if there are rows without a c_offset, which polling would pass over.

        `then` says what to do when they have one.
        """
        column = self._mapping["c_offset"]
        found = conn.execute(
            sql.SQL("select from {} where {} is null limit 1").format(self._table, self._offset)
        )
        if found.rowcount:
            raise ConfigurationError(
                f"source.table: {self._settings.source.table} has rows without {column}, which polling would pass "
                f"over: number them in the order in which they are to be relayed, and {then}"
            )
        if INSERTED_BY not in self._names(conn):
            return
        twice = conn.execute(
            sql.SQL(
                "select from {} where {} is null group by {} having count(*) > 1 limit 1"
            ).format(self._table, sql.Identifier(INSERTED_BY), self._offset)
        )
        if twice.rowcount:
            raise ConfigurationError(
                f"source.table: {self._settings.source.table} has rows from before relay came that share a {column}: "
                "number each of them, in the order in which they are to be relayed"
            )

    def require_own_xids(self, conn: Connection) -> None:
        """Raise ConfigurationError if a row has a c_xid that the server has not given yet."""
        row = conn.execute(
            # In this form the index on c_xid answers.
            sql.SQL(
                "select {xid} >= pg_snapshot_xmax(pg_current_snapshot())::text::xid8 from {table}"
                " where {xid} is not null order by {xid} desc limit 1"
            ).format(xid=sql.Identifier(INSERTED_BY), table=self._table)
        ).fetchone()
        if row and row[0]:
            raise ConfigurationError(
                f"source.table: {self._settings.source.table} has rows whose c_xid this server has not given yet: they "
                "come from another cluster, by logical replication or a dump: set their c_xid to null, which stands "
                "for events from before relay, and `relay offsets seek` to where relay is to go on"
            )

    def are_restored(self, conn: Connection) -> bool:
        """Whether rows were inserted before the transaction that they name: by a restore, or a subscription.

        Updates and savepoints give a row a later xmin than its c_xid, never an earlier one. Reads the whole table.
        """
        xid = sql.Identifier(INSERTED_BY)
        # xmin is at most half a cycle of 2^32 transactions away, and 2 or less in rows that an old server has frozen.
        lag = sql.SQL("(mod({}::text::numeric, 4294967296)::bigint - xmin::text::bigint)").format(
            xid
        )
        found = conn.execute(
            sql.SQL(
                "select from {} where {} is not null and xmin::text::bigint > 2"
                " and mod({} + 4294967296, 4294967296) between 1 and 2147483647 limit 1"
            ).format(self._table, xid, lag)
        )
        return found.rowcount > 0

    def is_empty(self, conn: Connection, between: Difference) -> bool:
        """Whether no row lies between two snapshots."""
        found = conn.execute(
            sql.SQL("select from {} where {} limit 1").format(self._table, condition(between)),
            prepare=False,
        )
        return not found.rowcount

    def xids(self, conn: Connection, between: Difference) -> dict[int, Xids]:
        """The transactions between two snapshots, by partition, without those from before there was c_xid."""
        rows = conn.execute(
            sql.SQL(
                """
                select partition, string_agg(xid8send({xid}), '')
                  from (select distinct {partition} as partition, {xid} from {table} where {between}) as x
                 where {xid} is not null group by partition
                """
            ).format(
                xid=sql.Identifier(INSERTED_BY),
                partition=self._partition,
                table=self._table,
                between=condition(between),
            ),
            prepare=False,
        )
        return {partition: xids_of(sent) for partition, sent in rows}

    def plan(
        self, conn: Connection, between: Difference, after: int, whole: bool = True
    ) -> Generator[Portion]:
        """A difference in portions, in order of the transactions' positions, after one of these.

        Where there is much to do they are large, since they are split by partitions; not `whole`, they are small.
        Its transactions are found once and stay with the server. The connection is in use until the generator is
        closed. Raises TransientFault where the server does not have yet what is to be planned.
        """
        require_visible(conn, between.after)
        with conn.cursor("relay_difference", withhold=True, binary=True) as cursor:
            cursor.itersize = 64
            cursor.execute(self._planning(conn, between, whole), {"after": after})
            for (upto, left), rows in groupby(cursor, itemgetter(0, 1)):
                yield Portion(upto, left, tuple(_share(*row) for _, _, *row in rows))

    def _planning(self, conn: Connection, between: Difference, whole: bool) -> sql.Composed:
        settings = self._settings
        most = settings.batch.max_events
        marked = sql.SQL(
            """
            select xid8send({xid}) as key, false as unmarked, bit_or(set_bit({none}, {partition}, 1)) as partitions,
                   coalesce(max({offset}), 0)::bigint as position, count(*) as events
              from {table} where {xid} is not null and {between} group by {xid}
            """
        )
        unmarked = sql.SQL(
            """
            union all
            select int8send(number), true, bit_or(partitions), max(position), count(*)
              from (select {offset}::bigint as number, (max({offset}) over business)::bigint as position,
                           bit_or(set_bit({none}, {partition}, 1)) over business as partitions
                      from {table} where {xid} is null and {offset} is not null
                    window business as (partition by coalesce({transaction}::text, tableoid::text || ctid::text))
                   ) as old group by number
            """
        )
        units = [marked, unmarked] if between.before.is_beginning else [marked]
        names = {
            "xid": sql.Identifier(INSERTED_BY),
            "none": sql.SQL("repeat('0', {0})::bit({0})").format(settings.partitions),
            "partition": self._partition,
            "offset": self._offset,
            "table": self._table,
            "between": condition(between),
            "transaction": self._transaction(conn),
        }
        return sql.SQL(
            """
            with units as ({units}
            ), counted as (
                select *, (sum(events) over ())::bigint as total,
                       (sum(events) over (order by position))::bigint as reached
                  from units where position > %(after)s
            ), numbered as (
                -- Much to do: about as many rows for each partition as a batch may have.
                select *, (reached - 1) / (case when total > {most} then {large} else {small} end) as portion
                  from counted
            ), cut as (
                select *, max(position) over (partition by portion) as upto,
                       max(reached) over (partition by portion) as gone
                  from numbered
            )
            select upto, total - gone, partitions::text, unmarked, sum(events)::bigint,
                   string_agg(key, '' order by position, key), string_agg(int8send(position), '' order by position, key)
              from cut group by upto, total, gone, partitions, unmarked order by upto
            """
        ).format(
            units=sql.SQL("").join(unit.format(**names) for unit in units),
            most=max(settings.poll.batch_size, most),
            large=max(settings.poll.batch_size, most * settings.partitions)
            if whole
            else settings.poll.batch_size,
            small=settings.poll.batch_size,
        )

    def unread(
        self, conn: Connection, applied: Sequence[AppliedPosition], noted: Xids
    ) -> dict[int, tuple[int, datetime | None]]:
        """How many rows of each partition that has any are not applied, and the least event_ts of them."""
        rows = conn.execute(
            sql.SQL(
                """
                select partition, count(*),
                       {oldest}
                  from ({states}) as r where not applied group by partition
                """
            ).format(oldest=_OLDEST, states=self._states(conn, applied, noted, _oldest(applied))),
            prepare=False,
        )
        return {partition: (count, oldest) for partition, count, oldest in rows}

    def unread_after(
        self, conn: Connection, position: Position, done: Xids
    ) -> tuple[int, datetime | None]:
        """How many rows a sink has still to look at, and the least event_ts of them.

        From its position on, but those of transactions that are done.
        """
        assert position.snapshot is not None  # noqa: S101
        now = current_position(conn).snapshot
        xid = sql.Identifier(INSERTED_BY)
        if not now.covers(position.snapshot):
            return 0, None
        (found,) = conn.execute(
            sql.SQL(
                """
                select count(*), {oldest} from (
                    select {happened} as happened, coalesce({xid}, {unmarked}::xid8) as xid,
                           case when {xid} is null then {offset}
                                else max({offset}) over (partition by {xid}) end as position
                      from {table} where {between}) as row
                 where xid <> all({done}) and not (position <= {polled} and {following})
                """
            ).format(
                oldest=_OLDEST,
                happened=self._or_null(conn, "event_ts", "null::timestamptz"),
                xid=xid,
                unmarked=UNMARKED,
                offset=self._offset,
                table=self._table,
                between=condition(Difference(position.snapshot, now)),
                done=array(done.tolist(), "xid8"),
                polled=position.polled_offset,
                following=sql.SQL("false")
                if position.following is None
                else sql.SQL("pg_visible_in_snapshot(xid, {}::pg_snapshot)").format(
                    str(position.following)
                ),
            ),
            prepare=False,
        )
        count, oldest = found
        return int(count), oldest

    def moved(
        self,
        conn: Connection,
        before: Sequence[AppliedPosition],
        noted: Xids,
        after: Sequence[AppliedPosition],
    ) -> tuple[int, int]:
        """How many rows that are applied would not be after a move, and how many would be that are not."""
        nothing = np.zeros(0, np.int64)
        oldest = _oldest([*before, *after])
        (found,) = conn.execute(
            sql.SQL(
                """
                select count(*) filter (where b.applied and not a.applied),
                       count(*) filter (where a.applied and not b.applied)
                  from ({before}) as b join ({after}) as a using (id)
                """
            ).format(
                before=self._states(conn, before, noted, oldest),
                after=self._states(conn, after, nothing, oldest),
            ),
            prepare=False,
        )
        return found[0], found[1]

    def _states(
        self, conn: Connection, applied: Sequence[AppliedPosition], noted: Xids, oldest: int
    ) -> sql.Composed:
        """Rows of transactions from `oldest` on, each with its partition and whether it is applied."""
        return sql.SQL(
            """
            select row.id, row.partition, row.happened,
                   pg_visible_in_snapshot(row.xid, a.snapshot) or row.xid = any({noted})
                   or row.position <= a.polled and pg_visible_in_snapshot(row.xid, a.after) as applied
              from (select tableoid::text || ctid::text as id, {partition} as partition, {happened} as happened,
                           coalesce({xid}, {unmarked}::xid8) as xid,
                           case when {xid} is null then {offset}
                                else max({offset}) over (partition by {xid}) end as position
                      from {table} where {xid} >= {oldest}::xid8 or {xid} is null and {old}) as row
              join unnest({partitions}::int[], {snapshots}::pg_snapshot[], {afters}::pg_snapshot[], {polled}::bigint[])
                   as a (partition, snapshot, after, polled) using (partition)
            """
        ).format(
            noted=array(noted.tolist(), "xid8"),
            partition=self._partition,
            happened=self._or_null(conn, "event_ts", "null::timestamptz"),
            xid=sql.Identifier(INSERTED_BY),
            unmarked=UNMARKED,
            offset=self._offset,
            table=self._table,
            oldest=str(oldest),
            old=sql.Literal(oldest <= BEGINNING.xmax),
            partitions=array(each.partition for each in applied),
            snapshots=sql.Literal([str(each.snapshot) for each in applied]),
            afters=sql.Literal([str(each.after) for each in applied]),
            polled=array(each.polled_offset for each in applied),
        )

    def large(self, conn: Connection, shares: Collection[Share]) -> list[int]:
        """The c_offsets of rows whose payload and metadata exceed `source.max_event_bytes` as text."""
        wanted = {self._mapping[name] for name in JSON_FIELDS}
        columns = [sql.Identifier(name) for name, _ in self.columns(conn) if name in wanted]
        length = sql.SQL(" + ").join(
            sql.SQL("coalesce(octet_length({}::text), 0)").format(column) for column in columns
        )
        stored = sql.SQL(" + ").join(
            sql.SQL("coalesce(pg_column_size({}), 0)").format(column) for column in columns
        )
        limit = self._settings.source.max_event_bytes
        found: list[int] = []
        for share in shares:
            key = self._offset if share.unmarked else sql.Identifier(INSERTED_BY)
            rows = conn.execute(
                # What is small as it is stored need not be decompressed to be measured.
                sql.SQL(
                    "select {offset} from {table} where {key} = any({keys}) and {offset} is not null"
                    " and case when {stored} > {least} then {length} > {limit} else false end"
                ).format(
                    offset=self._offset,
                    table=self._table,
                    key=key,
                    keys=_keys(share.xids, share.unmarked),
                    stored=stored,
                    least=limit // _MOST_COMPRESSED,
                    length=length,
                    limit=limit,
                ),
                prepare=False,
            )
            found += [int(offset) for (offset,) in rows]
        return sorted(found)

    def commits(
        self,
        conn: Connection,
        wanted: Wanted,
        unmarked: bool = False,
        by_reference: Collection[int] = (),
    ) -> Generator[Transactions]:
        """The rows of transactions, in their order, grouped as the WAL's commits are.

        `unmarked`: they are rows from before there was c_xid, which belong together while their transaction_id goes on,
        and their c_offsets stand for xids. Payload and metadata are null in the rows with an offset in `by_reference`.
        Rows are streamed; a commit above `batch.max_bytes` goes through a spool file. Raises TransientFault if the
        server does not have all of it yet, RelayError if the table cannot be read.
        """
        if not unmarked and len(wanted.xids):
            require_visible(conn, wanted.xids)
        limits = self._settings.batch
        described = self.columns(conn)
        columns = [name for name, _ in described]
        encoding = Encoding.of(conn.info.parameter_status("server_encoding"))
        translation = Translation.needed(described, self._mapping, encoding)
        layout = Layout.of(
            translation.columns if translation else columns,
            self._mapping,
            self._settings.source.table,
        )
        grouping = Grouping(self._mapping, limits.max_bytes, limits.spool_directory)
        last: tuple[int, bytes | None] | None = None
        name = self._mapping["transaction_id"]
        index = columns.index(name) if name in columns else None
        rows: list[bytes] = []
        size = 0
        ends: list[tuple[int, int]] = []
        statement = self._reading(columns, wanted, unmarked, by_reference)
        for inserted_by, *cells in self._read(conn, statement, len(columns), encoding):
            this = int(inserted_by or 0), None if index is None else cells[index]
            if last is not None and not _goes_on(last, this):
                ends.append((len(rows), last[0]))
            last = this
            if len(rows) >= _FETCHED_AT_ONCE or size >= _FETCHED_BYTES:
                grouping.take(layout, Rows.of(rows), polled(ends), last[0])
                yield from grouping.fetch()
                rows, size, ends = [], 0, []
            row = encode_tuple(cells)
            rows.append(row if translation is None else translation.row(row))
            size += len(rows[-1])
        if last is not None:
            ends.append((len(rows), last[0]))
        grouping.take(layout, Rows.of(rows), polled(ends))
        yield from grouping.fetch()

    def _reading(
        self,
        columns: Sequence[str],
        wanted: Wanted,
        unmarked: bool,
        by_reference: Collection[int],
    ) -> sql.Composed:
        xid = sql.Identifier(INSERTED_BY)
        columns_of = [_keys(wanted.xids, unmarked), array(wanted.positions.tolist())]
        names = [sql.Identifier("relay_key"), sql.Identifier("relay_position")]
        matches = sql.SQL("{} = relay_key").format(self._offset if unmarked else xid)
        if unmarked:
            matches += sql.SQL(" and {} is null").format(xid)
        if (wanted.partitions >= 0).any():
            columns_of.append(array(wanted.partitions.tolist(), "int"))
            names.append(sql.Identifier("relay_partition"))
            matches += sql.SQL(" and relay_partition in (-1, {})").format(self._partition)
        return sql.SQL(
            "copy (select {xid}, {columns} from unnest({arrays}) as wanted ({names}) join {table} on {matches}"
            " order by relay_position, relay_key, {offset}) to stdout"
        ).format(
            xid=xid,
            columns=sql.SQL(", ").join(self._selected(columns, by_reference)),
            arrays=sql.SQL(", ").join(columns_of),
            names=sql.SQL(", ").join(names),
            table=self._table,
            matches=matches,
            offset=self._offset,
        )

    def _read(
        self, conn: Connection, statement: sql.Composed, columns: int, encoding: Encoding | None
    ) -> Iterator[Sequence[bytes | None]]:
        text = statement.as_string(conn)
        with conn.cursor() as cursor:
            cursor.adapters.register_loader("text", _Raw)
            try:
                with (
                    _as_stored(conn, encoding),
                    cursor.copy(text.encode(encoding.codec if encoding else "utf-8")) as copy,
                ):
                    copy.set_types(["text"] * (columns + 1))
                    yield from copy.rows()
            except psycopg.Error as error:
                if is_transient(error):
                    raise
                raise RelayError(
                    f"source.table: {self._settings.source.table} cannot be read: {first_line(error)}: mend it, or "
                    "grant SELECT to the role of source.dsn"
                ) from None

    def _selected(
        self, columns: Sequence[str], by_reference: Collection[int]
    ) -> Iterator[sql.Composable]:
        large = {self._mapping[name] for name in JSON_FIELDS} if by_reference else set()
        offsets = sql.SQL(", ").join(map(sql.Literal, by_reference))
        for name in columns:
            column = sql.Identifier(name)
            yield (
                sql.SQL("case when {} in ({}) then null else {} end").format(
                    self._offset, offsets, column
                )
                if name in large
                else column
            )

    def _transaction(self, conn: Connection) -> sql.Composable:
        return self._or_null(conn, "transaction_id", "null::uuid")

    def _or_null(self, conn: Connection, field: str, null: LiteralString) -> sql.Composable:
        column = self._mapping[field]
        return sql.Identifier(column) if column in self._names(conn) else sql.SQL(null)

    def _names(self, conn: Connection) -> frozenset[str]:
        if self._known is None:
            source = self._settings.source
            try:
                cursor = conn.execute(sql.SQL("select * from {} limit 0").format(self._table))
            except psycopg.errors.UndefinedTable:
                raise ConfigurationError(
                    f"source.table: there is no table {source.table}: run `relay init` for relay's own outbox, or name "
                    "the table that you have"
                ) from None
            except psycopg.errors.InsufficientPrivilege as error:
                raise ConfigurationError(
                    f"source.table: {first_line(error)}: grant SELECT on {source.table} to the role of source.dsn"
                ) from None
            self._known = frozenset(column.name for column in cursor.description or ())
        return self._known


def require_visible(conn: Connection, wanted: Snapshot | Xids) -> None:
    """Raise TransientFault if the connection's server does not show yet what another connection has seen."""
    found = current_position(conn).snapshot
    seen = found.covers(wanted) if isinstance(wanted, Snapshot) else found.sees(wanted).all()
    if not seen:
        raise TransientFault(
            "the server that source.dsn leads to does not have yet what is to be read from it"
        )


def _oldest(applied: Sequence[AppliedPosition]) -> int:
    """The least transaction that may not be applied."""
    return min(each.snapshot.xmin for each in applied)


def _share(partitions: str, unmarked: bool, events: int, keys: bytes, positions: bytes) -> Share:
    members = tuple(number for number, bit in enumerate(partitions) if bit == "1")
    return Share(members, events, xids_of(keys), xids_of(positions), unmarked)


def _keys(keys: Xids, unmarked: bool) -> sql.Composed:
    return array(keys.tolist(), "bigint" if unmarked else "xid8")


def _goes_on(last: tuple[int, bytes | None], this: tuple[int, bytes | None]) -> bool:
    """Whether a row belongs to the commit of the one before; of each the xid or 0, and the transaction_id."""
    if last[0] or this[0]:
        return last[0] == this[0]
    return this[1] is not None and last[1] == this[1]
