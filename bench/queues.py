"""Workers that take messages of a queue and do nothing with them, in pgbench: relay.take beside plain SKIP LOCKED."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from bench.environment import variables
from bench.outbox import Outbox
from bench.plan import Plan
from bench.results import Contender, Goal, Measurement, Workload
from relay.demo.embedded import wheel_binaries

PLAIN = "plain SKIP LOCKED, delete"
KEYS = 1_000
FIGURE = "events/s"
CREATE = """
    create table plain_messages (like relay.queue_messages including defaults, primary key (id));
    select relay.declare_queue('unordered', null);
    select relay.declare_queue('ordered', null, 'host');
"""
FILL_PLAIN = """
    insert into plain_messages (queue_id, event_id, event_type, host_id, payload)
    select 1, n::text, 'order.placed', n %% %s, '{"order": 1, "amount": 1}' from generate_series(1, %s) as n
"""
FILL = """
    select relay.enqueue(%s, '{"order": 1, "amount": 1}', 'order.placed', (n %% %s)::text)
      from generate_series(1, %s) as n
"""
CLAIM = r"""
begin;
select id, attempt from relay.claim('unordered') \gset
savepoint handled;
release savepoint handled;
select relay.complete('unordered', :id, :attempt);
commit;
"""


@dataclass(frozen=True, slots=True)
class Taking:
    """A number of workers that take messages in batches, as often as it needs for all of them."""

    outbox: Outbox
    messages: int
    workers: int
    batch: int

    def plain(self) -> Measurement:
        """Delete the oldest rows that nobody has locked."""
        return self._measure(
            "delete from plain_messages where id = any (array("
            f"select id from plain_messages order by id limit {self.batch} for update skip locked)) returning *;",
            FILL_PLAIN,
            (KEYS, self.messages),
            "plain_messages",
        )

    def take(self, queue: str) -> Measurement:
        """Call `relay.take`."""
        return self._measure(
            f"select * from relay.take('{queue}', {self.batch});",
            FILL,
            (queue, KEYS, self.messages),
            "relay.queue_messages",
        )

    def claim(self) -> Measurement:
        """Claim and complete each message, with a savepoint, as workers in Python do."""
        return self._measure(
            CLAIM, FILL, ("unordered", KEYS, self.messages), "relay.queue_messages"
        )

    def _measure(
        self, script: str, fill: str, parameters: tuple[object, ...], table: str
    ) -> Measurement:
        conn = self.outbox.conn
        conn.execute(f"truncate {table}".encode())
        conn.execute(fill.encode(), parameters)
        conn.execute(f"vacuum analyze {table}".encode())
        conn.execute("checkpoint")
        each = self.messages // (self.workers * self.batch)
        command = [
            *(str(wheel_binaries() / "pgbench"), "--no-vacuum", "--protocol=prepared"),
            *(f"--client={self.workers}", "--jobs=1", f"--transactions={each}", "--file=-"),
            self.outbox.dsn,
        ]
        began = time.monotonic()
        subprocess.run(
            command, input=script, text=True, capture_output=True, check=True, env=variables()
        )
        seconds = time.monotonic() - began
        # A worker gets fewer than it asks for where others have the first messages of the keys.
        left = self.outbox.value(f"select count(*) from {table}")
        return {FIGURE: (self.messages - left) / seconds}


def queues(plan: Plan) -> Iterator[Workload]:
    """Throughput of workers by batch and number, beside plain SKIP LOCKED with delete."""
    outbox = Outbox(plan.cluster, "queues")
    outbox.conn.execute(CREATE)
    for batch, workers in ((1, 1), (1, 4), (1, 16), (10, 4), (100, 4)):
        messages = (2_000 if plan.quick else 16_000) * (1 if batch == 1 else 5)
        taking = Taking(outbox, messages, workers, batch)
        rows: dict[str, Callable[[], Measurement]] = {
            PLAIN: taking.plain,
            "relay.take": partial(taking.take, "unordered"),
            "relay.take, in the order of 1,000 keys": partial(taking.take, "ordered"),
        }
        if batch == 1:
            rows["relay.claim, relay.complete"] = taking.claim
        yield Workload(
            f"queues-{batch}-{workers}",
            f"{messages:,} messages, {batch} at a time, {workers} workers",
            [Contender(name, measure, plan.rounds, PLAIN) for name, measure in rows.items()],
            [Goal("relay.take", FIGURE, 0.9, PLAIN, at_least=True)],
        )
