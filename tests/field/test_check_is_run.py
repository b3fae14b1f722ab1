"""What `relay check` passes, `relay run` can do: what would fail later is found by both."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from relay.admin.check import examine, require
from relay.config.handlers import HandlerSettings
from relay.config.imports import load
from relay.config.settings import Route
from relay.config.templates import Template
from relay.faults import ConfigurationError, Rejected
from relay.handlers.messages import Message, Publishing
from relay.pipeline.route_rules import shadowed
from tests.outbox import Outbox
from tests.pgbouncer import pooled
from tests.sinks import make_event, transaction
from tests.webhook import Webhook


def one(event: Any) -> None:
    """Takes one argument."""


def many(*arguments: Any, **options: Any) -> None:
    """Takes all."""


def test_a_callable_that_cannot_be_called_as_relay_does(outbox: Outbox) -> None:
    """`run` requires what `check` finds."""
    handlers = {"projection": {"type": "python", "callable": "tests.field.test_check_is_run:one"}}
    with pytest.raises(ConfigurationError, match=r"relay calls it with \(transaction, cursor\)"):
        require(outbox.settings(handlers=handlers))


@pytest.mark.parametrize("path", ["tests.field.test_check_is_run:many", "builtins:print"])
def test_callables_that_take_more_are_called(path: str) -> None:
    assert callable(load("handlers.x.callable", path, "transaction", "cursor"))


def route(match: dict[str, Any], goes_on: bool = False) -> Route:
    """A route to one handler."""
    return Route(match=match, handlers=["projection"], **{"continue": goes_on})


@pytest.mark.parametrize(
    ("earlier", "later", "covered"),
    [
        ({}, {"event_type": "a"}, True),
        ({"event_type": "order.*"}, {"event_type": ["order.placed", "order.paid"]}, True),
        ({"event_type": "order.*"}, {"event_type": ["order.placed", "paid"]}, False),
        ({"event_type": "a"}, {"event_type": "a", "aggregate_type": "Order"}, True),
        ({"event_type": "a", "aggregate_type": "Order"}, {"event_type": "a"}, False),
        ({"event_type": "o*"}, {"event_type": "order.*"}, False),
        ({"payload.amount": 1}, {"payload.amount": 1}, True),
        ({"payload.amount": 1}, {"payload.amount": True}, False),
    ],
)
def test_a_route_that_never_applies(
    earlier: dict[str, Any], later: dict[str, Any], covered: bool
) -> None:
    assert list(shadowed([route(earlier), route(later)])) == ([(1, 0)] if covered else [])
    assert not list(shadowed([route(earlier, goes_on=True), route(later)]))


def test_a_route_that_never_applies_is_an_error_of_check_and_run(outbox: Outbox) -> None:
    routes = [
        {"handlers": ["projection"]},
        {"match": {"event_type": "a"}, "handlers": ["projection"]},
    ]
    with pytest.raises(ConfigurationError, match=r"routes.1: never applies, since routes.0"):
        require(outbox.settings(routes=routes))


def test_a_name_that_is_none_has_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"did you mean aggregate_type\?"):
        Template("shop.{agregate_type}")
    with pytest.raises(ValueError, match=r"did you mean payload.customer\?"):
        Template("{paylod.customer}")
    with pytest.raises(ValidationError, match=r"did you mean event_type\?"):
        route({"event_typ": "a"})


SERVERS: dict[str, dict[str, Any]] = {
    "nats": {"servers": ["nats://127.0.0.1"]},
    "rabbitmq": {"url": "amqp://127.0.0.1", "exchange": ""},
    "kafka": {"bootstrap": ["127.0.0.1:9092"]},
}


class Recording:
    """A broker that takes everything."""

    def __init__(self) -> None:
        self.topics: list[str] = []

    async def send(self, messages: Sequence[Message]) -> None:
        self.topics += [each.topic for each in messages]

    async def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize(
    ("kind", "topic"),
    [
        ("nats", "$JS.API.STREAM.DELETE.ORDERS"),
        ("nats", "_INBOX.x"),
        ("rabbitmq", "amq.gen-x"),
        ("kafka", "__consumer_offsets"),
    ],
)
def test_a_publisher_does_not_reach_what_controls_the_broker(kind: str, topic: str) -> None:
    broker = Recording()

    def send(template: str) -> None:
        settings: Any = TypeAdapter(HandlerSettings).validate_python(
            {"type": kind, **SERVERS[kind], "topic": template}
        )
        sink = Publishing("x", settings, broker)
        asyncio.run(sink.deliver(transaction(make_event(1, event_type=topic))))

    with pytest.raises(Rejected, match="control the broker"):
        send("{event_type}")
    send("shop.{event_type}")
    assert broker.topics == [f"shop.{topic}"]


def test_a_sink_behind_a_pooler_in_transaction_mode_is_named(outbox: Outbox) -> None:
    """The lock of a claim stays in the pooler's session: the next instance never claims the sink."""
    with Webhook() as webhook, pooled(outbox.dsn) as dsn:
        settings = outbox.settings(
            target={"dsn": dsn},
            handlers={"hook": {"type": "http", "url": webhook.url}},
            routes=[{"handlers": ["hook"]}],
        )
        found = [each.text for each in examine(settings) if each.subject == "pooler"]
        assert len(found) == 1
        assert "session mode" in found[0]
        direct = settings.model_copy(update={"target": outbox.settings().target})
        assert "pooler" not in [each.subject for each in examine(direct)]
