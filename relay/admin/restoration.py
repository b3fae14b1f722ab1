"""Restores archived events into the outbox: `relay restore`."""

from __future__ import annotations

from datetime import UTC, datetime

import psycopg

from relay.admin.check_source import require_table
from relay.admin.connections import reach
from relay.config.settings import Settings
from relay.faults import ConfigurationError, first_line
from relay.retention import restoration
from relay.runtime.reporting import ProgressReport, silent
from relay.store import migrations


def restore(
    settings: Settings,
    lower: str,
    upper: str,
    admin_dsn: str | None = None,
    report: ProgressReport = silent,
) -> restoration.Restored:
    """Restore archived events of a time range into the outbox.

    The times are ISO 8601, in UTC unless they have an offset; `admin_dsn`, where given, belongs to the table's owner or
    an administrator. Raises ConfigurationError.
    """
    begin, end = _time(lower, "--from"), _time(upper, "--to")
    if begin >= end:
        raise ConfigurationError(f"--to: {upper} is not after {lower}")
    with reach(admin_dsn or settings.source_dsn, "source.dsn") as source:
        migrations.require(source, "source", "source.dsn")
        require_table(source, settings)
        try:
            return restoration.restore(settings, source, begin, end, report)
        except psycopg.errors.InsufficientPrivilege as error:
            raise ConfigurationError(
                f"source.dsn: {first_line(error)}: connect as the owner of {settings.source.table} or an administrator "
                "(--admin-dsn …)"
            ) from None
        except OSError as error:
            raise ConfigurationError(
                f"handlers.{settings.retention.archive}.path: cannot be read: {first_line(error)}"
            ) from None


def _time(value: str, option: str) -> datetime:
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise ConfigurationError(
            f"{option}: {value!r} is not a time: write it as 2026-11-24 or 2026-11-24T12:00:00+00:00"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
