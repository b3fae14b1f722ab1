"""Shows and moves the offsets of a stopped group, and splits its hosts: `relay offsets show`, `seek` and `repartition`.

Finds the position that `--to` or `--from` names: a c_offset, an LSN, a time, the beginning or the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np

from relay.admin.connections import reach_source, reach_target
from relay.config.settings import Settings
from relay.faults import ConfigurationError, TransientFault
from relay.model.events import INSERTED_BY, Lsn
from relay.model.snapshots import BEGINNING, Snapshot, Xids, full_xids
from relay.model.transactions import Transactions
from relay.model.tuples import Walked
from relay.retention import reader_positions
from relay.runtime.reporting import ProgressReport, silent
from relay.source.outbox.applied import (
    AppliedPosition,
    BrokenChain,
    ReadPosition,
    applied_in,
    position_of_target,
)
from relay.source.outbox.table import OutboxTable
from relay.source.outbox.unread import Backlog, UnreadRows
from relay.source.recognition import Recognition
from relay.source.server import durable_position
from relay.source.stream.receiver import commits_after
from relay.source.stream.slot import slot_state
from relay.source.witnesses import cover
from relay.store import (
    actions,
    groups,
    presence,
)
from relay.store.connections import Connection
from relay.store.positions import offsets, rewind, sinks, snapshots
from relay.store.positions.rewind import GivenUp
from relay.store.positions.sinks import SinkPosition

_ROWS_AT_ONCE = 10_000
_BYTES_AT_ONCE = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Goal:
    """The position that a seek moves to; `text` describes it.

    The seek skips the rows that `snapshot` sees, and the rows up to c_offset `polled_offset` that `now` sees. With
    `snapshot` None, it skips the commits that end in the WAL at or below `lsn`. `split` has the 32-bit xids of database
    transactions with rows on both sides of `polled_offset`, which are not skipped.
    """

    text: str
    snapshot: Snapshot | None
    now: Snapshot
    polled_offset: int = offsets.FIRST
    split: tuple[int, ...] = ()
    lsn: Lsn = Lsn(0)  # noqa: RUF009


def find_goal(
    settings: Settings,
    source: Connection,
    table: OutboxTable,
    to: str,
    option: str = "--to",
    lsn: bool = True,
) -> Goal:
    """Find the position of `to`: an OFFSET, LSN, TIME, beginning or end.

    `lsn` is whether an error may propose an LSN. Raises ConfigurationError if the position does not exist.
    """
    seen = durable_position(source)
    if "/" in to:
        try:
            after = Lsn.parse(to)
        except ValueError as error:
            raise ConfigurationError(f"{option}: {error}") from None
        return _after(settings, source, after, seen.snapshot, seen.lsn)
    if settings.source.mode == "wal":
        if to != "end":
            raise ConfigurationError(
                f"{option}: {to!r} is not a position in the WAL, the only kind that source.mode: wal has: give an "
                "LSN, or end"
            )
        return Goal(f"at {seen.lsn}", None, seen.snapshot, lsn=seen.lsn)
    if to == "end":
        return Goal("with what is published from now on", seen.snapshot, seen.snapshot)
    table.require_offsets(source, "seek again")
    if to == "beginning":
        return Goal("with the oldest event", BEGINNING, seen.snapshot)
    following = table.next_offset(source)
    if to.isdecimal():
        if int(to) > following:
            raise ConfigurationError(
                f"{option}: {to} is past the end of the outbox; the next c_offset is {following}"
            )
        offset = int(to)
    else:
        first = table.first_since(source, moment_of(to, option, lsn))
        offset = following if first is None else first
    split = tuple(table.split_at(source, offset - 1))
    return Goal(f"at c_offset {offset}", BEGINNING, seen.snapshot, offset - 1, split)


def moment_of(to: str, option: str, lsn: bool) -> datetime:
    """Parse a time, of UTC if it names no zone; `lsn` is as in `find_goal`. Raises ConfigurationError."""
    try:
        moment = datetime.fromisoformat(to)
    except ValueError:
        raise ConfigurationError(
            f"{option}: {to!r} is neither a c_offset, {'an LSN such as 16/B374D848, ' if lsn else ''}a time such as "
            "2026-03-01T12:00, beginning nor end"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _after(settings: Settings, source: Connection, lsn: Lsn, now: Snapshot, end: Lsn) -> Goal:
    """Find the goal after an LSN: the WAL that the slot retains has the database transactions after it."""
    state = slot_state(source, settings.source.slot)
    oldest = Lsn.parse((state and state.confirmed_flush_lsn) or "0/0")
    if state is None or lsn < oldest:
        raise ConfigurationError(
            f"--to: {lsn} is older than the WAL that the slot {settings.source.slot!r} retains"
            + (f", which begins at {oldest}" if oldest else "")
            + ("" if settings.source.mode == "wal" else ": give a c_offset or a time")
        )
    if lsn > end:
        raise ConfigurationError(f"--to: {lsn} is past the end of the WAL, which is {end}")
    if settings.source.mode == "wal":
        return Goal(f"at {lsn}", None, now, lsn=lsn)
    after: list[Xids] = []
    for part in commits_after(settings, lsn, end):
        if _has_unmarked(part):
            raise ConfigurationError(
                f"--to: after {lsn} the slot has events that are older than the column {INSERTED_BY}, which polling "
                "cannot distinguish from applied ones: run relay with source.mode: wal until it is idle, stop it, and "
                "seek to the confirmed_flush_lsn of the slot"
            )
        after.append(full_xids(part.facts["xid"], now.xmax))
    later: Xids = np.unique(np.concatenate([*after, np.array(now.in_progress, np.int64)]))
    # A snapshot never sees transactions from xmax on.
    later = later[later < now.xmax]
    xmin = int(later[0]) if len(later) else now.xmax
    return Goal(f"at {lsn}", Snapshot(xmin, now.xmax, tuple(later.tolist())), now)


def _has_unmarked(commits: Transactions) -> bool:
    """Return whether a row lacks the xid of the transaction that inserted it."""
    if INSERTED_BY not in commits.columns:
        return True
    index = commits.columns.index(INSERTED_BY)
    return any(
        bool(Walked(rows, [index]).absent(index).any())
        for rows in commits.portions(_ROWS_AT_ONCE, _BYTES_AT_ONCE)
    )


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """One partition as `relay offsets show` prints it.

    `unread` counts its rows that are not applied yet; None if only the WAL is read.
    """

    partition_id: int
    next_offset: int
    applied_lsn: str
    snapshot: str | None
    unread: int | None


@dataclass(frozen=True, slots=True)
class OffsetsMove:
    """The effect of a seek: how many rows are delivered `again`, and how many are `skipped`.

    Both are None if only the WAL is read, which does not show them, and where the positions are unknown. `given_up`
    counts the dead and deferred transactions that are discarded, since they are delivered again. `sinks` move to the
    goal, too.
    """

    goal: Goal
    again: int | None
    skipped: int | None
    given_up: GivenUp
    sinks: Sequence[str]


def positions(settings: Settings) -> list[PartitionStatus]:
    """List the positions of the group's partitions.

    Raises ConfigurationError if a database cannot be reached or the group is not initialised.
    """
    with reach_target(settings) as target:
        positions = offsets.initialised(target, settings.group)
        applied = position_of_target(target, settings.group)
    unread: dict[int, Backlog] = {}
    if applied.positions:
        with reach_source(settings) as source:
            unread = UnreadRows(settings).by_partition(source, applied)
    snapshot_of = {each.partition: str(each.snapshot) for each in applied.positions}
    return [
        PartitionStatus(
            position.partition_id,
            position.next_offset,
            str(position.applied_lsn),
            snapshot_of.get(position.partition_id),
            unread.get(position.partition_id, Backlog()).events if applied.positions else None,
        )
        for position in positions
    ]


def plan_seek(settings: Settings, to: str, partition: int | None) -> OffsetsMove:
    """Find the position of `to` (OFFSET, LSN, TIME, beginning or end), and the effect of a seek to it.

    Raises ConfigurationError for a position that does not exist, or while an instance runs.
    """
    group = settings.group
    with reach_target(settings) as target, stopped(target, settings):
        positions = offsets.initialised(target, group)
        offsets.require_partition_count(len(positions), group, settings.partitions)
        chosen = _chosen(settings, positions, partition)
        try:
            applied = applied_in(target, group, partition)
        except BrokenChain:
            if partition is not None:
                raise
            # This repairs it; what was applied is not known.
            applied = []
        before = ReadPosition(applied, snapshots.noted(target, group))
        with reach_source(settings) as source:
            goal = find_goal(settings, source, OutboxTable(settings), to)
            moved_sinks = (
                _sinks_to_move(target, source, settings) if len(chosen) == len(positions) else []
            )
            with target.transaction(force_rollback=True):
                given_up = _move(target, settings, positions, chosen, goal, moved_sinks)
            if goal.snapshot is None or not before.positions:
                return OffsetsMove(goal, None, None, given_up, moved_sinks)
            after = [
                AppliedPosition(position.partition_id, goal.snapshot, goal.now, goal.polled_offset)
                for position in chosen
            ]
            again, skipped = UnreadRows(settings).moved(source, before, after)
    return OffsetsMove(goal, again, skipped, given_up, moved_sinks)


def seek(
    settings: Settings, move: OffsetsMove, partition: int | None, reason: str | None = None
) -> None:
    """Move the group, or one partition, to a goal. Raises ConfigurationError while an instance runs."""
    with reach_target(settings) as target, stopped(target, settings), target.transaction():
        positions = offsets.initialised(target, settings.group)
        chosen = _chosen(settings, positions, partition)
        given_up = _move(target, settings, positions, chosen, move.goal, move.sinks)
        detail = {"goes on": move.goal.text, "partition": partition, **given_up._asdict()}
        actions.record(target, settings.group, "", "offsets seek", reason, detail)
        # Before the commit, so that retention keeps the events that are read again.
        with reach_source(settings) as source:
            reader_positions.accept(source, target, settings, ["", *move.sinks])
            if move.goal.snapshot is not None:
                cover_goal(source, target, settings, move.goal)


def cover_goal(source: Connection, target: Connection, settings: Settings, goal: Goal) -> None:
    """Note a witness of a goal. Raises ConfigurationError where the group's other positions are of another history."""
    try:
        cover(source, target, settings.group, goal.now)
    except TransientFault as error:
        raise ConfigurationError(
            f"{error}: where it is another history, set with `relay offsets seek` where the whole group "
            f"{settings.group!r} is to continue, before a part of it"
        ) from None


