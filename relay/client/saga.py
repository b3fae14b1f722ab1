"""Sagas: functions of several steps, each of which commits by itself, that go on after a crash and undo what they did.

A saga is a queue ordered by the saga's key, which a `Worker` works: the messages are the events that start the saga or
that it waits for, and those that wake it at a time. A message is claimed in a transaction, the function runs again from
the top, steps that are done return what they returned, and the next one is run and recorded in that transaction.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from threading import Lock
from typing import Any, NoReturn, Protocol

from relay.causes import Causing, handling
from relay.client import sessions
from relay.client.errors import EventInvalid
from relay.client.event import Event
from relay.client.messages import RELEASE, Ends, Message, Queue, call_of, stored, text_of
from relay.client.outbox import Outbox
from relay.client.payloads import encode_object
from relay.model.moments import moment_of
from relay.outcomes import Drop, Fail, RetryLater, named_wait

__all__ = ["Context", "Saga", "SagaFault", "SagaStep", "StepFailed", "saga"]

log = logging.getLogger("relay.saga")

WAKE = "relay.saga"
"""The type of the messages that only say: look at the saga."""
MOST_BYTES = 1_000_000
"""Of the JSON of what a step returns."""
MOST_ENTRIES = 10_000
"""Of a saga: events, steps and waits."""
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 1.0, 300.0
_BUSY_SECONDS = 0.5
_FOR_EVER = 2**31 - 1
_NAMESPACE = uuid.UUID("7d2a6f6e-52c4-4b3c-9d0f-3a1c5e1d8f00")

_BEGIN = sessions.Statement.selecting(
    "relay.begin_saga(p.a->>'queue', (p.a->>'id')::bigint, (p.a->>'saga')::bigint, (p.a->>'entries')::int,"
    " (p.a->>'at')::timestamptz)::text"
)
ADVANCE = call_of(
    "relay.advance_saga",
    *("p.a->>'queue'", "(p.a->>'id')::bigint", "(p.a->>'attempt')::int", "(p.a->>'saga')::bigint"),
    *("(p.a->>'known')::int", "p.a->'added'", "p.a->>'state'", "(p.a->>'version')::int"),
    *("p.a->>'step'", "(p.a->>'next_at')::timestamptz", "p.a->>'error'", "p.a->>'failure'"),
    "make_interval(secs => (p.a->>'after')::float8)",
)
_HOLD = call_of(
    "relay.hold_event",
    *("p.a->>'queue'", "(p.a->>'id')::bigint", "(p.a->>'attempt')::int"),
    *("make_interval(secs => (p.a->>'seconds')::float8)", "p.a->>'error'"),
)


class SagaFault(Exception):
    """The code of a saga does not fit what has happened in it, or uses its context in a wrong way.

    The saga waits, and goes on when the code fits again.
    """


class StepFailed(Exception):
    """A step has failed for good: its attempts are used up, or it has raised Fail.

    A saga may catch it and take another way; else it fails, and what it has done is undone.
    """

    def __init__(self, step: str, reason: str) -> None:
        super().__init__(f"step {step}: {reason}")
        self.step, self.reason = step, reason


class _Stop(BaseException):
    """Leaves the function of a saga: nothing more can be done in this attempt. Not to be caught."""


@dataclass(frozen=True, slots=True)
class SagaStep:
    """What a step's function, or what undoes it, is called with before its own arguments.

    `session` is that of the worker's transaction: what is changed through it commits together with the step.
    `idempotency_key` is the same in each attempt, for calls of other services; that of the undo is another one.
    `attempt` counts from 1. `result` is what the step has returned, for what undoes it; None if the step has failed.
    """

    name: str
    session: Any
    idempotency_key: str
    attempt: int
    event: Message
    result: Any = None


Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Undo:
    step: str
    function: Function
    arguments: tuple[Any, ...]
    result: Any


class Saga:
    """A saga and its function, which `saga` makes; give it to a `Worker` in place of a queue."""

    def __init__(
        self, function: Function, queue: Queue, version: int, earlier: Sequence[Saga], **rules: Any
    ) -> None:
        self.function, self.queue, self.version = function, queue, version
        self.rules = _Rules(**rules)
        self.is_async = inspect.iscoroutinefunction(function)
        self.versions: dict[int, Saga] = {}
        for each in (*earlier, self):
            self.versions |= {**each.versions, each.version: each}
            if each.is_async is not self.is_async:
                raise ValueError(
                    f"saga {queue.name}: all its versions are coroutine functions, or none is"
                )
        self._missing: set[int] = set()

    def handler(self, outbox: Outbox) -> Function:
        """Return the handler of the messages of the saga's queue, for a worker."""
        known = KnownSagas()
        if self.is_async:

            async def handle(message: Message, session: Any) -> None:
                await SagaAttempt(self, message, _AsyncSession(session), outbox, known).run()

            return handle

        def handle_now(message: Message, session: Any) -> None:
            finished(SagaAttempt(self, message, _Session(session), outbox, known).run())

        return handle_now

    def require_awaited(self, event_type: str) -> None:
        """Raise SagaFault for a type, or a pattern, of which the queue gets no event."""
        types = (self.queue.match or {})["event_type"]
        if not any(
            fnmatchcase(event_type, each) or fnmatchcase(each, event_type) for each in types
        ):
            raise SagaFault(
                f"wait: {event_type} is not among the saga's `waits`: it would never come"
            )

    def lacks(self, version: int) -> bool:
        """Note that a saga has a version that the worker has not; returns whether that is new."""
        is_new = version not in self._missing
        self._missing.add(version)
        return is_new


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    starts: tuple[str, ...]
    cancels: tuple[str, ...]
    attempts: int
    undo_attempts: int | None
    hold: float


