"""The routes of the HTTP API, by which programs do what the pages do."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Security
from fastapi.security import HTTPBearer
from starlette.requests import Request

from relay.admin import acts
from relay.admin.acts import Act, Changed, Count, MessageCount, Moved
from relay.admin.events import FoundEvent
from relay.admin.offsets import OffsetsMove
from relay.admin.sinks import SinkStatus
from relay.console import models
from relay.console.charts import Series
from relay.console.forms import CallerDep, GroupDep
from relay.console.group import HISTORY_HOURS, MOST, PAGE, GroupView, Page, Partitions
from relay.console.security import Caller
from relay.faults import ConfigurationError
from relay.source.outbox.search import EventPage
from relay.store.actions import Action
from relay.store.api_tokens import TokenRow
from relay.store.brakes import BrakedHandler
from relay.store.dead_letters.selection import ActedOnDead, DeadTransaction, Kind
from relay.store.deferred.selection import Deferred
from relay.store.endpoints import StoredEndpoint
from relay.store.queues import MessageSelection, QueueFigures
from relay.store.sagas import SagaRow, SagaSelection
from relay.store.states import MessageState, SagaState
from relay.web.problems import PROBLEM, Problem

DESCRIPTION = """
Every action takes a `reason`, which is stored with the operator: the user that a reverse proxy names, or the header
`Relay-Operator` of a request with the token.
Errors are problems (RFC 9457), whose `detail` is one line.
Lists have pages: `next` of one is the key of the following one, and null at the end.
"""

_ERRORS = {
    401: "the token is missing or wrong",
    403: "the request comes from another site",
    404: "what the path names does not exist, such as a sink or a dead letter",
    409: "the action is not possible now; `detail` says why, and what to do",
    422: "the request is not valid",
    429: "the address has sent too many wrong tokens",
    503: "a database cannot be reached, or took too long",
}
_PROBLEM = {PROBLEM: {"schema": Problem.model_json_schema()}}
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
    """List the groups of this console."""
    return [models.GroupName(name=name) for name in request.app.state.groups]


@router.get(_GROUP + "/status", tags=["group"])
def status(group: GroupDep) -> models.StatusAnswer:
    """Read the status that `relay status --json` prints, and what needs attention."""
    current = group.status()
    return models.StatusAnswer.of(current, group.troubles(current))


@router.get(_GROUP + "/history", tags=["group"])
def history(
    group: GroupDep,
    hours: Annotated[float, Query(gt=0, le=HISTORY_HOURS)] = HISTORY_HOURS,
    sink: str | None = None,
) -> list[Series]:
    """Read throughput and lag of the last hours; empty unless this process relays the group."""
    return group.history(hours, sink)


@router.get(_GROUP + "/partitions", tags=["partitions"])
def partitions(group: GroupDep, limit: Limit = MOST, after: int = -1) -> Partitions:
    """List the positions of the partitions."""
    return group.partitions(limit, after)


@router.post(_GROUP + "/partitions/seek", tags=["partitions"])
def seek(group: GroupDep, caller: CallerDep, act: models.OffsetsSeekAct) -> Moved:
    """Move a stopped group to another position. Fails while an instance runs."""
    move = group.plan_seek(act.to, act.partition)
    if not act.dry_run:
        group.seek(act.to, act.partition, caller.name, act.reason)
    return _offsets_moved(move, done=not act.dry_run)


@router.get(_GROUP + "/sinks", tags=["sinks"])
def sinks(group: GroupDep) -> list[SinkStatus]:
    """List the sinks."""
    return group.sinks()


@router.get(_GROUP + "/sinks/{sink:path}/status", tags=["sinks"])
def sink(group: GroupDep, sink: str) -> SinkStatus:
    """Read one sink."""
    return group.sink(sink)


@router.get(_GROUP + "/sinks/{sink:path}/endpoints", tags=["sinks"])
def endpoints(group: GroupDep, sink: str, limit: Limit = MOST) -> list[StoredEndpoint]:
    """List endpoints of a sink, which data choose, that fail or are disabled, the disabled ones first."""
    return group.endpoints(sink, limit)


@router.get(_GROUP + "/events", tags=["events"])
def events(group: GroupDep, query: Annotated[models.EventQuery, Query()]) -> EventPage:
    """Search the outbox for events, newest first. One that no index serves reads at most 100,000 rows for a page."""
    return group.events(query.search(), query.limit, query.before)


@router.get(_GROUP + "/events/{event_id:path}", tags=["events"])
def event(group: GroupDep, event_id: str) -> FoundEvent:
    """Find an event by its id, with its state at the target, at each sink and in queues, by today's routes."""
    return group.event(event_id)


