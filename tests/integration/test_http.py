"""Events posted to an endpoint: how they look, and what becomes of them when it does not take them."""

from __future__ import annotations

import base64
import hmac
import json
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from relay.admin.dead_letters import DeadLetters
from relay.spark.session import Session
from relay.store.connections import connect
from relay.store.dead_letters.selection import DeadLetterSelection
from tests.outbox import APPEND, Outbox, event, host, relaying, wait_until
from tests.process import running
from tests.webhook import Answer, Webhook, hanging_until


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as server:
        yield server


SHORT_INTERVALS = {"wait": 0.2, "max_wait": 0.4, "jitter": 0.01, "defer_after": 0.1}


def posting(webhook: Webhook, projected: bool = True, **more: Any) -> dict[str, Any]:
    """Every event is posted, and goes into the projection as well."""
    handlers: dict[str, Any] = {
        "hook": {"type": "http", "url": webhook.url, "retry": SHORT_INTERVALS, **more}
    }
    if projected:
        handlers = {"projection": {"type": "sql", "statement": APPEND}, **handlers}
    return {"handlers": handlers, "routes": [{"handlers": list(handlers)}]}


def test_events_are_posted_in_order_and_their_effects_are_committed(
    outbox: Outbox, webhook: Webhook, engine: str, session: Session | None
) -> None:
    for number in range(40):
        outbox.publish(host(number % 4), event(number), event(number, "order.paid"))
    outbox.drain(outbox.settings(engine, **posting(webhook)), session)
    assert set(webhook.ids()) == set(outbox.column("select id::text from outbox_message_t"))
    assert max(webhook.ids().values()) == 1
    for number in range(4):
        assert webhook.order(host(number)) == outbox.column(
            "select c_offset from outbox_message_t where host_id = %s order by 1", (host(number),)
        )
    assert webhook.connections <= 8
    outbox.assert_exact()


def test_a_structured_event(outbox: Outbox, webhook: Webhook) -> None:
    outbox.publish(host(1), event(5, metadata={"trace": "é"}))
    secret = base64.b64encode(b"twelve bytes").decode()
    config = posting(
        webhook,
        headers={"authorization": "Bearer t0ken"},
        signing_secret=f"whsec_{secret}",
        source="/shop",
        compress_above=10,
    )
    outbox.drain(outbox.settings(**config))
    (request,) = webhook.requests
    stored = outbox.conn.execute(
        "select id::text, transaction_id::text, event_ts, c_offset from outbox_message_t"
    ).fetchone()
    assert stored is not None
    found = request.event
    assert datetime.fromisoformat(found.pop("time")) == stored[2]
    assert found == {
        "specversion": "1.0",
        "id": stored[0],
        "source": "/shop",
        "type": "order.placed",
        "subject": found["subject"],
        "datacontenttype": "application/json",
        "partitionkey": str(host(1)),
        "sequence": str(stored[3]),
        "hostid": str(host(1)),
        "userid": str(host(999)),
        "aggregatetype": "Order",
        "transactionid": stored[1],
        "transactionordinal": "1",
        "transactioncount": "1",
        "data": {"amount": 5},
    }
    headers = request.headers
    assert headers["content-type"] == "application/cloudevents+json"
    assert headers["idempotency-key"] == headers["webhook-id"] == stored[0]
    assert headers["authorization"] == "Bearer t0ken"
    assert headers["content-encoding"] == "gzip"
    assert abs(time.time() - int(headers["webhook-timestamp"])) < 30
    signed = f"{stored[0]}.{headers['webhook-timestamp']}.".encode() + request.body
    digest = base64.b64encode(hmac.digest(b"twelve bytes", signed, "sha256")).decode()
    assert headers["webhook-signature"] == f"v1,{digest}"


