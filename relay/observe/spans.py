"""Spans of OpenTelemetry: of batches, of business transactions in the target, and of deliveries to sinks.

Sources: OpenTelemetry specification, "Environment Variable Specification"; its semantic conventions, "Semantic
conventions for messaging spans".
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from threading import Thread
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
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
from relay.config.handlers import BrokerHandler, DeliveryHandler, HttpHandler
from relay.faults import describe
from relay.handlers import Sink
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
from relay.observe.otlp import Reporting, exporter
from relay.pipeline.tracing import add
from relay.store.groups import INSTANCE

log = logging.getLogger(__name__)

FLUSH_SECONDS = 5.0
"""How long the process waits at most, at its end, for spans to be sent."""
MOST_LINKS = 128
"""How many publishers a batch's span is linked to at most."""
MOST_READ = 128
"""How many events of a delivery are looked at for their context, before it begins."""
_EPOCH = POSTGRES_EPOCH.timestamp()

Attributes = dict[str, AttributeValue]


class Traces:
    """Makes spans and sends them, in threads of its own. What cannot be sent is dropped.

    Spans are made only for events whose publisher's trace is sampled; OTEL_TRACES_SAMPLER can leave some of them out.
    """

    def __init__(self, group: str, table: str) -> None:
        """`table` is the outbox."""
        resource = Resource.create(_resource())
        # Other code of the process, as handlers in Python, may have a provider of its own.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(Reporting(exporter())))
        self._tracer = self._provider.get_tracer("relay", __version__)
        self._group, self._table = group, table
        self._common: Attributes = {
            "messaging.system": "postgresql",
            "messaging.destination.name": table,
            "messaging.consumer.group.name": group,
        }

    def note(self, batch: Batch, outcome: Outcome, seconds: float) -> None:
        """Make the spans of a batch that has just become durable, so many seconds after it was taken."""
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

    def redelivered(self, trace_record: TraceRecord | None) -> None:
        """Make the spans of transactions of `relay.deferred` that were retried."""
        if trace_record is not None:
            with _harmless():
                self._processed(trace_record, {"relay.redelivery": True}, [])

    def around(self, name: str, sink: Sink, settings: DeliveryHandler) -> Sink:
        """The same sink, whose deliveries have spans."""
        return _TracedSink(self, name, sink, settings)

    def close(self) -> None:
        """Send what is left, within FLUSH_SECONDS."""
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
                _judge(span, traced)
                span.end(trace_record.committed)

    def start_delivery(
        self,
        name: str,
        kind: SpanKind,
        origin: PublishOrigin,
        transaction: Transaction,
        more: Attributes,
    ) -> Span:
        """A span that begins now, for an attempt to deliver the events of one origin."""
        return self._tracer.start_span(
            f"send {name}",
            parent(origin.context),
            kind,
            {
                **more,
                **_of_events(origin, transaction.transaction_id, len(transaction) <= MOST_READ),
                "messaging.operation.name": "send",
                "messaging.operation.type": "send",
                "relay.sink": name,
            },
        )


class _TracedSink:
    """A sink with a span for each attempt to deliver, and for each context that the events were published in.

    Messages and requests carry the span of their event, or the publisher's own context where that is not sampled.
    """

    def __init__(self, traces: Traces, name: str, sink: Sink, settings: DeliveryHandler) -> None:
        self.name = name
        self._traces = traces
        self._sink = sink
        self._kind = SpanKind.CLIENT if isinstance(settings, HttpHandler) else SpanKind.PRODUCER
        self._attributes = _of_destination(settings)

    async def close(self) -> None:
        """Close the connections."""
        await self._sink.close()

    async def deliver(self, transaction: Transaction) -> None:
        """Deliver all events of a transaction. Raises what the sink raises."""
        spans: dict[TraceContext, Span] = {}
        sent: dict[TraceContext, Headers] = {}
        with _harmless():
            for context, origin in _origins(transaction.events).items():
                spans[context] = self._traces.start_delivery(
                    self.name, self._kind, origin, transaction, self._attributes
                )
                sent[context] = _headers(spans[context].get_span_context())

        def headers(event: Event) -> Headers:
            context = parse(event.text("metadata"))
            if context is None:
                return {}
            return sent.get(context) or context.headers

        try:
            with carrying(headers), _current(spans.values()):
                await self._sink.deliver(transaction)
        except BaseException as error:
            for span in spans.values():
                span.set_status(StatusCode.ERROR, describe(error))
                span.set_attribute("error.type", type(error).__name__)
            raise
        finally:
            now = time.time_ns()
            with _harmless():
                for span in spans.values():
                    span.set_attributes(_of_commit(transaction.commit.ts, now))
                    span.end(now)


def parent(context: TraceContext) -> Context:
    """A context whose current span is the publisher's."""
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
    """The sampled contexts in which events were published."""
    found: dict[TraceContext, PublishOrigin] = {}
    for event in islice(events, MOST_READ):
        context = parse(event.text("metadata"))
        if context is not None and context.sampled:
            add(found, context, event.text("id"))
    return found


@contextmanager
def _harmless() -> Iterator[None]:
    """Relaying goes on, whatever goes wrong with spans."""
    try:
        yield
    except Exception as error:
        log.warning("spans cannot be made", extra={"fault": describe(error)})


@contextmanager
def _current(spans: Iterable[Span]) -> Iterator[None]:
    """Let log lines, and what the client libraries are instrumented with, see the first of some spans."""
    first = next(iter(spans), None)
    if first is None:
        yield
        return
    with use_span(first, record_exception=False, set_status_on_exception=False):
        yield


def _judge(span: Span, traced: Traced) -> None:
    if traced.fault is None:
        return
    span.set_status(StatusCode.ERROR, traced.fault)
    span.set_attribute("error.type", traced.fault.partition(":")[0])
    if traced.handler is not None:
        span.set_attribute("relay.handler", traced.handler)


def _of_events(
    origin: PublishOrigin, transaction_id: str | None, counted: bool = True
) -> Attributes:
    found: Attributes = {}
    if transaction_id is not None:
        found["messaging.message.conversation_id"] = transaction_id
    if not counted:
        return found
    if origin.events > 1:
        found["messaging.batch.message_count"] = origin.events
    elif origin.event_id is not None:
        found["messaging.message.id"] = origin.event_id
    return found


def _of_commit(committed: int, now: int) -> Attributes:
    """How long after the source's commit something ended; nothing where the commit's time is not known.

    The clock of the source may be ahead of this machine's.
    """
    if not committed:
        return {}
    return {"relay.seconds_since_commit": max(0.0, now / 1e9 - _EPOCH - committed / 1e6)}


def _of_destination(settings: DeliveryHandler) -> Attributes:
    """What may be said of a destination: never a path or a query, which may hold a secret."""
    if isinstance(settings, HttpHandler):
        parts = urlsplit(settings.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return {
            "http.request.method": "POST",
            "server.address": parts.hostname or "",
            "server.port": port,
        }
    kind = str(getattr(settings, "type", ""))
    if isinstance(settings, BrokerHandler):
        return {"messaging.system": kind, "messaging.destination.template": settings.topic}
    return {"messaging.system": kind}


def _resource() -> Mapping[str, str]:
    """What spans say of this process, where the environment does not."""
    known = {SERVICE_VERSION: __version__, SERVICE_INSTANCE_ID: INSTANCE}
    if not os.environ.get("OTEL_SERVICE_NAME"):
        known[SERVICE_NAME] = "relay"
    given = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    names = {pair.partition("=")[0].strip() for pair in given.split(",")}
    return {name: value for name, value in known.items() if name not in names}
