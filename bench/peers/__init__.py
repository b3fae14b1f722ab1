"""The peers: each is driven through its public interface, in its own process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.outbox import Backlog, Outbox


@dataclass(frozen=True, slots=True)
class Live:
    """A live run: the source of events, and the file to which a handler writes their arrivals."""

    outbox: Outbox
    folder: Path
    arrivals: Path


class Peer(Protocol):
    """A consumer of an outbox, with one configuration."""

    @property
    def name(self) -> str: ...

    def unavailable(self) -> str | None:
        """The reason why it cannot run here, or None."""

    def drain(self, outbox: Outbox, backlog: Backlog, folder: Path, effect: bool) -> float:
        """Events a second from the start of the stream to the last event; with `effect`, it writes a row for each."""
