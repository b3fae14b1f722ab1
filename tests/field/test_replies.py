"""What users of requests with replies have reported, tried on `POST /v1/events?wait=`: each test names the reports."""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event as ThreadEvent
from typing import Any

import httpx
import psycopg
import pytest
from psycopg.types.json import Jsonb

from relay.api import callers, publishing
from relay.api.shared_commits import CommitWriter
from relay.api.tail import Tail
from relay.config.settings import Settings
from relay.model.snapshots import Snapshot
from relay.observe import api_counts
from relay.store import api_tokens
from relay.store.api_tokens import TokenRow
from relay.store.connections import Connection
from relay.store.log_pages import LogPosition
from tests.api import authorized, new_token, served, settings_of
from tests.clients import http_client
from tests.outbox import Outbox, event, host, wait_until

HOST = host(1)
ACCEPT = """
    create function accept() returns trigger language plpgsql security definer as $$
    begin
        perform relay.publish(new.host_id, null, jsonb_build_array(jsonb_build_object(
            'event_type', 'order.accepted', 'aggregate_type', 'Order', 'aggregate_id', '1', 'payload', new.payload,
            'metadata', relay.caused_by(new.id, new.metadata))));
        return null;
    end $$;
    create trigger accept after insert on outbox_message_t for each row when (new.event_type = 'order.placed')
        execute function accept();
"""
"""Answers each order in the commit that publishes it: no answer is earlier."""


class Shop:
    """A program that publishes orders and waits for what answers them."""

    def __init__(self, outbox: Outbox, settings: Settings, address: str, token: str) -> None:
        self.outbox = outbox
        self.settings = settings
        self.posted: set[uuid.UUID] = set()
        self.client = http_client(
            f"{address}/v1",
            headers=authorized(token),
            timeout=90,
            limits=httpx.Limits(max_connections=None),
        )

    def post(self, id_: uuid.UUID, wait: int | None = 30, **query: Any) -> httpx.Response:
        document = {
            "id": str(id_),
            "host_id": str(HOST),
            "event_type": "order.placed",
            "payload": {"amount": id_.int % 1_000},
        }
        params = query | ({} if wait is None else {"wait": wait})
        self.posted.add(id_)
        response = self.client.post("/events", json=document, params=params)
        if response.status_code not in (200, 202):
            self.posted.discard(id_)
        return response

    def answer(self, id_: uuid.UUID, amount: int = 0, kind: str = "order.accepted") -> None:
        """Publish what answers an event, as a handler does."""
        metadata = {"causation_id": str(id_), "correlation_id": str(id_), "hop_count": 1}
        self.outbox.publish(HOST, event(amount, kind, metadata=metadata))

    def wait_for_waiting(self, count: int) -> None:
        """Wait until so many requests wait, each for an event that is committed."""
        wait_until(lambda: self.waiting == count)
        committed = "select count(*) from outbox_message_t where id = any(%s)"

        def are_committed() -> bool:
            row = self.outbox.conn.execute(committed, ([*self.posted],)).fetchone()
            return row is not None and row[0] == len(self.posted)

        wait_until(are_committed)

    @property
    def waiting(self) -> int:
        counts = api_counts.of(self.settings.group)
        assert counts is not None
        return counts.waiting


def _amount(answered: httpx.Response) -> int:
    assert answered.status_code == 200, answered.text
    return int(answered.json()["reply"]["payload"]["amount"])


@contextmanager
def shop_of(outbox: Outbox, **more: Any) -> Iterator[Shop]:
    settings = settings_of(outbox, **more)
    with served(settings) as address:
        yield Shop(outbox, settings, address, new_token(settings, "shop", ["publish", "read"]))


@pytest.fixture
def shop(outbox: Outbox) -> Iterator[Shop]:
    with shop_of(outbox) as made:
        yield made


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(40) as made:
        yield made


def _posted(
    threads: ThreadPoolExecutor, shop: Shop, id_: uuid.UUID, **more: Any
) -> Future[httpx.Response]:
    """Post an event in a thread, and wait until it is committed."""
    future = threads.submit(shop.post, id_, **more)
    wait_until(
        lambda: shop.outbox.value(f"select count(*) from outbox_message_t where id = '{id_}'") == 1
    )
    return future


