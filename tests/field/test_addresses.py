"""IPv6 literals wherever relay takes the address of a host."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from psycopg.conninfo import conninfo_to_dict

from relay.config.dsn import check_dsn
from relay.config.handlers import HttpHandler
from relay.config.settings import ConsoleSettings, Settings, address
from relay.console.server import console_server
from relay.faults import Undelivered
from relay.observe.server import listen
from relay.observe.spans import exporter
from relay.sinks import build_sinks
from relay.sinks.http import Http, public_url
from tests.sinks import make_event, transaction
from tests.webhook import Answer, Webhook

LOOPBACK = "::1"


def _has_ipv6() -> bool:
    try:
        socket.create_server((LOOPBACK, 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no ::1")


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook(host=LOOPBACK) as server:
        yield server


def deliver(url: str) -> None:
    """Post one event to an endpoint."""

    async def run() -> None:
        sink = Http("hook", HttpHandler(type="http", url=url))
        try:
            await sink.deliver(transaction(make_event(1)))
        finally:
            await sink.close()

    asyncio.run(run())


@pytest.mark.parametrize("host", ["[::1]", "[0:0:0:0:0:0:0:1]", "user:p%40ss@[::1]"])
def test_an_endpoint_may_be_an_ipv6_literal(webhook: Webhook, host: str) -> None:
    """aio-libs/aiohttp#425, chris-mc1/homeconnect_local_hass#59."""
    deliver(f"http://{host}:{webhook.port}/a%2Fb?c=d")
    (request,) = webhook.accepted
    assert request.path == "/a%2Fb?c=d"
    assert request.headers["host"] == f"[::1]:{webhook.port}"
    assert public_url(f"http://{host}:1/x") == f"http://{host.rpartition('@')[2]}:1/x"


@pytest.mark.parametrize("exempt", ["::1", "[::1]", "localhost, ::1", "[::1]:{port}"])
def test_no_proxy_may_name_an_ipv6_literal(
    webhook: Webhook, exempt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """curl/curl#2353, nodejs/undici#5616, oven-sh/bun#37429: with brackets or without."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", exempt.format(port=webhook.port))
    deliver(webhook.url)
    assert webhook.accepted


def test_a_proxy_may_be_an_ipv6_literal(webhook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://[::1]:{webhook.port}")
    monkeypatch.setenv("no_proxy", "::2")
    deliver("http://[2001:db8::1]:8080/x")
    (request,) = webhook.accepted
    assert request.path == "http://[2001:db8::1]:8080/x"


@pytest.mark.parametrize(
    "settings",
    [
        {"type": "redis", "url": "redis://u:p@[::1]:{port}/0"},
        {"type": "nats", "servers": ["nats://[::1]:{port}"]},
        {"type": "rabbitmq", "url": "amqp://guest:guest@[::1]:{port}/%2F"},
        {"type": "kafka", "bootstrap": ["[::1]:{port}"]},
    ],
    ids=lambda settings: str(settings["type"]),
)
def test_a_broker_may_be_an_ipv6_literal(settings: dict[str, Any]) -> None:
    """platformatic/kafka#364, redis/node-redis#2734, confluentinc/librdkafka#23: relay's clients connect to it."""
    listener = socket.create_server((LOOPBACK, 0), family=socket.AF_INET6)
    listener.settimeout(10)
    port = listener.getsockname()[1]
    filled = yaml.safe_load(yaml.safe_dump(settings).replace("{port}", str(port)))
    parsed = Settings(
        source={"dsn": "dbname=x"},
        handlers={"broker": {**filled, "topic": "events", "timeout": 2}},
    )
    sink, _ = build_sinks(parsed.handlers)["broker"]

    async def run() -> None:
        delivery = asyncio.create_task(sink.deliver(transaction(make_event(1))))
        conn, _ = await asyncio.to_thread(listener.accept)
        conn.close()
        listener.close()
        with pytest.raises(Undelivered):
            await delivery
        await sink.close()

    asyncio.run(run())


def test_traces_are_sent_to_an_ipv6_literal(
    webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://[::1]:{webhook.port}")
    webhook.answers = lambda headers, body: Answer(200)
    sender = exporter()
    sender.export([])
    sender.shutdown()
    assert [request.path for request in webhook.requests] == ["/v1/traces"]


def test_metrics_are_served_at_an_ipv6_literal() -> None:
    listener = listen(address("[::1]:0"))
    try:
        with urllib.request.urlopen(f"http://[::1]:{listener.port}/metrics", timeout=60) as answer:
            assert answer.status == 200
    finally:
        listener.close()


def test_the_console_is_served_at_an_ipv6_literal() -> None:
    console = ConsoleSettings(listen="[::1]:0", token="0123456789abcdef")
    with (
        console_server([], console) as server,
        urllib.request.urlopen(f"http://[::1]:{server.port}/login", timeout=60) as answer,
    ):
        assert answer.status == 200


@pytest.mark.parametrize("text", ["[::1]:9464", "127.0.0.1:9464", "localhost:9464"])
def test_an_address_is_shown_as_it_is_written(text: str) -> None:
    assert str(address(text)) == text


@pytest.mark.parametrize(
    ("dsn", "host", "port"),
    [
        ("postgresql://app:pw@[::1]:5433/shop", "::1", "5433"),
        (
            "postgresql://[::1],[2001:db8::2]:5433/shop?target_session_attrs=any",
            "::1,2001:db8::2",
            ",5433",
        ),
        ("host=::1 port=5433 dbname=shop", "::1", "5433"),
    ],
)
def test_a_dsn_may_have_ipv6_literals(dsn: str, host: str, port: str) -> None:
    fields = conninfo_to_dict(check_dsn(dsn))
    assert (fields["host"], fields["port"], fields["dbname"]) == (host, port, "shop")
