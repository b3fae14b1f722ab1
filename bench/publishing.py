"""Measures publishers: pgbench with one event a transaction, and samples of those that wait for a lock."""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from bench.environment import variables
from bench.outbox import Outbox
from bench.results import Measurement
from relay.demo.embedded import wheel_binaries

RELAY_TABLE = "outbox_message_t"
PLAIN_TABLE = "plain_outbox"
SET_GAPLESS = f"select relay.set_gapless('{RELAY_TABLE}', 'c_offset', %s)"
"""Makes c_offset of relay's outbox come from a counter or from the sequence (`source.offsets`)."""
CREATE_PLAIN_TABLE = f"""
    create table {PLAIN_TABLE} (like {RELAY_TABLE} including defaults including constraints);
    alter table {PLAIN_TABLE} drop column if exists c_offset, drop column if exists c_xid, add primary key (id)
"""
"""The same columns and limit of sizes, without c_xid, c_offset with its sequence, and the index for positions."""

SCRIPT = r"""
\set order random(1, 1000000)
{begin}
insert into {table} (host_id, user_id, aggregate_id, aggregate_type, event_type, payload,
    transaction_id, transaction_ordinal, transaction_count)
values (('00000000-0000-4000-8000-' || lpad((:order % 64)::text, 12, '0'))::uuid,
    ('00000000-0000-4000-9000-' || lpad((:order % 1000)::text, 12, '0'))::uuid,
    :order::text, 'Order', 'order.placed',
    jsonb_build_object('order', :order::int, 'amount', 1, 'note', repeat('x', 100)),
    gen_random_uuid(), 1, 1);
{commit}
"""
WAITING = """
    select wait_event = 'extend', count(*) from pg_stat_activity
    where application_name = 'pgbench' and wait_event_type = 'Lock' group by 1
"""
LOCK_WAITS = {False: "lock waits", True: "extend waits"}
"""The lock to extend a file is released before the insert ends; publishers of any table sometimes wait for it."""
SAMPLE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Publishers:
    """Concurrent publishers of one event a transaction, for `seconds`.

    A transaction stays open for `work_ms` milliseconds after its event; at 0 it is only the insert.
    """

    clients: int
    work_ms: int
    seconds: int

    def measure(
        self, outbox: Outbox, table: str, folder: Path, gapless: bool = False
    ) -> Measurement:
        """Commits a second into the truncated table, and the samples of publishers that wait for each kind of lock.

        With `gapless`, c_offset of relay's outbox has no gaps. Raises RuntimeError if pgbench fails.
        """
        outbox.conn.execute(SET_GAPLESS.encode(), (gapless,))
        outbox.conn.execute(f"truncate {table}".encode())
        outbox.conn.execute("checkpoint")
        output = folder / "pgbench.out"
        seen = dict.fromkeys(("samples", *LOCK_WAITS.values()), 0)
        with output.open("wb") as file:
            process = self._start(outbox.dsn, table, folder, file.fileno())
        try:
            while process.poll() is None:
                for extends, waiting in outbox.conn.execute(WAITING):
                    seen[LOCK_WAITS[extends]] += waiting
                seen["samples"] += 1
                time.sleep(SAMPLE_SECONDS)
        finally:
            process.kill()
            process.wait()
        rate = _rate(process.returncode, output.read_text(errors="replace"))
        return {"commits/s": rate, **seen}

    def _start(self, dsn: str, table: str, folder: Path, output: int) -> subprocess.Popen[bytes]:
        script = folder / "publish.sql"
        begin, commit = "", ""
        if self.work_ms:
            begin, commit = "begin;", f"select pg_sleep({self.work_ms / 1000});\ncommit;"
        script.write_text(SCRIPT.format(table=table, begin=begin, commit=commit))
        threads = min(self.clients, os.cpu_count() or 1)
        return subprocess.Popen(
            [
                *(str(wheel_binaries() / "pgbench"), "--no-vacuum", "--protocol=prepared"),
                *(f"--client={self.clients}", f"--jobs={threads}", f"--time={self.seconds}"),
                *(f"--file={script}", dsn),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables(),
        )


def _rate(status: int, output: str) -> float:
    match = re.search(r"^tps = ([0-9.]+)", output, re.MULTILINE)
    if status or not match:
        raise RuntimeError(f"pgbench ended with status {status}: {output.strip()[:500]}")
    return float(match[1])