def saga(
    name: str,
    *,
    starts: str | Sequence[str],
    key: str,
    waits: str | Sequence[str] = (),
    cancels: str | Sequence[str] = (),
    version: int = 1,
    earlier: Sequence[Saga] = (),
    attempts: int = 5,
    undo_attempts: int | None = None,
    hold: float = 600.0,
    backoff: float | None = None,
    max_backoff: float | None = None,
    keep: float = 30 * 86_400.0,
    workers: str | None = None,
    group_id: str | None = None,
) -> Callable[[Function], Saga]:
    """Return a decorator that makes a saga of a function, which is called with a `Context` and the event.

    An event of the types `starts` starts one, unless one of its key runs. `key` is where its events have what they have
    in common: a path such as `payload.order_id`, or "host", "user" or "aggregate", always within a host. `waits` are
    the other types, or patterns, that `Context.wait` may be given; an event of the types `cancels` makes the saga fail.
    A step is tried `attempts` times, with the waits of the queue (`backoff`, `max_backoff`), an undo `undo_attempts`
    times; None: for ever. An event that no saga has is held for `hold` seconds, then a dead letter. `version` is that
    of the function, which runs the sagas that it starts to their end; `earlier` are the versions before it. Sagas that
    have ended are kept for `keep` seconds. The queue has the saga's name; `workers` and `group_id` are those of a
    `Queue`. Raises ValueError for a number that makes no sense.
    """

    def listed(types: str | Sequence[str]) -> tuple[str, ...]:
        return (types,) if isinstance(types, str) else tuple(types)

    for what, number in (
        ("attempts", attempts),
        ("undo_attempts", undo_attempts),
        ("version", version),
    ):
        if number is not None and number < 1:
            raise ValueError(f"saga {name}: {what}: must be 1 or more")
    queue = Queue(
        name=name,
        match={"event_type": [*listed(starts), *listed(waits), *listed(cancels)]},
        key=key,
        attempts=_FOR_EVER,
        backoff=backoff,
        max_backoff=max_backoff,
        keep_done=keep,
        workers=workers,
        group_id=group_id,
    )

    def make(function: Function) -> Saga:
        return Saga(
            function,
            queue,
            version,
            earlier,
            starts=listed(starts),
            cancels=listed(cancels),
            attempts=attempts,
            undo_attempts=undo_attempts,
            hold=hold,
        )

    return make


_WITHIN: ContextVar[Context | None] = ContextVar("relay_saga_within", default=None)
"""The context one of whose steps, undos or matches runs here."""

Entry = tuple[str, str, Any]
"""What has happened in a saga: the kind, the step, and the result, as rows of `relay.saga_steps`."""


