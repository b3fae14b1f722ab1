"""Handlers that post events to an endpoint as CloudEvents.

Sources: CloudEvents specification 1.0.2, "HTTP Protocol Binding"; Standard Webhooks specification, "Signature scheme";
IETF draft "The Idempotency-Key HTTP Header Field"; RFC 9110 (status codes, Retry-After).
"""

from __future__ import annotations

import base64
import gzip
import hmac
import time
from collections.abc import Iterable, Iterator
from email.utils import parsedate_to_datetime
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import httpx

from relay.events import Event, Transaction
from relay.faults import ConfigurationError, Rejected, Undelivered
from relay.handler_settings import HttpHandler
from relay.handlers import cloudevents
from relay.handlers.certificates import verification

_TRANSIENT = frozenset(
    {
        httpx.codes.REQUEST_TIMEOUT,
        httpx.codes.TOO_EARLY,
        httpx.codes.TOO_MANY_REQUESTS,
    }
)
_TOLD_BYTES = 1_000
"""How much of a response is kept with a dead letter."""
_SECRET_PREFIX = "whsec_"  # noqa: S105 what Standard Webhooks puts before a secret in base64


class Http:
    """Posts each event, or each transaction, and takes any 2xx for an answer. Connections are kept and shared."""

    def __init__(self, name: str, settings: HttpHandler) -> None:
        """Raises ConfigurationError where a certificate cannot be used."""
        self.name = name
        self._settings = settings
        self._secret = _key(name, settings)
        self._headers = {key: value.get_secret_value() for key, value in settings.headers.items()}
        self._target = f"POST {public_url(settings.url)}"
        self._client = httpx.Client(
            timeout=settings.timeout,
            verify=verification(name, settings.tls),
            limits=httpx.Limits(
                max_connections=settings.concurrency,
                max_keepalive_connections=settings.concurrency,
            ),
            headers={"user-agent": "relay"},
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def deliver(self, transaction: Transaction) -> None:
        """Post the events, in order. Raises Undelivered or Rejected."""
        for identity, headers, body in self._requests(transaction.events):
            self._post(identity, headers, body)

    def _requests(self, events: Iterable[Event]) -> Iterator[tuple[str, dict[str, str], bytes]]:
        source = self._settings.source
        if self._settings.each == "transaction":
            whole = list(events)
            # Of a transaction it is that of its first event, which a change of configuration does not alter.
            identity = cloudevents.identity(whole[0])
            yield identity, {"content-type": cloudevents.BATCH}, cloudevents.batch(whole, source)
            return
        for event in events:
            identity = cloudevents.identity(event)
            if self._settings.mode == "binary":
                attributes = cloudevents.headers(cloudevents.attributes(event, source))
                body = cloudevents.data(event)
                yield identity, {"content-type": cloudevents.DATA, **attributes}, body
            elif self._settings.mode == "batch":
                body = cloudevents.batch([event], source)
                yield identity, {"content-type": cloudevents.BATCH}, body
            else:
                body = cloudevents.structured(event, source)
                yield identity, {"content-type": cloudevents.STRUCTURED}, body

    def _post(self, identity: str, headers: dict[str, str], body: bytes) -> None:
        headers = {**headers, "idempotency-key": identity, **self._headers}
        if self._secret:
            headers |= signature(self._secret, identity, int(time.time()), body)
        limit = self._settings.compress_above
        if limit is not None and len(body) > limit:
            body = gzip.compress(body, mtime=0)
            headers["content-encoding"] = "gzip"
        try:
            response = self._client.post(self._settings.url, content=body, headers=headers)
        except httpx.RequestError as error:
            detail = f"{self._target}: {error}"
            raise Undelivered(type(error).__name__, detail=detail) from None
        _judge(response, self._target)


def signature(secret: bytes, identity: str, clock: int, body: bytes) -> dict[str, str]:
    """The headers that let an endpoint verify who sent a body (before compression), and when (seconds since 1970)."""
    digest = hmac.digest(secret, b"%s.%d.%s" % (identity.encode(), clock, body), "sha256")
    return {
        "webhook-id": identity,
        "webhook-timestamp": str(clock),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


def public_url(url: str) -> str:
    """The address without what may be a secret in it: user, password and the query but for the names of its values."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    query = "&".join(
        f"{name}=..." if value else "..."
        for name, value in parse_qsl(parts.query, keep_blank_values=True)
    )
    return urlunsplit((parts.scheme, host, parts.path, query, ""))


def _judge(response: httpx.Response, target: str) -> None:
    if response.is_success:
        return
    reason = f"HTTP {response.status_code}"
    detail = f"{target}: {_told(response)}"
    if response.status_code in _TRANSIENT or response.status_code >= 500:
        after = retry_after(response.headers.get("retry-after"))
        raise Undelivered(reason, after=after, detail=detail)
    raise Rejected(reason, detail=detail)


def _told(response: httpx.Response) -> str:
    """The status and the start of the response."""
    status = f"{response.status_code} {response.reason_phrase}".rstrip()
    start = response.content[:_TOLD_BYTES].decode(errors="replace")
    return f"{status}\n{start}" if start else status


def retry_after(value: str | None) -> float | None:
    """How many seconds the header asks for, which gives them or a date; None where it says neither."""
    if value is None:
        return None
    if value.isascii() and value.isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _key(name: str, settings: HttpHandler) -> bytes:
    if settings.signing_secret is None:
        return b""
    secret = settings.signing_secret.get_secret_value()
    if not secret.startswith(_SECRET_PREFIX):
        return secret.encode()
    try:
        return base64.b64decode(secret.removeprefix(_SECRET_PREFIX), validate=True)
    except ValueError:
        raise ConfigurationError(
            f"handlers.{name}.signing_secret: is not base64 behind {_SECRET_PREFIX}"
        ) from None
