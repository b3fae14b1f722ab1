"""Ordering keys as text: the host, then the user or aggregate within it. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

from relay.model.events import Event

LONGEST = 1_000
"""The most bytes of each part of a key: an index entry of PostgreSQL, with group and sink, has at most 2,704 bytes."""
_BYTES_OF_CHARACTER = 4


def host_part(host: str) -> str:
    """The first part of a host's keys, before a space: the host_id, or its digest if it is long."""
    if len(host) * _BYTES_OF_CHARACTER <= LONGEST:
        return host
    octets = host.encode("utf-8", "surrogateescape")
    return host if len(octets) <= LONGEST else sha256(octets).hexdigest()


def of_host(host: str) -> str:
    """The key of all events of a host."""
    return f"{host_part(host)} host"


def of_event(kind: str, event: Event, fields: Iterable[str]) -> str:
    """The key of an event's host, a kind of key such as `user`, and some fields."""
    within = " ".join((kind, *(event.text(field) or "" for field in fields)))
    octets = within.encode("utf-8", "surrogateescape")
    if len(octets) > LONGEST:
        within = f"{kind} {sha256(octets).hexdigest()}"
    return f"{host_part(event.text('host_id') or '')} {within}"
