"""Lists the readers of the log and acts on them: `relay reader`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from shlex import quote
from typing import Annotated

import psycopg

from relay.admin import acts
from relay.admin.acts import Acting, Done, Given, Missing, Subject
from relay.admin.connections import reach_source
from relay.admin.publish import require_own_outbox
from relay.config.settings import Settings
from relay.faults import ConfigurationError, first_line
from relay.store import log_readers
from relay.store.connections import Connection
from relay.store.log_readers import ReaderRow


class UnknownReader(Missing):
    """The outbox has no reader of this name."""


def other_history(reader: str) -> str:
    """Return what there is to say of a reader of the log whose position is of another history of the database."""
    return (
        f"the reader {reader!r} stands still: its position is of another history of the source's database, such as "
        f"from before a dump was restored: run `relay init`, and if it stands still after that, too, "
        f"`relay reader seek {quote(reader)} --to now` or `--to beginning`"
    )


@dataclass(frozen=True, slots=True)
class ReaderSummary:
    """A reader, or all lanes of a name: the greatest lag, the oldest move, and who has claimed how many."""

    name: str
    owner: str
    lanes: int | None
    lag_seconds: float
    moved_at: datetime
    claims: int
    pid: int | None
    given_up_at: datetime | None
    other_history: bool


def summed(rows: Sequence[ReaderRow]) -> list[ReaderSummary]:
    """Put the lanes of a name together; `rows` are in the order in which they are listed."""
    return [
        ReaderSummary(
            name=name,
            owner=lanes[0].owner,
            lanes=lanes[0].lanes,
            lag_seconds=max(each.lag_seconds for each in lanes),
            moved_at=min(each.moved_at for each in lanes),
            claims=sum(each.pid is not None for each in lanes),
            pid=lanes[0].pid,
            given_up_at=min((each.given_up_at for each in lanes if each.given_up_at), default=None),
            other_history=any(each.other_history for each in lanes),
        )
        for name, lanes in (
            (name, list(group))
            for name, group in groupby(rows, lambda each: each.lane_of or each.name)
        )
    ]


def listed(settings: Settings) -> list[ReaderRow]:
    """Read the readers of the outbox. Raises ConfigurationError, psycopg.Error."""
    require_own_outbox(settings)
    with reach_source(settings) as source:
        return log_readers.listed(source)


def shown(settings: Settings, name: str) -> list[ReaderRow]:
    """Read one reader, or the lanes of a name. Raises UnknownReader, ConfigurationError, psycopg.Error."""
    require_own_outbox(settings)
    with reach_source(settings) as source:
        return _named(source, name)


READER = Subject("reader", "READER")


@acts.declare(READER, "seek", asks=True)
def seek(act: Acting, to: Annotated[str, Given("now, beginning, or a position.")]) -> Done:
    """Move a reader; one that retention has given up goes on from there. What is in flight cannot be done any more."""
    with _changing(act):
        log_readers.seek(act.source, act.name, to)
    act.ask(f"It is moved to {to}.")
    return Done(f"reader {act.name} is moved to {to}")


@acts.declare(READER, "drop", asks=True, removes=True)
def drop(act: Acting) -> Done:
    """Drop a reader: retention no longer keeps events for it. A program that declares it makes another one."""
    with _changing(act):
        log_readers.drop(act.source, act.name)
    act.ask(
        "Retention no longer keeps events for it. A program that declares it makes another one."
    )
    return Done(f"reader {act.name} is dropped")


ACTS = (seek, drop)


@contextmanager
def _changing(act: Acting) -> Iterator[None]:
    """Change a reader in the block. Raises UnknownReader, and ConfigurationError with what the server refuses."""
    require_own_outbox(act.settings)
    _named(act.source, act.name)
    try:
        yield
    except (
        psycopg.errors.InvalidParameterValue,
        psycopg.errors.ObjectNotInPrerequisiteState,
    ) as error:
        raise ConfigurationError(first_line(error).removeprefix("relay: ")) from error


def _named(source: Connection, name: str) -> list[ReaderRow]:
    found = log_readers.listed(source, name)
    if found:
        return found
    names = ", ".join(each.name for each in summed(log_readers.listed(source)))
    raise UnknownReader(f"the outbox has no reader {name!r} (it has {names or 'none'})")
