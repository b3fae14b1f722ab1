"""Reads the YAML file and the `RELAY_*` variables, and validates them; an error has a line for each fault."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import (
    ValidationError,
)
from pydantic_settings import (
    SettingsError,
)

from relay.config import environment
from relay.config.event_types import REGISTRY, TYPES
from relay.config.handlers import KINDS
from relay.config.settings import ENV_PREFIX, Settings
from relay.config.suggestions import keys_at, nearest
from relay.faults import ConfigurationError

_UNKNOWN = "unknown key; see docs/reference/settings.md for all keys"
DEFAULT_PATH = Path("relay.yaml")


def load(path: Path | None, beside: Sequence[Path] = ()) -> Settings:
    """Read and validate the configuration.

    Without a path, `RELAY_CONFIG` names the file, else `relay.yaml` is read where it exists, else only the environment.
    A variable that a file of `beside` references (`{env: NAME}`) is not reported as unknown. Raises ConfigurationError
    with one line for each fault (the file and key, what is wrong, what to do), also if there is neither a file nor a
    setting in the environment.
    """
    file = path or _default_file()
    if file is None and not environment.settings(Settings):
        raise ConfigurationError(
            f"there is no configuration: {Path.cwd() / DEFAULT_PATH} does not exist, and neither --config nor "
            f"{ENV_PREFIX}CONFIG names a file: write one (the project's config/relay.yaml has every key), or set "
            f"{ENV_PREFIX}SOURCE__DSN"
        )
    content = {} if file is None else _read(file)
    contents = [content, *map(_read, beside)]
    if unrecognised := list(environment.unknown_variables(Settings, contents)):
        raise ConfigurationError("\n".join(unrecognised))
    unknown = [key for key in content if key.startswith("_")]
    if unknown:
        # pydantic-settings would take these for its own arguments.
        raise ConfigurationError(f"{file}: {unknown[0]}: {_unknown(unknown[:1])}")
    try:
        return Settings(**content)
    except ValidationError as error:
        raise ConfigurationError("\n".join(dict.fromkeys(_lines(error, file)))) from None
    except SettingsError as error:
        key = re.search(r'field "(\w+)"', str(error))
        raise ConfigurationError(
            f"environment: {key[1] if key else ENV_PREFIX}: is not JSON: write a whole section in a variable as JSON"
        ) from None


def _unknown(location: Sequence[int | str]) -> str:
    meant = nearest(str(location[-1]), keys_at(Settings, location[:-1]))
    return f"unknown key; did you mean {meant}?" if meant else _UNKNOWN


def _default_file() -> Path | None:
    named = os.environ.get("RELAY_CONFIG")
    if named:
        return Path(named)
    return DEFAULT_PATH if DEFAULT_PATH.exists() else None


class _Loader(yaml.SafeLoader):
    """A YAML loader that rejects a duplicate key of a mapping; PyYAML's silently takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    problem = f"the key {key.value!r} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), _Loader)  # noqa: S506 a safe loader's child
    except OSError as error:
        raise ConfigurationError(
            f"{file}: cannot be read ({error.strerror}); give the configuration with --config FILE"
        ) from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{file}: is not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        origin = f"{file}:{mark.line + 1}" if mark else str(file)
        problem = getattr(error, "problem", None) or "cannot be parsed"
        raise ConfigurationError(f"{origin}: is not valid YAML: {problem}") from None
    except ValueError as error:
        raise ConfigurationError(f"{file}: is not valid YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigurationError(
            f"{file}: must be a mapping of keys such as source, handlers and routes"
        )
    return content


_NO_MAPPING = frozenset({"dict_type", "model_type", "model_attributes_type"})


def _lines(error: ValidationError, file: Path | None) -> Iterator[str]:
    for fault in error.errors(include_url=False, include_input=False, include_context=False):
        location = _location(fault["loc"])
        key = _key(location)
        origin = "environment" if file is None or _in_environment(location) else str(file)
        message = str(fault["msg"]).removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            message = _unknown(location)
        elif fault["type"] == "missing":
            message = "is required"
        elif fault["type"] in _NO_MAPPING:
            message = "must be a mapping of keys"
        elif fault["type"].startswith("union_tag"):
            key, message = f"{key}.type", f"must be one of {', '.join(KINDS)}"
        else:
            message = message[:1].lower() + message[1:]
        yield f"{origin}: {key}: {message}" if key else f"{origin}: {message}"


# Members of unions that pydantic adds to the location of a fault; the user did not write them.
_INVISIBLE = frozenset({"function-before", "str", "int", "float", "bool"})
_KIND_DEPTH = 2
"""The index at which pydantic names the kind of a handler: (handlers, its name, its kind, …)."""


def _location(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The location of a fault in the file, without the form of `events` that pydantic inserts."""
    if len(location) > 1 and location[0] == "events" and location[1] in (TYPES, REGISTRY):
        return (location[0], *location[2:])
    return location


def _key(location: tuple[int | str, ...]) -> str:
    parts = [str(part) for part in location]
    kept = [
        part
        for depth, part in enumerate(parts)
        if not (depth == _KIND_DEPTH and part in KINDS)
        and not (depth >= 2 and part in _INVISIBLE)
        and "[" not in part
    ]
    return ".".join(kept)


def _in_environment(location: tuple[int | str, ...]) -> bool:
    """Whether a variable sets the value at a location, or a section that contains it."""
    given = {name.upper() for name in os.environ}
    parts = [str(part).upper() for part in location]
    return any(ENV_PREFIX + "__".join(parts[:depth]) in given for depth in range(1, len(parts) + 1))
