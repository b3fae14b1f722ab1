"""What `relay check` finds: a finding has a severity, a subject, and a text that says what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from relay.faults import ConfigurationError, Unreachable
from relay.store import migrations
from relay.store.connections import Connection


class Severity(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `text` says what is wrong, where, and what to do; an outage `passes` by itself."""

    level: Severity
    subject: str
    text: str
    passes: bool = False


def finding_of_error(subject: str, error: ConfigurationError) -> Finding:
    """The finding that an error is; an outage passes by itself."""
    return Finding(Severity.ERROR, subject, str(error), passes=isinstance(error, Unreachable))


def finding_of(subject: str, fine: str, check: Any, *arguments: Any) -> Finding:
    """Call a check: an error if it raises ConfigurationError, otherwise `fine`."""
    try:
        check(*arguments)
    except ConfigurationError as error:
        return finding_of_error(subject, error)
    return Finding(Severity.OK, subject, fine)


def schema_finding(conn: Connection, side: migrations.Side, key: str) -> Finding:
    """Whether the tables of one side are those of this program."""
    return finding_of(
        "schema", f"{side}: relay's tables are this program's", migrations.require, conn, side, key
    )
