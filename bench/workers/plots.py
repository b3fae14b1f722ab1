"""Draws the results as PNG: `python -m bench.workers.plots RESULTS PLOTS`, in the peers' environment."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt

OWN, OTHERS = "#1f6f8b", "#b8c4cc"
TITLES = {
    "drain-noop": "Drain to a handler that does nothing",
    "drain-apply": "Drain into a table, one row for each event",
}


def bars(result: dict[str, Any], figure: str, title: str, unit: str, file: Path) -> None:
    """Draw a horizontal bar for each row that has the figure; relay's are dark."""
    rows = [row for row in result["contenders"] if figure in row["median"]]
    if not rows:
        return
    names = [row["name"] for row in rows]
    values = [row["median"][figure] for row in rows]
    colours = [OWN if name.startswith("relay") else OTHERS for name in names]
    _, axes = plt.subplots(figsize=(8, 0.6 + 0.38 * len(rows)))
    drawn = axes.barh(names, values, color=colours)
    axes.bar_label(drawn, [shown(value) for value in values], padding=4, fontsize=9)
    finish(axes, title, unit, max(values) * 1.15, file)


def latencies(result: dict[str, Any], file: Path) -> None:
    """Draw two bars for each row, the median and the 99th percentile, to the durable effect where there is one."""
    rows = [row for row in result["contenders"] if "p50" in row["median"]]
    if not rows:
        return
    names = [row["name"] for row in rows]
    _, axes = plt.subplots(figsize=(8, 0.8 + 0.6 * len(rows)))
    for offset, centile, faint in ((-0.2, "p50", 1.0), (0.2, "p99", 0.55)):
        values = [row["median"].get(f"durable {centile}", row["median"][centile]) for row in rows]
        colours = [OWN if name.startswith("relay") else OTHERS for name in names]
        indices = [index + offset for index in range(len(rows))]
        drawn = axes.barh(indices, values, height=0.38, color=colours, alpha=faint)
        labels = [f"{centile} {shown(value)}" for value in values]
        axes.bar_label(drawn, labels, padding=4, fontsize=8)
    axes.set_yticks(range(len(rows)), names)
    axes.set_xscale("log")
    largest = max(row["median"].get("durable p99", row["median"]["p99"]) for row in rows)
    title = f"From COMMIT to the handler or its effect's commit: {result['size']}"
    axes.set_xlim(left=0.1)
    finish(axes, title, "ms, logarithmic", largest * 4, file)


def finish(axes: Any, title: str, unit: str, limit: float, file: Path) -> None:
    """Set the title and the axes, with the first row on top and no frame, and write the file."""
    axes.invert_yaxis()
    axes.figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    axes.set_xlabel(unit, fontsize=9)
    axes.tick_params(labelsize=9)
    axes.set_xlim(right=limit)
    axes.spines[["top", "right"]].set_visible(False)
    axes.figure.tight_layout()
    axes.figure.savefig(file, dpi=90)
    plt.close(axes.figure)


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main(arguments: Sequence[str]) -> None:
    results, plots = map(Path, arguments)
    plots.mkdir(parents=True, exist_ok=True)
    for file in sorted(results.glob("*.json")):
        result = json.loads(file.read_text())
        target = plots / f"{file.stem}.png"
        if file.stem in TITLES:
            title = f"{TITLES[file.stem]}: {result['size']}"
            bars(result, "events/s", title, "events/s", target)
        elif file.stem == "live-200":
            latencies(result, target)


if __name__ == "__main__":
    main(sys.argv[1:])
