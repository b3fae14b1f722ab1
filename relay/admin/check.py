"""Checks configuration, source and target before a run: `relay check`. The source's checks are in `check_source`.

Also what the groups of one process share: their targets, its console, and the addresses at which it listens.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from threading import Event

import psycopg

from relay import handlers
from relay.admin import right_to_publish
from relay.admin.check_source import check_source
from relay.admin.connections import reach, require_schema
from relay.admin.findings import (
    Finding,
    Severity,
    finding_of,
    finding_of_error,
    rights_findings,
    schema_finding,
)
from relay.config.effects import Effects
from relay.config.files import Configuration, observed
from relay.config.handlers import (
    DeliveryHandler,
    HttpHandler,
    JdbcSettings,
    PythonHandler,
    QueueHandler,
)
from relay.config.settings import Address, QueueSettings, Settings, has_spark
from relay.event_types.registry import registered
from relay.faults import (
    ConfigurationError,
    RelayError,
    Unreachable,
    first_line,
    is_transient,
)
from relay.model.spool import require_writable
from relay.observe.traces import require_exporter
from relay.pipeline.retry_policy import RetryPolicy
from relay.pipeline.routing import shadowed
from relay.queues import configured
from relay.retention import restoration
from relay.retention.schedule import require_not_given_up
from relay.runtime.parts import SOON_SECONDS, Condition
from relay.runtime.retry import RetryUntilSuccess
from relay.sinks import Sink, Target, build_sinks
from relay.sinks.endpoint_lookup import Lookup
from relay.source.recognition import Recognition
from relay.spark.jvm import require_spark
from relay.store import (
    admission,
    connections,
    groups,
    own_rights,
    queues,
)
from relay.store.connections import INSTANCE, Connection, asking, database_identity
from relay.store.deferred import selection as deferred_selection
from relay.store.positions import offsets, sinks
from relay.store.presence import instances
from relay.store.session_settings import SessionKind, users_schemas

log = logging.getLogger(__name__)

_CLOSING_SECONDS = 5.0


def examine(settings: Settings, accept_configuration: bool = False) -> Iterator[Finding]:
    """Check everything that a run needs; yields the findings in the order in which to correct them.

    A run begins with the same findings, and refuses to start if one is an error. With `accept_configuration`, as with
    the option of `relay run`, its configuration may replace that of running instances.
    """
    examined = False
    try:
        with reach(settings.source_dsn, "source.dsn", bounded=True) as source:
            yield from check_source(source, settings)
            examined = True
            yield from _after_source(source, settings, accept_configuration)
    except psycopg.errors.InsufficientPrivilege as error:
        yield Finding(
            Severity.ERROR,
            "source",
            f"source.dsn: {error.diag.message_primary}: run `relay init`, which gives the role relay its rights "
            "again, and connect as a member of it",
        )
    except ConfigurationError as error:
        yield finding_of_error("source", error)
        if not examined and not settings.one_database:
            yield from _after_source(None, settings, accept_configuration)


def _after_source(source: Connection | None, settings: Settings, accept: bool) -> Iterator[Finding]:
    """Check all but the source. `source` is None if it cannot be reached."""
    if settings.needs_spark:
        installed = "Spark" if settings.spark.remote else "Spark and Java"
        yield finding_of("spark", f"installed: {installed}", require_spark, settings.spark)
    spark_handlers = settings.spark_handlers if has_spark() else {}
    try:
        built = handlers.build(settings.handlers, settings.source.sql_types)
        asyncio.run(_close(build_sinks(settings.handlers, target=Target.of(settings))))
        if spark_handlers:
            _build_spark_sinks(settings)
        for name, handler in settings.handlers.items():
            if isinstance(handler, PythonHandler | DeliveryHandler):
                RetryPolicy(name, handler.retry)
    except ConfigurationError as error:
        yield Finding(Severity.ERROR, "handlers", str(error))
        built = {}
    yield from _events(settings)
    yield from _routes(settings)
    unfit = restoration.unfit(settings)
    if unfit is not None:
        yield Finding(Severity.WARNING, "retention", f"retention.archive: {unfit}")
    yield finding_of(
        "spool", "its folder can be written", require_writable, settings.batch.spool_directory
    )
    if settings.observe.traces:
        yield finding_of("traces", "an exporter is installed", require_exporter)
    try:
        with reach(settings.target_dsn, "target.dsn", SessionKind.HANDLER, bounded=True) as conn:
            yield from _target(conn, source, settings, built, accept)
    except ConfigurationError as error:
        yield finding_of_error("target", error)
    except psycopg.errors.InsufficientPrivilege as error:
        message = error.diag.message_primary
        yield Finding(
            Severity.ERROR,
            "target",
            f"target.dsn: {message}: grant it, see sql/target/001_target.sql",
        )
    for name, handler in spark_handlers.items():
        if handler.jdbc is not None:
            yield _postgresql_table(name, handler.jdbc, handler.evolves)


def _postgresql_table(name: str, settings: JdbcSettings, evolves: bool) -> Finding:
    """Check the table of a Spark sink. A warning: it keeps the sink from going on, and nothing else from starting."""
    # Its imports take long.
    from relay.spark.writers.jdbc import JdbcWriter

    key = f"handlers.{name}.jdbc.dsn"
    try:
        with reach(settings.access, key, SessionKind.HANDLER, bounded=True) as conn:
            _require_writable(conn, key)
            JdbcWriter(name, settings, evolves).require(conn)
    except RelayError as error:
        return replace(finding_of_error("handler", error), level=Severity.WARNING)
    return Finding(Severity.OK, "handler", f"the table of {name} can be written")


def require(settings: Settings, accept_configuration: bool = False) -> None:
    """Raise ConfigurationError with a line for each error.

    Raises Unreachable if all errors are outages, and RelayError if none is one of the configuration.
    """
    findings = examine(settings, accept_configuration)
    errors = [finding for finding in findings if finding.level is Severity.ERROR]
    if not errors:
        return
    text = "\n".join(dict.fromkeys(finding.text for finding in errors))
    if all(each.passes for each in errors):
        raise Unreachable(text)
    of_configuration = any(each.exit_status == ConfigurationError.exit_status for each in errors)
    raise (ConfigurationError if of_configuration else RelayError)(text)


def require_when_reachable(
    settings: Settings, stopping: Event, accept_configuration: bool = False
) -> None:
    """Wait until source and target can be reached, then raise ConfigurationError with a line for each error."""
    condition = Condition(
        "start", log, "waiting for the database", "the database answers", SOON_SECONDS
    )
    retry = RetryUntilSuccess(
        stopping, condition, retryable=lambda error: isinstance(error, Unreachable)
    )
    retry(require, settings, accept_configuration)


def _events(settings: Settings) -> Iterator[Finding]:
    """Check the event types, if any are configured."""
    if settings.events:
        yield finding_of(
            "events", "their models and upcasters can be imported", registered, settings.events
        )


def _build_spark_sinks(settings: Settings) -> None:
    """Raise ConfigurationError if a Spark sink cannot be built."""
    # Its imports take long.
    from relay.spark.session import Session
    from relay.spark.sink_worker import SparkWorker

    session = Session(settings.spark)
    for name in settings.spark_handlers:
        SparkWorker(name, settings, session)


async def _close(built: Mapping[str, tuple[Sink, DeliveryHandler]]) -> None:
    """Close sinks that were not used. Raises ConfigurationError for one that cannot be closed."""
    for name, (sink, _) in built.items():
        try:
            async with asyncio.timeout(_CLOSING_SECONDS):
                await sink.close()
        except Exception as error:
            raise ConfigurationError(
                f"handlers.{name}: the sink cannot be closed before it was used: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error


def _routes(settings: Settings) -> Iterator[Finding]:
    routed = {name for route in settings.routes for name in route.handlers}
    for name in settings.handlers:
        if name not in routed:
            yield Finding(
                Severity.WARNING,
                "routes",
                f"handlers.{name}: no route leads to it: add one, or remove the handler",
            )
    for later, earlier in shadowed(settings.routes):
        yield Finding(
            Severity.ERROR,
            "routes",
            f"routes.{later}: never applies, since routes.{earlier} matches all of its events first: put it before "
            f"routes.{earlier}, or set continue: true there",
        )
    if not settings.routes and (settings.handlers or settings.unrouted != "ignore"):
        yield Finding(
            Severity.WARNING,
            "routes",
            f"routes: none is configured, so every event is unrouted ({settings.unrouted}): add a route",
        )


def _target(
    conn: Connection,
    source: Connection | None,
    settings: Settings,
    built: dict[str, handlers.Handler],
    accept: bool,
) -> Iterator[Finding]:
    writable = finding_of("target", "it can be written", _require_writable, conn, "target.dsn")
    yield writable
    if writable.level is Severity.ERROR:
        return
    schema = schema_finding(conn, "target", "target.dsn")
    yield schema
    if schema.level is Severity.OK:
        yield finding_of(
            "rights", "relay's own tables", own_rights.require, conn, ("target",), "target.dsn"
        )
        if not settings.one_database:
            yield from rights_findings(conn, ("target",), "target.dsn")
        yield finding_of(
            "group", f"{settings.partitions} partitions", require_group, conn, settings
        )
        yield from _open_schemas(conn)
        yield from _publications_of_all(conn)
        yield finding_of(
            "configuration",
            "no instance runs with another configuration that this one may not replace",
            admission.require_admissible,
            *(conn, settings.group, Effects.of(settings), accept),
        )
        if source is not None:
            yield from _position(conn, source, settings)
        yield from _former_handlers(conn, settings)
        yield from _sinks(conn, settings)
        yield from _queues(conn, settings)
        yield from right_to_publish.check(source, conn, settings)
    yield from _lookups(conn, settings)
    if built:
        temporary = finding_of(
            "rights", "temporary tables", own_rights.require_temporary, conn, "target.dsn"
        )
        yield temporary
        if temporary.level is Severity.ERROR:
            return
    for name, handler in built.items():
        yield _check_handler(conn, name, handler)


def _lookups(conn: Connection, settings: Settings) -> Iterator[Finding]:
    """Check the queries that find endpoints."""
    for name, handler in settings.handlers.items():
        if isinstance(handler, HttpHandler) and handler.endpoints and handler.endpoints.select:
            lookup = Lookup(name, handler.endpoints, Target.of(settings))
            yield finding_of(
                *("handler", f"the target accepts {name}'s lookup", lookup.check),
                *(conn, handler.columns),
            )


def _require_writable(conn: Connection, key: str) -> None:
    """Raise Unreachable if a database is read-only, which passes: relay waits for it."""
    try:
        connections.require_writable(conn)
    except psycopg.errors.ReadOnlySqlTransaction:
        raise Unreachable(
            f"{key}: the database is read-only, as a standby is, and one whose operator or provider has set "
            "default_transaction_read_only: connect to the primary, or reset that"
        ) from None


def _position(target: Connection, source: Connection, settings: Settings) -> Iterator[Finding]:
    """Check that the group may go on where it is: that retention has not given it up, nor the source lost events."""
    try:
        require_schema(source, settings)
    except ConfigurationError:
        # The source's own checks have reported it.
        return
    origin = groups.origin(target, settings.group)
    state = groups.read(target, settings.group)
    witnessed = state and state.witnessed_at
    proven = f", and the witness of {witnessed:%Y-%m-%d %H:%M:%S %Z}" if witnessed else ""
    try:
        kept = finding_of(
            "group",
            "events are kept for the group",
            require_not_given_up,
            *(source, target, settings.group),
        )
        valid = finding_of(
            "source",
            f"it has what the group has applied{proven}",
            Recognition(settings).require_valid,
            *(source, origin),
        )
    except psycopg.OperationalError:
        # The session of the source; a lost one is reported where the checks of the source end.
        return
    yield kept
    yield valid


def _open_schemas(conn: Connection) -> Iterator[Finding]:
    """Find schemas of handlers' search_path where everybody may create functions, which these sessions would call."""
    rows = conn.execute(
        """
        select quote_ident(nspname) from pg_namespace
         where nspname = any (%s)
           and exists (select from aclexplode(nspacl) where grantee = 0 and privilege_type = 'CREATE')
        """,
        (users_schemas(conn),),
    )
    for (schema,) in rows.fetchall():
        yield Finding(
            Severity.WARNING,
            "search_path",
            f"target.dsn: everybody may create functions in the schema {schema}, which handlers' sessions call with "
            f"relay's rights: run `revoke create on schema {schema} from public`, which PostgreSQL 15 has by default",
        )


