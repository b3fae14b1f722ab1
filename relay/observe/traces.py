"""Whether traces are sent. Nothing of OpenTelemetry is imported unless they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from relay.config.settings import Settings
from relay.faults import ConfigurationError

if TYPE_CHECKING:
    from relay.observe.spans import Traces


def open_traces(settings: Settings) -> Traces | None:
    """What makes spans; None with `observe.traces: false`. Raises ConfigurationError where they cannot be sent."""
    if not settings.observe.traces:
        return None
    with _named():
        from relay.observe.spans import Traces

        return Traces(settings.group, settings.source.table)


def require_exporter() -> None:
    """Raise ConfigurationError if the extra is missing, or one of its variables cannot be used."""
    with _named():
        from relay.observe.otlp import exporter

        exporter().shutdown()


@contextmanager
def _named() -> Iterator[None]:
    """Say which extra is missing, or that it is the environment which is wrong."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"observe.traces: needs {error.name}: install relay-outbox[otel]"
        ) from None
    except (OSError, ValueError) as error:
        # What the variables say may hold a token.
        raise ConfigurationError(
            f"environment: OpenTelemetry cannot use the variables OTEL_* ({type(error).__name__}): correct them, or "
            "set observe.traces: false"
        ) from None
