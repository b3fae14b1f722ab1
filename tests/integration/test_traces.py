"""Traces: from the transaction of a service through relay to the endpoint, in one tree."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

from relay.admin.dead_letters import DeadLetters
from relay.observe import spans as module
from relay.spark.session import Session
from relay.store.dead_letters.selection import DeadLetterSelection
from tests.brokers import KafkaCluster, started
from tests.outbox import APPEND, Outbox, event, host, relaying, wait_until
from tests.process import relay, running
from tests.traces import Collector, Shop, is_child, of, traceparent
from tests.webhook import Answer, Webhook

ON = {"observe": {"traces": True}}
SHORT_INTERVALS = {"wait": 0.1, "max_wait": 0.2, "jitter": 0.01, "defer_after": 0.01}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What relay exports; complete once it has ended."""
    found = InMemorySpanExporter()
    monkeypatch.setattr(module, "exporter", lambda: found)
    return found


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as found:
        yield found


@pytest.fixture
def shop(outbox: Outbox) -> Shop:
    return Shop(outbox.publisher_dsn)


def posting(webhook: Webhook, **more: Any) -> dict[str, Any]:
    """Every event goes to the projection and to the webhook, with traces."""
    handlers: dict[str, Any] = {
        "projection": {"type": "sql", "statement": APPEND},
        "hook": {"type": "http", "url": webhook.url, "retry": SHORT_INTERVALS, **more},
    }
    return {"handlers": handlers, "routes": [{"handlers": list(handlers)}], **ON}


def tracing(webhook: Webhook) -> list[str | None]:
    """The header of each request that was taken."""
    return [request.headers.get("traceparent") for request in webhook.accepted]


@pytest.mark.parametrize("mode", ["wal", "poll"])
def test_an_order_is_one_tree_from_its_transaction_to_the_endpoint(
    outbox: Outbox,
    webhook: Webhook,
    shop: Shop,
    exported: InMemorySpanExporter,
    engine: str,
    session: Session | None,
    mode: str,
) -> None:
    config = posting(webhook)
    config["source"] = {**outbox.config()["source"], "mode": "auto" if mode == "wal" else mode}
    with relaying(outbox.settings(engine, **config), session):
        order = shop.add_rows(host(1), 5)
        wait_until(lambda: len(webhook.accepted) == 1)
        outbox.wait_handled()
    spans = exported.get_finished_spans()
    (processed,), (sent,), (batch,) = (of(spans, name) for name in ("process", "send", "apply"))
    assert is_child(processed, order)
    assert is_child(sent, order)
    assert (processed.kind, sent.kind) == (SpanKind.CONSUMER, SpanKind.CLIENT)
    # The endpoint goes on below the delivery.
    assert tracing(webhook) == [traceparent(sent.context)]
    # The batch is a trace of its own, since it may join many.
    assert batch.parent is None
    assert [link.context.span_id for link in batch.links] == [order.span_id]
    assert [link.context for link in processed.links] == [batch.context]
    (identity,) = outbox.column("select id::text from outbox_message_t")
    (transaction,) = outbox.column("select transaction_id::text from outbox_message_t")
    assert processed.attributes is not None
    assert sent.attributes is not None
    assert {
        "messaging.system": "postgresql",
        "messaging.operation.type": "process",
        "messaging.destination.name": "public.outbox_message_t",
        "messaging.consumer.group.name": "default",
        "messaging.message.id": identity,
        "messaging.message.conversation_id": transaction,
        "relay.handlers": ("projection",),
        "relay.disposition": "applied",
        "relay.engine": engine,
    }.items() <= processed.attributes.items()
    assert {
        "messaging.operation.type": "send",
        "messaging.message.id": identity,
        "server.address": "127.0.0.1",
        "server.port": webhook.port,
        "relay.sink": "hook",
    }.items() <= sent.attributes.items()
    assert ("relay.seconds_since_commit" in processed.attributes) == (mode == "wal")
    assert processed.start_time is not None
    assert processed.end_time is not None
    assert batch.start_time is not None
    assert batch.end_time is not None
    assert batch.start_time <= processed.start_time <= processed.end_time <= batch.end_time


def test_a_batch_is_linked_to_each_order_that_it_joins(
    outbox: Outbox, webhook: Webhook, shop: Shop, exported: InMemorySpanExporter
) -> None:
    orders = [shop.add_rows(host(number), 1) for number in range(5)]
    outbox.publish(host(9), event(1))
    with relaying(outbox.settings(**posting(webhook))):
        wait_until(lambda: len(webhook.accepted) == 6)
        outbox.wait_handled()
    spans = exported.get_finished_spans()
    links = {link.context.span_id for batch in of(spans, "apply") for link in batch.links}
    assert links == {order.span_id for order in orders}
    processed = of(spans, "process")
    assert len(processed) == 5
    assert all(any(is_child(span, order) for span in processed) for order in orders)
    # The event without a trace goes without one.
    assert sorted(str(each) for each in tracing(webhook)) == sorted(
        ["None", *(traceparent(span.context) for span in of(spans, "send"))]
    )


