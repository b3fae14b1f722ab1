"""Imports the functions and classes that the configuration names as `module:name`.

A user's function runs in threads of relay, and must not end them: whatever it raises becomes an Exception. A result
that has not run yet, such as a coroutine, is refused.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import wraps
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from relay.faults import ConfigurationError
from relay.logs import enable
from relay.renewal import renew_sessions


def require_path(value: Any) -> str:
    """The value, if it has the form `module:name`. Raises ValueError."""
    if not isinstance(value, str) or not re.fullmatch(r"[\w.]+:[\w.]+", value):
        raise ValueError("must be module:function, such as shop.audit:on_transaction")
    return value


ASYNC = "async"
"""The kind of function whose call is to be awaited, as `unfinished_kind` describes it."""
WORK = (CoroutineType, GeneratorType, AsyncGeneratorType)
"""What a function returns that has not run yet: nothing is done before somebody awaits or iterates it."""


def load(key: str, path: str, *parameters: str) -> Callable[..., Any]:
    """Import the callable that a key of the configuration names, and that relay calls with these `parameters`.

    Raises ConfigurationError, also for a callable that does not take that many arguments.
    A call raises RuntimeError for what the function raises that is no Exception, such as SystemExit or asyncio's
    CancelledError, and ConfigurationError if it returns a coroutine or a generator.
    """
    return contained(key, find_function(key, path, *parameters))


def find_function(
    key: str, path: str, *parameters: str, may_await: bool = False
) -> Callable[..., Any]:
    """Import a function as it is, for a caller that contains what it raises. Raises ConfigurationError.

    Where the caller `may_await`, it may be an `async def`.
    """
    function = find(key, path)
    if not callable(function):
        raise ConfigurationError(f"{key}: {path!r} is not callable")
    kind = unfinished_kind(function)
    if kind is not None and not (may_await and kind == ASYNC):
        raise ConfigurationError(f"{key}: {path!r} is {kind}; relay calls plain functions")
    wrong = wrong_arguments(function, parameters)
    if wrong is not None:
        raise ConfigurationError(f"{key}: {path!r} {wrong}")
    return function  # type: ignore[no-any-return]


def wrong_arguments(function: Callable[..., Any], parameters: Sequence[str]) -> str | None:
    """Describe why a function cannot be called with arguments for these parameters; None if it can."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        # Some functions that are written in C have none.
        return None
    try:
        signature.bind(*parameters)
    except TypeError as error:
        # Without annotations, which may be long.
        taken = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
        bare = signature.replace(parameters=taken, return_annotation=signature.empty)
        return f"takes {bare}, but relay calls it with ({', '.join(parameters)}): {error}"
    return None


def unfinished_kind(function: Callable[..., Any]) -> str | None:
    """Describe a function whose call does nothing before somebody awaits or iterates its result; None for others."""
    for each in (function, getattr(type(function), "__call__", None)):  # noqa: B004
        if inspect.iscoroutinefunction(each):
            return ASYNC
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            return "a generator (it has `yield`)"
    return None


def contained(key: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function; a call raises RuntimeError and ConfigurationError as that of a function of `load`."""

    @wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            renew_sessions()
            returned = function(*arguments)
        except Exception:
            raise
        except BaseException as error:
            raise as_exception(error) from error
        if isinstance(returned, WORK):
            if isinstance(returned, CoroutineType):
                # Otherwise Python warns that it was never awaited.
                returned.close()
            raise ConfigurationError(
                f"{key}: the function returned a {type(returned).__name__}, which nobody runs, so that nothing was "
                "done: return when all is done"
            )
        return returned

    return call


def as_exception(error: BaseException) -> Exception:
    """The Exception for an error of a user's function that would end the thread of relay that has called it."""
    text = f"the function raised {type(error).__name__}"
    if isinstance(error, SystemExit):
        text = f"the function called sys.exit({error.code!r})"
    return RuntimeError(text).with_traceback(error.__traceback__)


@contextmanager
def importing() -> Iterator[None]:
    """Send what a user's module prints while it is imported to standard error: a command's output is its own."""
    with redirect_stdout(sys.stderr):
        yield


def find(key: str, path: str) -> Any:
    """Import the object that a key of the configuration names as `module:name`. Raises ConfigurationError."""
    module_name, _, attribute = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        # As with `python -m`: a module in the current folder needs no installation.
        sys.path.append(here)
    try:
        with importing():
            named: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigurationError(
            f"{key}: importing {module_name!r} failed: {type(error).__name__}: {error}"
            + (_search_path_text() if isinstance(error, ModuleNotFoundError) else "")
        ) from None
    finally:
        enable()
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
