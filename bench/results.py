"""Measures contenders in alternating rounds, and writes medians and ratios: a table on the terminal, a JSON file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.environment import description

Measurement = dict[str, float]
"""Figures by name, such as `events/s` or `p99`; latencies are in milliseconds."""

MORE_IS_BETTER = ("events/s", "transactions/s", "commits/s", "steps/s")

JUDGED = (
    "events/s",
    "steps/s",
    "its CPU, µs/event",
    "commits/s",
    "p50",
    "p99",
    "durable p50",
    "durable p99",
)
"""The figures whose ratios are shown."""

SUMMED = ("samples", "lock waits", "extend waits")
"""Figures that are summed over all rounds: a median would hide an occurrence in one round only."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A row: a peer with one configuration, its rounds, and the row with which it is compared."""

    name: str
    measure: Callable[[], Measurement]
    rounds: int
    against: str | None = None
    unavailable: str | None = None


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure of a row has to be: at most, or at least, a number, or a multiple of another row's figure."""

    row: str
    figure: str
    limit: float
    of: str | None = None
    at_least: bool = False

    def judged(self, medians: Mapping[str, Measurement]) -> dict[str, Any]:
        """The goal, what was measured, and whether that meets it; not measured, it is not met."""
        value = medians.get(self.row, {}).get(self.figure)
        reference = medians.get(self.of, {}).get(self.figure) if self.of else 1.0
        words = "at least" if self.at_least else "at most"
        judged: dict[str, Any] = {
            "row": self.row,
            "figure": self.figure,
            "goal": f"{words} {self.limit:g}" + (f" × “{self.of}”" if self.of else ""),
            "measured": "not measured",
            "met": False,
        }
        if value is None or reference is None:
            return judged
        judged["measured"] = number(value)
        bound = self.limit * reference
        judged["met"] = value >= bound if self.at_least else value <= bound
        if self.of:
            ratio = f"{value / reference:.2f} × {number(reference)}" if reference else "of 0"
            judged["measured"] += f" ({ratio})"
        return judged


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload, the description of its size, its contenders, and the goals that their figures have to meet."""

    name: str
    size: str
    contenders: Sequence[Contender]
    goals: Sequence[Goal] = ()


def run(workload: Workload, console: Console, folder: Path) -> dict[str, Any]:
    """Measure the contenders in alternating rounds, print the table and write the file, whose content is returned.

    A contender that fails is measured once more. One that fails again is left out, and named in the table.
    """
    measured: dict[str, list[Measurement]] = {c.name: [] for c in workload.contenders}
    skipped = {c.name: c.unavailable for c in workload.contenders if c.unavailable}
    for name, why in skipped.items():
        console.print(f"{workload.name}: without {name}: {why}")
    for number in range(1, max(c.rounds for c in workload.contenders) + 1):
        for contender in workload.contenders:
            if contender.name in skipped or number > contender.rounds:
                continue
            try:
                figures = _measured(contender, console)
            except Exception as error:
                # A contender that fails must not discard the figures of the others.
                skipped[contender.name] = f"failed twice: {_words_of(error)}"
                console.print(f"{contender.name} failed: {error}", style="red", markup=False)
                continue
            measured[contender.name].append(figures)
            console.print(f"{workload.name} round {number}: {contender.name}: {_words(figures)}")
    result = _result(workload, measured, skipped)
    console.print(_table(result))
    for name, why in skipped.items():
        console.print(f"{name}: {why}", markup=False)
    if workload.goals:
        console.print(goals_table([result]))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{workload.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def _measured(contender: Contender, console: Console) -> Measurement:
    """Measure a contender; once more if it fails. Raises what the second try raises."""
    try:
        return contender.measure()
    except Exception as error:
        console.print(f"{contender.name} failed: {error}", style="red", markup=False)
    return contender.measure()


def _words_of(error: Exception) -> str:
    return str(error)[:500] or type(error).__name__


def _result(
    workload: Workload,
    measured: Mapping[str, list[Measurement]],
    skipped: Mapping[str, str | None],
) -> dict[str, Any]:
    medians = {name: _medians(rounds) for name, rounds in measured.items() if rounds}
    rows = [
        {
            "name": c.name,
            "rounds": measured[c.name],
            "median": medians[c.name],
            "against": c.against,
            "ratio": _ratios(medians[c.name], medians.get(c.against or "", {})),
        }
        for c in workload.contenders
        if c.name in medians
    ]
    head = {"workload": workload.name, "size": workload.size, **description()}
    judged = [goal.judged(medians) for goal in workload.goals]
    return {**head, "contenders": rows, "skipped": dict(skipped), "goals": judged}


def _medians(rounds: Sequence[Measurement]) -> Measurement:
    names = dict.fromkeys(name for figures in rounds for name in figures)
    return {
        name: (sum if name in SUMMED else statistics.median)([f[name] for f in rounds if name in f])
        for name in names
    }


def _ratios(own: Measurement, reference: Measurement) -> Measurement:
    """How many times better each figure is than the reference's, whether more or less is better."""
    return {
        name: own[name] / value if name in MORE_IS_BETTER else value / own[name]
        for name, value in reference.items()
        if own.get(name) and value
    }


def headings(result: Mapping[str, Any]) -> list[str]:
    """The names of all figures in any row."""
    return list(dict.fromkeys(name for row in result["contenders"] for name in row["median"]))


def cell(row: Mapping[str, Any], heading: str) -> str:
    """The text of a figure, with its ratio."""
    if heading not in row["median"]:
        return ""
    ratio = row["ratio"].get(heading)
    shown = number(row["median"][heading])
    return f"{shown} ({ratio:.2f}×)" if ratio and heading in JUDGED else shown


def number(value: float) -> str:
    """The text of a number, with three significant digits, or as an integer with commas from 100 on."""
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _table(result: Mapping[str, Any]) -> Table:
    names = headings(result)
    table = Table(title=f"{result['workload']}: {result['size']}", title_justify="left")
    table.add_column("contender")
    for name in names:
        table.add_column(name, justify="right")
    for row in result["contenders"]:
        table.add_row(row["name"], *(cell(row, name) for name in names))
    for name in result["skipped"]:
        table.add_row(name, *(["-"] * len(names)))
    return table


def goals_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """The goals of results, what was measured, and whether they are met."""
    table = Table("workload", "row", "figure", "measured", "goal", "met", title="goals")
    for result in results:
        for goal in result["goals"]:
            shown = (goal["row"], goal["figure"], goal["measured"], goal["goal"])
            table.add_row(result["workload"], *shown, "yes" if goal["met"] else "[red]no")
    return table


def _words(figures: Measurement) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in figures.items())
