"""What the commands' help needs, and what it says."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from relay.cli.app import _leave_out_others, app
from relay.cli.deferred import deferred
from relay.store.deferred.selection import KINDS
from tests.process import ROOT


def test_the_command_line_is_light() -> None:
    """`relay --help` imports what only a command needs inside the command: no arrays, no pools, no Arrow, no Spark."""
    program = "import sys, relay.cli.app; print(*sorted(sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    heavy = {"numpy", "pandas", "psycopg_pool", "pyarrow", "pyspark", "aiohttp", "fastapi"}
    assert not heavy & set(found.stdout.split())


def test_help_lists_the_commands_in_the_order_of_their_use() -> None:
    group = getattr(typer.main, "get_command")(app)  # noqa: B009
    listed = group.list_commands(None)
    assert listed[:7] == ["init", "check", "run", "status", "top", "publish", "event"]
    assert listed[-1] == "uninstall"


@pytest.mark.parametrize("first", ["dlq", "status", "publish"])
def test_only_the_command_that_is_called_is_built(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("registered_groups", "registered_commands"):
        monkeypatch.setattr(app, kind, list(getattr(app, kind)))
    for none in ([], ["--help"], ["nothing"]):
        _leave_out_others(none)
        assert len(getattr(typer.main, "get_command")(app).list_commands(None)) > 20  # noqa: B009
    _leave_out_others([first])
    assert getattr(typer.main, "get_command")(app).list_commands(None) == [first]  # noqa: B009


def test_help_names_every_kind_of_deferral() -> None:
    """They are written out: the module that has them imports numpy."""
    commands = getattr(typer.main.get_command(deferred), "commands")  # noqa: B009
    for command in commands.values():
        (kind,) = (each for each in command.params if each.name == "kind")
        assert kind.help == f"One of {', '.join(KINDS)}."


def test_a_time_that_is_none_is_refused_with_an_example() -> None:
    refused = CliRunner().invoke(app, ["dlq", "list", "--since", "yesterday"])
    assert refused.exit_code == 2
    assert "'yesterday' is not a time such as 2026-03-01T12:00" in refused.output
