"""Runs a saga in memory, for its tests: without a database, and with a clock that the test moves."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from relay.client.event import Event
from relay.client.messages import RELEASE, Ends, Message
from relay.client.outbox import Outbox
from relay.client.saga import ADVANCE, WAKE, Entry, KnownSagas, Saga, SagaAttempt, finished
from relay.client.sessions import Statement
from relay.outcomes import Drop, Fail

_MOST_ATTEMPTS = 1_000


class StepLost(Exception):
    """What a step fails with that a test lets fail."""


class _Killed(BaseException):
    """A worker was killed."""


@dataclass
class SagaRun:
    """One run of a saga, beginning with the first event that starts it.

    run = SagaRun(checkout, fails={"ship": 5})
    run.event("order.placed", {"order_id": 1})
    assert (run.state, run.undone) == ("compensated", ["pay", "reserve"])

    `session` is what steps get as theirs. Of the steps in `fails`, so many attempts fail; those in `killed` are run,
    and their worker is killed before it can record that, once; an undo is named "undo pay". `now` is the time, which
    `pass_time` moves. `sent` are the events that the saga has published, `dead` why an event became a dead letter.
    """

    saga: Saga
    session: Any = None
    fails: Mapping[str, int] = field(default_factory=dict)
    killed: Collection[str] = ()
    now: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    state: str | None = None
    step: str | None = None
    error: str | None = None
    entries: list[Entry] = field(default_factory=list)
    sent: list[Event] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)
    """The steps and undos that were called, also those that have failed."""
    version: int = 0
    _wakes_at: datetime | None = None
    _early: list[Message] = field(default_factory=list)
    _left: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._left = dict(self.fails)
        self._kills = set(self.killed)

    @property
    def done(self) -> list[str]:
        """The steps that are done, in order."""
        return [step for kind, step, _ in self.entries if kind == "step"]

    @property
    def undone(self) -> list[str]:
        """The steps that were undone, in order."""
        return [step for kind, step, _ in self.entries if kind == "undone"]

    def event(
        self, event_type: str, payload: Any = None, *, host_id: str = "", **more: Any
    ) -> SagaRun:
        """Let an event arrive, and run the saga until it waits or has ended; returns this run.

        Raises what the saga's code raises, such as SagaFault.
        """
        message = self._message(event_type, payload, host_id or str(uuid.UUID(int=1)), more)
        self._work(message)
        early, self._early = self._early, []
        for each in early if self.state is not None else ():
            self._work(each)
        self._early += early if self.state is None else []
        return self

    def pass_time(self, **of: float) -> SagaRun:
        """Move the clock, by what a timedelta is made of, and wake the saga at the time for which it waits."""
        ends = self.now + timedelta(**of)
        while self._wakes_at is not None and self._wakes_at <= ends:
            self.now = max(self.now, self._wakes_at)
            self._wakes_at = None
            self._work(self._message(WAKE, None, "", {}))
        self.now = ends
        return self

    def _message(
        self, event_type: str, payload: Any, host_id: str, more: Mapping[str, Any]
    ) -> Message:
        names = set(Message.__dataclass_fields__) - {"replies", "results", "endings"}
        values: dict[str, Any] = dict.fromkeys(names) | {
            "queue": self.saga.queue.name,
            "id": 1,
            "attempt": 1,
            "key": "key",
            "event_id": str(uuid.uuid4()),
            "event_type": event_type,
            "host_id": host_id,
            "payload": payload,
            "enqueued_at": self.now,
            "first_taken_at": self.now,
        }
        return Message(**(values | dict(more)))

    def _work(self, message: Message) -> None:
        for _ in range(_MOST_ATTEMPTS):
            again = self._attempt(message)
            if again is None:
                return
            message = again
        raise AssertionError(f"the saga does not come to rest: {self.error}")

    def _attempt(self, message: Message) -> Message | None:
        """Work a message once; returns it as it is tried again, None if it is done."""
        attempt = SagaAttempt(self.saga, message, _MemorySession(self), Outbox(), KnownSagas())
        before = len(self.sent)
        try:
            if self.saga.is_async:
                asyncio.run(attempt.run())
            else:
                finished(attempt.run())
        except _Killed:
            del self.sent[before:]
            return self._again(message)
        except Drop:
            return None
        except Fail as error:
            self.dead.append(str(error))
            return None
        except Ends as ends:
            del self.sent[before:]
            statement, given = ends.ending
            if statement is not ADVANCE:
                self._give_back(message, statement, ends)
                return None
        else:
            if not message.endings:
                return None
            given = json.loads(message.endings[-1][1])
        return self._advanced(given, message)

    def _give_back(self, message: Message, statement: Statement, ends: Ends) -> None:
        if statement is RELEASE and ends.__cause__ is not None:
            raise ends.__cause__
        self._early.append(message)

    def _advanced(self, given: dict[str, Any], message: Message) -> Message | None:
        self.entries += [(kind, step, result) for kind, step, result in given["added"]]
        self.state, self.step, self.error = given["state"], given["step"], given["error"]
        self.version = given["version"]
        until = given["next_at"]
        self._wakes_at = None if until is None else datetime.fromisoformat(until)
        if self.state not in ("running", "undoing"):
            return None
        failed = given.get("failure") is not None
        if failed:
            self.now += timedelta(seconds=given["after"] or 1)
        number = message.attempt + 1 if failed else 1
        return self._again(message, event_type=WAKE, payload=None, attempt=number)

    def _again(self, message: Message, **changed: Any) -> Message:
        """The message as the next attempt gets it."""
        return replace(message, **changed, replies=[], results=[], endings=[])

    def begun(self) -> dict[str, Any]:
        """Return what `relay.begin_saga` says of this run."""
        common = {"key": "key", "now": self.now.isoformat(), "interruptions": 0, "failure": None}
        ended = self.state in ("done", "compensated", "given_up")
        if self.state is None or ended:
            return common | {"started": False, "ended": ended}
        return common | {
            "saga": 1,
            "version": self.version,
            "state": self.state,
            "step": self.step,
            "error": self.error,
            "known": 0,
            "entries": json.loads(json.dumps(self.entries)),
        }

    @contextmanager
    def called(self, name: str) -> Iterator[None]:
        """Let a step fail, or its worker be killed, as the test says."""
        self.ran.append(name)
        if self._left.get(name, 0) > 0:
            self._left[name] -= 1
            raise StepLost(f"{name} fails")
        yield
        if name in self._kills:
            self._kills.remove(name)
            raise _Killed


class _MemorySession:
    """What an attempt of a saga asks instead of a database."""

    def __init__(self, run: SagaRun) -> None:
        self.run, self.session = run, run.session

    async def query(self, statement: Statement, text: str) -> str:
        return json.dumps(self.run.begun())

    async def publish(self, outbox: Outbox, events: Sequence[Event], host_id: str) -> None:
        self.run.sent += events

    def calling(self, name: str) -> AbstractContextManager[None]:
        return self.run.called(name)

    def given(self, call: Coroutine[Any, Any, Any]) -> Any:
        return call if self.run.saga.is_async else finished(call)
