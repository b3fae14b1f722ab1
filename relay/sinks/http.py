"""Handlers that post events to an endpoint as CloudEvents.

Sources: CloudEvents specification 1.0.2, "HTTP Protocol Binding"; Standard Webhooks specification, "Signature scheme";
IETF draft "The Idempotency-Key HTTP Header Field"; RFC 9110 (status codes, Retry-After).
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hmac
import logging
import os
import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import NoReturn
from urllib.parse import parse_qsl, quote, unquote, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from pydantic import SecretStr
from yarl import URL

from relay.config import secrets
from relay.config.addresses import SAFE_IN_PATH
from relay.config.handlers import HttpHandler, is_header_value, template_of
from relay.faults import (
    LONGEST_ASKED_SECONDS,
    ConfigurationError,
    DestinationRefused,
    Rejected,
    SecretUnavailable,
    Unauthorized,
    Undelivered,
)
from relay.model import trace_context
from relay.model.events import Event, Transaction
from relay.sinks import ANSWER, Target, cloudevents
from relay.sinks.egress import EgressGuard, refused_address
from relay.sinks.http_connections import (
    READ_BYTES,
    Connector,
    ConnectorOfMany,
    KeptConnectionLost,
    Malformed,
    Resolver,
    Response,
)
from relay.sinks.tls import Certificates, is_refusal

log = logging.getLogger(__name__)

_OF_CREDENTIALS = frozenset({401, 403, 407})
"""Statuses that may speak of relay's credentials, where it has any."""
_SHOWN_BYTES = 1_000
"""How much of a response is kept with a dead letter."""
_LARGE_BYTES = 200_000
"""A body of more bytes is compressed in a thread: here that takes some ten milliseconds."""
_HEADER_BYTES = 65_536
"""The longest line of a response's head, such as a cookie of a proxy: a longer one would hide the status."""
_SECRET_PREFIX = "whsec_"  # noqa: S105 what Standard Webhooks puts before a secret in base64
_NOT_PUBLIC = "the endpoint's address is not public, and private_addresses refuses it"


def sink(name: str, settings: HttpHandler, target: Target | None = None) -> Http:
    """The sink of `type: http`. Raises ConfigurationError for an address, a certificate or a secret of no use."""
    return Http(name, settings)


class AddressNotPublic(DestinationRefused):
    """The endpoint's address is one that `private_addresses` refuses."""


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """Where a request goes, and what it presents there beside the handler's secrets: headers and signing keys.

    `shown` is the address without secrets; `proxy` one of the environment.
    """

    url: URL
    shown: str
    proxy: str | None
    headers: Mapping[str, str]
    keys: tuple[bytes, ...] = ()


