"""`relay status`: the state of a group, and checks of it. No logic of its own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relay.cli.options import ConfigOption, JsonOption, fail
from relay.cli.tables import print_facts, print_table
from relay.config.files import for_each, load_all
from relay.observe.phrases import counted, moment

if TYPE_CHECKING:
    from relay.config.settings import Settings


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
        int | None, typer.Option(min=0, metavar="N", help="Check the dead letters.")
    ] = None,
) -> None:
    """Show slot, partitions, sinks and dead letters."""
    from relay.admin import sinks
    from relay.admin.status import lag_seconds, read
    from relay.observe.health import Limits, failures

    limits = Limits(max_lag_bytes, max_lag_seconds, max_sink_lag_seconds, max_deferred, max_dead)
    checks = alive or limits != Limits()

    def show(settings: Settings) -> tuple[dict[str, Any], list[str]]:
        state = read(settings)
        if not as_json:
            _print_status(state, settings.source.mode)
        document = {"group": settings.group, **state.as_json()}
        if not checks:
            return document, []
        lag = None if max_lag_seconds is None else lag_seconds(settings, state.partitions)
        sink_lags = {}
        if max_sink_lag_seconds is not None:
            sink_lags = sinks.lag_seconds(settings)
        failed = failures(state, settings.group, limits, lag, sink_lags)
        return document, [f"group {settings.group}: {line}" if several else line for line in failed]

    several = len(load_all(config)) > 1
    shown = for_each(config, show, heading=not as_json)
    if as_json:
        documents = [document for document, _ in shown]
        print(json.dumps(documents if len(documents) > 1 else documents[0], indent=2))
    if failed := [line for _, lines in shown for line in lines]:
        fail("\n".join(failed), 1)


def _print_status(state: Any, mode: str) -> None:
    facts: list[tuple[str, object]] = [("source", state.source_mode)]
    if state.source_reason:
        facts.append(("reason", state.source_reason))
    facts.append(("active", state.active or "none"))
    standby = [name for name in state.instances if name != state.active]
    if standby:
        facts.append(("others", ", ".join(standby)))
    slot = state.slot
    if slot is None:
        facts.append(("slot", "none" if mode == "poll" else "missing: run `relay check`"))
    else:
        facts += _slot_facts(slot, state.slot_waits_for)
    facts.append(("dead letters", state.dead_letters))
    summary = state.deferred
    deferred = counted(summary.transactions, "transaction", "transactions")
    facts.append(("deferred", f"{deferred}, {summary.holding} holding"))
    facts += [("", _why(reason)) for reason in summary.reasons]
    for each in state.braked:
        since = f"since {moment(each.braked_at)}, after {each.deaths} dead letters in a row"
        facts.append((f"stopped: {each.handler}", f"{each.fault}, {since}"))
    facts += [(f"sink {each.sink}", _sink_state(each)) for each in state.sinks]
    for each in state.engines:
        since = f"since {moment(each.since)}: {each.reason}"
        batches = counted(each.batches, "batch", "batches")
        events = counted(each.events, "event", "events")
        facts.append((f"engine {each.engine}", f"{batches}, {events} {since}"))
    facts += [(f"reader {each.name}", _reader_state(each)) for each in state.readers]
    print_facts(facts)
    print_table(
        ("partition", "next offset", "applied LSN"),
        ((each.partition_id, each.next_offset, each.applied_lsn) for each in state.partitions),
    )


def _reader_state(reader: Any) -> str:
    """Describe which events retention keeps for a reader, on one line."""
    if reader.given_up_at:
        return f"given up {moment(reader.given_up_at)}: events that it has not read are removed"
    if reader.unread_since:
        return f"holds events from {moment(reader.unread_since)} on"
    return "has read everything"


def _sink_state(sink: Any) -> str:
    """Describe the state of a sink, and why it delivers nothing, on one line."""
    if sink.state == "paused":
        why = f": {sink.reason}" if sink.reason else ""
        return f"paused since {moment(sink.paused_at)} by {sink.paused_by}{why}"
    if sink.fault:
        return f"{sink.state}, nothing is delivered since {moment(sink.fault_since)}: {sink.fault}"
    return str(sink.state)


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


def _why(reason: Any) -> str:
    """Describe why transactions are deferred, on one line."""
    causes = {
        "retry": f"{reason.handler}: {reason.reason}",
        "holding": f"{reason.handler}: {reason.reason}; until they are replayed or discarded",
        "replay": "replayed",
        "scheduled": "scheduled with deliver_at",
        "blocked": "blocked by an earlier transaction of the same key",
    }
    sink = f"sink {reason.sink}, " if reason.sink else ""
    shown = f"{reason.transactions} since {moment(reason.since)}: {sink}{causes[reason.kind]}"
    if reason.next is None:
        return shown
    until = "" if reason.until == reason.next else f", the last {moment(reason.until)}"
    return f"{shown}; next {moment(reason.next)}{until}"
