"""Which events of the log a request gets: those that its token is for, and that it asks for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Annotated
from uuid import UUID

from fastapi import Query
from pydantic import StringConstraints

from relay.api.callers import Reading, TokenCaller
from relay.runtime.threads import pool
from relay.store.log_pages import LogEvent

MOST_PATTERNS = 50
Pattern = Annotated[str, StringConstraints(max_length=200)]

_Match = Callable[[str], object]


def _compiled(patterns: tuple[str, ...]) -> tuple[_Match, ...]:
    """Compile globs as `fnmatchcase` does."""
    return tuple(re.compile(translate(each)).match for each in patterns)


_compiling = pool(1, "api patterns")
"""One thread compiles at a time: it shares the interpreter with the event loop."""


@dataclass(frozen=True, slots=True)
class ReadFilter:
    """What a request asks for; an empty field leaves the choice to the token. Equal ones take the same events."""

    hosts: frozenset[str]
    types: tuple[str, ...]
    aggregate_type: str | None
    aggregate_id: str | None
    caller: TokenCaller
    matches: tuple[_Match, ...] = field(default=(), compare=False)
    """What `types` match, compiled by `of`."""

    @classmethod
    async def of(
        cls,
        hosts: frozenset[str],
        types: tuple[str, ...],
        aggregate_type: str | None,
        aggregate_id: str | None,
        caller: TokenCaller,
    ) -> ReadFilter:
        """Return a filter whose patterns were compiled beside the event loop: many new ones take seconds."""
        matches: tuple[_Match, ...] = ()
        if types:
            loop = asyncio.get_running_loop()
            matches = await loop.run_in_executor(_compiling, _compiled, types)
        return cls(hosts, types, aggregate_type, aggregate_id, caller, matches)

    @property
    def key(self) -> tuple[object, ...]:
        """What makes two filters take the same events: the names of their callers do not matter."""
        caller = self.caller
        asked = self.hosts, self.types, self.aggregate_type, self.aggregate_id
        return (*asked, caller.hosts, caller.types)

    def test(self) -> Callable[[LogEvent], bool]:
        """Return whether an event is taken, as a function that remembers event types."""
        seen: dict[str, bool] = {}
        hosts = self.hosts
        aggregate = self.aggregate_type, self.aggregate_id

        def takes(event: LogEvent) -> bool:
            if hosts and event.host_id not in hosts:
                return False
            if aggregate[0] is not None and event.aggregate_type != aggregate[0]:
                return False
            if aggregate[1] is not None and event.aggregate_id != aggregate[1]:
                return False
            if not self.caller.is_for(event.host_id):
                return False
            wanted = seen.get(event.event_type)
            if wanted is None:
                if len(seen) > 10_000:
                    seen.clear()
                wanted = seen[event.event_type] = self._takes_type(event.event_type)
            return wanted

        return takes

    def _takes_type(self, event_type: str) -> bool:
        asked = not self.types or any(each(event_type) for each in self.matches)
        return asked and self.caller.may_see_type(event_type)


async def asked(
    caller: Reading,
    host: Annotated[
        list[UUID] | None,
        Query(max_length=MOST_PATTERNS, description="Only events of these hosts."),
    ] = None,
    type_: Annotated[
        list[Pattern] | None,
        Query(
            alias="type",
            max_length=MOST_PATTERNS,
            description="Only events of these types, or that match these globs, such as order.*.",
        ),
    ] = None,
    aggregate_type: Annotated[
        Pattern | None, Query(description="Only events of this type of aggregate.")
    ] = None,
    aggregate_id: Annotated[
        Pattern | None, Query(description="Only events of the aggregate with this id.")
    ] = None,
) -> ReadFilter:
    """Return the filter of a request, as a dependency of its route."""
    return await ReadFilter.of(
        frozenset(map(str, host or ())),
        tuple(sorted(set(type_ or ()))),
        aggregate_type,
        aggregate_id,
        caller,
    )
