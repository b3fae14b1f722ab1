"""What goes wrong elsewhere where events are taken from others: by HTTP, and from brokers.

Reports: idempot-dev/idempot-js#186, mastodon/mastodon#37879, square1-io/laravel-idempotency#1,
jcagarcia/grape-idempotency#10 (a repetition that comes while the first request is worked on);
josipmusa/idempotency4j#12, novuhq/novu#4472 (other content under a known key gets the first answer);
mads256h/stregsystemet-rs#54 (a key is forgotten when many others come); enviodev/hyperindex#1195,
appstrate/appstrate#1501, fazer-ai/agents#238 (a character that PostgreSQL cannot store fails its neighbours, again and
again); confluentinc/kafka-connect-jdbc#721, debezium/debezium#7716 (a record that the database refuses stops all);
aio-libs/aiohttp#2098, sanic-org/sanic#1765 (a client that disconnects undoes half of the work);
redpanda-data/connect#1329, dotnetcore/CAP#78, getlago/lago#499 (acknowledged before it is stored);
bsm/sarama-cluster#148 (a later message is acknowledged before an earlier one).
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from typing import Any, Self

import psycopg
import pytest

from relay.api.shared_commits import CommitWriter
from relay.faults import Undelivered
from relay.intake.consuming import BrokerIntake, Taken
from relay.intake.messages import IncomingEvents, Invalid, MessageReader, derived
from relay.intake.publishing import Accepted, Conflict, NotCommitted, Publisher, Refused
from tests.chaos.proxy import through_proxy
from tests.outbox import Outbox, host, wait_until

READER = MessageReader()


def message(number: Any, **more: Any) -> bytes:
    event = {"host_id": str(host(1)), "event_type": "order.placed", "payload": number, **more}
    return json.dumps(event).encode()


def keyed(number: Any, key: str) -> IncomingEvents:
    return READER.read(message(number), id_of=derived("shop", key))


def payloads(outbox: Outbox) -> list[Any]:
    return outbox.column("select payload from outbox_message_t order by c_offset")


@pytest.fixture(autouse=True)
def _relay_may_publish(outbox: Outbox) -> None:
    outbox.let_handlers_publish()


@pytest.fixture
def writers(outbox: Outbox) -> Iterator[list[CommitWriter]]:
    found = [CommitWriter(outbox.relay_dsn), CommitWriter(outbox.relay_dsn)]
    for each in found:
        each.start()
    yield found
    for each in found:
        each.close()


def test_a_repetition_beside_the_first_request(outbox: Outbox, writers: list[CommitWriter]) -> None:
    """All get the answer of the first, none an error, in two processes too."""
    futures = [writers[n % 2].submit(keyed(7, "a key")) for n in range(32)]
    outcomes = [each.result(30) for each in futures]
    assert sorted(each.is_repeated for each in outcomes) == [False, *[True] * 31]
    assert len({each.transaction_id for each in outcomes}) == 1
    assert payloads(outbox) == [7]


def test_a_key_is_not_forgotten_and_not_for_other_content(outbox: Outbox) -> None:
    with closing(Publisher(outbox.relay_dsn)) as first:
        (accepted,) = first.publish([keyed(1, "a key")], time.monotonic() + 30)
        first.publish([keyed(n, f"key {n}") for n in range(1_000)], time.monotonic() + 30)
    with closing(Publisher(outbox.relay_dsn)) as later:
        same, other = later.publish([keyed(1, "a key"), keyed(2, "a key")], time.monotonic() + 30)
    assert isinstance(accepted, Accepted)
    assert same == Accepted(accepted.transaction_id, is_repeated=True)
    assert isinstance(other, Conflict)
    assert len(payloads(outbox)) == 1_001


@pytest.mark.parametrize(
    ("field", "path"),
    [
        ({"payload": {"note": ["a\0b"]}}, "$.payload.note[0]"),
        ({"payload": {"note": "\ud83d"}}, "$.payload.note"),
        ({"payload": {"a\0": 1}}, "$.payload.*"),
        ({"metadata": {"a": "\0"}}, "$.metadata.a"),
        ({"aggregate_id": "\ud83d"}, "$.aggregate_id"),
        ({"event_type": "a\0"}, "$.event_type"),
    ],
)
def test_a_character_that_cannot_be_stored_is_named(field: dict[str, Any], path: str) -> None:
    with pytest.raises(Invalid) as raised:
        READER.read(message(1, **field))
    assert [each.path for each in raised.value.faults] == [path]


def test_a_record_that_the_database_refuses_stops_no_other(outbox: Outbox) -> None:
    outbox.conn.execute(
        "alter table outbox_message_t add check (payload <> '13' and payload <> '77'), add check (payload <> '14')"
    )
    with closing(Publisher(outbox.relay_dsn)) as publisher:
        group = [READER.read(message(n)) for n in range(100)]
        outcomes = publisher.publish(group, time.monotonic() + 60)
    refused = [n for n, each in enumerate(outcomes) if isinstance(each, Refused)]
    assert refused == [13, 14, 77]
    assert payloads(outbox) == [n for n in range(100) if n not in refused]


def test_who_asks_no_longer_undoes_nothing(outbox: Outbox, writers: list[CommitWriter]) -> None:
    """It is published whole, or not begun; a repetition finds out."""
    writer = writers[0]
    submissions = [
        READER.read(b"[" + b",".join(message(n) for _ in range(5)) + b"]") for n in range(50)
    ]
    futures = [writer.submit(each) for each in submissions]
    cancelled = [each.cancel() for each in futures]
    for each in submissions:
        with suppress(NotCommitted):
            writer.submit(each).result(30)
    assert sorted(payloads(outbox)) == sorted([n for n in range(50) for _ in range(5)])
    assert len(cancelled) == 50


def test_the_answer_comes_after_the_commit(outbox: Outbox, writers: list[CommitWriter]) -> None:
    seen: list[bool] = []

    def look(submission: IncomingEvents) -> Any:
        def visible(future: Future[Accepted]) -> None:
            with psycopg.connect(outbox.relay_dsn) as conn:
                query = "select from outbox_message_t where id = %s"
                seen.append(conn.execute(query, (submission.ids[0],)).fetchone() is not None)

        return visible

    for n in range(20):
        submission = READER.read(message(n))
        writers[0].submit(submission).add_done_callback(look(submission))
    wait_until(lambda: len(seen) == 20)
    assert all(seen)


def test_an_answer_of_the_server_that_is_lost(outbox: Outbox) -> None:
    """The commit is there, and its answer is not: the writer finds out, and publishes once."""
    with through_proxy(outbox.relay_dsn) as proxy:
        proxy.cut_after = lambda data: b"COMMIT" in data and proxy.cuts < 3
        writer = CommitWriter(proxy.dsn)
        writer.start()
        try:
            outcomes = [writer.submit(READER.read(message(n))).result(30) for n in range(10)]
        finally:
            writer.close()
        assert proxy.cuts == 3
    assert not any(each.is_repeated for each in outcomes)
    assert payloads(outbox) == list(range(10))


class Broker:
    """A broker in memory, whose connection is lost and whose acknowledgements are lost at random."""

    def __init__(self, bodies: Sequence[bytes], chance: random.Random, fault_rate: float) -> None:
        self.bodies = bodies
        self.answered: list[int] = []
        self.rejected: list[int] = []
        self.extended = 0
        self._chance = chance
        self._fault_rate = fault_rate
        self._next = 0

    async def __aenter__(self) -> Self:
        self._may_fail()
        self._next = 0
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def fetch(self) -> Sequence[Taken]:
        self._may_fail()
        left = [n for n in range(self._next, len(self.bodies)) if n not in self.answered]
        found = left[: self._chance.randint(1, 5)]
        if not found:
            await asyncio.sleep(0.01)
            return []
        self._next = found[-1] + 1
        return [Taken(self.bodies[n], ("memory", str(n)), f"message {n}", n) for n in found]

    async def acknowledge(self, taken: Sequence[Taken]) -> None:
        for each in taken:
            self._may_fail()
            self._answer(each.raw)

    async def reject(self, taken: Taken) -> None:
        self._may_fail()
        self.rejected.append(taken.raw)
        self._answer(taken.raw)

    async def extend(self, taken: Sequence[Taken]) -> None:
        self.extended += 1

    async def give_back(self, taken: Sequence[Taken]) -> None: ...

    def _answer(self, number: int) -> None:
        # A later one before an earlier one would lose the earlier one in Kafka.
        assert all(n in self.answered for n in range(number))
        self.answered.append(number)

    def _may_fail(self) -> None:
        if self._chance.random() < self._fault_rate:
            raise Undelivered("the connection is lost")


def intake(outbox: Outbox, broker: Broker, rejects: bool = True, dsn: str = "") -> BrokerIntake:
    found = BrokerIntake(
        "orders",
        broker,
        READER,
        dsn or outbox.relay_dsn,
        "shop",
        rejects,
        lambda result, messages: None,
    )
    found.condition._first_pause = 0.01
    found.condition._longest_pause = 0.05
    return found


@pytest.mark.parametrize("seed", range(3))
def test_a_broker_whose_connection_is_lost_at_random(outbox: Outbox, seed: int) -> None:
    chance = random.Random(seed)
    invalid = {n for n in range(60) if chance.random() < 0.1}
    bodies = [b"{}" if n in invalid else message(n) for n in range(60)]
    broker = Broker(bodies, chance, 0.1)
    works = intake(outbox, broker)
    works.start()
    wait_until(lambda: len(broker.answered) == 60)
    works.close()
    assert payloads(outbox) == [n for n in range(60) if n not in invalid]
    assert sorted(set(broker.rejected)) == sorted(invalid)


def test_messages_are_not_acknowledged_while_the_database_is_away(outbox: Outbox) -> None:
    with through_proxy(outbox.relay_dsn) as proxy:
        broker = Broker([message(n) for n in range(20)], random.Random(1), 0.0)
        proxy.cut_after = lambda data: b"relay.publish" in data
        works = intake(outbox, broker, dsn=proxy.dsn)
        works.start()
        wait_until(lambda: broker.extended >= 3)
        assert broker.answered == []
        proxy.cut_after = None
        wait_until(lambda: len(broker.answered) == 20)
        works.close()
    assert payloads(outbox) == list(range(20))


def test_an_invalid_message_lets_none_behind_it_pass(outbox: Outbox) -> None:
    known = str(uuid.uuid4())
    bodies = [message(0, id=known), message(1), message(2, id=known), message(3)]
    broker = Broker(bodies, random.Random(1), 0.0)
    works = intake(outbox, broker, rejects=False)
    works.start()
    wait_until(lambda: works.condition.fault is not None)
    works.close()
    assert works.condition.fault is not None
    assert "message 2" in works.condition.fault.fault
    assert (payloads(outbox), broker.answered) == ([0, 1], [0, 1])
