"""One sink, many tenants: the endpoint of each is chosen by data, and concerns its own events only."""

from __future__ import annotations

import base64
import hmac
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import pairwise
from typing import Any

import pytest

from relay.admin.check import examine
from relay.admin.dead_letters import DeadLetters
from relay.admin.endpoints import disable, enable, listed
from relay.admin.findings import Severity
from relay.config.settings import Settings
from relay.delivery import checkpoint
from relay.faults import ConfigurationError
from relay.sinks.endpoints import FRESH_SECONDS
from relay.store.connections import connect
from relay.store.dead_letters.selection import DeadLetterSelection
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.webhook import Answer, Request, Webhook

SHORT = {"wait": 0.1, "max_wait": 0.3, "jitter": 0.01, "defer_after": 0.05}
TABLE = """
    create table endpoint (host_id uuid, url text, token text, secret text);
    grant select on endpoint to public;
"""
SELECT = "select url, token, secret from endpoint where host_id = %(host_id)s"


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as server:
        yield server


def sending(url: str, **more: Any) -> dict[str, Any]:
    """Every event is posted to its endpoint, by one sink."""
    hook = {
        "type": "http",
        "url": url,
        "headers": {"x-tenant": "{host_id}"},
        "private_addresses": "allow",
        "retry": SHORT,
        "circuit_breaker": {"failures": 2, "cool_down": 0.3},
        **more,
    }
    return {"handlers": {"hook": hook}, "routes": [{"handlers": ["hook"]}]}


def looked_up(outbox: Outbox, **more: Any) -> Settings:
    """The endpoint of each event is looked up in a table."""
    endpoints = {"select": SELECT, "cache": 0.2, **more.pop("endpoints", {})}
    return outbox.settings(**sending("{endpoint.url}", endpoints=endpoints, **more))


def register(outbox: Outbox, number: int, url: str | None, **more: str) -> None:
    """Give a tenant an endpoint, instead of the one that it has."""
    outbox.conn.execute("delete from endpoint where host_id = %s", (host(number),))
    outbox.conn.execute(
        "insert into endpoint values (%s, %s, %s, %s)",
        (host(number), url, more.get("token"), more.get("secret")),
    )


def of_tenant(webhook: Webhook, number: int) -> list[Request]:
    """The requests that were accepted for a tenant."""
    return [each for each in webhook.accepted if each.headers["x-tenant"] == str(host(number))]


def dead(outbox: Outbox) -> list[str]:
    """The exceptions of the dead letters."""
    return outbox.column("select exception from relay.dead_letter_queue order by c_offset")


def test_values_fill_their_part_of_the_address(outbox: Outbox, webhook: Webhook) -> None:
    for tenant in ("a b", "x/../../y", "q?z=1#f", "é", ".."):
        outbox.publish(host(1), event(1, payload={"tenant": tenant}))
    url = f"http://127.0.0.1:{webhook.port}/t/{{payload.tenant}}/h?for={{payload.tenant}}"
    outbox.drain(outbox.settings(**sending(url)))
    assert [each.path for each in webhook.requests] == [
        "/t/a%20b/h?for=a%20b",
        "/t/x%2F..%2F..%2Fy/h?for=x%2F..%2F..%2Fy",
        "/t/q%3Fz%3D1%23f/h?for=q%3Fz%3D1%23f",
        "/t/%C3%A9/h?for=%C3%A9",
    ]
    (exception,) = dead(outbox)
    assert "segment of the path" in exception


