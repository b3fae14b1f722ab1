"""Parts of the console that need no database: charts, series, signatures, attempts."""

from __future__ import annotations

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from importlib.resources import files
from threading import Event
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from jinja2 import Environment, PackageLoader
from starlette.datastructures import URL
from starlette.types import Message

from relay.config.settings import Settings
from relay.console import charts
from relay.console.app import create_app
from relay.console.charts import Point, Series, amount, chart
from relay.console.security import Signer, printable
from relay.observe.history import Sample
from relay.web import protocol, requests, sessions
from relay.web.requests import Failures, TooManyFailures
from tests.console import TOKEN, console_of, served


def samples(count: int, rate: float) -> list[Sample]:
    """Samples of ten seconds each, at a steady rate."""
    return [
        Sample(1_000.0 + n * 10, {"events_total": n * 10 * rate, "lag_seconds": float(n % 7)})
        for n in range(count)
    ]


def test_rates_are_differences() -> None:
    """A count that begins again, as after a restart, or is not known, leaves a gap."""
    throughput = charts.of_group(samples(20, 40.0))[0]
    assert {point.value for point in throughput.points} == {40.0}
    again = [
        Sample(0.0, {"events_total": 500.0}),
        Sample(10.0, {"events_total": 20.0}),
        Sample(20.0, {}),
        Sample(30.0, {"events_total": 90.0}),
        Sample(40.0, {"events_total": 190.0}),
    ]
    assert [each.value for each in charts.of_group(again)[0].points] == [None, None, None, 10.0]


def test_many_samples_are_few_points() -> None:
    """Of six hours a chart has at most 180 points, each the greatest lag of its interval."""
    throughput, lag, *_ = charts.of_group(samples(2160, 5.0))
    assert 100 < len(lag.points) <= 180
    assert {point.value for point in lag.points} == {6.0}
    assert all(point.value == 5.0 for point in throughput.points)


def test_the_last_value_of_a_chart_is_not_one_from_before() -> None:
    """While a database was away, the lag was the last known one, 0.0 s, with no word that it is not known."""
    drawn = chart(Series("lag", "Lag", "seconds", [Point(0.0, 0.0), Point(10.0, None)]))
    assert drawn is not None
    assert drawn.last == "not known"
    assert "last not known, least 0.0 s" in drawn.description


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"y" * 16_400]
)
def test_what_is_no_request_gets_a_problem(sent: bytes) -> None:
    """TLS on the port of HTTP, and a head without an end, got text/plain: no error that clients can read."""
    settings = Settings(source={"dsn": "postgresql://u@h/x"}, observe=console_of())
    with served(settings) as address:
        host, _, port = address.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=10) as client:
            # In two parts: a server that closes with bytes unread resets the connection, answer and all.
            client.sendall(sent[:16_000])
            client.sendall(sent[16_000:])
            answer = b"".join(iter(lambda: client.recv(65_536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request")
    assert b"content-type: application/problem+json" in head
    assert json.loads(body)["status"] == 400


def test_a_chart_has_words_and_a_table() -> None:
    """What is drawn can be read: a title, a description, and rows; a gap parts the line."""
    points = [Point(60.0 * n, None if n == 5 else float(n)) for n in range(10)]
    drawn = chart(Series("lag", "Lag", "seconds", points))
    assert drawn is not None
    assert drawn.description == "Lag from 00:00 to 00:09 UTC: last 9.0 s, least 0.0 s, most 9.0 s"
    assert len(drawn.lines) == 2
    assert drawn.rows[-1] == ("00:09", "9.0 s")
    assert chart(Series("lag", "Lag", "seconds", [Point(0.0, None)])) is None
    flat = chart(Series("lag", "Lag", "events", [Point(1.0, 0.0)]))
    assert flat is not None
    assert flat.upward[-1].text == "1"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0, "bytes", "0 B"),
        (1536.0, "bytes", "1.5 kB"),
        (1023.9 * 1024, "bytes", "1024 kB"),
        (1.0, "transactions", "1 transaction"),
        (1.0, "transactions/s", "1 transaction/s"),
        (3 * 1024.0**3, "bytes", "3 GB"),
        (12_345.0, "events/s", "12.3 k/s"),
        (7.0, "events/s", "7 events/s"),
        (None, "bytes", "-"),
        (90.0, "seconds", "90 s"),
    ],
)
def test_amounts_are_short(value: float | None, unit: str, text: str) -> None:
    """In the unit that a person would use."""
    assert amount(value, unit) == text


def test_a_signature_is_for_one_purpose() -> None:
    """What was signed for something else, by another token, or changed, is nothing."""
    signer = Signer(b"one")
    signed = signer.sign("session", {"name": "anna"})
    assert signer.read("session", signed) == {"name": "anna"}
    assert signer.read("flash", signed) is None
    assert Signer(b"two").read("session", signed) is None
    for changed in ("", ".", signed[:-1], "x" + signed, signed + ".x", "é.é"):
        assert signer.read("session", changed) is None


