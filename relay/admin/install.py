"""Installs relay in its databases: schema, publication, index, slot, group. `relay init`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial

import psycopg
from psycopg import sql
from tenacity import RetryCallState, Retrying, retry_if_exception, wait_random

from relay.admin import right_to_publish
from relay.admin.adoption import claim_schema, require_adoptable
from relay.admin.check_source import require_slot, require_table, unused_slots
from relay.admin.connections import administrators, on_one_server, source_sides
from relay.config.settings import Settings
from relay.config.source import OWN_OUTBOX, SourceSettings
from relay.faults import ConfigurationError, TransientFault, first_line
from relay.model.events import Lsn
from relay.model.snapshots import BEGINNING, Snapshot
from relay.retention import reader_positions
from relay.runtime.reporting import ProgressReport, silent
from relay.source.outbox.additions import (
    NOTIFY_TRIGGER,
    Indexed,
    create_index,
    drop_index,
    has_index,
    indexed_column,
    require_numbered,
    set_gapless,
    set_notify,
)
from relay.source.outbox.columns import require_readable
from relay.source.outbox.table import OutboxTable
from relay.source.server import (
    current_position,
    durable_position,
    give_replication_right,
    require_logical_wal,
)
from relay.source.stream.slot import (
    drop_publication,
    ensure_publication,
    ensure_slot,
    has_publication,
    reporting_blockers,
    require_streamable,
    slot_state,
)
from relay.source.witnesses import cover
from relay.store import (
    completeness,
    groups,
    index_builds,
    log_readers,
    migrations,
    own_rights,
    streams,
)
from relay.store.connections import Connection, Dsn
from relay.store.positions import offsets, sinks, snapshots


def grant_read(source: Connection, settings: Settings) -> bool:
    """Grant the service the right to read an outbox that is not relay's own; returns whether it may use its schema."""
    if not has_role(source):
        return True
    schema, table = settings.source.table_name
    may_use = "select has_schema_privilege('relay', %s, 'usage')"
    (usable,) = source.execute(may_use, (schema,)).fetchone() or (False,)
    if not usable:
        # The server only warns of what its role may not grant.
        source.execute(sql.SQL("grant usage on schema {} to relay").format(sql.Identifier(schema)))
        (usable,) = source.execute(may_use, (schema,)).fetchone() or (False,)
    source.execute(sql.SQL("grant select on {} to relay").format(sql.Identifier(schema, table)))
    return bool(usable)


def has_role(conn: Connection) -> bool:
    """Return whether the server has the role `relay`."""
    return bool(conn.execute("select from pg_roles where rolname = 'relay'").rowcount)


@dataclass(frozen=True, slots=True)
class Start:
    """The position at which a new group begins: `beginning`, `now` or a c_offset; None if the user gave none."""

    asked: str | None

    def require_possible(self, target: Connection, settings: Settings) -> None:
        """Raise ConfigurationError if the group exists already, or cannot begin at this position."""
        if self.asked is None:
            return
        if offsets.partition_count(target, settings.group):
            raise ConfigurationError(
                f"--from: the group {settings.group!r} has begun already: move it with "
                f"`relay offsets seek --to {self.asked}`"
            )
        if self.asked not in ("beginning", "now") and not self.asked.isdecimal():
            raise ConfigurationError(
                f"--from: {self.asked!r} is neither beginning, now, nor a c_offset"
            )
        if settings.source.mode == "wal" and self.asked != "now":
            raise ConfigurationError(
                "--from: rows older than the slot are read by polling, which source.mode: wal rules out: set it to auto"
            )

    def chain(self, source: Connection, settings: Settings) -> tuple[list[Snapshot], int]:
        """Return the snapshots with which the group begins, and the c_offset up to which it skips their difference.

        There are no snapshots if only the WAL is read. Raises ConfigurationError if rows have no c_offset.
        """
        if settings.source.mode == "wal":
            return [], offsets.FIRST
        now = current_position(source).snapshot
        if self.asked in (None, "now"):
            return [now], offsets.FIRST
        OutboxTable(settings).require_offsets(source, "run `relay init` again")
        first = offsets.FIRST if self.asked == "beginning" else int(self.asked or 1) - 1
        return [BEGINNING, now], first

    def __str__(self) -> str:
        if self.asked is None:
            return "now"
        return f"c_offset {self.asked}" if self.asked.isdecimal() else self.asked


