"""Moves a stopped group: to another place in the outbox, or to another number of partitions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psycopg

from relay.config import Settings
from relay.events import Lsn
from relay.faults import ConfigurationError
from relay.pipeline.runner import Pipeline
from relay.preflight import reach, reach_source, reach_target
from relay.source.index import ensure_index
from relay.source.poll import Poller
from relay.source.rows import OutboxRows, prefer_index
from relay.source.slot import slot_state
from relay.source.wal import first_offset_behind
from relay.store import offsets, presence

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class Position:
    """One partition as `relay offsets show` prints it.

    `behind` counts the c_offsets, of all partitions, from its first unread row to the newest; 0 without unread rows.
    """

    partition_id: int
    next_offset: int
    applied_lsn: str
    handover_offset: int
    behind: int


@dataclass(frozen=True, slots=True)
class Move:
    """What seeking would do: rows that would be delivered again, and rows that would be passed over."""

    offset: int
    again: int
    skipped: int


def positions(settings: Settings) -> list[Position]:
    """Where the group's partitions stand.

    Raises ConfigurationError if a database cannot be reached or the group is not initialised.
    """
    with reach_target(settings) as target:
        cursors = offsets.initialised(target, settings.group)
    rows = OutboxRows(settings.model_copy(update={"partitions": len(cursors)}))
    floors = {cursor.partition_id: cursor.next_offset for cursor in cursors}
    with reach_source(settings) as source:
        prefer_index(source)
        following = rows.next_offset(source)
        unread = rows.heads(source, floors, following - 1)
    return [
        Position(
            cursor.partition_id,
            cursor.next_offset,
            str(cursor.applied_lsn),
            cursor.handover_offset,
            following - unread.get(cursor.partition_id, following),
        )
        for cursor in cursors
    ]


def plan_seek(settings: Settings, to: str, partition: int | None) -> Move:
    """Find the c_offset that `to` means (OFFSET, LSN, TIME, beginning or end), and what going there would do.

    Raises ConfigurationError for a place that does not exist, or while an instance runs.
    """
    with reach_target(settings) as target, _stopped(target, settings):
        cursors = _chosen(settings, offsets.initialised(target, settings.group), partition)
        with reach_source(settings) as source:
            rows = OutboxRows(settings)
            offset = _resolve(settings, source, rows, to)
            moves = [
                rows.count(source, cursor.partition_id, *sorted((cursor.next_offset, offset)))
                * (1 if offset < cursor.next_offset else -1)
                for cursor in cursors
            ]
    return Move(offset, sum(max(m, 0) for m in moves), sum(max(-m, 0) for m in moves))


def seek(settings: Settings, offset: int, partition: int | None) -> None:
    """Let the group, or one partition, go on at a c_offset. Raises ConfigurationError while an instance runs."""
    with (
        reach_target(settings) as target,
        _stopped(target, settings),
        target.transaction(),
    ):
        cursors = _chosen(settings, offsets.initialised(target, settings.group), partition)
        offsets.place(target, settings.group, [cursor.partition_id for cursor in cursors], offset)


def repartition(settings: Settings, partitions: int, admin_dsn: str | None) -> int:
    """Split the stopped group's hosts into another number of partitions; returns the c_offset at which it goes on.

    Partitions that are behind others are first brought up to the foremost, with the configured handlers: what is
    applied must be the same for every host before hosts can move. A crash before the end changes nothing but that.
    Raises ConfigurationError while an instance runs.
    """
    with reach_target(settings) as target, _stopped(target, settings):
        cursors = offsets.initialised(target, settings.group)
        foremost = max(cursor.next_offset for cursor in cursors)
        unpinned = settings.poll.model_copy(update={"partition_ids": None})
        before = settings.model_copy(update={"partitions": len(cursors), "poll": unpinned})
        _catch_up(before, foremost)
        with target.transaction():
            offsets.replace(target, settings.group, partitions, foremost)
    after = settings.model_copy(update={"partitions": partitions})
    if settings.source.mode != "wal":
        with reach(admin_dsn or settings.source_dsn, "source.dsn") as source:
            try:
                ensure_index(source, after)
            except psycopg.errors.InsufficientPrivilege:
                # Polling works without it; `relay check` tells, and `relay init` makes it.
                return foremost
    return foremost


def _catch_up(settings: Settings, before: int) -> None:
    poller = Poller(settings)
    pipeline = Pipeline(settings)
    try:
        pipeline.start()
        while batch := poller.look(before):
            pipeline.run(batch)
    finally:
        pipeline.close()
        poller.close()


@contextmanager
def _stopped(target: Connection, settings: Settings) -> Iterator[None]:
    with presence.stopped(target, settings.group) as free:
        if not free:
            running = ", ".join(presence.instances(target, settings.group))
            raise ConfigurationError(
                f"group: an instance of {settings.group!r} is running ({running}): stop it first"
            )
        yield


def _chosen(
    settings: Settings, cursors: list[offsets.Cursor], partition: int | None
) -> list[offsets.Cursor]:
    chosen = [cursor for cursor in cursors if partition in (None, cursor.partition_id)]
    if not chosen:
        raise ConfigurationError(
            f"--partition: there is no partition {partition} of group {settings.group!r}: see `relay offsets show`"
        )
    return chosen


def _behind(settings: Settings, source: Connection, rows: OutboxRows, lsn: Lsn) -> int:
    """The first c_offset behind a position, which only the WAL that the slot holds can tell."""
    state = slot_state(source, settings.source.slot)
    held = Lsn.parse((state and state.confirmed_flush_lsn) or "0/0")
    if state is None or lsn < held:
        raise ConfigurationError(
            f"--to: {lsn} is older than the WAL that the slot {settings.source.slot!r} holds"
            + (f", which begins at {held}" if held else "")
            + ": give a c_offset or a time"
        )
    following, position = rows.checkpoint(source)
    if lsn > position:
        raise ConfigurationError(f"--to: {lsn} is behind the end of the WAL, which is {position}")
    found = first_offset_behind(settings, lsn, position)
    return following if found is None else found


def _resolve(settings: Settings, source: Connection, rows: OutboxRows, to: str) -> int:
    following = rows.next_offset(source)
    if to == "end":
        return following
    if to == "beginning":
        return rows.first_offset(source)
    if to.isdecimal():
        if int(to) > following:
            raise ConfigurationError(
                f"--to: {to} is behind the end of the outbox; the next c_offset is {following}"
            )
        return int(to)
    if "/" in to:
        try:
            lsn = Lsn.parse(to)
        except ValueError as error:
            raise ConfigurationError(f"--to: {error}") from None
        return _behind(settings, source, rows, lsn)
    try:
        moment = datetime.fromisoformat(to)
    except ValueError:
        raise ConfigurationError(
            f"--to: {to!r} is neither a c_offset, an LSN such as 16/B374D848, a time such as 2026-03-01T12:00, "
            "beginning nor end"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    found = rows.first_since(source, moment)
    return following if found is None else found
