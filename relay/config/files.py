"""The configurations of one command: finds their files, and checks that one process can run them together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal, TypeVar

from relay.config import loading
from relay.config.dsn import DatabaseAccess
from relay.config.settings import ENV_PREFIX, ObserveSettings, Settings, SparkSettings
from relay.faults import ConfigurationError, RelayError

T = TypeVar("T")
Side = Literal["source", "target"]

_VARIABLE = f"{ENV_PREFIX}CONFIG"
_LOCAL = frozenset({"", "127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, slots=True)
class Configuration:
    """One group's settings and their file; None where they are all in the environment."""

    file: Path | None
    settings: Settings

    @property
    def name(self) -> str:
        """The file's name in messages."""
        return "environment" if self.file is None else str(self.file)


def load(paths: Sequence[Path] | None) -> Settings:
    """The configuration of a command that takes a single one. Raises ConfigurationError."""
    files = _files(paths)
    if len(files) > 1:
        raise ConfigurationError(
            f"--config: this command takes one configuration, and {len(files)} are given "
            f"({', '.join(map(str, files))}): name one with --config FILE"
        )
    return loading.load(files[0] if files else None)


def load_all(paths: Sequence[Path] | None) -> list[Configuration]:
    """The configurations of a command, in the given order.

    Without `paths`, `RELAY_CONFIG` names the files, else `relay.yaml` is read where it exists. A folder stands for its
    *.yaml files, in order of their names. Raises ConfigurationError.
    """
    files = _files(paths)
    if len(files) < 2:
        file = files[0] if files else None
        return [Configuration(file, loading.load(file))]
    return [Configuration(file, loading.load(file, beside=files)) for file in files]


def require_apart(configurations: Sequence[Configuration]) -> None:
    """Raise ConfigurationError, with a line for each conflict of two files, if one process cannot run all of them."""
    lines = [
        f"{one.name} and {other.name}: {fault}"
        for one, other in combinations(configurations, 2)
        for fault in _conflicts(one.settings, other.settings)
    ]
    if lines:
        raise ConfigurationError("\n".join(lines))


def observed(configurations: Sequence[Configuration]) -> ObserveSettings:
    """The process's section `observe`: each key from the first file that sets it."""
    sections = [each.settings.observe for each in configurations]
    return ObserveSettings(
        listen=next((each.listen for each in sections if each.listen), None),
        traces=any(each.traces for each in sections),
        console=next((each.console for each in sections if each.console), None),
    )


def require_one(configurations: Sequence[Configuration], side: Side, option: str) -> None:
    """Raise ConfigurationError if there are several sources or targets: an option names only one."""
    databases = {
        _database(each.settings.source_dsn if side == "source" else each.settings.target_dsn)
        for each in configurations
    }
    if len(databases) > 1:
        raise ConfigurationError(
            f"{option}: the configurations have several {side}s: run the command for each of them, with one --config"
        )


def for_each(
    paths: Sequence[Path] | None, run: Callable[[Settings], T], heading: bool = True
) -> list[T]:
    """Run a command for each of its configurations, and return the results.

    With several, it prints a heading for each, and each line of an error names its group and file. It stops at the
    first error and raises it.
    """
    configurations = load_all(paths)
    if len(configurations) == 1:
        return [run(configurations[0].settings)]
    require_apart(configurations)
    return [_run_named(each, run, heading) for each in configurations]


def _run_named(configuration: Configuration, run: Callable[[Settings], T], heading: bool) -> T:
    if heading:
        print(f"group {configuration.settings.group} ({configuration.name})")
    try:
        return run(configuration.settings)
    except RelayError as error:
        prefix = f"group {configuration.settings.group} ({configuration.name})"
        lines = (f"{prefix}: {line}" for line in str(error).splitlines())
        raise type(error)("\n".join(lines)) from None


def _files(paths: Sequence[Path] | None) -> list[Path]:
    """The configuration files, each once. Raises ConfigurationError for a folder without any."""
    named = os.environ.get(_VARIABLE)
    if not paths:
        paths = [Path(text) for text in (named or "").split(os.pathsep) if text]
    files = [file for path in paths for file in (_in_folder(path) if path.is_dir() else [path])]
    return list(dict.fromkeys(files))


def _in_folder(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise ConfigurationError(f"{folder}: has no file *.yaml; give --config FILE")
    return files


def _conflicts(one: Settings, other: Settings) -> Iterator[str]:
    if one.group == other.group and _database(one.target_dsn) == _database(other.target_dsn):
        yield f"group: both have {one.group!r} in the same target: name another group in one of them"
    elif one.group == other.group and (one.observe.observes or other.observe.observes):
        yield (
            f"group: both have {one.group!r}, and metrics, health and the console tell groups apart by name: name "
            "another group in one of them"
        )
    streams = "poll" not in (one.source.mode, other.source.mode)
    # A slot's name is unique in the whole server.
    same_server = _database(one.source_dsn)[:2] == _database(other.source_dsn)[:2]
    if streams and same_server and one.source.slot == other.source.slot:
        yield f"source.slot: both have {one.source.slot!r} on the same server: name another slot in one of them"
    if one.needs_spark and other.needs_spark:
        for key in _different_spark(one.spark, other.spark):
            yield f"{key}: differs, and a process has one Spark session: set the same value in both"
    for key in ("listen", "console"):
        values = getattr(one.observe, key), getattr(other.observe, key)
        if None not in values and values[0] != values[1]:
            yield f"observe.{key}: differs, and a process has one: remove it from one of them"
    if one.api and other.api and one.api.listen.port and one.api.listen == other.api.listen:
        yield f"api.listen: both have {one.api.listen}: name another address in one of them"


def _different_spark(one: SparkSettings, other: SparkSettings) -> Iterator[str]:
    for key in ("master", "remote"):
        if getattr(one, key) != getattr(other, key):
            yield f"spark.{key}"
    left, right = one.plain_conf, other.plain_conf
    for key in sorted(left.keys() | right.keys()):
        if left.get(key) != right.get(key):
            yield f"spark.conf.{key}"


def _database(dsn: DatabaseAccess) -> tuple[str, str, str]:
    """The host, port and database of a connection string; two names of one server may differ."""
    given = dsn.parameters()

    def of(key: str, variable: str, default: str) -> str:
        return str(given.get(key) or os.environ.get(variable) or default)

    host = of("host", "PGHOST", "")
    user = of("user", "PGUSER", "")
    return (
        "local" if host in _LOCAL else host,
        of("port", "PGPORT", "5432"),
        of("dbname", "PGDATABASE", user),
    )