log = logging.getLogger(__name__)

LOCK_TIMEOUT = "100ms"
"""How long a statement waits for the lock of a table.

While it waits, it blocks every later publisher: so the whole transaction is tried again instead.
"""
LOCK_SECONDS = 10.0
"""How long the installation is tried again while tables are locked."""

_SET_LOCK_TIMEOUT = "select set_config('lock_timeout', %s, true)"
_Removal = Callable[[], object]


def _may_pass(error: BaseException) -> bool:
    """Return whether a table was locked, or an installation in another database has changed the same roles."""
    if isinstance(error, psycopg.errors.UniqueViolation):
        return error.diag.schema_name == "pg_catalog"
    if isinstance(error, psycopg.errors.InternalError_):
        return "concurrently" in str(error)
    return isinstance(error, psycopg.errors.DuplicateObject | psycopg.errors.LockNotAvailable)


def _is_over(state: RetryCallState) -> bool:
    return (state.seconds_since_start or 0.0) > LOCK_SECONDS


_repeating = Retrying(
    retry=retry_if_exception(_may_pass),
    wait=wait_random(0.05, 0.5),
    stop=_is_over,
    reraise=True,
)


def initialise(
    settings: Settings,
    source_dsn: str | None = None,
    target_dsn: str | None = None,
    start: str | None = None,
    warn: Callable[[str], None] = log.warning,
    report: ProgressReport = silent,
    handlers_publish: bool | None = None,
) -> list[str]:
    """Install the objects that are missing; returns a line for each. A second call changes nothing.

    `handlers_publish` grants the role relay the right to publish, or revokes it; None leaves it as it is. `start` is
    where a new group begins: `beginning`, `now` (the default) or a c_offset. The DSNs, where given, belong to an
    administrator; the configured roles need fewer rights. `warn` receives the reasons why relay cannot stream, and what
    the server refuses, `report` the progress of long steps. All but the index and the slot is installed in one
    transaction of each database; if one of these two fails, the objects that this call has created are removed. Raises
    ConfigurationError.
    """
    with administrators(settings, source_dsn, target_dsn, warn) as (source, target):
        try:
            dsn = source_dsn or settings.source_dsn
            return _Installation(
                settings, source, target, dsn, Start(start), report, handlers_publish
            ).run(warn)
        except psycopg.errors.InsufficientPrivilege as error:
            raise ConfigurationError(
                f"source.dsn or target.dsn: {first_line(error)}: {_whom_to_be(source, settings)} "
                "(`relay init --admin-dsn …`), or grant the right"
            ) from None
        except psycopg.errors.ConfigurationLimitExceeded as error:
            raise ConfigurationError(
                f"source.dsn: {first_line(error)}: raise max_replication_slots and restart the server, or drop a slot"
            ) from None
        except psycopg.errors.LockNotAvailable as error:
            raise ConfigurationError(
                f"source.dsn or target.dsn: {first_line(error)}: a transaction has locked a table for "
                f"{LOCK_SECONDS:.0f} s, and to wait longer would block publishers; nothing was changed: run "
                "`relay init` again when it has ended"
            ) from None
        except psycopg.errors.ObjectNotInPrerequisiteState as error:
            raise ConfigurationError(first_line(error)) from None
        except psycopg.errors.RestrictViolation as error:
            raise ConfigurationError(f"source.dsn or target.dsn: {first_line(error)}") from None
        except psycopg.errors.WrongObjectType as error:
            raise ConfigurationError(
                f"source.dsn or target.dsn: {first_line(error)}: drop or rename it, relay needs a table of this name"
            ) from None


