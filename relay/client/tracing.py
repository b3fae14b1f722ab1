"""The trace in which an event is published, where the service uses OpenTelemetry."""

from __future__ import annotations

import sys


def context() -> dict[str, str]:
    """W3C `traceparent` and what goes with it, for an event's metadata; empty without a current span."""
    # Who has a span has imported this.
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or not trace.get_current_span().get_span_context().is_valid:
        return {}
    from opentelemetry.propagate import inject

    carrier: dict[str, str] = {}
    inject(carrier)
    return carrier
