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
from relay.source.outbox_table import OutboxTable
from relay.source.server import durable_position
from relay.source.slot import slot_state
from relay.source.wal import commits_after
from relay.store import offsets
from relay.store.connections import Connection

_ROWS_AT_ONCE = 10_000
_BYTES_AT_ONCE = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Goal:
    """The position that a seek moves to; `text` says it in words.

    Skipped is what `snapshot` sees, and what the source shows now up to the position `polled_offset`; with `snapshot`
    None, what ends in the WAL at or below `lsn`. `split` are the 32-bit xids of transactions with rows on both sides of
    `polled_offset`, which are not skipped.
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
    """Find what `to` means: an OFFSET, LSN, TIME, beginning or end. Raises ConfigurationError for what does not exist.

    `lsn` says whether an error may propose an LSN.
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
                f"{option}: {to!r} is no position in the WAL, and source.mode: wal has no others: give an LSN, or end"
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
        found = table.first_since(source, _moment(to, option, lsn))
        offset = following if found is None else found
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
    """Find the goal after an LSN: the WAL that the slot holds says which transactions come after it."""
    state = slot_state(source, settings.source.slot)
    held = Lsn.parse((state and state.confirmed_flush_lsn) or "0/0")
    if state is None or lsn < held:
        raise ConfigurationError(
            f"--to: {lsn} is older than the WAL that the slot {settings.source.slot!r} holds"
            + (f", which begins at {held}" if held else "")
            + ("" if settings.source.mode == "wal" else ": give a c_offset or a time")
        )
    if lsn > end:
        raise ConfigurationError(f"--to: {lsn} is past the end of the WAL, which is {end}")
    if settings.source.mode == "wal":
        return Goal(f"at {lsn}", None, now, lsn=lsn)
    found: list[Xids] = []
    for part in commits_after(settings, lsn, end):
        if _has_unmarked(part):
            raise ConfigurationError(
                f"--to: after {lsn} the slot has events from before the outbox had {INSERTED_BY}, which polling cannot "
                "tell from those that are applied: run relay with source.mode: wal until it is idle, stop it, and seek "
                "to what the slot has confirmed then"
            )
        found.append(full_xids(part.facts["xid"], now.xmax))
    later: Xids = np.unique(np.concatenate([*found, np.array(now.in_progress, np.int64)]))
    # Transactions from xmax on are not visible in any case.
    later = later[later < now.xmax]
    xmin = int(later[0]) if len(later) else now.xmax
    return Goal(f"at {lsn}", Snapshot(xmin, now.xmax, tuple(later.tolist())), now)


def _has_unmarked(commits: Transactions) -> bool:
    """Say whether there are rows without the xid of the transaction that inserted them."""
    if INSERTED_BY not in commits.columns:
        return True
    index = commits.columns.index(INSERTED_BY)
    return any(
        bool(Walked(rows, [index]).absent(index).any())
        for rows in commits.portions(_ROWS_AT_ONCE, _BYTES_AT_ONCE)
    )
