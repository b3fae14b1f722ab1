"""Removes the events of one host wherever relay stores them, and lists the copies that it cannot reach."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import LiteralString

from psycopg import sql

from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.model.events import Lsn
from relay.retention import reader_positions
from relay.runtime import reporting
from relay.source.server import current_position
from relay.source.stream.slot import slot_state
from relay.store import actions, dead_letters, locks
from relay.store.connections import Connection
from relay.store.positions import sinks
from relay.store.streams import slots_of
from relay.store.suspects import shortened

_SLOT_SECONDS = 60
"""How long the slot may take to pass what is committed when the erasure begins."""
_PAGES = 2_000
"""How many pages of a table are read in one database transaction."""


@dataclass(slots=True)
class ErasureReport:
    """The result of an erasure: how many rows were removed, by kind, and in words the copies that are `left`."""

    removed: dict[str, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


def erase(
    settings: Settings,
    source: Connection,
    target: Connection,
    host: str,
    force: bool = False,
    progress: reporting.ProgressReport = reporting.silent,
) -> ErasureReport:
    """Remove a host's events from the outbox and from relay's tables of the group.

    The role of `source` needs the right to delete from the outbox. `force` also removes events that are not applied
    yet, but for those that the slot still brings. Raises ConfigurationError if there are any of these, or `force` is
    false and there are others, and psycopg.Error.
    """
    reader_positions.note(source, target, settings.group, settings.source.table)
    has_table = settings.source.message_prefix is None
    report = ErasureReport()
    if has_table:
        unread = _unread(settings, source, host)
        if not force:
            _require_applied(settings, target, host, unread)
        _require_passed(settings, source, target, host, unread)
        report.left += _in_other_slots(settings, source, unread)
    if settings.source.mode == "wal":
        _await_slot(settings, source, host, progress)
    transactions = _transactions_of(settings, source, target, host) if has_table else []
    # The target comes first: after an interruption, the outbox still has the ids of the host's transactions.
    with target.transaction():
        # Retention leaves alone what is being erased.
        locks.lock_in_transaction(target, locks.done(settings.group))
        _erase_from_target(target, settings.group, host, transactions, report)
    if has_table:
        report.removed["outbox"] = sum(_erase_from_outbox(settings, source, host, progress))
        # What was read from the outbox meanwhile, such as for a resend.
        with target.transaction():
            locks.lock_in_transaction(target, locks.done(settings.group))
            report.removed["deferred transactions"] += _erase_deferred(target, settings.group, host)
    if settings.source.owns_table:
        report.removed["subscribers"] = _erase_subscribers(source, host)
    report.left += _declared(settings, source, target, host)
    report.left += _out_of_reach(settings)
    detail = {"host": host, "removed": report.removed, "force": force}
    actions.record(target, settings.group, "", "erase", None, detail)
    return report


def _unread(settings: Settings, source: Connection, host: str) -> list[tuple[str, str]]:
    """List the group and the name of each reader of the outbox that has not read events of a host; '' is a target."""
    return source.execute(
        sql.SQL(
            """
            select r.group_id, r.reader from relay.readers as r
             where r.given_up_at is null and r.snapshot is not null and coalesce(r.outbox, {outbox}) = {outbox}
               and exists (select from {table} as o where o.{host} = %s
                              and not pg_visible_in_snapshot(o.c_xid, r.snapshot))
             order by 1, 2
            """
        ).format(**_names(settings)),
        (host,),
    ).fetchall()


def _require_passed(
    settings: Settings,
    source: Connection,
    target: Connection,
    host: str,
    unread: Collection[tuple[str, str]],
) -> None:
    """Raise ConfigurationError where the slot still brings events of a host, for the target or a sink that it feeds.

    They are in the WAL, so that relay would apply them after the outbox had lost them.
    """
    if settings.source.mode != "auto" or slot_state(source, settings.source.slot) is None:
        return
    stored = sinks.read(target, settings.group, settings.sink_handlers)
    fed = {"", *(each.sink for each in stored if not each.needs_outbox)}
    for group, reader in unread:
        if group == settings.group and reader in fed:
            name = f"sink {reader}" if reader else "the target"
            raise ConfigurationError(
                f"--host: the slot {settings.source.slot!r} still brings events of {host} to {name}, which --force "
                "cannot remove: let relay apply them, or stop it and move the group past them with "
                "`relay offsets seek`, and run this again"
            )


def _await_slot(
    settings: Settings, source: Connection, host: str, progress: reporting.ProgressReport
) -> None:
    """Wait until the slot has passed all that is committed now. Raises ConfigurationError where it does not.

    With mode wal no snapshot says what of the host it still brings.
    """
    end = current_position(source).lsn
    for second in range(_SLOT_SECONDS):
        slot = slot_state(source, settings.source.slot)
        if slot is None or Lsn.parse(slot.confirmed_flush_lsn or "0/0") >= end:
            return
        if not slot.active:
            break
        progress("waiting for the slot: seconds", second, _SLOT_SECONDS)
        time.sleep(1)
    raise ConfigurationError(
        f"--host: the slot {settings.source.slot!r} may still bring events of {host}, which --force cannot remove: let "
        "relay apply them, or stop it and move the group past them with `relay offsets seek`, and run this again"
    )


def _in_other_slots(
    settings: Settings, source: Connection, unread: Collection[tuple[str, str]]
) -> Iterator[str]:
    """Name other groups whose slots may still bring what their readers have not read."""
    lagging = {group for group, _ in unread if group != settings.group}
    for group in sorted(lagging):
        if any(slot_state(source, slot) is not None for slot in slots_of(source, group)):
            yield f"what the slot of group {group} still brings: it applies that"


def _erase_subscribers(source: Connection, host: str) -> int:
    """Drop the subscribers of relay's readers that are named for a host, or have it in what they match."""
    removed = source.execute(
        sql.SQL(
            """
            delete from relay.log_subscribers as s using relay.log_conditions as c
             where c.id = s.condition_id
               and (s.name = %(host)s or %(host)s = any (s.texts)
                    or {params} or {match} or strpos(c.condition, to_json(%(host)s::text)::text) > 0)
            """
        ).format(params=_names_host("s.params"), match=_names_host("c.match")),
        {"host": host},
    ).rowcount
    source.execute(
        "delete from relay.log_conditions as c"
        " where not exists (select from relay.log_subscribers as s where s.condition_id = c.id)"
    )
    return removed


