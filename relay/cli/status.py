"""`relay status`: the state of a group, and checks of it; `relay top`: the same, live. No logic of their own."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relay.admin.phrases import counted, due, moment
from relay.cli.options import ConfigOption, JsonOption, fail, out, time_of
from relay.cli.terminal import print_facts, print_table
from relay.config.files import for_each, load, load_all
from relay.config.settings import Settings
from relay.faults import ConfigurationError, Unreachable

if TYPE_CHECKING:
    from relay.observe.troubles import Trouble


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
            help="Check the unconfirmed WAL; implies --check, as do the other limits.",
        ),
    ] = None,
    max_lag_seconds: Annotated[
        float | None,
        typer.Option(min=0, metavar="N", help="Check the age of the oldest unread event."),
    ] = None,
    max_sink_lag_seconds: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="N", help="Check the age of the oldest event that a sink has not read."
        ),
    ] = None,
    max_deferred: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Check the deferred transactions.")
    ] = None,
    max_dead: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Check the dead letters, also those of queues."),
    ] = None,
    complete_before: Annotated[
        datetime | None,
        typer.Option(
            parser=time_of,
            metavar="TIME",
            help="Exit with status 1 unless the target and each sink of type spark have every event that was committed "
            "before this time (UTC).",
        ),
    ] = None,
    sink: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="With --complete-before: ask only for this sink. May be repeated.",
        ),
    ] = None,
) -> None:
    """Show slot, partitions, sinks and dead letters."""
    from relay.admin.status import lag_seconds, read
    from relay.observe.health import Limits, failures, incomplete
    from relay.observe.troubles import troubles

    if sink and complete_before is None:
        raise ConfigurationError("--sink: needs --complete-before")
    limits = Limits(max_lag_bytes, max_lag_seconds, max_sink_lag_seconds, max_deferred, max_dead)
    checks = alive or limits != Limits()

    def show(settings: Settings) -> tuple[dict[str, Any], list[str]]:
        readers = _readers(settings, sink)
        state = read(settings)
        found = troubles(state, settings.source.mode)
        if not as_json:
            _print_status(state, settings.source.mode, found)
        document = {
            "group": settings.group,
            "troubles": [each.as_json() for each in found],
            **state.as_json(),
        }
        if state.faults:
            away.extend(f"{key}: {why}" for key, why in state.faults.items())
        if state.faults:
            return document, []
        failed: list[str] = []
        if complete_before is not None:
            failed += incomplete(state, complete_before, readers)
        if not checks:
            return document, [_named(settings, line) for line in failed]
        lag = None if max_lag_seconds is None else lag_seconds(settings)
        sink_lags = {}
        if max_sink_lag_seconds is not None:
            # It imports a tenth of a second.
            from relay.admin import sinks

            sink_lags = sinks.lag_seconds(settings)
        failed += failures(state, limits, lag, sink_lags)
        return document, [_named(settings, line) for line in failed]

    def _named(settings: Settings, line: str) -> str:
        return f"group {settings.group}: {line}" if several else line

    several = len(load_all(config)) > 1
    away: list[str] = []
    # A sensor asks again after 1, and gives up after 2: no outage is worth a night.
    away_status = 2 if complete_before is None else 1
    try:
        shown = for_each(config, show, heading=not as_json)
    except Unreachable as error:
        fail(str(error), away_status)
    if as_json:
        documents = [document for document, _ in shown]
        print(json.dumps(documents if len(documents) > 1 else documents[0], indent=2))
    if away:
        fail("\n".join(away), away_status)
    if failed := [line for _, lines in shown for line in lines]:
        fail("\n".join(failed), 1)


def _readers(settings: Settings, named: list[str] | None) -> list[str]:
    """Return the readers to ask for: those that are named, else the target ('') and the sinks of type spark.

    Raises ConfigurationError for a sink that is not one of these.
    """
    known = list(settings.spark_handlers)
    for name in named or ():
        if name not in known:
            raise ConfigurationError(
                f"--sink: group {settings.group!r} has no sink {name!r} of type spark "
                f"(it has {', '.join(known) or 'none'})"
            )
    return named or ["", *known]


def _print_status(state: Any, mode: str, found: Sequence[Trouble]) -> None:
    facts: list[tuple[str, object]] = [
        (each.alert, f"{each.line}{_since(each.since)}") for each in found
    ]
    facts += [("waits", str(each)) for each in state.waits]
    if state.is_known("target.dsn"):
        facts += _group_facts(state)
    if state.is_known("source.dsn"):
        facts += _source_facts(state, mode)
    if state.is_known("target.dsn"):
        facts += _target_facts(state)
    facts += [(f"reader {each.name}", _reader_state(each)) for each in state.readers]
    print_facts(facts)
    if state.partitions:
        print_table(
            ("partition", "next offset", "applied LSN"),
            ((each.partition_id, each.next_offset, each.applied_lsn) for each in state.partitions),
        )


def _since(time: datetime | None) -> str:
    return f" (since {moment(time)})" if time else ""


def _group_facts(state: Any) -> list[tuple[str, object]]:
    facts: list[tuple[str, object]] = [("source", state.mode)]
    if state.source_reason:
        facts.append(("reason", state.source_reason))
    facts.append(("active", state.active or "none"))
    if state.witnessed_at:
        facts.append(("witness", f"noted {moment(state.witnessed_at)}"))
    standby = [name for name in state.instances if name != state.active]
    if standby:
        facts.append(("others", ", ".join(standby)))
    return facts


def _source_facts(state: Any, mode: str) -> list[tuple[str, object]]:
    facts: list[tuple[str, object]] = []
    slot = state.slot
    if slot is None:
        facts.append(("slot", "none" if mode == "poll" else "missing: run `relay check`"))
    else:
        facts += _slot_facts(slot, state.slot_waits_for)
    if state.lag is not None:
        facts.append(("lag", _lag(state.lag)))
    for each in state.noted:
        name = f"sink {each.reader}" if each.reader else "target"
        lag = "not counted" if each.backlog is None else _lag(each.backlog)
        facts.append(
            (f"{name}, last known", f"{lag}, after its position of {moment(each.noted_at)}")
        )
    if state.schedules:
        facts.append(("schedules", _schedules(state.schedules)))
    return facts


def _schedules(figures: Any) -> str:
    """Describe how many schedules there are, and how they do, on one line."""
    counts = {
        "paused": sum(each.is_paused for each in figures),
        "due": sum(each.overdue_seconds > 0 for each in figures),
        "not understood": sum(each.stands_still for each in figures),
    }
    missed = sum(each.missed_ticks for each in figures)
    parts = [counted(len(figures), "schedule", "schedules")]
    parts += [f"{count} {word}" for word, count in counts.items() if count]
    if missed:
        parts.append(f"{counted(missed, 'time', 'times')} missed")
    return ", ".join(parts)


def _queue_state(queue: Any) -> str:
    """Describe what is in a work queue, and whether it is paused, on one line."""
    parts = [f"{queue.ready:,} ready", f"{queue.waiting:,} waiting"]
    if queue.dead:
        parts.append(counted(queue.dead, "dead letter", "dead letters"))
    if queue.stuck:
        parts.append(counted(queue.stuck, "stuck saga", "stuck sagas"))
    parts.append(counted(queue.workers, "worker", "workers"))
    if queue.paused_at is not None:
        parts.append(f"paused since {moment(queue.paused_at)}")
    if queue.stopped_at is not None:
        parts.append(f"stopped since {moment(queue.stopped_at)}: {queue.fault}")
    return ", ".join(parts)


def _target_facts(state: Any) -> list[tuple[str, object]]:
    facts: list[tuple[str, object]] = [("dead letters", _dead(state))]
    summary = state.deferred
    deferred = counted(summary.transactions, "transaction", "transactions")
    facts.append(("deferred", f"{deferred}, {summary.holding} holding"))
    facts += [("", why_deferred(reason)) for reason in summary.reasons]
    for each in state.braked:
        since = f"since {moment(each.braked_at)}, after {each.count}"
        facts.append((f"stopped: {each.handler}", f"{each.fault}, {since}"))
        if each.sample:
            facts.append(("", f"such as {each.sample}"))
    facts += [(f"queue {each.queue}", _queue_state(each)) for each in state.queues]
    facts += [(f"sink {each.sink}", _sink_state(each, state.instances)) for each in state.sinks]
    facts += [
        (f"endpoints {each.sink}", f"{each.disabled} disabled, {each.failing} failing")
        for each in state.endpoints
    ]
    facts += [(_complete(each), _exceptions(each)) for each in state.watermarks]
    for each in state.engines:
        since = f"since {moment(each.since)}: {each.reason}"
        batches = counted(each.batches, "batch", "batches")
        events = counted(each.events, "event", "events")
        facts.append((f"engine {each.engine}", f"{batches}, {events} {since}"))
    return facts


def _dead(state: Any) -> str:
    """Describe how many events are dead, and how many of them are messages of queues, on one line."""
    queued = f", {state.dead_messages:,} of them in queues" if state.dead_messages else ""
    return f"{state.dead_letters}{queued}"


def _complete(mark: Any) -> str:
    """Name the reader of a watermark."""
    return f"complete: sink {mark.reader}" if mark.reader else "complete: target"


def _exceptions(mark: Any) -> str:
    """Describe up to when a reader has every event, but for what, on one line."""
    if mark.complete_before is None:
        return "not known up to when"
    dead = counted(mark.dead_letters, "dead letter", "dead letters")
    deferred = counted(mark.deferred, "deferred transaction", "deferred transactions")
    return f"before {moment(mark.complete_before)}, but for {dead} and {deferred}"


def _lag(backlog: Any) -> str:
    """Describe how many events are not applied, and how old the oldest is, on one line."""
    more = "more than " if backlog.more else ""
    events = f"{more}{counted(backlog.events, 'event', 'events')}"
    if backlog.oldest_seconds is None:
        return events
    return f"{events}, the oldest {max(0.0, backlog.oldest_seconds):.1f} s old"


def _reader_state(reader: Any) -> str:
    """Describe which events retention keeps for a reader, on one line."""
    if reader.given_up_at:
        return f"given up {moment(reader.given_up_at)}: events that it has not read are removed"
    if reader.unread_since:
        return f"holds events from {moment(reader.unread_since)} on"
    return "has read everything"


def _sink_state(sink: Any, running: Any) -> str:
    """Describe the state of a sink, and why it delivers nothing, on one line."""
    state = sink.state_in(running)
    if state == "paused":
        why = f": {sink.reason}" if sink.reason else ""
        return f"paused since {moment(sink.paused_at)} by {sink.paused_by}{why}"
    if sink.fault:
        return f"{state}, nothing is delivered since {moment(sink.fault_since)}: {sink.fault}"
    return str(state)


def _slot_facts(slot: Any, waits_for: str | None) -> list[tuple[str, object]]:
    retained = f"{slot.retained_bytes} bytes retained"
    if slot.creating:
        created = f"{slot.name} (being created by process {slot.active_pid})"
        return [("slot", created), ("waits for", waits_for or "nothing"), ("WAL", retained)]
    facts: list[tuple[str, object]] = [
        ("slot", f"{slot.name} ({'active' if slot.active else 'inactive'})")
    ]
    if slot.invalidation_reason:
        facts.append(("invalidated", slot.invalidation_reason))
    lag = "not known on a standby" if slot.lag_bytes is None else f"{slot.lag_bytes} bytes"
    confirmed = f"{slot.wal_status}, confirmed to {slot.confirmed_flush_lsn}, lag {lag}"
    return [*facts, ("WAL", f"{confirmed}, {retained}")]


def why_deferred(reason: Any) -> str:
    """Describe why transactions are deferred, on one line."""
    causes = {
        "retry": f"{reason.handler}: {reason.reason}",
        "holding": f"{reason.handler}: {reason.reason}; until they are replayed or discarded",
        "replay": "replayed",
        "resend": "to be delivered again, as asked for",
        "scheduled": "scheduled with deliver_at",
        "blocked": "blocked by an earlier transaction of the same key",
    }
    sink = f"sink {reason.sink}, " if reason.sink else ""
    shown = f"{reason.transactions} since {moment(reason.since)}: {sink}{causes[reason.kind]}"
    if reason.next is None:
        return shown
    until = "" if reason.until == reason.next else f", the last {moment(reason.until)}"
    return f"{shown}; next {due(reason.next)}{until}"


_WAIT_SECONDS = 0.1
_REFRESH_SECONDS = 1.0
"""The largest interval between two drawings: the terminal may be resized while a query runs."""
_MEASURE_SECONDS = 6.0
"""Between the two readings of `--once` that give the throughput: relay stores its counts every five seconds."""
_WHOLE = 10_000
"""The columns and lines of a screen on which nothing is cut off."""


def top(
    config: ConfigOption = None,
    interval: Annotated[
        float, typer.Option(min=0.2, metavar="SECONDS", help="Seconds between two queries.")
    ] = 2.0,
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="Print the state once and end, as without a terminal; takes 6 s.",
        ),
    ] = False,
) -> None:
    """Show the group live: source, slot, throughput, lags, deferred, dead letters; q ends."""
    settings = load(config)
    if once or not out.is_terminal:
        _print(settings)
    else:
        _show(settings, interval)


def _print(settings: Settings) -> None:
    from relay.admin.status import Watch
    from relay.observe.top import Size, Trends, lines

    watch, trends = Watch(settings), Trends()
    try:
        observation = watch.read()
        if observation.instances and not observation.faults:
            trends.note(observation)
            time.sleep(_MEASURE_SECONDS)
            observation = watch.read()
    finally:
        watch.close()
    trends.note(observation)
    size = (
        Size(out.size.width, _WHOLE, out.options.ascii_only)
        if out.is_terminal
        else Size(_WHOLE, _WHOLE)
    )
    for line in lines(observation, trends, size):
        out.print(line, soft_wrap=True)
    if observation.faults:
        raise typer.Exit(1)


def _show(settings: Settings, interval: float) -> None:
    from rich.live import Live

    from relay.observe.top import View

    with _interrupted_by_signals(), _keys() as key:
        try:
            with (
                View(settings, interval) as view,
                Live(view, console=out, screen=True, auto_refresh=False) as live,
            ):
                drawn = 0.0
                while key() != "q":
                    if view.refreshed.is_set() or time.monotonic() - drawn > _REFRESH_SECONDS:
                        view.refreshed.clear()
                        live.refresh()
                        drawn = time.monotonic()
        except KeyboardInterrupt:
            return


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGTERM too, and for SIGINT where a shell without job control has it ignored."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {
        number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _keys() -> Iterator[Callable[[], str]]:
    """Yield a function that waits 0.1 s for a key and returns it, or ''; without a keyboard it only waits."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    # Python does not have these modules on every system.
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield partial(_key, descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _no_key() -> str:
    time.sleep(_WAIT_SECONDS)
    return ""


def _key(descriptor: int) -> str:
    ready, _, _ = select.select([descriptor], [], [], _WAIT_SECONDS)
    if not ready:
        return ""
    # The end of input is a closed terminal.
    return os.read(descriptor, 1).decode(errors="replace") or "q"
