"""The types of values in the configuration's sections."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr


class Section(BaseModel):
    """A mapping with known keys; it is immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number")  # pydantic would convert YAML's `yes` to 1
    return value


Number = BeforeValidator(_no_boolean)
_MOST_SECONDS = 1e9
"""With this bound, every time that relay computes is in the range of PostgreSQL and of Python."""
Seconds = Annotated[float, Field(gt=0, le=_MOST_SECONDS), Number]
SecondsOrZero = Annotated[float, Field(ge=0, le=_MOST_SECONDS), Number]
Name = Annotated[str, Field(min_length=1, max_length=63)]


def read_secret_file(path: str) -> str:
    """The text of a file, without leading and trailing white space. Raises ValueError."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"the file {path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"the file {path} is not UTF-8 text") from None


def resolve_secret(value: Any) -> Any:
    """The text of a value: the value itself, or what `{env: NAME}` or `{file: PATH}` refers to. Raises ValueError."""
    if not isinstance(value, dict):
        return str(value) if isinstance(value, int | float) else value
    if len(value) != 1 or not isinstance(next(iter(value.values())), str):
        raise ValueError("must be a text, {env: NAME} or {file: PATH}")
    ((kind, reference),) = value.items()
    if kind == "env":
        if reference not in os.environ:
            raise ValueError(f"the environment has no variable {reference}: set it for relay")
        return os.environ[reference]
    if kind == "file":
        return read_secret_file(reference)
    raise ValueError("must be a text, {env: NAME} or {file: PATH}")


Secret = Annotated[SecretStr, BeforeValidator(resolve_secret)]
"""A secret value. It is resolved in the driver, because executors have neither its environment nor its files."""
