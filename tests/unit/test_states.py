"""The words for states: SQL, which tells them, and the glossary, which explains them, have those that are declared."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest

from relay.cli.status import why_deferred
from relay.store import states
from relay.store.deferred.selection import KIND, Reason
from relay.store.migrations import sql_directory
from tests.process import ROOT


def test_sql_tells_the_states_that_are_declared() -> None:
    told = re.findall(r"(?:then|else) '(\w+)'", KIND.as_string(None))
    assert sorted(told) == sorted(states.DEFERRED)
    queues = (sql_directory() / "target" / "004_queues.sql").read_text()
    state = queues[queues.index("function relay.message_state(") :].partition(" end;")[0]
    assert {*re.findall(r"(?:then|else) '(\w+)'", state), "dead", "done"} == {*states.MESSAGES}
    sagas = (sql_directory() / "target" / "008_sagas.sql").read_text()
    ended = re.search(r"has_ended boolean := .* in \('(.+)'\)", sagas)
    assert ended
    assert tuple(ended[1].split("', '")) == states.SAGAS[-3:]
    acted_on = re.search(r"states <@ '{(.+)}'", queues)
    assert acted_on
    assert acted_on[1] == ", ".join(states.AT_REST)
    figures = queues[queues.index("view relay.queue_figures") :].split("\n")[1]
    assert all(f"f.{each}," in figures for each in states.FIGURES)


@pytest.mark.parametrize("kind", states.DEFERRED)
def test_status_says_why_a_transaction_is_deferred(kind: states.DeferredKind) -> None:
    since = datetime(2026, 11, 29, tzinfo=UTC)
    said = why_deferred(Reason("hook", kind, "hook", "a fault", 3, since, None, None))
    assert said.startswith("3 since 2026-11-29")


def test_the_glossary_explains_each_state() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    table = glossary[glossary.index("## States") : glossary.index("## Sinks")]
    said = {
        word
        for row in re.findall(r"^\| (`.*?) \|", table, re.M)
        for word in re.findall(r"`(\w+)`", row)
    }
    assert said == {*states.DEFERRED, *states.MESSAGES, *states.DEAD, *states.SAGAS}
