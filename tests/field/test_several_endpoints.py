"""A host has several endpoints: each gets the events that it takes, in order, whatever the others do.

Reports: travis-ci/travis-ci#2356, #3192 and #5440 (the first one that fails or hangs ends the list),
webhookdb/webhookdb#237, OctopusDeploy/Issues#7216 (the same), formbricks/formbricks#9123 (one that is dead lets the
others get it again), frain-dev/convoy#2025 and KickEngineering/KickDevDocs#246 (an event for each subscription, not
for each endpoint), hookdeck/outpost#993 (an event for some of the endpoints), hookdeck/outpost#131 (a new URL for
what waits), hookdeck/outpost#488 (disabled from the beginning), hookdeck/outpost#611, frain-dev/convoy#132 and
frain-dev/convoy#972 (what came while it was disabled), frain-dev/convoy#1453 (paused), hookdeck/outpost#284 (what
became of an event, for each), hook0/hook0#24 and svix/svix-webhooks#887 (types of each endpoint),
svix/svix-webhooks#122 (several types).
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from relay.admin import resend
from relay.admin.dead_letters import DeadLetters
from relay.admin.endpoints import disable, enable, pause
from relay.admin.endpoints import test as sent_for_test
from relay.config.settings import Settings
from relay.source.outbox.search import EventSearch
from relay.store.connections import connect
from relay.store.dead_letters.selection import DeadLetterSelection, exported
from tests.console import Program, Visitor, console_of, served
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.webhook import Answer, Webhook

TABLE = """
    create table endpoint (id text, host_id uuid, url text, types text[], secret text default 'shh');
    grant select on endpoint to public;
"""
SELECT = "select id, url, types, secret from endpoint where host_id = %(host_id)s order by id"

WAITS = "select 1 from pg_locks where relation = 'public.endpoint'::regclass and not granted"


class Tenants:
    """Endpoints of tenants, of one server, by the last segment of their paths; some fail."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.failing: dict[str, int] = {}
        self.hanging: dict[str, threading.Event] = {}
        self.webhook = Webhook(self._answer)
        outbox.conn.execute(TABLE)

    def _answer(self, headers: dict[str, str], _: bytes) -> Answer:
        id = headers["x-endpoint"]
        if id in self.hanging:
            self.hanging[id].wait(60)
        return Answer(self.failing.get(id, 204))

    def add(self, id: str, tenant: int, types: list[str] | None = None) -> None:
        self.outbox.conn.execute(
            "insert into endpoint (id, host_id, url, types) values (%s, %s, %s, %s)",
            (id, host(tenant), f"{self.webhook.url}/{id}", types),
        )

    def got(self, id: str) -> list[str]:
        """The types of the events that an endpoint has accepted, in order."""
        path = f"/events/{id}"
        return [each.event["type"] for each in self.webhook.accepted if each.path == path]

    def asked(self, id: str) -> int:
        return sum(each.path == f"/events/{id}" for each in self.webhook.requests)

    def settings(self, **more: Any) -> Settings:
        return self.outbox.settings(**self.keys(**more))

    def keys(self, **more: Any) -> dict[str, Any]:
        """The handler, with some keys, and the routes of a configuration."""
        hook: dict[str, Any] = {
            "type": "http",
            "url": "{endpoint.url}",
            "headers": {"x-endpoint": "{endpoint.id}"},
            "signing_secret": "{endpoint.secret}",
            "private_addresses": "allow",
            "retry": {"wait": 0.05, "max_wait": 0.2, "jitter": 0.01, "defer_after": 0.02},
            "circuit_breaker": {"failures": 2, "cool_down": 0.2},
            "endpoints": {"select": SELECT, "cache": 0, "id": "id", "types": "types"},
            **more,
        }
        return {"handlers": {"hook": hook}, "routes": [{"handlers": ["hook"]}]}


@pytest.fixture
def tenants(outbox: Outbox) -> Iterator[Tenants]:
    found = Tenants(outbox)
    with found.webhook:
        yield found


def publish(outbox: Outbox, tenant: int, *types: str) -> None:
    for number, each in enumerate(types):
        outbox.publish(host(tenant), event(number, event_type=each))


