"""Where is my event? What those who asked that of other systems were told wrongly."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from relay.admin import offsets, sinks
from relay.admin.events import UnknownEvent, find
from relay.config.settings import Settings
from relay.store import deferred
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.webhook import Answer, Webhook

LATER = "2999-01-01T00:00:00+00:00"
_INSERT = """
    insert into outbox_message_t (id, host_id, aggregate_type, aggregate_id, event_type, payload, transaction_id,
                                  transaction_ordinal, transaction_count, deliver_at, user_id)
    values (%s, %s, 'Order', '1', 'order.placed', '{"amount": 1}', %s, 1, 1, %s, %s)
"""


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook(lambda _headers, _body: Answer()) as found:
        yield found


@pytest.fixture
def settings(outbox: Outbox, webhook: Webhook) -> Settings:
    """All events go to the projection and to a sink."""
    handlers = outbox.config()["handlers"] | {"hook": {"type": "http", "url": webhook.url}}
    found = outbox.settings(handlers=handlers, routes=[{"handlers": ["projection", "hook"]}])
    outbox.install_again(found)
    return found


def publish(outbox: Outbox, **more: Any) -> str:
    """Publish one event; returns its id."""
    transaction = outbox.publish(host(1), event(**more))
    return str(
        outbox.value("select id from outbox_message_t where transaction_id = %s", (transaction,))
    )


def states(settings: Settings, event_id: str) -> dict[str, str]:
    """The state of an event at each destination."""
    return {each.name or each.kind: each.state for each in find(settings, event_id).destinations}


def test_an_unknown_id_is_not_waiting(outbox: Outbox, settings: Settings) -> None:
    """A state that means both "waits" and "nobody knows it" told nobody whether to wait.

    https://github.com/celery/celery/issues/4450
    https://github.com/celery/celery/issues/3596
    """
    with pytest.raises(UnknownEvent):
        find(settings, str(uuid.uuid4()))
    assert states(settings, publish(outbox)) == {"target": "waiting", "hook": "waiting"}


def test_each_destination_has_a_state_before_and_after_its_first_attempt(
    outbox: Outbox, settings: Settings
) -> None:
    """The status of an event was never set, or was that of one of its destinations.

    https://github.com/hookdeck/outpost/issues/689
    https://github.com/hookdeck/outpost/issues/711
    https://github.com/frain-dev/convoy/pull/503
    """
    waits = publish(outbox)
    assert states(settings, waits) == {"target": "waiting", "hook": "waiting"}
    with relaying(settings):
        wait_until(lambda: states(settings, waits) == {"target": "passed", "hook": "passed"})
        later = publish(outbox, deliver_at=LATER)
        wait_until(lambda: states(settings, later) == {"target": "deferred", "hook": "deferred"})
        outbox.conn.execute("update relay.deferred set retry_at = now() where sink = ''")
        wait_until(lambda: states(settings, later) == {"target": "passed", "hook": "deferred"})


def test_an_event_that_was_passed_over_is_not_called_delivered_or_applied(
    outbox: Outbox, settings: Settings, webhook: Webhook
) -> None:
    """What a position has passed was `delivered` and `applied`, also after a seek that had left it out."""
    with relaying(settings):
        outbox.wait_handled()
    number = publish(outbox)
    sinks.seek(settings, "hook", "not wanted", to="end")
    offsets.seek(settings, offsets.plan_seek(settings, "end", None), None)
    found = {each.kind: each for each in find(settings, number).destinations}
    assert found["sink"].state == "skipped"
    assert (found["sink"].reason or "").startswith("sink seek by ")
    assert (found["sink"].reason or "").endswith(": not wanted")
    assert found["target"].state == "passed"
    assert found["target"].reason == (
        "applied, unless a handler dropped it, or the group began after it or was moved past it"
    )
    assert not webhook.requests


@pytest.mark.parametrize("indexed", [True, False], ids=["its id is stored", "its rows are read"])
def test_the_state_is_that_of_the_event_and_not_of_its_neighbour(
    outbox: Outbox, settings: Settings, indexed: bool
) -> None:
    """The state was read from the wrong row: one that is deferred was told of another between its offsets.

    https://github.com/juspay/hyperswitch/pull/13197
    """
    ids = [str(uuid.uuid4()) for _ in range(3)]
    together = uuid.uuid4()
    with relaying(settings):
        with psycopg.connect(outbox.publisher_dsn) as conn:
            conn.execute(_INSERT, (ids[0], host(1), together, LATER, host(9)))
            # Between the offsets of the others, in a commit of its own, and without a transaction id.
            outbox.conn.execute(_INSERT, (ids[1], host(2), None, None, host(9)))
            conn.execute(_INSERT, (ids[2], host(1), together, LATER, host(9)))
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") >= 2)
        if not indexed:
            outbox.conn.execute("update relay.deferred set event_ids = null")
        done = {"target": "passed", "hook": "passed"}
        wait_until(lambda: states(settings, ids[1]) == done)
        for each in (ids[0], ids[2]):
            assert states(settings, each) == {"target": "deferred", "hook": "deferred"}


def test_events_of_a_transaction_in_portions_are_found(
    outbox: Outbox, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that did not fit into a page of the listing were found nowhere.

    https://github.com/alteryx/evalml/issues/1372
    """
    monkeypatch.setattr(deferred, "_PORTION_EVENTS", 2)
    with relaying(settings):
        transaction = outbox.publish(host(1), *(event(n, deliver_at=LATER) for n in range(5)))
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 2)
        assert outbox.column("select distinct event_ids from relay.deferred") == [None]
        ids = outbox.column(
            "select id::text from outbox_message_t where transaction_id = %s", (transaction,)
        )
        for each in ids:
            assert states(settings, each) == {"target": "deferred", "hook": "deferred"}
