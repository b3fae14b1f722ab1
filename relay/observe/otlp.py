"""Sends spans as OTLP over HTTP, and says in relay's words what goes wrong with that.

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
    """An exporter whose failures are logged once, and concern nobody else."""

    def __init__(self, wrapped: SpanExporter) -> None:
        self._wrapped = wrapped
        self._failed = False
        self._lines = RepeatedLines(
            log,
            logging.WARNING,
            "traces cannot be sent: see what OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_EXPORTER_OTLP_HEADERS say",
            "spans",
            _REPEAT_SECONDS,
        )

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans."""
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
        """End."""
        self._wrapped.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is kept here."""
        return self._wrapped.force_flush(timeout_millis)


class _Drops(logging.Filter):
    """Says in relay's words that the queue of spans is full, and nothing else of what the library logs."""

    _lines = RepeatedLines(
        log,
        logging.WARNING,
        "spans are dropped, the queue is full: sample less, or raise OTEL_BSP_MAX_QUEUE_SIZE",
        "spans",
        _REPEAT_SECONDS,
    )

    def filter(self, record: logging.LogRecord) -> bool:
        """Note a line, and let nobody see it."""
        if str(record.msg).startswith("Queue full"):
            self._lines.note(1)
        return False


_DROPS = _Drops()


def exporter() -> SpanExporter:
    """What sends spans: OTLP over HTTP, to where the OTEL_* variables say."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    queue = logging.getLogger("opentelemetry.sdk._shared_internal")
    queue.setLevel(logging.WARNING)
    queue.addFilter(_DROPS)
    return OTLPSpanExporter()