class Http:
    """Posts each event, or each transaction; any 2xx confirms it. Deliveries share connections."""

    _read_bytes = READ_BYTES
    """How much of a response is read, and how much of that is kept."""
    _kept_bytes = _SHOWN_BYTES

    def __init__(self, name: str, settings: HttpHandler) -> None:
        """Raises ConfigurationError where a certificate, the address or the environment's proxy cannot be used."""
        self.name = name
        self._settings = settings
        self._presented: list[tuple[str, SecretStr]] = [
            (key, value)
            for key, value in (
                *((f"headers.{key}", value) for key, value in settings.headers.items()),
                *(("signing_secret", value) for value in settings.signing_secret),
            )
            if template_of(value) is None
        ]
        self._require_keys()
        self._tls = Certificates(name, settings.tls, _speak_http)
        self._guard = EgressGuard.of(settings.guard)
        self._open()

    def _open(self) -> None:
        settings = self._settings
        self._destination = self._destination_of(settings.url)
        self._identifies_itself = bool(
            self._presented or self._destination.headers or settings.tls.cert_file is not None
        )
        self._open_clients(None)

    def _destination_of(self, url: str) -> HttpAddress:
        try:
            return http_address(url)
        except ValueError as error:
            raise ConfigurationError(f"handlers.{self.name}.url: {error}") from None

    def _open_clients(self, resolver: Resolver | None) -> None:
        concurrency = self._settings.concurrency
        self._keeping = _Client(concurrency, self._guard, resolver, keeps=True)
        self._fresh = _Client(concurrency, self._guard, resolver, keeps=False)

    async def close(self) -> None:
        """Close the connections."""
        await self._keeping.close()
        await self._fresh.close()

    def resume(self, series: str) -> None:
        """Do nothing: an endpoint recognises an event by its identity alone."""

    async def deliver(self, transaction: Transaction) -> None:
        """Post the events, in order. Raises Undelivered, DestinationRefused or Rejected."""
        for identity, headers, body in self._requests(transaction.events):
            await self._post(self._destination, identity, headers, body)

    def _requests(self, events: Iterable[Event]) -> Iterator[tuple[str, dict[str, str], bytes]]:
        source, as_text = self._settings.source, self._settings.payload == "text"
        if self._settings.each == "transaction":
            whole = list(events)
            # A transaction has the identity of its first event, whatever the configuration.
            identity = cloudevents.identity(whole[0])
            trace = trace_context.headers(whole[0])
            body = cloudevents.batch(whole, source, as_text)
            yield identity, {"content-type": cloudevents.BATCH, **trace}, body
            return
        for event in events:
            identity = cloudevents.identity(event)
            trace = trace_context.headers(event)
            if self._settings.mode == "binary":
                attributes = cloudevents.headers(cloudevents.attributes(event, source))
                body = cloudevents.data(event, as_text)
                kind = cloudevents.data_type(as_text)
                yield identity, {"content-type": kind, **attributes, **trace}, body
            elif self._settings.mode == "batch":
                body = cloudevents.batch([event], source, as_text)
                yield identity, {"content-type": cloudevents.BATCH, **trace}, body
            else:
                body = cloudevents.structured(event, source, as_text)
                yield identity, {"content-type": cloudevents.STRUCTURED, **trace}, body

    async def _post(
        self, to: HttpAddress, identity: str, headers: dict[str, str], body: bytes
    ) -> bytearray:
        """Post a body; returns the beginning of the answer that confirms it."""
        identity = cloudevents.header(identity)
        headers = {**headers, "idempotency-key": identity}
        credentials = await self._credentials()
        try:
            return await self._post_with(to, credentials, identity, headers, body)
        except Unauthorized:
            newer = await self._newer(credentials)
            if newer == credentials:
                raise
            return await self._post_with(to, newer, identity, headers, body)

    async def _post_with(
        self,
        to: HttpAddress,
        credentials: _Credentials,
        identity: str,
        headers: dict[str, str],
        body: bytes,
    ) -> bytearray:
        headers = {**headers, **to.headers, **credentials.headers}
        keys = credentials.keys + to.keys
        if keys:
            headers |= signatures(keys, identity, int(time.time()), body)
        limit = self._settings.compress_above
        if limit is not None and len(body) > limit:
            # A large one would hold up the event loop, and so all sinks.
            body = (
                await asyncio.to_thread(gzip.compress, body, mtime=0)
                if len(body) > _LARGE_BYTES
                else gzip.compress(body, mtime=0)
            )
            headers["content-encoding"] = "gzip"
        return await self._send(to, headers, body, credentials.tls)

    async def _credentials(self) -> _Credentials:
        """The credentials of a request, as they are now. Raises SecretUnavailable."""
        if all(secrets.is_at_hand(secret) for _, secret in self._presented):
            return self._read_credentials()
        return await asyncio.to_thread(self._read_credentials)

    async def _newer(self, refused: _Credentials) -> _Credentials:
        """The credentials after a refusal: a file may have changed since, and functions are called again."""
        for (_, secret), text in zip(self._presented, refused.texts, strict=True):
            secrets.refused(secret, text)
        return await self._credentials()

    def _read_credentials(self) -> _Credentials:
        texts = []
        for key, secret in self._presented:
            try:
                texts.append(secrets.recent(secret))
            except SecretUnavailable as error:
                raise SecretUnavailable(f"{key}: {error}") from None
        headers: dict[str, str] = {}
        keys = []
        for (key, _), text in zip(self._presented, texts, strict=True):
            if key == "signing_secret":
                keys.append(key_of(text))
                continue
            if not is_header_value(text):
                raise SecretUnavailable(f"{key}: is not printable ASCII on one line")
            headers[key.partition(".")[2].lower()] = text
        return _Credentials(tuple(texts), headers, tuple(keys), self._tls.context())

    def _require_keys(self) -> None:
        """Raise ConfigurationError for a signing secret that is none; warn of one that receivers may read otherwise."""
        for key, secret in self._presented:
            text = secrets.known_text(secret) if key == "signing_secret" else None
            if text is None:
                continue
            try:
                key_of(text)
            except SecretUnavailable as error:
                raise ConfigurationError(f"handlers.{self.name}.{error}") from None
            if not text.startswith(_SECRET_PREFIX):
                log.warning(
                    f"handlers.{self.name}.signing_secret: does not begin with {_SECRET_PREFIX}, so its characters are "
                    "the key; libraries of Standard Webhooks take any secret for base64: give receivers the same "
                    f"bytes, or write {_SECRET_PREFIX} and base64"
                )

    async def _send(
        self, to: HttpAddress, headers: dict[str, str], body: bytes, tls: ssl.SSLContext
    ) -> bytearray:
        """Post a body; returns the beginning of the response.

        Raises what the response means: Undelivered, DestinationRefused or Rejected.
        """
        response: aiohttp.ClientResponse | None = None
        start = bytearray()
        timeout = self._settings.timeout
        answer = ANSWER.get()
        if answer is not None:
            answer.destination, answer.status = to.shown, None
        try:
            async with asyncio.timeout(timeout):
                if to.proxy is not None:
                    self._guard.require_literal(to.url.raw_host or "")
                try:
                    response = await self._request(self._keeping, to, headers, body, tls)
                except KeptConnectionLost:
                    response = await self._request(self._fresh, to, headers, body, tls)
                await _read(response, start, self._read_bytes, self._kept_bytes)
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            # RuntimeError: the client was closed meanwhile. A refusal counts even without the rest of its response.
            if response is None or _is_success(response):
                if isinstance(error, TimeoutError):
                    raise Undelivered(f"no complete response in {timeout:g} s") from None
                detail = f"{to.shown}: {_text_of(error)}"
                if refused_address(error):
                    raise AddressNotPublic(_NOT_PUBLIC, detail=detail) from None
                if is_refusal(error):
                    self._tls.refused()
                    raise Unauthorized(_reason(error), detail=detail) from None
                raise Undelivered(_reason(error), detail=detail) from None
        finally:
            if response is not None:
                response.close()
                if answer is not None:
                    answer.status = response.status
                    answer.text = start[:_SHOWN_BYTES].decode(errors="replace") or None
        if not _is_success(response):
            self._refuse(to, response, bytes(start[:_SHOWN_BYTES]))
        return start

    def _refuse(self, to: HttpAddress, response: aiohttp.ClientResponse, start: bytes) -> NoReturn:
        """Raise what a status that is no success means."""
        status = f"{response.status} {response.reason or ''}".rstrip()
        shown = f"{status}\n{start.decode(errors='replace')}" if start else status
        reason, detail = f"HTTP {response.status}", f"{to.shown}: {shown}"
        action = self._settings.action_for(response.status)
        if action == "dead":
            raise Rejected(reason, detail=detail)
        kind = DestinationRefused if action == "stop" else Undelivered
        if action == "retry" and self._identifies_itself and response.status in _OF_CREDENTIALS:
            kind, reason = Unauthorized, f"{reason}: the endpoint refuses relay's credentials"
        after = retry_after(response.headers.get("retry-after"))
        raise kind(reason, after=after, detail=detail)

    async def _request(
        self,
        client: _Client,
        to: HttpAddress,
        headers: dict[str, str],
        body: bytes,
        tls: ssl.SSLContext,
    ) -> aiohttp.ClientResponse:
        return await client.session(to.proxy is not None).post(
            to.url,
            data=body,
            headers=headers,
            proxy=to.proxy,
            ssl=tls,
            allow_redirects=False,
        )


