"""What `relay init` and `relay uninstall` do, and how other schemas and other installations are recognised."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relay.cli import app
from relay.config import load
from relay.faults import ConfigurationError
from relay.install import initialise
from relay.preflight import require
from relay.store import migrations
from tests.outbox import Outbox

COMMANDS = (
    ["status"],
    ["dlq", "list"],
    ["dlq", "export"],
    ["dlq", "replay", "--all"],
    ["offsets", "show"],
    ["offsets", "seek", "--to", "end"],
    ["offsets", "repartition", "--partitions", "4"],
)


def refusal(config: Path, *command: str) -> str:
    """What a command that is refused for its configuration or surroundings says."""
    result = CliRunner().invoke(app, [*command, "--config", str(config)])
    assert isinstance(result.exception, ConfigurationError), result.output
    return str(result.exception)


def checked(config: Path) -> str:
    """The errors that `relay check` prints, and that `relay run` refuses to start with."""
    result = CliRunner().invoke(app, ["check", "--config", str(config)])
    assert result.exit_code == 2, result.output
    with pytest.raises(ConfigurationError) as refused:
        require(load(config))
    assert all(line in result.stderr for line in str(refused.value).splitlines())
    return result.stderr


@pytest.fixture
def config(outbox: Outbox, tmp_path: Path) -> Path:
    return outbox.config_file(tmp_path / "relay.yaml")


def edition_with_one_more_file(directory: Path) -> Path:
    """The folder `sql` of a later program, which has one more file for the target."""
    shutil.copytree(migrations.sql_directory(), directory)
    (directory / "target" / "002_more.sql").write_text(
        "alter table relay.groups add column more text;"
        "insert into relay.migrations (name) values ('target/002_more.sql');"
    )
    return directory


def test_a_database_without_relay_is_recognised_by_every_command(
    database: str, tmp_path: Path
) -> None:
    with Outbox(database) as outbox:
        config = outbox.config_file(tmp_path / "relay.yaml")
        words = f"source.dsn: relay is not installed in the database '{outbox.slot}'"
        for command in (*COMMANDS, ["publish", "--generate", "1"]):
            said = refusal(config, *command)
            assert "relay is not installed in the database" in said, command
            assert "run `relay init`" in said, command
        assert words in checked(config)


def test_an_older_schema_is_recognised_by_every_command_and_migrated(
    config: Path, outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = edition_with_one_more_file(tmp_path / "sql")
    monkeypatch.setattr(migrations, "sql_directory", lambda: directory)
    for command in COMMANDS:
        said = refusal(config, *command)
        assert "is older than this program" in said, command
        assert "(target/002_more.sql is missing): stop relay and run `relay init`" in said
    assert "is older than this program" in checked(config)
    assert initialise(outbox.settings()) == ["schema file target/002_more.sql"]
    assert CliRunner().invoke(app, ["check", "--config", str(config)]).exit_code == 0


def test_a_newer_schema_is_recognised_by_every_command(config: Path, outbox: Outbox) -> None:
    outbox.conn.execute(
        "insert into relay.migrations (name) values ('source/002_future.sql'), ('target/002_future.sql')"
    )
    for command in (*COMMANDS, ["publish", "--generate", "1"], ["init"]):
        said = refusal(config, *command)
        assert "is newer than this program" in said, command
        assert "002_future.sql): install the relay that it belongs to" in said
    assert "is newer than this program" in checked(config)


@pytest.mark.parametrize(
    "change",
    [
        "update relay.migrations set digest = 'another' where name = 'target/001_target.sql'",
        "update relay.migrations set name = 'target/008_lock_partitions.sql' where name ~ 'target';"
        "alter table relay.migrations drop column digest",
    ],
    ids=["another edition of a file", "files of before the squash"],
)
def test_an_unreleased_schema_is_not_migrated(config: Path, outbox: Outbox, change: str) -> None:
    outbox.conn.execute(change.encode())
    for command in (["status"], ["dlq", "list"], ["init"]):
        said = refusal(config, *command)
        assert "unreleased edition" in said, command
        assert "run `relay uninstall` and `relay init`" in said
    assert "unreleased edition" in checked(config)


def test_a_role_that_may_not_see_the_schema_is_told_so(outbox: Outbox, tmp_path: Path) -> None:
    outbox.conn.execute(f"create role {outbox.slot}_weak login password 'x'".encode())
    dsn = f"{outbox.dsn}?user={outbox.slot}_weak&password=x"
    config = outbox.config_file(
        tmp_path / "relay.yaml", source={**outbox.config()["source"], "dsn": dsn}
    )
    try:
        for command in (["status"], ["dlq", "list"]):
            assert f"run `grant relay to {outbox.slot}_weak`" in refusal(config, *command)
        assert f"run `grant relay to {outbox.slot}_weak`" in checked(config)
    finally:
        outbox.conn.execute(
            f"drop owned by {outbox.slot}_weak; drop role {outbox.slot}_weak".encode()
        )


def test_publish_on_an_outbox_that_was_there_before_says_what_to_do(
    outbox: Outbox, tmp_path: Path
) -> None:
    outbox.conn.execute("create schema shop; create table shop.events ()")
    source = {**outbox.config()["source"], "table": "shop.events"}
    config = outbox.config_file(tmp_path / "relay.yaml", source=source)
    said = refusal(config, "publish", "--generate", "1")
    assert said.startswith("source.table: `relay publish` and relay.publish write to")
    assert "insert into shop.events with your own statements" in said
