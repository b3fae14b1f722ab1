"""Serves an application from a thread of its own, beside relay or alone."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from threading import Thread
from typing import TYPE_CHECKING, Self

from relay.config.settings import Address
from relay.faults import ConfigurationError
from relay.runtime import forks

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger(__name__)

_GRACE_SECONDS = 2
_END_SECONDS = 5.0
"""Longest wait of the process for requests in flight when it ends."""
_BACKLOG = 128


class Server:
    """The server of an application, from `start` to `close`."""

    def __init__(
        self,
        create: Callable[[], FastAPI],
        listen: Address,
        *,
        key: str,
        name: str,
        requests: int,
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        """`key` is the configuration key of the section, whose `listen` is the address, `name` that of the log lines.

        It has at most so many concurrent `requests`; further ones get status 503. `stop` ends those that would not end
        by themselves. Raises ConfigurationError if a package of the extra `console` is not installed.
        """
        try:
            import uvicorn

            from relay.web.protocol import IdleTimeoutProtocol

            app = create()
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "relay":
                raise
            raise ConfigurationError(
                f"{key}: {error.name} is not installed: install relay-outbox[console]"
            ) from None
        self._listen = listen
        self._key, self._name, self._stop = key, name, stop
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,
                # Any client can cause warnings, which would fill the log.
                log_level="error",
                http=IdleTimeoutProtocol,
                ws="none",
                access_log=False,
                lifespan="off",
                server_header=False,
                limit_concurrency=requests,
                timeout_graceful_shutdown=_GRACE_SECONDS,
            )
        )
        self._socket: socket.socket | None = None
        # A daemon, so that a request that waits for a database does not keep the process alive.
        self._thread = Thread(target=self._serve, name=f"relay {name}", daemon=True)

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
            # `create_server` adds the address to the reason.
            reason = str(error.strerror).partition(" (while")[0]
            raise ConfigurationError(
                f"{self._key}.listen: cannot listen on {self._listen}: {reason}: choose another address"
            ) from None
        self._thread.start()
        address = str(self._listen._replace(port=self.port))
        log.info(f"the {self._name} is served", extra={"address": address})

    def close(self) -> None:
        """Stop serving; waits five seconds at most for requests in flight."""
        self._server.should_exit = True
        self._stop()
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