def _publications_of_all(conn: Connection) -> Iterator[Finding]:
    """Find a publication of all tables, which refuses what workers do with messages: these have no replica identity."""
    rows = conn.execute(
        """
        select quote_ident(pubname) from pg_publication
         where puballtables and (pubdelete or pubupdate)
           and (select relreplident = 'd' from pg_class where oid = 'relay.queue_messages'::regclass)
         order by 1 limit 1
        """
    )
    for (name,) in rows.fetchall():
        yield Finding(
            Severity.WARNING,
            "queues",
            f"target.dsn: the publication {name} is of all tables, and keeps workers from taking messages: run "
            "`alter table relay.queue_messages replica identity full`, or make it of the tables that its readers need",
        )


def _former_handlers(conn: Connection, settings: Settings) -> Iterator[Finding]:
    """Find transactions that are deferred for a handler that the configuration no longer has."""
    deferred_for = deferred_selection.deferred_for_others(conn, settings.group, settings.handlers)
    for name, transactions in deferred_for.items():
        yield Finding(
            Severity.WARNING,
            "handlers",
            f"handlers.{name}: there is no such handler, but {transactions} deferred transactions failed in it: put it "
            "back, or the current routes decide which handlers apply them",
        )
    by_sink = deferred_selection.count_by_sink(conn, settings.group)
    for name in sorted(by_sink.keys() - {"", *settings.sink_handlers}):
        yield Finding(
            Severity.ERROR,
            "handlers",
            f"handlers.{name}: there is no such sink, but "
            f"{by_sink[name]} {'transaction is' if by_sink[name] == 1 else 'transactions are'} deferred for it: put it "
            f"back until `relay deferred list --sink {name}` shows none, or give them up with `relay deferred cancel`",
        )