class _Client:
    """Sessions of the client; created when they are needed, since that needs a running event loop."""

    def __init__(
        self, concurrency: int, guard: EgressGuard, resolver: Resolver | None, keeps: bool
    ) -> None:
        """Without `keeps` each request has a connection of its own."""
        self._concurrency = concurrency
        self._guard = guard
        self._resolver = resolver
        self._keeps = keeps
        self._sessions: dict[bool, aiohttp.ClientSession] = {}

    def session(self, proxied: bool) -> aiohttp.ClientSession:
        """The session for requests through a proxy, or for others."""
        session = self._sessions.get(proxied)
        if session is None:
            # A proxy of the environment resolves names itself, and may have a private address.
            guard = EgressGuard(refuses=False) if proxied else self._guard
            kind = Connector if self._resolver is None else ConnectorOfMany
            session = self._sessions[proxied] = aiohttp.ClientSession(
                connector=kind(self._concurrency, self._keeps, guard, self._resolver),
                # `_send` sets one deadline for the whole request.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
                headers={"user-agent": "relay", "accept-encoding": "identity"},
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                read_bufsize=_SHOWN_BYTES,
                response_class=Response,
                max_line_size=_HEADER_BYTES,
                max_field_size=_HEADER_BYTES,
            )
        return session

    async def close(self) -> None:
        """Close the connections."""
        for session in self._sessions.values():
            await session.close()


