"""What became of a delivery, and that it is made again: what others could not say, recorded wrongly, or sent twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

from relay import Delivery
from relay.admin import resend
from relay.admin.events import find
from relay.admin.retention import erase
from relay.cli.app import app
from relay.config.handlers import NatsHandler
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.model.events import EVENT_FIELDS, Commit, Event, Lsn, Transaction
from relay.model.headers import RESEND
from relay.sinks.brokers import Message, Publishing
from relay.source.outbox.search import EventSearch
from relay.store import actions
from tests.console import Program, Visitor, console_of, served
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.webhook import Answer, Request, Webhook

_AT_ONCE = {"wait": 0.05, "max_wait": 0.05, "jitter": 0, "defer_after": 0}


@contextmanager
def hooked(
    outbox: Outbox,
    answer: Callable[[dict[str, str], bytes], Answer] = lambda _headers, _body: Answer(),
    **more: Any,
) -> Iterator[tuple[Settings, Webhook]]:
    """A webhook that gets all events, and the configuration."""
    with Webhook(answer) as webhook:
        hook = {"type": "http", "url": webhook.url, "retry": _AT_ONCE, **more}
        settings = outbox.settings(handlers={"hook": hook}, routes=[{"handlers": ["hook"]}])
        outbox.install_again(settings)
        yield settings, webhook


def publish(outbox: Outbox, number: int = 1, event_type: str = "order.placed", **more: Any) -> str:
    """Publish one event; returns its id."""
    transaction = outbox.publish(host(number), event(event_type=event_type, **more))
    return str(
        outbox.value("select id from outbox_message_t where transaction_id = %s", (transaction,))
    )


def send_again(settings: Settings, *ids: str, **search: Any) -> int:
    """Resend events by their ids or a search; returns in how many deliveries."""
    planned = resend.plan(settings, "hook", ids, EventSearch(**search))
    return resend.resend(settings, planned, "asked for").deliveries


def of(webhook: Webhook, number: str) -> list[Request]:
    """The requests with an event."""
    return [each for each in webhook.requests if each.event["id"] == number]


def test_what_was_delivered_is_delivered_once_more_and_says_so(outbox: Outbox) -> None:
    """A retry by hand was not recorded as an attempt; nobody knew whether what had succeeded may be sent again, or for
    what a delivery was a repetition; a receiver could not tell it from the first one, or was sent another id.

    https://github.com/hookdeck/outpost/issues/310
    https://github.com/hookdeck/outpost/issues/144
    https://github.com/BBMRI-ERIC/negotiator/pull/1128
    https://github.com/deskhq/the-desk/pull/1065
    https://github.com/namuh-eng/opensend/pull/377
    https://github.com/documenso/documenso/issues/3204
    https://github.com/huggingface/hub-docs/pull/2749
    """
    with hooked(outbox) as (settings, webhook), relaying(settings):
        number = publish(outbox)
        outbox.wait_delivered("hook")
        assert send_again(settings, number) == 1
        wait_until(lambda: len(of(webhook, number)) == 2)
        wait_until(lambda: len(find(settings, number).attempts) == 1)
        first, second = of(webhook, number)
        found = find(settings, number)
        (action,) = actions.recent(outbox.conn, settings.group, 10, "hook")
    assert "relayresend" not in first.event
    assert int(second.event["relayresend"]) > 0
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]
    assert {**first.event, "relayresend": second.event["relayresend"]} == second.event
    (attempt,) = found.attempts
    assert (attempt.outcome, attempt.resent_by) == ("delivered", action.acted_by)
    assert (action.action, action.reason) == ("sink resend", "asked for")
    assert [each.state for each in found.destinations] == ["delivered"]


def test_an_event_that_was_never_for_a_sink_can_be_sent_to_it(outbox: Outbox) -> None:
    """Only what had a delivery could be retried: an endpoint got nothing that was published before it.

    https://github.com/frain-dev/convoy/issues/660
    https://github.com/frain-dev/convoy/issues/1213
    https://github.com/svix/svix-webhooks/pull/663
    https://github.com/TrustHire/hiresettle-backend/issues/274
    """
    before = outbox.settings()
    outbox.install_again(before)
    with relaying(before):
        old = [publish(outbox, 1), publish(outbox, 2), publish(outbox, 1)]
        other = publish(outbox, 1, "order.noted")
        outbox.wait_handled()
    with hooked(outbox) as (settings, webhook), relaying(settings):
        new = publish(outbox)
        outbox.wait_delivered("hook")
        assert set(webhook.ids()) == {new}
        assert send_again(settings, event_type="order.placed", host_id=str(host(1))) == 3
        wait_until(lambda: len(webhook.requests) == 4)
        # In the order of publishing, which is that of their key.
        assert [each.event["id"] for each in webhook.requests[1:]] == [old[0], old[2], new]
        assert find(settings, other).destinations[0].state == "before"
        assert not of(webhook, old[1])


def test_a_resend_waits_for_what_is_retried_and_later_events_wait_for_it(outbox: Outbox) -> None:
    """What a retry by hand means for one that is scheduled, and for the order, was not said.

    https://github.com/hookdeck/outpost/issues/144
    https://github.com/webhookx-io/webhookx/issues/15
    """
    is_down = [False]
    with hooked(
        outbox,
        lambda _headers, _body: Answer(503 if is_down[0] else 204),
        circuit_breaker=None,
    ) as (settings, webhook):
        with relaying(settings):
            first = publish(outbox)
            outbox.wait_delivered("hook")
            is_down[0] = True
            second = publish(outbox)
            wait_until(lambda: bool(of(webhook, second)))
        send_again(settings, first)
        third = publish(outbox)
        is_down[0] = False
        with relaying(settings):
            outbox.wait_delivered("hook")
            wait_until(lambda: bool(of(webhook, third)))
        assert [each.event["id"] for each in webhook.accepted] == [first, second, first, third]


def test_what_cannot_be_resent_is_refused_as_a_whole(outbox: Outbox) -> None:
    """A batch replay ended half-way, or said that it had succeeded.

    https://github.com/frain-dev/convoy/pull/1740
    https://github.com/frain-dev/convoy/issues/203
    """
    with hooked(outbox) as (settings, _):
        number = publish(outbox)
        with pytest.raises(ConfigurationError, match="no event '0"):
            send_again(settings, number, "00000000-0000-0000-0000-000000000001")
        with pytest.raises(ConfigurationError, match="no event 'no id'"):
            send_again(settings, "no id")
        elsewhere = settings.model_copy(update={"routes": []})
        with pytest.raises(ConfigurationError, match="is not routed"):
            send_again(elsewhere, number)
        with pytest.raises(ConfigurationError, match="there is no such handler"):
            resend.plan(settings, "other", [number], EventSearch())
        lake = {"hook": {"type": "spark", "path": "lake"}}
        written = outbox.settings(handlers=lake, routes=[{"handlers": ["hook"]}])
        with pytest.raises(ConfigurationError, match="of type spark"):
            resend.plan(written, "hook", [number], EventSearch())
    assert outbox.value("select count(*) from relay.deferred") == 0
    assert outbox.value("select count(*) from relay.actions") == 0


def test_what_is_for_later_or_cancelled_is_not_delivered_by_a_resend(outbox: Outbox) -> None:
    """One that was cancelled was delivered once the cancellation was forgotten, others before their time."""
    with hooked(outbox) as (settings, webhook):
        later = publish(outbox, event_type="order.later", deliver_at="2999-01-01")
        cancelled = publish(outbox, event_type="order.cancelled", deliver_at="2001-01-01")
        outbox.conn.execute("select relay.cancel(%s)", (cancelled,))
        for each in (later, cancelled):
            with pytest.raises(ConfigurationError, match="is for later, or cancelled"):
                send_again(settings, each)
        assert send_again(settings, host_id=str(host(1))) == 0
        assert outbox.value("select count(*) from relay.actions where action = 'sink resend'") == 0
        placed = publish(outbox)
        with relaying(settings):
            wait_until(lambda: len(of(webhook, placed)) == 1)
            planned = resend.plan(settings, "hook", (), EventSearch(host_id=str(host(1))))
            assert resend.resend(settings, planned, None) == resend.Resent(1, left_out=2)
            wait_until(lambda: len(of(webhook, placed)) == 2)
    assert {each.event["id"] for each in webhook.requests} == {placed}
    (action,) = actions.recent(outbox.conn, settings.group, 10, "hook")
    assert action.detail == {"events": 1, "deliveries": 1, "first": [placed]}


def test_what_is_resent_while_its_host_is_erased_is_erased(outbox: Outbox) -> None:
    with hooked(outbox) as (settings, webhook):
        with relaying(settings):
            number = publish(outbox)
            outbox.wait_delivered("hook")
            outbox.wait_compared()
        arguments = (settings, str(host(1)), True, outbox.installer_dsn)
        waits = (
            "select 1 from pg_locks where relation = 'outbox_message_t'::regclass and not granted"
        )
        with psycopg.connect(outbox.superuser_dsn) as holder, ThreadPoolExecutor(1) as pool:
            holder.execute("lock table public.outbox_message_t in share mode")
            erased = pool.submit(erase, *arguments)
            wait_until(lambda: erased.done() or bool(outbox.column(waits)))
            assert send_again(settings, number) == 1
            holder.commit()
            assert erased.result(60).removed["deferred transactions"] == 1
    assert outbox.value("select count(*) from relay.deferred") == 0
    assert len(of(webhook, number)) == 1


async def insert(delivery: Delivery) -> None:
    """Insert a row in the transaction that completes the delivery."""
    async with delivery.transaction() as conn:
        await conn.execute("insert into public.done values (1)")


def test_a_receiver_that_leaves_out_repetitions_does_a_resend(outbox: Outbox) -> None:
    """What had the id of something known was left out in silence.

    https://github.com/probot/smee-client/issues/72
    """
    hook = {"type": "function", "callable": f"{__name__}:insert"}
    settings = outbox.settings(handlers={"hook": hook}, routes=[{"handlers": ["hook"]}])
    outbox.install_again(settings)
    outbox.conn.execute("create table public.done (n int); grant all on public.done to relay")
    done = "select count(*) from public.done"
    with relaying(settings):
        number = publish(outbox)
        wait_until(lambda: outbox.value(done) == 1)
        send_again(settings, number)
        wait_until(lambda: outbox.value(done) == 2)


def test_no_attempt_has_a_secret(outbox: Outbox) -> None:
    """Records of deliveries had the signing secret, or the token that was sent.

    https://github.com/Agenta-AI/agenta/pull/3988
    https://github.com/opsmill/infrahub/pull/9810
    https://github.com/dograh-hq/dograh/pull/622
    """
    with Webhook(lambda _headers, _body: Answer(503)) as webhook:
        url = webhook.url.replace("://", "://user:hidden1@") + "?token=hidden2"
        secrets = {"headers": {"x-api-key": "hidden3"}, "signing_secret": ["hidden4"]}
        hook = {"type": "http", "url": url, "retry": {**_AT_ONCE, "attempts": 1}, **secrets}
        settings = outbox.settings(
            handlers={"hook": hook},
            routes=[{"handlers": ["hook"]}],
            attempts={"record": "all", "answers": True},
        )
        outbox.install_again(settings)
        with relaying(settings):
            publish(outbox)
            kept = "select count(*) from relay.attempts"
            wait_until(lambda: outbox.value(kept) > 0)
    text = outbox.value("select string_agg(to_jsonb(a)::text, '') from relay.attempts as a")
    assert "POST http" in text
    assert "hidden" not in text


def test_the_command_resends_and_tells_of_the_attempt(
    outbox: Outbox, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/frain-dev/convoy/issues/965"""
    with hooked(outbox) as (settings, webhook):
        config = outbox.config_file(
            tmp_path / "relay.yaml",
            handlers={"hook": {"type": "http", "url": webhook.url}},
            routes=[{"handlers": ["hook"]}],
        )

        def run(*arguments: str) -> str:
            result = CliRunner().invoke(app, [*arguments, "--config", str(config)])
            assert result.exit_code == 0, result.output
            return result.output

        with relaying(settings):
            number = publish(outbox)
            outbox.wait_delivered("hook")
            said = run("sink", "resend", "hook", "--event", number, "--yes", "--reason", "lost")
            assert "1 delivery queued" in said
            assert "no event is" not in run("sink", "resend", "hook", "--type", "none", "--yes")
            wait_until(lambda: bool(find(settings, number).attempts))
        said = run("event", number)
        assert "delivered" in said
        assert "POST http" in said
        run("sink", "resend", "hook", "--event", number, "--yes")
        assert ": sink hook, to be delivered again, as asked for" in run("status")


