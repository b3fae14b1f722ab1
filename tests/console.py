"""A running console, and clients of its pages and of its API."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from relay.config.settings import Settings
from relay.console.server import console_server
from tests.clients import http_client

TOKEN = "a-token-of-the-tests"


def console_of(**more: Any) -> dict[str, Any]:
    """The section `observe` with a console on a free port."""
    return {"console": {"listen": "127.0.0.1:0", "token": TOKEN, **more}}


@contextmanager
def served(*groups: Settings) -> Iterator[str]:
    """Run a console for some groups, with the settings of the first; yields its address."""
    console = groups[0].observe.console
    assert console is not None
    with console_server(groups, console) as server:
        yield f"http://127.0.0.1:{server.port}"


class Visitor:
    """A user who has logged in with a browser: it follows redirects, keeps cookies, and sends forms."""

    def __init__(self, address: str, name: str = "anna", token: str = TOKEN) -> None:
        self.client = http_client(address, follow_redirects=True)
        self.seconds: dict[str, float] = {}
        """How long each page took, in seconds."""
        self.login = self.client.post("/login", data={"name": name, "token": token, "next": "/"})

    def page(self, path: str) -> str:
        """The HTML of a page."""
        answer = self.client.get(path)
        assert answer.status_code == 200, answer.text
        self.seconds[path] = answer.elapsed.total_seconds()
        return answer.text

    def send(self, path: str, **fields: str) -> httpx.Response:
        """Send a form with the token of the session."""
        match = re.search(r'name="form_token" value="([^"]+)"', self.page("/"))
        assert match is not None
        return self.client.post(path, data={"form_token": match[1], **fields})


class Program:
    """A program that uses the API with the token."""

    def __init__(self, address: str, group: str = "default", **headers: str) -> None:
        self.client = http_client(
            f"{address}/api/v1/groups/{group}",
            headers={"authorization": f"Bearer {TOKEN}", "relay-operator": "robot", **headers},
        )

    def get(self, path: str, **query: Any) -> Any:
        """The JSON of a resource."""
        answer = self.client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, reason: str = "because", **body: Any) -> Any:
        """The JSON result of an action."""
        answer = self.client.post(path, json={"reason": reason, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()
