"""Reads the outbox as a table, by c_offset: what there is, where a range may end, and the rows themselves.

Reading by c_offset is sound because c_offset order is commit order: the counter's row is locked until the publisher
commits, so when a row is visible, every row with a smaller c_offset is.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, LiteralString

import psycopg
from psycopg import sql
from psycopg.abc import Buffer
from psycopg.adapt import Loader

from relay.config import Settings
from relay.events import INSERTED_BY, Lsn
from relay.faults import ConfigurationError, RelayError, first_line, is_transient
from relay.paths import JSON_FIELDS
from relay.source.grouping import Grouping, Layout, polled
from relay.source.pgoutput import encode_tuple
from relay.source.translation import Encoding, Translation
from relay.store.connections import pin_text_form
from relay.transactions import Rows, Transactions

Connection = psycopg.Connection[Any]
_FETCHED_AT_ONCE = 1_000
_FETCHED_BYTES = 1 << 20
"""How many rows, and bytes of them, are grouped together."""

Floors = Mapping[int, int]
"""The least c_offset of each partition that is still to be applied."""


_MOST_COMPRESSED = 4096
"""How many times smaller than its text a value may be stored: compressed, and with numbers such as 1e9999."""


class _Raw(Loader):
    """Values as the server's bytes, as the WAL brings them."""

    def load(self, data: Buffer) -> bytes:
        return bytes(data)


def partition_expression(host_column: str, partitions: int) -> sql.Composed:
    """The partition of a row, in the very words of the index that `relay init` makes."""
    return sql.SQL("mod(abs(hashtext({}::text)::bigint), {})").format(
        sql.Identifier(host_column), sql.Literal(partitions)
    )


def prefer_index(conn: Connection) -> None:
    """Let a connection read a partition through its index: the planner counts nearly each row as a page of its own.

    But the rows of a partition are as close together as those of the table, since both grow by c_offset: several share
    a page. Measured on a range of 10,000 rows, one partition of eight: 0.5 ms through the index, 3.0 ms by c_offset and
    filter; at 1.1 the planner chose the latter, from 0.5 downwards the former.
    """
    conn.execute("set random_page_cost = 0.3")


def prepare_reading(conn: Connection) -> None:
    """Prepare a new connection that reads rows of the outbox. Raises psycopg.Error."""
    pin_text_form(conn)
    prefer_index(conn)


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


def server_of(conn: Connection) -> tuple[str, int, bool]:
    """The server's system identifier, its timeline, and whether it is a standby.

    A standby that has just followed another timeline may still tell the former one.
    """
    (found,) = conn.execute(
        """
        select s.system_identifier::text,
               case when standby then greatest(c.timeline_id, r.min_recovery_end_timeline)
                    else ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int end,
               standby
          from pg_control_system() as s, pg_control_checkpoint() as c, pg_control_recovery() as r,
               pg_is_in_recovery() as standby
        """
    )
    identifier, timeline, standby = found
    return identifier, timeline, standby


def is_standby(conn: Connection) -> bool:
    """Whether the server is in recovery."""
    row = conn.execute("select pg_is_in_recovery()").fetchone()
    return bool(row and row[0])


