"""Converts a live outbox to one that is partitioned by time, without stopping publishers.

The table becomes the first partition of a new table that gets its name and its attachments. The outbox is usable after
each step, and the next run continues one that was killed.

Source: PostgreSQL documentation, "Table Partitioning", "ALTER TABLE" and "CREATE TABLE".
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

import psycopg
from psycopg import sql

from relay.config.settings import Settings
from relay.config.types import written
from relay.faults import ConfigurationError
from relay.retention import removable
from relay.retention.attachments import Attachments, obstacles
from relay.retention.partitions import aligned, create_ahead, retained, with_short_lock
from relay.runtime.reporting import ProgressReport, silent
from relay.store import clock, index_builds
from relay.store.connections import Connection

CONSTRAINT = "relay_before"
"""The name of the constraint that all rows are older than the end of the first partition."""
SPAN = timedelta(days=7)
"""The first partition ends at least this far ahead; a killed conversion must be continued before its end."""
_ATTEMPTS = 40
_MINUTE = timedelta(minutes=1)


def convert(
    settings: Settings, source: Connection, every: timedelta, report: ProgressReport = silent
) -> list[str]:
    """Partition the outbox, or set the interval of its next partitions; returns what was done, in words.

    `source` is an administrator's connection in autocommit mode. Raises ConfigurationError for attachments that a
    partitioned table cannot have, and psycopg.Error.
    """
    if every < _MINUTE:
        raise ConfigurationError("--every: a partition's range is at least a minute: 1d, 6h")
    table = settings.source.table
    if _is_partitioned(source, settings):
        done = _set_interval(source, settings, every)
    else:
        faults = [f"source.table: {table} has {what}" for what in obstacles(source, settings)]
        if faults:
            raise ConfigurationError("\n".join(faults))
        done = _Conversion(settings, source, every, report).run()
    created = create_ahead(source, table, clock.present(source), settings.retention.ahead)
    return done + [f"partition {name}" for name in created]


def _is_partitioned(source: Connection, settings: Settings) -> bool:
    partitioned = source.execute(
        "select from pg_partitioned_table where partrelid = to_regclass(%s)",
        (sql.Identifier(*settings.source.table_name).as_string(source),),
    )
    return partitioned.rowcount > 0


def _set_interval(source: Connection, settings: Settings, every: timedelta) -> list[str]:
    """Set the interval of the next partitions. Raises ConfigurationError for partitions that are not relay's."""
    table = settings.source.table
    given = retained(source, table)
    if given is None or given.every is None:
        raise ConfigurationError(
            f"source.table: {table} is partitioned already, and not by relay: create and drop its partitions with "
            "the tool that has partitioned it"
        )
    if given.every == every:
        return []
    source.execute("update relay.retained set every = %s where outbox = %s", (every, table))
    return [f"interval of {written(every)} for the next partitions of {table}"]


