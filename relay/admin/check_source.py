"""Checks the source: server, outbox, role, publication, slot, and what polling needs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import psycopg
from psycopg import sql

from relay.admin import right_to_publish
from relay.admin.connections import source_sides
from relay.admin.findings import (
    Finding,
    Severity,
    finding_of,
    finding_of_error,
    rights_findings,
    schema_finding,
)
from relay.admin.readers import other_history
from relay.config.settings import Settings
from relay.config.source import SourceSettings
from relay.faults import ConfigurationError, Unreachable, first_line, refused_for_good
from relay.intake.configured import intakes
from relay.model.events import FIELDS
from relay.retention import partitions, reader_positions
from relay.schedules.ticking import declare
from relay.source.outbox import columns
from relay.source.outbox.additions import (
    COUNTER_TRIGGER,
    NOTIFY_TRIGGER,
    has_index,
    has_own_index,
    indexed_column,
    is_gapless,
    require_numbered,
    sends_notify,
)
from relay.source.outbox.table import OutboxTable, no_table
from relay.source.server import (
    require_functions,
    require_logical_wal,
    require_replication_right,
)
from relay.source.stream.slot import (
    oldest_open,
    require_ours,
    require_published,
    require_streamable,
    slot_state,
)
from relay.source.walsender import open_replication, require_asynchronous
from relay.store import (
    api_tokens,
    dead_letters,
    log_readers,
    own_rights,
    schedules,
    streams,
)
from relay.store.connections import POOLER_HINT, Connection, asking, leads_to_pooler
from relay.store.migrations import Side

REQUIRED_FIELDS = ("id", "host_id", "event_type", "payload")
"""The fields for which an outbox must have a column. relay's own outbox has a column for each field."""


def require_table(conn: Connection, settings: Settings) -> None:
    """Raise ConfigurationError if the outbox does not exist, or lacks a column that relay needs."""
    source = settings.source
    if source.message_prefix is not None:
        raise ConfigurationError(
            f"source.message_prefix: the outbox is {source.outbox}, but this command needs a table"
        )
    existing = columns.columns(conn, source.table_name)
    if not existing:
        raise no_table(source.table)
    required = _required_fields(settings)
    missing = [
        f"source.columns: the table {source.table} has no column {column!r} for {field}: "
        f"add it, or map the column that has it (columns: {{{field}: …}})"
        for field, column in source.mapping.items()
        if column and column not in existing and (field in required or source.columns.get(field))
    ]
    missing += [
        f"source.headers.{name}: the table {source.table} has no column {column!r}: add it, or name the column that "
        "has it"
        for name, column in source.headers.items()
        if column not in existing
    ]
    if missing:
        raise ConfigurationError("\n".join(missing))


def _required_fields(settings: Settings) -> tuple[str, ...]:
    if settings.source.owns_table:
        # relay.publish fills all of them; `relay init` adds deliver_at by itself.
        return tuple(field for field in FIELDS if field != "deliver_at")
    return REQUIRED_FIELDS


def _sides(settings: Settings) -> tuple[Side, ...]:
    """The parts of the schema that this database has."""
    return (*source_sides(settings), "target") if settings.one_database else source_sides(settings)


def check_source(conn: Connection, settings: Settings) -> Iterator[Finding]:
    """Check everything that a run needs of the source."""
    source = settings.source
    schemas = [schema_finding(conn, side, "source.dsn") for side in source_sides(settings)]
    yield from schemas
    if all(schema.level is Severity.OK for schema in schemas):
        found = finding_of(
            "rights",
            "relay's own tables",
            own_rights.require,
            conn,
            source_sides(settings),
            "source.dsn",
        )
        # Only retention and the notes of slots need them.
        yield replace(found, level=Severity.WARNING) if found.level is Severity.ERROR else found
        yield from rights_findings(conn, _sides(settings), "source.dsn")
        yield from _retention(conn, settings)
        if source.owns_table:
            yield from _readers(conn)
            yield from _schedules(conn, settings)
            if settings.intake:
                yield finding_of(
                    "intake", "the packages of its brokers are installed", intakes, settings
                )
                yield finding_of(
                    "intake", "relay may publish", right_to_publish.require, conn, "intake"
                )
            if settings.api is not None:
                yield from _api(conn, settings)
    functions = finding_of(
        "functions",
        "relay may call what it needs",
        require_functions,
        *(conn, source.mode != "poll"),
    )
    yield functions
    if functions.level is Severity.ERROR:
        return
    if leads_to_pooler(conn):
        yield Finding(Severity.WARNING, "pooler", f"source.dsn: a pooler answers: {POOLER_HINT}")
    if source.message_prefix is not None:
        yield from _own_slot(conn, source)
        yield from _stream(conn, settings)
        return
    yield finding_of("table", f"{source.table} has its columns", require_table, conn, settings)
    for problem in columns.problems(conn, source):
        level = Severity.WARNING if problem.readable else Severity.ERROR
        yield Finding(level, "columns", problem.text)
    if source.mode != "wal":
        yield finding_of(
            "rows",
            "no policy hides rows from the role",
            OutboxTable(settings).require_visible_rows,
            conn,
        )
        yield _marks(conn, settings)
        if columns.columns(conn, source.table_name):
            yield _index(conn, settings)
    yield _offsets(conn, settings)
    if columns.columns(conn, source.table_name):
        yield _offset_index(conn, source)
    if source.mode == "auto" and not source.owns_table:
        yield _updates(conn, settings)
    yield _notify(conn, settings)
    if source.mode == "poll":
        for text in unused_slots(conn, settings):
            yield Finding(Severity.WARNING, "slot", text)
    else:
        yield finding_of("parts", "the WAL has all of its rows", require_streamable, conn, source)
        yield from _own_slot(conn, source)
        for finding in _stream(conn, settings):
            # Without the WAL, relay polls: no error keeps it from starting.
            downgraded = source.mode == "auto" and finding.level is Severity.ERROR
            yield replace(finding, level=Severity.WARNING) if downgraded else finding


