"""Workers that take messages of a queue and do nothing with them: relay's beside plain SKIP LOCKED and its peers.

What is SQL runs in pgbench. Workers in Python run in a process of their own, as their users start them.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from bench.environment import HOME, no_venv, variables
from bench.job import Job
from bench.outbox import Outbox
from bench.plan import Plan
from bench.results import Contender, Goal, Measurement, Workload
from relay.demo.embedded import wheel_binaries

PLAIN = "plain SKIP LOCKED, delete"
PLAIN_CLAIM = "plain SKIP LOCKED, the statements of a claim"
TAKE, CLAIM = "relay.take", "relay.claim, relay.complete"
KEYS = 1_000
FIGURE = "events/s"
WORKER = "bench.workers.queue_worker"
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
FILL_PGMQ = """
    select pgmq.send_batch('bench', array_agg('{"order": 1, "amount": 1}'::jsonb)) from generate_series(1, %s)
"""
PGMQ_READ = """
select pgmq.delete('bench', array(select msg_id from pgmq.read('bench', 30, {})));
"""
CLAIMS = r"""
begin;
select id, attempt from relay.claim('unordered') \gset
savepoint handled;
release savepoint handled;
select relay.complete('unordered', :id, :attempt);
commit;
"""
PLAIN_CLAIMS = r"""
begin;
select * from plain_messages order by id limit 1 for update skip locked \gset
savepoint handled;
release savepoint handled;
delete from plain_messages where id = :id;
commit;
"""
CLAIMS_MANY = """
begin;
select relay.complete('unordered', c.id, c.attempt) from relay.claim('unordered', {}) as c;
commit;
"""


@dataclass(frozen=True, slots=True)
class Taking:
    """A number of workers that take messages in batches, as often as it needs for all of them."""

    plan: Plan
    outbox: Outbox
    messages: int
    workers: int
    batch: int

    def plain(self) -> Measurement:
        """Delete the oldest rows that nobody has locked."""
        return self._plain(
            "delete from plain_messages where id = any (array("
            f"select id from plain_messages order by id limit {self.batch} for update skip locked)) returning *;"
        )

    def plain_claim(self) -> Measurement:
        """Lock a row and delete it, with the statements of `claim`."""
        return self._plain(PLAIN_CLAIMS)

    def _plain(self, script: str) -> Measurement:
        return self._measure(script, FILL_PLAIN, (KEYS, self.messages), "plain_messages")

    def take(self, queue: str) -> Measurement:
        """Call `relay.take`."""
        return self._measure(
            f"select * from relay.take('{queue}', {self.batch});",
            FILL,
            (queue, KEYS, self.messages),
            "relay.queue_messages",
        )

    def claim(self) -> Measurement:
        """Claim messages and complete each: one with a savepoint, as workers in Python do, or many in one statement."""
        script = CLAIMS if self.batch == 1 else CLAIMS_MANY.format(self.batch)
        parameters = ("unordered", KEYS, self.messages)
        return self._measure(script, FILL, parameters, "relay.queue_messages")

    def pgmq(self, script: str) -> Measurement:
        """Call functions of pgmq."""
        return self._measure(script.format(self.batch), FILL_PGMQ, (self.messages,), "pgmq.q_bench")

    def in_python(self, kind: str) -> Measurement:
        """Run workers in Python, from their first message to their last."""
        given = {"kind": kind, "messages": self.messages, "workers": self.workers}
        if kind == "relay":
            self.outbox.conn.execute("truncate relay.queue_messages")
            self.outbox.conn.execute(FILL.encode(), ("unordered", KEYS, self.messages))
            self.outbox.conn.execute("vacuum analyze relay.queue_messages")
        dsn = self.outbox.dsn if kind == "relay" else self._new_database(kind)
        job = {**given, "dsn": dsn, "queue": "unordered", "batch": self.batch}
        command = [sys.executable, "-m", WORKER] if kind == "relay" else None
        with Job(WORKER, job, self.plan.folder, command) as process:
            return {FIGURE: self.messages / float(process.answer("done")["seconds"])}

    def _new_database(self, kind: str) -> str:
        return self.plan.cluster.create_database(self.outbox.new_name() + f"_{kind}")

    def _measure(
        self, script: str, fill: str, parameters: tuple[object, ...], table: str
    ) -> Measurement:
        conn = self.outbox.conn
        conn.execute(f"truncate {table}".encode())
        conn.execute(fill.encode(), parameters)
        conn.execute(f"vacuum analyze {table}".encode())
        conn.execute("checkpoint")
        each = self.messages // (self.workers * self.batch)
        seconds = pgbench(self.outbox.dsn, script, self.workers, f"--transactions={each}")
        # A worker gets fewer than it asks for where others have the first messages of the keys.
        left = self.outbox.value(f"select count(*) from {table}")
        return {FIGURE: (self.messages - left) / seconds}


def pgbench(dsn: str, script: str, clients: int, *options: str) -> float:
    """Run a script in sessions of pgbench; returns the seconds that it took."""
    command = [
        *(str(wheel_binaries() / "pgbench"), "--no-vacuum", "--protocol=prepared"),
        *(f"--client={clients}", "--jobs=1", *options, "--file=-", dsn),
    ]
    began = time.monotonic()
    subprocess.run(
        command, input=script, text=True, capture_output=True, check=True, env=variables()
    )
    return time.monotonic() - began


def _pgmq(outbox: Outbox) -> str | None:
    """Install pgmq's functions, which its package for Python has as one file; returns why that is not possible."""
    found = list((HOME / "venv").glob("lib/*/site-packages/pgmq/sql/pgmq.sql"))
    if not found:
        return "its package could not be installed"
    outbox.conn.execute(found[0].read_bytes())
    outbox.conn.execute("select pgmq.create('bench')")
    return None