def test_a_binary_event_and_a_batch(outbox: Outbox, webhook: Webhook) -> None:
    outbox.publish(host(1), event(5, aggregate_id='ü"%'), event(6))
    config = posting(webhook, mode="binary")
    config["handlers"]["whole"] = {
        **config["handlers"]["hook"],
        "each": "transaction",
        "mode": None,
    }
    config["routes"][0]["handlers"].append("whole")
    outbox.drain(outbox.settings(**config))
    # Each sink is delivered to at its own pace.
    requests = sorted(webhook.requests, key=lambda each: "batch" in each.headers["content-type"])
    first, second, whole = requests
    assert first.headers["ce-subject"] == "%C3%BC%22%25"
    assert first.headers["content-type"] == "application/json"
    assert [json.loads(each.body) for each in (first, second)] == [{"amount": 5}, {"amount": 6}]
    assert whole.headers["content-type"] == "application/cloudevents-batch+json"
    assert [each["data"]["amount"] for each in json.loads(whole.body)] == [5, 6]
    assert whole.headers["idempotency-key"] == first.headers["ce-id"]


def test_what_an_endpoint_refuses_is_its_own_dead_letter(
    outbox: Outbox, webhook: Webhook, engine: str, session: Session | None
) -> None:
    webhook.answers = lambda _, body: (
        Answer(422, body=b"no such product 13") if b'"amount": 13' in body else Answer(200)
    )
    for number in range(10, 16):
        outbox.publish(host(1), event(number))
    outbox.drain(outbox.settings(engine, **posting(webhook)), session)
    assert outbox.column("select amount from projection order by seq") == list(range(10, 16))
    assert len(webhook.accepted) == 5
    (dead_letter,) = outbox.conn.execute(
        "select payload, sink, exception from relay.dead_letter_queue"
    ).fetchall()
    output = f"Rejected: HTTP 422\nPOST {webhook.url}: 422 Unprocessable Entity\nno such product 13"
    assert dead_letter == ({"amount": 13}, "hook", output)
    assert outbox.value("select count(*) from relay.deferred") == 0
    outbox.assert_exact()


@pytest.mark.parametrize(
    "answer",
    [
        Answer(503),
        Answer(0),
        *(
            pytest.param(each, marks=pytest.mark.rare)
            for each in (Answer(408), Answer(429, (("retry-after", "1"),)))
        ),
    ],
    ids=str,
)
def test_a_host_that_fails_is_deferred_in_order_and_no_other(
    outbox: Outbox, webhook: Webhook, engine: str, session: Session | None, answer: Answer
) -> None:
    down = True
    webhook.answers = lambda _, body: (
        answer if down and str(host(1)).encode() in body else Answer(204)
    )
    for number in range(8):
        outbox.publish(host(1), event(number))
        outbox.publish(host(2), event(number))
    with relaying(outbox.settings(engine, **posting(webhook)), session):
        outbox.wait_drained()
        assert outbox.value("select count(*) from projection") == 16
        assert outbox.column("select sink from relay.deferred") == ["hook"] * 8
        assert len(webhook.accepted) == 8
        outbox.publish(host(1), event(9))
        outbox.wait_drained()
        wait_until(lambda: outbox.value("select max(attempts) from relay.deferred") > 1)
        assert outbox.value("select count(*) from relay.deferred where attempts > 0") == 1
        down = False
        wait_until(lambda: len(webhook.accepted) == 17)
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
    assert webhook.order(host(1)) == outbox.column(
        "select c_offset from outbox_message_t where host_id = %s order by 1", (host(1),)
    )
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0
    assert outbox.value("select count(*) from relay.deferred_rows") == 0
    assert max(webhook.ids().values()) == 1
    outbox.assert_exact()


def test_retry_after_is_honoured(outbox: Outbox, webhook: Webhook) -> None:
    webhook.answers = lambda _, body: Answer(
        *((429, (("retry-after", "2"),)) if not webhook.requests else (200,))
    )
    outbox.publish(host(1), event(1))
    with relaying(outbox.settings(**posting(webhook))):
        wait_until(lambda: len(webhook.requests) == 2)
    refused, taken = webhook.requests
    assert 2 <= taken.at - refused.at < 3.5
    assert refused.headers["idempotency-key"] == taken.headers["idempotency-key"]


