"""Finds the transactions of a difference in the outbox's table, plans them in portions, and reads their rows."""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import psycopg
from psycopg import sql
from psycopg.abc import Buffer

from relay.config.fields import JSON_FIELDS
from relay.faults import (
    NotReceived,
    RelayError,
    TooLarge,
    exceeds_limits,
    first_line,
    is_transient,
)
from relay.model.batch import Share
from relay.model.events import INSERTED_BY, Event
from relay.model.snapshots import RowCounts, Xids
from relay.model.transactions import Rows, Transactions, Undecoded
from relay.source.decode.grouping import Grouping
from relay.source.decode.layout import Layout, polled, require_contents
from relay.source.decode.pgoutput import encode_tuple
from relay.source.decode.translation import Encoding, Translation
from relay.source.outbox.differences import Difference, array, condition, has_rows
from relay.source.outbox.selection import Wanted
from relay.source.outbox.table import OutboxTable, refused
from relay.source.outbox.visibility import require_visible
from relay.store.connections import Connection
from relay.store.positions.snapshots import xids_of

_FETCHED_AT_ONCE = 1_000
_FETCHED_BYTES = 1 << 20
"""How many rows, and bytes, are grouped together."""

_LONGEST = 16_384
"""How many times longer than its stored form a text can be, such as that of the number 1e131071."""
_SHORTENED = 1_000
"""How many characters are read of each text of a row that is too large."""
_SHORT = frozenset({16, 20, 21, 23, 26, 700, 701, 1082, 1114, 1184, 2950, 5069})
"""The types of fixed length, whose texts are short: numbers, times, uuid, xid8."""
_BACKSLASH = ord("\\")
_ESCAPED = re.compile(rb"\\(.)", re.DOTALL)
_CONTROLS = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
"""The characters that COPY TO escapes by a letter."""
_TEXTS = frozenset({25, 1043})
"""The types whose values are shortened: text and varchar."""


@dataclass(frozen=True, slots=True)
class Portion:
    """Transactions of a difference that are applied together, up to the position `upto`; `left` counts later events."""

    upto: int
    left: int
    shares: tuple[Share, ...]


def prepare_reading(conn: Connection) -> None:
    """Prepare a new connection that reads rows of the outbox. Raises psycopg.Error."""
    # Rows that were inserted together are on the same pages, but the planner assumes a page for each row.
    conn.execute("set random_page_cost = 0.3")


@contextmanager
def _as_stored(conn: Connection, encoding: Encoding | None) -> Iterator[None]:
    """Receive values in the server's own encoding, where relay converts them."""
    if encoding is None:
        yield
        return
    conn.execute(sql.SQL("set client_encoding to {}").format(encoding.name))
    try:
        yield
    finally:
        if not conn.closed:
            conn.execute("set client_encoding to utf8")


