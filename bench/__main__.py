"""`python -m bench [WORKLOAD...]`: measures relay beside its peers; `report` writes tables and plots into docs."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench import environment, report
from bench.outbox import SERVER_SETTINGS
from bench.plan import Plan
from bench.results import goals_table, run
from bench.workloads import LONG, QUICK, WORKLOADS
from relay.demo.embedded import Cluster

RESULTS = environment.ROOT / "bench" / "results"
PARTIAL_RESULTS = environment.HOME / "results"
DOCUMENTS = [environment.ROOT / "docs" / "performance.md", environment.ROOT / "bench" / "README.md"]
PLOTS = environment.ROOT / "docs" / "plots"
REPORT = "report"


def main(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"{', '.join(WORKLOADS)}, {REPORT}; sinks, spark-work, outage or endurance for all of "
            "these. By default all but the last three."
        ),
    ] = None,
    peers: Annotated[
        str, typer.Option(help="Prefixes of peers' names, with commas; relay is always measured.")
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each contender.")] = 3,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="How long a row of endurance, or queues-held, runs whose cost grows with time.",
        ),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=5, help="The events of each workload of spark-work.")
    ] = None,
) -> None:
    """Measure relay beside its peers. QUICK=1 in the environment measures less.

    A quick run, or one with --peers, writes its results to build/bench/results, not to bench/results.
    """
    quick = bool(os.environ.get("QUICK"))
    usual = QUICK if quick else [name for name in WORKLOADS if name not in LONG]
    chosen = [name for word in workloads for name in _named(word)] if workloads else list(usual)
    console = Console()
    console.print(f"building the peers' environment in {environment.HOME}, unless it exists")
    environment.build()
    named = [peer.strip() for peer in peers.split(",") if peer.strip()]
    results = PARTIAL_RESULTS if quick or named else RESULTS
    measured: list[dict[str, Any]] = []
    failed: list[str] = []
    for name in chosen:
        if name == REPORT:
            _report(console)
            continue
        try:
            measured.extend(_measure(name, console, quick, rounds, named, results, minutes, rows))
        except Exception:
            # The others are still measured.
            console.print_exception()
            failed.append(name)
    if len([result for result in measured if result["goals"]]) > 1:
        console.print(goals_table(measured))
    console.print(f"figures: {results}")
    if failed:
        console.print(f"failed: {', '.join(failed)}", style="red")
        raise typer.Exit(1)


def _named(word: str) -> list[str]:
    """The workload of this name, or all that begin with it and a dash, such as `sinks`."""
    known = [*WORKLOADS, REPORT]
    matching = [name for name in known if name == word or name.startswith(f"{word}-")]
    if not matching:
        raise typer.BadParameter(f"{word} is not one of {', '.join(known)}")
    return [word] if word in matching else matching


def _measure(
    name: str,
    console: Console,
    quick: bool,
    rounds: int,
    peers: list[str],
    results: Path,
    minutes: float | None,
    rows: int | None,
) -> Iterator[dict[str, Any]]:
    with (
        tempfile.TemporaryDirectory(prefix="relay-bench-") as folder,
        Cluster(settings=SERVER_SETTINGS) as cluster,
    ):
        console.rule(name)
        plan = Plan(cluster, Path(folder), quick, rounds, peers, minutes, rows)
        for workload in WORKLOADS[name](plan):
            yield run(workload, console, results)


def _report(console: Console) -> None:
    for document in DOCUMENTS:
        for missing in report.write(document, RESULTS):
            console.print(f"{document.name}: no result for {missing} in {RESULTS}")
    command = [str(environment.PYTHON), "-m", "bench.workers.plots", str(RESULTS), str(PLOTS)]
    subprocess.run(command, check=True, env=environment.variables())
    console.print(f"tables in {', '.join(map(str, DOCUMENTS))}, plots in {PLOTS}")


if __name__ == "__main__":
    typer.run(main)
