"""Writes the tables of results between markers in docs/performance.md and bench/README.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.results import cell, headings

Result = Mapping[str, Any]

PLOTTED = {
    "drain-noop": "Drain to a handler that does nothing",
    "drain-apply": "Drain into a table",
    "live-200": "Latencies at 200 transactions a second",
}
"""The workloads that have a plot, and the plot's alternative text."""

SHOWN = (
    *("transactions/s", "events/s", "commits/s", "ms/event", "missing", "p50", "p99"),
    *("durable p50", "durable p99", "total MiB", "first event s", "CPU, µs/event"),
    *("total, CPU µs/event", "hold, CPU µs/event", "delivered/s"),
)
"""The figures that tables have, where they are not 0 in each row; bench/results has the others."""

_MARKED = re.compile(r"(<!-- bench: ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def write(document: Path, results: Path) -> list[str]:
    """Write the table of each marker, which names one workload, or several with the same figures.

    Returns the names of markers without a result.
    """
    known = {file.stem: json.loads(file.read_text()) for file in sorted(results.glob("*.json"))}
    missing: list[str] = []

    def fill(match: re.Match[str]) -> str:
        head, named, end = match.groups()
        names = named.split()
        if named == "environment":
            body = _environment(list(known.values()))
        elif named == "goals":
            body = _goals(known)
        elif all(name in known for name in names):
            body = _table([known[name] for name in names]) + _plot(named)
        else:
            missing.append(named)
            body = "Not measured yet."
        return f"{head}{body}\n{end}"

    document.write_text(_MARKED.sub(fill, document.read_text()))
    return missing


def _table(results: Sequence[Result]) -> str:
    """Results as a Markdown table, with the ratio to the row that a contender is compared with in brackets."""
    columns = [name for name in headings(results[0]) if name in SHOWN and _differs(results, name)]
    several = len(results) > 1
    lines = [
        "" if several else f"{_sentence(results[0]['size'])} {_measured(results[0])}",
        "",
        f"| {'workload | ' * several}contender | {' | '.join(columns)} |",
        f"|{'---|' * several}---|{'---:|' * len(columns)}",
    ]
    for result in results:
        for n, row in enumerate(result["contenders"]):
            first = f"{result['workload'] if n == 0 else ''} | " * several
            figures = " | ".join(cell(row, name) for name in columns)
            lines.append(f"| {first}{row['name']} | {figures} |")
    lines.append("")
    if several:
        lines += [
            f"- {result['workload']}: {result['size']}. {_measured(result)}" for result in results
        ]
    lines += [line for result in results for line in _skipped(result)]
    return "\n".join(lines).strip()


def _differs(results: Sequence[Result], name: str) -> bool:
    return any(row["median"].get(name) for result in results for row in result["contenders"])


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _measured(result: Result) -> str:
    """Of what version the figures are, and of how many rounds each is the median."""
    rounds = max(len(row["rounds"]) for row in result["contenders"])
    version = result.get("versions", {}).get("relay", "")
    return f"{version or 'Not committed'}, {rounds} round{'s' * (rounds > 1)}."


def _plot(name: str) -> str:
    return f"\n\n![{PLOTTED[name]}](plots/{name}.png)" if name in PLOTTED else ""


def _skipped(result: Result) -> Iterator[str]:
    for name, why in result["skipped"].items():
        yield f"Without {name}: {why}."


def _goals(results: Mapping[str, Result]) -> str:
    """How many of the goals of all results are met, and a line for each that some do not meet."""
    goals = [(name, goal) for name, result in results.items() for goal in result.get("goals") or ()]
    if not goals:
        return "Not measured yet."
    missed: dict[tuple[str, str], list[str]] = {}
    for name, goal in goals:
        if not goal["met"]:
            what = f"{goal['row']}, {goal['figure']}", goal["goal"]
            missed.setdefault(what, []).append(f"{name} {goal['measured']}")
    met = sum(goal["met"] for _, goal in goals)
    lines = [
        f"- {what}, goal {goal}: {'; '.join(found)}." for (what, goal), found in missed.items()
    ]
    return "\n".join([f"{met} of {len(goals)} are met.", "", *lines]).rstrip()


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
