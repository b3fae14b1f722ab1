"""Events of several versions reach handlers and sinks in the current one; what does not is a dead letter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relay.admin.check import examine
from relay.spark.session import Session
from tests.event_types import EVENTS
from tests.outbox import APPEND, Outbox, event, host, relaying, wait_until
from tests.process import relay, running
from tests.webhook import Webhook

SEEN = "create table seen (seq bigserial, id uuid, payload jsonb, metadata jsonb, model text)"
PYTHON = {"type": "python", "callable": "tests.event_types:record"}


def overrides(events: Any = EVENTS, **handlers: Any) -> dict[str, Any]:
    """A configuration with event types, and handlers that get every event."""
    return {"events": events, "handlers": handlers, "routes": [{"handlers": list(handlers)}]}


def versions(outbox: Outbox) -> None:
    """Publish an event of each version, and one of a type that is not known."""
    outbox.publish(host(1), event(1))
    outbox.publish(
        host(1),
        event(2, payload={"amount": 2, "currency": "SEK"}, metadata={"version": 2, "trace": "x"}),
        event(
            3,
            payload={"amount": 3, "currency": "DKK", "items": [{"price": 1}]},
            metadata={"version": "3"},
        ),
    )
    outbox.publish(host(1), event(4, "order.shipped"))


@pytest.mark.parametrize("events", [EVENTS, "tests.event_types:registry"])
def test_a_python_handler_gets_the_current_version(
    outbox: Outbox, engine: str, session: Session | None, events: Any
) -> None:
    outbox.conn.execute(SEEN)
    versions(outbox)
    published = outbox.column("select payload from outbox_message_t order by c_offset")
    outbox.drain(outbox.settings(engine, **overrides(events, python=PYTHON)), session)
    assert outbox.conn.execute(
        "select payload, metadata, model from seen order by seq"
    ).fetchall() == [
        (
            {"amount": 1, "currency": "EUR", "items": [{"price": 1}]},
            {"version": 3},
            "OrderPlaced 1",
        ),
        (
            {"amount": 2, "currency": "SEK", "items": [{"price": 2}]},
            {"version": 3, "trace": "x"},
            "OrderPlaced 2",
        ),
        (
            {"amount": 3, "currency": "DKK", "items": [{"price": 1}]},
            {"version": "3"},
            "OrderPlaced 1",
        ),
        ({"amount": 4}, None, None),
    ]
    assert published == outbox.column("select payload from outbox_message_t order by c_offset")


ITEMS = """
    insert into seen (id, payload) values (%(id)s, jsonb_build_object(
        'price', %(payload)s->'items'->0->'price', 'version', %(metadata)s->'version'))
"""
ITEMS_BATCH = """
    insert into seen (id, payload)
    select id, jsonb_build_object('price', payload->'items'->0->'price', 'version', metadata->'version') from batch
