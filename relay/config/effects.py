"""The keys of a configuration that decide the effects of a group, which all its instances must have alike.

`types.Mark` says which ones these are. Secrets are left out, also where a key is marked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, SecretStr

from relay.config.handlers import TRANSACTIONAL, HttpHandler
from relay.config.settings import Settings
from relay.config.types import Mark
from relay.model.events import SQL_TYPES

ORDERING = ("order_by", "reliable")
"""Keys of handlers that decide the ordering keys of deferred transactions, which are stored with these."""
_ORDERING_COLUMNS = tuple(
    f"source.{section}.{field}"
    for section in ("columns", "types")
    for field in ("host_id", "user_id", "aggregate_type", "aggregate_id")
)
_ALWAYS: Mapping[str, Set[str]] = {"": {"partitions", "unrouted"}, "source.": {"table"}}
"""The keys that are among the effects even with their defaults, as in the rows that are stored, by what is above."""
_IDS = "endpoints.id"
"""The key of a handler by which an ordering key is that of an endpoint."""
_LONGEST = 60
"""The digest of a longer value replaces it."""


@dataclass(frozen=True, slots=True)
class Effects:
    """The keys that decide effects, such as `handlers.orders.statement`, with their values or digests."""

    values: Mapping[str, str]

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """The effects of a configuration."""
        # Without defaults, so that a key that a later version adds makes no difference until it is set. Handlers run in
        # the order in which they are listed.
        values: dict[str, Any] = {"handlers": list(settings.handlers)}
        for above, section in (("", settings), ("source.", settings.source)):
            given = section.model_dump(include=keys_alike(type(section)), exclude_defaults=True)
            for key in (given.keys() | _ALWAYS[above]) - {"handlers"}:
                values |= _entries(f"{above}{key}", getattr(section, key))
        for field, kind in settings.source.types.items():
            if kind == SQL_TYPES[field]:
                del values[f"source.types.{field}"]
        for name, handler in settings.handlers.items():
            given = handler.model_dump(include=keys_alike(type(handler)), exclude_defaults=True)
            for key, value in given.items():
                plain = _address if key == "url" else _without_credentials
                values[f"handlers.{name}.{key}"] = plain(value)
            if isinstance(handler, HttpHandler) and handler.has_ids:
                values[f"handlers.{name}.{_IDS}"] = handler.endpoints_or_default.id
        return cls({key: _shown(value) for key, value in values.items() if not _omitted(value)})

    @property
    def digest(self) -> str:
        """The SHA-256 of all keys and values, in hexadecimal."""
        return _digest(json.dumps(dict(self.values), sort_keys=True))

    def difference(self, other: Mapping[str, str]) -> str:
        """Describe the keys that differ, the other configuration's value first: `partitions (8, here 4)`."""
        here, there = handlers_of(self.values), handlers_of(other)
        named = [f"handlers.{name} (only here)" for name in sorted(here - there)]
        named += [f"handlers.{name} (not here)" for name in sorted(there - here)]
        one_sided = tuple(f"handlers.{name}." for name in here ^ there)
        for key in sorted({*self.values, *other}):
            if self.values.get(key) != other.get(key) and not key.startswith(one_sided):
                named.append(_compared(key, other.get(key), self.values.get(key)))
        return ", ".join(named)

    def reordered(self, former: Mapping[str, str]) -> list[str]:
        """The sinks, '' for the target, whose deferred transactions had other ordering keys by the `former` effects."""
        stores = {name if self._is_sink(name) else "" for name in handlers_of(self.values)}
        return sorted(
            sink
            for sink in stores
            if self._ordering(self.values, sink) != self._ordering(former, sink)
        )

    def reordered_handlers(self, former: Mapping[str, str]) -> list[str]:
        """The keys of handlers that are in both configurations and order by another key."""
        both = handlers_of(self.values) & handlers_of(former)
        return sorted(
            f"handlers.{name}.order_by"
            for name in both
            if _order_of(self.values, name) != _order_of(former, name)
        )

    def _ordering(self, values: Mapping[str, str], sink: str) -> list[str | None]:
        """What decides the ordering keys of one sink's deferred transactions, or of the target's."""
        names = [sink] if sink else sorted(n for n in handlers_of(values) if not self._is_sink(n))
        orders = [
            f"{name} {_order_of(values, name)} {f'handlers.{name}.{_IDS}' in values}"
            for name in names
        ]
        return [*map(values.get, _ORDERING_COLUMNS), *orders]

    def _is_sink(self, name: str) -> bool:
        return self.values.get(f"handlers.{name}.type") not in (None, *TRANSACTIONAL)


@cache
def keys_alike(model: type[BaseModel]) -> set[str]:
    """The keys of a section that all instances of a group must have alike."""
    return {name for name, each in model.model_fields.items() if Mark.ALIKE in each.metadata}


def _entries(key: str, value: Any) -> dict[str, Any]:
    """A key's value, or those of the keys or indices below it."""
    if isinstance(value, Mapping):
        return {f"{key}.{name}": _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return {f"{key}.{index}": _plain(each) for index, each in enumerate(value)}
    return {key: value}


def _plain(value: Any) -> Any:
    is_section = isinstance(value, BaseModel)
    return value.model_dump(by_alias=True, exclude_defaults=True) if is_section else value


def _order_of(values: Mapping[str, str], name: str) -> str:
    """The key that a handler orders by: without an entry, the default."""
    order_by, reliable = (values.get(f"handlers.{name}.{key}") for key in ORDERING)
    return "none" if reliable == "false" else order_by or "host"


def handlers_of(values: Mapping[str, str]) -> set[str]:
    """The names of the handlers among the keys that decide effects."""
    prefix, suffix = "handlers.", ".type"
    return {
        key[len(prefix) : -len(suffix)]
        for key in values
        if key.startswith(prefix) and key.endswith(suffix)
    }


def _compared(key: str, there: str | None, here: str | None) -> str:
    if there is None:
        return f"{key} (only here)"
    if here is None:
        return f"{key} (not here)"
    return key if _is_digest(there) or _is_digest(here) else f"{key} ({there}, here {here})"


def _omitted(value: Any) -> bool:
    """Whether a value is unset or empty, or holds secrets."""
    return value is None or value in ({}, [], "") or _is_secret(value)


def _is_secret(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_is_secret, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_secret, value))
    return isinstance(value, SecretStr)


def _address(url: Any) -> Any:
    """An address without its credentials and its query, which may hold a token; a SecretStr is returned unchanged."""
    text = _without_credentials(url)
    return (
        urlsplit(text)._replace(query="", fragment="").geturl() if isinstance(text, str) else text
    )


def _without_credentials(value: Any) -> Any:
    """A text without the credentials of the address that it is; another value is returned unchanged."""
    # pydantic's own types of addresses are no texts.
    text = value.unicode_string() if hasattr(value, "unicode_string") else value
    if not isinstance(text, str) or "@" not in text:
        return text
    with suppress(ValueError):
        parts = urlsplit(text)
        if "@" in parts.netloc:
            return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return text


def _as_json(value: Any) -> Any:
    """What JSON has no form for; sets in an order that is the same in each process."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=_as_json)
    return text if len(text) <= _LONGEST and not _is_digest(text) else f"sha256:{_digest(text)}"


def _is_digest(text: str) -> bool:
    return text.startswith("sha256:")


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
