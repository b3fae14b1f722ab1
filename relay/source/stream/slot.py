"""Creates, describes and drops the publication and the replication slot.

Source: PostgreSQL documentation, "Replication Slots", "CREATE PUBLICATION" and "Replication Management Functions".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import args_row, class_row, scalar_row

from relay.config.source import SourceSettings
from relay.faults import ConfigurationError, describe
from relay.model.events import Lsn
from relay.runtime.threads import beside
from relay.source.outbox.columns import PUBLISHES_GENERATED, mapped
from relay.store.connections import Dsn, connect

log = logging.getLogger(__name__)

PLUGIN = "pgoutput"

REPORT_AFTER_SECONDS = 1.0
"""How long the creation of a slot may take before the oldest open transaction is reported."""
REPORT_EVERY_SECONDS = 10.0
"""How often it is reported after that."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """A slot as `pg_replication_slots` shows it.

    `lag_bytes` is the WAL that is not confirmed, `retained_bytes` all that the server keeps for it: back to the oldest
    transaction that was open at the confirmed position.
    """

    name: str
    plugin: str
    database: str | None
    active: bool
    active_pid: int | None
    wal_status: str | None
    confirmed_flush_lsn: str | None
    lag_bytes: int | None
    retained_bytes: int | None
    invalidation_reason: str | None
    two_phase: bool

    @property
    def creating(self) -> bool:
        """Whether process `active_pid` is still creating it, which waits for running transactions."""
        return self.confirmed_flush_lsn is None

    @property
    def lost(self) -> bool:
        """Whether the server has invalidated the slot, so that it can never be read again."""
        return self.wal_status == "lost" or self.invalidation_reason is not None


def slot_state(conn: psycopg.Connection[object], name: str) -> SlotState | None:
    """Read the slot with that name; None if there is none."""
    with conn.cursor(row_factory=class_row(SlotState)) as cursor:
        return cursor.execute(
            """
            select slot_name::text as name, plugin::text as plugin, database::text as database, active, active_pid,
                   wal_status, confirmed_flush_lsn::text as confirmed_flush_lsn,
                   coalesce(to_jsonb(s) ->> 'invalidation_reason',
                            case when (to_jsonb(s) ->> 'conflicting')::boolean then 'conflict'
                                 when wal_status = 'lost' then 'wal_removed' end) as invalidation_reason, two_phase,
                   case when pg_is_in_recovery() then null
                        else pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)::bigint end as lag_bytes,
                   pg_wal_lsn_diff(case when pg_is_in_recovery() then pg_last_wal_replay_lsn()
                                        else pg_current_wal_lsn() end, restart_lsn)::bigint as retained_bytes
              from pg_replication_slots as s where slot_name = %s
            """,
            (name,),
        ).fetchone()


def slot_reader(conn: psycopg.Connection[object], name: str) -> str | None:
    """Read the application_name of the connection that reads the slot; None if none does."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        reader: str | None = cursor.execute(
            "select a.application_name from pg_replication_slots s join pg_stat_activity a on a.pid = s.active_pid"
            " where s.slot_name = %s",
            (name,),
        ).fetchone()
    return reader


