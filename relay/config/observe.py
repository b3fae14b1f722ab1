"""The section `observe` of the configuration: where relay shows what it does."""

from __future__ import annotations

import re
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from relay.config.types import Seconds, Secret, Section

_ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>\d{1,5})")
_MOST_PORT = 65_535
_LEAST_TOKEN = 16
"""Characters: a shorter token can be guessed."""


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int


def address(value: Any) -> Address:
    """An address such as `127.0.0.1:9464` or `[::1]:9464`; port 0 takes a free one. Raises ValueError."""
    if isinstance(value, Address):
        return value
    found = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    if found is None or int(found["port"]) > _MOST_PORT:
        raise ValueError("must be an address and a port, such as 127.0.0.1:9464 or [::1]:9464")
    return Address(found["v6"] or found["host"], int(found["port"]))


Listen = Annotated[Address, BeforeValidator(address)]


class ConsoleSettings(Section):
    """The console and its HTTP API.

    Whoever sends `token` may use them. With `user_header` a reverse proxy says who it is, in this header: nothing else
    may then reach the address.
    """

    listen: Listen
    """Where the console is served; plain HTTP."""
    token: Secret | None = None
    """What gives access: 16 characters or more. This or `user_header` is required."""
    user_header: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,100}$")] | None = None
    """The header in which a reverse proxy names the user; with a `token`, it counts only beside that."""

    @model_validator(mode="after")
    def _is_guarded(self) -> ConsoleSettings:
        if self.token is None and self.user_header is None:
            raise ValueError(
                "needs a token, or the user_header of a reverse proxy: without one, whoever reaches the address could "
                "replay and discard events"
            )
        return self

    @model_validator(mode="after")
    def _token_is_long(self) -> ConsoleSettings:
        if self.token is not None and len(self.token.get_secret_value()) < _LEAST_TOKEN:
            raise ValueError(f"token must have {_LEAST_TOKEN} characters or more")
        return self


class ObserveSettings(Section):
    """Metrics and health at `listen`, traces, and the console. Everything is off by default.

    For `/livez`, relay hangs if a thread shows no sign of life for `stall_seconds`, or works on one thing for
    `busy_seconds`.
    """

    listen: Listen | None = None
    """Where /metrics, /livez, /readyz and /healthz are served; null: nowhere."""
    traces: bool = False
    """Send traces of OpenTelemetry, as its OTEL_* variables say."""
    console: ConsoleSettings | None = None
    """The console and its HTTP API; null: off."""
    stall_seconds: Annotated[Seconds, Field(ge=2)] = 20.0
    """/livez is bad if a thread, or a handler, shows no sign of life for so many seconds."""
    busy_seconds: Annotated[Seconds, Field(ge=30)] = 900.0
    """/livez is bad if a thread or a handler works on one thing of its own for so many seconds."""

    @property
    def observes(self) -> bool:
        """Whether anybody looks at a running relay."""
        return self.listen is not None or self.console is not None
