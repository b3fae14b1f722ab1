"""Dead letters that come back: what is done about dead transactions, always whole and in the order of publishing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import psycopg

from relay.config import Settings
from relay.events import COMMIT_FIELDS, POLLED, Commit, Lsn, microseconds
from relay.faults import ConfigurationError
from relay.pipeline.routed import Routing
from relay.pipeline.waiting import Waiting
from relay.source.pgoutput import encode_tuple
from relay.store import dead_letters, deferred
from relay.store.dead_letters import FIELD_OF, STORED, DeadTransaction, Filter
from relay.store.deferred import Wait
from relay.transactions import FACTS, Rows, Transactions

Connection = psycopg.Connection[Any]

Edits = Mapping[int, str]
"""Letters as `relay dlq export` writes them, by their ids; what counts is the payload."""

_STORED_FIELDS = [name for name in STORED if FIELD_OF[name] not in COMMIT_FIELDS]


class DeadLetters:
    """The dead letters of the configured group, on an open connection to the target."""

    def __init__(self, settings: Settings, conn: Connection) -> None:
        self._group = settings.group
        self._mapping = settings.source.mapping
        self._waiting = Waiting(settings, Routing(settings))
        self._conn = conn

    def find(self, wanted: Filter, statuses: Sequence[str] = ("dead",)) -> list[DeadTransaction]:
        """The transactions of some statuses, in the order in which they were published."""
        found = dead_letters.transactions(
            self._conn, self._group, wanted=wanted, newest_first=False
        )
        return [each for each in found if each.status in statuses]

    def replay(
        self,
        transactions: Sequence[DeadTransaction],
        reason: str | None,
        edits: Edits | None = None,
    ) -> int:
        """Let a running relay apply transactions again, in their order; returns how many, all or none of them.

        What is published for their ordering keys meanwhile waits behind them. Those that are no longer dead are left
        out. What is edited is changed before, and the first payload kept beside it.
        """
        replayed = 0
        with self._conn.transaction():
            for each in transactions:
                if not dead_letters.lock(self._conn, each.letters, "dead"):
                    continue
                if edits:
                    self._edit(each, edits, reason)
                self._defer(each)
                dead_letters.mark(
                    self._conn, self._group, each.letters, "replay", "replaying", reason
                )
                replayed += 1
        return replayed

    def discard(self, transactions: Sequence[DeadTransaction], reason: str | None) -> int:
        """Give transactions up, and let go of the keys that they hold; returns how many."""
        discarded = 0
        with self._conn.transaction():
            for each in transactions:
                if not dead_letters.lock(self._conn, each.letters, "dead"):
                    continue
                blocked = self._blocked(self._rebuilt(each))
                if blocked is not None:
                    deferred.settle(self._conn, [blocked])
                dead_letters.mark(
                    self._conn, self._group, each.letters, "discard", "discarded", reason
                )
                discarded += 1
        return discarded

    def purge(self, transactions: Sequence[DeadTransaction], reason: str | None) -> int:
        """Delete the letters of transactions; what was done about them stays noted. Returns how many letters."""
        purged = 0
        with self._conn.transaction():
            for each in transactions:
                dead_letters.note(self._conn, self._group, each.letters, "purge", reason)
                purged += dead_letters.purge(self._conn, each.letters)
        return purged

    def _edit(self, dead: DeadTransaction, edits: Edits, reason: str | None) -> None:
        changed = [
            letter
            for letter in dead.letters
            if letter in edits and dead_letters.edit(self._conn, letter, edits[letter])
        ]
        if changed:
            dead_letters.note(self._conn, self._group, changed, "edit", reason)

    def _defer(self, dead: DeadTransaction) -> None:
        one = self._rebuilt(dead)
        wait = Wait(self._waiting.keys(one), letters=dead.letters)
        blocked = self._blocked(one)
        if blocked is None:
            deferred.park(self._conn, self._group, [(one[0], wait)])
        else:
            deferred.release(self._conn, blocked, one[0], wait)

    def _blocked(self, one: Transactions) -> int | None:
        """The place that a transaction still has before others of its keys."""
        return deferred.blocked(self._conn, self._group, one[0])

    def _rebuilt(self, dead: DeadTransaction) -> Transactions:
        """The transaction as it came, from its letters."""
        letters = [
            dict(zip(STORED, row, strict=True))
            for row in dead_letters.texts(self._conn, dead.letters)
        ]
        first = letters[0]
        rows = Rows.of(
            [encode_tuple([_bytes(letter[name]) for name in _STORED_FIELDS]) for letter in letters]
        )
        offsets = [int(letter["c_offset"]) for letter in letters if letter["c_offset"]]
        hosts = tuple(dict.fromkeys(letter["host_id"] or "" for letter in letters))
        facts = (
            *_commit(first),
            min(offsets, default=0),
            max(offsets, default=0),
            len(letters),
            int(rows.sizes.sum()),
            0,
        )
        return Transactions(
            tuple(self._mapping[FIELD_OF[name]] for name in _STORED_FIELDS),
            np.array([facts], FACTS),
            [_bytes(first["transaction_id"])],
            [hosts],
            rows,
        )


def read_edits(file: Path) -> Edits:
    """Read what `relay dlq export` wrote and somebody has edited. Raises ConfigurationError with file and line."""
    edits: dict[int, str] = {}
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file}: cannot be read ({type(error).__name__})") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            letter = json.loads(line)
        except ValueError as error:
            raise ConfigurationError(f"{file}:{number}: is not JSON: {error}") from None
        if (
            not isinstance(letter, dict)
            or not isinstance(letter.get("id"), int)
            or "payload" not in letter
        ):
            raise ConfigurationError(
                f"{file}:{number}: must be an object with id and payload, as `relay dlq export` writes it"
            )
        edits[letter["id"]] = line
    return edits


def _bytes(value: str | None) -> bytes | None:
    return None if value is None else value.encode()


def _commit(letter: dict[str, str | None]) -> Commit:
    """The commit that a letter came from; its end is not known, and nobody asks for it any more."""
    lsn, moment = letter["commit_lsn"], letter["commit_ts"]
    if lsn is None or moment is None:
        return POLLED
    ts = microseconds(datetime.fromisoformat(moment))
    return Commit(Lsn.parse(lsn), Lsn.parse(lsn), ts, int(letter["xid"] or 0))
