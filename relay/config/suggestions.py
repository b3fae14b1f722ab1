"""Suggests a known key in place of an unknown one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most similar to a word; None if none is similar."""
    by_lower_case = {each.lower(): each for each in known}
    matches = get_close_matches(word.lower(), by_lower_case, n=1, cutoff=0.65)
    return by_lower_case[matches[0]] if matches else None


def keys_at(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """The keys of the mapping at a location in the configuration; `location` is in pydantic's form."""
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
    """Yield the path of every key, such as `source.dsn`, except below mappings whose keys the user chooses."""
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
            # In a union, pydantic's location names the member by its type.
            if "type" in fields and part in get_args(fields["type"].annotation):
                yield member
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
