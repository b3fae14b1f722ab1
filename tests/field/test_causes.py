"""Events that handlers publish: each once, with what caused it, and none that causes itself for ever."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import psycopg
import pytest

from relay import Deliveries, Delivery, RetryLater
from relay.admin.dead_letters import DeadLetters
from relay.causes import Causing, handling
from relay.client import Event, TooManyHops, caused_by
from relay.client import Outbox as Client
from relay.client.worker import Message, Queue, Worker
from relay.faults import ConfigurationError
from relay.model.events import Transaction
from relay.store.dead_letters.selection import DeadLetterSelection
from relay.testing import transaction as given
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.published import CLIENT, HANDLERS, STEPS, chain, loop
from tests.workers import working

DEAD = "select count(*) from relay.dead_letter_queue"


@pytest.fixture
def outbox(outbox: Outbox) -> Outbox:
    """An outbox into which relay's handlers may publish."""
    outbox.let_handlers_publish()
    return outbox


def limited(outbox: Outbox, hops: int) -> dict[str, Any]:
    return {"source": {**outbox.config()["source"], "max_hops": hops}}


def wait_dead(outbox: Outbox, letters: int = 1) -> None:
    wait_until(lambda: outbox.value(DEAD) >= letters)


@pytest.mark.parametrize("kind", HANDLERS)
def test_an_event_that_causes_itself_ends_as_one_dead_letter(outbox: Outbox, kind: str) -> None:
    """muoncore/newton#44, personium/personium-core#123, BlocUnited-LLC/mozaiks#425: a handler of an event publishes one
    of the same kind, and goes round for ever. elastic/kibana#258370 ends such chains after ten events."""
    configured = loop(kind)
    if kind.startswith("python"):
        # An attempt more would not help.
        retry = {"on": "any", "attempts": 50, "wait": 300}
        configured["handlers"] = {kind: {**configured["handlers"][kind], "retry": retry}}
    settings = outbox.settings(**limited(outbox, 4), **configured)
    with relaying(settings):
        outbox.publish(host(1), event(1, "step.0"))
        wait_dead(outbox)
        outbox.wait_drained()
    steps = outbox.conn.execute(STEPS.encode()).fetchall()
    assert [(name, hops) for name, hops, *_ in steps] == [(f"step.{n}", n) for n in range(5)]
    ids = [each[3] for each in steps]
    assert [each[2] for each in steps] == [None, *ids[:-1]]
    assert {each[4] for each in steps[1:]} == {ids[0]}
    (exception,) = outbox.column("select exception from relay.dead_letter_queue")
    assert "hop 5 of a chain of events that cause each other" in exception
    assert outbox.column("select event_id::text from relay.dead_letter_queue") == [ids[-1]]


@pytest.mark.parametrize("kind", ["python", "sql"])
def test_a_chain_that_is_no_loop_goes_on_with_a_higher_limit(outbox: Outbox, kind: str) -> None:
    """OrchardCMS/OrchardCore#8878: what a limit has stopped was wanted, and is lost."""
    ends = {"match": {"event_type": "step.5"}, "handlers": ["end"]}
    configured: dict[str, Any] = {
        "handlers": {**loop(kind)["handlers"], "end": {"type": "sql", "statement": "select"}},
        "routes": [ends, {"handlers": [kind]}],
    }
    with relaying(outbox.settings(**limited(outbox, 3), **configured)):
        outbox.publish(host(1), event(1, "step.0"))
        wait_dead(outbox)
    settings = outbox.settings(**limited(outbox, 5), **configured)
    dead_letters = DeadLetters(settings, outbox.conn)
    with relaying(settings, accept_configuration=True):
        dead_letters.replay(dead_letters.find(DeadLetterSelection()), "no loop")
        wait_until(lambda: outbox.value("select count(*) from outbox_message_t") == 6)
        outbox.wait_drained()
    steps = outbox.conn.execute(STEPS.encode()).fetchall()
    assert [(name, hops) for name, hops, *_ in steps] == [(f"step.{n}", n) for n in range(6)]