@dataclass(frozen=True, slots=True)
class KnownSaga:
    """What a worker has read of a saga: its id, its entries, and when the last of them was added."""

    id: int | None = None
    entries: Sequence[Entry] = ()
    at: str | None = None


class KnownSagas:
    """What a worker has read of the sagas that its messages drive, so that the next attempt reads only what is new."""

    def __init__(self) -> None:
        self._of_messages: dict[int, KnownSaga] = {}
        self._count = 0
        self._using = Lock()

    def pop(self, message: int) -> KnownSaga:
        """Return what is known of the saga that a message has driven, and forget it."""
        with self._using:
            return self._popped(message)

    def keep(self, message: int, saga: KnownSaga) -> None:
        """Keep it for the next attempt with the message; too much is forgotten, the oldest first."""
        with self._using:
            self._popped(message)
            self._of_messages[message] = saga
            self._count += len(saga.entries)
            while self._count > MOST_ENTRIES:
                self._popped(next(iter(self._of_messages)))

    def _popped(self, message: int) -> KnownSaga:
        saga = self._of_messages.pop(message, KnownSaga())
        self._count -= len(saga.entries)
        return saga


class SagaSession(Protocol):
    """What an attempt of a saga reaches its database through; `session` is what steps get."""

    session: Any

    async def query(self, statement: sessions.Statement, text: str) -> str:
        """Return the one text that a statement results in."""
        ...

    async def publish(self, outbox: Outbox, events: Sequence[Event], host_id: str) -> None:
        """Publish events in the transaction."""
        ...

    def calling(self, name: str) -> AbstractContextManager[None]:
        """Return the context in which a step, or an undo, is called."""
        ...

    def given(self, call: Coroutine[Any, Any, Any]) -> Any:
        """What a method of the context returns to the saga's function."""
        ...