def queues(plan: Plan) -> Iterator[Workload]:
    """Throughput of workers by batch and number, beside plain SKIP LOCKED with delete and the peers."""
    outbox = Outbox(plan.cluster, "queues")
    outbox.conn.execute(CREATE)
    unavailable = {"pgmq": _pgmq(outbox), "pgqueuer": no_venv(), "procrastinate": no_venv()}
    for batch in (1, 10, 100):
        for workers in (1, 4, 16):
            messages = (2_000 if plan.quick else 16_000) * (1 if batch == 1 else 5)
            taking = Taking(plan, outbox, messages, workers, batch)
            few = Taking(plan, outbox, messages // 4, workers, batch)
            rows: dict[str, Callable[[], Measurement]] = {
                PLAIN: taking.plain,
                TAKE: partial(taking.take, "unordered"),
                "relay.take, in the order of 1,000 keys": partial(taking.take, "ordered"),
                CLAIM: taking.claim,
                "pgmq, pop": partial(taking.pgmq, "select * from pgmq.pop('bench', {});"),
                "pgmq, read and delete": partial(taking.pgmq, PGMQ_READ),
                "pgqueuer, a process": partial(few.in_python, "pgqueuer"),
            }
            if batch == 1:
                rows[PLAIN_CLAIM] = taking.plain_claim
                rows["procrastinate, a process"] = partial(few.in_python, "procrastinate")
                rows["relay's worker, a process"] = partial(few.in_python, "relay")
            name = f"queues-{batch}-{workers}"
            yield Workload(
                name,
                f"{messages:,} messages, {batch} at a time, {workers} workers",
                [
                    Contender(
                        *(row, measure, plan.rounds, PLAIN),
                        unavailable.get(row.partition(",")[0]),
                    )
                    for row, measure in rows.items()
                    if plan.takes("queues", row) or row == PLAIN
                ],
                [Goal(TAKE, FIGURE, 0.9, PLAIN, at_least=True)],
            )
