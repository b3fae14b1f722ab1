"""Matches single events with the routes of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from relay.config.fields import dig, split
from relay.config.settings import Route, Scalar
from relay.model import exact_json
from relay.model.events import Event

_JSON_FIELDS = frozenset({"payload", "metadata"})

Values = tuple[str | None, ...]
Test = Callable[[Values], bool]


class RouteRules:
    """The routes of a configuration, in order: the first that matches wins unless it says `continue: true`.

    `fields` are the fields that the routes match.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        names = [name for route in routes for name in route.match]
        self.fields = tuple(dict.fromkeys(split(name)[0] for name in names))
        self._routes = [
            (
                [_test(self.fields, name, patterns) for name, patterns in route.match.items()],
                route.handlers,
                route.continue_,
            )
            for route in routes
        ]
        # Event types and aggregates are few. Payloads rarely repeat, and may be large.
        remembered = 0 if not _JSON_FIELDS.isdisjoint(self.fields) else 10_000
        self.choose = lru_cache(maxsize=remembered)(self._choose)

    def handlers(self, event: Event) -> tuple[str, ...]:
        """The names of the event's handlers, each once, in the order of the routes; empty if no route matches."""
        return self.choose(tuple(event.text(field) for field in self.fields))

    def _choose(self, values: Values) -> tuple[str, ...]:
        names: dict[str, None] = {}
        for tests, handlers, goes_on in self._routes:
            if all(test(values) for test in tests):
                names.update(dict.fromkeys(handlers))
                if not goes_on:
                    break
        return tuple(names)


def shadowed(routes: Sequence[Route]) -> Iterator[tuple[int, int]]:
    """Yield the index of each route that can never apply, and of an earlier one that matches all of its events."""
    for index, route in enumerate(routes):
        for before, earlier in enumerate(routes[:index]):
            if not earlier.continue_ and _covers(earlier, route):
                yield index, before
                break


def _covers(earlier: Route, later: Route) -> bool:
    return all(
        name in later.match
        and all(any(_includes(each, given) for each in patterns) for given in later.match[name])
        for name, patterns in earlier.match.items()
    )


def _includes(pattern: Scalar, other: Scalar) -> bool:
    """Whether a pattern certainly matches all that another one matches."""
    if pattern == "*" or (pattern == other and type(pattern) is type(other)):
        return True
    if not _is_glob(other):
        return _matches(other, pattern)
    # Two globs: only a beginning is compared.
    beginning = pattern[:-1] if isinstance(pattern, str) and pattern.endswith("*") else None
    return beginning is not None and not _is_glob(beginning) and str(other).startswith(beginning)


def _is_glob(pattern: Scalar) -> bool:
    return isinstance(pattern, str) and any(sign in pattern for sign in "*?[")


def _test(fields: Sequence[str], name: str, patterns: Sequence[Scalar]) -> Test:
    head, path = split(name)
    index = fields.index(head)
    if not path:
        return lambda values: any(_matches(values[index], pattern) for pattern in patterns)

    def test(values: Values) -> bool:
        text = values[index]
        if text is None:
            return False
        try:
            found, value = dig(exact_json.loads(text), path)
        except ValueError:
            return False  # a mapped text column need not hold JSON
        return found and any(_matches(value, pattern) for pattern in patterns)

    return test


def _matches(value: Any, pattern: Scalar) -> bool:
    """Whether a value equals the pattern or, as text, matches it as a glob (case-sensitive)."""
    if value is None:
        return False
    if isinstance(pattern, str):
        return fnmatchcase(value if isinstance(value, str) else _text(value), pattern)
    if isinstance(value, str):
        return not isinstance(pattern, bool) and value == str(pattern)
    return isinstance(value, bool) is isinstance(pattern, bool) and bool(value == pattern)


def _text(value: Any) -> str:
    """A number, or an array or object, as PostgreSQL prints it; empty if it cannot be written."""
    try:
        return exact_json.dumps(value, "")
    except ValueError:
        return ""