def test_an_answer_that_is_quicker_than_the_registration(outbox: Outbox, shop: Shop) -> None:
    """A listener that was added after the job was enqueued missed one that was done at once: taskforcesh/bullmq#383,
    OptimalBits/bull#1906; a reply topic was not assigned yet: spring-projects/spring-kafka#2319,
    galax-io/gatling-kafka-plugin#79, smallrye/smallrye-reactive-messaging#2714; events before the subscription were
    dropped: hatchet-dev/hatchet#4820."""
    outbox.conn.execute(ACCEPT)
    # The first before anything is read of the log, the others while the tail reads.
    for _ in range(30):
        id_ = uuid.uuid4()
        assert _amount(shop.post(id_)) == id_.int % 1_000


def test_a_request_that_is_repeated_long_after_the_answer(outbox: Outbox, shop: Shop) -> None:
    """Waiting for a job that was done already never ended: OptimalBits/bull#1371, #2504; hatchet-dev/hatchet#4711; and
    a client that repeated its request was told that it is a repetition, and nothing else: useplunk/plunk#484,
    ietf-wg-httpapi/idempotency#48."""
    id_, other = uuid.uuid4(), uuid.uuid4()
    assert shop.post(id_, wait=None).status_code == 202
    assert shop.post(other, wait=None).status_code == 202
    shop.answer(id_, 7)
    outbox.fill(400, 50)
    assert _amount(shop.post(id_)) == 7
    # Another process, which has read nothing.
    with served(shop.settings) as address:
        again = Shop(
            outbox, shop.settings, address, new_token(shop.settings, "b", ["publish", "read"])
        )
        assert _amount(again.post(id_)) == 7
        # The 20,000 events of others are none.
        assert again.post(other, wait=1).json()["reply"] is None


def test_answers_of_one_commit(outbox: Outbox, shop: Shop) -> None:
    """A handler publishes the answers to the events of a batch together."""
    ids = [uuid.uuid4() for _ in range(5)]
    for id_ in ids:
        assert shop.post(id_, wait=None).status_code == 202
    answers = [event(number, metadata={"causation_id": str(id_)}) for number, id_ in enumerate(ids)]
    outbox.publish(HOST, *answers)
    assert [_amount(shop.post(id_)) for id_ in ids] == list(range(5))


def test_an_answer_of_a_transaction_that_began_before_the_event(outbox: Outbox, shop: Shop) -> None:
    id_ = uuid.uuid4()
    with psycopg.connect(outbox.publisher_dsn) as conn:
        conn.execute("select pg_current_xact_id()")
        assert shop.post(id_, wait=None).status_code == 202
        outbox.publish(HOST, event(1))
        answer = event(7, metadata={"causation_id": str(id_)})
        conn.execute("select relay.publish(%s, null, %s)", (HOST, Jsonb([answer])))
    assert _amount(shop.post(id_)) == 7


def test_requests_get_their_own_answers(shop: Shop, threads: ThreadPoolExecutor) -> None:
    """A client got the answer to another request: spring-projects/spring-amqp#2147,
    rabbitmq/rabbitmq-dotnet-client#28, rabbitmq/rabbitmq-tutorials#174."""
    ids = [uuid.uuid4() for _ in range(20)]
    waiting = [threads.submit(shop.post, each) for each in ids]
    shop.wait_for_waiting(20)
    for number, each in reversed([*enumerate(ids)]):
        shop.answer(each, number)
    assert [_amount(each.result()) for each in waiting] == list(range(20))
    wait_until(lambda: shop.waiting == 0)


def test_requests_whose_clients_have_gone_are_forgotten(outbox: Outbox) -> None:
    """Requests that timed out stayed in the map of those that wait: letsencrypt/boulder#1045, camunda/camunda#8541,
    #54650; handlers waited on for clients that had gone: jcuga/golongpoll#4."""
    with shop_of(outbox, streams=5) as shop:
        where = shop.client.base_url
        head = shop.client.headers["authorization"]
        for _ in range(4):
            clients = []
            for _ in range(5):
                id_ = uuid.uuid4()
                body = json.dumps(
                    {
                        "id": str(id_),
                        "host_id": str(HOST),
                        "event_type": "order.placed",
                        "payload": 1,
                    }
                )
                client = socket.create_connection((where.host, where.port or 80))
                client.sendall(
                    f"POST /v1/events?wait=50 HTTP/1.1\r\nhost: x\r\nauthorization: {head}\r\n"
                    f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
                )
                clients.append(client)
            shop.wait_for_waiting(5)
            refused = shop.post(uuid.uuid4(), wait=1)
            assert refused.status_code == 503, "one too many"
            assert refused.headers["retry-after"]
            for client in clients:
                client.close()
            shop.wait_for_waiting(0)
        assert outbox.value("select count(*) from outbox_message_t") == 20, (
            "the others are published"
        )


