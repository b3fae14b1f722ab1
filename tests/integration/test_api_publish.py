"""`POST /v1/events`: what each request is answered, and that its events are published once."""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from relay.admin import tokens
from relay.admin.check import examine
from relay.admin.findings import Severity
from relay.admin.tokens import revoke
from relay.api.shared_commits import WAIT_SECONDS
from relay.config.settings import Settings
from relay.intake.messages import derived
from relay.observe import api_counts
from tests.api import API, authorized, new_token, served, settings_of
from tests.clients import http_client
from tests.outbox import Outbox, host, wait_until

EVENTS = {
    "order.placed": {"version": 1, "model": "tests.event_types:Placed"},
}


def placed(amount: Any = 1, **more: Any) -> dict[str, Any]:
    return {
        "host_id": str(host(1)),
        "event_type": "order.placed",
        "payload": {"amount": amount},
        **more,
    }


class Publisher:
    """A program that publishes with a token."""

    def __init__(self, address: str, token: str) -> None:
        self.client = http_client(f"{address}/v1", headers=authorized(token))

    def post(self, document: Any, key: str | None = None, **query: Any) -> httpx.Response:
        headers = {"idempotency-key": key} if key else {}
        return self.client.post("/events", json=document, headers=headers, params=query)


@pytest.fixture
def settings(outbox: Outbox) -> Settings:
    return settings_of(outbox)


@pytest.fixture
def address(settings: Settings) -> Iterator[str]:
    with served(settings) as address:
        yield address


@pytest.fixture
def shop(settings: Settings, address: str) -> Publisher:
    token = new_token(settings, "shop", ["publish"], [str(host(1)), str(host(2))], ["order.*"])
    return Publisher(address, token)


def count(outbox: Outbox) -> int:
    return int(outbox.value("select count(*) from outbox_message_t"))


def test_events_are_published(outbox: Outbox, shop: Publisher) -> None:
    one = shop.post(placed())
    assert one.status_code == 202
    (id_,) = one.json()["ids"]
    assert one.headers["location"] == f"/v1/events/{id_}"
    many = shop.post([placed(1), placed(2)])
    assert many.status_code == 202
    rows = outbox.conn.execute(
        "select id::text, transaction_id::text, transaction_ordinal from outbox_message_t order by c_offset"
    ).fetchall()
    transaction = many.json()["transaction_id"]
    assert rows == [
        (id_, one.json()["transaction_id"], 1),
        *((each, transaction, n) for n, each in enumerate(many.json()["ids"], start=1)),
    ]


def test_a_repetition(outbox: Outbox, shop: Publisher) -> None:
    event = placed(id=str(uuid.uuid4()))
    first, again, other = shop.post(event), shop.post(event), shop.post({**event, "payload": 2})
    assert (first.status_code, again.status_code, other.status_code) == (202, 200, 409)
    assert again.json() == first.json()
    assert other.json()["errors"][0]["path"] == "$.id"
    first, again = shop.post([placed(1), placed(2)], "k"), shop.post([placed(1), placed(2)], "k")
    assert (first.status_code, again.status_code) == (202, 200)
    assert again.json() == first.json()
    other = shop.post([placed(1), placed(3)], "k")
    assert other.status_code == 409
    assert [each["path"] for each in other.json()["errors"]] == ["$[1].id"]
    assert count(outbox) == 3


def test_a_key_is_of_its_token(outbox: Outbox, settings: Settings, address: str) -> None:
    for name in ("one", "two"):
        token = new_token(settings, name, ["publish"])
        assert Publisher(address, token).post(placed(), "k").status_code == 202
    assert count(outbox) == 2


def test_a_token_cannot_take_the_ids_of_another(
    outbox: Outbox, settings: Settings, address: str
) -> None:
    """Whoever knew the name and the key could compute and publish them: the other's request then got 409."""
    victim = Publisher(address, new_token(settings, "alice", ["publish"]))
    (first,) = victim.post(placed(), "order 1").json()["ids"]
    assert first != str(derived("alice", "order 1")(1))
    stranger = Publisher(address, new_token(settings, "mallory", ["publish"]))
    for key in ("order 2", "order 3"):
        assert stranger.post(placed(id=str(derived("alice", key)(1)))).status_code == 202
        assert victim.post(placed(), key).status_code == 202
    # One that replaces it knows what its predecessor has sent.
    revoke(settings, "alice", None)
    later = Publisher(address, new_token(settings, "alice", ["publish"]))
    answer = later.post(placed(), "order 1")
    assert (answer.status_code, answer.json()["ids"]) == (200, [first])


def test_every_fault_is_named(outbox: Outbox, shop: Publisher) -> None:
    answer = shop.post([placed(), {"host_id": 5, "payload": ["\0"], "what": 1}])
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["errors"] == [
        {"path": "$[1].what", "message": answer.json()["errors"][0]["message"]},
        {"path": "$[1].event_type", "message": "is missing"},
        {"path": "$[1].host_id", "message": "must be a UUID"},
        {
            "path": "$[1].payload[0]",
            "message": "has a NUL character, which PostgreSQL cannot store",
        },
    ]
    assert shop.client.post("/events", content=b"{", headers=JSON).status_code == 400
    huge = f'{{"host_id": "{host(1)}", "event_type": "order.x", "payload": 1e200000}}'
    assert shop.client.post("/events", content=huge, headers=JSON).status_code == 400
    assert count(outbox) == 0