def test_a_lookup_finds_address_headers_and_secret(outbox: Outbox, webhook: Webhook) -> None:
    outbox.conn.execute(TABLE)
    key = base64.b64encode(b"x" * 24).decode()
    register(outbox, 1, f"{webhook.url}/one", token="t1", secret=f"whsec_{key}")
    register(outbox, 2, f"{webhook.url}/two", token="t2", secret="plain")
    for number in (1, 2, 3, 1):
        outbox.publish(host(number), event(number))
    headers = {"x-tenant": "{host_id}", "authorization": "Bearer {endpoint.token}"}
    settings = looked_up(outbox, headers=headers, signing_secret="{endpoint.secret}")
    outbox.drain(settings)
    paths = sorted((each.path, each.headers["authorization"]) for each in webhook.requests)
    assert paths == [("/events/one", "Bearer t1")] * 2 + [("/events/two", "Bearer t2")]
    for request in webhook.requests:
        own = b"x" * 24 if request.path.endswith("one") else b"plain"
        identity, clock = (request.headers[f"webhook-{name}"] for name in ("id", "timestamp"))
        signed = f"{identity}.{clock}.".encode() + request.body
        digest = base64.b64encode(hmac.digest(own, signed, "sha256")).decode()
        assert request.headers["webhook-signature"] == f"v1,{digest}"
    # The third tenant has no endpoint: there is nothing to deliver.
    assert outbox.value("select count(*) from relay.deferred") == 0
    assert not dead(outbox)


def test_a_row_is_looked_up_again_once_its_time_is_over(outbox: Outbox, webhook: Webhook) -> None:
    outbox.conn.execute(TABLE)
    register(outbox, 1, f"{webhook.url}/old")
    with relaying(looked_up(outbox)):
        outbox.publish(host(1), event(1))
        outbox.publish(host(2), event(1))
        outbox.wait_delivered("hook")
        register(outbox, 1, f"{webhook.url}/new")
        register(outbox, 2, f"{webhook.url}/late")
        time.sleep(0.3)
        outbox.publish(host(1), event(2))
        outbox.publish(host(2), event(2))
        wait_until(lambda: len(webhook.accepted) == 3)
    assert {each.path for each in webhook.accepted} == {
        *("/events/old", "/events/new", "/events/late")
    }


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:1/", "not public"),
        ("http://[::ffff:169.254.169.254]/", "not public"),
        ("ftp://shop.example/", "must be an address"),
        ("http://shop.example:x/", "port"),
        (None, "has no url"),
    ],
)
def test_an_address_of_no_use_is_a_dead_letter_with_its_reason(
    outbox: Outbox, webhook: Webhook, url: str | None, reason: str
) -> None:
    outbox.conn.execute(TABLE)
    register(outbox, 1, url)
    outbox.publish(host(1), event(1))
    outbox.drain(looked_up(outbox, private_addresses="refuse"))
    (exception,) = dead(outbox)
    assert exception.startswith("EndpointRejected")
    assert reason in exception.splitlines()[0]


def test_several_rows_are_one_clear_fault(outbox: Outbox, webhook: Webhook) -> None:
    outbox.conn.execute(TABLE)
    outbox.conn.execute(
        "insert into endpoint select %s, 'http://a' from generate_series(1, 2)", (host(1),)
    )
    outbox.publish(host(1), event(1))
    outbox.drain(looked_up(outbox))
    assert "more than one row" in dead(outbox)[0]


def test_a_value_that_the_lookup_does_not_take_is_the_event_s_fault(
    outbox: Outbox, webhook: Webhook
) -> None:
    select = f"select '{webhook.url}' as url where %(payload.tenant)s::int > 0"
    settings = outbox.settings(**sending("{endpoint.url}", endpoints={"select": select}))
    for tenant in ("x", "7", "0"):
        outbox.publish(host(1), event(payload={"tenant": tenant}))
    outbox.drain(settings)
    assert "22P02" in dead(outbox)[0]
    assert [each.event["data"] for each in webhook.accepted] == [{"tenant": "7"}]


