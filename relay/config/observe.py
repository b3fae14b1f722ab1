"""The section `observe`: metrics, health, traces and the console."""

from __future__ import annotations

import re
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from relay.config.secrets import Secret, known_text
from relay.config.types import Seconds, Section

_ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>\d{1,5})")
_MOST_PORT = 65_535
LEAST_TOKEN = 16
"""The least characters of a token: a shorter one can be guessed."""


class Address(NamedTuple):
    """The address at which a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        """The address as it is written in the configuration."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address(value: Any) -> Address:
    """Parse an address such as `127.0.0.1:9464` or `[::1]:9464`; port 0 takes a free port. Raises ValueError."""
    if isinstance(value, Address):
        return value
    match = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match["port"]) > _MOST_PORT:
        raise ValueError("must be an address and a port, such as 127.0.0.1:9464 or [::1]:9464")
    return Address(match["v6"] or match["host"], int(match["port"]))


Listen = Annotated[Address, BeforeValidator(address)]


class ConsoleSettings(Section):
    """The console and its HTTP API.

    `token` gives access to both. With `user_header`, a reverse proxy names the user in this header; only the proxy may
    then reach the address.
    """

    listen: Listen
    """The address of the console; plain HTTP."""
    token: Secret | None = None
    """The token that gives access: 16 characters or more. This or `user_header` is required."""
    user_header: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,100}$")] | None = None
    """The header in which a reverse proxy names the user; with a `token`, it counts only together with that."""

    @model_validator(mode="after")
    def _is_guarded(self) -> ConsoleSettings:
        if self.token is None and self.user_header is None:
            raise ValueError(
                "needs a token, or the user_header of a reverse proxy: without one, anyone who reaches the address "
                "could replay and discard events"
            )
        return self

    @model_validator(mode="after")
    def _token_is_long(self) -> ConsoleSettings:
        known = None if self.token is None else known_text(self.token)
        if known is not None and len(known) < LEAST_TOKEN:
            raise ValueError(f"token must have {LEAST_TOKEN} characters or more")
        return self


class ObserveSettings(Section):
    """Metrics and health at `listen`, traces, and the console. Everything is off by default.

    `/livez` reports that relay hangs if a thread has no heartbeat for `stall_seconds`, or one operation of it takes
    `busy_seconds`.
    """

    listen: Listen | None = None
    """The address of /metrics, /livez, /readyz and /healthz; null: off."""
    traces: bool = False
    """Send OpenTelemetry traces, as the OTEL_* variables say."""
    console: ConsoleSettings | None = None
    """The console and its HTTP API; null: off."""
    stall_seconds: Annotated[Seconds, Field(ge=2)] = 20.0
    """The seconds without a heartbeat of a thread or a handler after which /livez fails."""
    busy_seconds: Annotated[Seconds, Field(ge=30)] = 900.0
    """The seconds that one operation of a thread or a handler may take before /livez fails."""

    @property
    def observes(self) -> bool:
        """Whether relay serves metrics, health or the console."""
        return self.listen is not None or self.console is not None
