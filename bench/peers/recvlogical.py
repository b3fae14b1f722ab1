"""`pg_recvlogical` to /dev/null: the rate of the server, with no more work in the client than a write(2)."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from bench.outbox import PUBLICATION, TIMEOUT_SECONDS, Backlog, Outbox
from relay.demo.embedded import wheel_binaries


@dataclass(frozen=True, slots=True)
class Recvlogical:
    """PostgreSQL's own receiver."""

    name: str = "pg_recvlogical"

    def unavailable(self) -> str | None:
        return None

    def drain(self, outbox: Outbox, backlog: Backlog, folder: Path, effect: bool) -> float:
        options = ["-o", "proto_version=1", "-o", f"publication_names={PUBLICATION}"]
        with outbox.copy(backlog) as slot:
            process = subprocess.Popen(
                [
                    str(wheel_binaries() / "pg_recvlogical"),
                    *("-d", outbox.dsn, "--slot", slot, "--start", "--endpos", backlog.end),
                    *("--file", os.devnull, *options),
                ]
            )
            try:
                started = outbox.streaming(slot)
                process.wait(TIMEOUT_SECONDS)
            finally:
                process.kill()
            return backlog.events / (time.monotonic() - started)