def test_a_lookup_that_fails_is_an_outage(
    outbox: Outbox, webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "ACTIVITY_SECONDS", 0.1)
    outbox.conn.execute(TABLE)
    register(outbox, 1, webhook.url)
    with relaying(looked_up(outbox)):
        outbox.publish(host(1), event(1))
        outbox.wait_delivered("hook")
        outbox.conn.execute("alter table endpoint rename to elsewhere")
        time.sleep(0.3)
        outbox.publish(host(1), event(2))
        wait_until(
            lambda: bool(outbox.column("select 1 from relay.sink_activity where failed > 0"))
        )
        outbox.conn.execute("alter table elsewhere rename to endpoint")
        wait_until(lambda: len(webhook.accepted) == 2)
    assert not dead(outbox)


def test_a_failing_endpoint_neither_delays_nor_reorders_another_s_events(
    outbox: Outbox, webhook: Webhook
) -> None:
    """Of four tenants one hangs, one answers 500; the sink goes on, and no attempt of theirs counts."""
    outbox.conn.execute(TABLE)
    hangs, fails = str(host(1)), str(host(2))
    is_well = False

    def answers(headers: dict[str, str], _: bytes) -> Answer:
        if is_well or headers["x-tenant"] not in (hangs, fails):
            return Answer()
        return Answer(after=30.0) if headers["x-tenant"] == hangs else Answer(500)

    webhook.answers = answers
    for number in range(1, 5):
        register(outbox, number, f"{webhook.url}/{number}")
    settings = looked_up(
        outbox, timeout=1.0, concurrency=2, retry={**SHORT, "attempts": 4}, order_by="aggregate"
    )
    with relaying(settings):
        for number in range(40):
            tenant = number % 4 + 1
            outbox.publish(host(tenant), event(number, aggregate_id=f"{tenant}-{number % 3}"))
        began = time.monotonic()
        wait_until(lambda: len(of_tenant(webhook, 3)) + len(of_tenant(webhook, 4)) == 20)
        assert time.monotonic() - began < 15
        assert outbox.value("select fault from relay.sinks") is None
        is_well = True
        wait_until(lambda: sum(len(of_tenant(webhook, each)) for each in (1, 2)) == 20)
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
    assert not dead(outbox)
    for tenant in range(1, 5):
        requests = [each.event for each in of_tenant(webhook, tenant)]
        for key in {each["subject"] for each in requests}:
            sequence = [int(each["sequence"]) for each in requests if each["subject"] == key]
            assert list(dict.fromkeys(sequence)) == sorted(set(sequence))


def test_an_endpoint_that_is_gone_is_disabled_until_somebody_enables_it(
    outbox: Outbox, webhook: Webhook
) -> None:
    outbox.conn.execute(TABLE)
    webhook.answers = lambda headers, _: Answer(410 if headers["x-tenant"] == str(host(1)) else 204)
    register(outbox, 1, f"{webhook.url}/secret-path")
    register(outbox, 2, f"{webhook.url}/other")
    settings = looked_up(outbox, on_exhausted="block_key")
    with relaying(settings):
        for number in range(3):
            outbox.publish(host(1), event(number))
        outbox.publish(host(2), event(9))
        wait_until(lambda: len(dead(outbox)) == 3)
        row = outbox.conn.execute("select * from relay.endpoints").fetchone()
        assert row is not None
        assert "secret-path" not in str(row)
        assert outbox.value("select host_id from relay.endpoints") == str(host(1))
        asked = len([r for r in webhook.requests if r.headers["x-tenant"] == str(host(1))])
        assert asked == 1
    # A restart keeps it disabled.
    webhook.answers = lambda *_: Answer()
    outbox.publish(host(1), event(4))
    with relaying(settings):
        wait_until(lambda: len(dead(outbox)) == 4)
        assert "is disabled since" in dead(outbox)[-1]
        assert not of_tenant(webhook, 1)
        (disabled,) = listed(settings)
        assert enable(settings, "hook", "repaired", endpoint=disabled.endpoint).changed
        assert not enable(settings, "hook", "repaired", endpoint=disabled.endpoint).changed
        time.sleep(FRESH_SECONDS)
        # A replay follows: what it brings must not be dead letters again.
        outbox.publish(host(1), event(5))
        wait_until(lambda: len(of_tenant(webhook, 1)) == 1 or len(dead(outbox)) > 4)
        assert len(dead(outbox)) == 4
        wait_until(lambda: outbox.value("select count(*) from relay.endpoints") == 0)
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)