def test_wrong_tokens_are_counted_by_address() -> None:
    """Ten a minute; another address is not concerned, and a minute later all is forgotten."""
    now = 0.0
    failures = Failures(lambda: now)
    for number in range(10):
        failures.require_few("a")
        failures.note("a", f"guess {number}")
    with pytest.raises(TooManyFailures):
        failures.require_few("a")
    failures.require_few("b")
    now = 61.0
    failures.require_few("a")
    failures.note("a", "guess")
    failures.require_few("a")


def test_the_same_wrong_token_counts_once() -> None:
    """A program with an old token does not count as guessing, and locks out no other user."""
    failures = Failures(lambda: 0.0)
    for _ in range(50):
        failures.require_few("a")
        failures.note("a", "the token of yesterday")
    failures.require_few("a")


def test_addresses_that_are_counted_are_bounded() -> None:
    """Somebody with many addresses takes no memory."""
    failures = Failures(lambda: 0.0)
    for number in range(5_000):
        failures.note(str(number), "guess")
    assert len(failures._counted) == 1_000


def test_names_are_printable() -> None:
    """A name has no control characters, and an end."""
    assert printable(" an\x1b[31mna\n") == "an[31mna"
    assert len(printable("x" * 500)) == 100


def test_its_files_are_in_the_package() -> None:
    """Every template is valid, and the style sheet, the script and the icon are there."""
    package = files("relay.console")
    names = {each.name for each in (package / "static").iterdir()}
    assert names == {"console.css", "console.js", "icon.svg"}
    environment = Environment(loader=PackageLoader("relay.console"), autoescape=True)
    environment.filters |= dict.fromkeys(
        (
            "when",
            "ago",
            "age",
            "due",
            "recently",
            "amount",
            "duration",
            "number",
            "counted",
            "code",
            "sentence",
        ),
        str,
    )
    templates = environment.list_templates()
    assert "base.html" in templates
    for name in templates:
        environment.get_template(name)
        text = (package / "templates" / name).read_text(encoding="utf-8")
        assert "|safe" not in text
        assert "style=" not in text
        assert "<script>" not in text


def _app() -> FastAPI:
    settings = Settings(source={"dsn": "postgresql://u@h/x"}, observe=console_of())
    assert settings.observe.console is not None
    return create_app([settings], settings.observe.console)


def test_who_is_let_in_depends_on_the_path_that_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """The URL of a request is made of its header Host too, which may hold the beginning of an open path."""
    monkeypatch.setattr(Request, "url", URL("http://x/static/?/api/v1/groups"))
    answer = asyncio.run(_asked(_app(), "/api/v1/groups"))
    assert answer[0]["status"] == 401


async def _asked(app: FastAPI, path: str, **scope: Any) -> list[Message]:
    """What the application sends for a GET, without a client between."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    wanted = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
    await app({**wanted, "app": app, **scope}, receive, send)
    return sent


def test_clients_that_send_nothing_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as may be connected: they are closed, and others come in."""
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    settings = Settings(source={"dsn": "postgresql://u@h/x"}, observe=console_of())
    with served(settings) as address, ExitStack() as stack:
        port = int(address.rpartition(":")[2])
        for number in range(64):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(b"GET /login" if number % 2 else b"")
        assert httpx.get(address + "/login").status_code == 200


def test_a_body_that_does_not_come_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """For an unknown user it is small too."""
    monkeypatch.setattr(requests, "BODY_SECONDS", 0.2)
    settings = Settings(source={"dsn": "postgresql://u@h/x"}, observe=console_of())
    with served(settings) as address:
        port = int(address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=5) as slow:
            slow.sendall(
                b"POST /login HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"
                b"content-type: application/x-www-form-urlencoded\r\n\r\nname="
            )
            assert slow.recv(100).startswith(b"HTTP/1.1 408")
        large = httpx.post(f"{address}/login", data={"name": "x" * 20_000, "token": TOKEN})
        assert large.status_code == 413


def test_databases_that_do_not_answer_leave_threads_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A frozen server answers nothing and ends nothing: who asks it must not take all there is."""
    released = Event()
    settings = Settings(source={"dsn": "postgresql://u@h/x"}, observe=console_of())
    monkeypatch.setattr(sessions, "_TURN_SECONDS", 0.05)
    monkeypatch.setattr("relay.admin.sinks.listed", lambda *_, **__: released.wait() and [])
    known = {"authorization": f"Bearer {TOKEN}"}
    with (
        served(settings) as address,
        httpx.Client(base_url=address, timeout=20) as client,
        ThreadPoolExecutor(sessions.CONCURRENT_REQUESTS + 5) as threads,
    ):
        sinks = "/api/v1/groups/default/sinks"
        asking = [
            threads.submit(client.get, sinks, headers=known)
            for _ in range(sessions.CONCURRENT_REQUESTS + 5)
        ]
        try:
            refused = next(as_completed(asking)).result()
            assert refused.status_code == 503
            assert "the databases do not answer" in refused.text
            assert client.get("/login").status_code == 200
        finally:
            released.set()
        assert {each.result().status_code for each in asking} == {200, 503}
        assert client.get(sinks, headers=known).status_code == 200