def test_the_count_of_a_loop_over_two_databases_goes_on(outbox: Outbox, database: str) -> None:
    """langgenius/dify#33780: what leaves the process begins its depth again, so that the limit is never reached."""
    there, here = f"{__name__}:publish_there", f"{__name__}:publish_here"
    with Outbox(database) as other:
        other.install()
        TARGETS.update(here=outbox.publisher_dsn, there=other.publisher_dsn)
        routes = [{"handlers": ["pass"]}]
        first = outbox.settings(
            **limited(outbox, 6),
            handlers={"pass": {"type": "function", "callable": there}},
            routes=routes,
        )
        second = other.settings(
            **limited(other, 6),
            handlers={"pass": {"type": "function", "callable": here}},
            routes=routes,
        )
        with relaying(first), relaying(second):
            outbox.publish(host(1), event(1, "step.0"))
            wait_until(lambda: outbox.value(DEAD) + other.value(DEAD) == 1)
        both = outbox.conn.execute(STEPS.encode()).fetchall()
        both += other.conn.execute(STEPS.encode()).fetchall()
    assert sorted(hops for _, hops, *_ in both) == list(range(7))


TARGETS: dict[str, str] = {}


def _publish(delivery: Delivery, dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        for each in delivery.events:
            assert each.host_id is not None
            again = Event("step.0", ("Order", 1), payload=each.payload)
            CLIENT.publish(conn, again, host_id=each.host_id)


def publish_there(delivery: Delivery) -> None:
    _publish(delivery, TARGETS["there"])


async def publish_here(delivery: Delivery) -> None:
    """In a thread, as code of a coroutine does that blocks."""
    await asyncio.to_thread(_publish, delivery, TARGETS["here"])


def test_a_worker_that_answers_itself_ends(outbox: Outbox) -> None:
    """OrchardCMS/OrchardCore#6455, Shuffle/Shuffle#99: a workflow whose last step is the event that starts it."""
    client = Client(max_hops=3)

    def answer(message: Message, conn: Any) -> None:
        message.reply(Event("order.placed", ("Order", 1), payload={}))

    with outbox.member("relay_worker", "relay_publisher") as dsn:
        worker = Worker(dsn, Queue(name="mail"), concurrency=1, outbox=client, poll=0.1)
        worker.handles("order.*")(answer)
        with working(worker), relaying(outbox.settings()):
            declared = "select 1 from relay.queues where name = 'mail'"
            wait_until(lambda: bool(outbox.column(declared)))
            outbox.publish(host(1), event(1))
            dead = "select count(*) from relay.queue_items where queue = 'mail' and state = 'dead'"
            wait_until(lambda: outbox.value(dead) == 1)
    assert [hops for _, hops, *_ in outbox.conn.execute(STEPS.encode())] == [0, 1, 2, 3]
    (error,) = outbox.column("select error from relay.queue_items where state = 'dead'")
    assert error.startswith("TooManyHops: ")


CALLS: Counter[str] = Counter()
"""How often a handler was called with an event."""


def refuses_at_first(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Publish, then fail: at the first call for a while, for the amount 13 always."""
    for each in transaction.events:
        assert each.host_id is not None
        CLIENT.publish(
            cursor,
            Event("order.answered", ("Order", 1), payload=each.payload),
            host_id=each.host_id,
        )
        CALLS[str(each.id)] += 1
        if each.payload["amount"] == 13:
            raise ValueError("thirteen is not an amount")
        if CALLS[str(each.id)] == 1:
            raise RetryLater(after=0.1)


def test_what_a_failed_attempt_has_published_is_not_there(outbox: Outbox) -> None:
    """MassTransit/MassTransit#3791, node-ts/bus#224: a consumer that fails after it has published and is tried again
    publishes twice. MassTransit/MassTransit#2016: after the retry of a batch, some are missing."""
    retry = {"wait": 0.1, "max_wait": 0.2, "jitter": 0.01}
    handler = {"type": "python", "callable": f"{__name__}:refuses_at_first", "retry": retry}
    settings = outbox.settings(
        handlers={"answer": {**handler, "publishes": True}},
        routes=[{"match": {"event_type": "order.placed"}, "handlers": ["answer"]}],
        unrouted="ignore",
    )
    for number in range(20):
        outbox.publish(host(number), event(number))
    with relaying(settings):
        answers = "select count(*) from outbox_message_t where event_type = 'order.answered'"
        wait_until(lambda: outbox.value(answers) >= 19 and outbox.value(DEAD) == 1)
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
        outbox.wait_drained()
    assert outbox.column(
        "select (payload ->> 'amount')::int from outbox_message_t where event_type = 'order.answered' order by 1"
    ) == [number for number in range(20) if number != 13]


def test_nobody_sees_an_event_before_the_effects_that_it_tells_of(outbox: Outbox) -> None:
    """JasperFx/wolverine#3291, #2304: a cascaded message was on its way before the transaction had committed, and its
    handler did not find the row."""
    outbox.conn.execute("create table orders (id text primary key)")
    store = """
        with stored as (insert into orders values (%(id)s))
        select relay.publish(%(host_id)s, null, jsonb_build_array(jsonb_build_object(
            'event_type', 'order.stored', 'aggregate_type', 'Order', 'aggregate_id', %(id)s, 'payload', '{}'::jsonb)))
    """
    find = "insert into projection (amount) select count(*) from orders where id = %(aggregate_id)s"
    settings = outbox.settings(
        handlers={
            "store": {"type": "sql", "statement": store, "publishes": True},
            "find": {"type": "sql", "statement": find},
        },
        routes=[
            {"match": {"event_type": "order.placed"}, "handlers": ["store"]},
            {"match": {"event_type": "order.stored"}, "handlers": ["find"]},
        ],
    )
    with relaying(settings):
        for number in range(200):
            outbox.publish(host(number), event(number))
        wait_until(lambda: outbox.value("select count(*) from projection") == 200)
    assert outbox.column("select distinct amount from projection") == [1]


@pytest.mark.parametrize("kind", ["sql", "batch"])
def test_chains_of_different_lengths_in_one_transaction_keep_their_counts(
    outbox: Outbox, kind: str
) -> None:
    """rapidpro/rapidpro#893: a limit that counts what belongs to others stops what is no loop. Many business
    transactions are one database transaction of relay."""
    before = {"hop_count": 7, "correlation_id": "first", "causation_id": "x"}
    for number in range(80):  # more than are sent one by one
        more = {"metadata": before} if number % 2 else {}
        outbox.publish(host(number), event(number, "step.0", **more))
    with relaying(outbox.settings(**chain(kind))):
        wait_until(lambda: outbox.value("select count(*) from outbox_message_t") == 160)
    caused = outbox.conn.execute(
        """
        select coalesce((c.metadata ->> 'hop_count')::int, 0) + 1 = (e.metadata ->> 'hop_count')::int,
               coalesce(c.metadata ->> 'correlation_id', c.id::text) = e.metadata ->> 'correlation_id',
               c.payload = e.payload
          from outbox_message_t as e join outbox_message_t as c on c.id::text = e.metadata ->> 'causation_id'
         where e.event_type = 'step.1'
        """
    ).fetchall()
    assert caused == [(True, True, True)] * 80


def test_a_copy_of_all_metadata_does_not_keep_the_count(outbox: Outbox) -> None:
    """symfony/symfony#65901: a correlation id is copied, a cause is not: what copies all metadata of the event that it
    handles tells of the cause of that. commanded/commanded#232: which id is which."""
    settings = outbox.settings(
        **limited(outbox, 3),
        handlers={"copy": {"type": "python", "callable": f"{__name__}:copies", "publishes": True}},
        routes=[{"handlers": ["copy"]}],
    )
    with relaying(settings):
        outbox.publish(host(1), event(1, metadata={"tenant": "a"}))
        wait_dead(outbox)
    assert [hops for _, hops, *_ in outbox.conn.execute(STEPS.encode())] == [0, 1, 2, 3]
    assert outbox.column("select distinct metadata ->> 'tenant' from outbox_message_t") == ["a"]


def copies(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    for each in transaction.events:
        assert each.host_id is not None
        again = Event("order.placed", payload=each.payload, metadata=each.metadata)
        CLIENT.publish(cursor, again, host_id=each.host_id)


METADATA: list[Any] = [
    *(None, [], "text", {"hop_count": "7"}, {"hop_count": None}, {"hop_count": -3}),
    *({"hop_count": True}, {"correlation_id": None}, {"hop_count": {"a": 1}}),
]


def test_metadata_of_other_publishers_are_no_fault(
    outbox: Outbox, subtests: pytest.Subtests
) -> None:
    """abpframework/abp#24762: messages of others have no such headers, or have something else in them."""
    for metadata in METADATA:
        with subtests.test(str(metadata)):
            one = given({"metadata": metadata, "event_type": "step.0"})
            (first,) = one.events
            by_client = caused_by(first)
            by_sql = outbox.value(
                "select relay.caused_by(%s::uuid, %s::jsonb)",
                (first.id, psycopg.types.json.Jsonb(metadata)),
            )
            assert by_client == by_sql
            assert by_client == {
                "hop_count": 1,
                "causation_id": str(first.id),
                "correlation_id": str(first.id),
            }


def test_counts_of_any_size_are_the_same_in_both_languages(outbox: Outbox) -> None:
    """rapidpro/rapidpro#893 again, of a count that somebody has forged."""
    for count in (2.9, 1e30, 10**40, 31):
        (first,) = given({"metadata": {"hop_count": count}}).events
        query = "select relay.caused_by(%s::uuid, %s::jsonb)"
        by_sql = outbox.value(query, (first.id, psycopg.types.json.Jsonb({"hop_count": count})))
        assert caused_by(first) == by_sql


def test_a_trigger_of_the_handlers_table_knows_the_cause(outbox: Outbox) -> None:
    """AxonFramework/AxonFramework#240: what a saga's handler causes indirectly has no correlation."""
    outbox.conn.execute(
        """
        create function tell() returns trigger language plpgsql as $$
        begin
            perform relay.publish(new.host_id, null, jsonb_build_array(jsonb_build_object(
                'event_type', 'order.told', 'aggregate_type', 'Order', 'aggregate_id', '1', 'payload', '{}'::jsonb)));
            return new;
        end $$;
        create trigger tell after insert on projection for each row execute function tell()
        """
    )
    handlers = outbox.config()["handlers"]
    publishing = {"projection": {**handlers["projection"], "publishes": True}}
    routes = [{"match": {"event_type": "order.placed"}, "handlers": ["projection"]}]
    told = "select count(*) from outbox_message_t where event_type = 'order.told'"
    for number, configured in enumerate((publishing, handlers)):
        settings = outbox.settings(handlers=configured, routes=routes, unrouted="ignore")
        with relaying(settings, accept_configuration=True):
            outbox.publish(host(1), event(number))
            wait_until(lambda wanted=number + 1: outbox.value(told) == wanted)  # type: ignore[misc]
    # Without publishes: true, a trigger publishes as anybody does.
    assert [hops for _, hops, *_ in outbox.conn.execute(STEPS.encode())] == [0, 1, 0, 0]


def test_a_handler_that_follows_is_not_taken_for_the_cause(outbox: Outbox) -> None:
    """The setting of one handler is not that of the next one in the same transaction."""
    outbox.conn.execute("create table seen (cause text)")
    look = "insert into seen values (current_setting('relay.cause', true))"
    for kind in HANDLERS:
        handlers = {kind: HANDLERS[kind], "look": {"type": "sql", "statement": look}}
        routes = [{"match": {"event_type": "step.0"}, "handlers": [kind, "look"]}]
        settings = outbox.settings(handlers=handlers, routes=routes, unrouted="ignore")
        with relaying(settings, accept_configuration=True):
            outbox.publish(host(1), event(1, "step.0"))
            outbox.wait_drained()
    assert outbox.column("select coalesce(cause, '') from seen") == [""] * len(HANDLERS)


def publishes_for_many(deliveries: Deliveries) -> None:
    with psycopg.connect(TARGETS["here"]) as conn:
        for delivery in deliveries:
            for each in delivery.events:
                assert each.host_id is not None
                metadata = caused_by(each) if each.payload["amount"] == 1 else {}
                following = Event("order.told", payload={}, metadata=metadata)
                CLIENT.publish(conn, following, host_id=each.host_id)


def test_what_is_published_for_many_events_says_for_which(outbox: Outbox) -> None:
    """MassTransit/MassTransit#329: without the initiator in the message itself, a chain cannot be followed. Of a batch
    nobody else knows it."""
    TARGETS["here"] = outbox.publisher_dsn
    handler = {"type": "function", "callable": f"{__name__}:publishes_for_many", "each": "batch"}
    retry = {"wait": 0.1, "max_wait": 0.1, "attempts": 1}
    settings = outbox.settings(
        handlers={"tell": {**handler, "retry": retry}},
        routes=[{"match": {"event_type": "order.placed"}, "handlers": ["tell"]}],
        unrouted="ignore",
    )
    with relaying(settings):
        outbox.publish(host(1), event(1))
        told = "select count(*) from outbox_message_t where event_type = 'order.told'"
        wait_until(lambda: outbox.value(told) == 1)
        outbox.publish(host(1), event(2))
        wait_dead(outbox)
    assert [hops for _, hops, *_ in outbox.conn.execute(STEPS.encode())] == [0, 1, 0]
    (exception,) = outbox.column("select exception from relay.dead_letter_queue")
    assert "metadata=caused_by(event)" in exception


def test_a_statement_over_many_events_says_for_which(outbox: Outbox) -> None:
    """The same in SQL."""
    forgets = HANDLERS["batch"]["statement"].replace("relay.caused_by(id, metadata)", "'{}'::jsonb")
    settings = outbox.settings(
        handlers={"batch": {**HANDLERS["batch"], "statement": forgets}},
        routes=[{"handlers": ["batch"]}],
    )
    with relaying(settings):
        outbox.publish(host(1), event(1, "step.0"))
        wait_dead(outbox)
    (exception,) = outbox.column("select exception from relay.dead_letter_queue")
    assert "do not say what caused it" in exception
    assert "relay.caused_by(id, metadata)" in exception


def test_a_loop_that_nobody_declared_is_refused_before_it_runs(outbox: Outbox) -> None:
    """thin-edge/thin-edge.io#3985: publishing to what one listens to is easily done by accident."""
    undeclared = {**HANDLERS["sql"], "publishes": False}
    settings = outbox.settings(handlers={"sql": undeclared}, routes=[{"handlers": ["sql"]}])
    said = r"calls relay\.publish: set handlers\.sql\.publishes: true"
    with pytest.raises(ConfigurationError, match=said), relaying(settings):
        pass


def publishing(metadata: dict[str, Any], client: Client = CLIENT) -> Any:
    """The rows that a client would insert."""
    from relay.client.outbox import _published

    return client._rows(_published(Event("a", payload={}, metadata=metadata), host(1), None, None))


def test_a_thread_of_the_handlers_own_needs_its_context() -> None:
    """A thread begins with an empty context, so what it publishes is counted only with that of the handler.

    https://github.com/python/cpython/issues/86981, https://github.com/infiniflow/ragflow/pull/16247
    https://github.com/temporalio/sdk-python/issues/263
    """
    (cause,) = given({"event_type": "order.placed"}).events

    async def aside() -> Any:
        return await asyncio.to_thread(publishing, {})

    with handling(Causing([cause], 32)), ThreadPoolExecutor(1) as threads:
        lost = threads.submit(publishing, {}).result()
        kept = threads.submit(copy_context().run, publishing, {}).result()
        named = threads.submit(publishing, caused_by(cause)).result()
        beside = asyncio.run(aside())
    assert lost[0].get("metadata") is None
    for rows in (kept, named, beside):
        assert rows[0]["metadata"]["hop_count"] == 1
        assert rows[0]["metadata"]["causation_id"] == str(cause.id)


def test_an_ordinary_publisher_may_have_numbers_of_its_own() -> None:
    """Only what says it is caused by an event is counted, up to the client's limit."""
    client = Client(max_hops=2)
    assert publishing({"hop_count": "40"}, client)[0]["metadata"] == {"hop_count": "40"}
    assert publishing({"hop_count": 2}, client)[0]["metadata"] == {"hop_count": 2}
    with pytest.raises(TooManyHops, match=r"hop 3 .* Outbox\(max_hops=…\) allows 2"):
        publishing({"hop_count": 3}, client)