def test_short_waits_are_waited_in_place(outbox: Outbox, webhook: Webhook) -> None:
    webhook.answers = lambda _, body: Answer(503 if len(webhook.requests) < 3 else 200)
    outbox.publish(host(1), event(1))
    outbox.drain(
        outbox.settings(**posting(webhook, retry={"wait": 0.01, "jitter": 0, "defer_after": 5}))
    )
    assert [request.status for request in webhook.requests] == [503, 503, 503, 200]
    assert outbox.value("select coalesce(max(id), 0) from relay.deferred") == 0
    outbox.assert_exact()


@pytest.mark.parametrize("ending", ["dead_letter", "block_key"])
def test_exhausted_attempts_release_the_key_or_hold_it(
    outbox: Outbox, webhook: Webhook, ending: str
) -> None:
    webhook.answers = lambda _, body: Answer(500 if b'"amount": 1}' in body else 200)
    for number in range(1, 4):
        outbox.publish(host(1), event(number))
    outbox.publish(host(2), event(4))
    config = posting(webhook, retry={**SHORT_INTERVALS, "attempts": 3}, on_exhausted=ending)
    with relaying(outbox.settings(**config)):
        wait_until(lambda: outbox.value("select count(*) from relay.dead_letter_queue") == 1)
        wait_until(lambda: len(webhook.order(host(2))) == 1)
        if ending == "dead_letter":
            wait_until(lambda: len(webhook.accepted) == 3)
        else:
            outbox.publish(host(1), event(5))
            outbox.wait_drained()
    assert outbox.column("select exception from relay.dead_letter_queue") == [
        f"Undelivered: HTTP 500\nPOST {webhook.url}: 500 Internal Server Error"
    ]
    assert [r.status for r in webhook.requests].count(500) == 3
    outbox.assert_exact()
    if ending == "dead_letter":
        assert outbox.value("select count(*) from relay.deferred") == 0
    else:
        assert webhook.order(host(1)) == []
        assert outbox.column("select blocked from relay.deferred order by id") == [
            True,
            False,
            False,
            False,
        ]


def test_keys_by_aggregate_go_on_beside_each_other(outbox: Outbox, webhook: Webhook) -> None:
    webhook.answers = lambda _, body: Answer(503 if b'"subject": "a"' in body else 200)
    for name in ("a", "b", "a", "b"):
        outbox.publish(host(1), event(1, aggregate_id=name))
    with relaying(outbox.settings(**posting(webhook, False, order_by="aggregate"))):
        outbox.wait_drained()
        wait_until(lambda: len(webhook.accepted) == 2)
        webhook.answers = lambda _, body: Answer(200)
        wait_until(lambda: len(webhook.accepted) == 4)
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
    assert [request.event["subject"] for request in webhook.accepted] == ["b", "b", "a", "a"]


def test_scheduled_events_are_held_overtaken_and_delivered_when_due(
    outbox: Outbox, webhook: Webhook, engine: str, session: Session | None
) -> None:
    due = datetime.now(UTC) + timedelta(seconds=4)
    outbox.publish(host(1), event(1, deliver_at=due.isoformat()), event(2))
    outbox.publish(host(1), event(3))
    settings = outbox.settings(engine, **posting(webhook))
    with relaying(settings, session):
        outbox.wait_drained()
        assert outbox.column("select amount from projection") == [3]
        assert len(webhook.accepted) == 1
        assert sorted(outbox.column("select sink from relay.deferred")) == ["", "hook"]
    with relaying(settings, session):
        wait_until(lambda: outbox.handled() == len(webhook.accepted) == 3)
        late = datetime.now(UTC) - due
    assert timedelta(0) < late < timedelta(seconds=1.5)
    assert [request.event["data"]["amount"] for request in webhook.requests] == [3, 1, 2]
    assert outbox.value("select count(*) from relay.deferred") == 0


