"""The environment's variables that are settings, and those that only look like settings."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from relay.config.suggestions import nearest, paths

PREFIX = "RELAY_"
_OTHERS = frozenset(
    # Variables of relay's commands and of docker-compose.yml.
    f"{PREFIX}{name}"
    for name in ("ADMIN_DSN", "TARGET_ADMIN_DSN", "CONFIG", "IMAGE", "PASSWORD")
)
_UNRELATED = re.compile(
    # Variables that Kubernetes sets for a service whose name begins with relay, and those of relay's tests.
    PREFIX + r"((\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_\w+)?)|(TEST|CHAOS)_\w+)"
)


def settings(model: type[BaseModel]) -> dict[str, str]:
    """The variables that set a key of the model or a key below one, with their values."""
    return {name: text for name, text in os.environ.items() if _top(name) in model.model_fields}


def unknown_variables(model: type[BaseModel], contents: list[dict[str, Any]]) -> Iterator[str]:
    """Yield an error line for each variable that begins with `RELAY_` and sets no key.

    Variables that the configuration references (`{env: NAME}`, in a file's content or in a variable) are no errors.
    """
    given = settings(model)
    for name in sorted(os.environ):
        if _top(name) is None or name in given or name.upper() in _OTHERS:
            continue
        if _UNRELATED.fullmatch(name.upper()) or _is_referenced(name, contents):
            continue
        if any(name in text for text in given.values()):
            continue
        meant = nearest(name, (f"{PREFIX}{path.upper()}" for path in paths(model, "__")))
        hint = f"did you mean {meant}?" if meant else "see docs/reference/settings.md for all keys"
        yield f"environment: {name}: sets no key; {hint}"


def _top(variable: str) -> str | None:
    """The top-level key that a variable names; None if it does not begin with `RELAY_`."""
    name = variable.upper()
    if not name.startswith(PREFIX):
        return None
    return name.removeprefix(PREFIX).partition("__")[0].lower()


def _is_referenced(variable: str, content: Any) -> bool:
    """Whether the content has `{env: variable}`."""
    if isinstance(content, dict):
        return content.get("env") == variable or any(
            _is_referenced(variable, each) for each in content.values()
        )
    return isinstance(content, list) and any(_is_referenced(variable, each) for each in content)
