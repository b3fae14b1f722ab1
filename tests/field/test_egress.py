"""Where data choose the endpoint, no spelling, name, redirect or proxy leads to an address that is not public.

Reports: OneUptime/oneuptime#2578 and odysseus-dev/odysseus#1053 (IPv4-mapped, unspecified), JSONbored/metagraphed#1533,
vulnerability-lookup/vulnerability-lookup#540 and useplunk/plunk#449 (NAT64, 6to4, Teredo, IPv4-compatible, all of
fe80::/10), oblien/openship#209 (decimal and hexadecimal IPv4, shared addresses, names of metadata),
shashankswe2020-ux/whoop-mcp#126 (names that are rebound), ancsemi/Haven#5520 and hzrd149/blossom-server#57 (connects
to the address that was judged; redirects), librefang/librefang#2411 (brackets).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any

import pytest

from relay.config.handlers import HttpHandler
from relay.faults import DestinationRefused, Undelivered
from relay.sinks.egress import AddressRefused, EgressGuard, is_public
from relay.sinks.http import Http
from tests.sinks import make_event, transaction
from tests.webhook import Answer, Webhook

PUBLIC = (
    *("1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0"),
    *("126.255.255.255", "128.0.0.1", "168.63.129.15", "168.63.129.17", "169.253.255.255"),
    *("172.15.255.255", "172.32.0.0", "192.0.1.0", "192.167.255.255", "192.169.0.0", "198.17.0.1"),
    *("198.20.0.0", "223.255.255.255"),
    *("2001:4860:4860::8888", "2606:4700::1111", "2a00:1450:4001::200e", "2003::1"),
    *("64:ff9b::8.8.8.8", "2002:808:808::1", "::ffff:8.8.8.8"),
)
NOT_PUBLIC = (
    *("0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.100.100.200"),
    *("127.0.0.1", "127.255.255.254", "168.63.129.16", "169.254.169.254", "169.254.170.2"),
    *("172.16.0.1", "172.31.255.255", "192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.1.1"),
    *("198.18.0.1", "198.19.255.255", "198.51.100.7", "203.0.113.9", "224.0.0.1"),
    *("239.255.255.255", "240.0.0.1", "255.255.255.255"),
    *("::", "::1", "::127.0.0.1", "::8.8.8.8", "::ffff:127.0.0.1", "::ffff:a9fe:a9fe"),
    *("0:0:0:0:0:ffff:10.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b::127.0.0.1", "64:ff9b::a9fe:a9fe"),
    *("64:ff9b:1::8.8.8.8", "100::1", "2001::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2"),
    *("2001:db8::1", "2002:7f00:1::", "2002:a9fe:a9fe::1", "2002:c0a8:101::1", "3fff::1"),
    *("5f00::1", "fc00::1", "fd00:ec2::254", "fd20:ce::254", "fe80::1", "fe81::1", "febf::1"),
    *("fec0::1", "ff02::1", "ff05::1:3"),
)


@pytest.mark.parametrize("text", PUBLIC)
def test_a_public_address(text: str) -> None:
    assert is_public(ip_address(text))


@pytest.mark.parametrize("text", NOT_PUBLIC)
def test_an_address_that_is_not_public(text: str) -> None:
    assert not is_public(ip_address(text))
    with pytest.raises(AddressRefused):
        EgressGuard().require(text)


def test_an_allowed_network_is_allowed_in_each_of_its_forms() -> None:
    guard = EgressGuard.of(["10.8.0.0/16", "fd12::/16"])
    for text in ("10.8.1.2", "::ffff:10.8.1.2", "64:ff9b::10.8.1.2", "fd12::1", "8.8.8.8"):
        guard.require(text)
    for text in ("10.9.0.1", "fd13::1", "127.0.0.1"):
        with pytest.raises(AddressRefused):
            guard.require(text)
    EgressGuard(refuses=False).require("127.0.0.1")


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.0.0.1.", "127.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1"),
        *("0", "[::1]", "::1", "[fe80::1%eth0]", "[::ffff:7f00:1]", "localhost", "LOCALHOST."),
        "a.localhost",
    ],
)
def test_a_host_that_spells_an_address_is_none_for_a_proxy(host: str) -> None:
    with pytest.raises(AddressRefused):
        EgressGuard().require_literal(host)


@pytest.mark.parametrize(
    "host", ["shop.example", "1.2.3.4.example", "8.8.8.8", "localhost.example"]
)
def test_a_proxy_resolves_other_hosts(host: str) -> None:
    EgressGuard().require_literal(host)


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as server:
        yield server


def deliver(url: str, **more: Any) -> list[BaseException | None]:
    """What a delivery to an endpoint raises."""

    async def run() -> list[BaseException | None]:
        settings = {"private_addresses": "refuse", "timeout": 3.0, **more}
        sink = Http("hook", HttpHandler.model_validate({"type": "http", "url": url, **settings}))
        try:
            delivery = sink.deliver(transaction(make_event(1)))
            return list(await asyncio.gather(delivery, return_exceptions=True))
        finally:
            await sink.close()

    return asyncio.run(run())


def refused(error: BaseException | None) -> bool:
    """Whether a delivery was refused by the guard, in a message that has no address."""
    return isinstance(error, DestinationRefused) and "127" not in str(error)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "[::]", "0.0.0.0"]
)
def test_nothing_is_sent_to_an_address_that_is_not_public(webhook: Webhook, host: str) -> None:
    (error,) = deliver(f"http://{host}:{webhook.port}/")
    assert refused(error), error
    assert not webhook.connections


@pytest.mark.parametrize("host", ["2130706433", "0x7f.1", "127.1", "0177.0.0.1"])
def test_another_spelling_of_an_address_is_no_way_around(webhook: Webhook, host: str) -> None:
    (error,) = deliver(f"http://{host}:{webhook.port}/")
    assert isinstance(error, Undelivered)
    assert not webhook.connections


def test_a_network_may_be_allowed(webhook: Webhook) -> None:
    assert deliver(webhook.url, private_addresses=["127.0.0.0/8"]) == [None]
    assert deliver(webhook.url, private_addresses="allow") == [None]


def test_a_name_that_is_rebound_is_judged_by_the_address_that_is_connected_to(
    webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first query finds a public address, at which nobody answers; each later one finds loopback."""
    answers = iter(["192.0.2.7"])

    def resolve(host: Any, port: Any, *_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers, "127.0.0.1"), port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    url = f"http://rebound.example:{webhook.port}/"
    (first,) = deliver(url, timeout=0.5, private_addresses=["192.0.2.0/24"])
    (second,) = deliver(url, private_addresses=["192.0.2.0/24"])
    assert isinstance(first, Undelivered)
    assert refused(second)
    assert not webhook.connections


def test_a_redirect_leads_nowhere(webhook: Webhook) -> None:
    with Webhook(lambda *_: Answer(307, (("location", webhook.url),))) as redirecting:
        (error,) = deliver(redirecting.url, private_addresses=["127.0.0.1/32"])
    assert isinstance(error, Undelivered)
    assert "HTTP 307" in str(error)
    assert not webhook.requests


def test_a_proxy_may_be_private_and_is_asked_for_no_private_address(
    webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a name leads to is the proxy's to judge: relay does not resolve it."""
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{webhook.port}")
    monkeypatch.delenv("no_proxy", raising=False)
    for host in ("169.254.169.254", "[::ffff:a9fe:a9fe]", "2852039166", "localhost"):
        (error,) = deliver(f"http://{host}/latest/meta-data")
        assert refused(error), host
    assert not webhook.requests
    assert deliver("http://shop.example/hook") == [None]


def test_the_key_takes_networks_only() -> None:
    with pytest.raises(ValueError, match="must be a network"):
        HttpHandler.model_validate(
            {"type": "http", "url": "http://a", "private_addresses": ["shop.example"]}
        )
