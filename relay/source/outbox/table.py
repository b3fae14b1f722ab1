"""The outbox as a table: its columns, its offsets, whether polling can read it, and the partition of a host in SQL.

`rows` reads the rows, `unread` counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import LiteralString

import psycopg
from psycopg import sql

from relay.config.settings import Settings
from relay.faults import ConfigurationError, RelayError, first_line, is_of_row_security
from relay.model.events import EVENT_FIELDS, INSERTED_BY, Event
from relay.model.keys import hashes
from relay.store.connections import Connection

_PROBE = "relay: is it the same hash?"
_MOST_FORGED = 1_000
"""How many rows with a c_xid that nobody has are looked up: more of them are no publisher's."""


def no_table(table: str) -> ConfigurationError:
    """Return the error for a `source.table` that does not exist."""
    return ConfigurationError(
        f"source.table: there is no table {table}: run `relay init` for relay's own outbox, or name your own table"
    )


def _hidden(table: str, role: str) -> ConfigurationError:
    return ConfigurationError(
        f"source.table: row-level security hides rows of {table} from the role {role}, so relay would skip events: run "
        f"`alter role {role} bypassrls` as an administrator, make {role} a member of the role that owns the table, or "
        "disable row-level security for the table"
    )


@contextmanager
def refused(table: str, conn: Connection) -> Iterator[None]:
    """Raise ConfigurationError where the outbox is gone, or the role may not read it, or not all of its rows."""
    try:
        yield
    except psycopg.errors.UndefinedTable:
        raise no_table(table) from None
    except psycopg.errors.InsufficientPrivilege as error:
        if is_of_row_security(error):
            raise _hidden(table, conn.info.user) from None
        raise ConfigurationError(
            f"source.table: {first_line(error)}: grant SELECT on {table} to the role of source.dsn"
        ) from None