def test_events_of_several_traces_in_one_transaction_keep_theirs(
    outbox: Outbox, webhook: Webhook, exported: InMemorySpanExporter
) -> None:
    """As of a consumer that handles several messages in one database transaction."""
    others = [PARENT, PARENT.replace("0af765", "0bf765"), PARENT.replace("0af765", "0cf765")]
    events = [event(n, metadata={"traceparent": each}) for n, each in enumerate(others)]
    with relaying(outbox.settings(**posting(webhook))):
        outbox.publish(host(1), *events, event(9, metadata={"traceparent": PARENT[:-2] + "00"}))
        wait_until(lambda: len(webhook.accepted) == 4)
        outbox.wait_handled()
    spans = exported.get_finished_spans()
    sent = {format_trace_id(s.context.trace_id): s for s in of(spans, "send") if s.context}
    assert set(sent) == {each.split("-")[1] for each in others}
    assert len(of(spans, "process")) == 3
    # An event whose trace is not sampled hands that on.
    expected = [traceparent(sent[each.split("-")[1]].context) for each in others]
    assert tracing(webhook) == [*expected, PARENT[:-2] + "00"]


def test_what_is_not_sampled_has_no_spans(
    outbox: Outbox, webhook: Webhook, shop: Shop, exported: InMemorySpanExporter
) -> None:
    with relaying(outbox.settings(**posting(webhook))):
        order = shop.add_rows(host(1), 1, sampled=False)
        wait_until(lambda: len(webhook.accepted) == 1)
        outbox.wait_handled()
    assert exported.get_finished_spans() == ()
    # The endpoint gets to know that the trace is not sampled.
    assert tracing(webhook) == [traceparent(order)]


def test_each_attempt_is_a_span_of_the_order(
    outbox: Outbox, webhook: Webhook, shop: Shop, exported: InMemorySpanExporter
) -> None:
    """Retried at once, and deferred."""
    webhook.answers = lambda *_: Answer(503 if len(webhook.requests) < 3 else 204)
    with relaying(outbox.settings(**posting(webhook, circuit_breaker=None))):
        order = shop.add_rows(host(1), 1)
        wait_until(lambda: len(webhook.accepted) == 1)
    sent = of(exported.get_finished_spans(), "send")
    assert [span.status.status_code for span in sent] == [StatusCode.ERROR] * 3 + [StatusCode.UNSET]
    assert sent[0].status.description == "Undelivered: HTTP 503"
    assert all(is_child(span, order) for span in sent)
    headers = [request.headers["traceparent"] for request in webhook.requests]
    assert headers == [traceparent(span.context) for span in sent]


def test_a_dead_transaction_and_its_replay_are_in_the_trace_of_the_order(
    outbox: Outbox,
    webhook: Webhook,
    shop: Shop,
    exported: InMemorySpanExporter,
    engine: str,
    session: Session | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "relay")
    settings = outbox.settings(engine, **posting(webhook))
    with relaying(settings, session):
        order = shop.add_rows(host(1), -1)
        wait_until(lambda: bool(outbox.column("select 1 from relay.dead_letter_queue")))
        outbox.conn.execute("alter table projection drop constraint projection_amount_check")
        dead_letters = DeadLetters(settings, outbox.conn)
        dead_letters.replay(dead_letters.find(DeadLetterSelection()), "mended")
        wait_until(lambda: outbox.column("select amount from projection") == [-1])
    dead, replayed = of(exported.get_finished_spans(), "process")
    assert is_child(dead, order)
    assert is_child(replayed, order)
    assert dead.attributes is not None
    assert replayed.attributes is not None
    assert dead.status.status_code is StatusCode.ERROR
    assert dead.attributes["error.type"] == "CheckViolation"
    assert dead.attributes["relay.disposition"] == "dead"
    assert replayed.status.status_code is StatusCode.UNSET
    assert replayed.attributes["relay.redelivery"] is True
    (line,) = [each for each in caplog.records if each.getMessage() == "dead letter"]
    assert vars(line)["trace_id"] == format_trace_id(order.trace_id)


