"""Finds the position that `--to` or `--from` names: a c_offset, an LSN, a time, the beginning or the end."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.model.events import INSERTED_BY, Lsn
from relay.model.snapshots import BEGINNING, Snapshot, Xids, full_xids
from relay.model.transactions import Transactions
from relay.model.tuples import Walked
from relay.source.outbox.table import OutboxTable
from relay.source.server import durable_position
from relay.source.stream.slot import slot_state
from relay.source.stream.wal import commits_after
from relay.store.connections import Connection
from relay.store.positions import offsets

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
        first = table.first_since(source, _moment(to, option, lsn))
        offset = following if first is None else first
    split = tuple(table.split_at(source, offset - 1))
    return Goal(f"at c_offset {offset}", BEGINNING, seen.snapshot, offset - 1, split)


def _moment(to: str, option: str, lsn: bool) -> datetime:
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
