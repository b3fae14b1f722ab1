"""A running HTTP API, its tokens, and clients of its streams."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, IncompleteRead
from socket import SHUT_RDWR
from threading import Event, Thread
from typing import Any, Self

import httpx
import psycopg

from relay.admin import tokens
from relay.api.positions import parse
from relay.api.server import api_server
from relay.config.settings import Settings
from tests.clients import http_client
from tests.outbox import Outbox, initialise

API: dict[str, Any] = {"listen": "127.0.0.1:0"}
"""The section `api` on a free port."""


@contextmanager
def served(settings: Settings) -> Iterator[str]:
    """Run the HTTP API; yields its address."""
    assert settings.api is not None
    with api_server(settings, settings.api) as server:
        yield f"http://127.0.0.1:{server.port}"


def settings_of(outbox: Outbox, **more: Any) -> Settings:
    """Settings with an API, whose section has more keys."""
    return outbox.settings(api={**API, **more})


def new_token(
    settings: Settings,
    name: str = "reader",
    rights: Sequence[str] = ("read",),
    hosts: Sequence[str] = ("*",),
    types: Sequence[str] = ("*",),
) -> str:
    """Make a token. With one that may publish, relay may, too: that right is given by the administrator."""
    if "publish" in rights:
        initialise(settings, handlers_publish=True)
    return tokens.create(settings, name, rights, hosts, types, None, None)


def authorized(token: str) -> dict[str, str]:
    """The headers of a request with a token."""
    return {"authorization": f"Bearer {token}"}


class Program:
    """A program with a token."""

    def __init__(self, address: str, token: str) -> None:
        self.client = http_client(f"{address}/v1", headers=authorized(token))

    def get(self, path: str, **query: Any) -> Any:
        """The JSON of a resource."""
        answer = self.client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def pages(self, limit: int = 100, **query: Any) -> list[Any]:
        """All events from the beginning on, in pages."""
        found, after = [], "beginning"
        while True:
            page = self.get("/events", after=after, limit=limit, **query)
            assert len(page["events"]) <= limit
            found += page["events"]
            after = page["next"]
            if not page["more"]:
                return found


class Refused(Exception):
    """The API refuses a position for good."""


ENDED = (EOFError, OSError, IncompleteRead)
"""What a stream raises whose server has ended it."""


class Source:
    """A connection to the stream, which notes the last id, as a browser's EventSource does."""

    def __init__(self, address: str, token: str, last: str = "", **query: str) -> None:
        host, port = address.removeprefix("http://").split(":")
        self._connection = HTTPConnection(host, int(port), timeout=20)
        path = str(httpx.URL("/v1/events/stream", params=query))
        head = authorized(token) | ({"last-event-id": last} if last else {})
        self._connection.request("GET", path, headers=head)
        self._response = self._connection.getresponse()
        self.last = last
        self.status = self._response.status
        self.events: list[Any] = []
        """The events that have come so far."""
        self.ids: list[str] = []
        """The id of each."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()
        self._connection.close()

    def ready(self) -> Self:
        """Wait until it has a position: what is published from then on is streamed."""
        assert self.status == 200
        while not self.last:
            self.block()
        return self

    def require(self) -> None:
        """Raise Refused where the server has refused the position, OSError where it may serve later."""
        if self.status == 410:
            raise Refused(json.loads(self._response.read())["detail"])
        if self.status != 200:
            raise OSError(self.status)

    def cut(self) -> None:
        """End the connection, in another thread than that which reads."""
        if (sock := self._connection.sock) is not None:
            with suppress(OSError):
                sock.shutdown(SHUT_RDWR)

    def limit(self, seconds: float) -> None:
        """Wait so long at most for what comes: then TimeoutError."""
        self._connection.sock.settimeout(seconds)

    def take(self, count: int) -> list[Any]:
        """Wait until so many events have come, and return them."""
        while len(self.events) < count:
            self.block()
        return self.events[:count]

    def until_the_end(self) -> None:
        """Wait until the server ends the stream."""
        with suppress(*ENDED):
            while True:
                self.block()

    def block(self) -> dict[str, str]:
        """Wait for the lines up to an empty one, and return their fields. Raises EOFError at the end."""
        fields: dict[str, str] = {}
        while line := self._response.readline():
            text = line.decode().rstrip("\n")
            if not text:
                break
            name, _, value = text.partition(":")
            fields[name] = value.removeprefix(" ")
        else:
            raise EOFError
        self.last = fields.get("id", self.last)
        if "data" in fields:
            self.events.append(json.loads(fields["data"]))
            self.ids.append(self.last)
        return fields


class ResumingClient:
    """A client that goes on after the last event that it has, wherever its stream is cut."""

    def __init__(self, address: str, token: str) -> None:
        self.numbers: list[int] = []
        """The `number` in the payload of each event."""
        self.refused: list[int] = []
        """The status of each answer that no later attempt repairs."""
        self._address = address
        self._token = token
        self._last = ""
        self._source: Source | None = None

    def read(self, dsn: str, ended: Event) -> None:
        """Read, and cut the stream at random; the reader `stream` keeps what is not read from retention."""
        choose = random.Random(1)
        cutting = Thread(target=self._cut_at, args=(ended,))
        cutting.start()
        while not ended.is_set():
            with suppress(OSError, EOFError, HTTPException):
                self._some(choose.randrange(1, 40), ended)
            position = parse(self._last or "now")
            if position is not None:
                with suppress(psycopg.Error), psycopg.connect(dsn, autocommit=True) as conn:
                    conn.execute("select relay.seek('stream', %s)", (f"0/{position.before}",))
        cutting.join()

    def _cut_at(self, ended: Event) -> None:
        ended.wait()
        if self._source is not None:
            self._source.cut()

    def _some(self, count: int, ended: Event) -> None:
        start = {} if self._last else {"after": "beginning"}
        with Source(self._address, self._token, self._last, **start) as source:
            self._source = source
            if source.status != 200:
                if source.status not in (429, 503):
                    self.refused.append(source.status)
                ended.wait(0.2)
                return
            for taken in range(1, count):
                if ended.is_set():
                    return
                source.take(taken)
                self.numbers.append(source.events[-1]["payload"]["number"])
                self._last = source.last