def test_fire_and_forget_neither_waits_nor_blocks(
    outbox: Outbox, webhook: Webhook, caplog: pytest.LogCaptureFixture
) -> None:
    let_go = Event()
    webhook.answers = hanging_until(let_go, 503)
    for number in range(20):
        outbox.publish(host(1), event(number))
    with ExitStack() as stack:
        stack.enter_context(relaying(outbox.settings(**posting(webhook, reliable=False))))
        stack.callback(let_go.set)
        outbox.wait_drained()
        assert webhook.requests == []
        assert outbox.value("select count(*) from projection") == 20
        let_go.set()
        wait_until(lambda: len(webhook.requests) == 20)
    assert outbox.value("select count(*) from relay.deferred") == 0
    # One line for a fault that repeats.
    assert [r.losses for r in caplog.records if hasattr(r, "losses")] == [1]
    outbox.assert_exact()


def test_a_circuit_breaker_stops_the_sink_and_spends_no_attempts(
    outbox: Outbox, webhook: Webhook
) -> None:
    webhook.answers = lambda _, body: Answer(503)
    for number in range(30):
        outbox.publish(host(number), event(number))
    config = posting(
        webhook,
        retry={**SHORT_INTERVALS, "attempts": 4},
        concurrency=1,
        circuit_breaker={"failures": 3, "cool_down": 1.0},
    )
    with relaying(outbox.settings(**config)):
        outbox.wait_handled()
        wait_until(lambda: len(webhook.requests) == 4)
        wait_until(lambda: outbox.value("select fault from relay.sinks") == "Undelivered: HTTP 503")
        assert outbox.value("select count(*) from relay.deferred") <= 4
        webhook.answers = lambda _, body: Answer(200)
        wait_until(lambda: len(webhook.accepted) == 30)
        wait_until(lambda: outbox.value("select fault from relay.sinks") is None)
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0
    outbox.assert_exact()


def test_a_rate_limit_and_a_limit_of_concurrency_hold(outbox: Outbox, webhook: Webhook) -> None:
    for number in range(20):
        outbox.publish(host(number), event(number))
    outbox.drain(outbox.settings(**posting(webhook, rate_limit=20, concurrency=2)))
    times = sorted(request.at for request in webhook.requests)
    assert 0.8 < times[-1] - times[0] < 3
    assert webhook.connections <= 2


def test_a_hanging_endpoint_is_given_up_in_time(outbox: Outbox, webhook: Webhook) -> None:
    webhook.answers = lambda _, body: Answer(200, after=60)
    outbox.publish(host(1), event(1))
    with relaying(outbox.settings(**posting(webhook, timeout=0.3))):
        outbox.wait_drained(10)
        assert outbox.column("select reason from relay.deferred") == [
            "Undelivered: no complete response in 0.3 s"
        ]
        webhook.answers = lambda _, body: Answer(200)
        wait_until(lambda: len(webhook.accepted) == 1)


