"""Authenticates callers of the console, and recognises requests that come from its own pages."""

from __future__ import annotations

import base64
import hmac
import json
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request

from relay.config.secrets import recent
from relay.config.settings import LEAST_TOKEN, ConsoleSettings
from relay.faults import SecretUnavailable
from relay.web.requests import Failures, bearer

COOKIE = "relay_console"
"""Name of the cookie of a browser that has logged in."""
SESSION_SECONDS = 12 * 3600
"""Duration of a login."""
OPERATOR_HEADER = "relay-operator"
"""The header by which a program that sends the token names its operator."""
NAME_CHARACTERS = 100

_OWN_SITE = frozenset({"same-origin", "none"})


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request. `browser` says that a cookie authenticates it, which browsers send with every request.

    `form_token` is a CSRF token: forms of this caller's pages hold it, and other sites do not know it.
    """

    name: str
    browser: bool
    form_token: str


class Signer:
    """Signs values that a browser sends back, each for one purpose. Safe in several threads."""

    def __init__(self, secret: bytes) -> None:
        self._key = hmac.digest(secret, b"relay console", sha256)

    def mac(self, purpose: str, text: str) -> str:
        """Return the signature of a text."""
        mac = hmac.digest(self._key, f"{purpose}\n{text}".encode(), sha256)
        return base64.urlsafe_b64encode(mac).decode().rstrip("=")

    def sign(self, purpose: str, value: object) -> str:
        """Return a JSON value with its signature, as a text that a cookie can hold."""
        body = base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")
        return f"{body}.{self.mac(purpose, body)}"

    def read(self, purpose: str, signed: str) -> Any:
        """Return the signed value; None if the signature is invalid."""
        body, _, mac = signed.partition(".")
        if not equal(mac, self.mac(purpose, body)):
            return None
        return json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))


class Guard:
    """Authenticates callers by the token, by a cookie signed with it, or by the header of a reverse proxy."""

    def __init__(self, console: ConsoleSettings) -> None:
        self._secret = console.token
        self._user_header = console.user_header
        # Without a token only forms are signed, so a restart may invalidate them.
        self._random = secrets.token_bytes(32)
        self._last: str | None = None
        self._failures = Failures()

    @property
    def has_login(self) -> bool:
        """Whether the console has a token to log in with."""
        return self._secret is not None

    @property
    def signer(self) -> Signer:
        """What signs cookies and forms, with the token: another token ends all sessions."""
        token = self._token()
        return Signer(self._random if token is None else token.encode())

    def _token(self) -> str | None:
        """The token as it is now; the last one while it cannot be read, or is too short."""
        if self._secret is not None:
            with suppress(SecretUnavailable):
                text = recent(self._secret)
                self._last = text if len(text) >= LEAST_TOKEN else self._last
        return self._last

    def caller(self, request: Request) -> Caller | None:
        """Return the caller of a request; None if it is not authenticated. Raises TooManyFailures."""
        token = bearer(request.headers)
        if token is not None:
            return self._of_token(request, token)
        if self._secret is None:
            return self._proxied(request)
        return self._of_cookie(request)

    def log_in(self, request: Request, token: str, name: str) -> str | None:
        """Return the cookie of a login; None for a wrong token. Raises TooManyFailures."""
        if not self._is_token(request, token):
            return None
        session = {"name": printable(name), "until": int(time.time()) + SESSION_SECONDS}
        return self.signer.sign("session", {**session, "id": secrets.token_urlsafe(9)})

    def _of_token(self, request: Request, token: str) -> Caller | None:
        if not self._is_token(request, token):
            return None
        proxied = self._user(request)
        name = proxied or printable(request.headers.get(OPERATOR_HEADER, "")) or "token"
        return Caller(name, False, self._form_token(f"bearer {name}"))

    def _proxied(self, request: Request) -> Caller | None:
        name = self._user(request)
        return Caller(name, False, self._form_token(f"proxied {name}")) if name else None

    def _of_cookie(self, request: Request) -> Caller | None:
        cookie = request.cookies.get(COOKIE, "")
        session = self.signer.read("session", cookie)
        if session is None or session["until"] < time.time():
            return None
        return Caller(session["name"], True, self._form_token(cookie))

    def _user(self, request: Request) -> str:
        return printable(request.headers.get(self._user_header, "")) if self._user_header else ""

    def _form_token(self, bound_to: str) -> str:
        return self.signer.mac("form", bound_to)

    def _is_token(self, request: Request, given: str) -> bool:
        token = self._token()
        if token is None:
            return False
        # Compared first: the wrong tokens of others at this address, perhaps a proxy's, must not refuse the right one.
        if equal(given, token):
            return True
        address = request.client.host if request.client else ""
        self._failures.require_few(address)
        self._failures.note(address, given)
        return False


def equal(given: str, expected: str) -> bool:
    """Return whether two texts are the same, in a time that does not depend on where they differ."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())


def printable(name: str) -> str:
    """Return a name without control characters, cut to NAME_CHARACTERS."""
    return "".join(each for each in name.strip() if each.isprintable())[:NAME_CHARACTERS]


def is_same_origin(request: Request) -> bool:
    """Return whether the request comes from the console's own pages, or from no browser."""
    site = request.headers.get("sec-fetch-site")
    if site is not None and site not in _OWN_SITE:
        return False
    origin = request.headers.get("origin")
    if origin is None:
        return True
    try:
        return urlsplit(origin).netloc == request.headers.get("host")
    except ValueError:  # no URL, such as `http://[`
        return False
