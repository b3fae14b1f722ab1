"""Reads the YAML file and the `RELAY_*` variables, and validates them.

An error has a line for each fault, which suggests a known key in place of an unknown one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_settings import SettingsError

from relay.config.fields import nearest
from relay.config.handlers import HANDLER_TYPE, AnyHandler, settings_of
from relay.config.intake import INTAKES
from relay.config.settings import ENV_PREFIX, REGISTRY, TYPES, Settings
from relay.faults import ConfigurationError

_UNKNOWN = "unknown key; see docs/reference/settings.md for all keys"
DEFAULT_PATH = Path("relay.yaml")
_OTHERS = frozenset(
    # Variables of relay's commands and of docker-compose.yml.
    f"{ENV_PREFIX}{name}"
    for name in ("ADMIN_DSN", "TARGET_ADMIN_DSN", "CONFIG", "IMAGE", "PASSWORD")
)
_UNRELATED = re.compile(
    # Variables that Kubernetes sets for a service whose name begins with relay, and those of relay's tests.
    ENV_PREFIX + r"((\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_\w+)?)|(TEST|CHAOS)_\w+)"
)


def load(path: Path | None, beside: Sequence[Path] = ()) -> Settings:
    """Read and validate the configuration.

    Without a path, `RELAY_CONFIG` names the file, else `relay.yaml` is read where it exists, else only the environment.
    A variable that a file of `beside` references (`{env: NAME}`) is not reported as unknown. Raises ConfigurationError
    with one line for each fault (the file and key, what is wrong, what to do), also if there is neither a file nor a
    setting in the environment.
    """
    file = path or _default_file()
    if file is None and not _variables(Settings):
        raise ConfigurationError(
            f"there is no configuration: {Path.cwd() / DEFAULT_PATH} does not exist, and neither --config nor "
            f"{ENV_PREFIX}CONFIG names a file: write one (the project's config/relay.yaml has every key), or set "
            f"{ENV_PREFIX}SOURCE__DSN"
        )
    content = {} if file is None else _read(file)
    return _validated(
        content, "environment" if file is None else str(file), list(map(_read, beside))
    )


def of_mapping(content: Mapping[str, Any]) -> Settings:
    """Validate a configuration that is given as the mapping that a file would have. Raises as `load` does."""
    return _validated(dict(content), "configuration", [])


def _validated(
    content: dict[str, Any], origin: str, beside: Sequence[Mapping[str, Any]]
) -> Settings:
    """The settings of a file's content and of the environment; `origin` names the file in errors."""
    contents = [content, *beside]
    if unrecognised := list(_unknown_variables(Settings, contents)):
        raise ConfigurationError("\n".join(unrecognised))
    unknown = [key for key in content if key.startswith("_")]
    if unknown:
        # pydantic-settings would take these for its own arguments.
        raise ConfigurationError(f"{origin}: {unknown[0]}: {_unknown(unknown[:1])}")
    try:
        return Settings(**content)
    except ValidationError as error:
        raise ConfigurationError("\n".join(dict.fromkeys(_lines(error, origin, content)))) from None
    except SettingsError as error:
        key = re.search(r'field "(\w+)"', str(error))
        raise ConfigurationError(
            f"environment: {key[1] if key else ENV_PREFIX}: is not JSON: write a whole section in a variable as JSON"
        ) from None


def _unknown(location: Sequence[int | str]) -> str:
    meant = nearest(str(location[-1]), keys_at(location[:-1]))
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
_NO_TYPE = frozenset({"union_tag_invalid", "union_tag_not_found"})
"""Faults of an intake's type, the only one by which pydantic chooses a model."""


def _lines(error: ValidationError, file: str, content: Mapping[str, Any]) -> Iterator[str]:
    for fault in error.errors(include_url=False, include_input=False, include_context=False):
        location = _location(fault["loc"])
        key = _key(location)
        origin = "environment" if _in_environment(location) else file
        message = str(fault["msg"]).removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            message = _unknown(_typed(location, content))
        elif fault["type"] == "missing":
            message = "is required"
        elif fault["type"] in _NO_MAPPING:
            message = "must be a mapping of keys"
        elif fault["type"] == "list_type":
            message = "must be a list"
        elif fault["type"] in _NO_TYPE:
            key, message = f"{key}.type", f"must be one of {', '.join(INTAKES)}"
        elif fault["type"] == HANDLER_TYPE:
            key = f"{key}.type"
        else:
            is_acronym = message[1:2].isupper()
            message = message if is_acronym else message[:1].lower() + message[1:]
        yield f"{origin}: {key}: {message}" if key else f"{origin}: {message}"


# Members of unions that pydantic adds to the location of a fault; the user did not write them.
_INVISIBLE = frozenset({"function-before", "str", "int", "float", "bool"})


