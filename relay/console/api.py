"""The HTTP API: what the pages show and do, for programs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Security
from fastapi.security import HTTPBearer
from starlette.requests import Request

from relay.admin.offsets import OffsetsMove
from relay.admin.sinks import SinkMove, SinkStatus
from relay.console import models
from relay.console.forms import By, InGroup
from relay.console.group import HISTORY_HOURS, MOST, PAGE, GroupView, Page, Partitions
from relay.console.measured import Series
from relay.console.models import Changed, Count, Moved, Problem
from relay.faults import ConfigurationError
from relay.store.actions import Action
from relay.store.brakes import BrakedHandler
from relay.store.dead_letter_pages import ActedOnDead, Kind, Listed
from relay.store.deferred_selection import Deferred

DESCRIPTION = """
Every action takes a `reason`. It is kept with the name of whoever acts: the user that a reverse proxy names, or the
header `Relay-Operator` of a request with the token.
Whatever goes wrong is answered with a problem (RFC 9457), whose `detail` is one line.
Lists are read by pages: `next` of one is the key for the following one, and null at the end.
"""

_ERRORS = {
    401: "the token is missing or wrong",
    403: "another site has sent the request",
    404: "there is no such thing",
    409: "it cannot be done now; `detail` says why, and what to do",
    422: "the request is not valid",
    429: "too many wrong tokens",
    503: "a database is away, or took too long",
}
_PROBLEM = {"application/problem+json": {"schema": Problem.model_json_schema()}}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": _PROBLEM} for status, text in _ERRORS.items()
}

router = APIRouter(
    prefix="/api/v1",
    responses=_RESPONSES,
    dependencies=[
        Security(HTTPBearer(auto_error=False, description="The token of observe.console"))
    ],
)

Limit = Annotated[int, Query(ge=1, le=MOST)]
_GROUP = "/groups/{group}"


@router.get("/groups", tags=["group"])
def groups(request: Request) -> list[models.GroupName]:
    """The groups that this console shows."""
    return [models.GroupName(name=name) for name in request.app.state.groups]


@router.get(_GROUP + "/status", tags=["group"])
def status(group: InGroup) -> models.StatusAnswer:
    """What `relay status --json` prints."""
    found = group.status()
    return models.StatusAnswer.of(found, group.troubles(found))


@router.get(_GROUP + "/history", tags=["group"])
def history(
    group: InGroup,
    hours: Annotated[float, Query(gt=0, le=HISTORY_HOURS)] = HISTORY_HOURS,
    sink: str | None = None,
) -> list[Series]:
    """Throughput and lag of the last hours, as the running relay that serves this has measured them."""
    return group.history(hours, sink)


@router.get(_GROUP + "/partitions", tags=["partitions"])
def partitions(group: InGroup, limit: Limit = MOST, after: int = -1) -> Partitions:
    """Where the partitions stand."""
    return group.partitions(limit, after)


@router.post(_GROUP + "/partitions/seek", tags=["partitions"])
def seek(group: InGroup, by: By, act: models.OffsetsSeekAct) -> Moved:
    """Let a stopped group go on elsewhere. Refused while an instance runs."""
    if act.dry_run:
        return _offsets_moved(group.plan_seek(act.to, act.partition))
    move = group.plan_seek(act.to, act.partition)
    group.seek(act.to, act.partition, by.name, act.reason)
    return _offsets_moved(move, done=True)


@router.get(_GROUP + "/sinks", tags=["sinks"])
def sinks(group: InGroup) -> list[SinkStatus]:
    """The sinks."""
    return group.sinks()


@router.get(_GROUP + "/sinks/{sink:path}/status", tags=["sinks"])
def sink(group: InGroup, sink: str) -> SinkStatus:
    """One sink."""
    return group.sink(sink)


@router.post(_GROUP + "/sinks/{sink:path}/pause", tags=["sinks"])
def pause(group: InGroup, by: By, sink: str, act: models.Act) -> Changed:
    """Let a sink stop where it is."""
    return Changed(changed=group.pause(sink, by.name, act.reason))


@router.post(_GROUP + "/sinks/{sink:path}/resume", tags=["sinks"])
def resume(group: InGroup, by: By, sink: str, act: models.Act) -> Changed:
    """Let a paused sink go on where it is."""
    return Changed(changed=group.resume(sink, by.name, act.reason))


@router.post(_GROUP + "/sinks/{sink:path}/seek", tags=["sinks"])
def seek_sink(group: InGroup, by: By, sink: str, act: models.SeekAct) -> Moved:
    """Let a sink go on at another position."""
    return _seek_sink(group, sink, act.to, False, act, by.name)


@router.post(_GROUP + "/sinks/{sink:path}/rebuild", tags=["sinks"])
def rebuild(group: InGroup, by: By, sink: str, act: models.RebuildAct) -> Moved:
    """Deliver everything to a sink again."""
    return _seek_sink(group, sink, act.from_, True, act, by.name)


@router.post(_GROUP + "/sinks/{sink:path}/drop", tags=["sinks"])
def drop(group: InGroup, by: By, sink: str, act: models.Act) -> Count:
    """Forget a sink that is no longer configured; answers how many deferred transactions go with it."""
    return Count(transactions=group.drop_sink(sink, by.name, act.reason))


@router.get(_GROUP + "/stopped-handlers", tags=["group"])
def stopped_handlers(group: InGroup) -> list[BrakedHandler]:
    """The handlers that are stopped, since they fail with everything."""
    return group.stopped_handlers()


@router.get(_GROUP + "/deferred", tags=["deferred"])
def deferred(
    group: InGroup,
    wanted: Annotated[models.DeferredQuery, Query()],
) -> Page[Deferred]:
    """Deferred transactions, oldest first."""
    return group.deferred(wanted.asked(), wanted.limit, wanted.after)


@router.post(_GROUP + "/deferred/run", tags=["deferred"])
def run(group: InGroup, by: By, act: models.DeferredAct) -> Count:
    """Have deferred transactions tried now."""
    _require_some(act)
    return Count(transactions=group.run_deferred(act.filter.asked(), by.name, act.reason))


@router.post(_GROUP + "/deferred/cancel", tags=["deferred"])
def cancel(group: InGroup, by: By, act: models.DeferredAct) -> Count:
    """Give deferred transactions up to the dead letters."""
    _require_some(act)
    return Count(transactions=group.cancel_deferred(act.filter.asked(), by.name, act.reason))


@router.get(_GROUP + "/dead-letters", tags=["dead letters"])
def dead_letters(
    group: InGroup,
    wanted: Annotated[models.DeadLetterQuery, Query()],
) -> Page[Listed]:
    """Dead transactions, newest first."""
    return group.dead_letters(wanted.asked(), wanted.limit, wanted.before)


@router.get(_GROUP + "/dead-letters/kinds", tags=["dead letters"])
def kinds(group: InGroup) -> list[Kind]:
    """The commonest kinds of fault of what is dead, by handler."""
    return list(group.dead_kinds()[1] or ())


@router.get(_GROUP + "/dead-letters/{id:int}", tags=["dead letters"])
def dead_letter(
    group: InGroup, id: int, limit: Limit = PAGE, after: int | None = None
) -> models.DeadAnswer:
    """The dead transaction that holds a dead letter: its events, and what was done about it."""
    found = group.dead_letter(id, limit, after)
    return models.DeadAnswer(
        number=found.number,
        events=list(found.letters.rows),
        next=found.letters.next,
        actions=found.done,
    )


@router.get(_GROUP + "/dead-letters/{id:int}/payload", tags=["dead letters"])
def payload(group: InGroup, id: int) -> models.Payload:
    """The whole payload of a dead letter."""
    return models.Payload(payload=group.payload(id))


@router.post(_GROUP + "/dead-letters/{id:int}/payload", tags=["dead letters"])
def edit(group: InGroup, by: By, id: int, act: models.EditAct) -> Changed:
    """Give an event of a dead transaction another payload; the first one is kept beside it."""
    group.edit(id, act.payload, by.name, act.reason)
    return Changed(changed=True)


@router.post(_GROUP + "/dead-letters/replay", tags=["dead letters"])
def replay(group: InGroup, by: By, act: models.DeadLettersAct) -> Count:
    """Queue dead transactions to be applied or delivered again."""
    _require_some(act)
    done = group.replay(act.filter.asked(), by.name, act.reason)
    return Count(transactions=done.queued, warnings=list(done.warnings))


@router.post(_GROUP + "/dead-letters/discard", tags=["dead letters"])
def discard(group: InGroup, by: By, act: models.DeadLettersAct) -> Count:
    """Give dead transactions up; they stay in the list."""
    _require_some(act)
    return Count(transactions=group.discard(act.filter.asked(), by.name, act.reason))


@router.get(_GROUP + "/actions", tags=["actions"])
def actions(
    group: InGroup, limit: Limit = PAGE, before: int | None = None, sink: str | None = None
) -> Page[Action]:
    """What was done to the group and its sinks, newest first."""
    return group.actions(limit, before, sink)


@router.get(_GROUP + "/dead-letter-actions", tags=["actions"])
def dead_letter_actions(
    group: InGroup, limit: Limit = PAGE, before: int | None = None
) -> Page[ActedOnDead]:
    """What was done about dead letters, newest first."""
    return group.dead_letter_actions(limit, before)


def _require_some(act: models.DeadLettersAct | models.DeferredAct) -> None:
    """Refuse to act on everything because somebody forgot a filter."""
    if not act.all and act.filter == type(act.filter)():
        raise ConfigurationError("filter: say which, or all: true")


def _seek_sink(group: GroupView, sink: str, to: str, rebuild: bool, act: Any, by: str) -> Moved:
    move = group.plan_sink_seek(sink, to)
    if not act.dry_run:
        group.seek_sink(sink, to, rebuild, by, act.reason)
    return _sink_moved(move, done=not act.dry_run)


def _sink_moved(move: SinkMove, done: bool) -> Moved:
    return Moved(
        goes_on=move.goal.text, dead=move.given_up.dead, deferred=move.given_up.deferred, done=done
    )


def _offsets_moved(move: OffsetsMove, done: bool = False) -> Moved:
    given_up = move.given_up
    return Moved(
        goes_on=move.goal.text,
        dead=given_up.dead,
        deferred=given_up.deferred,
        done=done,
        again=move.again,
        skipped=move.skipped,
    )
