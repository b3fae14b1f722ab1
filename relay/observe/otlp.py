"""Exports spans as OTLP over HTTP, and logs failures as relay's own log lines.

Source: OpenTelemetry specification, "OpenTelemetry Protocol Exporter".
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from relay.logs import RepeatedLines

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
