"""The order of deferred transactions, whatever happens to them: a state machine against a model of what a turn is.

The model looks at everything each time. The store looks at what its indexes show it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from typing import Any, ClassVar

import psycopg
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

from relay.store import deferred
from relay.store.deferred import Deferral
from relay.store.deferred import due as deferred_due
from relay.store.deferred import selection as deferred_selection
from relay.store.deferred.due import DueTransaction
from relay.store.filters import DeferredSelection
from tests.deferrals import undecoded
from tests.outbox import Outbox

_GROUPS = count(1)
_LATER = 3_600.0
_FAR = datetime(2999, 1, 1, tzinfo=UTC)
EVERYTHING = 1_000
SIZE = undecoded().size
"""The size of each transaction here, in bytes."""

DeferredRow = list[tuple[frozenset[str], str]]
"""The keys of transactions, and when their time comes."""

KEYS = st.frozensets(st.sampled_from("abcd"), max_size=2) | st.just(frozenset("a"))
TIMES = st.sampled_from(["now", "now", "replayed", "later", "scheduled", "blocked"])
DEFERRED_ROWS: st.SearchStrategy[DeferredRow] = st.lists(
    st.tuples(KEYS, TIMES), min_size=1, max_size=8
)


@dataclass
class Row:
    """What the model knows of a deferred transaction."""

    keys: frozenset[str]
    holds: bool = True
    blocked: bool = False
    due: bool = True


class Store(RuleBasedStateMachine):
    """A sink's deferred transactions, a worker that takes and finishes some, and others that add and remove some."""

    conn: ClassVar[psycopg.Connection[Any]]
    other: ClassVar[psycopg.Connection[Any]]

    def __init__(self) -> None:
        super().__init__()
        self.group = f"g{next(_GROUPS)}"
        self.rows: dict[int, Row] = {}
        self.flying: set[int] = set()
        self.uncommitted: list[Row] = []
        self.open = ExitStack()

    def teardown(self) -> None:
        self.open.close()

    # Others.

    @precondition(lambda self: not self.uncommitted)
    @rule(deferred_rows=DEFERRED_ROWS)
    def defer(self, deferred_rows: DeferredRow) -> None:
        self.uncommitted = self.insert(self.conn, deferred_rows)
        self.see_what_was_deferred()

    @precondition(lambda self: not self.uncommitted)
    @rule(deferred_rows=DEFERRED_ROWS)
    def begin_to_defer(self, deferred_rows: DeferredRow) -> None:
        """Somebody has seen what is held now, and commits later."""
        self.open.enter_context(self.other.transaction())
        self.uncommitted = self.insert(self.other, deferred_rows)

    @precondition(lambda self: self.uncommitted)
    @rule()
    def commit(self) -> None:
        self.open.close()
        self.see_what_was_deferred()

    def insert(self, conn: psycopg.Connection[Any], deferred_rows: DeferredRow) -> list[Row]:
        waits = []
        for keys, when in deferred_rows:
            match when:
                case "now":
                    waits.append(Deferral(keys))
                case "replayed":
                    waits.append(Deferral(keys, dead_transaction=2))
                case "later":
                    waits.append(Deferral(keys, after=_LATER, attempts=1))
                case "scheduled":
                    waits.append(Deferral(keys, holds=False, until=_FAR))
                case _:
                    waits.append(Deferral(keys, blocked=True, dead_transaction=1))
        deferred.defer(conn, self.group, ((undecoded(), wait) for wait in waits), "s")
        return [
            Row(
                frozenset(wait.keys),
                wait.holds,
                wait.blocked,
                wait.until is None and not wait.after,
            )
            for wait in waits
        ]

    def see_what_was_deferred(self) -> None:
        ids = [number for number in self.ids() if number not in self.rows]
        self.rows |= dict(zip(ids, self.uncommitted, strict=True))
        self.rows = dict(sorted(self.rows.items()))
        self.uncommitted = []

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def time_passes(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sets(st.sampled_from(sorted(self.rows)), min_size=1))
        found = deferred_selection.find(self.conn, self.group, DeferredSelection(ids=tuple(chosen)))
        deferred_selection.make_due(self.conn, self.group, found)
        for number in chosen:
            if not self.rows[number].blocked:
                self.rows[number].due = True

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """Somebody gives some up."""
        chosen = data.draw(st.sets(st.sampled_from(sorted(self.rows)), min_size=1, max_size=3))
        assert deferred.remove(self.conn, chosen) == chosen
        self.forget(chosen)

    @precondition(lambda self: any(row.blocked for row in self.rows.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocked = [number for number, row in self.rows.items() if row.blocked]
        number = data.draw(st.sampled_from(blocked))
        deferred.release(self.conn, {number: undecoded()})
        self.rows[number].blocked = False
        self.rows[number].due = True

    # The worker.

    @rule(
        limit=st.integers(1, 6) | st.just(EVERYTHING),
        transactions=st.integers(0, 4) | st.just(EVERYTHING),
    )
    def take(self, limit: int, transactions: int) -> None:
        """`transactions` of them have as many bytes as may be taken."""
        due = self.heads(limit, transactions * SIZE)
        chosen = {each.id for each in due}
        turn = self.turn()
        assert len(due) <= limit
        assert [each.id for each in due] == sorted(chosen)
        assert chosen <= turn
        for number in chosen:
            assert self.holders_before(number) <= chosen
        if turn:
            assert chosen
        assert len(due) <= max(2, transactions)
        if limit == transactions == EVERYTHING:
            assert {number for number in turn if not self.holders_before(number)} <= chosen
        self.flying |= chosen

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), outcome=st.sampled_from(["done", "done", "later", "at once", "dead"]))
    def finish(self, data: st.DataObject, outcome: str) -> None:
        """One of those of which no other in flight comes before it."""
        free = [
            number
            for number in sorted(self.flying)
            if not any(
                other < number and not self.keys(other).isdisjoint(self.keys(number))
                for other in self.flying
            )
        ]
        number = data.draw(st.sampled_from(free))
        self.flying.remove(number)
        keys = self.rows[number].keys
        if outcome == "done":
            assert deferred.remove(self.conn, [number]) == {number}
            self.forget({number})
            return
        row = self.rows[number]
        row.holds, row.blocked, row.due = True, outcome == "dead", outcome != "later"
        wait = Deferral(
            keys,
            after=_LATER if outcome == "later" else 0.0,
            attempts=1,
            blocked=row.blocked,
            dead_transaction=1 if row.blocked else None,
        )
        assert deferred.defer_again(self.conn, [(number, wait)]) == {number}
        self.land_after(set(keys))

    def land_after(self, stuck: set[str]) -> None:
        """Block the transactions after a failed one with the same key. They hold their keys from now on."""
        blocked = []
        for number in sorted(self.flying):
            if not stuck.isdisjoint(self.keys(number)):
                stuck |= self.keys(number)
                blocked.append(number)
        self.flying -= set(blocked)
        again = [
            (number, Deferral(self.keys(number)))
            for number in blocked
            if not self.rows[number].holds
        ]
        assert deferred.defer_again(self.conn, again) == {number for number, _ in again}
        for number, _ in again:
            self.rows[number].holds = True

    @rule()
    def let_all_go(self) -> None:
        """The worker dies; nothing of what it had in flight was tried."""
        self.flying.clear()

    # What holds at any time.

    @rule()
    def held(self) -> None:
        expected = {key for row in self.rows.values() if row.holds for key in row.keys}
        assert deferred.held(self.conn, self.group, "s", "abcdef") == expected
        assert deferred.held(self.conn, self.group, "", "abcdef") == set()
        assert deferred.held(self.conn, "nobody", "s", "abcdef") == set()

    @rule()
    def keys_are_those_of_the_rows_that_hold_them(self) -> None:
        stored = self.conn.execute(
            "select deferred_id, key from relay.deferred_keys where group_id = %s and sink = 's'",
            (self.group,),
        ).fetchall()
        expected = {
            (number, key) for number, row in self.rows.items() if row.holds for key in row.keys
        }
        assert sorted(stored) == sorted(expected)

    @rule()
    def predecessors_are_there_and_hold_a_key(self) -> None:
        noted = self.conn.execute(
            "select id, predecessor from relay.deferred where group_id = %s and predecessor is not null",
            (self.group,),
        ).fetchall()
        for number, predecessor in noted:
            assert predecessor in self.holders_before(number)

    @precondition(lambda self: self.rows and not self.uncommitted)
    @rule()
    def drain(self) -> None:
        """Everything has its turn once nothing has failed."""
        self.flying.clear()
        found = deferred_selection.find(self.conn, self.group, DeferredSelection())
        deferred_selection.make_due(self.conn, self.group, found)
        for number, row in list(self.rows.items()):
            if row.blocked:
                deferred.remove(self.conn, [number])
                self.forget({number})
            row.due = True
        while due := self.heads(4):
            for each in due:
                assert self.holders_before(each.id) <= {one.id for one in due}
            deferred.remove(self.conn, [each.id for each in due])
            self.forget({each.id for each in due})
        assert not self.rows
        assert deferred_selection.count(self.conn, self.group).transactions == 0

    # The model.

    def turn(self) -> set[int]:
        """Those that may be tried now."""
        barred: set[int] = set()
        for number, row in self.rows.items():
            is_barred = row.blocked or not row.due or number in self.flying
            if is_barred or not self.holders_before(number).isdisjoint(barred):
                barred.add(number)
        return self.rows.keys() - barred

    def holders_before(self, number: int) -> set[int]:
        return {
            other
            for other, row in self.rows.items()
            if other < number and row.holds and not self.keys(other).isdisjoint(self.keys(number))
        }

    def keys(self, number: int) -> frozenset[str]:
        return self.rows[number].keys

    def forget(self, numbers: set[int]) -> None:
        for number in numbers:
            del self.rows[number]
        self.flying -= numbers

    # The store.

    def heads(self, limit: int, size: int = EVERYTHING * SIZE) -> list[DueTransaction]:
        return deferred_due.heads(self.conn, self.group, "s", limit, size, self.flying)

    def ids(self) -> Iterator[int]:
        for (number,) in self.conn.execute(
            "select id from relay.deferred where group_id = %s order by id", (self.group,)
        ):
            yield number


def test_every_transaction_has_its_turn_and_none_before_it(outbox: Outbox) -> None:
    with psycopg.connect(outbox.superuser_dsn, autocommit=True) as other:
        outbox.conn.execute("set synchronous_commit = off")
        Store.conn, Store.other = outbox.conn, other
        run_state_machine_as_test(
            Store,
            settings=settings(
                stateful_step_count=40,
                suppress_health_check=list(HealthCheck),
            ),
        )


def test_a_replay_has_its_turn_whose_key_was_not_among_those_that_went_first(
    outbox: Outbox,
) -> None:
    a, cd = frozenset("a"), frozenset("cd")
    Store.conn = Store.other = outbox.conn
    store = Store()
    store.defer([(cd, "replayed"), (a, "replayed")])
    store.defer([(frozenset("ad"), "replayed"), (a, "now"), (a, "now"), (frozenset("ac"), "now")])
    store.drain()