def test_an_operator_disables_an_endpoint_by_its_url(outbox: Outbox, webhook: Webhook) -> None:
    outbox.conn.execute(TABLE)
    register(outbox, 1, f"{webhook.url}/a?key=secret")
    settings = looked_up(outbox)
    with relaying(settings):
        outbox.publish(host(1), event(1))
        outbox.wait_delivered("hook")
        disable(settings, "hook", "abuse", endpoint=f"{webhook.url}/a?key=secret")
        publish_until(outbox, lambda: bool(dead(outbox)))
    assert "abuse" in dead(outbox)[0]
    (disabled,) = listed(settings, "hook")
    assert (disabled.state, disabled.address) == ("disabled", webhook.url.removesuffix("/events"))
    with pytest.raises(ConfigurationError, match="has no endpoint"):
        enable(settings, "hook", endpoint="0" * 16)
    with pytest.raises(ConfigurationError, match="neither an id"):
        disable(settings, "hook", endpoint="nonsense")
    with pytest.raises(ConfigurationError, match=r"such sinks: hook"):
        listed(settings, "projection")


def test_another_url_is_another_endpoint(outbox: Outbox, webhook: Webhook) -> None:
    """What was dead-lettered meanwhile can be replayed to it."""
    outbox.conn.execute(TABLE)
    register(outbox, 1, f"{webhook.url}/old")
    webhook.answers = lambda *_: Answer(410)
    settings = looked_up(outbox)
    with relaying(settings):
        outbox.publish(host(1), event(1))
        wait_until(lambda: len(dead(outbox)) == 1)
        webhook.answers = lambda *_: Answer()
        register(outbox, 1, f"{webhook.url}/new")
        time.sleep(0.3)
        outbox.publish(host(1), event(2))
        wait_until(lambda: len(webhook.accepted) == 1)
        with connect(outbox.relay_dsn) as conn:
            letters = DeadLetters(settings, conn)
            found = letters.find(DeadLetterSelection(exception="is disabled"))
            letters.replay(found, "a new address")
        wait_until(lambda: len(webhook.accepted) == 2)
    assert {each.path for each in webhook.accepted} == {"/events/new"}


def publish_until(outbox: Outbox, condition: Callable[[], bool]) -> None:
    """Publish events of the first tenant until a condition holds: relay reads what operators want with deliveries."""

    def holds() -> bool:
        outbox.publish(host(1), event(1))
        return condition()

    wait_until(holds, every=0.3)


def test_an_endpoint_that_fails_for_long_is_disabled(outbox: Outbox, webhook: Webhook) -> None:
    """It failed already in another process, days ago."""
    outbox.conn.execute(TABLE)
    webhook.answers = lambda *_: Answer(503)
    register(outbox, 1, webhook.url)
    with relaying(looked_up(outbox, endpoints={"disable_after": "2d"})):
        outbox.publish(host(1), event(1))
        wait_until(lambda: len(webhook.requests) >= 2)
    digest = sha256(webhook.url.encode()).hexdigest()[:16]
    outbox.conn.execute(
        "insert into relay.endpoints (group_id, sink, endpoint, address, failing_since)"
        " select group_id, sink, %s, 'x', now() - interval '2 days' from relay.sinks",
        (digest,),
    )
    with relaying(looked_up(outbox, endpoints={"disable_after": "2d"})):
        outbox.publish(host(1), event(2))
        wait_until(lambda: len(dead(outbox)) == 2)
        assert outbox.value("select disabled_at is not null from relay.endpoints")
    assert all("HTTP 503" in each for each in dead(outbox))
    assert len(webhook.requests) <= 20


