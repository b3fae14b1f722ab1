"""Creates OpenTelemetry spans of batches, of business transactions in the target, and of deliveries to sinks.

They are exported as OTLP over HTTP; failures are logged as relay's own log lines. Sources: OpenTelemetry specification,
"Environment Variable Specification" and "OpenTelemetry Protocol Exporter"; its semantic conventions, "Semantic
conventions for messaging spans".
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from threading import Thread
from typing import cast
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    format_span_id,
    format_trace_id,
    set_span_in_context,
    use_span,
)
from opentelemetry.trace.span import TraceState
from opentelemetry.util.types import AttributeValue

from relay import __version__
from relay.config.handlers import BrokerHandler, DeliveryHandler, FunctionHandler, HttpHandler
from relay.faults import describe
from relay.logs import RepeatedLines
from relay.model.batch import Batch, JobName, Outcome
from relay.model.events import POSTGRES_EPOCH, Event, Transaction
from relay.model.trace_context import (
    Headers,
    PublishOrigin,
    TraceContext,
    Traced,
    TraceRecord,
    carrying,
    parse,
)
from relay.pipeline.apply import Handled
from relay.pipeline.listeners import BatchListener
from relay.pipeline.tracing import add
from relay.runtime.parts import Part
from relay.sinks import BatchSink, OfBatch, Sink
from relay.store.connections import INSTANCE

log = logging.getLogger(__name__)

_REPEAT_SECONDS = 300.0


class Reporting(SpanExporter):
    """An exporter that logs failures at intervals, and raises none."""

    def __init__(self, wrapped: SpanExporter) -> None:
        self._wrapped = wrapped
        self._failed = False
        self._lines = RepeatedLines(
            log,
            logging.WARNING,
            "traces cannot be sent: check OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_EXPORTER_OTLP_HEADERS",
            "spans",
            _REPEAT_SECONDS,
        )

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export spans."""
        try:
            result = self._wrapped.export(spans)
        except Exception:
            result = SpanExportResult.FAILURE
        if result is not SpanExportResult.SUCCESS:
            self._failed = True
            self._lines.note(len(spans))
        elif self._failed:
            self._failed = False
            log.info("traces are sent again")
        return result

    def shutdown(self) -> None:
        """Shut the wrapped exporter down."""
        self._wrapped.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Flush the wrapped exporter."""
        return self._wrapped.force_flush(timeout_millis)


class _Drops(logging.Filter):
    """Replaces the library's log lines by one of relay's when the queue of spans is full."""

    _lines = RepeatedLines(
        log,
        logging.WARNING,
        "spans are dropped because the queue is full: sample fewer, or raise OTEL_BSP_MAX_QUEUE_SIZE",
        "spans",
        _REPEAT_SECONDS,
    )

    def filter(self, record: logging.LogRecord) -> bool:
        """Count a dropped span, and drop every line."""
        if str(record.msg).startswith("Queue full"):
            self._lines.note(1)
        return False


_DROPS = _Drops()


def exporter() -> SpanExporter:
    """Return an exporter of OTLP over HTTP that the OTEL_* variables configure."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    queue = logging.getLogger("opentelemetry.sdk._shared_internal")
    queue.setLevel(logging.WARNING)
    queue.addFilter(_DROPS)
    return OTLPSpanExporter()


FLUSH_SECONDS = 5.0
"""Longest wait, when the process ends, for spans to be sent."""
MOST_LINKS = 128
"""Largest number of publishers that a batch's span links to."""
MOST_READ = 128
"""Largest number of events of a delivery whose trace contexts are read."""
_EPOCH = POSTGRES_EPOCH.timestamp()

Attributes = dict[str, AttributeValue]


