"""`python -m bench [WORKLOAD...]`: measures relay beside its peers. `report` writes tables into docs/performance.md."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench import environment
from bench.outbox import SERVER_SETTINGS
from bench.results import run
from bench.workloads import WORKLOADS, Plan
from relay.embedded import Cluster

RESULTS = environment.ROOT / "bench" / "results"
QUICK_RESULTS = environment.HOME / "results"


def main(
    workloads: Annotated[
        list[str] | None, typer.Argument(help=f"{', '.join(WORKLOADS)}, report; by default all.")
    ] = None,
    peers: Annotated[
        str, typer.Option(help="Beginnings of peers' names, with commas; relay always takes part.")
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each contender.")] = 3,
) -> None:
    """Measure relay beside its peers. QUICK=1 in the environment measures less, and leaves bench/results alone."""
    chosen = workloads or list(WORKLOADS)
    for name in chosen:
        if name not in WORKLOADS:
            raise typer.BadParameter(f"{name} is none of {', '.join(WORKLOADS)}")
    quick = bool(os.environ.get("QUICK"))
    console = Console()
    console.print(f"environment of the peers: {environment.HOME}")
    environment.build()
    named = [peer.strip() for peer in peers.split(",") if peer.strip()]
    for name in chosen:
        with (
            tempfile.TemporaryDirectory(prefix="relay-bench-") as folder,
            Cluster(settings=SERVER_SETTINGS) as cluster,
        ):
            plan = Plan(cluster, Path(folder), quick, rounds, named)
            console.print(f"{name}: filling", style="bold")
            for workload in WORKLOADS[name](plan):
                run(workload, console, QUICK_RESULTS if quick else RESULTS)


if __name__ == "__main__":
    typer.run(main)