def test_secrets_come_from_files_and_the_environment(
    outbox: Outbox, webhook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("from a file\n")
    monkeypatch.setenv("HOOK_TOKEN", "from the environment")
    outbox.publish(host(1), event(1))
    headers = {"x-file": {"file": str(tmp_path / "token")}, "x-env": {"env": "HOOK_TOKEN"}}
    settings = outbox.settings(**posting(webhook, headers=headers))
    assert "from" not in repr(settings)
    outbox.drain(settings)
    (request,) = webhook.requests
    assert request.headers["x-file"] == "from a file"
    assert request.headers["x-env"] == "from the environment"


def test_a_python_handler_that_asks_for_time_defers_only_its_key(
    outbox: Outbox, engine: str, session: Session | None
) -> None:
    outbox.conn.execute("create table busy (amount int)")
    outbox.conn.execute("insert into busy values (13)")
    handlers = {
        "projection": {"type": "sql", "statement": APPEND},
        "slow": {
            "type": "python",
            "callable": "tests.callables:unless_busy",
            "retry": SHORT_INTERVALS,
        },
    }
    for amount in (1, 13, 2):
        for number in (1, 2):
            outbox.publish(host(number), event(amount + 10 * (number - 1) * (amount == 13)))
    routes = [{"handlers": list(handlers)}]
    with relaying(outbox.settings(engine, handlers=handlers, routes=routes), session):
        outbox.wait_drained()
        assert sorted(outbox.column("select amount from projection")) == [1, 1, 2, 23]
        wait_until(lambda: outbox.value("select max(attempts) from relay.deferred") > 1)
        outbox.conn.execute("delete from busy")
        wait_until(lambda: outbox.handled() == 6)
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0
    outbox.assert_exact()


def test_a_handler_in_the_target_that_is_not_reliable_leaves_out_what_it_fails_on(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    outbox.conn.execute("create table loose (amount int check (amount <> 3))")
    handlers = {
        "loose": {
            "type": "sql",
            "reliable": False,
            "statement": "insert into loose values ((%(payload)s->>'amount')::int)",
        },
        "projection": {"type": "sql", "statement": APPEND},
    }
    for amount in range(6):
        outbox.publish(host(1), event(amount))
    outbox.drain(outbox.settings(handlers=handlers, routes=[{"handlers": list(handlers)}]))
    assert outbox.column("select amount from loose") == [0, 1, 2, 4, 5]
    assert outbox.value("select count(*) from projection") == 6
    assert [r.losses for r in caplog.records if hasattr(r, "losses")] == [1]
    outbox.assert_exact()


def test_a_statement_that_fails_may_hold_its_key(outbox: Outbox) -> None:
    handlers = {
        "projection": {"type": "sql", "statement": APPEND, "on_exhausted": "block_key"},
    }
    settings = outbox.settings(handlers=handlers)
    for amount in (1, -1, 2):
        outbox.publish(host(1), event(amount))
    outbox.publish(host(2), event(3))
    outbox.drain(settings)
    outbox.publish(host(1), event(4))
    outbox.drain(settings)
    assert sorted(outbox.column("select amount from projection")) == [1, 3]
    assert outbox.column("select blocked from relay.deferred order by id") == [True, False, False]
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 1


def test_a_stop_leaves_what_is_not_delivered_yet_and_repeats_nothing(
    outbox: Outbox, webhook: Webhook, tmp_path: Path
) -> None:
    # All of it would take 40 s.
    webhook.answers = lambda _, body: Answer(200, after=0 if len(webhook.requests) < 20 else 2)
    # What is committed together is in one batch.
    with outbox.conn.transaction():
        for number in range(60):
            outbox.publish(host(number % 2), event(number))
    config = outbox.config_file(tmp_path / "relay.yaml", **posting(webhook))
    with running(config) as service:
        wait_until(lambda: len(webhook.accepted) >= 20)
        assert service.terminate() == 0
        assert len(webhook.accepted) < 60
        # Of a commit everything is delivered or deferred.
        deferred = outbox.value("select count(*) from relay.deferred")
        assert len(webhook.accepted) + deferred == 60
    webhook.answers = lambda _, body: Answer(200)
    with running(config) as service:
        wait_until(lambda: len(webhook.accepted) == 60)
        assert service.terminate() == 0
    assert set(webhook.ids().values()) == {1}
    for number in (0, 1):
        assert webhook.order(host(number)) == outbox.column(
            "select c_offset from outbox_message_t where host_id = %s order by 1", (host(number),)
        )
    outbox.assert_exact()


def test_a_transaction_of_several_megabytes_waits_whole_and_a_larger_one_in_a_file(
    outbox: Outbox, webhook: Webhook
) -> None:
    webhook.answers = lambda _, body: Answer(503)
    large = ({"amount": n, "note": "x" * 1_000} for n in range(3_000))
    outbox.publish(host(1), *(event(payload=payload) for payload in large))
    outbox.publish(host(2), *(event(n) for n in range(300)))
    config = posting(webhook, each="transaction")
    small = outbox.settings(**config, batch={"max_bytes": 500_000})
    with relaying(small):
        outbox.wait_drained()
        assert outbox.value("select count(*) from relay.deferred") == 2
        assert outbox.value("select max(portion) from relay.deferred_rows") > 1
        webhook.answers = lambda _, body: Answer(200)
        wait_until(lambda: len(webhook.accepted) == 2)
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
    assert [len(json.loads(each.body)) for each in webhook.accepted] in ([3_000, 300], [300, 3_000])
    assert outbox.value("select count(*) from relay.deferred_rows") == 0
    outbox.assert_exact()


def test_the_rights_that_are_granted_suffice_for_what_waits_and_comes_back(
    outbox: Outbox, webhook: Webhook
) -> None:
    with outbox.limited_role() as (_, dsn):
        source = {**outbox.config()["source"], "dsn": dsn}
        settings = outbox.settings(source=source, **posting(webhook))
        webhook.answers = lambda _, body: Answer(400 if b'"amount": 13' in body else 503)
        large = ({"amount": n, "note": "x" * 900} for n in range(14, 1_500))
        outbox.publish(host(1), *(event(payload=payload) for payload in large))
        outbox.publish(host(2), event(13))
        with relaying(settings):
            outbox.wait_drained()
            webhook.answers = lambda _, body: Answer(200)
            with connect(dsn) as conn:
                dead_letters = DeadLetters(settings, conn)
                wait_until(
                    lambda: (
                        len(dead_letters.replay(dead_letters.find(DeadLetterSelection()), "mended"))
                        == 1
                    )
                )
                wait_until(lambda: len(webhook.accepted) == 1_487)
                wait_until(
                    lambda: (
                        dead_letters.purge(
                            dead_letters.find(DeadLetterSelection(), ("replayed",)), None
                        )
                        == 1
                    )
                )


_DEFERRED = """
    select sink, hosts[1], attempts, blocked, split_part(reason, ':', 1), dead_transaction is not null
      from relay.deferred order by id
"""
_HELD = (
    "select split_part(key, ' ', 1), count(*)::int from relay.deferred_keys group by 1 order by 1"
)


@pytest.mark.parametrize("blocks_key", [False, True])
def test_a_delivery_that_fails_leaves_what_the_explanation_shows(
    outbox: Outbox, webhook: Webhook, blocks_key: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The stages of docs/explanation/failed-delivery.md."""
    answer = Answer(503)
    webhook.answers = lambda _, body: answer if str(host(1)).encode() in body else Answer(204)
    retry = {"wait": 0.2, "jitter": 0, "defer_after": 0}
    failing = posting(
        webhook, retry=retry, on_exhausted="block_key" if blocks_key else "dead_letter"
    )
    with caplog.at_level(logging.WARNING, "relay"), relaying(outbox.settings(**failing)):
        for number in range(2):
            outbox.publish(host(1), event(number))
        outbox.publish(host(2), event(2))
        outbox.wait_drained()
        wait_until(lambda: len(webhook.accepted) == 1)
        wait_until(lambda: outbox.value("select max(attempts) from relay.deferred") > 1)
        first, second = outbox.conn.execute(_DEFERRED).fetchall()
        assert (first[0], first[1], first[3:]) == (
            "hook",
            str(host(1)),
            (False, "Undelivered", False),
        )
        assert second == ("hook", str(host(1)), 0, False, None, False)
        assert outbox.conn.execute(_HELD).fetchall() == [(str(host(1)), 2)]

        answer = Answer(422)
        wait_until(lambda: outbox.value("select count(*) from relay.dead_letter_queue") > 0)
        if blocks_key:
            blocked, waits = outbox.conn.execute(_DEFERRED).fetchall()
            assert (blocked[0], blocked[1], blocked[3:]) == (
                "hook",
                str(host(1)),
                (True, "Rejected", True),
            )
            assert waits == ("hook", str(host(1)), 0, False, None, False)
            assert outbox.conn.execute(_HELD).fetchall() == [(str(host(1)), 2)]
        else:
            wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
            assert outbox.conn.execute(_HELD).fetchall() == []
            assert outbox.value("select count(*) from relay.dead_letter_queue") == 2
    assert {"deferred", "dead letter"} <= set(caplog.messages)