class Traces(BatchListener, Part):
    """Creates spans, and sends them in a thread of its own. Spans that cannot be sent are dropped.

    Only events whose publisher's trace is sampled have spans; OTEL_TRACES_SAMPLER can exclude more.
    """

    def __init__(self, group: str, table: str) -> None:
        """`table` is the outbox."""
        resource = Resource.create(_resource())
        # Not the global provider: other code of the process, such as Python handlers, may set that.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(Reporting(exporter())))
        self._tracer = self._provider.get_tracer("relay", __version__)
        self._group, self._table = group, table
        self._common: Attributes = {
            "messaging.system": "postgresql",
            "messaging.destination.name": table,
            "messaging.consumer.group.name": group,
        }

    def durable(self, batch: Batch, outcome: Outcome, seconds: float) -> None:
        """Create the spans of a batch that is durable now, `seconds` after it was taken from the source."""
        trace_records = [
            task.trace_record for task in outcome.tasks if task.trace_record is not None
        ]
        if trace_records:
            with _harmless():
                self._applied(batch, outcome, trace_records, seconds)

    def _applied(
        self, batch: Batch, outcome: Outcome, trace_records: Sequence[TraceRecord], seconds: float
    ) -> None:
        now = time.time_ns()
        traced = [one for trace_record in trace_records for one in trace_record.traced]
        contexts = dict.fromkeys(origin.context for one in traced for origin in one.origins)
        span = self._tracer.start_span(
            "apply batch",
            Context(),
            attributes={
                **self._common,
                "messaging.batch.message_count": batch.events,
                "relay.batch.number": batch.number,
                "relay.batch.job": JobName.of(self._group, batch, 1).group,
                "relay.engine": outcome.engine,
                "relay.engine.reason": outcome.reason,
                "relay.events.applied": outcome.applied,
                "relay.events.skipped": outcome.skipped,
                "relay.events.deferred": outcome.deferred,
                "relay.events.dead": sum(dead.events for dead in outcome.dead),
                "relay.transactions.traced": len(traced),
                "relay.transactions.left_out": sum(
                    trace_record.left_out for trace_record in trace_records
                ),
            },
            links=[Link(_span_context(each)) for each in islice(contexts, MOST_LINKS)],
            start_time=now - int(seconds * 1e9),
        )
        links = [Link(span.get_span_context())]
        more: Attributes = {"relay.batch.number": batch.number, "relay.engine": outcome.engine}
        for trace_record in trace_records:
            self._processed(trace_record, more, links)
        span.end(now)

    def redelivered(self, retried: Handled) -> None:
        """Create the spans of retried transactions of `relay.deferred`."""
        trace_record = retried.trace_record
        if trace_record is not None:
            with _harmless():
                self._processed(trace_record, {"relay.redelivery": True}, [])

    def around(self, name: str, sink: Sink, settings: DeliveryHandler) -> Sink:
        """Return the sink with spans for its deliveries."""
        return _TracedSink(self, name, sink, settings)

    def close(self) -> None:
        """Send the remaining spans, within FLUSH_SECONDS."""
        closing = Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(FLUSH_SECONDS)

    def _processed(
        self, trace_record: TraceRecord, more: Attributes, links: Sequence[Link]
    ) -> None:
        for traced in trace_record.traced:
            for origin in traced.origins:
                span = self._tracer.start_span(
                    f"process {self._table}",
                    parent(origin.context),
                    SpanKind.CONSUMER,
                    {
                        **self._common,
                        **more,
                        **_of_events(origin, traced.transaction_id),
                        **_of_commit(traced.committed, trace_record.committed),
                        "messaging.operation.name": "process",
                        "messaging.operation.type": "process",
                        "relay.handlers": traced.handlers,
                        "relay.disposition": traced.disposition,
                        "relay.attempt": traced.attempts + 1,
                    },
                    links,
                    trace_record.began,
                )
                _set_fault(span, traced)
                span.end(trace_record.committed)

    def start_delivery(
        self,
        name: str,
        kind: SpanKind,
        origin: PublishOrigin,
        transaction: Transaction,
        more: Attributes,
    ) -> Span:
        """Start a span for an attempt to deliver the events of one origin."""
        operation = "process" if kind is SpanKind.CONSUMER else "send"
        return self._tracer.start_span(
            f"{operation} {name}",
            parent(origin.context),
            kind,
            {
                **more,
                **_of_events(origin, transaction.transaction_id, len(transaction) <= MOST_READ),
                "messaging.operation.name": operation,
                "messaging.operation.type": operation,
                "relay.sink": name,
            },
        )


class _TracedSink:
    """A sink with spans: one for each delivery attempt and for each context in which its events were published.

    Messages and requests carry the span of their event, or the publisher's context if that is not sampled.
    """

    def __init__(self, traces: Traces, name: str, sink: Sink, settings: DeliveryHandler) -> None:
        self.name = name
        self._traces = traces
        self._sink = sink
        self._kind = _kind(settings)
        self._attributes = _of_destination(settings)

    async def close(self) -> None:
        """Close the connections."""
        await self._sink.close()

    def resume(self, series: str) -> None:
        """Prepare for deliveries from the sink's stored position."""
        self._sink.resume(series)

    async def deliver(self, transaction: Transaction) -> None:
        """Deliver all events of a transaction. Raises what the sink raises."""
        spans = self._begun(transaction)
        try:
            with carrying(_carried(spans)), _current(spans.values()):
                await self._sink.deliver(transaction)
        except BaseException as error:
            _end(transaction, spans, error)
            raise
        _end(transaction, spans, None)

    async def deliver_batch(
        self, transactions: Sequence[Transaction]
    ) -> Sequence[Exception | None]:
        """Deliver many transactions, each with spans of its own. Raises what the sink raises."""
        spans = [self._begun(each) for each in transactions]
        joined = {context: span for some in spans for context, span in some.items()}
        try:
            with carrying(_carried(joined)):
                results = await cast(BatchSink, self._sink).deliver_batch(transactions)
        except BaseException as error:
            for transaction, some in zip(transactions, spans, strict=True):
                _end(transaction, some, error)
            raise
        for transaction, some, result in zip(transactions, spans, results, strict=True):
            _end(transaction, some, result.fault if isinstance(result, OfBatch) else result)
        return results

    def _begun(self, transaction: Transaction) -> dict[TraceContext, Span]:
        spans: dict[TraceContext, Span] = {}
        with _harmless():
            for context, origin in _origins(transaction.events).items():
                spans[context] = self._traces.start_delivery(
                    self.name, self._kind, origin, transaction, self._attributes
                )
        return spans


