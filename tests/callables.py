"""Python handlers of the tests, which Spark's workers import by name."""

from __future__ import annotations

import asyncio
import gzip
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psycopg
from psycopg.rows import dict_row

from relay import Deliveries, Delivery
from relay.faults import Drop, Fail, RetryLater
from relay.model.events import Transaction


def die_of_666(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Like `record`, but the amount 666 ends the process."""
    if any(event.payload["amount"] == 666 for event in transaction.events):
        os._exit(66)
    record(transaction, cursor)


def record(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Append every event to the projection; raise ValueError for the amount 13."""
    for event in transaction.events:
        if event.payload["amount"] == 13:
            raise ValueError("thirteen is not an amount")
        cursor.execute(
            "insert into projection (id, host_id, c_offset, transaction_id, amount) values (%s, %s, %s, %s, %s)",
            (
                event.id,
                event.host_id,
                event.c_offset,
                event.transaction_id,
                event.payload["amount"],
            ),
        )


def terminate(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Like `record`, and send SIGTERM to this process, in a thread that is not the main thread."""
    record(transaction, cursor)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)


def stop_once(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Like `record`, but the first process that calls it stops in the middle of its transaction."""
    record(transaction, cursor)
    with psycopg.connect(cursor.connection.info.dsn, autocommit=True) as conn, conn.transaction():
        conn.execute("lock table stopped")
        first = conn.execute("select from stopped").rowcount == 0
        if first:
            conn.execute("insert into stopped values (%s)", (os.getpid(),))
    if first:
        os.kill(os.getpid(), signal.SIGSTOP)


def unless_busy(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Raise a transient fault for an event whose amount is in the table `busy`."""
    for event in transaction.events:
        cursor.execute("select from busy where amount = %s", (event.payload["amount"],))
        if cursor.rowcount:
            raise RetryLater("busy")


def refused_at_first(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Like `record`, but the first three attempts are refused; a sequence counts them, which does not roll back."""
    cursor.execute("select nextval('attempts')")
    if cursor.fetchone() < (4,):  # type: ignore[operator]
        raise ConnectionRefusedError
    record(transaction, cursor)


def refuse_or_ask_again(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Like `record`, but while the table `broken` has a row, reject negative amounts and ask for a retry of others."""
    cursor.execute("select from broken")
    if cursor.rowcount:
        negative = any(event.payload["amount"] < 0 for event in transaction.events)
        raise ValueError if negative else RetryLater
    record(transaction, cursor)


def wait_briefly(attempt: int) -> float:
    """A backoff: the same short wait after each attempt."""
    return 0.1 + attempt / 1_000


def decide_by_name(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Like `record`, and note each attempt in `tried`, out of the transaction; then end as the aggregate's id says."""
    (first, *_) = transaction.events
    name, attempt = first.aggregate_id or "", transaction.attempt
    with psycopg.connect(cursor.connection.info.dsn, autocommit=True) as conn:
        conn.execute("insert into tried (name, attempt) values (%s, %s)", (name, attempt))
    record(transaction, cursor)
    kind, _, times = name.partition(" ")
    if kind == "fails" and attempt <= int(times):
        raise KeyError(name)
    if kind == "exits" and attempt <= int(times):
        sys.exit(1)
    if kind == "asks" and attempt == 1:
        raise RetryLater("not yet", after=float(times))
    if kind == "drops":
        raise Drop("not for this service")
    if kind == "dies":
        raise Fail("no such customer") from ConnectionError()
    if kind == "repeats":
        try:
            record(transaction, cursor)
        except psycopg.errors.UniqueViolation as error:
            raise Drop("has it already") from error


def close_the_cursor(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Like `record`, and close the cursor."""
    with cursor:
        record(transaction, cursor)


def read_what_is_no_gzip(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Like `record`, but raise the error of an invalid gzip file for the amount 7."""
    if any(event.payload["amount"] == 7 for event in transaction.events):
        gzip.decompress(b"no gzip")
    record(transaction, cursor)


def obey(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Like `record`, then execute the command in each event's aggregate_id."""
    record(transaction, cursor)
    for event in transaction.events:
        command = str(event.aggregate_id)
        if command == "close":
            cursor.connection.close()
        elif command == "connection.commit":
            cursor.connection.commit()
        elif command == "sys.exit":
            sys.exit(3)
        elif command == "row_factory":
            cursor.connection.row_factory = dict_row
            cursor.connection.cursor_factory = psycopg.ClientCursor
        elif command != "1":
            for statement in [command] if command.startswith("do ") else command.split(";"):
                if statement == "raise":
                    raise ValueError
                cursor.execute(statement.encode())


def hide_an_error(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Like `record`, but hide an error of the database for a negative amount."""
    if any(event.payload["amount"] < 0 for event in transaction.events):
        with suppress(psycopg.Error):
            cursor.execute("select 1 / 0")
        return
    with suppress(psycopg.Error), cursor.connection.transaction():
        cursor.execute("select 1 / 0")
    record(transaction, cursor)


def sleep_long(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Take longer than any test."""
    cursor.execute("select pg_sleep(600)")


def hang_or_commit(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Take longer than any test for the amount 1; for others commit, once the table `ready` has a row."""
    for event in transaction.events:
        if event.payload["amount"] == 1:
            cursor.execute("select pg_sleep(600)")
        cursor.execute("select from ready")
        if not cursor.rowcount:
            raise RetryLater(after=0.1)
        cursor.execute("commit")


def note_headers(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Insert the headers of each event into the table `noted`."""
    for event in transaction.events:
        cursor.execute(
            "insert into noted (id, region, priority) values (%s, %s, %s)",
            (event.id, event.headers["region"], event.headers["priority"]),
        )


def with_customers(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Like `record`, read `customers` with `select *` for each event, and note the session's process."""
    if len(transaction.events) > 1:
        # So that the tasks of a batch are in different sessions at the same time.
        cursor.execute("select pg_sleep(0.3)")
    cursor.execute("insert into sessions_used select pg_backend_pid()")
    for _ in transaction.events:
        cursor.execute("select * from customers where id = %s", (1,))
    record(transaction, cursor)


def deallocating(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Like `record`, and end the statements that the session has prepared."""
    cursor.execute("deallocate all")
    record(transaction, cursor)


PASSWORDS: list[str] = []


def password() -> str:
    """The newest of PASSWORDS, as a service that makes credentials."""
    return PASSWORDS[-1]


def token() -> str:
    """The same, for another secret."""
    return PASSWORDS[-1]


def rotated() -> str:
    """The same, for a third one."""
    return PASSWORDS[-1]


class Broken(Exception):
    """An error whose message cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("the message is broken")


class NotCaught(BaseException):
    """An error that `except Exception` does not catch, such as gevent's and func_timeout's own."""


async def record_async(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Like `record`, once it is awaited."""
    record(transaction, cursor)


def record_lazily(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> Iterator[None]:
    """Like `record`, once it is iterated."""
    record(transaction, cursor)
    yield


def raise_what_is_named(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> Any:
    """Like `record`, but raise or return what an event's aggregate_id names."""
    raised: dict[str, BaseException] = {
        "cancelled": asyncio.CancelledError(),
        "interrupt": KeyboardInterrupt(),
        "not caught": NotCaught(),
        "group": BaseExceptionGroup("several", [KeyboardInterrupt()]),
        "broken": Broken(),
        "memory": MemoryError(),
        "long": ValueError("x" * 1_000_000),
    }
    returned = {"coroutine": record_async, "generator": record_lazily}
    for event in transaction.events:
        if event.aggregate_id in raised:
            raise raised[event.aggregate_id]
        if event.aggregate_id in returned:
            return returned[event.aggregate_id](transaction, cursor)
    return record(transaction, cursor)


def execute_what_is_named(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Like `record`, after the statement that an event's aggregate_id is; `later` raises RetryLater."""
    for event in transaction.events:
        if event.aggregate_id == "later":
            raise RetryLater
        cursor.execute(str(event.aggregate_id).encode())
    record(transaction, cursor)


class Handlers:
    """Handlers that are objects with `__call__`."""

    class Async:
        """Its call is a coroutine."""

        async def __call__(self, transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
            record(transaction, cursor)

    awaited = Async()


def count_lazily(frame: Any, batch: Any) -> Iterator[int]:
    """Count a batch of Spark, once it is iterated."""
    yield frame.count()


def exit_of_spark(frame: Any, batch: Any) -> None:
    """End the thread that calls it."""
    sys.exit(f"batch {batch.number}")


def write_nowhere(frame: Any, batch: Any) -> None:
    """Write a batch of a Spark sink to nowhere."""


async def complete(delivery: Delivery) -> None:
    """Append every event to `effects` in the transaction that completes the delivery; now and then, take a while."""
    async with delivery.transaction() as conn:
        await asyncio.sleep(random.choice((0, 0, 0.002, 0.02)))
        for values in _effects(delivery):
            await conn.execute(EFFECT, values)
    await asyncio.sleep(random.choice((0, 0.002)))


def complete_plain(delivery: Delivery) -> None:
    """The same, as a plain function."""
    with delivery.transaction() as conn:
        time.sleep(random.choice((0, 0, 0.002, 0.02)))
        for values in _effects(delivery):
            conn.execute(EFFECT, values)
    time.sleep(random.choice((0, 0.002)))


async def complete_batch(deliveries: Deliveries) -> None:
    """Like `complete`, for a batch in one transaction; now and then, name some as failed, or raise."""
    chosen = list(_without_some(deliveries))
    if not chosen:
        return
    async with deliveries.transaction() as conn:
        await asyncio.sleep(random.choice((0, 0, 0.002, 0.02)))
        for each in chosen:
            for values in _effects(each):
                await conn.execute(EFFECT, values)
        _raise_at_random()
    await asyncio.sleep(random.choice((0, 0.002)))
    _raise_at_random()


def complete_batch_plain(deliveries: Deliveries) -> None:
    """The same, as a plain function."""
    chosen = list(_without_some(deliveries))
    if not chosen:
        return
    with deliveries.transaction() as conn:
        time.sleep(random.choice((0, 0, 0.002, 0.02)))
        for each in chosen:
            for values in _effects(each):
                conn.execute(EFFECT, values)
        _raise_at_random()
    time.sleep(random.choice((0, 0.002)))
    _raise_at_random()


async def complete_each(deliveries: Deliveries) -> None:
    """Like `complete`, for each transaction of a batch alone; now and then, name some as failed, or raise."""
    for each in _without_some(deliveries):
        await complete(each)
        _raise_at_random()


async def complete_any(argument: Delivery | Deliveries) -> None:
    """Like `complete` or `complete_batch`, as the configuration calls it."""
    if isinstance(argument, Deliveries):
        await complete_batch(argument)
    else:
        await complete(argument)


EFFECT = "insert into effects (id, host_id, c_offset, attempt) values (%s, %s, %s, %s)"


def _effects(delivery: Delivery) -> Iterator[tuple[Any, ...]]:
    return ((each.id, each.host_id, each.c_offset, delivery.attempt) for each in delivery.events)


def _without_some(deliveries: Deliveries) -> Iterator[Delivery]:
    """Name some as failed, before they are handled."""
    for each in deliveries:
        if each.attempt == 1 and random.random() < 0.05:
            deliveries.fail(each, ConnectionError("at random"))
        else:
            yield each


def _raise_at_random() -> None:
    if random.random() < 0.05:
        raise ConnectionError("at random")


async def write_down(delivery: Delivery) -> None:
    """Append the offset of each event, and the time, to the file that TEST_FUNCTION_FILE names."""
    for event in delivery.events:
        line = f"{event.host_id} {event.c_offset} {time.monotonic()}\n"
        with open(os.environ["TEST_FUNCTION_FILE"], "a") as file:  # noqa: PTH123
            file.write(line)
    await asyncio.sleep(random.choice((0, 0.002, 0.01)))


async def write_down_batch(deliveries: Deliveries) -> None:
    """The same for a batch; now and then, name some as failed, or raise."""
    for each in _without_some(deliveries):
        await write_down(each)
        _raise_at_random()


def hurt(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Like `record`, but what `aggregate_id` names happens: a limit of the session, a lock, an error that is raised."""
    for event in transaction.events:
        match str(event.aggregate_id).split():
            case ["pause"]:
                time.sleep(0.8)
            case ["pause", "once"]:
                with psycopg.connect(cursor.connection.info.dsn, autocommit=True) as conn:
                    first = conn.execute("select nextval('pauses') = 1").fetchone()
                time.sleep(0.8 if first == (True,) else 0)
            case ["statement"]:
                cursor.execute("select pg_sleep(5)")
            case ["temporary"]:
                cursor.execute(
                    "select count(*) from (select generate_series(1, 1000000) order by 1 desc offset 0) s"
                )
            case ["lock"]:
                cursor.execute("select from held for update")
            case ["raise", state]:
                cursor.execute(
                    f"do $$ begin raise exception 'no' using errcode = '{state}'; end $$"
                )
    record(transaction, cursor)


def always_later(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Ask for another attempt, soon."""
    raise RetryLater("not yet", after=0.1)


def refuse_always(delivery: Delivery) -> None:
    """A function sink that fails."""
    raise ValueError("never")


def rolling_back(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Like `record`, after a savepoint that is rolled back and behind statements that psycopg prepares."""
    for _ in range(8):
        cursor.execute("select 1")
    with cursor.connection.transaction(force_rollback=True):
        cursor.execute("select 1")
    record(transaction, cursor)
