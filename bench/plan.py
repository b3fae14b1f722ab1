"""How much of each workload is measured: quick or in full, which rows, how many rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relay.demo.embedded import Cluster

LEFT_OUT_OF_QUICK = {
    "drain-noop": (
        *("Debezium, defaults", "pgqueuer, default batch"),
        *("pg-transactional-outbox, defaults", "pg-transactional-outbox, tuned"),
    ),
    "drain-apply": ("Debezium, tuned", "relay on Spark, each: event"),
    "live-200": (
        *("Debezium, defaults", "Debezium, tuned", "pg-transactional-outbox, tuned"),
        *("pgqueuer, no effect", "pgqueuer, durable effect, default batch"),
    ),
    "memory": (
        *("relay inline, idle", "relay on Spark, start", "relay on Spark, 40,000 events"),
        "relay as configured by default, one commit of 100,000 events",
    ),
}
"""Rows that quick runs leave out: variants, and contenders that start slowly."""

LEFT_OUT = {
    "live-1000": (
        *("Debezium, defaults", "pg-transactional-outbox, tuned"),
        *("pgqueuer, no effect", "pgqueuer, durable effect, default batch"),
    ),
}
"""Rows that full runs leave out: variants, and contenders that do not sustain the rate by far."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of a run. Quick runs have smaller workloads, and one round of expensive contenders."""

    cluster: Cluster
    folder: Path
    quick: bool
    rounds: int
    peers: Sequence[str] = ()
    minutes: float | None = None
    """How long each row of `endurance` runs, if its cost depends on time; None for as long as the row says."""
    rows: int | None = None
    """The events of a workload of `spark-work`; None for as many as the workload says."""

    def takes(self, workload: str, row: str) -> bool:
        """Whether a row is measured: as the command line asks, and always for relay."""
        left_out = LEFT_OUT_OF_QUICK.get(workload, ()) if self.quick else LEFT_OUT.get(workload, ())
        if row in left_out:
            return False
        asked = tuple(peer.lower() for peer in self.peers)
        return row.startswith("relay") or not asked or row.lower().startswith(asked)

    def often(self, expensive: bool) -> int:
        """The number of rounds of a contender."""
        return 1 if self.quick and expensive else self.rounds