def _sinks(conn: Connection, settings: Settings) -> Iterator[Finding]:
    """Find sinks that are no longer configured, and sinks that the WAL alone cannot feed."""
    for each in sinks.read(conn, settings.group, settings.sink_handlers):
        if each.state == sinks.GONE:
            yield Finding(
                Severity.WARNING,
                "handlers",
                f"handlers.{each.sink}: the sink is no longer configured, and events are not kept for it: put it back, "
                f"and it continues at its position, or run `relay sink drop {each.sink}`",
            )
        elif settings.source.mode == "wal":
            why = sinks.why_not_wal(each.sink, each.position, each.needs_outbox)
            if why is not None:
                yield Finding(Severity.ERROR, "sinks", why)


def _queues(conn: Connection, settings: Settings) -> Iterator[Finding]:
    """Check that the configured queues can be declared, and find those that are missing or no longer configured."""
    for name, queue in settings.queues.items():
        yield finding_of(
            "queues", f"{name} can be declared", _require_declarable, conn, settings, name, queue
        )
    for name, since, fault in queues.stopped(conn, settings.group):
        yield Finding(
            Severity.WARNING,
            "queues",
            f"the queue {name} is stopped, and lacks what was applied since {since:%Y-%m-%d %H:%M %Z}: {fault}: "
            f"declare it otherwise, then run `relay queue rebuild {name}`",
        )
    declared = {*settings.queues, *queues.names(conn, settings.group)}
    for name, handler in settings.handlers.items():
        if (
            isinstance(handler, QueueHandler)
            and (queue_name := handler.queue or name) not in declared
        ):
            yield Finding(
                Severity.WARNING,
                "queues",
                f"handlers.{name}.queue: there is no queue {queue_name!r}, and transactions with events for it wait: "
                "declare it under queues, or with relay.declare_queue",
            )
    for name in configured.no_longer_configured(conn, settings.group, settings.queues):
        yield Finding(
            Severity.WARNING,
            "queues",
            f"queues.{name}: the queue is no longer configured, and is filled as before: put it back, or run "
            f"`relay queue drop {name}`",
        )


