"""Opens the traces if they are configured; otherwise it imports nothing of OpenTelemetry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from relay.config.settings import Settings
from relay.faults import ConfigurationError

if TYPE_CHECKING:
    from relay.observe.spans import Traces


def open_traces(settings: Settings) -> Traces | None:
    """Return the traces; None with `observe.traces: false`. Raises ConfigurationError if spans cannot be exported."""
    if not settings.observe.traces:
        return None
    with _named():
        from relay.observe.spans import Traces

        return Traces(settings.group, settings.source.table)


def require_exporter() -> None:
    """Raise ConfigurationError if the extra `otel` is not installed, or a variable of OpenTelemetry is invalid."""
    with _named():
        from relay.observe.spans import exporter

        exporter().shutdown()


@contextmanager
def _named() -> Iterator[None]:
    """Raise ConfigurationError for the errors of a missing extra or an invalid environment."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"observe.traces: needs {error.name}: install relay-outbox[otel]"
        ) from None
    except (OSError, ValueError) as error:
        # Without the error's text: the values of the variables may hold a token.
        raise ConfigurationError(
            f"environment: OpenTelemetry cannot use the variables OTEL_* ({type(error).__name__}): correct them, or "
            "set observe.traces: false"
        ) from None