def test_a_rate_is_that_of_each_endpoint(outbox: Outbox, webhook: Webhook) -> None:
    outbox.conn.execute(TABLE)
    register(outbox, 1, f"{webhook.url}/1")
    register(outbox, 2, f"{webhook.url}/2")
    for number in range(10):
        outbox.publish(host(number % 2 + 1), event(number, aggregate_id=str(number)))
    outbox.drain(looked_up(outbox, rate_limit=5, order_by="aggregate"))
    for tenant in (1, 2):
        times = sorted(each.at for each in of_tenant(webhook, tenant))
        assert len(times) == 5
        assert all(later - earlier > 0.15 for earlier, later in pairwise(times))


def test_check_finds_what_a_lookup_lacks(outbox: Outbox) -> None:
    def errors(select: str) -> list[str]:
        settings = outbox.settings(**sending("{endpoint.url}", endpoints={"select": select}))
        return [each.text for each in examine(settings) if each.level is Severity.ERROR]

    assert errors("select nothing from nowhere") == [
        'handlers.hook.endpoints.select: relation "nowhere" does not exist: correct the statement, or create and grant '
        "what it names"
    ]
    assert errors("select 'x' as address where %(payload.n)s = '1'") == [
        "handlers.hook.endpoints.select: has no column url, which url needs (columns: address)"
    ]
    assert not errors("select 'http://a' as url where %(host_id)s is not null and 1 %% 2 = 1;")
    assert not errors("select (1 / length(%(payload.n)s))::text as url -- a comment")
    outbox.conn.execute(TABLE)
    (unfilled,) = errors("select url from endpoint where host_id = $1")
    assert "relay fills no parameter such as $1: write %(field)s" in unfilled
    for writes in (
        "delete from endpoint returning url",
        "with gone as (delete from endpoint returning url) select url from gone",
        "select url from endpoint for update",
    ):
        # It would run in a read-only transaction, and be an outage without an end.
        (refused,) = errors(writes)
        assert "it has to be a query that neither writes nor locks rows" in refused


def test_what_one_tenants_events_lack_stops_no_other(outbox: Outbox, webhook: Webhook) -> None:
    """A header that only some events have: those without it are dead letters, and the brake counts none of them."""
    url = f"http://127.0.0.1:{webhook.port}/{{payload.tenant}}"
    keys = sending(url, headers={"x-plan": "{payload.plan}", "x-tenant": "{host_id}"})
    with relaying(outbox.settings(**keys, dead_letters={"brake": 2})):
        for number in range(2, 8):
            outbox.publish(host(number), event(number, payload={"tenant": "bad"}))
        outbox.publish(host(1), event(1, payload={"tenant": "good", "plan": "x"}))
        wait_until(lambda: len(of_tenant(webhook, 1)) == 1)
        wait_until(lambda: len(dead(outbox)) == 6)
    assert all("payload.plan" in each for each in dead(outbox))


@pytest.mark.parametrize("status", [503, 410])
def test_templates_in_headers_make_no_endpoint_of_a_fixed_url(
    outbox: Outbox, webhook: Webhook, status: int
) -> None:
    """The sink stops for its only URL as without templates: nothing is dead-lettered, and little deferred."""
    webhook.answers = lambda headers, body: Answer(status)
    settings = outbox.settings(**sending(webhook.url))
    with relaying(settings):
        for number in range(40):
            outbox.publish(host(number), event(number))
        wait_until(lambda: outbox.column("select fault from relay.sinks") != [None])
        wait_until(lambda: len(webhook.requests) > 2)
        assert outbox.value("select count(*) from relay.deferred") < 20
        webhook.answers = lambda headers, body: Answer()
        wait_until(lambda: len({each.event["id"] for each in webhook.accepted}) == 40)
    assert not dead(outbox)
    assert outbox.value("select count(*) from relay.endpoints") == 0
