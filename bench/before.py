"""Measures relay beside relay at another commit: the same workloads, in alternating rounds."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.environment import HOME, ROOT
from bench.results import MORE_IS_BETTER, Measurement, number

NO_PEERS = "none"
Rounds = dict[tuple[str, str], list[Measurement]]
"""The figures of each round, by workload and contender."""


def main(
    commit: Annotated[str, typer.Argument(help="The commit to compare with, such as HEAD~3.")],
    workloads: Annotated[list[str] | None, typer.Argument()] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each side.")] = 3,
) -> None:
    """Print the medians of both sides and their ratios; above 1, relay is better now than at the commit."""
    chosen = workloads or ["drain-noop", "drain-apply", "live"]
    console = Console()
    trees = {"before": _checkout(commit), "now": ROOT}
    results: dict[str, Rounds] = {side: defaultdict(list) for side in trees}
    for turn in range(1, rounds + 1):
        for side, tree in trees.items():
            console.print(f"round {turn}, {side}")
            _measure(tree, chosen, results[side])
    console.print(_table(results["before"], results["now"]))


def _checkout(commit: str) -> Path:
    """The commit's work tree in `build/bench`, which the first call creates."""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.run(
        [*git, "rev-parse", "--short", "--verify", f"{commit}^{{commit}}"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    tree = HOME / "commits" / name
    if not tree.is_dir():
        subprocess.run([*git, "worktree", "add", "--detach", str(tree), name], check=True)
    return tree


def _measure(tree: Path, workloads: Sequence[str], rounds: Rounds) -> None:
    """Run a tree's own benchmark with this interpreter, without peers, and add one round."""
    command = [sys.executable, "-m", "bench", *workloads, "--peers", NO_PEERS, "--rounds", "1"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    started = {file: file.stat().st_mtime for file in _results(tree)}
    subprocess.run(command, check=True, cwd=tree, env=environment, stdout=subprocess.DEVNULL)
    for file in _results(tree):
        if started.get(file) == file.stat().st_mtime:
            continue
        result = json.loads(file.read_text())
        for row in result["contenders"]:
            rounds[result["workload"], row["name"]] += row["rounds"]


def _results(tree: Path) -> list[Path]:
    return sorted((tree / "build" / "bench" / "results").glob("*.json"))


def _table(before: Rounds, now: Rounds) -> Table:
    table = Table("workload", "contender", "figure", "before", "now", "ratio")
    for key, rounds in now.items():
        for figure in rounds[0]:
            old, new = _median(before[key], figure), _median(rounds, figure)
            if not old or not new:
                continue
            ratio = new / old if figure in MORE_IS_BETTER else old / new
            table.add_row(*key, figure, number(old), number(new), f"{ratio:.2f}")
    return table


def _median(rounds: Sequence[Measurement], figure: str) -> float:
    return statistics.median([each[figure] for each in rounds if figure in each] or [0.0])


if __name__ == "__main__":
    typer.run(main)