def _whom_to_be(source: Connection, settings: Settings) -> str:
    """What to do where a right is missing: only who owns an outbox may publish it and add columns to it."""
    owner = None
    if settings.source.message_prefix is None and not source.broken:
        owner = source.execute(
            """
            select quote_ident(pg_get_userbyid(c.relowner))
              from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
             where (n.nspname, c.relname) = (%s, %s) and not pg_has_role(c.relowner, 'usage')
            """,
            settings.source.table_name,
        ).fetchone()
    if owner is None:
        not_member = (
            source.broken
            or source.execute(
                "select where to_regrole('relay_owner') is not null and not pg_has_role('relay_owner', 'usage')"
            ).rowcount
        )
        member = (
            f"run `grant relay_owner to {source.info.user}` as a superuser, or "
            if not_member
            else ""
        )
        return f"{member}connect as an administrator"
    return (
        f"{settings.source.table} belongs to {owner[0]}: connect as {owner[0]}, as a member of it, or as an "
        "administrator"
    )


@dataclass(slots=True)
class _Installation:
    """One run of `relay init`: `done` has a line for each object that it has created so far.

    `refused` has one for each right that the server does not let it give.
    """

    settings: Settings
    source: Connection
    target: Connection
    source_dsn: Dsn
    start: Start
    report: ProgressReport = silent
    handlers_publish: bool | None = None
    done: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def run(self, warn: Callable[[str], None]) -> list[str]:
        settings, source = self.settings, self.source
        require_numbered(source, settings.source)
        streaming = self._can_stream(warn)
        with ExitStack() as undo:
            for role in _repeating(self._make_roles):
                undo.callback(_quietly, partial(own_rights.drop_role, source, role))
            removal = _repeating(self._install_whole)
            for remove in removal:
                undo.callback(_quietly, remove)
            for line in self.refused:
                warn(line)
            if settings.source.mode != "wal":
                self._ensure_index(undo, "c_xid", "for polling")
            if settings.source.index_offsets:
                self._ensure_index(undo, "c_offset", "for readers by number")
            if settings.source.mode != "wal":
                # A crash of the source must not lose a commit that the group's position counts as applied.
                durable_position(source)
            self._begin_history(warn)
            if settings.source.mode != "wal":
                self._take_witness(warn)
            if streaming and self._ensure_slot(warn):
                if settings.source.mode != "wal":
                    # In mode wal nobody polls: relay says that the slot does not continue where the former one ended.
                    self._join_slot()
                self.done.append(f"replication slot {settings.source.slot}")
            undo.pop_all()
        self._drop_unwanted_index()
        if settings.source.mode == "poll":
            for text in unused_slots(source, settings):
                warn(text)
        return self.done

    def _ensure_index(self, undo: ExitStack, field: Indexed, purpose: str) -> None:
        """Create an index of the outbox unless there is one; `undo` drops it again."""
        source, of = self.source, self.settings.source
        if has_index(source, of, field):
            return
        undo.callback(_quietly, partial(drop_index, source, of, field))
        with index_builds.reported(source, "building the index: pages", self.report):
            create_index(source, of, field)
        self.done.append(f"index of {of.table} on {indexed_column(of, field)}, {purpose}")

    def _drop_unwanted_index(self) -> None:
        source, of = self.source, self.settings.source
        if of.index_offsets or of.message_prefix is not None:
            return
        if drop_index(source, of, "c_offset"):
            column = indexed_column(of, "c_offset")
            self.done.append(f"index of {of.table} on {column} removed")

    def _begin_history(self, warn: Callable[[str], None]) -> None:
        """Take the witness of the database's history, to which the positions of readers refer."""
        self.source.execute("select relay.begin_history()")
        if not self.settings.source.owns_table:
            return
        bound = log_readers.bind(self.source)
        if bound:
            warn(
                f"readers: positions from before relay took witnesses, or of a dump of this server: {bound}: from now "
                "on relay knows another history of the source, but it cannot prove that they are of this one"
            )

    def _take_witness(self, warn: Callable[[str], None]) -> None:
        """Take the first witness of the group's positions."""
        source, group = self.source, self.settings.group
        origin = groups.origin(self.target, group)
        seen = current_position(source).snapshot
        if origin.witness is not None or seen.xmax < origin.xmax:
            return
        cover(source, self.target, group, seen)
        if origin.identifier is not None:
            warn(
                f"group: the positions of {group!r} are from before relay took witnesses: from now on it knows another "
                "history of the source, but it cannot prove that they are of this one"
            )

    def _ensure_slot(self, warn: Callable[[str], None]) -> bool:
        name = self.settings.source.slot

        def report_blockers(oldest: str) -> None:
            self.report(f"the slot waits for {oldest}")
            warn(
                f"source.slot: the slot {name!r} is created when all running transactions have ended; the oldest is "
                f"{oldest}: end it, or wait"
            )

        with reporting_blockers(self.source_dsn, report_blockers):
            return ensure_slot(self.source, name)

    def _join_slot(self) -> None:
        """Let the group poll the commits from before its slot."""
        group = self.settings.group
        seen = durable_position(self.source)
        state = slot_state(self.source, self.settings.source.slot)
        links = snapshots.chain(self.target, group)
        # Where the source is of another history relay says so when it starts.
        with suppress(TransientFault):
            cover(self.source, self.target, group, seen.snapshot)
        if (
            links
            and state
            and snapshots.append(self.target, group, links[-1], seen.snapshot, seen.lsn)
        ):
            groups.note_confirmed(self.target, group, Lsn.parse(state.confirmed_flush_lsn or "0/0"))

    def _can_stream(self, warn: Callable[[str], None]) -> bool:
        """Return whether relay can use a slot. Raises ConfigurationError if not, and source.mode rules out polling."""
        if self.settings.source.mode == "poll":
            return False
        try:
            require_logical_wal(self.source)
        except ConfigurationError as error:
            if self.settings.source.mode == "wal":
                raise
            warn(f"{error}; source.mode: auto polls until relay can read the WAL")
            return False
        require_slot(self.source, self.settings)
        return True

    def _make_roles(self) -> list[str]:
        """Create the roles if source and target are two databases of one server; returns those that are new.

        Roles belong to the server: otherwise the transactions in the two databases would wait for each other.
        """
        if self.target is self.source or not on_one_server(self.source, self.target):
            return []
        with self.source.transaction():
            self.source.execute(_SET_LOCK_TIMEOUT, (LOCK_TIMEOUT,))
            return own_rights.make_roles(self.source)

    @contextmanager
    def _transactions(self) -> Iterator[None]:
        """Run one transaction in each database; they commit one after the other."""
        other = nullcontext() if self.target is self.source else self.target.transaction()
        with self.source.transaction(), other:
            yield

    def _install_whole(self) -> list[_Removal]:
        self.done.clear()
        self.refused.clear()
        with self._transactions():
            for conn, _ in self._databases():
                conn.execute(_SET_LOCK_TIMEOUT, (LOCK_TIMEOUT,))
            return self._install()

    def _install(self) -> list[_Removal]:
        """Install schema, outbox, publication and group; returns the removals of new objects, the oldest first."""
        removal: list[_Removal] = []
        for conn, key in self._databases():
            migrations.lock(conn)
            if claim_schema(conn, key):
                removal.append(_removal_of_schema(conn))
        removal += self._install_outbox()
        self._apply(self.target, "target", "target.dsn")
        self._give_rights()
        removal += self._stream()
        removal += self._begin()
        self._begin_sinks()
        self._retain()
        self._let_publish()
        if self.settings.source.message_prefix is None:
            # Last, since publishers are blocked from here to the commit.
            self._set_gapless()
            self._set_notify()
        return removal

    def _give_rights(self) -> None:
        """Give again the rights that were lost since the files of the schema were applied."""
        sides = source_sides(self.settings)
        if self.target is self.source:
            self._repair(self.source, "source.dsn", (*sides, "target"))
        else:
            self._repair(self.source, "source.dsn", sides)
            self._repair(self.target, "target.dsn", ("target",))

    def _repair(self, conn: Connection, key: str, sides: Sequence[migrations.Side]) -> None:
        done, refused = own_rights.repair(conn, sides)
        self.done += done
        self.refused += [f"{key}: {line}" for line in refused]

    def _databases(self) -> list[tuple[Connection, str]]:
        source, target = (self.source, "source.dsn"), (self.target, "target.dsn")
        return [source] if self.source is self.target else [source, target]

    def _apply(self, conn: Connection, side: migrations.Side, key: str) -> list[str]:
        applied = migrations.install(conn, side, key)
        self.done += [f"schema file {name}" for name in applied]
        return applied

    def _install_outbox(self) -> list[_Removal]:
        source, settings = self.source, self.settings
        self._apply(source, "source", "source.dsn")
        if settings.source.message_prefix is not None:
            return []
        if settings.source.mode != "poll":
            require_streamable(source, settings.source)
        if not settings.source.owns_table:
            require_table(source, settings)
            require_readable(source, settings.source)
            _attach(source, settings)
            if not grant_read(source, settings):
                schema, _ = settings.source.table_name
                self.refused.append(
                    f"source.table: the role relay may not use the schema {schema}, and this role may not grant it: "
                    f"run `grant usage on schema {schema} to relay` as its owner"
                )
            return []
        existed = _has_own_outbox(source)
        adopting = not any(name.startswith("outbox/") for name in migrations.recorded(source))
        if existed:
            self._examine_outbox(adopting)
        self._apply(source, "outbox", "source.dsn")
        # Again: another session may have created the table in between.
        self._examine_outbox(adopting)
        _attach(source, settings)
        _limit_event_bytes(source, settings.source.max_event_bytes)
        return [] if existed else [_removal_of_outbox(source)]

    def _examine_outbox(self, adopting: bool) -> None:
        require_table(self.source, self.settings)
        require_readable(self.source, self.settings.source)
        if adopting:
            require_adoptable(self.source, OWN_OUTBOX, "source.table")

    def _stream(self) -> list[_Removal]:
        """Install the publication and the right to replicate, and record the slot."""
        source, of = self.source, self.settings.source
        if of.mode == "poll":
            return []
        streams.require_free(source, of.slot, self.settings.group)
        _require_unread(source, of)
        made = ensure_publication(source, of)
        removal: list[_Removal] = []
        if streams.record(source, of.slot, self.settings.group, of.publication if made else None):
            removal.append(lambda: streams.forget(source, of.slot))
        try:
            if give_replication_right(source, "relay"):
                self.done.append("right of the role relay to replicate")
        except ConfigurationError as error:
            self.refused.append(f"source.dsn: {error}")
        if made:
            removal.append(lambda: drop_publication(source, of.publication))
            self.done.append(f"publication {of.publication} of {of.outbox}")
        return removal

    def _set_notify(self) -> None:
        of, listens = self.settings.source, self.settings.poll.listen
        if not set_notify(self.source, of, listens):
            return
        self.done.append(
            f"trigger {NOTIFY_TRIGGER} {'on' if listens else 'removed from'} {of.table}"
        )

    def _set_gapless(self) -> None:
        of = self.settings.source
        gapless = of.offsets == "gapless"
        if set_gapless(self.source, of, gapless):
            self.done.append(
                f"c_offset of {of.table} {'without gaps' if gapless else 'from a sequence'}"
            )

    def _begin(self) -> list[_Removal]:
        """Store the offsets of a new group."""
        target, settings = self.target, self.settings
        offsets.require_partition_count(
            offsets.partition_count(target, settings.group), settings.group, settings.partitions
        )
        self.start.require_possible(target, settings)
        # Before the slot exists: commits in between are older than the slot, and are polled.
        if offsets.partition_count(target, settings.group):
            return []
        chain, polled = self.start.chain(self.source, settings)
        links = snapshots.begin(target, settings.group, chain)
        first = links[0].id if links else None
        created = offsets.create(target, settings.group, settings.partitions, first, polled)
        self.done.append(f"group {settings.group} with {created} partitions, from {self.start} on")
        return [
            lambda: offsets.remove(target, settings.group),
            lambda: sinks.remove(target, settings.group, settings.sink_handlers),
        ]

    def _begin_sinks(self) -> None:
        """Store the first positions of new sinks."""
        for name, handler in self.settings.sink_handlers.items():
            if sinks.begin(self.target, self.settings.group, name, handler.start):
                self.done.append(f"sink {name}, from {handler.start} on")
        completeness.expect(self.target, self.settings.group, self.settings.spark_handlers)

    def _retain(self) -> None:
        """Note positions for retention, and grant the right to remove events."""
        source, of = self.source, self.settings.source
        reader_positions.note(source, self.target, self.settings.group, of.table)
        if self.settings.retention.keep and reader_positions.retain(source, of):
            self.done.append(
                f"right of the role relay to remove events of {of.table} that are read"
            )

    def _let_publish(self) -> None:
        """Grant the right to publish, or revoke it, where the command says so."""
        wanted, of = self.handlers_publish, self.settings.source
        if wanted is None:
            return
        if not has_role(self.source):
            raise ConfigurationError(
                "--handlers-publish: the server has no role relay: create it, run `relay init` again, and connect as a "
                "member of it"
            )
        if right_to_publish.set_right(self.source, of, wanted):
            self.done.append(
                f"right of the role relay to publish into {of.table}{'' if wanted else ', revoked'}"
            )


