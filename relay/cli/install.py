"""The commands that install relay in a database, check it there and remove it. No logic of their own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from relay.cli.options import (
    AdministratorOptions,
    ConfigOption,
    JsonOption,
    YesOption,
    say,
    warn,
    with_groups,
    with_options,
)
from relay.cli.retention import EveryOption
from relay.cli.terminal import approve, progress
from relay.config.files import for_each, load, load_all, require_one
from relay.faults import ConfigurationError

if TYPE_CHECKING:
    from relay.admin.findings import Finding
    from relay.config.settings import Settings


@with_groups
def init(
    context: typer.Context,
    administrator: AdministratorOptions,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="beginning|now|OFFSET",
            help="The position at which a new group begins; default now. Rows older than the slot are polled.",
        ),
    ] = None,
    every: EveryOption = None,
    handlers_publish: Annotated[
        bool | None,
        typer.Option(
            "--handlers-publish/--no-handlers-publish",
            help="Grant the role relay the right to publish into the outbox, for handlers with publishes: true, or "
            "revoke it; default: as it is.",
        ),
    ] = None,
) -> None:
    """Install schema, publication, slot and group; a second run changes nothing."""
    from relay.admin.install import initialise
    from relay.admin.retention import partition_new

    config = administrator.config
    source_dsn, target_dsn = administrator.source_dsn(), administrator.target_dsn()
    if source_dsn is not None:
        require_one(load_all(config), "source", "--admin-dsn")
    if target_dsn is not None:
        require_one(load_all(config), "target", "--target-admin-dsn")

    def install(settings: Settings) -> None:
        try:
            with progress() as report:
                done = initialise(
                    settings,
                    source_dsn,
                    target_dsn,
                    start=start,
                    warn=warn,
                    report=report,
                    handlers_publish=handlers_publish,
                )
            if every is not None:
                done += partition_new(settings, every, source_dsn)
        except ConfigurationError as error:
            raise with_options(error, context) from None
        for line in done:
            say(f"created {line}")
        if not done:
            print("everything exists already")

    for_each(config, install)


def check(
    config: ConfigOption = None,
    as_json: JsonOption = False,
    accept_configuration: Annotated[
        bool,
        typer.Option(
            "--accept-configuration",
            help="Check for `relay run` with the same option.",
        ),
    ] = False,
) -> None:
    """Check everything that a run needs; each finding says what to do. Exit status 2 if there is an error."""
    from relay.admin.check import examine, examine_process
    from relay.admin.findings import Severity

    def examine_group(settings: Settings) -> list[tuple[str, Finding]]:
        findings = list(examine(settings, accept_configuration))
        if not as_json:
            _print_findings(findings)
        return [(settings.group, finding) for finding in findings]

    groups = for_each(config, examine_group, heading=not as_json)
    of_process = list(examine_process(load_all(config)))
    if not as_json:
        _print_findings(of_process)
    findings = [each for group in groups for each in group]
    findings += [("", finding) for finding in of_process]
    if as_json:
        named = len(groups) > 1
        print(
            json.dumps(
                [
                    ({"group": group} if named and group else {})
                    | {"level": f.level, "subject": f.subject, "text": f.text}
                    for group, f in findings
                ],
                indent=2,
            )
        )
    if any(finding.level is Severity.ERROR for _, finding in findings):
        raise typer.Exit(2)


def _print_findings(findings: list[Finding]) -> None:
    for finding in findings:
        for line in finding.text.splitlines():
            say(f"{finding.level:8} {finding.subject:22} {line}", error=finding.level == "error")


@with_groups
def uninstall(administrator: AdministratorOptions, yes: YesOption = False) -> None:
    """Drop every group's slot, publication, progress and dead letters, and the schema; the outbox and its rows stay."""
    from relay.admin.uninstall import plan_removal, remove

    settings = load(administrator.config)
    source_dsn, target_dsn = administrator.source_dsn(), administrator.target_dsn()
    removal = plan_removal(settings, source_dsn, target_dsn)
    if not yes:
        for line in removal.lines():
            say(f"will drop {line}")
        approve(yes)
    for line in remove(settings, removal, source_dsn, target_dsn):
        say(f"dropped {line}")
