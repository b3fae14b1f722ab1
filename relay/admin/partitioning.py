"""Partitions the outbox by time: `relay partition` and `relay init --partition`. Publishers are not stopped."""

from __future__ import annotations

import psycopg
from psycopg import sql

from relay.admin.check_source import require_table
from relay.admin.connections import reach
from relay.config.retention import duration
from relay.config.settings import Settings
from relay.faults import ConfigurationError, first_line
from relay.retention.conversion import convert
from relay.retention.partitions import retained
from relay.runtime.reporting import ProgressReport, silent
from relay.store import migrations


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
