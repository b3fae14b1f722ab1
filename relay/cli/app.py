"""The commands. No logic of their own."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import psycopg
import typer

from relay import __version__
from relay.cli.console import console
from relay.cli.deferred import deferred
from relay.cli.dlq import dlq
from relay.cli.options import (
    AdminFileOption,
    AdminOption,
    ConfigOption,
    JsonOption,
    ReasonOption,
    TargetAdminFileOption,
    TargetAdminOption,
    YesOption,
    out,
    warn,
    with_options,
)
from relay.cli.progress import progress
from relay.cli.retention import EveryOption, erase, partition, restore
from relay.cli.schema import schema
from relay.cli.sinks import sink
from relay.cli.spark import spark
from relay.cli.tables import print_facts, print_table
from relay.cli.top import top
from relay.config.dsn import administrator_dsn
from relay.config.files import Configuration, for_each, load, load_all, observed, require_one
from relay.faults import ConfigurationError, RelayError, first_line
from relay.logs import LogFormat, configure

if TYPE_CHECKING:
    from relay.admin.check import Finding
    from relay.config.settings import Settings

app = typer.Typer(
    help="Carries committed outbox events from PostgreSQL's WAL to handlers, in order and effectively once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(dlq, name="dlq")
app.add_typer(deferred, name="deferred")
app.add_typer(sink, name="sink")
app.add_typer(schema, name="schema")
app.add_typer(spark, name="spark")
app.command()(console)
app.command()(partition)
app.command()(restore)
app.command()(erase)
app.command()(top)
offsets = typer.Typer(
    help="Where a group stands, and how a stopped one is moved.", no_args_is_help=True
)
app.add_typer(offsets, name="offsets")


def main() -> None:
    """Run the command line. A fault is one line a fault on standard error, never a traceback."""
    try:
        app()
    except RelayError as error:
        _fail(str(error), error.exit_status)
    except psycopg.Error as error:
        _fail(f"the database refuses: {first_line(error)}", 1)
    except BrokenPipeError:
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(text: str, status: int) -> None:
    for line in text.splitlines():
        print(f"relay: {line}", file=sys.stderr)
    sys.exit(status)


def _leave_on_signals() -> None:
    """Until a service takes the signals over, SIGTERM and SIGINT end the process at once: nothing is in flight yet."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))


def _version(asked: bool) -> None:
    if asked:
        out.print(f"relay {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Carries committed outbox events from PostgreSQL's WAL to handlers, in order and effectively once."""


@app.command()
def init(
    context: typer.Context,
    config: ConfigOption = None,
    admin_dsn: AdminOption = None,
    admin_dsn_file: AdminFileOption = None,
    target_admin_dsn: TargetAdminOption = None,
    target_admin_dsn_file: TargetAdminFileOption = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="beginning|now|OFFSET",
            help="Where a new group begins; default now. Rows older than the slot are read by polling.",
        ),
    ] = None,
    every: EveryOption = None,
) -> None:
    """Install schema, publication, slot and group; doing it twice changes nothing."""
    from relay.admin.install import initialise
    from relay.admin.partitioning import partition_new

    admin = administrator_dsn(admin_dsn, admin_dsn_file, "--admin-dsn")
    target_admin = administrator_dsn(target_admin_dsn, target_admin_dsn_file, "--target-admin-dsn")
    if admin is not None:
        require_one(load_all(config), "source", "--admin-dsn")
    if target_admin is not None:
        require_one(load_all(config), "target", "--target-admin-dsn")

    def install(settings: Settings) -> None:
        try:
            with progress() as report:
                done = initialise(
                    settings, admin, target_admin, start=start, warn=warn, report=report
                )
            if every is not None:
                done += partition_new(settings, every, admin)
        except ConfigurationError as error:
            raise with_options(error, context) from None
        for line in done:
            print(f"created {line}")
        if not done:
            print("everything is there already")

    for_each(config, install)


