"""Findings of `relay check`: each has a severity, a subject, and a text that says what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from relay.faults import ConfigurationError, RelayError, Unreachable
from relay.store import migrations, own_rights
from relay.store.connections import Connection


class Severity(StrEnum):
    """The severity of a finding; an error keeps relay from starting."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `text` says what is wrong, where, and what to do. `passes` is true for an outage.

    `exit_status` is that of a relay which ends for it.
    """

    level: Severity
    subject: str
    text: str
    passes: bool = False
    exit_status: int = ConfigurationError.exit_status


def finding_of_error(subject: str, error: RelayError) -> Finding:
    """Make a finding of an error."""
    passes = isinstance(error, Unreachable)
    return Finding(Severity.ERROR, subject, str(error), passes, error.exit_status)


def finding_of(subject: str, passed: str, check: Any, *arguments: Any) -> Finding:
    """Call a check; returns an error if it raises RelayError, otherwise OK with the text `passed`."""
    try:
        check(*arguments)
    except RelayError as error:
        return finding_of_error(subject, error)
    return Finding(Severity.OK, subject, passed)


def schema_finding(conn: Connection, side: migrations.Side, key: str) -> Finding:
    """Check that one side of the schema has the version of this program."""
    return finding_of(
        "schema",
        f"{side}: relay's tables have the version of this program",
        migrations.require,
        conn,
        side,
        key,
    )


def rights_findings(
    conn: Connection, sides: Sequence[migrations.Side], key: str
) -> Iterator[Finding]:
    """Find what others than relay lack: it runs without, and publishers, workers or readers are refused."""
    for lack in own_rights.lacking(conn, sides, but=("relay",)):
        yield Finding(Severity.WARNING, "rights", f"{key}: {lack.text}: {lack.hint}")