def is_visible(conn: Connection, xid: int) -> bool:
    """Whether sessions see what a transaction has committed; `xid` as the WAL tells it, without its epoch."""
    row = conn.execute("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchone()
    following = int(row[0]) if row else 0
    full = following & ~0xFFFFFFFF | xid
    if full >= following:
        # It is not below the next one: of the epoch before, or newer than the snapshot.
        full -= 1 << 32
    if full < 0:
        return False
    found = conn.execute(
        "select pg_visible_in_snapshot(%s::text::xid8, pg_current_snapshot())", (str(full),)
    ).fetchone()
    return bool(found and found[0])


class OutboxRows:
    """The outbox of a configuration as a table. Connections are in autocommit mode; raises psycopg.Error."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._mapping = settings.source.mapping
        self._table = sql.Identifier(*settings.source.table_name)
        self._offset = sql.Identifier(self._mapping["c_offset"])
        self._partition = partition_expression(self._mapping["host_id"], settings.partitions)
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
        """One more than the c_offset of the newest committed row; stays when rows are pruned."""
        row = conn.execute(
            sql.SQL(
                """
                select greatest((select next_offset from relay.log_counter where id = 1),
                                (select max({offset}) + 1 from {table}))
                """
            ).format(offset=self._offset, table=self._table)
        ).fetchone()
        return int(row[0]) if row and row[0] is not None else 1

    def checkpoint(self, conn: Connection) -> tuple[int, Lsn]:
        """`next_offset`, and a position in the WAL behind the commits of all rows below it."""
        following = self.next_offset(conn)
        row = conn.execute(
            "select case when pg_is_in_recovery() then pg_last_wal_replay_lsn()"
            " else pg_current_wal_insert_lsn() end::text"
        ).fetchone()
        return following, Lsn.parse(row[0] if row else "0/0")

    def first_offset(self, conn: Connection) -> int:
        """The c_offset of the oldest row that is still there; that of the next one if there is none."""
        row = conn.execute(
            sql.SQL("select min({}) from {}").format(self._offset, self._table)
        ).fetchone()
        return int(row[0]) if row and row[0] is not None else self.next_offset(conn)

    def first_since(self, conn: Connection, moment: datetime) -> int | None:
        """The least c_offset of a row whose event_ts is not before `moment`."""
        row = conn.execute(
            sql.SQL("select min({}) from {} where {} >= %s").format(
                self._offset, self._table, self._or_null(conn, "event_ts", "null::timestamptz")
            ),
            (moment,),
        ).fetchone()
        return int(row[0]) if row and row[0] is not None else None

    def age(self, conn: Connection, found: Collection[int]) -> float | None:
        """How many seconds ago the oldest row with one of these c_offsets came about, by event_ts; or None."""
        row = conn.execute(
            sql.SQL(
                "select extract(epoch from clock_timestamp() - min({}))::float8 from {} where {} = any(%s)"
            ).format(
                self._or_null(conn, "event_ts", "null::timestamptz"), self._table, self._offset
            ),
            (list(found),),
        ).fetchone()
        return max(0.0, row[0]) if row and row[0] is not None else None

    def count(self, conn: Connection, partition: int, start: int, end: int) -> int:
        """How many rows of a partition lie from one c_offset up to another, exclusive."""
        row = conn.execute(
            sql.SQL("select count(*) from {} where {} = %s and {} >= %s and {} < %s").format(
                self._table, self._partition, self._offset, self._offset
            ),
            (partition, start, end),
        ).fetchone()
        return int(row[0]) if row else 0

    def require_offsets(self, conn: Connection) -> None:
        """Raise ConfigurationError if there are rows without a c_offset, which polling would pass over."""
        column = self._mapping["c_offset"]
        found = conn.execute(
            sql.SQL("select from {} where {} is null limit 1").format(self._table, self._offset)
        )
        if found.rowcount:
            raise ConfigurationError(
                f"source.table: {self._settings.source.table} has rows without {column}, from before relay came: "
                "number them in the order in which they are to be relayed, and run `relay init` again"
            )

    def heads(self, conn: Connection, floors: Floors, tip: int) -> dict[int, int]:
        """The first row of each partition from its floor up to `tip`, where there is one."""
        rows = conn.execute(
            sql.SQL(
                """
                select floor.relay_partition, head.c_offset
                  from unnest(%s::int[], %s::bigint[]) as floor (relay_partition, relay_start)
                 cross join lateral (
                    select {offset} as c_offset from {table}
                     where {partition} = floor.relay_partition and {offset} >= floor.relay_start and {offset} <= %s
                     order by {offset} limit 1) as head
                """
            ).format(offset=self._offset, table=self._table, partition=self._partition),
            (list(floors), list(floors.values()), tip),
            prepare=False,
        )
        return dict(rows.fetchall())

    def spread(
        self, conn: Connection, floors: Floors, low: int, upto: int
    ) -> list[tuple[tuple[int, ...], int]]:
        """How many rows from `low` to `upto` are still to be applied, by the partitions of their transactions."""
        rows = conn.execute(
            sql.SQL(
                """
                select partitions, sum(events)::bigint
                  from (select array_agg(distinct floor.relay_partition order by floor.relay_partition) as partitions,
                               count(*) as events
                          from {table} as o
                          join unnest(%s::int[], %s::bigint[]) as floor (relay_partition, relay_start)
                            on {partition} = floor.relay_partition and {offset} >= floor.relay_start
                         where {offset} between %s and %s
                         group by {transaction}, case when {transaction} is null then floor.relay_partition end
                       ) as found
                 group by partitions
                """
            ).format(
                table=self._table,
                partition=self._partition,
                offset=self._offset,
                transaction=self._transaction(conn),
            ),
            (list(floors), list(floors.values()), low, upto),
            prepare=False,
        )
        return [(tuple(partitions), int(events)) for partitions, events in rows]

    def boundary(self, conn: Connection, low: int, upto: int, tip: int, patience: int) -> int:
        """Where a range that should end at `upto` may end: behind the business transaction that stands there.

        Follows `transaction_count`, then runs of the same transaction_id (of the same commit where there is none; a row
        from before there was `c_xid` stands alone then). The
        rest of the commit comes along if it is not longer than `patience` rows, so that transactions which interleave
        in it stay whole; only in a longer commit they must be contiguous.
        """
        transaction = self._transaction(conn)
        # As bytes, since a text may hold some that cannot be sent as UTF-8.
        stored = sql.SQL("convert_to({}::text, getdatabaseencoding())").format(transaction)
        here = sql.SQL(
            """
            select {offset}, {stored}, {xid}::text, {left} from {table}
             where {offset} between %s and %s order by {offset} desc limit 1
            """
        ).format(
            offset=self._offset,
            stored=stored,
            xid=self._xid(conn),
            left=self._left_in_transaction(conn),
            table=self._table,
        )
        stranger = sql.SQL(
            "select {offset} from {table} where {offset} > %s and {offset} <= %s and {unrelated}"
            " order by {offset} limit 1"
        )
        end = min(upto, tip)
        while True:
            row = conn.execute(here, (low, end), prepare=False).fetchone()
            if row is None:
                return end
            _, transaction_id, xid, left = row
            if transaction_id is None and xid is None:
                return end
            # A hint at most, since rows may be numbered in any way.
            if left and end < (announced := min(row[0] + left, tip)):
                end = announced
                continue
            other_commit = sql.SQL("{} is distinct from {}::xid8").format(
                self._xid(conn), sql.Literal(xid)
            )
            if transaction_id is None:
                other = sql.SQL("({} is not null or {})").format(transaction, other_commit)
            else:
                other = sql.SQL("{} is distinct from {}").format(
                    stored, sql.Literal(transaction_id)
                )
            reached = end
            for unrelated, limit in ((other, tip), (other_commit, min(tip, end + patience))):
                found = conn.execute(
                    stranger.format(offset=self._offset, table=self._table, unrelated=unrelated),
                    (reached, limit),
                    prepare=False,
                ).fetchone()
                if found:
                    reached = found[0] - 1
                elif limit == tip:
                    return tip
            if reached == end:
                return end
            end = reached

    def large(self, conn: Connection, low: int, upto: int) -> list[int]:
        """The c_offsets from `low` to `upto` whose payload and metadata exceed `source.max_event_bytes` as text."""
        wanted = {self._mapping[name] for name in JSON_FIELDS}
        columns = [sql.Identifier(name) for name, _ in self.columns(conn) if name in wanted]
        length = sql.SQL(" + ").join(
            sql.SQL("coalesce(octet_length({}::text), 0)").format(column) for column in columns
        )
        stored = sql.SQL(" + ").join(
            sql.SQL("coalesce(pg_column_size({}), 0)").format(column) for column in columns
        )
        rows = conn.execute(
            # What is small as it is stored need not be decompressed to be measured.
            sql.SQL(
                "select {offset} from {table} where {offset} between %s and %s"
                " and case when {stored} > %s then {length} > %s else false end order by {offset}"
            ).format(offset=self._offset, table=self._table, stored=stored, length=length),
            (
                low,
                upto,
                self._settings.source.max_event_bytes // _MOST_COMPRESSED,
                self._settings.source.max_event_bytes,
            ),
            prepare=False,
        )
        return [int(offset) for (offset,) in rows]

    def commits(
        self, conn: Connection, floors: Floors, upto: int, by_reference: Collection[int] = ()
    ) -> Generator[Transactions]:
        """The rows of partitions from their floors up to `upto`, grouped as the WAL's commits are.

        Payload and metadata are null in the rows with an offset in `by_reference`.

        Rows from before there was `c_xid` belong together while their transaction_id goes on. Rows are streamed;
        a commit above `batch.max_bytes` goes through a spool file. Raises RelayError if the table cannot be read.
        """
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
        place = columns.index(name) if name in columns else None
        rows: list[bytes] = []
        size = 0
        ends: list[tuple[int, int]] = []
        for inserted_by, *cells in self._read(conn, columns, floors, upto, by_reference, encoding):
            this = int(inserted_by or 0), None if place is None else cells[place]
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

    def _read(
        self,
        conn: Connection,
        columns: Sequence[str],
        floors: Floors,
        upto: int,
        by_reference: Collection[int],
        encoding: Encoding | None,
    ) -> Iterator[Sequence[bytes | None]]:
        wanted = sql.SQL(" or ").join(
            sql.SQL("({} = {} and {} between {} and {})").format(
                self._partition, partition, self._offset, floor, upto
            )
            for partition, floor in floors.items()
        )
        statement = sql.SQL(
            "copy (select {xid}, {columns} from {table} where {wanted} order by {offset}) to stdout"
        ).format(
            xid=self._xid(conn),
            columns=sql.SQL(", ").join(self._selected(columns, by_reference)),
            table=self._table,
            wanted=wanted,
            offset=self._offset,
        )
        text = statement.as_string(conn)
        with conn.cursor() as cursor:
            cursor.adapters.register_loader("text", _Raw)
            try:
                with (
                    _as_stored(conn, encoding),
                    cursor.copy(text.encode(encoding.codec if encoding else "utf-8")) as copy,
                ):
                    copy.set_types(["text"] * (len(columns) + 1))
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

    def _xid(self, conn: Connection) -> sql.Composable:
        there = INSERTED_BY in self._names(conn)
        return sql.Identifier(INSERTED_BY) if there else sql.SQL("null::xid8")

    def _left_in_transaction(self, conn: Connection) -> sql.Composable:
        return sql.SQL("{} - {}").format(
            self._or_null(conn, "transaction_count", "null::int"),
            self._or_null(conn, "transaction_ordinal", "null::int"),
        )

    def _or_null(self, conn: Connection, field: str, null: LiteralString) -> sql.Composable:
        column = self._mapping[field]
        return sql.Identifier(column) if column in self._names(conn) else sql.SQL(null)

    def _names(self, conn: Connection) -> frozenset[str]:
        if self._known is None:
            cursor = conn.execute(sql.SQL("select * from {} limit 0").format(self._table))
            self._known = frozenset(column.name for column in cursor.description or ())
        return self._known


def _goes_on(last: tuple[int, bytes | None], this: tuple[int, bytes | None]) -> bool:
    """Whether a row belongs to the commit of the one before; of each the xid or 0, and the transaction_id."""
    if last[0] or this[0]:
        return last[0] == this[0]
    return this[1] is not None and last[1] == this[1]