@app.command()
def check(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Look at everything that a run needs; every finding says what to do. Exit status 2 if something is wrong."""
    from relay.admin.check import Severity, examine

    def examine_group(settings: Settings) -> list[tuple[str, Finding]]:
        found = list(examine(settings))
        if not as_json:
            _print_findings(found)
        return [(settings.group, finding) for finding in found]

    groups = for_each(config, examine_group, heading=not as_json)
    found = [each for group in groups for each in group]
    if as_json:
        named = len(groups) > 1
        print(
            json.dumps(
                [
                    ({"group": group} if named else {})
                    | {"level": f.level, "subject": f.subject, "text": f.text}
                    for group, f in found
                ],
                indent=2,
            )
        )
    if any(finding.level is Severity.ERROR for _, finding in found):
        raise typer.Exit(2)


def _print_findings(found: list[Finding]) -> None:
    for finding in found:
        stream = sys.stderr if finding.level == "error" else sys.stdout
        for line in finding.text.splitlines():
            print(f"{finding.level:8} {finding.subject:22} {line}", file=stream)


@app.command()
def run(
    config: ConfigOption = None,
    log_format: Annotated[
        LogFormat, typer.Option(help="How log lines are written.")
    ] = LogFormat.TEXT,
    log_level: Annotated[
        str, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")
    ] = "info",
    accept_configuration: Annotated[
        bool,
        typer.Option(
            "--accept-configuration",
            help="Replace the configuration of running instances of the group; they end.",
        ),
    ] = False,
) -> None:
    """Relay in the foreground until SIGTERM or SIGINT."""
    _leave_on_signals()
    # These take half a second to import.
    from relay.services import Services

    if log_level.lower() not in ("debug", "info", "warning", "error"):
        raise ConfigurationError(f"--log-level: {log_level!r} is not debug, info, warning or error")
    configure(log_format, log_level)
    configurations = load_all(config)
    with _console_of(configurations):
        Services(configurations, accept_configuration).run_in_foreground()


def _console_of(configurations: Sequence[Configuration]) -> AbstractContextManager[object]:
    """What serves the console of some groups beside relay; nothing where none is configured."""
    console = observed(configurations).console
    if console is None:
        return nullcontext()
    from relay.console.server import Server

    return Server([each.settings for each in configurations], console)


@app.command()
def status(
    config: ConfigOption = None,
    as_json: JsonOption = False,
    alive: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Exit with status 1, and a line for each reason, unless an instance runs and reads the slot.",
        ),
    ] = False,
    max_lag_bytes: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Checks the unconfirmed WAL; --check is implied, here and below.",
        ),
    ] = None,
    max_lag_seconds: Annotated[
        float | None,
        typer.Option(min=0, metavar="N", help="Checks the age of the oldest unread event."),
    ] = None,
    max_sink_lag_seconds: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="N", help="Checks the age of the oldest event that a sink has not read."
        ),
    ] = None,
    max_deferred: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Checks the deferred transactions.")
    ] = None,
    max_dead: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Checks the dead letters.")
    ] = None,
) -> None:
    """Show slot, partitions, sinks and dead letters."""
    from relay.admin import sinks
    from relay.admin.status import lag_seconds, read
    from relay.observe.health import Limits, failures

    limits = Limits(max_lag_bytes, max_lag_seconds, max_sink_lag_seconds, max_deferred, max_dead)
    checks = alive or limits != Limits()

    def show(settings: Settings) -> tuple[dict[str, Any], list[str]]:
        found = read(settings)
        if not as_json:
            _print_status(found, settings.source.mode)
        document = {"group": settings.group, **found.as_json()}
        if not checks:
            return document, []
        lag = None if max_lag_seconds is None else lag_seconds(settings, found.partitions)
        sink_lags = {}
        if max_sink_lag_seconds is not None:
            sink_lags = sinks.lag_seconds(sinks.listed(settings))
        failed = failures(found, settings.group, limits, lag, sink_lags)
        return document, [f"group {settings.group}: {line}" if several else line for line in failed]

    several = len(load_all(config)) > 1
    shown = for_each(config, show, heading=not as_json)
    if as_json:
        documents = [document for document, _ in shown]
        print(json.dumps(documents if len(documents) > 1 else documents[0], indent=2))
    if failed := [line for _, lines in shown for line in lines]:
        _fail("\n".join(failed), 1)


def _print_status(found: Any, mode: str) -> None:
    facts: list[tuple[str, object]] = [("source", found.source_mode)]
    if found.source_reason:
        facts.append(("reason", found.source_reason))
    facts.append(("active", found.active or "nobody"))
    standby = [name for name in found.instances if name != found.active]
    if standby:
        facts.append(("others", ", ".join(standby)))
    slot = found.slot
    if slot is None:
        facts.append(("slot", "none" if mode == "poll" else "missing: run `relay check`"))
    else:
        facts += _slot_facts(slot, found.slot_waits_for)
    facts.append(("dead letters", found.dead_letters))
    summary = found.deferred
    facts.append(("deferred", f"{summary.transactions} transactions, {summary.holding} holding"))
    facts += [("", _why(reason)) for reason in summary.reasons]
    for each in found.braked:
        since = f"since {each.braked_at:%Y-%m-%d %H:%M:%S %Z}, after {each.deaths} dead letters in a row"
        facts.append((f"stopped: {each.handler}", f"{each.fault}, {since}"))
    facts += [(f"sink {each.sink}", _sink_state(each)) for each in found.sinks]
    for each in found.engines:
        since = f"since {each.since:%Y-%m-%d %H:%M:%S %Z}: {each.reason}"
        facts.append(
            (f"engine {each.engine}", f"{each.batches} batches, {each.events} events {since}")
        )
    facts += [(f"reader {each.name}", _reader_state(each)) for each in found.readers]
    print_facts(facts)
    print_table(
        ("partition", "next offset", "applied LSN"),
        ((each.partition_id, each.next_offset, each.applied_lsn) for each in found.partitions),
    )


def _reader_state(found: Any) -> str:
    """What a reader holds in the outbox, on one line."""
    if found.given_up_at:
        return f"given up {found.given_up_at:%Y-%m-%d %H:%M:%S %Z}: events are removed that it has not read"
    if found.unread_since:
        return f"holds events from {found.unread_since:%Y-%m-%d %H:%M:%S %Z} on"
    return "has read everything"


def _sink_state(found: Any) -> str:
    """What a sink does, and what keeps it, on one line."""
    if found.state == "paused":
        why = f": {found.reason}" if found.reason else ""
        return f"paused since {found.paused_at:%Y-%m-%d %H:%M:%S %Z} by {found.paused_by}{why}"
    if found.fault:
        return f"{found.state}, nothing is delivered since {found.fault_since:%Y-%m-%d %H:%M:%S %Z}: {found.fault}"
    return str(found.state)


def _slot_facts(slot: Any, waits_for: str | None) -> list[tuple[str, object]]:
    held = f"{slot.retained_bytes} bytes held"
    if slot.creating:
        made = f"{slot.name} (being made by process {slot.active_pid})"
        return [("slot", made), ("waits for", waits_for or "nobody"), ("WAL", held)]
    facts: list[tuple[str, object]] = [
        ("slot", f"{slot.name} ({'being read' if slot.active else 'not being read'})")
    ]
    if slot.invalidation_reason:
        facts.append(("invalidated", slot.invalidation_reason))
    lag = "not known on a standby" if slot.lag_bytes is None else f"{slot.lag_bytes} bytes"
    confirmed = f"{slot.wal_status}, confirmed to {slot.confirmed_flush_lsn}, lag {lag}"
    return [*facts, ("WAL", f"{confirmed}, {held}")]


def _why(reason: Any) -> str:
    """Why some transactions are deferred, on one line."""
    causes = {
        "retry": f"{reason.handler}: {reason.reason}",
        "holding": f"{reason.handler}: {reason.reason}; until they are replayed or discarded",
        "replay": "replayed",
        "scheduled": "scheduled with deliver_at",
        "blocked": "blocked by an earlier transaction of the same key",
    }
    sink = f"sink {reason.sink}, " if reason.sink else ""
    shown = f"{reason.transactions} since {reason.since:%Y-%m-%d %H:%M:%S%z}: {sink}{causes[reason.kind]}"
    if reason.next is None:
        return shown
    until = "" if reason.until == reason.next else f", the last {reason.until:%Y-%m-%d %H:%M:%S%z}"
    return f"{shown}; next {reason.next:%Y-%m-%d %H:%M:%S%z}{until}"


@app.command()
def publish(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="JSON; standard input if it is missing or '-'."),
    ] = None,
    config: ConfigOption = None,
    generate: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Make up N business transactions instead."),
    ] = None,
    hosts: Annotated[int, typer.Option(min=1, help="With --generate: over how many hosts.")] = 8,
    seed: Annotated[
        int | None, typer.Option(help="With --generate: make the same ones again.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Publish business transactions: {host_id, user_id, events: [...]}, an array of them, or one on each line."""
    from relay.admin.check import reach_source
    from relay.admin.publish import business_transactions, parse, require_own_outbox
    from relay.admin.publish import publish as publish_all

    settings = load(config)
    transactions = (
        business_transactions(generate, hosts, seed) if generate else iter(parse(*_input(file)))
    )
    require_own_outbox(settings)
    with reach_source(settings) as conn, progress() as report:
        count, events = publish_all(conn, transactions, report, generate)
    if as_json:
        print(json.dumps({"transactions": count, "events": events}))
    else:
        print(f"published {count} transactions with {events} events")


def _input(file: Path | None) -> tuple[str, str]:
    if file is None or str(file) == "-":
        return sys.stdin.read(), "standard input"
    try:
        return file.read_text(encoding="utf-8"), str(file)
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{file}: is not UTF-8 text") from None


@offsets.command("show")
def offsets_show(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show where each partition stands."""
    from dataclasses import asdict

    from relay.admin.offsets import positions

    found = positions(load(config))
    if as_json:
        print(json.dumps([asdict(position) for position in found], indent=2))
        return
    print_table(
        ("partition", "next offset", "unread", "applied LSN", "snapshot"),
        (
            (p.partition_id, p.next_offset, _or_dash(p.unread), p.applied_lsn, _or_dash(p.snapshot))
            for p in found
        ),
    )


def _or_dash(value: object) -> object:
    return "-" if value is None else value


@offsets.command("seek")
def offsets_seek(
    to: Annotated[
        str, typer.Option("--to", metavar="OFFSET|LSN|TIME|beginning|end", help="Where to go on.")
    ],
    config: ConfigOption = None,
    partition: Annotated[
        int | None,
        typer.Option(
            help="Only this one; transactions that span others are then delivered in part."
        ),
    ] = None,
    reason: ReasonOption = None,
    yes: YesOption = False,
) -> None:
    """Let a stopped group go on at another position: what comes after it is delivered, again if need be."""
    from relay.admin.offsets import plan_seek, seek

    settings = load(config)
    with progress() as report:
        report("counting what this affects")
        move = plan_seek(settings, to, partition)
    effect = (
        "the WAL does not tell how many events this affects"
        if move.again is None
        else f"{move.again} events will be delivered again, {move.skipped} will be passed over"
    )
    print(f"group {settings.group} goes on {move.goal.text}: {effect}")
    if move.sinks:
        print(f"so do its sinks {', '.join(move.sinks)}")
    if any(move.given_up):
        print(
            f"of what is delivered again, {move.given_up.dead} dead transactions are discarded and "
            f"{move.given_up.deferred} deferred ones are forgotten"
        )
    if not yes:
        typer.confirm("Go on?", abort=True)
    with progress() as report:
        report("moving the group")
        seek(settings, move, partition, reason)


@offsets.command("repartition")
def offsets_repartition(
    partitions: Annotated[int, typer.Option(min=1, max=1024, help="How many from now on.")],
    config: ConfigOption = None,
) -> None:
    """Split a stopped group into another number of partitions, without losing or repeating an event."""
    from relay.admin.offsets import repartition

    settings = load(config)
    with progress() as report:
        repartition(settings, partitions, report)
    print(
        f"group {settings.group} has {partitions} partitions: set partitions: {partitions} in the configuration"
    )


@app.command()
def demo(
    directory: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where to work; default: a temporary folder, removed at the end."
        ),
    ] = None,
) -> None:
    """Show the whole thing on an embedded PostgreSQL and a local Spark, and verify the result from the database."""
    from relay.demo import run_demo

    if not run_demo(out, directory):
        raise typer.Exit(1)


@app.command()
def uninstall(
    config: ConfigOption = None,
    admin_dsn: AdminOption = None,
    admin_dsn_file: AdminFileOption = None,
    target_admin_dsn: TargetAdminOption = None,
    target_admin_dsn_file: TargetAdminFileOption = None,
    yes: YesOption = False,
) -> None:
    """Drop every group's slot, publication, progress and dead letters, and the schema; the outbox and its rows stay."""
    from relay.admin.uninstall import plan_removal, remove

    settings = load(config)
    source_admin = administrator_dsn(admin_dsn, admin_dsn_file, "--admin-dsn")
    target_admin = administrator_dsn(target_admin_dsn, target_admin_dsn_file, "--target-admin-dsn")
    removal = plan_removal(settings, source_admin, target_admin)
    if not yes:
        for line in removal.lines():
            print(f"will drop {line}")
        typer.confirm("Go on?", abort=True)
    for line in remove(settings, removal, source_admin, target_admin):
        print(f"dropped {line}")
