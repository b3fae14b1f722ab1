"""Spark reads a whole outbox: relay's data source beside Spark's own JDBC source, in a process of its own each time."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from psycopg.conninfo import conninfo_to_dict

from bench.environment import ROOT
from bench.outbox import Outbox
from bench.results import Measurement
from bench.workers.spark_reader import JAR

TASKS = 2
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class SparkReading:
    """One way of reading: `jdbc`, `hosts` (ordered), `ranges` (not ordered) or `stream` (AvailableNow)."""

    kind: str

    def unavailable(self) -> str | None:
        """Why it cannot run here."""
        missing = self.kind == "jdbc" and not Path(JAR).exists()
        return f"there is no {JAR}: Debian's libpostgresql-jdbc-java" if missing else None

    def read(self, outbox: Outbox, rows: int) -> Measurement:
        """Events a second of the second reading; the first one starts the workers and warms the JVM."""
        fields: dict[str, str] = {
            str(key): str(value) for key, value in conninfo_to_dict(outbox.dsn).items()
        }
        login = [(key, fields[key]) for key in ("user", "password") if key in fields]
        url = f"jdbc:postgresql://{fields['host']}:{fields['port']}/{fields['dbname']}?{urlencode(login)}"
        found = subprocess.run(
            [
                *(sys.executable, "-m", "bench.workers.spark_reader", self.kind),
                *(outbox.dsn, url, str(rows), "1", str(TASKS)),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=True,
        )
        return {"events/s": rows / float(found.stdout.split()[-1])}
