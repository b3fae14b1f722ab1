"""Replays, edits, discards and purges dead transactions, always whole and in the order of publishing: `relay dlq`.

A dead message of a work queue is one, too: a replay puts it into its queue again, and a discard deletes it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import chain, groupby
from pathlib import Path

import numpy as np
from tenacity import Retrying, retry_if_result, wait_exponential

from relay.admin.queues import require_known
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.model import headers
from relay.model.events import COMMIT_FIELDS, Commit, Lsn, Tuples, microseconds
from relay.model.transactions import FACTS, Rows, Transactions
from relay.pipeline.deferral import DeferralRules
from relay.pipeline.routing import BatchRouter
from relay.runtime.reporting import ProgressReport, silent
from relay.source.decode.pgoutput import encode_tuple
from relay.store import (
    dead_letters,
    deferred,
    presence,
    queues,
)
from relay.store.connections import Connection
from relay.store.dead_letters import FIELD_OF, STORED, DeadLetterRow, queue_of
from relay.store.dead_letters import edits as dead_letter_edits
from relay.store.dead_letters import selection as dead_letter_selection
from relay.store.dead_letters.selection import (
    DeadLetterSelection,
    FoundDeadLetters,
    FoundTransaction,
)
from relay.store.deferred import Deferral

_STORED_FIELDS = [name for name in STORED if FIELD_OF[name] not in (*COMMIT_FIELDS, headers.FIELD)]

_TRANSACTIONS_AT_ONCE = 500
_EVENTS_AT_ONCE = 10_000
_BYTES_AT_ONCE = 8 * 1024 * 1024
"""The limits of a portion that is replayed in memory; a larger transaction is streamed."""
_ROWS_AT_ONCE = 1_000
RowEncoder = Callable[[DeadLetterRow], bytes]
"""Encodes a dead letter as a row of the outbox."""
Facts = tuple[int, ...]
_POLL_SECONDS = 0.1
_MAX_POLL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Replayed:
    """Counts of replayed transactions: applied or delivered, dead again, and discarded while they were queued."""

    done: int
    dead: int
    discarded: int


def printed(
    settings: Settings, target: Connection, wanted: DeadLetterSelection, prefix: str = ""
) -> DeadLetterSelection:
    """Return a filter with ids as PostgreSQL prints them. `prefix` is that of the options `host` and `transaction`.

    Raises ConfigurationError for an id of another type, UnknownQueue for a queue that the group does not fill.
    """
    if wanted.queue is not None:
        require_known(target, settings, wanted.queue)
    printed = {
        name: settings.source.printed_id(f"{name}_id", given, f"{prefix}{name}")
        for name, given in wanted.given().items()
        if name in ("host", "transaction")
    }
    return wanted.model_copy(update=printed)


class DeadLetters:
    """The dead letters of the configured group, on an open connection to the target with a pinned text form."""

    def __init__(self, settings: Settings, conn: Connection) -> None:
        self._group = settings.group
        self._handlers = settings.handlers.keys()
        self._sinks = list(settings.sink_handlers)
        mapping = settings.source.mapping
        fields = [mapping[FIELD_OF[name]] for name in _STORED_FIELDS]
        # A header may be mapped to the column of another field.
        self._headers = {
            name: column for name, column in settings.source.headers.items() if column not in fields
        }
        self._columns = (*fields, *self._headers.values())
        self._router = BatchRouter(settings)
        self._deferral_rules = DeferralRules(settings, self._router)
        self._conn = conn

    def find(
        self, wanted: DeadLetterSelection, statuses: Sequence[str] = ("dead",)
    ) -> FoundDeadLetters:
        """Find the transactions of some statuses that a filter selects now."""
        return dead_letter_selection.find(self._conn, self._group, wanted, statuses)

    def warnings(self, selected: FoundDeadLetters) -> list[str]:
        """Return a line for each handler in which the transactions failed and that is not configured any more."""
        failed = dead_letter_selection.failed_handlers(self._conn, self._group, selected)
        return [
            f"handler {name!r}, in which {count} of these transactions failed, is not configured any more: the current "
            "routes decide where they go"
            for name, count in failed.items()
            if name not in self._handlers
        ]

    def verb(self, selected: FoundDeadLetters) -> str:
        """Return the verb for what a replay does: they are applied, delivered, enqueued, or several of these."""
        return " or ".join(verb for verb, count in self._verbs(selected).items() if count)

    def _verbs(self, selected: FoundDeadLetters) -> dict[str, int]:
        of_sinks = dead_letter_selection.sinks(self._conn, self._group, selected)
        delivered = sum(of_sinks.values())
        applied = selected.transactions - delivered - selected.messages
        return {"applied": applied, "delivered": delivered, "enqueued": selected.messages}

    def idle(self, selected: FoundDeadLetters) -> list[str]:
        """Return a line if no instance runs that would replay what is queued of the selected transactions."""
        needed = replace(
            selected, transactions=selected.transactions - selected.messages, messages=0
        )
        if not needed.transactions or presence.instances(self._conn, self._group):
            return []
        return [
            f"no instance of group {self._group!r} is running: they are {self.verb(needed)} when one starts"
        ]

    def replay(
        self,
        selected: FoundDeadLetters,
        reason: str | None,
        edits: Path | None = None,
        report: ProgressReport = silent,
    ) -> Sequence[int]:
        """Queue transactions to be applied, or delivered, again by a running relay, all or none; returns their numbers.

        They keep the order of publishing, and block later events of their ordering keys. Transactions that failed in a
        sink are delivered to that sink alone. Messages of work queues are put into their queue, after those that are
        there, with all their attempts. Transactions that are no longer dead are left out. A file of `edits`, as
        `relay dlq export` writes it, changes payloads first; the original one is kept in `original_payload`. Raises
        ConfigurationError for a file that cannot be read, for a payload that only the outbox has, and for a sink that
        is not configured any more.
        """
        of_sinks = dead_letter_selection.sinks(self._conn, self._group, selected)
        for name, count in of_sinks.items():
            if name not in self._sinks:
                raise ConfigurationError(
                    f"handlers.{name}: there is no such sink any more, and {count} of these transactions belong to it "
                    "alone: put it back, or replay the others (--sink, --handler) and discard these"
                )
        queued = array("q")
        with self._conn.transaction():
            if edits is not None:
                dead_letter_edits.load(self._conn, edits, selected.wanted.queue)
            for portion, numbers in self._locked(selected):
                if edits is not None:
                    dead_letter_edits.apply(self._conn, self._group, numbers, reason)
                self._require_payloads(numbers)
                transactions = [each for each in portion if each.message is None]
                if transactions:
                    self._queue(transactions)
                    marked = [each.number for each in transactions]
                    dead_letters.mark(
                        self._conn, self._group, marked, "replay", "replaying", reason
                    )
                messages = [each for each in portion if each.message is not None]
                if messages:
                    self._enqueue(messages, reason)
                queued.extend(numbers)
                report("queuing transactions", len(queued), selected.transactions)
        return queued

    def edit(
        self, dead_letter_id: int, payload: str, reason: str | None, queue: str | None = None
    ) -> None:
        """Give an event of a dead transaction another payload; the original one is kept in `original_payload`.

        With a `queue`, the dead letter is a message of it.

        Raises ConfigurationError for a payload that is not JSON, and if there is no such dead letter.
        """
        with self._conn.transaction():
            wanted = dead_letter_selection.one(dead_letter_id, queue)
            number = dead_letter_selection.transaction_of(self._conn, self._group, wanted)
            if number is None or not dead_letters.lock(self._conn, [number], ("dead",)):
                raise ConfigurationError(
                    f"dead letter {dead_letter_id}: does not have the status dead: it was replayed, discarded or purged"
                )
            dead_letter_edits.load_one(self._conn, dead_letter_id, queue, payload)
            dead_letter_edits.apply(self._conn, self._group, [number], reason)

    def outcome(self, numbers: Sequence[int], report: ProgressReport = silent) -> Replayed:
        """Wait until none of the replayed transactions is queued any more; returns their outcome."""
        replayed = list(numbers)

        def poll() -> dict[str, int]:
            counts = dead_letters.statuses(self._conn, replayed)
            done = len(replayed) - counts.get("replaying", 0)
            report("waiting for transactions", done, len(replayed))
            return counts

        statuses: dict[str, int] = Retrying(
            retry=retry_if_result(lambda counts: "replaying" in counts),
            wait=wait_exponential(multiplier=_POLL_SECONDS, max=_MAX_POLL_SECONDS),
        )(poll)
        dead, discarded = statuses.get("dead", 0), statuses.get("discarded", 0)
        return Replayed(len(replayed) - dead - discarded, dead, discarded)

    def discard(
        self, selected: FoundDeadLetters, reason: str | None, report: ProgressReport = silent
    ) -> int:
        """Discard transactions and release the keys that they hold; returns how many transactions.

        Those that are messages of work queues are deleted.
        """
        discarded = 0
        with self._conn.transaction():
            for portion, numbers in self._locked(selected):
                holding = deferred.blocked(self._conn, numbers)
                deferred.remove(self._conn, list(holding.values()))
                dead_letters.mark(self._conn, self._group, numbers, "discard", "discarded", reason)
                messages = [each.number for each in portion if each.message is not None]
                if messages:
                    dead_letters.purge(self._conn, messages)
                discarded += len(numbers)
                report("discarding transactions", discarded, selected.transactions)
        return discarded

    def purge(
        self, selected: FoundDeadLetters, reason: str | None, report: ProgressReport = silent
    ) -> int:
        """Delete dead transactions and keep the record of actions on them; returns how many dead letters."""
        purged = 0
        with self._conn.transaction():
            for _, numbers in self._locked(selected):
                dead_letters.note(self._conn, self._group, numbers, "purge", reason)
                purged += dead_letters.purge(self._conn, numbers)
                report("deleting dead letters", purged, selected.events)
        return purged

    def _locked(
        self, selected: FoundDeadLetters
    ) -> Iterator[tuple[list[FoundTransaction], list[int]]]:
        """Lock transactions in portions, in the order of publishing; yields each portion with its numbers."""
        for portion in _portions(dead_letter_selection.numbers(self._conn, self._group, selected)):
            numbers = [each.number for each in portion]
            locked = dead_letters.lock(self._conn, numbers, selected.statuses)
            left = [each for each in portion if each.number in locked]
            if left:
                yield left, [each.number for each in left]

    def _require_payloads(self, numbers: Sequence[int]) -> None:
        reference = dead_letters.by_reference(self._conn, numbers)
        if reference is not None:
            dead_letter_id, offset = reference
            raise ConfigurationError(
                f"dead letter {dead_letter_id}: the event at c_offset {offset} was too large to be received, its "
                "payload is only in the outbox: publish its content in smaller parts and `relay dlq discard` it, or "
                "give it a payload with `relay dlq replay --edit`"
            )

    def _queue(self, dead: Sequence[FoundTransaction]) -> None:
        transactions = self._rebuilt(dead)
        holding = deferred.blocked(self._conn, [each.number for each in dead])
        deferred.release(
            self._conn,
            {
                holding[each.number]: transactions[index]
                for index, each in enumerate(dead)
                if each.number in holding
            },
        )
        decoder = self._router.decoder(transactions.columns)
        for sink in dict.fromkeys(each.sink for each in dead):
            deferred.defer(
                self._conn,
                self._group,
                (
                    (
                        transaction,
                        Deferral(
                            self._keys(
                                transactions.part(index, index + 1), sink, dead[index].endpoint
                            ),
                            dead_transaction=dead[index].number,
                            undelivered=dead[index].undelivered,
                            event_ids=deferred.ids_of(transaction, decoder),
                            endpoint=dead[index].endpoint,
                        ),
                    )
                    for index, transaction in enumerate(transactions)
                    if dead[index].sink == sink and dead[index].number not in holding
                ),
                sink,
            )

    def _enqueue(self, messages: Sequence[FoundTransaction], reason: str | None) -> None:
        """Put dead messages into their queues again, each after those that are there."""
        of_queues: dict[str, list[int]] = {}
        for each in messages:
            if each.message is not None:
                of_queues.setdefault(queue_of(each.sink) or "", []).append(each.message)
        for name, ids in of_queues.items():
            queues.requeue(self._conn, name, ids, reason)

    def _keys(self, one: Transactions, sink: str, endpoint: str | None) -> frozenset[str]:
        if sink:
            return self._deferral_rules.delivery_keys(one, sink, endpoint)
        return self._deferral_rules.keys(self._router.route(one), 0)

    def _rebuilt(self, dead: Sequence[FoundTransaction]) -> Transactions:
        """Rebuild transactions from their dead letters, as they were published."""
        columns, encoded = self._columns, partial(_encoded, header_names=tuple(self._headers))
        if len(dead) == 1 and _is_large(dead[0]):
            tuples = _DeadLetterTuples(self._conn, dead[0], encoded)
            facts, transaction_id, hosts = _facts(tuples.rows(), encoded, index=0)
            return _spooled(columns, facts, transaction_id, hosts, tuples)
        rows_of: dict[int, list[DeadLetterRow]] = {
            number: [row for _, row in rows]
            for number, rows in groupby(
                dead_letters.stored(
                    self._conn, sorted(each.number for each in dead), _ROWS_AT_ONCE
                ),
                key=lambda each: each[0],
            )
        }
        in_order = [rows_of[each.number] for each in dead]
        known = [_facts(rows, encoded, index) for index, rows in enumerate(in_order)]
        return Transactions(
            columns,
            np.array([facts for facts, _, _ in known], FACTS),
            [transaction_id for _, transaction_id, _ in known],
            [hosts for _, _, hosts in known],
            Rows.of([encoded(row) for rows in in_order for row in rows]),
        )


class _DeadLetterTuples:
    """The rows of a large dead transaction: each iteration streams them from its dead letters."""

    def __init__(self, conn: Connection, dead: FoundTransaction, encoded: RowEncoder) -> None:
        self._conn = conn
        self._dead = dead
        self._encoded = encoded

    def __len__(self) -> int:
        return self._dead.events

    def rows(self) -> Iterator[DeadLetterRow]:
        """Yield the dead letters, in order."""
        dead = self._dead
        at_once = max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE * dead.events // max(1, dead.size)))
        return (row for _, row in dead_letters.stored(self._conn, [dead.number], at_once))

    def __iter__(self) -> Iterator[bytes]:
        return map(self._encoded, self.rows())


def _portions(transactions: Iterable[FoundTransaction]) -> Iterator[list[FoundTransaction]]:
    """Group transactions into portions that fit into memory; a large transaction is a portion of its own."""
    portion: list[FoundTransaction] = []
    events = size = 0
    for each in transactions:
        full = events + each.events > _EVENTS_AT_ONCE or size + each.size > _BYTES_AT_ONCE
        if portion and (full or len(portion) >= _TRANSACTIONS_AT_ONCE):
            yield portion
            portion, events, size = [], 0, 0
        portion.append(each)
        events += each.events
        size += each.size
    if portion:
        yield portion


def _is_large(dead: FoundTransaction) -> bool:
    return dead.events > _EVENTS_AT_ONCE or dead.size > _BYTES_AT_ONCE


def _spooled(
    columns: tuple[str, ...],
    facts: Facts,
    transaction_id: bytes | None,
    hosts: tuple[str, ...],
    tuples: Tuples,
) -> Transactions:
    return Transactions(
        columns, np.array([facts], FACTS), [transaction_id], [hosts], Rows.of([]), [tuples]
    )


def _facts(
    rows: Iterable[DeadLetterRow], encoded: RowEncoder, index: int
) -> tuple[Facts, bytes | None, tuple[str, ...]]:
    """Return a transaction's row of FACTS, its transaction_id and its hosts; `index` is its index in the batch."""
    remaining = iter(rows)
    first = next(remaining)
    offsets: list[int] = []
    hosts: dict[str, None] = {}
    events = size = 0
    for row in chain([first], remaining):
        if row["c_offset"]:
            offsets.append(int(row["c_offset"]))
            offsets = [min(offsets), max(offsets)]
        hosts.setdefault(row["host_id"] or "")
        events += 1
        size += len(encoded(row))
    facts = (
        *_commit(first),
        min(offsets, default=0),
        max(offsets, default=0),
        events,
        size,
        index,
    )
    return facts, _bytes(first["transaction_id"]), tuple(hosts)


def _encoded(row: DeadLetterRow, header_names: Sequence[str]) -> bytes:
    values = [row[name] for name in _STORED_FIELDS]
    if header_names:
        values_of = headers.from_json(row[headers.FIELD])
        values += [values_of.get(name) for name in header_names]
    return encode_tuple([_bytes(value) for value in values])


def _bytes(value: str | None) -> bytes | None:
    return None if value is None else value.encode("utf-8", "surrogateescape")


def _commit(row: DeadLetterRow) -> Commit:
    """Return the commit of a dead letter, with its LSN as its end: the end is not stored, and not needed."""
    lsn, moment, xid = row["commit_lsn"], row["commit_ts"], int(row["xid"] or 0)
    if lsn is None or moment is None:
        return Commit(Lsn(0), Lsn(0), 0, xid)
    ts = microseconds(datetime.fromisoformat(moment))
    return Commit(Lsn.parse(lsn), Lsn.parse(lsn), ts, xid)