class _Session:
    """The session of a worker whose database is synchronous."""

    def __init__(self, session: Any) -> None:
        self.session = session

    async def query(self, statement: sessions.Statement, text: str) -> str:
        return sessions.query(self.session, statement, text)

    async def publish(self, outbox: Outbox, events: Sequence[Event], host_id: str) -> None:
        outbox.publish(self.session, events, host_id=host_id)

    def calling(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def given(self, call: Coroutine[Any, Any, Any]) -> Any:
        return finished(call)


class _AsyncSession:
    """The session of a worker whose database is asynchronous."""

    def __init__(self, session: Any) -> None:
        self.session = session

    async def query(self, statement: sessions.Statement, text: str) -> str:
        return await sessions.query_async(self.session, statement, text)

    async def publish(self, outbox: Outbox, events: Sequence[Event], host_id: str) -> None:
        await outbox.publish_async(self.session, events, host_id=host_id)

    def calling(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def given(self, call: Coroutine[Any, Any, Any]) -> Any:
        return call


def finished(call: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that awaits nothing which is not there, and return its result."""
    try:
        call.send(None)
    except StopIteration as ended:
        return ended.value
    call.close()
    raise SagaFault("a step returned something to be awaited: make the saga a coroutine function")


@dataclass(slots=True)
class _Outcome:
    """How an attempt ends: the state of the saga afterwards, or an error that undoes the attempt."""

    state: str = "running"
    step: str | None = None
    """What it waits for, or the step that has failed."""
    next_at: datetime | None = None
    error: str | None = None
    gives_way: bool = False
    """Events of the saga come first: the message that wakes it is given back for a moment."""
    raised: Exception | None = None
    """What a step has raised: it is tried again."""
    fault: Exception | None = None
    """What the saga's code has raised: the message is given back for a while."""
    ended: StepFailed | None = None
    """A step that has failed for good: what the attempt has changed is undone, and only the entries count."""


class SagaAttempt:
    """One message for a saga, in the transaction that has claimed it."""

    def __init__(
        self,
        saga: Saga,
        message: Message,
        session: SagaSession,
        outbox: Outbox,
        sagas: KnownSagas,
    ) -> None:
        self.saga, self.message, self.session, self.outbox = saga, message, session, outbox
        self._sagas = sagas

    async def run(self) -> None:
        """Do the next thing that the saga has to do, and leave in the message how the attempt ends."""
        saga, message = self.saga, self.message
        before = self._sagas.pop(message.id)
        asked = {"queue": message.queue, "id": message.id, "saga": before.id}
        asked |= {"entries": len(before.entries), "at": before.at}
        found = json.loads(await self.session.query(_BEGIN, json.dumps(asked)))
        self.found, self.now = found, moment_of(found["now"])
        is_event = message.event_type != WAKE
        if found.get("busy"):
            self._release(RetryLater("another message drives the saga"), _BUSY_SECONDS)
        if "saga" not in found:
            self.number, self.entries, self.version = None, [], saga.version
            self.known, self.state = 0, "running"
            if not is_event or found["started"]:
                return
            self._require_start()
        else:
            self.number, self.version, self.state = found["saga"], found["version"], found["state"]
            self.entries = [*before.entries[: found["known"]], *map(_entry, found["entries"])]
            self.known = len(self.entries)
        if self.version not in saga.versions:
            if saga.lacks(self.version):
                log.warning(
                    "a saga waits for a worker that has its version",
                    extra={"queue": message.queue, "version": self.version},
                )
            self._release(SagaFault(f"the worker has not version {self.version} of the saga"))
        if is_event and any(
            kind == "event" and result["event_id"] == message.event_id
            for kind, _, result in self.entries
        ):
            is_event = False
        if is_event:
            if len(self.entries) >= MOST_ENTRIES:
                raise Fail(f"the saga has {MOST_ENTRIES:,} entries, and takes no further event")
            self.entries.append(("event", message.event_type, _stored(message)))
        outcome = await self._outcome(is_event)
        self._end(outcome)

    @property
    def is_beside(self) -> bool:
        """Whether the message only wakes the saga, beside the order of its key."""
        return self.message.event_type == WAKE and self.message.key is None

    @property
    def pending(self) -> list[str]:
        """The types of the events of the saga that are there and not taken in yet, in order."""
        return self.found.get("pending", [])  # type: ignore[no-any-return]

    def _cancelled_by(self, is_event: bool) -> str | None:
        """Return the type of the event that makes a saga fail which does not fail yet.

        Also of one that is there and has not come to its turn, unless it is for the saga that the one before it starts.
        """
        if self.state not in ("running", "waiting"):
            return None
        rules = self.saga.rules
        if is_event and _matches(rules.cancels, self.message.event_type):
            return self.message.event_type
        for each in self.pending:
            if _matches(rules.cancels, each):
                return each
            if _matches(rules.starts, each):
                break
        return None

    def _require_start(self) -> None:
        """Hold an event that starts no saga, and for which there is none. Raises what ends its attempt."""
        message, rules = self.message, self.saga.rules
        if self.found["key"] is None:
            key = self.saga.queue.key
            raise Fail(
                f"the event has no {key}, the key of the saga (relay.enqueue takes a message's as `key`)"
            )
        if _matches(rules.starts, message.event_type):
            return
        if self.found["ended"]:
            raise Drop("the saga of its key has ended")
        age = (self.now - message.first_taken_at).total_seconds()
        if age >= rules.hold:
            raise Fail(f"no saga of its key has begun within {rules.hold:g} s")
        seconds = min(max(age, _FIRST_WAIT_SECONDS), 30.0, max(rules.hold - age, 0.0))
        self._release(RetryLater("no saga of its key has begun"), seconds, _HOLD)

    def _release(
        self,
        error: BaseException,
        seconds: float | None = None,
        statement: sessions.Statement = RELEASE,
    ) -> NoReturn:
        """Give the message back for a while, without an attempt. The longer it has waited, the longer it waits."""
        age = (self.now - self.message.first_taken_at).total_seconds()
        wait = min(max(age / 4, _FIRST_WAIT_SECONDS), _LONGEST_WAIT_SECONDS)
        given = self.message.of_attempt | {
            "seconds": wait if seconds is None else seconds,
            "error": text_of(error),
        }
        raise Ends(statement, given) from error

    async def _outcome(self, is_event: bool) -> _Outcome:
        event_type = self._cancelled_by(is_event)
        if event_type is not None:
            self.entries.append(("fail", event_type, "cancelled"))
            return _Outcome("undoing")
        if self.state == "stuck":
            return _Outcome("stuck", self.found["step"], error=self.found["error"])
        context = Context(self)
        outcome = await self._call(context)
        if self.state != "undoing":
            return outcome
        return await context.undo(outcome.fault)

    async def _call(self, context: Context) -> _Outcome:
        """Call the saga's function up to where nothing more can be done."""
        event = context.event
        raised: BaseException | None = None
        try:
            with handling(Causing([event], self.outbox.max_hops)):
                result = self.saga.versions[self.version].function(context, event)
                if inspect.isawaitable(result):
                    await result
        except (Exception, BaseExceptionGroup, _Stop) as error:
            raised = error
        outcome = await context.outcome_after(raised)
        if outcome.fault is not None and context.has_effect:
            # What was done commits; the fault comes again with the next attempt.
            return _Outcome()
        return outcome

    def _end(self, outcome: _Outcome) -> None:
        """Have the slot end the attempt. Raises what undoes its effects."""
        if outcome.fault is not None:
            self._release(outcome.fault)
        if outcome.gives_way:
            self._release(RetryLater("events of the saga come first"), _BUSY_SECONDS)
        given = self.message.of_attempt | {
            "saga": self.number,
            "known": self.known,
            "added": self.entries[self.known :],
            "state": outcome.state,
            "version": self.version,
            "step": outcome.step,
            "next_at": None if outcome.next_at is None else outcome.next_at.isoformat(),
            "error": outcome.error or self._reason(),
        }
        if outcome.raised is not None:
            failure = text_of(outcome.raised)
            wait = named_wait(outcome.raised)
            told = {"error": failure, "failure": failure, "after": wait}
            raise Ends(ADVANCE, given | told) from outcome.raised
        if outcome.ended is not None:
            raise Ends(ADVANCE, given) from outcome.ended
        if outcome.state in ("running", "undoing") and self.number is not None:
            # Not what this attempt adds, which may not commit.
            read = self.entries[: self.known]
            self._sagas.keep(self.message.id, KnownSaga(self.number, read, self.found.get("at")))
        self.message.endings.append((ADVANCE, json.dumps(given)))

    def _reason(self) -> str | None:
        """Why the saga has failed, if it has."""
        for kind, step, reason in reversed(self.entries):
            if kind == "fail":
                return f"{reason} by {step}" if step else str(reason)
        return None


class Context:
    """What a saga does its work with. In a coroutine function each of its calls is awaited.

    Each step, wait and message has a name of its own within the saga: what is done is found again by it.
    """

    def __init__(self, attempt: SagaAttempt) -> None:
        self._attempt = attempt
        self._entries = attempt.entries
        self._done: dict[str, tuple[str, Any]] = {}
        self._began: dict[str, Any] = {}
        for kind, step, result in self._entries:
            if kind in ("step", "failed", "wait", "patched", "skipped"):
                self._done[step] = kind, result
            elif kind == "waits":
                self._began[step] = result
        self._asked: set[str] = set()
        self._undos: list[_Undo] = []
        self._names: dict[str, int] = {}
        self._turn = asyncio.Lock()
        self._is_left = False
        self.outcome: _Outcome | None = None
        self.has_effect = False

    @property
    def event(self) -> Message:
        """The event that has started the saga."""
        return self._message(self._entries[0][2])

    def step(
        self,
        name: str,
        function: Function,
        *arguments: Any,
        undo: Function | None = None,
        attempts: int | None = None,
        undo_failed: bool = False,
    ) -> Any:
        """Run a function once, as `function(step, *arguments)`, and return what it returns, as JSON has it.

        It is tried again as the saga says, or `attempts` times. `undo(step, *arguments)` undoes it if the saga fails
        later; with `undo_failed`, also where the step itself has failed, for calls whose outcome is not known. Raises
        StepFailed when it has failed for good.
        """
        return self._given(self._step(name, function, arguments, undo, attempts, undo_failed))

    def send(self, *events: Event, name: str | None = None) -> Any:
        """Publish events, as one business transaction with the host of the saga's event."""

        async def publish() -> None:
            host = self.event.host_id
            if host is None:
                raise EventInvalid(
                    "send: the saga's event has no host_id, which an event must have"
                )
            await self._attempt.session.publish(self._attempt.outbox, events, host)

        named = self._numbered(name or f"send {events[0].event_type}")
        return self._given(self._step(named, lambda step: publish(), (), None, None, False))

    def wait(
        self,
        event_type: str,
        match: Callable[[Message], bool] | None = None,
        timeout: float | timedelta | datetime | None = None,
        name: str | None = None,
    ) -> Any:
        """Wait for an event of a type, or a pattern, that `match` accepts, and return it; None at the timeout.

        An event that has come before, and that no other wait has had, is returned at once. `timeout` is in seconds, or
        a time. The saga's `waits` must have the type.
        """
        self._attempt.saga.require_awaited(event_type)
        named = self._numbered(name or event_type)
        return self._given(self._wait(named, event_type, match, timeout))

    def sleep(self, until: float | timedelta | datetime, name: str = "sleep") -> Any:
        """Wait for a time, or for some seconds: without a thread, a connection or a poll of its own."""
        return self._given(self._wait(self._numbered(name), None, None, until))

    def patched(self, name: str) -> bool:
        """Return whether the saga has not been here before `ctx.patched(name)` was: then the changed code runs.

        Not awaited. A saga that was further keeps the code of before: it gets False.
        """
        self._require_outside()
        named = f"patched {name}"
        if self._ask(named, ("patched",)) is not None:
            return True
        if self._attempt.state == "undoing" or self._unasked("") is not None:
            return False
        self._entries.append(("patched", named, True))
        return True

    def fail(self, reason: str) -> NoReturn:
        """Make the saga fail: what it has done is undone, in reverse order. Does not return, and is not awaited."""
        self._require_outside()
        self._stop(self.failed(reason))

    def failed(self, reason: str) -> _Outcome:
        """The outcome of a saga that fails."""
        if self._attempt.state == "undoing":
            return _Outcome("undoing")
        self._entries.append(("fail", "", stored(str(reason))))
        return _Outcome("undoing")

    def completed(self) -> _Outcome:
        """The outcome of a saga whose function has returned."""
        if self._attempt.state == "undoing":
            return _Outcome("undoing")
        fault = self._unasked("its end")
        return _Outcome("done") if fault is None else _Outcome(fault=fault)

    async def undo(self, fault: Exception | None) -> _Outcome:
        """Undo the last step that is not undone. `fault` is that of the code that leads to the steps."""
        gone = sorted(
            step
            for step, (kind, _) in self._done.items()
            if kind in ("step", "failed") and step not in self._asked
        )
        if gone:
            return _Outcome(fault=fault or self._gone(gone[0], "its undo"))
        undone = {step for kind, step, _ in self._entries if kind == "undone"}
        left = [each for each in self._undos if each.step not in undone]
        if not left:
            return _Outcome("compensated")
        last = left[-1]
        most = self._attempt.saga.rules.undo_attempts
        self.outcome = None
        within = _WITHIN.set(self)
        try:
            await self._run(last.step, last.function, last.arguments, most, "undo", last.result)
        except StepFailed as error:
            return _Outcome("stuck", last.step, error=f"undo of {error}", ended=error)
        except _Stop:
            return self._left("undoing")
        finally:
            _WITHIN.reset(within)
        self._entries.append(("undone", last.step, None))
        return _Outcome("undoing")

    def _left(self, state: str) -> _Outcome:
        return self.outcome or _Outcome(state)

    def _given(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self._attempt.session.given(self._in_turn(call))

    async def _in_turn(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Await a call after those that others have begun: an attempt that ends must leave none of them behind."""
        try:
            self._require_outside()
            async with self._turn:
                within = _WITHIN.set(self)
                try:
                    return await call
                finally:
                    _WITHIN.reset(within)
        finally:
            call.close()

    def _require_outside(self) -> None:
        """Refuse what a step, an undo or a match asks of the context, also in a task that it has begun."""
        if _WITHIN.get() is self:
            fault = SagaFault(
                "a step, an undo or a match uses the context: only the saga's function may"
            )
            self._stop(_Outcome(fault=fault))

    async def outcome_after(self, error: BaseException | None) -> _Outcome:
        """Return how the attempt ends, whose function has returned or raised: after the step that runs beside it."""
        self._is_left = True
        async with self._turn:
            if self.outcome is not None:
                return self.outcome
        if error is None:
            return self.completed()
        if isinstance(error, _Stop):
            return _Outcome()
        if isinstance(error, ExceptionGroup) and error.split(StepFailed)[1] is None:
            # Of a group of tasks, such as asyncio.TaskGroup.
            return self.failed("; ".join(map(str, error.exceptions)))
        if isinstance(error, StepFailed):
            return self.failed(str(error))
        if isinstance(error, Exception):
            return _Outcome(fault=error)
        raise error

    def _message(self, values: Mapping[str, Any]) -> Message:
        of = self._attempt.message
        times = {
            name: moment_of(values[name]) if values[name] is not None else None
            for name in ("event_ts", "enqueued_at", "first_taken_at")
        }
        return Message(queue=of.queue, **{**values, **times})

    def _numbered(self, name: str) -> str:
        """The name of something that may come several times, such as in a loop."""
        self._names[name] = number = self._names.get(name, 0) + 1
        return name if number == 1 else f"{name} {number}"

    def _ask(self, name: str, kinds: tuple[str, ...]) -> tuple[str, Any] | None:
        """Return what is known of a step. Raises SagaFault for a name that is used twice, or for something else."""
        if self.outcome is not None or self._is_left:
            raise _Stop
        done = self._done.get(name)
        fault = None
        if name != stored(name):
            fault = f"step {name!r}: a name has no NUL, no half of a surrogate pair, and is short"
        elif name in self._asked:
            fault = f"step {name!r} comes twice: give each step a name of its own"
        elif done is not None and done[0] not in kinds:
            fault = f"step {name!r} is a {kinds[0]} now, and was a {done[0]} when it was done"
        if fault is not None:
            self._stop(_Outcome(fault=SagaFault(fault)))
        self._asked.add(name)
        return done

    def _unasked(self, what: str) -> SagaFault | None:
        """Return the fault of a saga whose code does not come to what was done before it does something new."""
        kinds = ("step", "failed", "skipped", "waits", "wait")
        gone = (
            step for kind, step, _ in self._entries if kind in kinds and step not in self._asked
        )
        first = next(gone, None)
        return None if first is None else self._gone(first, what)

    def _gone(self, name: str, what: str) -> SagaFault:
        return SagaFault(
            f"step {name!r} was done, and the saga's code comes to {what} without it: has it been renamed or removed? "
            "Give the change a version of its own, or ask ctx.patched"
        )

    def _stop(self, outcome: _Outcome) -> NoReturn:
        self.outcome = outcome
        raise _Stop

    def _begin(self, name: str) -> None:
        """Allow something new. Raises what ends the attempt."""
        if self._attempt.state == "undoing":
            self._stop(_Outcome("undoing"))
        fault = self._unasked(repr(name))
        if fault is not None:
            self._stop(_Outcome(fault=fault))

    async def _step(
        self,
        name: str,
        function: Function,
        arguments: tuple[Any, ...],
        undo: Function | None,
        attempts: int | None,
        undo_failed: bool,
    ) -> Any:
        done = self._ask(name, ("step", "failed", "skipped"))
        if done is None:
            self._begin(name)
            if self.has_effect:
                # What was done commits first.
                self._stop(_Outcome())
            most = attempts or self._attempt.saga.rules.attempts
            try:
                result = await self._run(name, function, arguments, most, "step", None)
            except StepFailed as error:
                self._entries.append(("failed", name, error.reason))
                self._stop(_Outcome(ended=error))
            self._entries.append(("step", name, result))
            self._done[name] = done = "step", result
            self.has_effect = True
        kind, result = done
        if undo is not None and (kind == "step" or (kind == "failed" and undo_failed)):
            known = result if kind == "step" else None
            self._undos.append(_Undo(name, undo, arguments, known))
        if kind == "failed":
            raise StepFailed(name, result)
        return result

    async def _wait(
        self,
        name: str,
        event_type: str | None,
        match: Callable[[Message], bool] | None,
        until: float | timedelta | datetime | None,
    ) -> Message | None:
        done = self._ask(name, ("wait",))
        if done is None:
            self._begin(name)
            number = None if event_type is None else self._arrived(event_type, match)
            if number is None:
                if name not in self._began:
                    ends = self._moment(until)
                    self._began[name] = None if ends is None else ends.isoformat()
                    self._entries.append(("waits", name, self._began[name]))
                limit = self._began[name]
                ends = None if limit is None else datetime.fromisoformat(limit)
                is_over = ends is not None and ends <= self._attempt.now
                if is_over and event_type is not None and self._comes(event_type):
                    # It was there in time, and has its turn first.
                    if self._attempt.is_beside and not self.has_effect:
                        self._stop(_Outcome(gives_way=True))
                    is_over = False
                if not is_over:
                    self._stop(_Outcome("waiting", event_type or "sleep", ends))
            self._entries.append(("wait", name, number))
            self._done[name] = done = "wait", number
        _, number = done
        return None if number is None else self._message(self._entries[number - 1][2])

    def _comes(self, event_type: str) -> bool:
        return any(fnmatchcase(each, event_type) for each in self._attempt.pending)

    def _arrived(self, event_type: str, match: Callable[[Message], bool] | None) -> int | None:
        """Return the number of the first event that fits and that no wait has had."""
        had = {result for kind, _, result in self._entries if kind == "wait"} | {1}
        for number, (kind, each, result) in enumerate(self._entries, 1):
            if kind != "event" or number in had or not fnmatchcase(each, event_type):
                continue
            if match is None or match(self._message(result)):
                return number
        return None

    def _moment(self, until: float | timedelta | datetime | None) -> datetime | None:
        """Return when a wait is over, by the database's clock."""
        if until is None:
            return None
        if isinstance(until, datetime):
            if until.utcoffset() is None:
                raise SagaFault("a time to wait for has no time zone: give it one")
            return until
        if not isinstance(until, timedelta):
            until = timedelta(seconds=until)
        return self._attempt.now + until

    async def _run(
        self,
        name: str,
        function: Function,
        arguments: tuple[Any, ...],
        most: int | None,
        kind: str,
        result: Any,
    ) -> Any:
        """Call a step's function. Raises StepFailed if it has failed for good, and _Stop if it is tried again."""
        attempt = self._attempt
        state = "running" if kind == "step" else "undoing"
        began = attempt.message.attempt + attempt.found["interruptions"]
        if most is not None and began > most:
            raise StepFailed(name, attempt.found["failure"] or f"{most} attempts did not end")
        key = f"{attempt.message.queue} {self.event.event_id} {name} {kind}"
        step = SagaStep(
            name=name,
            session=attempt.session.session,
            idempotency_key=str(uuid.uuid5(_NAMESPACE, key)),
            attempt=began,
            event=self.event,
            result=result,
        )
        try:
            with attempt.session.calling(name if kind == "step" else f"undo {name}"):
                returned = function(step, *arguments)
                if inspect.isawaitable(returned):
                    returned = await returned
            return _exact(name, returned)
        except Exception as error:
            if isinstance(error, Fail | Drop) or (most is not None and began >= most):
                raise StepFailed(name, text_of(error)) from error
            self._stop(_Outcome(state, name, raised=error))
        except BaseException as error:
            # The saga may catch it, such as at a limit of time: what the step has changed does not count.
            cut = SagaFault(f"step {name!r} was cut off by {type(error).__name__}")
            self.outcome = self.outcome or _Outcome(state, name, raised=cut)
            raise


def _exact(name: str, returned: Any) -> Any:
    """Return a result as it will be read again. Raises EventInvalid for what is no JSON, or is too large."""
    text = encode_object({"result": returned})
    if len(text.encode()) > MOST_BYTES:
        raise EventInvalid(
            f"step {name!r} returns more than {MOST_BYTES:,} bytes: store it elsewhere, and return where"
        )
    return json.loads(text)["result"]


def _entry(given: Sequence[Any]) -> Entry:
    kind, step, result = given
    return kind, step, result


def _stored(message: Message) -> dict[str, Any]:
    """The event of a message as an entry has it, from which `Message` is made again."""
    values: dict[str, Any] = {
        name: getattr(message, name)
        for name in Message.__dataclass_fields__
        if name not in ("queue", "replies", "results", "endings")
    }
    return json.loads(encode_object(values))  # type: ignore[no-any-return]


def _matches(patterns: Sequence[str], event_type: str) -> bool:
    return any(fnmatchcase(event_type, each) for each in patterns)
