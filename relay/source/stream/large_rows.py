"""Counts how often receiving a commit failed for its size, or killed the process: it has a row that is too large."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import psycopg

from relay.config.settings import Settings
from relay.faults import describe
from relay.source.decode.assembler import OpenCommit
from relay.store.suspects import Suspects

log = logging.getLogger(__name__)


class FatalCommit(Exception):
    """Receiving a commit failed `deaths` times for its size, or killed the process."""

    def __init__(self, commit: OpenCommit, deaths: int) -> None:
        super().__init__(commit, deaths)
        self.commit = commit
        self.deaths = deaths


class ReceiverSuspects:
    """The receiver's notes in `relay.suspects`: while guarding, the open commit has a note.

    A note that still exists when its commit comes again is a death. Guarding begins after a crash or when memory ran
    out, and ends when more was received than can have been buffered at the crash. Raises psycopg.Error.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._left = 0
        self._noted: OpenCommit | None = None

    @cached_property
    def _suspects(self) -> Suspects:
        """Opened at the first note, which is only written after a crash."""
        return Suspects(self._settings, 1)

    def close(self) -> None:
        """Close the connection."""
        if "_suspects" in self.__dict__:
            self._suspects.close()

    @property
    def guarding(self) -> bool:
        """Whether the open commit is noted."""
        return self._left > 0

    def guard(self) -> None:
        """Begin to note commits, since one may have killed a process."""
        self._left = 2 * self._settings.source.buffer_bytes

    def count_received(self, size: int, begun: OpenCommit | None) -> None:
        """Count received bytes and note the open commit. Raises FatalCommit if it has killed too many processes."""
        if self._noted is None and not self.guarding:
            return
        if begun is not None and begun == self._noted:
            return
        self._left -= size
        former = None if self._noted is None else _name(self._noted)
        if begun is not None and self.guarding:
            limit = self._settings.crash_limit
            noted = self._suspects.note_next(former, _name(begun), limit)
            self._noted = begun if noted else None
            if not noted:
                raise FatalCommit(begun, limit)
        elif former is not None:
            self._suspects.clear(former)
            self._noted = None

    def died(self, begun: OpenCommit | None) -> None:
        """Count a death, although the process survives: the open commit has a value that is too large."""
        if begun is not None and self._noted is None:
            with _tolerating():
                self._suspects.note(_name(begun))
        self._noted = None
        self.guard()

    def survived(self) -> None:
        """Take back the note, since receiving ended for another reason."""
        if self._noted is not None:
            with _tolerating():
                self._suspects.take_back(_name(self._noted))
            self._noted = None

    def forget(self, begun: OpenCommit) -> None:
        """Delete the note of a commit that is done."""
        self._suspects.clear(_name(begun))


@contextmanager
def _tolerating() -> Iterator[None]:
    """Tolerate an outage of the target: a wrong count is better than the end of relay."""
    try:
        yield
    except psycopg.OperationalError as error:
        log.warning("cannot count deaths of the receiver", extra={"fault": describe(error)})


def _name(commit: OpenCommit) -> str:
    return f"receiving {commit.lsn}"
