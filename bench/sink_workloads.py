"""The workloads of sinks: an HTTP endpoint and brokers, beside loops over their client libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench import live
from bench.live import Consumer
from bench.outbox import Outbox
from bench.peers.sink_loop import SinkLoop
from bench.plan import Plan
from bench.receivers import Broker, Endpoint, Functions, Nats, Rabbitmq, Redis
from bench.relaying import Relay
from bench.results import Contender, Goal, Measurement, Workload


class Backlog(NamedTuple):
    """A kind of receiver, the client library of the plain loop, and how many transactions of it are delivered."""

    kind: Callable[[Path], Endpoint | Broker | Functions]
    client: str
    transactions: int
    quick: int

    def __call__(self, plan: Plan, name: str, at_least: float | None = None) -> Iterator[Workload]:
        return _sinks(
            *(plan, name, self.kind, self.client),
            *(self.quick if plan.quick else self.transactions, at_least),
        )


_STREAMING, _KEEPING = "relay, from the WAL", "relay, from the WAL, all attempts kept"
WAIT_SECONDS, WAIT_CONCURRENCY = 0.1, 1_000

BACKLOGS = {
    "function": Backlog(Functions, "asyncio", 20_000, 4_000),
    "function-waits": Backlog(
        partial(Functions, wait=WAIT_SECONDS, concurrency=WAIT_CONCURRENCY),
        "asyncio",
        10_000,
        5_000,
    ),
    "http": Backlog(Endpoint, "aiohttp", 8_000, 2_000),
    "redis": Backlog(Redis, "redis-py", 20_000, 4_000),
    "nats": Backlog(Nats, "nats-py", 20_000, 4_000),
    "rabbitmq": Backlog(Rabbitmq, "pika", 20_000, 4_000),
}


def _sinks(
    plan: Plan,
    name: str,
    kind: Callable[[Path], Endpoint | Broker | Functions],
    client: str,
    transactions: int,
    at_least: float | None,
) -> Iterator[Workload]:
    """A backlog to a receiver, beside a plain loop over a client library, of whose rate relay is to have a part."""
    outbox = Outbox(plan.cluster, name.replace("-", "_"))
    backlog = outbox.publish(transactions)
    with kind(plan.folder) as receiver:
        loop = SinkLoop(receiver)
        polling = Relay("", {**receiver.handler, "start": "beginning"}, mode="auto")
        streaming = Relay("", receiver.handler)
        keeping = Relay("", {**receiver.handler, "attempts": "all"})
        plain = f"plain loop, {client}"
        rows: dict[str, Callable[[], Measurement]] = {
            plain: lambda: loop.deliver(outbox, backlog.events, plan.folder),
            "relay, from the table": lambda: polling.deliver(
                outbox, backlog.events, plan.folder, receiver
            ),
            _STREAMING: lambda: streaming.deliver_stream(outbox, backlog, plan.folder, receiver),
            _KEEPING: lambda: keeping.deliver_stream(outbox, backlog, plan.folder, receiver),
        }

        def emptied(deliver: Callable[[], Measurement]) -> Callable[[], Measurement]:
            def measure() -> Measurement:
                receiver.empty()
                return deliver()

            return measure

        contenders = [
            Contender(
                row,
                emptied(deliver),
                plan.rounds,
                plain,
                receiver.unavailable() or loop.unavailable(),
            )
            for row, deliver in rows.items()
            if plan.takes(name, row)
        ]
        goals = [
            Goal(row, "events/s", at_least, plain, at_least=True)
            for row in rows
            if row not in (plain, _KEEPING) and at_least
        ]
        goals.append(Goal(_KEEPING, "its CPU, µs/event", 1.15, _STREAMING))
        size = f"{backlog.events:,} events in {transactions:,} commits"
        yield Workload(name, size, contenders, goals)


def sinks_function(plan: Plan) -> Iterator[Workload]:
    """A backlog to functions that return at once."""
    return BACKLOGS["function"](plan, "sinks-function", 0.8)


def sinks_function_waits(plan: Plan) -> Iterator[Workload]:
    """A backlog to functions that wait for 100 ms, a thousand at once."""
    return BACKLOGS["function-waits"](plan, "sinks-function-waits", 1 / 1.3)


def sinks_http(plan: Plan) -> Iterator[Workload]:
    """A backlog to an HTTP endpoint, a request for each event."""
    return BACKLOGS["http"](plan, "sinks-http")


def sinks_redis(plan: Plan) -> Iterator[Workload]:
    """A backlog to Redis."""
    return BACKLOGS["redis"](plan, "sinks-redis")


def sinks_nats(plan: Plan) -> Iterator[Workload]:
    """A backlog to NATS JetStream."""
    return BACKLOGS["nats"](plan, "sinks-nats")


def sinks_rabbitmq(plan: Plan) -> Iterator[Workload]:
    """A backlog to RabbitMQ."""
    return BACKLOGS["rabbitmq"](plan, "sinks-rabbitmq")


def sinks_live(plan: Plan) -> Iterator[Workload]:
    """A publisher at a fixed rate: the latency from its COMMIT to the endpoint, and to a consumer of Redis."""
    outbox = Outbox(plan.cluster, "sinks_live")
    rate, seconds = 200, 8 if plan.quick else 20
    arrivals = plan.folder / "arrivals"
    with Endpoint(plan.folder, arrivals) as endpoint, Redis(plan.folder) as server:

        def row(name: str, consumer: Consumer, against: str, unavailable: str | None) -> Contender:
            def measure() -> Measurement:
                with ExitStack() as stack:
                    if against.startswith("redis"):
                        server.empty()
                        stack.enter_context(server.noting(arrivals, plan.folder))
                    figures = live.measure(consumer, outbox, plan.folder, rate, seconds)
                return figures

            return Contender(name, measure, plan.often(expensive=True), against, unavailable)

        rows = []
        for receiver, name in ((endpoint, "http"), (server, "redis")):
            plain = f"{name}, plain loop that polls every 5 ms"
            loop = SinkLoop(receiver)
            relay = Relay("", receiver.handler, mode="auto")
            missing = receiver.unavailable()
            rows += [
                row(plain, loop, plain, missing or loop.unavailable()),
                row(f"relay, {name}", relay, plain, missing),
            ]
        chosen = [each for each in rows if plan.takes("sinks-live", each.name)]
        size = f"{rate:,} transactions/s of 5 events for {seconds} s, milliseconds"
        yield Workload("sinks-live", size, chosen)
