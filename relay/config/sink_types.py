"""Types of sinks that packages bring, found by entry points of the group `relay.sinks`.

An entry point has the name of the type, and names a module with a class `Settings`, a child of
`relay.sinks.SinkSettings`, and a function `sink(name, settings)` that returns a `relay.sinks.Sink`. A module is
imported only where a handler has the type. The names of relay's own types are taken.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

from relay.faults import ConfigurationError, first_line

GROUP = "relay.sinks"


def names() -> list[str]:
    """The types that installed packages bring, in alphabetical order."""
    return sorted(entry_points(group=GROUP).names)


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
        module = entry.load()
    except ModuleNotFoundError as error:
        raise ConfigurationError(missing(kind, error)) from None
    except Exception as error:
        raise ConfigurationError(
            f"{_package(entry)}: {entry.value} cannot be imported: {type(error).__name__}: {first_line(error)}"
        ) from None
    if not isinstance(module, ModuleType) or not callable(getattr(module, "sink", None)):
        raise ConfigurationError(
            f"{_package(entry)}: {entry.value} is no module with a class Settings and a function sink(name, settings)"
        )
    return module


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
