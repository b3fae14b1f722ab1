"""Notes which databases refuse relay's credentials, and ends relay when one has refused the newest for too long.

A password that is rotated is new in the database first, or in its file: until both agree, connections are refused. They
are tried again with what the file has then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

import psycopg

from relay.config.dsn import DatabaseAccess
from relay.faults import ConfigurationError, NoCredentials, first_line, refused_for_good
from relay.outages import Outage
from relay.runtime.parts import Condition, Recurring

log = logging.getLogger(__name__)

REFUSED_SECONDS = 120.0
"""How long a database may refuse relay's credentials before relay ends: kubelet takes a minute and a half to write a
secret that has changed."""
_CHECK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why no connection to a database is opened, and since when (monotonic clock, seconds)."""

    text: str
    since: float

    @property
    def seconds(self) -> float:
        """For how long the database has refused connections."""
        return time.monotonic() - self.since


_refusals: dict[DatabaseAccess, Refusal] = {}
_lock = Lock()


def note(access: DatabaseAccess, error: psycopg.OperationalError) -> None:
    """Note an ordinary connection that has failed."""
    if not refused_for_good(error):
        # An outage: nobody knows what the server would say.
        accepted(access)
        return
    access.refused()
    with _lock:
        before = _refusals.get(access)
        since = time.monotonic() if before is None else before.since
        _refusals[access] = Refusal(_why(access, error), since)


def _why(access: DatabaseAccess, error: psycopg.OperationalError) -> str:
    text = first_line(error).removeprefix("connection failed: ")
    if isinstance(error, NoCredentials):
        return f"has no credentials: {text.removeprefix(f'{access.key}: ')}"
    return f"refuses relay's credentials: {text}"


def accepted(access: DatabaseAccess) -> None:
    """Note that a database does not refuse relay's credentials."""
    if access in _refusals:
        with _lock:
            _refusals.pop(access, None)


def refusal(access: DatabaseAccess) -> Refusal | None:
    """Why a database refuses relay's credentials; None if it does not, as far as is known."""
    return _refusals.get(access)


class RefusalWatch(Recurring):
    """Ends with a ConfigurationError once a database has refused the credentials for REFUSED_SECONDS."""

    def __init__(self, accesses: list[DatabaseAccess], failed: Callable[[], None]) -> None:
        super().__init__(
            Condition(
                "refusals", log, "cannot watch for refusals", "refusals are watched for again"
            ),
            failed,
        )
        self._outages = {
            access: Outage(
                log,
                "no connection to a database is opened; relay ends unless that changes",
                "connections to a database are opened again",
            )
            for access in accesses
        }

    def turn(self) -> float:
        """Raise ConfigurationError if a database has refused the credentials for too long."""
        for access, outage in self._outages.items():
            found = refusal(access)
            if found is None:
                outage.over(database=access.key)
                continue
            outage.fails(
                found.text,
                lasts=found.seconds,
                database=access.key,
                limit_seconds=REFUSED_SECONDS,
            )
            if found.seconds > REFUSED_SECONDS:
                raise ConfigurationError(
                    f"{access.key}: {found.text} (for {REFUSED_SECONDS:g} s): correct the address or the "
                    "credentials"
                )
        self.condition.works()
        return _CHECK_SECONDS
