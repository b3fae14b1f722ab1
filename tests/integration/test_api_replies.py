"""`POST /v1/events?wait=`: who may wait, for what, and a handler that answers."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from relay.admin.check import examine
from relay.admin.findings import Severity
from relay.demo.embedded import free_port
from tests.api import API, authorized, new_token, served, settings_of
from tests.field.test_replies import HOST, Shop, shop_of
from tests.observing import Scrape, is_good
from tests.outbox import Outbox, event, initialise, relaying, wait_until

BOTH = ("publish", "read")
ACCEPT = """
    select relay.publish(%(host_id)s, null, jsonb_build_array(jsonb_build_object(
        'event_type', %(event_type)s || '.accepted', 'aggregate_type', 'Order', 'aggregate_id', '1',
        'payload', %(payload)s)))
"""


def test_a_handler_answers(outbox: Outbox) -> None:
    """In the shape of a page; with the counts of it in a scrape."""
    port = free_port()
    settings = outbox.settings(
        api=API,
        observe={"listen": f"127.0.0.1:{port}"},
        handlers={"accept": {"type": "sql", "statement": ACCEPT, "publishes": True}},
        routes=[{"match": {"event_type": "order.placed"}, "handlers": ["accept"]}],
        unrouted="ignore",
    )
    initialise(settings, handlers_publish=True)

    def value(name: str, **labels: str) -> float | None:
        return Scrape(port).value(f"relay_api_{name}", group="default", **labels)

    with relaying(settings):
        wait_until(lambda: is_good(port, "/livez"))
        with served(settings) as address:
            shop = Shop(outbox, settings, address, new_token(settings, "shop", BOTH))
            for _ in range(5):
                id_ = uuid.uuid4()
                answered = shop.post(id_)
                assert answered.status_code == 200, answered.text
                assert answered.headers["content-type"] == "application/json"
                assert answered.headers["location"] == f"/v1/events/{id_}"
                assert answered.json()["ids"] == [str(id_)]
                reply = answered.json()["reply"]
                assert reply["event_type"] == "order.placed.accepted"
                assert reply["metadata"]["causation_id"] == str(id_)
                paged = shop.client.get("/events", params={"type": "*.accepted"}).json()["events"]
                assert reply in paged
            assert shop.post(uuid.uuid4(), 1, reply_type="order.refused").status_code == 202
            wait_until(lambda: value("waits_total", result="answered") == 5)
            assert value("waits_total", result="unanswered") == 1
            assert value("waiting") == 0
            assert value("requests_total", status="5xx") == 0
            assert (value("requests_total", status="2xx") or 0) >= 11
            for part in ("tokens", "streams", "publishing"):
                assert value("failing", part=part) == 0, part


def test_who_may_wait_for_what(outbox: Outbox) -> None:
    """Each refusal publishes nothing."""
    with shop_of(outbox) as shop:
        address = str(shop.client.base_url)

        def refused(
            status: int, rights: Any = BOTH, types: Any = ("order.*",), **query: Any
        ) -> str:
            token = new_token(shop.settings, str(uuid.uuid4()), rights, [str(HOST)], types)
            document = {"host_id": str(HOST), "event_type": "order.placed", "payload": {}}
            body = [document, document] if query.pop("many", False) else document
            answered = httpx.post(
                f"{address}events", json=body, headers=authorized(token), params={"wait": 1} | query
            )
            assert answered.status_code == status, answered.text
            return str(answered.json()["detail"])

        assert "gives no right to read" in refused(403, rights=("publish",))
        assert "gives no right to publish" in refused(403, rights=("read",))
        assert "invoice.made" in refused(403, reply_type="invoice.made")
        assert "single event" in refused(400, many=True)
        for wait in (0, 51, -1, "nan", "1.5", ""):
            refused(422, wait=wait)
        refused(422, reply_type=["order.*"] * 51)
        assert (
            refused(400, wait=(), reply_type="order.a") == "reply_type: is for a request with wait"
        )
        assert outbox.value("select count(*) from outbox_message_t") == 0


def test_which_event_answers(outbox: Outbox) -> None:
    """The first of the types that are asked for and may be read; also one that comes of the direct effect."""
    with shop_of(outbox) as shop, ThreadPoolExecutor() as threads:
        address = str(shop.client.base_url).removesuffix("/v1/")
        token = new_token(shop.settings, "orders", BOTH, [str(HOST)], ["order.*"])
        orders = Shop(outbox, shop.settings, address, token)
        first, second = uuid.uuid4(), uuid.uuid4()
        any_ = threads.submit(orders.post, first)
        done = threads.submit(orders.post, second, reply_type=["*.d?ne", "order.refused"])
        orders.wait_for_waiting(2)
        for id_ in (first, second):
            shop.answer(id_, 1, "payment.requested")
            shop.answer(id_, 2, "order.accepted")
            step = {"causation_id": str(uuid.uuid4()), "correlation_id": str(id_), "hop_count": 2}
            outbox.publish(HOST, event(3, "order.done", metadata=step))
        for answered, amount, id_ in ((any_, 2, first), (done, 3, second)):
            assert answered.result().json()["reply"]["payload"] == {"amount": amount}
            types = ["*.d?ne"] if amount == 3 else []
            again = orders.post(id_, reply_type=types)
            assert again.json()["reply"]["payload"] == {"amount": amount}, "looked up"


def test_an_answer_is_as_it_was_published(outbox: Outbox) -> None:
    with shop_of(outbox) as shop:
        id_ = uuid.uuid4()
        assert shop.post(id_, wait=None).status_code == 202
        outbox.conn.execute(
            "select relay.publish(%s, null, jsonb_build_array(jsonb_build_object('event_type', 'a', "
            "'aggregate_type', 'b', 'aggregate_id', 'c', 'payload', '{\"n\": 0.1000000000000000055}'::jsonb, "
            "'metadata', jsonb_build_object('causation_id', %s::text))))",
            (HOST, id_),
        )
        assert '{"n": 0.1000000000000000055}' in shop.post(id_).text


def test_requests_that_wait_are_bounded(outbox: Outbox) -> None:
    with shop_of(outbox, streams_per_token=1) as shop, ThreadPoolExecutor() as threads:
        id_ = uuid.uuid4()
        waiting = threads.submit(shop.post, id_)
        shop.wait_for_waiting(1)
        refused = shop.post(uuid.uuid4())
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
        shop.answer(id_)
        assert waiting.result().status_code == 200
        assert outbox.value("select count(*) from outbox_message_t") == 2


def test_check_says_what_the_api_lacks(outbox: Outbox) -> None:
    """A token, and in mode `wal` the index."""
    settings = settings_of(outbox)

    def found(of: Any) -> list[str]:
        return [
            each.text
            for each in examine(of)
            if each.subject == "api" and each.level is not Severity.OK
        ]

    (text,) = found(settings)
    assert "relay token create" in text
    new_token(settings)
    assert found(settings) == []
    wal = outbox.settings(api={**API}, source={**outbox.config()["source"], "mode": "wal"})
    assert found(wal) == []
    name = outbox.value(
        "select indexrelid::regclass::text from pg_index join pg_attribute as a on a.attrelid = indrelid"
        " and a.attnum = indkey[0] where indrelid = 'outbox_message_t'::regclass and a.attname = 'c_xid'"
        " and indpred is null"
    )
    outbox.conn.execute(f"drop index {name}")
    (text,) = found(wal)
    assert "no index on c_xid" in text


def test_the_description_of_waiting(outbox: Outbox) -> None:
    with shop_of(outbox) as shop:
        described = shop.client.get("/openapi.json").json()
        post = described["paths"]["/v1/events"]["post"]
        names = {each["name"] for each in post["parameters"]}
        assert names == {"idempotency-key", "wait", "reply_type"}
        assert described["components"]["schemas"]["PublishedEvents"]["properties"].keys() == {
            "transaction_id",
            "ids",
            "reply",
        }