def deferred(outbox: Outbox) -> dict[str | None, int]:
    rows = outbox.conn.execute("select endpoint, count(*) from relay.deferred group by 1")
    return dict(rows.fetchall())


def dead(outbox: Outbox) -> list[tuple[str | None, str]]:
    rows = outbox.conn.execute(
        "select endpoint, event_type from relay.dead_letters where status = 'dead' order by c_offset, endpoint"
    )
    return rows.fetchall()


def test_an_event_goes_to_each_endpoint_that_takes_it(outbox: Outbox, tenants: Tenants) -> None:
    tenants.add("all", 1)
    tenants.add("orders", 1, ["order.*"])
    tenants.add("two", 1, ["order.placed", "user.*"])
    tenants.add("none", 1, [])
    tenants.add("other", 2)
    publish(outbox, 1, "order.placed", "user.left", "order.paid", "car.sold")
    publish(outbox, 3, "order.placed")
    outbox.drain(tenants.settings())
    assert tenants.got("all") == ["order.placed", "user.left", "order.paid", "car.sold"]
    assert tenants.got("orders") == ["order.placed", "order.paid"]
    assert tenants.got("two") == ["order.placed", "user.left"]
    assert not tenants.got("none") + tenants.got("other")
    assert not deferred(outbox)


def test_an_endpoint_gets_an_event_once_however_many_rows_it_has(
    outbox: Outbox, tenants: Tenants
) -> None:
    tenants.add("a", 1, ["order.*"])
    tenants.add("a", 1, ["order.placed", "*"])
    publish(outbox, 1, "order.placed", "car.sold")
    outbox.drain(tenants.settings())
    assert tenants.got("a") == ["order.placed", "car.sold"]


def test_an_event_chooses_some_of_the_endpoints(outbox: Outbox, tenants: Tenants) -> None:
    for id in ("a", "b", "c"):
        tenants.add(id, 1)
    some = f"{SELECT.partition('order by')[0]} and %(payload.to)s::jsonb ? id"
    outbox.publish(host(1), event(1, event_type="order.placed", payload={"to": ["a", "c"]}))
    outbox.drain(tenants.settings(endpoints={"select": some, "id": "id"}))
    assert [tenants.got(id) for id in ("a", "b", "c")] == [["order.placed"], [], ["order.placed"]]


def test_what_fails_at_one_is_not_sent_to_the_others_again(
    outbox: Outbox, tenants: Tenants
) -> None:
    tenants.add("a", 1)
    tenants.add("b", 1)
    tenants.failing["b"] = 503
    types = [f"order.{number}" for number in range(8)]
    with relaying(tenants.settings()):
        publish(outbox, 1, *types)
        wait_until(lambda: tenants.got("a") == types)
        wait_until(lambda: deferred(outbox).keys() == {"b"})
        tenants.failing.clear()
        wait_until(lambda: tenants.got("b") == types)
        wait_until(lambda: not deferred(outbox))
    assert tenants.asked("a") == len(types)
    assert not dead(outbox)


def test_one_that_hangs_delays_no_other(outbox: Outbox, tenants: Tenants) -> None:
    tenants.add("a", 1)
    tenants.add("b", 1)
    let_go = threading.Event()
    tenants.hanging["a"] = let_go
    types = [f"order.{number}" for number in range(8)]
    with relaying(tenants.settings(timeout=60)):
        publish(outbox, 1, *types)
        wait_until(lambda: tenants.got("b") == types)
        assert not tenants.got("a")
        let_go.set()
        wait_until(lambda: tenants.got("a") == types)
    assert tenants.asked("b") == len(types)


def test_deferred_deliveries_keep_their_order_by_other_keys(
    outbox: Outbox, tenants: Tenants
) -> None:
    """Their keys are computed again once the configuration orders by others."""
    tenants.add("a", 1)
    tenants.add("b", 1)
    tenants.failing["b"] = 503
    with relaying(tenants.settings()):
        publish(outbox, 1, "order.0", "order.1")
        wait_until(lambda: deferred(outbox) == {"b": 2})
    with relaying(tenants.settings(order_by="user")):
        publish(outbox, 1, "order.2")
        wait_until(lambda: len(tenants.got("a")) == 3)
        wait_until(lambda: deferred(outbox) == {"b": 3})
        tenants.failing.clear()
        wait_until(lambda: tenants.got("b") == [f"order.{number}" for number in range(3)])
        wait_until(lambda: not deferred(outbox))