def _api(conn: Connection, settings: Settings) -> Iterator[Finding]:
    """Check what the HTTP API needs of the source. Nothing of that keeps relay from starting."""
    rights = {right for token, _ in api_tokens.valid(conn).values() for right in token.rights}
    if not rights:
        yield Finding(
            Severity.WARNING,
            "api",
            "no token is valid, so that every request is refused: create one with `relay token create`",
        )
    if "publish" in rights:
        found = finding_of("api", "relay may publish", right_to_publish.require, conn, "api")
        # Reading goes on.
        yield replace(found, level=Severity.WARNING) if found.level is Severity.ERROR else found
    if settings.source.mode == "wal" and not has_index(conn, settings.source, "c_xid"):
        yield Finding(
            Severity.WARNING,
            "api",
            f"{settings.source.table} has no index on c_xid, so that pages, streams and answers read the whole table: "
            "run `relay init` with source.mode: auto, or create one",
        )


def _schedules(conn: Connection, settings: Settings) -> Iterator[Finding]:
    """Check that the configured schedules can be declared, and find those that stand still."""
    if settings.schedules:
        yield finding_of("schedules", "they can be declared", _require_schedules, conn, settings)
    for each in schedules.listed(conn):
        if each.state == "over" and not each.published:
            yield Finding(
                Severity.WARNING,
                "schedules",
                f"{each.name}: its time had passed when it was declared, so it publishes nothing: give it another time",
            )
        if each.fault is not None:
            yield Finding(
                Severity.WARNING,
                "schedules",
                f"{each.name}: stands still: {each.fault}: declare it again with relay.declare_schedule",
            )


def _require_schedules(conn: Connection, settings: Settings) -> None:
    """Raise ConfigurationError if the source refuses a schedule."""
    with conn.transaction(force_rollback=True):
        declare(conn, settings)


def _stream(conn: Connection, settings: Settings) -> Iterator[Finding]:
    yield finding_of("wal_level", "the server writes logical WAL", require_logical_wal, conn)
    yield _role(conn)
    yield finding_of("replication", "a stream can be opened", require_stream, settings)
    yield _publication(conn, settings)
    yield finding_of("commits", "no commit waits for relay's stream", require_asynchronous, conn)
    yield from _slot(conn, settings)


def require_stream(settings: Settings) -> None:
    """Raise ConfigurationError unless the server opens a replication connection; Unreachable for an outage."""
    try:
        with open_replication(settings) as conn:
            conn.execute("IDENTIFY_SYSTEM")
    except (psycopg.OperationalError, psycopg.errors.SyntaxError) as error:
        first = first_line(error).removeprefix("connection failed: ")
        problem = f"source.dsn: no replication connection: {first}"
        if isinstance(error, psycopg.errors.SyntaxError) or "startup parameter" in first:
            raise ConfigurationError(f"{problem}: {POOLER_HINT}") from None
        if refused_for_good(error):
            raise ConfigurationError(
                f"{problem}: let pg_hba.conf and the role's attributes allow it, see docs/security.md"
            ) from None
        raise Unreachable(f"{problem}: free a walsender, or start the server") from None


