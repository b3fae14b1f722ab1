"""A service that publishes under OpenTelemetry, and a collector of relay's spans."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from uuid import UUID

import psycopg
import sqlalchemy
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler
from opentelemetry.trace import SpanContext, format_span_id, format_trace_id
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from relay.client import Event
from relay.client import Outbox as Client


class Shop:
    """A service that stores orders with SQLAlchemy, each in a span."""

    def __init__(self, dsn: str) -> None:
        self._engine = sqlalchemy.create_engine(
            "postgresql+psycopg://", creator=lambda: psycopg.connect(dsn), poolclass=NullPool
        )

    def add_rows(self, host: UUID, *amounts: int, sampled: bool = True) -> SpanContext:
        """Publish an event for each amount in one transaction, and return the span of the transaction."""
        sampler: Sampler = ALWAYS_ON if sampled else ALWAYS_OFF
        tracer = TracerProvider(sampler=sampler, shutdown_on_exit=False).get_tracer("shop")
        with (
            Session(self._engine) as session,
            tracer.start_as_current_span("POST /orders") as span,
            session.begin(),
        ):
            events = [
                Event("order.placed", aggregate=("Order", amount), payload={"amount": amount})
                for amount in amounts
            ]
            Client().publish(session, events, host_id=host)
        return span.get_span_context()


def of(spans: Sequence[ReadableSpan], name: str) -> list[ReadableSpan]:
    """The spans whose name begins with `name`, ordered by their start."""
    named = [span for span in spans if span.name.startswith(name)]
    return sorted(named, key=lambda span: span.start_time or 0)


def is_child(span: ReadableSpan, parent: SpanContext) -> bool:
    """Whether a span is a child of another."""
    assert span.context is not None
    return (
        span.parent is not None
        and span.parent.span_id == parent.span_id
        and span.context.trace_id == parent.trace_id
    )


def traceparent(context: SpanContext | None) -> str:
    """The header `traceparent` of a context."""
    assert context is not None
    ids = f"{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}"
    return f"00-{ids}-{int(context.trace_flags):02x}"


class Collector:
    """An OTLP/HTTP receiver, which keeps the requests as protocol messages."""

    def __init__(self, status: int = 200) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.asked = 0
        self.status = status
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def spans(self, name: str) -> list[Any]:
        """The received spans whose name begins with `name`."""
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
            if span.name.startswith(name)
        ]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.asked += 1
                if collector.status == 200 and self.path == "/v1/traces":
                    collector.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler
