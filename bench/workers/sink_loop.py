"""Hand-written loops from the outbox to an endpoint or a broker, with only the client library.

Like relay, each loop reads the outbox in order, sends CloudEvents, waits for every confirmation, keeps the order of
each host, and stores its position every second.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, Generic, TypeVar

import aiohttp
import nats
import pika
import psycopg
import redis

from bench import functions
from bench.workers.talk import arguments, say

FIELDS = (
    *("id", "event_type", "aggregate_id", "event_ts", "host_id", "c_offset", "user_id"),
    *("aggregate_type", "aggregate_version", "transaction_id", "transaction_ordinal"),
    *("transaction_count", "payload"),
)
ATTRIBUTES = (
    *("id", "type", "subject", "time", "hostid", "sequence", "userid"),
    *("aggregatetype", "aggregateversion", "transactionid", "transactionordinal"),
    "transactioncount",
)
"""The CloudEvents attributes of the fields; the last field is the data."""
COLUMNS = ", ".join(f"{field}::text" for field in ("c_xid", *FIELDS))
READ = f"""
    select {COLUMNS} from outbox_message_t as log where c_offset > %s order by log.c_offset
"""
READ_NEW = f"""
    select {COLUMNS} from outbox_message_t as log
    where (c_xid, c_offset) > (%s::xid8, %s) and c_xid < pg_snapshot_xmin(pg_current_snapshot())
    order by log.c_xid, log.c_offset limit 2000
