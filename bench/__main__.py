"""`make bench`: drains one backlog with relay and with `pg_recvlogical`, in turns, and prints medians and ratios.

`QUICK=1` in the environment takes a smaller backlog.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
import yaml
from rich.console import Console
from rich.table import Table

from bench.backlog import PROJECTION, STATEMENTS, fill
from relay.config import Settings
from relay.embedded import Cluster, wheel_binaries
from relay.install import initialise
from relay.source.slot import slot_state

ROUNDS = 3
TRANSACTIONS = 8_000 if os.environ.get("QUICK") else 40_000
EVENTS = 5 * TRANSACTIONS
PEER = "pg_recvlogical, no effect"
TIMEOUT_SECONDS = 600


class Bench:
    """One server with one backlog, drained again and again through copies of its slot."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self._dsn = dsn
        self._folder = folder
        self._runs = 0
        self._conn = psycopg.connect(dsn, autocommit=True)
        self._conn.execute(PROJECTION)
        initialise(self._settings("base", {}))
        fill(self._conn, TRANSACTIONS)
        row = self._conn.execute("select pg_current_wal_lsn()::text").fetchone()
        self._end = str(row[0]) if row else ""

    def peer(self) -> float:
        """Events a second that `pg_recvlogical` takes from the server."""
        slot = self._copy_of_the_slot()
        options = ["-o", "proto_version=1", "-o", "publication_names=bench"]
        started = time.monotonic()
        subprocess.run(
            [
                str(wheel_binaries() / "pg_recvlogical"),
                *("-d", self._dsn, "--slot", slot, "--start", "--endpos", self._end),
                *("--file", os.devnull, *options),
            ],
            check=True,
            timeout=TIMEOUT_SECONDS,
        )
        return EVENTS / (time.monotonic() - started)

    def relay(self, statement: dict[str, str], inline: bool) -> float:
        """Events a second of `relay run`, from the start of the stream to the last commit."""
        slot = self._copy_of_the_slot()
        limit = 1_000_000_000 if inline else 0
        settings = self._settings(slot, {"inline_max_events": limit}, statement)
        initialise(settings)
        file = self._folder / f"{slot}.yaml"
        file.write_text(yaml.safe_dump(self._config(slot, {"inline_max_events": limit}, statement)))
        process = subprocess.Popen(
            [sys.executable, "-m", "relay", "run", "--config", str(file), "--log-level", "warning"]
        )
        try:
            self._wait(lambda: self._state(slot).active)
            if not inline:
                # A session is built once, not for each batch: the clock starts behind the first of them.
                before = self._state(slot).confirmed_flush_lsn
                self._wait(lambda: self._state(slot).confirmed_flush_lsn != before)
            started, done = time.monotonic(), self._applied()
            self._wait(lambda: self._confirmed(slot))
            return (EVENTS - done) / (time.monotonic() - started)
        finally:
            process.terminate()
            process.wait(60)

    def _copy_of_the_slot(self) -> str:
        self._runs += 1
        name = f"run{self._runs}"
        self._conn.execute("select pg_copy_logical_replication_slot('base', %s)", (name,))
        self._conn.execute("truncate projection")
        self._conn.execute("checkpoint")
        return name

    def _config(
        self, slot: str, batch: dict[str, int], statement: dict[str, str] | None = None
    ) -> dict[str, Any]:
        handler = {"type": "sql", **(statement or STATEMENTS["each: event"])}
        return {
            "source": {"dsn": self._dsn, "slot": slot, "publication": "bench"},
            "group": slot,
            "batch": batch,
            "handlers": {"projection": handler},
            "routes": [{"handlers": ["projection"]}],
        }

    def _settings(
        self, slot: str, batch: dict[str, int], statement: dict[str, str] | None = None
    ) -> Settings:
        return Settings(**self._config(slot, batch, statement))

    def _state(self, slot: str) -> Any:
        return slot_state(self._conn, slot)

    def _applied(self) -> int:
        row = self._conn.execute("select count(*) from projection").fetchone()
        return int(row[0]) if row else 0

    def _confirmed(self, slot: str) -> bool:
        row = self._conn.execute(
            "select confirmed_flush_lsn >= %s::pg_lsn from pg_replication_slots where slot_name = %s",
            (self._end, slot),
        ).fetchone()
        return bool(row and row[0])

    def _wait(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not reached():
            if time.monotonic() > deadline:
                raise TimeoutError("relay did not drain the backlog")
            time.sleep(0.01)


def main() -> None:
    """Run the rounds and print the table."""
    console = Console()
    with (
        TemporaryDirectory() as folder,
        Cluster(settings={"max_replication_slots": "40"}) as cluster,
    ):
        console.print(f"filling {EVENTS:,} events in {TRANSACTIONS:,} commits")
        bench = Bench(cluster.create_database("bench"), Path(folder))
        contenders: dict[str, Callable[[], float]] = {PEER: bench.peer}
        for name, statement in STATEMENTS.items():
            contenders[f"relay inline, {name}"] = lambda s=statement: bench.relay(s, inline=True)  # type: ignore[misc]
            contenders[f"relay on Spark, {name}"] = lambda s=statement: bench.relay(s, inline=False)  # type: ignore[misc]
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(1, ROUNDS + 1):
            for name, run in contenders.items():
                rates[name].append(run())
                console.print(f"round {number}: {name}: {rates[name][-1]:,.0f} events/s")
    peer = statistics.median(rates[PEER])
    table = Table("drain", "median events/s", f"ratio to {PEER}")
    for name, found in rates.items():
        table.add_row(
            name, f"{statistics.median(found):,.0f}", f"{statistics.median(found) / peer:.2f}"
        )
    console.print(table)


if __name__ == "__main__":
    main()