def _names_host(column: LiteralString) -> sql.Composed:
    """A condition: a JSON value has the host in it."""
    return sql.SQL(
        "coalesce(jsonb_path_exists({}, '$.** ? (@ == $host)', jsonb_build_object('host', %(host)s::text)), false)"
    ).format(sql.SQL(column))


def _declared(
    settings: Settings, source: Connection, target: Connection, host: str
) -> Iterator[str]:
    """Name the readers, queues and schedules of others that have the host in what they declare."""
    statement = """
        select name from relay.{} where {} or strpos(condition::text, to_json(%(host)s::text)::text) > 0 order by 1
    """
    either = sql.SQL("({} or {})").format(_names_host("match"), _names_host("params"))
    declared = [(target, "queues", "queue")]
    if settings.source.owns_table:
        declared.append((source, "log_readers", "reader"))
    for conn, table, kind in declared:
        query = sql.SQL(statement).format(sql.Identifier(table), either)
        for (name,) in conn.execute(query, {"host": host}):
            yield f"the {kind} {name}, whose match or where names the host"
    if settings.source.owns_table:
        query = sql.SQL("select name from relay.schedules where {} order by 1").format(
            _names_host("publish")
        )
        for (name,) in source.execute(query, {"host": host}):
            yield f"the schedule {name}, which publishes events of it: drop it with relay.drop_schedule"


def _require_applied(
    settings: Settings, target: Connection, host: str, unread: Sequence[tuple[str, str]]
) -> None:
    if unread:
        name = " ".join(filter(None, unread[0]))
        raise ConfigurationError(
            f"--host: events of {host} are not applied yet ({name}): let relay apply them, or give --force"
        )
    unapplied = target.execute(
        "select count(*) from relay.deferred where group_id = %s and not blocked and %s = any (hosts)",
        (settings.group, host),
    ).fetchone()
    if unapplied and unapplied[0]:
        raise ConfigurationError(
            f"--host: {unapplied[0]} deferred transactions of {host} are not applied yet: let relay apply them, run "
            "`relay deferred cancel`, or give --force"
        )


def _names(settings: Settings) -> dict[str, sql.Composable]:
    of = settings.source
    return {
        "table": sql.Identifier(*of.table_name),
        "host": sql.Identifier(of.mapping["host_id"]),
        "outbox": sql.Literal(of.table),
    }


def _transactions_of(
    settings: Settings, source: Connection, target: Connection, host: str
) -> list[str]:
    """List the ids of the host's business transactions, in the form of relay.suspects."""
    suspects = target.execute(
        "select exists (select from relay.suspects where group_id = %s)", (settings.group,)
    ).fetchone()
    column = settings.source.mapping["transaction_id"]
    if not suspects or not suspects[0] or not column:
        return []
    rows = source.execute(
        sql.SQL(
            "select distinct {id}::text from {table} where {host} = %s and {id} is not null"
        ).format(id=sql.Identifier(column), **_names(settings)),
        (host,),
    )
    return [shortened(str(each)) for (each,) in rows]


def _erase_messages(target: Connection, of: Mapping[str, object]) -> int:
    return sum(
        target.execute(
            sql.SQL(
                "delete from {} where host_id = %(host)s"
                " and not exists (select from relay.queues where id = queue_id and group_id <> %(group)s)"
            ).format(sql.Identifier("relay", table)),
            of,
        ).rowcount
        for table in ("queue_messages", "queue_done")
    )


