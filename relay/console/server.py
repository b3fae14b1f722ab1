"""Serves the console from a thread of its own, beside relay or alone."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from threading import Thread
from typing import Self

from relay.config.settings import ConsoleSettings, Settings
from relay.faults import ConfigurationError
from relay.runtime import forks

log = logging.getLogger(__name__)

_GRACE_SECONDS = 2
_END_SECONDS = 5.0
"""Longest wait of the process for requests in flight when it ends."""
_BACKLOG = 128
_REQUESTS = 64
"""Largest number of concurrent requests; further ones get status 503."""


class Server:
    """The server of a console for some groups, from `start` to `close`."""

    def __init__(self, groups: Sequence[Settings], console: ConsoleSettings) -> None:
        """Raises ConfigurationError if a package of the extra `console` is not installed."""
        try:
            import uvicorn

            from relay.console.app import IdleTimeoutProtocol, create_app
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "relay":
                raise
            raise ConfigurationError(
                f"observe.console: {error.name} is not installed: install relay-outbox[console]"
            ) from None
        self._listen = console.listen
        self._server = uvicorn.Server(
            uvicorn.Config(
                create_app(groups, console),
                log_config=None,
                # Any client can cause warnings, which would fill the log.
                log_level="error",
                http=IdleTimeoutProtocol,
                ws="none",
                access_log=False,
                lifespan="off",
                server_header=False,
                limit_concurrency=_REQUESTS,
                timeout_graceful_shutdown=_GRACE_SECONDS,
            )
        )
        self._socket: socket.socket | None = None
        # A daemon, so that a request that waits for a database does not keep the process alive.
        self._thread = Thread(target=self._serve, name="relay console", daemon=True)

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        assert self._socket is not None  # noqa: S101
        return int(self._socket.getsockname()[1])

    def start(self) -> None:
        """Listen and serve. Raises ConfigurationError if it cannot listen at the address."""
        host, port = self._listen
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
            forks.keep(self._socket)
        except OSError as error:
            raise ConfigurationError(
                f"observe.console.listen: cannot listen on {self._listen}: {error.strerror}: choose another address"
            ) from None
        self._thread.start()
        log.info(
            "the console is served", extra={"address": str(self._listen._replace(port=self.port))}
        )

    def close(self) -> None:
        """Stop serving; waits five seconds at most for requests in flight."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(_END_SECONDS)
        if self._socket is not None:
            self._socket.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        assert self._socket is not None  # noqa: S101
        self._server.run(sockets=[self._socket])
