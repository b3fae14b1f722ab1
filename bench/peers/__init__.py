"""The peers: each driven by its own public interface, in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.outbox import Backlog, Outbox


@dataclass(frozen=True, slots=True)
class Live:
    """One live run: where events come from, and the file that a handler writes their arrivals to."""

    outbox: Outbox
    folder: Path
    arrivals: Path


class Peer(Protocol):
    """One way to consume an outbox, with one configuration."""

    @property
    def name(self) -> str: ...

    def unavailable(self) -> str | None:
        """Why it cannot run here, in a word, or None."""

    def drain(self, outbox: Outbox, backlog: Backlog, folder: Path, effect: bool) -> float:
        """Events a second, from the start of the stream to the last event; with or without a row for each."""
