"""A browser's EventSource on the HTTP API, as docs/how-to/http-api.md has it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

import pytest
from psycopg.conninfo import conninfo_to_dict

from relay.admin import tokens
from tests.api import new_token, served, settings_of
from tests.browser import Browser, chromium
from tests.chaos.proxy import through_proxy
from tests.outbox import Outbox, event, host, wait_until
from tests.process import ROOT

pytestmark = pytest.mark.rare

_NOTE = "x" * 20_000
_LISTEN = """
window.found = [];
window.source = source;
source.addEventListener("message", (message) => window.found.push(JSON.parse(message.data).payload.amount));
"""


class _Page(BaseHTTPRequestHandler):
    """An empty page of another site."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>app</title>")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _page() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _script(address: str, token: str) -> str:
    """The script of the page in the documentation, for an address and a token."""
    page = (ROOT / "docs/how-to/http-api.md").read_text()
    found = re.search(r"```js\n(.*?)```", page, re.DOTALL)
    assert found is not None
    script = found[1].replace("https://relay.example", address)
    assert address in script
    return f'const token = "{token}"; {script} {_LISTEN}'


def _found(browser: Browser) -> list[int]:
    return list(browser.script("return window.found;"))


def _wait_found(browser: Browser, count: int) -> None:
    """Wait until so many events have come. Fails where the browser has given up."""

    def has() -> bool:
        assert browser.script("return window.source.readyState;") != 2, browser.logged_errors()
        return len(_found(browser)) >= count

    wait_until(has)


def test_a_browser_gets_each_event_once_through_a_connection_that_is_cut(outbox: Outbox) -> None:
    """Libraries sent no Last-Event-ID, or the first one for ever: EventSource/eventsource#27 and #291,
    alevinval/sse#40; and everything came again: athrvk/vayu#21. A token in a header cannot be sent at all:
    whatwg/html#2177, Yaffle/EventSource#44."""
    with _page() as page, chromium() as browser:
        settings = settings_of(outbox, origins=[page])
        token = new_token(settings, "browser", types=["order.*"])
        with (
            served(settings) as address,
            through_proxy(f"host=127.0.0.1 port={address.rpartition(':')[2]}") as proxy,
        ):
            asked: list[bytes] = []

            def notes(data: bytes) -> bool:
                asked.append(data)
                return False

            proxy.cut_after = notes
            through = f"http://127.0.0.1:{conninfo_to_dict(proxy.dsn)['port']}"
            browser.open(page)
            browser.script(_script(through, token))
            wait_until(lambda: browser.script("return window.source.readyState;") == 1)

            stop, published = Event(), list[int]()

            def publish() -> None:
                while not stop.wait(0.01):
                    number = len(published)
                    outbox.publish(
                        host(1), event(number, payload={"amount": number, "note": _NOTE})
                    )
                    published.append(number)

            publishing = Thread(target=publish)
            publishing.start()
            for _ in range(5):
                _wait_found(browser, len(_found(browser)) + 20)
                proxy.cut()
            stop.set()
            publishing.join()
            # The stream begins at a position of the moment after it was opened.
            first = _found(browser)[0]
            _wait_found(browser, len(published) - first)
            assert _found(browser) == published[first:]
            heads = [each.lower() for each in asked if each.startswith(b"GET /v1/events/stream")]
            # After the last cut it need not have come back: what was published may be there.
            assert len(heads) >= 5
            assert all(b"last-event-id: " in each for each in heads[1:])
            # It gives up where it may not read any more.
            tokens.revoke(settings, "browser")
            wait_until(lambda: browser.script("return window.source.readyState;") == 2)


def test_a_page_of_another_site_gets_nothing(outbox: Outbox) -> None:
    """Of which `api.origins` knows nothing, even with a token."""
    with _page() as page, chromium() as browser:
        settings = settings_of(outbox)
        token = new_token(settings, "browser", types=["order.*"])
        with served(settings) as address:
            browser.open(page)
            browser.script(_script(address, token))
            wait_until(lambda: browser.script("return window.source.readyState;") == 2)
            outbox.publish(host(1), event(1))
            assert _found(browser) == []
