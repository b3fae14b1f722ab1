"""What operators do is declared once, as an `Act`.

Its command, its route of the console's API, its form and its question on a page, and what is recorded are made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from inspect import Parameter, cleandoc, signature
from typing import Annotated, Any
from uuid import UUID

from relay.admin.connections import reach_source, reach_target
from relay.admin.phrases import pausing
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.store import actions
from relay.store.connections import Connection

SUBJECTS = ("sink", "endpoint", "queue", "saga", "schedule", "reader", "token")
"""The subjects whose modules, such as `relay.admin.sinks`, have `ACTS`."""


class Missing(ConfigurationError):
    """What an operator names does not exist."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Whether the action changed anything."""

    changed: bool


@dataclass(frozen=True, slots=True)
class Count:
    """How many transactions the action concerned."""

    transactions: int
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MessageCount:
    """How many messages of a queue the action concerned."""

    messages: int


@dataclass(frozen=True, slots=True)
class Moved:
    """The new position of a sink or a group in words, and how many dead and deferred transactions are given up.

    Of a group also how many events are delivered again, and skipped; null if that is unknown.
    """

    goes_on: str
    dead: int
    deferred: int
    done: bool
    again: int | None = None
    skipped: int | None = None


@dataclass(frozen=True, slots=True)
class QueueRebuild:
    """Where a queue begins after a rebuild, in words, and how many messages and dead letters are deleted."""

    begins: str
    messages: int
    dead: int
    done: bool


@dataclass(frozen=True, slots=True)
class EventAnswer:
    """The event that was published."""

    event_id: UUID


@dataclass(frozen=True, slots=True)
class Done:
    """What an act has done: what to say, what is recorded beside the name of its subject, what the API answers.

    Without `detail` it has changed nothing, and nothing is recorded.
    """

    said: str
    detail: Mapping[str, Any] | None = field(default_factory=dict)
    answer: object = None

    @property
    def changed(self) -> bool:
        """Whether it has changed anything."""
        return self.detail is not None


@dataclass(frozen=True, slots=True)
class Given:
    """What the parameter of an act is: an option of its command, a member of the API's body, a field of its form."""

    help: str
    is_argument: bool = False
    metavar: str | None = None
    examples: tuple[str, ...] = ()


FirstEvent = Annotated[str, Given("The first event.", metavar="OFFSET|TIME|beginning")]
"""Where a rebuild begins."""


def option(parameter: Parameter) -> str:
    """Return the name of a parameter of an act wherever it is given: `from_` is called so in Python alone."""
    return parameter.name.rstrip("_")


@dataclass(frozen=True, slots=True)
class Subject:
    """What acts are on: the group of their commands, with what its argument is.

    Acts `of_sink` name a sink, and are recorded as its own.
    """

    name: str
    metavar: str
    help: str = "Its name."
    of_sink: bool = False

    def recorded(self, name: str) -> tuple[str, dict[str, Any]]:
        """Return the sink of an action, and what its detail says of the subject."""
        return (name, {}) if self.of_sink else ("", {self.name: name})


class _Rehearsed(Exception):
    """Ends a rehearsal, whose transactions are rolled back; has what it would have done."""

    def __init__(self, done: Done) -> None:
        self.done = done


class Acting:
    """An act while it is done: on what, why, and in one transaction of each database."""

    def __init__(
        self, settings: Settings, name: str, reason: str | None, opened: ExitStack, rehearses: bool
    ) -> None:
        self.settings = settings
        self.group = settings.group
        self.name = name
        self.reason = reason
        # First, and committed last: nothing is done that the target cannot record.
        self.target: Connection = opened.enter_context(reach_target(settings, pooled=True))
        self._opened = opened
        self._rehearses = rehearses

    @cached_property
    def source(self) -> Connection:
        """The source, which is opened for the acts that need it."""
        return self._opened.enter_context(reach_source(self.settings, pooled=True))

    @cached_property
    def log(self) -> Connection:
        """A session of the source in no transaction, which tells what is durable: what it changes is not undone."""
        return self._opened.enter_context(reach_source(self.settings))

    def ask(self, effect: str, answer: object = None) -> None:
        """Say what the act does, or has done in its transactions: a rehearsal ends here, and undoes it."""
        if self._rehearses:
            raise _Rehearsed(Done(effect, None, answer))


