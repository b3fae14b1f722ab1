"""Types of sinks that packages bring, found by entry points of the group `relay.sinks`.

An entry point has the name of the type, and names a module with a class `Settings`, a child of
`relay.sinks.SinkSettings`, and a function `sink(name, settings)` that returns a `relay.sinks.Sink`. A module is
imported only where a handler has the type. The names of relay's own types are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from inspect import iscoroutinefunction, isroutine
from types import ModuleType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from relay.config.imports import importing
from relay.config.types import Mark, Section
from relay.faults import ConfigurationError, first_line

GROUP = "relay.sinks"


def names() -> list[str]:
    """The types that installed packages bring, in alphabetical order."""
    return sorted(entry_points(group=GROUP).names)


def packages() -> dict[str, str]:
    """The package that brings each of the types `names`."""
    return {each.name: _package(each) for each in entry_points(group=GROUP)}


@cache
def module_of(kind: str) -> ModuleType:
    """The module of one of the types `names`.

    Raises ConfigurationError, whose text says which package, where two bring it or it cannot be used.
    """
    found = list(entry_points(group=GROUP, name=kind))
    if len(found) > 1:
        packages = " and ".join(sorted(map(_package, found)))
        raise ConfigurationError(f"{packages} both bring the type {kind}: remove one of them")
    (entry,) = found
    try:
        with importing():
            module = entry.load()
    except ModuleNotFoundError as error:
        raise ConfigurationError(missing(kind, error)) from None
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"{_package(entry)}: {entry.value} cannot be imported: {type(error).__name__}: {first_line(error)}"
        ) from None
    if not isinstance(module, ModuleType) or not callable(getattr(module, "sink", None)):
        raise ConfigurationError(
            f"{_package(entry)}: {entry.value} is no module with a class Settings and a function sink(name, settings)"
        )
    return module


def require_keys(settings: type[BaseModel], known: type[BaseModel]) -> None:
    """Raise ConfigurationError for a key of settings that relay would misread.

    `known` is the parent of all settings of sinks. A key of relay's may have another default and be narrower.
    """
    theirs = next(each for each in settings.__mro__ if each.__module__.startswith("relay."))
    inherited: Mapping[str, FieldInfo] = getattr(theirs, "model_fields", {})
    where = f"{settings.__module__}.{settings.__name__}"
    names = {name for each in known.__mro__ if issubclass(each, Section) for name in vars(each)}
    for name, key in settings.model_fields.items():
        if not any(isinstance(each, Mark) for each in key.metadata):
            raise ConfigurationError(
                f"{where}.{name}: annotate it with relay.sinks.Alike or relay.sinks.Own"
            )
        if name in inherited:
            if not _is_narrower(key.annotation, inherited[name].annotation):
                raise ConfigurationError(
                    f"{where}.{name}: every sink has a key of this name, of another type: choose another name"
                )
        elif name in names:
            raise ConfigurationError(
                f"{where}.{name}: relay's own class has this name: choose another one"
            )


def _is_narrower(annotation: Any, other: Any) -> bool:
    """Whether each value of a type is one of another type."""
    of_other = _alternatives(other)
    return all(
        each in of_other
        or any(_is_one_of(each, kind) for kind in of_other if isinstance(kind, type))
        for each in _alternatives(annotation)
    )


def _is_one_of(each: Any, kind: type) -> bool:
    if isinstance(each, type):
        return issubclass(each, kind) or (each is int and kind is float)
    return isinstance(each, kind)


def _alternatives(annotation: Any) -> list[Any]:
    """The types of a union, and the values of a literal."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _alternatives(arguments[0])
    if origin in (Union, UnionType):
        return [each for argument in arguments for each in _alternatives(argument)]
    return list(arguments) if origin is Literal else [annotation]


def build(name: str, kind: str, settings: BaseModel) -> Any:
    """The sink of a handler, as the package of the type builds it.

    Raises ConfigurationError where that fails, or what it builds is no sink, and ModuleNotFoundError.
    """
    module = module_of(kind)
    key = f"handlers.{name}: {module.__name__}.sink"
    try:
        sink = module.sink(name, settings)
    except (ConfigurationError, ModuleNotFoundError):
        raise
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"{key} has failed: {type(error).__name__}: {first_line(error)}"
        ) from None
    for method, is_async in (("resume", False), ("deliver", True), ("close", True)):
        found = getattr(sink, method, None)
        if not callable(found):
            raise ConfigurationError(f"{key} returned a {type(sink).__name__} without {method}()")
        if is_async and isroutine(found) and not iscoroutinefunction(found):
            raise ConfigurationError(
                f"{key} returned a {type(sink).__name__}: make {method}() an async def"
            )
    if getattr(sink, "name", None) != name:
        raise ConfigurationError(
            f"{key} returned a sink with another name: it is the handler's, the first argument"
        )
    return sink


def missing(kind: str, error: ModuleNotFoundError) -> str:
    """What to say where the imports of a type fail: the extra of its name, if its package has one."""
    for entry in entry_points(group=GROUP, name=kind):
        package, extras = _package(entry), entry.dist and entry.dist.metadata.get_all(_EXTRA)
        if kind not in (extras or ()):
            return f"{kind} needs {error.name}, which {package} does not bring: install it"
        return f"{kind} needs {error.name}: install {package}[{kind}]"
    return f"{kind} needs {error.name}: install relay-outbox[{kind}]"


_EXTRA = "Provides-Extra"


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.value