def test_the_order_of_each_holds_over_restarts(outbox: Outbox, tenants: Tenants) -> None:
    tenants.add("a", 1)
    tenants.add("b", 1)
    tenants.failing["b"] = 503
    types = [f"order.{number}" for number in range(6)]

    def publish_one(number: int) -> None:
        publish(outbox, 1, types[number])
        wait_until(lambda: tenants.got("a") == types[: number + 1])

    for number in range(len(types)):
        with relaying(tenants.settings()):
            publish_one(number)
        if number == 3:
            tenants.failing.clear()
    with relaying(tenants.settings()):
        wait_until(lambda: tenants.got("b") == types)
        wait_until(lambda: not deferred(outbox))
    assert tenants.got("a") == types


def test_a_dead_letter_is_of_one_endpoint_and_replayed_to_it_alone(
    outbox: Outbox, tenants: Tenants
) -> None:
    tenants.add("a", 1)
    tenants.add("b", 1)
    tenants.failing["b"] = 400
    settings = outbox.settings(**tenants.keys(), observe=console_of())
    publish(outbox, 1, "order.placed", "order.paid")
    outbox.drain(settings)
    assert dead(outbox) == [("b", "order.placed"), ("b", "order.paid")]
    with served(settings) as address:
        program = Program(address)
        assert not program.get("dead-letters", endpoint="a")["rows"]
        (first, _) = program.get("dead-letters", endpoint="b")["rows"]
        assert "endpoint <code>b</code>" in Visitor(address).page(
            f"/groups/default/dead-letter?id={first['id']}"
        )
    tenants.failing.clear()
    with connect(settings.target_dsn) as conn:
        letters = DeadLetters(settings, conn)
        lines = exported(conn, settings.group, DeadLetterSelection())
        assert [json.loads(each)["endpoint"] for each in lines] == ["b", "b"]
        assert not letters.find(DeadLetterSelection(endpoint="a"), ["dead"]).transactions
        letters.replay(letters.find(DeadLetterSelection(endpoint="b"), ["dead"]), "repaired")
    with relaying(settings):
        wait_until(lambda: tenants.got("b") == ["order.placed", "order.paid"])
        wait_until(lambda: not deferred(outbox))
    assert tenants.got("a") == ["order.placed", "order.paid"]
    assert not dead(outbox)


def test_one_that_is_disabled_is_disabled_alone_by_its_id(outbox: Outbox, tenants: Tenants) -> None:
    tenants.add("a", 1)
    tenants.add("b", 1)
    settings = tenants.settings()
    disable(settings, "hook", "abuse", endpoint="b")
    publish(outbox, 1, "order.placed")
    # Another URL is the same endpoint.
    outbox.conn.execute(
        "update endpoint set url = %s where id = 'b'", (f"{tenants.webhook.url}/c",)
    )
    outbox.drain(settings)
    assert tenants.got("a") == ["order.placed"]
    assert dead(outbox) == [("b", "order.placed")]
    assert enable(settings, "hook", endpoint="b").changed


def test_what_comes_for_a_paused_one_waits(outbox: Outbox, tenants: Tenants) -> None:
    tenants.add("a", 1)
    tenants.add("b", 1)
    settings = tenants.settings()
    assert pause(settings, "hook", "maintenance", endpoint="b").changed
    assert not pause(settings, "hook", endpoint="b").changed
    with relaying(settings):
        publish(outbox, 1, "order.placed", "order.paid")
        wait_until(lambda: deferred(outbox) == {"b": 2})
        wait_until(lambda: len(tenants.got("a")) == 2)
        assert not tenants.asked("b")
        assert enable(settings, "hook", endpoint="b").changed
        wait_until(lambda: tenants.got("b") == ["order.placed", "order.paid"])
    assert not dead(outbox)


