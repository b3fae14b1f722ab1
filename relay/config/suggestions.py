"""What somebody may have meant: the keys that there are where an unknown one stands, and the one that is nearest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most like another, if one is."""
    by_lower_case = {each.lower(): each for each in known}
    found = get_close_matches(word.lower(), by_lower_case, n=1)
    return by_lower_case[found[0]] if found else None


def keys_at(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """The keys of a mapping in the configuration; `location` leads to it, as pydantic tells it."""
    kinds: list[Any] = [model]
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
    """Every key with those above it, such as `source.dsn`; below mappings with keys of the user's there are none."""
    for name, field in model.model_fields.items():
        yield name
        for member in _members(field.annotation):
            if _is_model(member):
                yield from (f"{name}{joint}{path}" for path in paths(member, joint))


def _below(kind: Any, part: int | str) -> Iterator[Any]:
    for member in _members(kind):
        if _is_model(member):
            fields: Mapping[str, Any] = member.model_fields
            yield from (f.annotation for name, f in fields.items() if part in (name, f.alias))
            # Of a union pydantic names the member by its type.
            if "type" in fields and part in get_args(fields["type"].annotation):
                yield member
        elif get_origin(member) in (dict, list):
            yield get_args(member)[-1]


def _members(kind: Any) -> Iterator[Any]:
    """The types that a value may have, without what only describes them."""
    if get_origin(kind) is Annotated:
        yield from _members(get_args(kind)[0])
    elif get_origin(kind) in (Union, UnionType):
        for each in get_args(kind):
            yield from _members(each)
    else:
        yield kind


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
