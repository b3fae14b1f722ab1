"""`relay event`: where an event is. No logic of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from relay.admin.phrases import moment
from relay.cli.options import ConfigOption, JsonOption, say
from relay.cli.terminal import print_table
from relay.config.files import load
from relay.model.json_fields import json_fields

if TYPE_CHECKING:
    from relay.admin.events import RelatedEvent
    from relay.store.attempts import KeptAttempt


def _named(each: RelatedEvent) -> str:
    return f"{each.id} ({each.event_type or 'not in the outbox'})"


def print_attempts(attempts: Sequence[KeptAttempt]) -> None:
    """Print the attempts that are kept of an event or a message, if there are any."""
    if not attempts:
        return
    print_table(
        (
            "attempt at",
            "sink",
            "number",
            "outcome",
            "status",
            "seconds",
            "to",
            "error",
            "resent by",
        ),
        (
            (
                moment(each.began_at),
                each.consumer,
                each.number,
                each.outcome,
                each.status or "-",
                "-" if each.seconds is None else f"{each.seconds:.3f}",
                each.destination or "-",
                each.error or "-",
                each.resent_by or "-",
            )
            for each in attempts
        ),
    )


def event(
    event_id: Annotated[str, typer.Argument(metavar="ID", help="The event's id.")],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say where an event is, at the target, at each sink and in queues, by today's routes; its attempts and causes."""
    from relay.admin.events import find

    found = find(load(config), event_id)
    if as_json:
        lists = {
            "destinations": [json_fields(each) for each in found.destinations],
            "attempts": [json_fields(each) for each in found.attempts],
            "actions": [json_fields(each) for each in found.actions],
        }
        print(json.dumps({**json_fields(found), **lists}, indent=2))
        return
    facts = {
        "event": found.id,
        "event type": found.event_type or "not in the outbox any more",
        "host": found.host_id,
        "aggregate": " ".join(filter(None, (found.aggregate_type, found.aggregate_id))),
        "transaction": found.transaction_id,
        "published": found.event_ts,
        "deliver at": found.deliver_at,
        "caused by": " < ".join(map(_named, found.caused_by)),
        "caused": ", ".join(map(_named, found.caused or ())),
    }
    for name, value in facts.items():
        if value:
            say(f"{name} {value}")
    print_table(
        ("destination", "name", "handlers", "state", "attempts", "since", "until", "id", "reason"),
        (
            (
                each.kind,
                each.name or "-",
                ", ".join(each.handlers) or "-",
                each.state,
                "-" if each.attempts is None else str(each.attempts),
                moment(each.since),
                moment(each.until),
                "-" if each.reference is None else str(each.reference),
                (each.reason or "-").partition("\n")[0],
            )
            for each in found.destinations
        ),
    )
    print_attempts(found.attempts)
    for each in found.actions:
        where = f"sink {each.sink}" if each.sink else "target"
        say(f"{moment(each.acted_at)} {each.action} ({where}) by {each.who}: {each.reason or '-'}")