def _require_declarable(
    conn: Connection, settings: Settings, name: str, queue: QueueSettings
) -> None:
    """Raise ConfigurationError if the target refuses a queue, and Unreachable if that cannot be found out now."""
    try:
        with conn.transaction(force_rollback=True):
            configured.declare(conn, settings.group, name, queue)
    except psycopg.Error as error:
        if conn.broken or not is_transient(error):
            raise
        raise Unreachable(f"queues.{name}: cannot be checked now: {first_line(error)}") from None


def require_group(conn: Connection, settings: Settings) -> None:
    """Raise ConfigurationError if the group is not initialised with the configured number of partitions."""
    stored = offsets.partition_count(conn, settings.group)
    if stored == 0:
        raise offsets.not_initialised(settings.group)
    offsets.require_partition_count(stored, settings.group, settings.partitions)


def _check_handler(conn: Connection, name: str, handler: handlers.Handler) -> Finding:
    try:
        handler.configure(conn)
        handler.check(conn)
    except RelayError as error:
        return Finding(Severity.ERROR, "handler", str(error))
    except psycopg.Error as error:
        if is_transient(error):
            passes = f"handlers.{name}: its statement cannot be checked now: {first_line(error)}"
            if isinstance(error, psycopg.errors.LockNotAvailable):
                passes += ": end the session that holds a table's lock, or wait"
            return finding_of_error("handler", Unreachable(passes))
        return Finding(
            Severity.ERROR,
            "handler",
            f"handlers.{name}: {first_line(error)}: grant what it needs",
        )
    return Finding(Severity.OK, "handler", f"the target accepts {name}")


