"""Imports the functions and classes that the configuration names as `module:name`."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relay.faults import ConfigurationError


def require_path(value: Any) -> str:
    """The value, if it has the form `module:name`. Raises ValueError."""
    if not isinstance(value, str) or not re.fullmatch(r"[\w.]+:[\w.]+", value):
        raise ValueError("must be module:function, such as shop.audit:on_transaction")
    return value


def load(key: str, path: str) -> Callable[..., Any]:
    """Import the callable that a key of the configuration names. Raises ConfigurationError."""
    function = find(key, path)
    if not callable(function):
        raise ConfigurationError(f"{key}: {path!r} is not callable")
    if inspect.iscoroutinefunction(function):
        raise ConfigurationError(f"{key}: {path!r} is async; relay calls plain functions")
    return function  # type: ignore[no-any-return]


def find(key: str, path: str) -> Any:
    """Import the object that a key of the configuration names as `module:name`. Raises ConfigurationError."""
    module_name, _, attribute = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        # As with `python -m`: a module in the current folder needs no installation.
        sys.path.append(here)
    try:
        named: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigurationError(
            f"{key}: importing {module_name!r} failed: {type(error).__name__}: {error}"
            + (_search_path_text() if isinstance(error, ModuleNotFoundError) else "")
        ) from None
    for part in attribute.split("."):
        if not hasattr(named, part):
            raise ConfigurationError(f"{key}: {module_name!r} has no {attribute!r}")
        named = getattr(named, part)
    return named


def _search_path_text() -> str:
    """The end of an error about a missing module: the folders of sys.path but the standard library's, and a hint."""
    library = sysconfig.get_path("stdlib")
    folders = [
        folder or str(Path.cwd())
        for folder in sys.path
        if folder != library and not folder.endswith((".zip", "lib-dynload"))
    ]
    listed = ", ".join(dict.fromkeys(folders))
    return f": not found in {listed}: start relay in the module's folder, add that to PYTHONPATH, or install the module"