@dataclass(frozen=True, slots=True)
class _Credentials:
    """What a request presents: the texts of the secrets, the headers and signing keys made of them, the certificate."""

    texts: tuple[str, ...]
    headers: dict[str, str]
    keys: tuple[bytes, ...]
    tls: ssl.SSLContext


async def _read(response: aiohttp.ClientResponse, start: bytearray, most: int, kept: int) -> None:
    """Read up to `most` bytes of a response; its first `kept` bytes are appended to `start`."""
    left = most
    # The status counts, however malformed the rest is; a response that is cut short ends in another error.
    with suppress(Malformed):
        while left > 0 and (part := await response.content.read(left)):
            left -= len(part)
            start += part[: kept - len(start)]


def signatures(keys: Iterable[bytes], identity: str, clock: int, body: bytes) -> dict[str, str]:
    """The headers by which an endpoint verifies who sent a body (uncompressed), and when (seconds since 1970).

    There is a signature for each key; an endpoint accepts a request if it knows one of them.
    """
    content = b"%s.%d.%s" % (identity.encode(), clock, body)
    digests = (hmac.digest(key, content, "sha256") for key in keys)
    return {
        "webhook-id": identity,
        "webhook-timestamp": str(clock),
        "webhook-signature": " ".join(f"v1,{base64.b64encode(each).decode()}" for each in digests),
    }


def _speak_http(tls: ssl.SSLContext) -> None:
    tls.set_alpn_protocols(["http/1.1"])