def _erase_from_target(
    target: Connection, group: str, host: str, transactions: list[str], report: ErasureReport
) -> None:
    of = {"group": group, "host": host, "transactions": transactions}
    report.removed["dead letters"] = dead_letters.erase(target, group, host)
    report.removed["messages of queues"] = _erase_messages(target, of)
    report.removed["sagas"] = target.execute(
        """
        delete from relay.sagas where host_id = %(host)s
           and exists (select from relay.queues as q where q.name = saga and q.group_id = %(group)s)
        """,
        of,
    ).rowcount
    # What its sagas have left of themselves while those waited that had them.
    report.removed["messages of queues"] += _erase_messages(target, of)
    report.removed["deferred transactions"] = _erase_deferred(target, group, host)
    target.execute(
        """
        update relay.brakes set sample_transaction = null, sample_hosts = null, sample_exception = null
         where group_id = %(group)s and %(host)s = any (sample_hosts)
        """,
        of,
    )
    target.execute(
        "update relay.endpoints set host_id = null where group_id = %(group)s and host_id = %(host)s",
        of,
    )
    report.removed["requests to cancel"] = target.execute(
        "delete from relay.cancellations where host_id = %(host)s and group_id in ('', %(group)s)",
        of,
    ).rowcount
    report.removed["attempts"] = target.execute(
        "delete from relay.attempts where group_id = %(group)s and %(host)s = any (hosts)", of
    ).rowcount
    report.removed["suspects"] = target.execute(
        """
        delete from relay.suspects
         where group_id = %(group)s and substr(suspect, strpos(suspect, '/') + 1) = any (%(transactions)s::text[])
        """,
        of,
    ).rowcount
    report.removed["batches of Spark sinks"] = target.execute(
        "update relay.spark_batches set data = null where group_id = %(group)s and batch is null and data is not null",
        of,
    ).rowcount
    # The folders of a batch may be named after a host. What tells nothing is noted again with the next batch.
    target.execute(
        """
        update relay.spark_batches set last_batch = jsonb_set(last_batch, '{facts}', '{}')
         where group_id = %(group)s and strpos(last_batch::text, %(host)s) > 0
        """,
        of,
    )
    shared = target.execute(
        "select count(*) from relay.deferred where group_id = %(group)s and %(host)s = any (hosts)",
        of,
    ).fetchone()
    if shared and shared[0]:
        report.left.append(
            f"{shared[0]} deferred transactions that have events of other hosts too: run this again when they are "
            "applied, or give them up with `relay deferred cancel`"
        )
    for (sink,) in target.execute(
        """
        select sink from relay.spark_batches
         where group_id = %(group)s and batch is not null and data is not null order by 1
        """,
        of,
    ):
        report.left.append(f"the batch that {sink} writes now: run this again when it is written")


def _erase_deferred(target: Connection, group: str, host: str) -> int:
    return target.execute(
        "delete from relay.deferred where group_id = %s and hosts = array[%s::text]", (group, host)
    ).rowcount


def _erase_from_outbox(
    settings: Settings, source: Connection, host: str, progress: reporting.ProgressReport
) -> Iterator[int]:
    """Delete in ranges of pages, so that no database transaction lasts long; yields the number of rows of each."""
    tables = source.execute(
        """
        select n.nspname, c.relname, pg_relation_size(c.oid) / current_setting('block_size')::int
          from (select to_regclass(%(table)s)::oid as oid
                 union select relid::oid from pg_partition_tree(to_regclass(%(table)s))) as t
          join pg_class as c on c.oid = t.oid join pg_namespace as n on n.oid = c.relnamespace
         where c.relkind = 'r' order by 1, 2
        """,
        {"table": sql.Identifier(*settings.source.table_name).as_string(source)},
    ).fetchall()
    total, done = sum(int(pages) for *_, pages in tables), 0
    for schema, name, pages in tables:
        statement = sql.SQL(
            "delete from {table} where {host} = %s and ctid >= %s::tid and ctid < %s::tid"
        ).format(**{**_names(settings), "table": sql.Identifier(schema, name)})
        for first in range(0, int(pages) + 1, _PAGES):
            page_range = (host, f"({first},0)", f"({first + _PAGES},0)")
            progress("scanning the outbox: pages", done + first, total)
            yield source.execute(statement, page_range).rowcount
        done += int(pages)


def _out_of_reach(settings: Settings) -> Iterator[str]:
    for name, handler in settings.handlers.items():
        if name in settings.spark_handlers:
            archive = ", the archive" if name == settings.retention.archive else ""
            yield f"files and tables that {name} has written{archive}"
        elif name in settings.sink_handlers:
            yield f"what {name} has delivered ({handler.type})"
        else:
            yield f"what {name} has written to the target"
    if settings.source.mode != "poll":
        yield "the WAL, until the server recycles it"
    yield "archived WAL and backups of both databases"
    yield "files of Spark queries of your own"