@router.get(_GROUP + "/queues", tags=["queues"])
def queues(group: GroupDep) -> list[QueueFigures]:
    """List the work queues with their figures, each of which counts to 100,001 at most."""
    return group.queues()


@router.get(_GROUP + "/queues/{queue:path}/messages", tags=["queues"])
def queue(
    group: GroupDep, queue: str, limit: Limit = MOST, state: MessageState | None = None
) -> models.QueueAnswer:
    """Read a queue and its messages that are not done, the oldest first; only those in a state if one is given."""
    wanted = MessageSelection(states=[state] if state else None)
    figures, items = group.queue(queue, wanted, limit)
    return models.QueueAnswer(figures=figures, items=items)


@router.post(_GROUP + "/queues/{queue:path}/messages/cancel", tags=["queues"])
def cancel_messages(
    group: GroupDep, caller: CallerDep, queue: str, act: models.MessagesAct
) -> MessageCount:
    """Delete messages of a queue; those that workers have are left to them."""
    selection = act.filter
    return MessageCount(messages=group.cancel_messages(queue, selection, caller.name, act.reason))


@router.post(_GROUP + "/queues/{queue:path}/messages/move", tags=["queues"])
def move_messages(
    group: GroupDep, caller: CallerDep, queue: str, act: models.MoveMessagesAct
) -> MessageCount:
    """Give messages that wait for their time, or for a retry, another time; without `to` they can be taken now."""
    selection = act.filter
    moved = group.move_messages(queue, selection, act.to, caller.name, act.reason)
    return MessageCount(messages=moved)


@router.post(_GROUP + "/queues/{queue:path}/messages/{id}/edit", tags=["queues"])
def edit_message(
    group: GroupDep, caller: CallerDep, queue: str, id: int, act: models.EditAct
) -> Changed:
    """Replace the payload of a message that no worker has, or of a dead letter of the queue."""
    return Changed(changed=group.edit_message(queue, id, act.payload, caller.name, act.reason))


@router.post(_GROUP + "/queues/{queue:path}/replay", tags=["queues"])
def replay_queue(
    group: GroupDep, caller: CallerDep, queue: str, act: models.QueueReplayAct
) -> MessageCount:
    """Enqueue dead letters of a queue again, after the messages that are there."""
    replayed = group.replay(act.selection(queue), caller.name, act.reason)
    return MessageCount(messages=replayed.queued)


@router.post(_GROUP + "/queues/{queue:path}/discard", tags=["queues"])
def discard_queue(
    group: GroupDep, caller: CallerDep, queue: str, act: models.QueueDiscardAct
) -> MessageCount:
    """Delete dead letters of a queue."""
    if not act.all and not act.ids:
        raise ConfigurationError("ids: is empty: name the dead letters, or give all: true")
    return MessageCount(messages=group.discard(act.selection(queue), caller.name, act.reason))


@router.get(_GROUP + "/sagas", tags=["sagas"])
def sagas(
    group: GroupDep,
    limit: Limit = PAGE,
    after: int = 0,
    saga: str | None = None,
    version: int | None = None,
    state: SagaState | None = None,
) -> Page[SagaRow]:
    """List sagas, the oldest first; without a state those that have not ended."""
    wanted = SagaSelection(saga=saga, version=version, states=[state] if state else None)
    return group.sagas(wanted, limit, after)


