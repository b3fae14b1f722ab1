"""Converts a live outbox to one that is partitioned by time, without stopping publishers.

The table becomes the first partition of a new table that gets its name and its attachments: anything that belongs to a
table beside its rows, such as indexes, triggers, grants and publications. Some of these rule a conversion out. The
outbox is usable after each step, and the next run continues one that was killed.

Source: PostgreSQL documentation, "Table Partitioning", "ALTER TABLE" and "CREATE TABLE"; the chapter "System Catalogs".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import psycopg
from psycopg import sql

from relay.config.settings import Settings
from relay.config.types import written
from relay.faults import ConfigurationError
from relay.retention import reader_positions
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
        faults = [f"source.table: {table} has {what}" for what in _obstacles(source, settings)]
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
        with_short_lock(source, lambda: reader_positions.retain(source, of), _ATTEMPTS)
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
        attached = _Attachments.read(self._source, self._table)
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


_OBSTACLES = """
    with t as (select c.* from pg_class as c where c.oid = %(table)s::regclass)
    select what from t cross join lateral (
        select 'the view ' || r.ev_class::regclass::text
               || ', which would go on showing the old table alone: drop it, and create it again afterwards' as what
          from pg_depend as d join pg_rewrite as r on r.oid = d.objid
         where d.classid = 'pg_rewrite'::regclass and d.refclassid = 'pg_class'::regclass and d.refobjid = t.oid
           and r.ev_class <> t.oid
        union
        select 'the function ' || d.objid::regprocedure::text || ', whose body depends on the table: drop it first'
          from pg_depend as d
         where d.classid = 'pg_proc'::regclass and d.refobjid in (t.oid, t.reltype)
        union
        select 'the column ' || d.objid::regclass::text || ' of its row type: drop the column first'
          from pg_depend as d
         where d.classid = 'pg_class'::regclass and d.refclassid = 'pg_type'::regclass and d.refobjid = t.reltype
           and d.objid <> t.oid
        union
        select 'the foreign key ' || conname || ' of ' || conrelid::regclass::text
               || ', which cannot name a single column of its new key (id, c_ts): drop the foreign key'
          from pg_constraint where confrelid = t.oid and contype = 'f'
        union
        select 'the foreign key ' || conname || ': drop it, an outbox refers to nothing'
          from pg_constraint where conrelid = t.oid and contype = 'f'
        union
        select 'the constraint ' || conname || ', which cannot hold across partitions: drop it'
          from pg_constraint where conrelid = t.oid and contype in ('u', 'x')
        union
        select 'the unique index ' || indexrelid::regclass::text || ', which cannot hold across partitions: drop it'
          from pg_index as i
         where indrelid = t.oid and indisunique and not indisprimary
           and indexrelid is distinct from to_regclass(%(own)s)
           and not exists (select from pg_constraint where conindid = i.indexrelid)
        union
        select 'the rule ' || rulename || ': drop it' from pg_rewrite where ev_class = t.oid and rulename <> '_RETURN'
        union
        select 'the row security policy ' || polname || ': drop it' from pg_policy where polrelid = t.oid
        union
        select 'row level security: disable it' where t.relrowsecurity
        union
        select 'the identity column ' || attname || ': give it a default from a sequence instead'
          from pg_attribute where attrelid = t.oid and attidentity <> '' and not attisdropped
        union
        select 'a parent or a child by inheritance: end it with `alter table ... no inherit`'
          from pg_inherits where t.oid in (inhrelid, inhparent)
        union
        select 'no permanent storage: make it an ordinary table with `alter table ... set logged`'
         where t.relpersistence <> 'p'
        union
        select 'an index as its replica identity: set it to default' where t.relreplident = 'i'
        union
        select 'the publication ' || pubname || ', which publishes partitions under their own names: run `alter '
               'publication ' || pubname || ' set (publish_via_partition_root = true)`'
          from pg_publication as p
         where not pubviaroot and not exists (select from pg_publication_rel where prpubid = p.oid and prrelid = t.oid)
           and exists (select from pg_publication_tables as pt
                        where pt.pubname = p.pubname and (pt.schemaname, pt.tablename) = (%(schema)s, %(name)s))
    ) as obstacle
    order by 1