def test_a_dead_delivery_names_the_trace(
    outbox: Outbox, webhook: Webhook, shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """With traces or without."""
    caplog.set_level(logging.WARNING, "relay")
    webhook.answers = lambda *_: Answer(400)
    with relaying(outbox.settings(**{**posting(webhook), "observe": {}})):
        order = shop.add_rows(host(1), 1)
        wait_until(lambda: bool(outbox.column("select 1 from relay.dead_letter_queue")))
    (line,) = [each for each in caplog.records if each.getMessage() == "dead letter"]
    assert vars(line)["trace_id"] == format_trace_id(order.trace_id)
    assert tracing(webhook) == []


HOSTILE: Sequence[Any] = [
    {"traceparent": f"{PARENT}\r\nx-evil: 1"},
    {"traceparent": PARENT, "tracestate": "a=b\r\nx-evil: 1"},
    {"traceparent": PARENT, "tracestate": "a=" + "b" * 1_000},
    {"traceparent": "00-" + "0" * 32 + "-" + "0" * 16 + "-01"},
    {"traceparent": "ff" + PARENT[2:]},
    {"traceparent": "9" * 100_000},
    {"traceparent": {"traceparent": PARENT}},
    {"traceparent": 1, "tracestate": []},
    [PARENT, "traceparent"],
    "traceparent",
    None,
    {"traceparent": PARENT, "more": "traceparent" * 20_000},
    {"traceparent": PARENT, "baggage": "user=secret"},
]


def test_hostile_metadata_break_nothing(
    outbox: Outbox, webhook: Webhook, exported: InMemorySpanExporter
) -> None:
    with relaying(outbox.settings(**posting(webhook))):
        for number, metadata in enumerate(HOSTILE):
            outbox.publish(host(number), event(1, metadata=metadata))
        wait_until(lambda: len(webhook.accepted) == len(HOSTILE))
        outbox.wait_handled()
    outbox.assert_exact()
    names = {name for request in webhook.accepted for name in request.headers}
    assert not names & {"x-evil", "baggage", "tracestate"}
    given = [each for each in tracing(webhook) if each is not None]
    # A valid parent counts without the state that is not.
    assert len(given) == 3
    assert all(each.startswith(PARENT[:36]) for each in given)
    assert len(of(exported.get_finished_spans(), "process")) == 3


class _Broken(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise RuntimeError("broken")


def test_an_exporter_that_fails_concerns_nobody(
    outbox: Outbox,
    webhook: Webhook,
    shop: Shop,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "exporter", _Broken)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with relaying(outbox.settings(**posting(webhook))):
        for number in range(5):
            shop.add_rows(host(1), number)
            wait_until(lambda number=number: len(webhook.accepted) == number + 1)  # type: ignore[misc]
        outbox.wait_handled()
    outbox.assert_exact()
    lines = [r for r in caplog.records if r.getMessage().startswith("traces cannot be sent")]
    assert len(lines) == 1


class _Hanging(_Broken):
    def __init__(self) -> None:
        self.released = Event()
        self.answers = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.released.wait(60)
        self.answers += 1
        return SpanExportResult.SUCCESS


def test_a_collector_that_hangs_delays_neither_events_nor_for_long_the_end(
    outbox: Outbox, webhook: Webhook, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = _Hanging()
    monkeypatch.setattr(module, "exporter", lambda: hanging)
    monkeypatch.setattr(module, "FLUSH_SECONDS", 0.3)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with relaying(outbox.settings(**posting(webhook))):
        for number in range(3):
            shop.add_rows(host(1), number)
            wait_until(lambda number=number: len(webhook.accepted) > number)  # type: ignore[misc]
        outbox.wait_handled()
    assert hanging.answers == 0
    hanging.released.set()
    outbox.assert_exact()


def test_spans_that_cannot_be_made_concern_nobody(
    outbox: Outbox,
    webhook: Webhook,
    shop: Shop,
    exported: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(module, "parent", broken)
    with relaying(outbox.settings(**posting(webhook))):
        shop.add_rows(host(1), 1)
        shop.add_rows(host(1), -1)
        wait_until(lambda: len(webhook.accepted) == 2)
        outbox.wait_handled()
    outbox.assert_exact()
    assert not of(exported.get_finished_spans(), "send")


def test_a_large_transaction_has_one_span(
    outbox: Outbox, webhook: Webhook, exported: InMemorySpanExporter
) -> None:
    more: dict[str, Any] = {"metadata": {"traceparent": PARENT}}
    config = posting(webhook, each="transaction")
    config["batch"] = {"max_bytes": 50_000}
    with relaying(outbox.settings(**config)):
        outbox.publish(host(1), *(event(number, **more) for number in range(3_000)))
        wait_until(lambda: len(webhook.accepted) == 1)
        outbox.wait_handled()
    spans = exported.get_finished_spans()
    (processed,), (sent,) = of(spans, "process"), of(spans, "send")
    assert tracing(webhook) == [traceparent(sent.context)]
    assert processed.attributes is not None
    assert processed.attributes["messaging.batch.message_count"] == 3_000


@pytest.mark.brokers
def test_a_message_carries_the_span_of_its_delivery(
    outbox: Outbox, shop: Shop, exported: InMemorySpanExporter, tmp_path: Path
) -> None:
    with started(KafkaCluster, tmp_path / "broker") as broker:
        kafka = {**broker.handler, "topic": "shop.{event_type}"}
        to_kafka: dict[str, Any] = {
            "handlers": {"kafka": kafka},
            "routes": [{"handlers": ["kafka"]}],
        }
        with relaying(outbox.settings(**{**to_kafka, **ON})):
            order = shop.add_rows(host(1), 1)
            wait_until(lambda: broker.count() == 1)
        (message,) = broker.messages()
    (sent,) = exported.get_finished_spans()
    assert is_child(sent, order)
    assert sent.kind is SpanKind.PRODUCER
    assert sent.attributes is not None
    assert sent.attributes["messaging.system"] == "kafka"
    assert sent.attributes["messaging.destination.template"] == "shop.{event_type}"
    assert dict(message.headers())["traceparent"].decode() == traceparent(sent.context)


def test_a_process_sends_its_spans_to_a_collector(
    outbox: Outbox, webhook: Webhook, shop: Shop, tmp_path: Path
) -> None:
    """With the exporter, the variables and the protocol that are used in earnest."""
    config = outbox.config_file(tmp_path / "relay.yaml", **posting(webhook))
    with Collector() as collector:
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
        }
        with running(config, **variables) as process:
            order = shop.add_rows(host(1), 3)
            dead = shop.add_rows(host(2), -3)
            wait_until(lambda: len(webhook.accepted) == 2)
            outbox.wait_handled()
            assert process.terminate() == 0
            lines = process.lines()
        processed, sent = collector.spans("process"), collector.spans("send")
        resource = collector.requests[0].resource_spans[0].resource
    assert len(processed) == len(sent) == 2
    for span in (*processed, *sent):
        parent = order if span.trace_id.hex() == format_trace_id(order.trace_id) else dead
        assert span.parent_span_id.hex() == format_span_id(parent.span_id)
        assert span.trace_id.hex() == format_trace_id(parent.trace_id)
    ids = {f"00-{span.trace_id.hex()}-{span.span_id.hex()}" for span in sent}
    assert {str(each)[:-3] for each in tracing(webhook)} == ids
    said = {each.key: each.value.string_value for each in resource.attributes}
    assert said["service.name"] == "relay"
    assert said["deployment.environment.name"] == "test"
    (dead_letter,) = [line for line in lines if line["message"] == "dead letter"]
    assert dead_letter["trace_id"] == format_trace_id(dead.trace_id)
    assert dead_letter["batch"] > 0


def test_a_process_without_a_collector_relays_and_ends(
    outbox: Outbox, webhook: Webhook, shop: Shop, tmp_path: Path
) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml", **posting(webhook))
    with Collector(status=401) as collector:
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer s3cret",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }
        with running(config, **variables) as process:
            for number in range(3):
                shop.add_rows(host(1), number)
                wait_until(lambda number=number: collector.asked > number)  # type: ignore[misc]
            outbox.wait_handled()
            assert process.terminate() == 0
            text = process.log.read_text()
            said = [line for line in process.lines() if "traces" in line["message"]]
            foreign = [line for line in process.lines() if not line["logger"].startswith("relay")]
    assert len(said) == 1
    assert said[0]["message"].startswith("traces cannot be sent")
    assert foreign == []
    assert "s3cret" not in text
    assert "Traceback" not in text


@pytest.mark.rare
def test_traces_without_the_extra_are_refused(outbox: Outbox, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    (hidden / "opentelemetry").mkdir(parents=True)
    (hidden / "opentelemetry" / "__init__.py").write_text(
        "raise ModuleNotFoundError('none', name='opentelemetry')"
    )
    config = outbox.config_file(tmp_path / "relay.yaml", **ON)
    path = f"{hidden}:{Path.cwd()}"
    done = relay("run", "--config", str(config), PYTHONPATH=path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "relay: observe.traces: needs opentelemetry: install relay-outbox[otel]"
    ]
    done = relay("check", "--config", str(config), PYTHONPATH=path)
    assert done.returncode == 2
    assert "observe.traces: needs opentelemetry: install relay-outbox[otel]" in done.stderr


def test_without_traces_nothing_of_opentelemetry_is_imported(
    outbox: Outbox, tmp_path: Path
) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml")
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, str(config)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "[]\n", done.stderr


IMPORTED = """
import sys
from pathlib import Path
import relay.admin.check
from relay.config.loading import load
from relay.service import Service
Service(load(Path(sys.argv[1])))
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