def reader_activity(conn: psycopg.Connection[object], name: str) -> str:
    """Describe what the server shows of the process that reads the slot, and of standby slots that it waits for."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        activity: str | None = cursor.execute(
            """
            select concat_ws(', ',
                   format('process %%s reads the slot (%%s)', s.active_pid, a.application_name),
                   'waits for ' || a.wait_event,
                   (select 'synchronized_standby_slots names ' || string_agg(trim(standby), ', ')
                           || ', which no standby reads'
                      from unnest(string_to_array(nullif(current_setting('synchronized_standby_slots', true), ''), ','))
                           as standby
                     where not exists (select from pg_replication_slots p
                                        where p.slot_name = trim(standby) and p.active)))
              from pg_replication_slots s left join pg_stat_activity a on a.pid = s.active_pid
             where s.slot_name = %s and s.active_pid is not null
            """,
            (name,),
        ).fetchone()
    return activity or "no process reads the slot"


def create_slot(conn: psycopg.Connection[object], name: str) -> Lsn:
    """Create the slot, as a failover slot where the server has them (PostgreSQL 17 and later); returns its position.

    The publication must exist already: a slot decodes with the catalog of the time of each change, and fails for
    changes from before the publication. Waits for all running transactions. Raises psycopg.Error.
    """
    failover = sql.SQL(", failover => true") if conn.info.server_version >= 170000 else sql.SQL("")
    with conn.cursor(row_factory=args_row(Lsn.parse)) as cursor:
        cursor.execute(
            sql.SQL(
                "select lsn::text from pg_create_logical_replication_slot({name}, {plugin}{failover})"
            ).format(name=name, plugin=PLUGIN, failover=failover)
        )
        return next(cursor)


def ensure_slot(conn: psycopg.Connection[object], name: str) -> bool:
    """Create the slot if it does not exist; returns whether it was created.

    Raises ConfigurationError if it exists and is not ours.
    """
    state = slot_state(conn, name)
    if state is None:
        try:
            create_slot(conn, name)
        except psycopg.errors.DuplicateObject:
            # Another session was faster, perhaps for another database: the names of slots are unique in the cluster.
            return ensure_slot(conn, name)
        return True
    require_ours(state, conn.info.dbname)
    return False


def require_ours(state: SlotState, database: str) -> None:
    """Raise ConfigurationError if the slot has another plugin or database, or decodes prepared transactions."""
    if state.plugin != PLUGIN:
        raise ConfigurationError(
            f"source.slot: the slot {state.name!r} uses the plugin {state.plugin!r}, relay needs {PLUGIN!r}: "
            "name another slot, or drop this one if it is unused"
        )
    if state.database != database:
        raise ConfigurationError(
            f"source.slot: the slot {state.name!r} belongs to the database {state.database!r}, "
            f"not to {database!r}: name another slot"
        )
    if state.two_phase:
        # pgoutput then sends PREPARE TRANSACTION apart from its end, whatever the version of the protocol.
        raise ConfigurationError(
            f"source.slot: the slot {state.name!r} was created with two_phase, and relay takes a transaction when it "
            f"commits: drop the slot (select pg_drop_replication_slot('{state.name}')) and run `relay init`"
        )


def drop_slot(conn: psycopg.Connection[object], name: str) -> bool:
    """Drop the slot if it exists; returns whether it did. Raises psycopg.errors.ObjectInUse while it is read."""
    cursor = conn.execute(
        "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = %s",
        (name,),
    )
    return cursor.rowcount > 0


@dataclass(frozen=True, slots=True)
class _Publication:
    """A publication as the catalog shows it: each table with its columns, None where the server does not show them."""

    membership: tuple[int, int | None]
    inserts: bool
    through_root: bool
    tables: dict[str, list[str] | None]
    filters: dict[str, str]


def _publication(conn: psycopg.Connection[Any], source: SourceSettings) -> _Publication | None:
    table = "" if source.message_prefix else sql.Identifier(*source.table_name).as_string(conn)
    row = conn.execute(
        """
        select p.oid::bigint, r.oid::bigint, p.pubinsert, p.pubviaroot
          from pg_publication as p
          left join pg_publication_rel as r on r.prpubid = p.oid and r.prrelid = to_regclass(nullif(%s, ''))
         where p.pubname = %s
        """,
        (table, source.publication),
    ).fetchone()
    if row is None:
        return None
    lists_columns = conn.info.server_version >= 150000
    tables = conn.execute(
        sql.SQL(
            "select schemaname || '.' || tablename, {} from pg_publication_tables where pubname = %s"
        ).format(sql.SQL("attnames::text[], rowfilter" if lists_columns else "null, null")),
        (source.publication,),
    ).fetchall()
    publication, entry, inserts, through_root = row
    return _Publication(
        (publication, entry),
        inserts,
        through_root,
        {table: columns for table, columns, _ in tables},
        {table: condition for table, _, condition in tables if condition is not None},
    )


def require_published(
    conn: psycopg.Connection[Any], source: SourceSettings
) -> tuple[int, int | None]:
    """Raise ConfigurationError unless the publication has the outbox's inserts, all of them, under the outbox's name.

    A commit of which the stream brings a part looks like a whole one. Returns the oids of the publication and of the
    outbox's entry in it, which change when the outbox is taken out and put back.
    """
    publication = _publication(conn, source)
    if publication is None:
        raise ConfigurationError(
            f"source.publication: there is no publication {source.publication!r}: run `relay init`"
        )
    if source.message_prefix is not None:
        # Every publication has logical messages.
        return publication.membership
    require_streamable(conn, source)
    alter = f"alter publication {source.publication}"
    if source.table not in publication.tables:
        _refuse_leaves(conn, source, publication)
        raise ConfigurationError(
            f"source.publication: {source.publication!r} does not publish {source.table}: "
            f"run `{alter} add table {source.table}`, or name another publication"
        )
    if not publication.inserts:
        raise ConfigurationError(
            f"source.publication: {source.publication!r} does not publish inserts: "
            f"run `{alter} set (publish = 'insert')`, or name another publication"
        )
    if source.table in publication.filters:
        raise ConfigurationError(
            f"source.publication: {source.publication!r} has a row filter, {publication.filters[source.table]}, which "
            f"leaves out events of {source.table}: publish it without one (`{alter} drop table {source.table}`, then "
            f"`{alter} add table {source.table}`), or name another publication"
        )
    published = publication.tables[source.table]
    if published is None:
        return publication.membership
    missing = [column for column in mapped(conn, source).values() if column.name not in published]
    if any(column.generated for column in missing):
        names = ", ".join(column.name for column in missing if column.generated)
        raise ConfigurationError(
            f"source.publication: {source.publication!r} leaves out the generated columns {names} of {source.table}: "
            f"run `{alter} set (publish_generated_columns = stored)`"
        )
    if missing:
        raise ConfigurationError(
            f"source.publication: {source.publication!r} leaves out the columns "
            f"{', '.join(column.name for column in missing)} of {source.table}: publish it without a list of columns "
            f"(`{alter} drop table {source.table}`, then `{alter} add table {source.table}`), or leave their fields "
            "out of source.columns and source.headers"
        )
    return publication.membership


_LEFT_OUT = """
    with recursive part as (
        select to_regclass(%s)::oid as oid, false as inherited
        union all
        select i.inhrelid, not c.relispartition
          from part join pg_inherits as i on i.inhparent = part.oid join pg_class as c on c.oid = i.inhrelid
         where not part.inherited)
    select c.oid::regclass::text,
           case when part.inherited then 'child' when c.relkind = 'f' then 'foreign' else 'unlogged' end
      from part join pg_class as c using (oid)
     where part.inherited or c.relkind = 'f' or c.relpersistence = 'u'
     order by part.inherited desc, 1 limit 1