"""


def _obstacles(source: Connection, settings: Settings) -> Iterator[str]:
    """Yield the attachments that a partitioned table cannot have, each with what to do. Raises psycopg.Error."""
    schema, name = settings.source.table_name
    rows = source.execute(
        _OBSTACLES,
        {
            "table": sql.Identifier(schema, name).as_string(source),
            "own": sql.Identifier(schema, f"{name[:40]}_relay_key").as_string(source),
            "schema": schema,
            "name": name,
        },
    )
    for (what,) in rows:
        yield what


@dataclass(frozen=True, slots=True)
class _Attachments:
    """The indexes of the old table, and the statements that carry over its other attachments to the new table.

    An index has its name, and its definition from USING on, None if it is not carried over. In a statement, {table} is
    the new table and {before} the old one.
    """

    indexes: list[tuple[str, str | None]]
    statements: list[str]

    @classmethod
    def read(cls, source: Connection, table: sql.Identifier) -> _Attachments:
        """Read the attachments of a locked table. Raises psycopg.Error."""
        of = {"table": table.as_string(source)}
        indexes = source.execute(
            """
            select c.relname::text,
                   case when not i.indisunique and i.indisvalid
                        then substring(pg_get_indexdef(c.oid) from position(' USING ' in pg_get_indexdef(c.oid))) end
              from pg_index as i join pg_class as c on c.oid = i.indexrelid where i.indrelid = %(table)s::regclass
            """,
            of,
        ).fetchall()
        return cls(indexes, [text for (text,) in source.execute(_STATEMENTS, of)])

    def rename_indexes(self, source: Connection, schema: str) -> None:
        """Rename the indexes of the old table, so that the new one can have their names. Raises psycopg.Error."""
        for name, _ in self.indexes:
            source.execute(
                sql.SQL("alter index {} rename to {}").format(
                    sql.Identifier(schema, name), sql.Identifier(f"{name[:56]}_before")
                )
            )

    def carry_over(self, source: Connection, table: sql.Identifier, before: sql.Identifier) -> None:
        """Carry the attachments over. Those that only one table can have are removed from the old one.

        Raises psycopg.Error.
        """
        names = {"{table}": table.as_string(source), "{before}": before.as_string(source)}
        for text in self.statements:
            for mark, name in names.items():
                text = text.replace(mark, name)
            source.execute(text.encode())
        for name, definition in self.indexes:
            if definition is not None:
                source.execute(
                    sql.SQL("create index {} on {} {}").format(
                        sql.Identifier(name),
                        table,
                        sql.SQL(definition),
                    )
                )


_STATEMENTS = r"""
    with t as (select c.*, n.nspname from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
                where c.oid = %(table)s::regclass),
    triggers as (
        select g.*, quote_ident(g.tgname) as name,
               replace(pg_get_triggerdef(g.oid), format(' ON %%I.%%I ', nspname, relname),
                       ' ON {table} ') as definition
          from pg_trigger as g, t where g.tgrelid = t.oid and not g.tgisinternal),
    published as (
        select quote_ident(p.pubname) as name, pt.whole ->> 'rowfilter' as filter,
               (select string_agg(quote_ident(a.attname), ', ')
                  from regexp_matches(to_jsonb(r) ->> 'prattrs', '\d+', 'g') as number
                  join pg_attribute as a on a.attrelid = r.prrelid and a.attnum = number[1]::int) as columns
          from t join pg_publication_rel as r on r.prrelid = t.oid join pg_publication as p on p.oid = r.prpubid
         cross join lateral (
               select to_jsonb(pt) as whole from pg_publication_tables as pt
                where pt.pubname = p.pubname and pt.tablename = t.relname
                  and pt.schemaname = t.nspname) as pt)
    select statement from (
        select 1 as step, format('alter table {table} owner to %%I', pg_get_userbyid(relowner)) as statement from t
        union all
        select 2, format('comment on table {table} is %%L', obj_description(t.oid, 'pg_class'))
          from t where obj_description(t.oid, 'pg_class') is not null
        union all
        select 2, format('revoke all on {table} from public') from t where relacl is not null
        union all
        select 3, format('grant %%s on {table} to %%s%%s', a.privilege_type,
                         case when a.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end,
                         case when a.is_grantable then ' with grant option' else '' end)
          from t, aclexplode(t.relacl) as a
        union all
        select 3, format('grant %%s (%%I) on {table} to %%s%%s', a.privilege_type, c.attname,
                         case when a.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end,
                         case when a.is_grantable then ' with grant option' else '' end)
          from t join pg_attribute as c on c.attrelid = t.oid and not c.attisdropped, aclexplode(c.attacl) as a
        union all
        select 4, format('alter sequence %%s owned by {table}.%%I', d.objid::regclass, a.attname)
          from t join pg_depend as d on d.refobjid = t.oid and d.deptype = 'a' and d.classid = 'pg_class'::regclass
               and d.refclassid = 'pg_class'::regclass
          join pg_class as s on s.oid = d.objid and s.relkind = 'S'
          join pg_attribute as a on a.attrelid = t.oid and a.attnum = d.refobjsubid
        union all
        select 5, format('alter table {table} drop constraint %%1$I, add constraint %%1$I %%2$s', conname,
                         pg_get_constraintdef(k.oid))
          from t join pg_constraint as k on k.conrelid = t.oid
         where k.contype = 'c' and not k.convalidated and k.conname <> 'relay_before'
        union all
        select 6, format('drop trigger %%s on {before}', name) from triggers
        union all
        select 7, definition from triggers
        union all
        select 8, format('alter table {table} %%s trigger %%s',
                         case tgenabled when 'D' then 'disable' when 'A' then 'enable always' else 'enable replica' end,
                         name)
          from triggers where tgenabled <> 'O'
        union all
        select 9, 'alter table {table} replica identity full' from t where relreplident = 'f'
        union all
        select 10, format('alter publication %%s drop table {before}', name) from published
        union all
        select 11, format('alter publication %%s set (publish_via_partition_root = true)', name) from published
        union all
        select 12, format('alter publication %%s add table {table}%%s%%s', name, ' (' || columns || ')',
                          ' where (' || filter || ')')
          from published
    ) as steps
    order by step
"""
