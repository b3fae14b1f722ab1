"""Addresses of HTTP endpoints: what is one, and templates in which data fill parts of one, and no others. No I/O.

Source: RFC 3986, "Syntax Components" and "Remove Dot Segments".
"""

from __future__ import annotations

import re
from urllib.parse import SplitResult, quote, urlsplit

from relay.config.fields import EndpointTemplate, Row, value_of
from relay.faults import Rejected
from relay.model.events import Event

SAFE_IN_PATH = "!$&'()*+,;=:@/%"
"""What is not percent-encoded in a path that the configuration has."""
_SCHEME = re.compile(r"(https?)://", re.IGNORECASE)
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
_TEMPLATE_HOST = re.compile(r"[A-Za-z0-9._-]+(:\d{1,5})?|\[[0-9A-Fa-f:.]+\](:\d{1,5})?")
_DOTS = re.compile(r"(\.|%2e){1,2}", re.IGNORECASE)

_Part = tuple[str, str | None]
"""A literal text, and the name of the value that follows it."""


def split_address(address: str) -> SplitResult:
    """The parts of an address. Raises ValueError, whose text quotes nothing: an address may hold a password."""
    try:
        return urlsplit(address)
    except ValueError:
        raise ValueError("is not a valid address") from None


def require_port(parts: SplitResult) -> None:
    """Raise ValueError, whose text quotes nothing, if the port of an address is invalid."""
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError("has a port that is not a number from 1 to 65535")


def require_http(address: str) -> None:
    """Raise ValueError, whose text quotes nothing, for what is no address of http or https."""
    parts = split_address(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be an address such as https://shop.example/events")
    require_port(parts)


class AddressTemplate(EndpointTemplate):
    """An address with values in its host, path or query, such as `https://hooks.example/{payload.tenant}`.

    A value fills what it stands in and nothing else: in a path or query it is percent-encoded, as a whole; in a host it
    has the characters of a host. Scheme, port and what is before and after a value are the template's. Only where the
    address is a single value, such as `{endpoint.url}`, is all of it that value's.
    """

    def __init__(self, text: str) -> None:
        """Raises ValueError for names that are none, and for values where an address must not have any."""
        super().__init__(text)
        self.is_value = len(self.parts) == 1 and not self.parts[0][0]
        self._scheme = ""
        self._host: list[_Part] = []
        self._path: list[_Part] = []
        self._query: list[_Part] = []
        if not self.is_value:
            self._divide()

    @property
    def chooses_host(self) -> bool:
        """Whether a value decides which host an address has."""
        return self.is_value or any(name for _, name in self._host)

    def _divide(self) -> None:
        first = self.parts[0][0] if self.parts else ""
        scheme = _SCHEME.match(first)
        if scheme is None:
            raise ValueError(
                "must begin with http:// or https://, or be a single value such as {endpoint.url}"
            )
        self._scheme = scheme[1].lower()
        current, after = self._host, "/?#"
        for index, (literal, name) in enumerate(self.parts):
            text = literal[scheme.end() :] if index == 0 else literal
            while found := re.search(f"[{re.escape(after)}]", text) if after else None:
                current.append((text[: found.start()], None))
                text = text[found.start() :]
                if text[0] == "/":
                    current, after = self._path, "?#"
                elif text[0] == "?":
                    current, after, text = self._query, "#", text[1:]
                else:
                    current, after, text = [], "", ""
            current.append((text, name))
        self._require_host()

    def _require_host(self) -> None:
        # A value is checked like the letter that stands for it here.
        text = "".join(literal + ("x" if name else "") for literal, name in self._host)
        if "@" in text:
            raise ValueError("has a user before the host: write a header `authorization` instead")
        if not _TEMPLATE_HOST.fullmatch(text):
            raise ValueError("has a host or port that is not valid; a port must be a number")
        require_port(urlsplit(f"//{text}"))
        host = [(literal.partition(":")[0], name) for literal, name in self._host]
        while host and host[-1] == ("", None):
            host.pop()
        if host and host[-1][1] and len(text) > 1:
            before = "".join(literal + ("x" if name else "") for literal, name in host[:-1])
            before += host[-1][0]
            if before and not before.endswith("."):
                raise ValueError(
                    "has a value at the end of the host that could make it another host: end it with a domain, such as "
                    "https://{payload.tenant}.shop.example"
                )

    def address(self, event: Event, row: Row) -> str:
        """The address for an event and its endpoint's row. Raises Rejected, in a text without values."""
        if self.is_value:
            ((_, name),) = self.parts
            address = value_of(name or "", event, row)
            try:
                require_http(address)
            except ValueError as error:
                raise Rejected(f"url: {name} {error}") from None
            return address
        host = "".join(
            literal + (_in_host(name, value_of(name, event, row)) if name else "")
            for literal, name in self._host
        )
        path = "".join(
            quote(literal, safe=SAFE_IN_PATH) + (_in_path(name, event, row) if name else "")
            for literal, name in self._path
        )
        if any(name for _, name in self._path) and any(map(_DOTS.fullmatch, path.split("/"))):
            raise Rejected("url: a value would make a segment of the path `.` or `..`")
        query = "".join(
            quote(literal, safe=f"{SAFE_IN_PATH}?")
            + (quote(value_of(name, event, row), safe="") if name else "")
            for literal, name in self._query
        )
        return f"{self._scheme}://{host}{path or '/'}{'?' if query else ''}{query}"


def _in_host(name: str, value: str) -> str:
    if not _HOST.fullmatch(value) or ".." in value:
        raise Rejected(f"url: {name} is not valid in the name of a host")
    return value


def _in_path(name: str, event: Event, row: Row) -> str:
    value = value_of(name, event, row)
    if not value:
        raise Rejected(f"url: {name} is empty")
    return quote(value, safe="")