class OutboxTable:
    """The outbox of a configuration as a table. Connections are in autocommit mode; raises psycopg.Error."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._mapping = settings.source.mapping
        self._table = sql.Identifier(*settings.source.table_name)
        self._offset = sql.Identifier(self._mapping["c_offset"])
        # A position is after the first one, which the least bigint is.
        self._row_position = sql.SQL("greatest({}::bigint, -9223372036854775807)").format(
            self._offset
        )
        self._partition = partition_of(self._mapping["host_id"], settings.partitions)
        self._known: frozenset[str] | None = None

    def columns(self, conn: Connection) -> list[tuple[str, int]]:
        """The outbox's columns that hold fields, in the order of the table, each with the oid of its type."""
        wanted = set(self._mapping.values())
        # Prepared, it would fail once the table has another column.
        cursor = conn.execute(
            sql.SQL("select * from {} limit 0").format(self._table), prepare=False
        )
        return [
            (column.name, column.type_code)
            for column in cursor.description or ()
            if column.name in wanted
        ]

    def require_visible_rows(self, conn: Connection) -> None:
        """Raise ConfigurationError if row-level security applies to the role of the connection."""
        active = conn.execute(
            "select from pg_class where oid = to_regclass(%s) and row_security_active(oid)",
            (self._table.as_string(conn),),
        )
        if active.rowcount:
            raise _hidden(self._settings.source.table, conn.info.user)

    def next_offset(self, conn: Connection) -> int:
        """One more than the greatest c_offset; 1 without rows."""
        row = conn.execute(
            sql.SQL("select max({}) from {}").format(self._offset, self._table)
        ).fetchone()
        # Above the range of bigint where a row has the greatest number.
        return int(row[0]) + 1 if row and row[0] is not None else 1

    def oldest_offset(self, conn: Connection) -> int | None:
        """The least c_offset; None without rows."""
        row = conn.execute(
            sql.SQL("select min({}) from {}").format(self._offset, self._table)
        ).fetchone()
        return int(row[0]) if row and row[0] is not None else None

    def event(self, conn: Connection, event_id: str) -> Event | None:
        """The event with an id; None if there is no row of it, also where no id of this outbox can be the text."""
        present = self._names(conn)
        headers = self._settings.source.headers
        names = [self._mapping.get(field) for field in EVENT_FIELDS]
        values = [
            sql.SQL("{}::text").format(sql.Identifier(name)) if name in present else sql.SQL("null")
            for name in [*names, *headers.values()]
        ]
        query = sql.SQL("select {} from {} where {} = %s limit 1").format(
            sql.SQL(", ").join(values), self._table, sql.Identifier(self._mapping["id"])
        )
        try:
            row = conn.execute(query, (event_id,), prepare=False).fetchone()
        except psycopg.DataError:
            return None
        if row is None:
            return None
        fields = len(EVENT_FIELDS)
        return Event(row[:fields], dict(zip(headers, row[fields:], strict=True)))

    def split_at(self, conn: Connection, offset: int) -> list[int]:
        """The 32-bit xids of the transactions with rows both up to a c_offset and after it."""
        xid = sql.Identifier(INSERTED_BY)
        rows = conn.execute(
            sql.SQL(
                "select mod({xid}::text::numeric, 4294967296)::bigint from {table} where {xid} is not null"
                " group by {xid} having min({offset}) <= %(at)s and max({offset}) > %(at)s"
            ).format(xid=xid, table=self._table, offset=self._offset),
            {"at": offset},
        )
        return [xid for (xid,) in rows]

    def first_since(self, conn: Connection, moment: datetime) -> int | None:
        """The least c_offset of a row whose event_ts is at or after `moment`; None without such a row."""
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
                "would not record which transaction inserted them: run `relay init`, which sets it"
            )
        if self._settings.source.offsets == "sequence":
            self._require_order(conn)

    def _require_order(self, conn: Connection) -> None:
        """Raise ConfigurationError if c_offset does not follow the order of insertion."""
        # Most databases have no such sequence, and to look whose it is costs much more.
        if not conn.execute(
            "select from pg_sequence where seqcache > 1 or seqincrement < 0 limit 1"
        ).rowcount:
            return
        sequence = conn.execute(
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
        if sequence:
            raise ConfigurationError(
                f"source.table: the sequence {sequence[0]} does not number the rows of "
                f"{self._settings.source.table} in the order in which they are inserted, which polling needs: "
                f"run `alter sequence {sequence[0]} increment 1 cache 1`, or set source.mode: wal"
            )

    def require_offsets(self, conn: Connection, then: str) -> None:
        """Raise ConfigurationError if there are rows without a c_offset, which polling would skip.

        `then` says what to do once they have one.
        """
        column = self._mapping["c_offset"]
        unnumbered = conn.execute(
            sql.SQL("select from {} where {} is null limit 1").format(self._table, self._offset)
        )
        if unnumbered.rowcount:
            raise ConfigurationError(
                f"source.table: {self._settings.source.table} has rows without {column}, which polling would skip: "
                f"number them in the order in which they are to be relayed, and {then}{self._numbered_by_id()}"
            )
        if INSERTED_BY not in self._names(conn):
            return
        shared = conn.execute(
            sql.SQL(
                "select from {} where {} is null group by {} having count(*) > 1 limit 1"
            ).format(self._table, sql.Identifier(INSERTED_BY), self._offset)
        )
        if shared.rowcount:
            raise ConfigurationError(
                f"source.table: {self._settings.source.table} has rows from before `relay init` that share a {column}: "
                "number each of them, in the order in which they are to be relayed"
            )

    def _numbered_by_id(self) -> str:
        """Return what else can be done where the id is a number that grows, as in the tables of Blumchen."""
        number = self._mapping["id"]
        if self._settings.source.types.get("id") != "bigint":
            return ""
        return f"; or let {number}, if it grows in that order, be the number: source.columns: {{c_offset: {number}}}"

    def unassigned(self, conn: Connection, most: int) -> list[tuple[str | None, int | None, str]]:
        """The id, c_offset and c_xid of rows whose c_xid the server has not assigned yet, the greatest first."""
        return conn.execute(
            # In this form the query uses the index on c_xid.
            sql.SQL(
                "select {id}::text, {offset}, {xid}::text from (select * from {table} where {xid} is not null"
                " order by {xid} desc limit {most}) as newest"
                " where {xid} >= pg_snapshot_xmax(pg_current_snapshot())::text::xid8"
            ).format(
                id=sql.Identifier(self._mapping["id"]),
                offset=self._offset,
                xid=sql.Identifier(INSERTED_BY),
                table=self._table,
                most=most,
            )
        ).fetchall()

    def require_own_xids(
        self, conn: Connection, dead: Callable[[Sequence[str]], Collection[str]]
    ) -> None:
        """Raise ConfigurationError if a row has a c_xid that the server has not assigned yet.

        `dead` returns which of some event ids have a dead letter: the stream has brought these rows.
        """
        rows = self.unassigned(conn, _MOST_FORGED)
        if not rows:
            return
        known = dead([event for event, _, _ in rows if event is not None])
        left = [row for row in rows if row[0] not in known]
        if left or len(rows) == _MOST_FORGED:
            _, offset, xid = (left or rows)[0]
            raise ConfigurationError(
                f"source.table: {self._settings.source.table} has rows whose c_xid this server has not assigned yet, "
                f"such as {xid} at c_offset {offset}: they come from another cluster, by logical replication or a "
                "dump, or whoever inserted them has set it: set their c_xid to null, which marks events from before "
                "relay, and set with `relay offsets seek` where relay is to continue"
            )

    def are_restored(self, conn: Connection) -> bool:
        """Whether rows were inserted before the transaction of their c_xid: by a restore, or a subscription.

        Updates and savepoints give a row a later xmin than its c_xid, never an earlier one. Reads the whole table.
        """
        xid = sql.Identifier(INSERTED_BY)
        # xmin is less than half a cycle of 2^32 xids away, and 2 or less in rows that an old server has frozen.
        distance = sql.SQL(
            "(mod({}::text::numeric, 4294967296)::bigint - xmin::text::bigint)"
        ).format(xid)
        restored = conn.execute(
            sql.SQL(
                "select from {} where {} is not null and xmin::text::bigint > 2"
                " and mod({} + 4294967296, 4294967296) between 1 and 2147483647 limit 1"
            ).format(self._table, xid, distance)
        )
        return restored.rowcount > 0

    def _or_null(self, conn: Connection, field: str, null: LiteralString) -> sql.Composable:
        column = self._mapping[field]
        return sql.Identifier(column) if column in self._names(conn) else sql.SQL(null)

    def _names(self, conn: Connection) -> frozenset[str]:
        if self._known is None:
            source = self._settings.source
            with refused(source.table, conn):
                cursor = conn.execute(sql.SQL("select * from {} limit 0").format(self._table))
            self._known = frozenset(column.name for column in cursor.description or ())
        return self._known


def partition_of(column: str, partitions: int) -> sql.Composed:
    """The expression of the partition of a row, whose host is in the column `column`; '' stands for null.

    `relay.model.keys` computes the same of the bytes that the stream brings. `concat` gives the text that the
    stream has, with the blanks of a char(n), where a cast would strip them. Under a nondeterministic collation equal
    texts of different bytes would have one hash: the collation "C" has the bytes'.
    """
    return sql.SQL('mod(abs(hashtext(concat({}) collate "C")::bigint), {})::int').format(
        sql.Identifier(column), sql.Literal(partitions)
    )


def require_same_hash(conn: Connection) -> None:
    """Raise RelayError if the server's hash of a text is not that of `relay.model.keys`. Raises psycopg.Error."""
    (row,) = conn.execute(sql.SQL("select hashtext({})").format(_PROBE))
    if row[0] != hashes([_PROBE.encode()])[0]:
        raise RelayError(
            "source.dsn: the server's hashtext is not that of PostgreSQL on a little-endian machine, so that hosts "
            "would have other partitions in the WAL than in the table: set source.mode: poll"
        )
