"""What the commands' help needs, and what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from relay.admin.status import Status
from relay.cli.app import app
from relay.cli.options import with_options
from relay.cli.status import _group_facts
from relay.config import imports
from relay.faults import ConfigurationError
from tests.process import ROOT


def test_the_command_line_is_light() -> None:
    """A command imports no other's module; `relay --help` no arrays, no pools, no Arrow, no Spark."""
    program = """
import sys
from typer.testing import CliRunner
from relay.cli.app import app
for words in (["status", "--help"], ["--help"]):
    assert CliRunner().invoke(app, words).exit_code == 0
    print(*sorted(sys.modules))
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    of_status, of_all = map(str.split, found.stdout.splitlines())
    own = {each.removeprefix("relay.cli.") for each in of_status if each.startswith("relay.cli.")}
    assert own == {"app", "options", "status", "terminal"}
    assert "relay.cli.verify" in of_all
    heavy = {"numpy", "pandas", "psycopg_pool", "pyarrow", "pyspark", "aiohttp", "fastapi"}
    assert not heavy & set(of_all)


def test_a_database_that_is_down_is_said_in_lines_of_relay_only() -> None:
    """psycopg's pool logs each attempt, with the host."""
    program = """
from relay.cli import app
from relay.store.connections import asking
def ask():
    with asking("postgresql://postgres@127.0.0.1:1/x"):
        pass
app.app = ask
app.main()
"""
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert said.returncode == 1
    assert said.stderr.startswith("relay: the database refuses: connection failed")
    assert "sessions" not in said.stderr


def test_help_lists_the_commands_in_the_order_of_their_use() -> None:
    group = getattr(typer.main, "get_command")(app)  # noqa: B009
    listed = group.list_commands(None)
    assert listed[:7] == ["init", "check", "run", "status", "top", "publish", "event"]
    assert listed[-1] == "uninstall"


def test_a_time_that_is_none_is_refused_with_an_example() -> None:
    refused = CliRunner().invoke(app, ["dlq", "list", "--since", "yesterday"])
    assert refused.exit_code == 2
    assert "'yesterday' is not a time such as 2026-03-01T12:00" in refused.output


def test_the_own_package_has_one_name() -> None:
    """The types that relay.sinks brings were of `relay-outbox`, the others of `relay`."""
    shown = CliRunner().invoke(app, ["keys", "--json"]).output
    assert {each["package"] for each in json.loads(shown)} == {"relay-outbox"}


def test_a_command_to_run_again_has_the_options_that_were_given() -> None:
    """It said ``relay init --config '()'`` where no configuration was named."""
    commands: Any = typer.main.get_command(app)
    init = commands.commands["init"]

    def again(*words: str) -> str:
        context = init.make_context("init", list(words))
        return str(with_options(ConfigurationError("run `relay init`"), context))

    assert again() == "run `relay init`"
    assert again("-c", "a.yaml", "-c", "b c.yaml") == (
        "run `relay init --config a.yaml --config 'b c.yaml'`"
    )


def test_what_a_module_prints_when_it_is_imported_is_not_in_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`relay check --json | jq` failed at the first line of a user's package."""
    (tmp_path / "prints_at_import.py").write_text("print('hello')\n\ndef f(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    imports.find("handlers.f", "prints_at_import:f")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "hello\n")


def test_the_mode_of_a_source_that_is_away_is_not_known() -> None:
    """`source poll`, of a server that was dead: that is how it was read last."""
    state = Status(
        "default",
        "poll",
        faults={"source.dsn": "cannot connect"},
        read_at={"target.dsn": datetime.now(UTC)},
    )
    assert ("source", "unknown, poll before") in _group_facts(state)