"""
"""Rows of transactions that are older than every open transaction, so that the loop skips none."""
PROGRESS = "create table if not exists progress (loop text primary key, c_offset bigint)"
STORE = "insert into progress values (%s, %s) on conflict (loop) do update set c_offset = excluded.c_offset"
POLL_SECONDS = 0.005
STORE_SECONDS = 1.0
CHUNK = 2_000
UNANSWERED = 4_000
CONTENT_TYPE = "application/cloudevents+json"


class Event:
    """A row as a message."""

    __slots__ = ("body", "host", "identity", "offset", "topic")

    def __init__(self, row: Sequence[str | None]) -> None:
        given = {name: value for name, value in zip(ATTRIBUTES, row[1:-1], strict=True) if value}
        given["partitionkey"] = given["hostid"]
        head = json.dumps({"specversion": "1.0", "source": "loop", **given})
        self.identity, self.host = given["id"], given["hostid"]
        self.offset = int(given["sequence"])
        self.topic = f"shop.{given['type']}"
        self.body = f'{head[:-1]}, "data": {row[-1]}}}'.encode()


class Row:
    """A row as what a function gets: a mapping of its fields."""

    __slots__ = ("fields", "offset")

    def __init__(self, row: Sequence[str | None]) -> None:
        self.fields = dict(zip(FIELDS, row[1:], strict=True))
        self.offset = int(self.fields["c_offset"] or 0)


Item = TypeVar("Item", Event, Row)


class Log(Generic[Item]):
    """Reads the outbox in chunks, and stores the delivered position every second."""

    def __init__(self, dsn: str, follows: bool, item: type[Item]) -> None:
        """A row is made an `item`."""
        self._item: type[Item] = item
        self._reading: psycopg.Connection[Any] = psycopg.connect(dsn, autocommit=follows)
        self._storing: psycopg.Connection[Any] = psycopg.connect(dsn, autocommit=True)
        self._storing.execute(PROGRESS)
        self._follows = follows
        self._stored = time.monotonic()

    def chunks(self) -> Iterator[list[Item]]:
        """Yield all rows; if it follows the outbox, yield new rows without end, and an empty chunk after each wait."""
        if self._follows:
            yield from self._new_ones()
            return
        with self._reading.cursor(name="log") as cursor:
            cursor.execute(READ, (0,))
            while rows := cursor.fetchmany(CHUNK):
                yield [self._item(row) for row in rows]

    def _new_ones(self) -> Iterator[list[Item]]:
        newest = self._reading.execute(
            "select c_xid::text, c_offset from outbox_message_t as log order by log.c_xid desc, c_offset desc limit 1"
        ).fetchone()
        last: tuple[Any, ...] = newest or ("0", 0)
        while True:
            rows = self._reading.execute(READ_NEW.encode(), last).fetchall()
            if rows:
                events = [self._item(row) for row in rows]
                last = rows[-1][0], events[-1].offset
                yield events
            else:
                time.sleep(POLL_SECONDS)
                yield []

    def delivered(self, upto: int) -> None:
        """Note that everything up to an offset is confirmed."""
        now = time.monotonic()
        if now - self._stored >= STORE_SECONDS:
            self._storing.execute(STORE, ("loop", upto))
            self._stored = now


class Delivered:
    """Tracks the offset up to which every event of consecutive chunks is confirmed."""

    def __init__(self, log: Log[Any]) -> None:
        self._log = log
        self._open: deque[list[int]] = deque()

    def begin(self, events: Sequence[Event | Row]) -> list[int]:
        chunk = [events[-1].offset, len(events)]
        self._open.append(chunk)
        return chunk

    def one_of(self, chunk: list[int]) -> None:
        chunk[1] -= 1
        while self._open and not self._open[0][1]:
            self._log.delivered(self._open.popleft()[0])


async def http(log: Log[Event], job: dict[str, Any]) -> None:
    """Deliver with aiohttp: `concurrency` hosts at once, with at most one request each."""
    delivered = Delivered(log)
    queues: list[asyncio.Queue[Any]] = [asyncio.Queue(CHUNK) for _ in range(job["concurrency"])]
    headers = {"content-type": CONTENT_TYPE}

    async def post(session: aiohttp.ClientSession, queue: asyncio.Queue[Any]) -> None:
        while (item := await queue.get()) is not None:
            event, chunk = item
            more = {**headers, "idempotency-key": event.identity}
            async with session.post(job["url"], data=event.body, headers=more) as response:
                await response.read()
                response.raise_for_status()
            delivered.one_of(chunk)

    connector = aiohttp.TCPConnector(limit=job["concurrency"])
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
        for queue in queues:
            group.create_task(post(session, queue))
        say("ready")
        of_host: dict[str, asyncio.Queue[Any]] = {}
        chunks = log.chunks()
        while (events := await asyncio.to_thread(next, chunks, None)) is not None:
            if not events:
                continue
            chunk = delivered.begin(events)
            for event in events:
                queue = of_host.setdefault(event.host, queues[len(of_host) % len(queues)])
                await queue.put((event, chunk))
        for queue in queues:
            await queue.put(None)


async def call(log: Log[Row], job: dict[str, Any]) -> None:
    """Call a function for each business transaction, `concurrency` at once, with at most one of each key."""
    function, field = getattr(functions, job["name"]), job["key"]
    delivered = Delivered(log)
    queues: list[asyncio.Queue[Any]] = [asyncio.Queue(CHUNK) for _ in range(job["concurrency"])]

    async def work(queue: asyncio.Queue[Any]) -> None:
        while (item := await queue.get()) is not None:
            rows, chunk = item
            await function(rows)
            for _ in rows:
                delivered.one_of(chunk)

    async with asyncio.TaskGroup() as group:
        for queue in queues:
            group.create_task(work(queue))
        say("ready")
        of_key: dict[str, asyncio.Queue[Any]] = {}
        chunks = log.chunks()
        while found := await asyncio.to_thread(next, chunks, None):
            chunk = delivered.begin(found)
            for _, some in groupby(found, lambda row: row.fields["transaction_id"]):
                rows = list(some)
                key = str(rows[0].fields[field])
                queue = of_key.setdefault(key, queues[len(of_key) % len(queues)])
                await queue.put((rows, chunk))
        for queue in queues:
            await queue.put(None)


def to_redis(log: Log[Event], job: dict[str, Any]) -> None:
    """Deliver with redis-py: a pipeline, not a transaction, for each thousand messages."""
    client = redis.Redis(port=job["port"])
    client.ping()
    say("ready")
    for events in log.chunks():
        for begin in range(0, len(events), job["batch"]):
            pipeline = client.pipeline(transaction=False)
            portion = events[begin : begin + job["batch"]]
            for event in portion:
                pipeline.xadd(event.topic, {"id": event.identity, "data": event.body})
            pipeline.execute()
            log.delivered(portion[-1].offset)


async def to_nats(log: Log[Event], job: dict[str, Any]) -> None:
    """Deliver with nats-py: `publish_async`, with at most UNANSWERED pending acknowledgements."""
    client = await nats.connect(f"nats://127.0.0.1:{job['port']}")
    stream = client.jetstream(publish_async_max_pending=UNANSWERED)
    delivered = Delivered(log)
    say("ready")
    chunks = log.chunks()

    def answered(chunk: list[int]) -> Callable[[asyncio.Future[Any]], None]:
        def note(future: asyncio.Future[Any]) -> None:
            future.result()
            delivered.one_of(chunk)

        return note

    while events := await asyncio.to_thread(next, chunks, None):
        note = answered(delivered.begin(events))
        for event in events:
            headers = {"Nats-Msg-Id": event.identity, "content-type": CONTENT_TYPE}
            future = await stream.publish_async(event.topic, event.body, headers=headers)
            future.add_done_callback(note)
    await stream.publish_async_completed()
    await client.close()


class ToRabbitmq:
    """Delivers with pika: a SelectConnection in confirm mode, with at most UNANSWERED unconfirmed messages."""

    def __init__(self, log: Log[Event], job: dict[str, Any]) -> None:
        self._delivered = Delivered(log)
        self._events = (
            (event, chunk)
            for events in log.chunks()
            for chunk in (self._delivered.begin(events),)
            for event in events
        )
        self._number = 0
        self._unconfirmed: dict[int, list[int]] = {}
        self._channel: Any = None
        parameters = pika.ConnectionParameters(port=job["port"])
        self._connection = pika.SelectConnection(parameters, on_open_callback=self._opened)
        self._connection.ioloop.start()

    def _opened(self, connection: Any) -> None:
        connection.channel(on_open_callback=self._confirm)

    def _confirm(self, channel: Any) -> None:
        self._channel = channel
        channel.add_on_return_callback(self._returned)
        channel.confirm_delivery(self._confirmed, self._begin)

    def _begin(self, _: Any) -> None:
        say("ready")
        self._publish()

    def _returned(self, *_: Any) -> None:
        raise RuntimeError("no queue takes the message")

    def _confirmed(self, frame: Any) -> None:
        method = frame.method
        if isinstance(method, pika.spec.Basic.Nack):
            raise RuntimeError("the broker refuses the message")
        numbers = [method.delivery_tag]
        if method.multiple:
            numbers = [number for number in self._unconfirmed if number <= method.delivery_tag]
        for number in numbers:
            self._delivered.one_of(self._unconfirmed.pop(number))
        if len(self._unconfirmed) <= UNANSWERED // 2:
            self._publish()

    def _publish(self) -> None:
        while len(self._unconfirmed) < UNANSWERED:
            following = next(self._events, None)
            if following is None:
                break
            event, chunk = following
            self._number += 1
            self._unconfirmed[self._number] = chunk
            properties = pika.BasicProperties(
                content_type=CONTENT_TYPE, message_id=event.identity, delivery_mode=2
            )
            self._channel.basic_publish("", event.topic, event.body, properties, mandatory=True)


def main() -> None:
    job = arguments()
    log: Log[Any] = Log(job["dsn"], job["follows"], Row if job["kind"] == "function" else Event)
    match job["kind"]:
        case "http":
            asyncio.run(http(log, job))
        case "function":
            asyncio.run(call(log, job))
        case "redis":
            to_redis(log, job)
        case "nats":
            asyncio.run(to_nats(log, job))
        case "rabbitmq":
            ToRabbitmq(log, job)
    say("done")
    # The benchmark still reads this process's CPU time.
    time.sleep(60)


if __name__ == "__main__":
    main()
