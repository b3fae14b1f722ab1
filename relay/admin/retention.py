"""Partitions the outbox by time, and removes and restores its events: `relay partition`, `erase` and `restore`.

`relay init --partition` partitions a new outbox. Publishers are not stopped.
"""

from __future__ import annotations

from datetime import UTC, datetime

import psycopg
from psycopg import sql

from relay.admin.check import require_group
from relay.admin.check_source import require_table
from relay.admin.connections import administrators, reach
from relay.config.settings import Settings
from relay.config.types import duration
from relay.faults import ConfigurationError, first_line
from relay.retention import erasure, restoration
from relay.retention.conversion import convert
from relay.retention.partitions import retained
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


def erase(
    settings: Settings,
    host: str,
    force: bool,
    source_dsn: str | None = None,
    target_dsn: str | None = None,
    report: ProgressReport = silent,
) -> erasure.ErasureReport:
    """Remove the events of a host. The DSNs, where given, belong to administrators. Raises ConfigurationError."""
    wanted = settings.source.printed_id("host_id", host, "--host")
    with administrators(settings, source_dsn, target_dsn) as (source, target):
        migrations.require(source, "source", "source.dsn")
        migrations.require(target, "target", "target.dsn")
        require_group(target, settings)
        try:
            return erasure.erase(settings, source, target, wanted, force, report)
        except psycopg.errors.InsufficientPrivilege as error:
            raise ConfigurationError(
                f"source.dsn: {first_line(error)}: connect as an administrator (--admin-dsn …)"
            ) from None


def partition(
    settings: Settings,
    every: str,
    admin_dsn: str | None = None,
    option: str = "--every",
    report: ProgressReport = silent,
) -> list[str]:
    """Partition the outbox, or change the interval of its next partitions; returns a line for each change.

    `every` is an interval such as 1d; `admin_dsn`, where given, belongs to the table's owner or an administrator.
    Raises ConfigurationError.
    """
    try:
        interval = duration(every)
    except ValueError as error:
        raise ConfigurationError(f"{option}: {error}") from None
    with reach(admin_dsn or settings.source_dsn, "source.dsn") as source:
        migrations.require(source, "source", "source.dsn")
        require_table(source, settings)
        try:
            return convert(settings, source, interval, report)
        except psycopg.errors.InsufficientPrivilege as error:
            raise ConfigurationError(
                f"source.dsn: {first_line(error)}: connect as the owner of {settings.source.table} or an administrator "
                "(--admin-dsn …)"
            ) from None
        except psycopg.errors.LockNotAvailable:
            raise ConfigurationError(
                f"source.table: {settings.source.table} is locked by long transactions: it was not partitioned; run "
                "the command again when they have ended"
            ) from None


def partition_new(settings: Settings, every: str, admin_dsn: str | None = None) -> list[str]:
    """Partition a new outbox, for `relay init --partition`. Raises ConfigurationError for a table that has rows."""
    with reach(admin_dsn or settings.source_dsn, "source.dsn") as source:
        require_table(source, settings)
        table = sql.Identifier(*settings.source.table_name)
        filled = source.execute(sql.SQL("select from {} limit 1").format(table)).rowcount
        if filled and retained(source, settings.source.table) is None:
            raise ConfigurationError(
                f"--partition: {settings.source.table} has rows already: run `relay partition --every {every}`, which "
                "converts it while publishers insert"
            )
    return partition(settings, every, admin_dsn, "--partition")