class OutboxRows(OutboxTable):
    """Finds and reads the rows of differences. Connections are in autocommit mode; raises psycopg.Error.

    A transaction's position in a difference is the greatest c_offset of its rows, so a transaction that inserts after
    another one has committed has a greater position.
    """

    def is_empty(self, conn: Connection, between: Difference) -> bool:
        """Whether a difference has no rows."""
        with self._refused(conn):
            return not has_rows(conn, self._table, condition(between))

    def inserted(self, conn: Connection, between: Difference) -> tuple[RowCounts, RowCounts]:
        """How many rows of each transaction of a difference lie as it has inserted them, and how many have its c_xid.

        The stream has brought at least as many as the first, unless it leaves out a part. Rows that were updated since,
        inserted in a savepoint, or got their c_xid from somebody else are only among the second. Rows without c_xid are
        left out.
        """
        query = sql.SQL(
            """
            select string_agg(xid8send(inserted_by), '' order by inserted_by),
                   string_agg(int8send(own), '' order by inserted_by),
                   string_agg(int8send(every), '' order by inserted_by)
              from (select {xid} as inserted_by, count({counted}) filter (where xmin = {xid}::xid) as own,
                           count({counted}) as every
                      from {table} where {between} and {xid} is not null group by 1) as counted
            """
        ).format(
            xid=sql.Identifier(INSERTED_BY),
            # There the stream knows a row by its id alone.
            counted=sql.SQL("distinct {}").format(sql.Identifier(self._mapping["id"]))
            if self._settings.source.offsets == "gapless"
            else sql.SQL("*"),
            table=self._table,
            between=condition(between),
        )
        with self._refused(conn):
            (found,) = conn.execute(query, prepare=False)
        xids, own, every = map(xids_of, found)
        return RowCounts(xids, own), RowCounts(xids, every)

    def partitions_of(self, conn: Connection, xids: Xids) -> dict[int, set[int]]:
        """The partitions in which transactions (full xids, int64) have rows now, by their xids."""
        query = sql.SQL(
            "select {xid}::text::bigint, array_agg(distinct {partition}) from {table} where {xid} = any({xids})"
            " group by 1"
        ).format(
            xid=sql.Identifier(INSERTED_BY),
            partition=self._partition,
            table=self._table,
            xids=_keys(xids, unmarked=False),
        )
        with self._refused(conn):
            return {xid: set(found) for xid, found in conn.execute(query, prepare=False)}

    def plan(
        self,
        conn: Connection,
        between: Difference,
        after: int,
        whole: bool = True,
        applied: RowCounts | None = None,
        most: int | None = None,
    ) -> Generator[Portion]:
        """Yield a difference in portions, in order of the transactions' positions, after the position `after`.

        Transactions of which as many rows are `applied` as the outbox has are left out: a row whose host has changed
        since would count for another partition. With `whole`, the portions of a large difference are large, since tasks
        split them by partitions; with `most`, none has many more events than that. The server finds the transactions
        once and keeps them in a cursor: the connection is in use until the generator is closed. Raises TransientFault
        if the server does not show the difference yet.
        """
        require_visible(conn, between.after)
        with conn.cursor("relay_difference", withhold=True, binary=True) as cursor:
            cursor.itersize = 64
            with self._refused(conn):
                cursor.execute(self._planning(conn, between, whole, most), {"after": after})
            for (upto, left), rows in groupby(cursor, itemgetter(0, 1)):
                shares = (_share(applied, *row) for _, _, *row in rows)
                yield Portion(upto, left, tuple(share for share in shares if share.events))

    def _planning(
        self, conn: Connection, between: Difference, whole: bool, most: int | None
    ) -> sql.Composed:
        settings = self._settings
        small = min(settings.poll.batch_size, most or settings.poll.batch_size)
        large = max(small, settings.batch.max_events * settings.partitions)
        marked = sql.SQL(
            """
            select xid8send({xid}) as key, false as unmarked, bit_or(set_bit({none}, {partition}, 1)) as partitions,
                   coalesce(max({row_position}), 0) as position, count(*) as events
              from {table} where {xid} is not null and {between} group by {xid}
            """
        )
        unmarked = sql.SQL(
            """
            union all
            select int8send(number), true, bit_or(partitions), max(position), count(*)
              from (select {offset}::bigint as number, max({row_position}) over business as position,
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
            "row_position": self._row_position,
            "table": self._table,
            "between": condition(between),
            "transaction": self._or_null(conn, "transaction_id", "null::uuid"),
        }
        return sql.SQL(
            """
            with units as ({units}
            ), counted as (
                select *, (sum(events) over ())::bigint as total,
                       (sum(events) over (order by position))::bigint as reached
                  from units where position > %(after)s
            ), numbered as (
                -- In a large difference: about as many rows for each partition as a batch may have.
                select *, (reached - 1) / (case when total > {most} then {large} else {small} end) as portion
                  from counted
            ), cut as (
                select *, max(position) over (partition by portion) as upto,
                       max(reached) over (partition by portion) as gone
                  from numbered
            )
            select upto, total - gone, partitions::text, unmarked, string_agg(key, '' order by position, key),
                   string_agg(int8send(position), '' order by position, key),
                   string_agg(int8send(events), '' order by position, key)
              from cut group by upto, total, gone, partitions, unmarked order by upto
            """
        ).format(
            units=sql.SQL("").join(unit.format(**names) for unit in units),
            most=max(small, settings.batch.max_events),
            large=large if whole and most is None else small,
            small=small,
        )

    def large(self, conn: Connection, shares: Collection[Share]) -> list[int]:
        """The c_offsets of rows whose values exceed `source.max_event_bytes` as text, or cannot be made a text."""
        columns = [
            sql.Identifier(name) for name, type_oid in self.columns(conn) if type_oid not in _SHORT
        ]
        if not columns:
            return []
        length = sql.SQL(" + ").join(
            sql.SQL("coalesce(octet_length({}::text)::bigint, 0)").format(column)
            for column in columns
        )
        limit = self._settings.source.max_event_bytes
        exceeds = sql.SQL("{} > {}").format(length, limit)
        # Otherwise no text is made: what is not compressed becomes so many times longer at most.
        may_exceed = sql.SQL("coalesce({}) is not null or {} > {}").format(
            sql.SQL(", ").join(map(sql.SQL("pg_column_compression({})").format, columns)),
            sql.SQL(" + ").join(map(sql.SQL("coalesce(pg_column_size({}), 0)").format, columns)),
            limit // _LONGEST,
        )
        large: list[int] = []
        for share in shares:
            rows = sql.SQL(
                "from {table} where {key} = any({keys}) and {offset} is not null"
            ).format(
                offset=self._offset,
                table=self._table,
                key=self._offset if share.unmarked else sql.Identifier(INSERTED_BY),
                keys=_keys(share.xids, share.unmarked),
            )
            with self._refused(conn):
                large += self._exceeding(conn, rows, may_exceed, exceeds)
        return sorted(large)

    def _exceeding(
        self, conn: Connection, rows: sql.Composed, may_exceed: sql.Composed, exceeds: sql.Composed
    ) -> list[int]:
        """The c_offsets of rows that exceed the limit; each is measured alone if one cannot be measured."""
        together = sql.SQL("select {}::bigint {} and case when {} then {} else false end")
        try:
            found = conn.execute(
                together.format(self._offset, rows, may_exceed, exceeds), prepare=False
            )
            return [offset for (offset,) in found]
        except psycopg.Error as error:
            if not exceeds_limits(error):
                raise
        candidates = sql.SQL("select ctid::text, tableoid, {}::bigint {} and ({})")
        listed = conn.execute(candidates.format(self._offset, rows, may_exceed), prepare=False)
        return [
            offset
            for row, part, offset in listed.fetchall()
            if self._exceeds(conn, row, part, exceeds)
        ]

    def _exceeds(self, conn: Connection, row: str, part: int, exceeds: sql.Composed) -> bool:
        query = sql.SQL("select {} from {} where ctid = %s::tid and tableoid = %s")
        try:
            found = conn.execute(query.format(exceeds, self._table), (row, part), prepare=False)
        except psycopg.Error as error:
            if not exceeds_limits(error):
                raise
            return True
        measured = found.fetchone()
        return measured is not None and bool(measured[0])

    def commits(
        self,
        conn: Connection,
        wanted: Wanted,
        by_reference: Collection[int] = (),
    ) -> Generator[Transactions]:
        """Yield the rows of transactions, in order of their positions, grouped like commits of the WAL.

        Where the rows have no c_xid, successive rows with one transaction_id are a commit. In the rows whose offset is
        in `by_reference`, payload and metadata are null, and texts have _SHORTENED characters. Rows are streamed; a
        commit above `batch.max_bytes` goes through a spool file. Raises TransientFault if the server does not show the
        transactions yet, TooLarge if a value is too large to be read, RelayError if the table cannot be read.
        """
        if not wanted.unmarked and len(wanted.xids):
            require_visible(conn, wanted.xids)
        limits = self._settings.batch
        described = self.columns(conn)
        columns = [name for name, _ in described]
        require_contents(columns, self._mapping, self._settings.source.table)
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
        statement = self._reading(described, wanted, by_reference)
        for inserted_by, *cells in self._read(conn, statement, encoding):
            this = int(inserted_by or 0), None if index is None else cells[index]
            if last is not None and not _is_same_commit(last, this):
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
        columns: Sequence[tuple[str, int]],
        wanted: Wanted,
        by_reference: Collection[int],
    ) -> sql.Composed:
        xid = sql.Identifier(INSERTED_BY)
        unmarked = wanted.unmarked
        columns_of: list[sql.Composable] = [
            _keys(wanted.xids, unmarked),
            array(wanted.positions.tolist()),
        ]
        names = [sql.Identifier("relay_key"), sql.Identifier("relay_position")]
        key = self._offset if unmarked else xid
        matches = sql.SQL("{} = relay_key").format(key)
        if len(wanted.xids):
            # Without statistics the planner joins the whole table.
            ends = (str(end) for end in (wanted.xids.min(), wanted.xids.max()))
            kind = sql.SQL("bigint" if unmarked else "xid8")
            first, last = (sql.SQL("{}::{}").format(end, kind) for end in ends)
            matches += sql.SQL(" and {} between {} and {}").format(key, first, last)
        if unmarked:
            matches += sql.SQL(" and {} is null").format(xid)
        if wanted.done is not None:
            columns_of.append(sql.SQL("{}::text[]").format(list(wanted.done)))
            names.append(sql.Identifier("relay_done"))
            matches += sql.SQL(" and {} <> all (relay_done::int[])").format(self._partition)
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
        self, conn: Connection, statement: sql.Composed, encoding: Encoding | None
    ) -> Iterator[Sequence[bytes | None]]:
        text = statement.as_string(conn)
        with conn.cursor() as cursor:
            try:
                with (
                    self._refused(conn),
                    _as_stored(conn, encoding),
                    cursor.copy(text.encode(encoding.codec if encoding else "utf-8")) as copy,
                ):
                    # psycopg would call Python for each value.
                    yield from map(_values_of, copy)
            except psycopg.Error as error:
                if exceeds_limits(error):
                    raise TooLarge(first_line(error)) from None
                if is_transient(error):
                    raise
                raise RelayError(
                    f"source.table: {self._settings.source.table} cannot be read: {first_line(error)}: repair it"
                ) from None
            except MemoryError:
                raise TooLarge("memory ran out") from None

    def _refused(self, conn: Connection) -> AbstractContextManager[None]:
        return refused(self._settings.source.table, conn)

    def _selected(
        self, columns: Sequence[tuple[str, int]], by_reference: Collection[int]
    ) -> Iterator[sql.Composable]:
        offsets = sql.SQL(", ").join(map(sql.Literal, by_reference))
        contents = {self._mapping[name] for name in JSON_FIELDS}
        for name, type_oid in columns:
            column = sql.Identifier(name)
            if not by_reference or not (name in contents or type_oid in _TEXTS):
                yield column
                continue
            short = (
                sql.SQL("null")
                if name in contents
                else sql.SQL("left({}, {})").format(column, _SHORTENED)
            )
            yield sql.SQL("case when {} in ({}) then {} else {} end").format(
                self._offset, offsets, short, column
            )


def not_received(
    rows: Undecoded, events: Iterable[Event], by_reference: Collection[int], table: str
) -> NotReceived | None:
    """The fault of a transaction with rows of `table` that were too large to be read; None if it has none.

    `by_reference` are the c_offsets of such rows. `events` is read only if some of them may be the transaction's.
    """
    if not any(rows.first_offset <= offset <= rows.last_offset for offset in by_reference):
        return None
    offsets = [event.c_offset for event in events if event.c_offset in by_reference]
    found = [offset for offset in offsets if offset is not None]
    if not found:
        return None
    where = f"{table}, c_offset {', '.join(map(str, found))}"
    return NotReceived(f"payload and metadata are too large, they are only in {where}", found)


def _values_of(line: Buffer) -> list[bytes | None]:
    """The values of a row as COPY TO sends it, in the form that they have in the WAL.

    Source: PostgreSQL documentation, "COPY", text format; the server sends a message for each row.
    """
    cells = bytes(line)[:-1].split(b"\t")
    return [
        None if cell == b"\\N" else _ESCAPED.sub(_unescaped, cell) if _BACKSLASH in cell else cell
        for cell in cells
    ]


def _unescaped(escape: re.Match[bytes]) -> bytes:
    return _CONTROLS.get(escape[1], escape[1])


def _share(
    applied: RowCounts | None,
    partitions: str,
    unmarked: bool,
    keys: bytes,
    positions: bytes,
    events: bytes,
) -> Share:
    members = tuple(number for number, bit in enumerate(partitions) if bit == "1")
    xids, at, counts = xids_of(keys), xids_of(positions), xids_of(events)
    if applied is not None and not unmarked:
        left = counts > applied.of(xids)
        xids, at, counts = xids[left], at[left], counts[left]
    return Share(members, int(counts.sum()), xids, at, unmarked)


def _keys(keys: Xids, unmarked: bool) -> sql.Composed:
    return array(keys.tolist(), "bigint" if unmarked else "xid8")


def _is_same_commit(last: tuple[int, bytes | None], this: tuple[int, bytes | None]) -> bool:
    """Whether a row belongs to the commit of the one before; each is given by its xid or 0, and its transaction_id."""
    if last[0] or this[0]:
        return last[0] == this[0]
    return this[1] is not None and last[1] == this[1]
