"""Shares the lanes of a reader among the processes that read it: each has some, and gives some back when one comes.

A lane is a reader of its own, of which one session at a time may move the position. All lanes of a process are read in
one thread, one page after the other.
"""

from __future__ import annotations

import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relay.client.claimed_reader import ClaimedReader
from relay.client.log_pages import LogPage, LogTransaction
from relay.client.log_session import LaneSession

if TYPE_CHECKING:
    from concurrent.futures import Executor

_SHARES = "select lane, pid, members, rank from relay.share_lanes(%s, true)"


@dataclass(frozen=True, slots=True, eq=False)
class _Lane:
    reader: ClaimedReader
    session: LaneSession


class SharedLanes:
    """The lanes of a reader that this process has. Its methods are called by one thread at a time, except `stop`.

    `member` is the reader whose session takes part in the sharing. `open_lane` returns the reader of a lane.
    """

    def __init__(
        self,
        dsn: str,
        member: ClaimedReader,
        open_lane: Callable[[str, LaneSession], ClaimedReader],
        poll: float,
        lease: float,
    ) -> None:
        self.name = member.name
        self.executor: Executor | None = None
        self._dsn = dsn
        self._member = member
        self._open_lane = open_lane
        self._poll = poll
        self._lease = lease
        self._lanes: dict[str, _Lane] = {}
        self._current: tuple[_Lane, LogPage, Iterator[LogTransaction]] | None = None
        self._shares_at = 0.0
        """When to look again who has which lanes."""
        self._leaving: dict[str, float] = {}
        """The lanes that are to be given back, and when at the latest."""
        self._stopping = threading.Event()
        self._waker, self._wakeup = socket.socketpair()
        self._waker.setblocking(False)

    def next_page(self) -> LogPage | None:
        """Wait for the next page of any lane; returns None once the reader is stopped. Raises ReaderError."""
        while not self._stopping.is_set():
            if time.monotonic() >= self._shares_at:
                self._share()
            self._leave()
            if self._current is not None:
                return self._current[1]
            for name in list(self._lanes):
                lane = self._lanes[name]
                if name in self._leaving or lane.session.waits_until > time.monotonic():
                    continue
                page = lane.reader.step()
                if page is not None:
                    # The others come first now.
                    self._lanes[name] = self._lanes.pop(name)
                    self._current = lane, page, lane.reader.transactions(page)
                    return page
            self._wait()
        return None

    def transactions(self, page: LogPage) -> Iterator[LogTransaction]:
        """Yield the transactions of a page, until it is time to look at the lanes: then the page comes again."""
        assert self._current is not None  # noqa: S101
        _, _, transactions = self._current
        for each in transactions:
            yield each
            if time.monotonic() >= self._shares_at or self._stopping.is_set():
                return
        self._current = None

    def stop(self) -> None:
        """End `next_page`, and yield no further transaction. Safe in any thread and in a signal handler."""
        self._stopping.set()
        for lane in list(self._lanes.values()):
            lane.reader.stop()
        with suppress(OSError):
            self._waker.send(b"!")

    def close(self) -> None:
        """Give all lanes back."""
        self._stopping.set()
        for lane in self._lanes.values():
            lane.reader.close()
        self._lanes.clear()
        self._member.close()
        self._waker.close()
        self._wakeup.close()

    def _share(self) -> None:
        """Take lanes that are free, or begin to give some back, so that no process has more than its share."""
        self._shares_at = time.monotonic() + self._poll * random.uniform(0.75, 1)  # noqa: S311
        found = self._member.ask(_SHARES, (self.name,))
        if not found:
            return
        holders = {str(lane): pid for lane, pid, *_ in found}
        # The first ones have what is left after the division, so that no lane is too many for all.
        share, left = divmod(len(found), int(found[0][2] or 1))
        share += int(found[0][3] or 0) < left
        for name, lane in list(self._lanes.items()):
            # Another process took it while this one had no connection.
            if not lane.reader.is_claimed and holders.get(name) is not None:
                self._drop(name)
        # Those that are given back already first, then those that wait for nobody's `done`.
        last = sorted(
            self._lanes,
            key=lambda each: (each not in self._leaving, not self._lanes[each].reader.is_idle),
        )
        deadline = time.monotonic() + self._lease
        self._leaving = {
            name: self._leaving.get(name, deadline) for name in last[: max(0, len(last) - share)]
        }
        free = [name for name, pid in holders.items() if pid is None and name not in self._lanes]
        random.shuffle(free)
        for name in free[: max(0, share - len(self._lanes))]:
            session = LaneSession(self._dsn, name, self._lease)
            self._lanes[name] = lane = _Lane(self._open_lane(name, session), session)
            lane.reader.executor = self.executor

    def _leave(self) -> None:
        """Give back the lanes of which everything is done, or that have been asked for long enough."""
        for name, deadline in list(self._leaving.items()):
            if self._lanes[name].reader.is_idle or time.monotonic() >= deadline:
                self._drop(name)

    def _drop(self, name: str) -> None:
        lane = self._lanes.pop(name)
        self._leaving.pop(name, None)
        if self._current is not None and self._current[0] is lane:
            self._current = None
        # What is in flight is another process's.
        lane.reader.forget()
        lane.reader.close()

    def _wait(self) -> None:
        """Wait until a lane is notified or has something to do."""
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        waiting = {}
        for name, lane in self._lanes.items():
            with lane.reader.using():
                descriptor = lane.session.descriptor
            if descriptor is not None and name not in self._leaving:
                poll.register(descriptor, select.POLLIN)
                waiting[descriptor] = lane
        ends = min(
            [
                self._shares_at,
                *self._leaving.values(),
                *(
                    lane.session.waits_until
                    for name, lane in self._lanes.items()
                    if name not in self._leaving
                ),
            ]
        )
        for descriptor, _ in poll.poll(max(0.0, ends - time.monotonic()) * 1000):
            if descriptor in waiting:
                lane = waiting[descriptor]
                # A beat of the reader's may wait for its answer.
                with lane.reader.using():
                    lane.session.notice()
