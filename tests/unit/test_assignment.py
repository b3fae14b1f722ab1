"""Transactions are routed once: whatever is taken out of them has the handlers that routing it again would find."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.config.settings import Settings
from relay.model.events import NOTE
from relay.model.transactions import FACTS, Rows, Transactions
from relay.pipeline.routing import Assignment, BatchRouter, RouteRules
from tests.unit import wire

COLUMNS = ("event_type", "id")
ROUTES: list[dict[str, Any]] = [
    {"match": {"event_type": "a"}, "handlers": ["first"], "continue": True},
    {"match": {"event_type": ["a", "b"]}, "handlers": ["second"]},
]
TYPES = st.lists(st.lists(st.sampled_from("abx"), min_size=1, max_size=4), min_size=1, max_size=6)


def router(routes: list[dict[str, Any]], unrouted: str = "dead_letter") -> BatchRouter:
    statement = {"type": "sql", "statement": "select 1"}
    handlers = {"first": statement, "second": statement}
    return BatchRouter(Settings(handlers=handlers, routes=routes, unrouted=unrouted))


def transactions(types: Sequence[Sequence[str]], undecodable: Sequence[int] = ()) -> Transactions:
    """One transaction for each list of event types; some cannot be decoded."""
    facts = np.zeros(len(types), FACTS)
    facts["events"] = list(map(len, types))
    rows = [
        wire.tuple_data([kind.encode(), b"1", b"note" if index in undecodable else None])
        for index, kinds in enumerate(types)
        for kind in kinds
    ]
    ids = [None] * len(types)
    return Transactions((*COLUMNS, NOTE), facts, ids, [("h",)], Rows.of(rows))


def shown(assignment: Assignment) -> dict[str, list[list[str | None]]]:
    """The event types that go to each handler, by transaction."""
    return {
        name: [[event.text("event_type") for event in each.events] for each in routed]
        for name, routed in assignment.parts.items()
    }


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str | None, ...]]]:
    """Each time that the routes are asked for the handlers of an event."""
    asked: list[tuple[str | None, ...]] = []
    built = RouteRules.__init__

    def build(self: RouteRules, *args: Any) -> None:
        built(self, *args)
        choose = self.choose

        def choose_counted(values: tuple[str | None, ...]) -> tuple[str, ...]:
            asked.append(values)
            return choose(values)

        self.choose = choose_counted  # type: ignore[assignment]

    with monkeypatch.context() as patch:
        patch.setattr(RouteRules, "__init__", build)
        yield asked


@given(TYPES, st.sets(st.integers(0, 5)), st.sampled_from(["dead_letter", "ignore"]), st.data())
def test_what_is_taken_out_is_routed_as_it_was(
    types: list[list[str]], undecodable: set[int], unrouted: str, data: st.DataObject
) -> None:
    routes = router(ROUTES, unrouted)
    every = transactions(types, sorted(undecodable))
    assigned = routes.route(every)
    first = data.draw(st.integers(0, len(types)))
    last = data.draw(st.integers(first, len(types)))
    indices = data.draw(st.lists(st.integers(0, len(types) - 1), unique=True)) if types else []
    for found, again in (
        (assigned.part(first, last), routes.route(every.part(first, last))),
        (assigned.take(sorted(indices)), routes.route(every.take(sorted(indices)))),
    ):
        assert shown(found) == shown(again)
        assert found.refused.keys() == again.refused.keys()
    for name, routed in assigned.parts.items():
        assert assigned.reached(name).sum() == len(routed.transactions)


def test_a_refused_transaction_reaches_no_handler() -> None:
    assigned = router(ROUTES).route(transactions(["a", "ax", "a"]))
    assert list(assigned.refused) == [1]
    for handler in assigned.parts:
        assert not assigned.reached(handler)[1]
    assert list(assigned.part(1, 3).refused) == [0]
    assert not assigned.part(2, 3).refused


def test_the_routes_are_asked_once_for_each_event(monkeypatch: pytest.MonkeyPatch) -> None:
    types = [["a", "b"], ["b"], ["x", "a"], ["a"]]
    with counted(monkeypatch) as asked:
        assigned = router(ROUTES).route(transactions(types))
        rest = assigned.take([0, 1, 3])
        halves = rest.part(0, 1), rest.part(1, 3)
        found = [shown(each) for each in (assigned, rest, *halves)]
    assert found[0] == {"first": [["a"], ["a"]], "second": [["a", "b"], ["b"], ["a"]]}
    assert found[2] == {"first": [["a"]], "second": [["a", "b"]]}
    assert list(assigned.refused) == [2]
    assert len(asked) == sum(map(len, types))


def test_without_a_field_to_match_no_event_is_looked_at() -> None:
    assigned = router([{"handlers": ["first", "second"]}]).route(transactions([["a"], ["b", "x"]]))
    assert shown(assigned.part(1, 2)) == {"first": [["b", "x"]], "second": [["b", "x"]]}
    assert assigned.take([0]).reached("first").tolist() == [True]