def test_the_console_and_its_api_resend(outbox: Outbox) -> None:
    """A batch replay from the list of events did nothing; one from a page left out what had succeeded.

    https://github.com/frain-dev/convoy/pull/1740
    https://github.com/frain-dev/convoy/pull/1237
    https://github.com/juspay/hyperswitch/pull/4176
    """
    with Webhook(lambda _headers, _body: Answer()) as webhook:
        settings = outbox.settings(
            handlers={"hook": {"type": "http", "url": webhook.url}},
            routes=[{"handlers": ["hook"]}],
            observe=console_of(),
        )
        outbox.install_again(settings)
        with relaying(settings):
            number = publish(outbox)
            outbox.wait_delivered("hook")
            with served(settings) as address:
                visitor, program = Visitor(address), Program(address)
                page = f"/groups/default/event?id={number}"
                assert "Send it to hook again" in visitor.page(page)
                sent = visitor.send(
                    "/groups/default/sink/resend", name="hook", event=number, reason="lost"
                )
                assert "is delivered to sink hook again" in sent.text
                wait_until(lambda: len(of(webhook, number)) == 2)
                answer = program.post("sinks/hook/resend", filter={"event_type": "order.placed"})
                assert answer["transactions"] == 1
                wait_until(lambda: len(of(webhook, number)) == 3)
                wait_until(lambda: len(find(settings, number).attempts) == 2)
                assert "resent by" in visitor.page(page)
                told = program.get(f"events/{number}")["attempts"]
    assert [each["outcome"] for each in told] == ["delivered", "delivered"]


def test_a_broker_that_leaves_out_repetitions_takes_a_resend() -> None:
    """It knows messages by an id, which is another one for each resend, and the same in each attempt of one.

    https://github.com/probot/smee-client/issues/72
    """
    sent: list[Message] = []

    class Stream:
        async def send(self, messages: Sequence[Message]) -> None:
            sent.extend(messages)

        async def close(self) -> None: ...

    settings = NatsHandler(type="nats", topic="orders", servers=["nats://localhost"])
    sink = Publishing("hook", settings, Stream())
    row = tuple("1" if name in ("id", "c_offset") else None for name in EVENT_FIELDS)
    for headers in ({}, {}, {RESEND: "7"}, {RESEND: "7"}, {RESEND: "8"}):
        of_one: Any = [Event(row, headers)]
        asyncio.run(sink.deliver(Transaction(None, Commit(Lsn(0), Lsn(0), 0, 1), of_one)))
    known = [each.deduplication for each in sent]
    assert known == [known[0], known[0], known[2], known[2], known[4]]
    assert len(set(known)) == 3
    assert {each.identity for each in sent} == {"1"}
