"""Workers of a queue that are killed, frozen and cut off: each message has its effect once, in the order of its key."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from relay.client.worker import Queue
from tests.outbox import Outbox, wait_until
from tests.process import ROOT

PROGRAM = """
import asyncio, random, sys
from relay.client.worker import Worker

dsn, lease = sys.argv[1], float(sys.argv[2]) or None
worker = Worker(dsn, "mail", concurrency=4, lease=lease, poll=0.05)

EFFECT = "insert into done (number, key, pid) values (%s, %s, pg_backend_pid())"

if lease:
    @worker.handles()
    async def handle(message):
        await asyncio.sleep(random.random() / 8)
        async with message.transaction() as conn:
            await conn.execute(EFFECT, (message.payload, message.key))
else:
    @worker.handles()
    async def handle(message, conn):
        await conn.execute(EFFECT, (message.payload, message.key))
        await asyncio.sleep(random.random() / 8)
        if random.random() < 0.05:
            raise RuntimeError("now and then")

worker.run_forever()
"""
MESSAGES = 600


@pytest.mark.chaos
@pytest.mark.parametrize(
    "lease", [pytest.param(0, marks=pytest.mark.rare), 1], ids=["claimed", "leased"]
)
@pytest.mark.parametrize("key", ["host", pytest.param("none", marks=pytest.mark.rare)])
def test_each_message_has_its_effect_once(
    outbox: Outbox, tmp_path: Path, key: str, lease: int
) -> None:
    declared = Queue(
        name="mail", match=None, key=key, attempts=1000, backoff=0.01, max_backoff=0.05
    )
    statement, text = declared.declaration()
    outbox.worker.execute(statement.with_parameter("%s").encode(), (text,))
    outbox.conn.execute(
        "create table done (id bigint generated always as identity, number int, key text, pid int)"
    )
    outbox.worker.execute(
        "select relay.enqueue('mail', to_jsonb(n), host_id => (n %% 40)::text) from generate_series(1, %s) as n",
        (MESSAGES,),
    )
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), outbox.worker_dsn, str(lease)]
    chance = random.Random(f"{key} {lease}")

    with ExitStack() as stack:

        def start() -> subprocess.Popen[bytes]:
            process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        workers = [start() for _ in range(4)]
        ends = time.monotonic() + 120
        while outbox.value("select count(*) from relay.queue_items") and time.monotonic() < ends:
            time.sleep(chance.random() / 4)
            index = chance.randrange(4)
            match chance.choice(["kill", "freeze", "cut"]):
                case "kill":
                    workers[index].kill()
                    workers[index] = start()
                case "freeze":
                    workers[index].send_signal(signal.SIGSTOP)
                    time.sleep(1.2 if lease else 0.2)
                    workers[index].send_signal(signal.SIGCONT)
                case "cut":
                    outbox.conn.execute(
                        "select pg_terminate_backend(pid) from pg_stat_activity"
                        " where application_name = 'relay worker mail' and random() < 0.3"
                    )
        for each in workers:
            each.terminate()
        for each in workers:
            # One that was just started has no handler for the signal yet.
            assert each.wait(30) in (0, -signal.SIGTERM)
    wait_until(lambda: outbox.value("select count(*) from relay.queue_items") == 0)
    assert outbox.column("select number from done group by number having count(*) > 1") == []
    assert outbox.value("select count(*) from done") == MESSAGES
    assert outbox.value("select count(*) from relay.queue_dead_letters") == 0
    if key == "host":
        disorder = """
            select key from (select key, number, lag(number) over (partition by key order by id) as former
                               from done) as d
             where number < former
        """
        assert outbox.column(disorder) == []