@router.get(_GROUP + "/sagas/{saga}", tags=["sagas"])
def saga(group: GroupDep, saga: str, limit: Limit = PAGE, after: int = 0) -> models.SagaAnswer:
    """Read a saga by its id, and what has happened in it, in order."""
    found, entries = group.saga(saga, limit, after)
    return models.SagaAnswer(saga=found, entries=list(entries.rows), next=entries.next)


@router.get(_GROUP + "/schedules", tags=["schedules"])
def schedules(group: GroupDep, limit: Limit = MOST, after: str = "") -> models.SchedulesAnswer:
    """List the schedules of the outbox in the order of their names, with their last ten times."""
    rows, following = group.schedules(limit, after)
    return models.SchedulesAnswer(rows=rows, next=following)


@router.get(_GROUP + "/schedules/{schedule:path}/times", tags=["schedules"])
def schedule(group: GroupDep, schedule: str) -> models.ScheduleAnswer:
    """Read a schedule, its last and its next ten times."""
    found, times = group.schedule(schedule)
    return models.ScheduleAnswer(schedule=found, next=times)


@router.get(_GROUP + "/tokens", tags=["tokens"])
def tokens(group: GroupDep, limit: Limit = PAGE, before: int | None = None) -> Page[TokenRow]:
    """List the tokens of `/v1`, the API for readers and publishers, newest first, also those that are revoked."""
    return group.tokens(limit, before)


@router.post(_GROUP + "/tokens", tags=["tokens"])
def create_token(group: GroupDep, caller: CallerDep, act: models.TokenAct) -> models.NewToken:
    """Create a token. The answer has it; relay stores its hash only."""
    return models.NewToken(
        token=group.create_token(
            act.name, act.rights, act.hosts, act.types, act.expires, caller.name, act.reason
        )
    )


@router.post(_GROUP + "/sinks/{sink:path}/resend", tags=["sinks"])
def resend(group: GroupDep, caller: CallerDep, sink: str, act: models.ResendAct) -> Count:
    """Deliver events to a sink again, marked as a resend. The sink keeps its position."""
    wanted = act.filter.search()
    deliveries = group.resend(sink, act.ids, wanted, act.endpoint, caller.name, act.reason)
    return Count(transactions=deliveries)


@router.get(_GROUP + "/stopped-handlers", tags=["group"])
def stopped_handlers(group: GroupDep) -> list[BrakedHandler]:
    """List the handlers that are stopped because too many transactions in a row failed."""
    return group.stopped_handlers()


@router.get(_GROUP + "/deferred", tags=["deferred"])
def deferred(
    group: GroupDep,
    query: Annotated[models.DeferredQuery, Query()],
) -> Page[Deferred]:
    """List deferred transactions, oldest first."""
    return group.deferred(query, query.limit, query.after)


@router.post(_GROUP + "/deferred/run", tags=["deferred"])
def run(group: GroupDep, caller: CallerDep, act: models.DeferredAct) -> Count:
    """Make deferred transactions due now."""
    _require_filter(act)
    return Count(transactions=group.run_deferred(act.filter, caller.name, act.reason))


@router.post(_GROUP + "/deferred/cancel", tags=["deferred"])
def cancel(group: GroupDep, caller: CallerDep, act: models.DeferredAct) -> Count:
    """Cancel deferred transactions: they become dead letters."""
    _require_filter(act)
    return Count(transactions=group.cancel_deferred(act.filter, caller.name, act.reason))


@router.get(_GROUP + "/dead-letters", tags=["dead letters"])
def dead_letters(
    group: GroupDep,
    query: Annotated[models.DeadLetterQuery, Query()],
) -> Page[DeadTransaction]:
    """List dead transactions and dead messages of queues, newest first."""
    return group.dead_letters(query, query.limit, query.before)


@router.get(_GROUP + "/dead-letters/kinds", tags=["dead letters"])
def kinds(group: GroupDep) -> list[Kind]:
    """List the commonest kinds of fault of dead events, by handler and queue."""
    return list(group.dead_kinds()[1] or ())