def test_an_answer_that_comes_too_late(shop: Shop) -> None:
    """A timeout was told as an answer of nothing: temporalio/sdk-ruby#499, temporalio/sdk-rust#1149; an answer that
    came after the timeout was lost, or disturbed the next request: MassTransit/MassTransit#2223, #1369."""
    id_, following = uuid.uuid4(), uuid.uuid4()
    began = time.monotonic()
    late = shop.post(id_, wait=1)
    assert time.monotonic() - began >= 1
    assert (late.status_code, late.json()["reply"]) == (202, None)
    assert late.headers["location"] == f"/v1/events/{id_}"
    shop.answer(id_, 3)
    assert shop.post(following, wait=1).status_code == 202
    assert shop.client.get(late.headers["location"].removeprefix("/v1")).json()["in_outbox"]
    assert _amount(shop.post(id_)) == 3


def test_an_event_that_is_answered_twice(shop: Shop, threads: ThreadPoolExecutor) -> None:
    """A second answer to one request: rabbitmq/rabbitmq-dotnet-client#957, oleksiyk/kafka#153."""
    id_, following = uuid.uuid4(), uuid.uuid4()
    first = _posted(threads, shop, id_)
    shop.answer(id_, 1)
    shop.answer(id_, 2)
    assert _amount(first.result()) == 1
    second = _posted(threads, shop, following)
    shop.answer(id_, 3)
    shop.answer(following, 4)
    assert _amount(second.result()) == 4
    assert _amount(shop.post(id_)) == 1


