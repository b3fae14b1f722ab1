"""Writes the tables of results between markers in docs/performance.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.results import JUDGED, cell, headings, number

Result = Mapping[str, Any]

PLOTTED = {
    "drain-noop": "Drain to a handler that does nothing",
    "drain-apply": "Drain into a table",
    "live-200": "Latencies at 200 transactions a second",
    "live-1000": "Latencies at 1,000 transactions a second",
    "scale": "Task slots of Spark",
}
"""The workloads that have a plot, and the plot's alternative text."""

_MARKED = re.compile(r"(<!-- bench: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def write(document: Path, results: Path) -> list[str]:
    """Write the table of each marker; returns the names of markers without a result."""
    known = {file.stem: json.loads(file.read_text()) for file in sorted(results.glob("*.json"))}
    missing: list[str] = []

    def fill(match: re.Match[str]) -> str:
        head, name, end = match.groups()
        if name == "environment":
            body = _environment(list(known.values()))
        elif name == "slower":
            body = _slower(known)
        elif name == "goals":
            body = _goals(known)
        elif name in known:
            body = _table(known[name]) + _plot(name)
        else:
            missing.append(name)
            body = "Not measured yet."
        return f"{head}{body}\n{end}"

    document.write_text(_MARKED.sub(fill, document.read_text()))
    return missing


def _table(result: Result) -> str:
    """A result as a Markdown table, with the ratio to the row that a contender is compared with in brackets."""
    names = headings(result)
    lines = [
        f"{result['size'][0].upper()}{result['size'][1:]}.",
        "",
        f"| contender | {' | '.join(names)} | rounds |",
        f"|---|{'---:|' * len(names)}---:|",
    ]
    for row in result["contenders"]:
        figures = " | ".join(cell(row, name) for name in names)
        lines.append(f"| {row['name']} | {figures} | {len(row['rounds'])} |")
    lines += ["", *_against(result), *_skipped(result)]
    return "\n".join(lines).rstrip()


def _plot(name: str) -> str:
    return f"\n\n![{PLOTTED[name]}](plots/{name}.png)" if name in PLOTTED else ""


def _against(result: Result) -> Iterator[str]:
    named = dict.fromkeys(row["against"] for row in result["contenders"] if row["against"])
    if named:
        yield f"In brackets: how many times better than {' and '.join(f'“{name}”' for name in named)}."


def _skipped(result: Result) -> Iterator[str]:
    for name, why in result["skipped"].items():
        yield f"Without {name}: {why}."


def _goals(results: Mapping[str, Result]) -> str:
    """The goals of all results, what was measured, and the size of each workload below."""
    judged = {name: result for name, result in results.items() if result.get("goals")}
    if not judged:
        return "Not measured yet."
    lines = [
        "| workload | row | figure | measured | goal | met |",
        "|---|---|---|---:|---|---|",
        *(
            f"| {name} | {goal['row']} | {goal['figure']} | {goal['measured']} | {goal['goal']} | {met} |"
            for name, result in judged.items()
            for goal in result["goals"]
            for met in ["yes" if goal["met"] else "**no**"]
        ),
        "",
        *(f"- {name}: {result['size']}." for name, result in judged.items()),
        *(line for result in judged.values() for line in _skipped(result)),
    ]
    return "\n".join(lines)


PEERS = ("pgqueuer", "procrastinate", "pgmq", "pg-transactional-outbox")
"""Peers whose rows have the name of their package."""


def _environment(results: Sequence[Result]) -> str:
    if not results:
        return "Nothing has been measured yet."
    newest = max(results, key=lambda result: str(result["date"]))
    machine = newest["machine"]
    rows = [row["name"] for result in results for row in result["contenders"]]
    versions = ", ".join(
        f"{name} {found}"
        for name, found in newest["versions"].items()
        if found and (name not in PEERS or any(name in row for row in rows))
    )
    return (
        f"Measured {newest['date']} on {machine['cores']} cores with {machine['memory_gib']} GiB,"
        f" {machine['system']}. Versions: {versions}."
    )


def _slower(results: Mapping[str, Result]) -> str:
    lines = [
        f"| {name} | {row['name']} | {figure} | {number(row['median'][figure])} | {row['against']} | {ratio:.2f}× |"
        for name, result in results.items()
        for row in result["contenders"]
        if row["name"].startswith("relay") and row["against"] and row["against"] != row["name"]
        for figure, ratio in row["ratio"].items()
        if figure in JUDGED and ratio < 1
    ]
    if not lines:
        return "There are none in these tables."
    head = [
        "| workload | row | figure | measured | against | ratio |",
        "|---|---|---|---:|---|---:|",
    ]
    return "\n".join([*head, *lines])
