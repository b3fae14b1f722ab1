"""Tracks the position of a sink: which commits are done, and what to store. No I/O.

Source: PgQ (Skype Tools), whose consumers have snapshots as positions too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from relay.model.events import Lsn
from relay.model.snapshots import Snapshot, Xids
from relay.store.positions.sinks import BEFORE_FIRST, SinkPosition


@dataclass(slots=True, eq=False)
class SinkCommit:
    """A commit of the source with deliveries for the sink; it is done when all of them are.

    `position` is the end of the commit in the WAL or, if it was polled, its position in the difference. `xid` is the
    full xid, 0 for rows that are older than the column c_xid. `since` is when it was read (monotonic clock, seconds).
    `deliveries` counts those that are not done; `is_begun` says that at least one is done.
    """

    position: int
    xid: int
    deliveries: int
    since: float
    is_begun: bool = False
    number: int = field(init=False)
    prefix: Prefix | None = field(init=False, default=None)


class Prefix:
    """Commits in order, and `reached`, the position up to which all of them are done."""

    def __init__(self, reached: int) -> None:
        self.reached = reached
        self._commits: deque[SinkCommit] = deque()
        self._passed: list[int] = []

    def __len__(self) -> int:
        """The number of commits that are remembered."""
        return len(self._commits) + len(self._passed)

    def add(self, commits: Iterable[SinkCommit]) -> None:
        """Append commits whose deliveries start."""
        for commit in commits:
            commit.prefix = self
            self._commits.append(commit)
        self.advance()

    def advance(self) -> None:
        """Move `reached` over the commits that are done."""
        while self._commits and not self._commits[0].deliveries:
            commit = self._commits.popleft()
            self.reached = commit.position
            if commit.xid:
                self._passed.append(commit.xid)

    def take_passed(self) -> list[int]:
        """The xids of the commits that `reached` has passed since the last call."""
        passed, self._passed = self._passed, []
        return passed


@dataclass(slots=True, eq=False)
class _Reading:
    """A difference up to the snapshot `end` that is being polled.

    `before` is the number of the last commit that started before the difference was opened; such a commit may be part
    of the difference nevertheless, if the stream brought it. Once the whole difference has been read, `last` is the
    number of its last commit.
    """

    end: Snapshot
    prefix: Prefix
    before: int
    last: int | None = None


class SinkProgress:
    """The position of a running sink, and the transactions after it that are done already.

    A slow delivery does not stop the sink: it polls the next difference or takes the stream while deliveries of an
    earlier difference are in flight. The stored position names the oldest difference that is not done and the position
    in it up to which it is done; other transactions that are done are remembered by their xids.
    """

    def __init__(self, position: SinkPosition, done: Xids, polls: bool) -> None:
        """`done`: full xids (int64, any order; copied) that are done and not covered by the position.

        Without `polls` the sink reads the WAL only, and its position is an LSN.
        """
        self.position = position
        self._polls = polls
        self._known = set(done.tolist())
        self._done = set(self._known)
        self._unstored: list[int] = []
        # Those that have started, without those before the oldest that is not done.
        self._in_flight: deque[SinkCommit] = deque()
        self._polled = 0
        self._number = 0
        self._streamed = Prefix(position.applied_lsn)
        self._differences: deque[_Reading] = deque()
        if position.following is not None:
            self._differences.append(
                _Reading(position.following, Prefix(position.polled_offset), 0)
            )

    @property
    def known(self) -> Xids:
        """The transactions that are done or in flight and that `end` may not see: full xids, int64, unordered."""
        return np.fromiter(self._known, np.int64, len(self._known))

    @property
    def end(self) -> Snapshot | None:
        """The snapshot up to which the outbox was polled or is being polled; None without one."""
        return self._differences[-1].end if self._differences else self.position.snapshot

    @property
    def since(self) -> float | None:
        """When the oldest unfinished commit was read (monotonic clock, seconds); None if all are done."""
        oldest = self._oldest
        return oldest.since if oldest else None

    @property
    def reached(self) -> Lsn:
        """The position up to which every commit of the stream is done; 0/0 while a polled commit is not."""
        return Lsn(0) if self._polled else Lsn(self._streamed.reached)

    @property
    def polls_any(self) -> bool:
        """Whether a commit that was polled is in flight."""
        return self._polled > 0

    def is_new(self, ends: NDArray[np.uint64], xids: Xids) -> NDArray[np.bool_]:
        """Find the commits of the stream that are not done: a mask of bool, one element for each commit.

        `ends` (uint64) are their end positions in the WAL, `xids` (int64) their full xids, in the same order.
        """
        end = self.end
        new: NDArray[np.bool_] = np.ones(len(ends), np.bool_)
        if not self._polls:
            new &= ends > self.position.applied_lsn
        if end is not None:
            new &= ~end.sees(xids)
        if self._known and new.any():
            new &= [xid not in self._known for xid in xids.tolist()]
        return new

    def reach(self, lsn: Lsn) -> None:
        """Raise `delivered_lsn`: no commit that is done or in flight ends after it."""
        if lsn > self.position.delivered_lsn:
            self.position = replace(self.position, delivered_lsn=lsn)

    # The stream

    def join(self, reached: Lsn) -> None:
        """Start to take the stream, which is buffered after the position `reached`.

        What the stream brought before, and is not done, counts as polled: the WAL after `reached` does not have it.
        """
        self._polled += sum(
            1 for each in self._in_flight if each.deliveries and each.prefix is self._streamed
        )
        self._streamed = Prefix(reached if self._polls else max(reached, self.position.applied_lsn))

    def stream(self, *commits: SinkCommit) -> None:
        """Start commits of the stream. One without deliveries only notes the position that was read."""
        self._begin(commits)
        self._streamed.add(commits)
        self.reach(Lsn(max((commit.position for commit in commits), default=0)))
        self._forget_passed()

    def poll_beside(self, *commits: SinkCommit) -> None:
        """Start commits that were polled while the sink joins the stream, which may bring them too."""
        self._polled += len(commits)
        self._begin(commits)

    def adopt(self, snapshot: Snapshot) -> bool:
        """Move to a snapshot up to which the stream has brought all; False while a polled commit is in flight."""
        before = self.position.snapshot
        if self._differences or self._polled:
            return False
        if before is not None and not snapshot.covers(before):
            return False
        self._move_to(snapshot)
        return True

    # The outbox

    def open(self, following: Snapshot) -> None:
        """Start the difference between `end` and the snapshot `following`."""
        self._differences.append(_Reading(following, Prefix(BEFORE_FIRST), self._number))
        self._describe_first()

    @property
    def reading(self) -> tuple[Snapshot, Snapshot, int] | None:
        """The difference that is being polled: its two snapshots, and the position in it after which to continue."""
        if not self._differences or self._differences[-1].last is not None:
            return None
        before = self._differences[-2].end if len(self._differences) > 1 else self.position.snapshot
        assert before is not None  # noqa: S101
        return before, self._differences[-1].end, self._differences[-1].prefix.reached

    @property
    def remembered(self) -> int:
        """The number of polled commits that are remembered."""
        return sum(len(each.prefix) for each in self._differences)

    def poll(self, *commits: SinkCommit) -> None:
        """Start commits of the difference. One without deliveries only notes the position that was read."""
        self._polled += sum(1 for commit in commits if commit.deliveries)
        self._begin(commits)
        self._differences[-1].prefix.add(commits)
        self._forget_passed()

    def read(self) -> None:
        """Note that the difference has been read to its end."""
        self._differences[-1].last = self._number
        self._advance()

    def finish(self, *commits: SinkCommit) -> None:
        """Finish a delivery of each commit: it was confirmed, or its outcome is stored together with the position."""
        advanced: set[Prefix] = set()
        for commit in commits:
            commit.deliveries -= 1
            commit.is_begun = True
            if commit.deliveries:
                continue
            if commit.prefix is not self._streamed:
                self._polled -= 1
            if commit.xid in self._known:
                self._done.add(commit.xid)
                self._unstored.append(commit.xid)
            if commit.prefix is not None:
                advanced.add(commit.prefix)
        while self._in_flight and not self._in_flight[0].deliveries:
            self._in_flight.popleft()
        for prefix in advanced:
            prefix.advance()
        self._advance()

    def to_store(self) -> tuple[SinkPosition, list[int]]:
        """The position to store, and the xids done after it: those since the last call, or all without a snapshot."""
        if self._position_suffices:
            reached = self._differences[0].prefix.reached
            self.position = replace(self.position, polled_offset=reached)
        if not self._polls:
            self.position = replace(self.position, applied_lsn=Lsn(self._streamed.reached))
        unstored, self._unstored = self._unstored, []
        if self.position.snapshot is None:
            return self.position, sorted(self._done)
        return self.position, [xid for xid in unstored if xid in self._known]

    def give_back(self, done: Sequence[int]) -> None:
        """Store again what `to_store` has returned: it was not stored."""
        self._unstored[:0] = done

    def _begin(self, commits: Iterable[SinkCommit]) -> None:
        for commit in commits:
            if not commit.deliveries:
                continue
            self._number += 1
            commit.number = self._number
            self._in_flight.append(commit)
            if commit.xid:
                self._known.add(commit.xid)

    @property
    def _oldest(self) -> SinkCommit | None:
        """The first commit that is not done; None if all are."""
        try:
            return self._in_flight[0]
        except IndexError:
            return None

    def _advance(self) -> None:
        """Drop the differences that are read and done, and move to the end of the last of them."""
        oldest = self._oldest
        while self._differences:
            last = self._differences[0].last
            if last is None or (oldest is not None and oldest.number <= last):
                break
            end = self._differences.popleft().end
            self._move_to(end)
        self._forget_passed()

    def _forget_passed(self) -> None:
        """Forget the transactions that the position covers."""
        passed = self._streamed.take_passed()
        if self.position.snapshot is not None:
            passed = self._differences[0].prefix.take_passed() if self._position_suffices else []
        self._known.difference_update(passed)
        self._done.difference_update(passed)

    @property
    def _position_suffices(self) -> bool:
        """Whether a position in the first difference suffices to say which of its transactions are done.

        It does not while a commit is in flight that started before the difference was opened: polling skips that commit
        wherever it is in the difference.
        """
        oldest = self._oldest
        return bool(self._differences) and (
            oldest is None or oldest.number > self._differences[0].before
        )

    def _move_to(self, snapshot: Snapshot) -> None:
        self.position = replace(self.position, snapshot=snapshot)
        self._describe_first()
        known = self.known
        self._known = set(known[~snapshot.sees(known)].tolist())
        self._done &= self._known

    def _describe_first(self) -> None:
        """Set the parts of the position that name the first difference that is not done."""
        first = self._differences[0] if self._differences else None
        self.position = replace(
            self.position,
            following=first.end if first else None,
            polled_offset=first.prefix.reached
            if first and self._position_suffices
            else BEFORE_FIRST,
        )


def commits_of(
    positions: Sequence[int], xids: Sequence[int], since: float
) -> tuple[list[SinkCommit], list[SinkCommit]]:
    """The commits of transactions, in order: each once, and that of each transaction.

    Neighbours with the same position and xid are of one commit: positions [7, 7, 9] with xids [1, 1, 2] give one commit
    of two deliveries and one of one delivery, and of these the first one twice for the transactions.
    """
    commits: list[SinkCommit] = []
    of_each: list[SinkCommit] = []
    before: tuple[int, int] | None = None
    for transaction in zip(positions, xids, strict=True):
        if transaction == before:
            commits[-1].deliveries += 1
        else:
            commits.append(SinkCommit(*transaction, 1, since))
            before = transaction
        of_each.append(commits[-1])
    return commits, of_each
