"""The order of each key, over a change of `order_by` while transactions are deferred, and over a stop."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from relay.admin.check import examine
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.service import Service
from tests.outbox import APPEND, Outbox, event, host, relaying, wait_until
from tests.webhook import Answer, Webhook

RETRY = {"wait": 0.2, "max_wait": 0.2, "jitter": 0, "defer_after": 0}


def posting(outbox: Outbox, webhook: Webhook, **more: Any) -> Settings:
    hook = {
        "type": "http",
        "url": webhook.url,
        "retry": RETRY,
        "circuit_breaker": None,
        "concurrency": 1,
        **more,
    }
    return outbox.settings(handlers={"hook": hook}, routes=[{"handlers": ["hook"]}])


def amounts(webhook: Webhook) -> list[int]:
    """The amounts of the accepted events, in order."""
    return [request.event["data"]["amount"] for request in webhook.accepted]


def refusing(is_refused: Callable[[int], bool], status: int = 503) -> Callable[..., Answer]:
    def answers(headers: dict[str, str], body: bytes) -> Answer:
        return Answer(status if is_refused(json.loads(body)["data"]["amount"]) else 204)

    return answers


def publish(outbox: Outbox, amount: int, aggregate: str = "1") -> None:
    outbox.publish(host(1), event(amount, aggregate_id=aggregate))


def deferred(outbox: Outbox) -> int:
    return int(outbox.value("select count(*) from relay.deferred"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("aggregate", "host"),
        pytest.param("none", "host", marks=pytest.mark.rare),
        ("host", "aggregate"),
    ],
)
def test_deferred_events_stay_before_later_ones(outbox: Outbox, before: str, after: str) -> None:
    with Webhook(refusing(lambda amount: True)) as webhook:
        with relaying(posting(outbox, webhook, order_by=before)):
            for amount in (1, 2):
                publish(outbox, amount)
            wait_until(lambda: deferred(outbox) == 2)
        webhook.answers = refusing(lambda amount: amount == 1 and len(webhook.requests) < refused)
        refused = len(webhook.requests) + 4
        with relaying(posting(outbox, webhook, order_by=after)):
            publish(outbox, 3)
            outbox.wait_delivered("hook")
        assert amounts(webhook) == [1, 2, 3]
    assert not outbox.column("select * from relay.deferred_keys")


def test_a_coarser_key_blocks_other_aggregates(outbox: Outbox) -> None:
    with Webhook(refusing(lambda amount: amount == 1)) as webhook:
        with relaying(posting(outbox, webhook, order_by="aggregate")):
            publish(outbox, 1, "a")
            wait_until(lambda: deferred(outbox) == 1)
        with relaying(posting(outbox, webhook, order_by="host")):
            publish(outbox, 2, "b")
            publish(outbox, 3, "c")
            wait_until(lambda: deferred(outbox) == 3)
            webhook.answers = refusing(lambda amount: False)
            outbox.wait_delivered("hook")
        assert amounts(webhook) == [1, 2, 3]


def test_a_dead_transaction_that_holds_its_key_holds_the_new_one(outbox: Outbox) -> None:
    with Webhook(refusing(lambda amount: amount == 1, 422)) as webhook:
        more = {"on_exhausted": "block_key"}
        with relaying(posting(outbox, webhook, order_by="aggregate", **more)):
            publish(outbox, 1)
            publish(outbox, 2)
            wait_until(lambda: deferred(outbox) == 2)
        with relaying(posting(outbox, webhook, order_by="host", **more)):
            publish(outbox, 3)
            wait_until(lambda: deferred(outbox) == 3)
        assert amounts(webhook) == []


def test_a_scheduled_event_gets_the_new_key_and_keeps_its_time(outbox: Outbox) -> None:
    at = outbox.value("select now() + interval '1 hour'")
    with Webhook() as webhook:
        with relaying(posting(outbox, webhook, order_by="aggregate")):
            outbox.publish(host(1), event(1, deliver_at=at.isoformat()))
            wait_until(lambda: deferred(outbox) == 1)
        with relaying(posting(outbox, webhook, order_by="host")):
            publish(outbox, 2)
            outbox_at = outbox.value("select retry_at from relay.deferred")
            wait_until(lambda: amounts(webhook) == [2])
        assert outbox_at == at
        assert outbox.column("select keys from relay.deferred") == [[f"{host(1)} host"]]
        assert not outbox.column("select * from relay.deferred_keys")


def test_the_target_s_deferred_transactions_get_new_keys(outbox: Outbox) -> None:
    python = {"type": "python", "callable": "tests.callables:unless_busy", "retry": RETRY}
    projection = {"type": "sql", "statement": APPEND}

    def settings(order_by: str) -> Settings:
        return outbox.settings(
            handlers={
                "python": {**python, "order_by": order_by},
                "projection": {**projection, "order_by": order_by},
            },
            routes=[
                {"match": {"event_type": "later"}, "handlers": ["python"]},
                {"handlers": ["projection"]},
            ],
        )

    outbox.conn.execute("create table busy as select 1 as amount")
    with relaying(settings("aggregate")):
        outbox.publish(host(1), event(1, "later", aggregate_id="a"))
        wait_until(lambda: deferred(outbox) == 1)
    with relaying(settings("host")):
        outbox.publish(host(1), event(2, aggregate_id="b"))
        wait_until(lambda: deferred(outbox) == 2)
    assert not outbox.column("select * from projection")


def test_instances_with_different_order_do_not_run_together(outbox: Outbox) -> None:
    with Webhook() as webhook, relaying(posting(outbox, webhook, order_by="aggregate")):
        publish(outbox, 1)
        outbox.wait_delivered("hook")
        other = Service(posting(outbox, webhook, order_by="host"), accept_configuration=True)
        with pytest.raises(
            ConfigurationError, match=r"handlers\.hook\.order_by: .* stop the others"
        ):
            other.run()
        (advice,) = (
            each.text
            for each in examine(posting(outbox, webhook, order_by="host"))
            if each.subject == "configuration"
        )
        assert advice.startswith("handlers.hook.order_by: has changed, and an instance")
        assert "stop the others first; --accept-configuration cannot replace it" in advice


@pytest.mark.parametrize("mode", ["auto", "wal"])
def test_a_stop_lets_nothing_overtake_what_was_queued_before(outbox: Outbox, mode: str) -> None:
    """Of the second commit one host is done and the other one waits for the first commit, which hangs."""
    source = {**outbox.config()["source"], "mode": mode}
    with Webhook() as webhook:
        webhook.answers = lambda headers, body: Answer(
            after=60 if json.loads(body)["data"]["amount"] == 1 else 0
        )
        hook = {"type": "http", "url": webhook.url, "concurrency": 4}
        settings = outbox.settings(
            source=source,
            handlers={"hook": hook},
            routes=[{"handlers": ["hook"]}],
            sinks={"attach_seconds": 60},
            shutdown_timeout=1,
        )
        outbox.install_again(settings)
        with relaying(settings):
            outbox.publish(host(1), event(1))
            with outbox.conn.transaction():
                outbox.publish(host(1), event(2))
                outbox.publish(host(2), event(3))
            wait_until(lambda: amounts(webhook) == [3])
        webhook.answers = lambda headers, body: Answer()
        with relaying(settings):
            wait_until(lambda: len(amounts(webhook)) >= 3)
        assert amounts(webhook) == [3, 1, 2]


@pytest.mark.parametrize("odd", ["a\x1fb", "a\nb"], ids=["separator", "before it"])
def test_a_key_may_have_characters_that_come_before_a_blank(outbox: Outbox, odd: str) -> None:
    """An aggregate_id with U+001F was taken for another one at an endpoint; each ended relay once it was deferred."""
    outbox.worker.execute("select relay.declare_queue('mail', '{}', 'aggregate')")
    outbox.worker.execute(
        "select relay.enqueue('mail', '{}', host_id => %s, key => %s)",
        (str(host(1)), f"Order {odd}"),
    )
    with Webhook(refusing(lambda amount: amount == 1)) as webhook:
        with relaying(posting(outbox, webhook, order_by="aggregate")):
            publish(outbox, 1, odd)
            wait_until(lambda: deferred(outbox) == 1)
            publish(outbox, 2, "a")
            wait_until(lambda: amounts(webhook) == [2])
            publish(outbox, 3, odd)
            wait_until(lambda: deferred(outbox) == 2)
            webhook.answers = refusing(lambda amount: False)
            outbox.wait_delivered("hook")
        assert amounts(webhook) == [2, 1, 3]
    # What is enqueued has the key that an event has.
    keys = outbox.column("select key from relay.queue_messages order by id")
    assert [keys.index(key) for key in keys] == [0, 0, 2, 0]
