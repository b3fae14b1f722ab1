"""Checks what the groups of one process share: their targets, its console, and the addresses at which it listens."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Sequence

import psycopg

from relay.admin.findings import Finding, Severity, finding_of
from relay.config.files import Configuration, observed
from relay.config.observe import Address
from relay.faults import ConfigurationError
from relay.retention.removable import identity
from relay.store.connections import connect
from relay.store.groups import INSTANCE
from relay.store.presence import instances


def examine_process(configurations: Sequence[Configuration]) -> Iterator[Finding]:
    """Check what a process needs beside what each of its groups does."""
    if len(configurations) > 1:
        yield finding_of(
            "group", "no two have the same name and target", _require_own_targets, configurations
        )
    of = observed(configurations)
    if of.console is not None:
        from relay.console.server import Server

        groups = [each.settings for each in configurations]
        yield finding_of("console", "its packages are installed", Server, groups, of.console)
        yield _address(configurations, "observe.console.listen", of.console.listen)
    if of.listen is not None:
        yield _address(configurations, "observe.listen", of.listen)


def same_target(one: Configuration, other: Configuration) -> ConfigurationError:
    """Return the error for two configurations of which a process cannot run both."""
    return ConfigurationError(
        f"{one.name} and {other.name}: both have the group {one.settings.group!r} in the same target: name another "
        "group in one of them"
    )


def _require_own_targets(configurations: Sequence[Configuration]) -> None:
    seen: dict[tuple[str, str], Configuration] = {}
    for each in configurations:
        try:
            with connect(each.settings.target_dsn) as conn:
                key = (identity(conn), each.settings.group)
        except psycopg.Error:
            # A target that cannot be reached is a finding of its group.
            continue
        other = seen.setdefault(key, each)
        if other is not each:
            raise same_target(other, each)


def _address(configurations: Sequence[Configuration], key: str, address: Address) -> Finding:
    """Check that relay can listen at an address, unless one that runs on this host listens there."""
    try:
        (family, *_, resolved), *_ = socket.getaddrinfo(
            *address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        socket.create_server(resolved[:2], family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE and _runs_here(configurations):
            return Finding(Severity.OK, key, f"{address} is in use, and relay runs on this host")
        return Finding(
            Severity.ERROR,
            key,
            f"{key}: cannot listen on {address}: {error.strerror}: choose another address or port",
        )
    return Finding(Severity.OK, key, f"relay can listen on {address}")


def _runs_here(configurations: Sequence[Configuration]) -> bool:
    """Return whether an instance of one of the groups runs on this host."""
    host = INSTANCE.rpartition(":")[0]
    for each in configurations:
        try:
            with connect(each.settings.target_dsn) as conn:
                running = instances(conn, each.settings.group)
        except psycopg.Error:
            continue
        if any(name.rpartition(":")[0] == host for name in running):
            return True
    return False