@dataclass(frozen=True, slots=True)
class Act:
    """An act on a subject; `does` says what it does, and `answers` is what the API answers.

    One that `asks` is confirmed first, and calls `Acting.ask`; with `plans`, the API answers a rehearsal, too.
    `path` is that of its route, below `/sinks/NAME/`.
    """

    subject: Subject
    name: str
    does: str
    effect: Callable[..., Done]
    answers: type[Any] = Changed
    asks: bool = False
    plans: bool = False
    removes: bool = False
    path: str = ""

    @property
    def parameters(self) -> Sequence[Parameter]:
        """What it needs to know beside the name, each annotated with a `Given`."""
        _, *parameters = signature(self.effect, eval_str=True).parameters.values()
        return parameters

    @property
    def label(self) -> str:
        """What its button says."""
        return self.name.replace("-", " ").capitalize()

    @property
    def of(self) -> str:
        """What the name is the name of, such as a sink: also of acts on its endpoints."""
        return "sink" if self.subject.of_sink else self.subject.name

    def question(self, name: str) -> str:
        """Return the question before it is done."""
        return f"{self.label} {self.subject.name} {name}?"

    def __call__(
        self, settings: Settings, name: str, reason: str | None = None, **given: Any
    ) -> Done:
        """Do it, and record it where it has changed something. Raises ConfigurationError, psycopg.Error."""
        return self._act(settings, name, reason, given)

    def rehearse(self, settings: Settings, name: str, **given: Any) -> Done:
        """Return what an act that asks would do, or raise what it would raise; nothing is changed."""
        try:
            self._act(settings, name, None, given, rehearses=True)
        except _Rehearsed as rehearsed:
            return rehearsed.done
        raise AssertionError(f"{self.subject.name} {self.name} does not ask")

    def _act(
        self,
        settings: Settings,
        name: str,
        reason: str | None,
        given: Mapping[str, Any],
        rehearses: bool = False,
    ) -> Done:
        with ExitStack() as opened:
            acting = Acting(settings, name, reason, opened, rehearses)
            done = self.effect(acting, **given)
            if done.detail is not None:
                sink, detail = self.subject.recorded(name)
                action = f"{self.subject.name} {self.name}"
                detail = {**detail, **done.detail}
                actions.record(acting.target, settings.group, sink, action, reason, detail)
        return done


def declare(subject: Subject, name: str, **more: Any) -> Callable[[Callable[..., Done]], Act]:
    """Make an act of a function, whose docstring says what it does; `more` are fields of `Act`."""
    return lambda effect: Act(subject, name, cleandoc(effect.__doc__ or ""), effect, **more)


def pauses(
    subject: Subject, pause: str, resume: str, change: Callable[[Acting, bool], bool]
) -> tuple[Act, Act]:
    """Declare the acts that pause something and let it go on, by what these do.

    `change` pauses it or lets it go on, and returns whether that changed anything.
    """

    def effect(paused: bool) -> Callable[[Acting], Done]:
        def done(act: Acting) -> Done:
            changed = change(act, paused)
            said = f"{subject.name} {act.name} {pausing(paused, changed)}"
            return Done(said, {} if changed else None)

        return done

    return (
        Act(subject, "pause", pause, effect(True)),
        Act(subject, "resume", resume, effect(False)),
    )


def of(subject: str) -> Sequence[Act]:
    """Return the acts on a subject; imports what they act on."""
    found: Sequence[Act] = import_module(f"relay.admin.{subject}s").ACTS
    return found


@cache
def declared() -> Mapping[tuple[str, str], Act]:
    """Return every act, by its subject and its name."""
    return {(subject, each.name): each for subject in SUBJECTS for each in of(subject)}