"""


def require_streamable(conn: psycopg.Connection[Any], source: SourceSettings) -> None:
    """Raise ConfigurationError if the outbox has parts whose rows the stream of the outbox cannot bring."""
    if source.message_prefix is not None:
        return
    name = sql.Identifier(*source.table_name).as_string(conn)
    found = conn.execute(_LEFT_OUT, (name,)).fetchone()
    if found is None:
        return
    part, kind = found
    why = {
        "child": f"inherits from it (as the chunks of a hypertable do), and the WAL has its rows under the name {part}",
        "foreign": "is a foreign table, whose rows are not in the WAL of this server",
        "unlogged": "is unlogged, and its rows are not in the WAL",
    }[kind]
    raise ConfigurationError(
        f"source.table: rows of {source.table} lie in {part}, which {why}: partition the table declaratively with "
        "ordinary tables (`partition by`), or set source.mode: poll"
    )


def _refuse_leaves(
    conn: psycopg.Connection[Any], source: SourceSettings, publication: _Publication
) -> None:
    """Raise ConfigurationError if the publication names the partitions of the outbox instead of the outbox."""
    if publication.through_root:
        return
    leaves = conn.execute(
        "select n.nspname || '.' || c.relname from pg_partition_tree(to_regclass(%s)) t"
        " join pg_class c on c.oid = t.relid join pg_namespace n on n.oid = c.relnamespace",
        (sql.Identifier(*source.table_name).as_string(conn),),
    )
    if not publication.tables.keys().isdisjoint(name for (name,) in leaves):
        raise ConfigurationError(
            f"source.publication: {source.publication!r} publishes the partitions of {source.table} under their own "
            f"names: run `alter publication {source.publication} set (publish_via_partition_root = true)`"
        )


def has_publication(conn: psycopg.Connection[Any], source: SourceSettings) -> bool:
    """Whether the publication exists, whatever it publishes."""
    found = conn.execute("select from pg_publication where pubname = %s", (source.publication,))
    return bool(found.rowcount)


def ensure_publication(conn: psycopg.Connection[Any], source: SourceSettings) -> bool:
    """Create the publication of the outbox's inserts if it does not exist; returns whether it was created.

    Only inserts are published, so that deletes by retention are not streamed, and under the name of the root table.
    Raises ConfigurationError if it exists and does not publish the outbox as relay needs it.
    """
    if has_publication(conn, source):
        require_published(conn, source)
        return False
    if source.message_prefix is not None:
        conn.execute(
            sql.SQL("create publication {} with (publish = 'insert')").format(
                sql.Identifier(source.publication)
            )
        )
        return True
    generated = conn.info.server_version >= PUBLISHES_GENERATED and any(
        column.generated for column in mapped(conn, source).values()
    )
    conn.execute(
        sql.SQL(
            "create publication {} for table {} with (publish = 'insert', publish_via_partition_root = true{})"
        ).format(
            sql.Identifier(source.publication),
            sql.Identifier(*source.table_name),
            sql.SQL(", publish_generated_columns = stored" if generated else ""),
        )
    )
    return True


def drop_publication(conn: psycopg.Connection[object], name: str) -> None:
    """Drop the publication if it exists."""
    conn.execute(sql.SQL("drop publication if exists {}").format(sql.Identifier(name)))


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction of any database of the server. `pid` is None if it is prepared, otherwise `gid` is None.

    `seconds` is how long it has been open; None if the role may not see that.
    """

    pid: int | None
    application_name: str | None
    gid: str | None
    seconds: float | None

    def __str__(self) -> str:
        duration = "" if self.seconds is None else f", open for {self.seconds:.0f} s"
        if self.gid is not None:
            return f"the prepared transaction {self.gid!r}{duration}"
        return f"the transaction of process {self.pid} ({self.application_name or 'no name'}){duration}"