def test_many_requests_that_wait_cost_one_reader(shop: Shop, threads: ThreadPoolExecutor) -> None:
    """Each one that waited was a subscription of its own, which the server could not bear: celery/celery#3808,
    nats-io/nats.ex#69."""
    ids = [uuid.uuid4() for _ in range(40)]
    waiting = [threads.submit(shop.post, each) for each in ids]
    shop.wait_for_waiting(40)
    sessions = shop.outbox.value(
        "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    )
    # The pool of requests has eight, the tail and the writer one each.
    assert sessions <= 10
    metadata = [{"causation_id": str(each)} for each in ids]
    shop.outbox.publish(
        HOST, *(event(n, "order.accepted", metadata=each) for n, each in enumerate(metadata))
    )
    assert [_amount(each.result()) for each in waiting] == list(range(40))


def test_an_answer_while_nothing_was_read(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor
) -> None:
    """After a connection was lost or a leader had changed, those who waited were not told: nats-io/nats.py#667,
    celery/celery#4857, hatchet-dev/hatchet#4712, hatchet-dev/hatchet-python#56."""
    ahead: list[LogPosition] = []
    read = Tail._read
    answered = [False]

    def moved(self: Tail, conn: Connection) -> None:
        if ahead:
            self._position = ahead.pop()
            read(self, conn)
            # What comes before the tail begins again is not read by it.
            shop.answer(id_, 5)
            answered[0] = True
            return
        read(self, conn)

    with shop_of(outbox) as shop:
        id_ = uuid.uuid4()
        waiting = _posted(threads, shop, id_)
        monkeypatch.setattr(Tail, "_read", moved)
        xid = outbox.value("select pg_current_xact_id()::text::bigint") + 1_000_000
        ahead.append(LogPosition(Snapshot(xid, xid)))
        wait_until(lambda: answered[0])
        assert _amount(waiting.result()) == 5


def test_two_requests_wait_for_one_answer(shop: Shop, threads: ThreadPoolExecutor) -> None:
    """Only one could listen to a run: hatchet-dev/hatchet-python#56. A client repeats its request while the first one
    waits: jcagarcia/grape-idempotency#10, ietf-wg-httpapi/idempotency#11."""
    id_ = uuid.uuid4()
    first = _posted(threads, shop, id_)
    second = threads.submit(shop.post, id_)
    shop.wait_for_waiting(2)
    shop.answer(id_, 9)
    assert (_amount(first.result()), _amount(second.result())) == (9, 9)
    assert shop.outbox.value("select count(*) from outbox_message_t") == 2


def test_a_receipt_is_no_answer(shop: Shop, threads: ThreadPoolExecutor) -> None:
    """A requester got the acknowledgement of its own message as the answer: nats-io/nats.go#772, nats-io/nats.node#591,
    nats-io/nats.c#776. An event may be the first of its chain by its own metadata, and a payload may say anything."""
    id_ = uuid.uuid4()
    document = {
        "id": str(id_),
        "host_id": str(HOST),
        "event_type": "order.placed",
        "payload": {"causation_id": str(id_)},
        "metadata": {"correlation_id": str(id_)},
    }
    assert shop.client.post("/events", json=document, params={"wait": 1}).status_code == 202
    again = threads.submit(shop.client.post, "/events", json=document, params={"wait": 30})
    shop.wait_for_waiting(1)
    shop.outbox.publish(HOST, {**event(1), "payload": {"metadata": {"causation_id": str(id_)}}})
    shop.answer(id_, 4)
    assert _amount(again.result()) == 4


def test_relay_stops_while_requests_wait(outbox: Outbox, threads: ThreadPoolExecutor) -> None:
    """A server that stopped let those who polled wait for its timeout, or reset their connections: saiya/dsps#18,
    aspnet/SignalR#476, samanhappy/mcphub#1042."""
    with shop_of(outbox) as shop:
        ids = [uuid.uuid4() for _ in range(5)]
        waiting = [_posted(threads, shop, each) for each in ids]
        began = time.monotonic()
    for id_, each in zip(ids, waiting, strict=True):
        answered = each.result()
        assert answered.status_code == 202
        assert answered.headers["location"] == f"/v1/events/{id_}"
    assert time.monotonic() - began < 25


def test_the_database_is_away_while_a_request_waits(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its broker a request had no timeout at all: MassTransit/MassTransit#3502. Here it ends, and says what the
    client does next; the repetition is answered."""
    monkeypatch.setattr(publishing, "CommitWriter", lambda dsn: CommitWriter(dsn, wait_seconds=1.0))
    outbox.conn.execute(ACCEPT)
    id_ = uuid.uuid4()
    with shop_of(outbox) as shop, psycopg.connect(outbox.superuser_dsn) as other:
        other.execute("lock table outbox_message_t in access exclusive mode")
        refused = shop.post(id_, wait=2)
        assert refused.status_code == 503
        assert "with the same ids" in refused.json()["detail"]
        assert refused.headers["retry-after"]
        other.rollback()
        assert _amount(shop.post(id_)) == id_.int % 1_000


def test_a_forged_answer_of_another_host(
    outbox: Outbox, shop: Shop, threads: ThreadPoolExecutor
) -> None:
    """An id is no secret: whoever may publish for other hosts only answers nothing."""
    id_ = uuid.uuid4()
    waiting = _posted(threads, shop, id_)
    forger = new_token(shop.settings, "forger", ["publish"], [str(host(2))])
    forged = {
        "host_id": str(host(2)),
        "event_type": "order.accepted",
        "payload": {"amount": 666},
        "metadata": {"causation_id": str(id_)},
    }
    address = str(shop.client.base_url)
    sent = httpx.post(f"{address}events", json=forged, headers=authorized(forger), timeout=30)
    assert sent.status_code == 202
    shop.answer(id_, 1)
    assert _amount(waiting.result()) == 1
    assert _amount(shop.post(id_)) == 1


def test_a_server_that_has_frozen_keeps_no_request(
    shop: Shop, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request waited without end for a connection that was established and silent: MassTransit/MassTransit#3502,
    hatchet-dev/hatchet#4712. The tokens are read first."""
    thawed = ThreadEvent()
    valid = api_tokens.valid

    def read(conn: Connection) -> dict[bytes, tuple[TokenRow, str]]:
        thawed.wait(60)
        return valid(conn)

    monkeypatch.setattr(api_tokens, "valid", read)
    monkeypatch.setattr(callers, "ANSWER_SECONDS", 0.5)
    try:
        refused = [threads.submit(shop.post, uuid.uuid4()) for _ in range(8)]
        for each in refused:
            assert each.result().status_code == 503
            assert each.result().headers["retry-after"]
    finally:
        thawed.set()
    wait_until(lambda: shop.client.get("/events").status_code == 200)