def _location(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The location of a fault in the file, without what pydantic inserts: the form of `events`, an intake's type."""
    if len(location) > 1 and location[0] == "events" and location[1] in (TYPES, REGISTRY):
        return (location[0], *location[2:])
    if len(location) > 2 and location[0] == "intake" and location[2] in INTAKES:
        return (*location[:2], *location[3:])
    return location


def _typed(location: tuple[int | str, ...], content: Mapping[str, Any]) -> tuple[int | str, ...]:
    """The location of a key with the type of the handler or intake that it is in, as `keys_at` has it."""
    if len(location) < 3 or location[0] not in ("handlers", "intake"):
        return location
    section = content.get(str(location[0]))
    given = section.get(location[1]) if isinstance(section, Mapping) else None
    kind = given.get("type") if isinstance(given, Mapping) else None
    return (*location[:2], kind, *location[2:]) if isinstance(kind, str) else location


def _key(location: tuple[int | str, ...]) -> str:
    parts = [str(part) for part in location]
    kept = [
        part
        for depth, part in enumerate(parts)
        if not (depth >= 2 and part in _INVISIBLE) and "[" not in part
    ]
    return ".".join(kept)


def _in_environment(location: tuple[int | str, ...]) -> bool:
    """Whether a variable sets the value at a location, or a section that contains it."""
    given = {name.upper() for name in os.environ}
    parts = [str(part).upper() for part in location]
    return any(ENV_PREFIX + "__".join(parts[:depth]) in given for depth in range(1, len(parts) + 1))


def _variables(model: type[BaseModel]) -> dict[str, str]:
    """The variables that set a key of the model or a key below one, with their values."""
    return {name: text for name, text in os.environ.items() if _top(name) in model.model_fields}


def _unknown_variables(
    model: type[BaseModel], contents: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yield an error line for each variable that begins with `RELAY_` and sets no key.

    Variables that the configuration references (`{env: NAME}`, in a file's content or in a variable) are no errors.
    """
    given = _variables(model)
    for name in sorted(os.environ):
        if _top(name) is None or name in given or name.upper() in _OTHERS:
            continue
        if _UNRELATED.fullmatch(name.upper()) or _is_referenced(name, contents):
            continue
        if any(name in text for text in given.values()):
            continue
        meant = nearest(name, (f"{ENV_PREFIX}{path.upper()}" for path in paths(model, "__")))
        hint = f"did you mean {meant}?" if meant else "see docs/reference/settings.md for all keys"
        yield f"environment: {name}: sets no key; {hint}"


def _top(variable: str) -> str | None:
    """The top-level key that a variable names; None if it does not begin with `RELAY_`."""
    name = variable.upper()
    if not name.startswith(ENV_PREFIX):
        return None
    return name.removeprefix(ENV_PREFIX).partition("__")[0].lower()


def _is_referenced(variable: str, content: Any) -> bool:
    """Whether the content has `{env: variable}`."""
    if isinstance(content, Mapping):
        return content.get("env") == variable or any(
            _is_referenced(variable, each) for each in content.values()
        )
    return isinstance(content, list) and any(_is_referenced(variable, each) for each in content)


def keys_at(location: Sequence[int | str]) -> list[str]:
    """The keys of the mapping at a location in the configuration: ("handlers", name, type, …) for a handler.

    An intake has its type there, too.
    """
    kinds: list[Any] = [Settings]
    for part in location:
        kinds = [below for kind in kinds for below in _below(kind, part)]
    return [
        field.alias or name
        for kind in kinds
        for member in _members(kind)
        if _is_model(member)
        for name, field in member.model_fields.items()
    ]


def paths(model: type[BaseModel], joint: str) -> Iterator[str]:
    """Yield the path of every key, such as `source.dsn`, except below mappings whose keys the user chooses."""
    for name, field in model.model_fields.items():
        yield name
        for member in _members(field.annotation):
            if _is_model(member):
                yield from (f"{name}{joint}{path}" for path in paths(member, joint))


def _below(kind: Any, part: int | str) -> Iterator[Any]:
    for member in _members(kind):
        if member is AnyHandler:
            # Without its type, a handler has the keys of every handler.
            with suppress(ConfigurationError):
                yield settings_of(part)
        elif part in INTAKES and member in INTAKES.values():
            if member is INTAKES[str(part)]:
                yield member
        elif _is_model(member):
            fields: Mapping[str, Any] = member.model_fields
            yield from (f.annotation for name, f in fields.items() if part in (name, f.alias))
        elif get_origin(member) in (dict, list):
            yield get_args(member)[-1]


def _members(kind: Any) -> Iterator[Any]:
    """The types that a value may have, without Annotated and unions."""
    if get_origin(kind) is Annotated:
        yield from _members(get_args(kind)[0])
    elif get_origin(kind) in (Union, UnionType):
        for each in get_args(kind):
            yield from _members(each)
    else:
        yield kind


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
