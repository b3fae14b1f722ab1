"""Handlers that publish events to NATS JetStream; `Nats-Msg-Id` lets the stream drop repetitions.

A stream has one set of ids for all its subjects and publishers. So an id has the sink's series and the row, and an
answer with `duplicate` says that this sink has sent this event before.

Sources: NATS documentation, "JetStream Model Deep Dive", message deduplication, and "JetStream wire API Reference",
publishing; CloudEvents, "NATS Protocol Binding".
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import BadSubjectError, ConnectionClosedError, Error, MaxPayloadError

from relay.config.handlers import NatsHandler, NatsServers
from relay.config.secrets import read_aside
from relay.faults import Rejected, Unauthorized, Undelivered
from relay.sinks import cloudevents
from relay.sinks.brokers import Message, Publishing, Sending, SendWindow, Shared, Unanswered
from relay.sinks.tls import Certificates, is_refusal

_TOO_LARGE = 10054
"""The error code of JetStream for a message that is larger than the stream accepts."""
_NO_RESPONDERS = "503"
"""The status with which the server answers if no stream has the subject."""
_ELSEWHERE = frozenset({10008, 10076})
"""Error codes of JetStream for a server that is cut off from its cluster, or has no JetStream."""
_LONGEST_LINE = 4_096
"""The server's default `max_control_line`, which it does not announce, in bytes."""
_CLOSING_SECONDS = 2.0
_REFUSAL = re.compile("authorization|authentication", re.IGNORECASE)
"""What a server says of credentials that it does not accept, or no longer."""


class _NotHere(Undelivered):
    """The server that relay is connected to does not reach the stream; another one may."""


class NoTls(Error):
    """The server offers no TLS although the configuration asks for it; nothing was sent."""