"""


@pytest.mark.parametrize(
    "handler",
    [
        {"type": "sql", "statement": ITEMS},
        {"type": "sql", "each": "batch", "statement": ITEMS_BATCH},
    ],
    ids=["event", "batch"],
)
@pytest.mark.parametrize("count", [2, 80])
def test_a_statement_gets_the_current_version(
    outbox: Outbox, handler: dict[str, Any], count: int
) -> None:
    outbox.conn.execute(SEEN)
    for number in range(count):
        outbox.publish(host(1), event(number), event(number, "order.shipped"))
    outbox.drain(outbox.settings(**overrides(sql=handler)))
    found = outbox.conn.execute(
        "select payload->'price', payload->'version' from seen order by seq"
    )
    expected = [[(number, 3), (None, None)] for number in range(count)]
    assert found.fetchall() == [row for rows in expected for row in rows]


def test_a_large_transaction_is_upcast_from_its_file(outbox: Outbox) -> None:
    outbox.conn.execute(SEEN)
    outbox.publish(host(1), *(event(number) for number in range(200)))
    handlers = {"python": PYTHON, "projection": {"type": "sql", "statement": APPEND}}
    outbox.drain(outbox.settings(batch={"max_bytes": 1024}, **overrides(**handlers)))
    assert (
        outbox.value(
            "select count(*) from seen where payload->'items'->0->'price' = payload->'amount'"
        )
        == 200
    )
    outbox.assert_exact()


def test_a_sink_delivers_the_current_version(outbox: Outbox) -> None:
    # What a float cannot repeat passes through all upcasters as it was published.
    exact = "0.10000000000000000000000000001"
    with Webhook() as webhook:
        settings = outbox.settings(**overrides(hook={"type": "http", "url": webhook.url}))
        given = json.dumps([event("AMOUNT")]).replace('"AMOUNT"', exact)
        outbox.conn.execute("select relay.publish(%s, %s, %s::jsonb)", (host(1), host(999), given))
        outbox.publish(host(1), event(2, "order.shipped"))
        with relaying(settings):
            outbox.wait_delivered("hook")
        first, second = webhook.requests
    assert (
        f'"amount": {exact}, "currency": "EUR", "items": [{{"price": {exact}}}]'.encode()
        in first.body
    )
    assert second.event["data"]["amount"] == 2


INVALID: list[tuple[dict[str, Any], str]] = [
    (
        {
            "payload": {"amount": "SECRET", "currency": "EUR", "items": [{"price": "SECRET"}]},
            "metadata": {"version": 3},
        },
        "payload.amount: Input should be a valid decimal; payload.items.0.price: Input should be a valid decimal",
    ),
    (
        {"payload": {"amount": 1}, "metadata": {"version": 3}},
        "payload.currency: Field required; payload.items: Field required",
    ),
    ({"metadata": {"version": 471147}}, "metadata.version: an unknown version; known are 1 to 3"),
    (
        {"metadata": {"version": "SECRET"}},
        "metadata.version: is not a version, a whole number from 1",
    ),
    (
        {"payload": {"SECRET": 1}, "metadata": {"version": 2}},
        "upcast.2 (tests.event_types:v2_to_v3): raised KeyError",
    ),
]


def test_what_is_not_valid_is_a_dead_letter_that_names_the_field(
    outbox: Outbox, tmp_path: Path
) -> None:
    with Webhook() as webhook:
        handlers = {
            "projection": {"type": "sql", "statement": APPEND},
            "hook": {"type": "http", "url": webhook.url},
        }
        config = outbox.config_file(tmp_path / "relay.yaml", **overrides(**handlers))
        for given, _ in INVALID:
            # The valid event before it is not delivered either.
            outbox.publish(host(1), event(7), event(1, **given))
        outbox.publish(host(1), event(8))
        with running(config) as process:
            outbox.wait_handled()
            wait_until(
                lambda: (
                    outbox.value("select count(*) from relay.dead_letter_queue") == 4 * len(INVALID)
                )
            )
            outbox.wait_delivered("hook")
            log = json.dumps(process.lines())
        assert [request.event["data"]["amount"] for request in webhook.requests] == [8]
    outbox.assert_exact()
    for sink in ("", "hook"):
        found = outbox.column(
            "select exception from relay.dead_letter_queue where sink = %s order by event_id, c_offset",
            (sink,),
        )
        for _, words in INVALID:
            assert sum(words in exception for exception in found) == 2, words
        assert not any("SECRET" in exception for exception in found)
    assert all(words in log for _, words in INVALID)
    assert "SECRET" not in log
    assert "471147" not in log
    payloads = outbox.column("select payload from relay.dead_letter_queue")
    assert {"amount": 7} in payloads  # as published


def test_a_replay_after_the_registry_was_mended_applies_what_was_published(
    outbox: Outbox, tmp_path: Path
) -> None:
    with Webhook() as webhook:
        handlers = {
            "projection": {"type": "sql", "statement": APPEND},
            "hook": {"type": "http", "url": webhook.url},
        }
        broken = {
            "order.placed": {"version": 2, "upcast": {1: "tests.event_types:need_environment"}}
        }
        config = outbox.config_file(tmp_path / "relay.yaml", **overrides(broken, **handlers))
        outbox.publish(host(1), event(5))
        dead = "select count(*) from relay.dead_letter_queue where status = 'dead'"
        with running(config):
            wait_until(lambda: outbox.value(dead) == 2)
        exceptions = outbox.column("select exception from relay.dead_letter_queue")
        assert all("need_environment): raised KeyError" in text for text in exceptions)
        assert all("in need_environment" in text for text in exceptions)
        with running(config, FACTOR="3"):
            relay("dlq", "replay", "--config", str(config), "--all", "--yes")
            wait_until(lambda: outbox.value("select count(*) from projection") == 1)
            wait_until(lambda: len(webhook.requests) == 1)
        assert webhook.requests[0].event["data"] == {"amount": 15}
    assert outbox.column("select amount from projection") == [15]
    assert outbox.column("select payload from relay.dead_letter_queue") == [{"amount": 5}] * 2


def test_a_transient_fault_of_an_upcaster_defers_the_transaction(
    outbox: Outbox, tmp_path: Path
) -> None:
    outbox.conn.execute(SEEN)
    events = {"file.named": {"upcast": {1: "tests.event_types:need_file"}}}
    quick = {"wait": 0.1, "jitter": 0, "max_wait": 0.2}
    with Webhook() as webhook:
        settings = outbox.settings(
            **overrides(
                events,
                python={**PYTHON, "retry": quick},
                hook={"type": "http", "url": webhook.url, "retry": quick},
            )
        )
        file = tmp_path / "there"
        outbox.publish(host(1), event(1, "file.named", payload={"file": str(file)}))
        outbox.publish(host(2), event(2))
        with relaying(settings):
            wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 2)
            wait_until(lambda: outbox.value("select count(*) from seen") == 1)
            file.touch()
            wait_until(lambda: outbox.value("select count(*) from seen") == 2)
            outbox.wait_delivered("hook")
        assert len(webhook.requests) == 2
    assert not outbox.column("select 1 from relay.dead_letter_queue")


def check(outbox: Outbox, events: Any) -> list[str]:
    """What `relay check` says of event types."""
    found = examine(outbox.settings(events=events))
    return [line for each in found if each.subject == "events" for line in each.text.splitlines()]


def test_check_examines_the_event_types(outbox: Outbox) -> None:
    assert check(outbox, EVENTS) == ["their models and upcasters can be imported"]
    assert check(outbox, "tests.event_types:registry") == [
        "their models and upcasters can be imported"
    ]
    assert check(outbox, {}) == []
    upcaster = "tests.event_types:v1_to_v2"
    wrong = {
        "a": {"version": 4, "upcast": {1: upcaster, 3: upcaster}},
        "b": {"version": 2, "upcast": {2: upcaster}},
        "c": {"model": upcaster},
        "d": {"model": "tests.event_types:Missing"},
        "e": {"upcast": {1: "tests.nowhere:f"}},
    }
    said = sorted(check(outbox, wrong))
    for line, words in zip(
        said,
        [
            "events.a.upcast: no upcaster leads from version 2 to 3: add one from 2",
            "events.b.upcast.2: cannot lead to the current version 2: set version to 3",
            "events.c.model: is not a pydantic model",
            "events.d.model: 'tests.event_types' has no 'Missing'",
            "events.e.upcast.1: importing 'tests.nowhere' failed: ModuleNotFoundError",
        ],
        strict=True,
    ):
        assert line.startswith(words)
    assert check(outbox, "tests.event_types:EVENTS") == [
        "events: 'tests.event_types:EVENTS' is not a registry: name an object of relay.EventTypes"
    ]


def test_relay_does_not_start_with_event_types_that_are_not_there(
    outbox: Outbox, tmp_path: Path
) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml", events="tests.nowhere:registry")
    result = relay("run", "--config", str(config))
    assert result.returncode == 2
    assert "relay: events: importing 'tests.nowhere' failed" in result.stderr


def test_a_transient_fault_of_an_upcaster_is_retried_for_a_statement(
    outbox: Outbox, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events = {"file.named": {"upcast": {1: "tests.event_types:need_file"}}}
    file = tmp_path / "there"
    named = event(1, "file.named", payload={"file": str(file), "amount": 1})
    outbox.publish(host(1), named)
    outbox.publish(host(1), event(2))
    projection = {"type": "sql", "statement": APPEND}
    with relaying(outbox.settings(**overrides(events, projection=projection))):
        wait_until(lambda: any("RetryLater" in str(vars(each)) for each in caplog.records))
        assert not outbox.column("select 1 from projection")
        file.touch()
        outbox.wait_handled()
    outbox.assert_exact()
    assert not outbox.column("select 1 from relay.dead_letter_queue")


def test_both_engines_refuse_the_same(outbox: Outbox, engine: str, session: Session | None) -> None:
    for given, _ in INVALID:
        outbox.publish(host(1), event(7), event(1, **given))
    outbox.publish(host(2), event(8))
    projection = {"type": "sql", "statement": APPEND}
    outbox.drain(outbox.settings(engine, **overrides(projection=projection)), session)
    assert outbox.column("select amount from projection") == [8]
    outbox.assert_exact()
    found = outbox.column("select exception from relay.dead_letter_queue order by c_offset")
    assert len(found) == 2 * len(INVALID)
    assert all(words in text for (_, words), text in zip(INVALID, found[::2], strict=True))