def examine_process(configurations: Sequence[Configuration]) -> Iterator[Finding]:
    """Check what a process needs beside what each of its groups does."""
    if len(configurations) > 1:
        yield finding_of(
            "group", "no two have the same name and target", _require_own_targets, configurations
        )
    of = observed(configurations)
    if of.console is not None:
        from relay.console.server import console_server

        groups = [each.settings for each in configurations]
        yield finding_of(
            "console", "its packages are installed", console_server, groups, of.console
        )
        yield _address(configurations, "observe.console.listen", of.console.listen)
    if of.listen is not None:
        yield _address(configurations, "observe.listen", of.listen)
    for each in configurations:
        if each.settings.api is not None:
            from relay.api.server import api_server

            yield finding_of(
                "api", "its packages are installed", api_server, each.settings, each.settings.api
            )
            yield _address(configurations, "api.listen", each.settings.api.listen)


def same_target(one: Configuration, other: Configuration) -> ConfigurationError:
    """Return the error for two configurations of which a process cannot run both."""
    return ConfigurationError(
        f"{one.name} and {other.name}: both have the group {one.settings.group!r} in the same target: name another "
        "group in one of them"
    )


def _require_own_targets(configurations: Sequence[Configuration]) -> None:
    seen: dict[tuple[str, str], Configuration] = {}
    for each in configurations:
        try:
            with asking(each.settings.target_dsn) as conn:
                key = (database_identity(conn), each.settings.group)
        except psycopg.Error:
            # A target that cannot be reached is a finding of its group.
            continue
        other = seen.setdefault(key, each)
        if other is not each:
            raise same_target(other, each)


def _address(configurations: Sequence[Configuration], key: str, address: Address) -> Finding:
    """Check that relay can listen at an address, unless one that runs on this host listens there."""
    try:
        (family, *_, resolved), *_ = socket.getaddrinfo(
            *address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        socket.create_server(resolved[:2], family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE and _runs_here(configurations):
            return Finding(Severity.OK, key, f"{address} is in use, and relay runs on this host")
        # `create_server` adds the address to the reason.
        reason = str(error.strerror).partition(" (while")[0]
        return Finding(
            Severity.ERROR,
            key,
            f"{key}: cannot listen on {address}: {reason}: choose another address or port",
        )
    return Finding(Severity.OK, key, f"relay can listen on {address}")


def _runs_here(configurations: Sequence[Configuration]) -> bool:
    """Return whether an instance of one of the groups runs on this host."""
    host = INSTANCE.rpartition(":")[0]
    for each in configurations:
        try:
            with asking(each.settings.target_dsn) as conn:
                running = instances(conn, each.settings.group)
        except psycopg.Error:
            continue
        if any(name.rpartition(":")[0] == host for name in running):
            return True
    return False