def public_url(url: str) -> str:
    """The address without secrets: no user and password, and only the names of the query."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    query = "&".join(
        f"{name}=..." if value else "..."
        for name, value in parse_qsl(parts.query, keep_blank_values=True)
    )
    return urlunsplit((parts.scheme, host, parts.path, query, ""))


def http_address(url: str) -> HttpAddress:
    """Where an address leads. Raises ValueError, whose text has nothing secret."""
    return HttpAddress(_address(url), f"POST {public_url(url)}", _proxy(url), _login(url))


def _address(url: str) -> URL:
    """The address without credentials and fragment; characters that an address may not have are percent-encoded."""
    parts = urlsplit(url)
    try:
        host = URL(url).host_subcomponent
        # As the resolver will: a label may be empty or too long.
        (host or "").encode("idna")
    except ValueError:
        raise ValueError("the host name is not valid: correct it") from None
    return URL.build(
        scheme=parts.scheme,
        host=host or "",
        port=parts.port,
        # Nothing else is changed, since the address may be signed.
        path=quote(parts.path or "/", safe=SAFE_IN_PATH),
        query_string=quote(parts.query, safe=f"{SAFE_IN_PATH}?"),
        encoded=True,
    )


def _login(url: str) -> dict[str, str]:
    """The header for the user and password of an address (RFC 7617)."""
    parts = urlsplit(url)
    if parts.username is None:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}


def _proxy(url: str) -> str | None:
    """The proxy that the environment names for an address: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY."""
    parts = urlsplit(url)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    # NO_PROXY names an IPv6 address with brackets, as the URL does, or without.
    named = (parts.netloc.rpartition("@")[2], parts.hostname or "")
    if not proxy or any(map(proxy_bypass, named)):
        return None
    if "://" not in proxy:
        proxy = f"http://{proxy}"
    if not proxy.startswith(("http://", "https://")):
        raise ValueError(
            "the environment names a proxy that is neither http:// nor https://: exempt the host with NO_PROXY, or "
            "name another proxy"
        )
    return proxy


def _reason(error: Exception) -> str:
    """A description of a network fault that is safe in a log: no address, and nothing of the response."""
    kind = type(error).__name__
    text: str | None = None
    if isinstance(error, aiohttp.ClientHttpProxyError):
        text = f"the proxy answers {error.status}"
    elif isinstance(error, aiohttp.ClientResponseError):
        text = "the response is not valid HTTP"
    elif isinstance(error, aiohttp.ClientConnectorCertificateError):
        text = getattr(error.certificate_error, "verify_message", None)
    else:
        # aiohttp presents OpenSSL's errno as one of the system.
        cause = error.__cause__ or error
        if isinstance(cause, ssl.SSLError):
            text = cause.reason
        elif isinstance(cause, socket.gaierror):
            text = cause.strerror
        elif isinstance(cause, OSError) and cause.errno is not None:
            text = os.strerror(cause.errno)
    return f"{kind}: {text}" if text else kind


def _text_of(error: Exception) -> str:
    """The text of an error, without the address, which may hold a secret."""
    return error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)


def _is_success(response: aiohttp.ClientResponse) -> bool:
    return 200 <= response.status < 300


def retry_after(value: str | None) -> float | None:
    """The seconds that a Retry-After header asks for, as a number or a date; None if it is neither.

    At most `LONGEST_ASKED_SECONDS`.
    """
    if value is None:
        return None
    if value.isascii() and value.isdecimal():
        return min(float(value), LONGEST_ASKED_SECONDS)
    moment = _http_date(value)
    if moment is None:
        return None
    seconds = moment.timestamp() - datetime.now(UTC).timestamp()
    return min(max(0.0, seconds), LONGEST_ASKED_SECONDS)


def _http_date(value: str) -> datetime | None:
    """A date in one of the forms of RFC 9110, "Date/Time Formats", all of which are in UTC; None if it is none."""
    try:
        parsed = parsedate_to_datetime(value)
    except Exception:
        # The parser raises various errors for what is not a date.
        return None
    # asctime's form names no zone, and the parser leaves it out.
    return parsed.replace(tzinfo=UTC) if parsed.tzinfo is None else parsed


def key_of(secret: str) -> bytes:
    """The key of a signing secret: what follows `whsec_` in base64, or its characters. Raises SecretUnavailable."""
    if not secret.startswith(_SECRET_PREFIX):
        return secret.encode()
    text = secret.removeprefix(_SECRET_PREFIX)
    try:
        # As libraries of Standard Webhooks do, it takes base64 without padding too.
        key = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except ValueError:
        raise SecretUnavailable(f"signing_secret: is not base64 after {_SECRET_PREFIX}") from None
    if not key:
        raise SecretUnavailable(f"signing_secret: has nothing after {_SECRET_PREFIX}")
    return key