def _carried(spans: Mapping[TraceContext, Span]) -> Callable[[Event], Headers]:
    """Return a function that gives an event the headers of its span, or of the publisher's context."""
    sent: dict[TraceContext, Headers] = {}
    with _harmless():
        sent |= {context: _headers(span.get_span_context()) for context, span in spans.items()}

    def headers(event: Event) -> Headers:
        context = parse(event.text("metadata"))
        if context is None:
            return {}
        return sent.get(context) or context.headers

    return headers


def _end(
    transaction: Transaction, spans: Mapping[TraceContext, Span], error: BaseException | None
) -> None:
    """End the spans of an attempt, which has failed with `error`."""
    now = time.time_ns()
    with _harmless():
        for span in spans.values():
            if error is not None:
                span.set_status(StatusCode.ERROR, describe(error))
                span.set_attribute("error.type", type(error).__name__)
            span.set_attributes(_of_commit(transaction.commit.ts, now))
            span.end(now)


def parent(context: TraceContext) -> Context:
    """Return a context whose current span is the publisher's."""
    return set_span_in_context(NonRecordingSpan(_span_context(context)), Context())


def _span_context(context: TraceContext) -> SpanContext:
    return SpanContext(
        int(context.trace_id, 16),
        int(context.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(context.flags),
        trace_state=TraceState.from_header([context.state]) if context.state else None,
    )


def _headers(context: SpanContext) -> Headers:
    state = context.trace_state.to_header() if context.trace_state else ""
    ids = format_trace_id(context.trace_id), format_span_id(context.span_id)
    return TraceContext(*ids, int(context.trace_flags), state).headers


def _origins(events: Iterable[Event]) -> Mapping[TraceContext, PublishOrigin]:
    """Return the sampled contexts in which events were published."""
    origins: dict[TraceContext, PublishOrigin] = {}
    for event in islice(events, MOST_READ):
        context = parse(event.text("metadata"))
        if context is not None and context.sampled:
            add(origins, context, event.text("id"))
    return origins


@contextmanager
def _harmless() -> Iterator[None]:
    """Log errors of spans instead of raising them: they must not stop relaying."""
    try:
        yield
    except Exception as error:
        log.warning("cannot create spans", extra={"fault": describe(error)})


@contextmanager
def _current(spans: Iterable[Span]) -> Iterator[None]:
    """Make the first of some spans the current one, for log lines and instrumented client libraries."""
    first = next(iter(spans), None)
    if first is None:
        yield
        return
    with use_span(first, record_exception=False, set_status_on_exception=False):
        yield


def _set_fault(span: Span, traced: Traced) -> None:
    if traced.fault is None:
        return
    span.set_status(StatusCode.ERROR, traced.fault)
    span.set_attribute("error.type", traced.fault.partition(":")[0])
    if traced.handler is not None:
        span.set_attribute("relay.handler", traced.handler)


def _of_events(
    origin: PublishOrigin, transaction_id: str | None, counted: bool = True
) -> Attributes:
    attributes: Attributes = {}
    if transaction_id is not None:
        attributes["messaging.message.conversation_id"] = transaction_id
    if not counted:
        return attributes
    if origin.events > 1:
        attributes["messaging.batch.message_count"] = origin.events
    elif origin.event_id is not None:
        attributes["messaging.message.id"] = origin.event_id
    return attributes


def _of_commit(committed: int, now: int) -> Attributes:
    """Return the time since the source's commit; nothing if the time of the commit is unknown.

    It is never negative, since the clock of the source may be ahead.
    """
    if not committed:
        return {}
    return {"relay.seconds_since_commit": max(0.0, now / 1e9 - _EPOCH - committed / 1e6)}


def _kind(settings: DeliveryHandler) -> SpanKind:
    if isinstance(settings, HttpHandler):
        return SpanKind.CLIENT
    return SpanKind.CONSUMER if isinstance(settings, FunctionHandler) else SpanKind.PRODUCER


def _of_destination(settings: DeliveryHandler) -> Attributes:
    """Return the attributes of a destination, without path and query, which may hold a secret."""
    if isinstance(settings, HttpHandler):
        parts = urlsplit(settings.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return {
            "http.request.method": "POST",
            "server.address": parts.hostname or "",
            "server.port": port,
        }
    if isinstance(settings, FunctionHandler):
        return {"messaging.system": "postgresql", "code.function.name": settings.callable}
    kind = str(getattr(settings, "type", ""))
    if isinstance(settings, BrokerHandler):
        return {"messaging.system": kind, "messaging.destination.template": settings.topic}
    return {"messaging.system": kind}


def _resource() -> Mapping[str, str]:
    """Return attributes of this process that the environment does not set."""
    known = {SERVICE_VERSION: __version__, SERVICE_INSTANCE_ID: INSTANCE}
    if not os.environ.get("OTEL_SERVICE_NAME"):
        known[SERVICE_NAME] = "relay"
    given = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    names = {pair.partition("=")[0].strip() for pair in given.split(",")}
    return {name: value for name, value in known.items() if name not in names}
