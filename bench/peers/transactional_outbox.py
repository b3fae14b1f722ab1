"""pg-transactional-outbox on Node.js: it reads its own table through a slot, and marks row by row."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict

from bench.environment import NODE_MODULES, ROOT, no_node, variables
from bench.job import Job
from bench.outbox import Backlog, Outbox
from bench.peers import Live

LISTENER = ["node", str(ROOT / "bench" / "workers" / "transactional_outbox.cjs")]
PUBLICATION = "bench_outbox"
TRANSACTIONS = 2_000

FILL = """
    do $$
    begin
        for t in 1..{transactions} loop
            set local synchronous_commit = off;
            insert into outbox (id, aggregate_type, aggregate_id, message_type, segment, payload)
            select gen_random_uuid(), 'Order', t::text, 'order.placed',
                   '00000000-0000-4000-8000-' || lpad((t % 64)::text, 12, '0'),
                   jsonb_build_object('order', t, 'amount', n, 'note', repeat('x', 100))
              from generate_series(1, 5) n;
            commit;
        end loop;
    end $$
"""


@dataclass(frozen=True, slots=True)
class TransactionalOutbox:
    """The replication listener with its defaults, or tuned with a mutex for each host and twenty connections."""

    tuned: bool
    style: str = "pg-transactional-outbox"

    @property
    def name(self) -> str:
        return f"pg-transactional-outbox, {'tuned' if self.tuned else 'defaults'}"

    def unavailable(self) -> str | None:
        return no_node()

    def drain(self, outbox: Outbox, backlog: Backlog, folder: Path, effect: bool) -> float:
        """Events a second of 10,000 events in its own table."""
        events = 5 * TRANSACTIONS
        with self._prepared(outbox) as slot:
            outbox.conn.execute(FILL.format(transactions=TRANSACTIONS).encode())
            outbox.conn.execute("checkpoint")
            with self._job(outbox, slot, folder, events, None) as job:
                started = outbox.streaming(slot)
                return events / (float(job.answer("done")["at"]) - started)

    @contextmanager
    def consuming(self, live: Live) -> Iterator[None]:
        with (
            self._prepared(live.outbox) as slot,
            self._job(live.outbox, slot, live.folder, None, live.arrivals),
        ):
            live.outbox.streaming(slot)
            yield

    @contextmanager
    def _prepared(self, outbox: Outbox) -> Iterator[str]:
        """Recreate the library's table and publication, and create a slot."""
        script = subprocess.run(
            [*LISTENER, json.dumps({"setup": PUBLICATION})],
            env=variables(NODE_PATH=str(NODE_MODULES)),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        outbox.conn.execute(script.encode())
        slot = outbox.new_slot()
        try:
            yield slot
        finally:
            outbox.drop(slot)

    def _job(
        self, outbox: Outbox, slot: str, folder: Path, events: int | None, arrivals: Path | None
    ) -> Job:
        where: dict[str, Any] = conninfo_to_dict(outbox.dsn)
        connection = {
            **{"host": where["host"], "port": int(where["port"])},
            **{"user": where["user"], "database": where["dbname"]},
        }
        job = {
            **{"connection": connection, "publication": PUBLICATION, "slot": slot},
            **{"tuned": self.tuned, "events": events},
            "arrivals": str(arrivals) if arrivals else None,
        }
        return Job(
            "transactional_outbox", job, folder, command=LISTENER, NODE_PATH=str(NODE_MODULES)
        )
