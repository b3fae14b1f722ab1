"""The environment's variables: which of them are settings, and which only look like some."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from relay.config.suggestions import nearest, paths

PREFIX = "RELAY_"
_OTHERS = frozenset(
    # Those of the commands, and of docker-compose.yml, which may be exported where relay runs.
    f"{PREFIX}{name}"
    for name in ("ADMIN_DSN", "TARGET_ADMIN_DSN", "CONFIG", "IMAGE", "PASSWORD")
)
_NOT_MEANT = re.compile(
    # What Kubernetes tells containers about a service whose name begins with relay; and the tests' own.
    PREFIX + r"((\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_\w+)?)|(TEST|CHAOS)_\w+)"
)


def settings(model: type[BaseModel]) -> dict[str, str]:
    """The variables that set a key of the model, or something below one, with their texts."""
    return {name: text for name, text in os.environ.items() if _top(name) in model.model_fields}


def unknown_variables(model: type[BaseModel], contents: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each variable that looks like a setting and is none.

    Those that the configuration takes values from (`{env: NAME}`, in a file's content or in a variable) are no
    settings by intent.
    """
    given = settings(model)
    for name in sorted(os.environ):
        if _top(name) is None or name in given or name.upper() in _OTHERS:
            continue
        if _NOT_MEANT.fullmatch(name.upper()) or _is_taken(name, contents):
            continue
        if any(name in text for text in given.values()):
            continue
        meant = nearest(name, (f"{PREFIX}{path.upper()}" for path in paths(model, "__")))
        hint = (
            f"did you mean {meant}?"
            if meant
            else "see docs/reference/settings.md for the keys there are"
        )
        yield f"environment: {name}: sets no key; {hint}"


def _top(variable: str) -> str | None:
    """The key at the top of the configuration that a variable names; None if it does not begin as relay's do."""
    name = variable.upper()
    if not name.startswith(PREFIX):
        return None
    return name.removeprefix(PREFIX).partition("__")[0].lower()


def _is_taken(variable: str, content: Any) -> bool:
    """Whether `{env: variable}` stands in the content."""
    if isinstance(content, dict):
        return content.get("env") == variable or any(
            _is_taken(variable, each) for each in content.values()
        )
    return isinstance(content, list) and any(_is_taken(variable, each) for each in content)