def test_the_console_and_its_api_resend_to_one_endpoint(outbox: Outbox, tenants: Tenants) -> None:
    tenants.add("a", 1)
    tenants.add("b", 1)
    settings = outbox.settings(**tenants.keys(), observe=console_of())
    publish(outbox, 1, "order.placed")
    outbox.drain(settings)
    (id,) = outbox.column("select id::text from outbox_message_t")
    with served(settings) as address:
        visitor, program = Visitor(address), Program(address)
        assert 'name="endpoint"' in visitor.page(f"/groups/default/event?id={id}")
        sent = {"name": "hook", "event": id, "endpoint": "b", "reason": "lost"}
        assert "again" in visitor.send("/groups/default/sink/resend", **sent).text
        assert program.post("/sinks/hook/resend", ids=[id], endpoint="b")["transactions"] == 1
    with relaying(settings):
        outbox.wait_delivered("hook")
        wait_until(lambda: not deferred(outbox))
    assert (len(tenants.got("a")), len(tenants.got("b"))) == (1, 3)


def test_an_event_is_resent_to_each_endpoint_or_to_one(outbox: Outbox, tenants: Tenants) -> None:
    tenants.add("a", 1)
    tenants.add("b", 1)
    settings = outbox.settings(**tenants.keys(), attempts={"record": "all"})
    publish(outbox, 1, "order.placed")
    outbox.drain(settings)
    (id,) = outbox.column("select id::text from outbox_message_t")
    for endpoint in (None, "b"):
        resend.resend(settings, resend.plan(settings, "hook", [id], EventSearch(), endpoint), None)
        with relaying(settings):
            outbox.wait_delivered("hook")
    assert (len(tenants.got("a")), len(tenants.got("b"))) == (2, 3)
    marked = outbox.column("select resent_by is not null from relay.attempts")
    assert sorted(marked) == [False, False, True, True, True]


def test_what_is_cancelled_while_it_is_divided_goes_to_none(
    outbox: Outbox, tenants: Tenants
) -> None:
    tenants.add("a", 1)
    tenants.add("b", 1)
    outbox.publish(host(1), event(0, event_type="order.cancelled", deliver_at="2999-01-01"))
    (id,) = outbox.column("select id::text from outbox_message_t")
    with relaying(tenants.settings()):
        wait_until(lambda: deferred(outbox) == {None: 1})
        with connect(outbox.superuser_dsn) as holder, holder.transaction():
            holder.execute("lock table public.endpoint in access exclusive mode")
            outbox.conn.execute("update relay.deferred set retry_at = now()")
            wait_until(lambda: bool(outbox.column(WAITS)))
            outbox.conn.execute("select relay.cancel(%s)", (id,))
            assert not deferred(outbox)
        publish(outbox, 1, "order.placed")
        outbox.wait_delivered("hook")
    assert tenants.got("a") == tenants.got("b") == ["order.placed"]
    assert outbox.column("select outcome from relay.cancellations where sink = 'hook'") == [
        "in doubt"
    ]


def test_what_waits_goes_to_a_new_url_and_not_to_an_endpoint_that_is_gone(
    outbox: Outbox, tenants: Tenants
) -> None:
    for id in ("a", "b", "c"):
        tenants.add(id, 1)
    tenants.failing |= {"b": 503, "c": 503}
    with relaying(tenants.settings()):
        publish(outbox, 1, "order.placed", "order.paid")
        wait_until(lambda: deferred(outbox) == {"b": 2, "c": 2})
        outbox.conn.execute("delete from endpoint where id = 'c'")
        outbox.conn.execute(
            "update endpoint set url = %s where id = 'b'", (f"{tenants.webhook.url}/new",)
        )
        wait_until(lambda: bool(tenants.asked("new")) and deferred(outbox) == {"b": 2})
        tenants.failing.clear()
        wait_until(lambda: not deferred(outbox))
    assert tenants.got("new") == ["order.placed", "order.paid"]
    assert not tenants.got("b") + tenants.got("c")
    assert len(tenants.got("a")) == 2
    assert not dead(outbox)


