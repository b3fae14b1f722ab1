"""Polls the end of the outbox for the sinks of an instance: those that ask at the same time share the queries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from typing import Any

from relay.config.settings import Settings
from relay.model.snapshots import Snapshot, Xids
from relay.runtime.shielding import shielded
from relay.source.outbox.differences import Difference
from relay.source.outbox.rows import OutboxRows
from relay.source.outbox.visibility import JOIN_SECONDS
from relay.source.server import SourcePosition, current_position, durable_position
from relay.source.witnesses import cover, require_history
from relay.store.connections import Pool

FIRST_POLL_SECONDS = 0.01
"""The first wait between two polls that find nothing; it doubles up to `poll.wait_period_ms`."""

_Answers = tuple[SourcePosition | None, frozenset[Snapshot]]
"""A position of the source, and the snapshots which do not see all rows that it sees."""


class OutboxEnd:
    """Where the outbox ends now. For one event loop; raises psycopg.Error and RelayError."""

    def __init__(self, settings: Settings, source: Pool, target: Pool, in_source: Executor) -> None:
        self._rows = OutboxRows(settings)
        self._group = settings.group
        self._source = source
        self._target = target
        self._in_source = in_source
        self._asked: set[Snapshot] = set()
        self._asks_position = False
        self._answering: asyncio.Task[_Answers] | None = None

    async def position(self, *shown: Snapshot | Xids) -> SourcePosition | None:
        """Read a position of the source, whose commits are durable there, that shows snapshots and transactions.

        These are full xids. None if they stay invisible for JOIN_SECONDS.
        """
        ends = time.monotonic() + JOIN_SECONDS
        while True:
            self._asks_position = True
            seen, _ = await self._answer()
            if seen is not None and seen.snapshot.shows(*shown):
                return seen
            if time.monotonic() > ends:
                return None
            await asyncio.sleep(FIRST_POLL_SECONDS)

    async def require_history(self) -> None:
        """Raise TransientFault where the source is not known to be of the history of the stored positions."""
        await asyncio.get_running_loop().run_in_executor(
            self._in_source, self._in_both, require_history
        )

    async def following(self, snapshot: Snapshot) -> SourcePosition | None:
        """Read a position that sees rows which `snapshot` does not see; None without such rows."""
        self._asked.add(snapshot)
        seen, outdated = await self._answer()
        return seen if snapshot in outdated else None

    async def _answer(self) -> _Answers:
        """What is answered to all who ask before the queries begin."""
        if self._answering is None:
            self._answering = asyncio.create_task(self._answer_all())
        # Who is cancelled does not cancel the others.
        return await shielded(self._answering)

    async def _answer_all(self) -> _Answers:
        # After those that were woken at the same time have asked, too.
        await asyncio.sleep(0)
        asked, self._asked = self._asked, set()
        asks_position, self._asks_position = self._asks_position, False
        self._answering = None
        return await asyncio.get_running_loop().run_in_executor(
            self._in_source, self._read, asked, asks_position
        )

    def _read(self, asked: Collection[Snapshot], asks_position: bool) -> _Answers:
        with self._source.connection() as conn:
            seen = current_position(conn).snapshot
            outdated = frozenset(
                each
                for each in asked
                # A standby may lag. Who is at the beginning leaves it also without rows, and may join the stream then.
                if seen.covers(each)
                and (each.is_beginning or not self._rows.is_empty(conn, Difference(each, seen)))
            )
            if not (outdated or asks_position):
                return None, outdated
            found = durable_position(conn)
        self._in_both(cover, found.snapshot)
        return found, outdated

    def _in_both(self, act: Callable[..., None], *arguments: Any) -> None:
        """Do something for the group with a session of the source and one of the target."""
        with self._source.connection() as source, self._target.connection() as target:
            act(source, target, self._group, *arguments)