def oldest_open(conn: psycopg.Connection[Any]) -> OpenTransaction | None:
    """Return the open transaction with the oldest xid. Raises psycopg.Error.

    By its lock, which every role may see: pg_stat_activity shows the xids of other roles to few.
    """
    with conn.cursor(row_factory=class_row(OpenTransaction)) as cursor:
        return cursor.execute(
            """
            select l.pid, a.application_name, p.gid,
                   extract(epoch from clock_timestamp() - coalesce(a.xact_start, p.prepared))::float8 as seconds
              from pg_locks as l
              left join pg_stat_activity as a on a.pid = l.pid
              left join pg_prepared_xacts as p on p.transaction = l.transactionid
             where l.locktype = 'transactionid' and l.mode = 'ExclusiveLock' and l.granted
             order by age(l.transactionid) desc limit 1
            """
        ).fetchone()


@contextmanager
def reporting_blockers(dsn: Dsn, report_blockers: Callable[[str], None]) -> Iterator[None]:
    """Call `report_blockers` every REPORT_EVERY_SECONDS, in another thread, with the oldest open transaction."""
    with beside(partial(_report_oldest, dsn, report_blockers), "blockers"):
        yield


def _report_oldest(dsn: Dsn, report_blockers: Callable[[str], None], ended: Event) -> None:
    if ended.wait(REPORT_AFTER_SECONDS):
        return
    try:
        with connect(dsn) as conn:
            while not ended.is_set():
                oldest = oldest_open(conn)
                if oldest is not None:
                    report_blockers(str(oldest))
                ended.wait(REPORT_EVERY_SECONDS)
    except psycopg.Error as error:
        log.debug(
            "cannot read which transaction the slot waits for", extra={"fault": describe(error)}
        )
