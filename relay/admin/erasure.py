"""Removes the events of a host from source and target: `relay erase`."""

from __future__ import annotations

import psycopg

from relay.admin.administrators import administrators
from relay.admin.check import require_group
from relay.config.settings import Settings
from relay.faults import ConfigurationError, first_line
from relay.retention import erasure
from relay.runtime.reporting import ProgressReport, silent
from relay.store import migrations


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