class _Conversion:
    """One run of the conversion."""

    def __init__(
        self, settings: Settings, source: Connection, every: timedelta, report: ProgressReport
    ) -> None:
        self._settings = settings
        self._report = report
        self._source = source
        self._every = every
        schema, name = settings.source.table_name
        self._schema = schema
        self._table = sql.Identifier(schema, name)
        self._before = sql.Identifier(schema, f"{name[:56]}_before")
        self._index = f"{name[:40]}_relay_key"

    def run(self) -> list[str]:
        """Prepare the table while it is in use, then exchange it in one short database transaction."""
        source, of = self._source, self._settings.source
        with_short_lock(source, lambda: removable.retain(source, of), _ATTEMPTS)
        key = self._primary_key()
        if key:
            with index_builds.reported(source, "building the key: pages", self._report):
                self._build_key(key)
        try:
            end = self._bound()
            self._report("checking the range of the first partition")
            self._execute("alter table {table} validate constraint {constraint}")
            self._report("exchanging the table for its partitions")
            with_short_lock(source, lambda: self._exchange(key, end), _ATTEMPTS)
        except BaseException:
            # The constraint refuses rows after the end of the range.
            with suppress(psycopg.Error):
                self._execute("alter table {table} drop constraint if exists {constraint}")
            raise
        return [f"partitions of {of.table}, one for each {written(self._every)}"]

    def _execute(self, text: str, **names: sql.Composable) -> psycopg.Cursor[Any]:
        return self._source.execute(
            sql.SQL(text).format(
                table=self._table,
                before=self._before,
                constraint=sql.Identifier(CONSTRAINT),
                **names,
            )
        )

    def _primary_key(self) -> tuple[str, list[str]] | None:
        """Return the name and the columns of the primary key, without c_ts; None if there is none."""
        row = self._source.execute(
            """
            select conname::text, array(select attname::text from unnest(conkey) with ordinality as k (number, ordinal)
                                    join pg_attribute on attrelid = conrelid and attnum = number
                                   where attname <> 'c_ts' order by ordinal)
              from pg_constraint where conrelid = %s::regclass and contype = 'p'
            """,
            (self._table.as_string(self._source),),
        ).fetchone()
        return None if row is None else (row[0], row[1])

    def _build_key(self, key: tuple[str, list[str]]) -> None:
        index = sql.Identifier(self._schema, self._index)
        row = self._source.execute(
            "select indisvalid from pg_index where indexrelid = to_regclass(%s)",
            (index.as_string(self._source),),
        ).fetchone()
        if row and row[0]:
            return
        self._execute("drop index concurrently if exists {index}", index=index)
        self._execute(
            "create unique index concurrently {index} on {table} ({columns})",
            index=sql.Identifier(self._index),
            columns=self._columns(key),
        )

    def _columns(self, key: tuple[str, list[str]]) -> sql.Composed:
        return sql.SQL(", ").join(map(sql.Identifier, [*key[1], "c_ts"]))

    def _bound(self) -> datetime:
        """Add the constraint of the first partition, not validated yet; returns the end of its range."""
        empty = not self._execute("select from {table} limit 1").rowcount
        span = timedelta(0) if empty else max(SPAN, 2 * self._every)
        end = aligned(clock.present(self._source) + span, self._every) + self._every

        def add() -> None:
            self._execute("alter table {table} drop constraint if exists {constraint}")
            self._execute(
                "alter table {table} add constraint {constraint} check (c_ts < {end}) not valid",
                end=sql.Literal(end),
            )

        with_short_lock(self._source, add, _ATTEMPTS)
        return end

    def _exchange(self, key: tuple[str, list[str]] | None, end: datetime) -> None:
        """Exchange the table. Publishers are blocked from here to the commit; no row is read."""
        self._execute("lock table {table} in access exclusive mode")
        attached = Attachments.read(self._source, self._table)
        attached.rename_indexes(self._source, self._schema)
        self._execute("alter table {table} rename to {name}", name=self._name(self._before))
        if key:
            self._exchange_key(key)
        self._execute(
            """
            create table {table} (like {before} including defaults including generated including constraints
                including storage including compression including comments including statistics)
                partition by range (c_ts)
            """
        )
        self._execute("alter table {table} drop constraint {constraint}")
        if key:
            self._execute(
                "alter table {table} add constraint {name} primary key ({columns})",
                name=sql.Identifier(key[0]),
                columns=self._columns(key),
            )
        attached.carry_over(self._source, self._table, self._before)
        self._execute(
            "alter table {table} attach partition {before} for values from (minvalue) to ({end})",
            end=sql.Literal(end),
        )
        self._execute("alter table {before} drop constraint {constraint}")
        table = self._settings.source.table
        self._source.execute(
            "select relay.add_default(%s::regclass, %s)",
            (
                self._table.as_string(self._source),
                f"{self._settings.source.table_name[1][:40]}_default",
            ),
        )
        self._source.execute(
            "update relay.retained set every = %s where outbox = %s", (self._every, table)
        )

    def _exchange_key(self, key: tuple[str, list[str]]) -> None:
        former = self._source.execute(
            "select conname from pg_constraint where conrelid = %s::regclass and contype = 'p'",
            (self._before.as_string(self._source),),
        ).fetchone()
        assert former is not None  # noqa: S101
        self._execute(
            "alter table {before} drop constraint {former}, add constraint {name} primary key using index {index}",
            former=sql.Identifier(former[0]),
            name=sql.Identifier(f"{key[0][:56]}_before"),
            index=sql.Identifier(f"{self._index[:56]}_before"),
        )

    @staticmethod
    def _name(qualified: sql.Identifier) -> sql.Identifier:
        return sql.Identifier(qualified._obj[-1])