def test_what_was_deferred_without_endpoints_goes_to_each_when_it_is_due(
    outbox: Outbox, tenants: Tenants
) -> None:
    """A row that the landed edition has written, and events behind it, once the configuration names ids."""
    tenants.add("a", 1)
    one_row = {"select": "select * from endpoint where host_id = %(host_id)s", "cache": 0}
    tenants.failing["a"] = 503
    with relaying(tenants.settings(endpoints=one_row)):
        publish(outbox, 1, "order.placed")
        wait_until(lambda: deferred(outbox) == {None: 1})
    tenants.add("b", 1)
    with relaying(tenants.settings()):
        publish(outbox, 1, "order.paid")
        wait_until(lambda: tenants.got("b") == ["order.placed", "order.paid"])
        tenants.failing.clear()
        wait_until(lambda: tenants.got("a") == ["order.placed", "order.paid"])
        wait_until(lambda: not deferred(outbox))


def test_a_test_event_goes_to_the_endpoints_of_a_host(outbox: Outbox, tenants: Tenants) -> None:
    for id, types in (("a", None), ("b", ["relay.*"]), ("c", ["order.*"])):
        tenants.add(id, 1, types)
    tenants.failing["b"] = 503
    settings = tenants.settings()
    payload = {"test": True}
    found = sent_for_test(settings, "hook", str(host(1)), "relay.test", payload, None)
    assert found == {"a": "", "b": "EndpointFailed: HTTP 503"}
    assert tenants.webhook.accepted[0].event["data"] == payload
    found = sent_for_test(settings, "hook", str(host(1)), "relay.test", payload, "c")
    assert "takes no such event" in found["c"]
    assert not deferred(outbox)


def test_an_id_of_no_use_is_the_fault_of_its_host(outbox: Outbox, tenants: Tenants) -> None:
    tenants.add("", 1)
    tenants.add("b", 2)
    publish(outbox, 1, "order.placed")
    publish(outbox, 2, "order.placed")
    outbox.drain(tenants.settings())
    assert dead(outbox) == [(None, "order.placed")]
    assert tenants.got("b") == ["order.placed"]


def test_ids_need_a_template_of_the_url(outbox: Outbox, tenants: Tenants) -> None:
    with pytest.raises(ValueError, match=r"endpoints\.id: needs a template in url"):
        tenants.settings(url="http://127.0.0.1/")


@pytest.mark.parametrize("seed", range(3))
def test_whatever_fails_and_stops_each_gets_all_of_its_events_in_order(
    outbox: Outbox, tenants: Tenants, seed: int
) -> None:
    """Transactions of several hosts, endpoints that fail in turns, and relay stopped while deliveries are in flight."""
    chance = random.Random(seed)
    owners = {"a": 1, "b": 1, "c": 2, "d": 2}
    for id, tenant in owners.items():
        tenants.add(id, tenant, None if id in "ac" else ["order.*"])
    published: dict[int, list[str]] = {1: [], 2: []}
    for _ in range(5):
        tenants.failing = {id: 503 for id in owners if chance.random() < 0.4}
        with relaying(tenants.settings()):
            for _ in range(6):
                with outbox.conn.transaction():
                    for tenant in chance.sample((1, 2), chance.choice((1, 2))):
                        kind = f"{chance.choice(('order', 'car'))}.{len(published[tenant])}"
                        published[tenant].append(kind)
                        outbox.publish(host(tenant), event(1, event_type=kind))
    tenants.failing = {}
    with relaying(tenants.settings()):
        outbox.wait_delivered("hook")
    for id, tenant in owners.items():
        wanted = [each for each in published[tenant] if id in "ac" or each.startswith("order.")]
        assert list(dict.fromkeys(tenants.got(id))) == wanted
    assert not dead(outbox)


def test_what_waits_keeps_its_order_when_ids_are_given_up(outbox: Outbox, tenants: Tenants) -> None:
    tenants.add("b", 1)
    tenants.failing["b"] = 503
    with relaying(tenants.settings()):
        publish(outbox, 1, "order.0", "order.1")
        wait_until(lambda: deferred(outbox) == {"b": 2})
    one_row = {"select": "select * from endpoint where host_id = %(host_id)s", "cache": 0}
    with relaying(tenants.settings(endpoints=one_row, circuit_breaker=None)):
        publish(outbox, 1, "order.2")
        wait_until(lambda: deferred(outbox) == {"b": 2, None: 1})
        tenants.failing.clear()
        wait_until(lambda: not deferred(outbox))
    assert tenants.got("b") == ["order.0", "order.1", "order.2"]