def _marks(conn: Connection, settings: Settings) -> Finding:
    rows = OutboxTable(settings)

    def dead(events: Sequence[str]) -> Collection[str]:
        # A target that cannot be reached is a finding of its own.
        with suppress(psycopg.Error), asking(settings.target_dsn) as target:
            return dead_letters.dead_of(target, settings.group, events)
        return ()

    def require(conn: Connection) -> None:
        rows.require_marked(conn)
        rows.require_own_xids(conn, dead)

    return finding_of(
        "positions", "its rows have the xid of the transaction that inserted them", require, conn
    )


def _index(conn: Connection, settings: Settings) -> Finding:
    if has_index(conn, settings.source, "c_xid"):
        return Finding(Severity.OK, "index", "polling reads only new rows")
    return Finding(
        Severity.WARNING,
        "index",
        f"source.table: {settings.source.table} has no index on c_xid, so polling reads the whole table for each "
        "window: run `relay init`",
    )


def _offsets(conn: Connection, settings: Settings) -> Finding:
    source = settings.source
    try:
        require_numbered(conn, source)
    except ConfigurationError as error:
        return finding_of_error("offsets", error)
    gapless = source.offsets == "gapless"
    return _installed(
        "offsets",
        gapless,
        is_gapless(conn, source),
        ok="numbers without gaps: publishers take turns" if gapless else "publishers do not wait",
        missing=f"source.offsets: is gapless, but {source.table} has no trigger {COUNTER_TRIGGER}, so its numbers have "
        "gaps: run `relay init`",
        unwanted=f"source.offsets: is sequence, but with the trigger {COUNTER_TRIGGER} of {source.table} publishers "
        "still take turns: run `relay init`, which removes it, or set source.offsets: gapless",
    )


def _offset_index(conn: Connection, source: SourceSettings) -> Finding:
    column = indexed_column(source, "c_offset")
    wanted = source.index_offsets
    return _installed(
        "index",
        wanted,
        (has_index if wanted else has_own_index)(conn, source, "c_offset"),
        ok=f"{column} is indexed" if wanted else f"publishers pay for no index on {column}",
        missing=f"source.index_offsets: {source.table} has no index on {column}, so whoever reads in its order reads "
        "the whole table: run `relay init`",
        unwanted=f"source.index_offsets: is false, but publishers still pay for relay's index of {source.table} on "
        f"{column}: run `relay init`, which removes it, or set source.index_offsets: true",
    )


def _updates(conn: Connection, settings: Settings) -> Finding:
    """Report whether rows are updated: the WAL brings them as they were inserted, polling as they are by then."""
    source = settings.source
    ((updates,),) = conn.execute(
        """
        select coalesce(sum(n_tup_upd), 0)::bigint from pg_stat_all_tables
         where relid = to_regclass(%(table)s) or relid in (select relid from pg_partition_tree(to_regclass(%(table)s)))
        """,
        {"table": sql.Identifier(*source.table_name).as_string(conn)},
    )
    if not updates:
        return Finding(Severity.OK, "updates", "its rows are not updated")
    return Finding(
        Severity.OK,
        "updates",
        f"rows of {source.table} were updated ({updates} so far): relay delivers them as they were inserted, and those "
        "that it polls, after an outage, as they are by then: update no column that relay reads",
    )


def _notify(conn: Connection, settings: Settings) -> Finding:
    table, listens = settings.source.table, settings.poll.listen
    return _installed(
        "notify",
        listens,
        sends_notify(conn, settings.source),
        ok="inserts wake relay while it polls" if listens else "inserts send no NOTIFY",
        missing=f"poll.listen: {table} has no trigger {NOTIFY_TRIGGER}, so no notification wakes polling: run "
        "`relay init`",
        unwanted=f"poll.listen: is false, but the trigger {NOTIFY_TRIGGER} of {table} still sends a NOTIFY with each "
        "insert: run `relay init`, which removes it, or set poll.listen: true if another group listens",
    )


def _installed(
    subject: str, wanted: bool, installed: bool, ok: str, missing: str, unwanted: str
) -> Finding:
    """Compare a setting with the trigger or index that it needs."""
    if wanted == installed:
        return Finding(Severity.OK, subject, ok)
    return Finding(Severity.WARNING, subject, missing if wanted else unwanted)


def _role(conn: Connection) -> Finding:
    return finding_of("role", f"{conn.info.user} may replicate", require_replication_right, conn)


def _publication(conn: Connection, settings: Settings) -> Finding:
    source = settings.source
    published = f"{source.publication} publishes {source.outbox}"
    return finding_of("publication", published, require_published, conn, source)


def _own_slot(conn: Connection, source: SourceSettings) -> Iterator[Finding]:
    """Check a slot that exists: relay neither reads one that is not its own, nor polls beside it."""
    if (state := slot_state(conn, source.slot)) is not None:
        passed = f"relay may read {source.slot}"
        yield finding_of("slot", passed, require_ours, state, conn.info.dbname)