def _sinks_to_move(target: Connection, source: Connection, settings: Settings) -> list[str]:
    """List the sinks that move with the group.

    These are the sinks that have delivered events which the source has lost; in mode `wal` all sinks, since the group
    reads the WAL for them.
    """
    stored = sinks.read(target, settings.group, settings.sink_handlers)
    if settings.source.mode == "wal":
        return [each.sink for each in stored if each.state != sinks.NEW]
    origin, recognition = groups.origin(target, settings.group), Recognition(settings)
    lost: list[str] = []
    for each in stored:
        seen = each.position.following or each.position.snapshot
        theirs = replace(
            origin,
            applied=Lsn(0),
            polled=each.position.delivered_lsn,
            xmax=seen.xmax if seen else 0,
        )
        try:
            if recognition.has_lost(source, theirs):
                lost.append(each.sink)
        except TransientFault as error:
            raise ConfigurationError(f"{error}: seek again later") from None
    return lost


def _move(
    target: Connection,
    settings: Settings,
    positions: Sequence[offsets.PartitionPosition],
    chosen: Sequence[offsets.PartitionPosition],
    goal: Goal,
    moved_sinks: Sequence[str],
) -> GivenUp:
    """Move some of a group's partitions and sinks to a goal; returns how much is discarded."""
    group = settings.group
    numbers = [position.partition_id for position in chosen]
    given_up = GivenUp(0, 0)
    if goal.snapshot is not None:
        given_up = rewind.give_up(
            target,
            group,
            goal.snapshot,
            goal.polled_offset,
            goal.split,
            goal.now.xmax,
            len(positions),
            numbers,
        )
    if len(chosen) < len(positions):
        _move_partition(target, group, chosen[0], goal)
        return given_up
    for name in moved_sinks:
        of_sink = move_sink(target, settings, name, goal)
        detail = {"goes on": goal.text, **of_sink._asdict()}
        actions.record(target, group, name, "sink seek", "relay offsets seek", detail)
        given_up = given_up.plus(of_sink)
    # The next run stores the source of the new position.
    groups.forget_origin(target, group)
    if goal.snapshot is None:
        snapshots.remove(target, group)
        offsets.move(target, group, numbers, None, applied_lsn=goal.lsn)
        return given_up
    first, last = snapshots.begin(target, group, [goal.snapshot, goal.now])
    start = last if goal.snapshot == goal.now else first
    offsets.move(target, group, numbers, start.id, goal.polled_offset)
    snapshots.forget_in(target, group, numbers)
    snapshots.prune(target, group, since=0)
    return given_up