JSON = {"content-type": "application/json"}


def test_who_may_publish_what(
    outbox: Outbox, settings: Settings, address: str, shop: Publisher
) -> None:
    assert httpx.post(f"{address}/v1/events", json=placed()).status_code == 401
    reader = Publisher(address, new_token(settings, "reader", ["read"]))
    assert reader.post(placed()).status_code == 403
    assert shop.post(placed(host_id=str(host(2)))).status_code == 202
    for event in (placed(host_id=str(host(3))), placed(event_type="user.created")):
        assert shop.post(event).status_code == 403
        assert shop.post([placed(), event]).status_code == 403
    assert count(outbox) == 1


def test_what_is_no_json_or_too_large(outbox: Outbox, shop: Publisher) -> None:
    text = json.dumps(placed())
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = shop.client.post("/events", content=text, headers={"content-type": kind})
        assert answer.status_code == 415
    assert shop.client.post("/events", content=text).status_code == 415
    for kind in ("Application/JSON", "application/json ; charset=utf-8"):
        answer = shop.client.post("/events", content="[]", headers={"content-type": kind})
        assert answer.status_code == 400, answer.text
    assert shop.post([placed()] * 1_001).status_code == 413
    assert shop.post([placed()] * 1_000).status_code == 202
    assert shop.post(placed("x" * 17_000_000)).status_code == 413
    outbox.install_again(
        outbox.settings(source={**outbox.config()["source"], "max_event_bytes": 50_000})
    )
    assert shop.post(placed("x" * 60_000)).status_code == 413
    assert shop.post(placed(), "k" * 300).status_code == 422
    assert count(outbox) == 1_000


def test_a_client_that_disconnects(outbox: Outbox, shop: Publisher, address: str) -> None:
    """Its event is published whole or not at all, and the repetition finds out."""
    where, port = address.removeprefix("http://").split(":")
    token = shop.client.headers["authorization"]
    for number in range(20):
        body = json.dumps([placed(number), placed(number)])
        head = (
            f"POST /v1/events HTTP/1.1\r\nhost: x\r\nauthorization: {token}\r\ncontent-type: application/json\r\n"
            f"idempotency-key: {number}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection((where, int(port))) as client:
            client.sendall((head + body).encode())
        answer = shop.post([placed(number), placed(number)], str(number))
        assert answer.status_code in (200, 202)
    assert count(outbox) == 40


def test_many_clients(outbox: Outbox, shop: Publisher) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda n: shop.post(placed(n % 50), str(n % 50)), range(300)))
    assert {each.status_code for each in answers} == {200, 202}
    assert sum(each.status_code == 202 for each in answers) == 50
    assert count(outbox) == 50


def test_the_description(shop: Publisher, address: str) -> None:
    described = httpx.get(f"{address}/v1/openapi.json").json()
    post = described["paths"]["/v1/events"]["post"]
    assert post["responses"].keys() >= {
        "200",
        "202",
        "400",
        "401",
        "403",
        "409",
        "413",
        "415",
        "503",
    }
    assert post["requestBody"]["content"].keys() == {"application/json"}
    assert wait_until is not None


def _is_failing(part: str) -> bool:
    counts = api_counts.of("default")
    return counts is not None and counts.failing[part]


def test_a_role_that_may_not_publish(outbox: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    """The client is not to blame, and is answered at once; `relay check` and the log say what to do."""
    with outbox.limited_role() as (name, dsn):
        settings = settings_of(outbox)
        of_source = {"dsn": dsn, "slot": outbox.slot, "publication": outbox.slot}
        limited = outbox.settings(api={**API}, source=of_source)
        reader = new_token(settings)
        writer = tokens.create(settings, "shop", ["publish"], ["*"], ["*"], None, None)
        cure = f"the role {name} may not publish: run `relay init --handlers-publish`"
        (found,) = [each for each in examine(limited) if cure in each.text]
        assert (found.level, found.subject) == (Severity.WARNING, "api")
        with served(limited) as address:
            began = time.monotonic()
            answer = Publisher(address, writer).post(placed())
            assert time.monotonic() - began < WAIT_SECONDS
            assert answer.status_code == 503
            assert "relay may not publish" in answer.json()["detail"]
            assert httpx.get(f"{address}/v1/events", headers=authorized(reader)).is_success
            # A fault counts with the second attempt.
            assert Publisher(address, writer).post(placed()).status_code == 503
            wait_until(lambda: _is_failing("publishing"))
            wait_until(lambda: "relay init --handlers-publish" in str([*map(vars, caplog.records)]))
        revoke(settings, "shop", None)
        assert not [each for each in examine(limited) if cure in each.text]