class SecureClient(Client):
    """A client that sends nothing in plain text if TLS is configured.

    The server's INFO comes in plain text, and nats-py continues without TLS unless INFO demands it. If TLS is
    configured, this client starts it if the server offers it, and otherwise refuses before CONNECT, which has the
    password. So do nats.go and nats-core; source: nats-io/nats.py, pull request 912, "Enforce TLS intent against server
    capabilities".
    """

    def __init__(self, always_tls: bool) -> None:
        """`always_tls` requires TLS for `nats://` too; `tls://` always requires it."""
        super().__init__()
        self._always_tls = always_tls

    def abandon(self) -> None:
        """Close the socket at once; `close` would wait for a server that is gone, or for a failed TLS handshake."""
        transport: Any = self._transport
        if not transport:
            return
        writer = getattr(transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
        else:
            transport.close()

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and self._requires_tls():
            if not (info.get("tls_required") or info.get("tls_available")):
                raise NoTls("the server offers no TLS, which tls:// or the key tls asks for")
            info["tls_required"] = True
        # A server announces a changed limit too.
        self._max_payload = info.get("max_payload", self._max_payload)
        await super()._process_info(info, initial_connection)

    def _requires_tls(self) -> bool:
        server = self._current_server
        scheme = server.uri.scheme if server else None
        return scheme == "tls" or (scheme == "nats" and self._always_tls)


def sink(name: str, settings: NatsHandler) -> Publishing:
    """The sink of `type: nats`. Raises ConfigurationError for a certificate that cannot be used."""
    return Publishing(name, settings, Nats(name, settings))


class Nats:
    """One connection that all transactions share, opened again after it was lost."""

    def __init__(self, name: str, settings: NatsHandler) -> None:
        """Raises ConfigurationError where a certificate cannot be used."""
        self._settings = settings
        self._tls = Certificates(name, settings.tls)
        self._link = Shared(self._connect, lambda link: not link.client.is_closed)
        self._window = SendWindow(settings.timeout, ordered=settings.is_ordered)

    async def close(self) -> None:
        """Close the connection."""
        link = await self._link.close()
        if link is not None:
            with suppress(Exception):
                async with asyncio.timeout(_CLOSING_SECONDS):
                    await link.client.close()
            link.client.abandon()

    async def send(self, messages: Sequence[Message]) -> None:
        """Publish the messages and wait for the acknowledgements. Raises Undelivered or Rejected."""
        try:
            link = await self._link.get()
            try:
                await self._window.send(self._window.sending(messages), link.publish)
            except TimeoutError:
                if link.unanswered.is_silent(self._settings.timeout):
                    # The server may have vanished; the client would notice that only minutes later.
                    link.lose()
                raise
        except (BadSubjectError, MaxPayloadError) as error:
            raise Rejected(type(error).__name__) from None
        except NoTls as error:
            raise Undelivered(str(error)) from None
        except Undelivered:
            raise
        except (Error, OSError, TimeoutError) as error:
            raise Undelivered(type(error).__name__) from None

    async def _connect(self) -> _Link:
        settings = self._settings
        client = SecureClient(always_tls="tls" in settings.model_fields_set)
        link = _Link(client, settings.timeout)
        await connect(client, settings, settings.timeout, self._tls, link.closed)
        await link.subscribe()
        return link


async def connect(
    client: SecureClient,
    settings: NatsServers,
    timeout: float,
    tls: Certificates,
    closed: Callable[[], Awaitable[None]],
) -> None:
    """Connect a client, which calls `closed` when the connection is lost, and does not connect again.

    Raises Unauthorized, SecretUnavailable, and the client's errors.
    """
    noted = _Noted()
    options: dict[str, Any] = {
        "closed_cb": closed,
        # The client tries each server twice, without a wait in between.
        "connect_timeout": timeout / len(settings.servers),
        "allow_reconnect": False,
        "max_reconnect_attempts": 1,
        "reconnect_time_wait": 0,
        "ping_interval": timeout,
        "max_outstanding_pings": 1,
        # Publishing never waits for the socket, where the client swallows cancellations. `SendWindow` limits it.
        "pending_size": 0,
        "tls": tls.context(),
        "error_cb": noted.note,
        "tls_handshake_first": settings.tls_first,
    }
    servers = [
        await read_aside(f"servers.{number}", each) for number, each in enumerate(settings.servers)
    ]
    try:
        async with asyncio.timeout(timeout):
            await client.connect(servers, **options)
    except BaseException as error:
        client.abandon()
        noted.errors.append(error)
        for each in filter(is_refusal, noted.errors):
            tls.refused()
            raise Unauthorized(f"{type(each).__name__}: a certificate is refused") from None
        if any(isinstance(each, Error) and _REFUSAL.search(str(each)) for each in noted.errors):
            raise Unauthorized("the server refuses relay's credentials") from None
        raise


class _Noted:
    """The errors of an attempt to connect: the client raises only the last one."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    async def note(self, error: Exception) -> None:
        self.errors.append(error)


class _Link:
    """A connection, and the inbox to which JetStream answers: each message has a number in its reply subject."""

    def __init__(self, client: SecureClient, timeout: float) -> None:
        """After `timeout` seconds of `_NotHere` alone the link gives up its connection."""
        self.client = client
        self.unanswered = Unanswered()
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._useful_at = self._loop.time()
        self._inbox = ""
        self._number = 0

    async def subscribe(self) -> None:
        self._inbox = self.client.new_inbox()
        await self.client.subscribe(f"{self._inbox}.*", cb=self._answered)

    async def publish(self, sending: Sending, index: int) -> None:
        message = sending.messages[index]
        number = self._number + 1
        reply = f"{self._inbox}.{number}"
        headers = _headers(message)
        self._require_fitting(message, reply, headers)
        self._number = number
        self.unanswered.add(number, sending, index)
        try:
            await self.client.publish(message.topic, message.body, reply, headers)
        except BaseException:
            self.unanswered.discard(number)
            raise

    def _require_fitting(self, message: Message, reply: str, headers: dict[str, str]) -> None:
        """Raise MaxPayloadError or Rejected for a message for which the server would close the connection.

        Rejected too for a subject with an empty part, which no stream can have: the server would know nobody for it;
        and for one with a wildcard as a part, which is for subscribers.
        """
        parts = message.topic.split(".")
        if not all(parts):
            raise Rejected("the subject has an empty part")
        if not {"*", ">"}.isdisjoint(parts):
            raise Rejected("the subject has a wildcard")
        # `NATS/1.0`, and a colon, a blank and a line end for each header. All are ASCII.
        of_headers = 12 + sum(len(name) + len(value) + 4 for name, value in headers.items())
        size = of_headers + len(message.body)
        if size > self.client.max_payload:
            raise MaxPayloadError
        if len(f" {reply} {of_headers} {size}") + len(message.topic.encode()) > _LONGEST_LINE:
            raise Rejected("the subject is too long")

    def lose(self) -> None:
        """Give up the connection."""
        self.client.abandon()
        self.unanswered.fail(ConnectionClosedError())

    async def closed(self) -> None:
        """Fail the unanswered messages: the client has closed the connection."""
        self.unanswered.fail(ConnectionClosedError())

    async def _answered(self, msg: Msg) -> None:
        number = msg.subject.rpartition(".")[2]
        # Other subscribers of the subject may answer too, even before the stream does.
        answer = _answer(msg)
        if not number.isdecimal() or answer is None:
            return
        fault = _fault(answer)
        self.unanswered.answer(int(number), fault)
        if not isinstance(fault, _NotHere):
            self._useful_at = self._loop.time()
        elif self._loop.time() - self._useful_at >= self._timeout:
            self.lose()


def _answer(msg: Msg) -> dict[str, Any] | None:
    """The answer of JetStream, or of a server that knows no stream; None for that of another subscriber."""
    if msg.headers and msg.headers.get("Status") == _NO_RESPONDERS:
        return {"error": {"err_code": _NO_RESPONDERS}}
    try:
        answer = json.loads(msg.data)
    except ValueError:
        return None
    if not isinstance(answer, dict):
        return None
    error = answer.get("error")
    is_of_stream = {"stream", "seq"} <= answer.keys() if error is None else isinstance(error, dict)
    return answer if is_of_stream else None


def _fault(answer: dict[str, Any]) -> Exception | None:
    """The fault that an answer reports; None if the message is stored."""
    if "error" not in answer:
        return None
    code = answer["error"].get("err_code")
    if code == _NO_RESPONDERS:
        return _NotHere("NoStreamResponseError")
    if code == _TOO_LARGE:
        return Rejected(f"JetStream {code}")
    return (_NotHere if code in _ELSEWHERE else Undelivered)(f"JetStream {code}")


def _headers(message: Message) -> dict[str, str]:
    return {
        "Nats-Msg-Id": cloudevents.header(message.deduplication),
        "content-type": message.content_type,
        **cloudevents.headers(message.attributes),
        **message.trace,
    }
