"""An operator's day in a browser: why a transaction died, its cause mended, replayed; a sink paused and resumed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.observe import history
from relay.observe.history import Sample
from tests.browser import Browser, chromium
from tests.console import TOKEN, console_of, served
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.webhook import Webhook

pytestmark = pytest.mark.rare

DESKTOP, PHONE = (1280, 860), (390, 844)
IMAGES = "RELAY_CONSOLE_IMAGES"
"""The folder that screenshots are written to, such as docs/images; none where it is not set."""

_CONTRAST = """
const parse = (text) => {
  const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1});
  const context = canvas.getContext("2d", {willReadFrequently: true});
  context.fillStyle = text; context.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
};
const light = ([r, g, b]) => {
  const part = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
};
const ground = (element) => {
  for (let e = element; e; e = e.parentElement) {
    const colour = parse(getComputedStyle(e).backgroundColor);
    if (colour[3] > 0.99) return colour;
  }
  return [255, 255, 255, 1];
};
const poor = [];
for (const element of document.querySelectorAll("body *:not(svg):not(svg *)")) {
  const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  if (!own || !element.checkVisibility()) continue;
  const [a, b] = [light(parse(getComputedStyle(element).color)), light(ground(element))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) poor.push(`${element.tagName} ${element.textContent.trim().slice(0, 30)} ${ratio.toFixed(2)}`);
}
return poor;
"""
"""Texts whose contrast is below WCAG's AA."""
_UNNAMED = """
const named = (e) => (e.labels && e.labels.length) || e.ariaLabel || e.textContent.trim();
return [...document.querySelectorAll("input:not([type=hidden]), select, textarea, button, a[href]")]
  .filter((e) => !named(e)).map((e) => e.outerHTML)
  .concat([...document.querySelectorAll("table")].filter((t) => !t.caption).map((t) => t.outerHTML.slice(0, 80)))
  .concat([...document.querySelectorAll("th:not([scope])")].map((t) => t.outerHTML));
"""
"""Controls without a name, tables without a caption, headers without a scope."""
_PAGES = (
    *("", "sinks", "sink?name=hook", "dead-letters", "deferred", "partitions", "actions"),
    *("schedules", "schedule?name=nightly", "events", "events?event_type=order.placed"),
    *("tokens", "token/revoke?name=shop"),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser for the tests of this file."""
    with chromium() as found:
        yield found


def _log_in(browser: Browser, address: str) -> None:
    browser.set_view(*DESKTOP)
    # Cookies do not tell ports apart.
    browser.command("Network.clearBrowserCookies")
    browser.open(address)
    browser.type("#name", "anna")
    browser.type("#token", TOKEN)
    browser.click("form button.primary")
    browser.wait_text("Source")


def _picture(browser: Browser, name: str) -> None:
    """Store a screenshot for the documentation, if RELAY_CONSOLE_IMAGES asks for it."""
    if folder := os.environ.get(IMAGES):
        Path(folder).mkdir(parents=True, exist_ok=True)
        browser.screenshot(Path(folder) / f"console-{name}.png")


def _measured() -> None:
    """Six hours as a running relay measures them."""
    kept, now, total = history.of("default"), time.time(), 0.0
    for at in range(6 * 360):
        wave = 1 + ((at * 37) % 100) / 250 + (at % 700) / 900
        total += 10 * 420 * wave
        late = 40.0 if 1500 < at < 1560 else 0.2 * wave
        kept.add(
            Sample(
                now - (6 * 360 - at) * 10,
                {
                    "events_total": total,
                    "lag_seconds": late,
                    "lag_bytes": 180_000 * wave * (40 if late > 1 else 1),
                    "deferred": 3.0 if 900 < at < 1300 else 0.0,
                },
                {"hook": {"delivered_total": total / 3, "lag_seconds": late * 2}},
            )
        )


def test_an_operator_mends_and_replays(outbox: Outbox, browser: Browser) -> None:
    """From the overview to a dead letter, its exception, the mended cause, and the transaction that is applied."""
    settings = outbox.settings(observe=console_of())
    _measured()
    with served(settings) as address, relaying(settings):
        for number in range(3):
            outbox.publish(
                host(number),
                event(
                    payload={"amount": -5, "note": "</pre><script>document.title='owned'</script>"}
                ),
            )
            outbox.publish(host(10 + number), event(12.5))
        outbox.wait_handled()
        _log_in(browser, address)
        assert browser.text("#tiles").count("Dead letters") == 1
        _picture(browser, "light")
        browser.set_view(*DESKTOP, dark=True)
        _picture(browser, "dark")
        browser.set_view(*DESKTOP)
        browser.click(".tile a[href$='dead-letters']")
        browser.wait_text("Kinds of fault")
        browser.click(".kinds a")
        _picture(browser, "dead-letters")
        browser.click("table tbody a")
        assert "violates check constraint" in browser.text(".exception")
        assert "<script>" in browser.text(".payload")
        assert browser.script("return document.title").startswith("Dead letter")
        _picture(browser, "dead-letter")
        # The cause is mended: refunds are negative.
        outbox.conn.execute("alter table projection drop constraint projection_amount_check")
        browser.type("#replay-reason", "refunds are allowed now")
        browser.click("#replay-form button.primary")
        browser.wait_text("1 transaction is queued", ".flash")
        # The page reads itself again.
        browser.wait_text("It has been applied.", "#do-area")
        assert "refunds are allowed now" in browser.text("#done-area")
        assert outbox.value("select count(*) from projection where amount = -5") == 1
        assert browser.logged_errors() == []


def test_an_operator_pauses_a_sink(
    outbox: Outbox, browser: Browser, caplog: pytest.LogCaptureFixture
) -> None:
    """The page of a paused sink shows its lag grow; when it is resumed, everything arrives."""
    caplog.set_level("INFO", "relay")
    with Webhook() as hook:
        handlers = outbox.config()["handlers"] | {"hook": {"type": "http", "url": hook.url}}
        settings = outbox.settings(
            handlers=handlers,
            routes=[{"handlers": ["projection", "hook"]}],
            observe=console_of(),
            schedules={
                "nightly": {
                    "cron": "0 3 * * *",
                    "timezone": "Europe/Paris",
                    "publish": {"event_type": "cron.nightly", "host_id": str(host(1))},
                }
            },
        )
        outbox.install_again(settings)
        _measured()
        with served(settings) as address, relaying(settings):
            outbox.publish(host(1), event())
            wait_until(lambda: len(hook.requests) == 1)
            _log_in(browser, address)
            browser.open(f"{address}/groups/default/sink?name=hook")
            browser.type("#pause-reason", "the endpoint is moved")
            browser.click("#pause-form button")
            browser.wait_text("is paused", ".flash")
            wait_until(lambda: "a sink is paused" in caplog.text)
            for number in range(5):
                outbox.publish(host(number), event())
            browser.wait_text("5", "#unread")
            assert len(hook.requests) == 1
            _picture(browser, "sink")
            browser.type("#pause-reason", "it has moved")
            browser.click("#pause-form button")
            browser.wait_text("is resumed", ".flash")
            wait_until(lambda: len(hook.requests) == 6)
            browser.wait_text("attached", "#state")
            for each in _PAGES:
                browser.open(f"{address}/groups/default/{each}")
                for dark in (False, True):
                    browser.set_view(*DESKTOP, dark=dark)
                    assert browser.script(_CONTRAST) == [], each
                assert browser.script(_UNNAMED) == [], each
                browser.set_view(*PHONE, phone=True)
                width = browser.script("return document.documentElement.scrollWidth")
                assert width <= PHONE[0], each
            browser.open(f"{address}/groups/default/events?host={host(4)}")
            browser.click("#events a")
            browser.wait_text("by today's routes")
            number = browser.script("return document.querySelector('#id').value")
            found = "select host_id from outbox_message_t where id = %s"
            assert outbox.value(found, (number,)) == host(4)
            assert browser.script(_UNNAMED) == []
            browser.open(f"{address}/groups/default/")
            _picture(browser, "phone")
            assert browser.logged_errors() == []


def test_an_operator_creates_and_revokes_a_token(outbox: Outbox, browser: Browser) -> None:
    with served(outbox.settings(observe=console_of())) as address:
        _log_in(browser, address)
        browser.open(f"{address}/groups/default/tokens")
        browser.type("#name", "shop")
        browser.type("#create-reason", "a new shop")
        browser.click("#create-form button")
        browser.wait_text("no page shows it again")
        assert browser.text("#new-token").startswith("relay_")
        assert browser.script(_UNNAMED) == []
        assert browser.script(_CONTRAST) == []
        browser.click("a.button.primary")
        browser.click("table a")
        browser.type("#reason", "it has closed")
        browser.click("button.danger")
        browser.wait_text("Token shop is revoked", ".flash")
        rights = "select rights from relay.api_tokens where revoked_at is not null"
        assert outbox.column(rights) == [["read"]]
        assert browser.logged_errors() == []


def test_a_keyboard_is_enough(outbox: Outbox, browser: Browser) -> None:
    """The first Tab reaches the link past the header; every Tab after it goes on, and shows where."""
    with served(outbox.settings(observe=console_of())) as address:
        _log_in(browser, address)
        browser.open(f"{address}/groups/default/dead-letters")
        seen = []
        for _ in range(40):
            browser.press("\ue004")
            seen.append(
                browser.script(
                    "const e = document.activeElement, s = getComputedStyle(e);"
                    "return [e.outerHTML.slice(0, 120), e.tagName, s.outlineStyle, s.outlineWidth]"
                )
            )
            if seen[-1][1] == "BODY":
                break
        assert "Skip to the content" in seen[0][0]
        reached = [each for each in seen if each[1] != "BODY"]
        assert len({each[0] for each in reached}) == len(reached) > 15
        assert all(each[2] != "none" and each[3] != "0px" for each in reached)