@router.get(_GROUP + "/dead-letters/{id:int}", tags=["dead letters"])
def dead_letter(
    group: GroupDep,
    id: int,
    queue: str | None = None,
    limit: Limit = PAGE,
    after: int | None = None,
) -> models.DeadAnswer:
    """Read the dead transaction of a dead letter, with `queue` of one of a queue: its events, and the actions on it."""
    dead = group.dead_letter(id, queue, limit, after)
    return models.DeadAnswer(
        number=dead.number,
        events=list(dead.events.rows),
        next=dead.events.next,
        actions=dead.actions,
    )


@router.get(_GROUP + "/dead-letters/{id:int}/payload", tags=["dead letters"])
def payload(group: GroupDep, id: int, queue: str | None = None) -> models.Payload:
    """Read the whole payload of a dead letter, with `queue` of one of a queue."""
    return models.Payload(payload=group.payload(id, queue))


@router.post(_GROUP + "/dead-letters/{id:int}/payload", tags=["dead letters"])
def edit(
    group: GroupDep, caller: CallerDep, id: int, act: models.EditAct, queue: str | None = None
) -> Changed:
    """Replace the payload of a dead letter, with `queue` of one of a queue; the published one is stored beside it."""
    group.edit(id, act.payload, caller.name, act.reason, queue)
    return Changed(changed=True)


@router.post(_GROUP + "/dead-letters/replay", tags=["dead letters"])
def replay(group: GroupDep, caller: CallerDep, act: models.DeadLettersAct) -> Count:
    """Queue dead transactions to be applied or delivered again, and put dead messages into their queues."""
    _require_filter(act)
    done = group.replay(act.filter, caller.name, act.reason)
    return Count(transactions=done.queued, warnings=list(done.warnings))


@router.post(_GROUP + "/dead-letters/discard", tags=["dead letters"])
def discard(group: GroupDep, caller: CallerDep, act: models.DeadLettersAct) -> Count:
    """Discard dead transactions, which stay in the list; dead messages of queues are deleted."""
    _require_filter(act)
    return Count(transactions=group.discard(act.filter, caller.name, act.reason))


@router.get(_GROUP + "/actions", tags=["actions"])
def actions(
    group: GroupDep, limit: Limit = PAGE, before: int | None = None, sink: str | None = None
) -> Page[Action]:
    """List the actions on the group and its sinks, newest first."""
    return group.actions(limit, before, sink)


@router.get(_GROUP + "/dead-letter-actions", tags=["actions"])
def dead_letter_actions(
    group: GroupDep, limit: Limit = PAGE, before: int | None = None
) -> Page[ActedOnDead]:
    """List the actions on dead letters, newest first."""
    return group.dead_letter_actions(limit, before)


def _add(act: Act) -> None:
    """Add the route of an act."""

    def run(group: GroupView, caller: Caller, name: str, body: models.Reasoned) -> object:
        given = body.model_dump(exclude={"reason", "dry_run"})
        if getattr(body, "dry_run", False):
            return group.rehearse(act, name, given).answer
        done = group.act(act, name, given, caller.name, body.reason)
        return done.answer or Changed(done.changed)

    annotations = {
        "group": GroupDep,
        "caller": CallerDep,
        "name": Annotated[str, Path(alias=act.of)],
        "body": models.body_of(act),
    }
    run.__annotations__ = annotations
    router.add_api_route(
        f"{_GROUP}/{act.of}s/{{{act.of}:path}}/{act.path or act.name}",
        run,
        methods=["POST"],
        tags=[f"{act.of}s"],
        response_model=act.answers,
        name=f"{act.name}_{act.subject.name}",
        summary=f"{act.label} {act.subject.name}",
        description=act.does,
    )


for each in acts.declared().values():
    _add(each)


def _require_filter(act: models.DeadLettersAct | models.DeferredAct) -> None:
    """Raise ConfigurationError for an empty filter without `all`, which may be a mistake."""
    if not act.all and act.filter == type(act.filter)():
        raise ConfigurationError("filter: is empty: give a condition, or all: true")


def _offsets_moved(move: OffsetsMove, done: bool) -> Moved:
    given_up = move.given_up
    return Moved(
        goes_on=move.goal.text,
        dead=given_up.dead,
        deferred=given_up.deferred,
        done=done,
        again=move.again,
        skipped=move.skipped,
    )
