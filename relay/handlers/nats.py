"""Handlers that publish events to NATS JetStream; `Nats-Msg-Id` lets the stream drop what comes twice.

The client is asynchronous, so each handler has an event loop in a thread of its own.

Sources: NATS documentation, "JetStream Model Deep Dive", message deduplication; CloudEvents, "NATS Protocol Binding".
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from threading import Thread
from typing import Any

from nats.aio.client import Client
from nats.errors import BadSubjectError, Error, MaxPayloadError
from nats.js.errors import APIError

from relay.faults import Rejected, Undelivered
from relay.handler_settings import NatsHandler
from relay.handlers import cloudevents
from relay.handlers.certificates import verification
from relay.handlers.messages import Message

_TOO_LARGE = 10054
"""The error code of JetStream for a message above what the stream takes."""


class NoTls(Error):
    """The server offers no TLS although the configuration asks for it; nothing was sent."""


class _SecureClient(Client):
    """A client that sends nothing in plain text where TLS is asked for.

    The server's INFO comes in plain text, and nats-py goes on without TLS unless INFO demands it. Where TLS is asked
    for, this client starts it if the server can, and refuses before CONNECT, which carries the password, otherwise.
    So do nats.go and nats-core; source: nats-io/nats.py, pull request 912, "Enforce TLS intent against server
    capabilities".
    """

    def __init__(self, always_tls: bool) -> None:
        """`always_tls` asks for TLS from `nats://` too; `tls://` asks for it by itself."""
        super().__init__()
        self._always_tls = always_tls

    def abandon(self) -> None:
        """Close the socket of a connection that failed, which `connect` leaves open.

        `close` would wait for ever for the end of a TLS handshake that has failed.
        """
        transport: Any = self._transport
        if transport:
            transport.close()

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and self._asks_for_tls():
            if not (info.get("tls_required") or info.get("tls_available")):
                raise NoTls("the server offers no TLS, which tls:// or the key tls asks for")
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)

    def _asks_for_tls(self) -> bool:
        server = self._current_server
        scheme = server.uri.scheme if server else None
        return scheme == "tls" or (scheme == "nats" and self._always_tls)


class Nats:
    """One connection, opened again when it is lost."""

    def __init__(self, name: str, settings: NatsHandler) -> None:
        """Raises ConfigurationError where a certificate cannot be used."""
        self._settings = settings
        self._tls = verification(name, settings.tls)
        self._client: Client | None = None
        self._connecting = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="nats", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the connection and end the loop."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def send(self, messages: Sequence[Message]) -> None:
        """Publish the messages, each acknowledged before the next. Raises Undelivered or Rejected."""
        try:
            asyncio.run_coroutine_threadsafe(self._publish(messages), self._loop).result()
        except (BadSubjectError, MaxPayloadError) as error:
            raise Rejected(type(error).__name__) from None
        except APIError as error:
            kind = Rejected if error.err_code == _TOO_LARGE else Undelivered
            raise kind(f"JetStream {error.err_code}") from None
        except NoTls as error:
            raise Undelivered(str(error)) from None
        except (Error, OSError, TimeoutError) as error:
            raise Undelivered(type(error).__name__) from None

    async def _publish(self, messages: Sequence[Message]) -> None:
        client = await self._connected()
        stream = client.jetstream(timeout=self._settings.timeout)
        try:
            for message in messages:
                await stream.publish(message.topic, message.body, headers=_headers(message))
        except TimeoutError:
            # The server may be gone without a word; the client would notice that minutes later.
            await client.close()
            raise

    async def _connected(self) -> Client:
        async with self._connecting:
            if self._client is None or self._client.is_closed:
                self._client = await self._connect()
            return self._client

    async def _connect(self) -> Client:
        settings = self._settings
        client = _SecureClient(always_tls="tls" in settings.model_fields_set)
        options: dict[str, Any] = {
            "connect_timeout": settings.timeout,
            # Each server is asked twice, at once: waiting is not for the client.
            "allow_reconnect": False,
            "max_reconnect_attempts": 1,
            "reconnect_time_wait": 0,
            "tls": self._tls,
            "tls_handshake_first": settings.tls_first,
        }
        try:
            await client.connect([each.get_secret_value() for each in settings.servers], **options)
        except BaseException:
            client.abandon()
            raise
        return client

    async def _end(self) -> None:
        if self._client is not None:
            await self._client.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def _headers(message: Message) -> dict[str, str]:
    return {
        "Nats-Msg-Id": message.identity,
        "content-type": message.content_type,
        **cloudevents.headers(message.attributes),
    }
