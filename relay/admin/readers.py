"""Lists the readers of the log and acts on them: `relay reader`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from shlex import quote

import psycopg

from relay.admin.connections import reach_source, reach_target
from relay.admin.publish import require_own_outbox
from relay.config.settings import Settings
from relay.faults import ConfigurationError, first_line
from relay.store import actions, log_readers
from relay.store.connections import Connection
from relay.store.log_readers import ReaderRow


class UnknownReader(ConfigurationError):
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


def seek(settings: Settings, name: str, to: str, reason: str | None) -> None:
    """Move a reader to `now`, `beginning` or a position. Raises ConfigurationError, psycopg.Error."""
    _act(settings, name, "reader seek", reason, lambda source: log_readers.seek(source, name, to))


def drop(settings: Settings, name: str, reason: str | None) -> None:
    """Drop a reader. Raises ConfigurationError, psycopg.Error."""
    _act(settings, name, "reader drop", reason, lambda source: log_readers.drop(source, name))


def _act(
    settings: Settings,
    name: str,
    action: str,
    reason: str | None,
    act: Callable[[Connection], None],
) -> None:
    require_own_outbox(settings)
    with reach_source(settings) as source:
        _named(source, name)
        try:
            act(source)
        except (
            psycopg.errors.InvalidParameterValue,
            psycopg.errors.ObjectNotInPrerequisiteState,
        ) as error:
            raise ConfigurationError(first_line(error).removeprefix("relay: ")) from error
    with reach_target(settings) as target:
        actions.record(target, settings.group, "", action, reason, {"reader": name})


def _named(source: Connection, name: str) -> list[ReaderRow]:
    found = log_readers.listed(source, name)
    if found:
        return found
    names = ", ".join(each.name for each in summed(log_readers.listed(source)))
    raise UnknownReader(f"the outbox has no reader {name!r} (it has {names or 'none'})")
