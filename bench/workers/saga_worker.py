"""Sagas of three steps, each of which inserts a row, run by relay, by DBOS, and by a hand-written state table.

`sagas` of them run, `workers` at once, on connections of psycopg in threads. The answer `done` has the seconds from
the first step to the end of the last saga. The database is new, and has the table `effects`.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from bench.workers.talk import arguments, say

STEPS = 3
EFFECT = "insert into effects (saga, step) values (%s, %s)"
TAKE = """
    select id, done from plain_sagas where done < 3 order by id limit 1 for update skip locked
"""


class Watch:
    """The time from the first step to the end of the last saga."""

    def __init__(self, sagas: int) -> None:
        self._left, self._began, self.seconds = sagas, 0.0, 0.0
        self._using = threading.Lock()
        self.done = threading.Event()

    def begins(self) -> None:
        with self._using:
            self._began = self._began or time.monotonic()

    def ends(self) -> None:
        with self._using:
            self._left -= 1
            if self._left == 0:
                self.seconds = time.monotonic() - self._began
                self.done.set()


def plain(job: dict[str, Any], watch: Watch) -> None:
    """A row is a saga, with the number of its steps that are done, which commits with the step."""
    with psycopg.connect(job["dsn"], autocommit=True) as conn:
        conn.execute("create table plain_sagas (id int primary key, done int not null default 0)")
        conn.execute(
            "insert into plain_sagas select n from generate_series(1, %s) as n", (job["sagas"],)
        )
        conn.execute("create index on plain_sagas (id) where done < 3")
        conn.execute("vacuum analyze plain_sagas")

    def work() -> None:
        with psycopg.connect(job["dsn"]) as conn:
            while True:
                watch.begins()
                taken = conn.execute(TAKE).fetchone()
                if taken is None:
                    return
                number, done = taken
                conn.execute(EFFECT, (number, done))
                conn.execute("update plain_sagas set done = done + 1 where id = %s", (number,))
                conn.commit()
                if done + 1 == STEPS:
                    watch.ends()

    threads = [threading.Thread(target=work) for _ in range(job["workers"])]
    for each in threads:
        each.start()


def relay(job: dict[str, Any], watch: Watch) -> None:
    """A saga of relay, whose steps commit with their effect."""
    from relay.client.saga import Context, SagaStep, saga
    from relay.client.worker import Message, Worker

    def insert(step: SagaStep, number: int, of: int) -> None:
        step.session.execute(EFFECT, (number, of))

    @saga("bench", starts="begin", key="payload.number")
    def run(ctx: Context, event: Message) -> None:
        watch.begins()
        number = event.payload["number"]
        for each in range(STEPS):
            ctx.step(f"step {each}", insert, number, each)
        watch.ends()

    statement, text = run.queue.declaration()
    with psycopg.connect(job["dsn"], autocommit=True) as conn:
        conn.execute(statement.with_parameter("%s").encode(), (text,))
        conn.execute(
            "select relay.enqueue('bench', jsonb_build_object('number', n), 'begin', '1', n::text)"
            " from generate_series(1, %s) as n",
            (job["sagas"],),
        )
        conn.execute("vacuum analyze relay.queue_messages")
    worker = Worker(job["dsn"], run, concurrency=job["workers"])
    threading.Thread(target=lambda: asyncio.run(worker.run()), daemon=True).start()


def dbos(job: dict[str, Any], watch: Watch) -> None:
    """A workflow of DBOS, whose steps are transactions of its data source: they commit with their checkpoint."""
    from dbos import DBOS, SQLAlchemyDatasource
    from sqlalchemy import text

    given = conninfo_to_dict(job["dsn"])
    address = "postgresql+psycopg://{user}@/{dbname}?host={host}&port={port}".format(**given)
    DBOS(config={"name": "bench", "system_database_url": address, "log_level": "ERROR"})
    effects = SQLAlchemyDatasource.create(address)
    insertion = text("insert into effects (saga, step) values (:saga, :step)")

    @effects.transaction  # type: ignore[untyped-decorator]
    def insert(number: int, of: int) -> None:
        effects.sql_session().execute(insertion, {"saga": number, "step": of})

    @DBOS.workflow()  # type: ignore[untyped-decorator]
    def run(number: int) -> None:
        watch.begins()
        for each in range(STEPS):
            insert(number, each)
        watch.ends()

    DBOS.launch()
    DBOS.register_queue("bench", worker_concurrency=job["workers"], polling_interval_sec=0.05)
    for number in range(job["sagas"]):
        DBOS.enqueue_workflow("bench", run, number)


KINDS: dict[str, Callable[[dict[str, Any], Watch], None]] = {
    "plain": plain,
    "relay": relay,
    "dbos": dbos,
}


def main() -> None:
    job = arguments()
    watch = Watch(job["sagas"])
    KINDS[job["kind"]](job, watch)
    watch.done.wait()
    say("done", seconds=watch.seconds)
    # Threads of workers have no end of their own.
    os._exit(0)


if __name__ == "__main__":
    main()
