"""Which addresses a sink may connect to, where data choose the destination. No I/O.

What is asked is the address of a connection that is about to be opened: a name may lead elsewhere with each query (DNS
rebinding), and an address has many spellings.

Sources: IANA IPv4 and IPv6 Special-Purpose Address Registries; RFC 6052 (NAT64), RFC 3056 (6to4); Azure documentation,
"What is IP address 168.63.129.16?".
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Literal

Address = IPv4Address | IPv6Address
Networks = Sequence[IPv4Network | IPv6Network]

_NOT_PUBLIC_V4 = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",  # this network; 0.0.0.0 is this host
            "10.0.0.0/8",  # private
            "100.64.0.0/10",  # shared by carriers; Alibaba's metadata
            "127.0.0.0/8",  # loopback
            "168.63.129.16/32",  # Azure's platform, such as its metadata for agents
            "169.254.0.0/16",  # link-local; the metadata of most clouds
            "172.16.0.0/12",  # private
            "192.0.0.0/24",  # protocols; Oracle's metadata
            "192.0.2.0/24",  # documentation
            "192.88.99.0/24",  # relays of 6to4
            "192.168.0.0/16",  # private
            "198.18.0.0/15",  # benchmarks
            "198.51.100.0/24",  # documentation
            "203.0.113.0/24",  # documentation
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved; broadcast
        ),
    )
)
_GLOBAL_V6 = IPv6Network("2000::/3")
_NOT_PUBLIC_V6 = tuple(
    map(
        IPv6Network,
        (
            "2001::/23",  # protocols, Teredo among them
            "2001:db8::/32",  # documentation
            "3fff::/20",  # documentation
        ),
    )
)
_NAT64 = IPv6Network("64:ff9b::/96")


class AddressRefused(OSError):
    """The address may not be connected to. Its message names the address, so it is not for a log."""


class EgressGuard:
    """Refuses addresses that are not public, but those in `allowed`; without `refuses` none."""

    def __init__(self, allowed: Networks = (), *, refuses: bool = True) -> None:
        self._allowed = allowed
        self._refuses = refuses

    @classmethod
    def of(cls, setting: Literal["allow", "refuse"] | list[str]) -> EgressGuard:
        """The guard for a value of `private_addresses`."""
        if isinstance(setting, list):
            return cls(tuple(ip_network(each) for each in setting))
        return cls(refuses=setting == "refuse")

    def require(self, address: str) -> None:
        """Raise AddressRefused for the address of a connection that is about to be opened."""
        if self._refuses and not self._permits(ip_address(address.partition("%")[0])):
            raise AddressRefused(f"{address} is not a public address")

    def require_literal(self, host: str) -> None:
        """Raise AddressRefused for a host of a URL that is an address, in any spelling, or this host's own name.

        A proxy resolves names, and connects to what it finds.
        """
        host = host.rstrip(".").lower()
        if self._refuses and (host == "localhost" or host.endswith(".localhost")):
            raise AddressRefused(f"{host} is not a public address")
        address = _literal(host)
        if address is not None:
            self.require(address)

    def _permits(self, address: Address) -> bool:
        inner = _embedded(address)
        return (
            is_public(address)
            or any(address in network for network in self._allowed)
            or (inner is not None and any(inner in network for network in self._allowed))
        )


def refused_address(error: BaseException) -> bool:
    """Whether an error of the client is that of an address that a guard has refused."""
    causes = (error, error.__cause__, getattr(error, "os_error", None))
    return any(isinstance(each, AddressRefused) for each in causes)


def is_public(address: Address) -> bool:
    """Whether an address is one of the Internet that everybody may reach; an embedded IPv4 address decides."""
    inner = _embedded(address)
    if inner is not None:
        address = inner
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_V4)
    return address in _GLOBAL_V6 and not any(address in network for network in _NOT_PUBLIC_V6)


def _embedded(address: Address) -> IPv4Address | None:
    """The IPv4 address to which packets for an IPv6 address are translated or tunnelled; None without one."""
    if isinstance(address, IPv4Address):
        return None
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour


def _literal(host: str) -> str | None:
    """The address that a host of a URL spells: `2130706433` and `0x7f.1` are 127.0.0.1 too; None for a name."""
    host = host.removeprefix("[").removesuffix("]").partition("%")[0]
    try:
        return str(ip_address(host))
    except ValueError:
        pass
    try:
        return socket.inet_ntoa(socket.inet_aton(host))
    except (OSError, ValueError):
        return None
