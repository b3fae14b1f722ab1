"""Random histories of producers and workers of a queue against a model: what can be taken is exactly what should be.

Producers and workers hold transactions open, roll back, and are killed; marks are moved at any moment, so one that runs
ahead of a message that is still to come hides it from the next one who takes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg
import pytest

from tests.outbox import Outbox

ATTEMPTS = 3
PRODUCERS, WORKERS = (0, 1), (2, 3, 4)
DUE, LATER = "0 seconds", "1 hour"


@dataclass
class Message:
    """A committed message: who has it in a transaction, until when it waits, and how often it was tried.

    `aborted` says that the last transaction that had it was aborted, and `interruptions` how often a claim saw that.
    """

    id: int
    key: str | None
    attempts: int = 0
    holder: int | None = None
    until: str | None = None
    leased: bool = False
    aborted: bool = False
    interruptions: int = 0

    @property
    def exhausted(self) -> bool:
        """Whether the lease of its last attempt is over."""
        return self.until == DUE and self.attempts >= ATTEMPTS


@dataclass
class Claim:
    """What a worker has claimed in its transaction: how each message ends if that commits."""

    messages: list[Message] = field(default_factory=list)
    ends: list[Callable[[], None]] = field(default_factory=list)


@dataclass
class History:
    """The sessions of producers and workers, and what the queue has to have."""

    outbox: Outbox
    keyed: bool
    chance: random.Random
    messages: dict[int, Message] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    begun: dict[int, list[Message]] = field(default_factory=dict)
    taken: dict[int, list[int]] = field(default_factory=dict)
    claimed: dict[int, Claim] = field(default_factory=dict)
    leases: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # The test looks, in a worker's transaction, at what is there for it; no function reads it with this right.
        self.outbox.conn.execute("grant select on relay.queue_messages to app_worker")
        self.outbox.worker.execute(
            "select relay.declare_queue('q', null, %s, attempts => %s)",
            ("aggregate" if self.keyed else "none", ATTEMPTS),
        )
        self.sessions = [self.connect() for _ in range(5)]

    def connect(self) -> psycopg.Connection[Any]:
        conn = psycopg.connect(self.outbox.worker_dsn)
        # Nobody waits for another.
        conn.execute("set lock_timeout = '2s'")
        conn.commit()
        return conn

    def close(self) -> None:
        for each in self.sessions:
            each.close()

    def enqueue(self, who: int) -> None:
        count = self.chance.randint(1, 4)
        for _ in range(count):
            # Each has keys of its own: those that enqueue messages of one key at the same time have no order.
            key = f"Order {who} {self.chance.randint(1, 3)}" if self.keyed else None
            row = (
                self.sessions[who]
                .execute(
                    "select relay.enqueue('q', '{}', host_id => 'h', key => %s)",
                    (key,),
                )
                .fetchone()
            )
            assert row is not None
            self.begun.setdefault(who, []).append(Message(row[0], key))

    def available(self, who: int | None) -> list[Message]:
        """What can be taken now: of a key, one that waits is tried again before the others, and only one is worked.

        A transaction that has taken one can go on with the next: they commit together.
        """
        found = []
        busy = {
            each.key
            for each in self.messages.values()
            if each.key is not None
            and (each.holder is not None or each.until is not None)
            and not each.exhausted
            and (each.holder is None or each.holder != who)
        }
        for each in sorted(self.messages.values(), key=lambda message: message.id):
            if each.holder is not None or each.until == LATER:
                continue
            if each.until is None and each.key is not None:
                if each.key in busy:
                    continue
                busy.add(each.key)
            found.append(each)
        return found

    def received(
        self, rows: list[tuple[int, int]], most: int, who: int | None = None
    ) -> list[Message]:
        """Compare what was taken with what could be; returns its messages."""
        could = self.available(who)
        # Whoever meets one makes a dead letter of it, and then the next one of its key is the first.
        exhausted = {each.id for each in could if each.exhausted}
        possible = {each.id: each for each in could if each.id not in exhausted}
        assert {number for number, _ in rows} <= possible.keys()
        assert [number for number, _ in rows] == sorted({number for number, _ in rows})
        if not exhausted:
            # Of a long queue with keys, a window of the oldest is looked at: if it has one, that is enough.
            least = min(1 if self.keyed and len(self.messages) > 50 else most, len(possible))
            assert least <= len(rows) <= most
        if not self.keyed and most >= 100:
            assert {number for number, _ in rows} == possible.keys()
        for number, attempt in rows:
            assert attempt == possible[number].attempts + 1
        return [possible[number] for number, _ in rows]

    def find_dead(self) -> None:
        """Note which messages became dead letters when somebody met their last lease."""
        for number in self.outbox.column("select id from relay.queue_dead_letters"):
            if number in self.messages:
                assert self.messages[number].attempts >= ATTEMPTS
                self.bury(self.messages[number])

    def bury(self, each: Message) -> None:
        del self.messages[each.id]
        self.dead.add(each.id)

    def finish_one(self, each: Message) -> None:
        del self.messages[each.id]
        self.done.add(each.id)

    def claim(self, who: int) -> None:
        """Claim messages, and end some of them: in the same transaction, which may be aborted all the same."""
        if who in self.claimed:
            return  # it would get again what it has not ended
        conn, most = self.sessions[who], self.chance.choice((1, 2, 3, 100))
        counted = "select id, interruptions from relay.queue_messages"
        before = dict(conn.execute(counted).fetchall())
        rows = conn.execute("select id, attempt from relay.claim('q', %s)", (most,)).fetchall()
        after = dict(conn.execute(counted).fetchall())
        left = [
            self.messages[number]
            for number, count in before.items()
            if after.get(number) != count and not self.messages[number].exhausted
        ]
        assert [number for number, _ in rows] == sorted({number for number, _ in rows})
        self.received(sorted(rows + [(each.id, each.attempts + 1) for each in left]), most, who)
        claim = self.claimed[who] = Claim()
        for each in left:
            assert each.aborted
            claim.messages.append(each)
            if each.interruptions + 1 >= ATTEMPTS:
                assert each.id not in after
                claim.ends.append(partial(self.bury, each))
            else:
                assert after[each.id] == each.interruptions + 1
                claim.ends.append(partial(self.interrupt, each))
        for number, attempt in rows:
            each = self.messages[number]
            assert not each.aborted
            claim.messages.append(each)
            self.end_claim(who, each, attempt)
        for each in claim.messages:
            each.holder = who

    def end_claim(self, who: int, each: Message, attempt: int) -> None:
        how = self.chance.choice(("complete", "retry", "fail", None))
        if how is None:
            return
        after = self.chance.choice((DUE, LATER))
        row = (
            self.sessions[who]
            .execute(
                f"select relay.{how}('q', %s, %s{', %s' if how == 'retry' else ''})".encode(),
                (each.id, attempt, after)[: 3 if how == "retry" else 2],
            )
            .fetchone()
        )
        dies = how == "fail" or (how == "retry" and attempt >= ATTEMPTS)
        assert row == ({True: "dead", False: "retry"}[dies] if how == "retry" else True,)
        self.claimed[who].ends.append(
            partial(self.finish_one, each)
            if how == "complete"
            else partial(self.bury, each)
            if dies
            else partial(self.again, each, attempt, after)
        )

    def interrupt(self, each: Message) -> None:
        each.interruptions += 1

    def again(self, each: Message, attempt: int, until: str) -> None:
        each.attempts, each.leased, each.until = attempt, False, until
        each.aborted, each.interruptions = False, 0

    def take(self, who: int) -> None:
        if who in self.claimed:
            return
        most = self.chance.choice((1, 2, 3, 100))
        rows = (
            self.sessions[who].execute("select id, attempt from relay.take('q', %s)", (most,))
        ).fetchall()
        for each in self.received(rows, most, who):
            each.holder = who
            self.taken.setdefault(who, []).append(each.id)

    def lease(self, _: int) -> None:
        most = self.chance.choice((1, 2, 100))
        duration = self.chance.choice((DUE, LATER))
        rows = self.outbox.worker.execute(
            "select id, attempt from relay.lease('q', %s, %s)", (most, duration)
        ).fetchall()
        for each in self.received(rows, most):
            each.attempts += 1
            each.leased, each.until, each.aborted = True, duration, False
            self.leases.append((each.id, each.attempts))
        self.find_dead()

    def end_lease(self, _: int) -> None:
        """End one of the leases there ever were: only its holder of now succeeds."""
        if not self.leases:
            return
        number, attempt = self.chance.choice(self.leases)
        each = self.messages.get(number)
        if each is not None and each.exhausted:
            return  # a worker may be making a dead letter of it
        holds = (
            each is not None and each.leased and each.attempts == attempt and each.holder is None
        )
        how = self.chance.choice(("complete", "extend", "release", "fail", "retry"))
        more = {"retry": ", %(after)s", "extend": ", %(after)s"}.get(how, "")
        after = self.chance.choice((DUE, LATER))
        row = self.outbox.conn.execute(
            f"select relay.{how}('q', %(id)s, %(attempt)s{more})".encode(),
            {"id": number, "attempt": attempt, "after": after},
        ).fetchone()
        ended = row is not None and bool(row[0])
        if (
            how in ("release", "retry", "fail", "complete")
            and each is not None
            and (not each.leased or each.until == DUE)
        ):
            # One that was given back counts as the attempt after those that were counted.
            holds = holds or (each.holder is None and each.attempts == attempt - 1)
        assert ended == holds, (how, number, attempt, each)
        if not holds or each is None:
            return
        if how == "complete":
            self.finish_one(each)
        elif how == "extend":
            each.until, each.aborted = after, False
        elif how == "release":
            each.attempts, each.leased, each.until, each.aborted = attempt - 1, False, DUE, False
        elif how == "fail" or attempt >= ATTEMPTS:
            self.bury(each)
        else:
            self.again(each, attempt, after)

    def give_up(self, who: int) -> None:
        """Roll back what a worker has taken, and end the attempt at one of the messages."""
        given_back = self.taken.get(who, [])[:]
        self.roll_back(who)
        for number in given_back[:1]:
            each = self.messages[number]
            after = self.chance.choice((DUE, LATER))
            how = self.outbox.worker.value(
                "select relay.retry('q', %s, %s, %s)", (number, each.attempts + 1, after)
            )
            self.again(each, each.attempts + 1, after)
            assert how == ("dead" if each.attempts >= ATTEMPTS else "retry")
            if how == "dead":
                self.bury(each)

    def requeue(self, _: int) -> None:
        # Or these would have enqueued messages of the same keys at the same time.
        for producer in PRODUCERS:
            self.commit(producer)
        before = {each for each in self.dead if self.chance.random() < 0.5}
        keys: dict[int, str | None] = dict(
            self.outbox.conn.execute("select id, key from relay.queue_dead_letters").fetchall()
        )
        count = self.outbox.worker.value("select relay.requeue('q', %s)", (list(before),))
        assert count == len(before)
        new = self.outbox.conn.execute(
            "select id, key from relay.queue_messages where not id = any(%s) order by id",
            (list(self.messages),),
        ).fetchall()
        assert sorted(keys[each] or "" for each in before) == sorted(key or "" for _, key in new)
        self.dead -= before
        for number, key in new:
            self.messages[number] = Message(number, key and key.removeprefix("h aggregate "))

    def commit(self, who: int) -> None:
        self.sessions[who].commit()
        for each in self.begun.pop(who, []):
            self.messages[each.id] = each
        for number in self.taken.pop(who, []):
            self.finish_one(self.messages[number])
        claim = self.claimed.pop(who, Claim())
        for each in claim.messages:
            each.holder, each.aborted = None, False
        for end in claim.ends:
            end()
        self.find_dead()

    def forget(self, who: int) -> None:
        self.begun.pop(who, None)
        given_back = [self.messages[number] for number in self.taken.pop(who, [])]
        for each in given_back + self.claimed.pop(who, Claim()).messages:
            each.holder, each.aborted = None, True

    def roll_back(self, who: int) -> None:
        self.sessions[who].rollback()
        self.forget(who)

    def kill(self, who: int) -> None:
        """End a session as the death of its process does."""
        process = self.sessions[who].info.backend_pid
        assert self.outbox.value("select pg_terminate_backend(%s, 10000)", (process,))
        self.sessions[who].close()
        self.sessions[who] = self.connect()
        self.forget(who)

    def move_marks(self, _: int) -> None:
        self.outbox.conn.execute(
            "select relay.move_marks(q.id, s.mark, s.due_mark, '-infinity')"
            " from relay.queues as q, relay.queue_state(q.name, relay.this_call()) as s"
        )

    def run(self, steps: int) -> None:
        actions = [
            *[self.enqueue] * 5,
            *[self.take] * 4,
            *[self.claim] * 3,
            *[self.commit] * 4,
            *[self.move_marks] * 4,
            *[self.lease] * 2,
            *[self.end_lease] * 3,
            *[self.roll_back] * 2,
            self.give_up,
            self.requeue,
        ]
        for _ in range(steps):
            action = self.kill if self.chance.random() < 0.01 else self.chance.choice(actions)
            # Who publishes does not take: a session sees what it has not committed.
            who = self.chance.choice(PRODUCERS if action == self.enqueue else WORKERS)
            if action in (self.commit, self.roll_back, self.kill):
                who = self.chance.randrange(len(self.sessions))
            action(who)

    def finish(self) -> None:
        """End everything, and take what is left: it is what should be."""
        for who in range(len(self.sessions)):
            self.chance.choice((self.commit, self.roll_back))(who)
        self.outbox.conn.execute(
            "update relay.queue_messages set available_at = clock_timestamp()"
            " where available_at > clock_timestamp()"
        )
        left: list[int] = []
        while rows := self.outbox.worker.column("select id from relay.take('q', 7)"):
            left += rows
        self.find_dead()
        assert sorted(left) == sorted(self.messages)
        assert not self.outbox.column("select id from relay.queue_messages")
        assert set(self.outbox.column("select id from relay.queue_dead_letters")) == self.dead


def histories(outbox: Outbox, keyed: bool, seeds: range, steps: int) -> Iterator[None]:
    for seed in seeds:
        with closing(History(outbox, keyed, random.Random(seed))) as history:
            history.run(steps)
            history.finish()
        outbox.worker.execute("select relay.drop_queue('q')")
        yield


@pytest.mark.parametrize("keyed", [False, True], ids=["none", "key"])
def test_random_histories(outbox: Outbox, keyed: bool) -> None:
    assert len(list(histories(outbox, keyed, range(3), 150))) == 3


@pytest.mark.rare
@pytest.mark.parametrize("keyed", [False, True], ids=["none", "key"])
def test_many_random_histories(outbox: Outbox, keyed: bool) -> None:
    assert len(list(histories(outbox, keyed, range(100, 160), 400))) == 60