def _has_own_outbox(conn: Connection) -> bool:
    row = conn.execute("select to_regclass(%s) is not null", (OWN_OUTBOX,)).fetchone()
    return bool(row and row[0])


def _require_unread(source: Connection, of: SourceSettings) -> None:
    """Raise ConfigurationError if the publication is missing while a process reads the slot.

    Of a commit that is open when the publication is made again, PostgreSQL 18 brings such a stream the rest only.
    """
    state = slot_state(source, of.slot)
    if state is not None and state.active and not has_publication(source, of):
        raise ConfigurationError(
            f"source.publication: {of.publication!r} is missing while process {state.active_pid} of the server sends "
            f"the slot {of.slot!r} to its reader: stop relay, run `relay init` again, and start relay; in mode auto it "
            "makes the publication again by itself"
        )


def _removal_of_schema(conn: Connection) -> _Removal:
    return lambda: conn.execute("drop schema relay cascade")


def _removal_of_outbox(source: Connection) -> _Removal:
    """Return the removal of the outbox, which keeps it if it has rows."""
    return lambda: source.execute(
        """
        do $$
        begin
            lock table public.outbox_message_t in access exclusive mode;
            if not exists (select from public.outbox_message_t) then
                drop table public.outbox_message_t;
            end if;
        end
        $$
        """
    )


def _quietly(remove: _Removal) -> None:
    """Call a removal and ignore its errors: the failure that caused it is reported."""
    with suppress(psycopg.Error):
        remove()


def _limit_event_bytes(source: Connection, limit: int) -> None:
    """Make relay's own table and `relay.publish` refuse larger events; existing rows stay."""
    source.execute(
        "select relay.limit_event_bytes(%(limit)s) where relay.max_event_bytes() <> %(limit)s",
        {"limit": limit},
    )


def _attach(source: Connection, settings: Settings) -> None:
    """Add the columns to an outbox that polling needs, and let its readers keep positions.

    Raises ConfigurationError if that is impossible.
    """
    if settings.source.mode == "wal":
        return
    table = sql.Identifier(*settings.source.table_name).as_string(source)
    source.execute("select relay.let_keep_positions(%s::regclass)", (table,))
    source.execute(
        "select relay.attach(%s::regclass, %s)", (table, settings.source.mapping["c_offset"])
    )
    OutboxTable(settings).require_marked(source)