def _slot(conn: Connection, settings: Settings) -> Iterator[Finding]:
    name = settings.source.slot
    state = slot_state(conn, name)
    if state is None:
        yield Finding(
            Severity.ERROR,
            "slot",
            f"source.slot: there is no replication slot {name!r}: run `relay init`",
        )
        yield _room(conn, "max_replication_slots", "select count(*) from pg_replication_slots")
    else:
        progress = f"{name} {'is being created' if state.creating else 'exists'}"
        yield Finding(Severity.OK, "slot", progress)
        if state.lost:
            yield Finding(
                Severity.ERROR,
                "slot",
                f"source.slot: {name!r} can serve no more ({state.invalidation_reason}): run relay with source.mode: "
                "auto, which recreates it and reads by polling what it lacks",
            )
    if state is not None and state.creating:
        yield Finding(
            Severity.WARNING,
            "slot",
            f"source.slot: {name!r} is still being created by process {state.active_pid}, which waits for all "
            f"running transactions; the oldest is {oldest_open(conn) or 'not known'}: end it, or wait",
        )
    elif state is not None and state.active:
        yield Finding(
            Severity.WARNING,
            "slot",
            f"{name} is read by process {state.active_pid}: a second relay waits, and takes over when that ends",
        )
    else:
        yield _room(conn, "max_wal_senders", "select count(*) from pg_stat_replication")


def unused_slots(conn: Connection, settings: Settings) -> Iterator[str]:
    """Yield a line for each slot that a group which only polls has from a former mode, and that no process reads."""
    slots: list[str] = []
    # A role that an administrator created may lack the right.
    with suppress(psycopg.errors.InsufficientPrivilege):
        slots = streams.slots_of(conn, settings.group)
    for slot in slots:
        state = slot_state(conn, slot)
        if state is not None and state.database == conn.info.dbname and not state.active:
            yield (
                f"source.mode: is poll, but the slot {slot!r} of the group {settings.group!r} still exists, and "
                f"retains WAL for ever ({state.retained_bytes} bytes now): run "
                f"`select pg_drop_replication_slot('{slot}')`, or set source.mode: auto again"
            )


def require_slot(conn: Connection, settings: Settings) -> None:
    """Raise ConfigurationError unless the server has the slot for relay, or can create it."""
    name = settings.source.slot
    state = slot_state(conn, name)
    if state is not None:
        require_ours(state, conn.info.dbname)
        return
    for finding in (
        _role(conn),
        _room(conn, "max_replication_slots", "select count(*) from pg_replication_slots"),
    ):
        if finding.level is Severity.ERROR:
            raise ConfigurationError(finding.text)


def _room(conn: Connection, setting: str, used: str) -> Finding:
    limit = conn.execute("select current_setting(%s)::int", (setting,)).fetchone()
    in_use = conn.execute(used.encode()).fetchone()
    if limit and in_use and in_use[0] >= limit[0]:
        return Finding(
            Severity.ERROR,
            setting,
            f"source.dsn: all {limit[0]} of {setting} are in use: raise it and restart the server, or free one",
        )
    return Finding(
        Severity.OK,
        setting,
        f"{in_use[0] if in_use else 0} of {limit[0] if limit else 0} are in use",
    )


def _readers(conn: Connection) -> Iterator[Finding]:
    """Find readers of the log whose positions are of another history of the database."""
    if not log_readers.has_history(conn):
        yield Finding(
            Severity.WARNING,
            "readers",
            "source.dsn: the database has no history of its own yet, as after a dump was restored into it: "
            "run `relay init`",
        )
    for name in log_readers.of_other_histories(conn):
        yield Finding(Severity.WARNING, "readers", other_history(name))


def _retention(conn: Connection, settings: Settings) -> Iterator[Finding]:
    """Check the right to remove events; find the remains of killed commands and readers that were given up."""
    table, keep = settings.source.table, settings.retention.keep
    if keep is not None and partitions.retained(conn, table) is None:
        yield Finding(
            Severity.WARNING,
            "retention",
            f"retention.keep: the role relay has no right to remove events of {table}: run `relay init`",
        )
    for left in partitions.unfinished(conn, table):
        yield Finding(
            Severity.WARNING,
            "retention",
            f"source.table: {left.partition} refuses events from {left.end} on, because a command was "
            f"killed: {left.hint}",
        )
    for name in reader_positions.given_up_readers(conn):
        yield Finding(
            Severity.WARNING,
            "retention",
            f"retention.max_lag: the reader {name} was given up: move it with `relay sink seek` or "
            "`relay offsets seek`, or drop it",
        )
