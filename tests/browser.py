"""Headless Chromium, driven through ChromeDriver with the W3C WebDriver protocol."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.outbox import wait_until

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--disable-dev-shm-usage"),
)
_PORT = re.compile(r"started successfully on port (\d+)")


class Browser:
    """A window. CSS selectors name elements; every call waits until its element exists."""

    def __init__(self, session: httpx.Client) -> None:
        self._session = session

    def open(self, address: str) -> None:
        """Load a page."""
        self._post("url", url=address)

    def click(self, selector: str) -> None:
        """Click an element."""
        self._post(f"element/{self._element(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        """Replace the text of a field."""
        element = self._element(selector)
        self._post(f"element/{element}/clear")
        self._post(f"element/{element}/value", text=text)

    def press(self, key: str) -> None:
        """Press a key; the element with the focus receives it."""
        keys = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self._post("actions", actions=[{"type": "key", "id": "keyboard", "actions": keys}])

    def text(self, selector: str = "body") -> str:
        """The visible text of an element."""
        return str(self._get(f"element/{self._element(selector)}/text"))

    def wait_text(self, text: str, selector: str = "body", timeout: float = 30.0) -> None:
        """Wait until an element shows a text."""
        wait_until(lambda: text in self.script(_SHOWN, selector), timeout, 0.1)

    def script(self, script: str, *arguments: Any) -> Any:
        """Run the body of a function, and return its result."""
        return self._post("execute/sync", script=script, args=list(arguments))

    def command(self, name: str, **parameters: Any) -> Any:
        """Run a command of the DevTools protocol."""
        return self._post("goog/cdp/execute", cmd=name, params=parameters)

    def set_view(self, width: int, height: int, dark: bool = False, phone: bool = False) -> None:
        """Set the size of the page, and the preferred colour scheme."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, file: Path) -> None:
        """Write the visible page as a PNG."""
        file.write_bytes(base64.b64decode(self._get("screenshot")))

    def logged_errors(self) -> Sequence[str]:
        """The browser's log of errors and refused scripts since the last call."""
        entries = self._post("se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def _element(self, selector: str) -> str:
        element = self._post("element", using="css selector", value=selector)
        return str(element[_ELEMENT])

    def _get(self, path: str) -> Any:
        return _value(self._session.get(path))

    def _post(self, path: str, **body: Any) -> Any:
        return _value(self._session.post(path, json=body))


_SHOWN = "const e = document.querySelector(arguments[0]); return e ? e.innerText : '';"


def _value(answer: httpx.Response) -> Any:
    value = answer.json()["value"]
    assert answer.status_code == 200, value
    return value


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with a new profile. Skips the test where Chromium or ChromeDriver is missing."""
    driver, binary = shutil.which("chromedriver"), shutil.which("chromium")
    if driver is None or binary is None:
        pytest.skip("Debian's chromium and chromium-driver are not installed")
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True) as process,
    ):
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{_port(process)}", timeout=60) as client:
                yield from _in_session(client, binary, profile)
        finally:
            process.kill()


def _in_session(client: httpx.Client, binary: str, profile: str) -> Iterator[Browser]:
    wanted: Mapping[str, Any] = {
        "browserName": "chrome",
        "timeouts": {"implicit": 15_000, "pageLoad": 30_000, "script": 15_000},
        "goog:loggingPrefs": {"browser": "ALL"},
        "goog:chromeOptions": {
            "binary": binary,
            "args": [*_FLAGS, f"--user-data-dir={profile}"],
        },
    }
    created = _value(client.post("/session", json={"capabilities": {"alwaysMatch": wanted}}))
    path = f"/session/{created['sessionId']}"
    address = str(client.base_url).rstrip("/")
    try:
        with httpx.Client(base_url=f"{address}{path}/", timeout=60) as session:
            yield Browser(session)
    finally:
        client.delete(path)


def _port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    for line in process.stdout:
        if found := _PORT.search(line):
            return int(found[1])
    raise AssertionError("chromedriver has ended")
