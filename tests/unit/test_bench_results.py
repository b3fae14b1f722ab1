"""The benchmark measures a contender that fails once more, names one that fails again, and judges goals."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench import report, results
from bench.results import Contender, Goal, Measurement, Workload, run
from tests.process import ROOT


@pytest.fixture(autouse=True)
def _no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Describe no machine: that asks git and Java."""
    monkeypatch.setattr(results, "description", dict)


def failing(times: int) -> Callable[[], Measurement]:
    """A contender that fails so many times before it has figures."""
    left = [times]

    def measure() -> Measurement:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("no slot is free")
        return {"p50": 2.0}

    return measure


def ran(workload: Workload, folder: Path) -> tuple[dict[str, Any], str]:
    """The result of a workload, and what was printed."""
    printed = io.StringIO()
    result = run(workload, Console(file=printed, width=200), folder)
    assert json.loads((folder / f"{workload.name}.json").read_text()) == result
    return result, printed.getvalue()


def test_a_contender_that_fails_once_is_measured_again(tmp_path: Path) -> None:
    result, _ = ran(Workload("w", "small", [Contender("a", failing(1), 2)]), tmp_path)
    assert result["contenders"][0]["rounds"] == [{"p50": 2.0}, {"p50": 2.0}]
    assert result["skipped"] == {}


def test_one_that_fails_twice_is_named_in_the_table_and_ends_nothing(tmp_path: Path) -> None:
    both = [Contender("a", failing(2), 1), Contender("b", failing(0), 1)]
    result, printed = ran(Workload("w", "small", both), tmp_path)
    assert [row["name"] for row in result["contenders"]] == ["b"]
    assert result["skipped"] == {"a": "failed twice: no slot is free"}
    table = printed[printed.index("contender") :]
    assert "a: failed twice: no slot is free" in table


@pytest.mark.parametrize(
    ("goal", "measured", "met"),
    [
        (Goal("b", "p50", 30.0), "25.0", True),
        (Goal("b", "p50", 20.0), "25.0", False),
        (Goal("b", "p50", 2.5, "a"), "25.0 (2.50 × 10.0)", True),
        (Goal("b", "p50", 2.0, "a"), "25.0 (2.50 × 10.0)", False),
        (Goal("b", "p50", 2.0, "a", at_least=True), "25.0 (2.50 × 10.0)", True),
        (Goal("b", "p50", 1.1, "none"), "not measured", False),
        (Goal("none", "p50", 1.1), "not measured", False),
        (Goal("b", "files", 1.1, "a"), "0 (of 0)", True),
    ],
)
def test_a_goal_is_judged(goal: Goal, measured: str, met: bool) -> None:
    medians = {"a": {"p50": 10.0, "files": 0.0}, "b": {"p50": 25.0, "files": 0.0}}
    judged = goal.judged(medians)
    assert (judged["measured"], judged["met"]) == (measured, met)


def test_the_report_has_every_goal_that_is_missed(tmp_path: Path) -> None:
    goals = [Goal("a", "p50", 1.0), Goal("a", "p50", 3.0)]
    ran(Workload("w", "small", [Contender("a", failing(0), 1)], goals), tmp_path)
    page = tmp_path / "performance.md"
    page.write_text("<!-- bench: goals -->\n<!-- end -->\n")
    assert report.write(page, tmp_path) == []
    assert "1 of 2 are met." in page.read_text()
    assert "- a, p50, goal at most 1: w 2.00." in page.read_text()
    assert "at most 3" not in page.read_text()


def test_workloads_with_the_same_figures_share_a_table(tmp_path: Path) -> None:
    for name in ("v", "w"):
        ran(Workload(name, "small", [Contender("a", failing(0), 2)]), tmp_path)
    page = tmp_path / "performance.md"
    page.write_text("<!-- bench: v w -->\n<!-- end -->\n")
    assert report.write(page, tmp_path) == []
    assert "| workload | contender | p50 |\n|---|---|---:|\n| v | a | 2.00 |" in page.read_text()
    assert "- w: small. Not committed, 2 rounds." in page.read_text()


def test_the_page_names_no_peer_without_a_row() -> None:
    """Text described pgmq's and procrastinate's rows, which no table had."""
    lines = (ROOT / "docs/performance.md").read_text(encoding="utf-8").splitlines()
    figures = [line for line in lines if re.match(r"\| [^|]+ \| [\d,.]+ ", line)]
    for peer in (*report.PEERS, "Debezium", "subscription", "pg_recvlogical", "psycopg2 loop"):
        has_row = any(line.startswith(f"| {peer}") for line in figures)
        assert has_row or not any(peer in line for line in lines), peer