def move_sink(target: Connection, settings: Settings, name: str, goal: Goal) -> GivenUp:
    """Move a sink to a goal, while relay runs or not; returns how much is discarded."""
    position = SinkPosition(goal.snapshot, applied_lsn=goal.lsn)
    if goal.polled_offset != offsets.FIRST:
        position = SinkPosition(goal.snapshot, goal.now, goal.polled_offset)
    sinks.move(target, settings.group, name, position)
    if goal.snapshot is None:
        return GivenUp(0, 0)
    return rewind.give_up(
        target,
        settings.group,
        goal.snapshot,
        goal.polled_offset,
        goal.split,
        goal.now.xmax,
        settings.partitions,
        range(settings.partitions),
        name,
    )


def _move_partition(
    target: Connection, group: str, position: offsets.PartitionPosition, goal: Goal
) -> None:
    """Move one partition to a goal while the others stay. Raises ConfigurationError if that is impossible."""
    chain = snapshots.chain(target, group)
    if goal.lsn or goal.snapshot not in (BEGINNING, goal.now):
        raise ConfigurationError(
            "--partition: a position in the WAL belongs to all partitions: give a c_offset or a time"
        )
    if len(chain) != 1:
        raise ConfigurationError(
            f"--partition: group {group!r} has not yet polled all events from before its last start: run relay, and "
            "stop it when it is idle"
        )
    (former,) = chain
    first, current, last = snapshots.begin(target, group, [BEGINNING, former.snapshot, goal.now])
    offsets.rename_snapshots(target, group, {former.id: current.id})
    # A partition that moves forward may skip more than the others have applied.
    forward = current if goal.polled_offset + 1 >= position.next_offset else first
    start = last if goal.snapshot == goal.now else forward
    offsets.move(target, group, [position.partition_id], start.id, goal.polled_offset)
    snapshots.forget_in(target, group, [position.partition_id])
    snapshots.prune(target, group, since=0)


