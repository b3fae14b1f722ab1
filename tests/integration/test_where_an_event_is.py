"""`relay event`: where an event is, at the target, at sinks and in queues, for commands, programs and browsers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relay.admin.events import EventDestination, UnknownEvent, find, search
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.source.outbox import search as outbox_search
from relay.source.outbox.search import EventPage, EventSearch
from tests.clients import http_client
from tests.console import TOKEN, console_of, served
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.process import relay
from tests.webhook import Answer, Webhook

LATER = "2999-01-01T00:00:00+00:00"


@pytest.fixture
def webhook() -> Any:
    """An endpoint that refuses odd events for good."""

    def answer(_: dict[str, str], body: bytes) -> Answer:
        return Answer(400 if b"order.odd" in body else 204)

    with Webhook(answer) as found:
        yield found


@pytest.fixture
def settings(outbox: Outbox, webhook: Webhook) -> Settings:
    """All events go to the projection, which refuses negative amounts, and to a sink."""
    handlers = outbox.config()["handlers"] | {"hook": {"type": "http", "url": webhook.url}}
    found = outbox.settings(
        handlers=handlers,
        routes=[{"handlers": ["projection", "hook"]}],
        observe=console_of(),
    )
    outbox.install_again(found)
    return found


def publish(outbox: Outbox, *args: Any, **more: Any) -> str:
    """Publish one event; returns its id."""
    transaction = outbox.publish(host(1), event(*args, **more))
    return str(
        outbox.value("select id from outbox_message_t where transaction_id = %s", (transaction,))
    )


def states(settings: Settings, event_id: str) -> dict[str, str]:
    """The state of an event at each destination."""
    return {each.name or each.kind: each.state for each in find(settings, event_id).destinations}


def test_it_is_applied_and_delivered_after_it_waited(outbox: Outbox, settings: Settings) -> None:
    with relaying(settings):
        first = publish(outbox)
        wait_until(lambda: states(settings, first) == {"target": "passed", "hook": "passed"})
    second = publish(outbox)
    assert states(settings, second) == {"target": "waiting", "hook": "waiting"}
    found = find(settings, second)
    assert (found.in_outbox, found.event_type, found.host_id) == (
        True,
        "order.placed",
        str(host(1)),
    )
    assert found.destinations[0].handlers == ("projection",)


def test_what_keeps_it_is_named(outbox: Outbox, settings: Settings) -> None:
    with relaying(settings):
        dead = publish(outbox, -1)
        refused = publish(outbox, 1, "order.odd")
        later = publish(outbox, deliver_at=LATER)
        wait_until(lambda: states(settings, later) == {"target": "deferred", "hook": "deferred"})
        wait_until(lambda: states(settings, dead) == {"target": "dead", "hook": "passed"})
        wait_until(lambda: states(settings, refused) == {"target": "passed", "hook": "dead"})
    target, hook = find(settings, dead).destinations
    assert target.reason is not None
    assert "CheckViolation" in target.reason
    assert target.reference in outbox.column(
        "select id from relay.dead_letter_queue where event_id = %s", (dead,)
    )
    assert hook == EventDestination("sink", "hook", (), "passed", reason=hook.reason)
    waiting = find(settings, later).destinations[0]
    assert waiting.until is not None
    assert waiting.until.year == 2999


def test_queues_have_it_too(outbox: Outbox, settings: Settings) -> None:
    outbox.worker.execute(
        "select relay.declare_queue('mail', '{}'), relay.declare_queue('other', null)"
    )
    with relaying(settings):
        number = publish(outbox)
        wait_until(lambda: states(settings, number).get("mail") == "enqueued")
    outbox.conn.execute("delete from outbox_message_t")
    found = find(settings, number)
    assert (found.in_outbox, found.event_type) == (False, None)
    assert [each.kind for each in found.destinations] == ["queue"]


def test_an_event_without_a_route_is_unrouted(outbox: Outbox) -> None:
    settings = outbox.settings(
        routes=[{"match": {"event_type": "else"}, "handlers": ["projection"]}], unrouted="ignore"
    )
    with relaying(settings):
        number = publish(outbox)
        wait_until(lambda: states(settings, number) == {"target": "unrouted"})


def test_mode_wal_knows_it_too(outbox: Outbox) -> None:
    settings = outbox.settings(source={**outbox.config()["source"], "mode": "wal"})
    with relaying(settings):
        number = publish(outbox)
        wait_until(lambda: states(settings, number) == {"target": "passed"})


UNKNOWN: list[str] = ["00000000-0000-4000-8000-000000000000", "no uuid", "\0"]


def test_an_event_that_nobody_knows_is_refused_in_a_line(
    outbox: Outbox, settings: Settings, subtests: pytest.Subtests
) -> None:
    for event_id in UNKNOWN:
        with (
            subtests.test(repr(event_id)),
            pytest.raises(UnknownEvent, match=r"there is no event|no NUL"),
        ):
            find(settings, event_id)


def test_the_command_the_api_and_the_page_say_the_same(
    outbox: Outbox, settings: Settings, tmp_path: Path
) -> None:
    number = publish(outbox)
    config = outbox.config_file(
        tmp_path / "relay.yaml", handlers=outbox.config()["handlers"], observe=console_of()
    )
    words = ("event", number, "--config", str(config))
    lines = relay(*words).stdout.splitlines()
    assert lines[:2] == [f"event {number}", "event type order.placed"]
    assert lines[-1].split("\t")[:4] == ["target", "-", "projection", "waiting"]
    printed = json.loads(relay(*words, "--json").stdout)
    with served(settings) as address:
        client = http_client(address, headers={"Authorization": f"Bearer {TOKEN}"})
        answer = client.get(f"/api/v1/groups/default/events/{number}")
        assert answer.json()["destinations"][0] == printed["destinations"][0]
        assert client.get("/api/v1/groups/default/events/odd").status_code == 404
        page = client.get("/groups/default/event", params={"id": number})
        assert "sink hook" in page.text
        assert "waiting" in page.text
        missing = client.get("/groups/default/event", params={"id": "odd<"})
        assert missing.status_code == 200
        assert "there is no event" in missing.text
    refused = relay("event", "odd", "--config", str(config))
    assert refused.returncode == 2
    assert "there is no event 'odd'" in refused.stderr


def test_what_caused_it_and_what_it_has_caused_are_shown(
    outbox: Outbox, settings: Settings
) -> None:
    first = publish(outbox)
    chain = [first]
    for number in range(2):
        cause = {"causation_id": chain[-1], "hop_count": number + 1}
        chain.append(publish(outbox, number, "order.shipped", metadata=cause))
    found = find(settings, chain[1])
    assert [(each.id, each.event_type) for each in found.caused_by] == [(first, "order.placed")]
    assert [(each.id, each.event_type) for each in found.caused or ()] == [
        (chain[2], "order.shipped")
    ]
    assert [each.id for each in find(settings, chain[2]).caused_by] == [chain[1], first]
    # One of another database, or that retention has removed.
    stranger = publish(outbox, metadata={"causation_id": "elsewhere"})
    (unknown,) = find(settings, stranger).caused_by
    assert (unknown.id, unknown.event_type) == ("elsewhere", None)
    itself = publish(outbox)
    outbox.conn.execute(
        "update outbox_message_t set metadata = jsonb_build_object('causation_id', id::text) where id = %s",
        (itself,),
    )
    assert find(settings, itself).caused_by == ()


def test_events_are_searched(outbox: Outbox, settings: Settings) -> None:
    numbers = [publish(outbox, number, f"order.{number % 2}") for number in range(6)]

    def searched(limit: int = 10, before: str | None = None, **wanted: Any) -> EventPage:
        return search(settings, EventSearch(**wanted), before, limit)

    assert [each.id for each in searched().rows] == numbers[::-1]
    assert [each.id for each in searched(event_type="order.1").rows] == numbers[5::-2]
    assert searched(host_id=str(host(2))).rows == []
    assert searched(host_id="none of its").rows == []
    assert len(searched(host_id=str(host(1)), aggregate_type="Order").rows) == 6
    now = outbox.value("select clock_timestamp()")
    assert len(searched(until=now).rows) == 6
    assert searched(since=now).rows == []
    page = searched(2, event_type="order.0")
    assert [each.id for each in page.rows] == [numbers[4], numbers[2]]
    assert [each.id for each in searched(2, page.next, event_type="order.0").rows] == [numbers[0]]
    with pytest.raises(ConfigurationError, match="before: 'first' is not `next`"):
        searched(before="first")


def test_a_search_that_no_index_serves_reads_a_bounded_number(
    outbox: Outbox, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_search, "SCANNED", 4)
    numbers = [
        publish(outbox, number, "order.odd" if number < 2 else "order.even") for number in range(10)
    ]
    found, before, pages = list[str](), None, 0
    while True:
        page = search(settings, EventSearch(event_type="order.odd"), before, 5)
        assert page.is_partial == (page.next is not None)
        found += [each.id for each in page.rows]
        before, pages = page.next, pages + 1
        if before is None:
            break
    assert (found, pages) == ([numbers[1], numbers[0]], 3)
    outbox.conn.execute("create index on outbox_message_t (event_type)")
    page = search(settings, EventSearch(event_type="order.odd"), None, 5)
    assert ([each.id for each in page.rows], page.next) == ([numbers[1], numbers[0]], None)


def test_the_pages_of_events_lead_from_a_search_to_the_causes(
    outbox: Outbox, settings: Settings
) -> None:
    with relaying(settings):
        dead = publish(outbox, -1, metadata={"causation_id": "<elsewhere>"})
        wait_until(lambda: states(settings, dead).get("target") == "dead")
        outbox.conn.execute(
            "insert into relay.dead_letter_actions (group_id, dead_transaction, letters, action, reason)"
            " select group_id, dead_transaction, array[id], 'replay', 'mended' from relay.dead_letter_queue"
        )
    with served(settings) as address:
        client = http_client(address, headers={"Authorization": f"Bearer {TOKEN}"})
        rows = client.get("/api/v1/groups/default/events", params={"host": str(host(1))}).json()
        assert [each["id"] for each in rows["rows"]] == [dead]
        answer = client.get("/api/v1/groups/default/events", params={"before": "odd"})
        assert answer.status_code == 409
        one = client.get(f"/api/v1/groups/default/events/{dead}").json()
        assert one["caused_by"][0]["id"] == "<elsewhere>"
        assert [each["reason"] for each in one["actions"]] == ["mended"]
        page = client.get("/groups/default/events", params={"event_type": "order.placed"}).text
        assert f"/groups/default/event?id={dead}" in page
        assert "Nothing matches" in client.get("/groups/default/events", params={"host": "x"}).text
        page = client.get("/groups/default/event", params={"id": dead}).text
        assert "&lt;elsewhere&gt;" in page
        assert "mended" in page