@contextmanager
def stopped(target: Connection, settings: Settings) -> Iterator[None]:
    """Keep instances of the group from starting meanwhile. Raises ConfigurationError while one runs."""
    with presence.stopped(target, settings.group) as free:
        if not free:
            running = ", ".join(presence.instances(target, settings.group))
            raise ConfigurationError(
                f"group: an instance of {settings.group!r} is running ({running}): stop it first"
            )
        yield


def _chosen(
    settings: Settings, positions: list[offsets.PartitionPosition], partition: int | None
) -> list[offsets.PartitionPosition]:
    chosen = [position for position in positions if partition in (None, position.partition_id)]
    if not chosen:
        raise ConfigurationError(
            f"--partition: there is no partition {partition} of group {settings.group!r}: see `relay offsets show`"
        )
    return chosen


def repartition(settings: Settings, partitions: int, report: ProgressReport = silent) -> None:
    """Split the stopped group's hosts into another number of partitions.

    First it applies all committed events with the configured handlers, since hosts can move only between partitions at
    one position. A crash before the end changes nothing else. Raises ConfigurationError while an instance runs.
    """
    group = settings.group
    with reach_target(settings) as target, stopped(target, settings):
        positions = offsets.initialised(target, group)
        if settings.source.mode == "wal":
            _require_confirmed(settings, positions)
        else:
            unpinned = settings.poll.model_copy(update={"partition_ids": None})
            with reach_source(settings) as source:
                shown = durable_position(source).snapshot
            unsplit = settings.model_copy(update={"partitions": len(positions), "poll": unpinned})
            _catch_up(unsplit, report)
            # Noted transactions without rows: retention has removed their rows.
            snapshots.forget(target, group, shown)
            positions = offsets.initialised(target, group)
        with target.transaction():
            links = snapshots.chain(target, group)
            if len(links) > 1 or len(snapshots.noted(target, group)):
                raise ConfigurationError(
                    f"group: {group!r} has applied a commit that the source does not show yet, since it waits for a "
                    "synchronous standby: repartition when it is committed"
                )
            reached = groups.origin(target, group).polled
            offsets.remove(target, group)
            begun = snapshots.begin(target, group, [link.snapshot for link in links], reached)
            following = max(position.next_offset for position in positions)
            offsets.create(target, group, partitions, begun[0].id if begun else None)
            offsets.set_wal_position(
                target, group, max(position.applied_lsn for position in positions), following
            )


def _require_confirmed(settings: Settings, positions: Sequence[offsets.PartitionPosition]) -> None:
    """Raise ConfigurationError if a commit may have been applied in some partitions and not in others."""
    with reach_source(settings) as source:
        state = slot_state(source, settings.source.slot)
    confirmed = Lsn.parse((state and state.confirmed_flush_lsn) or "0/0")
    if max(position.applied_lsn for position in positions) > confirmed:
        raise ConfigurationError(
            f"group: {settings.group!r} has not confirmed all applied commits to the slot: run relay, and stop it "
            "when it is idle"
        )


def _catch_up(settings: Settings, report: ProgressReport) -> None:
    # These imports take a tenth of a second, which the other commands need not wait.
    from relay.pipeline.runner import Pipeline
    from relay.source.polling import Poller
    from relay.spark.engine import SparkEngine
    from relay.spark.session import Session

    done = 0
    poller = Poller(settings)
    session = Session(settings.spark, settings)
    pipeline = Pipeline(settings, SparkEngine(settings, session))
    try:
        pipeline.start()
        for opening in (False, True, False):
            while batch := poller.window(opening):
                pipeline.run(batch)
                done += batch.events
                left = batch.window.left if batch.window else 0
                report("applying events", done, done + left)
                if opening:
                    break
    finally:
        pipeline.close()
        session.close()
        poller.close()
